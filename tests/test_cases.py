"""The 44 known faults: that each has a test, and those tests that belong to no single module."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
from mutants import MUTANTS, N_CASES, marked_cases
from papermill.translators import PythonTranslator
from test_notebooks import RESULT, SOURCED

from rapo_lib import driver, execution
from rapo_lib.config import ROOT, RunConfig, load_profile
from rapo_lib.driver import execute_notebook
from rapo_lib.plots import METRICS, plot_learning_curves
from rapo_lib.policy import load_policy
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.traces import save_jsonl

TESTS = Path(__file__).parent


def test_every_case_has_a_test():
    found = set().union(*(marked_cases(p) for p in TESTS.glob("test_*.py")))
    assert found == set(range(1, N_CASES + 1))


def test_every_case_has_a_mutant():
    assert {m.case for m in MUTANTS} == set(range(1, N_CASES + 1))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.case}-{m.file}")
def test_a_mutant_still_fits_the_code(mutant):
    """`python tests/mutants.py` tells whether the tests notice it."""
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.old != mutant.new


# ------------------------------------------------------------------------------------ text in any locale

CALLS_A_READER = {"open", "fdopen", "read_text", "write_text", "NamedTemporaryFile", "TemporaryFile", "TextIOWrapper"}
RUNS_A_PROCESS = {"run", "Popen", "check_output", "check_call"}
#: Position of the mode among the arguments, and the mode without one.
MODES = {"fdopen": (1, "r"), "NamedTemporaryFile": (0, "w+b"), "TemporaryFile": (0, "w+b")}


def python_sources() -> Iterator[tuple[str, str]]:
    """Name and code of the library, the tests and each code cell of the notebooks."""
    for path in sorted([*ROOT.glob("rapo_lib/**/*.py"), *ROOT.glob("tests/*.py")]):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        for i, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                yield f"{path.name}, cell {i}", cell.source


def in_locale_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the encoding of the locale."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    given = {k.arg: k.value for k in call.keywords}
    if "encoding" in given or None in given:  # None: `**settings`
        return False
    if name in RUNS_A_PROCESS:
        return any(isinstance(given.get(k), ast.Constant) and given[k].value for k in ("text", "universal_newlines"))
    if name not in CALLS_A_READER:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    if name == "TextIOWrapper":
        return len(call.args) < 2
    owner = call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else ""
    if name == "open" and owner in ("os", "Image"):
        return False
    of_path = isinstance(call.func, ast.Attribute) and owner not in ("io", "codecs", "gzip", "bz2", "lzma")
    at, default = MODES.get(name, (0 if of_path else 1, "rb" if owner in ("gzip", "bz2", "lzma") else "r"))
    mode = given.get("mode", call.args[at] if len(call.args) > at else None)
    text = mode.value if isinstance(mode, ast.Constant) else default
    return "b" not in text


@pytest.mark.case(44)
def test_no_text_is_read_or_written_in_the_encoding_of_the_locale():
    bare = []
    for where, source in python_sources():
        bare += [f"{where}:{c.lineno}: {ast.unparse(c)[:60]}" for c in calls_of(source) if in_locale_encoding(c)]
    assert not bare, "\n".join(bare)


@pytest.mark.case(44)
@pytest.mark.parametrize(
    ("call", "bare"),
    [
        ("open(p)", True),
        ("open(p, 'w')", True),
        ("open(p, mode='a')", True),
        ("open(p, 'rb')", False),
        ("open(p, encoding='utf-8')", False),
        ("p.open()", True),
        ("p.open('wb')", False),
        ("p.read_text()", True),
        ("p.read_text('utf-8')", False),
        ("p.write_text(x)", True),
        ("p.write_text(x, encoding='utf-8')", False),
        ("os.fdopen(fd, 'w')", True),
        ("os.fdopen(fd, 'wb')", False),
        ("os.open(p, os.O_RDONLY)", False),
        ("gzip.open(p)", False),
        ("gzip.open(p, 'rt')", True),
        ("tempfile.TemporaryFile()", False),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("subprocess.run(c, text=True)", True),
        ("subprocess.run(c, text=True, encoding='utf-8')", False),
        ("subprocess.run(c)", False),
    ],
)
def test_the_check_for_the_encoding_of_the_locale(call, bare):
    assert in_locale_encoding(ast.parse(call).body[0].value) == bare


@pytest.mark.case(32, 44)
def test_a_path_that_the_locale_cannot_write_ends_no_command(tmp_path):
    write_notebook(tmp_path / "日本" / "smoke" / "notebooks" / "01_one.ipynb", "print(1)")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "cp1252", "RAPO_RESULTS": str(tmp_path / "日本")}
    command = [sys.executable, "-m", "rapo_lib.runs", "html", "--profile", "smoke"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="cp1252", timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    assert "\\u65e5" in done.stdout and (tmp_path / "日本" / "smoke" / "html" / "01_one.html").exists()


# ------------------------------------------------------------------------------------- several processes

ONE_STEP = """
import hashlib, json, sys
import torch
from rapo_lib.config import RunConfig
from rapo_lib.execution import make_retriever
from rapo_lib.methods import get_method
from rapo_lib.policy import add_lora, load_policy
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.trainer import RAPOTrainer

