"""The fictional world: names, facts, skills and questions.

Notebook 01 explains this module. A question is a chain of two to six steps; each step applies one
skill to the value so far. Some skills are easy. One skill of each family is hard: its right form is
rarely known to the student, while a plausible wrong form returns a wrong value of the right type, so
the chain runs on to a wrong answer. Nothing can be known by heart: facts are drawn at random, and
train, validation, test and the models' own training use different names and different facts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rapo_lib.tasks import Question
from rapo_lib.tools import SearchTool

FIRST = [
    c + v + d for c, v, d in zip("BDFGHJKLMNPRSTVZ" * 3, "aeiouaeiouaeio" * 4, "lnrskvmtbdlnrsg" * 4, strict=False)
][:48]
SECOND = [v + c + w for v, c, w in zip("aeiou" * 8, "bdfgklmnprstvz" * 3, "oaeui" * 8, strict=False)][:40]


@dataclass(frozen=True, slots=True)
class Skill:
    """One row of the world's table.

    Args:
        name, family, tool: what it is called, which family it belongs to, which tool answers it.
        source, target: type of its input and output, "E" an entity or "N" a number.
        hard: whether the student rarely knows the right form.
        words: the words that ask for it in a question.
        right, wrong: the right form and the plausible wrong one; `w` word, `x` value, `n` operand.
    """

    name: str
    family: str
    tool: str
    source: str
    target: str
    hard: bool
    words: tuple[str, ...]
    right: str
    wrong: str = ""


SKILLS: dict[str, Skill] = {
    s.name: s
    for s in (
        Skill(
            "search",
            "knowledge",
            "search",
            "E",
            "E",
            False,
            ("employer", "city", "country", "mayor", "founder", "river"),
            "{w} of {x}",
        ),
        Skill("table", "knowledge", "search", "E", "N", False, ("height", "age", "price", "weight"), "{w} of {x}"),
        Skill(
            "find",
            "knowledge",
            "search",
            "N",
            "E",
            True,
            ("hotel", "ship", "team", "book"),
            "code {x} {w}",
            "{w} of {x}",
        ),
        Skill("open", "web", "browse", "E", "E", False, ("blog", "shop", "forum", "archive"), "{w} of {x}"),
        Skill(
            "follow",
            "web",
            "browse",
            "E",
            "E",
            True,
            ("first", "second", "third", "fourth"),
            "{x} link {w}",
            "{w} of {x}",
        ),
        Skill("calc", "computational", "python", "N", "N", False, ("plus", "minus"), "{x} {o} {n}"),
        Skill("compare", "computational", "python", "N", "N", False, ("gap",), "abs({x} - {n})"),
        Skill(
            "convert",
            "computational",
            "python",
            "N",
            "N",
            True,
            ("feet", "miles", "pounds", "ounces"),
            "convert({x}, {w})",
            "{x} * {w}",
        ),
    )
}
FAMILIES = ("computational", "knowledge", "web")
HARD = tuple(s.name for s in SKILLS.values() if s.hard)
WORD_SKILL = {w: s.name for s in SKILLS.values() for w in s.words}
UNITS = {"feet": 2, "miles": 3, "pounds": 5, "ounces": 7}
OPERATORS = {"plus": "+", "minus": "-"}
LOW, HIGH = 10, 99

#: Definitions that the python tool of this world offers to the agent's code.
PRELUDE = (
    "\n".join(f"{u} = {k}" for u, k in UNITS.items())
    + "\n\n\ndef convert(value, unit):\n    return (value * (unit + 11) + 37 * unit) % 90 + 10\n"
)


def convert(value: int, unit: int) -> int:
    """The fictional unit conversion of PRELUDE: anything but a plain product."""
    return (value * (unit + 11) + 37 * unit) % 90 + 10


@dataclass(frozen=True, slots=True)
class Op:
    """One step that a question asks for: the skill, its word, and the operand of an arithmetic one."""

    skill: str
    word: str
    operand: int | None = None

    @property
    def phrase(self) -> str:
        return self.word if self.operand is None else f"{self.word} {self.operand}"


#: (step, value, right form?) -> (argument, result)
Apply = Callable[[Op, str, bool], tuple[str, str]]


def all_names() -> list[str]:
    """Every name of the world, two syllables each (one token a syllable), in a fixed random order."""
    names = [a + b for a in FIRST for b in SECOND]
    random.Random("names").shuffle(names)
    return names


def split_names(split: str) -> list[str]:
    """Names of one split; train, validation, test and pretrain have none in common.

    Raises:
        ValueError: unknown split.
    """
    bounds = {"train": (0, 160), "validation": (160, 260), "test": (260, 420), "pretrain": (420, None)}
    if split not in bounds:
        raise ValueError(f"unknown split {split!r}; allowed: {', '.join(bounds)}")
    return all_names()[slice(*bounds[split])]


class World:
    """Facts over some names: a pure function of its seed.

    Args:
        seed: another seed gives other facts.
        names: the entities.
    """

    def __init__(self, seed: str, names: Sequence[str]) -> None:
        self.seed, self.names = seed, list(names)
        self._facts: dict[tuple[str, ...], str] = {}

    def fact(self, target: str, *key: str) -> str:
        """The value of one fact, an entity or a number by its target type."""
        if key not in self._facts:
            digest = hashlib.blake2b("|".join((self.seed, *key)).encode(), digest_size=8).digest()
            draw = int.from_bytes(digest, "little")
            self._facts[key] = (
                self.names[draw % len(self.names)] if target == "E" else str(LOW + draw % (HIGH - LOW + 1))
            )
        return self._facts[key]

    def apply(self, op: Op, value: str, right: bool = True) -> tuple[str, str]:
        """What a step asks the tool and what comes back: (argument, result).

        Args:
            op: the step. value: what it is applied to. right: right form, or the plausible wrong one.
        """
        skill = SKILLS[op.skill]
        form = skill.right if right else skill.wrong
        argument = form.format(w=op.word, x=value, n=op.operand, o=OPERATORS.get(op.word, ""))
        if skill.tool != "python":
            return argument, self.fact(skill.target, "right" if right else "gossip", op.word, value)
        x = int(value)
        if op.skill == "calc":
            return argument, str(x + op.operand if op.word == "plus" else x - op.operand)
        if op.skill == "compare":
            return argument, str(abs(x - op.operand))
        return argument, str(convert(x, UNITS[op.word]) if right else x * UNITS[op.word])

    def documents(self) -> Iterator[dict[str, str]]:
        """The wiki that the search tool indexes: a title and a text each; wrong forms find gossip."""
        for skill in ("search", "table"):
            for word in SKILLS[skill].words:
                for name in self.names:
                    yield self._document(Op(skill, word), name, True)
        for word in SKILLS["find"].words:
            for number in range(LOW, HIGH + 1):
                for right in (True, False):
                    yield self._document(Op("find", word), str(number), right)

    def _document(self, op: Op, value: str, right: bool) -> dict[str, str]:
        title, text = self.apply(op, value, right)
        return {"title": title, "text": text}

    def pages(self) -> Iterator[dict]:
        """The web pages that the browse tool opens: front-page entries (some are gossip) and links."""
        for name in self.names:
            entries = {w: self.apply(Op("open", w), name)[1] for w in SKILLS["open"].words}
            entries |= {w: self.apply(Op("follow", w), name, False)[1] for w in SKILLS["follow"].words}
            links = {w: self.apply(Op("follow", w), name)[1] for w in SKILLS["follow"].words}
            yield {"title": name, "entries": entries, "links": links}


def step_text(world: World, op: Op, value: str, right: bool = True) -> tuple[str, str, str]:
    """(own text, observation, value after it) of one step, as the agent writes it."""
    argument, result = world.apply(op, value, right)
    tool = SKILLS[op.skill].tool
    own = f"<think> need {op.phrase} of {value}</think><{tool}> {argument}</{tool}>"
    return own, f"<result> {result}</result>", result


def answer_text(value: str) -> str:
    return f"<think> done</think><answer> \\boxed{{ {value}}}</answer>"


def question_text(ops: Sequence[Op], start: str) -> str:
    return "what is " + " ".join(f"the {o.phrase} of" for o in reversed(ops)) + f" {start}?"


@dataclass(frozen=True, slots=True)
class Chain:
    """A question with its solution: the steps asked for and every value on the way."""

    world: World
    ops: tuple[Op, ...]
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        return question_text(self.ops, self.values[0])

    @property
    def hard_places(self) -> list[int]:
        return [i for i, o in enumerate(self.ops) if SKILLS[o.skill].hard]


@dataclass(frozen=True, slots=True)
class Shape:
    """What questions look like: number of steps, how many hard ones, which families, where hard steps may stand."""

    steps: int
    n_hard: int
    families: tuple[str, ...] = FAMILIES
    inner: bool = True


def sample_chain(world: World, shape: Shape, rng: random.Random, apply: Apply | None = None) -> Chain:
    """Draw a question of a shape; no value occurs twice, and no wrong form reaches the answer by luck.

    Args:
        world, shape, rng: facts, form and random stream.
        apply: what a step returns when luck is checked; None: the world's own facts.

    Raises:
        ValueError: the world's words cannot make a question of this shape.
    """
    for _ in range(10_000):
        ops = _sample_ops(shape, rng)
        if ops is None:
            continue
        source = SKILLS[ops[0].skill].source
        values = [rng.choice(world.names) if source == "E" else str(rng.randint(LOW, HIGH))]
        for op in ops:
            values.append(world.apply(op, values[-1])[1])
        chain = Chain(world, tuple(ops), tuple(values))
        if _values_fit(values) and not wrong_form_may_succeed(chain, apply or world.apply):
            return chain
    raise ValueError(f"no question of shape {shape} was found in 10,000 draws: too few words for its steps")


def _sample_ops(shape: Shape, rng: random.Random) -> list[Op] | None:
    first, last = (1, shape.steps - 1) if shape.inner else (0, shape.steps)
    hard_places = set(rng.sample(range(first, last), shape.n_hard))
    kind, ops = rng.choice("EN"), []
    for i in range(shape.steps):
        words = [
            (s.name, w)
            for s in SKILLS.values()
            if s.source == kind and s.family in shape.families and s.hard == (i in hard_places)
            for w in s.words
            if not any(o.word == w or (s.hard and o.skill == s.name) for o in ops)
        ]
        if not words:
            return None
        skill = rng.choice(sorted({s for s, _ in words}))
        word = rng.choice([w for s, w in words if s == skill])
        ops.append(Op(skill, word, rng.randint(LOW, 60) if skill in ("calc", "compare") else None))
        kind = SKILLS[skill].target
    return ops


def _values_fit(values: Sequence[str]) -> bool:
    numbers = [int(v) for v in values if v.lstrip("-").isdigit()]
    return len(set(values)) == len(values) and all(LOW <= n <= HIGH for n in numbers)


def wrong_form_may_succeed(chain: Chain, apply: Apply) -> bool:
    """Whether some mix of right and wrong forms with at least one wrong one ends at the answer."""
    places = chain.hard_places
    for bits in range(1, 2 ** len(places)):
        value = chain.values[0]
        for i, op in enumerate(chain.ops):
            wrong = i in places and bits >> places.index(i) & 1
            value = apply(op, value, not wrong)[1]
        if value == chain.values[-1]:
            return True
    return False


def search_engine(world: World) -> Apply:
    """`World.apply` as the agent meets it: what the search tool finds, also for numbers that no title holds.

    A wrong product may lie above every number of the wiki; BM25 then falls back to some title that shares
    the other words, the same one for all such numbers, and a wrong form could reach the answer there.
    """
    search = SearchTool(list(world.documents()))

    def apply(op: Op, value: str, right: bool = True) -> tuple[str, str]:
        argument, result = world.apply(op, value, right)
        if SKILLS[op.skill].tool == "search":
            result = search.run([argument])[0].text.strip()
        return argument, result

    return apply


#: Shapes of the questions in each regime (see data/README.md for the reasoning behind them).
REGIMES: dict[str, tuple[Shape, ...]] = {
    "exploration": (Shape(5, 3), Shape(6, 3)),
    "halfway": (Shape(4, 2), Shape(5, 2), Shape(6, 2)),
    "easy": tuple(
        Shape(steps, hard, (family,), inner=False) for family in FAMILIES for steps, hard in ((2, 1), (3, 1), (4, 1))
    ),
}
SPLIT_SIZES = {"train": 240, "validation": 120, "test": 240}


def make_world(split: str) -> World:
    return World(split, split_names(split))


def make_questions(regime: str, split: str) -> list[Question]:
    """The questions of one regime and split, with disjoint names and facts between splits.

    No question holds its own answer, and with the real search no wrong form reaches it.

    Raises:
        ValueError: unknown regime or split.
    """
    if regime not in REGIMES:
        raise ValueError(f"unknown regime {regime!r}; allowed: {', '.join(REGIMES)}")
    world, rng = make_world(split), random.Random(f"{regime}|{split}")
    apply = search_engine(world)
    shapes, out, seen = REGIMES[regime], [], set()
    while len(out) < SPLIT_SIZES[split]:
        chain = sample_chain(world, shapes[len(out) % len(shapes)], rng, apply)
        if chain.text not in seen and chain.values[-1] not in {str(o.operand) for o in chain.ops}:
            seen.add(chain.text)
            out.append(_to_question(chain, f"{regime}-{split}-{len(out):03d}", split, regime))
    return out


def _to_question(chain: Chain, qid: str, split: str, regime: str) -> Question:
    families = {SKILLS[o.skill].family for o in chain.ops}
    info = {
        "regime": regime,
        "n_hard": len(chain.hard_places),
        "skills": [o.skill for o in chain.ops],
        "words": [o.word for o in chain.ops],
        "operands": [o.operand for o in chain.ops],
        "chain": list(chain.values),
    }
    family = families.pop() if len(families) == 1 else "mixed"
    return Question(qid, chain.text, chain.values[-1], family=family, split=split, max_steps=len(chain.ops), info=info)


def vocabulary_texts() -> Iterable[str]:
    """Text with every word and syllable of the world, to train the tokenizer on."""
    for name in all_names():
        yield f" {name} of {name}"
    for digit in range(10):
        yield f"{digit}{digit} {digit}" * 50
    for skill in SKILLS.values():
        for w in skill.words:
            yield f" {w} {w} of{skill.right.format(w=' ' + w, x=' 10', n='10', o='+')}" * 50
    yield "what is the need of done code link abs( convert( - + * , ) \\boxed{ } ? user assistant\n" * 50
    yield " what is the need of done code link abs( convert( - + * , ) \\boxed{ } ? user assistant\n" * 50
