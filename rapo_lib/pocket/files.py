"""Where the shipped files lie, and their checksums: a damaged or swapped file is named when it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from rapo_lib.config import DATA
from rapo_lib.traces import file_sha256, write_text_atomic

POCKET = DATA / "pocket"
SUMS = "checksums.json"


def write_checksums(root: Path = POCKET) -> None:
    """sha256 of every file below root, into checksums.json."""
    write_text_atomic(root / SUMS, json.dumps(checksums(root, SUMS), indent=1) + "\n")


def checksums(root: Path, without: str) -> dict[str, str]:
    """sha256 of every file below a folder but one, by its path there; hidden files and caches do not count."""
    return {name: file_sha256(root / name) for name in _names(root) if name != without}


def verify_checksums(root: Path = POCKET, below: str = "") -> None:
    """Compare files with their checksums.

    Args:
        root: folder that holds checksums.json. below: a file or folder there; empty for all of root.

    Raises:
        ValueError: names the first file that differs, is missing or is not one of them, with what was expected.
    """
    remedy = "restore data/pocket/ from the repository, or rebuild it with python -m rapo_lib.pocket"
    compare_checksums(root, _read_sums(root, remedy), SUMS, remedy, below)


def compare_checksums(root: Path, sums: Mapping[str, str], without: str, remedy: str, below: str = "") -> None:
    """Compare the files below a folder with given checksums.

    Args:
        root: the folder. sums: path below root -> sha256. without: the file that holds the sums.
        remedy: what to do, ends each message. below: a file or folder in root; empty for all of it.

    Raises:
        ValueError: names the first file that differs, is missing or is not in `sums`, with what was expected.
    """
    inside = [n for n in sums if not below or n == below or n.startswith(f"{below}/")]
    if below and not inside:
        beside = sorted({n.rpartition("/")[2] for n in sums if n.rpartition("/")[0] == below.rpartition("/")[0]})
        raise ValueError(
            f"{root / below} is none of the files that belong there ({', '.join(beside) or 'none in that folder'}); "
            f"keep files of your own elsewhere, or {remedy}"
        )
    for name in inside:
        got = file_sha256(root / name) if (root / name).is_file() else "missing"
        if got != sums[name]:
            twin = next((f" (that of {n})" for n, s in sums.items() if s == got), "")
            raise ValueError(f"{root / name}: sha256 is {got}{twin}, expected {sums[name]}; {remedy}")
    if (root / below).is_dir():
        for name in (n for n in _names(root / below) if n != without):
            full = f"{below}/{name}" if below else name
            if full not in sums:
                raise ValueError(f"{root / full} is there, but no such file is expected; remove it, or {remedy}")


def checked(path: Path, root: Path | None = None) -> Path:
    """The path of a file or folder, after comparing it with its checksums when it is a shipped one.

    Args:
        path: any file or folder. root: the shipped folder; None: data/pocket/.

    Raises:
        ValueError: a shipped file that is missing or differs, or a file that does not belong there.
    """
    root = (root or POCKET).resolve()
    real = path.resolve()
    if real.is_relative_to(root):
        below = real.relative_to(root).as_posix()
        verify_checksums(root, "" if below == "." else below)
    return path


def _read_sums(root: Path, remedy: str) -> dict[str, str]:
    path = root / SUMS
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path} is missing: the files beside it cannot be checked; {remedy}") from None
    except ValueError as e:
        raise ValueError(f"{path} is damaged: expected JSON, found {e}; {remedy}") from None
    if not isinstance(sums, dict) or not sums:
        raise ValueError(f"{path} is damaged: expected an object of paths and sums, found {sums!r:.80}; {remedy}")
    for name, value in sums.items():
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            raise ValueError(f"{path} is damaged: {name} has {value!r:.80}, expected 64 hex digits; {remedy}")
    return sums


def _names(root: Path) -> list[str]:
    found = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
    return sorted(p.as_posix() for p in found if not any(x.startswith(".") or x == "__pycache__" for x in p.parts))
