"""Rollouts from an engine that writes whole turns: the same as those of the own decoder, id for id."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from trl import GRPOConfig

from rapo_lib import trainer as trainer_module
from rapo_lib.config import RunConfig
from rapo_lib.execution import make_retriever
from rapo_lib.methods import get_method
from rapo_lib.policy import load_policy
from rapo_lib.rollout import RolloutRequest, SamplingLimits, coin, sample_rollouts
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import STOP_TAGS
from rapo_lib.trainer import RAPOTrainer, grpo_config, logps_and_entropies
from rapo_lib.vllm_sampler import TurnSampler, check_vllm, engine_of, vllm_settings

CONFIG = RunConfig(n_hybrid=1)
LIMITS = SamplingLimits.of(CONFIG)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world():
    policy, train = load_policy(CONFIG.student), load_pocket_questions("exploration", "train")
    return (
        policy,
        train,
        make_pocket_toolbox("train"),
        make_retriever(CONFIG, get_method("rapo"), policy.protocol, train),
    )


class Stop(StoppingCriteria):
    def __init__(self, policy, start):
        self.policy, self.start = policy, start

    def __call__(self, ids, scores, **kwargs):
        text = self.policy.protocol.decode(ids[0, self.start :].tolist())
        return torch.tensor([any(tag in text for tag in STOP_TAGS)])


class Engine:
    """transformers' greedy generation, one prompt after the other; may write some ids too many, as an engine does."""

    def __init__(self, policy, extra=0):
        self.policy, self.extra, self.calls = policy, extra, 0

    def __call__(self, prompts):
        self.calls += 1
        return [self.turn(p) for p in prompts]

    def turn(self, prompt):
        ids = torch.tensor([prompt])
        stop = StoppingCriteriaList([Stop(self.policy, len(prompt))])
        out = self.policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64, stopping_criteria=stop
        )
        return [*out[0, len(prompt) :].tolist(), *[7] * self.extra]


@pytest.mark.parametrize("extra", [0, 3])
def test_turns_of_an_engine_become_the_rollouts_of_the_own_decoder(world, extra):
    policy, train, toolbox, retriever = world
    requests = [RolloutRequest(q, place, hybrid=place == 1) for q in train[:3] for place in range(2)]
    how = dict(limits=LIMITS, seed=3, stream=("train", 1), retriever=retriever, when_to_retrieve=coin(0.7))
    own = sample_rollouts(policy, requests, toolbox, greedy=True, **how).rollouts
    engine = Engine(policy, extra)
    batch = TurnSampler(engine, lambda rollouts: logps_and_entropies(policy, rollouts))(
        policy, requests, toolbox, **how
    )
    assert any(r.retrievals for r in own) and sum(len(r.tool_calls) for r in own) > 6
    for a, b in zip(own, batch.rollouts, strict=True):
        assert (a.end_reason, a.place, a.hybrid, a.prompt_ids) == (b.end_reason, b.place, b.hybrid, b.prompt_ids)
        assert [(s.origin, s.ids, s.info) for s in a.segments] == [(s.origin, s.ids, s.info) for s in b.segments]
        assert b.logps == pytest.approx(a.logps, abs=1e-4)
        assert b.step_entropies == pytest.approx(a.step_entropies, abs=1e-4)
    written = sum(sum(r.policy_mask) for r in own)
    assert batch.stats.generated_tokens == written and batch.stats.model_calls == engine.calls > 1


def test_a_rollout_ends_at_its_length_whatever_the_engine_writes(world):
    policy, train, toolbox, _ = world
    sampler = TurnSampler(lambda prompts: [[9] * 500 for _ in prompts], lambda rs: logps_and_entropies(policy, rs))
    (rollout,) = sampler(policy, [RolloutRequest(train[0])], toolbox, limits=LIMITS, seed=0).rollouts
    assert rollout.end_reason == "length" and len(rollout.completion_ids) == LIMITS.max_completion


def test_an_engine_that_writes_nothing_is_named(world):
    policy, train, toolbox, _ = world
    sampler = TurnSampler(lambda prompts: [[] for _ in prompts], lambda rs: ([], []))
    with pytest.raises(RuntimeError, match=f"the engine wrote nothing for question '{train[0].id}'"):
        sampler(policy, [RolloutRequest(train[0])], toolbox, limits=LIMITS, seed=0)


def test_what_is_missing_for_vllm_is_said(monkeypatch, world, tmp_path):
    policy, train, toolbox, _ = world
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = CONFIG.replace(method="grpo", generator="vllm")
    message = "generator is 'vllm', but the package vllm is not installed .* and there is no CUDA GPU; set generator"
    with pytest.raises(RuntimeError, match=message):
        RAPOTrainer(policy, train, toolbox, None, config, get_method("grpo"), tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(trainer_module, "check_vllm", lambda: None)
    gated = config.replace(method="rapo_gated")
    with pytest.raises(ValueError, match="method 'rapo_gated' retrieves by entropy, which vllm tells too late"):
        RAPOTrainer(policy, train, toolbox, object(), gated, get_method("rapo_gated"), tmp_path)
    with pytest.raises(ValueError, match="generator is 'sglang'; allowed: own, vllm"):
        grpo_config(config.replace(generator="sglang"), get_method("grpo"), policy, tmp_path)


def test_trl_knows_the_settings_and_the_engine_s_answer(world, tmp_path):
    """A contract with the pinned TRL: the names of its settings, and what its `generate` is given and gives back."""
    policy, *_ = world
    args = grpo_config(CONFIG.replace(generator="vllm"), get_method("grpo"), policy, tmp_path)
    for name, value in vllm_settings(policy.context).items():
        assert getattr(args, name) == value
    assert not GRPOConfig(str(tmp_path), bf16=False, use_cpu=True).use_vllm and set(STOP_TAGS) == set(
        args.generation_kwargs["stop"]
    )

    class Trainer:
        class vllm_generation:  # noqa: N801 (TRL's name)
            @staticmethod
            def generate(prompts, images, num_generations, profiler=None):
                assert images is None and num_generations == 1
                return prompts, [(1, 2), (3,)], [[[0.0], [0.0]], [[0.0]]], None

    assert engine_of(Trainer())([[5], [6]]) == [[1, 2], [3]]
    if importlib.util.find_spec("trl.generation.vllm_generation"):
        import inspect

        from trl.generation.vllm_generation import VLLMGeneration

        assert list(inspect.signature(VLLMGeneration.generate).parameters)[:4] == [
            "self",
            "prompts",
            "images",
            "num_generations",
        ]


def test_check_passes_where_both_are_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_vllm() is None
