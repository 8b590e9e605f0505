"""Rebuild everything under data/pocket/: tokenizer, questions, wiki, models, trajectories, checksums."""

from __future__ import annotations

import json
import multiprocessing as mp
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import pandas as pd

from rapo_lib.pocket.files import POCKET, write_checksums
from rapo_lib.pocket.tokenizer import save_tokenizer
from rapo_lib.pocket.train import RECIPES, build_model
from rapo_lib.pocket.world import PRELUDE, REGIMES, SPLIT_SIZES, make_questions, make_world
from rapo_lib.traces import Protocol, Rollout, load_rollouts, save_jsonl, save_rollouts, write_text_atomic

#: Order of training: the base first, then two at a time.
WAVES = (("base",), ("student", "teacher"), ("weak", "middling"), ("searcher", "reckoner"), ("wasteful",))
SAMPLES_PER_QUESTION = 8
#: Completion ids that a spare step may take: a step of this world has about 20 with its result.
IDS_PER_SPARE_STEP = 32


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a teacher's trajectories are sampled, and what of them is shipped.

    Args:
        model: folder of the model. regimes: whose training questions it answers. samples: tries a question.
        extra_steps: steps beyond the question's budget.
        ship: `all` of them, the `right` ones, or those that are `kept` for a buffer (`select_trajectories`).
        compact: log-probabilities and entropies with two decimals, and zeros as 0; else with three.
    """

    model: str
    regimes: tuple[str, ...] = ("exploration",)
    samples: int = SAMPLES_PER_QUESTION
    extra_steps: int = 0
    ship: Literal["all", "right", "kept"] = "all"
    compact: bool = True


TEACHERS: dict[str, Sampling] = {
    "teacher": Sampling("teacher", tuple(REGIMES), compact=False),
    "weak": Sampling("weak", tuple(REGIMES), compact=False),
    "middling": Sampling("middling"),
    "searcher": Sampling("searcher"),
    "reckoner": Sampling("reckoner"),
    "wasteful": Sampling("wasteful", extra_steps=3, ship="right"),
    "patient": Sampling("weak", samples=64, ship="kept"),
}
#: (model, regimes, steps beyond the budget) of `measure`.
MEASURED: tuple[tuple[str, tuple[str, ...], int], ...] = (
    *((model, tuple(REGIMES), 0) for model in ("student", "teacher", "weak")),
    *((model, ("exploration",), 0) for model in ("middling", "searcher", "reckoner", "wasteful")),
    ("wasteful", ("exploration",), TEACHERS["wasteful"].extra_steps),
)


def make_data(root: Path = POCKET) -> None:
    """Tokenizer, questions, wiki documents, pages and the python prelude."""
    save_tokenizer(root / "tokenizer")
    for split in SPLIT_SIZES:
        world = make_world(split)
        save_jsonl(root / "wiki" / f"{split}_documents.jsonl", world.documents())
        save_jsonl(root / "wiki" / f"{split}_pages.jsonl", world.pages())
        for regime in REGIMES:
            save_jsonl(root / "questions" / f"{regime}_{split}.jsonl", map(asdict, make_questions(regime, split)))
    write_text_atomic(root / "python_prelude.py", PRELUDE)
    write_checksums(root)


def make_models(root: Path = POCKET, jobs: int = 2, only: Sequence[str] = tuple(RECIPES)) -> None:
    """Train the models of RECIPES, `jobs` at a time, one thread each.

    Raises:
        ValueError: a name that is no recipe's.
    """
    _check_names(only, RECIPES)
    context = mp.get_context("spawn")
    for wave in WAVES:
        names = [n for n in wave if n in only]
        with context.Pool(min(jobs, max(1, len(names)))) as pool:
            for report in pool.starmap(_train_one, [(n, root) for n in names], chunksize=1):
                print(json.dumps(report))
    write_checksums(root)


def _train_one(name: str, root: Path) -> dict:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
    return {"model": name} | build_model(
        name, root / "models", tokenizer, 1, lambda t: print(f"[{name}] {t}", flush=True)
    )


def _check_names(names: Iterable[str], allowed: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(allowed)):
        raise ValueError(f"{unknown[0]!r} is not known; allowed: {', '.join(allowed)}")


def make_trajectories(root: Path = POCKET, teachers: Sequence[str] = tuple(TEACHERS)) -> None:
    """Let each teacher sample trajectories for every training question; they are scored, and mostly not filtered.

    Raises:
        ValueError: a name that is no teacher's.
    """
    from rapo_lib.rollout import RolloutRequest

    _check_names(teachers, TEACHERS)
    for teacher in teachers:
        how = TEACHERS[teacher]
        for regime in how.regimes:
            questions = make_questions(regime, "train")
            requests = [RolloutRequest(q, place=k) for q in questions for k in range(how.samples)]
            rollouts = sample_with(
                root / "models" / how.model,
                requests,
                "train",
                extra_steps=how.extra_steps,
                seed=5,
                stream=("trajectories", teacher),
            )
            shipped = _selected(rollouts, how.ship)
            path = root / "trajectories" / f"{teacher}_{regime}.jsonl"
            save_rollouts(path, (_rounded(r, how.compact) for r in shipped))
            rate = sum(r.reward for r in rollouts) / len(rollouts)
            print(f"{teacher} {regime}: pass@1 {rate:.3f} (n = {len(rollouts)}), {len(shipped)} shipped", flush=True)
    write_checksums(root)


def _selected(rollouts: list[Rollout], ship: Literal["all", "right", "kept"]) -> list[Rollout]:
    from rapo_lib.buffer import TOP_K, select_trajectories

    if ship == "kept":
        return select_trajectories(rollouts, TOP_K)
    return rollouts if ship == "all" else [r for r in rollouts if r.reward >= 1]


def _rounded(rollout: Rollout, compact: bool) -> Rollout:
    """Few decimals are enough for a teacher's numbers (they enter no objective) and halve the files."""
    short: Callable[[float], float] = (lambda x: round(x, 2) or 0) if compact else (lambda x: round(x, 3))
    for i, s in enumerate(rollout.segments):
        rollout.segments[i] = replace(s, logps=tuple(map(short, s.logps)), entropies=tuple(map(short, s.entropies)))
    return rollout


