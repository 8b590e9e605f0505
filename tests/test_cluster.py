"""Runs as jobs of a cluster: submitit's own local executor, and what is said when something is missing."""

import sys
import textwrap

import pytest

from rapo_lib import cluster, study
from rapo_lib.cluster import make_executor, submit_runs
from rapo_lib.config import RunConfig
from rapo_lib.runs import RunFailed, find_runs, run_many

TOY = """
    def run(config, folder):
        if config.seed == 3:
            raise ValueError("seed 3 is unlucky")
        (folder / "seed.txt").write_text(str(config.seed), encoding="utf-8")
        return {"pass@1": 0.5}
"""


@pytest.fixture
def on_local(tmp_path, monkeypatch):
    (tmp_path / "toy_cluster.py").write_text(textwrap.dedent(TOY), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{study.RESULTS.parent}")
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path / "results"))
    monkeypatch.delenv("RAPO_FRESH_SINCE", raising=False)

    def work(*arguments):
        submit_runs(*arguments, cluster="local", folder=tmp_path / "jobs", parameters={"timeout_min": 5})

    return work


def test_jobs_do_the_runs_and_are_found_again(on_local):
    plan, said = {"grpo": [RunConfig(method="grpo", seed=s) for s in range(2)]}, []
    how = {"profile": "smoke", "experiment": "x", "jobs": 2, "executor": "toy_cluster:run", "work": on_local}
    runs = run_many(plan, **how, say=said.append)
    assert [r.file("seed.txt").read_text(encoding="utf-8") for r in runs] == ["0", "1"]
    assert len(said) == 2 and said[0].startswith("grpo seed 0 (job ") and "pass@1 0.500" in said[0]
    run_many(plan, **how, say=said.append)
    assert said[2:] == ["2 of 2 runs are there already"] and len(find_runs(plan, profile="smoke")) == 2


def test_a_job_that_fails_is_named_and_the_rest_is_not_submitted(on_local):
    plan = {"grpo": [RunConfig(method="grpo", seed=s) for s in (3, 4)]}
    with pytest.raises(RunFailed, match="grpo seed 3: .*(?s:.*)seed 3 is unlucky(?s:.*)logs lie in"):
        run_many(plan, profile="smoke", experiment="x", jobs=1, executor="toy_cluster:run", work=on_local)
    assert find_runs(plan, profile="smoke") == []


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--on is 'lsf'; allowed: slurm, local"):
        make_executor("lsf", tmp_path, {})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match="--on needs the package submitit: pip install submitit"):
        make_executor("local", tmp_path, {})


def test_the_command_line_hands_its_jobs_over(monkeypatch):
    asked = []
    monkeypatch.setattr(cluster, "submit_runs", lambda runs, *rest, **how: asked.append((len(runs), how)))
    monkeypatch.setattr(study, "run_many", lambda plan, **how: how["work"](list(plan), 1, "x", print))
    study.main(
        ["run", "ours", "--profile", "smoke", "--on", "slurm", "--job", "timeout_min=60", "--job", "slurm_qos=a"]
    )
    ((n, how),) = asked
    assert n == 1 and how["cluster"] == "slurm" and how["parameters"] == {"timeout_min": 60, "slurm_qos": "a"}
