"""How much memory a model of a real size needs: computed per token from its shape, and measured where it can be.

Nothing here acts inside a run. `python -m rapo_lib.bench qwen --plan` prints the plan; the README shows it. All of it
is computed for a GPU with bfloat16 weights and a float32 adapter; nothing was measured on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rapo_lib.config import ROOT
from rapo_lib.local_models import SIZES, QwenSize, qwen_config
from rapo_lib.trainer import LOGITS_BYTES

#: Bytes of a bfloat16 and of a float32.
HALF, FULL = 2, 4
#: What the CUDA context, kernels and fragmentation take of a GPU; an assumption.
RESERVE_BYTES = 2 * 10**9
#: Arrays of the size of the logits while a chunk is scored (logits, scaled, log-softmax, its exponential and product,
#: the gradient), and while tokens are sampled (logits, scaled, log-softmax, probabilities, their sums).
SCORING_COPIES, SAMPLING_COPIES = 6, 5


# ------------------------------------------------------------------------------------------- from a shape


def _linear_shapes(size: QwenSize) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one block."""
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    return {
        "q": (size.hidden, q),
        "k": (size.hidden, kv),
        "v": (size.hidden, kv),
        "o": (q, size.hidden),
        "gate": (size.hidden, size.intermediate),
        "up": (size.hidden, size.intermediate),
        "down": (size.intermediate, size.hidden),
    }


def n_linear(size: QwenSize) -> int:
    """Weights of the linear layers that an adapter covers: all but embedding and output layer."""
    return size.layers * sum(a * b for a, b in _linear_shapes(size).values())


def n_parameters(size: QwenSize) -> int:
    """Parameters of a model, tied embeddings counted once.

    Example:
        >>> from rapo_lib.local_models import SIZES
        >>> n_parameters(SIZES["0.5b"]), n_parameters(SIZES["7b"])
        (494032768, 7615616512)
    """
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    attention = q + 2 * kv if size.family == "qwen2.5" else 2 * size.head_dim  # biases, or norms of queries and keys
    blocks = n_linear(size) + size.layers * (attention + 2 * size.hidden)
    return blocks + size.hidden + size.vocab * size.hidden * (1 if size.tied else 2)


def n_adapter(size: QwenSize, r: int) -> int:
    """Parameters of a LoRA adapter of rank r on all linear layers: r (inputs + outputs) each."""
    return size.layers * sum(r * (a + b) for a, b in _linear_shapes(size).values())


def kv_bytes(size: QwenSize) -> int:
    """Bytes of keys and values of one token in bfloat16: `2 x layers x key-value heads x head dimension x 2`.

    Example:
        >>> from rapo_lib.local_models import SIZES
        >>> kv_bytes(SIZES["0.5b"])
        12288
    """
    return 2 * size.layers * size.kv_heads * size.head_dim * HALF


#: On the hub, of the models in SIZES.
HUB_NAMES = {"Qwen2.5-0.5B": "0.5b", "Qwen2.5-1.5B": "1.5b", "Qwen2.5-3B": "3b", "Qwen2.5-7B": "7b"}
HUB_NAMES |= {"Qwen3-0.6B": "qwen3-0.6b"}


def size_of(student: str) -> QwenSize | None:
    """The shape of a Qwen2 or Qwen3 model by its folder's config.json or its hub name; None for others.

    Example:
        >>> size_of("Qwen/Qwen2.5-7B-Instruct").layers, size_of("meta-llama/Llama-3-8B")
        (28, None)
    """
    path = ROOT / student / "config.json"
    if not path.is_file():
        known = (key for name, key in HUB_NAMES.items() if Path(student).name.startswith(name))
        return SIZES.get(next(known, ""))
    c = json.loads(path.read_text(encoding="utf-8"))
    family = {"qwen2": "qwen2.5", "qwen3": "qwen3"}.get(c.get("model_type", ""))
    if family is None:
        return None
    heads = c["num_attention_heads"]
    return QwenSize(
        family,
        c["hidden_size"],
        c["intermediate_size"],
        c["num_hidden_layers"],
        heads,
        c.get("num_key_value_heads") or heads,
        c.get("head_dim") or c["hidden_size"] // heads,
        c["vocab_size"],
        c.get("tie_word_embeddings", False),
        c["max_position_embeddings"],
    )


# ------------------------------------------------------------------------------------------- measured

#: Bytes a token that one layer keeps while it is recomputed, per unit of its width: `layer_bytes` measured 91.4 for
#: Qwen2.5-0.5B and 90.6 for Qwen3-0.6B.
LAYER_BYTES_PER_UNIT = 91.4


