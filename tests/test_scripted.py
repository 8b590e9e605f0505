"""The teacher that needs no model: correct trajectories from worked solutions and plans, with real tool calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rapo_lib import benchmarks, scripted
from rapo_lib.benchmarks import load_benchmark, make_toolbox
from rapo_lib.buffer import StepTraceBuffer, make_traces
from rapo_lib.rewards import format_ok
from rapo_lib.scripted import Unscriptable, main, script_rollout, script_rollouts, solution_steps
from rapo_lib.tasks import Question
from rapo_lib.traces import Protocol, load_rollouts, parse_step, save_jsonl


@pytest.fixture(scope="module")
def protocol(split_tokenizer):
    return Protocol(split_tokenizer)


@pytest.fixture(scope="module")
def python():
    return make_toolbox("gsm_symbolic", "train")


def asked(solution, answer, **more):
    return Question("q", "How many?", answer, info={"solution": solution} | more)


@pytest.mark.parametrize(
    ("line", "code", "result"),
    [
        ("She ate 3 + 5 = 8 slices.", "3 + 5", "8"),
        ("It costs 29 * \u20ac0.67 = \u20ac19.43 in all.", "round(29 * 0.67, 6)", "19.43"),
        ("He works 6 days/week * 2 weeks/month = 12 days/month", "6 * 2", "12"),
        ("so 28 x 4 = 112 bananas.", "28 * 4", "112"),
        ("The fee is $410,000 x 7/100 = $28,700.", "round(410000 * 7 / 100, 6)", "28700"),
        ("2 hours * (60 minutes + 5 minutes) = 130 minutes", "2 * ( 60 + 5 )", "130"),
        ("He sold 48/2 = <<48/2=24>>24 clips.", "round(48 / 2, 6)", "24"),
        ("It fell by 3 - 10 = -7 degrees", "3 - 10", "-7"),
    ],
)
def test_an_equation_becomes_a_call(line, code, result):
    ((_, tool, query, want),), _ = solution_steps(f"{line}\n#### {result}")
    assert (tool, query, want) == ("python", code, result)


def test_thoughts_are_the_text_between_equations():
    steps, last = solution_steps("Her cousin ate 3 + 5 = 8 slices.\nTogether 3 + 8 = 11 slices.\n#### 11")
    assert [s[0] for s in steps] == ["Her cousin ate", "slices. Together"] and last == "slices"
    with pytest.raises(Unscriptable, match="no equation between numbers"):
        solution_steps("Thus T = 182 - x.\n#### 43")
    with pytest.raises(Unscriptable, match="no equation between numbers"):
        solution_steps("no mark of an answer: 1 + 1 = 2")


def test_a_script_is_a_scored_rollout_in_the_student_s_ids(protocol, python):
    rollout = script_rollout(asked("A: 3 + 5 = 8.\nB: 8 * 2 = 16.\n#### 16", "16"), python, protocol)
    assert rollout.reward == 1.0 and rollout.end_reason == "answer" and format_ok(rollout, protocol)
    assert [s.origin for s in rollout.segments] == ["policy", "tool", "policy", "tool", "policy"]
    assert [protocol.decode(s.ids) for s in rollout.segments[:2]] == [
        "<think> A:</think><python> 3 + 5</python>",
        "<result> 8</result>",
    ]
    assert parse_step(protocol.decode(rollout.segments[4].ids)).answer == r"\boxed{16}"
    assert sum(rollout.policy_mask) == sum(len(s.ids) for s in rollout.segments[::2])


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (asked("17 * 2 = 35.\n#### 35", "35"), "an equation that does not hold"),
        (asked("17 * 2 = 34.\n#### 35", "35"), "a last equation that does not give the answer"),
        (asked("17 / 0 = 3.\n#### 3", "3"), "a python call that failed"),
        (Question("q", "6 * 7?", "42"), "neither a plan nor a worked solution"),
        (asked("A: 3 + 5 = 8.\n#### 8", "8"), "more than 5 completion tokens"),
        (Question("q", "a?", " }", info={"plan": [["t", "python", "1"]]}), "a trajectory without reward"),
    ],
)
def test_a_script_that_is_not_correct_is_left_out(question, reason, protocol, python):
    limit = 5 if "more than" in reason else 2048
    assert script_rollouts([question], python, protocol, limit) == ([], Counter([reason]))


@pytest.mark.parametrize(("name", "share"), [("gsm_symbolic", 0.8), ("world", 0.95)])
def test_most_questions_made_here_have_a_script(name, share, protocol):
    if name == "gsm_symbolic":
        pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    questions = benchmarks.read_benchmark(name, "validation")[0]
    rollouts, missing = script_rollouts(questions, make_toolbox(name, "validation"), protocol, 10_000)
    assert len(rollouts) >= share * len(questions) and len(rollouts) + missing.total() == len(questions)
    assert all(r.reward == 1.0 and r.tool_calls for r in rollouts)
    traces = make_traces(rollouts, questions, protocol, "scripted")
    assert len(traces) == sum(len(r.tool_calls) for r in rollouts)
    buffer = StepTraceBuffer.build(traces)
    ((hit, *_),) = buffer.search([traces[1].key], 1)
    assert traces[hit.trace_id].key == traces[1].key


def test_a_solution_of_the_bad_templates_would_be_found_out(protocol, python):
    """Template 75: half a tube is lost on the way. The equations are read, and do not hold."""
    question = asked("He used 17 * 0.5 = 8 tubes.\n#### 8", "8")
    with pytest.raises(Unscriptable, match="an equation that does not hold"):
        script_rollout(question, python, protocol)
    whole = replace(question, info={"solution": "He used 16 * 0.5 = 8 tubes.\n#### 8"})
    assert script_rollout(whole, python, protocol).reward == 1.0


def test_the_command_line_writes_what_a_run_s_buffer_reads(tmp_path, capsys, monkeypatch, protocol):
    rows = [{"id": f"q{i}", "text": f"{i} and 1?", "answer": str(i + 1)} for i in range(3)]
    solutions = [f"{i} + 1 = {i + 1}.\n#### {i + 1}" for i in (0, 1)] + ["#### 3"]
    save_jsonl(tmp_path / "train.jsonl", [r | {"info": {"solution": s}} for r, s in zip(rows, solutions, strict=True)])
    monkeypatch.setattr(scripted, "load_policy", lambda name: type("Policy", (), {"protocol": protocol}))
    out = tmp_path / "scripted_sums.jsonl"
    assert main(["--student", "x", "--questions", str(tmp_path), "--out", str(out)]) == 0
    assert [r.question_id for r in load_rollouts(out)] == ["q0", "q1"]
    said = capsys.readouterr().out
    assert "2 of 3 questions" in said and "1 left out: no equation between numbers" in said
    questions = load_benchmark(str(tmp_path), "train")
    (first, second) = make_traces(load_rollouts(out), questions, protocol, "scripted")
    assert first.value == "<think> Next</think><python> 0 + 1</python><result> 1</result>" and second.reward == 1.0
    save_jsonl(tmp_path / "train.jsonl", rows)
    with pytest.raises(SystemExit, match="no question of .* has a script: .'neither a plan nor a worked solution': 3"):
        main(["--student", "x", "--questions", str(tmp_path), "--out", str(out)])
    with pytest.raises(SystemExit):
        main(["--student", "x", "--split", "test", "--out", str(out)])
