"""Statistics of few seeds: intervals, interquartile means, comparisons and verdicts.

Notebook 99_report uses this module. The seed is the unit everywhere: questions of one run are not
independent runs. Every function that draws takes its seed, so the same data give the same interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats as sps

from rapo_lib.config import child_rng

#: A difference below this (as a fraction: 2 points) counts as none.
MARGIN = 0.02
#: Fewer seeds than this give points, not verdicts.
MIN_SEEDS = 5
#: When both arms stay under this pass@1, nothing was learned that could be compared.
FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval and the number of values behind it."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        if np.isnan(self.low):
            return f"{self.mean:{spec}} (n = {self.n})"
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}] (n = {self.n})"


def _values(x: ArrayLike, name: str = "values") -> np.ndarray:
    array = np.asarray(x, dtype=float)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"{name} hold {array.size} numbers, {int((~np.isfinite(array)).sum())} of them not finite")
    return array


def t_interval(x: ArrayLike, confidence: float = 0.95) -> Interval:
    """Mean with Student's t interval over seeds.

    Args:
        x: (n,) one value a seed. confidence: 0 .. 1.

    Returns:
        Interval; its ends are NaN for a single value.

    Example:
        >>> round(t_interval([0.5, 0.6, 0.7]).half_width, 4)
        0.2484
    """
    x = _values(x).ravel()
    mean, n = float(x.mean()), len(x)
    if n == 1:
        return Interval(mean, float("nan"), float("nan"), 1)
    half = float(sps.t.ppf((1 + confidence) / 2, n - 1) * x.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def bootstrap_interval(
    x: ArrayLike,
    statistic: Callable[[np.ndarray], np.ndarray] = lambda a: a.mean(-1),
    *,
    seed: int = 0,
    n_resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """A statistic with its percentile bootstrap interval over seeds.

    Args:
        x: (n,) one value a seed.
        statistic: maps (.., n) to (..).
        seed: of the resamples. n_resamples: how many. confidence: 0 .. 1.
    """
    x = _values(x).ravel()
    rows = child_rng(seed, "stats.bootstrap").integers(len(x), size=(n_resamples, len(x)))
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(statistic(x[rows]), [tail, 100 - tail])
    return Interval(float(statistic(x)), float(low), float(high), len(x))


def iqm(scores: ArrayLike) -> float:
    """Interquartile mean: the mean of the middle half of all scores.

    Args:
        scores: any shape; seeds and tasks are pooled.

    Example:
        >>> iqm([0, 1, 2, 9])
        1.5
    """
    return float(sps.trim_mean(_values(scores, "scores").ravel(), 0.25))


def iqm_interval(scores: ArrayLike, *, seed: int = 0, n_resamples: int = 2000, confidence: float = 0.95) -> Interval:
    """Interquartile mean with a bootstrap interval, seeds drawn anew within each task (stratified).

    Args:
        scores: (seeds, tasks), or (seeds,) for one task.
        seed: of the resamples. n_resamples: how many. confidence: 0 .. 1.

    Returns:
        Interval whose n is the number of seeds.
    """
    x = _values(scores, "scores")
    x = x[:, None] if x.ndim == 1 else x  # (seeds, tasks)
    rows = child_rng(seed, "stats.iqm").integers(x.shape[0], size=(n_resamples, *x.shape))
    draws = np.take_along_axis(x[None], rows, axis=1).reshape(n_resamples, -1)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(sps.trim_mean(draws, 0.25, axis=1), [tail, 100 - tail])
    return Interval(iqm(x), float(low), float(high), x.shape[0])


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """A rate with its Wilson score interval.

    Args:
        successes: 0 .. n. n: trials, at least 1. confidence: 0 .. 1.

    Example:
        >>> i = wilson(7, 10); round(i.low, 3), round(i.high, 3)
        (0.397, 0.892)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes of {n} trials; expected 0 <= successes <= n and n >= 1")
    z = float(sps.norm.ppf((1 + confidence) / 2))
    p, shrink = successes / n, 1 + z * z / n
    mid = (p + z * z / (2 * n)) / shrink
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    # At 0 and at n successes an end is p itself; rounding must not put it on the wrong side.
    return Interval(p, min(p, max(0.0, float(mid - half))), max(p, min(1.0, float(mid + half))), n)


