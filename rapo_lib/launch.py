"""One run from the command line, on one process or several: `python -m rapo_lib.launch --profile qwen --out FOLDER`.

Several GPUs or processes: `torchrun --nproc_per_node 4 -m rapo_lib.launch ..` (on a CPU with ACCELERATE_USE_CPU=true).
Groups are split over the processes; advantages, and so weights, are those of one process. `--dry-run` prints the plan.
Interrupted runs go on when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rapo_lib import study
from rapo_lib.config import PROFILES, Profile, RunConfig, load_profile
from rapo_lib.execution import execute_run
from rapo_lib.methods import METHODS, get_method
from rapo_lib.runs import EXECUTOR, finish_run, inputs_hash, load_config, read_done
from rapo_lib.traces import write_text_atomic

#: Completion tokens an RL step takes a second, all processes together, when nothing is known; an assumption.
TOKENS_PER_SEC = 2000.0


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
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair!r}: expected name=value, for example rl_steps=100")
        try:
            out[name] = text if name in texts else json.loads(text)
        except ValueError:
            raise ValueError(f"--set {pair!r}: {text!r} is no number and neither true nor false") from None
    return out


def plan_of(config: RunConfig, tokens_per_sec: float = TOKENS_PER_SEC) -> pd.DataFrame:
    """What a run does at most, computed from its settings and not measured.

    Args:
        config: the run. tokens_per_sec: completion tokens of sampling and update a second, all processes together.

    Returns:
        One row a quantity: `what`, `how many` and `how it is computed`.
    """
    rollouts = config.questions_per_step * config.group_size
    n_evals = 1 + -(-config.rl_steps // config.eval_every)
    answered = n_evals * config.n_eval + 2 * config.n_final
    learned, judged = (n * config.max_completion for n in (config.rl_steps * rollouts, answered))
    rows = [
        ("RL steps", config.rl_steps, "rl_steps"),
        ("optimiser steps", config.rl_steps * config.updates_per_step, "rl_steps x updates_per_step"),
        ("rollouts of an RL step", rollouts, "questions_per_step x group_size"),
        ("of them hybrid", config.questions_per_step * get_method(config.method).n_hybrid(config), "the method's"),
        ("rollouts of a backward pass", config.micro_batch or "by size", "micro_batch; 0 takes what fits"),
        ("rollouts in training", config.rl_steps * rollouts, "all RL steps"),
        ("answers in evaluations", answered, f"{n_evals} x n_eval + 2 x n_final"),
        (
            "completion tokens at most",
            learned + judged,
            f"rollouts and answers x max_completion ({config.max_completion})",
        ),
    ]
    rows = [(what, f"{n:,}" if isinstance(n, int) else n, how) for what, n, how in rows]
    hours = (learned + judged) / tokens_per_sec / 3600
    rows.append(("hours at most", f"{hours:,.1f}", f"at {tokens_per_sec:,.0f} tokens a second"))
    return pd.DataFrame(rows, columns=["what", "how many", "how it is computed"])


def print_plans(profile: Profile, jobs: int | None = None) -> int:
    """What `./run_all.sh --profile NAME` would do; nothing is done. Returns 0."""
    print(f"profile {profile.name}: {profile.about}")
    if profile.sources:
        table = [(name, str(value), profile.sources[name]) for name, value in profile.run.items()]
        print(pd.DataFrame(table, columns=["setting", "value", "source"]).to_string(index=False, justify="left"))
    print("\none run of RAPO (computed):")
    print(plan_of(profile.config("rapo")).to_string(index=False))
    if profile.config("rapo").questions == "pocket":
        print("\nthe notebooks' runs:")
        print(study.plan_table(profile, jobs).to_string(index=False, float_format="%.0f"))
        print(study.time_line(profile, jobs))
    else:
        print("\nThe notebooks are about the pocket world; do runs of this profile with python -m rapo_lib.launch.")
    return 0


def launch(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Do one run in a folder, or say what it holds when it is done already.

    Raises:
        ValueError: the folder holds another run.
    """
    first, inputs = int(os.environ.get("RANK", "0")) == 0, inputs_hash(config)
    if (folder / "config.json").exists() and load_config(folder) != config:
        raise ValueError(f"{folder} holds a run with other settings; name another folder")
    if done := read_done(folder, config, inputs):
        return done
    if not first:
        return execute_run(config, folder)
    write_text_atomic(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    return finish_run(EXECUTOR, folder, inputs)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="qwen", choices=list(PROFILES))
    parser.add_argument("--method", default="rapo", choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of RunConfig")
    parser.add_argument("--out", type=Path, help="the run's folder")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and do nothing")
    parser.add_argument("--tokens-per-sec", type=float, default=TOKENS_PER_SEC, help="for the plan's hours")
    a = parser.parse_args(arguments)
    try:
        config = load_profile(a.profile).config(a.method, a.seed, **parse_settings(a.set))
    except ValueError as e:
        parser.error(str(e))
    if a.dry_run:
        print(plan_of(config, a.tokens_per_sec).to_string(index=False))
        return 0
    if a.out is None:
        parser.error("--out FOLDER is needed")
    done = launch(config, a.out)
    print({k: v for k, v in done.items() if k.startswith("pass@1") or k == "seconds"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
