"""RAPOTrainer against stock GRPOTrainer, against the oracle `rapo_loss`, and its runs."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer_world as w
from conftest import make_model
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    TrainerCallback,
)
from trl import GRPOTrainer

from rapo_lib import objective as o
from rapo_lib import trainer as t
from rapo_lib.config import child_rng
from rapo_lib.methods import METHODS
from rapo_lib.policy import load_policy, save_adapter
from rapo_lib.traces import Rollout, Segment

pytestmark = pytest.mark.filterwarnings("ignore")


class Gradients(TrainerCallback):
    """Keeps the gradients (after norm clipping) and the weights of each optimiser step."""

    def __init__(self, policy):
        self.policy, self.all, self.before = policy, [], []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.all.append({n: p.grad.clone() for n, p in self.policy.model.named_parameters() if p.requires_grad})
        self.before.append(w.adapter(self.policy))


def train(folder, method="grpo", config=None, sampler=None, **more):
    policy = w.make_policy()
    seen = Gradients(policy)
    rows = []
    more = dict(callbacks=[seen], on_rl_step=lambda row, rollouts: rows.append((row, rollouts))) | more
    trainer = w.make_trainer(policy, config or w.small_config(), method, folder, sampler, **more)
    trainer.train()
    return trainer, seen, rows


def assert_same(a, b, rtol=1e-4, atol=1e-7):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def clipped(grads):
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    return {n: g * min(1.0, (1.0 / (norm + 1e-6)).item()) for n, g in grads.items()}


# -------------------------------------------------------------------------------------- parity with TRL


def stock_gradients(folder, config, sampler):
    """The same batches through GRPOTrainer itself: its own advantages, scoring, old log-probabilities and loss."""
    policy = w.make_policy()
    order = t.question_order(len(w.QUESTIONS), config)
    seen = Gradients(policy)

    def rollout_func(prompts, trainer):
        rl_step = trainer.state.global_step // config.updates_per_step + 1
        numbers = order[(rl_step - 1) * config.questions_per_step :]
        rollouts = [
            sampler.rollout(policy, w.QUESTIONS[numbers[i // config.group_size]], i % config.group_size, rl_step, False)
            for i in range(len(prompts))
        ]
        assert [w.QUESTIONS[numbers[i // config.group_size]].text for i in range(len(prompts))] == prompts
        torch.manual_seed(int(child_rng(config.seed, "mini-batches", rl_step).integers(2**63)))
        return {
            "prompt_ids": [list(r.prompt_ids) for r in rollouts],
            "completion_ids": [r.completion_ids for r in rollouts],
            "logprobs": [r.logps for r in rollouts],
            "env_mask": [r.policy_mask for r in rollouts],
            "outcome": [r.reward for r in rollouts],
        }

    args = t.grpo_config(config, METHODS["grpo"], policy, folder)
    data = t.Dataset.from_dict({"prompt": [w.QUESTIONS[i].text for i in order]})
    trainer = GRPOTrainer(
        policy.model,
        t.outcome_reward,
        args,
        data,
        processing_class=policy.tokenizer,
        rollout_func=rollout_func,
        callbacks=[seen],
    )
    trainer.train()
    return seen, w.adapter(policy)


def no_signal_in_step_2(rollout, rl_step):
    rollout.reward = 1.0 if rl_step == 2 else rollout.reward
    return rollout


@pytest.mark.case(17)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_without_retrieval_the_gradients_are_those_of_grpo_trainer(tmp_path, kl_coef):
    config = w.small_config(rl_steps=3, kl_coef=kl_coef)
    ours = train(tmp_path / "a", config=config, sampler=w.Canned(edit=no_signal_in_step_2))
    stock, weights = stock_gradients(tmp_path / "b", config, w.Canned(edit=no_signal_in_step_2))
    assert len(ours[1].all) == len(stock.all) == 6
    for mine, theirs in zip(ours[1].all, stock.all, strict=True):
        assert_same(mine, theirs, atol=2e-6)
    assert_same(w.adapter(ours[0].policy), weights, atol=1e-5)
    biggest = [max(g.abs().max().item() for g in step.values()) for step in ours[1].all]
    assert min(biggest[:2] + biggest[4:]) > 1e-3
    if kl_coef == 0:  # RL step 2 has no signal: gradients exactly 0, and the weights still move by Adam's momentum
        assert biggest[2:4] == [0.0, 0.0]
        assert any(not ours[1].before[3][n].equal(p) for n, p in ours[1].before[2].items())


@pytest.fixture
def live(tmp_path):
    """A trainer in the middle of nothing, with one batch as `_compute_loss` gets it."""
    config = w.small_config(updates_per_step=1, group_size=4)
    trainer = w.make_trainer(w.make_policy(), config, "rapo", tmp_path, w.Canned(noise=0.3))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[i // 4] for i in range(8)]
    return trainer, trainer._generate_and_score_completions(rows)


def grads_of(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.case(2, 8)
def test_contract_scoring_override_equals_stock_on_the_same_batch(live):
    trainer, batch = live
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    assert (batch["prompt_mask"][:, 0] == 0).any() and (batch["completion_mask"][:, -1] == 0).any()
    width = batch["completion_ids"].shape[1]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    arguments = (trainer.model, ids, attention, width)
    stock, stock_entropies, _ = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer, *arguments, compute_entropy=True
    )
    trainer._scored = mask
    for trainer.chunk_tokens in (None, 60):
        ours, entropies, _ = trainer._get_per_token_logps_and_entropies(*arguments, compute_entropy=True)
        torch.testing.assert_close(ours[mask], stock[mask], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies[mask], stock_entropies[mask], rtol=1e-5, atol=1e-5)
        assert not ours[~mask].any() and not entropies[~mask].any()
        weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
        assert_same(grads_of(trainer, (ours * weight).sum()), grads_of(trainer, (stock * weight).sum()), atol=1e-5)
        stock = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *arguments)[0]


def test_contract_loss_override_equals_stock_on_the_same_batch(live):
    trainer, batch = live
    batch["advantages"][batch["advantages"].abs() < 0.5] = 0.0  # some rows without signal
    assert 0 < (batch["advantages"] == 0).sum() < 8
    ours = trainer._compute_loss(trainer.model, dict(batch))
    stock = GRPOTrainer._compute_loss(trainer, trainer.model, dict(batch))
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    assert_same(grads_of(trainer, ours), grads_of(trainer, stock), atol=1e-6)


@pytest.mark.case(15)
def test_contract_prompts_come_in_groups_and_columns_travel_with_their_rows(tmp_path):
    sampler = w.Canned(noise=0.3)
    trainer, _, rows = train(tmp_path, "rapo", sampler=sampler)
    for requests, (_, rollouts) in zip(sampler.requests, rows, strict=True):
        assert [q.question.id for q in requests] == [r.question_id for r in rollouts]
        assert [q.place for q in requests] == [0, 1, 2, 3] * 2
        assert len({q.question.id for q in requests[:4]}) == len({q.question.id for q in requests[4:]}) == 1


@pytest.mark.case(2, 18)
def test_the_gradient_is_zero_exactly_at_inserted_tokens(live, monkeypatch):
    trainer, batch = live
    logps = torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(0)) / 10 - 2
    logps.requires_grad_()
    scores = lambda model, ids, attention, width, **_: (logps[:, :width], logps[:, :width].detach(), None)  # noqa: E731
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", scores)
    loss = trainer._compute_loss(trainer.model, batch | {"old_per_token_logps": logps.detach()})
    loss.backward()
    origins = [[s.origin == "policy" for s in r.segments for _ in s.ids] for r in trainer._rollouts]
    own = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, origins)), batch_first=True)
    assert (own.sum(1) < torch.tensor(list(map(len, origins)))).all()  # each row holds inserted tokens
    signal = batch["advantages"] != 0
    assert not logps.grad[~own].any() and logps.grad[own & signal[:, None]].all() and signal.any()
    # Each token of a row weighs 1 over the number of the policy's tokens: inserted ones do not dilute it.
    for grad, mask, advantage in zip(logps.grad, own, batch["advantages"], strict=True):
        want = torch.full_like(grad[mask], -advantage / mask.sum() / len(own))
        torch.testing.assert_close(grad[mask], want, rtol=1e-5, atol=1e-7)


@pytest.mark.case(2)
def test_the_trainer_sees_inserted_tokens(tmp_path):
    policy = w.make_policy()
    rollout = w.canned_rollout(policy, w.QUESTIONS[0], 3, 1, True, 0.0)
    place = [s.origin for s in rollout.segments].index("retrieval")
    old = rollout.segments[place]
    other = Rollout.from_dict(rollout.to_dict())
    other.segments[place] = Segment("retrieval", (old.ids[0] + 1, *old.ids[1:]))
    a, b = map(torch.tensor, t.score_rollouts(policy, [rollout, other]))
    first = sum(len(s.ids) for s in rollout.segments[: place + 1])
    assert (a[first] - b[first]).abs() > 1e-3 and a[: first - len(old.ids)].equal(b[: first - len(old.ids)])
    inserted = ~torch.tensor(rollout.policy_mask).bool()
    assert not a[inserted].any() and a[~inserted].all()


@pytest.mark.case(3)
def test_a_pad_id_that_also_ends_sequences_is_masked_as_padding_alone(tmp_path):
    tokenizer = copy.deepcopy(w.TOKENIZER)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    policy = w.add_lora(w.Policy(w.make_model(tokenizer), tokenizer, w.Protocol(tokenizer), "tiny"), 4, 0)
    written = ((5, 6, 2), (5, 6, 7, 8, 9))

    def edit(rollout, rl_step):
        ids = written[rollout.place % 2]
        own = Segment("policy", ids, (-1.0,) * len(ids), (0.5,) * len(ids))
        return Rollout(rollout.question_id, rollout.prompt_ids, [own], rollout.place, False, "eos", rollout.reward)

    trainer = w.make_trainer(policy, w.small_config(updates_per_step=1), "grpo", tmp_path, w.Canned(edit=edit))
    trainer.model.train()
    batch = trainer._generate_and_score_completions([trainer.train_dataset[i // 4] for i in range(8)])
    assert batch["completion_ids"][:2].tolist() == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 9]]
    assert batch["completion_mask"][:2].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["tool_mask"][0, :3].tolist() == [1, 1, 1]
    learned = t._collate([t._sft_row(r) for r in trainer._rollouts[:2]])["labels"]  # SFT learns the real one too
    assert learned[0][learned[0] != -100].tolist() == [5, 6, 2]
    rollouts = trainer._rollouts[:2]
    together, alone = t.score_rollouts(policy, rollouts), [t.score_rollouts(policy, [r])[0] for r in rollouts]
    assert [len(x) for x in together] == [3, 5] and all(together[0])
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.case(8)
def test_eight_left_padded_rows_score_as_each_alone(tmp_path):
    policy = w.make_policy()
    rollouts = [w.canned_rollout(policy, q, place, 1, place > 1, 0.0) for q in w.QUESTIONS for place in (0, 3)]
    assert len({len(r.prompt_ids) for r in rollouts}) == 4
    for row, r in zip(t.score_rollouts(policy, rollouts), rollouts, strict=True):
        assert row == pytest.approx(t.score_rollouts(policy, [r])[0], abs=1e-4)
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
        fresh = policy.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        own = torch.tensor(r.policy_mask).bool()
        torch.testing.assert_close(torch.tensor(row)[own], fresh[len(r.prompt_ids) - 1 :][own], rtol=0, atol=1e-4)


@pytest.mark.case(17)
def test_a_micro_batch_without_a_policy_token_has_loss_0_and_no_gradient(live):
    trainer, batch = live
    before = trainer._clippable
    loss = trainer._compute_loss(trainer.model, batch | {"tool_mask": torch.zeros_like(batch["tool_mask"])})
    assert loss.item() == 0.0 and not any(g.any() for g in grads_of(trainer, loss).values())
    assert trainer._clippable == before and math.isfinite(trainer._clipped)


@pytest.mark.case(17)
def test_a_micro_batch_without_signal_leaves_the_metrics_of_the_others(tmp_path):
    def first_question_only(rollout, rl_step):
        rollout.reward = 1.0 if rollout.question_id in ("q0", "q2") else rollout.reward
        return rollout

    config = w.small_config(updates_per_step=1, micro_batch=2)
    sampler = w.Canned(noise=0.3, edit=first_question_only)
    trainer, seen, rows = train(tmp_path, "rapo", config, sampler)
    assert all(row["groups_no_signal_frac"] == 0.5 and 0 < row["clip_frac"] < 1 for row, _ in rows)
    assert all(g.isfinite().all() for step in seen.all for g in step.values())
    assert not [name for log in trainer.state.log_history for name, value in log.items() if value != value]


# -------------------------------------------------------------------------------- parity with the oracle


def plain_logps(policy, rollout, weights):
    """Log-probabilities of one rollout from one forward pass over its ids, at all completion tokens."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    logits = torch.func.functional_call(policy.model, weights, (), {"input_ids": ids}).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(rollout.prompt_ids) - 1 :, 0]


