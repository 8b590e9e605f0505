"""Eq. 5-11 of RAPO as pure tensor functions: retrieval reward, advantages, shaped and clipped loss.

Notebook 04 explains this module. It is also the readable oracle of the trainer's loss: a test holds
the gradient of `RAPOTrainer` to the gradient of `rapo_loss`.

Shape letters: B rollouts of a batch, T completion tokens, V vocabulary. Entropies are in nats.

Deviations from arXiv 2603.03078:
1. Eq. 5 is undefined at H_before = 0: the quality is 0 there (the policy was already certain).
2. `sign_aware_advantage` is ours: Eq. 10 pushes a failing rollout down more for a good retrieval.
3. With 1/H_before (Table 3) the inverse is held to `MAX_INVERSE_ENTROPY`, since H_before can be near 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from rapo_lib.traces import Rollout

#: Largest 1/H_before in 1/nats that the low-entropy inversions of Table 3 may reach.
MAX_INVERSE_ENTROPY = 100.0
#: Constant of LUFFY's policy shaping (arXiv 2504.14945).
LUFFY_GAMMA = 0.1
#: Added to a group's standard deviation (TRL's value).
NORM_EPS = 1e-4

#: (H_before, H_after) in nats -> retrieval reward of one retrieval.
RetrievalReward = Callable[[Tensor, Tensor], Tensor]
#: (A_acc, A_ret, a) -> advantage.
Advantage = Callable[[Tensor, Tensor, float], Tensor]

# ------------------------------------------------------------------------------------- retrieval reward


def retrieval_quality(h_before: Tensor | float, h_after: Tensor | float) -> Tensor:
    """How far the step entropy falls across a retrieval, squashed.

    Equation: `H_delta = -(H_after - H_before) / H_before`, `g = tanh(2 H_delta)`
    (arXiv 2603.03078, Eq. 5 and 6).

    Args:
        h_before: entropy of the own step before the retrieval, any shape, nats, >= 0.
        h_after: entropy of the own step after it, same shape.

    Returns:
        g, same shape, in (-1, tanh 2] = (-1, 0.964].

    Edge cases:
        H_before = 0 gives 0.

    Example:
        >>> round(retrieval_quality(0.6, 0.3).item(), 6)
        0.761594
        >>> retrieval_quality(0.0, 0.3).item()
        0.0
    """
    before, after = _entropy(h_before), _entropy(h_after)
    certain = before == 0
    delta = (before - after) / before.masked_fill(certain, 1.0)
    return torch.tanh(2 * delta).masked_fill(certain, 0.0)


def retrieval_reward(h_before: Tensor | float, h_after: Tensor | float) -> Tensor:
    """Retrieval reward of one retrieval: quality times timing (high entropy before, falling after).

    Equation: `Z_ret = g * H_before` (arXiv 2603.03078, Eq. 7).

    Args:
        h_before: entropy of the own step before the retrieval, any shape, nats, >= 0.
        h_after: entropy of the own step after it, same shape.

    Returns:
        Z_ret, same shape, nats.

    Example:
        >>> round(retrieval_reward(0.6, 0.3).item(), 5)
        0.45696
    """
    return retrieval_quality(h_before, h_after) * _entropy(h_before)


def timing_reward(h_before: Tensor | float, h_after: Tensor | float) -> Tensor:
    """Retrieval reward without quality: `Z_ret = H_before` (w/o RQ; arXiv 2603.03078, Fig. 7)."""
    return _entropy(h_before) + 0 * _entropy(h_after)


def high_rising_reward(h_before: Tensor | float, h_after: Tensor | float) -> Tensor:
    """Inversion `H_delta <- -H_delta`: high entropy before, rising after (arXiv 2603.03078, Table 3)."""
    return -retrieval_reward(h_before, h_after)  # tanh is odd


def low_falling_reward(h_before: Tensor | float, h_after: Tensor | float) -> Tensor:
    """Inversion `H_before <- 1/H_before`: low entropy before, falling after (arXiv 2603.03078, Table 3).

    Edge cases:
        1/H_before is at most `MAX_INVERSE_ENTROPY`; H_before = 0 gives 0, as the quality is 0 there.
    """
    inverse = 1 / _entropy(h_before).clamp(min=1 / MAX_INVERSE_ENTROPY)
    return retrieval_quality(h_before, h_after) * inverse


def low_rising_reward(h_before: Tensor | float, h_after: Tensor | float) -> Tensor:
    """Both inversions: low entropy before, rising after (arXiv 2603.03078, Table 3)."""
    return -low_falling_reward(h_before, h_after)


def rollout_retrieval_reward(rollout: Rollout, reward: RetrievalReward = retrieval_reward) -> float:
    """Z_ret of a rollout: the mean over its retrievals (arXiv 2603.03078, 4.2.1).

    Args:
        rollout: a rollout; its retrievals count that have an own step on both sides.
        reward: (H_before, H_after) -> reward of one retrieval.

    Returns:
        The mean in nats; 0.0 for a rollout without such a retrieval.
    """
    pairs = torch.tensor(rollout.retrieval_entropies, dtype=torch.float64)
    return reward(pairs[:, 0], pairs[:, 1]).mean().item() if len(pairs) else 0.0


def _entropy(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


# ------------------------------------------------------------------------------------------- advantages


def group_normalise(values: Tensor, group_ids: Sequence[Hashable] | Tensor, eps: float = NORM_EPS) -> Tensor:
    """Normalise values inside their groups: subtract the mean, divide by the standard deviation.

    Equation: `(x - mean) / (std + eps)`, std with n - 1 (arXiv 2603.03078, Eq. 9; TRL's epsilon).

    Args:
        values: (B,), for instance rewards or Z_ret. NaN marks a value that could not be had, and so does infinity.
        group_ids: the question of each value, B of them; rows of a group may stand anywhere.
        eps: added to the standard deviation.

    Returns:
        (B,), finite.

    Raises:
        ValueError: as many ids as values are needed.

    Edge cases:
        A NaN or infinite value counts neither in mean nor in std and becomes 0. A group of one value, or of equal
        values, becomes exactly 0.

    Example:
        >>> group_normalise(torch.tensor([1.0, 0.0, 0.0, 0.0]), ["a", "b", "a", "b"]).round(decimals=3).tolist()
        [0.7070000171661377, 0.0, -0.7070000171661377, 0.0]
    """
    if len(group_ids) != len(values):
        raise ValueError(f"{len(group_ids)} group ids for {len(values)} values; each value needs the id of its group")
    group = _group_index(group_ids).to(values.device)  # (B,) numbers 0 .. n_groups - 1
    valid = values.isfinite()
    x = values.masked_fill(~valid, 0.0)
    count = _group_sum(valid.to(x.dtype), group)  # (n_groups,)
    centred = (x - (_group_sum(x, group) / count.clamp(min=1))[group]) * valid
    std = (_group_sum(centred**2, group) / (count - 1).clamp(min=1)).sqrt()
    return (centred / (std + eps)[group]).masked_fill(~_differs(values, group), 0.0)


def groups_without_signal(values: Tensor, group_ids: Sequence[Hashable] | Tensor) -> float:
    """Share of groups whose values are all equal, so that they teach nothing (NaN and infinity left out)."""
    group = _group_index(group_ids).to(values.device)
    signal = torch.zeros(int(group.max()) + 1, dtype=torch.bool).to(values.device)
    signal[group[_differs(values, group)]] = True
    return 1.0 - signal.double().mean().item()


def _group_index(group_ids: Sequence[Hashable] | Tensor) -> Tensor:
    ids = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    number: dict[Hashable, int] = {}
    return torch.tensor([number.setdefault(i, len(number)) for i in ids], dtype=torch.long)


def _group_sum(x: Tensor, group: Tensor) -> Tensor:
    return torch.zeros(int(group.max()) + 1, dtype=x.dtype, device=x.device).index_add(0, group, x)


def _differs(values: Tensor, group: Tensor) -> Tensor:
    """True at each row whose group holds two different values; asked exactly, since a mean is rounded."""
    start = torch.full((int(group.max()) + 1,), math.inf, dtype=values.dtype, device=values.device)
    broken = ~values.isfinite()
    low = start.scatter_reduce(0, group, values.masked_fill(broken, math.inf), "amin")
    high = (-start).scatter_reduce(0, group, values.masked_fill(broken, -math.inf), "amax")
    return (high > low)[group]


def rapo_advantage(a_acc: Tensor, a_ret: Tensor, weight: float) -> Tensor:
    """Advantage of RAPO: the outcome advantage, scaled by the retrieval advantage.

    Equation: `A = (1 + a A_ret) A_acc` (arXiv 2603.03078, Eq. 10).

    Args:
        a_acc: group-normalised outcome reward, (B,).
        a_ret: group-normalised retrieval reward, (B,).
        weight: a, >= 0.

    Returns:
        (B,).

    Edge cases:
        A failing rollout (A_acc < 0) with a good retrieval is pushed down *more*; with a large
        weight the factor can turn negative: log `negative_factor_frac`.
    """
    return (1 + weight * a_ret) * a_acc


def sign_aware_advantage(a_acc: Tensor, a_ret: Tensor, weight: float) -> Tensor:
    """Our variant of Eq. 10: a good retrieval always raises the advantage.

    Equation: `A = A_acc + a A_ret |A_acc|` (ours).

    Args:
        a_acc: group-normalised outcome reward, (B,).
        a_ret: group-normalised retrieval reward, (B,).
        weight: a, >= 0.

    Returns:
        (B,).
    """
    return a_acc + weight * a_ret * a_acc.abs()


def negative_factor_frac(a_ret: Tensor, weight: float) -> float:
    """Share of rollouts whose factor `1 + a A_ret` is negative, so that their advantage changes sign."""
    return (1 + weight * a_ret < 0).double().mean().item()


# ------------------------------------------------------------------------------------------------- loss


def shaping_factor(retrieved_frac: Tensor, weight: float) -> Tensor:
    """Factor on the importance ratio of a rollout that was helped by retrieval.

    Equation: `s = 1 + m F_ret` (arXiv 2603.03078, Eq. 8).

    Args:
        retrieved_frac: F_ret, (B,), retrieved tokens over completion tokens, in [0, 1].
        weight: m, >= 0.

    Returns:
        (B,), 1 for an on-policy rollout.
    """
    return 1 + weight * retrieved_frac


def luffy_log_ratio(logps: Tensor) -> Tensor:
    """Log of LUFFY's shaped ratio at the teacher's tokens, which stands in place of the importance ratio.

    Equation: `f(p) = p / (p + 0.1)` (arXiv 2504.14945): an unlikely token gets more of the gradient than its
    probability would give it, a likely one less.

    Args:
        logps: the policy's log-probabilities of the tokens, any shape, nats; gradients flow through them.

    Returns:
        log f, same shape, below log(1 / 1.1).

    Example:
        >>> round(luffy_log_ratio(torch.tensor(0.1).log()).exp().item(), 6)
        0.5
    """
    return torch.nn.functional.logsigmoid(logps - math.log(LUFFY_GAMMA))


def token_logps_and_entropies(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the ids and token entropies, both in nats, over the full vocabulary.

    Equation: `H = -sum_j p_j log p_j` (arXiv 2603.03078, Eq. 2).

    Args:
        logits: (..., V); -inf is allowed.
        ids: (...), the sampled ids.
        temperature: the logits are divided by it, as in sampling.

    Returns:
        Log-probabilities (...), and entropies (...), which carry no gradient.

    Example:
        >>> logps, entropies = token_logps_and_entropies(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5)
        >>> round(logps.item(), 4)
        -0.0181
    """
    logps = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logps.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropies = -(logps.exp() * logps.nan_to_num(neginf=0.0)).sum(-1)
    return chosen, entropies


def rapo_loss(
    logps: Tensor,
    old_logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    shaping: Tensor,
    clip: float | tuple[float, float] = 0.28,
    *,
    dual_clip: float | None = None,
    token_mean: bool = False,
    ref_logps: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Clipped loss of RAPO with the shaped importance ratio (the negative objective).

    Equation: `r_hat = s exp(logp - old)`, `L = -mean_i mean_t min(r_hat A, clip(r_hat, 1 - e, 1 + e) A)
    + beta KL` (arXiv 2603.03078, Eq. 8 and 11; KL by the estimator `exp(d) - d - 1`, `d = ref - logp`).

    Args:
        logps: log-probabilities of the policy, (B, T), nats; gradients flow through them.
        old_logps: those of the sampler, (B, T).
        mask: policy mask, (B, T), 1 where the policy wrote the token.
        advantages: (B,).
        shaping: s, (B,), >= 1.
        clip: e, or (below, above); the released code has (.2, .28).
        dual_clip: c > 1 bounds the loss of a failing rollout by `c |A|` (released code: 3).
        token_mean: mean over all policy tokens of the batch (released code), not per rollout first.
        ref_logps: those of the reference policy, (B, T); needed when kl_coef is not 0.
        kl_coef: beta.

    Returns:
        Scalar loss.

    Edge cases:
        A rollout without policy tokens, and one with advantage 0 (and beta 0), adds exactly 0.
    """
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    ratio = shaping[:, None] * (logps - old_logps).exp()  # (B, T)
    adv = advantages[:, None]
    gain = torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)
    if dual_clip is not None:
        gain = torch.where(adv < 0, torch.maximum(gain, dual_clip * adv), gain)
    if kl_coef:
        gain = gain - kl_coef * kl_estimate(logps, ref_logps)
    if token_mean:
        return -(gain * mask).sum() / mask.sum().clamp(min=1)
    return -((gain * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def kl_estimate(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference): `exp(d) - d - 1`, `d = ref - logp` (as in TRL)."""
    d = ref_logps - logps
    return d.exp() - d - 1
