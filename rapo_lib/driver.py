"""The notebooks in order: parameters, execution, and what need not be done again.

README explains this module. Papermill only logs an unknown parameter, turns a tuple into a string and
calls a run complete whose kernel left early; here each of these is an error. A notebook is done when its
executed copy carries the hashes of its code cells, of the profile and of library and data.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from filelock import FileLock, Timeout

from rapo_lib.config import ROOT, Profile
from rapo_lib.runs import advice, library_hash, results_folder
from rapo_lib.show import BATCH
from rapo_lib.study import time_line
from rapo_lib.traces import write_text_atomic

NOTEBOOKS = ROOT / "notebooks"
#: In a profile's folder while a `--fresh` batch is not finished: the moment at which it was begun.
FRESH = ".fresh"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class NotebookFailed(RuntimeError):
    """A notebook did not run to its end; the message names the cell and the error."""


# ---------------------------------------------------------------------------------------- one notebook


def plain_parameter(name: str, value: Any) -> Any:
    """A parameter as papermill can pass it on.

    Paths become strings, tuples lists, NumPy numbers Python numbers.

    Raises:
        TypeError: a value of another type.

    Example:
        >>> plain_parameter("grid", (0.0, np.float64(0.4)))
        [0.0, 0.4]
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [plain_parameter(name, v) for v in value]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: plain_parameter(name, v) for k, v in value.items()}
    raise TypeError(
        f"parameter {name} is a {type(value).__name__}; allowed: numbers, strings, paths, lists, dicts of these"
    )


