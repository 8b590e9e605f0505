"""Kill runs on purpose and see whether they end as if nothing had happened: `python -m rapo_lib.faults --kills 30`.

Notebook 08 shows one such kill. Each trial kills a run with SIGKILL at a moment drawn from the seed, starts the
same command again, and compares weights, metrics and rollouts with those of an unbroken run, byte for byte. Most
kills hit one process at a chosen call (the POINTS); every fifth hits the whole command with its notebooks,
kernels and workers at a random second, or its first process alone so that orphans remain.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from rapo_lib.config import ROOT, RunConfig
from rapo_lib.runs import EXECUTOR, RunFailed, run_many

#: Where a run can be killed: name -> the functions of which the n-th call is hit.
POINTS: dict[str, tuple[str, ...]] = {
    "reading a model": ("rapo_lib.execution:load_policy",),
    "building the buffer": ("rapo_lib.execution:make_buffer",),
    "evaluating": ("rapo_lib.execution:evaluate",),
    "sampling": ("rapo_lib.rollout:sample_tokens",),
    "calling a tool": ("rapo_lib.tools:Toolbox.run",),
    "updating": ("torch.optim:AdamW.step",),
    "writing tensors": ("rapo_lib.checkpoints:save_file", "peft.peft_model:safe_save_file"),
    "putting a file or folder in place": ("os:replace",),
    "deleting a folder": ("shutil:rmtree",),
    "writing a file": ("os:fsync",),
}
#: Columns that hold seconds, and so differ between equal runs.
CLOCK = ("rollout_sec", "update_sec", "retrieval_sec", "tools_sec", "step_sec", "train_sec")
DYING = "rapo_lib.faults:dying_run"
ORDER, COUNTS = "RAPO_FAULT", "RAPO_FAULT_COUNTS"
TINY = RunConfig(
    rl_steps=4, questions_per_step=2, group_size=8, n_hybrid=4, eval_every=2, n_eval=8, n_final=8, sft_epochs=0.5
)
METHODS = ("rapo", "grpo", "sft")


def run_digest(folder: Path) -> dict[str, str]:
    """sha256 of all that a run must leave in the same form: weights and rollouts by bytes, tables without seconds."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".safetensors", ".jsonl", ".parquet")):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content = pd.read_parquet(path).drop(columns=list(CLOCK), errors="ignore").to_json().encode()
        out[path.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return out


# ------------------------------------------------------------------------------------- inside the process


def dying_run(config: RunConfig, folder: Path) -> dict[str, Any]:
    """An executor that counts the calls at each point, and kills its process at the one that RAPO_FAULT names."""
    point, number, when = json.loads(os.environ.get(ORDER, '["", 0, ""]'))
    counts: Counter[str] = Counter()

    def due(name: str) -> bool:
        counts[name] += 1
        if COUNTS in os.environ:  # at once: the last calls come when this function has returned
            Path(os.environ[COUNTS]).write_text(json.dumps(counts), encoding="utf-8")
        return name == point and counts[name] == number

    for name, targets in POINTS.items():
        for target in targets:
            _wrap(target, functools.partial(due, name), when)
    module, name = EXECUTOR.split(":")
    return getattr(importlib.import_module(module), name)(config, folder)


def _wrap(target: str, due: Callable[[], bool], when: str) -> None:
    """Replace `module:function` by one that kills this process before, in the middle of, or after a due call."""
    module, path = target.split(":")
    holder = functools.reduce(getattr, path.split(".")[:-1], importlib.import_module(module))
    name = path.rpartition(".")[2]
    real = getattr(holder, name)

    @functools.wraps(real)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        dies = due()
        if dies and when == "before":
            _die()
        value = real(*args, **kwargs)
        if dies and when == "in":
            _halve(args)
        if dies:
            _die()
        return value

    setattr(holder, name, wrapped)


def _halve(args: Sequence[Any]) -> None:
    """Leave half of a file of tensors that a call has just written."""
    for path in (a for a in args if isinstance(a, str | Path) and str(a).endswith(".safetensors")):
        os.truncate(path, os.path.getsize(path) // 2)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ trials


class Campaign:
    """Trials in a folder of their own.

    Args:
        folder: where results go. seed: of the kills.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.unbroken: dict[str, tuple[dict[str, str], dict[str, int]]] = {}
        self.command_digests: dict[str, dict[str, str]] = {}
        self.command_sec = 0.0

    def kill_in_run(self, n: int, method: str, point: str) -> tuple[str, bool]:
        """One kill at a point inside a run (at another one where the method never comes there).

        Returns:
            What was done, and whether the run ended as the unbroken one.
        """
        want, counts = self._unbroken(method)
        point = point if point in counts else self.rng.choice(sorted(counts))
        number, when = self.rng.randint(1, counts[point]), self.rng.choice(("before", "in", "after"))
        config, results = TINY.replace(method=method), self.folder / f"trial{n}"
        died = _run(config, results, {ORDER: json.dumps([point, number, when])})
        again = _run(config, results, {})
        (run,) = (results / "smoke" / "runs" / "faults" / method).glob("seed*")
        resumed = json.loads((run / "done.json").read_text(encoding="utf-8"))["resumed_at"]
        went_on = f"went on after {resumed[0]}" if resumed else "began again"
        what = f"{method}: {when} call {number} of {counts[point]}, {point}; {went_on}"
        return what, "exit code -9" in died and not again and run_digest(run) == want

    def _unbroken(self, method: str) -> tuple[dict[str, str], dict[str, int]]:
        if method not in self.unbroken:
            results, counts = self.folder / f"unbroken-{method}", self.folder / f"counts-{method}.json"
            if error := _run(TINY.replace(method=method), results, {COUNTS: str(counts)}):
                raise RuntimeError(f"the unbroken run failed: {error}")
            (run,) = (results / "smoke" / "runs" / "faults" / method).glob("seed*")
            self.unbroken[method] = run_digest(run), json.loads(counts.read_text(encoding="utf-8"))
        return self.unbroken[method]

    def kill_command(self, n: int) -> tuple[str, bool]:
        """One kill of the whole command, or of its first process alone, at a random second."""
        if not self.command_digests:
            start = time.time()
            self._command(self.folder / "unbroken-command").wait()
            self.command_sec = time.time() - start
            self.command_digests = _digests(self.folder / "unbroken-command")
        results, alone = self.folder / f"trial{n}", self.rng.random() < 0.3
        second = self.rng.uniform(0.1, 0.95) * self.command_sec
        first = self._command(results)
        time.sleep(second)
        _kill(first, alone)
        code = self._command(results).wait()
        what = f"{'first process' if alone else 'whole command'} after {second:.1f} of {self.command_sec:.0f} s"
        return what, code == 0 and _digests(results) == self.command_digests

    def _command(self, results: Path) -> subprocess.Popen:
        arguments = ["notebooks", "--profile", "smoke", "--only", "02,05"]
        results.mkdir(exist_ok=True)
        with open(results / "command.log", "a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "rapo_lib.runs", *arguments],
                cwd=ROOT,
                env=os.environ | {"RAPO_RESULTS": str(results)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _run(config: RunConfig, results: Path, fault: dict[str, str]) -> str:
    """Do a run in a worker of its own; returns the error, empty when there was none."""
    with _environment({"RAPO_RESULTS": str(results)} | fault):
        try:
            run_many([config], profile="smoke", experiment="faults", executor=DYING, say=lambda text: None)
        except RunFailed as e:
            return str(e)
    return ""


@contextmanager
def _environment(variables: dict[str, str]):
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _kill(process: subprocess.Popen, alone: bool) -> None:
    family = [] if alone else psutil.Process(process.pid).children(recursive=True)
    for p in (psutil.Process(process.pid), *family):
        try:
            p.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


def _digests(results: Path) -> dict[str, str]:
    runs = sorted(p.parent for p in results.glob("smoke/runs/*/*/seed*/done.json"))
    return {f"{r.relative_to(results)}/{k}": v for r in runs for k, v in run_digest(r).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 when a run did not end identical."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="how many kills (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="keep everything in this folder (default: a temporary one)")
    a = parser.parse_args(arguments)
    if a.folder and a.folder.exists() and any(a.folder.iterdir()):
        parser.error(f"{a.folder} is not empty: runs that lie there would not be done, and so not be killed")
    with tempfile.TemporaryDirectory() as temporary:
        campaign, same = Campaign(a.folder or Path(temporary), a.seed), 0
        points = sorted(POINTS)
        for n in range(a.kills):
            if n % 5 == 4:
                what, good = campaign.kill_command(n)
            else:
                what, good = campaign.kill_in_run(n, METHODS[n % 3], points[n % len(points)])
            same += good
            print(f"{n + 1:3} {'identical' if good else 'DIFFERENT'}  {what}", flush=True)
    print(f"{same} of {a.kills} kills ended identical")
    return int(same < a.kills)


if __name__ == "__main__":
    sys.exit(main())
