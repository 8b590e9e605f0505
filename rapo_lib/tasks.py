"""Questions: what a row is, where rows come from, and which sets must stay apart.

Notebook 01 shows them. Loaders: JSONL, the pocket sets, verl-format parquet, and Hugging Face datasets by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .pocket.files import POCKET, checked
from .traces import ACTIONS, load_jsonl

REGIMES: tuple[str, ...] = ("exploration", "halfway", "easy")
SPLITS: tuple[str, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Question:
    """A question with its gold answer.

    Args:
        id: unique in its set.
        text: the question as the agent reads it.
        answer: gold answer, or several that count as right.
        family: kind of task, such as `computational`, `knowledge` or `web`.
        split: `train`, `validation` or `test`.
        max_steps: step budget; None means that the profile sets it.
        info: whatever else is known of it (pocket: skills, number of hard steps, the chain).
    """

    id: str
    text: str
    answer: str | tuple[str, ...]
    family: str = ""
    split: str = ""
    max_steps: int | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[str, ...]:
        """All gold answers."""
        return (self.answer,) if isinstance(self.answer, str) else self.answer


#: Column -> accepted types; the first three are required.
_COLUMNS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "text": (str,),
    "answer": (str, list, tuple),
    "family": (str,),
    "split": (str,),
    "max_steps": (int, type(None)),
    "info": (dict,),
}
_REQUIRED = ("id", "text", "answer")


def load_questions(path: Path | str) -> list[Question]:
    """Read questions from JSONL: `id`, `text`, `answer` and, if known, family, split, max_steps, info.

    Raises:
        ValueError: names file, row and column when one is missing, empty, of another type or unknown, or an
            id stands twice.
    """
    return make_questions(load_jsonl(path), str(path))


def make_questions(rows: Iterable[Mapping[str, Any]], source: str) -> list[Question]:
    """Check rows and make questions of them; `source` names them in errors.

    Example:
        >>> make_questions([{"id": "a", "text": "6 * 7?", "answer": "42"}], "cell")[0].answers
        ('42',)
    """
    questions: dict[str, Question] = {}
    for n, row in enumerate(rows, 1):
        where = f"{source}, row {n}"
        _check_row(row, where)
        answer = row["answer"]
        question = Question(**{**row, "answer": answer if isinstance(answer, str) else tuple(answer)})
        if question.id in questions:
            raise ValueError(f"{where}, column id: {question.id!r} stands twice; ids must be unique")
        questions[question.id] = question
    if not questions:
        raise ValueError(f"{source} holds no questions")
    return list(questions.values())


def _check_row(row: Mapping[str, Any], where: str) -> None:
    for name in row:
        if name not in _COLUMNS:
            raise ValueError(f"{where}, column {name}: unknown; allowed: {', '.join(_COLUMNS)}")
    for name, types in _COLUMNS.items():
        if name not in row:
            if name in _REQUIRED:
                raise ValueError(f"{where}, column {name}: missing; the row has {', '.join(row) or 'no columns'}")
            continue
        value = row[name]
        if not isinstance(value, types) or isinstance(value, bool):
            want = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise ValueError(f"{where}, column {name}: {value!r} is {type(value).__name__}, expected {want}")
    for name in _REQUIRED:
        values = [row[name]] if isinstance(row[name], str) else row[name]
        if not values or not all(isinstance(v, str) and v.strip() for v in values):
            raise ValueError(f"{where}, column {name}: {row[name]!r} is empty or holds something that is no text")
    if row.get("max_steps") is not None and row["max_steps"] < 1:
        raise ValueError(f"{where}, column max_steps: {row['max_steps']}; at least 1, or null")


def load_pocket_questions(regime: str, split: str) -> list[Question]:
    """Questions of the pocket world.

    Args:
        regime: `exploration`, `halfway` or `easy`.
        split: `train`, `validation` or `test`; the splits have different facts.

    Raises:
        ValueError: an unknown regime or split.
    """
    check_name("regime", regime, REGIMES)
    check_name("split", split, SPLITS)
    return load_questions(checked(POCKET / "questions" / f"{regime}_{split}.jsonl"))


def load_verl_questions(path: Path | str, split: str = "") -> list[Question]:
    """Read verl-format parquet: `prompt` (chat messages), `reward_model.ground_truth`, `extra_info`.

    Raises:
        ValueError: names file, row and column that lack.
    """
    import pyarrow.parquet as pq

    def row_of(n: int, r: Mapping[str, Any]) -> dict[str, Any]:
        try:
            users = [m["content"] for m in r["prompt"] if m["role"] == "user"]
            gold = r["reward_model"]["ground_truth"]
        except (KeyError, TypeError) as e:
            need = "needs prompt and reward_model.ground_truth"
            raise ValueError(f"{path}, row {n}: not verl format ({e!r}); {need}") from None
        info = dict(r.get("extra_info") or {})
        answer = [str(a) for a in gold] if isinstance(gold, list) else str(gold)
        name = f"{r.get('data_source') or 'row'}-{info.get('index', n)}"
        return {"id": name, "text": "\n".join(users), "answer": answer, "split": split, "info": info}

    return make_questions((row_of(n, r) for n, r in enumerate(pq.read_table(path).to_pylist(), 1)), str(path))


def load_hub_questions(
    name: str, split: str, text: str = "question", answer: str = "answer", **kwargs: Any
) -> list[Question]:
    """Questions of a Hugging Face dataset.

    Args:
        name: dataset on the hub, or a local folder.
        split: its split.
        text: column of the question.
        answer: column of the gold answer; of GSM8K's worked solutions only what follows `####` counts.
        kwargs: passed to `datasets.load_dataset`.
    """
    import datasets

    data = datasets.load_dataset(name, split=split, **kwargs)
    for column in (text, answer):
        if column not in data.column_names:
            raise ValueError(f"{name}: no column {column!r}; it has {', '.join(data.column_names)}")

    def gold(value: Any) -> Any:
        return [str(v) for v in value] if isinstance(value, list) else str(value).rsplit("####", 1)[-1].strip()

    rows = ({"id": f"{name}-{split}-{n}", "text": r[text], "answer": gold(r[answer])} for n, r in enumerate(data))
    return make_questions(rows, f"{name}, {split}")


def check_name(kind: str, name: str, allowed: Sequence[str]) -> None:
    """Refuse a name that is not among the allowed ones."""
    if name not in allowed:
        raise ValueError(f"unknown {kind} {name!r}; allowed: {', '.join(allowed)}")


def required_tools(questions: Iterable[Question]) -> tuple[str, ...]:
    """The tools that the steps of pocket questions need, for `Toolbox.require`.

    Args:
        questions: those that do not say which skills they need ask for no tool.

    Returns:
        Names, in the order of `traces.ACTIONS`.

    Raises:
        ValueError: names a question with an unknown skill.

    Example:
        >>> required_tools([Question("a", "gap 3 of 5?", "2", info={"skills": ["compare", "search"]})])
        ('search', 'python')
    """
    from .pocket.world import SKILLS  # it makes questions, and so imports this module

    needed = set()
    for question in questions:
        for skill in question.info.get("skills", ()):
            if skill not in SKILLS:
                raise ValueError(f"question {question.id!r}: unknown skill {skill!r}; allowed: {', '.join(SKILLS)}")
            needed.add(SKILLS[skill].tool)
    return tuple(name for name in ACTIONS if name in needed)


def check_disjoint(buffer: Iterable[str | Question], questions: Sequence[Question]) -> None:
    """Refuse to evaluate on questions that the step-trace buffer was built from.

    Args:
        buffer: ids or texts of the buffer's questions, or the questions themselves.
        questions: the evaluation questions; both their ids and their texts are compared (white space and case aside).

    Raises:
        ValueError: names the share and up to three of them.

    Example:
        >>> check_disjoint(["q1"], [Question("q2", "6 * 7?", "42")])
    """
    known = {_key(t) for b in buffer for t in ((b.id, b.text) if isinstance(b, Question) else (b,))}
    both = [q for q in questions if _key(q.id) in known or _key(q.text) in known]
    if both:
        examples = "; ".join(f"{q.id}: {q.text[:60]!r}" for q in both[:3])
        raise ValueError(
            f"{len(both)} of {len(questions)} evaluation questions are in the step-trace buffer ({examples}); "
            "build the buffer from training questions only"
        )


def _key(text: str) -> str:
    return " ".join(text.casefold().split())
