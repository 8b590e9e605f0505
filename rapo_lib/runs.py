"""Run folders: what has been run, what is still missing, and the worker processes that do it.

Notebook 05 explains this module. A run is a pure function of its RunConfig and lives in
`results/<profile>/runs/<experiment>/<variant>/seed<k>-<hash>/`. It counts as done when done.json carries
the hash of the modules and data that act on it. It is written beside its place (`.seed<k>-<hash>.partial`) and
moved there whole, so an interrupted run leaves nothing that looks finished, and goes on from its last
checkpoint. `python -m rapo_lib.runs` is the command line.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import errno
import functools
import hashlib
import importlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from rapo_lib.config import DATA, PROFILE_HELP, PROFILES, RESULTS, ROOT, RunConfig, load_profile
from rapo_lib.traces import Rollout, file_sha256, load_jsonl, write_text_atomic

#: Modules that only look at runs; a change in them makes no run stale.
LOOKING_ON = {
    "runs.py",
    "driver.py",
    "reference.py",
    "stats.py",
    "plots.py",
    "show.py",
    "explorer.py",
    "live.py",
    "watch.py",
    "pages.py",
    "bench.py",
    "hybrids.py",
    "launch.py",
    "cluster.py",
    "study.py",
    "teach.py",
    "scripted.py",
    "serve.py",
    "claims.py",
    "transfer.py",
    "peek.py",
    "diversity.py",
    "faults.py",
    "hostile.py",
    "local_models.py",
    "memory.py",
    "docs.py",
    "__init__.py",
}
#: Names in config.py that choose runs but do not act inside one.
CHOOSING = {"MAIN_METHODS", "Profile", "PROFILES", "PROFILE_HELP", "_PAPER", "load_profile", "_load_own"}
CHOOSING |= {"own_profile", "field_table"}
EXECUTOR = "rapo_lib.execution:execute_run"
#: Folder inside a run's partial folder for what only an interrupted run needs; gone when the run is done.
WORK = "work"
#: Files that done.json holds no checksum of: itself, and what may differ between equal runs.
UNCHECKED = ("done.json", "log.txt")
#: Seconds between two looks at runs that go on.
LOOK_SEC = 2.0


class RunFailed(RuntimeError):
    """A run ended with an error; the message holds the end of its log."""


# ---------------------------------------------------------------------------------------------- hashes


def source_text(path: Path, skip: Iterable[str] = ()) -> str:
    """The code of a Python file without comments, docstrings, layout, and the top-level names in `skip`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [n for n in tree.body if not _names(n) & set(skip)]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _names(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {t.id for t in targets if isinstance(t, ast.Name)} | {getattr(node, "name", "")}


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, size: int, mtime_ns: int, skip: tuple[str, ...]) -> bytes:
    content = source_text(path, skip).encode() if path.suffix == ".py" else path.read_bytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def hash_files(paths: Iterable[Path], skip: Iterable[str] = ()) -> str:
    """8 hex digits of files, folders included; Python files count by their code alone.

    Raises:
        FileNotFoundError: a path that is not there.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing")
        found = path.rglob("*") if path.is_dir() else [path]
        files += sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith("."))
    total = hashlib.blake2b(digest_size=4)
    for path in files:
        stat = path.stat()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        total.update(name.encode() + _digest(path, stat.st_size, stat.st_mtime_ns, tuple(sorted(skip))))
    return total.hexdigest()


def library_hash() -> str:
    """8 hex digits of the whole library and of data/: what an executed notebook depends on."""
    return hash_files([ROOT / "rapo_lib", DATA])


def inputs_hash(config: RunConfig) -> str:
    """8 hex digits of the modules and data that act on a run."""
    return hash_files([*_acting_modules(), *(p for p in _data_of(config) if p.exists())], skip=CHOOSING)


def code_hash() -> str:
    """8 hex digits of the modules that act on runs."""
    return hash_files(_acting_modules(), skip=CHOOSING)


def _acting_modules() -> list[Path]:
    modules = sorted(p for p in (ROOT / "rapo_lib").glob("*.py") if p.name not in LOOKING_ON)
    return [*modules, ROOT / "rapo_lib" / "pocket" / "world.py"]


def _data_of(config: RunConfig) -> list[Path]:
    if config.questions != "pocket":
        return [ROOT / config.questions, ROOT / config.student, *buffer_paths(config)]
    pocket = DATA / "pocket"
    questions = [pocket / "questions" / f"{config.regime}_{split}.jsonl" for split in ("train", "validation", "test")]
    return [*questions, pocket / "wiki", pocket / "python_prelude.py", ROOT / config.student, *buffer_paths(config)]


def buffer_paths(config: RunConfig) -> list[Path]:
    """Files that the buffer is built from: those of pocket teachers (`teacher`, `teacher+weak`), or a JSONL file."""
    return [path for teacher in buffer_teachers(config) for path in teacher]


def buffer_teachers(config: RunConfig) -> list[tuple[Path, ...]]:
    """For each teacher its file, and behind it the files that limit how many trajectories of a question it gives."""
    if config.buffer.endswith(".jsonl"):
        return [(ROOT / config.buffer,)]
    folder = DATA / "pocket" / "trajectories"
    teachers = [part.split("&") for part in config.buffer.split("+")]
    return [tuple(folder / f"{name}_{config.regime}.jsonl" for name in names) for names in teachers]


# ------------------------------------------------------------------------------------------------ runs


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its variant's name, its configuration and its folder.

    Example:
        >>> Run("rapo", RunConfig(seed=3), Path("x")).label
        'rapo seed 3'
    """

    variant: str
    config: RunConfig
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.variant} seed {self.config.seed}"

    @property
    def done(self) -> dict[str, Any] | None:
        """What done.json says, or None when the run is missing, stale or half-written."""
        return read_done(self.folder, self.config)

    def file(self, name: str) -> Path:
        """The path of one of the run's files, after comparing it with the checksum in done.json.

        Raises:
            ValueError: the file is missing, damaged or swapped, or was not made by the run.
        """
        sums = json.loads((self.folder / "done.json").read_text(encoding="utf-8"))["files"]
        path = self.folder / name
        got = file_sha256(path) if path.is_file() else "missing"
        if got != (want := sums.get(name, "no such file")):
            raise ValueError(
                f"{path}: sha256 is {got}, done.json expects {want}; delete {self.folder}, and it is made again"
            )
        return path

    def table(self, name: str) -> pd.DataFrame:
        """One of the run's tables: `metrics`, `evals` or `final`, with columns variant, method, seed in front."""
        return _named(pd.read_parquet(self.file(f"{name}.parquet")), self)

    def metrics_so_far(self) -> pd.DataFrame:
        """The metrics that a run has written by now, one row an RL step, with columns variant, method, seed in front.

        Edge cases: empty before the first RL step, and while the folder still holds what other code had begun.
        """
        partial, none = partial_folder(self.folder), pd.DataFrame()
        if self.done:
            return self.table("metrics")
        if _read_json(partial / WORK / "started.json").get("inputs") != inputs_hash(self.config):
            return none
        try:
            df = pd.read_parquet(partial / "metrics.parquet")
        except FileNotFoundError:  # not yet, or moved to its place just now
            return none
        return _named(df, self)

    def rollouts(self) -> list[dict[str, Any]]:
        """The stored rollouts: rows with `rl_step` and `rollout`."""
        return [{**r, "rollout": Rollout.from_dict(r["rollout"])} for r in load_jsonl(self.file("rollouts.jsonl"))]


