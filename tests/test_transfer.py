"""Exams of finished policies: hand-counted rows, and a real run that answers again as it did; and lags of notes."""

import doctest
import json
import math

import pandas as pd
import pytest

import rapo_lib.transfer as transfer
from rapo_lib.config import load_profile
from rapo_lib.pocket.files import POCKET
from rapo_lib.pocket.world import SKILLS
from rapo_lib.policy import load_adapter, load_policy, load_tokenizer
from rapo_lib.runs import Run, finish_run, inputs_hash
from rapo_lib.tasks import Question
from rapo_lib.traces import Protocol, Rollout, Segment
from rapo_lib.transfer import exam_row, note_lags, own_exams, spare_limits, take_exam, transfer_table, with_adapter


def test_examples_in_docstrings():
    result = doctest.testmod(transfer)
    assert result.attempted and not result.failed


def answers(*rows: dict) -> pd.DataFrame:
    """A table of `evaluate`: no calls unless a row says so."""
    none = {f"{kind}_{s}": 0 for kind in ("calls", "right") for s in SKILLS}
    usual = {"correct": False, "end_reason": "answer", "steps": 5, "max_steps": 5, "entropy": 0.0}
    return pd.DataFrame([none | usual | row for row in rows])


def test_a_row_counts_what_became_of_the_rollouts():
    row = exam_row(
        answers(
            {"correct": True, "calls_find": 1, "right_find": 1, "calls_table": 2, "right_table": 1},
            {"steps": 3, "entropy": 0.4, "calls_convert": 3},
            {"end_reason": "budget", "calls_calc": 2, "right_calc": 2},
            {"end_reason": "format", "steps": 0},
        )
    )
    assert row["n"] == 4 and row["pass@1"] == row["early"] == row["out_of_steps"] == row["broken"] == 0.25
    assert row["beyond"] == (-2 - 5) / 4 and row["entropy"] == pytest.approx(0.1)
    assert row["rate_easy"] == 3 / 4 and row["rate_hard"] == 1 / 4


def test_a_chain_that_breaks_off_is_not_an_early_answer_and_spare_steps_are_counted():
    row = exam_row(answers({"end_reason": "format", "steps": 2}, {"correct": True, "steps": 8}))
    assert row["early"] == 0 and row["beyond"] == (-3 + 3) / 2


def test_without_calls_there_is_no_rate():
    row = exam_row(answers({"calls_find": 2, "right_find": 1}))
    assert row["rate_hard"] == 0.5 and math.isnan(row["rate_easy"])


def test_spare_steps_may_not_be_negative():
    with pytest.raises(ValueError, match="extra_steps is -1; allowed: 0 or more"):
        spare_limits(load_profile("smoke").config("sft"), -1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Run:
    """A real run, some optimiser steps of SFT long."""
    config = load_profile("smoke", n_eval=4, n_final=12, sft_epochs=0.15).config("sft")
    folder = tmp_path_factory.mktemp("runs") / f"seed0-{config.hash()}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(vars(config)), encoding="utf-8")
    finish_run("rapo_lib.execution:execute_run", folder, inputs_hash(config))
    return Run("sft", config, folder)


def test_a_policy_that_takes_its_own_exam_again_answers_the_same(trained):
    own, again = own_exams([trained]), transfer_table([trained], ["exploration"])
    pd.testing.assert_frame_equal(own, again, check_exact=True)
    assert own["n"][0] == 12 and 0 < own["rate_easy"][0] < 1  # not a table of zeros
    assert own_exams([trained], n=5)["n"][0] == 5


def test_another_exam_has_other_questions_and_says_whose(trained):
    table = transfer_table([trained], ["easy", "exploration"], n=6, extra_steps=2)
    assert table["tested_on"].tolist() == ["easy", "exploration"]
    assert set(table["trained_on"]) == {"exploration"} and set(table["extra_steps"]) == {2} and set(table["n"]) == {6}
    policy = load_adapter(load_policy(trained.config.student), trained.folder / "adapter")
    easy, tight = (take_exam(policy, trained.config, "easy", n=6, extra_steps=k) for k in (2, 0))
    assert [q.rsplit("-", 1)[0] for q in easy["question_id"]] == ["easy-test"] * 6
    assert exam_row(easy) == table.iloc[0][list(exam_row(easy))].to_dict()
    assert (tight["steps"] <= tight["max_steps"]).all() and (easy["steps"] <= easy["max_steps"] + 2).all()


def test_runs_without_a_loadable_adapter_are_left_out(trained, tmp_path):
    assert with_adapter([trained]) == [trained]
    done = json.loads((trained.folder / "done.json").read_text(encoding="utf-8"))
    taken_over, bare = (Run("sft", trained.config, tmp_path / name) for name in ("carried", "bare"))
    for run, row in ((taken_over, done | {"carried": {}}), (bare, done)):
        run.folder.mkdir()
        (run.folder / "done.json").write_text(json.dumps(row), encoding="utf-8")
    (taken_over.folder / "adapter").mkdir()
    assert with_adapter([taken_over, bare, Run("sft", trained.config, tmp_path / "nowhere")]) == []


def test_a_note_lags_by_the_steps_that_were_spent_beyond_its_place_in_the_chain():
    """The chain of `the first of the ship of the feet of 42`: convert, find, follow."""
    info = {"skills": ["convert", "find", "follow"], "words": ["feet", "ship", "first"], "operands": [None] * 3}
    question = Question("q", "", "Tolano", info=info | {"chain": ["42", "61", "Hukuti", "Tolano"]})
    protocol = Protocol(load_tokenizer(POCKET / "tokenizer"))

    def own(text):
        ids = protocol.encode(text)
        return Segment("policy", ids, (0.0,) * len(ids), (0.0,) * len(ids))

    def note(text):
        return Segment("retrieval", protocol.retrieval_ids(text))

    result = Segment("tool", protocol.observation_ids("61"))
    convert = "<think> need feet of 42</think><python> convert(42, feet)</python><result> 61</result>"
    find = "<think> need ship of 61</think><search> code 61 ship</search><result> Hukuti</result>"
    foreign = "<think> need ship of 99</think><search> code 99 ship</search><result> Hukuti</result>"
    segments = [own("<python> 42 * feet</python>"), result, note(find), own("<browse> x</browse>"), result]
    segments += [note(convert), note(foreign), note("<think> done</think><answer> \\boxed{ Tolano}</answer>")]
    table = note_lags([Rollout("q", (), segments, place=7), Rollout("q", (), segments[:2])], [question], protocol)
    assert table["steps_before"].tolist() == [1, 3, 4, 5] and set(table["place"]) == {7}
    # find stands at place 1 of the chain and comes after one step; convert stands at 0 and comes after three
    assert table["lag"].tolist()[:2] == [0, 3] and table["lag"].isna().tolist() == [False, False, True, True]


def test_rollouts_without_a_note_give_an_empty_table_with_its_columns():
    assert note_lags([], [], None).columns.tolist() == ["question_id", "place", "steps_before", "lag"]
