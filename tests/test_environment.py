"""Dependency files agree, and the one command refuses what it does not know."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rapo_lib.config import PROFILES, ROOT

USERS_PACKAGES = [
    "jupyterlab",
    "papermill",
    "torch",
    "transformers",
    "peft",
    "trl",
    "faiss-cpu",
    "matplotlib",
    "pandas",
    "seaborn",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8").split()
PINS = {canonicalize_name(name): pin for name, pin in (line.split("==") for line in LOCK)}
#: Imports that a package of another name provides.
PROVIDED_BY = {
    "PIL": "pillow",
    "faiss": "faiss-cpu",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "pydantic_monty": "pydantic-monty",
    "IPython": "ipython",
}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout
    return [ROOT / n for n in names.split("\0") if n and (ROOT / n).is_file()]


def test_lock_file_is_exact_and_local_tags_are_absent():
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in LOCK)
    assert len(PINS) == len(LOCK) and PINS["torch"] == "2.13.0"


def test_the_lock_file_satisfies_the_ranges():
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        pin = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} against {pin} in requirements-lock.txt"


def test_the_users_ten_packages_are_core_dependencies():
    core = {canonicalize_name(Requirement(d).name) for d in PROJECT["dependencies"]}
    assert set(USERS_PACKAGES) <= core
    assert [str(Requirement(d).specifier) for d in PROJECT["dependencies"] if d.startswith("trl")] == ["<1.17,>=1.16"]


def test_environment_yml_is_python_and_the_lock_file():
    env = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert env["dependencies"] == ["python=3.11", "pip", {"pip": ["-r requirements-lock.txt", "-e ."]}]
    assert PROJECT["requires-python"] == ">=3.11.5"


def test_every_import_of_the_library_and_tests_is_declared():
    declared = {canonicalize_name(Requirement(d).name) for d in PROJECT["dependencies"]}
    for group in PROJECT["optional-dependencies"].values():
        declared |= {canonicalize_name(Requirement(d).name) for d in group}
    brought = {"pyyaml", "packaging", "ipython", "requests", "jupyter-client"}  # by core dependencies, in the lock file
    declared |= brought
    ours = {"rapo_lib", "tests"} | {p.stem for p in ROOT.glob("tests/*.py")}
    for path in [*ROOT.glob("rapo_lib/**/*.py"), *ROOT.glob("tests/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for top in {m.split(".")[0] for m in modules} - set(sys.stdlib_module_names) - ours:
                assert canonicalize_name(PROVIDED_BY.get(top, top)) in declared, f"{path.name} imports {top}"


def test_installed_versions_are_those_of_the_lock_file():
    stamp = Path(sys.prefix) / ".rapo-stamp"
    if not stamp.exists():
        pytest.skip("this environment was not made by run_all.sh")
    wrong = {n: (version(n), pin) for n, pin in PINS.items() if version(n).split("+")[0] != pin}
    assert not wrong


def test_no_registry_is_named_in_tracked_files():
    hosts = [
        ".".join(parts)
        for parts in (("pypi", "org"), ("files", "pythonhosted"), ("registry", "npmjs"), ("deb", "debian"))
    ]
    pattern = re.compile("|".join(map(re.escape, hosts)).encode(), re.IGNORECASE)
    named = [
        p
        for p in tracked_files()
        if p.suffix not in {".safetensors", ".parquet", ".png"} and pattern.search(p.read_bytes())
    ]
    assert not named


# ---------------------------------------------------------------------------------------- run_all.sh


def run_all(*args: str, root: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(root / "run_all.sh"), *args],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd="/",
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["slide"], "unknown command 'slide'; valid: test, browser, lab, html, slides, bare, docs"),
        (["--profile", "pockte"], "unknown profile 'pockte'; valid: " + ", ".join(PROFILES)),
        (["--quick"], "unknown option '--quick'; valid: --profile, --only, --jobs, --fresh, --dry-run, --help"),
        (["--jobs", "0"], "--jobs is '0'; expected a whole number from 1 up"),
        (["--jobs"], "--jobs needs a value"),
        (["--only", "05;rm"], "--only is '05;rm'; expected numbers such as 05,06"),
        (["html", "--fresh"], "html takes only --profile"),
    ],
)
def test_unknown_arguments_are_refused_before_anything_is_installed(args, message):
    done = run_all(*args)
    assert done.returncode == 2 and message in done.stderr


def test_help_names_every_profile_and_option():
    text = run_all("--help").stdout
    assert all(word in text for word in (*PROFILES, "--profile", "--only", "--jobs", "--fresh", "test", "lab", "html"))


FAKE_PYTHON = """#!/bin/bash
echo "$(basename "$0") $*" >>"$LOG"
case "$*" in
  *"-m venv "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *"-m pip"*) [ -z "${FAIL:-}" ] || { echo "no network" >&2; exit 1; } ;;