def _named(df: pd.DataFrame, run: Run) -> pd.DataFrame:
    for i, column in enumerate(("variant", "method", "seed")):
        df.insert(i, column, run.variant if column == "variant" else getattr(run.config, column))
    return df


def read_done(folder: Path, config: RunConfig, inputs: str | None = None) -> dict[str, Any] | None:
    """What done.json in a folder says; None when it is missing, half-written, of another run, stale or not fresh.

    Args:
        folder: of the run. config: the run. inputs: hash of the modules and data that act on it (default: now's).
    """
    try:
        row = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if row.get("config_hash") != config.hash() or row.get("inputs_hash") != (inputs or inputs_hash(config)):
        return None
    return row if row["finished_at"] >= _fresh_since() else None


def _fresh_since() -> float:
    """Runs that were begun before this moment do not count (`--fresh`)."""
    return float(os.environ.get("RAPO_FRESH_SINCE", "0"))


def load_table(runs: Iterable[Run], name: str) -> pd.DataFrame:
    """The same table of several runs below each other.

    Args:
        runs: finished runs. name: `metrics` (one row an RL step), `evals` (one an evaluation) or `final`
            (one a test question).
    """
    tables = [run.table(name) for run in runs]
    if not tables:
        raise ValueError(f"no runs to read {name} from")
    return pd.concat(tables, ignore_index=True)


