"""Policies: load a causal language model, give it an adapter, and decode from it in one batch.

Notebook 01 explains this module. A `Policy` is a model with its tokenizer and tag protocol. For sampling it
becomes a decoder with a key-value cache in which each row has its own length, so rows may be fed one token, many,
or none at a time. Two decoders give the same numbers: `GenericDecoder` runs any causal model's own forward,
`FusedDecoder` is a Qwen2/Qwen3 step with joined weights for CPU. Both read the adapter merged into a copy; the
weights that are trained are never written.

Deviations from arXiv 2603.03078: none here; entropies are exact over the vocabulary (Eq. 2).
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache

from rapo_lib.config import ROOT, child_rng
from rapo_lib.pocket.files import checked
from rapo_lib.traces import SYSTEM_PROMPT, TAGS, Protocol, file_sha256, write_text_atomic

#: Beside an adapter: which base model it belongs to, and the sha256 of its files.
BASE_FILE = "base_model.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

# ---------------------------------------------------------------------------------------- the policy


@dataclass
class Policy:
    """A causal language model with its tokenizer and protocol.

    Args:
        model: a Hugging Face causal language model, or a PeftModel around one.
        tokenizer: its tokenizer, with a chat template.
        protocol: how questions, observations and step traces become ids.
        name: shown in logs and error messages.
    """

    model: Any
    tokenizer: Any
    protocol: Protocol
    name: str

    @property
    def base(self) -> Any:
        """The Hugging Face model without the PEFT wrapper (adapted layers stay inside it)."""
        return self.model.get_base_model() if has_adapter(self.model) else self.model

    @property
    def device(self) -> torch.device:
        return self.base.get_input_embeddings().weight.device

    @property
    def context(self) -> int:
        """How many ids, prompt and completion together, the model was made for."""
        return self.base.config.get_text_config().max_position_embeddings

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence: those of the model's configurations and the tokenizer's."""
        found = {self.tokenizer.eos_token_id}
        for config in (self.base.config, self.base.generation_config):
            ids = getattr(config, "eos_token_id", None)
            found |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
        return tuple(sorted(found - {None}))


def has_adapter(model: Any) -> bool:
    return hasattr(model, "get_base_model")


