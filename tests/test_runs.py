"""Run folders, worker processes and the notebook driver, on small made-up runs and notebooks."""

import doctest
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from filelock import FileLock

from rapo_lib import driver, faults, runs
from rapo_lib.config import RunConfig, load_profile
from rapo_lib.driver import NotebookFailed, execute_notebook, plain_parameter, run_notebooks
from rapo_lib.runs import RunFailed, hash_files, inputs_hash, load_table, plan_runs, run_many, source_text

TOY = """
    import os, sys, time
    import pandas as pd

    def run(config, folder):
        with open(os.environ["TOY_LOG"], "a", encoding="utf-8") as f:
            f.write(f"{os.getpid()} {config.method} {config.seed}\\n")
        os.write(1, b"from the depths\\n")
        if config.method == "fail":
            raise ValueError("reward is NaN")
        if config.method == "die":
            os._exit(9)
        while config.method == "hang":
            time.sleep(0.05)
        work = folder / "work" / "step"
        if config.method == "half" and not work.exists():
            work.write_text("1", encoding="utf-8")
            while True:
                time.sleep(0.05)
        if config.method == "slow":
            while not os.path.exists(os.environ["TOY_LOG"] + ".go"):
                time.sleep(0.05)
        if config.method == "full":
            with open("/dev/full", "w", encoding="utf-8") as f:
                f.write("x" * 100_000)
        pd.DataFrame({"rl_step": [1, 2], "reward": [0.0, float(config.seed)]}).to_parquet(folder / "metrics.parquet")
        return {"pass@1": 0.5, "threads": os.environ["OMP_NUM_THREADS"]}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A results folder of its own, and an executor `toy:run` that notes each run."""
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "toy.log"))
    monkeypatch.delenv("RAPO_FRESH_SINCE", raising=False)
    monkeypatch.setattr(runs, "inputs_hash", lambda config: "fixed")

    def call(configs, experiment="main", jobs=2, said=None):
        said = [] if said is None else said
        return run_many(configs, profile="smoke", experiment=experiment, jobs=jobs, executor="toy:run", say=said.append)

    call.log = lambda: (
        (tmp_path / "toy.log").read_text(encoding="utf-8").splitlines() if (tmp_path / "toy.log").exists() else []
    )
    call.folder = tmp_path / "results" / "smoke" / "runs"
    return call


def test_examples_in_docstrings():
    assert doctest.testmod(runs).failed == 0 and doctest.testmod(driver).failed == 0


# ------------------------------------------------------------------------------------------------ runs


def test_code_counts_and_prose_does_not(tmp_path):
    path = tmp_path / "m.py"
    texts = [
        '"""Doc."""\ndef f(x):\n    """Doc."""\n    return x  # why\n',
        "def f(x):\n\n    return (x)\n",
        "def f(x):\n    return -x\n",
    ]
    hashes = []
    for text in texts:
        path.write_text(text, encoding="utf-8")
        hashes.append(source_text(path))
    assert hashes[0] == hashes[1] != hashes[2]
    path.write_text("A = 1\nB: int = 2\ndef f(): pass\n", encoding="utf-8")
    assert source_text(path, skip=["A", "B"]) == "def f():\n    pass"


def test_files_are_hashed_by_content_and_name(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"1")
    one = hash_files([tmp_path / "d"])
    (tmp_path / "d" / "b").write_bytes(b"1")
    two = hash_files([tmp_path / "d"])
    (tmp_path / "d" / "b").write_bytes(b"22")
    assert len({one, two, hash_files([tmp_path / "d"])}) == 3
    with pytest.raises(FileNotFoundError, match="nothing"):
        hash_files([tmp_path / "nothing"])


def test_inputs_of_a_run_are_its_own_data():
    assert inputs_hash(RunConfig()) == inputs_hash(RunConfig(seed=1))
    names = {p.name for p in runs._data_of(RunConfig(regime="easy", buffer="weak"))}
    assert {"easy_train.jsonl", "weak_easy.jsonl", "student"} <= names


