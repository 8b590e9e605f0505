"""Divergence and information of next steps: against hand-computed values, full enumeration, and in real situations."""

import doctest
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import FakeQuestion, ScriptedDecoder, make_model

from rapo_lib import peek
from rapo_lib.buffer import StepTraceBuffer, answer_span, holds_answer
from rapo_lib.config import DATA, RunConfig, child_rng
from rapo_lib.peek import (
    History,
    Information,
    PolicySteps,
    Situation,
    SymmetricChannel,
    agreement,
    boundaries,
    collect_situations,
    conditional_information,
    helpful_traces,
    information_along,
    known_channel,
    listening_table,
    peek_table,
    predictive_mixture,
    random_traces,
    step_divergence,
    token_divergence,
)
from rapo_lib.policy import Policy, load_policy, sample_tokens
from rapo_lib.rollout import SamplingLimits
from rapo_lib.tasks import Question, load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import Rollout, Segment, StepTrace

LN2 = math.log(2)
LIMITS = SamplingLimits(max_completion=200, max_calls=8, max_steps=3)


def test_doctests():
    assert doctest.testmod(peek).failed == 0 < doctest.testmod(peek).attempted


# --------------------------------------------------------------------------------------- exact along a step


def test_token_divergence_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]] * 2).double(), torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]).double()
    np.testing.assert_allclose(token_divergence(p.log(), q.log()), [0.25 * LN2, 0.0], atol=1e-15)
    sure, half = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.5, 0.5]]).double()
    assert token_divergence(sure.log(), half.log()).item() == pytest.approx(LN2)
    assert token_divergence(half.log(), sure.log()).item() == math.inf
    assert token_divergence(sure.log(), sure.log()).item() == 0.0


def test_mixture_weights_follow_the_prefix():
    a, b = [0.8, 0.2], [0.4, 0.6]
    logps = torch.tensor([[a, a, a], [b, b, b]]).double().log()
    # After one 0 the weights are 2 : 1, after 0 and 1 they are 0.8 * 0.2 : 0.4 * 0.6 = 2 : 3.
    expected = [0.6, (2 * 0.8 + 0.4) / 3, (2 * 0.8 + 3 * 0.4) / 5]
    np.testing.assert_allclose(predictive_mixture(logps, [0, 1, 0]).exp()[:, 0], expected)
    impossible = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.9, 0.1]]]).double().log()
    np.testing.assert_allclose(predictive_mixture(impossible, [0, 0]).exp(), [[0.5, 0.5], [0.5, 0.5]])


# ------------------------------------------------------------------------------------ where the value is known


@pytest.mark.parametrize("n_traces, error", [(2, 0.1), (8, 0.3), (5, 1.0)])
def test_information_of_a_symmetric_channel_has_a_formula(n_traces, error):
    coin = sum(-x * math.log(x) for x in (error, 1 - error) if x)
    formula = math.log(n_traces) - coin - error * math.log(n_traces - 1)
    assert SymmetricChannel(n_traces, error).information == pytest.approx(formula, abs=1e-12)
    assert SymmetricChannel(n_traces, error, silent=2).information == pytest.approx(formula, abs=1e-12)


@pytest.mark.parametrize("silent", [0, 1, 3])
@pytest.mark.parametrize("error", [0.0, 0.1, 0.875])
def test_one_look_is_estimated_exactly_wherever_it_stands_in_the_step(silent, error):
    found = known_channel(8, error, silent=silent, n_histories=3)
    assert found["estimate"] == pytest.approx(found["exact"], abs=1e-12)
    assert found["standard_error"] == pytest.approx(0.0, abs=1e-12)
    known = {0.0: math.log(8), 0.875: 0.0}
    assert found["exact"] == pytest.approx(known.get(error, found["exact"]), abs=1e-12) and found["cap"] == math.log(8)


def test_a_symbol_that_needs_the_others_says_nothing_by_itself():
    """With a silent symbol before it, the marginal of the second symbol is uniform: only the whole step informs."""
    channel = SymmetricChannel(4, 0.1, silent=1)
    for k in range(4):
        lines = torch.stack(channel.logps((k,), [(u, 0) for u in range(4)])).exp()  # (first symbol, place, symbol)
        np.testing.assert_allclose(lines[:, 0], 0.25)
        np.testing.assert_allclose(lines[:, 1].mean(0), 0.25)
    assert known_channel(4, 0.1, silent=1, n_histories=2)["estimate"] > 0.9


