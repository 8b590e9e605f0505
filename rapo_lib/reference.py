"""Collect the committed results: `python -m rapo_lib.reference PROFILE` fills results/reference/.

It copies what a finished profile left (executed notebooks, tables, figures, the metrics of its runs, the
rollouts of two runs), writes MANIFEST.json with the sha256 of each file beside them, and sets the result table of
README.md. `--check` compares the files with their sums, `--sums` writes the sums of the files as they are, `--prose`
takes over what was written anew in notebooks whose code is the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
import torch

from rapo_lib.config import PROFILES, RESULTS, ROOT
from rapo_lib.driver import cells_hash, select_notebooks, stamp_of
from rapo_lib.plots import with_palette
from rapo_lib.pocket.files import checksums, compare_checksums
from rapo_lib.traces import write_text_atomic

REFERENCE = RESULTS / "reference"
MANIFEST = "MANIFEST.json"
PACKAGES = ("torch", "transformers", "trl", "peft", "faiss-cpu", "pydantic-monty", "papermill", "jupyterlab", "pandas")
RUN_FILES = ("config.json", "metrics.parquet", "evals.parquet", "final.parquet", "done.json")
#: Variants whose first seed keeps its rollouts.
WITH_ROLLOUTS = ("grpo", "rapo")
README_BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
MAX_BYTES = 30_000_000


def collect(profile: str, source: Path | None = None, target: Path = REFERENCE) -> dict[str, Any]:
    """Copy a finished profile's results and write their manifest.

    Args:
        profile: which one. source: its results folder. target: where the copy goes.

    Returns:
        The manifest.

    Raises:
        ValueError: a notebook has not been executed in its present form, or the copy is above 30 MB.
    """
    source = source or RESULTS / profile
    notebooks, stamps = _executed(profile, select_notebooks(()), source)
    shutil.rmtree(target, ignore_errors=True)
    for name in notebooks:
        _copy_notebook(source / "notebooks" / f"{name}.ipynb", target / "notebooks" / f"{name}.ipynb")
    for folder in ("tables", "figures"):
        shutil.copytree(source / folder, target / folder)
    runs = sorted(p.parent for p in (source / "runs").rglob("done.json"))
    for run in runs:
        _copy_run(run, target / run.relative_to(source))
    return write_manifest(target, make_manifest(profile, notebooks, stamps, runs))


def add(profile: str, only: Sequence[str], source: Path | None = None, target: Path = REFERENCE) -> dict[str, Any]:
    """Copy some notebooks that were executed later, their figures, and the runs that are not there yet.

    The rest stays as it was; the manifest names the commit of each added notebook. Its `code_since` names the copies
    of which a part was changed after they were executed, and says which: lines, figures drawn again from the same runs,
    a cell executed alone; no number of a run differs, and the stamp keeps the hash of the cells that were executed.

    Args:
        profile: which one. only: beginnings of the notebooks' names. source: its results folder. target: where
            collected results lie.

    Returns:
        The manifest.

    Raises:
        ValueError: a notebook has not been executed in its present form, or is not there.
    """
    source, manifest = source or RESULTS / profile, read_manifest(target)
    notebooks, stamps = _executed(profile, select_notebooks(only), source)
    for name in notebooks:
        _copy_notebook(source / "notebooks" / f"{name}.ipynb", target / "notebooks" / f"{name}.ipynb")
        for figure in (source / "figures").glob(f"{name.split('_')[0]}_*"):
            _copy(figure, target / "figures" / figure.name)
    there = {p.parent.name for p in (target / "runs").rglob("done.json")}
    runs = sorted(p.parent for p in (source / "runs").rglob("done.json") if p.parent.name not in there)
    for run in runs:
        _copy_run(run, target / run.relative_to(source))
    manifest["notebooks"] |= notebooks
    manifest["seconds"] |= {name: stamp["seconds"] for name, stamp in stamps.items()}
    manifest["added"] = manifest.get("added", {}) | dict.fromkeys(notebooks, _commit())
    manifest["code_since"] = {n: what for n, what in manifest.get("code_since", {}).items() if n not in notebooks}
    manifest["runs"] += len(runs)
    return write_manifest(target, manifest)


def take_over_prose(sources: Sequence[Path], target: Path = REFERENCE) -> list[str]:
    """Give executed copies the prose of their notebooks, and write the sums of the files anew.

    Returns:
        The names of the copies that changed.

    Raises:
        ValueError: a notebook whose code cells are not those of its executed copy.
    """
    changed = []
    for source in sources:
        path = target / "notebooks" / source.name
        new, old = nbformat.read(source, as_version=4), nbformat.read(path, as_version=4)
        if cells_hash(new) != cells_hash(old):
            raise ValueError(f"{path} was executed with other code than {source} has; execute and collect it again")
        cells = with_outputs(new.cells, old.cells)
        if cells != old.cells:
            old.cells = cells
            write_text_atomic(path, nbformat.writes(old) + "\n")
            changed.append(source.stem)
    write_manifest(target, read_manifest(target))
    return changed


def with_outputs(source: Sequence[Any], executed: Sequence[Any]) -> list[Any]:
    """A notebook's cells in its order: its prose, and the code cells of its executed copy, papermill's among them."""
    code = iter([c for c in executed if c.cell_type == "code"])
    known = {c.id: c for c in executed if c.cell_type != "code"}
    cells: list[Any] = []
    for cell in source:
        if cell.cell_type == "code":
            cells.append(next(code))
        else:  # papermill's metadata stay
            cells.append(nbformat.from_dict(known.get(cell.id, cell) | {"source": cell.source}))
        if "parameters" in cell.metadata.get("tags", ()):
            cells += [next(code) for c in executed if "injected-parameters" in c.metadata.get("tags", ())]
    return cells


def _executed(profile: str, notebooks: Sequence[Path], source: Path) -> tuple[dict[str, str], dict[str, dict]]:
    """Hash of the code cells and stamp of each notebook's executed copy; ValueError when one is missing or stale."""
    hashes = {p.stem: cells_hash(nbformat.read(p, as_version=4)) for p in notebooks}
    stamps = {name: stamp_of(source / "notebooks" / f"{name}.ipynb") for name in hashes}
    stale = [name for name, h in hashes.items() if stamps[name].get("cells") != h]
    if stale:
        raise ValueError(
            f"not executed in their present form: {', '.join(stale)}; run ./run_all.sh --profile {profile} first"
        )
    return hashes, stamps


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def _copy_notebook(path: Path, to: Path) -> None:
    """Copy an executed notebook, its pictures in 256 colours each as the saved figures are."""
    notebook = nbformat.read(path, as_version=4)
    for output in (o for c in notebook.cells for o in c.get("outputs", ())):
        if picture := output.get("data", {}).get("image/png"):
            output["data"]["image/png"] = b64encode(with_palette(b64decode(picture))).decode()
    write_text_atomic(to, nbformat.writes(notebook) + "\n")


