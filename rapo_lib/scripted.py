r"""A teacher that needs no model: `python -m rapo_lib.scripted --student MODEL --questions gsm_symbolic --out FILE`.

It writes correct trajectories from what a set knows about its own questions: the worked solutions of gsm_symbolic (each
equation becomes a Python call), and the plans of `world` (look up, look up, answer). The calls are made with the real
tools, a result that differs from the worked solution's takes the whole trajectory out, and so does a wrong answer. What
is left out is counted by reason. The file of scored rollouts, in the student's ids, is what `RunConfig.buffer` names;
call it `scripted_..`, since the part before the first `_` is the teacher's name in the step-trace buffer.

Nothing was sampled, so log-probabilities and entropies are 0: step-trace buffer, SFT and LUFFY do not read them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rapo_lib.benchmarks import load_benchmark, make_toolbox
from rapo_lib.policy import load_policy
from rapo_lib.rewards import answers_equal, pocket_reward
from rapo_lib.tasks import Question
from rapo_lib.tools import Toolbox
from rapo_lib.traces import Protocol, Rollout, Segment, save_rollouts

#: Splits that a teacher may see: test questions stay unseen.
SPLITS = ("train", "validation")
#: (thought, tool, query, result): the result that has to come, or "" for any.
Step = tuple[str, str, str, str]

_NUMBER = r"[$\u20ac\u00a3]?\d[\d,]*(?:\.\d+)?"
#: What may stand behind a number: `beetles`, `days/week`.
_UNIT = r"(?:\s+[A-Za-z]+(?:/[A-Za-z]+)?)?"
_TERM = rf"[(]*{_NUMBER}{_UNIT}[)]*"
# `29 * €0.67 = €19.43`, `6 days/week * 2 weeks/month = 12 days/month`; the right side may not go on.
_EQUATION = re.compile(
    rf"(?P<left>{_TERM}(?:\s*(?:[-+*/x]|\u00d7)\s*{_TERM})+)\s*=\s*(?P<right>-?{_NUMBER})(?![,.]?\d|\s*[-+*/%])"
)
_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|[-+*/()\u00d7]|(?<![A-Za-z])x(?![A-Za-z])|(?P<unit>[A-Za-z]+(?:/[A-Za-z]+)?)")
#: GSM8K's calculator marks, `<<48/2=24>>`.
_CALCULATOR = re.compile(r"<<[^>]*>>")


class Unscriptable(ValueError):
    """A question without a correct script; the message says why."""


def solution_steps(solution: str) -> tuple[list[Step], str]:
    r"""Python calls for the equations of a worked solution, and what is thought before the answer.

    Args:
        solution: lines of text with equations, the last line `#### answer`.

    Returns:
        One step an equation; its thought is the text since the equation before.

    Raises:
        Unscriptable: no equation between numbers.

    Example:
        >>> solution_steps("She ate 3 + 5 = 8 slices.\nThat is all.\n#### 8")
        ([('She ate', 'python', '3 + 5', '8')], 'slices. That is all')
    """
    text = _CALCULATOR.sub("", " ".join(solution.rpartition("####")[0].split()))
    steps, place = [], 0
    for m in _EQUATION.finditer(text):
        if m["left"].count("(") != m["left"].count(")"):
            continue
        code = _code(m["left"])
        if "/" in code or "." in code:
            code = f"round({code}, 6)"  # 14 * 1.1 is not 15.4 in binary
        steps.append(
            (text[place : m.start()].strip(" .,;") or "Next", "python", code, _code(m["right"]).replace("- ", "-"))
        )
        place = m.end()
    if not steps:
        raise Unscriptable("no equation between numbers in its worked solution")
    return steps, text[place:].strip(" .,;")


def _code(text: str) -> str:
    """Numbers and operators of an equation's side, without currencies and units."""
    tokens = (m[0] for m in _TOKEN.finditer(text) if not m["unit"])
    return " ".join({"x": "*", "\u00d7": "*"}.get(t, t.replace(",", "")) for t in tokens)