@pytest.mark.parametrize("n_traces, error, looks, silent", [(8, 0.3, 2, 0), (4, 0.4, 3, 1)])
def test_several_looks_agree_within_their_sampling_error(n_traces, error, looks, silent):
    found = known_channel(n_traces, error, looks=looks, silent=silent, n_histories=200)
    assert 0 < found["standard_error"] < 0.03
    assert abs(found["estimate"] - found["exact"]) < 4 * found["standard_error"]
    # Looks that are added up as if each were the first would give more than this.
    single = SymmetricChannel(n_traces, error).information
    assert found["exact"] < looks * single - 10 * found["standard_error"]


def test_information_is_capped_and_equal_traces_carry_none():
    found = known_channel(8, 0.0, looks=3)
    assert found["estimate"] == pytest.approx(found["cap"], abs=1e-12)
    channel = SymmetricChannel(3, 0.0)
    same = conditional_information(channel, [[(1,), (1,)]], n_samples=2, seed=0)
    assert same.values == pytest.approx([0.0], abs=1e-12) and same.cap == pytest.approx(LN2)
    halves = conditional_information(channel, [[(1,), (1,), (2,), (2,)]], n_samples=1, seed=0)
    assert halves.mean == pytest.approx(LN2)
    alone = conditional_information(channel, [[(1,)]], n_samples=1, seed=0)
    assert alone.mean == pytest.approx(0.0, abs=1e-12) and alone.cap == 0.0 and math.isnan(alone.standard_error)


def test_standard_error_over_histories():
    assert Information(np.array([1.0, 2.0, 3.0, 6.0]), 2.0).standard_error == pytest.approx(math.sqrt(14 / 3 / 4))


def test_step_divergence_of_the_channel():
    error, k = 0.2, 5
    one = (1 - error - error / (k - 1)) * math.log((1 - error) / (error / (k - 1)))
    for looks, silent in ((1, 0), (1, 2), (3, 1)):
        channel = SymmetricChannel(k, error, looks, silent)
        found = step_divergence(channel, [(0,), (2,)], [(1,), (2,)], n_samples=3, seed=0)
        assert found.tolist() == pytest.approx([looks * one, 0.0], abs=1e-12)


def test_divergence_beside_the_information():
    channel = SymmetricChannel(3, 0.1)
    contexts, steps = channel.contexts[:2], [[(0,), (1,)], [(1,), (2,)]]
    information, divergence = information_along(channel, contexts, steps, without=(2,))
    pair = conditional_information(channel, [contexts], n_samples=1, seed=0).mean
    apart = step_divergence(channel, [(0,)], [(2,)], n_samples=1, seed=0)[0]
    assert (information, divergence) == pytest.approx((pair, apart))
    assert math.isnan(information_along(channel, contexts, steps)[1])


@pytest.mark.parametrize("bad", [dict(n_traces=1), dict(error=1.1), dict(looks=0), dict(silent=-1)])
def test_a_channel_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="allowed: at least 2"):
        SymmetricChannel(**dict(n_traces=2, error=0.1) | bad)


def test_histories_need_the_same_number_of_traces():
    channel = SymmetricChannel(3, 0.1)
    for histories in ([], [[]], [[(0,)], [(0,), (1,)]]):
        with pytest.raises(ValueError, match="give each the same number"):
            conditional_information(channel, histories, n_samples=1, seed=0)


# ------------------------------------------------------------------------------------------------- a policy


def contexts_of(policy: Policy, *texts: str) -> list[tuple[int, ...]]:
    return [policy.protocol.prompt_ids(t) for t in texts]


