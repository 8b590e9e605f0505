"""Small world for the trainer's tests: a tiny policy with a trained-looking adapter, and canned rollouts.

Run as a script it trains a few RL steps, in one process and in two, and writes what each did.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from conftest import FakeQuestion, FakeToolbox, make_model, make_tokenizer

from rapo_lib.config import RunConfig, child_rng
from rapo_lib.methods import METHODS
from rapo_lib.policy import Policy, add_lora
from rapo_lib.rollout import RolloutBatch, RolloutStats
from rapo_lib.traces import Protocol, Rollout, Segment
from rapo_lib.trainer import RAPOTrainer, score_rollouts

QUESTIONS = [FakeQuestion(f"q{i}", f"what is the code {i} of the hotel?", max_steps=3) for i in range(4)]
TOKENIZER = make_tokenizer()
VOCAB = len(TOKENIZER)


def small_config(**changes: Any) -> RunConfig:
    sizes = dict(
        rl_steps=2, questions_per_step=2, group_size=4, n_hybrid=2, max_completion=40, max_calls=3, learning_rate=2e-3
    )
    return RunConfig().replace(**(sizes | changes))


def make_policy(seed: int = 0, r: int = 4) -> Policy:
    """A tiny policy whose adapter already does something (with B = 0 half of the gradients would vanish)."""
    policy = add_lora(Policy(make_model(TOKENIZER), TOKENIZER, Protocol(TOKENIZER), "tiny"), r, seed)
    for i, (name, p) in enumerate(policy.model.named_parameters()):
        if "lora_B" in name:
            p.data.copy_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return policy


def adapter(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in policy.model.named_parameters() if p.requires_grad}


def canned_rollout(
    policy: Policy, question: FakeQuestion, place: int, rl_step: int, hybrid: bool, noise: float
) -> Rollout:
    """Random ids: own, tool, perhaps retrieval, own; the sampler's log-probabilities are the policy's plus noise."""
    rng = child_rng(7, question.id, place, rl_step)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(5, VOCAB, n).tolist())

    def own(n: int) -> Segment:
        return Segment("policy", ids(n), (0.0,) * n, tuple(rng.uniform(0.1, 1.5, n).tolist()))

    segments = [
        own(int(rng.integers(2, 7))),
        Segment("tool", ids(3), info={"tool": "search", "query": "x", "ok": True}),
    ]
    if hybrid:
        segments.append(Segment("retrieval", ids(int(rng.integers(3, 9)))))
    segments.append(own(int(rng.integers(2, 9))))
    prompt = policy.protocol.prompt_ids(question.text + " where" * int(question.id[1:]))  # prompts of several lengths
    reward = float(place in (0, 3) if question.id in ("q0", "q2") else place == 1)
    draft = Rollout(question.id, prompt, segments, place, hybrid, "answer", reward)
    (logps,) = score_rollouts(policy, [draft])
    return with_logps(draft, [x + noise * float(rng.normal()) for x in logps])


def with_logps(rollout: Rollout, logps: Sequence[float]) -> Rollout:
    segments, at = [], 0
    for s in rollout.segments:
        mine = tuple(logps[at : at + len(s.ids)]) if s.origin == "policy" else ()
        segments.append(Segment(s.origin, s.ids, mine, s.entropies, s.info))
        at += len(s.ids)
    rest = (rollout.place, rollout.hybrid, rollout.end_reason, rollout.reward)
    return Rollout(rollout.question_id, rollout.prompt_ids, segments, *rest)


class Canned:
    """A sampler that returns the same rollouts whenever it is asked for the same question, place and RL step."""

    def __init__(self, noise: float = 0.0, edit: Any = None) -> None:
        self.noise, self.edit, self.requests = noise, edit, []
        self.made: dict[tuple[str, int, int], Rollout] = {}

    def __call__(self, policy: Any, requests: Any, toolbox: Any, *, stream: tuple[Any, ...], **_: Any) -> RolloutBatch:
        self.requests.append(list(requests))
        rollouts = [self.rollout(policy, q.question, q.place, stream[1], q.hybrid) for q in requests]
        return RolloutBatch(rollouts, RolloutStats())

    def rollout(self, policy: Policy, question: FakeQuestion, place: int, rl_step: int, hybrid: bool) -> Rollout:
        key = question.id, place, rl_step
        if key not in self.made:
            made = canned_rollout(policy, question, place, rl_step, hybrid, self.noise)
            self.made[key] = self.edit(made, rl_step) if self.edit else made
        return self.made[key]


def make_trainer(
    policy: Policy, config: RunConfig, method: str, folder: Any, sampler: Any = None, **more: Any
) -> RAPOTrainer:
    retriever = FakeRetriever() if METHODS[method].retrieves else None
    sampling = {} if sampler is None else {"sampler": sampler}
    more = {"reward": (lambda r, q, p: r.reward) if sampler else coin_reward} | more
    return RAPOTrainer(policy, QUESTIONS, FakeToolbox(), retriever, config, METHODS[method], folder, **sampling, **more)


class FakeRetriever:
    """Stands for a retriever where the rollouts are canned."""

    unit = "step"


def coin_reward(rollout: Rollout, question: Any, protocol: Any) -> float:
    """A reward that random rollouts earn about half of the time, a function of their ids alone."""
    return float(sum(rollout.completion_ids) % 2)


def main(folder: Path, rank: int, n_processes: int, port: int) -> None:
    """Train on real samples, twice, and save adapters, advantages, rollouts and metrics."""
    if n_processes > 1:  # what torchrun sets
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_processes, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    out = {name: train_and_keep(folder / name, **case) for name, case in CASES.items()}
    torch.save(out, folder / f"rank{rank}.pt")


def in_processes(folder: Path, n_processes: int, port: int) -> None:
    """Train in processes of their own, forked so that the libraries are read once."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(folder, rank, n_processes, port)) for rank in range(n_processes)]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    while running and not any(rank.exitcode for rank in ranks):  # a rank whose partner is gone would wait for it
        for ended in wait(list(running)):
            running.pop(ended).join()
    for rank in running.values():
        rank.kill()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"{n_processes} processes ended with {[rank.exitcode for rank in ranks]}")


