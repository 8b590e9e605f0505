"""Statistics against values worked out elsewhere; every argument changes a result."""

import doctest
import math

import numpy as np
import pytest

from rapo_lib import stats
from rapo_lib.stats import (
    bootstrap_interval,
    iqm,
    iqm_interval,
    paired_verdict,
    probability_of_improvement,
    t_interval,
    wilson,
)

RISING = [0.50, 0.55, 0.60, 0.52, 0.58]


def test_examples_in_docstrings():
    assert doctest.testmod(stats).failed == 0


@pytest.mark.case(42)
def test_values():
    i = t_interval([0.5, 0.6, 0.7])
    assert i.mean == pytest.approx(0.6) and i.half_width == pytest.approx(0.2484, abs=1e-4) and i.n == 3
    w = wilson(7, 10)
    assert (round(w.low, 3), round(w.high, 3)) == (0.397, 0.892)


@pytest.mark.case(42)
def test_single_seed_has_no_interval():
    i = t_interval([0.4])
    assert i.mean == 0.4 and math.isnan(i.low) and f"{i:.1f}" == "0.4 (n = 1)"


@pytest.mark.case(42)
def test_wilson_at_the_ends():
    assert wilson(0, 20).low == 0.0 and wilson(0, 20).high > 0.1
    assert all(wilson(0, n).low == 0.0 and wilson(n, n).high == 1.0 for n in range(1, 1200))  # rounding included
    assert wilson(7, 10, confidence=0.5).half_width < wilson(7, 10).half_width
    for bad in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError):
            wilson(*bad)


def test_bootstrap_depends_on_its_seed_and_only_on_it():
    many = np.random.default_rng(0).normal(size=40)
    a, b, c = (bootstrap_interval(many, seed=s) for s in (0, 0, 1))
    assert a == b and a != c
    assert a.low <= a.mean <= a.high
    assert bootstrap_interval(many, confidence=0.5).half_width < a.half_width
    assert bootstrap_interval(RISING, lambda x: x.max(-1)).mean == 0.60


def test_iqm_is_the_mean_of_the_middle_half():
    assert iqm([0, 1, 2, 9]) == 1.5
    scores = np.array([[0.0, 1.0], [0.1, 0.9], [0.0, 0.8], [0.1, 1.0]])
    i = iqm_interval(scores)
    assert i.n == 4 and i.mean == iqm(scores) and i.low <= i.mean <= i.high
    # Stratified: a task's scores never move to another task, so the spread stays inside the tasks.
    assert 0.4 < i.low and i.high < 0.6
    assert iqm_interval(RISING).n == 5


def test_probability_of_improvement():
    assert probability_of_improvement([1, 2], [3, 4]).mean == 0.0
    assert probability_of_improvement([1, 1], [1, 1]).mean == 0.5
    i = probability_of_improvement(RISING, [0.1, 0.6, 0.2])
    assert i.low <= i.mean <= i.high == 1.0


@pytest.mark.case(41)
@pytest.mark.parametrize(
    ("x", "y", "verdict"),
    [
        (RISING, [0.1, 0.2, 0.1, 0.2, 0.1], "reproduced"),
        ([0.1, 0.2, 0.1, 0.2, 0.1], RISING, "not reproduced"),
        (RISING, RISING, "not reproduced"),
        (RISING, [0.6, 0.4, 0.6, 0.4, 0.6], "inconclusive"),
        (RISING[:4], [0.1] * 4, "no verdict"),
        ([0.01, 0.0, 0.01, 0.0, 0.01], [0.0] * 5, "no verdict"),
    ],
)
def test_verdicts(x, y, verdict):
    assert paired_verdict(x, y).verdict == verdict


@pytest.mark.case(42)
def test_pairs_need_the_same_seeds_and_finite_numbers():
    with pytest.raises(ValueError, match="5 seeds and y has 4"):
        paired_verdict(RISING, RISING[:4])
    with pytest.raises(ValueError, match="not finite"):
        t_interval([0.1, float("nan")])
