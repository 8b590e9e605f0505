"""One run from the command line, on one process or several: `python -m rapo_lib.launch --profile qwen --out FOLDER`.

Several GPUs or processes: `torchrun --nproc_per_node 4 -m rapo_lib.launch --processes 4 ..` (on a CPU with
ACCELERATE_USE_CPU=true). Groups are split over the processes; advantages, and so weights, are those of one process.
`--dry-run` prints the plan. Interrupted runs go on when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from rapo_lib import study
from rapo_lib.config import PROFILE_HELP, Profile, RunConfig, load_profile
from rapo_lib.execution import execute_run
from rapo_lib.memory import HALF, LAYER_BYTES_PER_UNIT, memory_plan, n_parameters, size_of
from rapo_lib.methods import METHODS, get_method
from rapo_lib.runs import EXECUTOR, do_run, inputs_hash, load_config, partial_folder, read_done
from rapo_lib.trainer import CHECKPOINTING_FROM, DDP_TIMEOUT_SEC, default_micro_batch

#: Completion tokens an RL step takes a second, all processes together, when nothing is known; an assumption.
TOKENS_PER_SEC = 2000.0
#: Ids of a prompt, for the plan's memory; an assumption.
PROMPT_TOKENS = 512


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`["rl_steps=2", "buffer=teacher"]` as settings of a run, with the types of their fields.

    Raises:
        ValueError: no `=`, an unknown name, or a value that is not of the field's type.

    Example:
        >>> parse_settings(["rl_steps=2", "kl_coef=0", "leak_guard=false", "buffer=weak"])
        {'rl_steps': 2, 'kl_coef': 0, 'leak_guard': False, 'buffer': 'weak'}
    """
    texts = {f.name for f in dataclasses.fields(RunConfig) if isinstance(f.default, str)}
    out = {}
    for name, text in map(_pair, pairs):
        try:
            out[name] = text if name in texts else json.loads(text)
        except ValueError:
            raise ValueError(f"--set {name}={text}: {text!r} is no number and neither true nor false") from None
    return out


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """As `parse_settings`, for names that are not ours: a number where it reads as one, else a text.

    Example:
        >>> parse_pairs(["timeout_min=60", "slurm_partition=gpu"])
        {'timeout_min': 60, 'slurm_partition': 'gpu'}
    """
    return {name: int(text) if text.isdecimal() else text for name, text in map(_pair, pairs)}


def _pair(pair: str) -> tuple[str, str]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise ValueError(f"{pair!r}: expected name=value, for example rl_steps=100")
    return name, text