def declared_parameters(nb: nbformat.NotebookNode) -> set[str]:
    """Names that a notebook's `parameters` cell assigns.

    Raises:
        ValueError: no such cell, or several.
    """
    cells = [c for c in nb.cells if c.cell_type == "code" and "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"{len(cells)} cells are tagged `parameters`; expected exactly one")
    body = ast.parse(cells[0].source).body
    targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in body if isinstance(n, ast.AnnAssign)]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def execute_notebook(
    source: Path,
    output: Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    stream: Callable[[str], None] | None = None,
) -> nbformat.NotebookNode:
    """Run a notebook in a kernel of its own, in its folder, and write the executed copy.

    Args:
        source: the notebook. output: where the executed copy goes, written cell by cell.
        parameters: values for names of its `parameters` cell.
        stream: gets what the cells print, as it comes.

    Returns:
        The executed notebook.

    Raises:
        ValueError: a parameter that the notebook does not declare.
        NotebookFailed: a cell failed, the kernel died, or a cell was never run.
    """
    nb = nbformat.read(source, as_version=4)
    wanted = {k: plain_parameter(k, v) for k, v in (parameters or {}).items()}
    declared = declared_parameters(nb)
    if unknown := sorted(set(wanted) - declared):
        raise ValueError(f"{source.name} has no parameter {unknown[0]!r}; it declares: {', '.join(sorted(declared))}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done, error = _papermill(nb, source, output, wanted, stream)
    if error:
        raise NotebookFailed(error)
    never = [
        i for i, c in enumerate(done.cells) if c.cell_type == "code" and c.source.strip() and c.execution_count is None
    ]
    if never or _left_early(done):
        raise NotebookFailed(
            f"cell {never[0] if never else len(done.cells)} was never run: the kernel left early (sys.exit?)"
        )
    return done


def _papermill(nb, source, output, parameters, stream) -> tuple[nbformat.NotebookNode, str]:
    """Papermill's own run; the second value says what went wrong."""
    import papermill
    from nbclient.exceptions import DeadKernelError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    with _kernel_environment():
        try:
            done = papermill.execute_notebook(
                nb,
                str(output).replace("{", "{{").replace("}", "}}"),  # papermill formats the path
                parameters,
                kernel_name="python3",
                progress_bar=False,
                cwd=source.parent,
                stdout_file=_Stream(stream) if stream else None,
                extra_arguments=["--log-level=CRITICAL"],  # its notes on TCP and on being stopped are noise
            )
        except papermill.PapermillExecutionError as e:
            trace = _ANSI.sub("", "\n".join(e.traceback[-1:] or [""])).splitlines()
            return nb, f"cell {e.cell_index}: {e.ename}: {e.evalue}\n" + "\n".join(trace[-25:])
        except DeadKernelError:
            return nb, "the kernel died (killed, or out of memory)"
    return done, ""


def _left_early(nb: nbformat.NotebookNode) -> bool:
    """Whether a cell asked the kernel to exit: IPython notes it in the error output or as SystemExit."""
    outputs = (o for c in nb.cells if c.cell_type == "code" for o in c.outputs)
    return any(o.output_type == "error" and o.ename == "SystemExit" for o in outputs)


class _Stream:
    """What papermill writes cell output to."""

    def __init__(self, to: Callable[[str], None]) -> None:
        self.write = to

    def flush(self) -> None:
        pass


@contextmanager
def _kernel_environment():
    """Variables that the kernel inherits; MPLBACKEND would turn inline figures off."""
    before = dict(os.environ)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1", "JUPYTER_PREFER_ENV_PATH": "1"}
    os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# -------------------------------------------------------------------------------------- all notebooks


def cells_hash(nb: nbformat.NotebookNode) -> str:
    """8 hex digits of a source notebook's code cells; prose may change freely."""
    code = [
        c.source for c in nb.cells if c.cell_type == "code" and "injected-parameters" not in c.metadata.get("tags", [])
    ]
    return hashlib.blake2b(json.dumps(code).encode(), digest_size=4).hexdigest()


def stamp_of(path: Path) -> dict[str, Any]:
    """The stamp in an executed copy, empty when there is none."""
    if not path.exists():
        return {}
    try:
        return dict(nbformat.read(path, as_version=4).metadata.get("rapo", {}))
    except (nbformat.reader.NotJSONError, json.JSONDecodeError, UnicodeDecodeError):
        return {}


def select_notebooks(only: Sequence[str], folder: Path = NOTEBOOKS) -> list[Path]:
    """The notebooks in order, or those whose names begin with an entry of `only`.

    Raises:
        ValueError: no notebook begins so.
    """
    every = sorted(folder.glob("*.ipynb"))
    for prefix in only:
        if not any(p.stem.startswith(prefix) for p in every):
            raise ValueError(f"no notebook begins with {prefix!r}; there are: {', '.join(p.stem for p in every)}")
    return [p for p in every if not only or any(p.stem.startswith(x) for x in only)]


def run_notebooks(
    profile: Profile,
    *,
    only: Sequence[str] = (),
    jobs: int | None = None,
    fresh: bool = False,
    folder: Path = NOTEBOOKS,
) -> int:
    """Run the notebooks that are not done, in order; one line each and a final table.

    Args:
        profile: how much is run. only: beginnings of file names; empty for all.
        jobs: training runs at once; None for the profile's number.
        fresh: do finished notebooks and their runs again; a fresh batch that was interrupted goes on. folder: where
            the notebooks are.

    Returns:
        0, or 1 when a notebook failed; the ones after it are not started.
    """
    out = results_folder() / profile.name
    out.mkdir(parents=True, exist_ok=True)
    try:
        notebooks = select_notebooks(only, folder)
        with FileLock(out / ".driver.lock", timeout=0), _settings(profile, _fresh_since(out, fresh)) as since:
            code = _run_all(profile, notebooks, out, jobs or profile.jobs, since)
            if code == 0:
                (out / FRESH).unlink(missing_ok=True)
            return code
    except Timeout:
        print(f"another run_all.sh is working in {out}; wait for it, or choose another profile", file=sys.stderr)
    except (ValueError, OSError) as e:
        print(f"{e}{advice(e)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ninterrupted; what is finished is kept, the same command goes on from here", file=sys.stderr)
        return 130
    return 1


def _fresh_since(out: Path, fresh: bool) -> float:
    """From when on results count: the moment at which the fresh batch that is not finished was begun, else 0."""
    mark = out / FRESH
    if fresh and not mark.exists():
        write_text_atomic(mark, str(time.time()))
    return float(mark.read_text(encoding="utf-8")) if fresh else 0.0


@contextmanager
def _settings(profile: Profile, since: float):
    """Variables of this batch for kernels and runs."""
    mine = {"RAPO_FRESH_SINCE": str(since)} if since else {}
    mine |= {"HF_HUB_OFFLINE": "1"} if profile.offline else {}
    mine |= {BATCH: "1"}
    before = {k: os.environ.get(k) for k in mine}
    os.environ |= mine
    try:
        yield since
    finally:
        for k, v in before.items():
            os.environ.pop(k)
            os.environ |= {k: v} if v is not None else {}


def _run_all(profile: Profile, notebooks: list[Path], out: Path, jobs: int, since: float) -> int:
    if not notebooks:
        print("there are no notebooks to run", file=sys.stderr)
        return 1
    print(f"profile {profile.name}: {profile.about}; results go to {_shown(out)}")
    print(time_line(profile, jobs, [p.stem for p in notebooks]), flush=True)
    library, rows = library_hash(), []
    for path in notebooks:
        rows.append(_run_one(path, out / "notebooks", profile, library, jobs, since))
        if rows[-1][1] == "failed":
            rows += [(p.stem, "not started", 0.0) for p in notebooks[len(rows) :]]
            break
    print(_final_table(rows))
    print(f"\nexecuted copies: {_shown(out / 'notebooks')}; ./run_all.sh lab opens them, html makes pages of them")
    return int(any(status == "failed" for _, status, _ in rows))


def _run_one(path: Path, out: Path, profile: Profile, library: str, jobs: int, since: float) -> tuple[str, str, float]:
    """(name, status, minutes) of one notebook; prints its line."""
    nb, copy = nbformat.read(path, as_version=4), out / path.name
    stamp = {"cells": cells_hash(nb), "profile": profile.hash(), "library": library, "after": _earlier(path, out)}
    old = stamp_of(copy)
    if {k: old.get(k) for k in stamp} == stamp and old["finished_at"] >= since:
        print(f"{path.stem:<32} there already")
        return path.stem, "there already", old["seconds"] / 60
    line, start = _Line(path.stem), time.time()
    running = out / f".{path.stem}.running.ipynb"
    parameters = {"profile": profile.name} | ({"jobs": jobs} if "jobs" in declared_parameters(nb) else {})
    try:
        done = execute_notebook(path, running, parameters, stream=line.show)
    except (NotebookFailed, ValueError) as e:
        failed = out / f"{path.stem}.failed.ipynb"
        if running.exists():
            os.replace(running, failed)
        line.end(f"FAILED after {_minutes(start)}")
        print(f"{e}\n(the notebook as far as it came: {_shown(failed)})", file=sys.stderr)
        return path.stem, "failed", (time.time() - start) / 60
    finally:
        if running.exists():
            running.unlink()
    _save_copy(done, copy, stamp | {"seconds": round(time.time() - start, 1), "finished_at": time.time()})
    (out / f"{path.stem}.failed.ipynb").unlink(missing_ok=True)
    line.end(f"done in {_minutes(start)}")
    return path.stem, "done", (time.time() - start) / 60


def _earlier(path: Path, out: Path) -> str:
    """For the report, which reads what the others made: a hash of their executed copies' stamps; else empty."""
    if not path.stem.startswith("99"):
        return ""
    others = [stamp_of(p) for p in sorted(out.glob("[0-9]*.ipynb")) if p.name < path.name and ".failed" not in p.name]
    return hashlib.blake2b(json.dumps(others, sort_keys=True).encode(), digest_size=4).hexdigest()


def _save_copy(nb: nbformat.NotebookNode, copy: Path, stamp: Mapping[str, Any]) -> None:
    """Write an executed copy whole, with its stamp and without this machine's paths and the widgets' state."""
    for key in ("input_path", "output_path", "environment_variables"):
        nb.metadata.get("papermill", {}).pop(key, None)
    nb.metadata.pop("widgets", None)
    nb.metadata["rapo"] = dict(stamp)
    text = nbformat.writes(nb).replace(json.dumps(str(ROOT))[1:-1], ".")
    temporary = copy.with_name(f".{copy.stem}.writing.ipynb")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, copy)


class _Line:
    """One line a notebook: updated in place on a terminal, printed once elsewhere."""

    def __init__(self, name: str) -> None:
        self.name, self.live = f"{name:<32} ", sys.stdout.isatty()
        if self.live:
            self._write("running")

    def _write(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{(self.name + text)[:width]}", end="", flush=True)

    def show(self, printed: str) -> None:
        lines = printed.strip().splitlines()
        if self.live and lines:
            self._write(lines[-1])

    def end(self, text: str) -> None:
        print(("\r\x1b[K" if self.live else "") + self.name + text, flush=True)


def _minutes(start: float) -> str:
    seconds = time.time() - start
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _final_table(rows: Iterable[tuple[str, str, float]]) -> str:
    lines = [f"{'notebook':<32} {'status':<14} {'minutes':>7}", "-" * 55]
    lines += [f"{name:<32} {status:<14} {minutes:>7.1f}" for name, status, minutes in rows]
    return "\n" + "\n".join(lines)
