"""Evaluation without retrieval: pass@1 and pass@k, and how often each skill is used rightly.

Notebook 05 explains this module. The step budget is the one of training. A row is one rollout; the unit
of a comparison is the run (rapo_lib.stats), not the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from rapo_lib.pocket.world import OPERATORS, SKILLS
from rapo_lib.policy import Policy
from rapo_lib.rewards import Reward, pocket_reward
from rapo_lib.rollout import RolloutRequest, SamplingLimits, sample_and_score
from rapo_lib.stats import wilson
from rapo_lib.tasks import Question
from rapo_lib.tools import Toolbox
from rapo_lib.traces import Protocol, Rollout

#: Rollouts of one batch at most: above this, memory grows and speed does not.
BATCH = 256


def evaluate(
    policy: Policy,
    questions: Sequence[Question],
    toolbox: Toolbox,
    *,
    limits: SamplingLimits,
    seed: int,
    greedy: bool = False,
    temperature: float = 1.0,
    n_samples: int = 1,
    reward: Reward = pocket_reward,
    at_once: int = BATCH,
) -> pd.DataFrame:
    """Answer questions without retrieval.

    Args:
        policy: who answers. questions: held-out ones. toolbox: with the facts of their split.
        limits: as in training. seed: of the random streams; the same for two policies draws the same numbers.
        greedy: take the most likely token each time. temperature: of sampling.
        n_samples: rollouts of one question. reward: what counts as correct (1 or more). at_once: rollouts of a batch.

    Returns:
        One row a rollout: question_id, place, family, n_hard, max_steps, correct, end_reason, tokens (completion
        with observations), steps, entropy (nats, mean over the policy's tokens), and for each skill of the pocket
        world `calls_<skill>` and `right_<skill>`.

    Raises:
        ValueError: no questions.
    """
    if not questions:
        raise ValueError("there are no questions to evaluate on")
    requests = [RolloutRequest(q, place) for q in questions for place in range(n_samples)]
    rollouts = sample_and_score(
        policy,
        requests,
        toolbox,
        reward=reward,
        at_once=at_once,
        limits=limits,
        seed=seed,
        stream=("evaluate",),
        greedy=greedy,
        temperature=temperature,
    ).rollouts
    pairs = zip(requests, rollouts, strict=True)
    return pd.DataFrame([evaluation_row(r, request.question, policy.protocol) for request, r in pairs])


def evaluation_row(rollout: Rollout, question: Question, protocol: Protocol) -> dict:
    """One row of `evaluate`, from a scored rollout."""
    entropies = [x for s in rollout.segments for x in s.entropies]
    row = {
        "question_id": question.id,
        "place": rollout.place,
        "family": question.family,
        "n_hard": question.info.get("n_hard", 0),
        "max_steps": question.max_steps,
        "correct": bool(rollout.reward is not None and rollout.reward >= 1.0),
        "end_reason": rollout.end_reason,
        "tokens": len(rollout.completion_ids),
        "steps": sum(s.kind == "own" and len(s.segments) > 1 for s in rollout.steps),
        "entropy": float(np.mean(entropies)) if entropies else math.nan,
    }
    calls = call_results(rollout, question, protocol)
    if "skills" in question.info:
        for skill in SKILLS:
            row[f"calls_{skill}"] = sum(s == skill for s, _ in calls)
            row[f"right_{skill}"] = sum(s == skill and right for s, right in calls)
    return row


def call_results(rollout: Rollout, question: Question, protocol: Protocol) -> list[tuple[str, bool]]:
    """For each own tool call of a pocket question: the skill that was due, and whether its right form was used.

    The call is judged in the rollout's own state: the right word and form, applied to the value that the step
    before brought, right or wrong. Calls after the last step of the question are left out; questions of
    other sets give an empty list.
    """
    skills, words = question.info.get("skills", ()), question.info.get("words", ())
    operands, value = question.info.get("operands", ()), (question.info.get("chain") or [""])[0]
    results = []
    for i, step in enumerate(_single_steps(rollout)):
        if i >= len(skills):
            break
        call = next((s for s in step if s.origin == "tool" and "tool" in s.info), None)
        if call is not None:
            skill = SKILLS[skills[i]]
            form = skill.right.format(w=words[i], x=value, n=operands[i], o=OPERATORS.get(words[i], ""))
            results.append(
                (skill.name, (call.info["tool"], _squeezed(call.info["query"])) == (skill.tool, _squeezed(form)))
            )
        if step:
            value = _value(protocol.decode(step[-1].ids)) or value
    return results


def _single_steps(rollout: Rollout) -> list[tuple]:
    """Segments of each step of the budget; a retrieved trajectory stands for several."""
    out: list[tuple] = []
    for step in rollout.steps:
        spent = step.segments[0].info.get("n_steps", 1) if step.kind == "retrieved" else 1
        out += [()] * (spent - 1) + [step.segments]
    return out


def _value(text: str) -> str:
    """What the last `<result>` of a text holds, without a note of the harness."""
    return text.rsplit("<result>", 1)[1].split("</result>")[0].split("(")[0].strip() if "<result>" in text else ""


def _squeezed(text: str) -> str:
    return text.replace(" ", "")


# --------------------------------------------------------------------------------------------- summaries


def summarise(table: pd.DataFrame, by: str | Sequence[str] = ()) -> pd.DataFrame:
    """Pass@1 with its Wilson interval over rows, for all rows or for each group.

    Args:
        table: from `evaluate`. by: columns to group by, such as `family` or `n_hard`.

    Returns:
        One row a group: the columns, n, pass@1, low, high, mean tokens, steps and entropy.
    """
    by = [by] if isinstance(by, str) else list(by)
    rows = []
    for keys, part in table.groupby(by) if by else [((), table)]:
        rate = wilson(int(part["correct"].sum()), len(part))
        row = dict(zip(by, keys, strict=True)) | {"n": rate.n, "pass@1": rate.mean, "low": rate.low, "high": rate.high}
        rows.append(row | {c: part[c].mean() for c in ("tokens", "steps", "entropy")})
    return pd.DataFrame(rows)


def summarise_skills(table: pd.DataFrame) -> pd.DataFrame:
    """Per-step success: for each skill of the pocket world how often its right form was used when it was due.

    Args:
        table: from `evaluate`, with `calls_<skill>` and `right_<skill>`.

    Returns:
        One row a skill: skill, family, hard, calls, right, rate (NaN without calls). No row for other question sets.
    """
    rows = []
    for skill in (s for s in SKILLS.values() if f"calls_{s.name}" in table):
        calls, right = (int(table[f"{kind}_{skill.name}"].sum()) for kind in ("calls", "right"))
        rate = right / calls if calls else math.nan
        rows.append(
            {
                "skill": skill.name,
                "family": skill.family,
                "hard": skill.hard,
                "calls": calls,
                "right": right,
                "rate": rate,
            }
        )
    return pd.DataFrame(rows)


def pass_at_k(correct: ArrayLike, k: int) -> float:
    """Probability that at least one of k samples is correct, without bias, mean over questions.

    Equation: 1 - C(n - c, k) / C(n, k) for c correct of n samples (arXiv 2107.03374).

    Args:
        correct: (questions, n) of 0 and 1. k: 1 .. n.

    Example:
        >>> pass_at_k([[1, 0, 0, 0]], 2)
        0.5
    """
    x = np.asarray(correct, dtype=int)
    n = x.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; allowed: 1 to {n}, the samples of a question")
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in x.sum(1)]))