def test_steps_behind_one_context_are_scored_as_each_alone(tiny_policy):
    (context,) = contexts_of(tiny_policy, "employer of Kavelo?")
    steps = [(5, 9, 300), (7,), (5, 8, 11, 12, 40)]
    for step, lines in zip(steps, PolicySteps(tiny_policy, temperature=0.7).logps(context, steps), strict=True):
        with torch.no_grad():
            logits = tiny_policy.model(torch.tensor([[*context, *step]])).logits[0, len(context) - 1 : -1]
        assert lines.dtype == torch.float64 and lines.shape == (len(step), len(tiny_policy.tokenizer))
        np.testing.assert_allclose(lines, torch.log_softmax(logits.double() / 0.7, -1), atol=1e-4)


def test_a_large_vocabulary_is_scored_in_parts_with_the_same_result(tiny_policy, monkeypatch):
    contexts = contexts_of(tiny_policy, "a?", "employer of Kavelo?")
    model = PolicySteps(tiny_policy, max_tokens=5)
    calls, logps = [], model.logps
    model.logps = lambda context, steps: calls.append(len(steps)) or logps(context, steps)
    whole = conditional_information(model, [contexts], n_samples=4, seed=0).mean
    assert set(calls) == {8}
    calls.clear()
    monkeypatch.setattr(peek, "MAX_NUMBERS", 3 * 2 * 5 * model.n_vocab)
    assert conditional_information(model, [contexts], n_samples=4, seed=0).mean == pytest.approx(whole, abs=1e-5)
    assert set(calls) == {3, 2}


def test_sampled_steps_are_those_of_their_own_stream_and_end_where_a_step_ends(tiny_policy):
    """Rows leave at different times and others take their places; each step is still the one of its context."""
    eos = tiny_policy.tokenizer.eos_token_id
    model = PolicySteps(tiny_policy, temperature=0.8, max_tokens=12)
    model.stops.kinds[: len(model.stops.kinds) : 7] = model.stops.EOS  # so that steps end often
    contexts = contexts_of(tiny_policy, "a?", "employer of Kavelo?", "what is the code of the hotel of Lumiro?") * 3
    steps = model.sample(contexts, 4, seed=3)
    assert len({len(s) for own in steps for s in own}) > 3 and model.ended((5, eos))
    for c, (context, own) in enumerate(zip(contexts, steps, strict=True)):
        for i, (step, lines) in enumerate(zip(own, model.logps(context, own), strict=True)):
            draws = torch.from_numpy(child_rng(3, "peek.step", c, i).random(12, np.float32))
            assert sample_tokens(lines.float(), draws[: len(step)])[0].tolist() == list(step)
            assert not any(model.ended(step[:t]) for t in range(1, len(step)))
            assert model.ended(step) or len(step) == 12


def test_more_rows_than_a_batch_give_the_same_steps(tiny_policy, monkeypatch):
    contexts = contexts_of(tiny_policy, "a?", "employer of Kavelo?", "b?")
    model = PolicySteps(tiny_policy, max_tokens=6)
    whole = model.sample(contexts, 3, seed=0)
    monkeypatch.setattr(peek, "BATCH", 4)
    assert model.sample(contexts, 3, seed=0) == whole != model.sample(contexts, 3, seed=1)


def test_greedy_steps_take_the_most_likely_token(tiny_policy):
    model = PolicySteps(tiny_policy, max_tokens=6)
    (context,) = contexts_of(tiny_policy, "employer of Kavelo?")
    ((step,),) = model.sample([context], 1, seed=0, greedy=True)
    assert model.logps(context, [step])[0].argmax(-1).tolist() == list(step)


def test_what_cannot_be_sampled_is_refused(tiny_policy):
    model = PolicySteps(tiny_policy, max_tokens=64)
    with pytest.raises(ValueError, match="a context has 449 ids; with a step of up to 64 it does not fit the 512"):
        model.sample([[1] * 449], 1, seed=0)
    assert len(model.sample([[1] * 448], 1, seed=0)) == 1
    for contexts, n in (([], 1), ([[1]], 0)):
        with pytest.raises(ValueError, match="sample at least 1 step of at least 1"):
            model.sample(contexts, n, seed=0)