def oracle_gradient(policy, rollouts, weights, first_weights, config, method):
    weights = {n: p.clone().requires_grad_() for n, p in weights.items()}
    pad = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # noqa: E731
    ids = [r.question_id for r in rollouts]
    a_acc = o.group_normalise(torch.tensor([r.reward for r in rollouts]), ids)
    z = torch.tensor([o.rollout_retrieval_reward(r, method.retrieval_reward) for r in rollouts])
    assert z.abs().max() > 0.01 or not method.retrieves
    with torch.no_grad():
        reference = pad([plain_logps(policy, r, first_weights) for r in rollouts])
    loss = o.rapo_loss(
        pad([plain_logps(policy, r, weights) for r in rollouts]),
        pad([torch.tensor(r.logps) for r in rollouts]),
        pad([torch.tensor(r.policy_mask, dtype=torch.float32) for r in rollouts]),
        method.advantage(a_acc, o.group_normalise(z, ids), method.advantage_weight(config)),
        o.shaping_factor(torch.tensor([r.retrieved_frac for r in rollouts]), method.shaping_weight(config)),
        (0.2, 0.28) if method.released_loss else config.clip,
        dual_clip=3.0 if method.released_loss else None,
        token_mean=method.released_loss,
        ref_logps=reference,
        kl_coef=config.kl_coef,
    )
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


