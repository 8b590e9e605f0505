"""What `./run_all.sh browser` does before a browser is there; the rest is tried by the command itself, in CI too."""

import importlib.util
import os
import shutil

import nbformat
import pytest

from rapo_lib.config import ROOT

spec = importlib.util.spec_from_file_location("browser_run", ROOT / "tests" / "browser" / "run.py")
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_copy_differs_by_its_profile_alone(path, tmp_path):
    run.smoke_copy(path, tmp_path / "notebooks")
    was, copy = (nbformat.read(p, as_version=4).cells for p in (path, tmp_path / "notebooks" / path.name))
    changed = [(a.source, b.source) for a, b in zip(was, copy, strict=True) if a.source != b.source]
    assert len(changed) == 1 and changed[0][0].replace('profile = "pocket"', 'profile = "smoke"') == changed[0][1]


def test_a_notebook_without_a_profile_is_refused(tmp_path):
    cell = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    with pytest.raises(ValueError, match="a.ipynb: the parameters cell has 0 lines"):
        run.smoke_copy(tmp_path / "a.ipynb", tmp_path / "copies")


def test_without_chromium_the_command_says_that_it_is_skipped(monkeypatch, capsys):
    monkeypatch.delenv("RAPO_CHROMIUM", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run.main([]) == 77
    assert "skipped: no Chromium here" in capsys.readouterr().out


def test_the_chromium_that_is_named_is_taken_or_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RAPO_CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="which is no program; name one"):
        run.find_chromium()
    (tmp_path / "mine").write_text("#!/bin/sh", encoding="utf-8")
    os.chmod(tmp_path / "mine", 0o755)
    monkeypatch.setenv("RAPO_CHROMIUM", str(tmp_path / "mine"))
    assert run.find_chromium() == str(tmp_path / "mine")


def test_an_unknown_notebook_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["77"])
    assert "no notebook begins with '77'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "foreign"),
    [
        ("http://127.0.0.1:8888/api", False),
        ("ws://127.0.0.1:8888/api/kernels", False),
        ("data:image/png;base64,AA", False),
        ("https://cdn.jsdelivr.net/x.js", True),
    ],
)
def test_requests_to_other_machines_are_told_apart(url, foreign):
    assert run._is_foreign(url, "http://127.0.0.1:8888") == foreign
