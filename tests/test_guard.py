"""The collapse guard on made-up logs and on the committed runs, and what happens when tools fail or repeat."""

from __future__ import annotations

import doctest
import math
import warnings

import numpy as np
import pandas as pd
import pytest

from rapo_lib import guard, tasks
from rapo_lib.guard import KEYS, KINDS, METRIC_OF, CollapseGuard, find_alarms
from rapo_lib.reference import REFERENCE
from rapo_lib.rollout import RolloutRequest, SamplingLimits, sample_rollouts
from rapo_lib.tasks import Question, load_pocket_questions, required_tools
from rapo_lib.tools import SearchTool, Toolbox, ToolResult, make_pocket_toolbox

CALM = {
    "reward": 0.5,
    "entropy": 0.07,
    "completion_tokens": 100.0,
    "truncated_frac": 0.01,
    "tool_failures_frac": 0.03,
    "groups_no_signal_frac": 0.2,
}


def log(n: int, **changes) -> list[dict]:
    """n calm rows; a change is a list that replaces a metric's last values."""
    rows = [{"rl_step": t} | CALM for t in range(1, n + 1)]
    for key, values in changes.items():
        for row, value in zip(rows[-len(values) :], values, strict=True):
            row[key] = value
    return rows


def found(rows) -> list[tuple[int, str]]:
    return [(a.rl_step, a.kind) for a in find_alarms(rows)]


@pytest.mark.case(38)
@pytest.mark.parametrize(
    ("rows", "want"),
    [
        # means of five: .4 .3 .2 .1 0 after 1 .. 5 rows without reward; .1 of the best, .5, is .05
        (log(30, reward=[0.0] * 10), (25, "reward")),
        # .04 .06 .04 .06 .04 have a mean of .048, just below a tenth of .5
        (log(30, reward=[0.04, 0.06, 0.04, 0.06, 0.04] + [0.06] * 5), (25, "reward")),
        # five times .07 is .35: means of .168, .266, .364
        (log(20, entropy=[0.56] * 5), (18, "entropy")),
        # .8 times five is 4, but 1.5 above it is 2.3: means of 1.24, 1.68, 2.12, 2.56
        (log(20, entropy=[0.8] * 15 + [3.0] * 5), (19, "entropy")),
        # a tenth of .07 is .007, reached with the fifth zero, and the reward is low all along
        (log(20, reward=[0.05] * 20, entropy=[0.0] * 7), (18, "entropy")),
        # twice 100: means of 140, 180, 220
        (log(20, completion_tokens=[300.0] * 6), (17, "length")),
        (log(20, truncated_frac=[0.9, 1.0, 0.95, 1.0]), (19, "truncated")),
        (log(20, tool_failures_frac=[1.0] * 4), (19, "tools")),
        # rows 2 .. 21 hold 19 without any signal: .95 of all groups; rows 1 .. 20 only 18
        (log(30, groups_no_signal_frac=[0.0, 0.0] + [1.0] * 28), (21, "signal")),
    ],
)
def test_a_collapse_is_found_at_its_step_and_once(rows, want):
    assert found(rows) == [want]
    (alarm,) = find_alarms(rows)
    assert alarm.text.startswith(f"RL step {want[0]}: ") and alarm.text.endswith(".") and ";" in alarm.text


@pytest.mark.case(38)
@pytest.mark.parametrize(
    "rows",
    [
        log(30, reward=[0.0] * 4 + [0.5] * 8),  # four bad steps and back
        log(30, reward=[0.06] * 10),  # an eighth is left
        log(40, reward=[0.0] * 40),  # never was up
        log(40, reward=[0.0] * 20 + [0.0999] * 5 + [0.0] * 15),  # up, but not clearly
        log(20, entropy=[0.34] * 5),
        log(20, entropy=[0.02] * 10 + [0.16] * 10),  # eight times, and still nearly certain
        log(20, entropy=[0.0] * 10),  # certain and right
        log(20, completion_tokens=[199.0] * 10),
        log(20, reward=[0.1] * 10 + [0.5] * 10, completion_tokens=[300.0] * 10),  # longer and better
        log(20, truncated_frac=[1.0, 1.0, 0.89, 1.0, 1.0]),
        log(20, tool_failures_frac=[1.0, 1.0, 0.89, 1.0, 1.0]),
        log(30, groups_no_signal_frac=[1.0] * 18 + [0.9, 0.0] + [1.0] * 10),
        log(19, groups_no_signal_frac=[1.0] * 19),
        log(40, reward=[0.95] * 40, groups_no_signal_frac=[1.0] * 40),  # all solved
    ],
)
def test_close_to_a_collapse_is_none(rows):
    assert found(rows) == []


