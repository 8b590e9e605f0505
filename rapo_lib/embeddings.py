"""Embeddings kept on disk: what a neural encoder has encoded once is not encoded again, and a kill loses one part.

`StepTraceBuffer.build(.., cache=folder)` uses it for encoders that are `costly`. Each part is one safetensors file,
written as a whole, with its own sum in its name; a folder belongs to one encoder and its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from rapo_lib.config import RESULTS
from rapo_lib.traces import write_bytes_atomic

#: Where runs and the search server keep them.
EMBEDDINGS = RESULTS / "embeddings"
#: Texts of one part: what a kill can cost.
PART = 512


def encode_texts(encoder: Any, texts: Sequence[str], folder: Path | str | None) -> np.ndarray:
    """Unit rows (N, D) of texts: those of a costly encoder are kept in the folder, unless it is None."""
    if folder is not None and encoder.costly:
        return encode_kept(encoder, texts, folder)
    return encoder.encode(texts)


def encode_kept(
    encoder: Any,
    texts: Sequence[str],
    folder: Path | str,
    *,
    part: int = PART,
    say: Callable[[str], None] | None = None,
) -> np.ndarray:
    """Unit rows (N, D) of texts, from the folder where they are there, else encoded and added to it.

    Args:
        encoder: with `name`, `settings`, `state()`, `dim` and `encode`. texts: any, also twice the same.
        folder: of all encoders' parts. part: texts encoded before they are written. say: gets a line a part.

    Raises:
        ValueError: a part whose content does not have the sum in its name.
    """
    place = Path(folder) / encoder_key(encoder)
    known = dict(_read(place, encoder.dim))
    names = [_key(t) for t in texts]
    due = list({n: t for n, t in zip(names, texts, strict=True) if n not in known}.items())
    for first in range(0, len(due), part):
        some = due[first : first + part]
        rows = np.ascontiguousarray(encoder.encode([t for _, t in some]), dtype=np.float32)
        keys = np.frombuffer(b"".join(n for n, _ in some), np.uint8).reshape(len(some), -1)
        _write(place, {"keys": keys, "rows": rows})
        known.update(zip((n for n, _ in some), rows, strict=True))
        if say is not None:
            say(f"{min(first + part, len(due))} of {len(due)} texts encoded")
    return np.stack([known[n] for n in names]) if names else np.zeros((0, encoder.dim), np.float32)


def encoder_key(encoder: Any) -> str:
    """A folder name that two encoders share only when they give the same rows."""
    what = json.dumps([encoder.name, encoder.settings, encoder.state()], sort_keys=True, default=str)
    return f"{encoder.name}-{hashlib.blake2b(what.encode(), digest_size=6).hexdigest()}"


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _write(place: Path, tensors: dict[str, np.ndarray]) -> None:
    data = save(tensors)
    write_bytes_atomic(place / f"{hashlib.sha256(data).hexdigest()}.safetensors", data)


def _read(place: Path, dim: int) -> Iterator[tuple[bytes, np.ndarray]]:
    for path in sorted(place.glob("*.safetensors")):
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.stem:
            raise ValueError(f"{path} is damaged: its content has another sha256 than its name; delete it")
        part = load(data)
        if part["rows"].shape[1] != dim:
            raise ValueError(f"{path} has {part['rows'].shape[1]} dimensions, the encoder gives {dim}; delete it")
        yield from zip(map(bytes, part["keys"]), part["rows"], strict=True)