def saved_bytes(model: Any, n_tokens: int) -> int:
    """Bytes that a forward pass over one row of n_tokens keeps for the backward pass, parameters left out.

    Counted, not sampled: every tensor that autograd saves, each storage once.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(1, n_tokens, dtype=torch.long)
        model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum()
    return sum(s.nbytes() for s in kept.values())


def layer_bytes(size: QwenSize, *, checkpointing: bool, lora_r: int = 16, n_tokens: int = 256) -> float:
    """Bytes a token and layer that are kept for the backward pass in bfloat16, measured on this machine's CPU.

    The difference between a model of three layers and one of two, of the real width, with an adapter and random
    weights.

    Args:
        checkpointing: whether only the input of each layer is kept.
    """
    found = []
    for layers in (2, 3):
        model = _adapted(dataclasses.replace(size, layers=layers, vocab=1000), lora_r)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        found.append(saved_bytes(model, n_tokens))
    return (found[1] - found[0]) / n_tokens


def _adapted(size: QwenSize, r: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = qwen_config(size)
    config.eos_token_id = config.bos_token_id = None  # beyond the small vocabulary
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).base_model.model.train()


@dataclass
class Peak:
    """Seconds and the highest memory of a block of code: of the process, or of the GPU when there is one."""

    sec: float = 0.0
    bytes: int = 0


@contextmanager
def peak_memory(every_sec: float = 0.01):
    """Measure a block: `with peak_memory() as p: ..`, then p.sec and p.bytes (resident set; CUDA's allocations)."""
    peak, ended, process = Peak(), threading.Event(), psutil.Process()

    def watch() -> None:
        while not ended.wait(every_sec):
            peak.bytes = max(peak.bytes, process.memory_info().rss)

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    began = time.perf_counter()
    try:
        yield peak
    finally:
        if on_gpu:
            torch.cuda.synchronize()
        peak.sec = time.perf_counter() - began
        ended.set()
        thread.join()
        peak.bytes = torch.cuda.max_memory_allocated() if on_gpu else max(peak.bytes, process.memory_info().rss)


# ------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that training a model with an adapter takes; computed.

    Args:
        weights: bfloat16, frozen.
        adapter: float32 weights, gradients and the two moments of AdamW, 16 bytes a parameter.
        merged: while sampling, copies of the linear layers with the adapter merged into them.
        kv_token: keys and values of one token, and one layer's repeated for all heads.
        sampling_row: logits of one row while it is sampled.
        token: kept for the backward pass of one token with checkpointing, all layers.
        layer_token: one layer's recomputed activations of one token, and as much again for their gradients.
        logits: logits of a chunk of scored tokens.
    """

    weights: int
    adapter: int
    merged: int
    kv_token: int
    sampling_row: int
    token: int
    layer_token: int
    logits: int

    def sampling(self, rollouts: int, tokens: int) -> int:
        """Bytes while so many rollouts of so many tokens, prompt included, are sampled at once."""
        return (
            self.weights
            + self.adapter
            + self.merged
            + rollouts * (tokens * self.kv_token + self.sampling_row)
            + RESERVE_BYTES
        )

    def update(self, tokens: int) -> int:
        """Bytes of a backward pass over so many tokens."""
        return self.weights + self.adapter + self.logits + tokens * (self.token + self.layer_token) + RESERVE_BYTES

    def most_rollouts(self, gpu_bytes: int, tokens: int) -> int:
        """Rollouts of so many tokens that can be sampled at once; 0 when not even one."""
        return max(0, (gpu_bytes - self.sampling(0, tokens)) // (tokens * self.kv_token + self.sampling_row))

    def most_tokens(self, gpu_bytes: int) -> int:
        """Tokens of one backward pass; 0 when not even one."""
        return max(0, (gpu_bytes - self.update(0)) // (self.token + self.layer_token))


def memory_plan(size: QwenSize, lora_r: int, token_layer: float, layer_token: float) -> MemoryPlan:
    """The plan of a size.

    Args:
        token_layer: bytes a token and layer kept with checkpointing, as `layer_bytes` measures.
        layer_token: the same without checkpointing: what one layer takes while it is recomputed.
    """
    one_layer = kv_bytes(size) // size.layers
    return MemoryPlan(
        weights=n_parameters(size) * HALF,
        adapter=n_adapter(size, lora_r) * 4 * FULL,
        merged=n_linear(size) * HALF,
        kv_token=kv_bytes(size) + one_layer * size.heads // size.kv_heads,
        sampling_row=SAMPLING_COPIES * size.vocab * FULL,
        token=round(size.layers * token_layer),
        layer_token=round(2 * layer_token),
        logits=SCORING_COPIES * LOGITS_BYTES,
    )


def plan_table(
    plans: Sequence[tuple[str, MemoryPlan]], gpus_gb: Sequence[int] = (16, 24, 80), tokens: int = 2448
) -> str:
    """Two Markdown tables: what each model takes, and what fits on each GPU with rollouts of so many tokens."""

    def gb(n: float) -> str:
        return f"{n / 1e9:.2f}"

    columns: Sequence[tuple[str, Callable[[MemoryPlan], str]]] = (
        ("weights GB", lambda p: gb(p.weights)),
        ("adapter, gradients, optimiser GB", lambda p: gb(p.adapter)),
        ("merged copy while sampling GB", lambda p: gb(p.merged)),
        ("cache kB a token", lambda p: f"{p.kv_token / 1e3:.1f}"),
        ("kept kB a token", lambda p: f"{p.token / 1e3:.1f}"),
        ("one layer recomputed kB a token", lambda p: f"{p.layer_token / 1e3:.1f}"),
        ("logits chunk GB", lambda p: gb(p.logits)),
    )
    lines = [f"| model | {' | '.join(c for c, _ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(show(p) for _, show in columns)} |" for name, p in plans]
    heads = [f"{g} GB: rollouts sampled at once | {g} GB: tokens of a backward pass" for g in gpus_gb]
    lines += ["", f"| model | {' | '.join(heads)} |", "|---" * (2 * len(gpus_gb) + 1) + "|"]
    for name, p in plans:
        cells = [f"{p.most_rollouts(g * 10**9, tokens):,} | {p.most_tokens(g * 10**9):,}" for g in gpus_gb]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
