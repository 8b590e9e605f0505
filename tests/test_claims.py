"""The claims table: hand-computed verdicts, and that every claim is about runs that the study makes."""

import ast

import nbformat
import numpy as np
import pandas as pd
import pytest

from rapo_lib import claims
from rapo_lib.claims import CLAIMS, COLUMNS, Claim, judge, judge_all, scores
from rapo_lib.config import ROOT, load_profile
from rapo_lib.study import EXPERIMENTS, MADE_BY, everything


def table(column="pass@1", **arms):
    rows = [(v, seed, x) for v, xs in arms.items() for seed, x in enumerate(xs)]
    return pd.DataFrame(rows, columns=["variant", "seed", column])


NONE = table("step_sec")


def test_every_claim_is_about_variants_of_the_study():
    study = {v for plan in everything(load_profile("study")).values() for v in plan}
    assert {v for c in CLAIMS for v in (c.x, c.y)} <= study
    assert len({c.claim for c in CLAIMS}) == len(CLAIMS)
    assert set(MADE_BY) == set(EXPERIMENTS)


def test_every_figure_of_a_claim_is_saved_by_a_notebook():
    saved = set()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                strings = (n.value for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Constant))
                saved |= {s for s in strings if isinstance(s, str) and s.endswith(".png")}
    assert {c.figure for c in CLAIMS} <= saved


def test_a_row_by_hand():
    """Five differences of 40, 30, .., each around 36 points: t(.975, 4) = 2.776, sd = 5.477, half width 6.8."""
    results = table(rapo=[0.5, 0.4, 0.5, 0.4, 0.5], grpo=[0.1, 0.1, 0.1, 0.1, 0.1])
    row = judge(Claim("RAPO beats GRPO", "Table 1", "51.3", "rapo", "grpo", "x.png"), results, NONE)
    assert row["ours"] == "46% against 10%: +36 points [+29, +43]" and row["n"] == 5
    assert row["verdict"] == "reproduced" and row["figure"] == "x.png" and row["the paper"] == "51.3"


def test_a_cost_is_a_ratio_and_less_is_better():
    costs = table("step_sec", rapo=[2.0, 2.2, 1.8, 2.0, 2.0], grpo=[1.0] * 5)
    claim = Claim("RAPO needs less time", "Fig. 3", "less", "rapo", "grpo", "x.png", "step_sec")
    row = judge(claim, table(), costs)
    assert row["ours"] == "2.00 [1.82, 2.18] times" and row["verdict"] == "not reproduced"
    assert row["why"] == "the interval of the ratio lies above 0.98"
    less = judge(claim, table(), table("step_sec", rapo=[0.5, 0.6, 0.5, 0.6, 0.5], grpo=[1.0] * 5))
    assert less["verdict"] == "reproduced"


def test_a_cost_of_nothing_gives_no_ratio():
    claim = next(c for c in CLAIMS if c.column == "tool_calls")
    costs = pd.DataFrame([{"variant": v, "seed": 0, "tool_calls": n} for v, n in ((claim.x, 1.5), (claim.y, 0.0))])
    row = judge(claim, table(), costs)
    assert (row["ours"], row["n"], row["verdict"]) == ("1.5 against 0", 1, "no verdict")
    assert row["why"] == "no ratio to a cost of 0"


def test_arms_are_paired_by_seed():
    results = table(a=[0.1, 0.2, 0.3], b=[0.0, 0.5]).sample(frac=1, random_state=1)
    x, y = scores(results, "a", "b", "pass@1")
    assert (x.tolist(), y.tolist()) == ([0.1, 0.2], [0.0, 0.5])
    x, y = scores(results, "a", "c", "pass@1")
    assert len(x) == len(y) == 0


def test_what_was_not_run_names_the_notebook_or_the_profile():
    rows = judge_all(load_profile("study"), table(), NONE).set_index("claim")
    assert set(rows["verdict"]) == {"not run"} and (rows["n"] == 0).all()
    assert rows.loc["RAPO beats SFT on the teacher's trajectories", "why"] == "made by notebook 05"
    assert rows.loc["RAPO with 48 trajectories beats GRPO", "why"] == "made by notebook 05 and 11"
    assert rows.loc["With 60% noise RAPO still beats GRPO", "why"] == "made by notebook 05 and 06"
    pocket = judge_all(load_profile("pocket"), table(), NONE).set_index("claim")
    assert (
        pocket.loc["A middling teacher's notes beat GRPO", "why"] == "not in profile pocket; the profile study runs it"
    )
    assert list(judge_all(load_profile("pocket"), table(), NONE).columns) == COLUMNS


def test_few_seeds_give_points_and_no_verdict():
    row = judge(CLAIMS[0], table(rapo=[0.5], grpo=[0.1]), NONE)
    assert row["ours"] == "50% against 10%: +40 points" and row["verdict"] == "no verdict"


@pytest.mark.parametrize("name", ["rapo_no_rpo", "low_h_rising"])
def test_names_in_claims_are_those_of_the_figures(name):
    assert any(claims.label_of(name) in c.claim for c in CLAIMS if c.y == name)


def test_the_papers_table_3_is_averaged_rightly():
    """Table 3, five sets: the means that stand in the claims."""
    rapo, low_rising = [18.0, 45.8, 48.9, 20.5, 45.9], [16.4, 44.2, 46.8, 19.1, 41.5]
    low_falling, high_rising = [11.4, 40.5, 38.6, 16.4, 39.8], [12.4, 42.0, 39.4, 17.8, 38.1]
    said = {c.y: c.paper for c in CLAIMS if c.source == "Table 3"}
    for name, row in (("low_h_rising", low_rising), ("low_h_falling", low_falling), ("high_h_rising", high_rising)):
        assert said[name] == f"{np.mean(rapo):.1f} against {np.mean(row):.1f}"