def steps_of(question: Question) -> tuple[list[Step], str]:
    """The script of a question: steps, and the thought before the answer.

    Raises:
        Unscriptable: a question that knows neither a plan nor a worked solution.
    """
    if plan := question.info.get("plan"):
        return [(thought, tool, query, "") for thought, tool, query in plan], "Now I can answer."
    if solution := question.info.get("solution"):
        steps, last = solution_steps(solution)
        return steps, last or "That is the answer."
    raise Unscriptable("neither a plan nor a worked solution")


def script_rollout(question: Question, toolbox: Toolbox, protocol: Protocol, max_completion: int = 2048) -> Rollout:
    """One correct trajectory.

    Args:
        question: of a set with plans or worked solutions. toolbox: makes the calls. protocol: of the student.
        max_completion: ids at most, observations included.

    Returns:
        A rollout with end reason `answer` and reward 1.

    Raises:
        Unscriptable: no script, a call that fails or gives another result than the worked solution, a wrong answer, or
            a trajectory that is too long.
    """
    steps, last = steps_of(question)
    segments: list[Segment] = []
    for thought, tool, query, want in steps:
        (result,) = toolbox.run([(tool, query)])
        if not result.ok:
            raise Unscriptable(f"a {tool} call that failed")
        if want and not answers_equal(result.text, want):
            raise Unscriptable("an equation that does not hold")
        segments.append(_written(protocol, f"<think> {thought}</think><{tool}> {query}</{tool}>"))
        info = {"tool": tool, "query": query, "ok": True, "error": None, "repeats": 1}
        segments.append(Segment("tool", protocol.observation_ids(result.text), info=info))
    segments.append(_written(protocol, f"<think> {last}</think><answer> \\boxed{{{question.answers[0]}}}</answer>"))
    rollout = Rollout(question.id, protocol.prompt_ids(question.text), segments, end_reason="answer")
    if len(rollout.completion_ids) > max_completion:
        raise Unscriptable(f"more than {max_completion} completion tokens")
    rollout.reward = pocket_reward(rollout, question, protocol)
    if rollout.reward != 1.0:
        raise Unscriptable("a trajectory without reward")
    if "plan" not in question.info and not answers_equal(steps[-1][3], question.answers[0]):
        raise Unscriptable("a last equation that does not give the answer")
    return rollout


def _written(protocol: Protocol, text: str) -> Segment:
    ids = protocol.encode(text)
    return Segment("policy", ids, (0.0,) * len(ids), (0.0,) * len(ids))


def script_rollouts(
    questions: Sequence[Question], toolbox: Toolbox, protocol: Protocol, max_completion: int = 2048
) -> tuple[list[Rollout], Counter[str]]:
    """A correct trajectory of each question that has one, and how many have none, by reason."""
    missing: Counter[str] = Counter()

    def scripted() -> Iterator[Rollout]:
        for question in questions:
            try:
                yield script_rollout(question, toolbox, protocol, max_completion)
            except Unscriptable as e:
                missing[str(e)] += 1

    return list(scripted()), missing


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.scripted", description=__doc__.splitlines()[0])
    parser.add_argument("--student", required=True, help="model whose tokenizer the ids are of: a folder or a hub name")
    parser.add_argument("--questions", default="gsm_symbolic", help="gsm_symbolic, world or gsm8k")
    parser.add_argument("--split", default="train", choices=SPLITS, help="test questions stay unseen")
    parser.add_argument("--search", default="", help="address of a Search-R1-compatible server")
    parser.add_argument(
        "--out", type=Path, required=True, help="the JSONL file of scored rollouts: scripted_NAME.jsonl"
    )
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--max-completion", type=int, default=2048, help="completion tokens at most")
    a = parser.parse_args(arguments)
    questions = load_benchmark(a.questions, a.split, limit=a.limit)
    toolbox = make_toolbox(a.questions, a.split, a.search)
    rollouts, missing = script_rollouts(questions, toolbox, load_policy(a.student).protocol, a.max_completion)
    if not rollouts:
        raise SystemExit(f"no question of {a.questions} has a script: {dict(missing)}")
    save_rollouts(a.out, rollouts)
    print(f"{a.out}: {len(rollouts)} of {len(questions)} questions")
    for reason, n in missing.most_common():
        print(f"{n} left out: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