def load_policy(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    system_prompt: str | None = None,
) -> Policy:
    """Load a model and its tokenizer from a folder or from the hub.

    Args:
        name_or_folder: a folder (absolute, or relative to here or to the repository) or a hub name.
        dtype: default float32 on CPU and bfloat16 on CUDA.
        device: default the process's own GPU when there is one.
        system_prompt: default `SYSTEM_PROMPT`; empty when the tokenizer has the tags as ids of their own, since
            such a model was trained on the protocol.

    Only safetensors and JSON are read: nothing is unpickled, and no code that comes with a model is run.

    Raises:
        ValueError: neither a folder with a model nor a name that can be loaded, or a folder with damaged files,
            with weights in another format, or whose weights, config.json and tokenizer do not fit each other.
    """
    own_gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # under torchrun each process has one
    device = torch.device(device or (own_gpu if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    source = _model_source(name_or_folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        # Weights of another shape are refused by _check_weights, which names them.
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as e:
        first = (str(e).splitlines() or [""])[0]
        if Path(source).is_dir():
            raise ValueError(f"{source} holds no complete model ({first}); copy its files again") from e
        raise ValueError(
            f"cannot load the model {str(name_or_folder)!r}: no such folder here or in the repository, and not on the "
            "hub or in its cache. Without a network, download it elsewhere and pass the folder that holds config.json, "
            "model.safetensors and the tokenizer's files, for example load_policy('/data/Qwen2.5-0.5B-Instruct'). "
            f"The first error was: {first}"
        ) from e
    _check_weights(source, model, report)
    if not tokenizer.chat_template:
        raise ValueError(
            f"{source}: the tokenizer has no chat template; copy its files again, or take an instruct model"
        )
    if system_prompt is None:
        known = tokenizer.get_vocab()
        system_prompt = "" if all(tag in known for tag in TAGS) else SYSTEM_PROMPT
    policy = Policy(model, tokenizer, Protocol(tokenizer, system_prompt), Path(str(name_or_folder)).name)
    _check_tokenizer(source, policy)
    model.to(device).eval()
    return policy


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, compared with its checksums when it is a shipped one.

    Raises:
        ValueError: a folder without a tokenizer, or with a damaged one.
    """
    checked(folder)
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as e:
        first = (str(e).splitlines() or [""])[0]
        raise ValueError(f"{folder} holds no complete tokenizer ({first}); copy its files again") from e


def _model_source(name_or_folder: str | Path) -> str:
    for folder in (Path(name_or_folder), ROOT / name_or_folder):
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ValueError(f"the folder {folder} holds no config.json, so it is no model folder")
            return str(_check_folder(checked(folder.resolve())))
        if folder.is_file():
            raise ValueError(f"{folder} is a file; pass the folder that holds config.json and model.safetensors")
    return str(name_or_folder)


def _check_folder(folder: Path) -> Path:
    """Refuse a model folder with what transformers would pass over in silence."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            _read_json(folder / name)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter beside the model (adapter_config.json); load_policy loads a plain model: move "
            "the adapter to a folder of its own and give it to load_adapter"
        )
    if not any(folder.glob("*.safetensors")):
        other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".h5"))
        found = f"its weights are in {other[0]}, which would have to be unpickled" if other else "it holds no weights"
        raise ValueError(
            f"{folder}: {found}; model.safetensors is expected: take the safetensors files of the model, or convert it "
            "where you trust it, with save_pretrained"
        )
    for path in sorted(folder.glob("*.safetensors")):
        _read_shapes(path)
    return folder


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a safetensors file, from its header alone."""
    try:
        with safe_open(str(path), "pt") as f:
            return {key: tuple(f.get_slice(key).get_shape()) for key in f.keys()}
    except SafetensorError as e:
        raise ValueError(f"{path} is damaged: expected a complete safetensors file, found {e}; copy it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: expected JSON, found {e}; copy the file again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object, found {type(found).__name__}; copy it again")
    return found


def _check_weights(source: str, model: Any, report: dict[str, Any]) -> None:
    """Refuse weights that are not those of the configuration: transformers makes random ones of what is missing."""
    faults = []
    if missing := sorted(report["missing_keys"]):
        faults.append(f"{len(missing)} weights are missing (first: {missing[0]})")
    if unexpected := sorted(report["unexpected_keys"]):
        faults.append(f"{len(unexpected)} are there that it does not have (first: {unexpected[0]})")
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, want = mismatched[0]
        faults.append(f"{len(mismatched)} have another shape (first: {name}, {list(found)}, expected {list(want)})")
    if faults:
        raise ValueError(
            f"{source}: the weights do not fit config.json, which describes a {type(model).__name__}: "
            f"{'; '.join(faults)}; take config.json and model.safetensors from one and the same model"
        )


def _check_tokenizer(source: str, policy: Policy) -> None:
    """Refuse a tokenizer that belongs to another model or lost a file."""
    tokenizer, rows = policy.tokenizer, policy.base.get_input_embeddings().weight.shape[0]
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{source}: the tokenizer names no end-of-sequence token; tokenizer_config.json is missing or of another "
            "model: copy it again"
        )
    try:
        prompt = policy.protocol.prompt_text("6 * 7?")
    except Exception as e:  # whatever a template raises, it cannot make prompts
        raise ValueError(
            f"{source}: the chat template is damaged: {e}; copy it again; or, when it takes no system prompt, load the "
            'policy with system_prompt=""'
        ) from e
    if "6 * 7?" not in prompt:
        raise ValueError(f"{source}: the chat template leaves the question out ({prompt!r:.80}); copy it again")
    # Not the whole vocabulary: transformers adds default tokens that a model may lack and never meets.
    used = (*policy.protocol.encode(prompt + "".join(TAGS)), tokenizer.eos_token_id)
    if max(used) >= rows:
        raise ValueError(
            f"{source}: the tokenizer gives a prompt the id {max(used)}, the model has {rows} embeddings (0 to "
            f"{rows - 1}); they are of different models: copy the tokenizer's files again"
        )


# ------------------------------------------------------------------------------------------- adapter


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Hide what the pinned TRL and PEFT make transformers say at every start; everything else is shown.

    Both ask a model for `is_gradient_checkpointing`, PEFT whenever it wraps one, and transformers 5 has renamed it.
    """
    with warnings.catch_warnings():
        for message in (
            "You are using 'rollout_func'",
            "`gradient_checkpointing` is deprecated",
            "`is_gradient_checkpointing`",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


def add_lora(policy: Policy, r: int, seed: int) -> Policy:
    """Put a fresh LoRA adapter on all linear layers (alpha 2r, no dropout); it changes nothing until trained.

    The model's layers are wrapped in place, as PEFT does; the base weights are frozen.

    Args:
        policy: a policy without an adapter.
        r: rank.
        seed: the run's seed; the adapter's random half has a stream of its own.

    Raises:
        ValueError: the policy has an adapter already.
    """
    from peft import LoraConfig, get_peft_model

    _refuse_second_adapter(policy)
    config = LoraConfig(r=r, lora_alpha=2 * r, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(), without_known_warnings():
        torch.manual_seed(int(child_rng(seed, "lora").integers(2**62)))
        model = get_peft_model(policy.model, config)
    return Policy(model, policy.tokenizer, policy.protocol, policy.name)


def save_adapter(policy: Policy, folder: str | Path) -> None:
    """Save the adapter and, beside it, which base model it belongs to.

    Raises:
        ValueError: the policy has no adapter.
    """
    if not has_adapter(policy.model):
        raise ValueError(f"policy {policy.name!r} has no adapter to save; add_lora makes one")
    # "auto" would ask the hub whether the vocabulary grew; it never does here
    policy.model.save_pretrained(str(folder), save_embedding_layers=False)
    sums = {name: file_sha256(Path(folder) / name) for name in ADAPTER_FILES}
    base = {"name": policy.name, "checksum": base_checksum(policy), "sha256": sums}
    write_text_atomic(Path(folder) / BASE_FILE, json.dumps(base, indent=1) + "\n")


def load_adapter(policy: Policy, folder: str | Path, *, trainable: bool = False) -> Policy:
    """Put a saved adapter on its base model.

    Args:
        policy: the base model's policy, without an adapter.
        folder: written by `save_adapter`.
        trainable: whether training goes on.

    Raises:
        ValueError: the folder holds no adapter or a damaged one, it was trained on another base model, some of its
            weights are missing or of another rank, or the policy has an adapter already.
    """
    from peft import PeftModel, get_peft_model_state_dict

    folder = Path(folder)
    _refuse_second_adapter(policy)
    keys = _check_adapter(policy, folder)
    with without_known_warnings():
        model = PeftModel.from_pretrained(policy.model, str(folder), is_trainable=trainable)
    lost = set(get_peft_model_state_dict(model, save_embedding_layers=False)) ^ keys
    if lost:
        raise ValueError(f"the adapter in {folder} does not fit the model; first weight on one side only: {min(lost)}")
    return Policy(model.eval(), policy.tokenizer, policy.protocol, policy.name)


def _check_adapter(policy: Policy, folder: Path) -> set[str]:
    """Refuse an adapter that is damaged or not of this policy before anything is put on it; returns its weights."""
    if not (folder / BASE_FILE).is_file():
        raise ValueError(f"{folder} holds no {BASE_FILE}, so it is no adapter written by save_adapter")
    saved = _read_json(folder / BASE_FILE)
    if absent := {"name", "checksum", "sha256"} - set(saved):
        raise ValueError(
            f"{folder / BASE_FILE} lacks {min(absent)}: damaged, or written by an older version; train the run again"
        )
    for name in ADAPTER_FILES:
        # PEFT would take adapter_model.bin, a pickle, where the safetensors file is missing.
        got = file_sha256(folder / name) if (folder / name).is_file() else "missing"
        if got != (want := saved["sha256"].get(name)):
            raise ValueError(f"{folder / name}: sha256 is {got}, expected {want}; copy it again or train the run again")
    if saved["checksum"] != base_checksum(policy):
        raise ValueError(
            f"the adapter in {folder} was trained on {saved['name']!r} (checksum {saved['checksum']}), but the policy "
            f"is {policy.name!r} (checksum {base_checksum(policy)}); load the adapter's own base model"
        )
    rank, shapes = _read_json(folder / ADAPTER_FILES[0]).get("r"), _read_shapes(folder / ADAPTER_FILES[1])
    for key, shape in shapes.items():
        if ".lora_A." in key and shape[0] != rank:
            raise ValueError(
                f"the adapter in {folder} has rank {rank} by {ADAPTER_FILES[0]}, but {key} has rank {shape[0]}; take "
                "both files from one and the same adapter"
            )
    return set(shapes)


def _refuse_second_adapter(policy: Policy) -> None:
    if has_adapter(policy.model):
        raise ValueError(f"policy {policy.name!r} has an adapter already; start from a fresh load_policy")


def base_checksum(policy: Policy) -> str:
    """16 hex digits of the base weights: names, shapes and up to 1,024 values of each, rounded to bfloat16.

    A sample of the values is enough to tell two models apart and takes a moment for a large one; the rounding
    makes it the same for float32 and bfloat16 loads.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in sorted(policy.base.named_parameters()):
        if ".lora_" in name:
            continue
        values = parameter.detach().flatten()
        values = values[:: max(1, values.numel() // 1024)][:1024].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name.replace('.base_layer', '')} {tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def merged_model(policy: Policy) -> Any:
    """The plain model with the adapter merged into copies of the adapted weights; all else is shared.

    The policy's own weights are not written. Without an adapter this is the model itself.
    """
    if not has_adapter(policy.model):
        return policy.model
    base = policy.base
    shared = {id(t): t for t in (*base.parameters(), *base.buffers())}
    out = copy.deepcopy(base, memo=shared)
    for name, module in list(out.named_modules()):
        if hasattr(module, "lora_A"):
            parent, _, child = name.rpartition(".")
            setattr(out.get_submodule(parent), child, _merged_linear(module))
    return out.eval()


def _merged_linear(module: Any) -> nn.Linear:
    base = module.base_layer
    if not isinstance(base, nn.Linear):
        raise ValueError(f"an adapter on a {type(base).__name__} cannot be merged; adapt linear layers only")
    out = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    out.weight = nn.Parameter(merged_weight(module), requires_grad=False)
    out.bias = base.bias
    return out


@torch.no_grad()
def merged_weight(module: Any) -> Tensor:
    """The weight of a linear layer, with its active adapter added: `W + scale * B A`, added in float32."""
    if not hasattr(module, "lora_A"):
        return module.weight.detach()
    base = module.base_layer.weight
    weight = base.float()
    for key in module.active_adapters:
        weight = weight + module.scaling[key] * (module.lora_B[key].weight.float() @ module.lora_A[key].weight.float())
    return weight.to(base.dtype)


# ------------------------------------------------------------------------------------------ sampling


@torch.inference_mode()
def sample_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, greedy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row, with its log-probability and the entropy of the distribution it came from.

    Equation: `p = softmax(logits / T)`; the token is the first j with `p_0 + .. + p_j > u`;
    `H = -sum_j p_j log p_j` over the full vocabulary (arXiv 2603.03078, Eq. 2).

    Args:
        logits: (R, V), -inf allowed.
        uniforms: (R,) in [0, 1), one a row, so a row's token depends on its own stream only.
        temperature: T > 0.
        greedy: take the most likely token; log-probability and entropy stay those of p.

    Returns:
        ids (R,), log-probabilities in nats (R,), entropies in nats (R,).

    Example:
        >>> ids, logps, H = sample_tokens(torch.tensor([[2.0, 0.0]]), torch.tensor([0.5]), temperature=0.5)
        >>> ids.item(), round(logps.item(), 4)
        (0, -0.0181)
        >>> round(sample_tokens(torch.zeros(1, 4), torch.tensor([0.9]))[2].item(), 6)
        1.386294
    """
    logps = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)  # (R, V)
    probs = logps.exp()
    logps.clamp_(min=-1e5)  # 0 * -inf would be NaN in the entropy; no token with p > 0 is touched
    if greedy:
        ids = probs.argmax(-1, keepdim=True)
    else:
        cdf = probs.cumsum(-1)
        # just below 1, so that u * total stays below the total in float32 and no token with p = 0 is drawn
        target = uniforms.clamp(max=1 - 2**-22)[:, None] * cdf[:, -1:]
        ids = torch.searchsorted(cdf, target, right=True)
    return ids[:, 0], logps.gather(1, ids)[:, 0], -(probs * logps).sum(-1)


# ------------------------------------------------------------------------------------------ decoders


class Decoder(Interface):
    """A model with a key-value cache of R rows, each with a length of its own."""

    model_calls: int

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], capacity: int) -> None:
        """Compute each prompt once, all but its last id, and give row r a copy of prompt `rows[r]`."""

    def extend(self, rows: Tensor, ids: Tensor, positions: Tensor, lengths: Tensor) -> None:
        """Feed `ids` (N, C) to rows (N,) from `positions` (N,) on; of each line the first `lengths` (N,) ids count."""

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Feed one id a row at its position, both (R,); returns the next id's logits (R, V) in float32."""

    def keep(self, slots: Sequence[int]) -> None:
        """Row i becomes what row slots[i] was. A row that moves must come from behind the kept ones."""


