"""Runs from the command line, alone and on two processes, and plans that do nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from rapo_lib import launch
from rapo_lib.config import PROFILES, ROOT, RunConfig, load_profile
from rapo_lib.launch import parse_settings, plan_of, print_plans

SMALL = ["rl_steps=2", "questions_per_step=1", "group_size=4", "n_off_policy=2", "updates_per_step=1", "eval_every=2"]
SMALL += ["n_eval=4", "n_final=4", "regime=easy", "temperature=1.5"]
CLOCKS = ("rollout_sec", "update_sec", "retrieval_sec", "tools_sec", "step_sec")


def command(folder, method, n_processes=1):
    settings = [x for pair in SMALL for x in ("--set", pair)]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    several = ["-m", "torch.distributed.run", "--nproc_per_node", str(n_processes), "--master_port", port]
    launcher = several if n_processes > 1 else []
    more = ["--profile", "pocket", "--method", method, "--out", str(folder), *settings]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "rapo_lib.launch", *more],
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_processes_do_the_run_of_one(tmp_path):
    """A group of four on two processes; with LUFFY the second one holds nothing but the teacher's two rollouts."""
    out = [command(tmp_path / f"{n}", "luffy", n) for n in (1, 2)]
    assert all("pass@1" in text for text in out)
    one, two = (pd.read_parquet(tmp_path / n / "metrics.parquet").drop(columns=list(CLOCKS)) for n in "12")
    pd.testing.assert_frame_equal(one, two, rtol=1e-4, atol=1e-6)
    a, b = (load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in "12")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-5)
    done = [json.loads((tmp_path / n / "done.json").read_text(encoding="utf-8")) for n in "12"]
    assert done[0]["pass@1"] == done[1]["pass@1"] and len(list((tmp_path / "2").glob("*.parquet"))) == 3


def test_a_run_that_is_done_is_not_done_again_and_another_is_refused(tmp_path, monkeypatch):
    config = load_profile("smoke").config("grpo", rl_steps=1, eval_every=1, n_eval=2, n_final=2)
    done = launch.launch(config, tmp_path)
    monkeypatch.setattr(launch, "finish_run", lambda *_: pytest.fail("done twice"))
    assert launch.launch(config, tmp_path) == done and "pass@1" in done
    with pytest.raises(ValueError, match="holds a run with other settings; name another folder"):
        launch.launch(config.replace(seed=1), tmp_path)


def test_settings_have_the_types_of_their_fields():
    assert parse_settings(["buffer=7.jsonl", "leak_guard=true", "learning_rate=1e-5"]) == {
        "buffer": "7.jsonl",
        "leak_guard": True,
        "learning_rate": 1e-5,
    }
    with pytest.raises(ValueError, match="--set 'rl_steps': expected name=value"):
        parse_settings(["rl_steps"])
    with pytest.raises(ValueError, match="'many' is no number and neither true nor false"):
        parse_settings(["rl_steps=many"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "rl_stepz=3", "--dry-run"], "unknown setting 'rl_stepz'; allowed: "),
        (["--set", "rl_steps=0.5", "--dry-run"], "rl_steps is 0.5 (float); a int is expected"),
        ([], "--out FOLDER is needed"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        launch.main(arguments)
    assert message in capsys.readouterr().err


def test_a_plan_by_hand():
    config = RunConfig(rl_steps=10, questions_per_step=4, group_size=8, n_hybrid=4, max_completion=100)
    config = config.replace(eval_every=4, n_eval=5, n_final=6, updates_per_step=2)
    rows = dict(plan_of(config, tokens_per_sec=10.0)[["what", "how many"]].itertuples(index=False))
    assert rows["rollouts in training"] == "320" and rows["of them hybrid"] == "16"
    assert rows["rollouts of a backward pass"] == "by size"
    assert rows["answers in evaluations"] == "32"  # 1 + 3 evaluations of 5, and 6 twice
    assert rows["completion tokens at most"] == "35,200" and rows["hours at most"] == "1.0"
    assert (
        dict(plan_of(config.replace(method="grpo"))[["what", "how many"]].itertuples(index=False))["of them hybrid"]
        == "0"
    )


@pytest.mark.parametrize("name", PROFILES)
def test_a_dry_run_prints_a_plan_of_every_profile_and_starts_nothing(name, capsys, monkeypatch):
    monkeypatch.setattr(launch.study, "runs_folder", lambda profile: ROOT / "nowhere")
    monkeypatch.setattr(launch.study, "find_runs", lambda plan, profile: [])
    assert print_plans(load_profile(name)) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"profile {name}: ") and "completion tokens at most" in out
    assert ("missing" in out) == (name != "paper")


def test_every_value_of_the_paper_profile_names_its_source():
    paper = load_profile("paper")
    assert set(paper.sources) == set(paper.run) and all(
        s.startswith(("arXiv 2603.03078", "ours")) for s in paper.sources.values()
    )
    config = paper.config("rapo")
    assert (config.shaping_weight, config.advantage_weight, config.retrieval_prob) == (0.05, 0.2, 0.5)
    assert (config.group_size, config.n_hybrid, config.questions_per_step, config.clip) == (16, 8, 32, 0.28)