def test_plan_names_variants_and_refuses_doubles(tmp_path):
    a, b = RunConfig(method="grpo"), RunConfig(method="rapo", seed=1)
    assert [r.folder.relative_to(tmp_path).as_posix() for r in plan_runs([a, b], tmp_path)] == [
        f"grpo/seed0-{a.hash()}",
        f"rapo/seed1-{b.hash()}",
    ]
    assert plan_runs({"noise-0.4": [b]}, tmp_path)[0].variant == "noise-0.4"
    with pytest.raises(ValueError, match="twice"):
        plan_runs([a, a], tmp_path)
    with pytest.raises(ValueError, match="letters"):
        plan_runs({"../x": [a]}, tmp_path)


@pytest.mark.case(43)
def test_runs_are_done_once_and_shared_between_experiments(toy):
    configs = [RunConfig(method=m, seed=s) for m in ("grpo", "rapo") for s in (0, 1)]
    said = []
    done = toy(configs, said=said)
    assert [r.label for r in done] == ["grpo seed 0", "grpo seed 1", "rapo seed 0", "rapo seed 1"]
    assert len(toy.log()) == 4 and len({line.split()[0] for line in toy.log()}) == 2  # two workers, reused
    assert said[-1].startswith("[4/4]") and "pass@1 0.500" in said[-1]
    for r in done:
        assert sorted(p.name for p in r.folder.iterdir()) == ["config.json", "done.json", "log.txt", "metrics.parquet"]
        assert "from the depths" in (r.folder / "log.txt").read_text(encoding="utf-8")
        assert r.done["threads"] == "1" and r.done["config_hash"] == r.config.hash()
    table = load_table(done, "metrics")
    assert list(table.columns[:3]) == ["variant", "method", "seed"] and len(table) == 8

    again = toy({"baseline": configs[:1], "other": [RunConfig(method="other")]}, experiment="noise", said=said)
    assert len(toy.log()) == 5 and again[0].folder == done[0].folder and again[0].variant == "baseline"
    assert "1 of 2 runs are there already" in said


def test_stale_damaged_and_fresh_runs_are_done_again(toy, monkeypatch):
    config = [RunConfig(method="grpo")]
    (run,) = toy(config)
    (run.folder / "done.json").write_bytes(b"{\xff")
    toy(config)
    assert len(toy.log()) == 2
    row = json.loads((run.folder / "done.json").read_text(encoding="utf-8"))
    (run.folder / "done.json").write_text(json.dumps(row | {"inputs_hash": "older"}), encoding="utf-8")
    toy(config)
    assert len(toy.log()) == 3
    monkeypatch.setenv("RAPO_FRESH_SINCE", str(time.time()))
    toy(config)
    toy(config)
    assert len(toy.log()) == 4


@pytest.mark.parametrize(
    ("method", "text"), [("fail", "ValueError: reward is NaN"), ("die", "its process died .exit code 9")]
)
def test_a_failure_shows_the_log_and_stops_the_rest(toy, method, text):
    configs = [RunConfig(method=method), *(RunConfig(method="grpo", seed=s) for s in range(3))]
    with pytest.raises(RunFailed, match=text) as e:
        toy(configs, jobs=1)
    assert "from the depths" in str(e.value) and len(toy.log()) == 1
    assert not list(toy.folder.glob("main/*/seed*"))
    with pytest.raises(RunFailed):
        toy(configs, jobs=1)


