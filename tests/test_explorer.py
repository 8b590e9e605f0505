"""The trajectory explorer and the rollout by hand: pure parts by numbers, widgets without a browser."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import pytest

from rapo_lib import explorer as e
from rapo_lib import live
from rapo_lib.config import RunConfig
from rapo_lib.execution import make_retriever
from rapo_lib.methods import get_method
from rapo_lib.policy import load_policy
from rapo_lib.rollout import SamplingLimits
from rapo_lib.show import BATCH
from rapo_lib.tasks import Question, load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import Rollout, Segment, load_rollouts, save_rollouts

CONFIG = RunConfig(group_size=4, n_hybrid=2)


@pytest.fixture(scope="module")
def policy():
    return load_policy(CONFIG.student)


def own(protocol, text, entropy=0.1, logp=-0.2):
    ids = protocol.encode(text)
    return Segment("policy", ids, (logp,) * len(ids), (entropy,) * len(ids))


def rollout(protocol, question="q1", place=0, reward=1.0, hybrid=False, note="<think> n</think>", end="answer"):
    segments = [own(protocol, "<think> a</think><search> x</search>", 0.6)]
    info = {"tool": "search", "query": "x", "ok": True, "error": None}
    segments.append(Segment("tool", protocol.encode("<result> r</result>"), info=info))
    if hybrid:
        info = {
            "trace_id": 3,
            "score": 0.5,
            "teacher": "strong",
            "noisy": False,
            "source_question_id": "q9",
            "n_steps": 1,
        }
        segments.append(Segment("retrieval", protocol.encode(f"<retrieve>{note}</retrieve>"), info=info))
    segments.append(own(protocol, "<answer> \\boxed{1}</answer>", 0.3))
    return Rollout(question, (1, 2), segments, place, hybrid, end, reward)


@pytest.fixture
def file(policy, tmp_path):
    """Two RL steps of a group of four, as a run stores them."""
    lines = []
    for step in (1, 5):
        for place in range(4):
            r = rollout(policy.protocol, place=place, reward=float(place % 2), hybrid=place >= 2)
            after = [lp + 0.25 for lp in r.logps]
            lines.append(
                json.dumps({"rl_step": step, "logps_after": after, "rollout": r.to_dict()}, separators=(",", ":"))
            )
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def collection(file, policy):
    questions = [Question("q1", "what is <b>it</b>?", "1")]
    return e.Collection({"run": e.RolloutFile(file)}, policy.protocol, questions, {"run": CONFIG})


# ------------------------------------------------------------------------------------------- the file


def test_headers_are_those_of_the_whole_rows(file):
    found = e.RolloutFile(file)
    assert [(h.rl_step, h.place, h.hybrid, h.retrievals, h.calls) for h in found.headers[:4]] == [
        (1, 0, False, 0, 1),
        (1, 1, False, 0, 1),
        (1, 2, True, 1, 1),
        (1, 3, True, 1, 1),
    ]
    for h in found.headers:
        row = found.read(h)
        r = row["rollout"]
        assert (h.question_id, h.place, h.reward, h.end_reason) == (r.question_id, r.place, r.reward, r.end_reason)
        assert (h.retrievals, h.calls) == (len(r.retrievals), len(r.tool_calls)) and row["rl_step"] == h.rl_step
    assert [h.place for h in found.group(found.headers[6])] == [0, 1, 2, 3]
    assert {h.rl_step for h in found.group(found.headers[6])} == {5}


def test_a_file_of_plain_rollouts_and_one_written_otherwise_are_read(policy, tmp_path):
    rollouts = [rollout(policy.protocol, f'q"{n}\\', n, None if n else 0.5) for n in range(3)]
    save_rollouts(tmp_path / "a.jsonl", rollouts)
    rows = [json.dumps(dict(sorted(r.to_dict().items()))) for r in rollouts]  # other spaces, another order
    (tmp_path / "b.jsonl").write_text("\n\n".join(rows), encoding="utf-8")
    a, b = e.RolloutFile(tmp_path / "a.jsonl"), e.RolloutFile(tmp_path / "b.jsonl")
    assert [h[1:] for h in a.headers] == [h[1:] for h in b.headers]
    assert [a.read(h)["rollout"] for h in a.headers] == load_rollouts(tmp_path / "a.jsonl")
    assert a.headers[0].question_id == 'q"0\\' and [h.reward for h in a.headers] == [0.5, None, None]


def test_text_that_looks_like_fields_counts_as_text(policy, tmp_path):
    r = rollout(policy.protocol)
    fake = '"origin":"retrieval" "info":{"tool":"x" "reward":1.0,'
    info = {"tool": "search", "query": fake, "ok": True, "error": None}
    r.segments[1] = Segment("tool", r.segments[1].ids, info=info)
    save_rollouts(tmp_path / "a.jsonl", [r])
    (h,) = e.RolloutFile(tmp_path / "a.jsonl").headers
    assert (h.retrievals, h.calls, h.hybrid) == (0, 1, False)


@pytest.mark.parametrize("content", ["", "\n", "{}\n", "[1]\n", "no json\n"])
def test_a_file_without_rollouts_is_named(content, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="a.jsonl(, line 1 is no rollout| holds no rollouts)"):
        e.RolloutFile(path)
    with pytest.raises(ValueError, match="is no file; expected JSONL"):
        e.RolloutFile(tmp_path / "gone")


# -------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", [0, 1, 2, 3]),
        ("hybrid, right", [3]),
        ("on-policy , WRONG", [0]),
        ("one retrieval", [2, 3]),
        ("no retrievals", [0, 1]),
        ("1 call, hybrid", [2, 3]),
        ("two calls", []),
        ("ended by answer, q1", [0, 1, 2, 3]),
        ("q2", []),
    ],
)
def test_a_search_finds_what_it_says(collection, text, places):
    assert [h.place for h in collection.find("run", f"step 5, {text}")] == places


def test_a_word_that_is_no_condition_is_named_with_those_that_are():
    with pytest.raises(ValueError, match="'purple' is nothing that can be searched for; try hybrid, on-policy, right"):
        e.parse_search("hybrid, purple")


# -------------------------------------------------------------------------------------------- cards


def test_a_card_says_all_that_is_known(collection):
    card = collection.card("run", collection.find("run", "step 1, hybrid, right")[0], "entropy", 1)
    for part in ("right", "hybrid, 1 retrieved", "place 3", "ended by answer", "Gold answer: 1", "own step"):
        assert part in card
    assert "written by strong, similarity 0.5, from question q9" in card
    assert "entropy 0.600 before, 0.300 after, retrieval reward +0.457" in card  # the paper's worked value
    assert "F_ret" in card and "advantage" in card and card.count("border:3px solid") == 1
    assert "what is &lt;b&gt;it&lt;/b&gt;?" in card and "<b>it</b>" not in card


def test_advantages_need_the_whole_group_and_a_method(collection, policy, file):
    alone = e.Collection({"run": e.RolloutFile(file)}, policy.protocol)
    header = alone.find("run", "step 1")[0]
    assert "A_acc" not in alone.card("run", header) and "Question q1" in alone.card("run", header)
    credit = collection._group_credit("run", header)
    assert [round(credit[p]["a_acc"], 3) for p in range(4)] == [-0.866, 0.866, -0.866, 0.866]


def test_changes_are_after_minus_before_at_own_tokens_alone(collection):
    header = collection.find("run", "step 1, hybrid")[0]
    row = collection.files["run"].read(header)
    changes = e._changes(row["rollout"], row["logps_after"])
    assert {round(c, 6) for c in changes} == {0.0, 0.25}
    assert [c != 0 for c in changes] == [bool(m) for m in row["rollout"].policy_mask]
    assert 'title="+0.250 nats"' in collection.card("run", header, "change")
    with pytest.raises(ValueError, match="colour_by is 'mood'; allowed: entropy, change, author"):
        collection.card("run", header, "mood")


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "<img src=x onerror=y>", "a\u202eb", '"><i>'])
def test_text_of_a_file_is_never_interpreted(policy, tmp_path, hostile):
    r = rollout(policy.protocol, question=hostile, hybrid=True, note=hostile)
    r.segments[2].info["teacher"] = r.segments[1].info["tool"] = hostile
    save_rollouts(tmp_path / "a.jsonl", [r])
    some = e.Collection({hostile: e.RolloutFile(tmp_path / "a.jsonl")}, policy.protocol)
    (header,) = some.find(hostile)
    shown = some.card(hostile, header) + some.siblings_html(hostile, header)
    assert hostile not in shown and "<script" not in shown and "<img" not in shown and "\u202e" not in shown


def test_tokens_that_share_a_character_stand_together(policy):
    ids = policy.protocol.encode("a é 你 b")
    texts = [t for t, _ in e._readable(ids, [0.5] * len(ids), policy.protocol)]
    assert "".join(texts) == "a é 你 b" and not any("\ufffd" in t for t in texts)


# ------------------------------------------------------------------------------------------- widgets


def test_the_widget_walks_searches_and_compares(collection):
    x = e.Explorer(collection)
    assert len(x.rollout.options) == 8 and "8 of 8 rollouts" in x.says.value and x.step.max == 1
    x.search.value = "step 5, hybrid, right"
    assert x.rollout.value.place == 3 and x.step.max == 2 and "1 of 8" in x.says.value
    first = x.left.value
    x.forward.click()
    assert x.step.value == 1 and x.left.value != first
    for _ in range(5):
        x.forward.click()
    assert x.step.value == 2
    x.back.click()
    assert x.step.value == 1
    x.compare.value = x.compare.options[1][1]
    assert "place 0" in x.right.value and x.siblings.value.count("<tr") == 5
    x.colour.value = "change"
    assert "log-probability after the update" in x.left.value
    assert x.cards.children == (x.left, x.right)
    x.compare.value = None
    assert x.cards.children == (x.left,)
    x.show_raw.value = True
    assert "&quot;rl_step&quot;: 5" in x.left.value
    x.search.value = "purple"
    assert "nothing that can be searched for" in x.says.value and x.rollout.value.place == 3
    x.search.value = "q7"
    assert x.rollout.value is None and x.left.value == "" and "0 of 8" in x.says.value


def test_the_widget_chooses_by_rl_step_and_question(policy, tmp_path):
    rows = [(1, "q1", 0), (1, "q2", 0), (5, "q2", 1), (5, "q3", 1)]
    lines = [
        json.dumps({"rl_step": s, "rollout": rollout(policy.protocol, q, p).to_dict()}, separators=(",", ":"))
        for s, q, p in rows
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    x = e.Explorer(e.Collection({"run": e.RolloutFile(path)}, policy.protocol, [Question("q2", "who?", "1")]))
    assert [label for label, _ in x.rl_step.options] == ["all", "1", "5"]
    assert [label for label, _ in x.question.options] == ["all", "q1", "q2: who?", "q3"]
    x.question.value = "q2"
    assert [h.rl_step for _, h in x.rollout.options] == [1, 5] and "2 of 4 rollouts" in x.says.value
    x.rl_step.value = 5
    assert x.question.value == "q2" and [h.place for _, h in x.rollout.options] == [1]
    x.question.value = "q3"
    x.rl_step.value = 1
    assert x.question.value is None, "RL step 1 has no q3"
    assert [h.question_id for _, h in x.rollout.options] == ["q1", "q2"]


def test_the_link_saves_the_row_as_it_stands(collection, file):
    header = collection.find("run", "step 5, hybrid")[0]
    link = collection.raw_link_html("run", header)
    data = re.search(r'base64,([^"]+)"', link)[1]
    assert json.loads(base64.b64decode(data)) == json.loads(file.read_text(encoding="utf-8").splitlines()[6])
    assert f"from byte {header.offset}" in link and 'download="rollout.json"' in link


def test_a_note_at_the_end_has_no_retrieval_reward(policy, tmp_path):
    cut = rollout(policy.protocol, hybrid=True, end="budget", reward=0.0)
    save_rollouts(tmp_path / "a.jsonl", [Rollout("q", (1,), cut.segments[:3], 0, True, "budget", 0.0)])
    some = e.Collection({"a": e.RolloutFile(tmp_path / "a.jsonl")}, policy.protocol)
    card = some.card("a", some.find("a")[0])
    assert "no retrieval reward: it needs an own step on both sides" in card and "retrieval reward +" not in card


def test_in_a_batch_one_rollout_is_drawn_and_no_widget(collection, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(e, "display", lambda data, **_: shown.append(data))
    monkeypatch.setenv(BATCH, "1")
    assert e.explore(collection, "hybrid, right") is None and "retrieved step" in shown[0]["text/html"]
    assert e.explore(collection, "q7") is None and shown[1]["text/plain"] == "run: no rollout meets 'q7'"
    monkeypatch.delenv(BATCH)
    stills = []
    monkeypatch.setattr(e, "show_widget", lambda widget, still: stills.append(still))
    assert isinstance(e.explore(collection), e.Explorer) and "place 0" in stills[0]
    with pytest.raises(ValueError, match="no file was given"):
        e.Collection({}, collection.protocol)


# ----------------------------------------------------------------------------------------------- by hand


@pytest.fixture(scope="module")
def world(policy):
    questions = load_pocket_questions("exploration", "train")
    retriever = make_retriever(CONFIG, get_method("rapo"), policy.protocol, questions)
    return policy, make_pocket_toolbox("train"), retriever, questions, SamplingLimits.of(RunConfig())


def test_choices_decide_and_what_was_shown_stays(world):
    policy, toolbox, retriever, questions, limits = world
    one = live.LiveRollout(policy, toolbox, retriever, questions[3], limits, seed=1)
    seen = [s.kind for s in one.shown.steps]
    assert seen == ["own"] and not one.ended
    while not one.ended:
        before = list(one.shown.segments)
        one.choose("peek" if len(one.choices) == 0 else "think")
        assert one.shown.segments[: len(before)] == before
    kinds = [s.kind for s in one.whole.steps]
    assert kinds[:2] == ["own", "retrieved"] and kinds.count("retrieved") == 1 and one.shown.reward in (0.0, 1.0)
    again = live.LiveRollout(policy, toolbox, retriever, questions[3], limits, seed=1, choices=list(one.choices))
    assert again.whole == one.whole
    with pytest.raises(ValueError, match="this rollout has ended; begin a new one"):
        one.choose("think")
    with pytest.raises(ValueError, match="choice is 'nap'; allowed: think, peek"):
        live.LiveRollout(policy, toolbox, retriever, questions[3], limits).choose("nap")


def test_the_notes_that_lie_nearest_are_shown_once_each(world):
    policy, toolbox, retriever, questions, limits = world
    one = live.LiveRollout(policy, toolbox, retriever, questions[3], limits)
    hits = one.hits()
    assert 1 <= len(hits) <= live.HITS and len({h["note"] for h in hits}) == len(hits)
    assert hits[0]["similarity"] == max(h["similarity"] for h in hits)
    retriever_says = [retriever.buffer.search([questions[3].text], 1)[0][0].score]
    assert all(h["withheld"] in (True, False) for h in hits) and retriever_says


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "There is nothing to answer yet; a question looks like this: "),
        ("who are you?", "This world does not know 'who'"),
        ("what is the price", "begins with 'what is' and ends with a question mark"),
    ],
)
def test_what_is_no_question_gets_a_kind_answer(world, text, message):
    questions = world[3]
    with pytest.raises(ValueError, match=message) as told:
        live.find_question(text, questions)
    assert questions[0].text in str(told.value)


def test_questions_are_found_by_text_and_new_ones_are_taken(world):
    questions = world[3]
    assert live.find_question(questions[4].text.upper().replace(" ", "  "), questions) is questions[4]
    new = " ".join([*questions[4].text.split()[:-1], questions[5].text.split()[-1]])
    made = live.find_question(new, questions)
    assert made.id == "typed" and made.max_steps == live.BUDGET and made.text == new


def test_the_panel_answers_every_press(world):
    policy, toolbox, retriever, questions, limits = world
    panel = live.LivePanel(policy, toolbox, retriever, questions, limits)
    assert panel.think.disabled and panel.peek.disabled
    panel.typed.value = "hello"
    panel.start.click()
    assert "does not know" in panel.view.value and panel.think.disabled
    panel.pick.value = panel.pick.options[2][1]
    panel.start.click()
    assert (
        panel.live.question is questions[1]
        and not panel.think.disabled
        and "notes that lie nearest" in panel.view.value
    )
    for _ in range(9):
        panel.think.click()
    assert panel.live.ended and panel.think.disabled and "The agent" in panel.view.value
    before = list(panel.live.choices)
    panel.peek.click()
    assert panel.live.choices == before


def test_in_a_batch_drawn_choices_play_and_no_widget_is_made(world, monkeypatch):
    shown = []
    monkeypatch.setattr(live, "display", lambda data, **_: shown.append(data))
    monkeypatch.setenv(BATCH, "1")
    policy, toolbox, retriever, questions, limits = world
    assert live.play(policy, toolbox, retriever, questions, limits, seed=2) is None
    assert shown[0]["text/plain"].startswith("choices: ") and "The agent" in shown[0]["text/html"]
    monkeypatch.delenv(BATCH)
    monkeypatch.setattr(live, "show_widget", lambda widget, still: shown.append(still))
    assert isinstance(live.play(policy, toolbox, retriever, questions, limits), live.LivePanel)
    assert shown[1].startswith("<p>choices: ")


def test_peeks_that_got_no_note_are_told(world):
    """A budget of one step has no room for a note."""
    policy, toolbox, retriever, questions, limits = world
    asked = replace(questions[3], max_steps=1)
    one = live.LiveRollout(policy, toolbox, retriever, asked, limits, seed=1)
    assert one.unanswered == 0
    one.choose("peek")
    notes = [s for s in one.shown.steps if s.kind == "retrieved"]
    assert one.unanswered == 1 and not notes
    assert "1 of your 1 peeks got no note" in live.live_html(one)
