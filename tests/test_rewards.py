"""Answers and rewards: what is equal, what is not, and that only the policy's own text earns anything."""

import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapo_lib import rewards
from rapo_lib.rewards import (
    answer_text,
    answers_equal,
    exact_match,
    extract_boxed,
    f1,
    format_ok,
    math_equal,
    normalise_answer,
    parse_number,
    pocket_reward,
    released_reward,
)
from rapo_lib.tasks import Question
from rapo_lib.traces import Protocol, Rollout, Segment

QUESTION = Question("q1", "employer of Kavelo?", "42")
SEARCH = "<think> need it</think><search> employer of Kavelo</search>"


@pytest.fixture(scope="module")
def protocol(tiny_tokenizer):
    return Protocol(tiny_tokenizer)


def make_rollout(protocol, *parts, end_reason="answer"):
    """Parts are policy texts, or (origin, text) pairs."""
    segments = []
    for part in parts:
        origin, text = ("policy", part) if isinstance(part, str) else part
        ids = protocol.encode(text)
        numbers = (0.0,) * len(ids) if origin == "policy" else ()
        info = {"tool": "search", "ok": True} if origin == "tool" else {}
        segments.append(Segment(origin, ids, numbers, numbers, info))
    return Rollout("q1", (1,), segments, end_reason=end_reason)


# ---------------------------------------------------------------------------------------------- answers


@pytest.mark.case(12)
@pytest.mark.parametrize(
    ("pred", "gold", "equal"),
    [
        ("A", "A", True),
        ("A", "B", False),
        ("(A)", "A", True),
        ("3.14", "314", False),
        ("-5", "5", False),
        ("\u22125", "-5", True),
        ("1,000", "1000", True),
        ("3,5", "35", False),
        ("The Beatles", "beatles", True),
        ("", "", False),
        ("", "42", False),
        ("2 2/3", "8/3", True),
        (r"2\frac{2}{3}", "8/3", True),
        ("-3 1/2", "-3.5", True),
        ("1\u00bd", "3/2", True),
        (r"\frac{1}{2}", "1/2", True),
        (r"\dfrac12", "0.5", True),
        ("18.00", "18", True),
        ("1e3", "1000", True),
        ("6.02\u00d710\u00b2\u00b3", "6.02e23", True),
        ("10\u00b2", "102", False),
        ("10\u00b2", "100", True),
        ("2^{10}", "210", False),
        ("2^{10}", "1024", True),
        ("50%", "0.5", True),
        ("50%", "50", False),
        ("3/4", r"75\%", True),
        ("$12", "12", True),
        ("-$5", "5", False),
        ("12:30", "12:45", False),
        ("12:30:15", "12", False),
        ("12:30", "12:30", True),
        ("yes", "Yes.", True),
        ("1,2,3", "1, 2, 3", True),
        ("1;2", "12", False),
        ("U.S.", "us", True),
        ("5 apples and 3 pears", "3", False),
        ("Founded 1990 (May)", "Berlin (May)", False),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("x = 3", "3", True),
        (r"\text{Paris}", "Paris", True),
        ("nan", "0", False),
        ("1/0", "1", False),
        (".5", "0.5", True),
        ("+5", "5", True),
        ("-0", "0", True),
        ("(5)", "-5", False),
        ("--5", "5", False),
        ("1\u202f000", "1000", True),
        ("1,000.50", "1000.5", True),
        ("1.000,5", "1000.5", False),
        ("1,00,000", "100000", False),
        ("3.14", "3,14", False),
        ("\u0663", "3", True),
        ("1.5\u00d710^{-3}", "0.0015", True),
        (r"-\frac{1}{2}", "-0.5", True),
        (r"-\frac{1}{2}", "0.5", False),
        ("-2 2/3", "-8/3", True),
        ("-2 2/3", "-4/3", False),
        (r"10\,000", "10000", True),
        ("5 kg", "5", False),
        ("3:2", "3/2", False),
        ("1-2", "-1", False),
    ],
)
def test_answers(pred, gold, equal):
    assert answers_equal(pred, gold) is equal
    assert answers_equal(gold, pred) is equal


