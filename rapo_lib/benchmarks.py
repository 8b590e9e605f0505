"""Question sets by name: those of the paper, an arithmetic set, real facts of the world; and the tools that each needs.

`load_benchmark("gsm8k", "train")` reads from the Hugging Face hub, or from a local folder with the set's files. A row
becomes a `tasks.Question`; rows that cannot be used are left out with a reason, and a `LoadReport` says how many.

The hub names and columns are those that public code uses for these sets. Without a network they were tried on
hand-made rows of the same schema only.
"""

from __future__ import annotations

import base64
import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rapo_lib.facts import load_facts_documents, make_fact_rows
from rapo_lib.rewards import extract_boxed, parse_number
from rapo_lib.tasks import SPLITS, Question, check_name, load_questions, load_verl_questions, make_questions
from rapo_lib.tools import HTTPSearchTool, PythonTool, SearchTool, Toolbox

#: Of a set without validation questions, one in this many training questions (by the hash of its text).
VALIDATION_ONE_IN = 20
#: Templates of gsm_symbolic whose gold answer is wrong or cut for some numbers.
BAD_TEMPLATES = frozenset((2, 4, 24, 75, 99))


class Unusable(ValueError):
    """A row that is no question with a gold answer; the message says why."""


@dataclass(frozen=True)
class Benchmark:
    """One public question set.

    Args:
        name: its name here. hub: on the hub. config: the hub's configuration. read: (row) -> text, gold, info.
        splits: ours -> the hub's. family: computational, knowledge or web. tools: what its questions need.
        gated: whether the hub asks for an agreement. licence: as the set's card has it.
    """

    name: str
    hub: str
    read: Callable[[Mapping[str, Any]], tuple[str, str | list[str], dict[str, Any]]]
    splits: Mapping[str, str]
    family: str
    tools: tuple[str, ...]
    config: str | None = None
    gated: bool = False
    licence: str = ""


@dataclass
class LoadReport:
    """What became of the rows of a set.

    Args:
        name: the set and its split. read: rows. kept: questions. dropped: reason -> rows left out.
        repaired: what was mended -> rows.
    """

    name: str
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.kept} of {self.read} rows are questions"]
        parts += [f"{n} left out ({reason})" for reason, n in self.dropped.items()]
        return "; ".join(parts + [f"{n} repaired ({what})" for what, n in self.repaired.items()])


# ------------------------------------------------------------------------------------------- rows


def _text(row: Mapping[str, Any], *names: str) -> str:
    """The first of some columns that holds text; names differ between copies of a set in case alone."""
    lower = {k.lower(): v for k, v in row.items()}
    for name in names:
        value = lower.get(name.lower())
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(int(value) if float(value).is_integer() else value)  # a column with gaps holds 70.0 for 70
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise Unusable(f"no {' or '.join(names)}")


