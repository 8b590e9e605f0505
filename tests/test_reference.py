"""The committed results: made from the notebooks as they stand, small enough, and shown in README as they are."""

from __future__ import annotations

import io
import shutil
from base64 import b64decode, b64encode
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from rapo_lib.config import ROOT
from rapo_lib.driver import NOTEBOOKS, cells_hash
from rapo_lib.reference import (
    MAX_BYTES,
    README_BLOCK,
    REFERENCE,
    _copy_notebook,
    add,
    collect,
    main,
    read_manifest,
    set_readme,
    take_over_prose,
    verify_reference,
    write_manifest,
)


@pytest.fixture(scope="module")
def manifest() -> dict:
    return read_manifest()


@pytest.mark.case(39, 40)
def test_executed_copies_were_made_from_the_notebooks_as_they_stand(manifest):
    sources = {p.stem: cells_hash(nbformat.read(p, as_version=4)) for p in NOTEBOOKS.glob("*.ipynb")}
    assert manifest["notebooks"] == sources
    for name in sources:
        copy = nbformat.read(REFERENCE / "notebooks" / f"{name}.ipynb", as_version=4)
        assert cells_hash(copy) == sources[name]
        assert all(c.execution_count for c in copy.cells if c.cell_type == "code" and c.source.strip())
        prose = [
            c.source for c in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells if c.cell_type != "code"
        ]
        assert [c.source for c in copy.cells if c.cell_type != "code"] == prose, "python -m rapo_lib.reference --prose"
        as_executed = copy.metadata["rapo"]["cells"] == sources[name]
        assert as_executed == (name not in manifest.get("code_since", {}))


def test_every_file_has_the_sum_that_the_manifest_says():
    assert verify_reference() == sum(p.is_file() for p in REFERENCE.rglob("*")) - 1  # MANIFEST.json itself


@pytest.fixture
def collected(tmp_path):
    """A small folder of results with its manifest."""
    for name, text in (("tables/a.csv", "1,2"), ("tables/b.csv", "3,4"), ("runs/x/done.json", "{}")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_manifest(tmp_path, {"profile": "smoke"})
    return tmp_path


def test_a_manifest_keeps_what_it_says_when_its_sums_are_written_again(collected):
    first = read_manifest(collected)
    assert list(first) == ["profile", "files"] and list(first["files"]) == [
        "runs/x/done.json",
        "tables/a.csv",
        "tables/b.csv",
    ]
    assert write_manifest(collected, first) == first == read_manifest(collected)
    assert verify_reference(collected) == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: (d / "tables/a.csv").write_text("1,", encoding="utf-8"),
            r"tables/a.csv: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}",
        ),
        (
            lambda d: (d / "tables/a.csv").write_text("1,3", encoding="utf-8"),
            r"tables/a.csv: sha256 is [0-9a-f]{64}, expected",
        ),
        (
            lambda d: (d / "tables/a.csv").write_text("3,4", encoding="utf-8"),
            r"a.csv: sha256 is [0-9a-f]{64} \(that of tables/b.csv\), exp",
        ),
        (lambda d: (d / "runs/x/done.json").unlink(), "runs/x/done.json: sha256 is missing, expected [0-9a-f]{64}"),
        (
            lambda d: (d / "tables/c.csv").write_text("", encoding="utf-8"),
            "tables/c.csv is there, but no such file is expected; remove it",
        ),
        (lambda d: (d / "MANIFEST.json").unlink(), "MANIFEST.json is missing; restore"),
        (
            lambda d: (d / "MANIFEST.json").write_text('{"fil', encoding="utf-8"),
            "MANIFEST.json is damaged: expected JSON",
        ),
        (
            lambda d: (d / "MANIFEST.json").write_text("[]", encoding="utf-8"),
            r"MANIFEST.json is damaged: expected an object, found \[\]",
        ),
        (
            lambda d: (d / "MANIFEST.json").write_text("{}", encoding="utf-8"),
            "holds no sums of files .*reference --sums",
        ),
    ],
)
def test_damage_is_named_with_both_sums(collected, damage, message):
    damage(collected)
    with pytest.raises(ValueError, match=message):
        verify_reference(collected)


def test_the_command_checks_and_fails_with_the_file(collected, monkeypatch, capsys):
    monkeypatch.setattr("rapo_lib.reference.REFERENCE", collected)
    main(["--check"])
    assert "3 files in" in capsys.readouterr().out
    (collected / "tables/a.csv").write_text("other", encoding="utf-8")
    with pytest.raises(SystemExit, match="1"):
        main(["--check"])
    assert "tables/a.csv: sha256 is" in capsys.readouterr().err
    main(["--sums"])
    main(["--check"])
    with pytest.raises(SystemExit, match="2"):
        main([])


