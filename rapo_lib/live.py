"""A rollout by hand: choose before each later step whether the agent thinks for itself or peeks at a note.

Notebook 03 uses it. Nothing is special about such a rollout: it is sampled anew with the choices so far, by the engine
that training uses, and shown up to the step that is next. Random numbers belong to a place in the rollout, so the steps
that were shown stay what they were.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ipywidgets as w
import numpy as np
from IPython.display import display

from rapo_lib.buffer import Retriever
from rapo_lib.explorer import Facts, card_html
from rapo_lib.policy import Policy
from rapo_lib.rewards import pocket_reward
from rapo_lib.rollout import RolloutRequest, SamplingLimits, sample_rollouts
from rapo_lib.show import BATCH, escape, show_widget
from rapo_lib.tasks import Question
from rapo_lib.tools import Toolbox
from rapo_lib.traces import Rollout, history_text

#: What can be chosen before a later step.
CHOICES = ("think", "peek")
#: Step budget of a question that was typed in and is in no set.
BUDGET = 6
#: Nearest notes that are shown.
HITS = 3


def find_question(text: str, questions: Sequence[Question]) -> Question:
    """The question that was typed, or a new one of the same world.

    A new one has no known gold answer, so it is never scored and the leak guard cannot help.

    Raises:
        ValueError: a text that is no question of this world; says which words are unknown, and what one looks like.
    """
    clean = " ".join(text.split())
    same = [q for q in questions if q.text.casefold() == clean.casefold() or q.id == clean]
    if same:
        return same[0]
    known = {word for q in questions for word in re.findall(r"\w+", q.text.casefold())}
    strange = [word for word in re.findall(r"\w+", clean.casefold()) if word not in known and not word.isdigit()]
    example = questions[0].text if questions else "what is the town of the employer of Kavelo?"
    like = f"a question looks like this: {example!r}. Pick one from the list, or change a name or a word of it"
    if not clean:
        raise ValueError(f"There is nothing to answer yet; {like}.")
    if strange:
        raise ValueError(f"This world does not know {', '.join(map(repr, strange[:5]))}; {like}.")
    if not re.fullmatch(r"what is .+\?", clean.casefold()):
        raise ValueError(f"A question here begins with 'what is' and ends with a question mark; {like}.")
    return Question("typed", clean, "(not known)", max_steps=BUDGET)


@dataclass
class LiveRollout:
    """A rollout in the making.

    Args:
        policy: who writes. toolbox: its tools. retriever: of the notes. question: what is asked. limits: as in
            training. seed: of the random streams. choices: before each later own step, of CHOICES.
    """

    policy: Policy
    toolbox: Toolbox
    retriever: Retriever
    question: Question
    limits: SamplingLimits
    seed: int = 0
    choices: list[str] = field(default_factory=list)

    def choose(self, choice: str) -> None:
        """Choose for the next step.

        Raises:
            ValueError: an unknown choice, or a rollout that has ended.
        """
        if choice not in CHOICES:
            raise ValueError(f"choice is {choice!r}; allowed: {', '.join(CHOICES)}")
        if self.ended:
            raise ValueError("this rollout has ended; begin a new one")
        self.choices.append(choice)
        self.__dict__.pop("_whole", None)

    @property
    def whole(self) -> Rollout:
        """The rollout with these choices, and the agent on its own behind them."""
        if "_whole" not in self.__dict__:
            made = iter(self.choices)
            (rollout,) = sample_rollouts(
                self.policy,
                [RolloutRequest(self.question, 0, hybrid=True)],
                self.toolbox,
                limits=self.limits,
                seed=self.seed,
                stream=("live",),
                retriever=self.retriever,
                when_to_retrieve=lambda state, rng: next(made, "think") == "peek",
            ).rollouts
            if self.question.id != "typed":
                rollout.reward = pocket_reward(rollout, self.question, self.policy.protocol)
            self.__dict__["_whole"] = rollout
        return self.__dict__["_whole"]

    @property
    def shown(self) -> Rollout:
        """The steps that the choices so far have led to: one own step more than there are choices."""
        steps, own, kept = self.whole.steps, 0, []
        for step in steps:
            if own > len(self.choices):
                break
            kept += step.segments
            own += step.kind == "own"
        done = len(kept) == len(self.whole.segments)
        end, reward = (self.whole.end_reason, self.whole.reward) if done else ("", None)
        return replace(self.whole, segments=kept, end_reason=end, reward=reward)

    @property
    def unanswered(self) -> int:
        """Peeks that got no note, since the leak guard withheld the nearest one or the budget had no room for it."""
        return self.choices.count("peek") - sum(step.kind == "retrieved" for step in self.shown.steps)

    @property
    def ended(self) -> bool:
        return bool(self.shown.end_reason)

    def hits(self) -> list[Mapping[str, Any]]:
        """The nearest different notes at this moment.

        Returns:
            similarity, teacher, question (that it comes from), withheld (by the leak guard) and note.
        """
        history = history_text(self.policy.protocol, self.question.text, self.shown.segments)
        buffer, rows = self.retriever.buffer, {}
        for hit in buffer.search([history], 8 * HITS)[0]:
            t = buffer.traces[hit.trace_id]
            held = self.retriever.leak_guard and buffer.holds_answer(hit.trace_id, self.question.answers)
            row = {"similarity": hit.score, "teacher": t.teacher, "question": t.question_id}
            rows.setdefault(t.value, row | {"withheld": held, "note": t.value})
        return list(rows.values())[:HITS]


def live_html(live: LiveRollout) -> str:
    """The steps so far, and the notes that a peek would choose from."""
    card = card_html(live.shown, live.policy.protocol, Facts(live.question if live.question.id != "typed" else None))
    style = "font-family:sans-serif;font-size:14px;color:#111;background:#fff"
    if live.unanswered:
        n = f"{live.unanswered} of your {live.choices.count('peek')} peeks"
        card += f'<div style="{style};padding:6px">{n} got no note: it was withheld, or did not fit the budget.</div>'
    if live.ended:
        end = {"answer": "gave its answer"}.get(live.shown.end_reason, f"was ended: {live.shown.end_reason}")
        score = {1.0: " It is right.", 0.0: " It is wrong."}.get(live.shown.reward, "")
        return f'{card}<div style="{style};padding:6px"><b>The agent {escape(end)}.{score}</b></div>'
    rows = []
    for h in live.hits():
        withheld = "withheld: holds the answer" if h["withheld"] else ""
        cells = [f"{h['similarity']:.3f}", h["teacher"], h["question"], withheld, h["note"]]
        rows.append("".join(f'<td style="padding-right:12px;vertical-align:top">{escape(str(c))}</td>' for c in cells))
    head = "".join(f"<th>{x}</th>" for x in ("similarity", "teacher", "from question", "", "note"))
    body = "".join(f"<tr>{r}</tr>" for r in rows)
    return f'{card}<table style="{style}"><caption>notes that lie nearest now</caption><tr>{head}</tr>{body}</table>'


class LivePanel(w.VBox):
    """Buttons around a LiveRollout."""

    def __init__(
        self,
        policy: Policy,
        toolbox: Toolbox,
        retriever: Retriever,
        questions: Sequence[Question],
        limits: SamplingLimits,
        seed: int = 0,
    ) -> None:
        self.made = {"policy": policy, "toolbox": toolbox, "retriever": retriever, "limits": limits}
        self.questions, self.live = list(questions), None
        wide = w.Layout(width="100%")
        options = [("pick a question", "")] + [(f"{q.id}: {q.text}", q.text) for q in self.questions[:50]]
        self.pick = w.Dropdown(options=options, description="question", layout=wide)
        self.typed = w.Text(placeholder="or type one", description="", continuous_update=False, layout=wide)
        self.seed = w.BoundedIntText(seed, 0, 10_000, description="seed", layout=w.Layout(width="170px"))
        self.start = w.Button(description="begin", button_style="primary")
        self.think = w.Button(description="own step")
        self.peek = w.Button(description="peek at a note")
        self.view = w.HTML(layout=wide)
        super().__init__([self.pick, self.typed, w.HBox([self.seed, self.start, self.think, self.peek]), self.view])
        self.pick.observe(lambda change: setattr(self.typed, "value", change["new"]), "value")
        self.start.on_click(lambda _: self._begin())
        self.think.on_click(lambda _: self._choose("think"))
        self.peek.on_click(lambda _: self._choose("peek"))
        self._draw()

    def _begin(self) -> None:
        try:
            question = find_question(self.typed.value, self.questions)
        except ValueError as e:
            self.live = None
            self._draw()
            self.view.value = (
                f'<div style="font-size:15px;color:#a33;background:#fff;padding:6px">{escape(str(e))}</div>'
            )
            return
        self.live = LiveRollout(question=question, seed=self.seed.value, **self.made)
        self._draw()

    def _choose(self, choice: str) -> None:
        if self.live is not None and not self.live.ended:
            self.live.choose(choice)
            self._draw()

    def _draw(self) -> None:
        going = self.live is not None and not self.live.ended
        self.think.disabled = self.peek.disabled = not going
        self.view.value = live_html(self.live) if self.live is not None else ""


def play(
    policy: Policy,
    toolbox: Toolbox,
    retriever: Retriever,
    questions: Sequence[Question],
    limits: SamplingLimits,
    seed: int = 0,
) -> LivePanel | None:
    """Show the panel; in a batch, a rollout of the first question with seeded choices, drawn once."""
    live, rng = LiveRollout(policy, toolbox, retriever, questions[0], limits, seed), np.random.default_rng(seed)
    while not live.ended:
        live.choose(CHOICES[int(rng.integers(2))])
    said = f"choices: {', '.join(live.choices)}"
    still = f"<p>{said}</p>{live_html(live)}"
    if os.environ.get(BATCH):
        display({"text/html": still, "text/plain": said}, raw=True)
        return None
    panel = LivePanel(policy, toolbox, retriever, questions, limits, seed)
    show_widget(panel, still)
    return panel
