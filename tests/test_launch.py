"""Runs from the command line, alone and on two processes, and plans that do nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from rapo_lib import launch, runs
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
    more = ["--profile", "pocket", "--method", method, "--processes", str(n_processes), "--out", str(folder), *settings]
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
    assert [d["processes"] for d in done] == [1, 2] and not (tmp_path / "2" / "work").exists()


def test_a_run_that_is_done_is_not_done_again_and_another_is_refused(tmp_path, monkeypatch):
    config = load_profile("smoke").config("grpo", rl_steps=1, eval_every=1, n_eval=2, n_final=2)
    out = tmp_path / "run"
    done = launch.launch(config, out)
    monkeypatch.setattr(runs, "finish_run", lambda *_: pytest.fail("done twice"))
    assert launch.launch(config, out) == done and "pass@1" in done
    with pytest.raises(ValueError, match="holds a run with other settings; name another folder"):
        launch.launch(config.replace(seed=1), out)


def test_a_folder_that_is_no_run_s_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1", encoding="utf-8")
    for place in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match="exists and holds no run; name a new folder"):
            launch.launch(RunConfig(), place)
    assert (tmp_path / "thesis.tex").read_text(encoding="utf-8") == "chapter 1"


def test_a_missing_process_is_noticed(capsys, monkeypatch, tmp_path):
    """`accelerate launch --cpu --num_processes 2` starts one process, and says nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        launch.main(["--processes", "2", "--out", str(tmp_path / "x")])
    assert "--processes is 2, but there is 1; start them with torchrun --nproc_per_node 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.check_processes(2) is None and launch.check_processes(None) is None


def test_a_configuration_file_says_it_all(tmp_path, monkeypatch):
    path, asked = tmp_path / "run.json", []
    path.write_text(json.dumps(dataclasses.asdict(RunConfig(method="sft", seed=3))), encoding="utf-8")
    monkeypatch.setattr(launch, "launch", lambda config, folder: asked.append(config) or {})
    launch.main(["--config", str(path), "--set", "sft_epochs=1", "--out", str(tmp_path / "x")])
    assert asked == [RunConfig(method="sft", seed=3, sft_epochs=1.0)]


def test_settings_have_the_types_of_their_fields():
    assert parse_settings(["buffer=7.jsonl", "leak_guard=true", "learning_rate=1e-5"]) == {
        "buffer": "7.jsonl",
        "leak_guard": True,
        "learning_rate": 1e-5,
    }
    with pytest.raises(ValueError, match="'rl_steps': expected name=value"):
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
    assert rows["GPU memory"] == "not computed"  # the pocket student has half a million parameters
    assert rows["answers in evaluations"] == "32"  # 1 + 3 evaluations of 5, and 6 twice
    assert rows["completion tokens at most"] == "35,200" and rows["hours at most"] == "1.0"
    assert (
        dict(plan_of(config.replace(method="grpo"))[["what", "how many"]].itertuples(index=False))["of them hybrid"]
        == "0"
    )


def test_the_memory_of_a_real_size_by_hand():
    """Qwen2.5-0.5B: 494,032,768 weights of 2 bytes; 8,798,208 of the adapter of 16; a token's keys and values take
    12,288 bytes, and one layer's 512 are repeated 7 times."""
    config = load_profile("qwen").config("rapo", max_completion=1488, rollouts_at_once=100)
    rows = dict(plan_of(config)[["what", "how many"]].itertuples(index=False))
    assert rows["GPU memory: weights"] == "1.0 GB" and rows["adapter and optimiser"] == "0.1 GB"
    assert rows["keys and values"] == "3.2 GB"  # 100 x (512 + 1,488) x (12,288 + 3,584) = 3.17e9
    assert rows["copy with the adapter merged"] == "0.7 GB"  # 357,826,560 x 2
    parts = 2 * 494_032_768 + 16 * 8_798_208 + 2 * 357_826_560 + 100 * 2000 * 15_872 + 100 * 5 * 4 * 151_936 + 2e9
    assert rows["all while sampling"] == f"{parts / 1e9:.1f} GB"
    four = plan_of(config.replace(rollouts_at_once=0), processes=8)
    (how,) = four[four["what"] == "keys and values"]["how it is computed"]
    assert how.startswith("64 rollouts at once x 2,000 tokens") and how.endswith("a process of 8, computed")


def test_a_profile_s_runs_are_added_up(capsys, monkeypatch):
    one = RunConfig(
        rl_steps=2, questions_per_step=3, group_size=4, eval_every=1, n_eval=5, n_final=6, max_completion=10
    )
    monkeypatch.setattr(launch.study, "everything", lambda *_: {"x": {"a": [one, one.replace(seed=1)], "b": [one]}})
    monkeypatch.setattr(launch.study, "plan_table", lambda *_: pd.DataFrame({"runs": [2]}))
    monkeypatch.setattr(launch.study, "time_line", lambda *_: "")
    print_plans(load_profile("pocket"), tokens_per_sec=0.5)
    out = capsys.readouterr().out
    assert "all of them, computed: 2 runs, 4 RL steps, 48 rollouts, 54 answers" in out  # 3 x 5 + 2 x 6 answers a run
    assert "1,020 completion tokens at most: 0.6 hours at 0 tokens a second" in out  # 2,040 seconds


def test_a_dry_run_of_some_notebooks_counts_their_runs_alone(capsys, monkeypatch):
    monkeypatch.setattr(launch.study, "find_runs", lambda plan, profile: [])
    assert runs.main(["notebooks", "--profile", "smoke", "--dry-run", "--only", "05,08"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.split("the notebooks' runs:\n")[1].splitlines()[1:5]]
    assert rows == [x.split() for x in ("training 3 0", "positive_control 2 0", "regimes 3 0", "health 1 0")]
    assert runs.main(["notebooks", "--profile", "smoke", "--dry-run", "--only", "00"]) == 0
    assert capsys.readouterr().out.endswith("\nno training runs in these notebooks\n")
    with pytest.raises(SystemExit):
        runs.main(["notebooks", "--dry-run", "--only", "42"])
    assert "no notebook begins with '42'; there are: 00_start_here" in capsys.readouterr().err


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