@pytest.mark.case(43)
def test_an_interrupted_batch_goes_on(toy, tmp_path):
    """The parent is killed in the middle: its worker ends too, and finished runs are kept."""
    code = (
        "from rapo_lib import runs; from rapo_lib.config import RunConfig as C\n"
        "runs.run_many([C(method='grpo'), C(method='hang')], "
        "profile='smoke', experiment='main', jobs=1, executor='toy:run')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    _until(lambda: len(toy.log()) == 2)
    worker = int(toy.log()[1].split()[0])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _until(lambda: not _alive(worker))
    assert len(list(toy.folder.glob("main/grpo/seed*/done.json"))) == 1
    assert not list(toy.folder.glob("main/hang/seed*"))
    lock = FileLock(toy.folder / ".lock")
    lock.acquire(timeout=0)  # nobody holds it any more
    lock.release()


def test_what_is_half_done_is_gone_on_with(toy, tmp_path, monkeypatch):
    """Ctrl-C in the middle: the worker ends, its folder stays, and the next call goes on in it."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell has it ignored
        "from rapo_lib import runs; from rapo_lib.config import RunConfig as C\n"
        "runs.inputs_hash = lambda config: 'fixed'\n"
        "runs.run_many([C(method='half')], profile='smoke', experiment='main', executor='toy:run')"
    )
    partial = toy.folder / "main" / "half" / f".seed0-{RunConfig(method='half').hash()}.partial"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, encoding="utf-8")
    _until(lambda: (partial / "work" / "step").exists())
    parent.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in parent.communicate()[1]
    _until(lambda: not _alive(int(toy.log()[0].split()[0])))
    assert (partial / "work" / "step").exists() and not list(toy.folder.glob("main/half/seed*"))

    (partial / ".metrics.parquet.abcd_123").write_bytes(b"half")  # what a kill in the middle of a write leaves
    (run,) = toy([RunConfig(method="half")])
    assert len(toy.log()) == 2 and run.done and not partial.exists()
    assert sorted(p.name for p in run.folder.iterdir()) == ["config.json", "done.json", "log.txt", "metrics.parquet"]


def half_done(toy, config: RunConfig, inputs: str = "fixed") -> Path:
    """A partial folder as an interrupted run leaves it, with a step of work in it."""
    (place,) = plan_runs([config], toy.folder / "main")
    runs._prepare(runs.partial_folder(place.folder), config, inputs)
    step = runs.partial_folder(place.folder) / "work" / "step"
    step.write_text("1", encoding="utf-8")
    return step


def test_half_done_work_of_other_code_or_an_earlier_fresh_call_is_not_gone_on_with(toy, monkeypatch):
    config = RunConfig(method="grpo")
    step = half_done(toy, config)
    runs._prepare(step.parent.parent, config, "fixed")
    assert step.exists()
    runs._prepare(step.parent.parent, config, "changed")
    assert not step.exists() and (step.parent / "started.json").exists()
    step = half_done(toy, config, "changed")
    monkeypatch.setenv("RAPO_FRESH_SINCE", str(time.time()))
    runs._prepare(step.parent.parent, config, "changed")
    assert not step.exists()
    step = half_done(toy, config, "changed")
    runs._prepare(step.parent.parent, config, "changed")
    assert step.exists()  # what the fresh call itself began
    (step.parent / "started.json").unlink()  # the mark goes first when a folder is deleted
    runs._prepare(step.parent.parent, config, "changed")
    assert not step.exists()


def test_half_done_work_whose_notes_are_damaged_is_begun_again(toy):
    config = RunConfig(method="grpo")
    for name in ("config.json", "work/started.json"):
        step = half_done(toy, config)
        (step.parent.parent / name).write_bytes(b"{\xff")
        runs._prepare(step.parent.parent, config, "fixed")
        assert not step.exists() and runs.load_config(step.parent.parent) == config


def test_a_folder_that_is_half_deleted_counts_neither_as_done_nor_as_begun(toy, monkeypatch):
    (run,) = toy([RunConfig(method="grpo")])

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        runs._delete(run.folder)
    assert run.done is None and (run.folder / "metrics.parquet").exists()


def test_code_that_is_changed_while_runs_go_on_is_noticed(toy, monkeypatch):
    hashes = iter(["one", "one", "two"])
    monkeypatch.setattr(runs, "code_hash", lambda: next(hashes))
    with pytest.raises(RunFailed, match="rapo_lib was changed while runs were going on; start the command again"):
        toy([RunConfig(method="grpo", seed=s) for s in (0, 1)], jobs=1)
    assert len(toy.log()) == 1


def test_a_folder_of_another_configuration_is_refused_and_kept(toy):
    step = half_done(toy, RunConfig(method="grpo"))
    path = step.parent.parent / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"seed": 0', '"seed": 7'), encoding="utf-8")
    with pytest.raises(RunFailed, match="belongs to another run: seed is 7 there and 0 here; move it away or delete"):
        toy([RunConfig(method="grpo")])
    assert step.exists() and not toy.log()


def test_a_run_that_was_done_but_not_moved_is_moved(toy):
    """Killed after done.json was written: nothing is done again."""
    (run,) = toy([RunConfig(method="grpo")])
    os.replace(run.folder, runs.partial_folder(run.folder))
    (run,) = toy([RunConfig(method="grpo")])
    assert run.done and len(toy.log()) == 1


def test_two_processes_on_one_run_never_mix(toy, tmp_path, monkeypatch):
    """The second waits until the first has done it, and then does nothing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # run_many sets it for its workers; here nothing does, and toy reads it
    config = RunConfig(method="slow")
    (place,) = plan_runs([config], toy.folder / "main")
    code = (
        "import sys; from pathlib import Path; from rapo_lib import runs; from rapo_lib.config import RunConfig\n"
        "print(runs.do_run('toy:run', Path(sys.argv[1]), RunConfig(method='slow'), 'fixed'))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(place.folder)], **pipes, encoding="utf-8") for _ in range(2)
    ]
    _until(lambda: len(toy.log()) == 1)
    time.sleep(3)  # long enough for the other one to be there, too
    assert len(toy.log()) == 1 and all(p.poll() is None for p in both)
    (tmp_path / "toy.log.go").touch()
    said, errors = zip(*(p.communicate() for p in both), strict=True)
    assert [p.returncode for p in both] == [0, 0], errors
    assert len(toy.log()) == 1 and said[0] == said[1] and "pass@1 0.500" in said[0]
    assert runs.read_done(place.folder, config, "fixed")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_named_and_earlier_runs_are_kept(toy):
    (kept,) = toy([RunConfig(method="grpo")])
    with pytest.raises(RunFailed, match="No space left on device(.|\n)*free some space, run the same command again"):
        toy([RunConfig(method="full")])
    assert kept.done and list(kept.table("metrics")["reward"]) == [0.0, 0.0]


def test_a_real_run_on_a_disk_that_fills_up_goes_on_when_there_is_space(toy, tmp_path, monkeypatch):
    """A limit on the size of files stands for the disk; the run ends as one that had space all along."""
    (tmp_path / "tight.py").write_text(
        "import os, resource\nfrom rapo_lib.execution import execute_run\n"
        "def run(config, folder):\n"
        "    if os.path.exists(os.environ['TOY_LOG']):\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))\n"
        "    return execute_run(config, folder)\n",
        encoding="utf-8",
    )
    config = faults.TINY.replace(method="grpo", rl_steps=2, n_eval=2, n_final=2)
    call = dict(profile="smoke", experiment="main", executor="tight:run", say=lambda text: None)
    (whole,) = run_many([config], **call)
    want = faults.run_digest(whole.folder)
    shutil.rmtree(whole.folder)
    (tmp_path / "toy.log").touch()
    with pytest.raises(RunFailed, match="the disk is full"):
        run_many([config], **call)
    (tmp_path / "toy.log").unlink()
    (again,) = run_many([config], **call)
    assert faults.run_digest(again.folder) == want != {}


def test_damaged_swapped_and_missing_files_of_a_run_are_named(toy):
    one, two = toy([RunConfig(method="grpo", seed=s) for s in (0, 1)])
    path = one.folder / "metrics.parquet"
    good = path.read_bytes()
    for bad in (good[:-1], good[:-1] + b"?", (two.folder / "metrics.parquet").read_bytes()):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="metrics.parquet: sha256 is .*, done.json expects .*; delete .*seed0"):
            load_table([one, two], "metrics")
    path.unlink()
    with pytest.raises(ValueError, match="metrics.parquet: sha256 is missing, done.json expects"):
        one.table("metrics")
    with pytest.raises(ValueError, match="rollouts.jsonl: sha256 is missing, done.json expects no such file"):
        one.rollouts()
    path.write_bytes(good)
    assert len(one.table("metrics")) == 2


