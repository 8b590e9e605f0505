"""Every method, ablation and baseline as arguments to the same rollout and the same objective.

Notebooks 05 and 06 explain this module. Nothing here computes: a `Method` says what the rollout and
the objective get. The numbers (m, a, N_hybrid, p) stand in `RunConfig`; a method only switches them off.
"""

# ruff: noqa: E501 (METHODS is a table, one row a line)
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rapo_lib.config import RunConfig
from rapo_lib.objective import (
    Advantage,
    RetrievalReward,
    high_rising_reward,
    low_falling_reward,
    low_rising_reward,
    rapo_advantage,
    retrieval_quality,
    retrieval_reward,
    sign_aware_advantage,
    timing_reward,
)
from rapo_lib.rollout import WhenToRetrieve, coin, entropy_above


@dataclass(frozen=True, kw_only=True)
class Method:
    """Arguments that a method gives to rollout and objective.

    Args:
        name: key in METHODS.
        summary: one line for tables and legends.
        source: where it comes from.
        trained_by: `rl` (rollouts and RAPOTrainer), `sft` (cross-entropy on the teacher's trajectories), or `sft+rl`.
        off_policy: whether some of the teacher's trajectories take the group's last places (LUFFY).
        retrieves: whether the group's last N_hybrid rollouts may retrieve.
        trigger: what decides on a retrieval: a `coin`, or the `entropy` of the last own step.
        unit: what one retrieval inserts: a step, or a trajectory from its start (w/ TO).
        shaped: whether the importance ratio is shaped; else m = 0.
        weighted: whether the retrieval advantage counts; else a = 0.
        retrieval_reward: (H_before, H_after) -> Z_ret of one retrieval.
        advantage: (A_acc, A_ret, a) -> advantage.
        released_loss: the released code's loss: clip .2 below and .28 above, dual clip 3, token mean.
    """

    name: str
    summary: str
    source: str = "arXiv 2603.03078"
    trained_by: Literal["rl", "sft", "sft+rl"] = "rl"
    off_policy: bool = False
    retrieves: bool = True
    trigger: Literal["coin", "entropy"] = "coin"
    unit: Literal["step", "trajectory"] = "step"
    shaped: bool = True
    weighted: bool = True
    retrieval_reward: RetrievalReward = retrieval_reward
    advantage: Advantage = rapo_advantage
    released_loss: bool = False

    def n_hybrid(self, config: RunConfig) -> int:
        """N_hybrid: rollouts of a group that may retrieve."""
        return config.n_hybrid if self.retrieves else 0

    def n_off_policy(self, config: RunConfig) -> int:
        """Places of a group that the teacher's trajectories take."""
        return config.n_off_policy if self.off_policy else 0

    def when_to_retrieve(self, config: RunConfig) -> WhenToRetrieve:
        """What decides before each later step of a hybrid rollout."""
        return coin(config.retrieval_prob) if self.trigger == "coin" else entropy_above(config.gate_nats)

    @property
    def imitates(self) -> bool:
        """Whether it learns from the teacher's own tokens."""
        return self.off_policy or self.trained_by != "rl"

    def shaping_weight(self, config: RunConfig) -> float:
        """m of Eq. 8."""
        return config.shaping_weight if self.shaped else 0.0

    def advantage_weight(self, config: RunConfig) -> float:
        """a of Eq. 10."""
        return config.advantage_weight if self.weighted else 0.0


_FIG7, _TABLE3 = "arXiv 2603.03078, Fig. 7", "arXiv 2603.03078, Table 3"

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(name="grpo", summary="GRPO: on-policy rollouts only", source="arXiv 2402.03300", retrieves=False, shaped=False, weighted=False),
        Method(name="rapo", summary="RAPO: step retrieval, retrieval reward, shaped ratio"),
        Method(name="rapo_no_rpo", summary="w/o RPO: retrieval only, a = m = 0", source=_FIG7, shaped=False, weighted=False),
        Method(name="rapo_no_reward", summary="w/o RR: no retrieval reward, a = 0", source=_FIG7, weighted=False),
        Method(name="rapo_no_shaping", summary="w/o RIS: no importance shaping, m = 0", source=_FIG7, shaped=False),
        Method(name="rapo_no_quality", summary="w/o RQ: Z_ret = H_before", source=_FIG7, retrieval_reward=timing_reward),
        Method(name="rapo_no_timing", summary="w/o RT: Z_ret = g", source=_FIG7, retrieval_reward=retrieval_quality),
        Method(name="rapo_to", summary="w/ TO: retrieves whole trajectories", source=_FIG7, unit="trajectory"),
        Method(name="rapo_sign_aware", summary="A = A_acc + a A_ret |A_acc|", source="ours", advantage=sign_aware_advantage),
        Method(name="rapo_gated", summary="retrieves where the last own step was unsure", source="ours", trigger="entropy"),
        Method(name="low_h_falling", summary="low H before, falling after", source=_TABLE3, retrieval_reward=low_falling_reward),
        Method(name="low_h_rising", summary="low H before, rising after", source=_TABLE3, retrieval_reward=low_rising_reward),
        Method(name="high_h_rising", summary="high H before, rising after", source=_TABLE3, retrieval_reward=high_rising_reward),
        Method(name="rapo_released", summary="RAPO with the released code's loss", source="released code", released_loss=True),
        Method(name="sft", summary="SFT on the teacher's trajectories", source="baseline", trained_by="sft", retrieves=False, shaped=False, weighted=False),
        Method(name="sft_grpo", summary="SFT, then GRPO", source="baseline", trained_by="sft+rl", retrieves=False, shaped=False, weighted=False),
        Method(name="luffy", summary="LUFFY: the teacher's trajectories in the group", source="arXiv 2504.14945", off_policy=True, retrieves=False, shaped=False, weighted=False),
    )
}  # fmt: skip


def get_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: an unknown name; the message lists the valid ones.

    Example:
        >>> get_method("grpo").n_hybrid(RunConfig())
        0
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; allowed: {', '.join(METHODS)}")
    return METHODS[name]
