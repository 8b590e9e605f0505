"""Eq. 5-11 against values worked out by hand."""

import math

import pytest
import torch

from rapo_lib import objective as o
from rapo_lib.config import RunConfig
from rapo_lib.methods import METHODS, get_method
from rapo_lib.traces import Rollout, Segment

NAN = math.nan


def policy(n: int, entropy: float) -> Segment:
    return Segment("policy", tuple(range(5, 5 + n)), (-0.5,) * n, (entropy,) * n)


def retrieval(n: int) -> Segment:
    return Segment("retrieval", tuple(range(50, 50 + n)))


def close(got, want, tol=2e-4):
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, atol=tol, rtol=0)


# ------------------------------------------------------------------------------------- retrieval reward


@pytest.mark.case(22)
def test_retrieval_reward_worked_values():
    close(o.retrieval_quality(0.6, 0.3), math.tanh(1.0), 1e-12)
    close(o.retrieval_reward(0.6, 0.3), 0.456957, 1e-6)
    assert o.retrieval_reward(0.5, 0.5).item() == 0.0
    assert o.retrieval_reward(0.0, 0.3).item() == 0.0
    close(o.retrieval_reward(0.4, 0.6), 0.4 * math.tanh(-1.0), 1e-12)


def test_retrieval_quality_is_at_most_tanh_2():
    close(o.retrieval_quality(0.7, 0.0), math.tanh(2.0), 1e-12)
    assert o.retrieval_quality(0.01, 50.0).item() == -1.0


@pytest.mark.case(22)
def test_rollout_reward_is_the_mean_and_a_last_retrieval_earns_nothing():
    r = Rollout("q", (1, 2), [policy(3, 0.6), retrieval(4), policy(2, 0.3), retrieval(4), policy(2, 0.3), retrieval(4)])
    close(o.rollout_retrieval_reward(r), (0.6 * math.tanh(1.0) + 0.0) / 2, 1e-9)
    assert o.rollout_retrieval_reward(Rollout("q", (1,), [policy(3, 0.6), retrieval(4)])) == 0.0
    assert o.rollout_retrieval_reward(Rollout("q", (1,), [policy(3, 0.6)])) == 0.0


@pytest.mark.case(22)
@pytest.mark.parametrize(
    "method, want",
    [
        ("rapo", 0.5 * math.tanh(0.8)),
        ("rapo_no_quality", 0.5),
        ("rapo_no_timing", math.tanh(0.8)),
        ("high_h_rising", -0.5 * math.tanh(0.8)),
        ("low_h_falling", 2.0 * math.tanh(0.8)),
        ("low_h_rising", -2.0 * math.tanh(0.8)),
    ],
)
def test_variants_of_the_retrieval_reward(method, want):
    fn = METHODS[method].retrieval_reward
    close(fn(0.5, 0.3), want, 1e-12)
    assert fn(0.0, 0.3).item() == 0.0
    rollout = Rollout("q", (1,), [policy(2, 0.5), retrieval(2), policy(2, 0.3)])
    close(o.rollout_retrieval_reward(rollout, fn), want, 1e-9)


def test_inverse_of_a_small_entropy_is_held():
    close(o.low_falling_reward(1e-6, 0.0), o.MAX_INVERSE_ENTROPY * math.tanh(2.0), 1e-9)
    close(o.low_falling_reward(0.02, 0.0), 50 * math.tanh(2.0), 1e-9)


# ------------------------------------------------------------------------------------------- advantages


@pytest.mark.case(15)
def test_groups_by_question_id_not_by_position():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    close(o.group_normalise(rewards, ["a", "b", "a", "b"]), [0.7071, 0.0, -0.7071, 0.0])
    close(o.group_normalise(rewards, torch.tensor([7, 3, 7, 3])), [0.7071, 0.0, -0.7071, 0.0])


@pytest.mark.case(16)
def test_nan_reward_is_left_out_and_the_others_stay_finite():
    got = o.group_normalise(torch.tensor([1.0, NAN, 0.0, 0.0]), ["q"] * 4)
    std = math.sqrt(1 / 3)
    close(got, [(2 / 3) / (std + 1e-4), 0.0, (-1 / 3) / (std + 1e-4), (-1 / 3) / (std + 1e-4)], 1e-5)
    assert o.group_normalise(torch.tensor([1.0, NAN]), ["q", "q"]).tolist() == [0.0, 0.0]


@pytest.mark.case(16)
@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
def test_a_reward_that_is_no_number_takes_no_signal_from_its_group(broken):
    want = o.group_normalise(torch.tensor([1.0, 0.0, 0.0]), ["q"] * 3)
    got = o.group_normalise(torch.tensor([1.0, broken, 0.0, 0.0]), ["q"] * 4)
    close(got, [want[0], 0.0, want[1], want[2]], 1e-7)
    assert got[0] > 1 and o.groups_without_signal(torch.tensor([1.0, broken]), ["q", "q"]) == 1.0