def test_alarms_of_a_run_are_told():
    row = {"pass@1": 0.25, "pass@1 greedy": 0.5, "n_final": 3, "seconds": 61.2, "alarms": ["RL step 3: it fell."]}
    assert runs._summary(row) == "pass@1 0.250, pass@1 greedy 0.500, 61 s\n  WARNING: RL step 3: it fell."
    assert runs._summary({"seconds": 1.0}) == "1 s"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z")


def _until(condition) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never came true")


def test_a_second_process_waits_for_the_first(toy):
    toy.folder.mkdir(parents=True)
    said = []
    with FileLock(toy.folder / ".lock"):
        with pytest.raises(_Waited):
            with runs._lock(toy.folder / ".lock", _raise_waited):
                pass
    with runs._lock(toy.folder / ".lock", said.append):
        assert said == []


class _Waited(Exception):
    pass


def _raise_waited(text: str) -> None:
    assert "waiting" in text
    raise _Waited


# ------------------------------------------------------------------------------------------- notebooks


def write_notebook(path: Path, *cells: str, parameters: str = 'profile = "smoke"\njobs = 1') -> Path:
    nb = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    nb.cells = [
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, cells),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


@pytest.mark.case(39)
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2.5, "x")), [1, [2.5, "x"]]),
        (Path("a/b"), "a/b"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        ({"a": (None, True)}, {"a": [None, True]}),
    ],
)
def test_parameters_are_converted(value, plain):
    assert plain_parameter("p", value) == plain and type(plain_parameter("p", value)) is type(plain)


