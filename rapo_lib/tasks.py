"""Questions: what a row is, where rows come from, and which sets must stay apart.

Notebook 01 shows them. Loaders: JSONL, the pocket sets, verl-format parquet; `benchmarks.py` reads public sets by name.
"""

from __future__ import annotations

import codecs
import math
import re
import warnings
from collections import Counter
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
            id stands twice; or a path that is no file, or a file that is no JSONL in UTF-8.
    """
    _check_file(path, "a JSONL file, one question a line")
    try:
        return make_questions(load_jsonl(path), str(path))
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not in UTF-8 ({e.reason} at byte {e.start}); save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path}: a line is nested too deeply to be a question; make the file again") from None


def _check_file(path: Path | str, expected: str) -> None:
    """Refuse what is no file with content, and a byte-order mark, which is no part of JSON."""
    path = Path(path)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {found}; expected {expected}")
    with open(path, "rb") as f:
        head = f.read(3)
    if not head:
        raise ValueError(f"{path} is empty and holds no questions; expected {expected}")
    if head == codecs.BOM_UTF8 or head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError(f"{path} begins with a byte-order mark; save it as UTF-8 without one")


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
    if not isinstance(row, Mapping):
        raise ValueError(
            f"{where}: {row!r:.60} is {type(row).__name__}, expected a mapping with {', '.join(_REQUIRED)}"
        )
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
        if any("\ud800" <= c <= "\udfff" for v in values for c in v):
            raise ValueError(f"{where}, column {name}: holds a broken character (half of a surrogate pair)")
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


def load_verl_questions(path: Path | str, split: str = "", repaired: Counter[str] | None = None) -> list[Question]:
    """Read verl-format parquet: `prompt` (chat messages), `reward_model.ground_truth`, `extra_info`.

    The ground truth is a text, a number, a list of these, or `{"target": ..}` around one of them (Search-R1). The
    system message is not read: a run has its own. Three things are repaired and counted: texts whose LaTeX was read as
    escapes (`mend_escapes`), instructions of another protocol around the question (Search-R1 has them in the user's
    message), and ids that are not unique (then rows are numbered).

    Args:
        path: the file. split: of the questions. repaired: counts repaired rows by reason; None warns of them.

    Raises:
        ValueError: names file, row and column that lack or hold something else, or a path that is no parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_file(path, "a parquet file in verl format")
    try:
        table = pq.ParquetFile(path).read()
        found = table.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as e:
        raise ValueError(f"{path} is no complete parquet file ({e}); copy it again") from None
    if absent := [name for name in ("prompt", "reward_model") if name not in table.column_names]:
        raise ValueError(
            f"{path}: not verl format: no column {absent[0]}; it has {', '.join(table.column_names) or 'no columns'}, "
            "and needs prompt and reward_model.ground_truth"
        )
    counts: Counter[str] = Counter() if repaired is None else repaired
    rows = [_verl_row(r, f"{path}, row {n}", n, split, counts) for n, r in enumerate(found, 1)]
    if len({row["id"] for row in rows}) < len(rows):
        counts[RENUMBERED] += len(rows)
        rows = [row | {"id": f"{Path(path).stem}-{n}"} for n, row in enumerate(rows, 1)]
    if counts and repaired is None:
        what = "; ".join(f"{n} of {len(rows)} rows repaired ({reason})" for reason, n in counts.items())
        warnings.warn(f"{path}: {what}", stacklevel=2)
    return make_questions(rows, str(path))


RENUMBERED = "ids that were not unique"
UNWRAPPED = "instructions of another protocol around the question"
#: What `mend_escapes` mends, in words.
MENDED = "control characters where a backslash and a letter were meant"
#: Control characters that no question holds on purpose, and those that only stand for LaTeX before certain letters.
_ESCAPES = {"\x07": r"\a", "\x08": r"\b", "\x0b": r"\v", "\x0c": r"\f"}
_BEFORE_LATEX = re.compile(
    "\t(?=(?:ext|extbf|imes|heta|frac|riangle|au|ilde|binom)(?![a-z]))"
    "|\r(?=(?:ight|ightarrow|angle|ho|floor|ceil)(?![a-z]))"
)


