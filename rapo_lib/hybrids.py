"""Tables of what happens around retrievals: who did the hard steps, what was copied, how entropy moved.

Notebooks 06, 07, 09 and 10 use this module. It only looks at rollouts; nothing here acts on a run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from rapo_lib.config import RunConfig
from rapo_lib.methods import get_method
from rapo_lib.objective import group_normalise, rollout_retrieval_reward, shaping_factor
from rapo_lib.pocket.world import SKILLS
from rapo_lib.policy import Policy, has_adapter
from rapo_lib.rollout import RolloutRequest, SamplingLimits, coin, sample_and_score
from rapo_lib.tasks import Question
from rapo_lib.traces import ACTIONS, Protocol, Rollout
from rapo_lib.trainer import score_tokens

_ACTION = re.compile(rf"<(?P<tool>{'|'.join(ACTIONS)})>(?P<query>.*?)</(?P=tool)>", re.DOTALL)


def require_steps(rollouts: Sequence[Rollout], policy: Policy) -> None:
    """Stop when nothing can be retrieved or compared, since the policy never came as far as a tool call.

    A random or a weak model may never write a step as the protocol wants it, or answer at once.

    Raises:
        ValueError: no rollout holds a tool call.

    Edge cases:
        No rollouts at all are refused too.
    """
    if any(r.tool_calls for r in rollouts):
        return
    ends = ", ".join(f"{reason} {n}" for reason, n in Counter(r.end_reason for r in rollouts).most_common())
    raise ValueError(
        f"the student {policy.name!r} wrote no valid step with a tool call in {len(rollouts)} rollouts (their ends: "
        f"{ends}), so there is nothing to retrieve for and nothing to show here. Take a model that follows the "
        "instructions in traces.SYSTEM_PROMPT, one that imitated the teacher first (method sft), or a larger "
        "max_completion when most rollouts end by length"
    )


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

    Raises:
        ValueError: rollouts may retrieve, and a policy without an adapter never came as far as a tool call. (That a
            trained policy has come to this is a result, and tables show it.)
    """
    n_on = config.group_size - config.n_hybrid
    requests = [RolloutRequest(q, place, hybrid=place >= n_on) for q in questions for place in range(config.group_size)]
    batch = sample_and_score(
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
    if retriever is not None and config.n_hybrid and config.retrieval_prob and not has_adapter(policy.model):
        require_steps(batch.rollouts, policy)
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
    table = pd.DataFrame(rows, columns=[*columns, "h_before", "h_after", "goes_on_from", "success"])
    return table.astype({"score": float, "h_before": float, "h_after": float})  # also without rows


def with_holes(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """On-policy rollouts without the own steps in whose place a hybrid rollout of the same question retrieved.

    A retrieved step leaves a hole in what the policy wrote, and texts with holes in different places differ by the
    holes alone. With equal holes on both sides the rest can be compared (notebook 09, Fig. 4).

    Args:
        rollouts: of any questions. By place in the group, the k-th on-policy rollout of a question gets the holes of
            its k-th hybrid one.

    Returns:
        The rollouts in their order. Hybrid ones are left as they are, and so are on-policy ones without a partner, or
        which ended before the place of the hole.
    """
    rollouts = list(rollouts)
    kinds: dict[tuple[str, bool], list[Rollout]] = {}
    for r in sorted(rollouts, key=lambda r: r.place):
        kinds.setdefault((r.question_id, r.hybrid), []).append(r)
    holes: dict[tuple[str, int], set[int]] = {}
    for (question_id, hybrid), alone in kinds.items():
        if not hybrid:
            partners = kinds.get((question_id, True), [])
            for one, other in zip(alone, partners, strict=False):  # groups need not be halved evenly
                holes[question_id, one.place] = set(_retrieved_places(other))
    return [_without(r, set() if r.hybrid else holes.get((r.question_id, r.place), set())) for r in rollouts]


def _retrieved_places(rollout: Rollout) -> Iterator[int]:
    """Which steps of the budget were retrieved, from 0; a trajectory takes as many as it holds."""
    place = 0
    for step in rollout.steps:
        retrieved = step.kind == "retrieved"
        n = step.segments[0].info["n_steps"] if retrieved else 1
        yield from range(place, place + n) if retrieved else ()
        place += n


def _without(rollout: Rollout, holes: set[int]) -> Rollout:
    kept = [s for i, step in enumerate(rollout.steps) if i not in holes for s in step.segments]
    return dataclasses.replace(rollout, segments=kept)


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


def note_table(rollouts: Iterable[Rollout], questions: Iterable[Question], protocol: Protocol) -> pd.DataFrame:
    """One row a retrieval, in the order of `retrieval_table`: what the policy had just done, and what the note does.

    A note behind a `wrong` step repairs it: it goes on from the value that the right form would have given.

    Returns:
        `before` (the last own call in front of the note) and `note` (its last call): `right` or `wrong` for a hard
        step of the asking question in its right or in its plausible wrong form, whatever the value; `easy` for
        another call; `none` without a call.
    """
    by_id = {q.id: q for q in questions}
    rows = []
    for r in rollouts:
        forms, before = _hard_forms(by_id[r.question_id]), "none"
        for s in r.segments:
            if s.origin == "tool" and "tool" in s.info:
                before = _call_kind(forms, s.info["tool"], s.info["query"])
            elif s.origin == "retrieval":
                calls = _calls(protocol.decode(s.ids))
                rows.append((before, _call_kind(forms, *calls[-1]) if calls else "none"))
    return pd.DataFrame(rows, columns=["before", "note"])


def _call_kind(forms: Sequence[tuple[str, tuple[re.Pattern[str], re.Pattern[str]]]], tool: str, query: str) -> str:
    for i, kind in enumerate(("right", "wrong")):
        if any(tool == t and pair[i].fullmatch(_squeezed(query)) for t, pair in forms):
            return kind
    return "easy"


# ------------------------------------------------------------------------------------------------ credit


def credit_table(rows: Iterable[Mapping[str, Any]], config: RunConfig) -> pd.DataFrame:
    """One row a stored rollout: what the objective of a method makes of it.

    Equation: `A = (1 + a A_ret) A_acc` and `s = 1 + m F_ret` (arXiv 2603.03078, Eq. 8 to 10), with the retrieval
    reward, the advantage and the weights of the configuration's method.

    Args:
        rows: as `Run.rollouts` returns them, with `rl_step` and `rollout`, whole groups and scored.
        config: names the method, a and m; any method can be asked about the rollouts of any other.

    Returns:
        In the order given: rl_step, question_id, place, hybrid, retrievals, reward, z_ret (nats), a_acc, a_ret,
        advantage, shaping.

    Edge cases:
        The same question in another RL step is another group.
    """
    rows, method = list(rows), get_method(config.method)
    rollouts = [row["rollout"] for row in rows]
    groups = [(row["rl_step"], row["rollout"].question_id) for row in rows]
    z_ret = [rollout_retrieval_reward(r, method.retrieval_reward) for r in rollouts]
    rewards = [math.nan if r.reward is None else r.reward for r in rollouts]
    a_acc, a_ret = (group_normalise(torch.tensor(x, dtype=torch.float64), groups) for x in (rewards, z_ret))
    frac = torch.tensor([r.retrieved_frac for r in rollouts], dtype=torch.float64)
    columns = {"rl_step": [step for step, _ in groups]}
    columns |= {name: [getattr(r, name) for r in rollouts] for name in ("question_id", "place", "hybrid")}
    columns |= {"retrievals": [len(r.retrievals) for r in rollouts], "reward": rewards, "z_ret": z_ret}
    columns |= {"a_acc": a_acc, "a_ret": a_ret}
    columns |= {"advantage": method.advantage(a_acc, a_ret, method.advantage_weight(config))}
    return pd.DataFrame(columns | {"shaping": shaping_factor(frac, method.shaping_weight(config))})


def rollout_gradients(policy: Policy, rollouts: Sequence[Rollout], temperature: float = 1.0) -> torch.Tensor:
    """Gradient of each rollout's mean log-probability, so that any weighting of the rollouts is one product.

    Equation: `g_i = grad mean_t logp_it` over the policy's own tokens. Before the first update of an RL step, where
    the importance ratio is 1 and nothing is clipped, the gradient of Eq. 11 is `mean_i s_i A_i g_i` (beta = 0).

    Args:
        policy: with a trainable adapter. rollouts: B rollouts, of any policy with the same ids.
        temperature: of the sampler.

    Returns:
        (B, P) with P trainable numbers; zeros for a rollout without own tokens.

    Raises:
        ValueError: nothing of the policy is trainable.
    """
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    if not weights:
        raise ValueError("no parameter of the policy is trainable; load the adapter with trainable=True")
    out = torch.zeros(len(rollouts), sum(p.numel() for p in weights))  # (B, P)
    for i, r in enumerate(rollouts):
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]], device=policy.device)
        mask = torch.tensor([r.policy_mask], device=policy.device)
        if mask.any():
            logps, _ = score_tokens(policy.model, ids, torch.ones_like(ids), mask, temperature=temperature)
            grads = torch.autograd.grad(logps.sum() / mask.sum(), weights)
            out[i] = torch.cat([g.flatten() for g in grads])
    return out