@pytest.mark.case(39)
@pytest.mark.parametrize("value", [np.zeros(2), {1: 2}, object(), pd.Timestamp("2026-01-01")])
def test_other_parameters_are_refused(value):
    with pytest.raises(TypeError, match="parameter p is a"):
        plain_parameter("p", value)


@pytest.mark.case(39)
def test_an_unknown_parameter_and_a_missing_cell_raise(tmp_path):
    nb = write_notebook(tmp_path / "a.ipynb", "x = 1")
    with pytest.raises(ValueError, match="no parameter 'seeed'; it declares: jobs, profile"):
        execute_notebook(nb, tmp_path / "out.ipynb", {"seeed": 1})
    plain = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")])
    nbformat.write(plain, tmp_path / "b.ipynb")
    with pytest.raises(ValueError, match="0 cells are tagged"):
        execute_notebook(tmp_path / "b.ipynb", tmp_path / "out.ipynb")


@pytest.mark.case(39)
@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", "SystemExit|left early"),
        ("import os; os._exit(0)", "kernel died|left early"),
    ],
)
def test_a_notebook_that_does_not_end_fails(tmp_path, cell, message):
    nb = write_notebook(tmp_path / "with {braces} and space" / "a.ipynb", cell, "print('after')")
    with pytest.raises(NotebookFailed, match=message):
        execute_notebook(nb, nb.with_name("out.ipynb"))


@pytest.fixture
def batch(tmp_path, monkeypatch, capsys):
    """A driver over made-up notebooks; each notes on disk that it ran."""
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.delenv("RAPO_FRESH_SINCE", raising=False)
    monkeypatch.setattr(driver, "library_hash", lambda: "library")
    folder = tmp_path / "notebooks"
    note = "import os\nopen(os.environ['RAN'], 'a', encoding='utf-8').write(f'{name}:{profile}:{jobs} ')"
    for name in ("01_one", "99_report"):
        write_notebook(
            folder / f"{name}.ipynb", f"name = {name!r}\n" + note, "print(os.environ['HF_HUB_OFFLINE'], os.getcwd())"
        )

    def call(**arguments):
        (tmp_path / "ran").write_text("", encoding="utf-8")
        code = run_notebooks(load_profile("smoke"), folder=folder, **arguments)
        return code, (tmp_path / "ran").read_text(encoding="utf-8").split(), capsys.readouterr()

    call.folder, call.out = folder, tmp_path / "results" / "smoke" / "notebooks"
    return call


