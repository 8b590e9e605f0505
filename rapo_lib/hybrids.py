"""Tables of what happens around retrievals: who did the hard steps, what was copied, how entropy moved.

Notebooks 06 and 07 use this module. It only looks at rollouts; nothing here acts on a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import pandas as pd

from rapo_lib.config import RunConfig
from rapo_lib.pocket.world import SKILLS
from rapo_lib.policy import Policy
from rapo_lib.rewards import pocket_reward
from rapo_lib.rollout import RolloutRequest, SamplingLimits, coin, sample_rollouts
from rapo_lib.tasks import Question
from rapo_lib.traces import ACTIONS, Protocol, Rollout

_ACTION = re.compile(rf"<(?P<tool>{'|'.join(ACTIONS)})>(?P<query>.*?)</(?P=tool)>", re.DOTALL)


def sample_groups(
    policy: Policy,
    questions: Sequence[Question],
    toolbox,
    retriever,
    config: RunConfig,
    *,
    stream: Sequence[str | int] = ("look",),
) -> list[Rollout]:
    """Scored rollouts as in training, without training: a group for each question, its last N_hybrid hybrid.

    Args:
        policy: who samples. questions: one group each. toolbox: with the facts of their split.
        retriever: answers the hybrid rollouts; None for none. config: group size, budget and retrieval probability.
        stream: keys of the random streams; the same keys draw the same numbers for every policy.
    """
    n_on = config.group_size - config.n_hybrid
    requests = [RolloutRequest(q, place, hybrid=place >= n_on) for q in questions for place in range(config.group_size)]
    batch = sample_rollouts(
        policy,
        requests,
        toolbox,
        limits=SamplingLimits.of(config),
        seed=config.seed,
        stream=tuple(stream),
        temperature=config.temperature,
        retriever=retriever,
        when_to_retrieve=coin(config.retrieval_prob),
    )
    for rollout, request in zip(batch.rollouts, requests, strict=True):
        rollout.reward = pocket_reward(rollout, request.question, policy.protocol)
    return batch.rollouts


def rollout_table(rollouts: Iterable[Rollout], questions: Iterable[Question], protocol: Protocol) -> pd.DataFrame:
    """One row a rollout of pocket questions.

    Returns:
        question_id, place, hybrid, retrievals, success, own_calls, own_hard and own_wrong (different hard steps of the
        question that an own call did in their right or in their plausible wrong form, whatever value it was applied
        to), copied (own calls that repeat a call which stands in a retrieved trace of the same rollout), tokens
        (completion, inserted ones included).
    """
    by_id = {q.id: q for q in questions}
    rows = []
    for r in rollouts:
        own = [(s.info["tool"], _squeezed(s.info["query"])) for s in r.tool_calls]
        seen = {c for s in r.retrievals for c in _calls(protocol.decode(s.ids))}
        forms = _hard_forms(by_id[r.question_id])
        row = {"question_id": r.question_id, "place": r.place, "hybrid": r.hybrid, "retrievals": len(r.retrievals)}
        row |= {"success": bool((r.reward or 0) >= 1), "own_calls": len(own)}
        for i, name in enumerate(("own_hard", "own_wrong")):
            row[name] = sum(any(tool == t and form[i].fullmatch(q) for t, q in own) for tool, form in forms)
        rows.append(row | {"copied": sum(call in seen for call in own), "tokens": len(r.completion_ids)})
    return pd.DataFrame(rows)


def retrieval_table(rollouts: Iterable[Rollout], protocol: Protocol) -> pd.DataFrame:
    """One row a retrieval.

    Returns:
        question_id, place, same_question (whether the trace comes from the asking question), noisy, score, n_steps,
        h_before, h_after (entropy in nats of the own step on either side; NaN without one), goes_on_from (whose value
        the next own action or answer names: `note`, `own` for the last result before it, `both` or `neither`), success.
    """
    rows = []
    for r in rollouts:
        for i, s in enumerate(r.segments):
            if s.origin != "retrieval":
                continue
            before = next((p.mean_entropy for p in reversed(r.segments[:i]) if p.entropies), math.nan)
            after = next((p.mean_entropy for p in r.segments[i + 1 :] if p.entropies), math.nan)
            row = {
                "question_id": r.question_id,
                "place": r.place,
                "same_question": s.info["source_question_id"] == r.question_id,
            }
            row |= {k: s.info[k] for k in ("noisy", "score", "n_steps")}
            row |= {"h_before": before, "h_after": after, "goes_on_from": _goes_on_from(r, i, protocol)}
            rows.append(row | {"success": bool((r.reward or 0) >= 1)})
    columns = ["question_id", "place", "same_question", "noisy", "score", "n_steps"]
    return pd.DataFrame(rows, columns=[*columns, "h_before", "h_after", "goes_on_from", "success"])


def _goes_on_from(rollout: Rollout, i: int, protocol: Protocol) -> str:
    """Whose value the own step behind the retrieval at segment i names in its action or answer."""
    before, note, behind = rollout.segments[:i], rollout.segments[i], rollout.segments[i + 1 :]
    text = protocol.decode(behind[0].ids) if behind else ""
    said = re.findall(r"\w+", text.rpartition("</think>")[2])
    own = next((v for s in reversed(before) if s.origin == "tool" and (v := _value(protocol.decode(s.ids)))), "")
    names = {name: value in said for name, value in (("note", _value(protocol.decode(note.ids))), ("own", own))}
    return "both" if all(names.values()) else next((name for name, named in names.items() if named), "neither")


def _value(text: str) -> str:
    """What the last `<result>` of a text holds."""
    return text.rpartition("<result>")[2].partition("</result>")[0].strip() if "<result>" in text else ""


def _calls(text: str) -> list[tuple[str, str]]:
    return [(m["tool"], _squeezed(m["query"])) for m in _ACTION.finditer(text)]


def _hard_forms(question: Question) -> list[tuple[str, tuple[re.Pattern[str], re.Pattern[str]]]]:
    """For each hard step of a question: its tool, its right form and its wrong form, with any value in them."""
    steps = zip(question.info["skills"], question.info["words"], strict=True)
    hard = [(SKILLS[name], word) for name, word in steps if SKILLS[name].hard]
    return [(skill.tool, (_pattern(skill.right, word), _pattern(skill.wrong, word))) for skill, word in hard]


def _pattern(form: str, word: str) -> re.Pattern[str]:
    return re.compile(re.escape(_squeezed(form.format(w=word, x="\0"))).replace("\0", r"\w+"))


def _squeezed(text: str) -> str:
    return text.replace(" ", "")
