"""A whole run on the pocket data: its files, its repeatability, its evaluation."""

import doctest
import json

import pandas as pd
import pytest
import torch
from conftest import make_model

from rapo_lib import evaluate as evaluation
from rapo_lib.config import DATA, RunConfig
from rapo_lib.evaluate import call_results, evaluation_row, pass_at_k, summarise, summarise_skills
from rapo_lib.execution import execute_run, load_trajectories, make_retriever
from rapo_lib.methods import get_method
from rapo_lib.policy import load_adapter, load_policy
from rapo_lib.runs import EXECUTOR, Run, finish_run
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.traces import Rollout, Segment, load_rollouts

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
        (tmp_path / name).mkdir()
        execute_run(config, tmp_path / name)
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
    assert not (tmp_path / "a" / "work").exists()
    load_adapter(load_policy(config.student), tmp_path / "a" / "adapter")


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_other_methods_run_from_a_folder(tmp_path, method):
    (tmp_path / "config.json").write_text(json.dumps({"method": method, **_overrides()}), encoding="utf-8")
    line = finish_run(EXECUTOR, tmp_path, "hash")
    done = json.loads((tmp_path / "done.json").read_text(encoding="utf-8"))
    assert "pass@1" in line and 0 <= done["pass@1"] <= 1 and done["inputs_hash"] == "hash"
    assert len(pd.read_parquet(tmp_path / "metrics.parquet")) >= 2


def _overrides() -> dict:
    names = (
        "rl_steps",
        "questions_per_step",
        "group_size",
        "n_hybrid",
        "eval_every",
        "n_eval",
        "n_final",
        "sft_epochs",
    )
    return {name: getattr(TINY, name) for name in names}


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
