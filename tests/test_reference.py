"""The committed results: made from the notebooks as they stand, small enough, and shown in README as they are."""

from __future__ import annotations

import json

import nbformat
import pytest

from rapo_lib.config import ROOT
from rapo_lib.driver import NOTEBOOKS, cells_hash
from rapo_lib.reference import MAX_BYTES, README_BLOCK, REFERENCE, collect, set_readme


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((REFERENCE / "MANIFEST.json").read_text(encoding="utf-8"))


@pytest.mark.case(39, 40)
def test_executed_copies_were_made_from_the_notebooks_as_they_stand(manifest):
    sources = {p.stem: cells_hash(nbformat.read(p, as_version=4)) for p in NOTEBOOKS.glob("*.ipynb")}
    assert manifest["notebooks"] == sources
    for name in sources:
        copy = nbformat.read(REFERENCE / "notebooks" / f"{name}.ipynb", as_version=4)
        assert cells_hash(copy) == sources[name]
        assert all(c.execution_count for c in copy.cells if c.cell_type == "code" and c.source.strip())


def test_reference_is_at_most_30_mb():
    assert sum(p.stat().st_size for p in REFERENCE.rglob("*") if p.is_file()) <= MAX_BYTES


def test_readme_shows_the_reference_table_as_it_is():
    block = README_BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert (REFERENCE / "tables" / "readme.md").read_text(encoding="utf-8").strip() in block


def test_every_figure_that_readme_shows_is_there():
    import re

    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path


def test_a_profile_that_was_not_run_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="run ./run_all.sh --profile smoke first"):
        collect("smoke", tmp_path / "nothing", tmp_path / "target")


def test_a_readme_without_marks_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks the marks"):
        set_readme("| a |", tmp_path / "README.md")