torch.set_num_threads(1)
config = RunConfig(rl_steps=2, questions_per_step=1, group_size=8, n_hybrid=6, retrieval_prob=0.8, noise_prob=0.4,
                   regime="easy")
train, method = load_pocket_questions(config.regime, "train"), get_method(config.method)
policy, rows = add_lora(load_policy(config.student), config.lora_r, config.seed), []
retriever = make_retriever(config, method, policy.protocol, train)
trainer = RAPOTrainer(policy, train, make_pocket_toolbox("train"), retriever, config, method, sys.argv[1],
                      on_rl_step=lambda row, rollouts: rows.append((row, [r.to_dict() for r in rollouts])))
trainer.train()
kept = [({k: v for k, v in row.items() if not k.endswith("_sec")}, rollouts) for row, rollouts in rows]
found = [s["info"] for _, rollouts in kept for r in rollouts for s in r["segments"] if s["origin"] == "retrieval"]
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
weights = [p.detach().numpy().tobytes() for p in policy.model.parameters() if p.requires_grad]
digest = hashlib.sha256(b"".join(weights)).hexdigest()
print(json.dumps([len(found), sum(f["noisy"] for f in found), kept, losses, digest]))
"""


@pytest.mark.case(35)
def test_two_processes_make_the_same_retrievals_ids_and_losses(tmp_path):
    def once(hash_seed: str) -> list:
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", ONE_STEP, str(tmp_path / hash_seed)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    first, second = once("1"), once("2")
    n_retrievals, n_noisy, _, losses, _ = first
    assert 0 < n_noisy < n_retrievals and any(losses), (n_noisy, n_retrievals, losses)
    assert json.dumps(first) == json.dumps(second)  # as text, in which NaN equals NaN


@pytest.mark.case(35)
def test_the_library_draws_from_no_stream_that_everyone_shares():
    shared = {f"random.{name}" for name in ("random", "randint", "choice", "choices", "sample", "shuffle", "seed")}
    own = ("np.random.default_rng", "np.random.Generator", "np.random.PCG64")
    own += ("np.random.get_state", "np.random.set_state")  # a checkpoint keeps the shared one for other libraries
    for where, source in python_sources():
        if where.startswith("rapo_lib/"):
            names = {ast.unparse(c.func) for c in calls_of(source)}
            drawn = {n for n in names if n.startswith("np.random.") and n not in own} | names & (shared | {"hash"})
            assert not drawn, f"{where}: {drawn}; use config.child_rng"


# ------------------------------------------------------------------------------------------------- paths


@pytest.mark.case(32)
def test_paths_with_names_beyond_ascii_and_path_objects(tmp_path, tiny_policy):
    folder = tmp_path / "Größe π – 日本"
    tiny_policy.base.save_pretrained(folder / "modèle")
    tiny_policy.tokenizer.save_pretrained(folder / "modèle")
    for path in (folder / "modèle", str(folder / "modèle")):
        assert load_policy(path).name == "modèle"
    write_notebook(folder / "cahier.ipynb", "print('π ≈ 3.14')")
    done = execute_notebook(folder / "cahier.ipynb", folder / "exécuté.ipynb")
    assert done.cells[-1].outputs[0].text == "π ≈ 3.14\n" and (folder / "exécuté.ipynb").exists()


@pytest.mark.case(30)
@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_run_refuses_imported_traces_of_evaluation_questions(tmp_path, split):
    """Imported traces have ids of their own, so the texts of their questions tell."""
    question = load_pocket_questions("exploration", split)[0]
    steps = "<think> a</think><search> b</search><result> c</result>"
    rows = [{"key": f"{text}\n", "value": steps, "reward": 1.0} for text in ("Who?", question.text.upper())]
    save_jsonl(tmp_path / "others.jsonl", rows)
    config = RunConfig(rl_steps=1, n_eval=1, n_final=1, buffer=str(tmp_path / "others.jsonl"))
    with pytest.raises(ValueError, match="1 of [0-9]+ evaluation questions are in the step-trace buffer"):
        execution.execute_run(config, tmp_path)


# --------------------------------------------------------------------------------------------------- tools


@pytest.mark.case(36)
def test_the_share_of_failed_calls_can_be_plotted():
    rows = [{"variant": "grpo", "seed": 0, "rl_step": t, "tool_failures_frac": x} for t, x in ((1, 0.25), (2, 1.0))]
    ax = plot_learning_curves(pd.DataFrame(rows), "tool_failures_frac")
    assert ax.get_ylabel() == METRICS["tool_failures_frac"][0] == "failed tool calls (%)"
    assert ax.lines[0].get_ydata().tolist() == [0.25, 1.0]


# ----------------------------------------------------------------------------------------------- notebooks


def write_notebook(path: Path, *cells: str) -> Path:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    nb.cells = [nbformat.v4.new_code_cell("profile = 'smoke'", metadata={"tags": ["parameters"]})]
    nb.cells += map(nbformat.v4.new_code_cell, cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


@pytest.mark.case(39)
def test_papermill_turns_tuples_and_numpy_integers_into_strings():
    """What our conversion is for; when papermill mends it, `plain_parameter` can go."""
    for value in ((1, 2), np.int64(3)):
        cell = PythonTranslator.codify({"x": value}, "").splitlines()[-1]
        assert isinstance(ast.literal_eval(cell.removeprefix("x = ")), str)
        assert not isinstance(driver.plain_parameter("x", value), str)


NOISY = """
def run(config, folder):
    for i in range(10_000):
        print(f"step {i}: loss {i / 7:.4f} reward {i / 9:.4f} entropy {i / 3:.4f} and so on and so forth")
    with open(folder / "metrics.txt", "w", encoding="utf-8") as f:
        f.write("kept")
    return {"pass@1": 0.5}