def _copy_run(run: Path, to: Path) -> None:
    for name in RUN_FILES:
        if (run / name).exists():
            _copy(run / name, to / name)
    if run.parent.name in WITH_ROLLOUTS and run.name.startswith("seed0-"):
        _copy(run / "rollouts.jsonl", to / "rollouts.jsonl")


def make_manifest(profile: str, notebooks: dict[str, str], stamps: dict[str, dict], runs: list[Path]) -> dict[str, Any]:
    """Where the results come from: commit, versions, device, seeds, seconds, the hash of each notebook's code cells."""
    seeds = sorted({json.loads((r / "config.json").read_text(encoding="utf-8"))["seed"] for r in runs})
    return {
        "profile": profile,
        "about": PROFILES[profile].about,
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in PACKAGES},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "machine": platform.machine(),
        "runs": len(runs),
        "seeds": seeds,
        "seconds": {name: s.get("seconds") for name, s in stamps.items()},
        "notebooks": notebooks,
    }


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.strip()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write MANIFEST.json with the sha256 of every other file of the folder, and return it.

    Raises:
        ValueError: the folder is above 30 MB.
    """
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    if size > MAX_BYTES:
        raise ValueError(f"{folder} has {size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB are committed")
    manifest = {k: v for k, v in manifest.items() if k != "files"} | {"files": checksums(folder, MANIFEST)}
    write_text_atomic(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_manifest(folder: Path = REFERENCE) -> dict[str, Any]:
    """MANIFEST.json of collected results.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{folder / MANIFEST} is missing; {_remedy(folder)}") from None
    except ValueError as e:
        raise ValueError(f"{folder / MANIFEST} is damaged: expected JSON, found {e}; {_remedy(folder)}") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{folder / MANIFEST} is damaged: expected an object, found {manifest!r:.80}")
    return manifest