@pytest.mark.case(2, 17)
def test_the_gradient_is_zero_exactly_where_the_mask_is(mask=(1.0, 1.0, 0.0, 0.0, 1.0)):
    logps = torch.tensor([[-0.1, -0.7, -0.2, -1.1, -0.4]], requires_grad=True)
    loss = o.rapo_loss(logps, logps.detach(), torch.tensor([mask]), torch.ones(1), torch.ones(1))
    (grad,) = torch.autograd.grad(loss, logps)
    assert (grad != 0).tolist() == [[True, True, False, False, True]]


@pytest.mark.case(16)
def test_group_of_one_and_equal_values_give_exactly_zero():
    assert o.group_normalise(torch.tensor([3.0, 1.0]), ["a", "b"]).tolist() == [0.0, 0.0]
    # The mean of seven .7 is not .7 in float32: without care the result is small but not 0.
    equal, groups = torch.tensor([0.7] * 7 + [1.0, 0.0]), ["a"] * 7 + ["b"] * 2
    assert equal[:7].sum() / 7 != equal[0]
    assert o.group_normalise(equal, groups)[:7].tolist() == [0.0] * 7
    assert o.groups_without_signal(equal, groups) == 0.5


def test_group_ids_must_fit():
    with pytest.raises(ValueError, match="3 group ids for 2 values"):
        o.group_normalise(torch.zeros(2), ["a", "b", "c"])


@pytest.mark.case(23)
def test_eq10_pushes_a_failing_rollout_down_more_for_a_good_retrieval():
    a_acc = o.group_normalise(torch.tensor([0.0, 1.0]), ["q", "q"])
    a_ret = o.group_normalise(torch.tensor([0.457, 0.0]), ["q", "q"])
    close(o.rapo_advantage(a_acc, a_ret, 0.2), [-0.8071, 0.6071])
    close(o.sign_aware_advantage(a_acc, a_ret, 0.2), [-0.7071 + 0.1, 0.7071 - 0.1])
    assert o.rapo_advantage(a_acc, a_ret, 0.0).equal(a_acc)
    assert o.sign_aware_advantage(a_acc, a_ret, 0.0).equal(a_acc)


def test_negative_factor_frac():
    a_ret = torch.tensor([-6.0, -4.0, 0.0, 6.0])
    assert o.negative_factor_frac(a_ret, 0.2) == 0.25
    assert o.negative_factor_frac(a_ret, 0.0) == 0.0


# ------------------------------------------------------------------------------------------------- loss


@pytest.mark.case(24)
def test_retrieved_fraction_follows_truncation_into_the_shaping_factor():
    r = Rollout("q", (1,), [policy(40, 0.1), retrieval(30)])
    frac = r.truncated(50).retrieved_frac
    assert frac == 0.2
    close(o.shaping_factor(torch.tensor([frac, 0.0]), 0.05), [1.01, 1.0], 1e-6)
    assert o.shaping_factor(torch.tensor([0.5]), 0.0).item() == 1.0


def one_row(ratio, advantage, shaping=1.0, **kw):
    logps = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    adv, shape = torch.tensor([[advantage], [shaping]], dtype=torch.float64)
    return o.rapo_loss(logps, 0 * logps, torch.ones_like(logps), adv, shape, **kw).item()


@pytest.mark.parametrize(
    "ratio, advantage, shaping, want",
    [
        (1.0, 2.0, 1.0, -2.0),
        (1.5, 2.0, 1.0, -2.56),  # clipped above
        (1.5, -2.0, 1.0, 3.0),  # a failing rollout is not clipped above
        (0.5, -2.0, 1.0, 1.44),  # clipped below
        (0.5, 2.0, 1.0, -1.0),
        (1.25, 2.0, 1.04, -2.56),  # 1.25 alone is inside; with the shaping factor it is clipped
        (1.0, 2.0, 1.05, -2.1),
    ],
)
def test_clipped_loss_with_shaped_ratio(ratio, advantage, shaping, want):
    close(one_row(ratio, advantage, shaping), want, 1e-9)


def test_released_clip_and_dual_clip():
    released = dict(clip=(0.2, 0.28), dual_clip=3.0)
    close(one_row(0.5, -2.0, **released), 1.6, 1e-9)
    close(one_row(1.5, 2.0, **released), -2.56, 1e-9)
    close(one_row(5.0, -2.0, **released), 6.0, 1e-9)  # without dual clip: 10
    close(one_row(5.0, -2.0, clip=(0.2, 0.28)), 10.0, 1e-9)


