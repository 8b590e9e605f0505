"""A teacher's trajectories on any question set: `python -m rapo_lib.teach --teacher MODEL --questions NAME --out FILE`.

The file of scored rollouts is what `RunConfig.buffer` names (`buffer="FILE.jsonl"`): the step-trace buffer, SFT and
LUFFY read it. The teacher has to share the student's tokenizer, since the file holds ids. Interrupted work goes on
where it stopped. Trajectories of the pocket teachers ship with the package; notebook 01 shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rapo_lib.config import RunConfig
from rapo_lib.execution import questions_of, toolbox_of
from rapo_lib.policy import Policy, load_policy
from rapo_lib.rollout import RolloutRequest, SamplingLimits, sample_and_score
from rapo_lib.tasks import Question
from rapo_lib.tools import Toolbox
from rapo_lib.traces import iter_rollouts, jsonl_line

#: Splits that a teacher may see: test questions stay unseen.
SPLITS = ("train", "validation")


def teach(
    policy: Policy,
    questions: Sequence[Question],
    toolbox: Toolbox,
    out: Path | str,
    *,
    n: int,
    limits: SamplingLimits,
    seed: int = 0,
    temperature: float = 1.0,
    batch: int = 16,
    say: Callable[[str], None] = print,
) -> Counter[str]:
    """Sample and score n trajectories of each question and append them to a JSONL file.

    Args:
        policy: the teacher. questions: what it is asked. toolbox: with their facts. out: the file; a question of which
            it holds n trajectories is not asked again. n: trajectories of a question. limits: as in training.
        seed: of the random streams: a trajectory depends on it, its question and its number alone.
        temperature: of sampling. batch: questions sampled at once, and so what an interruption can cost.
        say: gets a line a batch.

    Returns:
        Numbers of `rollouts` and `right` ones and of `questions` with a right one, over the whole file.

    Raises:
        ValueError: n below 1, or a file that holds rollouts of other questions or of another tokenizer.
    """
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 trajectory a question")
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    there, right = _there(out, questions, n, len(policy.tokenizer), say)
    due = [q for q in questions if there[q.id] < n]
    if len(due) < len(questions):
        say(f"{len(questions) - len(due)} of {len(questions)} questions are in {out.name} already")
    began = time.perf_counter()
    for first in range(0, len(due), batch):
        part = [RolloutRequest(q, place) for q in due[first : first + batch] for place in range(n)]
        how = {"limits": limits, "seed": seed, "stream": ("teach",), "temperature": temperature}
        new = sample_and_score(policy, part, toolbox, **how).rollouts
        with open(out, "a", encoding="utf-8") as f:  # what a kill leaves of these lines is cut off the next time
            f.writelines(jsonl_line(r.to_dict()) for r in new)
        there.update(r.question_id for r in new)
        right.update(r.question_id for r in new if r.reward == 1.0)
        done = min(first + batch, len(due))
        left = (time.perf_counter() - began) / done * (len(due) - done)
        rate = f"{right.total():,} of {there.total():,} rollouts right"
        say(f"{done}/{len(due)} questions, {rate}, {left / 60:.0f} min left")
    return Counter(rollouts=there.total(), right=right.total(), questions=len(right))


def _there(
    out: Path, questions: Sequence[Question], n: int, n_ids: int, say: Callable[[str], None]
) -> tuple[Counter[str], Counter[str]]:
    """Rollouts, and right ones, of each question that the file holds already; it is made when there is none."""
    with open(out, "ab"):
        pass
    if cut := _cut_unfinished(out, n):
        say(f"{out.name}: {cut} lines of a question that was not finished are cut off")
    known, there, right = {q.id for q in questions}, Counter(), Counter()
    for rollout in iter_rollouts(out, n_ids):
        if rollout.question_id not in known:
            raise ValueError(f"{out} holds rollouts of other questions ({rollout.question_id!r}); name another file")
        there[rollout.question_id] += 1
        right[rollout.question_id] += rollout.reward == 1.0
    if there and set(there.values()) != {n}:
        raise ValueError(f"{out} holds {max(there.values())} rollouts of a question, not {n}; name another file")
    return there, +right


def _cut_unfinished(out: Path, n: int) -> int:
    """Cut off what a kill left of the last question: a torn line, and fewer lines than n; returns their number."""
    places, questions, place = [], [], 0
    with open(out, "rb") as f:
        for line in f:
            places.append(place)
            questions.append(json.loads(line).get("question_id") if line.endswith(b"\n") else None)
            place += len(line)
    keep = len(questions) - (questions[-1:] == [None])
    of_last = sum(q == questions[keep - 1] for q in questions[max(0, keep - n) : keep])
    keep -= of_last if of_last < n else 0
    if keep < len(questions):
        os.truncate(out, places[keep])
    return len(questions) - keep


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.teach", description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", required=True, help="model: a folder or a hub name")
    parser.add_argument("--questions", default="pocket", help="pocket, a name in benchmarks.py, or a folder of files")
    parser.add_argument("--regime", default="exploration", help="of the pocket questions")
    parser.add_argument("--split", default="train", choices=SPLITS, help="test questions stay unseen")
    parser.add_argument("--search", default="", help="address of a Search-R1-compatible server")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file of scored rollouts")
    parser.add_argument("--n", type=int, default=4, help="trajectories of a question")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--max-completion", type=int, default=2048, help="completion tokens at most")
    parser.add_argument("--max-calls", type=int, default=8, help="tool calls at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(arguments)
    config = RunConfig(
        questions=a.questions,
        regime=a.regime,
        search=a.search,
        max_completion=a.max_completion,
        max_calls=a.max_calls,
        seed=a.seed,
    )
    torch.set_grad_enabled(False)
    how = {"n": a.n, "limits": SamplingLimits.of(config), "seed": a.seed, "temperature": a.temperature}
    asked = questions_of(config, a.split)[: a.limit]
    print(dict(teach(load_policy(a.teacher), asked, toolbox_of(config, a.split), a.out, **how)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