def result_table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a finished run: variant, method, seed, regime, buffer, noise_prob, and what its done.json says.

    Returns:
        Among the columns `pass@1` and `pass@1 greedy` on the test questions as fractions, and `train_sec`.
    """
    names = ("method", "seed", "regime", "buffer", "noise_prob")
    rows = [{"variant": r.variant} | {n: getattr(r.config, n) for n in names} | done for r in runs if (done := r.done)]
    return pd.DataFrame(rows, columns=None if rows else ["variant", *names, "pass@1", "pass@1 greedy", "train_sec"])


def find_runs(configs: Sequence[RunConfig] | Mapping[str, Sequence[RunConfig]], *, profile: str) -> list[Run]:
    """The finished ones of some runs, whichever experiment of the profile made them; nothing is started."""
    folder = runs_folder(profile)
    return [run for planned in plan_runs(configs, folder / "none") if (run := _find(planned, folder))]


def runs_folder(profile: str) -> Path:
    """`results/<profile>/runs`; RAPO_RESULTS names another place for `results/`."""
    return results_folder() / profile / "runs"


def results_folder() -> Path:
    return Path(os.environ.get("RAPO_RESULTS", RESULTS))


def plan_runs(configs: Sequence[RunConfig] | Mapping[str, Sequence[RunConfig]], folder: Path) -> list[Run]:
    """The folder of each run; a variant is named by its key, or by its method when there is none.

    Raises:
        ValueError: two variants of one name, or a variant name that is no plain folder name.
    """
    if not isinstance(configs, Mapping):
        grouped: dict[str, list[RunConfig]] = {}
        for c in configs:
            grouped.setdefault(c.method, []).append(c)
        configs = grouped
    runs = []
    for variant, group in configs.items():
        if not variant or any(not (c.isalnum() or c in "._-+=") for c in variant) or variant.startswith("."):
            raise ValueError(f"variant {variant!r}: letters, digits and . _ - + = only")
        runs += [Run(variant, c, folder / variant / f"seed{c.seed}-{c.hash()}") for c in group]
    if len({r.folder for r in runs}) < len(runs):
        raise ValueError("the same configuration stands twice in one variant")
    return runs


def run_many(
    configs: Sequence[RunConfig] | Mapping[str, Sequence[RunConfig]],
    *,
    profile: str,
    experiment: str,
    jobs: int = 2,
    executor: str = EXECUTOR,
    say: Callable[[str], None] = print,
    work: Callable[[list[Run], int, str, Callable[[str], None]], None] | None = None,
) -> list[Run]:
    """Do the runs that are missing, `jobs` at once, and return them all in the order given.

    A finished run is found again by its configuration, also when another experiment of the same profile
    made it. After a failure no further run starts. An interrupted run goes on where it stopped.

    Args:
        configs: configurations, or for each variant's name its configurations.
        profile: which results folder. experiment: folder below it.
        jobs: worker processes, each with the threads that its configuration names.
        executor: `module:function` called with (config, folder).
        say: gets one line a run.
        work: does the missing runs, called with (runs, jobs, executor, say); None: workers of this machine.

    Returns:
        Runs with their folders.

    Raises:
        RunFailed: a run failed; holds the end of its log.
    """
    folder = runs_folder(profile)
    runs = plan_runs(configs, folder / experiment)
    with _lock(folder / ".lock", say):
        found = [_find(run, folder) for run in runs]
        missing = {r.folder: r for r, f in zip(runs, found, strict=True) if f is None}
        if len(missing) < len(runs):
            say(f"{len(runs) - len(missing)} of {len(runs)} runs are there already")
        (work or work_here)(_unique(missing.values()), jobs, executor, say)
        return [f or _find(r, folder) or r for r, f in zip(runs, found, strict=True)]


def _find(run: Run, folder: Path) -> Run | None:
    """The run itself when done, else a finished run of the same configuration in another experiment."""
    others = sorted(folder.glob(f"*/*/{run.folder.name}"))
    for place in (run.folder, *others):
        there = Run(run.variant, run.config, place)
        if there.done:
            return there
    return None


def _unique(runs: Iterable[Run]) -> list[Run]:
    """One run a configuration."""
    return list({r.config: r for r in reversed(list(runs))}.values())[::-1]


@contextmanager
def _lock(path: Path, say: Callable[[str], None]):
    """Two processes never write into one results folder: the second waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        say(f"another process is training runs in {path.parent}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# --------------------------------------------------------------------------------------------- workers


def work_here(
    runs: list[Run],
    jobs: int,
    executor: str,
    say: Callable[[str], None],
    watch: Callable[[list[Run]], None] | None = None,
) -> None:
    """Give each run to one of `jobs` workers; stop giving out after the first failure.

    Args:
        watch: called with the runs every LOOK_SEC seconds while they go on, and after each that ends. What it raises
            ends the workers as Ctrl-C does: each run goes on from its last checkpoint when it is asked for again.
    """
    if not runs:
        return
    idle = [Worker(executor, runs[0].config.threads) for _ in range(min(jobs, len(runs)))]
    everyone, todo, n_done, failure, began = list(idle), list(runs), 0, None, time.time()
    try:
        with ThreadPoolExecutor(len(everyone)) as pool:
            pending: dict[Any, tuple[Worker, Run]] = {}
            while pending or (todo and not failure):
                while idle and todo and not failure:
                    worker, run = idle.pop(), todo.pop(0)
                    pending[pool.submit(worker.do, run)] = (worker, run)
                try:
                    finished, _ = wait(pending, LOOK_SEC if watch else None, return_when=FIRST_COMPLETED)
                    if watch:
                        watch(runs)
                except BaseException:
                    _stop(everyone)  # else the pool would wait for runs that nobody wants
                    raise
                for future in finished:
                    worker, run = pending.pop(future)
                    idle.append(worker)
                    if future.exception():
                        failure = failure or future.exception()
                        continue
                    n_done += 1
                    left = (time.time() - began) / n_done * (len(runs) - n_done)
                    say(f"[{n_done}/{len(runs)}{_left(left)}] {run.label}: {future.result()}")
    finally:
        _stop(everyone)
    if failure:
        raise failure


def _left(seconds: float) -> str:
    """How long the runs will go on, by the pace so far; empty at the end."""
    return f", {max(seconds / 60, 1):.0f} min left" if seconds else ""


def _stop(workers: Iterable[Worker]) -> None:
    for w in workers:
        w.stop()


class Worker:
    """A process that does one run after another, so that the libraries are imported once.

    Args:
        executor: `module:function` called with (config, folder).
        threads: of the numeric libraries.
    """

    def __init__(self, executor: str, threads: int) -> None:
        count = str(threads)
        env = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count)
        env |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        command = [sys.executable, "-m", "rapo_lib.runs", "worker", executor]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
        self.code = code_hash()
        # A session of its own: Ctrl-C reaches the parent alone, which then ends its workers.
        self.process = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True, **pipes)

    def do(self, run: Run) -> str:
        """Do one run.

        Raises:
            RunFailed: it did not finish.
        """
        if code_hash() != self.code:
            raise RunFailed(f"{run.label}: rapo_lib was changed while runs were going on; start the command again")
        order = {"folder": str(run.folder), "config": dataclasses.asdict(run.config), "inputs": inputs_hash(run.config)}
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except (BrokenPipeError, ValueError):
            answer = ""
        log = partial_folder(run.folder) / "log.txt"
        if not answer:
            raise RunFailed(f"{run.label}: its process died (exit code {self.process.wait()})\n{_tail(log)}")
        reply = json.loads(answer)
        if "error" in reply:
            raise RunFailed(f"{run.label}: {reply['error']}\n{_tail(log)}")
        return reply["summary"]

    def stop(self) -> None:
        """End the process and wait for it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                pass


def _tail(path: Path, n: int = 25) -> str:
    if not path.exists():
        return "(no log)"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-n:]
    return "\n".join([f"end of {path}:", *lines])


def work(executor: str) -> None:
    """Do the runs whose folders arrive on standard input, one line each; answer one JSON line each.

    When standard input closes in the middle of a run, the parent has died: the process ends at once.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    lines: queue.Queue[str | None] = queue.Queue()
    busy = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            busy.set()
            lines.put(line)
        if busy.is_set():
            os._exit(1)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get()) is not None:
        reply = _answer(executor, json.loads(line))
        busy.clear()
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _answer(executor: str, order: dict[str, Any]) -> dict[str, str]:
    try:
        config = RunConfig().replace(**order["config"])
        return {"summary": do_run(executor, Path(order["folder"]), config, order["inputs"])}
    except Exception as e:  # the worker goes on; the parent raises with the log
        return {"error": f"{type(e).__name__}: {e}{advice(e)}"}