@pytest.mark.case(12)
def test_text_scores():
    assert exact_match("The Beatles", "beatles") and not exact_match("", "")
    assert not exact_match("3.14", "314") and not exact_match("-5", "5") and exact_match("1,000", "1000")
    assert not exact_match("Paris or London or Rome", "London")
    assert f1("Paris or London or Rome", "London") == pytest.approx(1 / 3)
    assert f1("the Beatles", "Beatles") == 1.0 and f1("", "x") == 0.0 and f1("x", "y") == 0.0
    assert f1("a b b c", "b b d") == pytest.approx(2 * 2 / (3 + 3))  # "a" is an article


@pytest.mark.case(12)
def test_boxes():
    assert extract_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert parse_number(extract_boxed(r"so \boxed{\frac{1}{2}}.")) == parse_number("1/2")
    assert extract_boxed(r"\boxed{1} no, \boxed{ 2 }") == "2"
    assert extract_boxed(r"\boxed{\boxed{5}}") == "5"
    assert extract_boxed(r"\boxed{\frac{1}{2}") is None
    assert extract_boxed("42") is None
    assert extract_boxed(r"\boxed{}") == ""


@pytest.mark.case(12)
@given(st.text(max_size=40), st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_text_scores_hold_for_any_text(a, b):
    assert exact_match(a, b) == exact_match(b, a)
    assert f1(a, b) == f1(b, a) and 0.0 <= f1(a, b) <= 1.0
    assert exact_match(a, a) == bool(normalise_answer(a))
    parse_number(a)


@pytest.mark.case(12)
@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=1000), st.integers(-(10**9), 10**9))
@settings(max_examples=150, deadline=None)
def test_numbers_are_read_exactly(fraction, n):
    assert parse_number(f"{fraction.numerator}/{fraction.denominator}") == fraction
    assert parse_number(f"{n:,}") == parse_number(str(n)) == n
    assert parse_number(f"{n}.50") == parse_number(f"{n}.5")
    assert parse_number(f"{n}e2") == 100 * n and parse_number(f"{n}%") * 100 == n


@pytest.mark.case(14)
def test_a_tower_of_powers_ends_in_time_also_from_a_thread():
    assert math_equal("x^2 + 1", "1 + x^2")  # the worker runs now: its start is not part of the limit
    ended = []

    def compare():
        start = time.monotonic()
        ended.append((answers_equal("2003^{2002^{2001}}", "9"), time.monotonic() - start))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    ((equal, sec),) = ended
    assert equal is False and sec < 30  # on a busy machine
    assert math_equal("x^2 + 2", "2 + x^2")


@pytest.mark.case(14)
@pytest.mark.parametrize("bomb", [r"\sqrt[3]{9^{9^{9^{9}}}}", "(10^9)!", "2^{" + "9" * 150 + "}"])
def test_other_endless_formulas_end_in_time(bomb):
    assert math_equal("x^2 + 3", "3 + x^2")
    start = time.monotonic()
    assert answers_equal(bomb, "9") is False and time.monotonic() - start < 30  # seconds, on a busy machine


@pytest.mark.case(14)
def test_mathematics_is_asked_only_about_formulas(monkeypatch):
    def refuse(pred, gold):
        raise AssertionError(f"asked about {pred} and {gold}")

    monkeypatch.setattr(rewards, "math_equal", refuse)
    for pred, gold in [("Lumiro", "Riva"), ("42", "17"), ("12:30", "12"), ("Berlin (1990)", "Bonn"), ("42", "Lumiro")]:
        assert not answers_equal(pred, gold)


# ---------------------------------------------------------------------------------------------- rollouts