@pytest.mark.case(18)
@pytest.mark.parametrize(
    "method, kl_coef",
    [
        ("rapo", 0.0),
        ("rapo", 0.5),
        ("rapo_sign_aware", 0.0),
        ("rapo_no_timing", 0.0),
        ("rapo_released", 0.0),
        ("rapo_no_rpo", 0.0),
    ],
)
def test_with_retrieval_the_gradient_is_that_of_the_oracle(tmp_path, method, kl_coef):
    config = w.small_config(updates_per_step=1, kl_coef=kl_coef, shaping_weight=0.5, advantage_weight=0.9)
    trainer, seen, rows = train(tmp_path, method, config, w.Canned(noise=0.4))
    assert all(row["retrievals"] == 4 and 0 < row["clip_frac"] < 1 for row, _ in rows)
    for grads, weights, (_, rollouts) in zip(seen.all, seen.before, rows, strict=True):
        want = oracle_gradient(trainer.policy, rollouts, weights, seen.before[0], config, METHODS[method])
        assert_same(grads, clipped(want), atol=2e-6)


def teachers_rollouts(question, n, reward=1.0):
    """Trajectories that the tiny policy did not write: other ids, and log-probabilities that mean nothing here."""
    rollouts = [w.canned_rollout(w.make_policy(seed=3), question, 50 + i, 1, False, 0.0) for i in range(n)]
    return [w.with_logps(dataclasses.replace(r, reward=reward), [-9.0] * len(r.policy_mask)) for r in rollouts]