def test_two_token_steps_of_a_policy_against_all_of_them(tiny_policy):
    """The divergence and the information of steps of two tokens, by going through the whole vocabulary."""
    contexts = contexts_of(tiny_policy, "a?", "employer of Kavelo?")
    model = PolicySteps(tiny_policy, max_tokens=2)
    firsts = [(v, 0) for v in range(model.n_vocab)]
    lines = [torch.stack(model.logps(c, firsts)) for c in contexts]  # (V, 2, V) each
    joint = torch.stack([(x[0, 0][:, None] + x[:, 1]) for x in lines])  # (2, V, V): log-probability of both tokens
    for v in range(model.n_vocab):
        if model.ended((v,)):  # a step of one token: its second one does not count
            joint[:, v] = -math.inf
            joint[:, v, 0] = torch.stack([x[0, 0, v] for x in lines])
    joint = joint.flatten(1)
    divergence = token_divergence(joint[:1], joint[1:]).item()
    mixture = torch.logsumexp(joint, 0, keepdim=True) - LN2
    information = token_divergence(joint, mixture.expand_as(joint)).mean().item()
    samples = [step_divergence(model, contexts[:1], contexts[1:], n_samples=1, seed=s)[0] for s in range(60)]
    found = conditional_information(model, [contexts] * 60, n_samples=1, seed=0)
    for values, exact in ((np.array(samples), divergence), (found.values, information)):
        error = values.std(ddof=1) / math.sqrt(60)
        assert 0 < error < 0.2 * exact and abs(values.mean() - exact) < 4 * error


# ------------------------------------------------------------------------------------------- real situations


def own(protocol, text: str) -> Segment:
    ids = protocol.encode(text)
    return Segment("policy", ids, (0.0,) * len(ids), (0.0,) * len(ids))


def result(protocol, text: str) -> Segment:
    return Segment("tool", protocol.observation_ids(text), info={"tool": "search", "query": "q", "ok": True})


def test_boundaries_lie_behind_observations_while_budget_is_left(tiny_policy):
    protocol, question = tiny_policy.protocol, FakeQuestion("q", " who?")
    step, answer = own(protocol, "<search> a</search>"), own(protocol, "<answer> b</answer>")
    segments = [step, result(protocol, "x"), step, result(protocol, "y"), step, result(protocol, "z"), answer]
    rollout = Rollout("q", (1, 2), segments, end_reason="answer")
    first, second = boundaries([rollout], [question], protocol, LIMITS)
    assert (first.n_steps, first.steps_left, second.n_steps, second.steps_left) == (1, 2, 2, 1)
    assert first.ids == (1, 2, *segments[0].ids, *segments[1].ids)
    assert second.ids == (*first.ids, *segments[2].ids, *segments[3].ids)
    assert first.text == "who?\n<search> a</search><result> x</result>"
    assert len(boundaries([rollout], [question], protocol, replace(LIMITS, extra_steps=1))) == 3
    assert len(boundaries([rollout], [replace(question, max_steps=2)], protocol, LIMITS)) == 1
    cut = Rollout("q", (1, 2), segments[:4], end_reason="length")
    assert [h.n_steps for h in boundaries([cut], [question], protocol, LIMITS)] == [1]
    assert boundaries([Rollout("q", (1, 2), [answer], end_reason="answer")], [question], protocol, LIMITS) == []
    peeked = Rollout("q", (1, 2), [step, result(protocol, "x"), Segment("retrieval", (5,))])
    with pytest.raises(ValueError, match="holds a retrieved step"):
        boundaries([peeked], [question], protocol, LIMITS)


@pytest.fixture
def shelf() -> tuple[StepTraceBuffer, History]:
    traces = [
        StepTrace("red door", "one", "mine"),
        StepTrace("red door", "one", "mine", "another teacher"),
        StepTrace("red door", "the gold answer Lumiro", "mine"),
        StepTrace("red door", "three steps", "mine", n_steps=3),
        StepTrace("red wall", "two", "other"),
        StepTrace("blue wall", "three", "other"),
        StepTrace("blue wall", "Lumiro again", "other"),
        StepTrace("red door", "four", "other"),
    ]
    question = FakeQuestion("mine", "door?")
    return StepTraceBuffer.build(traces), History(question, (1,), "red door", n_steps=1, steps_left=2)


