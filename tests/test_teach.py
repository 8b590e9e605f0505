"""A teacher on another question set, and a whole run that learns from it: nothing here knows the pocket world."""

from __future__ import annotations

import json
import os

import pandas as pd
import pytest
import torch
from conftest import make_model

from rapo_lib import execution, runs
from rapo_lib.config import RunConfig
from rapo_lib.execution import execute_run, make_buffer, questions_of, toolbox_of
from rapo_lib.methods import get_method
from rapo_lib.policy import load_policy
from rapo_lib.rollout import SamplingLimits
from rapo_lib.runs import inputs_hash
from rapo_lib.teach import main, teach
from rapo_lib.traces import load_rollouts, save_jsonl
from rapo_lib.trainer import _check as check_fit

SETTINGS = dict(rl_steps=1, questions_per_step=2, group_size=4, n_hybrid=2, eval_every=1, n_eval=2, n_final=2)
STEP = "<think> use python</think><python> print({a} * {b})</python>"
ANSWER = "<think> done</think><answer> \\boxed{{{c}}}</answer>"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.set_grad_enabled(True)


@pytest.fixture
def model(tmp_path, split_tokenizer):
    folder = tmp_path / "model"
    make_model(split_tokenizer, "qwen2", max_position_embeddings=2048).save_pretrained(folder)
    split_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def sums(tmp_path):
    """A question set of files: products."""
    folder = tmp_path / "sums"
    for split, first in (("train", 2), ("validation", 20), ("test", 40)):
        rows = [{"id": f"{split}-{a}", "text": f"{a} * 7?", "answer": str(7 * a)} for a in range(first, first + 4)]
        save_jsonl(folder / f"{split}.jsonl", rows)
    return folder


def config_of(model, sums, **more):
    values = dict(student=str(model), questions=str(sums), max_completion=96, **SETTINGS) | more
    return RunConfig().replace(**values)


def written(policy, script, questions, n):
    """A teacher that calls Python and answers rightly, but for its last trajectory of each question."""
    turns = []
    for q in questions:
        a = int(q.text.split()[0])
        for place in range(n):
            turns.append([STEP.format(a=a, b=7), ANSWER.format(c=7 * a if place < n - 1 else 0)])
    return script(policy, turns)


def test_a_teacher_s_file_is_scored_and_goes_on_where_it_stopped(model, sums, tmp_path, script):
    config, policy = config_of(model, sums), load_policy(model)
    questions, toolbox = questions_of(config, "train"), toolbox_of(config, "train")
    limits, lines = SamplingLimits.of(config), []
    written(policy, script, questions[:2], 2)
    out = tmp_path / "t.jsonl"
    teach(policy, questions[:2], toolbox, out, n=2, limits=limits, say=lines.append)
    first = out.read_bytes()
    decoder = written(policy, script, questions[2:], 2)
    counts = teach(policy, questions, toolbox, out, n=2, limits=limits, say=lines.append)
    assert out.read_bytes().startswith(first) and lines[1] == "2 of 4 questions are in t.jsonl already"
    assert len(decoder.fed) == 4 and dict(counts) == {"rollouts": 8, "right": 4, "questions": 4}
    rollouts = load_rollouts(out)
    assert [r.reward for r in rollouts] == [1.0, 0.0] * 4
    assert policy.protocol.decode(rollouts[0].segments[1].ids) == "<result> 14</result>"
    again = teach(policy, questions, toolbox, out, n=2, limits=limits, say=lines.append)
    assert again == counts and lines[-1] == "4 of 4 questions are in t.jsonl already"
    with pytest.raises(ValueError, match="holds 2 rollouts of a question, not 3; name another file"):
        teach(policy, questions, toolbox, out, n=3, limits=limits)
    with pytest.raises(ValueError, match="holds rollouts of other questions .'train-2'.; name another file"):
        teach(policy, questions_of(config, "test"), toolbox, out, n=2, limits=limits)
    with pytest.raises(ValueError, match="n is 0; at least 1"):
        teach(policy, questions, toolbox, out, n=0, limits=limits)


@pytest.mark.parametrize(("cut", "lines"), [(5, 2), (-1, 0), (-2, 1), (-3, 2)])
def test_what_a_kill_left_of_the_last_question_is_cut_off(model, sums, tmp_path, script, cut, lines):
    """Files of two questions, two rollouts each: cut in the middle of the last line, at its end, one line earlier, and
    at the first of a question's two lines."""
    config, policy = config_of(model, sums), load_policy(model)
    questions, toolbox = questions_of(config, "train"), toolbox_of(config, "train")
    how, out, said = {"n": 2, "limits": SamplingLimits.of(config)}, tmp_path / "t.jsonl", []
    written(policy, script, questions[:2], 2)
    teach(policy, questions[:2], toolbox, out, **how, say=lambda text: None)
    whole = out.read_bytes()
    rows = whole.splitlines(keepends=True)
    kept = {5: whole[:-5], -1: whole, -2: b"".join(rows[:3]), -3: b"".join(rows[:3]) + rows[3][:9]}[cut]
    out.write_bytes(kept)
    decoder = written(policy, script, questions[1:2], 2) if lines else None
    counts = teach(policy, questions[:2], toolbox, out, **how, say=said.append)
    assert dict(counts) == {"rollouts": 4, "right": 2, "questions": 2}
    assert [(r.question_id, r.place, r.reward) for r in load_rollouts(out)] == [
        (q.id, place, 1.0 - place) for q in questions[:2] for place in range(2)
    ]
    assert (said[0] == f"t.jsonl: {lines} lines of a question that was not finished are cut off") == bool(lines)
    assert decoder is None or len(decoder.fed) == 2