def probability_of_improvement(x: ArrayLike, y: ArrayLike, *, seed: int = 0, n_resamples: int = 2000) -> Interval:
    """Probability that a run of x beats a run of y, ties counted half, with a 95 % bootstrap interval.

    Equation: P(X > Y) + P(X = Y) / 2 over all pairs (the Mann-Whitney statistic).

    Args:
        x: (n,) one value a seed of the method. y: (m,) of the other one.

    Example:
        >>> probability_of_improvement([1, 2], [0, 1]).mean
        0.875
    """
    x, y = _values(x, "x").ravel(), _values(y, "y").ravel()
    rng = child_rng(seed, "stats.improvement")
    wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)  # (n, m)
    rows = rng.integers(len(x), size=(n_resamples, len(x)))
    columns = rng.integers(len(y), size=(n_resamples, len(y)))
    draws = wins[rows[:, :, None], columns[:, None, :]].mean((1, 2))
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(float(wins.mean()), float(low), float(high), min(len(x), len(y)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison says about a claim "x is better than y".

    Args:
        verdict: reproduced, not reproduced, inconclusive or no verdict.
        difference: mean of x - y over seeds with its t interval.
        reason: the verdict in words.
    """

    verdict: str
    difference: Interval
    reason: str

    def __str__(self) -> str:
        """The difference in points, from five seeds on with its interval, and the verdict."""
        d = self.difference
        spread = "" if d.n < MIN_SEEDS else f" [{100 * d.low:+.0f}, {100 * d.high:+.0f}]"
        return f"{self.verdict}: {100 * d.mean:+.0f} points{spread}, n = {d.n} ({self.reason})"


def paired_verdict(x: ArrayLike, y: ArrayLike) -> Verdict:
    """Verdict on "x is better than y" from runs paired by seed.

    Reproduced: the 95 % interval of the difference lies above 0. Not reproduced: it lies below +2
    points. Else inconclusive. No verdict with fewer than five seeds, or when both arms stay under 2 %.

    Args:
        x, y: (n,) pass@1 as fractions, the same seed at the same place.

    Raises:
        ValueError: different numbers of seeds.

    Example:
        >>> paired_verdict([.5, .6, .5, .6, .5], [.1, .1, .2, .1, .1]).verdict
        'reproduced'
    """
    x, y = _values(x, "x").ravel(), _values(y, "y").ravel()
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} seeds and y has {len(y)}; a paired comparison needs the same seeds")
    d = t_interval(x - y)
    if d.n < MIN_SEEDS:
        return Verdict("no verdict", d, f"{d.n} seeds; a verdict needs {MIN_SEEDS}")
    if max(x.mean(), y.mean()) < FLOOR:
        return Verdict("no verdict", d, f"both stay under {FLOOR:.0%}: compare in the half-way regime")
    if d.low > 0:
        return Verdict("reproduced", d, "the interval of the difference lies above 0")
    if d.high < MARGIN:
        return Verdict("not reproduced", d, f"the interval of the difference lies below +{100 * MARGIN:.0f} points")
    return Verdict("inconclusive", d, f"the interval of the difference holds 0 and +{100 * MARGIN:.0f} points")


def compare_variants(table: pd.DataFrame, x: str, y: str, metric: str = "pass@1") -> Verdict:
    """Verdict on "variant x is better than variant y", from the seeds that both have.

    Args:
        table: one row a run with variant, seed and the metric (from `runs.result_table`).
        x, y: names of variants. metric: column, as a fraction.

    Raises:
        ValueError: no seed that both have.
    """
    wide = table.pivot_table(index="seed", columns="variant", values=metric)
    if missing := [v for v in (x, y) if v not in wide]:
        raise ValueError(f"no run of {missing[0]!r}; there are: {', '.join(map(str, wide.columns))}")
    both = wide[[x, y]].dropna()
    if both.empty:
        raise ValueError(f"{x} and {y} have no seed in common")
    return paired_verdict(both[x], both[y])