#: With two processes: `split` has one group, its on-policy half on rank 0 and its hybrid half on rank 1; `idle` has two
#: groups, and the one on rank 1 has no signal, so that rank has nothing to score.
CASES: dict[str, dict[str, Any]] = {
    "split": dict(questions_per_step=1, group_size=6, n_hybrid=3),
    "idle": dict(questions_per_step=2, group_size=6, n_hybrid=3, rl_steps=1, seed=1),  # takes q3 and q1
}


def train_and_keep(folder: Path, **changes: Any) -> dict[str, Any]:
    policy, log, advantages = make_policy(), [], []
    trainer = make_trainer(
        policy,
        small_config(updates_per_step=1, **changes),
        "rapo_no_reward",
        folder,
        on_rl_step=lambda row, rollouts: log.append((row, rollouts)),
        when_to_retrieve=lambda state, rng: False,
        reward=coin_reward if folder.name == "split" else lambda r, q, p: coin_reward(r, q, p) * (q.id == "q3"),
    )
    inner = trainer._advantages
    trainer._advantages = lambda device: advantages.append(inner(device)) or advantages[-1]
    trainer.train()
    return dict(
        n_processes=trainer.accelerator.num_processes,
        adapter=adapter(policy),
        advantages=[trainer.accelerator.gather(a) for a in advantages],
        local_signal=[bool(a.any()) for a in advantages],
        rollouts=[[r.to_dict() for r in rollouts] for _, rollouts in log],
        metrics=[{k: v for k, v in row.items() if not k.endswith("_sec")} for row, _ in log],
    )


if __name__ == "__main__":
    for name, n in (("one", 1), ("two", 2)):
        in_processes(Path(sys.argv[1]) / name, n, int(sys.argv[2]))
