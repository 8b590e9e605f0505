"""Collect the committed results: `python -m rapo_lib.reference PROFILE` fills results/reference/.

It copies what a finished profile left (executed notebooks, tables, figures, the metrics of its runs, the
rollouts of two runs), writes MANIFEST.json beside them, and sets the result table of README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
import torch

from rapo_lib.config import PROFILES, RESULTS, ROOT
from rapo_lib.driver import NOTEBOOKS, cells_hash, stamp_of
from rapo_lib.traces import write_text_atomic

REFERENCE = RESULTS / "reference"
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
    notebooks = {p.stem: cells_hash(nbformat.read(p, as_version=4)) for p in sorted(NOTEBOOKS.glob("*.ipynb"))}
    stamps = {name: stamp_of(source / "notebooks" / f"{name}.ipynb") for name in notebooks}
    stale = [name for name, h in notebooks.items() if stamps[name].get("cells") != h]
    if stale:
        raise ValueError(
            f"not executed in their present form: {', '.join(stale)}; run ./run_all.sh --profile {profile} first"
        )
    shutil.rmtree(target, ignore_errors=True)
    for name in notebooks:
        _copy(source / "notebooks" / f"{name}.ipynb", target / "notebooks" / f"{name}.ipynb")
    for folder in ("tables", "figures"):
        shutil.copytree(source / folder, target / folder)
    runs = sorted(p.parent for p in (source / "runs").rglob("done.json"))
    for run in runs:
        _copy_run(run, target / run.relative_to(source))
    manifest = make_manifest(profile, notebooks, stamps, runs)
    write_text_atomic(target / "MANIFEST.json", json.dumps(manifest, indent=1) + "\n")
    size = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
    if size > MAX_BYTES:
        raise ValueError(f"{target} has {size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB are committed")
    return manifest


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def _copy_run(run: Path, to: Path) -> None:
    for name in RUN_FILES:
        if (run / name).exists():
            _copy(run / name, to / name)
    if run.parent.name in WITH_ROLLOUTS and run.name.startswith("seed0-"):
        _copy(run / "rollouts.jsonl", to / "rollouts.jsonl")


def make_manifest(profile: str, notebooks: dict[str, str], stamps: dict[str, dict], runs: list[Path]) -> dict[str, Any]:
    """Where the results come from: commit, versions, device, seeds, seconds, the hash of each notebook's code cells."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout.strip()
    seeds = sorted({json.loads((r / "config.json").read_text(encoding="utf-8"))["seed"] for r in runs})
    return {
        "profile": profile,
        "about": PROFILES[profile].about,
        "commit": commit,
        "python": platform.python_version(),
        "versions": {p: version(p) for p in PACKAGES},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "machine": platform.machine(),
        "runs": len(runs),
        "seeds": seeds,
        "seconds": {name: s.get("seconds") for name, s in stamps.items()},
        "notebooks": notebooks,
    }


def set_readme(table: str, readme: Path = ROOT / "README.md") -> None:
    """Put the result table between README's two marks.

    Raises:
        ValueError: the marks are missing.
    """
    text = readme.read_text(encoding="utf-8")
    if not README_BLOCK.search(text):
        raise ValueError(f"{readme} lacks the marks <!-- results --> and <!-- /results -->")
    write_text_atomic(readme, README_BLOCK.sub(lambda m: m[1] + table.strip() + "\n" + m[2], text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.reference", description=__doc__)
    parser.add_argument("profile", choices=PROFILES)
    print(json.dumps(collect(parser.parse_args().profile), indent=1))
    set_readme((REFERENCE / "tables" / "readme.md").read_text(encoding="utf-8"))