def test_helpful_traces_are_the_nearest_that_may_be_inserted(shelf):
    buffer, history = shelf
    rng = np.random.default_rng(0)
    nearest = helpful_traces(buffer, history, 3, rng)
    assert {t.value for t in nearest[:2]} == {"one", "four"} and nearest[2].value == "two"
    assert [t.value for t in helpful_traces(buffer, history, 9, rng)][2:] == ["two", "three"]  # and there are no more
    first = {helpful_traces(buffer, history, 1, np.random.default_rng(i))[0].value for i in range(20)}
    assert first == {"one", "four"}  # a tie is drawn
    open_book = helpful_traces(buffer, history, 9, rng, leak_guard=False)
    assert {t.value for t in open_book[:3]} == {"one", "four", "the gold answer Lumiro"} and len(open_book) == 6
    assert "three steps" in {t.value for t in helpful_traces(buffer, replace(history, steps_left=3), 9, rng)}
    assert helpful_traces(StepTraceBuffer.build([]), history, 1, rng) == ()


def test_random_traces_come_from_other_questions(shelf):
    buffer, history = shelf
    drawn = [random_traces(buffer, history, 2, np.random.default_rng(i)) for i in range(40)]
    assert {t.value for pair in drawn for t in pair} == {"two", "three", "four"}
    assert all(len({t.value for t in pair}) == 2 for pair in drawn)
    first = [pair[0].value for pair in drawn]
    assert min(map(first.count, ("two", "three", "four"))) >= 6  # 13 expected
    loose = random_traces(buffer, history, 9, np.random.default_rng(0), leak_guard=False)
    assert {t.value for t in loose} == {"two", "three", "four", "Lumiro again"}


def situations_of(policy: Policy) -> list[Situation]:
    """Two small ones in the ids of a tiny policy; the traces of the second are all equal."""
    traces = [StepTrace("k", f"<think> need {n}</think><search> code {n}</search>", "q") for n in (42, 7)]
    history = History(Question("q", "who?", "Lumiro"), policy.protocol.prompt_ids("who?"), "who?\n", 1, 2)
    other = replace(history, ids=policy.protocol.prompt_ids("employer of Kavelo?"))
    return [
        Situation(history, tuple(traces), (traces[1], traces[0])),
        Situation(other, (traces[0],) * 2, (traces[1],) * 2),
    ]