def test_kl_term():
    logps, ref = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    args = (logps, logps, torch.ones(1, 1), torch.zeros(1), torch.ones(1))
    close(o.rapo_loss(*args, ref_logps=ref, kl_coef=0.1), 0.1 * (math.exp(-1.0) + 1.0 - 1.0), 1e-6)


@pytest.mark.case(18)
def test_masked_tokens_do_not_dilute_the_mean():
    mask = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    zeros = torch.zeros(1, 5)
    assert o.rapo_loss(zeros, zeros, mask, torch.tensor([-1.0]), torch.ones(1)).item() == 1.0


def test_mean_per_rollout_and_token_mean_differ():
    mask = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    args = (torch.zeros(2, 4), torch.zeros(2, 4), mask, torch.tensor([-1.0, 0.5]), torch.ones(2))
    close(o.rapo_loss(*args), (1.0 - 0.5) / 2, 1e-7)
    close(o.rapo_loss(*args, token_mean=True), (1.0 - 4 * 0.5) / 5, 1e-7)


@pytest.mark.case(17)
def test_all_masked_gives_zero_loss_and_zero_gradient():
    logps = torch.randn(2, 3, requires_grad=True)
    for token_mean in (False, True):
        loss = o.rapo_loss(
            logps, logps.detach(), torch.zeros(2, 3), torch.ones(2), torch.ones(2), token_mean=token_mean
        )
        (grad,) = torch.autograd.grad(loss, logps)
        assert loss.item() == 0.0 and grad.abs().max().item() == 0.0


@pytest.mark.case(17)
def test_without_retrieval_the_loss_is_that_of_grpo():
    torch.manual_seed(0)
    logps, old = torch.randn(4, 6).double(), torch.randn(4, 6).double()
    mask, adv = (torch.rand(4, 6) < 0.7).double(), torch.randn(4).double()
    ratio = (logps - old).exp()
    gain = torch.minimum(ratio * adv[:, None], ratio.clamp(0.72, 1.28) * adv[:, None])
    grpo = -sum((gain[i] * mask[i]).sum() / mask[i].sum() for i in range(4)) / 4
    rapo_adv = o.rapo_advantage(adv, o.group_normalise(torch.zeros(4).double(), ["q"] * 4), 0.2)
    shaping = o.shaping_factor(torch.zeros(4).double(), 0.05)
    close(o.rapo_loss(logps, old, mask, rapo_adv, shaping), grpo, 1e-12)


@pytest.mark.case(19)
def test_log_probability_under_temperature():
    logps, _ = o.token_logps_and_entropies(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=0.5)
    close(logps, [-0.0181], 5e-5)


@pytest.mark.case(25)
def test_token_entropy():
    _, uniform = o.token_logps_and_entropies(torch.zeros(5, 4), torch.zeros(5, dtype=torch.long))
    close(uniform, [1.386294] * 5, 1e-6)
    _, cut = o.token_logps_and_entropies(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]))
    close(cut, [math.log(2)], 1e-6)


@pytest.mark.case(25)
def test_step_entropy_does_not_grow_with_length_and_leaves_out_inserted_tokens():
    r = Rollout("q", (1,), [policy(5, 1.25), retrieval(9), policy(20, 1.25)])
    assert r.step_entropies == [1.25, 1.25]


# ---------------------------------------------------------------------------------------------- methods


def test_unknown_method_lists_the_valid_ones():
    with pytest.raises(ValueError, match="unknown method 'rpo'; allowed: grpo, rapo,"):
        get_method("rpo")


@pytest.mark.parametrize(
    "name, n_hybrid, m, a",
    [
        ("grpo", 0, 0.0, 0.0),
        ("rapo", 8, 0.05, 0.2),
        ("rapo_no_rpo", 8, 0.0, 0.0),
        ("rapo_no_reward", 8, 0.05, 0.0),
        ("rapo_no_shaping", 8, 0.0, 0.2),
        ("rapo_to", 8, 0.05, 0.2),
        ("rapo_sign_aware", 8, 0.05, 0.2),
    ],
)
def test_methods_are_arguments(name, n_hybrid, m, a):
    config, method = RunConfig(), get_method(name)
    assert (method.n_hybrid(config), method.shaping_weight(config), method.advantage_weight(config)) == (n_hybrid, m, a)


def test_every_ablation_differs_from_the_full_method_in_one_thing():
    full, fields = METHODS["rapo"], method_fields()
    for name in (
        "rapo_no_reward",
        "rapo_no_shaping",
        "rapo_no_quality",
        "rapo_no_timing",
        "rapo_to",
        "rapo_sign_aware",
    ):
        changed = [f for f in fields if getattr(METHODS[name], f) != getattr(full, f)]
        assert len(changed) == 1, (name, changed)


def method_fields():
    return [f for f in METHODS["rapo"].__dataclass_fields__ if f not in ("name", "summary", "source")]