@pytest.mark.case(40)
def test_the_driver_does_what_is_missing(batch, monkeypatch):
    code, ran, io = batch(jobs=3)
    assert code == 0 and ran == ["01_one:smoke:3", "99_report:smoke:3"]
    assert [line.split()[:2] for line in io.out.splitlines() if line.startswith(("01", "99"))] == [
        ["01_one", "done"],
        ["99_report", "done"],
        ["01_one", "done"],
        ["99_report", "done"],
    ]
    copy = nbformat.read(batch.out / "01_one.ipynb", as_version=4)
    assert copy.metadata.rapo.seconds > 0 and "input_path" not in copy.metadata.papermill
    assert copy.cells[-1].outputs[0].text.startswith("1 ") and "HF_HUB_OFFLINE" not in os.environ
    assert "encryption" not in io.err

    code, ran, io = batch()
    assert code == 0 and ran == [] and "there already" in io.out

    nb = nbformat.read(batch.folder / "01_one.ipynb", as_version=4)  # prose changes nothing, code does
    nb.cells.insert(0, nbformat.v4.new_markdown_cell("words"))
    nbformat.write(nb, batch.folder / "01_one.ipynb")
    assert batch()[1] == []
    nb.cells[-1].source += "\nprint(2)"
    nbformat.write(nb, batch.folder / "01_one.ipynb")
    assert batch()[1] == ["01_one:smoke:2", "99_report:smoke:2"]  # the report reads the others

    monkeypatch.setattr(driver, "library_hash", lambda: "another library")
    assert batch(only=["01"])[1] == ["01_one:smoke:2"]
    assert batch(only=["01"], fresh=True)[1] == ["01_one:smoke:2"]
    assert "RAPO_FRESH_SINCE" not in os.environ


@pytest.mark.case(39)
def test_a_fresh_batch_that_was_interrupted_goes_on(batch, monkeypatch):
    assert batch()[0] == 0
    real = driver.execute_notebook

    def interrupted(source, *args, **kwargs):
        if source.stem == "99_report":
            raise KeyboardInterrupt
        return real(source, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "execute_notebook", interrupted)
        assert batch(fresh=True)[:2] == (130, ["01_one:smoke:2"])
    assert batch(fresh=True)[1] == ["99_report:smoke:2"]
    assert not (batch.out.parent / driver.FRESH).exists()
    assert batch(fresh=True)[1] == ["01_one:smoke:2", "99_report:smoke:2"]


def test_the_driver_stops_at_a_failure_and_keeps_the_failed_copy(batch):
    write_notebook(batch.folder / "02_bad.ipynb", "raise RuntimeError('broken on purpose')")
    code, ran, io = batch()
    assert code == 1 and ran == ["01_one:smoke:2"]
    assert "broken on purpose" in io.err and "cell 2" in io.err
    table, last = io.out.splitlines()[-5:-2], io.out.splitlines()[-1]
    assert last.startswith("executed copies: ")
    assert [" ".join(line.split()[1:-1]) for line in table] == ["done", "failed", "not started"]
    assert (batch.out / "02_bad.failed.ipynb").exists() and not (batch.out / "02_bad.ipynb").exists()
    assert not list(batch.out.glob(".*"))


def test_the_driver_refuses_unknown_notebooks_and_a_second_driver(batch):
    code, ran, io = batch(only=["07"])
    assert code == 1 and ran == [] and "no notebook begins with '07'; there are: 01_one, 99_report" in io.err
    with FileLock(batch.out.parent / ".driver.lock"):
        code, ran, io = batch()
    assert code == 1 and ran == [] and "another run_all.sh is working" in io.err
    write_notebook(batch.folder / "01_one.ipynb", "x = 1", parameters="jobs = 1")
    code, ran, io = batch(only=["01"])
    assert code == 1 and "no parameter 'profile'" in io.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_keeps_earlier_copies(batch, monkeypatch):
    batch(only=["01"])
    kept = (batch.out / "01_one.ipynb").read_bytes()

    def full(*arguments):
        with open("/dev/full", "w", encoding="utf-8") as f:
            f.write("x" * 100_000)

    monkeypatch.setattr(driver, "_save_copy", full)
    code, ran, io = batch()
    assert code == 1 and ran == ["99_report:smoke:2"]
    assert "No space left on device" in io.err and "run the same command again" in io.err
    assert (batch.out / "01_one.ipynb").read_bytes() == kept and not (batch.out / "99_report.ipynb").exists()


def test_unknown_command_line_arguments_are_refused(capsys):
    for arguments in (["notebooks", "--profile", "pockte"], ["sweep"]):
        with pytest.raises(SystemExit):
            runs.main(arguments)
    assert "unknown profile 'pockte'; allowed: smoke, pocket" in capsys.readouterr().err