def coverage(root: Path = POCKET, teachers: Sequence[str] = tuple(TEACHERS)) -> pd.DataFrame:
    """What a buffer gets of each teacher's shipped trajectories.

    Returns:
        One row a teacher and regime: `shipped` and `right` trajectories in the file, `covered` training questions
        (with a right one), `kept` trajectories (at most TOP_K a question), step `traces` of these, `beyond` (mean
        steps of a kept trajectory beyond its question's chain) and `MB` (10^6 bytes) of the file.

    Raises:
        ValueError: a name that is no teacher's.
    """
    from transformers import AutoTokenizer

    from rapo_lib.buffer import TOP_K, make_traces, select_trajectories

    _check_names(teachers, TEACHERS)
    protocol = Protocol(AutoTokenizer.from_pretrained(root / "tokenizer"))
    rows = []
    for teacher, regime in ((t, r) for t in teachers for r in TEACHERS[t].regimes):
        path = root / "trajectories" / f"{teacher}_{regime}.jsonl"
        questions = {q.id: q for q in make_questions(regime, "train")}
        rollouts = load_rollouts(path)
        kept = select_trajectories(rollouts, TOP_K)
        beyond = [len(r.tool_calls) - questions[r.question_id].max_steps for r in kept]
        row = {"teacher": teacher, "regime": regime, "shipped": len(rollouts)}
        row |= {"right": sum(r.reward >= 1 for r in rollouts), "covered": len({r.question_id for r in kept})}
        row |= {"kept": len(kept), "traces": len(make_traces(rollouts, questions.values(), protocol, teacher))}
        # + 0.0 makes a 0 of -0.0
        rows.append(row | {"beyond": round(sum(beyond) / len(beyond), 2) + 0.0, "MB": path.stat().st_size / 1e6})
    return pd.DataFrame(rows).round({"MB": 2})


def sample_with(
    model: Path, requests: list, split: str, *, seed: int, stream: tuple, extra_steps: int = 0, **kwargs
) -> list:
    """Sample one rollout a request with a pocket model and give it its outcome reward."""
    from rapo_lib.policy import load_policy
    from rapo_lib.rollout import SamplingLimits, sample_and_score
    from rapo_lib.tools import make_pocket_toolbox

    policy, toolbox = load_policy(str(model)), make_pocket_toolbox(split)
    limits = SamplingLimits(224 + IDS_PER_SPARE_STEP * extra_steps, 8 + extra_steps, 6, extra_steps)
    how = {"limits": limits, "seed": seed, "stream": stream} | kwargs
    return sample_and_score(policy, requests, toolbox, at_once=240, **how).rollouts


def measure(
    root: Path = POCKET, models: Sequence[str] = tuple(dict.fromkeys(m for m, _, _ in MEASURED))
) -> pd.DataFrame:
    """pass@1 without retrieval of each model on the test questions, one sample a question.

    Returns:
        One row a model, regime, steps beyond the budget, family and number of steps: n, pass@1.

    Raises:
        ValueError: a model that is none of MEASURED.
    """
    from rapo_lib.rollout import RolloutRequest

    _check_names(models, dict.fromkeys(m for m, _, _ in MEASURED))
    rows = []
    for model, regime, extra in ((m, r, e) for m, regimes, e in MEASURED if m in models for r in regimes):
        questions = {q.id: q for q in make_questions(regime, "test")}
        requests = [RolloutRequest(q) for q in questions.values()]
        how = {"seed": 7, "stream": ("measure",), "extra_steps": extra}
        for r in sample_with(root / "models" / model, requests, "test", **how):
            q = questions[r.question_id]
            row = {"model": model, "regime": regime, "extra_steps": extra, "family": q.family, "steps": q.max_steps}
            rows.append(row | {"pass@1": r.reward})
    by = ["model", "regime", "extra_steps", "family", "steps"]
    return pd.DataFrame(rows).groupby(by, sort=False)["pass@1"].agg(["size", "mean"]).reset_index()


def build_all(jobs: int = 2) -> None:
    """Everything, in order, with the seconds of each part."""
    parts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("data", make_data),
        ("models", lambda: make_models(jobs=jobs)),
        ("trajectories", make_trajectories),
        ("what the buffers get", lambda: print(coverage().to_string(index=False))),
        ("pass@1 on the test questions", lambda: print(measure().to_string(index=False))),
        ("checksums", write_checksums),
    )
    for name, part in parts:
        start = time.perf_counter()
        part()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