def advice(error: Exception) -> str:
    """What to do about a full disk, empty for other errors; some libraries pass the system's words on as their own."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if getattr(error, "errno", None) in full or any(os.strerror(n) in str(error) for n in full):
        return "\nthe disk is full; finished runs and checkpoints are kept: free some space, run the same command again"
    return ""


@contextmanager
def _to_log(path: Path):
    """Everything printed, by C code too, goes into a file."""
    with open(path, "a", encoding="utf-8") as log:
        kept = [(fd, os.dup(fd)) for fd in (1, 2)]
        for fd, _ in kept:
            os.dup2(log.fileno(), fd)
        try:
            yield
        except Exception:
            with suppress(OSError):
                traceback.print_exc()
            raise
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # on a full disk the error at hand matters more than the log
                    stream.flush()
            for fd, old in kept:
                os.dup2(old, fd)
                os.close(old)


def partial_folder(folder: Path) -> Path:
    """Where a run is written before it is moved to its place."""
    return folder.with_name(f".{folder.name}.partial")


def _lock_file(folder: Path) -> Path:
    """Held by the process that writes a run; beside the folder, which moves. Empty, and left there for good."""
    return folder.with_name(f".{folder.name}.lock")


def do_run(
    executor: str, folder: Path, config: RunConfig, inputs: str, begins: Callable[[], None] = lambda: None
) -> str:
    """Do a run, or go on with it, beside its place, and move it there whole.

    Args:
        executor: `module:function`. folder: its place. config: what to run. inputs: hash of modules and data.
        begins: called when there is something to do and the folder is prepared.

    Returns:
        One line about the run.

    Raises:
        ValueError: the partial folder belongs to another configuration.
    """
    partial = partial_folder(folder)
    partial.parent.mkdir(parents=True, exist_ok=True)
    # A worker whose parent was killed may still be ending; the system frees its lock when it is gone.
    with FileLock(_lock_file(folder)):
        if done := read_done(folder, config, inputs):  # another process did it while this one waited
            return _summary(done)
        _prepare(partial, config, inputs)
        done = read_done(partial, config, inputs)
        if not done:
            begins()
            with _to_log(partial / "log.txt"):
                done = finish_run(executor, partial, inputs)
        shutil.rmtree(partial / WORK, ignore_errors=True)
        _delete(folder)
        os.replace(partial, folder)
    return _summary(done)


def _prepare(partial: Path, config: RunConfig, inputs: str) -> None:
    """Keep a partial folder that this run can go on from, empty one that is out of date, refuse a foreign one."""
    started = partial / WORK / "started.json"
    there, here = _config_if_readable(partial), config
    if there is not None:
        if there != here:
            name = next(f.name for f in dataclasses.fields(here) if getattr(there, f.name) != getattr(here, f.name))
            raise ValueError(
                f"{partial} belongs to another run: {name} is {getattr(there, name)!r} there and "
                f"{getattr(here, name)!r} here; move it away or delete it"
            )
        begun = _read_json(started)
        current = begun.get("inputs") == inputs and begun.get("started_at", 0) >= _fresh_since()
        if current or read_done(partial, config, inputs):
            return
    _delete(partial)
    write_text_atomic(partial / "config.json", json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    write_text_atomic(started, json.dumps({"inputs": inputs, "started_at": time.time()}) + "\n")


def _config_if_readable(partial: Path) -> RunConfig | None:
    try:
        return load_config(partial)
    except (FileNotFoundError, ValueError):  # nothing to go on with
        return None


def _read_json(path: Path) -> dict[str, Any]:
    """A small file of our own; empty when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _delete(folder: Path) -> None:
    """Remove a run's folder; first what marks it as done or as worth going on with, so that half of it is neither."""
    for mark in ("done.json", f"{WORK}/started.json"):
        (folder / mark).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def load_config(folder: Path) -> RunConfig:
    """The configuration of a run folder."""
    return RunConfig().replace(**json.loads((folder / "config.json").read_text(encoding="utf-8")))


