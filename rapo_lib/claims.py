"""The claims of the paper and of the post about it, each with the two arms that test it here and its verdict.

Notebook 99 uses this module. A claim is a sentence "x is better than y" about two variants of `rapo_lib.study`; the
verdict comes from `stats.paired_verdict` alone. What the paper measured stands beside it, with other models and tasks.
"""

# ruff: noqa: E501 (CLAIMS is a table, one row a line)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rapo_lib.config import Profile
from rapo_lib.plots import label_of
from rapo_lib.stats import MARGIN, MIN_SEEDS, paired_verdict, t_interval
from rapo_lib.study import EXPERIMENTS, MADE_BY, planned

COLUMNS = ["claim", "source", "the paper", "ours", "n", "verdict", "why", "figure"]


@dataclass(frozen=True)
class Claim:
    """A sentence about two variants.

    Args:
        claim: the sentence. source: where it stands (`ours` when the paper does not say it).
        paper: the paper's number or words. x, y: variants; x is the one that should be better.
        figure: file in `results/<profile>/figures` that shows both.
        column: `pass@1` on the test questions (more is better), or a cost from metrics.parquet, mean over a run (less is
            better; the ratio x / y is judged).
    """

    claim: str
    source: str
    paper: str
    x: str
    y: str
    figure: str
    column: str = "pass@1"


