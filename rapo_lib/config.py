"""One dial for everything: the fields of a run, the profiles, and the random streams.

A run is a pure function of its `RunConfig`. A profile (`smoke`, `pocket`, `study`, `qwen`) sets the
rest; overrides name a field, and an unknown name is an error. `field_table()` lists each field with
its symbol and source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
RESULTS = ROOT / "results"


def child_rng(seed: int, *names: str | int) -> np.random.Generator:
    """A random stream of its own for each purpose, so that one more draw shifts nothing else.

    Args:
        seed: the run's seed.
        names: purpose and keys, such as `"buffer.noise", rl_step, question_id, place`.

    Example:
        >>> child_rng(0, "a").random() == child_rng(0, "a").random() != child_rng(0, "b").random()
        True
    """
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def _f(default: Any, doc: str, symbol: str = "", source: str = "") -> Any:
    return field(default=default, metadata={"doc": doc, "symbol": symbol, "source": source})


_P = "arXiv 2603.03078"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a training run depends on."""

    method: str = _f("rapo", "name in methods.METHODS: which arguments rollout and objective get")
    seed: int = _f(0, "seed of every random stream of the run")
    questions: str = _f(
        "pocket", "question set: pocket, a name in benchmarks.py, or a folder with train, validation and test files"
    )
    regime: str = _f("exploration", "pocket questions: exploration, halfway or easy", source="feasibility")
    search: str = _f("", "address of a Search-R1-compatible server; empty: the question set's own documents")
    student: str = _f("data/pocket/models/student", "policy to train: folder or hub name")
    buffer: str = _f(
        "teacher",
        "teachers of the step-trace buffer: teacher, weak, .., several as teacher+weak, teacher&weak (the first one's, "
        "at most as many of a question as the second has), or a JSONL path",
    )
    encoder: str = _f(
        "tfidf", "of the buffer's keys: tfidf, or minilm as in the paper", source=f"{_P}, settings (minilm)"
    )
    index: str = _f("exact", "of the buffer: exact, or ivf for 100,000 keys and more")
    n_trajectories: int = _f(0, "trajectories that buffer, SFT and LUFFY get, drawn by the seed; 0: all", source="ours")
    rl_steps: int = _f(40, "RL steps: one rollout batch and `updates_per_step` optimiser steps each")
    questions_per_step: int = _f(6, "questions in one rollout batch", source=f"{_P}, settings (32)")
    group_size: int = _f(16, "rollouts a question", "G", f"{_P}, settings")
    n_hybrid: int = _f(8, "rollouts of a group that may retrieve", "N_hybrid", f"{_P}, settings")
    retrieval_prob: float = _f(0.5, "probability of a retrieval before each later step", "p", f"{_P}, Eq. 4")
    gate_nats: float = _f(
        0.037, "step entropy above which rapo_gated retrieves; the untrained student's median", source="ours"
    )
    n_off_policy: int = _f(2, "the teacher's trajectories in a group of LUFFY", source="arXiv 2504.14945 (1 of 8)")
    shaping_weight: float = _f(0.05, "weight of the retrieved fraction in the importance ratio", "m", f"{_P}, Eq. 8")
    advantage_weight: float = _f(0.2, "weight of the retrieval advantage", "a", f"{_P}, Eq. 10")
    noise_prob: float = _f(
        0.0, "probability that a retrieved trace is replaced by a random one", "p_noise", f"{_P}, Fig. 6"
    )
    leak_guard: bool = _f(True, "insert nothing when a trace already holds the gold answer", source="ours")
    exclude_same_question: bool = _f(False, "never retrieve from trajectories of the same question", source="ours")
    extra_steps: int = _f(0, "steps beyond the question's budget", source="ours")
    reward: str = _f("pocket", "outcome reward in training, in rewards.REWARDS; evaluations count right answers")
    learning_rate: float = _f(2e-3, "constant learning rate of AdamW on the adapter")
    lora_r: int = _f(16, "LoRA rank; alpha is twice the rank, all linear layers, no dropout")
    clip: float = _f(0.28, "clip range of the importance ratio, both sides", "epsilon", f"{_P}, settings")
    kl_coef: float = _f(0.0, "weight of the KL term", "beta", f"{_P}, settings")
    updates_per_step: int = _f(2, "optimiser steps per rollout batch", source=f"{_P}, mini-batch of half")
    generator: str = _f("own", "who samples in training: own, or vllm (a GPU and the package vllm; never tried)")
    temperature: float = _f(1.0, "sampling temperature in training and evaluation")
    max_completion: int = _f(224, "completion tokens at most, inserted ones included")
    max_calls: int = _f(8, "tool calls a rollout at most")
    sft_epochs: float = _f(3.0, "passes over the teacher's trajectories (method sft only)")
    rollouts_at_once: int = _f(0, "rollouts sampled at once by a process, for memory; 0: all of an RL step")
    micro_batch: int = _f(0, "rollouts of one backward pass, for memory; 0: what trainer.default_micro_batch says")
    eval_every: int = _f(5, "RL steps between evaluations on the validation questions")
    n_eval: int = _f(96, "validation questions at each of them")
    n_final: int = _f(200, "test questions after training")
    threads: int = _f(1, "torch threads of the run")

    def hash(self) -> str:
        """8 hex digits of the configuration; run folders end in them."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def replace(self, **overrides: Any) -> RunConfig:
        """A copy with other values.

        Raises:
            ValueError: a name that is no field, or a value of another type.
        """
        return dataclasses.replace(self, **_checked(type(self), overrides))


def _checked(cls: type, overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides with the fields' own types; JSON and papermill give an int where a float stands."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    out = {}
    for name, value in overrides.items():
        if name not in fields:
            raise ValueError(f"unknown setting {name!r}; allowed: {', '.join(fields)}")
        want = type(fields[name].default)
        if want is float and type(value) is int:
            value = float(value)
        if type(value) is not want:
            raise ValueError(f"{name} is {value!r} ({type(value).__name__}); a {want.__name__} is expected")
        out[name] = value
    return out


def field_table(cls: type = RunConfig) -> list[dict[str, Any]]:
    """One row a field: name, default, symbol, meaning, source."""
    return [{"field": f.name, "default": f.default, **f.metadata} for f in dataclasses.fields(cls)]


#: Methods that get `seeds_main` seeds; the others get `seeds`.
MAIN_METHODS = ("grpo", "rapo")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How much is run: one dial for all notebooks.

    Example:
        >>> smoke = load_profile("smoke")
        >>> [c.seed for c in smoke.configs("grpo")]
        [0]
        >>> smoke.configs("rapo", noise_prob=1.0)[0].noise_prob
        1.0
    """

    name: str = _f("", "smoke, pocket, study or qwen")
    about: str = _f("", "what the profile is for")
    seeds_main: int = _f(5, "seeds of GRPO and of RAPO")
    seeds: int = _f(1, "seeds of every other method and variant")
    noise_probs: tuple[float, ...] = _f((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "grid of the noise experiment", "p_noise")
    jobs: int = _f(2, "training runs at once, one thread each")
    n_gate: int = _f(1000, "rollouts each way of the check before any RL")
    offline: bool = _f(True, "everything needed lies in the repository: no hub is asked")
    run: Mapping[str, Any] = field(
        default_factory=dict, metadata={"doc": "RunConfig fields that differ from the default"}
    )
    sources: Mapping[str, str] = field(default_factory=dict, metadata={"doc": "where each value of `run` comes from"})

    def config(self, method: str, seed: int = 0, **overrides: Any) -> RunConfig:
        """The configuration of one run in this profile; `overrides` are RunConfig fields."""
        return RunConfig().replace(**{**self.run, **overrides, "method": method, "seed": seed})

    def configs(self, method: str, n_seeds: int | None = None, **overrides: Any) -> list[RunConfig]:
        """One configuration a seed, 0, 1, ..; by default as many as the profile gives the method.

        The variants of a method (overrides of anything but the profile's own values) get `seeds`.
        """
        if n_seeds is None:
            n_seeds = self.seeds_main if method in MAIN_METHODS and not overrides else self.seeds
        return [self.config(method, seed, **overrides) for seed in range(n_seeds)]

    def hash(self) -> str:
        """8 hex digits of everything but `jobs`, which changes no result."""
        row = dataclasses.asdict(self) | {"jobs": 0}
        return hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=4).hexdigest()