def mend_escapes(text: str) -> str:
    """LaTeX whose backslashes were read as escapes: backspace and `oxed` becomes `\\boxed`.

    Example:
        >>> mend_escapes("put it in \x08oxed{}, 2 \\times 3, 1\\t2")
        'put it in \\\\boxed{}, 2 \\\\times 3, 1\\t2'
    """
    for control, meant in _ESCAPES.items():
        text = text.replace(control, meant)
    return _BEFORE_LATEX.sub(lambda m: r"\t" if m[0] == "\t" else r"\r", text)


#: What tells a model how to answer, in protocols that are not ours, and how long such instructions are at most.
_INSTRUCTION = re.compile(r"</?(?:think|search|python|answer|information|tool_call)>|\\boxed|####|step by step")
_MAX_INSTRUCTION = 2000


def _question_alone(text: str, known: Iterable[Any]) -> str:
    """A user's message without instructions around the question.

    Args:
        text: the message. known: what may be the question (other columns of the row have it as it was).
    """
    for question in known:
        if isinstance(question, str) and question.strip() and question.strip() in text:
            around = text.replace(question.strip(), "", 1)
            if len(around) <= _MAX_INSTRUCTION and _INSTRUCTION.search(around):
                return question.strip()
    head, mark, tail = text.rpartition("Question:")
    wrapped = mark and tail.strip() and len(head) <= _MAX_INSTRUCTION and _INSTRUCTION.search(head)
    return tail.strip() if wrapped else text


def _verl_row(r: Mapping[str, Any], where: str, n: int, split: str, repaired: Counter[str]) -> dict[str, Any]:
    try:
        users = [m["content"] for m in r["prompt"] if m["role"] == "user"]
        gold = r["reward_model"]["ground_truth"]
    except (KeyError, TypeError) as e:
        need = "needs prompt (a list of role and content) and reward_model.ground_truth"
        raise ValueError(f"{where}: not verl format ({e!r}); {need}") from None
    if not users or not all(isinstance(u, str) for u in users):
        raise ValueError(
            f"{where}, column prompt: expected a message of role user whose content is text, found {users!r:.60}"
        )
    info = r.get("extra_info") or {}
    if not isinstance(info, Mapping):
        raise ValueError(f"{where}, column extra_info: {info!r:.60} is {type(info).__name__}, expected fields or null")
    if isinstance(gold, Mapping) and set(gold) == {"target"}:
        gold = gold["target"]
    gold = _gold(gold, f"{where}, column reward_model.ground_truth")
    asked = "\n".join(users)
    answer, text = _mended(gold), mend_escapes(asked)
    known = [mend_escapes(q) for q in (info.get("question"), r.get("question")) if isinstance(q, str)]
    question = _question_alone(text, known)
    repaired.update([MENDED] * ((answer, text) != (gold, asked)) + [UNWRAPPED] * (question != text))
    index = n if info.get("index") is None else info["index"]
    name = f"{r.get('data_source') or 'row'}-{index}"
    return {"id": name, "text": question, "answer": answer, "split": split, "info": dict(info)}


def _mended(value: str | list[str]) -> str | list[str]:
    return mend_escapes(value) if isinstance(value, str) else [mend_escapes(v) for v in value]


def _gold(value: Any, where: str) -> str | list[str]:
    """A gold answer as text, or several; what is neither text nor number would become a wrong one."""
    if isinstance(value, list):
        if any(isinstance(v, list) for v in value):
            raise ValueError(f"{where}: {value!r:.60} holds lists; expected text or numbers")
        return [_gold(v, where) for v in value]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        raise ValueError(
            f"{where}: {value!r:.60} is {type(value).__name__}; expected text, a number, or a list of these"
        )
    return str(value)


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
