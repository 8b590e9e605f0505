"""Tables around retrievals, and what the report reads of runs."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from rapo_lib.config import DATA, RunConfig
from rapo_lib.hybrids import credit_table, note_table, retrieval_table, rollout_gradients, rollout_table, with_holes
from rapo_lib.objective import rapo_loss
from rapo_lib.policy import add_lora
from rapo_lib.runs import find_runs, inputs_hash, plan_runs, result_table, runs_folder
from rapo_lib.stats import Interval, Verdict, compare_variants
from rapo_lib.tasks import Question
from rapo_lib.traces import Protocol, Rollout, Segment
from rapo_lib.trainer import score_tokens

QUESTION = Question(
    "q", "text", "7", info={"skills": ["find", "calc"], "words": ["hotel", "plus"], "operands": [0, 17]}
)


@pytest.fixture(scope="module")
def protocol():
    from transformers import AutoTokenizer

    return Protocol(AutoTokenizer.from_pretrained(DATA / "pocket" / "tokenizer"))


def policy_segment(entropy: float) -> Segment:
    return Segment("policy", (1, 2), (-0.1, -0.1), (entropy, entropy))


def call(tool: str, query: str) -> Segment:
    return Segment("tool", (3,), info={"tool": tool, "query": query, "ok": True, "error": None})


def retrieval(protocol, text: str, source: str) -> Segment:
    info = {
        "trace_id": 0,
        "score": 0.5,
        "teacher": "t",
        "noisy": source != "q",
        "source_question_id": source,
        "n_steps": 1,
    }
    return Segment("retrieval", protocol.retrieval_ids(text), info=info)


def test_own_hard_steps_are_told_from_copies(protocol):
    trace = "<think> need hotel of 42</think><search> code 42 hotel</search><result> Lumiro</result>"
    segments = [policy_segment(0.6), call("search", "x of y"), retrieval(protocol, trace, "q"), policy_segment(0.3)]
    copier = Rollout("q", (9,), [*segments, call("search", " code 42 hotel")], hybrid=True, reward=1.0)
    doer = Rollout(
        "q", (9,), [policy_segment(0.1), call("search", "code 55 hotel"), call("browse", "code 1 hotel")], reward=0.0
    )
    table = rollout_table([copier, doer], [QUESTION], protocol)
    assert table["own_hard"].tolist() == [1, 1] and table["copied"].tolist() == [1, 0]
    assert table["success"].tolist() == [True, False] and table["retrievals"].tolist() == [1, 0]
    wrong_form = Rollout("q", (9,), [policy_segment(0.1), call("search", "hotel of 42")], reward=0.0)
    (row,) = rollout_table([wrong_form], [QUESTION], protocol).to_dict("records")
    assert (row["own_hard"], row["own_wrong"]) == (0, 1)


def test_on_policy_rollouts_get_the_holes_of_their_partners(protocol):
    def step(k):
        return [Segment("policy", (10 + k,), (-0.1,), (0.1,)), call("python", str(k))]

    def rollout(place, *parts, hybrid=False, question="q"):
        return Rollout(question, (9,), [s for p in parts for s in p], place, hybrid, reward=1.0)

    note, two = [retrieval(protocol, "x", "q")], [retrieval(protocol, "x", "q")]
    two[0].info["n_steps"] = 2
    alone = [rollout(k, *(step(i) for i in range(4))) for k in range(3)]
    short, other = rollout(3, step(0)), rollout(0, step(0), step(1), question="other")
    hybrid = [
        rollout(4, step(0), note, step(2), note, hybrid=True),  # holes 1 and 3
        rollout(5, step(0), two, step(3), hybrid=True),  # holes 1 and 2
        rollout(6, step(0), step(1), hybrid=True),
        rollout(7, step(0), note, hybrid=True),  # its partner has no step there
    ]
    given = [*hybrid, other, *alone[::-1], short]  # the order of the list does not count, the place does
    found = with_holes(given)
    assert [(r.question_id, r.place) for r in found] == [(r.question_id, r.place) for r in given]
    own = {(r.question_id, r.place): [s.ids[0] for s in r.segments if s.origin == "policy"] for r in found}
    assert own["q", 0] == [10, 12] and own["q", 1] == [10, 13] and own["q", 2] == [10, 11, 12, 13]
    assert own["q", 3] == [10] and own["other", 0] == [10, 11]
    assert found[:4] == hybrid and [len(r.tool_calls) for r in alone] == [4, 4, 4]
    assert sum(s.origin == "tool" for s in found[-2].segments) == 2  # the observation goes with its step


def test_whose_value_the_next_step_names(protocol):
    def own(text):
        ids = protocol.tokenizer.encode(text, add_special_tokens=False)
        return Segment("policy", tuple(ids), (0.0,) * len(ids), (0.1,) * len(ids))

    result = Segment("tool", protocol.observation_ids("55"), info=call("python", "5").info)
    note = retrieval(protocol, "<think> a</think><python> 1 + 2</python><result> 42</result>", "other")
    said = {"42": "note", "55": "own", "42 + 55": "both", "7": "neither", "4": "neither"}
    for body, expected in said.items():
        first, after = (
            own("<think> a</think><python> 5</python>"),
            own(f"<think> need 42</think><python> {body}</python>"),
        )
        rollout = Rollout("q", (9,), [first, result, note, after])
        assert retrieval_table([rollout], protocol)["goes_on_from"].tolist() == [expected], body
    assert retrieval_table([Rollout("q", (9,), [result, note])], protocol)["goes_on_from"].tolist() == ["neither"]


def test_one_row_a_retrieval_with_the_steps_on_either_side(protocol):
    trace = "<think> a</think><python> 1 + 2</python><result> 3</result>"
    last = [policy_segment(0.6), retrieval(protocol, trace, "other")]
    rollouts = [Rollout("q", (9,), [*last, policy_segment(0.3)], reward=1.0), Rollout("q", (9,), last)]
    table = retrieval_table(rollouts, protocol)
    assert table["same_question"].tolist() == [False, False] and table["noisy"].tolist() == [True, True]
    np.testing.assert_allclose(table["h_before"], [0.6, 0.6])
    np.testing.assert_allclose(table["h_after"], [0.3, np.nan])
    assert list(retrieval_table([], protocol).columns) == list(table.columns)


def test_finished_runs_are_found_in_any_experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path))
    configs = {"one": [RunConfig(seed=0)], "two": [RunConfig(seed=1)]}
    (run,) = plan_runs({"other_name": [RunConfig(seed=0)]}, runs_folder("smoke") / "elsewhere")
    run.folder.mkdir(parents=True)
    row = {"config_hash": run.config.hash(), "inputs_hash": inputs_hash(run.config), "finished_at": 1.0, "pass@1": 0.5}
    (run.folder / "done.json").write_text(json.dumps(row), encoding="utf-8")
    found = find_runs(configs, profile="smoke")
    assert [r.variant for r in found] == ["one"] and found[0].folder == run.folder
    assert result_table(found)[["variant", "seed", "pass@1"]].values.tolist() == [["one", 0, 0.5]]
    assert result_table([]).empty and "pass@1" in result_table([])


def test_variants_are_compared_on_the_seeds_that_both_have():
    rows = [
        {"variant": v, "seed": s, "pass@1": p}
        for v, base in (("x", 0.5), ("y", 0.1))
        for s, p in enumerate(np.linspace(base, base + 0.1, 5))
    ]
    table = pd.DataFrame([*rows, {"variant": "x", "seed": 9, "pass@1": 0.0}])
    verdict = compare_variants(table, "x", "y")
    assert verdict.verdict == "reproduced" and verdict.difference.n == 5
    with pytest.raises(ValueError, match="no run of 'z'"):
        compare_variants(table, "x", "z")
    with pytest.raises(ValueError, match="no seed in common"):
        compare_variants(table[(table["seed"] == 9) | (table["variant"] == "y")], "x", "y")


def test_a_verdict_reads_as_a_sentence():
    assert (
        str(Verdict("reproduced", Interval(0.4, 0.3, 0.5, 5), "why"))
        == "reproduced: +40 points [+30, +50], n = 5 (why)"
    )
    assert str(Verdict("no verdict", Interval(-0.1, np.nan, np.nan, 1), "few")) == "no verdict: -10 points, n = 1 (few)"


def test_a_note_is_known_by_the_step_before_it_and_by_its_own(protocol):
    hard = retrieval(protocol, "<think> a</think><search> code 42 hotel</search><result> Lumiro</result>", "q")
    easy = retrieval(protocol, "<think> a</think><python> 1 + 2</python><result> 3</result>", "q")
    own = policy_segment(0.1)
    wrong_then_right = [own, call("search", " hotel of 42"), easy, own, call("search", "code 7 hotel"), easy]
    rollouts = [
        Rollout("q", (9,), [own, hard]),
        Rollout("q", (9,), wrong_then_right),
        Rollout("q", (9,), [own, call("browse", "code 7 hotel"), hard, retrieval(protocol, "no call", "q")]),
    ]
    table = note_table(rollouts, [QUESTION], protocol)
    assert table["before"].tolist() == ["none", "wrong", "right", "easy", "easy"]
    assert table["note"].tolist() == ["right", "easy", "easy", "right", "none"]
    assert len(table) == len(retrieval_table(rollouts, protocol))
    assert list(note_table([], [], protocol).columns) == ["before", "note"]


# ------------------------------------------------------------------------------------------------ credit

NOTE = Segment("retrieval", (8, 8, 8, 8), info={"n_steps": 1})


def pair(rl_step: int, rewards: tuple[float | None, float]) -> list[dict]:
    """A group of two: one whose entropy fell from 0.6 to 0.3 across a note of 4 of 8 tokens, and one without a note."""
    helped = Rollout("q", (9,), [policy_segment(0.6), NOTE, policy_segment(0.3)], 0, True, "answer", rewards[0])
    alone = Rollout("q", (9,), [policy_segment(0.4)], 1, False, "answer", rewards[1])
    return [{"rl_step": rl_step, "rollout": r} for r in (helped, alone)]


@pytest.mark.case(23)
def test_credit_of_a_failing_rollout_with_a_good_retrieval():
    table = credit_table(pair(5, (0.0, 1.0)), RunConfig(method="rapo"))
    np.testing.assert_allclose(table["z_ret"], [0.456957, 0.0], atol=1e-6)
    np.testing.assert_allclose(table["advantage"], [-0.8071, 0.6071], atol=2e-4)
    np.testing.assert_allclose(table["shaping"], [1 + 0.05 * 0.5, 1.0])
    assert table["retrievals"].tolist() == [1, 0] and table["hybrid"].tolist() == [True, False]
    aware = credit_table(pair(5, (0.0, 1.0)), RunConfig(method="rapo_sign_aware"))
    np.testing.assert_allclose(aware["advantage"], [-0.6071, 0.6071], atol=2e-4)
    plain = credit_table(pair(5, (0.0, 1.0)), RunConfig(method="rapo_no_rpo"))
    assert plain["advantage"].equals(plain["a_acc"].rename("advantage")) and plain["shaping"].eq(1).all()


def test_credit_is_shared_inside_one_rl_step_and_not_across():
    """Rewards 0, 1 and 1, 1: in the second group nothing differs, so its advantage is 0; pooled it would not be."""
    table = credit_table([*pair(5, (0.0, 1.0)), *pair(10, (1.0, 1.0))], RunConfig(method="rapo"))
    np.testing.assert_allclose(table["a_acc"], [-0.707, 0.707, 0.0, 0.0], atol=1e-3)
    np.testing.assert_allclose(table["a_ret"], [0.707, -0.707] * 2, atol=1e-3)
    lost = credit_table(pair(1, (None, 1.0)), RunConfig(method="rapo"))
    assert np.isnan(lost["reward"][0]) and lost["advantage"].tolist() == [0.0, 0.0]


def test_weighted_rollout_gradients_are_the_gradient_of_the_loss(tiny_policy):
    policy = add_lora(tiny_policy, 2, seed=0)
    rollouts = [
        Rollout("q", (5, 6, 7), [policy_segment(0.6), NOTE, policy_segment(0.3)]),
        Rollout("q", (5,), [policy_segment(0.4), call("search", "x")]),
        Rollout("q", (5, 6), [NOTE]),  # nothing of its own
    ]
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in weights:
            p.add_(0.1)  # a fresh adapter's second half is 0, and so is half of its gradient
    gradients = rollout_gradients(policy, rollouts)
    assert gradients.shape == (3, sum(p.numel() for p in weights)) and gradients[2].eq(0).all()
    ids = [torch.tensor([*r.prompt_ids, *r.completion_ids]) for r in rollouts]
    mask = [torch.tensor([0] * len(r.prompt_ids) + r.policy_mask) for r in rollouts]
    real = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    x, mask = (pad_sequence(part, batch_first=True) for part in (ids, mask))
    logps, _ = score_tokens(policy.model, x, real, mask[:, 1:])
    advantages, shaping = torch.tensor([-0.8, 0.6, 0.3]), torch.tensor([1.025, 1.0, 1.05])
    rapo_loss(logps, logps.detach(), mask[:, 1:], advantages, shaping).backward()
    expected = -torch.cat([p.grad.flatten() for p in weights])
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close((advantages * shaping) @ gradients / 3, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(rollout_gradients(policy, rollouts, temperature=0.5), gradients)


def test_gradients_need_something_to_train(tiny_policy):
    for p in tiny_policy.model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="trainable=True"):
        rollout_gradients(tiny_policy, [])
