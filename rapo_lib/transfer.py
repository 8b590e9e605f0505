"""Finished policies before other questions than their own, and with spare steps; and notes that come too late.

Notebook 11 uses this module: imitation should mislead where the exam differs from what the teacher showed. It only
looks at runs and rollouts; nothing here acts on one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from rapo_lib.config import RunConfig
from rapo_lib.evaluate import evaluate
from rapo_lib.execution import EVALUATION_SEED
from rapo_lib.pocket.world import OPERATORS, SKILLS
from rapo_lib.policy import Policy, load_adapter, load_policy
from rapo_lib.rollout import SamplingLimits
from rapo_lib.runs import Run
from rapo_lib.tasks import Question, load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import Protocol, Rollout, parse_step

#: Completion ids that a spare step may take: a step of the pocket world has about 20 with its result.
IDS_PER_SPARE_STEP = 32


def with_adapter(runs: Iterable[Run]) -> list[Run]:
    """The runs whose policy can be loaded: those that left an adapter and were not taken over from older code."""
    return [r for r in runs if (done := r.done) and "carried" not in done and (r.folder / "adapter").is_dir()]


def spare_limits(config: RunConfig, extra_steps: int) -> SamplingLimits:
    """The limits of a run with more steps, and with as many more calls and ids as these may take.

    Example:
        >>> spare_limits(RunConfig(), 3)
        SamplingLimits(max_completion=320, max_calls=11, max_steps=8, extra_steps=3)
    """
    if extra_steps < 0:
        raise ValueError(f"extra_steps is {extra_steps}; allowed: 0 or more")
    return SamplingLimits(
        config.max_completion + IDS_PER_SPARE_STEP * extra_steps,
        config.max_calls + extra_steps,
        config.max_calls,
        config.extra_steps + extra_steps,
    )


def take_exam(
    policy: Policy, config: RunConfig, regime: str, *, n: int | None = None, extra_steps: int = 0, greedy: bool = False
) -> pd.DataFrame:
    """Answer a regime's test questions as at the end of a run: the same questions, random numbers and limits.

    Args:
        policy: who answers. config: of its run: limits, temperature, and how many questions.
        regime: whose test questions. n: the first ones only; None: `n_final` of the run.
        extra_steps: spare steps beyond the run's budget. greedy: take the most likely token each time.

    Returns:
        The table of `evaluate`.
    """
    questions = load_pocket_questions(regime, "test")[: config.n_final if n is None else n]
    return evaluate(
        policy,
        questions,
        make_pocket_toolbox("test"),
        limits=spare_limits(config, extra_steps),
        seed=EVALUATION_SEED,
        greedy=greedy,
        temperature=config.temperature,
    )


def exam_row(table: pd.DataFrame) -> dict[str, float]:
    """One exam in numbers.

    Args:
        table: from `evaluate` on pocket questions, whose step budget is the length of their chain.

    Returns:
        n; pass@1; the shares of rollouts that answered with fewer steps than the chain has (`early`), that ran out of
        steps (`out_of_steps`) or ended by a broken format (`broken`); `beyond`, the mean number of steps above the
        chain's length (negative: below); entropy in nats; and `rate_easy` and `rate_hard`, how often the right form
        was used when an easy or a hard skill was due (NaN without calls).
    """
    ends, beyond = table["end_reason"], table["steps"] - table["max_steps"]
    row = {"n": len(table), "pass@1": float(table["correct"].mean())}
    row |= {"early": float(((ends == "answer") & (beyond < 0)).mean())}
    row |= {"out_of_steps": float((ends == "budget").mean()), "broken": float((ends == "format").mean())}
    row |= {"beyond": float(beyond.mean()), "entropy": float(table["entropy"].mean())}
    for name, hard in (("rate_easy", False), ("rate_hard", True)):
        skills = [s.name for s in SKILLS.values() if s.hard is hard]
        calls, right = (table[[f"{kind}_{s}" for s in skills]].to_numpy().sum() for kind in ("calls", "right"))
        row[name] = float(right / calls) if calls else math.nan
    return row


def own_exams(runs: Iterable[Run], *, n: int | None = None) -> pd.DataFrame:
    """The exams that runs took at their end, on their own regime's test questions, sampled at temperature 1.

    Args:
        runs: finished runs. n: the first questions only; None: all.

    Returns:
        One row a run, the columns of `transfer_table`; nothing is sampled.
    """
    rows = []
    for run in runs:
        final = run.table("final")
        rows.append(_who(run, run.config.regime, 0) | exam_row(final[~final["greedy"]].head(n or len(final))))
    return pd.DataFrame(rows)


def transfer_table(
    runs: Sequence[Run], regimes: Sequence[str], *, n: int | None = None, extra_steps: int = 0
) -> pd.DataFrame:
    """Finished policies before the test questions of some regimes.

    Args:
        runs: runs with their adapters (`with_adapter`). regimes: whose test questions.
        n: the first questions only; None: `n_final` of the run. extra_steps: spare steps beyond the run's budget.

    Returns:
        One row a run and regime: variant, method, seed, trained_on, tested_on, extra_steps, and those of `exam_row`.
    """
    rows = []
    for run in runs:
        policy = load_adapter(load_policy(run.config.student), run.folder / "adapter")
        for regime in regimes:
            table = take_exam(policy, run.config, regime, n=n, extra_steps=extra_steps)
            rows.append(_who(run, regime, extra_steps) | exam_row(table))
    return pd.DataFrame(rows)


def _who(run: Run, regime: str, extra_steps: int) -> dict[str, Any]:
    row = {"variant": run.variant, "method": run.config.method, "seed": run.config.seed}
    return row | {"trained_on": run.config.regime, "tested_on": regime, "extra_steps": extra_steps}


def note_lags(rollouts: Iterable[Rollout], questions: Iterable[Question], protocol: Protocol) -> pd.DataFrame:
    """One row a retrieved step of pocket questions: whether it is the step that is due, or one that lies behind.

    A rollout whose budget is its chain can only succeed when each of its steps, own or retrieved, takes the chain on.

    Args:
        rollouts: with single retrieved steps. questions: theirs. protocol: of the policy that sampled them.

    Returns:
        question_id, place, steps_before (own and retrieved ones), and lag: these minus the place of the note's step in
        the question's chain, so that 0 is the step that is due; NaN when the note is no step of this question's chain.
    """
    by_id = {q.id: q for q in questions}
    rows = []
    for r in rollouts:
        calls = _chain_calls(by_id[r.question_id])
        for before, step in enumerate(r.steps):
            if step.kind == "retrieved":
                call = _note_call(protocol.decode(step.ids))
                lag = before - calls.index(call) if call in calls else math.nan
                rows.append({"question_id": r.question_id, "place": r.place, "steps_before": before, "lag": lag})
    return pd.DataFrame(rows, columns=["question_id", "place", "steps_before", "lag"])


def _chain_calls(question: Question) -> list[tuple[str, str]]:
    """(tool, query without spaces) of each step of a pocket question, in its right form on the right value."""
    i = question.info
    steps = zip(i["skills"], i["words"], i["chain"], i["operands"], strict=False)  # the chain ends with the answer
    out = []
    for name, word, value, operand in steps:
        form = SKILLS[name].right.format(w=word, x=value, n=operand, o=OPERATORS.get(word, ""))
        out.append((SKILLS[name].tool, form.replace(" ", "")))
    return out


def _note_call(text: str) -> tuple[str, str] | None:
    """The call of a retrieved step; None when it has none, such as an answer."""
    action = parse_step(text.removeprefix("<retrieve>").partition("<result>")[0].strip()).action
    return (action[0], action[1].replace(" ", "")) if action else None