def finish_run(executor: str, folder: Path, inputs: str) -> dict[str, Any]:
    """Do the run that a folder's config.json describes, in place, and write done.json last.

    Args:
        executor: `module:function`. folder: with a config.json. inputs: hash of modules and data.

    Returns:
        What done.json holds: hashes, `seconds` of the process that finished it, the sha256 of every file, and
        the executor's facts.
    """
    config = load_config(folder)
    module, name = executor.split(":")
    start = time.time()
    facts = getattr(importlib.import_module(module), name)(config, folder)
    for leftover in folder.rglob(".*.????????"):  # of an atomic write that was killed
        leftover.unlink()
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in UNCHECKED)
    sums = {p.relative_to(folder).as_posix(): file_sha256(p) for p in files if p.relative_to(folder).parts[0] != WORK}
    row = {"config_hash": config.hash(), "inputs_hash": inputs, "seconds": round(time.time() - start, 1)}
    row |= {"finished_at": time.time(), "files": sums, **facts}
    write_text_atomic(folder / "done.json", json.dumps(row, indent=1) + "\n")
    return row


def _summary(done: Mapping[str, Any]) -> str:
    """One line about a run, and one for each alarm of its collapse guard."""
    facts = ", ".join(f"{k} {v:.3f}" for k, v in done.items() if k.startswith("pass@1"))
    line = f"{facts}, {done['seconds']:.0f} s" if facts else f"{done['seconds']:.0f} s"
    return "\n".join([line, *(f"  WARNING: {text}" for text in done.get("alarms", []))])