"""
CELL = """
from rapo_lib.config import RunConfig
from rapo_lib.runs import run_many
done = run_many([RunConfig(seed=s) for s in (0, 1)], profile="smoke", experiment="main", jobs=2, executor="noisy:run")
print(len(done))
"""


@pytest.mark.case(39, 43)
def test_worker_processes_start_from_a_cell_and_their_output_stays_out_of_the_notebook(tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text(NOISY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path / "results"))
    out = tmp_path / "out.ipynb"
    done = execute_notebook(write_notebook(tmp_path / "a.ipynb", CELL), out)
    assert out.stat().st_size < 20_000  # the two runs printed 1.5 MB
    lines = "".join(o.text for o in done.cells[-1].outputs).splitlines()
    assert [line[:4] for line in lines] == ["[1/2", "[2/2", "2"]
    logs = list((tmp_path / "results").rglob("log.txt"))
    assert [len(p.read_text(encoding="utf-8").splitlines()) for p in logs] == [10_000] * 2
    assert len(list((tmp_path / "results").rglob("metrics.txt"))) == 2


@pytest.mark.case(43)
def test_executed_copies_hold_little_output():
    for path in ROOT.glob("results/reference/notebooks/*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert len(json.dumps(cell.get("outputs", []))) < 1_000_000, path.name


@pytest.mark.case(43)
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_that_is_updated(monkeypatch, terminal):
    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    line = driver._Line("05_training")
    for i in range(10_000):
        line.show(f"RL step {i}\n")
    line.end("done")
    text = screen.getvalue()
    assert text.count("\n") == 1 and text.endswith("done\n")
    assert ("RL step 9999" in text) == terminal
    # On a terminal each update writes over the line before.
    assert text.count("\r") == (10_002 if terminal else 0)


@pytest.mark.case(43)
def test_metrics_are_in_a_file_while_the_run_goes_on(tmp_path, monkeypatch):
    answers = pd.DataFrame({"correct": [True, False]})
    monkeypatch.setattr(execution, "evaluate", lambda *a, **k: answers)
    monkeypatch.setattr(execution, "summarise_skills", lambda t: pd.DataFrame({"skill": [], "rate": []}))
    monkeypatch.setattr(execution, "score_rollouts", lambda *a: [[-0.5]])
    monkeypatch.setattr(execution, "make_pocket_toolbox", lambda split: None)
    monkeypatch.setattr(execution, "save_adapter", lambda *a: None)
    config = RunConfig(rl_steps=6, eval_every=2)
    recorder = execution.Recorder(config, tmp_path, SimpleNamespace(), [])
    rollout = SimpleNamespace(question_id="q", reward=1.0, retrievals=[], to_dict=dict)
    for step in range(1, 6):  # the process dies after RL step 5, between two evaluations
        recorder.on_rl_step({"rl_step": step, "reward": 0.1 * step, "entropy": 1.0}, [rollout])
    kept = pd.read_parquet(tmp_path / "metrics.parquet")
    assert kept["rl_step"].tolist() == [1, 2, 3, 4, 5]
    assert kept["reward"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.case(40)
def test_executed_copies_go_into_results_and_leave_the_source_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(driver, "library_hash", lambda: "library")
    source = write_notebook(tmp_path / "notebooks" / "01_one.ipynb", "print(1)")
    before = source.read_bytes()
    assert driver.run_notebooks(load_profile("smoke"), folder=source.parent) == 0
    assert source.read_bytes() == before and [p.name for p in source.parent.iterdir()] == ["01_one.ipynb"]
    copy = nbformat.read(tmp_path / "results" / "smoke" / "notebooks" / "01_one.ipynb", as_version=4)
    assert copy.cells[-1].outputs[0].text == "1\n"


@pytest.mark.case(40)
def test_an_executed_copy_holds_no_widget_state(tmp_path):
    nb = nbformat.v4.new_notebook(metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}}})
    driver._save_copy(nb, tmp_path / "copy.ipynb", {"cells": "x"})
    assert "widgets" not in nbformat.read(tmp_path / "copy.ipynb", as_version=4).metadata


@pytest.mark.case(40)
def test_notebooks_are_text_that_a_merge_can_read():
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        data = path.read_bytes()
        assert data.endswith(b"}\n") and b"\r" not in data, path.name
        raw = json.loads(data)
        assert set(raw["metadata"]) == {"kernelspec", "language_info"}, path.name
        assert raw["metadata"]["language_info"] == {"name": "python"}, path.name  # no version of one machine
        assert not any("attachments" in c for c in raw["cells"]), path.name
    places = {p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.ipynb")}
    assert {p for p in places if not p.startswith(".")} <= {"notebooks", "results"}  # .venv holds some of papermill's


@pytest.mark.case(23)
def test_the_notebook_shows_that_eq_10_pushes_a_failing_rollout_down_more():
    nb = nbformat.read(ROOT / "notebooks" / "04_retrieval_aware_objective.ipynb", as_version=4)
    code = "\n".join(c.source for c in nb.cells if c.cell_type == "code")
    assert "-0.8071, 0.6071" in code and "sign_aware_advantage" in code
    assert any("pushed down *more*" in c.source for c in nb.cells if c.cell_type == "markdown")


#: Calls whose texts stand in a figure or under it.
CAPTIONS = {"set_title", "suptitle", "title", "set_xlabel", "set_ylabel", "figtext", "text", "annotate"}


def typed_texts(call: ast.Call) -> list[str]:
    """Texts among the arguments of a call; what a format string makes from variables reads `{}`."""
    texts, inside = [], set()
    for node in ast.walk(call):
        if isinstance(node, ast.JoinedStr):
            inside |= set(map(id, ast.walk(node))) - {id(node)}
            if id(node) not in inside:
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            texts.append(node.value)
    return texts


def calls_of(source: str) -> list[ast.Call]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]


def captions(source: str) -> list[str]:
    """Texts that a cell writes into figures."""
    return [t for c in calls_of(source) if getattr(c.func, "attr", "") in CAPTIONS for t in typed_texts(c)]


@pytest.mark.case(41)
def test_figures_hold_no_typed_results():
    assert captions("ax.set_title(f'RAPO {x:.0%} after 35 steps')") == ["RAPO {} after 35 steps"]
    assert RESULT.search(captions("ax.set_title('RAPO 49 %')")[0])
    for where, source in python_sources():
        if not where.startswith("tests/"):
            assert not [t for t in captions(source) if RESULT.search(t)], where


@pytest.mark.case(41)
def test_printed_sentences_hold_no_typed_results():
    for where, source in python_sources():
        if ".ipynb" not in where:
            continue
        shown = [c for c in calls_of(source) if ast.unparse(c.func) in ("print", "Markdown", "HTML")]
        lines = [line for c in shown for t in typed_texts(c) for line in t.splitlines()]
        assert not [t for t in lines if RESULT.search(t) and not SOURCED.search(t)], where
