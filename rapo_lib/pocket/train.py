"""How the pocket models are trained: supervised, on demonstrations, in a world of their own.

A base model learns the format and all skills half-way; the student and the teachers continue from it
with the habits that define them (data/README.md gives the reason of each number). Facts and names of
this training occur in no question.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rapo_lib.pocket.demonstrator import Demonstration, Habits
from rapo_lib.pocket.world import FAMILIES, Shape, World, sample_chain, split_names
from rapo_lib.traces import Protocol

BATCH, MICRO = 48, 24
_SINGLE = tuple(Shape(s, h, (f,), inner=False) for f in FAMILIES for s, h in ((2, 0), (2, 1), (3, 0), (3, 1), (4, 1)))
_SHORT = tuple(Shape(s, h) for s, h in ((2, 0), (3, 0), (3, 1), (4, 2))) + _SINGLE
_LONG = tuple(Shape(s, h) for s in (3, 4, 5, 6) for h in (0, 1, 2, 3) if h < s - 1)
_OTHER = (Shape(4, 1), Shape(5, 2))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of training: optimiser steps, what questions look like, and the demonstrator's habits."""

    steps: int
    shapes: tuple[Shape, ...]
    habits: Habits


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one model comes about: where it starts, its stages, the peak learning rate and its seed."""

    start: str | None
    stages: tuple[Stage, ...]
    learning_rate: float
    seed: int


RECIPES: dict[str, Recipe] = {
    "base": Recipe(
        None,
        (
            Stage(250, _SHORT, Habits(0.95, 0.6, 0.8, 0.97, 0.25)),
            Stage(450, _SHORT + _LONG, Habits(0.9, 0.5, 0.8, 0.95, 0.5)),
        ),
        3e-3,
        0,
    ),
    "student": Recipe("base", (Stage(800, _LONG + _SINGLE, Habits(0.9, 0.04)),), 2e-3, 1),
    "teacher": Recipe("base", (Stage(500, _LONG + _SINGLE, Habits(0.97, 0.93, 0.95, 0.98, 0.25)),), 2e-3, 2),
    "weak": Recipe("base", (Stage(500, _LONG + _SINGLE, Habits(0.88, 0.5, 0.7, 0.95, 0.25)),), 2e-3, 3),
    "middling": Recipe("base", (Stage(500, _LONG + _SINGLE, Habits(0.93, 0.78, 0.85, 0.96, 0.25)),), 2e-3, 4),
    "searcher": Recipe(
        "base",
        (Stage(500, _LONG + _SINGLE, Habits(0.97, 0.9, 0.95, 0.98, 0.25, hard_by_skill=(("convert", 0.3),))),),
        2e-3,
        5,
    ),
    "reckoner": Recipe(
        "base",
        (Stage(500, _LONG + _SINGLE, Habits(0.97, 0.5, 0.95, 0.98, 0.25, hard_by_skill=(("convert", 0.93),))),),
        2e-3,
        6,
    ),
    "wasteful": Recipe(
        "base",
        (Stage(800, _LONG + _SINGLE, Habits(0.97, 0.93, 0.95, 0.98, 0.25, rechecks=0.95)),),
        2e-3,
        7,
    ),
}


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of about 0.35 M parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def sample_examples(protocol: Protocol, stage: Stage, rng: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Endless (ids, mask) pairs; the mask is 1 at the demonstrator's own tokens."""
    names = split_names("pretrain")
    while True:
        world = World(f"pretrain{rng.random()}", names)
        chain = sample_chain(world, rng.choice(stage.shapes), rng)
        demo = Demonstration(chain, stage.habits, rng, lambda w=world: sample_chain(w, rng.choice(_OTHER), rng))
        ids = list(protocol.prompt_ids(chain.text))
        mask = [0] * len(ids)
        encoded = protocol.tokenizer([p.text for p in demo.pieces], add_special_tokens=False)["input_ids"]
        for piece, part in zip(demo.pieces, encoded, strict=True):
            ids += part
            mask += [int(piece.own)] * len(part)
        yield ids + [protocol.tokenizer.eos_token_id], mask + [1]


def train_model(recipe: Recipe, model: Qwen3ForCausalLM, protocol: Protocol, log=print) -> dict[str, float]:
    """Train in place; the learning rate warms up, stays, and falls to zero over the last 40 %.

    Returns:
        loss (nats a token, mean of the last 50 steps), seconds, tokens.
    """
    torch.manual_seed(recipe.seed)
    rng = random.Random(f"sft|{recipe.seed}")
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    total, step, tokens, losses, start = sum(s.steps for s in recipe.stages), 0, 0, [], time.perf_counter()
    for stage in recipe.stages:
        examples = sample_examples(protocol, stage, rng)
        for _ in range(stage.steps):
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate * min(1, (step + 1) / 40, (total - step) / (0.4 * total))
            loss, n = _update(model, optimiser, [next(examples) for _ in range(BATCH)])
            losses, tokens, step = [*losses[-49:], loss], tokens + n, step + 1
            if step % 50 == 0:
                speed = tokens / (time.perf_counter() - start)
                log(f"  step {step}/{total} loss {sum(losses) / len(losses):.4f} {speed:.0f} tokens/s")
    return {"loss": sum(losses) / len(losses), "seconds": time.perf_counter() - start, "tokens": float(tokens)}


def _update(model: Qwen3ForCausalLM, optimiser: torch.optim.Optimizer, batch: list) -> tuple[float, int]:
    batch = sorted(batch, key=lambda e: len(e[0]))
    weight, loss, n = sum(sum(m) for _, m in batch), 0.0, 0
    optimiser.zero_grad()
    for part in (batch[i : i + MICRO] for i in range(0, len(batch), MICRO)):
        length = max(len(ids) for ids, _ in part)
        x = torch.tensor(
            [ids + [0] * (length - len(ids)) for ids, _ in part]
        )  # (MICRO, L), right padding needs no mask
        own = torch.tensor([m + [0] * (length - len(m)) for _, m in part]).bool()[:, 1:]
        hidden = model.model(input_ids=x).last_hidden_state[:, :-1][own]  # (own tokens, D)
        part_loss = F.cross_entropy(model.lm_head(hidden), x[:, 1:][own], reduction="sum") / weight
        part_loss.backward()
        loss, n = loss + part_loss.item(), n + x.numel()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss, n


def build_model(
    name: str, folder: Path, tokenizer: PreTrainedTokenizerFast, threads: int, log=print
) -> dict[str, float]:
    """Train one model of RECIPES and save it with its tokenizer under folder/name."""
    torch.set_num_threads(threads)
    recipe = RECIPES[name]
    torch.manual_seed(recipe.seed)
    model = make_model(tokenizer) if recipe.start is None else Qwen3ForCausalLM.from_pretrained(folder / recipe.start)
    log(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    report = train_model(recipe, model.train(), Protocol(tokenizer), log)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return report