def make_decoder(policy: Policy) -> Decoder:
    """The fused decoder where it applies (Qwen2 or Qwen3 in float32 on CPU), else the generic one."""
    if FusedDecoder.applies(policy.base):
        return FusedDecoder(policy.base)
    return GenericDecoder(merged_model(policy))


class _DecoderBase:
    """What both decoders share: prompts once a question, padding of ragged feeds, counting."""

    def __init__(self, model: Any) -> None:
        self.device = model.get_input_embeddings().weight.device
        self.model_calls = 0

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], capacity: int) -> None:
        slots = max(len(rows), len(prompts))
        self._allocate(slots, capacity)
        lengths = torch.tensor([len(p) - 1 for p in prompts])
        width = int(lengths.max())
        if width:
            ids = torch.tensor([[*p[:-1], *[0] * (width - len(p) + 1)] for p in prompts])
            self.extend(torch.arange(len(prompts)), ids, torch.zeros(len(prompts), dtype=torch.long), lengths)
            self._copy_prefix(torch.tensor(rows), width)

    @torch.inference_mode()
    def extend(self, rows: Tensor, ids: Tensor, positions: Tensor, lengths: Tensor) -> None:
        self.model_calls += 1
        # Ids behind a row's length are written behind its end, where the next real ids will overwrite them.
        grid = (positions[:, None] + torch.arange(ids.shape[1])).clamp(max=self.capacity - 1)
        self._forward(ids, grid, rows, want_logits=False)

    @torch.inference_mode()
    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        self.model_calls += 1
        return self._forward(ids[:, None], positions[:, None], None, want_logits=True)


