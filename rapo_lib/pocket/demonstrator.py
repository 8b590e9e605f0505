"""Demonstrators: noisy solutions that the pocket models are trained on (never written into a buffer).

A demonstrator knows the chain and errs with given probabilities, in the ways a small model errs: the
wrong form of a hard step, a stale value, a skipped step, an early answer. Part of its trajectories
hold retrieved steps, most of them fitting, some of them not, so that the model can use a
`<retrieve>` step and also live with a useless one. Once a hard form was shown in the context, it is
used more often: this is what makes a retrieved step worth reading.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rapo_lib.pocket.world import HARD, SKILLS, Chain, Op, answer_text, step_text

#: Steps beyond the chain's length after which a demonstrator gives up and answers.
SPARE_STEPS = 2


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of a demonstrator.

    Args:
        easy: an easy step is done right.
        hard: a hard step is done in its right form.
        hard_seen: likewise, when a right form of this skill stands in the context.
        answer: the answer is given at the right moment.
        retrieval_share: share of trajectories with retrieved steps (each boundary then has one with p = 0.5).
        irrelevant: share of retrieved steps that come from another question.
        hard_by_skill: (skill, probability) pairs that take the place of `hard` for some of the hard skills.
        rechecks: the call of a hard step, in whichever form, is made once more.

    Raises:
        ValueError: `hard_by_skill` names what is no hard skill, or one twice.

    Example:
        >>> searcher = Habits(0.97, 0.9, hard_by_skill=(("convert", 0.3),))
        >>> searcher.hard_of("find"), searcher.hard_of("convert")
        (0.9, 0.3)
    """

    easy: float
    hard: float
    hard_seen: float = 0.7
    answer: float = 0.95
    retrieval_share: float = 0.75
    irrelevant: float = 0.2
    hard_by_skill: tuple[tuple[str, float], ...] = ()
    rechecks: float = 0.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.hard_by_skill]
        if len(set(names)) < len(names) or not set(names) <= set(HARD):
            raise ValueError(f"hard_by_skill names {', '.join(names)}; allowed, each once: {', '.join(HARD)}")

    def hard_of(self, skill: str) -> float:
        """Probability of the right form of a hard skill that does not stand in the context."""
        return dict(self.hard_by_skill).get(skill, self.hard)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text with its author; only the policy's own text is trained on."""

    text: str
    own: bool


class Demonstration:
    """One noisy solution of a chain.

    Args:
        chain: the question. habits: how it errs. rng: its random stream.
        other: makes the chain of another question, for irrelevant retrieved steps.
    """

    def __init__(self, chain: Chain, habits: Habits, rng: random.Random, other: Callable[[], Chain]) -> None:
        self.chain, self.habits, self.rng, self.other = chain, habits, rng, other
        self.pieces: list[Piece] = []
        self.history = [chain.values[0]]  # values seen so far; the last one is the present one
        self.place = 0  # next step of the chain
        self.seen: set[str] = set()  # skills whose right form stands in the context
        self._write()

    def _write(self) -> None:
        retrieves = self.rng.random() < self.habits.retrieval_share
        spent = 0  # steps of the budget, own and retrieved
        while True:
            if retrieves and 0 < spent < len(self.chain.ops) and self.rng.random() < 0.5:
                self._retrieve()
                spent += 1
            act = self._choose(spent)
            if act is None:
                return
            self._do(*act)
            spent += 1

    def _retrieve(self) -> None:
        ops, draw = self.chain.ops, self.rng.random()
        if draw < self.habits.irrelevant:
            other = self.other()
            k = self._irrelevant_place(other)
            self._insert(other, k)
            return
        shift = 0 if draw < 0.96 else self.rng.choice((-1, 1))
        k = min(max(self.place + shift, 0), len(ops) - 1)
        self._insert(self.chain, k)
        self.place = k + 1
        self.history.append(self.chain.values[k + 1])

    def _irrelevant_place(self, other: Chain) -> int:
        """Often a step of the very skill that is due: a form worth copying, facts that are not."""
        due = self.chain.ops[self.place].skill if self.place < len(self.chain.ops) else ""
        same = [k for k, o in enumerate(other.ops) if o.skill == due and SKILLS[due].hard]
        return self.rng.choice(same if same and self.rng.random() < 0.6 else range(len(other.ops)))

    def _insert(self, chain: Chain, k: int) -> None:
        own, observation, _ = step_text(chain.world, chain.ops[k], chain.values[k])
        self.pieces.append(Piece(f"<retrieve>{own}{observation}</retrieve>", own=False))
        self.seen.add(chain.ops[k].skill)

    def _choose(self, spent: int) -> tuple[int, str, bool] | None:
        """The next step as (place in the chain, value, right form), or None once an answer is written."""
        rng, now = self.rng, self.history[-1]
        if spent >= len(self.chain.ops) + SPARE_STEPS:
            return self._answer(now)
        if self.place >= len(self.chain.ops):
            return self._end()
        op = self.chain.ops[self.place]
        if SKILLS[op.skill].hard:
            right = rng.random() < (self.habits.hard_seen if op.skill in self.seen else self.habits.hard_of(op.skill))
            return self._fitting(self.place, now, right)
        if rng.random() < self.habits.easy:
            return self._fitting(self.place, now, True)
        draw = rng.random()
        if draw < 0.25 and spent:
            return self._answer(now)
        stale = [v for v in self.history[:-1] if _type(v) == _type(now)]
        if draw < 0.65 and stale:
            return self._fitting(self.place, rng.choice(stale), True)
        return self._skip(now)

    def _end(self) -> tuple[int, str, bool] | None:
        now = self.history[-1]
        if self.rng.random() < self.habits.answer:
            return self._answer(now)
        if self.rng.random() < 0.6 and len(self.history) > 1:
            return self._answer(self.rng.choice(self.history[:-1]))
        return self._skip(now)

    def _skip(self, now: str) -> tuple[int, str, bool] | None:
        """Another easy step of the question that takes this type of value."""
        ops = self.chain.ops
        places = [
            j
            for j, o in enumerate(ops)
            if j != self.place and not SKILLS[o.skill].hard and SKILLS[o.skill].source == _type(now)
        ]
        return (self.rng.choice(places), now, True) if places else self._answer(now)

    def _fitting(self, place: int, value: str, right: bool) -> tuple[int, str, bool] | None:
        if _type(value) != SKILLS[self.chain.ops[place].skill].source:
            return self._answer(value)
        return place, value, right

    def _answer(self, value: str) -> None:
        self.pieces.append(Piece(answer_text(value), own=True))
        return None

    def _do(self, place: int, value: str, right: bool) -> None:
        op: Op = self.chain.ops[place]
        own, observation, result = step_text(self.chain.world, op, value, right)
        self.pieces += [Piece(own, own=True), Piece(observation, own=False)] * self._times(op)
        if right:
            self.seen.add(op.skill)
        self.history.append(result)
        self.place = place + 1

    def _times(self, op: Op) -> int:
        """How often the call of a step is made; a call made again is no step of the demonstrator's own budget."""
        again = SKILLS[op.skill].hard and self.habits.rechecks > 0  # habits without it draw as if there were none
        return 2 if again and self.rng.random() < self.habits.rechecks else 1


def _type(value: str) -> str:
    return "N" if value.lstrip("-").isdigit() else "E"