# ---------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m rapo_lib.runs notebooks|html|slides|bare|worker`; see --help."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.runs", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("notebooks", help="execute the notebooks in order; finished ones are kept")
    p.add_argument("--profile", default="pocket", help=PROFILE_HELP)
    p.add_argument("--only", default="", help="numbers such as 05,06")
    p.add_argument("--jobs", type=int, help="training runs at once (default: the profile's)")
    p.add_argument("--fresh", action="store_true", help="do finished notebooks and their runs again")
    p.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    p.add_argument("--tokens-per-sec", type=float, help="for the hours of a dry run (default: an assumption)")
    for kind, what in (("html", "pages"), ("slides", "slides")):
        p = commands.add_parser(kind, help=f"write the executed notebooks as {what} that need no network")
        p.add_argument("--profile", default="pocket", choices=[*PROFILES, "reference"])
    p = commands.add_parser("bare", help="write the notebooks without prose and answers")
    p.add_argument("--profile", choices=list(PROFILES))
    p = commands.add_parser("worker", help="used by run_many")
    p.add_argument("executor")
    a = parser.parse_args(arguments)
    if a.command == "worker":
        work(a.executor)
        return 0
    sys.stdout.reconfigure(errors="backslashreplace")  # a path that the locale cannot write must not end the batch
    from rapo_lib import driver, pages

    if a.command == "bare":
        return pages.export_bare(a.profile)
    if a.command in pages.KINDS:
        return pages.export(a.command, a.profile)
    only = [x for x in a.only.split(",") if x]
    try:
        profile, chosen = load_profile(a.profile), driver.select_notebooks(only)
    except ValueError as e:
        parser.error(str(e))
    if a.dry_run:
        from rapo_lib import launch

        return launch.print_plans(profile, a.jobs, a.tokens_per_sec, [p.stem for p in chosen] if only else ())
    if profile.config("rapo").questions != "pocket":
        parser.error(
            f"the notebooks are about the pocket world, and profile {profile.name} is not; do its runs with "
            f"python -m rapo_lib.launch --profile {profile.name} --out FOLDER"
        )
    return driver.run_notebooks(profile, only=only, jobs=a.jobs, fresh=a.fresh)


if __name__ == "__main__":
    sys.exit(main())