def _causal_bias(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may look, the lowest number elsewhere: (N, C) positions -> (N, C, longest + 1)."""
    keys = torch.arange(int(positions.max()) + 1, device=positions.device)
    hidden = keys > positions[..., None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, torch.finfo(dtype).min)


class _RowCache(Cache):
    """A Hugging Face cache that writes each row at its own positions."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def aim(self, rows: Tensor | None, positions: Tensor) -> None:
        """Where the next forward writes and how far it looks."""
        self.rows, self.positions, self.width = rows, positions, int(positions.max()) + 1

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._write(self.keys, k, layer_idx), self._write(self.values, v, layer_idx)

    def _write(self, store: dict[int, Tensor], new: Tensor, layer: int) -> Tensor:  # new (N, heads, C, D)
        if layer not in store:
            store[layer] = new.new_zeros(self.slots, new.shape[1], self.capacity, new.shape[3])
        rows = torch.arange(len(new), device=new.device) if self.rows is None else self.rows
        store[layer][rows[:, None], :, self.positions] = new.transpose(1, 2)
        seen = store[layer][:, :, : self.width]
        return seen[: len(new)] if self.rows is None else seen[rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width - self.positions.shape[1]


class GenericDecoder(_DecoderBase):
    """Any causal model whose forward takes position ids and a four-dimensional attention mask.

    Raises:
        ValueError: a layer type without a key-value cache, or no position ids.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.model = model
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        positioned = "position_ids" in inspect.signature(model.forward).parameters
        if kinds - {"full_attention", "sliding_attention"} or not positioned:
            raise ValueError(f"{type(model).__name__} cannot be sampled: attention layers with position ids are needed")
        self.window = config.sliding_window if "sliding_attention" in kinds else None

    def _allocate(self, slots: int, capacity: int) -> None:
        if self.window and capacity > self.window:
            name = type(self.model).__name__
            raise ValueError(f"sequences may have {capacity} ids, but {name} looks back {self.window} only")
        self.capacity = capacity
        self.cache = _RowCache(slots, capacity)

    def _copy_prefix(self, prompts: Tensor, width: int) -> None:
        for store in (self.cache.keys, self.cache.values):
            for layer in store.values():
                layer[: len(prompts), :, :width] = layer[prompts.to(self.device), :, :width]

    @torch.inference_mode()
    def keep(self, slots: Sequence[int]) -> None:
        for store in (self.cache.keys, self.cache.values):
            for layer in store.values():
                for into, source in _moves(slots):
                    layer[into].copy_(layer[source])

    def _forward(self, ids: Tensor, positions: Tensor, rows: Tensor | None, want_logits: bool) -> Tensor:
        ids, positions = ids.to(self.device), positions.to(self.device)
        self.cache.aim(None if rows is None else rows.to(self.device), positions)
        mask = _causal_bias(positions, self.model.dtype)[:, None]  # (N, 1, C, T)
        call = self.model if want_logits else self.model.base_model
        out = call(input_ids=ids, position_ids=positions, attention_mask=mask, cache=self.cache, use_cache=True)
        return out.logits[:, -1].float() if want_logits else out.last_hidden_state


def _moves(slots: Sequence[int]) -> list[tuple[int, int]]:
    return [(i, s) for i, s in enumerate(slots) if i != s]


class FusedDecoder(_DecoderBase):
    """A Qwen2 or Qwen3 step with few, large operations: joined projections, one cache, rotation as complex product.

    The two halves of a head that the rotation mixes are interleaved in the weights, so that one complex product
    rotates queries and keys together; dot products do not change. The query scale is folded into the weights.
    """

    @staticmethod
    def applies(model: Any) -> bool:
        config = model.config
        return (
            config.model_type in ("qwen2", "qwen3")
            and model.device.type == "cpu"
            and model.dtype == torch.float32
            and config.hidden_act == "silu"
            and config.rope_parameters["rope_type"] == "default"
            and set(config.layer_types) == {"full_attention"}
            and model.model.layers[0].self_attn.o_proj.bias is None
        )

    @torch.inference_mode()
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        body, config = model.model, model.config
        self.eps = config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = body.layers[0].self_attn.head_dim
        self.embedding = body.embed_tokens.weight
        self.norm = body.norm.weight
        self.head = model.lm_head.weight.t()
        self.rotary = body.rotary_emb
        self.layers = [self._fuse(layer) for layer in body.layers]

    def _fuse(self, layer: Any) -> dict[str, Tensor | None]:
        attention, mlp = layer.self_attn, layer.mlp
        dim, half = self.head_dim, self.head_dim // 2
        order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()  # 0, half, 1, half + 1, ..
        normed = hasattr(attention, "q_norm")
        scale = dim**-0.5

        def interleave(tensor: Tensor) -> Tensor:  # (heads * dim, ...)
            return tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1)

        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        q_scale = 1.0 if normed else scale
        w_q, w_k, w_v = map(merged_weight, (q, k, v))
        weight = torch.cat([interleave(w_q) * q_scale, interleave(w_k), w_v])
        bias = None if q.bias is None else torch.cat([interleave(q.bias) * q_scale, interleave(k.bias), v.bias])
        qk_norm = None
        if normed:
            q_norm, k_norm = attention.q_norm.weight[order] * scale, attention.k_norm.weight[order]
            qk_norm = torch.cat([q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)])
        return {
            "norm1": layer.input_layernorm.weight,
            "qkv": weight.t().contiguous(),
            "bias": bias,
            "qk_norm": qk_norm,
            "out": merged_weight(attention.o_proj).t().contiguous(),
            "norm2": layer.post_attention_layernorm.weight,
            "gate_up": torch.cat([merged_weight(mlp.gate_proj), merged_weight(mlp.up_proj)]).t().contiguous(),
            "down": merged_weight(mlp.down_proj).t().contiguous(),
        }

    def _allocate(self, slots: int, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        shape = (2, slots, self.kv_heads, capacity, self.head_dim)
        self.cache = [torch.zeros(shape) for _ in self.layers]
        cos, sin = self.rotary(self.embedding, torch.arange(capacity)[None])
        half = self.head_dim // 2
        self.turns = torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]  # (capacity, 1, D / 2)
        lines = torch.arange(2 * slots * self.kv_heads).view(2, slots, self.kv_heads)
        self.lines = lines.transpose(0, 1).contiguous() * capacity  # (slots, 2, kv heads): where a cache line starts

    def _copy_prefix(self, prompts: Tensor, width: int) -> None:
        for cache in self.cache:
            cache[:, : len(prompts), :, :width] = cache[:, prompts, :, :width]

    @torch.inference_mode()
    def keep(self, slots: Sequence[int]) -> None:
        for cache in self.cache:
            used = cache[:, :, :, : self.used]
            for into, source in _moves(slots):  # a loop: index_select would first copy the whole slice
                used[:, into].copy_(used[:, source])

    def _forward(self, ids: Tensor, positions: Tensor, rows: Tensor | None, want_logits: bool) -> Tensor:
        n, c = ids.shape
        x = self.embedding[ids.flatten()]  # (N * C, hidden)
        turns = self.turns[positions.flatten()]
        lines = self.lines[:n] if rows is None else self.lines[rows]
        lines = (lines[:, None] + positions[:, :, None, None]).flatten()
        bias = self._attention_bias(positions)
        self.used = max(self.used, bias.shape[-1])
        for i, (layer, cache) in enumerate(zip(self.layers, self.cache, strict=True)):
            queries = self._write(layer, cache, x, turns, lines)
            if i == len(self.layers) - 1 and not want_logits:
                break  # the cache is complete; nobody reads what comes behind
            x = torch.addmm(x, self._attend(queries, cache, bias, rows, n, c), layer["out"])
            gate, up = (self._rms(x, layer["norm2"]) @ layer["gate_up"]).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer["down"])
        return self._rms(x, self.norm) @ self.head if want_logits else x

    def _attention_bias(self, positions: Tensor) -> Tensor:
        """(N, C) -> (N * groups, C * heads a group, T); with one query a row the heads share a line."""
        bias = _causal_bias(positions, torch.float32)
        bias = bias[:, None].expand(-1, self.kv_heads, -1, -1).flatten(0, 1)
        return bias if positions.shape[1] == 1 else bias.repeat_interleave(self.heads // self.kv_heads, 1)

    def _rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def _write(self, layer: dict[str, Any], cache: Tensor, x: Tensor, turns: Tensor, lines: Tensor) -> Tensor:
        """Project, rotate, store keys and values; returns the queries (N * C, heads, D)."""
        h = self._rms(x, layer["norm1"])
        qkv = h @ layer["qkv"] if layer["bias"] is None else torch.addmm(layer["bias"], h, layer["qkv"])
        qkv = qkv.view(len(x), -1, self.head_dim)
        qk = qkv[:, : self.heads + self.kv_heads]
        if layer["qk_norm"] is not None:
            qk = self._rms(qk, None).mul_(layer["qk_norm"])
        qk = torch.view_as_real(torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * turns).flatten(-2)
        kv = torch.cat([qk[:, self.heads :], qkv[:, self.heads + self.kv_heads :]], 1)
        cache.view(-1, self.head_dim).index_copy_(0, lines, kv.view(-1, self.head_dim))
        return qk[:, : self.heads]

    def _attend(self, queries: Tensor, cache: Tensor, bias: Tensor, rows: Tensor | None, n: int, c: int) -> Tensor:
        groups, dim, width = self.kv_heads, self.head_dim, bias.shape[-1]
        seen = cache[:, :n] if rows is None else cache[:, :, :, :width][:, rows]
        keys, values = seen.flatten(1, 2)[:, :, :width]  # (N * groups, T, D) each
        q = queries.view(n, c, groups, -1, dim).transpose(1, 2).reshape(n * groups, -1, dim)
        weights = torch.baddbmm(bias, q, keys.transpose(1, 2)).softmax(-1)
        out = torch.bmm(weights, values)  # (N * groups, C * heads a group, D)
        return out.view(n, groups, c, -1).transpose(1, 2).reshape(n * c, -1)
