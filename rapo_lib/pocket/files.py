"""Where the shipped files lie, and their checksums: a damaged or swapped file is named when it is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rapo_lib.config import DATA
from rapo_lib.traces import write_text_atomic

POCKET = DATA / "pocket"
SUMS = "checksums.json"


def write_checksums(root: Path = POCKET) -> None:
    """sha256 of every file below root, into checksums.json."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != SUMS)
    sums = {p.relative_to(root).as_posix(): _sha256(p) for p in files}
    write_text_atomic(root / SUMS, json.dumps(sums, indent=1) + "\n")


def verify_checksums(root: Path = POCKET, below: str = "") -> None:
    """Compare files with their checksums.

    Args:
        root: folder that holds checksums.json. below: only files whose path begins so.

    Raises:
        ValueError: names the first file that is missing or differs, with both checksums.
    """
    sums = json.loads((root / SUMS).read_text(encoding="utf-8"))
    for name, want in ((n, s) for n, s in sums.items() if n.startswith(below)):
        got = _sha256(root / name) if (root / name).is_file() else "missing"
        if got != want:
            raise ValueError(
                f"{root / name}: sha256 is {got}, expected {want}; restore the file or run python -m rapo_lib.pocket"
            )


def checked(path: Path, root: Path = POCKET) -> Path:
    """The path of a file or folder, after comparing it with its checksums when it is a shipped one.

    Raises:
        ValueError: a shipped file that is missing or differs.
    """
    if path.is_relative_to(root):
        verify_checksums(root, path.relative_to(root).as_posix())
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