def verify_reference(folder: Path = REFERENCE) -> int:
    """Compare collected results with the sums in their manifest.

    Args:
        folder: where they lie.

    Returns:
        The number of files.

    Raises:
        ValueError: names the first file that differs, is missing or is not expected, with both sums.
    """
    sums = read_manifest(folder).get("files")
    if not isinstance(sums, dict) or not sums:
        raise ValueError(
            f"{folder / MANIFEST} holds no sums of files (`files` is {sums!r:.40}); {_remedy(folder)}, or run "
            "python -m rapo_lib.reference --sums when you know that the files are right"
        )
    compare_checksums(folder, sums, MANIFEST, _remedy(folder))
    return len(sums)


def _remedy(folder: Path) -> str:
    return f"restore {folder.name}/ from the repository, or collect it again with python -m rapo_lib.reference PROFILE"


def set_readme(table: str, readme: Path = ROOT / "README.md") -> None:
    """Put the result table between README's two marks.

    Raises:
        ValueError: the marks are missing.
    """
    text = readme.read_text(encoding="utf-8")
    if not README_BLOCK.search(text):
        raise ValueError(f"{readme} lacks the marks <!-- results --> and <!-- /results -->")
    write_text_atomic(readme, README_BLOCK.sub(lambda m: m[1] + table.strip() + "\n" + m[2], text))


def main(arguments: list[str] | None = None) -> None:
    """`python -m rapo_lib.reference PROFILE [--only LIST] | --check | --sums | --prose`."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.reference", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("profile", nargs="?", choices=PROFILES, help="collect the results of this profile")
    what.add_argument("--check", action="store_true", help="compare the files with the sums in MANIFEST.json")
    what.add_argument("--sums", action="store_true", help="write the sums of the files as they are into MANIFEST.json")
    what.add_argument("--prose", action="store_true", help="take over prose of notebooks whose code is the same")
    parser.add_argument("--only", default="", help="with a profile: add these notebooks, such as 08, keep the rest")
    a = parser.parse_args(arguments)
    if a.only and not a.profile:
        parser.error("--only goes with a profile")
    if a.profile:
        manifest = add(a.profile, a.only.split(",")) if a.only else collect(a.profile)
        print(json.dumps({k: v for k, v in manifest.items() if k != "files"}, indent=1))
        set_readme((REFERENCE / "tables" / "readme.md").read_text(encoding="utf-8"))
        return
    try:
        if a.prose:
            print("new prose in:", ", ".join(take_over_prose(select_notebooks([]))) or "none")
        if a.sums:
            write_manifest(REFERENCE, read_manifest(REFERENCE))
        print(f"{verify_reference(REFERENCE)} files in {REFERENCE} have the sums of {MANIFEST}")
    except ValueError as e:
        parser.exit(1, f"{e}\n")


if __name__ == "__main__":
    main()
