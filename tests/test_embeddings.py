"""Embeddings kept on disk: nothing is encoded twice, nothing is shared between encoders, nothing damaged is used."""

from __future__ import annotations

import numpy as np
import pytest

from rapo_lib.buffer import Encoder, StepTraceBuffer, TfidfEncoder
from rapo_lib.embeddings import encode_kept, encoder_key
from rapo_lib.traces import StepTrace


class Counting(Encoder):
    """A costly encoder that notes what it was asked for and dies when told to."""

    name, dim, costly = "counting", 4, True

    def __init__(self, weights="a", dies_after=10**9):
        self.weights, self.dies_after, self.asked = weights, dies_after, []

    def state(self):
        return {"weights": self.weights}

    def encode(self, texts):
        if len(self.asked) >= self.dies_after:
            raise KeyboardInterrupt
        self.asked += texts
        rows = np.array([[len(t), sum(map(ord, t)) % 97, 1, 2] for t in texts], np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


TEXTS = [f"text {i}" for i in range(10)]


def test_only_what_is_new_is_encoded_and_rows_are_those_of_the_encoder(tmp_path):
    encoder = Counting()
    first = encode_kept(encoder, [*TEXTS[:6], TEXTS[0]], tmp_path, part=4)
    assert encoder.asked == TEXTS[:6] and np.array_equal(first[0], first[6])
    lines = []
    rows = encode_kept(encoder, TEXTS[::-1], tmp_path, part=4, say=lines.append)
    assert sorted(encoder.asked) == sorted(TEXTS) and lines == ["4 of 4 texts encoded"]
    assert np.array_equal(rows, Counting().encode(TEXTS[::-1]))
    assert encode_kept(encoder, [], tmp_path).shape == (0, 4)


def test_a_killed_work_goes_on_with_the_rest(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        encode_kept(Counting(dies_after=8), TEXTS, tmp_path, part=4)
    encoder = Counting()
    encode_kept(encoder, TEXTS, tmp_path, part=4)
    assert encoder.asked == TEXTS[8:]


def test_another_encoder_shares_nothing(tmp_path):
    encode_kept(Counting("a"), TEXTS, tmp_path)
    other = Counting("b")
    encode_kept(other, TEXTS, tmp_path)
    assert other.asked == TEXTS and encoder_key(Counting("a")) != encoder_key(other) == encoder_key(Counting("b"))


def test_a_damaged_part_is_named(tmp_path):
    encode_kept(Counting(), TEXTS, tmp_path)
    (path,) = tmp_path.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path.name} is damaged: .*; delete it"):
        encode_kept(Counting(), TEXTS, tmp_path)


def test_a_buffer_keeps_rows_of_a_costly_encoder_alone(tmp_path):
    traces = [StepTrace(t, "v", "q", "t") for t in TEXTS]
    encoder = Counting()
    one = StepTraceBuffer.build(traces, encoder, cache=tmp_path)
    two = StepTraceBuffer.build(traces, encoder, cache=tmp_path)
    assert encoder.asked == TEXTS and np.array_equal(*(b.index.reconstruct_n(0, len(TEXTS)) for b in (one, two)))
    StepTraceBuffer.build(traces, TfidfEncoder(), cache=tmp_path / "none")
    assert not (tmp_path / "none").exists()