def test_listening_table_holds_the_estimates_of_its_situations(tiny_policy):
    situations = situations_of(tiny_policy)
    table = listening_table(tiny_policy, situations, n_samples=3, seed=5, max_tokens=8)
    assert table["kind"].tolist() == ["helpful"] * 2 + ["random"] * 2 and table["history"].tolist() == [0, 1, 0, 1]
    assert set(table["cap"]) == {math.log(2)} and table["cut_frac"].between(0, 1).all()
    model = PolicySteps(tiny_policy, max_tokens=8)
    insert = [tiny_policy.protocol.retrieval_ids(t.value) for s in situations for t in s.helpful]
    contexts = [(*situations[i // 2].history.ids, *ids) for i, ids in enumerate(insert)]
    information = conditional_information(model, [contexts[:2], contexts[2:]], n_samples=3, seed=5)
    np.testing.assert_allclose(table["information"][:2], information.values, atol=1e-9)
    others = [situations[i // 2].history.ids for i in range(4)]
    divergence = step_divergence(model, contexts, others, n_samples=3, seed=5).reshape(2, 2).mean(1)
    np.testing.assert_allclose(table["divergence"][:2], divergence, rtol=1e-4)
    assert table["information"][0] > 0.01 and table["information"][[1, 3]].abs().max() < 1e-4
    one = model.sample([s.history.ids for s in situations], 3, seed=5)[0]
    entropies = [-(x.exp() * x).sum(-1).mean() for x in model.logps(situations[0].history.ids, one)]
    assert table["step_entropy"][0] == pytest.approx(np.mean(entropies))


def test_every_setting_of_the_listening_table_matters(tiny_policy):
    situations = situations_of(tiny_policy)
    base = dict(n_samples=2, seed=0, temperature=1.0, max_tokens=8)
    first = listening_table(tiny_policy, situations, **base)
    assert first.equals(listening_table(tiny_policy, situations, **base))
    for change in (dict(n_samples=3), dict(seed=1), dict(temperature=0.5), dict(max_tokens=4)):
        assert not first.equals(listening_table(tiny_policy, situations, **base | change)), change
    with pytest.raises(ValueError, match="same number"):
        listening_table(tiny_policy, [replace(situations[0], random=situations[0].random[:1])])


def test_a_deaf_policy_has_no_information(tiny_policy):
    """Without attention the next token depends on the last one alone, and every trace ends with the same tag."""
    for layer in tiny_policy.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    table = listening_table(tiny_policy, situations_of(tiny_policy), n_samples=2, seed=0, max_tokens=8)
    assert table["information"].abs().max() < 1e-4


CHAIN = Question(
    "q",
    "what is the hotel of the plus 17 of 25?",
    "Lumiro",
    max_steps=2,
    info={
        "skills": ["calc", "find"],
        "words": ["plus", "hotel"],
        "operands": [17, None],
        "chain": ["25", "42", "Lumiro"],
    },
)


def test_actions_are_judged_from_the_own_state_and_from_the_note(monkeypatch):
    policy = load_policy(DATA / "pocket" / "models" / "student")
    encode = policy.protocol.encode
    good = StepTrace("k", "<think> a</think><search> code 42 hotel</search><result> Lumiro</result>", "q")
    same = StepTrace("k", "<think> a</think><python> 25 + 17</python><result> 42</result>", "q")
    alien = StepTrace("k", "<think> a</think><search> code 8 hotel</search><result> 77</result>", "other")
    at_42 = History(CHAIN, (1, 2, 3), "what?\n<python> 25 + 17</python><result> 42</result>", 1, 1)
    at_start = replace(at_42, text="what?\n<python> 0</python><result> 25 (this call was made 3 times)</result>")
    situations = [Situation(at_42, (good,), (alien,)), Situation(at_42, (same,), (StepTrace("k", "words", "other"),))]
    situations.append(Situation(replace(at_start, n_steps=1), (same,), (alien,)))
    hotel = "<think> a</think><search> code 42 hotel</search>"
    turns = [
        hotel,  # none: right
        "<search> hotel of 42</search>",  # none: the plausible wrong form
        "<search> code 25 hotel</search>",  # off the chain, one step done: the second skill of the value at hand
        "<think> done</think><answer> \\boxed{ Lumiro}</answer>",  # behind the good note: the chain is done
        hotel,  # behind a note that repeats the last step: goes on from either
        hotel,  # behind a note that lies on the chain
        "<answer> \\boxed{ 77}</answer>",  # the chain is over behind the note, whatever it holds
        "<search> hotel of 42</search>",
        "no step at all",
    ]
    decoder = ScriptedDecoder([[encode(t)] for t in turns], policy.tokenizer.eos_token_id, len(policy.tokenizer))
    monkeypatch.setattr(peek, "make_decoder", lambda _: decoder)
    table = agreement(policy, situations)
    assert table["kind"].tolist() == ["none"] * 3 + ["helpful"] * 3 + ["random"] * 3
    assert table["tool"].tolist() == ["search"] * 3 + ["answer", "search", "search", "answer", "search", ""]
    assert table["query"][:2].tolist() == ["code42hotel", "hotelof42"] and table["query"][6] == "77"
    assert table["changed"].tolist() == [False] * 3 + [True, True, True, True, False, True]
    assert table["right_own"].tolist() == [True, False, True, False, True, False, False, False, False]
    assert table["right_note"].isna()[:3].all()
    assert table["right_note"][3:].tolist() == [True, True, True, True, False, False]
    assert table["ahead"].isna().tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert table["ahead"][3:6].tolist() == [1, 0, 0]


def test_questions_without_a_chain_are_not_judged(tiny_policy):
    table = agreement(tiny_policy, situations_of(tiny_policy), max_tokens=4)
    assert len(table) == 6 and table[["ahead", "right_own", "right_note"]].isna().all(axis=None)
    assert not table["changed"][:2].any()


@pytest.fixture(scope="module")
def pocket():
    from rapo_lib.execution import make_buffer

    config = RunConfig()
    student = load_policy(config.student)
    questions = load_pocket_questions("exploration", "train")
    buffer = make_buffer(config, student.protocol, questions)
    return student, questions, make_pocket_toolbox("train"), buffer, config


def test_situations_of_the_pocket_student(pocket):
    student, questions, toolbox, buffer, config = pocket
    how = dict(n_histories=5, n_traces=3, seed=0)
    situations = collect_situations(student, questions, toolbox, buffer, config, **how)
    assert len({s.history.question.id for s in situations}) == 5
    for s in situations:
        assert s.history.text.startswith(s.history.question.text) and s.history.steps_left >= 1
        assert len({t.value for t in s.helpful}) == len({t.value for t in s.random}) == 3
        assert all(t.question_id != s.history.question.id for t in s.random)
        assert not any(holds_answer(answer_span(t.value), s.history.question.answers) for t in s.helpful + s.random)
        rows = buffer.encoder.encode([s.history.text, *(t.key for t in s.helpful), *(t.key for t in s.random)])
        scores = rows[1:] @ rows[0]
        assert (np.diff(scores[:3]) < 1e-4).all() and scores[:3].mean() > scores[3:].mean()
    assert collect_situations(student, questions, toolbox, buffer, config.replace(seed=9), **how) == situations
    assert collect_situations(student, questions, toolbox, buffer, config, **how | {"seed": 1}) != situations
    table = listening_table(student, situations, n_samples=2, seed=0)
    assert table["information"].between(-1e-4, 1.3 * math.log(3)).all() and table["cut_frac"].max() == 0
    # Each trace moves the step of a student that was trained to use traces, by nats.
    assert table["divergence"].mean() > 1 and table["information"].mean() > 0.2
    assert peek_table(student, questions, toolbox, buffer, config, **how).equals(table)
    acts = agreement(student, situations)
    assert acts["right_own"].notna().all() and acts.query("kind == 'helpful'")["right_note"].notna().all()


def test_the_leak_guard_of_the_run_holds_for_the_traces(pocket):
    student, questions, toolbox, _, config = pocket
    golds = " ".join(a for q in questions[:8] for a in q.answers)
    buffer = StepTraceBuffer.build([StepTrace(questions[0].text, f"it is {golds}", "another question")])
    how = dict(n_histories=2, n_traces=1, seed=0)
    with pytest.raises(ValueError, match="8 questions gave 0 histories"):
        collect_situations(student, questions[:8], toolbox, buffer, config, **how)
    open_book = config.replace(leak_guard=False)
    assert len(collect_situations(student, questions[:8], toolbox, buffer, open_book, **how)) == 2


def test_too_few_situations_are_said(pocket):
    student, questions, toolbox, buffer, config = pocket
    with pytest.raises(
        ValueError, match="3 questions gave [0-3] histories with 2 different traces of each kind, 4 were"
    ):
        collect_situations(student, questions[:3], toolbox, buffer, config, n_histories=4, n_traces=2, seed=0)
    with pytest.raises(ValueError, match="2 questions gave 0 histories with 9999 different traces"):
        collect_situations(student, questions[:2], toolbox, buffer, config, n_histories=1, n_traces=9999, seed=0)
    with pytest.raises(ValueError, match="gave 0 histories"):
        empty = StepTraceBuffer.build([])
        collect_situations(student, questions[:2], toolbox, empty, config, n_histories=1, n_traces=1, seed=0)
    for n, k in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match="at least 1 of each"):
            collect_situations(student, questions, toolbox, buffer, config, n_histories=n, n_traces=k, seed=0)


def test_an_adapter_is_measured_as_it_acts(tiny_tokenizer, tiny_policy):
    """Sampling and scoring both see the adapter: another one gives another table in the same situations."""
    from trainer_world import make_policy

    situations = situations_of(tiny_policy)
    policy = make_policy()
    lines = PolicySteps(policy).logps(situations[0].history.ids, [(5, 6, 7)])[0]
    with torch.no_grad():
        ids = torch.tensor([[*situations[0].history.ids, 5, 6, 7]])
        logits = policy.model(ids).logits[0, -4:-1]
        plain = make_model(tiny_tokenizer)(ids).logits[0, -4:-1]
    np.testing.assert_allclose(lines, torch.log_softmax(logits.double(), -1), atol=1e-4)
    assert (torch.log_softmax(plain.double(), -1) - lines).abs().max() > 0.01