#: Settings of the profile `paper`: name -> (value, where it comes from).
_PAPER: dict[str, tuple[Any, str]] = {
    "student": ("Qwen/Qwen2.5-7B-Instruct", f"{_P}, settings: one of three students"),
    "questions": ("hotpotqa", f"{_P}: one of its sets; the paper trains on a mixture that is not published"),
    "search": ("http://127.0.0.1:8000", f"{_P}, settings: a Wikipedia dump behind MiniLM, three passages a call"),
    "buffer": ("results/teacher_hotpotqa.jsonl", "ours: made by rapo_lib.teach; the paper's teacher is AEPO-Qwen3-14B"),
    "encoder": ("minilm", f"{_P}, settings: all-MiniLM-L6-v2"),
    "questions_per_step": (32, f"{_P}, settings"),
    "group_size": (16, f"{_P}, settings"),
    "n_hybrid": (8, f"{_P}, settings"),
    "updates_per_step": (2, f"{_P}, settings: mini-batches of 16 questions"),
    "retrieval_prob": (0.5, f"{_P}, settings"),
    "shaping_weight": (0.05, f"{_P}, settings"),
    "advantage_weight": (0.2, f"{_P}, settings"),
    "clip": (0.28, f"{_P}, settings"),
    "kl_coef": (0.0, f"{_P}, settings"),
    "learning_rate": (
        1e-5,
        "ours: an adapter takes about ten times the 1e-6 of the released scripts' full fine-tuning",
    ),
    "lora_r": (64, "ours: the paper tunes all weights"),
    "max_completion": (4096, f"{_P}, released scripts: response length"),
    "max_calls": (3, f"{_P}, released scripts"),
    "rl_steps": (300, "ours: the paper gives three epochs of a set whose size it does not state"),
    "reward": ("released", f"{_P}, released code: -1, F1, +0.1"),
    "micro_batch": (1, "ours: memory"),
    "rollouts_at_once": (64, "ours: memory"),
    "eval_every": (20, "ours"),
    "n_eval": (256, "ours"),
    "n_final": (1000, "ours"),
    "leak_guard": (False, f"{_P}: it has none"),
}

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile(
            name="smoke",
            about="every notebook from end to end in a few minutes, to see that it runs; its numbers mean nothing",
            seeds_main=1,
            noise_probs=(0.0, 1.0),
            n_gate=96,
            run={"rl_steps": 2, "questions_per_step": 2, "group_size": 8, "n_hybrid": 4, "eval_every": 2}
            | {"n_eval": 8, "n_final": 16, "sft_epochs": 0.1},
        ),
        Profile(name="pocket", about="the default walk-through on a laptop"),
        Profile(
            name="study",
            about="five or more seeds of every comparison and the full noise grid: hours",
            seeds=5,
        ),
        Profile(
            name="qwen",
            about="real Qwen weights from a hub or a local folder, in the pocket world; meant for a GPU; not run yet",
            seeds_main=1,
            noise_probs=(0.0, 1.0),
            jobs=1,
            offline=False,
            run={"student": "Qwen/Qwen2.5-0.5B-Instruct", "learning_rate": 1e-5, "questions_per_step": 32}
            | {"max_completion": 2048, "rl_steps": 200, "eval_every": 20, "micro_batch": 8, "rollouts_at_once": 128},
        ),
        Profile(
            name="paper",
            about="the paper's settings for reasoning tasks, with an adapter in place of full fine-tuning; not run yet",
            seeds_main=1,
            jobs=1,
            offline=False,
            run={name: value for name, (value, _) in _PAPER.items()},
            sources={name: source for name, (_, source) in _PAPER.items()},
        ),
    )
}