@pytest.mark.parametrize("method", ["rapo", "sft"])
def test_a_run_on_other_questions_learns_from_their_teacher(model, sums, tmp_path, script, monkeypatch, method):
    config, policy = config_of(model, sums), load_policy(model)
    questions = questions_of(config, "train")
    with monkeypatch.context():
        written(policy, script, questions, 2)
        teach(
            policy, questions, toolbox_of(config, "train"), tmp_path / "t.jsonl", n=2, limits=SamplingLimits.of(config)
        )
    monkeypatch.undo()
    config = config.replace(method=method, buffer=str(tmp_path / "t.jsonl"), sft_epochs=1.0)
    buffer = make_buffer(config, policy.protocol, questions)
    assert len(buffer.traces) == 4 and "print(2 * 7)" in buffer.traces[0].value
    execute_run(config, tmp_path / "run")
    evals = pd.read_parquet(tmp_path / "run" / "evals.parquet")
    assert list(evals["n"]) == [2] * len(evals) and set(evals["split"]) == {"validation", "test"}
    final = pd.read_parquet(tmp_path / "run" / "final.parquet")
    assert set(final["question_id"]) == {"test-40", "test-41"} and not [c for c in final if c.startswith("calls_")]


def test_test_questions_are_not_taught(capsys):
    with pytest.raises(SystemExit):
        main(["--teacher", "x", "--split", "test", "--out", "y"])
    assert "invalid choice: 'test'" in capsys.readouterr().err


def test_a_search_that_pocket_questions_cannot_use_is_refused():
    with pytest.raises(ValueError, match="search is 'http://x', but pocket questions are about facts that no server"):
        toolbox_of(RunConfig(search="http://x"), "train")


def test_a_question_set_that_needs_a_server_says_so():
    with pytest.raises(ValueError, match="hotpotqa needs a search"):
        toolbox_of(RunConfig(questions="hotpotqa"), "train")


def test_files_of_the_question_set_count_as_inputs(model, sums):
    config = config_of(model, sums, buffer=str(sums / "train.jsonl"))
    before = inputs_hash(config)
    rows = [json.loads(line) for line in (sums / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    save_jsonl(sums / "test.jsonl", [*rows[:-1], rows[-1] | {"answer": "1"}])
    assert inputs_hash(config) != before


def test_a_folder_of_questions_is_found_from_anywhere(model, sums, tmp_path, monkeypatch):
    """Notebooks run in a folder of their own; a path is then meant from the repository on, as for the student."""
    monkeypatch.chdir(model)
    below = os.path.relpath(sums, runs.ROOT)
    config = config_of(model, sums, questions=below, buffer=str(sums / "train.jsonl"))
    assert [q.text for q in questions_of(config, "train")][0] == "2 * 7?" and toolbox_of(config, "train").names
    before = inputs_hash(config)
    (sums / "test.jsonl").write_text("{}", encoding="utf-8")
    assert inputs_hash(config) != before


def test_the_reward_of_training_is_what_the_run_says(model, sums, tmp_path, script):
    config, policy = config_of(model, sums, method="grpo", reward="released"), load_policy(model)
    execute_run(config, tmp_path / "run")  # a random model never writes a valid rollout: -1 each
    assert pd.read_parquet(tmp_path / "run" / "metrics.parquet")["reward"].tolist() == [-1.0]
    assert set(pd.read_parquet(tmp_path / "run" / "evals.parquet")["pass@1"]) == {0.0}
    with pytest.raises(ValueError, match="unknown reward 'f1'; allowed: pocket, released"):
        execute_run(config.replace(reward="f1"), tmp_path / "other")
    with pytest.raises(ValueError, match="reward is 'released', of which a rollout may earn more than the teacher's"):
        check_fit(policy, None, config, get_method("luffy"), [object()])


def test_the_encoder_of_the_buffer_is_what_the_run_says(monkeypatch, model, sums):
    made = []
    monkeypatch.setattr(execution, "make_encoder", lambda name: made.append(name))
    config = RunConfig(encoder="minilm")
    policy = load_policy(config.student)
    make_buffer(config, policy.protocol, questions_of(config, "train"))
    assert made == ["minilm"] and get_method("rapo").retrieves
    monkeypatch.undo()
    with pytest.raises(ValueError, match="unknown encoder 'bert'; allowed: tfidf, minilm"):
        make_buffer(config.replace(encoder="bert"), policy.protocol, questions_of(config, "train"))