def cell(kind, source, key, **metadata):
    made = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
    return made(source, id=key, metadata=metadata)


def test_prose_is_taken_over_and_outputs_stay(tmp_path):
    parameters = cell("code", "a = 1", "c1", tags=["parameters"])
    old = [cell("markdown", "old", "m1", papermill={"x": 1}), parameters]
    old += [cell("code", "a = 2", "c0", tags=["injected-parameters"]), cell("code", "print(a)", "c2")]
    old[3].outputs = [nbformat.v4.new_output("stream", text="2\n")]
    new = [cell("markdown", "new", "m1"), parameters, cell("markdown", "more", "m2"), cell("code", "print(a)", "c2")]
    source, copy = tmp_path / "00_a.ipynb", tmp_path / "reference" / "notebooks" / "00_a.ipynb"
    copy.parent.mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=old), copy)
    nbformat.write(nbformat.v4.new_notebook(cells=new), source)
    write_manifest(tmp_path / "reference", {})
    assert take_over_prose([source], tmp_path / "reference") == ["00_a"]
    cells = nbformat.read(copy, as_version=4).cells
    assert [c.source for c in cells] == ["new", "a = 1", "a = 2", "more", "print(a)"]
    assert cells[0].metadata == {"papermill": {"x": 1}} and cells[4].outputs[0].text == "2\n"
    assert verify_reference(tmp_path / "reference") == 1
    assert take_over_prose([source], tmp_path / "reference") == []
    new[3].source = "print(a + 1)"
    nbformat.write(nbformat.v4.new_notebook(cells=new), source)
    with pytest.raises(ValueError, match="00_a.ipynb was executed with other code than .* has; execute and collect"):
        take_over_prose([source], tmp_path / "reference")


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


def test_a_notebook_that_was_executed_later_is_added_and_the_rest_stays(tmp_path):
    source, target = tmp_path / "study", tmp_path / "reference"
    name = "00_start_here"
    shutil.copytree(REFERENCE, target)
    write_manifest(target, read_manifest(target) | {"code_since": {name: "a line", "01_x": "another"}})
    (target / "notebooks" / f"{name}.ipynb").write_text("older", encoding="utf-8")
    (source / "notebooks").mkdir(parents=True)
    shutil.copy(REFERENCE / "notebooks" / f"{name}.ipynb", source / "notebooks")
    (old,) = list(REFERENCE.glob("runs/*/rapo/seed0-*"))[:1]
    for folder in (old.name, "seed7-0123abcd"):
        shutil.copytree(old, source / "runs" / "later" / "rapo" / folder)
    (source / "figures").mkdir()
    (source / "figures" / "00_new.png").write_bytes(b"picture")
    before = read_manifest(target)
    manifest = add("study", ["00"], source, target)
    assert manifest["runs"] == before["runs"] + 1 and manifest["added"].keys() >= {name}
    assert manifest["code_since"] == {"01_x": "another"}
    assert manifest["notebooks"] == before["notebooks"] and manifest["commit"] == before["commit"]
    new = {p for p in manifest["files"] if p not in before["files"]}
    assert "figures/00_new.png" in new and {Path(p).parent.name for p in new} == {"figures", "seed7-0123abcd"}
    assert verify_reference(target) == len(manifest["files"])
    assert {p: manifest["files"][p] for p in before["files"]} == before["files"]
    with pytest.raises(ValueError, match="not executed in their present form: 01_.*; run ./run_all.sh --profile study"):
        add("study", ["01"], source, target)


def test_a_copied_notebook_keeps_all_but_the_bytes_of_its_pictures(tmp_path):
    source = next(
        p for p in sorted(REFERENCE.glob("notebooks/*.ipynb")) if '"image/png"' in p.read_text(encoding="utf-8")
    )
    drawn = io.BytesIO()
    Image.linear_gradient("L").convert("RGBA").save(drawn, "PNG", pnginfo=None)
    notebook = nbformat.read(source, as_version=4)
    pictures = [o["data"] for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
    pictures[0]["image/png"] = b64encode(drawn.getvalue()).decode()
    nbformat.write(notebook, tmp_path / "a.ipynb")
    _copy_notebook(tmp_path / "a.ipynb", tmp_path / "b.ipynb")
    copy = nbformat.read(tmp_path / "b.ipynb", as_version=4)
    slim = [o["data"] for c in copy.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert all(Image.open(io.BytesIO(b64decode(d["image/png"]))).mode == "P" for d in slim)
    for one, other in zip(pictures, slim, strict=True):
        one["image/png"] = other["image/png"]
    assert copy == notebook
