"""The collapse guard: watches the metrics of a run and says when it has stopped learning, and why.

Notebook 08 shows its figure (`plots.plot_health`). The guard only looks: it draws nothing at random and changes
nothing. It holds no state beyond the rows it was given, so a resumed run feeds it the earlier rows again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: RL steps of a running mean, and of the start that later ones are compared with. One RL step has six questions,
#: so a single one swings by tenths; five in a row do not.
WINDOW = 5
#: A running mean of the reward from here on is clearly up: of about 500 rollouts, 50 and not a handful were right.
REWARD_UP = 0.1
#: The reward has collapsed when its running mean is below this share of the best: nearly all that was learned is
#: gone. A swing to half is common and often recovers.
REWARD_LEFT = 0.1
#: Entropy explodes when it is this many times that of the start, or this many nats above it (each token is then
#: chosen among 4.5 times as many), and is at least the floor: below it the policy is nearly certain whatever the ratio.
ENTROPY_TIMES, ENTROPY_ABOVE, ENTROPY_FLOOR = 5.0, 1.5, 0.2
#: Entropy has gone when it is below this share of the start. That is fine for a policy that is right, so the reward
#: must be below REWARD_UP.
ENTROPY_LEFT = 0.1
#: Length explodes when completions are this many times those of the start and the reward has not gained REWARD_UP
#: since: longer and better is no fault.
LENGTH_TIMES = 2.0
#: Nearly all rollouts cut, or nearly all tool calls failed, in this many RL steps in a row. Both shares are at a few
#: hundredths in a healthy run, so three are enough, and a broken tool is found before much time is lost.
NEARLY_ALL, IN_A_ROW = 0.9, 3
#: Nothing is learned when of the groups of this many RL steps at least this share have no signal. Half-way runs that
#: take off later start with nine such steps in a row; none of them has 20 with fewer than one group in 20 that teaches.
SIGNAL_STEPS, SIGNAL_SHARE = 20, 0.95
#: Groups without signal are no fault when all of them are right.
SOLVED = 0.9


@dataclass(frozen=True, slots=True)
class Alarm:
    """What the guard found.

    Args:
        rl_step: the RL step after which it shows. kind: one of KINDS. text: one sentence with numbers and what to do.
    """

    rl_step: int
    kind: str
    text: str


class CollapseGuard:
    """Reads one row of metrics after the other; each kind of alarm is raised once a run.

    Rewards are taken to lie between 0 and 1, as those of `rapo_lib.rewards` do.

    Example:
        >>> guard = CollapseGuard()
        >>> rows = [{"rl_step": t, "tool_failures_frac": 1.0} for t in (1, 2, 3)]
        >>> [alarm.kind if (alarm := guard.update(row)) else None for row in rows]
        [None, None, 'tools']
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {key: [] for key in KEYS}
        self._best_reward, self._best_step = 0.0, 0
        self._last_step: int | None = None
        self._raised: set[str] = set()

    def update(self, row: Mapping[str, Any]) -> Alarm | None:
        """Take the metrics of the next RL step.

        Args:
            row: with `rl_step` and as many of KEYS as are known. A missing, empty or NaN value is skipped: it
                counts neither as 0 nor as a step of a row.

        Returns:
            The alarm that this row raises, the first of KINDS when there are several (the others follow with
            the next row if they still hold); None when there is none.

        Raises:
            ValueError: RL steps that do not rise.
        """
        step = int(row["rl_step"])
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"RL step {step} came after RL step {self._last_step}; give each row once and in order, and make a "
                "new CollapseGuard to start over"
            )
        self._last_step = step
        for key, values in self._values.items():
            value = row.get(key)
            if value is not None and math.isfinite(value):
                values.append(float(value))
        mean = self._mean("reward")
        if mean is not None and mean > self._best_reward:
            self._best_reward, self._best_step = mean, step
        for kind, check in _CHECKS.items():
            if kind not in self._raised and (text := check(self)):
                self._raised.add(kind)
                return Alarm(step, kind, f"RL step {step}: {text}.")
        return None

    def _mean(self, key: str, n: int = WINDOW) -> float | None:
        """Mean of the last n values; None before there are as many."""
        values = self._values[key]
        return sum(values[-n:]) / n if len(values) >= n else None

    def _start(self, key: str) -> float | None:
        """Mean of the first values; None before a full window has come after them."""
        values = self._values[key]
        return sum(values[:WINDOW]) / WINDOW if len(values) >= 2 * WINDOW else None

    def _reward(self) -> str | None:
        mean = self._mean("reward")
        if mean is None or self._best_reward < REWARD_UP or mean > REWARD_LEFT * self._best_reward:
            return None
        return (
            f"the mean reward of {WINDOW} steps fell to {mean:.3f}, from {self._best_reward:.3f} at RL step "
            f"{self._best_step}; best/ holds the adapter of the best validation; lower learning_rate or raise kl_coef"
        )

    def _entropy(self) -> str | None:
        mean, start = self._mean("entropy"), self._start("entropy")
        if mean is None or start is None:
            return None
        if mean >= max(ENTROPY_FLOOR, min(ENTROPY_TIMES * start, start + ENTROPY_ABOVE)):
            return (
                f"the entropy rose to {mean:.3g} nats, from {start:.3g} in the first {WINDOW} steps: the policy writes "
                "more and more at random; lower learning_rate or clip, or set kl_coef above 0"
            )
        reward = self._mean("reward")
        if mean < ENTROPY_LEFT * start and reward is not None and reward < REWARD_UP:
            return (
                f"the entropy fell to {mean:.3g} nats, from {start:.3g} in the first {WINDOW} steps, with a mean "
                f"reward of {reward:.3f}: all rollouts of a group are nearly alike and wrong; lower learning_rate or "
                "raise temperature"
            )
        return None

    def _length(self) -> str | None:
        mean, start = self._mean("completion_tokens"), self._start("completion_tokens")
        if mean is None or start is None or mean < LENGTH_TIMES * start:
            return None
        reward, before = self._mean("reward"), self._start("reward")
        if reward is not None and before is not None and reward - before >= REWARD_UP:
            return None
        earned = "an unknown reward" if reward is None else f"a mean reward of {reward:.3f}"
        return (
            f"completions grew to {mean:.0f} tokens, from {start:.0f} in the first {WINDOW} steps, with {earned}; read "
            "some rollouts for repetition, and lower max_completion or learning_rate"
        )

    def _truncated(self) -> str | None:
        share = self._nearly_all("truncated_frac")
        return share and (
            f"in {IN_A_ROW} steps in a row {share} of all rollouts were cut at the length limit, so hardly any can "
            "answer; raise max_completion, or take the adapter in best/ if the policy has begun to repeat itself"
        )

    def _tools(self) -> str | None:
        share = self._nearly_all("tool_failures_frac")
        return share and (
            f"in {IN_A_ROW} steps in a row {share} of all tool calls failed: a tool is broken, or the policy calls it "
            "wrongly; the run's log names the first real error of each tool"
        )

    def _nearly_all(self, key: str) -> str | None:
        """The lowest share of the last rows as text when even that is nearly all."""
        last = self._values[key][-IN_A_ROW:]
        return f"at least {min(last):.0%}" if len(last) == IN_A_ROW and min(last) >= NEARLY_ALL else None

    def _signal(self) -> str | None:
        share, reward = self._mean("groups_no_signal_frac", SIGNAL_STEPS), self._mean("reward")
        if share is None or share < SIGNAL_SHARE or (reward is not None and reward >= SOLVED):
            return None
        earned = "" if reward is None else f" (mean reward {reward:.3f})"
        return (
            f"in {SIGNAL_STEPS} steps {share:.0%} of all groups had no signal{earned}, so nothing is learned; take "
            "questions of another difficulty, a larger group_size, or retrieval from a better teacher"
        )


#: Metrics that the guard reads.
KEYS = (
    "reward",
    "entropy",
    "completion_tokens",
    "truncated_frac",
    "tool_failures_frac",
    "groups_no_signal_frac",
)
_CHECKS = {
    "reward": CollapseGuard._reward,
    "truncated": CollapseGuard._truncated,
    "tools": CollapseGuard._tools,
    "entropy": CollapseGuard._entropy,
    "length": CollapseGuard._length,
    "signal": CollapseGuard._signal,
}
#: Every kind of alarm, in the order in which they are raised.
KINDS = tuple(_CHECKS)
#: Kind -> the metric that shows it.
METRIC_OF = {
    "reward": "reward",
    "truncated": "truncated_frac",
    "tools": "tool_failures_frac",
    "entropy": "entropy",
    "length": "completion_tokens",
    "signal": "groups_no_signal_frac",
}


def find_alarms(rows: Iterable[Mapping[str, Any]]) -> list[Alarm]:
    """All alarms of a run, from its rows of metrics in order."""
    guard = CollapseGuard()
    return [alarm for row in rows if (alarm := guard.update(row))]