def test_luffy_has_the_gradient_of_its_equation(tmp_path):
    config = w.small_config(updates_per_step=1, rl_steps=1, n_off_policy=1)
    batch = {}

    def keep(trainer):
        inner = trainer.sample

        def sample():
            batch["rollouts"], batch["taught"] = inner(), list(trainer._is_teachers)
            return batch["rollouts"]

        trainer.sample = sample

    teacher = [r for q in w.QUESTIONS[:3] for r in teachers_rollouts(q, 2)]
    policy, rows = w.make_policy(), []
    seen = Gradients(policy)
    trainer = w.make_trainer(
        policy, config, "luffy", tmp_path, w.Canned(noise=0.4), teacher=teacher, callbacks=[seen],
        on_rl_step=lambda row, rollouts: rows.append((row, rollouts)),
    )  # fmt: skip
    keep(trainer)
    trainer.train()
    rollouts, taught = batch["rollouts"], batch["taught"]
    asked = {r.question_id for r in rollouts}
    assert sum(taught) == len(asked - {"q3"}) and all(
        r.place == 3 for r, yes in zip(rollouts, taught, strict=True) if yes
    )
    assert len(rows[0][1]) == len(rollouts) - sum(taught)  # metrics and kept rollouts are the policy's own

    weights = {n: p.clone().requires_grad_() for n, p in seen.before[0].items()}
    advantages = o.group_normalise(torch.tensor([r.reward for r in rollouts]), [r.question_id for r in rollouts])
    terms = []
    for r, yes, a in zip(rollouts, taught, advantages, strict=True):
        logps, mask = plain_logps(policy, r, weights), torch.tensor(r.policy_mask, dtype=torch.float32)
        p = logps.exp()
        ratio = (logps - torch.tensor(r.logps)).exp()
        own = torch.minimum(ratio * a, ratio.clamp(1 - config.clip, 1 + config.clip) * a)
        terms.append(((p / (p + 0.1) * a if yes else own) * mask).sum() / mask.sum())
    loss = -torch.stack(terms).mean()
    want = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    assert any(yes and a > 0.1 for yes, a in zip(taught, advantages, strict=True))
    assert_same(seen.all[0], clipped(want), atol=2e-6)


def test_the_teachers_trajectories_change_by_rl_step_and_fill_only_their_places(tmp_path):
    config = w.small_config(updates_per_step=1, rl_steps=4, n_off_policy=2)
    teacher = teachers_rollouts(w.QUESTIONS[0], 4) + teachers_rollouts(w.QUESTIONS[1], 1)
    sampler = w.Canned(noise=0.4)
    seen = []
    trainer, _, rows = train(tmp_path, "luffy", config, sampler, teacher=teacher)
    for requests, (row, own) in zip(sampler.requests, rows, strict=True):
        places = {q: [r.place for r in requests if r.question.id == q] for q in {r.question.id for r in requests}}
        for q, asked in places.items():
            assert asked == {"q0": [0, 1], "q1": [0, 1, 3]}.get(q, [0, 1, 2, 3])
        assert [r.question_id for r in own] == [r.question.id for r in requests]
        assert row["generated_tokens"] == sum(sum(r.policy_mask) for r in own)
        seen.append(row)
    request = lambda place: t.RolloutRequest(w.QUESTIONS[0], place)  # noqa: E731
    pairs = set()
    for trainer.state.global_step in range(6):
        pairs.add(tuple(tuple(trainer._teachers_rollout(request(p)).completion_ids) for p in (2, 3)))
    assert len(pairs) > 1 and all(a != b for a, b in pairs)  # two different ones at a time, others at other steps


def test_a_group_that_only_the_teacher_solves_has_a_signal(tmp_path):
    config = w.small_config(updates_per_step=1, rl_steps=1, n_off_policy=1)
    fail = lambda r, step: dataclasses.replace(r, reward=0.0)  # noqa: E731
    teacher = [r for q in w.QUESTIONS for r in teachers_rollouts(q, 1)]
    _, _, rows = train(tmp_path, "luffy", config, w.Canned(edit=fail), teacher=teacher)
    assert rows[0][0]["groups_no_signal_frac"] == 0.0 and rows[0][0]["reward"] == 0.0
    assert {r.place for r in rows[0][1]} == {0, 1, 2}


def test_each_weight_changes_the_gradient(tmp_path):
    config = w.small_config(rl_steps=1, updates_per_step=1)
    names = (
        "rapo",
        "rapo_no_reward",
        "rapo_no_shaping",
        "rapo_no_quality",
        "high_h_rising",
        "rapo_sign_aware",
        "rapo_released",
    )
    grads = [train(tmp_path / m, m, config, w.Canned(noise=0.4))[1].all[0] for m in names]
    name = next(n for n in grads[0] if "lora_B" in n)
    for i in range(len(names)):
        for j in range(i):
            assert not torch.allclose(grads[i][name], grads[j][name], rtol=1e-3, atol=0), (names[i], names[j])


# -------------------------------------------------------------------------------------------- the cases


@pytest.mark.case(16)
def test_nan_row_is_counted_and_out_of_the_loss(tmp_path):
    def nan_at(place, swap):
        def edit(rollout, rl_step):
            if rollout.place == place:
                rollout.reward = math.nan
                if swap:  # other ids in the row: nothing may change
                    segments = [t.Rollout.from_dict(rollout.to_dict()).segments[0]]
                    return Rollout(rollout.question_id, rollout.prompt_ids, segments, place, False, "answer", math.nan)
            return rollout

        return edit

    config = w.small_config(rl_steps=1, updates_per_step=1)
    runs = [train(tmp_path / str(s), "grpo", config, w.Canned(edit=nan_at(1, s))) for s in (False, True)]
    assert_same(runs[0][1].all[0], runs[1][1].all[0])
    assert max(g.abs().max() for g in runs[0][1].all[0].values()) > 1e-3
    (row, _) = runs[0][2][0]
    assert row["nan_rewards"] == 2 and math.isfinite(row["reward"])


