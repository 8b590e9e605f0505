"""Rollouts written by vLLM, a turn at a time, with tools, retrieval and limits as in `rapo_lib.rollout`.

`RunConfig.generator = "vllm"` chooses it for training; evaluations keep the package's own decoder. The engine is the
one that TRL's GRPOTrainer starts inside of each training process (`use_vllm`, colocate mode) and gives the new weights
to at each RL step. The engine writes a turn up to a closing tag; what `rapo_lib.rollout` does at the boundary is the
same code. When all rollouts are finished the policy itself scores them once: log-probabilities and entropies are its
own and exact (arXiv 2603.03078, Eq. 2), not the engine's.

**Not tried with vLLM: it needs a GPU.** Tests put another engine in its place and compare every id, log-probability
and entropy with the package's own decoder.

What differs from the own decoder:
1. The engine draws its own random numbers, so a run cannot be repeated exactly, and one that is taken up again goes on
   otherwise.
2. vLLM's probabilities differ a little from the model's; the difference is not corrected.
3. Entropies are known only when a rollout is over, so methods that retrieve by entropy are refused.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rapo_lib.policy import Policy
from rapo_lib.rollout import RolloutBatch, RolloutRequest, SamplingLimits, WhenToRetrieve, _Sampler, coin
from rapo_lib.traces import STOP_TAGS, Rollout

#: Prompts (ids so far) -> the ids that follow, up to a closing tag, an end of sequence, or the engine's limit.
Generate = Callable[[list[list[int]]], list[list[int]]]
#: Rollouts -> log-probabilities and entropies in nats, one list a rollout, one number a completion token.
Score = Callable[[Sequence[Rollout]], tuple[list[list[float]], list[list[float]]]]
#: Share of a GPU that the engine may take beside the trained model.
GPU_SHARE = 0.4


def check_vllm() -> None:
    """Refuse to start where the engine cannot run.

    Raises:
        RuntimeError: the package vllm is not installed, or there is no CUDA GPU.
    """
    import torch

    missing = (
        [] if importlib.util.find_spec("vllm") else ["the package vllm is not installed (pip install 'trl[vllm]')"]
    )
    missing += [] if torch.cuda.is_available() else ["there is no CUDA GPU"]
    if missing:
        raise RuntimeError(f"generator is 'vllm', but {' and '.join(missing)}; set generator to 'own'")


def vllm_settings(context: int) -> dict[str, Any]:
    """Fields of GRPOConfig that start the engine. context: ids that a prompt and its completion may have together."""
    return dict(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=GPU_SHARE,
        vllm_max_model_length=context,
        # Old log-probabilities are the policy's own, so there is nothing to correct between it and the engine.
        vllm_importance_sampling_correction=False,
        generation_kwargs={"stop": list(STOP_TAGS), "include_stop_str_in_output": True, "skip_special_tokens": False},
    )


def engine_of(trainer: Any) -> Generate:
    """The engine of a GRPOTrainer that was made with `vllm_settings`, as a function."""

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        _, completions, _, _ = trainer.vllm_generation.generate(prompts=prompts, images=None, num_generations=1)
        return [list(ids) for ids in completions]

    return generate


class TurnSampler:
    """Makes rollouts like `rollout.sample_rollouts`, but asks an engine for whole turns.

    Args:
        generate: the engine. score: scores finished rollouts.
    """

    def __init__(self, generate: Generate, score: Score) -> None:
        self.generate, self.score = generate, score

    def __call__(
        self,
        policy: Policy,
        requests: Sequence[RolloutRequest],
        toolbox: Any,
        *,
        limits: SamplingLimits,
        seed: int,
        stream: tuple[str | int, ...] = (),
        temperature: float = 1.0,
        retriever: Any = None,
        when_to_retrieve: WhenToRetrieve = coin(0.5),  # noqa: B008 (a coin has no state)
    ) -> RolloutBatch:
        """As `rollout.sample_rollouts`; the temperature is the engine's, set when it was started."""
        turns = _Turns(policy, requests, toolbox, limits, seed, stream, retriever, when_to_retrieve)
        batch = turns.run_with(self.generate)
        for rollout, logps, entropies in zip(batch.rollouts, *self.score(batch.rollouts), strict=True):
            rollout.segments[:] = _with_numbers(rollout, logps, entropies)
        batch.stats.rollout_sec = time.perf_counter() - turns.began
        return batch


class _Turns(_Sampler):
    """The sampler without a decoder: the engine keeps no cache of ours, so there is nothing to feed or to drop."""

    def run_with(self, generate: Generate) -> RolloutBatch:
        while len(self.who):
            self.stats.model_calls += 1
            self._write_turns(generate)
            self.waiting[:] = True
            self._serve(_NoCache())
        return RolloutBatch([s.rollout for s in self.states], self.stats)

    def _write_turns(self, generate: Generate) -> None:
        rollouts = [self.states[w].rollout for w in self.who]
        prompts = [[*r.prompt_ids, *r.completion_ids] for r in rollouts]
        self.stats.fed_tokens += sum(map(len, prompts))
        for row, (request, new) in enumerate(zip(self.who, generate(prompts), strict=True)):
            turn = self._up_to_its_end(new)[: self.limits.max_completion - self.length[row]]
            if not turn:
                raise RuntimeError(f"the engine wrote nothing for question {self.states[request].question.id!r}")
            a, b = self.length[row], self.length[row] + len(turn)
            self.ids[request, a:b] = turn
            self.length[row] = b
            self.stats.generated_tokens += len(turn)

    def _up_to_its_end(self, ids: Sequence[int]) -> Sequence[int]:
        """What an engine writes beyond the end of a step does not count."""
        for n in range(1, len(ids) + 1):
            if self.stops.kinds[ids[n - 1]] == self.stops.EOS or self.stops.step_ended(ids[:n]):
                return ids[:n]
        return ids


class _NoCache:
    """Stands where the own decoder keeps keys and values."""

    def extend(self, *_: Any) -> None:
        pass

    def keep(self, slots: Sequence[int]) -> None:
        pass


def _with_numbers(rollout: Rollout, logps: Sequence[float], entropies: Sequence[float]) -> list[Any]:
    segments, at = [], 0
    for s in rollout.segments:
        here = slice(at, at + len(s.ids))
        own = s.origin == "policy"
        segments.append(replace(s, logps=tuple(logps[here]), entropies=tuple(entropies[here])) if own else s)
        at += len(s.ids)
    return segments
