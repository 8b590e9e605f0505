"""A whole run on the pocket data: its files, its repeatability, its evaluation."""

import dataclasses
import doctest
import json
import shutil
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file

from rapo_lib import evaluate as evaluation
from rapo_lib import execution
from rapo_lib.config import DATA, RunConfig
from rapo_lib.evaluate import call_results, evaluation_row, pass_at_k, summarise, summarise_skills
from rapo_lib.execution import execute_run, load_trajectories, make_buffer, make_retriever
from rapo_lib.faults import run_digest
from rapo_lib.guard import Alarm
from rapo_lib.methods import get_method
from rapo_lib.policy import load_adapter, load_policy
from rapo_lib.runs import EXECUTOR, Run, finish_run
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import SearchTool, Toolbox
from rapo_lib.traces import Rollout, Segment, load_rollouts, save_rollouts

TINY = RunConfig(
    rl_steps=2, questions_per_step=2, group_size=4, n_hybrid=2, eval_every=2, n_eval=4, n_final=6, sft_epochs=0.05
)
CLOCK = ["rollout_sec", "update_sec", "retrieval_sec", "tools_sec", "step_sec"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def policy():
    return load_policy("data/pocket/models/student")


@pytest.mark.case(35)
def test_a_run_leaves_its_files_and_is_repeatable(tmp_path):
    config = TINY.replace(method="rapo")
    for name in ("a", "b"):
        save_config(config, tmp_path / name)
        finish_run(EXECUTOR, tmp_path / name, "hash")
    one, two = Run("rapo", config, tmp_path / "a"), Run("rapo", config, tmp_path / "b")
    pd.testing.assert_frame_equal(one.table("metrics").drop(columns=CLOCK), two.table("metrics").drop(columns=CLOCK))
    pd.testing.assert_frame_equal(one.table("final"), two.table("final"))
    assert (tmp_path / "a" / "adapter" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "b" / "adapter" / "adapter_model.safetensors"
    ).read_bytes()

    evals = one.table("evals")
    assert list(evals["split"]) == ["validation", "validation", "test", "test"] and list(evals["rl_step"]) == [
        0,
        2,
        2,
        2,
    ]
    assert list(evals["n"]) == [4, 4, 6, 6] and list(evals["greedy"]) == [False, False, False, True]
    kept = one.rollouts()
    assert {r["rl_step"] for r in kept} == {1, 2} and len(kept) == 8
    for row in kept:
        r = row["rollout"]
        assert len(row["logps_after"]) == len(r.completion_ids) and r.reward is not None
    assert len({r["rollout"].question_id for r in kept[:4]}) == 1
    for path in tmp_path.glob("*/work"):
        shutil.rmtree(path)
    assert run_digest(tmp_path / "a") == run_digest(tmp_path / "b") != {}
    load_adapter(load_policy(config.student), tmp_path / "a" / "adapter")
    load_adapter(load_policy(config.student), tmp_path / "a" / "best")
    assert [p.name for p in (tmp_path / "a" / "adapters").iterdir()] == ["step2"]
    load_adapter(load_policy(config.student), tmp_path / "a" / "adapters" / "step2")
    done = json.loads((tmp_path / "a" / "done.json").read_text(encoding="utf-8"))
    assert done["best"]["rl_step"] == 2 and done["resumed_at"] == [] and done["alarms"] == []


@pytest.mark.parametrize("method", ["grpo", "sft", "sft_grpo", "luffy", "rapo_gated"])
def test_other_methods_run_from_a_folder(tmp_path, method):
    save_config(TINY.replace(method=method), tmp_path)
    row = finish_run(EXECUTOR, tmp_path, "hash")
    done = json.loads((tmp_path / "done.json").read_text(encoding="utf-8"))
    assert row == done and 0 <= done["pass@1"] <= 1 and done["inputs_hash"] == "hash"
    assert len(pd.read_parquet(tmp_path / "metrics.parquet")) >= 2


def save_config(config: RunConfig, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test catches it."""


def stopped_run(monkeypatch, config: RunConfig, folder: Path, name: str, number: int) -> None:
    """Do a run until the n-th call of a name in rapo_lib.execution."""
    real, calls = getattr(execution, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(execution, name, call)
        with pytest.raises(Killed):
            execute_run(config, folder)


@pytest.mark.case(34)
@pytest.mark.parametrize(
    ("method", "name", "number", "after"),
    [
        ("rapo", "score_rollouts", 2, 1),  # in the second RL step, before its checkpoint
        ("rapo", "evaluate", 4, 2),  # between the two test evaluations, when the training is over
        ("grpo", "evaluate", 2, 1),
        ("luffy", "evaluate", 2, 1),
        ("sft_grpo", "score_rollouts", 2, 1),
        ("sft", "evaluate", 2, 15),
        ("sft", "save_adapter", 1, 15),
    ],
)
def test_a_run_that_is_taken_up_again_ends_as_the_unbroken_one(tmp_path, monkeypatch, method, name, number, after):
    config = TINY.replace(method=method, sft_epochs=0.22)
    monkeypatch.setattr(execution, "SFT_EVERY", 7)
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    whole = execute_run(config, tmp_path / "whole")
    stopped_run(monkeypatch, config, tmp_path / "broken", name, number)
    assert (tmp_path / "broken" / "work").exists()
    facts = execute_run(config, tmp_path / "broken")
    assert facts["resumed_at"] == [after] and whole["resumed_at"] == []
    clock = {"train_sec": 0, "resumed_at": []}
    assert facts | clock == whole | clock and facts["train_sec"] > 0
    for path in tmp_path.glob("*/work"):
        shutil.rmtree(path)
    assert run_digest(tmp_path / "broken") == run_digest(tmp_path / "whole") != {}
    metrics = pd.read_parquet(tmp_path / "broken" / "metrics.parquet")
    step = "update" if method == "sft" else "rl_step"
    assert list(metrics[step]) == list(range(1, len(metrics) + 1))


@pytest.mark.case(34)
def test_sft_before_rl_is_taken_up_again_too(tmp_path, monkeypatch):
    config = TINY.replace(method="sft_grpo", sft_epochs=0.22)
    monkeypatch.setattr(execution, "SFT_EVERY", 7)
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    whole = execute_run(config, tmp_path / "whole")
    stopped_run(monkeypatch, config, tmp_path / "broken", "RAPOTrainer", 1)  # SFT is over, RL has not begun
    facts = execute_run(config, tmp_path / "broken")
    assert facts | {"train_sec": 0} == whole | {"train_sec": 0}
    for path in tmp_path.glob("*/work"):
        shutil.rmtree(path)
    assert run_digest(tmp_path / "broken") == run_digest(tmp_path / "whole") != {}
    evals, metrics = (pd.read_parquet(tmp_path / "whole" / f"{n}.parquet") for n in ("evals", "metrics"))
    assert list(metrics["rl_step"]) == [1, 2] and evals["train_sec"][0] > 0  # the seconds of SFT stand at RL step 0


@pytest.mark.case(34)
def test_rollouts_that_changed_under_an_interrupted_run_are_named(tmp_path, monkeypatch):
    config = TINY.replace(method="rapo")
    stopped_run(monkeypatch, config, tmp_path, "evaluate", 3)
    path = tmp_path / "rollouts.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"rl_step":1', '"rl_step":3', 1), encoding="utf-8")
    with pytest.raises(ValueError, match="rollouts.jsonl: sha256 of its first .* the checkpoint checkpoint-4 expects"):
        execute_run(config, tmp_path)


def test_a_folder_with_another_runs_checkpoint_is_refused(tmp_path, monkeypatch):
    config = TINY.replace(method="grpo")
    stopped_run(monkeypatch, config, tmp_path, "evaluate", 2)
    with pytest.raises(ValueError, match="belongs to another run: learning_rate is 0.002 there and 0.001 here"):
        execute_run(config.replace(learning_rate=1e-3), tmp_path)


@pytest.mark.parametrize("method", ["rapo", "sft"])
def test_trajectories_in_ids_of_another_tokenizer_are_refused(tmp_path, method):
    rows = load_rollouts(DATA / "pocket" / "trajectories" / "teacher_exploration.jsonl")[:3]
    rows[1].prompt_ids = (*rows[1].prompt_ids, 151_645)
    save_rollouts(tmp_path / "others.jsonl", rows)
    with pytest.raises(ValueError, match="others.jsonl, line 2: prompt_ids holds 151645, the vocabulary has 588 ids"):
        execute_run(TINY.replace(method=method, buffer=str(tmp_path / "others.jsonl")), tmp_path)


@pytest.mark.case(36)
def test_a_run_whose_tools_are_missing_does_not_start(tmp_path, monkeypatch):
    documents = [{"title": "capital of Mora", "text": "Lumiro"}]
    monkeypatch.setattr(execution, "make_pocket_toolbox", lambda split: Toolbox([SearchTool(documents)]))
    with pytest.raises(RuntimeError, match="tools missing: browse, python; the toolbox has search"):
        execute_run(TINY, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.case(38)
def test_a_run_that_collapses_says_so_and_keeps_its_best_adapter(tmp_path, monkeypatch):
    """Validation .5 after step 1 and .25 after step 2: the adapter of step 1 is kept, and the alarm is told."""
    rates = iter([0.0, 0.5, 0.25])

    class Guard:
        def update(self, row):
            return Alarm(2, "reward", "the reward fell") if row["rl_step"] == 2 else None

    def evaluate(self, step):
        self.evals.append({"pass@1": next(rates)})
        return self.evals[-1]["pass@1"]

    monkeypatch.setattr(execution, "CollapseGuard", Guard)
    monkeypatch.setattr(execution.Recorder, "evaluate", evaluate)
    facts = execute_run(TINY.replace(method="rapo", eval_every=1), tmp_path)
    assert facts["best"] == {"rl_step": 1, "pass@1": 0.5} and facts["alarms"] == ["the reward fell"]
    base = load_policy(TINY.student)
    weights = {}
    for name in ("best", "adapter"):
        weights[name] = load_file(tmp_path / name / "adapter_model.safetensors")
    assert any(not weights["best"][k].equal(v) for k, v in weights["adapter"].items())
    load_adapter(base, tmp_path / "best")


def test_the_buffer_is_built_from_what_the_configuration_names(policy):
    train = load_pocket_questions("exploration", "train")
    config = RunConfig(noise_prob=0.25, leak_guard=False, exclude_same_question=True)
    assert make_retriever(config, get_method("grpo"), policy.protocol, train) is None
    retriever = make_retriever(config, get_method("rapo_to"), policy.protocol, train)
    assert (retriever.noise_prob, retriever.leak_guard, retriever.exclude_same_question) == (0.25, False, True)
    assert retriever.unit == "trajectory" and {t.teacher for t in retriever.buffer.traces} == {"teacher"}
    kept = load_trajectories(config, policy.protocol, train)
    assert all(r.reward == 1.0 for r in kept) and len({t.question_id for t in retriever.buffer.traces}) == len(
        {r.question_id for r in kept}
    )


def test_a_drawn_number_of_trajectories_is_the_same_for_every_method(policy):
    train = load_pocket_questions("exploration", "train")
    kept = {}
    for seed in (0, 1):
        config = RunConfig(n_trajectories=12, seed=seed)
        chosen = load_trajectories(config, policy.protocol, train)
        traces = make_retriever(config, get_method("rapo"), policy.protocol, train).buffer.traces
        assert len(chosen) == 12 and {r.question_id for r in chosen} == {t.question_id for t in traces}
        kept[seed] = [(r.question_id, r.place) for r in chosen]
    everything = [(r.question_id, r.place) for r in load_trajectories(RunConfig(), policy.protocol, train)]
    assert kept[0] != kept[1] and kept[0] == [key for key in everything if key in set(kept[0])]
    every = RunConfig(n_trajectories=len(everything))
    assert [(r.question_id, r.place) for r in load_trajectories(every, policy.protocol, train)] == everything
    with pytest.raises(ValueError, match=f"n_trajectories is {len(everything) + 1}; allowed: 1 to {len(everything)}"):
        load_trajectories(RunConfig(n_trajectories=len(everything) + 1), policy.protocol, train)


def test_a_teacher_can_be_held_to_anothers_coverage(policy):
    train = load_pocket_questions("exploration", "train")
    count = {}
    for buffer in ("teacher", "weak", "teacher&weak", "teacher&weak+weak"):
        chosen = load_trajectories(RunConfig(buffer=buffer), policy.protocol, train)
        count[buffer] = Counter(r.question_id for r in chosen)
    strong, weak, held = count["teacher"], count["weak"], count["teacher&weak"]
    assert held == strong & weak and 0 < held.total() < strong.total()
    assert count["teacher&weak+weak"] == held + weak
    retriever = make_retriever(RunConfig(buffer="teacher&weak"), get_method("rapo"), policy.protocol, train)
    assert {t.teacher for t in retriever.buffer.traces} == {"teacher"}


def test_single_steps_cannot_be_counted_as_trajectories(policy, tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"key": "what is it?", "value": "<search>x</search><result>y</result>", "reward": 1.0}\n', "utf-8")
    train = load_pocket_questions("exploration", "train")
    with pytest.raises(ValueError, match="n_trajectories is 3, but .* holds single steps; allowed: 0"):
        make_buffer(RunConfig(buffer=str(path), n_trajectories=3), policy.protocol, train)


# ------------------------------------------------------------------------------------------ evaluation


def test_examples_in_docstrings():
    assert doctest.testmod(evaluation).failed == 0


def test_right_rollouts_use_right_forms(policy):
    questions = {q.id: q for q in load_pocket_questions("exploration", "train")}
    rollouts = load_rollouts(DATA / "pocket" / "trajectories" / "teacher_exploration.jsonl")[:200]
    rows = [evaluation_row(r, questions[r.question_id], policy.protocol) for r in rollouts]
    table = pd.DataFrame(rows)
    skills = summarise_skills(table[table.correct]).dropna()
    assert (skills["rate"] > 0.97).all() and len(skills) == 8  # a wrong form reaches the answer only by luck
    assert (summarise_skills(table[~table.correct]).dropna()["rate"] < 0.97).any()
    total = summarise(table)
    assert total["n"][0] == 200 and total["low"][0] < total["pass@1"][0] < total["high"][0]
    assert summarise(table, "max_steps")["n"].sum() == 200
    assert summarise(table, ["family", "n_hard"])["n"].sum() == 200


def test_calls_are_judged_in_the_rollouts_own_state(policy):
    question = next(q for q in load_pocket_questions("exploration", "train") if q.info["skills"][0] == "search")
    word, start = question.info["words"][0], question.info["chain"][0]

    def calls(*queries: tuple[str, str, str]) -> list[tuple[str, bool]]:
        segments = []
        for tool, query, result in queries:
            segments.append(Segment("policy", (1,), (0.0,), (0.0,)))
            segments.append(
                Segment(
                    "tool", policy.protocol.observation_ids(result), info={"tool": tool, "query": query, "ok": True}
                )
            )
        return call_results(Rollout(question.id, (1,), segments), question, policy.protocol)

    assert calls(("search", f"{word} of {start}", "Belo")) == [("search", True)]
    assert calls(("browse", f"{word} of {start}", "Belo")) == [("search", False)]
    assert calls(("search", f"{word} of Nobody", "Belo")) == [("search", False)]
    assert calls() == []
    too_many = [("search", "x", "none")] * 9
    assert len(calls(*too_many)) == len(question.info["skills"])


def test_pass_at_k():
    assert pass_at_k([[1, 0], [0, 0]], 1) == 0.25 and pass_at_k([[1, 0], [0, 0]], 2) == 0.5
    with pytest.raises(ValueError, match="k is 3; allowed: 1 to 2"):
        pass_at_k([[1, 0]], 3)


@pytest.mark.parametrize("method", ["rapo", "sft"])
def test_a_qwen_with_another_tokenizer_learns_from_the_pocket_teacher(tmp_path, split_tokenizer, method):
    """The profile `qwen` in small: a Qwen2 or Qwen3 whose tokenizer cuts the tags into several ids."""
    folder = tmp_path / "model"
    make_model(split_tokenizer, "qwen2", max_position_embeddings=2048).save_pretrained(folder)
    split_tokenizer.save_pretrained(folder)
    config = TINY.replace(
        method=method, student=str(folder), rl_steps=1, eval_every=1, n_eval=2, n_final=2, max_completion=96
    )
    execute_run(config, tmp_path)
    assert len(pd.read_parquet(tmp_path / "evals.parquet")) == 3 + (method == "rapo")

    student, train = load_policy(folder), load_pocket_questions("exploration", "train")
    example = load_trajectories(config, student.protocol, train)[0]
    text = student.protocol.decode(example.completion_ids)
    assert (
        text.startswith("<think> need")
        and student.protocol.prompt_text(train[0].text).startswith("<")
        and "boxed" in text
    )
    assert len(student.protocol.encode("</search>")) > 1