@pytest.mark.case(17)
def test_no_signal_leaves_our_metric_absent_and_a_zero_gradient(tmp_path):
    def equal(rollout, rl_step):
        rollout.reward = 0.0
        return rollout

    _, seen, rows = train(tmp_path, "rapo", w.small_config(rl_steps=1), w.Canned(edit=equal))
    assert all(not g.any() for step in seen.all for g in step.values())
    row = rows[0][0]
    assert math.isnan(row["clip_frac"]) and row["groups_no_signal_frac"] == 1.0


class Ratios(t.RAPOTrainer):
    """Keeps the importance ratios at policy tokens, update by update."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.scores = out[0].detach()
        return out

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        width = self.scores.shape[1]
        mask = (inputs["completion_mask"] * inputs["tool_mask"])[:, :width].bool()
        mask &= (inputs["advantages"] != 0)[:, None]
        self.seen.append((self.scores - inputs["old_per_token_logps"][:, :width]).exp()[mask])
        return loss


@pytest.mark.case(20)
def test_ratio_is_one_before_the_first_update_and_not_after_it(tmp_path):
    policy, config = w.make_policy(), w.small_config(rl_steps=1, learning_rate=0.02)
    trainer = Ratios(
        policy, w.QUESTIONS, w.FakeToolbox(), None, config, METHODS["grpo"], tmp_path, reward=w.coin_reward
    )
    trainer.seen = []
    trainer.train()  # on real samples: the sampler's log-probabilities are those of the trainer
    first, second = trainer.seen
    assert len(first) > 20 and len(second) > 20
    torch.testing.assert_close(first, torch.ones_like(first), rtol=0, atol=1e-5)
    assert (second - 1).abs().max() > 1e-2


@pytest.mark.case(20)
def test_dropout_is_refused(tmp_path):
    policy = w.make_policy()
    base = w.make_model(w.TOKENIZER)
    policy.model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    with pytest.raises(ValueError, match="dropout in 14 modules .* lora_dropout=0"):
        w.make_trainer(policy, w.small_config(), "grpo", tmp_path)


@pytest.mark.case(20)
def test_dropout_of_attention_weights_is_refused(tmp_path):
    """transformers applies it without a module of its own."""
    model = w.make_model(w.TOKENIZER, attention_dropout=0.1)
    policy = w.add_lora(w.Policy(model, w.TOKENIZER, w.Protocol(w.TOKENIZER), "tiny"), 4, 0)
    with pytest.raises(ValueError, match="dropout in 2 modules .*set attention_dropout to 0"):
        w.make_trainer(policy, w.small_config(), "grpo", tmp_path)


@pytest.mark.case(16)
def test_an_infinite_reward_counts_as_none():
    segment = Segment("policy", (5,), (-1.0,), (0.5,))
    rollouts = [Rollout("q", (1,), [segment], i, reward=x) for i, x in enumerate((1.0, math.inf, 0.0))]
    row = t.rollout_metrics(rollouts, METHODS["grpo"])
    assert (row["nan_rewards"], row["reward"]) == (1, 0.5)


@pytest.mark.case(21)
@pytest.mark.parametrize("method", ["rapo", "rapo_released"])
def test_one_batch_of_8_and_4_micro_batches_of_2_give_the_same_gradient(tmp_path, method):
    config = w.small_config(rl_steps=2, updates_per_step=1)
    whole = train(tmp_path / "a", method, config, w.Canned(noise=0.3))[1]
    parts = train(tmp_path / "b", method, config.replace(micro_batch=2), w.Canned(noise=0.3))[1]
    assert len(whole.all) == len(parts.all) == 2
    for a, b in zip(whole.all, parts.all, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-5 * a[name].abs().max().item())


@pytest.mark.case(24)
def test_exactly_n_hybrid_rollouts_of_a_group_may_retrieve(tmp_path):
    config = w.small_config(group_size=8, n_hybrid=4, rl_steps=1)
    for method, hybrid in (("rapo", [False] * 4 + [True] * 4), ("grpo", [False] * 8)):
        sampler = w.Canned(noise=0.1)
        train(tmp_path / method, method, config, sampler)
        assert [q.hybrid for q in sampler.requests[0]] == hybrid * 2


@pytest.mark.case(33)
def test_adapter_round_trip_in_a_new_process(tmp_path):
    base = w.make_model(w.TOKENIZER)
    base.save_pretrained(tmp_path / "base")
    w.TOKENIZER.save_pretrained(tmp_path / "base")
    policy = t.Policy(load_policy(tmp_path / "base").model, w.TOKENIZER, w.Protocol(w.TOKENIZER), "base")
    ids = torch.arange(5, 25)[None]
    untrained = policy.model(ids).logits
    policy = w.add_lora(policy, 4, 0)
    w.make_trainer(policy, w.small_config(rl_steps=1), "grpo", tmp_path / "run", w.Canned()).train()
    save_adapter(policy, tmp_path / "adapter")
    code = (
        "import sys, torch; from rapo_lib.policy import load_policy, load_adapter; base, adapter, out = sys.argv[1:]\n"
        "policy = load_adapter(load_policy(base), adapter)\n"
        "assert list(policy.model.peft_config) == ['default']\n"
        "assert all(p.norm() > 0 for n, p in policy.model.named_parameters() if 'lora_B' in n)\n"
        "torch.save(policy.model(torch.arange(5, 25)[None]).logits.detach(), out)"
    )
    paths = [str(tmp_path / name) for name in ("base", "adapter", "logits.pt")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, cwd=Path(__file__).parent.parent)
    loaded, trained = torch.load(paths[2]), policy.model(ids).logits
    torch.testing.assert_close(loaded, trained, rtol=0, atol=1e-6)
    assert (trained - untrained).abs().max() > 1e-4


def state_of(trainer):
    steps = [s["step"].item() for s in trainer.optimizer.state.values()]
    moments = {
        f"{i}.{k}": s[k] for i, s in enumerate(trainer.optimizer.state.values()) for k in ("exp_avg", "exp_avg_sq")
    }
    return steps, moments, w.adapter(trainer.policy), trainer.lr_scheduler.get_last_lr()


@pytest.mark.case(34)
def test_resume_is_exact_and_a_half_written_checkpoint_is_ignored(tmp_path):
    config = w.small_config(rl_steps=4)
    whole, _, rows = train(tmp_path / "whole", config=config, checkpoint_every=2)
    assert t.latest_checkpoint(tmp_path / "whole").name == "checkpoint-8"

    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = True

    _, _, first = train(tmp_path / "parts", config=config, checkpoint_every=2, callbacks=[Stop()])
    half = tmp_path / "parts" / "checkpoint-6"  # newer, but its writing never came to its end
    half.mkdir()
    (half / "trainer_state.json").write_text('{"global_step": 6', encoding="utf-8")
    assert t.latest_checkpoint(tmp_path / "parts").name == "checkpoint-4"
    rest = []
    resumed = w.make_trainer(
        w.make_policy(seed=5),
        config,
        "grpo",
        tmp_path / "parts",
        on_rl_step=lambda *a: rest.append(a),
        checkpoint_every=2,
    )
    resumed.train(resume_from_checkpoint=True)
    assert [row["rl_step"] for row, _ in first + rest] == [1, 2, 3, 4]
    assert [[r.to_dict() for r in x] for _, x in first + rest] == [[r.to_dict() for r in x] for _, x in rows]
    a, b = state_of(whole), state_of(resumed)
    assert a[0] == b[0] == [8.0] * len(a[0]) and a[3] == b[3]
    for mine, theirs in zip(a[1:3], b[1:3], strict=True):
        assert all(mine[k].equal(theirs[k]) for k in mine), "resumed run differs from the unbroken one"
    moved = whole.policy.model.state_dict()
    assert any(not moved[n].equal(p) for n, p in w.make_policy().model.state_dict().items())


@pytest.mark.case(34)
def test_no_checkpoint_means_a_fresh_start(tmp_path):
    assert t.latest_checkpoint(tmp_path) is None
    trainer = w.make_trainer(w.make_policy(), w.small_config(rl_steps=1), "grpo", tmp_path, w.Canned())
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


@pytest.mark.case(35)
def test_noise_in_the_seed_alone_changes_a_run(tmp_path):
    runs = {name: train(tmp_path / name, config=w.small_config(seed=s)) for name, s in (("a", 0), ("b", 0), ("c", 1))}
    ids = {k: [r.completion_ids for _, rollouts in run[2] for r in rollouts] for k, run in runs.items()}
    assert ids["a"] == ids["b"] != ids["c"]
    assert all(p.equal(w.adapter(runs["b"][0].policy)[n]) for n, p in w.adapter(runs["a"][0].policy).items())


# ----------------------------------------------------------------------------------- settings and metrics


def test_settings_that_differ_from_trl(tmp_path):
    args = t.grpo_config(w.small_config(), METHODS["rapo"], w.make_policy(), tmp_path)
    got = {
        k: getattr(args, k)
        for k in ("bf16", "loss_type", "epsilon", "epsilon_high", "adam_beta1", "adam_beta2", "weight_decay")
    }
    want = dict(
        bf16=False, loss_type="grpo", epsilon=0.28, epsilon_high=0.28, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.0
    )
    assert got == want and not args.use_bias_correction_kl
    assert (args.steps_per_generation, args.num_iterations, args.logging_steps, args.beta) == (2, 1, 1, 0.0)
    assert args.lr_scheduler_type == "constant" and args.max_grad_norm == 1.0 and not args.gradient_checkpointing


def test_question_order_is_a_permutation_an_epoch_the_same_for_every_method():
    config = w.small_config(rl_steps=6, questions_per_step=2)
    order = t.question_order(5, config)
    assert len(order) == 12
    assert len(set(order[:4])) == len(set(order[4:8])) == 4
    assert all(order[i] != order[i + 1] for i in range(0, 12, 2))
    assert t.question_order(5, config.replace(method="grpo")) == order != t.question_order(5, config.replace(seed=1))
    assert t.question_order(5, config.replace(rl_steps=2)) == order[:4]


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    def build(method="grpo", retriever=None, teacher=(), **changes):
        config = w.small_config(**changes)
        return t.RAPOTrainer(
            w.make_policy(), w.QUESTIONS, None, retriever, config, METHODS[method], tmp_path, teacher=teacher
        )

    with pytest.raises(ValueError, match="'rapo' retrieves, and got no retriever"):
        build("rapo")
    with pytest.raises(ValueError, match="'grpo' does not retrieve, and got a retriever"):
        build("grpo", w.FakeRetriever())
    with pytest.raises(ValueError, match="inserts a step, method 'rapo_to' needs a trajectory"):
        build("rapo_to", w.FakeRetriever())
    with pytest.raises(ValueError, match="use train_sft"):
        build("sft")
    with pytest.raises(ValueError, match="4 questions, but an RL step needs questions_per_step = 5"):
        build(questions_per_step=5)
    with pytest.raises(ValueError, match="8 rollouts do not divide into 3 optimiser steps"):
        build(updates_per_step=3)
    with pytest.raises(ValueError, match="n_hybrid is 5; allowed: 0 to group_size = 4"):
        build("rapo", w.FakeRetriever(), n_hybrid=5)
    with pytest.raises(ValueError, match="'luffy' needs the teacher's trajectories, and got 0"):
        build("luffy")
    one = teachers_rollouts(w.QUESTIONS[0], 1)
    with pytest.raises(ValueError, match="'grpo' takes no teacher's trajectories, and got 1"):
        build("grpo", teacher=one)
    with pytest.raises(ValueError, match="n_off_policy is 4; allowed: 0 to group_size - 1 = 3"):
        build("luffy", teacher=one, n_off_policy=4)
    with pytest.raises(ValueError, match="kl_coef is 0.1; method 'luffy' allows 0"):
        build("luffy", teacher=one, kl_coef=0.1)


@pytest.mark.case(16, 22, 36)
def test_rollout_metrics_by_hand():
    own, tool = t.Rollout.from_dict, {"tool": "search", "query": "x"}

    def segment(origin, n, h=0.0, **info):
        logged = [h] * n if origin == "policy" else []
        return {"origin": origin, "ids": [5] * n, "logps": logged, "entropies": logged, "info": info}

    def rollout(segments, hybrid, reward, question="q", end_reason="answer"):
        rest = dict(prompt_ids=[1], place=0, end_reason=end_reason)
        out = own({"question_id": question, "segments": segments, "hybrid": hybrid, "reward": None} | rest)
        out.reward = reward  # NaN is never read from a file
        return out

    rollouts = [
        rollout(
            [segment("policy", 2, 0.6), segment("tool", 1, ok=False, **tool), segment("policy", 1, 0.6)], False, 1.0
        ),
        rollout(
            [segment("policy", 4, 0.6), segment("retrieval", 2), segment("policy", 2, 0.3)], True, 0.0, "q", "format"
        ),
        rollout([segment("policy", 1, 0.6), segment("tool", 2, ok=True, **tool)], True, math.nan, "p", "length"),
    ]
    got = t.rollout_metrics(rollouts, METHODS["rapo"])
    want = dict(
        reward=0.5,
        reward_on=1.0,
        reward_hybrid=0.0,
        nan_rewards=1,
        groups_no_signal_frac=0.5,
        entropy=(0.6 * 8 + 0.3 * 2) / 10,
    )
    want |= dict(
        retrieved_frac=0.25,
        retrieval_reward=0.6 * math.tanh(1.0),
        retrievals=1,
        tool_calls=2 / 3,
        tool_failures_frac=0.5,
    )
    want |= dict(completion_tokens=(4 + 8 + 3) / 3, generated_tokens=10, truncated_frac=1 / 3, format_faults_frac=1 / 3)
    assert got == pytest.approx(want)


def test_metric_names_of_a_row(tmp_path):
    (row, rollouts) = train(tmp_path, "rapo", w.small_config(rl_steps=1), w.Canned(noise=0.1))[2][0]
    names = """rl_step reward reward_on reward_hybrid entropy retrieved_frac retrieval_reward groups_no_signal_frac
        clip_frac negative_factor_frac tool_calls tool_failures_frac completion_tokens generated_tokens retrievals
        rollout_sec update_sec retrieval_sec tools_sec step_sec nan_rewards truncated_frac format_faults_frac"""
    assert set(row) == set(names.split()) and len(rollouts) == 8
    json.dumps(row)


# -------------------------------------------------------------------------------------------------- SFT


@pytest.mark.case(2)
def test_sft_learns_the_teachers_ids_and_nothing_else(tmp_path):
    policy, sampler = w.make_policy(), w.Canned()
    teacher = [sampler.rollout(policy, q, i, 1, False) for q in w.QUESTIONS for i in range(4)]
    before = t.score_rollouts(policy, teacher)
    mask = [m for r in teacher for m in r.policy_mask]
    expected = -sum(x for row in before for x in row) / sum(mask)
    config, log = w.small_config(sft_epochs=6.0, learning_rate=0.02), []
    t.train_sft(policy, teacher, config, tmp_path, batch_size=16, on_update=log.append)
    assert [row["update"] for row in log] == [1, 2, 3, 4, 5, 6]
    assert log[0]["loss"] == pytest.approx(expected, rel=1e-4)  # observations would move this mean
    assert log[-1]["loss"] < log[0]["loss"] - 0.1
    after = t.score_rollouts(policy, teacher)
    assert sum(map(sum, after)) > sum(map(sum, before))


def test_sft_needs_trajectories(tmp_path):
    with pytest.raises(ValueError, match="no trajectories to learn from"):
        t.train_sft(w.make_policy(), [], w.small_config(), tmp_path)


def test_what_decides_on_a_retrieval_follows_the_method():
    """The coin has the run's probability; the gate opens above the run's entropy, and draws nothing."""

    class State:
        last_entropy = 0.05

    rng = child_rng(0, "gate")
    config = w.small_config(retrieval_prob=1.0, gate_nats=0.049)
    assert METHODS["rapo"].when_to_retrieve(config)(State, rng)
    assert not METHODS["rapo"].when_to_retrieve(config.replace(retrieval_prob=0.0))(State, rng)
    gate = METHODS["rapo_gated"].when_to_retrieve(config)
    assert gate(State, None) and not METHODS["rapo_gated"].when_to_retrieve(config.replace(gate_nats=0.05))(State, None)


# ------------------------------------------------------------------------------------------ large vocabularies


def head_rows(model):
    """Rows of logits that each call of the output layer made, as a list that grows."""
    rows = []

    def note(module, arguments, out):
        if out.shape[-1] == w.VOCAB:  # not the hidden states that pass a head which is left out
            rows.append(out.flatten(0, -2).shape[0])

    model.get_output_embeddings().register_forward_hook(note)
    return rows


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "adapter", "gpt2"])
def test_logits_in_chunks_give_the_same_numbers_and_gradients(kind, monkeypatch):
    small = dict(vocab_size=w.VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2)
    small |= dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    torch.manual_seed(0)
    model = {
        "adapter": lambda: w.make_policy().model,
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**small)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**small)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=w.VOCAB, n_embd=32, n_layer=2, n_head=4)),
    }.get(kind, lambda: make_model(w.TOKENIZER, kind))()
    model.eval()
    ids = torch.randint(5, w.VOCAB, (3, 20))
    scored = torch.ones(3, 15, dtype=torch.long)
    scored[1, 9:] = scored[2, ::2] = 0
    n_scored, weight = int(scored.sum()), torch.randn(3, 15)  # 15 + 9 + 7 = 31
    rows, found = head_rows(t._causal_model(model)), []
    for held in (t.LOGITS_BYTES, 4 * w.VOCAB * 8):
        monkeypatch.setattr(t, "LOGITS_BYTES", held)
        rows.clear()
        logps, entropies = t.score_tokens(model, ids, torch.ones_like(ids), scored, temperature=0.7)
        model.zero_grad()
        (logps * weight).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((logps.detach(), entropies, grads))
        # 31 rows in chunks of 8, once forward and once more (from the last chunk back) in the backward pass
        chunks = [31] if held > 10**6 or kind == "gpt2" else [8, 8, 8, 7, 7, 8, 8, 8]
        assert n_scored == 31 and rows == chunks
    (logps, entropies, grads), (logps2, entropies2, grads2) = found
    torch.testing.assert_close(logps2, logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies2, entropies, rtol=1e-5, atol=1e-5)
    assert any("embed" in n or "wte" in n or "lora" in n for n in grads)
    assert_same(grads2, grads, atol=1e-5)
    with torch.no_grad():
        assert t.score_tokens(model, ids, torch.ones_like(ids), scored)[0].shape == (3, 15)
        assert model(input_ids=ids).logits.shape == (3, 20, w.VOCAB)  # the head is where it was


def test_sft_of_a_large_vocabulary_is_the_same_training(tmp_path, monkeypatch):
    sampler, config, found = w.Canned(), w.small_config(sft_epochs=2.0, learning_rate=0.02), []
    teacher = [sampler.rollout(w.make_policy(), q, i, 1, False) for q in w.QUESTIONS for i in range(4)]
    for held in (t.LOGITS_BYTES, 4 * w.VOCAB * 50):
        monkeypatch.setattr(t, "LOGITS_BYTES", held)
        policy, log = w.make_policy(), []
        rows = head_rows(policy.base)
        t.train_sft(policy, teacher, config, tmp_path / str(held), batch_size=8, on_update=log.append)
        found.append((w.adapter(policy), [row["loss"] for row in log], max(rows)))
    (adapter, losses, most), (adapter2, losses2, most2) = found
    assert losses2 == pytest.approx(losses, rel=1e-4) and len(losses) == 4
    assert_same(adapter2, adapter, rtol=1e-3, atol=1e-4)
    assert most2 == 50 < most


def test_a_large_model_gets_small_micro_batches_and_checkpointing_by_itself(tmp_path, monkeypatch):
    assert t.default_micro_batch(256, 4096, 10**9) == 4 and t.default_micro_batch(256, 4096, 10**8) == 256
    assert t.default_micro_batch(7, 2048, 10**9) == 7 and t.default_micro_batch(11, 2048, 10**9) == 1  # divisors only
    assert t.default_micro_batch(8, 100_000, 10**9) == 1  # one rollout alone may be longer
    policy, config = w.make_policy(), w.small_config(max_completion=8192, updates_per_step=1)  # 8 rollouts
    small = t.grpo_config(config, METHODS["rapo"], policy, tmp_path)
    monkeypatch.setattr(t, "CHECKPOINTING_FROM", 10)
    large = t.grpo_config(config, METHODS["rapo"], policy, tmp_path)
    assert (small.per_device_train_batch_size, small.gradient_accumulation_steps) == (8, 1)
    assert (large.per_device_train_batch_size, large.gradient_accumulation_steps) == (2, 4)
    assert large.gradient_checkpointing and not small.gradient_checkpointing


def test_recomputed_activations_give_the_same_gradient(tmp_path, monkeypatch):
    config = w.small_config(rl_steps=1, updates_per_step=1)
    kept = train(tmp_path / "a", "rapo", config, w.Canned(noise=0.3))[1].all
    monkeypatch.setattr(t, "CHECKPOINTING_FROM", 10)
    monkeypatch.setattr(t, "LOGITS_BYTES", 4 * w.VOCAB * 8)
    trainer, seen, _ = train(tmp_path / "b", "rapo", config, w.Canned(noise=0.3))
    assert trainer.policy.base.is_gradient_checkpointing
    for a, b in zip(kept, seen.all, strict=True):
        assert_same(b, a, rtol=1e-3, atol=1e-5)
    assert all(p.requires_grad for p in trainer.optimizer.state)  # frozen weights have no moments
    assert len(trainer.optimizer.state) == len(w.adapter(trainer.policy))