esac
"""
FAKE_CONDA = """#!/bin/bash
echo "conda $*" >>"$LOG"
mkdir -p "$4/bin"; cp "$(dirname "$0")/python3.11" "$4/bin/python"
"""


@pytest.fixture
def clone(tmp_path):
    """A copy of the command in a folder with a space, and a stand-in for Python that only notes its calls."""
    root, tools = tmp_path / "a clone", tmp_path / "bin"
    root.mkdir()
    tools.mkdir()
    for name in ("run_all.sh", "requirements-lock.txt", "pyproject.toml", "environment.yml"):
        shutil.copy(ROOT / name, root / name)
    (tools / "python3.11").write_text(FAKE_PYTHON, encoding="utf-8")
    (tools / "python3.11").chmod(0o755)
    log = tmp_path / "log"
    env = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "LOG": str(log),
        "HOME": str(tmp_path / "home"),
        "CONDA_EXE": "",
        "MAMBA_EXE": "",
    }

    def call(*args: str, **more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log.write_text("", encoding="utf-8")
        return run_all(*args, root=root, **env, **more), log.read_text(encoding="utf-8").splitlines()

    call.root, call.tools = root, tools
    return call


def test_the_environment_is_made_once(clone):
    done, calls = clone("--profile", "smoke", "--only", "05,06", "--jobs", "3", "--fresh")
    assert done.returncode == 0, done.stderr
    said = ["Making the environment", "1 of 2: torch", "2 of 2:", "The environment is complete after"]
    assert [word in line for word, line in zip(said, done.stderr.splitlines(), strict=True)] == [True] * 4
    pips = [c for c in calls if "-m pip" in c]
    assert (
        pips[0].endswith("install --quiet torch==2.13.0") and "-r" in pips[1] and pips[2].endswith(f"-e {clone.root}")
    )
    assert calls[-1] == "python -m rapo_lib.runs notebooks --profile smoke --only 05,06 --jobs 3 --fresh"
    done, calls = clone()
    assert calls == ["python -m rapo_lib.runs notebooks --profile pocket"] and not done.stderr
    settings = clone.root / ".venv" / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    (lab,) = json.loads(settings.read_text(encoding="utf-8")).values()
    assert lab == {"fetchNews": "false", "checkForUpdates": False}
    (clone.root / "requirements-lock.txt").write_text("torch==2.14.0\n", encoding="utf-8")
    done, calls = clone("test", "-x")
    assert any("torch==2.14.0" in c for c in calls) and calls[-1] == "python -m pytest -n 2 --dist loadfile -x"


def test_an_interrupted_installation_is_done_again(clone):
    done, calls = clone(FAIL="1")
    assert done.returncode != 0 and "no network" in done.stderr and "complete after" not in done.stderr
    assert done.stderr.splitlines()[-2].endswith("call again") and "docs/troubleshooting.md" in done.stderr
    assert not any("rapo_lib.runs" in c for c in calls)
    (clone.root / ".venv" / "half").touch()
    done, calls = clone("lab")
    assert done.returncode == 0 and "interrupted" in done.stderr and not (clone.root / ".venv" / "half").exists()
    assert calls[-1].startswith("python -m jupyterlab")


def test_conda_is_taken_when_it_is_found(clone):
    conda = clone.tools / "conda"
    conda.write_text(FAKE_CONDA, encoding="utf-8")
    conda.chmod(0o755)
    done, calls = clone()
    assert done.returncode == 0, done.stderr
    assert calls[0] == f"conda env create --prefix {clone.root}/.conda --file environment.yml"
    assert (clone.root / ".conda" / "bin" / "python").exists() and not (clone.root / ".venv").exists()
    done, calls = clone(RAPO_ENV="venv")
    assert (clone.root / ".venv").exists()
    done, _ = clone(RAPO_ENV="docker")
    assert done.returncode == 2 and "valid: venv, conda" in done.stderr