@pytest.mark.case(11)
def test_a_right_boxed_answer_earns_one(protocol):
    rollout = make_rollout(
        protocol, SEARCH, ("tool", "<result> 42</result>"), r"<think> done</think><answer> \boxed{ 42}</answer>"
    )
    assert format_ok(rollout, protocol) and answer_text(rollout, protocol) == "42"
    assert pocket_reward(rollout, QUESTION, protocol) == 1.0
    assert released_reward(rollout, QUESTION, protocol) == 1.0
    several = replace(QUESTION, answer=("41", "42.0"))
    assert pocket_reward(rollout, several, protocol) == 1.0


@pytest.mark.case(11)
def test_a_gold_answer_that_the_policy_did_not_write_earns_nothing(protocol):
    right = r"<answer> \boxed{ 42}</answer>"
    for part in (("tool", f"<result> 42 {right}</result>"), ("retrieval", f"<retrieve> {right}</retrieve>")):
        for end_reason in ("budget", "answer", "eos"):
            rollout = make_rollout(protocol, SEARCH, part, end_reason=end_reason)
            assert pocket_reward(rollout, QUESTION, protocol) == 0.0
        rollout = make_rollout(protocol, SEARCH, part, r"<answer> \boxed{ 17}</answer>")
        assert pocket_reward(rollout, QUESTION, protocol) == 0.0
        assert released_reward(rollout, QUESTION, protocol) == 0.0


@pytest.mark.case(11)
def test_a_policy_that_writes_a_result_breaks_the_format(protocol):
    rollout = make_rollout(protocol, r"<result> 42</result><answer> \boxed{ 42}</answer>")
    assert pocket_reward(rollout, QUESTION, protocol) == 0.0
    assert released_reward(rollout, QUESTION, protocol) == -1.0


@pytest.mark.case(13)
def test_a_prompt_that_ends_in_think_does_not_break_the_format(protocol):
    rollout = make_rollout(
        protocol,
        SEARCH.removeprefix("<think>"),
        ("tool", "<result> 42</result>"),
        r" done</think><answer> \boxed{ 42}</answer>",
    )
    assert pocket_reward(rollout, QUESTION, protocol) == 1.0


@pytest.mark.parametrize(
    "parts",
    [
        [r"<answer> 42</answer>"],
        [SEARCH],
        ["no tags at all", r"<answer> \boxed{ 42}</answer>"],
        [r"<answer> \boxed{ 42}</answer>", r"<answer> \boxed{ 42}</answer>"],
        [r"<think> \boxed{ 42}</think><answer> I do not know</answer>"],
        [r"<answer> \boxed{ 42}"],
        [],
    ],
)
def test_broken_formats_earn_nothing(protocol, parts):
    rollout = make_rollout(protocol, *parts)
    assert not format_ok(rollout, protocol)
    assert pocket_reward(rollout, QUESTION, protocol) == 0.0
    assert released_reward(rollout, QUESTION, protocol) == -1.0


@pytest.mark.case(11)
def test_only_a_rollout_that_ended_with_an_answer_is_right(protocol):
    for end_reason in ("length", "budget", "format", ""):
        rollout = make_rollout(protocol, r"<answer> \boxed{ 42}</answer>", end_reason=end_reason)
        assert pocket_reward(rollout, QUESTION, protocol) == 0.0


def test_the_released_reward_adds_a_tenth_for_both_tools(protocol):
    call = (SEARCH, ("tool", "<result> x</result>"))
    rollout = make_rollout(protocol, *call, *call, r"<answer> \boxed{ 42}</answer>")
    assert released_reward(rollout, QUESTION, protocol) == 1.0
    rollout.segments[3] = replace(rollout.segments[3], info={"tool": "python"})
    assert released_reward(rollout, QUESTION, protocol) == pytest.approx(1.1)
    partly = replace(QUESTION, answer="42 hotels")
    assert released_reward(rollout, partly, protocol) == pytest.approx(2 / 3)