def plan_of(config: RunConfig, tokens_per_sec: float = TOKENS_PER_SEC, processes: int = 1) -> pd.DataFrame:
    """What a run does at most, computed from its settings and not measured.

    Args:
        config: the run. tokens_per_sec: completion tokens of sampling and update a second, all processes together.
        processes: that do it together.

    Returns:
        One row a quantity: `what`, `how many` and `how it is computed`.
    """
    rollouts = config.questions_per_step * config.group_size
    learned, judged = _rollouts_of(config)
    n_evals = 1 + -(-config.rl_steps // config.eval_every)
    tokens = (learned + judged) * config.max_completion
    rows = [
        ("RL steps", config.rl_steps, "rl_steps"),
        ("optimiser steps", config.rl_steps * config.updates_per_step, "rl_steps x updates_per_step"),
        ("rollouts of an RL step", rollouts, "questions_per_step x group_size"),
        ("of them hybrid", config.questions_per_step * get_method(config.method).n_hybrid(config), "the method's"),
        ("rollouts in training", learned, "all RL steps"),
        ("answers in evaluations", judged, f"{n_evals} x n_eval + 2 x n_final"),
        ("completion tokens at most", tokens, f"rollouts and answers x max_completion ({config.max_completion})"),
    ]
    rows = [(what, f"{n:,}", how) for what, n, how in rows]
    hours = f"{tokens / tokens_per_sec / 3600:,.1f}"
    rows.append(("hours at most", hours, f"at {tokens_per_sec:,.0f} tokens a second, all processes together"))
    return pd.DataFrame([*rows, *_memory_rows(config, processes)], columns=["what", "how many", "how it is computed"])


def _rollouts_of(config: RunConfig) -> tuple[int, int]:
    """Rollouts in training, and answers in all evaluations."""
    n_evals = 1 + -(-config.rl_steps // config.eval_every)
    trained = config.rl_steps * config.questions_per_step * config.group_size
    return trained, n_evals * config.n_eval + 2 * config.n_final


def _memory_rows(config: RunConfig, processes: int) -> list[tuple[str, str, str]]:
    """GPU memory of one process, where the student's shape is known and large enough to matter."""
    size = size_of(config.student)
    if size is None or n_parameters(size) <= CHECKPOINTING_FROM:
        why = "the student's shape is not known here" if size is None else "a small model; the plan is for large ones"
        return [("GPU memory", "not computed", why)]
    mine = config.questions_per_step * config.group_size // processes
    rows_of_update = max(1, mine // config.updates_per_step)
    at_once = min(mine, config.rollouts_at_once or mine)
    batch = config.micro_batch or default_micro_batch(rows_of_update, config.max_completion, n_parameters(size))
    tokens = PROMPT_TOKENS + config.max_completion
    plan = memory_plan(size, config.lora_r, HALF * size.hidden, LAYER_BYTES_PER_UNIT * size.hidden)
    cache = at_once * tokens * plan.kv_token
    rows = [
        ("GPU memory: weights", plan.weights, "bfloat16, frozen"),
        ("adapter and optimiser", plan.adapter, f"rank {config.lora_r}: weights, gradients, two moments in float32"),
        ("copy with the adapter merged", plan.merged, "while sampling"),
        ("keys and values", cache, f"{at_once} rollouts at once x {tokens:,} tokens (prompts of {PROMPT_TOKENS})"),
        ("logits", max(plan.logits, at_once * plan.sampling_row), "a chunk of an update, or of a sampled token"),
        ("all while sampling", plan.sampling(at_once, tokens), "with 2 GB for CUDA itself"),
        ("all in an update", plan.update(batch * tokens), f"{batch} rollouts of a backward pass, activations too"),
    ]
    return [(what, f"{n / 1e9:,.1f} GB", f"{how}; a process of {processes}, computed") for what, n, how in rows]


def print_plans(
    profile: Profile,
    jobs: int | None = None,
    tokens_per_sec: float | None = None,
    notebooks: Sequence[str] = (),
) -> int:
    """What a profile would do, in all notebooks or in some; nothing is done. Returns 0."""
    rate = tokens_per_sec or TOKENS_PER_SEC
    print(f"profile {profile.name}: {profile.about}")
    if profile.sources:
        table = [(name, str(value), profile.sources[name]) for name, value in profile.run.items()]
        print(pd.DataFrame(table, columns=["setting", "value", "source"]).to_string(index=False, justify="left"))
    print("\none run of RAPO (computed from its settings, not measured):")
    print(plan_of(profile.config("rapo"), rate).to_string(index=False))
    if profile.config("rapo").questions != "pocket":
        print("\nThe notebooks are about the pocket world; do runs of this profile with python -m rapo_lib.launch.")
        return 0
    table = study.plan_table(profile, jobs, notebooks)
    if table.empty:
        print(f"\n{study.time_line(profile, jobs, notebooks)}")
        return 0
    print("\nthe notebooks' runs:")
    print(table.to_string(index=False, float_format="%.0f"))
    plans = study.everything(profile, notebooks).values()
    configs = list(dict.fromkeys(c for plan in plans for group in plan.values() for c in group))
    trained, judged = (sum(n) for n in zip(*map(_rollouts_of, configs), strict=True))
    tokens = sum(sum(_rollouts_of(c)) * c.max_completion for c in configs)
    steps, hours = sum(c.rl_steps for c in configs), tokens / rate / 3600
    print(f"all of them, computed: {len(configs)} runs, {steps:,} RL steps, {trained:,} rollouts, {judged:,} answers,")
    print(f"{tokens:,} completion tokens at most: {hours:,.1f} hours at {rate:,.0f} tokens a second")
    print(study.time_line(profile, jobs, notebooks))
    return 0


def launch(config: RunConfig, folder: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Do one run as the only process or, under torchrun, as one of several, or say what it left when it is done.

    The first process prepares the folder, writes, and evaluates; it is written beside its place and moved there whole,
    as every run (`runs.do_run`). The others wait until it is prepared, so that all go on from the same checkpoint.

    Returns:
        What done.json says; empty in processes other than the first.

    Raises:
        ValueError: the folder holds another run, or something that is no run.
    """
    folder, inputs = folder.resolve(), inputs_hash(config)
    _check_folder(folder, config)
    if not _is_first():
        return execute_run(config, partial_folder(folder)) if _agree() else {}
    begun = []

    def begins() -> None:
        say(f"{n_processes()} process(es); the log is {partial_folder(folder) / 'log.txt'}")
        begun.append(_agree(True))

    do_run(EXECUTOR, folder, config, inputs, begins)
    if not begun:
        _agree(False)
    return read_done(folder, config, inputs) or {}


def _check_folder(folder: Path, config: RunConfig) -> None:
    """Refuse a folder that `do_run` would replace although it holds something else."""
    if (folder / "config.json").exists():
        if load_config(folder) != config:
            raise ValueError(f"{folder} holds a run with other settings; name another folder")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and holds no run; name a new folder, which is made for the run alone")


def n_processes() -> int:
    """Processes that do this run together, as torchrun tells each of them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _agree(go: bool | None = None) -> bool:
    """The first process tells the others whether there is something to do; alone it is its own answer."""
    if n_processes() == 1:
        return bool(go)
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    # This joins the processes; the trainer finds them joined.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(seconds=DDP_TIMEOUT_SEC))
    if state.num_processes != n_processes():
        raise RuntimeError(f"{n_processes()} processes were started, and {state.num_processes} found each other")
    (answer,) = broadcast_object_list([go], from_process=0)
    return bool(answer)


def check_processes(wanted: int | None) -> None:
    """Refuse to go on with another number of processes than was asked for.

    `accelerate launch --cpu --num_processes 2` starts a single one and says nothing.

    Raises:
        ValueError: another number is running.
    """
    if wanted is not None and wanted != n_processes():
        raise ValueError(
            f"--processes is {wanted}, but there is {n_processes()}; start them with torchrun --nproc_per_node {wanted}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="qwen", help=PROFILE_HELP)
    parser.add_argument("--config", type=Path, help="a run's config.json, in place of profile, method and seed")
    parser.add_argument("--method", default="rapo", choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of RunConfig")
    parser.add_argument("--out", type=Path, help="the run's folder")
    parser.add_argument("--processes", type=int, help="refuse to run unless so many processes were started")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and do nothing")
    parser.add_argument("--tokens-per-sec", type=float, default=TOKENS_PER_SEC, help="for the plan's hours")
    a = parser.parse_args(arguments)
    try:
        config = _config_of(a)
        if not a.dry_run:
            check_processes(a.processes)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    if a.dry_run:
        print(plan_of(config, a.tokens_per_sec, a.processes or 1).to_string(index=False))
        return 0
    if a.out is None:
        parser.error("--out FOLDER is needed")
    if done := launch(config, a.out):
        print({k: v for k, v in done.items() if k.startswith("pass@1") or k in ("seconds", "processes")})
    return 0


def _config_of(a: argparse.Namespace) -> RunConfig:
    settings = parse_settings(a.set)
    if a.config is None:
        return load_profile(a.profile).config(a.method, a.seed, **settings)
    return RunConfig().replace(**json.loads(a.config.read_text(encoding="utf-8")) | settings)


if __name__ == "__main__":
    sys.exit(main())