@pytest.mark.case(38)
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_noisy_log_never_fires(seed):
    rng = np.random.default_rng(seed)
    t = np.arange(1, 101)
    success = 0.7 / (1 + np.exp(-(t - 30) / 8))
    rows = {
        "rl_step": t,
        "reward": np.clip(success + rng.normal(0, 0.12, 100), 0, 1),
        "entropy": np.clip(0.07 - 0.05 * success + rng.normal(0, 0.02, 100), 0.001, None),
        "completion_tokens": 100 + 20 * success + rng.normal(0, 8, 100),
        "truncated_frac": rng.beta(1, 50, 100),
        "tool_failures_frac": rng.beta(2, 50, 100),
        "groups_no_signal_frac": rng.binomial(6, np.where(t < 15, 0.9, 0.15)) / 6,
    }
    assert found(pd.DataFrame(rows).to_dict("records")) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_policy_that_never_earns_anything_has_no_signal_but_no_reward_to_lose(seed):
    rng = np.random.default_rng(seed)
    lucky = rng.random(60) < 0.1
    rows = log(60, reward=list(lucky / 96), groups_no_signal_frac=list(1 - lucky / 6))
    assert found(rows) == [(20, "signal")]


def test_a_value_that_is_not_there_is_skipped_and_not_taken_for_0():
    holes = log(40)
    for row in holes[10:30]:
        row |= dict.fromkeys(KEYS, math.nan)
    assert found(holes) == []
    assert found([{"rl_step": t} for t in range(1, 40)]) == []
    # failures in steps 8, 9 and 12, with nothing known in between, are three in a row
    rows = log(12, tool_failures_frac=[1.0, 1.0, None, math.nan, 1.0])
    assert found(rows) == [(12, "tools")]
    # the reward fell in step 21, and what is not known neither hastens nor stops the alarm
    rows = log(30, reward=[0.0, 0.0, math.nan, math.nan, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert found(rows) == [(27, "reward")]


@pytest.mark.parametrize("n", range(1, 5))
def test_short_runs_say_nothing_that_they_cannot_know(n):
    bad = dict(reward=[0.0] * n, entropy=[5.0] * n, completion_tokens=[900.0] * n, groups_no_signal_frac=[1.0] * n)
    assert found(log(n, **bad)) == []
    assert found(log(n, truncated_frac=[1.0] * n)) == ([(3, "truncated")] if n >= 3 else [])
    assert find_alarms([]) == []


def test_two_alarms_of_one_row_come_one_after_the_other():
    rows = log(20, truncated_frac=[1.0] * 5, tool_failures_frac=[1.0] * 5)
    assert found(rows) == [(18, "truncated"), (19, "tools")]


def test_a_resumed_run_that_replays_its_rows_goes_on_exactly():
    rows = log(30, reward=[0.0] * 10, truncated_frac=[1.0] * 3)
    for cut in range(len(rows)):
        watch = CollapseGuard()
        before = [a for row in rows[:cut] if (a := watch.update(row))]
        again = CollapseGuard()
        assert [a for row in rows[:cut] if (a := again.update(row))] == before
        assert [a for row in rows[cut:] if (a := again.update(row))] == find_alarms(rows)[len(before) :]


def test_rows_that_overlap_are_refused():
    watch = CollapseGuard()
    watch.update({"rl_step": 4})
    with pytest.raises(ValueError, match="RL step 4 came after RL step 4; give each row once and in order"):
        watch.update({"rl_step": 4})


def test_every_kind_has_its_metric():
    assert set(METRIC_OF) == set(KINDS) and set(METRIC_OF.values()) == set(KEYS)


def reference_runs() -> list[tuple[str, pd.DataFrame]]:
    paths = sorted((REFERENCE / "runs").glob("*/*/*/metrics.parquet"))
    return [(p.parts[-3], d) for p in paths if "reward" in (d := pd.read_parquet(p))]


#: Variants whose runs may do worse than learn nothing: they lose what they had, or fall apart.
FALLING = {"too_fast", "rapo_no_guard", "sft_grpo", "grpo_easy_lr=0.004_r=32"}
#: One run each that earned something after an alarm: its entropy stayed high; it took off late; it fell and came back.
CAME_BACK = ["rapo_hybrid=4", "rapo_wasteful", "sft_grpo"]


def test_on_the_committed_runs_it_fires_for_those_that_learned_nothing_and_for_hardly_another():
    alarmed, learned, came_back = set(), 0, []
    for variant, metrics in reference_runs():
        kinds = {kind for _, kind in found(metrics.to_dict("records"))}
        late = metrics["reward"].tail(5).mean()
        assert kinds <= {"signal", "entropy"} or variant in FALLING, (variant, kinds)
        came_back += [variant] if kinds and late >= 0.05 else []
        alarmed |= {variant} if kinds else set()
        learned += late >= 0.05
        if variant == "grpo":
            assert "signal" in kinds  # nothing to reinforce, in all seeds
        if variant == "too_fast":
            assert {"reward", "entropy"} <= kinds  # learned, and lost it
    assert sorted(came_back) == CAME_BACK
    assert learned >= 200 and "grpo" in alarmed and not alarmed & {"grpo_easy", "grpo_halfway", "rapo", "rapo_easy"}


# ------------------------------------------------------------------------------------- tools, cases 36 and 37

SEARCH = "<think> need it</think><search> employer of Kavelo</search>"
ANSWER = "<answer> \\boxed{ Lumiro}</answer>"


class BrokenTool:
    name = "search"
    deterministic = False

    def run(self, queries):
        raise ConnectionError("no route to the corpus")

    def check(self):
        """It seems to be there."""


def write(policy, questions, toolbox, limits=None):
    requests = [RolloutRequest(q, place) for q in questions for place in range(4)]
    return sample_rollouts(policy, requests, toolbox, limits=limits or SamplingLimits(200, 8, 6), seed=0, stream=("t",))


@pytest.mark.case(36)
def test_a_tool_that_always_fails_warns_in_a_rollout_and_alarms_the_guard(tiny_policy, questions, script):
    toolbox, watch, alarms = Toolbox([BrokenTool()], warn_after=8), CollapseGuard(), []
    with pytest.warns(RuntimeWarning, match="search: all 8 calls failed; first error: ConnectionError: no route"):
        for step in (1, 2, 3):
            script(tiny_policy, [[SEARCH, ANSWER]] * 4)
            rollouts = write(tiny_policy, questions[:1], toolbox).rollouts
            calls = [s for r in rollouts for s in r.tool_calls]
            assert all(r.end_reason == "answer" for r in rollouts)
            share = sum(not s.info["ok"] for s in calls) / len(calls)
            alarms.append(watch.update({"rl_step": step, "tool_failures_frac": share}))
    assert alarms[:2] == [None, None] and alarms[2].kind == "tools"
    assert "at least 100% of all tool calls failed" in alarms[2].text


@pytest.mark.case(36)
def test_required_tools_are_those_of_the_questions_steps():
    assert required_tools(load_pocket_questions("exploration", "test")) == ("search", "browse", "python")
    easy = load_pocket_questions("easy", "test")
    for family, want in (("computational", ("python",)), ("knowledge", ("search",)), ("web", ("browse",))):
        assert required_tools([q for q in easy if q.family == family]) == want
    assert required_tools([Question("a", "6 * 7?", "42")]) == required_tools([]) == ()
    strange = Question("a", "6 * 7?", "42", info={"skills": ["sing"]})
    with pytest.raises(ValueError, match="question 'a': unknown skill 'sing'; allowed: search, table"):
        required_tools([strange])


@pytest.mark.case(36)
def test_a_toolbox_without_a_tool_that_the_questions_need_refuses_to_start():
    questions = load_pocket_questions("exploration", "test")
    make_pocket_toolbox("test").require(required_tools(questions))
    toolbox = Toolbox([SearchTool([{"title": "a", "text": "b"}])])
    with pytest.raises(RuntimeError, match="tools missing: browse, python; the toolbox has search"):
        toolbox.require(required_tools(questions))


@pytest.mark.case(37)
def test_a_query_repeated_with_the_real_toolbox_is_counted_told_and_ended(tiny_policy, questions, script):
    toolbox = Toolbox([SearchTool([{"title": "employer of Kavelo", "text": "Lumiro"}])])
    script(tiny_policy, [[SEARCH] * 6] * 4)
    rollouts = write(tiny_policy, questions[:1], toolbox, SamplingLimits(400, 3, 9)).rollouts
    for r in rollouts:
        results = [tiny_policy.protocol.decode(s.ids) for s in r.tool_calls]
        assert results[:2] == ["<result> Lumiro</result>"] * 2
        assert results[2] == "<result> Lumiro (this call was made 3 times)</result>"
        assert r.end_reason == "calls"
    assert (toolbox.counts["search"].calls, toolbox.counts["search"].cached) == (12, 8)


@pytest.mark.case(37)
def test_an_empty_action_gets_an_error_result_from_the_real_toolbox(tiny_policy, questions, script):
    toolbox = Toolbox([SearchTool([{"title": "a", "text": "b"}])])
    script(tiny_policy, [["<search> </search>", ANSWER]] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        (r, *_) = write(tiny_policy, questions[:1], toolbox).rollouts
    (call,) = r.tool_calls
    assert tiny_policy.protocol.decode(call.ids) == "<result> error: the search call is empty</result>"
    assert call.info["ok"] is False and r.end_reason == "answer"


@pytest.mark.case(37)
def test_a_call_that_only_differs_in_blanks_and_a_tool_result_that_is_empty_end_nothing(tiny_policy, questions, script):
    class Silent:
        name, deterministic = "search", True

        def run(self, queries):
            return [ToolResult("")] * len(queries)

        def check(self):
            """Works."""

    script(tiny_policy, [[SEARCH, SEARCH.replace("<search> ", "<search>   "), ANSWER]] * 4)
    (r, *_) = write(tiny_policy, questions[:1], Toolbox([Silent()])).rollouts
    assert [s.info["repeats"] for s in r.tool_calls] == [1, 2] and r.end_reason == "answer"


def test_docstring_examples():
    for module in (guard, tasks):
        assert doctest.testmod(module).failed == 0 < doctest.testmod(module).attempted