CLAIMS: tuple[Claim, ...] = (
    # the comparison
    Claim("RAPO beats GRPO", "Table 1; post", "51.3 against 46.7", "rapo", "grpo", "05_test.png"),
    Claim("RAPO beats SFT on the teacher's trajectories", "Table 1", "51.3 against 38.9", "rapo", "sft", "05_test.png"),
    Claim("RAPO beats LUFFY", "Table 1", "51.3 against 44.8", "rapo", "luffy", "11_test.png"),
    Claim("GRPO beats SFT", "Table 1", "46.7 against 38.9", "grpo", "sft", "05_test.png"),
    Claim("GRPO beats LUFFY", "Table 1", "46.7 against 44.8", "grpo", "luffy", "11_test.png"),
    Claim("RAPO beats SFT followed by GRPO", "ours", "", "rapo", "sft_grpo", "11_test.png"),
    Claim("RAPO beats GRPO, half-way regime (two hard skills)", "ours", "", "rapo_halfway", "grpo_halfway", "05_regimes.png"),
    Claim("RAPO beats GRPO, easy regime (one hard skill)", "ours", "", "rapo_easy", "grpo_easy", "05_regimes.png"),
    Claim("RAPO beats LUFFY, half-way regime", "ours", "", "rapo_halfway", "luffy_halfway", "11_regimes.png"),
    Claim("RAPO beats LUFFY, easy regime", "ours", "", "rapo_easy", "luffy_easy", "11_regimes.png"),
    # noise
    *(Claim(f"With {p:.0%} noise RAPO still beats GRPO", "Fig. 6; post" if p == 1 else "Fig. 6", "yes", f"rapo_p={p:g}", "grpo", "06_noise.png") for p in (0.2, 0.4, 0.6, 0.8, 1.0)),
    Claim("With 100% noise RAPO beats GRPO, half-way regime", "Fig. 6; post", "yes", "rapo_halfway_p=1", "grpo_halfway", "06_halfway.png"),
    # teachers
    Claim("A weak teacher's notes still beat GRPO", "Fig. 5; post", "yes, all six teachers", "rapo_weak", "grpo", "07_results.png"),
    Claim("A stronger teacher is better", "Fig. 5", "yes", "rapo", "rapo_weak", "07_results.png"),
    Claim("A middling teacher's notes beat GRPO", "Fig. 5", "yes", "rapo_middling", "grpo", "07_teachers.png"),
    Claim("A middling teacher is better than a weak one", "Fig. 5", "yes", "rapo_middling", "rapo_weak", "07_teachers.png"),
    Claim("At the weak teacher's coverage, the strong teacher is better", "ours", "", "rapo_strong_few", "rapo_weak", "07_teachers.png"),
    Claim("The weak teacher is better when it covers all questions", "ours", "", "rapo_patient", "rapo_weak", "07_teachers.png"),
    Claim("Two specialists' notes beat GRPO", "post, outlook", "proposed", "rapo_specialists", "grpo", "07_teachers.png"),
    Claim("Notes of other questions alone beat GRPO", "ours", "", "rapo_other_questions", "grpo", "10_guard.png"),
    # step or trajectory
    Claim("Step level beats trajectory level (w/ TO), one spare step", "Fig. 7; post", "w/ TO is worst", "rapo_spare", "rapo_to_spare", "07_results.png"),
    # components
    *(Claim(f"RAPO beats {label_of(name)}", "Fig. 7", "yes", "rapo", name, "10_components.png") for name in ("rapo_no_rpo", "rapo_no_reward", "rapo_no_shaping", "rapo_no_quality", "rapo_no_timing")),
    *(Claim(f"RAPO beats {label_of(name)}", "Table 3", paper, "rapo", name, "10_inversions.png") for name, paper in (("low_h_rising", "35.8 against 33.6"), ("low_h_falling", "35.8 against 29.3"), ("high_h_rising", "35.8 against 29.9"))),
    *(Claim(f"The defaults beat {label_of(name)}", "Fig. 8", "yes", "rapo", name, "10_parameters.png") for name in ("rapo_m=0.5", "rapo_a=1", "rapo_hybrid=4", "rapo_hybrid=12")),
    *(Claim(f"The defaults beat {label_of(name)}", "ours", "", "rapo", name, "10_parameters.png") for name in ("rapo_prob=0.25", "rapo_prob=1")),
    # our own variants and choices
    Claim("The sign-aware advantage beats Eq. 10", "ours", "", "rapo_sign_aware", "rapo", "99_test.png"),
    Claim("Retrieving at high entropy beats the coin", "ours", "", "rapo_gated", "rapo", "10_gate.png"),
    Claim("The leak guard helps", "ours", "", "rapo", "rapo_no_guard", "10_guard.png"),
    Claim("RAPO beats GRPO with a spare step, too", "ours", "", "rapo_spare", "grpo_spare", "10_spare.png"),
    Claim("RAPO beats GRPO with a quarter of the learning rate", "ours", "", "rapo", "grpo_lr=0.0005", "10_rates.png"),
    Claim("RAPO beats GRPO with half of the learning rate", "ours", "", "rapo", "grpo_lr=0.001", "10_rates.png"),
    # how many notes
    *(Claim(f"RAPO with {n} trajectories beats GRPO", "ours", "", f"rapo_n={n}", "grpo", "11_buffer_size.png") for n in (12, 48, 240)),
    Claim("RAPO with all trajectories beats RAPO with 48", "ours", "", "rapo", "rapo_n=48", "11_buffer_size.png"),
    # where imitation misleads
    *(Claim(f"With a wasteful teacher RAPO beats {label_of(m)}", "ours", "", "rapo_wasteful", f"{m}_wasteful", "11_wasteful.png") for m in ("sft", "luffy", "sft_grpo")),
    # costs: exploration, and easy, where both learn
    *(Claim(f"RAPO needs {words} than GRPO{where}", "Fig. 3, 11", paper, f"rapo{end}", f"grpo{end}", "99_costs.png", column)
      for end, where in (("", ""), ("_easy", ", easy regime")) for words, paper, column in
      (("fewer tool calls", "about -25 %", "tool_calls"), ("fewer generated tokens", "less", "generated_tokens"), ("less rollout time", "less", "rollout_sec"),
       ("less update time", "less", "update_sec"), ("less time for an RL step", "1.2x faster training", "step_sec"))),
)  # fmt: skip


