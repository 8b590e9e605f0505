"""Rebuild everything under data/pocket/: tokenizer, questions, wiki, models, trajectories, checksums."""

from __future__ import annotations

import json
import multiprocessing as mp
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from rapo_lib.pocket.files import POCKET, write_checksums
from rapo_lib.pocket.tokenizer import save_tokenizer
from rapo_lib.pocket.train import RECIPES, build_model
from rapo_lib.pocket.world import PRELUDE, REGIMES, SPLIT_SIZES, make_questions, make_world
from rapo_lib.traces import Rollout, save_jsonl, save_rollouts, write_text_atomic

#: Order of training: the base first, then two at a time.
WAVES = (("base",), ("student", "teacher"), ("weak",))
TEACHERS = ("teacher", "weak")
SAMPLES_PER_QUESTION = 8


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


def make_models(root: Path = POCKET, jobs: int = 2, only: tuple[str, ...] = tuple(RECIPES)) -> None:
    """Train the models of RECIPES, `jobs` at a time, one thread each."""
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


def make_trajectories(root: Path = POCKET, teachers: tuple[str, ...] = TEACHERS) -> None:
    """Let each teacher sample trajectories for every training question; they are scored, not filtered."""
    from rapo_lib.rollout import RolloutRequest

    for teacher in teachers:
        for regime in REGIMES:
            questions = make_questions(regime, "train")
            requests = [RolloutRequest(q, place=k) for q in questions for k in range(SAMPLES_PER_QUESTION)]
            rollouts = sample_and_score(
                root / "models" / teacher, requests, "train", seed=5, stream=("trajectories", teacher)
            )
            save_rollouts(root / "trajectories" / f"{teacher}_{regime}.jsonl", map(_rounded, rollouts))
            rate = sum(r.reward for r in rollouts) / len(rollouts)
            print(f"{teacher} {regime}: pass@1 {rate:.3f} (n = {len(rollouts)})")


def _rounded(rollout: Rollout) -> Rollout:
    """Three decimals are enough for a teacher's numbers (they enter no objective) and halve the files."""
    for i, s in enumerate(rollout.segments):
        numbers = [tuple(round(x, 3) for x in xs) for xs in (s.logps, s.entropies)]
        rollout.segments[i] = replace(s, logps=numbers[0], entropies=numbers[1])
    return rollout


def sample_and_score(model: Path, requests: list, split: str, *, seed: int, stream: tuple, **kwargs) -> list:
    """Sample one rollout a request with a pocket model and give it its outcome reward."""
    from rapo_lib.policy import load_policy
    from rapo_lib.rewards import pocket_reward
    from rapo_lib.rollout import SamplingLimits, sample_rollouts
    from rapo_lib.tools import make_pocket_toolbox

    policy, toolbox = load_policy(str(model)), make_pocket_toolbox(split)
    limits, out = SamplingLimits(max_completion=224, max_calls=8, max_steps=6), []
    for i in range(0, len(requests), 240):
        part = requests[i : i + 240]
        rollouts = sample_rollouts(policy, part, toolbox, limits=limits, seed=seed, stream=stream, **kwargs).rollouts
        for request, rollout in zip(part, rollouts, strict=True):
            rollout.reward = pocket_reward(rollout, request.question, policy.protocol)
        out += rollouts
    return out


def measure(root: Path = POCKET, models: tuple[str, ...] = ("student", "teacher", "weak")) -> pd.DataFrame:
    """pass@1 without retrieval of each model on the test questions, one sample a question.

    Returns:
        One row a model, regime, family and number of steps: n, pass@1.
    """
    from rapo_lib.rollout import RolloutRequest

    rows = []
    for model in models:
        for regime in REGIMES:
            questions = {q.id: q for q in make_questions(regime, "test")}
            requests = [RolloutRequest(q) for q in questions.values()]
            for r in sample_and_score(root / "models" / model, requests, "test", seed=7, stream=("measure",)):
                q = questions[r.question_id]
                rows.append(
                    {"model": model, "regime": regime, "family": q.family, "steps": q.max_steps, "pass@1": r.reward}
                )
    frame = pd.DataFrame(rows)
    return (
        frame.groupby(["model", "regime", "family", "steps"], sort=False)["pass@1"].agg(["size", "mean"]).reset_index()
    )


def build_all(jobs: int = 2) -> None:
    """Everything, in order, with the seconds of each part."""
    parts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("data", make_data),
        ("models", lambda: make_models(jobs=jobs)),
        ("trajectories", make_trajectories),
        ("pass@1 on the test questions", lambda: print(measure().to_string(index=False))),
        ("checksums", write_checksums),
    )
    for name, part in parts:
        start = time.perf_counter()
        part()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