def _info(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    worked, mark, gold = _text(row, "answer").rpartition("####")
    if not mark:
        raise Unusable("no #### before the answer")
    return _text(row, "question"), gold.strip().replace(",", ""), {"solution": worked.strip()}


def _math(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    gold = row.get("answer") or extract_boxed(_text(row, "solution"))
    if not gold or not str(gold).strip():
        raise Unusable("no boxed answer in the solution")
    return _text(row, "problem"), str(gold).strip(), _info(row, "level", "type", "subject", "solution")


def _aime(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    gold = _text(row, "answer")
    value = parse_number(extract_boxed(gold) or gold)
    if value is None or value.denominator != 1 or not 0 <= value <= 999:
        raise Unusable("an answer that is no integer from 0 to 999")
    return _text(row, "problem", "question"), str(value), _info(row, "id", "year", "url")


def _multihop(row: Mapping[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    """Sets of several hops, in FlashRAG's common form or in their own columns; the paragraphs are not kept."""
    metadata = row.get("metadata")
    own = {**row, **(metadata if isinstance(metadata, Mapping) else {})}
    if own.get("answerable") is False:
        raise Unusable("not answerable from its paragraphs")
    golds = row.get("golden_answers")
    if not isinstance(golds, list):
        golds = [_text(row, "answer"), *(own.get("answer_aliases") or [])]
    golds = list(dict.fromkeys(g.strip() for g in golds if isinstance(g, str) and g.strip()))
    if not golds:
        raise Unusable("no gold answer")
    info = _info(own, "type", "level", "evidences", "question_decomposition")
    if titles := _supporting_titles(own):
        info["supporting_titles"] = titles
    return _text(row, "question"), golds, info


def _supporting_titles(row: Mapping[str, Any]) -> list[str]:
    """Titles of the pages that hold the answer: HotpotQA and 2Wiki name them, MuSiQue marks its paragraphs."""
    facts = row.get("supporting_facts") or []
    titles = facts.get("title") or [] if isinstance(facts, Mapping) else [fact[0] for fact in facts]
    marked = (p for p in row.get("paragraphs") or [] if p.get("is_supporting"))
    return list(dict.fromkeys([*titles, *(p["title"] for p in marked)]))


def _plain(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    return _text(row, "question", "problem"), _text(row, "answer"), _info(row, "metadata")


def _webwalker(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    info = row.get("info") or row.get("Info") or {}
    return _text(row, "question"), _text(row, "answer"), {"root_url": _text(row, "root_url"), **info}


def _gaia(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    if row.get("file_name"):
        raise Unusable("needs a file")
    gold = _text(row, "Final answer")
    if gold == "?":
        raise Unusable("its answer is not public")
    return _text(row, "Question"), gold, _info(row, "Level")


def _browsecomp(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Question and answer are hidden from crawlers: XOR with a key that the row's canary gives."""
    canary = _text(row, "canary")
    text, gold = (_unhide(_text(row, name), canary) for name in ("problem", "answer"))
    return text, gold, _info(row, "problem_topic")


def _unhide(hidden: str, canary: str) -> str:
    try:
        data = base64.b64decode(hidden, validate=True)
        key = hashlib.sha256(canary.encode()).digest()
        return bytes(b ^ key[i % len(key)] for i, b in enumerate(data)).decode("utf-8")
    except ValueError:
        raise Unusable("does not decrypt with its canary") from None


_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
_BOTH, _DEV, _TEST = {"train": "train", "test": "test"}, {"train": "train", "test": "dev"}, {"test": "test"}
_MATH, _SEARCH, _WEB = ("python",), ("search",), ("search", "browse", "python")


_ALL = (
    Benchmark("gsm8k", "openai/gsm8k", _gsm8k, _BOTH, "computational", _MATH, "main", licence="MIT"),
    Benchmark("math", "EleutherAI/hendrycks_math", _math, _BOTH, "computational", _MATH, "*", licence="MIT"),
    Benchmark("math500", "HuggingFaceH4/MATH-500", _math, _TEST, "computational", _MATH, licence="MIT"),
    Benchmark("aime24", "HuggingFaceH4/aime_2024", _aime, {"test": "train"}, "computational", _MATH),
    Benchmark("aime25", "math-ai/aime25", _aime, _TEST, "computational", _MATH),
    Benchmark("hotpotqa", _FLASHRAG, _multihop, _DEV, "knowledge", _SEARCH, "hotpotqa", licence="CC-BY-SA-4.0"),
    Benchmark(
        "2wikimultihopqa", _FLASHRAG, _multihop, _DEV, "knowledge", _SEARCH, "2wikimultihopqa", licence="Apache-2.0"
    ),
    Benchmark("musique", _FLASHRAG, _multihop, _DEV, "knowledge", _SEARCH, "musique", licence="CC-BY-4.0"),
    Benchmark("bamboogle", _FLASHRAG, _multihop, _TEST, "knowledge", _SEARCH, "bamboogle", licence="MIT"),
    Benchmark("webwalkerqa", "callanwu/WebWalkerQA", _webwalker, {"test": "main"}, "web", _WEB, licence="Apache-2.0"),
    Benchmark("simpleqa", "basicv8vc/SimpleQA", _plain, _TEST, "knowledge", _SEARCH, licence="MIT"),
    Benchmark("gaia", "gaia-benchmark/GAIA", _gaia, {"test": "validation"}, "web", _WEB, "2023_all", gated=True),
    Benchmark("browsecomp", "smolagents/browse_comp", _browsecomp, _TEST, "web", _WEB, licence="MIT"),
)
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({b.name: b for b in _ALL})
#: Sets that are made here, from the packages of the extra `tasks`.
MADE = ("gsm_symbolic", "world")


# ---------------------------------------------------------------------------------------- loading


def load_benchmark(name: str, split: str, folder: Path | str | None = None, limit: int | None = None) -> list[Question]:
    """Questions of a public set, of one made here, or of files.

    Args:
        name: a key of BENCHMARKS, one of MADE, or a folder with `train`, `validation` and `test` files (`.jsonl` in the
            columns of `load_questions`, or `.parquet` in verl's format).
        split: train, validation or test. Where a set has no validation split, one in VALIDATION_ONE_IN of its training
            questions is kept for it.
        folder: a local copy of a public set, with its files as the hub has them; None asks the hub.
        limit: at most so many, the first ones; at least 1.

    Raises:
        ValueError: an unknown name or split, a split that the set does not have, or a set that cannot be loaded.
        ImportError: a package that makes the set is not there.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; at least 1, or None for all questions")
    questions, report = read_benchmark(name, split, folder)
    if report.dropped or report.repaired:
        warnings.warn(str(report), stacklevel=2)
    return questions[:limit]


def read_benchmark(name: str, split: str, folder: Path | str | None = None) -> tuple[list[Question], LoadReport]:
    """As `load_benchmark`, and what became of the rows."""
    check_name("split", split, SPLITS)
    if Path(name).is_dir():
        return _from_files(Path(name), split)
    report = LoadReport(f"{name}, {split}")
    if name in MADE:
        rows = list({"gsm_symbolic": _gsm_symbolic_rows, "world": make_fact_rows}[name](split, report.dropped))
        report.read, report.kept = len(rows) + report.dropped.total(), len(rows)
        return make_questions(rows, report.name), report
    _check_set(name)
    benchmark = BENCHMARKS[name]
    return _questions_of(benchmark, split, _rows_of(benchmark, split, folder), report), report


def _check_set(name: str) -> None:
    if not Path(name).is_dir():
        check_name("question set", name, [*BENCHMARKS, *MADE, "a folder with train, validation and test files"])


def _from_files(folder: Path, split: str) -> tuple[list[Question], LoadReport]:
    """One file a split: JSONL or verl's parquet."""
    report = LoadReport(f"{folder.name}, {split}")
    if (path := folder / f"{split}.parquet").is_file():
        questions = load_verl_questions(path, split, report.repaired)
    else:
        questions = load_questions(folder / f"{split}.jsonl")
    report.read = report.kept = len(questions)
    return questions, report


def _rows_of(benchmark: Benchmark, split: str, folder: Path | str | None) -> Iterator[Mapping[str, Any]]:
    """Rows of one of the hub's splits, from the hub or a local copy."""
    source = split if split in benchmark.splits else "train" if split == "validation" else ""
    if source not in benchmark.splits:
        have = [s for s in SPLITS if s in benchmark.splits or (s == "validation" and "train" in benchmark.splits)]
        raise ValueError(f"{benchmark.name} has no {split} questions; it has {', '.join(have)}")
    hub_split = benchmark.splits[source]
    import datasets

    try:
        for config in _configs(benchmark, folder):
            yield from _load(benchmark, config, hub_split, folder)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as e:
        first = (str(e).splitlines() or [""])[0]
        hint = " It asks for an agreement on its page, and for a token (HF_TOKEN)." if benchmark.gated else ""
        raise ValueError(
            f"cannot load {benchmark.name} from {str(folder or benchmark.hub)!r}, split {hub_split!r}: {first}.{hint} "
            "Without a network, copy the set's files to a folder and pass folder='..'"
        ) from e


def _configs(benchmark: Benchmark, folder: Path | str | None) -> list[str | None]:
    if folder is not None or benchmark.config != "*":
        return [benchmark.config]
    import datasets

    return datasets.get_dataset_config_names(benchmark.hub)


def _load(
    benchmark: Benchmark, config: str | None, split: str, folder: Path | str | None
) -> Iterable[Mapping[str, Any]]:
    import datasets

    if folder is None:
        return datasets.load_dataset(benchmark.hub, config, split=split)
    kind, files = _local_files(Path(folder), config, split)
    return datasets.load_dataset(kind, data_files=[str(f) for f in files], split="train")


#: Ending of a file -> the builder that reads it.
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def _local_files(folder: Path, config: str | None, split: str) -> tuple[str, list[Path]]:
    """Files of one split in a copy of a set, in any subfolder: those with the split's name in theirs.

    `test.jsonl`, `test-00000-of-00001.parquet`, `musique_ans_v1.0_dev.jsonl`; else `validation/metadata.parquet`.
    Where the configuration has a subfolder, only that one counts.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    inside = folder / config if config and (folder / config).is_dir() else folder
    named = re.compile(rf"(?<![A-Za-z]){re.escape(split)}(?![A-Za-z])")
    there = sorted(p for p in inside.rglob("*") if p.suffix in _BUILDERS)
    files = [p for p in there if named.search(p.stem)]
    files = files or [p for p in there if p.stem == "metadata" and named.search(str(p.parent.relative_to(inside)))]
    kinds = {_BUILDERS[p.suffix] for p in files}
    if len(kinds) != 1:
        found = ", ".join(sorted(p.name for p in inside.rglob("*") if p.is_file())[:8]) or "no file"
        raise ValueError(
            f"expected files with {split} in their names and one of the endings {', '.join(_BUILDERS)}, all of one "
            f"kind; there is {found}"
        )
    return kinds.pop(), files


def _questions_of(
    benchmark: Benchmark, split: str, rows: Iterable[Mapping[str, Any]], report: LoadReport
) -> list[Question]:
    carve = "validation" not in benchmark.splits and "train" in benchmark.splits and split != "test"
    out: dict[str, dict[str, Any]] = {}
    columns: Iterable[str] = ()
    for n, row in enumerate(rows):
        columns = row
        try:
            text, gold, info = benchmark.read(row)
        except Unusable as e:
            report.read += 1
            report.dropped[str(e)] += 1
            continue
        if carve and _is_validation(text) != (split == "validation"):
            continue
        report.read += 1
        if text in out:
            report.dropped["the same text as an earlier one"] += 1
            continue
        name = f"{benchmark.name}-{split}-{n}"
        out[text] = {"id": name, "text": text, "answer": gold, "family": benchmark.family, "split": split, "info": info}
    report.kept = len(out)
    if not out:
        raise ValueError(f"{report}; the columns are {', '.join(columns) or 'none'}: is this {benchmark.hub}?")
    return make_questions(out.values(), report.name)


def _is_validation(text: str) -> bool:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % VALIDATION_ONE_IN == 0


# ----------------------------------------------------------------------------------- gsm_symbolic

#: Questions of each split that are made of each template, before duplicates are dropped.
PER_TEMPLATE = 12


def _gsm_symbolic_rows(split: str, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """Word problems with the numbers changed (reasoning-gym, after arXiv 2410.05229); a template is in one split only.

    Left out: BAD_TEMPLATES, and a question whose worked solution does not end with its gold answer.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise ImportError("gsm_symbolic needs the package reasoning-gym: pip install -e '.[tasks]'") from None
    probe = reasoning_gym.create_dataset("gsm_symbolic", seed=0, size=1)
    templates = [t for t in range(len(probe.generators)) if t not in BAD_TEMPLATES]
    mine = {t for t in templates if _template_split(t) == split}
    wanted, seen = Counter(dict.fromkeys(mine, PER_TEMPLATE)), set()
    data = reasoning_gym.create_dataset("gsm_symbolic", seed=SPLITS.index(split), size=100 * PER_TEMPLATE * 2)
    for n, template in enumerate(data.task_indices):
        if wanted[template] <= 0:
            continue
        item = data[n]
        text, gold, worked = item["question"].strip(), str(item["answer"]), item["metadata"]["answer_cot"]
        fault = "the same text as an earlier one" if text in seen else _solution_fault(worked, gold)
        if fault:
            dropped[fault] += 1
            continue
        seen.add(text)
        wanted[template] -= 1
        info = {"template": int(template), "solution": worked}
        name = f"gsm_symbolic-{split}-{n}"
        yield {"id": name, "text": text, "answer": gold, "family": "computational", "split": split, "info": info}


def _template_split(template: int) -> str:
    """Seven of ten templates train, one of ten validates, two of ten test."""
    place = int.from_bytes(hashlib.blake2b(f"template {template}".encode(), digest_size=8).digest()) % 10
    return "train" if place < 7 else "validation" if place == 7 else "test"


def _solution_fault(worked: str, gold: str) -> str:
    """Why a worked solution does not give its gold answer; empty when it does."""
    last = re.findall(r"-?\d[\d,]*\.?\d*", worked.rpartition("####")[2] or worked)
    if not last or parse_number(last[-1].rstrip(".,")) != parse_number(gold):
        return "its worked solution ends with another number"
    return "a negative number of things" if gold.startswith("-") else ""


# ------------------------------------------------------------------------------------------ tools


def make_toolbox(name: str, split: str, search: str = "") -> Toolbox:
    """The tools of a question set.

    Args:
        name: as for `load_benchmark`. split: whose documents are searched, where splits differ. search: address of a
            Search-R1-compatible server; empty means the set's own documents.

    Raises:
        ValueError: an unknown name or split, or a set whose questions need a search, without documents of its own and
            without a server.
    """
    check_name("split", split, SPLITS)
    _check_set(name)
    python = PythonTool()
    if search:
        return Toolbox([HTTPSearchTool(search), python])
    if name == "world":
        return Toolbox([SearchTool(load_facts_documents(), top_k=3, over="all"), python])
    if name in BENCHMARKS and "search" in BENCHMARKS[name].tools:
        raise ValueError(
            f"{name} needs a search: set search to the address of a Search-R1-compatible server, for example one that "
            "`python -m rapo_lib.serve` starts"
        )
    return Toolbox([python])


def tools_needed(name: str) -> Sequence[str]:
    """Tools without which the questions of a set cannot be answered."""
    _check_set(name)
    if name in BENCHMARKS:
        return tuple(t for t in BENCHMARKS[name].tools if t != "browse")  # no tool here opens real web pages
    return {"world": ("search", "python")}.get(name, ("python",))
