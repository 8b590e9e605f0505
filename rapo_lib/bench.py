"""Side-by-side speed figures: `python -m rapo_lib.bench rollout` (one sub-bench a name, all in one process).

A bench prints ours beside what a reader would use otherwise, measured in the same run on the same machine. Times
are the best of a few rounds, in which the contestants take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rapo_lib import buffer, sandbox, trainer
from rapo_lib.config import DATA
from rapo_lib.policy import Policy, add_lora, load_policy, merged_model
from rapo_lib.rollout import RolloutRequest, SamplingLimits, sample_rollouts
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import Toolbox, make_pocket_toolbox
from rapo_lib.traces import STOP_TAGS, parse_step


def main(argv: list[str] | None = None) -> None:
    """Run one bench by name."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.bench", description=__doc__)
    parser.add_argument("bench", choices=sorted(BENCHES))
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many rounds counts")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    BENCHES[options.bench](options)


def fp32_peak(seconds: float = 1.0, n: int = 1024) -> float:
    """FLOP a second of a large float32 matrix product with the threads in use: what this machine can do at best."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds:
        t = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - t)
    return 2 * n**3 / best


# ------------------------------------------------------------------------------------------- rollout


@dataclass(frozen=True)
class RolloutTiming:
    """One way of sampling: seconds without tools, tool seconds, ids written, ids read besides."""

    sec: float
    tools_sec: float
    generated: int
    fed: int

    @property
    def rate(self) -> float:
        return self.generated / self.sec


LIMITS = SamplingLimits(max_completion=224, max_calls=8, max_steps=6)


def bench_rollout(options: argparse.Namespace, n_questions: int = 8, group_size: int = 16) -> None:
    """Multi-step rollouts: our engine, one `generate` a step, and one plain `generate` of as many ids."""
    policy = add_lora(load_policy(DATA / "pocket" / "models" / "student"), r=16, seed=0)
    questions = load_pocket_questions("exploration", "train")[:n_questions]
    requests = [RolloutRequest(q, place) for q in questions for place in range(group_size)]
    toolbox = make_pocket_toolbox("train")
    ours: Callable[[], RolloutTiming] = lambda: _time_ours(policy, requests, toolbox)
    new_ids = round(ours().generated / len(requests))
    contestants: dict[str, Callable[[], RolloutTiming]] = {
        "a  our engine": ours,
        "b  one model.generate a step": lambda: _time_generate_steps(policy, requests, toolbox),
        "c  plain model.generate, no tools": lambda: _time_generate(policy, requests, new_ids, policy.model),
        "c' the same with the adapter merged": lambda: _time_generate(policy, requests, new_ids, merged_model(policy)),
    }
    best: dict[str, RolloutTiming] = {}
    for _ in range(options.rounds):
        for name, contestant in contestants.items():
            timing = contestant()
            best[name] = max(best.get(name, timing), timing, key=lambda t: t.rate)
    _print_rollout(policy, len(requests), options.threads, best)


def _print_rollout(policy: Policy, n: int, threads: int, best: dict[str, RolloutTiming]) -> None:
    parameters = sum(p.numel() for name, p in policy.base.named_parameters() if ".lora_" not in name)
    peak = fp32_peak()
    print(f"{n} rollouts, {parameters:,} parameters and a LoRA adapter, {threads} thread(s), best rounds")
    print(f"float32 peak of a matrix product: {peak / 1e9:.0f} GFLOP/s; share of it: 2 FLOP a parameter and id read")
    print(f"{'':38}{'generated/s':>12}{'ids':>8}{'read besides':>14}{'sec':>7}{'tools sec':>11}{'peak':>7}")
    for name, t in best.items():
        share = 2 * parameters * (t.generated + t.fed) / t.sec / peak
        print(f"{name:38}{t.rate:12,.0f}{t.generated:8,}{t.fed:14,}{t.sec:7.2f}{t.tools_sec:11.2f}{share:7.1%}")
    a, b, c, merged = (t.rate for t in best.values())
    print(f"a/b = {a / b:.2f} (goal 2.5)   a/c = {a / c:.2f} (goal 1.5)   a/c' = {a / merged:.2f}   (tools left out)")


def _time_ours(policy: Policy, requests: list[RolloutRequest], toolbox: Toolbox) -> RolloutTiming:
    s = sample_rollouts(policy, requests, toolbox, limits=LIMITS, seed=0).stats
    return RolloutTiming(s.rollout_sec - s.tools_sec, s.tools_sec, s.generated_tokens, s.fed_tokens)


def _time_generate_steps(policy: Policy, requests: list[RolloutRequest], toolbox: Toolbox) -> RolloutTiming:
    """What a tool loop around `generate` does (TRL's, for one): each step reads the whole context again."""
    began = time.perf_counter()
    stop_ids = [*policy.eos_ids, *policy.tokenizer.convert_tokens_to_ids(list(STOP_TAGS))]
    prompts = [policy.protocol.prompt_ids(r.question.text) for r in requests]
    rows = [(list(ids), len(ids), r.question.max_steps) for ids, r in zip(prompts, requests, strict=True)]
    tools_sec, generated, fed = 0.0, 0, 0
    while rows:
        left = LIMITS.max_completion - min(len(ids) - n for ids, n, _ in rows)
        fed += sum(len(ids) for ids, _, _ in rows)
        outputs = _generate(policy, policy.model, [ids for ids, _, _ in rows], left, eos_token_id=stop_ids)
        generated += sum(map(len, outputs))
        steps = [parse_step(policy.protocol.decode(o)).action for o in outputs]
        going = [i for i, action in enumerate(steps) if action and rows[i][2] > 0]
        t = time.perf_counter()
        results = toolbox.run([steps[i] for i in going])
        tools_sec += time.perf_counter() - t
        rows = [
            ([*rows[i][0], *outputs[i], *policy.protocol.observation_ids(result.text)], rows[i][1], rows[i][2] - 1)
            for i, result in zip(going, results, strict=True)
        ]
        rows = [(ids, n, left) for ids, n, left in rows if len(ids) - n < LIMITS.max_completion]
    return RolloutTiming(time.perf_counter() - began - tools_sec, tools_sec, generated, fed)


def _time_generate(policy: Policy, requests: list[RolloutRequest], new_ids: int, model: Any) -> RolloutTiming:
    began = time.perf_counter()
    prompts = [list(policy.protocol.prompt_ids(r.question.text)) for r in requests]
    _generate(policy, model, prompts, new_ids, min_new_tokens=new_ids)
    return RolloutTiming(time.perf_counter() - began, 0.0, new_ids * len(requests), sum(map(len, prompts)))


@torch.inference_mode()
def _generate(
    policy: Policy, model: Any, sequences: list[list[int]], max_new_tokens: int, **settings: Any
) -> list[list[int]]:
    """One padded `generate` call at temperature 1; the new ids of each row up to its first stop id."""
    width, pad = max(map(len, sequences)), policy.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    sampling = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **(sampling | settings))
    new = out[:, width:].tolist()
    return [row[: row.index(pad)] if pad in row else row for row in new]


BENCHES: dict[str, Callable[[argparse.Namespace], None]] = {
    "rollout": bench_rollout,
    "update": trainer.bench,
    "buffer": buffer.bench,
    "sandbox": sandbox.bench,
}

if __name__ == "__main__":
    main()