#: What a verdict says about the interval of a ratio of costs.
COST_REASONS = {
    "reproduced": "the interval of the ratio lies below 1",
    "not reproduced": f"the interval of the ratio lies above {1 - MARGIN:g}",
    "inconclusive": f"the interval of the ratio holds 1 and {1 - MARGIN:g}",
}


def scores(table: pd.DataFrame, x: str, y: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Both arms' values of the seeds that both have.

    Args:
        table: one row a run with variant, seed and the column. x, y: variants. column: which values.

    Returns:
        (n,) and (n,), the same seed at the same place; empty when there is no such seed.
    """
    if table.empty:
        return np.zeros(0), np.zeros(0)
    wide = table.pivot_table(index="seed", columns="variant", values=column).reindex(columns=[x, y]).dropna()
    return wide[x].to_numpy(), wide[y].to_numpy()


def judge(claim: Claim, results: pd.DataFrame, costs: pd.DataFrame) -> dict[str, object]:
    """One row of the claims table.

    Args:
        claim: what is said. results: one row a run with variant, seed and pass@1 (from `runs.result_table`).
        costs: one row a run with variant, seed and the cost columns (means over its RL steps).

    Returns:
        COLUMNS; the verdict is `not run` when no seed has both arms.
    """
    row = {"claim": claim.claim, "source": claim.source, "the paper": claim.paper, "figure": claim.figure}
    accuracy = claim.column == "pass@1"
    x, y = scores(results if accuracy else costs, claim.x, claim.y, claim.column)
    if not len(x):
        return row | {
            "ours": "",
            "n": 0,
            "verdict": "not run",
            "why": f"made by notebook {_made_by(claim.x, claim.y)}",
        }
    return row | (_compare(x, y) if accuracy else _ratio(x, y))


def _compare(x: np.ndarray, y: np.ndarray) -> dict[str, object]:
    v = paired_verdict(x, y)
    spread = "" if len(x) < MIN_SEEDS else f" [{100 * v.difference.low:+.0f}, {100 * v.difference.high:+.0f}]"
    ours = f"{x.mean():.0%} against {y.mean():.0%}: {100 * v.difference.mean:+.0f} points{spread}"
    return {"ours": ours, "n": len(x), "verdict": v.verdict, "why": v.reason}


def _ratio(x: np.ndarray, y: np.ndarray) -> dict[str, object]:
    """A cost: "x needs less" is the claim that 1 is more than x / y."""
    if not y.all():  # a student that calls no tool, say
        why = "no ratio to a cost of 0"
        return {"ours": f"{x.mean():.3g} against {y.mean():.3g}", "n": len(x), "verdict": "no verdict", "why": why}
    ratio = x / y
    v = paired_verdict(np.ones(len(ratio)), ratio)
    spread = "" if len(ratio) < MIN_SEEDS else f" [{t_interval(ratio).low:.2f}, {t_interval(ratio).high:.2f}]"
    why = COST_REASONS.get(v.verdict, v.reason)
    return {"ours": f"{ratio.mean():.2f}{spread} times", "n": len(ratio), "verdict": v.verdict, "why": why}


def _made_by(*variants: str) -> str:
    """The first notebook that makes each variant."""
    first = {v.name: MADE_BY[experiment] for experiment, rows in reversed(EXPERIMENTS.items()) for v in rows}
    return " and ".join(sorted({first.get(v, MADE_BY["noise"]) for v in variants}))  # the noise grid is the profile's


def judge_all(
    profile: Profile, results: pd.DataFrame, costs: pd.DataFrame, claims: Sequence[Claim] = CLAIMS
) -> pd.DataFrame:
    """The claims table: one row a claim.

    A claim about variants that the profile does not plan says so instead of naming a notebook.
    """
    there = {variant for experiment in EXPERIMENTS for variant in planned(profile, experiment)}
    rows = []
    for claim in claims:
        row = judge(claim, results, costs)
        if row["verdict"] == "not run" and not {claim.x, claim.y} <= there:
            row["why"] = f"not in profile {profile.name}; the profile study runs it"
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)