#: For command lines.
PROFILE_HELP = f"{', '.join(PROFILES)}, or your own: NAME stands for results/NAME/profile.json"


def own_profile(name: str) -> Path:
    """Where a profile of one's own stands: beside its results, `{"like": "qwen", "student": "/data/my-qwen"}`."""
    return Path(os.environ.get("RAPO_RESULTS", RESULTS)) / name / "profile.json"


def load_profile(name: str, **overrides: Any) -> Profile:
    """A profile by name; overrides name a field of Profile or of RunConfig.

    A name that is not in PROFILES is one of your own when `own_profile` exists: a JSON object with `like`, the name of
    a profile here, and the fields of Profile or RunConfig that differ from it.

    Raises:
        ValueError: unknown profile or field, or a value of another type.

    Example:
        >>> load_profile("pocket", rl_steps=3, seeds_main=4).config("grpo").rl_steps
        3
    """
    if name not in PROFILES:
        return _load_own(name, overrides)
    profile = PROFILES[name]
    own = {f.name for f in dataclasses.fields(Profile)} - {"name", "about", "run"}
    mine = {k: tuple(v) if isinstance(v, list) else v for k, v in overrides.items() if k in own}
    runs = {k: v for k, v in overrides.items() if k not in own}
    allowed = own | {f.name for f in dataclasses.fields(RunConfig)}
    if unknown := sorted(set(runs) - allowed):
        raise ValueError(f"unknown setting {unknown[0]!r}; allowed: {', '.join(sorted(allowed))}")
    return dataclasses.replace(profile, **_checked(Profile, mine), run={**profile.run, **_checked(RunConfig, runs)})


def _load_own(name: str, overrides: Mapping[str, Any]) -> Profile:
    path = own_profile(name) if name and Path(name).name == name else None
    if path is None or not path.is_file():
        raise ValueError(f"unknown profile {name!r}; allowed: {PROFILE_HELP}")
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(row, dict) or row.get("like") not in PROFILES:
            raise ValueError(f"expected an object with like, one of {', '.join(PROFILES)}")
        like = load_profile(row.pop("like"), **row | overrides)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return dataclasses.replace(like, name=name, about=f"{like.name} with the settings of {path.name}", sources={})
