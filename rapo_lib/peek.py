"""Does a policy listen to a retrieved trace? Divergence and information of its next step, in nats.

The paper's theory says that its objective bounds the conditional mutual information between the agent's action and
the retrieved trace given the history (arXiv 2603.03078, App. B, Eq. 12); it never measures it. Here we do. An action is
a whole own step, thought included, up to its closing tag. Steps are sampled, and along each sampled step the KL
divergence of every token is taken exactly, over the full vocabulary (chain rule): no bias, and less spread than a ratio
of log-probabilities. This module looks at policies and rollouts and acts on no run; all of it is ours.

To follow a policy over training, collect the situations once, from the untrained student, and measure every policy in
the same ones:

    situations = collect_situations(student, questions, toolbox, buffer, config, n_histories=24, n_traces=8, seed=0)
    table = pd.concat(listening_table(p, situations, n_samples=2, seed=0).assign(rl_step=t) for t, p in policies)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from rapo_lib.buffer import StepTraceBuffer
from rapo_lib.config import RunConfig, child_rng
from rapo_lib.hybrids import require_steps, sample_groups
from rapo_lib.pocket.world import OPERATORS, SKILLS
from rapo_lib.policy import Policy, make_decoder, merged_model, sample_tokens
from rapo_lib.rewards import extract_boxed
from rapo_lib.rollout import SamplingLimits, StopTable
from rapo_lib.tasks import Question
from rapo_lib.tools import Toolbox
from rapo_lib.traces import Protocol, Rollout, StepTrace, history_text, parse_step

Ids = Sequence[int]
#: Ids of a sampled step at most; a pocket step has about 15.
MAX_TOKENS = 64
#: Rows of the decoder at most: above this, memory grows and speed does not.
BATCH = 256
#: Log-probabilities held at once, in float64: half a GiB.
MAX_NUMBERS = 2**26


# --------------------------------------------------------------------------------------- exact along a step


def token_divergence(logps: Tensor, other: Tensor) -> Tensor:
    """KL divergence of two next-token distributions, exact over the vocabulary, for each token of a step.

    Equation: `KL(p || q) = sum_v p(v) (log p(v) - log q(v))`; where p(v) = 0 nothing is added.

    Args:
        logps: log p in nats, (T, V); -inf is allowed. other: log q, likewise.

    Returns:
        (T,), nats; inf where q is 0 and p is not.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
        >>> [round(x, 4) for x in token_divergence(p.log(), q.log()).tolist()]
        [0.0, 0.6931]
    """
    probs = logps.exp()
    return torch.where(probs > 0, probs * (logps - other), 0.0).sum(-1)


def predictive_mixture(logps: Tensor, ids: Ids) -> Tensor:
    """What an observer predicts who does not know which of K traces was retrieved, token by token.

    Equation: `pibar(v | s_<t) = sum_j w_j pi_j(v | s_<t)` with `w_j` proportional to `pi_j(s_<t)`: the weights start
    at 1/K, and each token of the step says something about the trace (Bayes' rule).

    Args:
        logps: log-probabilities in nats of the next token under each trace, (K, T, V).
        ids: the step along which they were taken, (T,).

    Returns:
        Log-probabilities of the mixture, (T, V).

    Example:
        >>> one, two = [[0.9, 0.1], [0.9, 0.1]], [[0.1, 0.9], [0.1, 0.9]]
        >>> [round(x, 2) for x in predictive_mixture(torch.tensor([one, two]).log(), [0, 0]).exp()[:, 0].tolist()]
        [0.5, 0.82]
    """
    at = torch.as_tensor(ids, device=logps.device).expand(len(logps), -1)
    chosen = logps.gather(-1, at[..., None])[..., 0]  # (K, T)
    weights = F.pad(chosen[:, :-1].cumsum(-1), (1, 0)).log_softmax(0)
    return torch.logsumexp(weights[..., None] + logps, 0)


# ------------------------------------------------------------------------------------------- who is measured


class StepModel(Interface):
    """What the estimators need: next steps that can be sampled and scored."""

    n_vocab: int

    def sample(self, contexts: Sequence[Ids], n_samples: int, seed: int) -> list[list[tuple[int, ...]]]:
        """`n_samples` next steps of each context."""

    def logps(self, context: Ids, steps: Sequence[Ids]) -> list[Tensor]:
        """For each step the log-probabilities (T, V) in nats before each of its T tokens, float64."""


class PolicySteps:
    """A policy as the estimators see it.

    Args:
        policy: whose steps; it must not be trained while this object is used.
        temperature: of the distribution that is sampled and scored.
        max_tokens: ids of a step at most; a longer one is cut there, and its divergence with it.
    """

    def __init__(self, policy: Policy, temperature: float = 1.0, max_tokens: int = MAX_TOKENS) -> None:
        self.policy, self.temperature, self.max_tokens = policy, temperature, max_tokens
        self.n_vocab = policy.base.get_input_embeddings().weight.shape[0]
        self.stops = StopTable(policy)
        self._decoder, self._model = make_decoder(policy), merged_model(policy)

    def sample(
        self, contexts: Sequence[Ids], n_samples: int, seed: int, *, greedy: bool = False
    ) -> list[list[tuple[int, ...]]]:
        """Next steps, each up to its closing tag or the end of the sequence.

        Each has a random stream of its own, keyed by seed, place of the context and place of the sample: two policies
        draw the same numbers.

        Raises:
            ValueError: no context, one that leaves no room for a step, or n_samples below 1.
        """
        if not contexts or n_samples < 1:
            raise ValueError(f"{n_samples} steps of {len(contexts)} contexts: sample at least 1 step of at least 1")
        longest = max(map(len, contexts))
        if longest + self.max_tokens > self.policy.context:
            raise ValueError(
                f"a context has {longest} ids; with a step of up to {self.max_tokens} it does not fit the "
                f"{self.policy.context} ids of {self.policy.name!r}; take shorter histories or a smaller max_tokens"
            )
        rows = [(c, i) for c in range(len(contexts)) for i in range(n_samples)]
        parts = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        steps = [s for part in parts for s in self._sample(contexts, part, seed, greedy)]
        return [steps[i : i + n_samples] for i in range(0, len(steps), n_samples)]

    def _sample(
        self, contexts: Sequence[Ids], rows: Sequence[tuple[int, int]], seed: int, greedy: bool
    ) -> list[tuple[int, ...]]:
        used = sorted({c for c, _ in rows})  # a run of places
        lengths = np.array([len(contexts[c]) for c, _ in rows])
        streams = [child_rng(seed, "peek.step", c, i).random(self.max_tokens, np.float32) for c, i in rows]
        uniforms, who = np.stack(streams), np.arange(len(rows))
        token = torch.tensor([contexts[c][-1] for c, _ in rows])
        steps: list[list[int]] = [[] for _ in rows]
        capacity = int(lengths.max()) + self.max_tokens
        self._decoder.start([contexts[c] for c in used], [c - used[0] for c, _ in rows], capacity)
        for t in range(self.max_tokens):
            logits = self._decoder.step(token, torch.from_numpy(lengths[who] - 1 + t))
            draws = torch.from_numpy(uniforms[who, t]).to(logits.device)
            token = sample_tokens(logits, draws, self.temperature, greedy)[0].cpu()
            for r, i in zip(who, token.tolist(), strict=True):
                steps[r].append(i)
            slots = _close_gaps(np.array([self.ended(steps[r]) for r in who]))
            if not len(slots):
                break
            self._decoder.keep(slots.tolist())
            who, token = who[slots], token[slots]
        return [tuple(s) for s in steps]

    def ended(self, step: Ids) -> bool:
        """Whether a step is over: a closing action or answer tag, or the end of the sequence."""
        return self.stops.kinds[step[-1]] == StopTable.EOS or self.stops.step_ended(step)

    @torch.inference_mode()
    def logps(self, context: Ids, steps: Sequence[Ids]) -> list[Tensor]:
        """Log-probabilities before each token of some steps that follow one context, in one forward pass.

        The context stands once, the steps behind it; each sees the context and itself.

        Args:
            context: P ids. steps: of T ids each, at least one.

        Returns:
            For each step (T, V) in nats, float64, on the policy's device.
        """
        n = len(context)
        inner = [s[:-1] for s in steps]  # nothing is predicted behind a last id
        ids = torch.tensor([*context, *itertools.chain.from_iterable(inner)], device=self.policy.device)
        blocks = torch.tensor([0] * n + [b for b, s in enumerate(inner, 1) for _ in s], device=ids.device)
        positions = torch.tensor([*range(n), *(n + t for s in inner for t in range(len(s)))], device=ids.device)
        place = torch.arange(len(ids), device=ids.device)
        seen = (place <= place[:, None]) & ((blocks == 0) | (blocks == blocks[:, None]))  # (L, L)
        dtype = self._model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=ids.device).masked_fill_(~seen, torch.finfo(dtype).min)
        logits = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=mask[None, None],
            logits_to_keep=place[n - 1 :],
            use_cache=False,
        ).logits[0]
        lines = torch.log_softmax(logits.double() / self.temperature, -1)  # (1 + L - P, V)
        own = lines[1:].split([len(s) for s in inner])
        return [torch.cat([lines[:1], part]) for part in own]


def _close_gaps(ended: np.ndarray) -> np.ndarray:
    """Which rows go on, (n,): rows from the end fill the gaps, so that few cache lines are copied."""
    n = int((~ended).sum())
    slots = np.arange(n)
    slots[ended[:n]] = np.flatnonzero(~ended[n:]) + n
    return slots


# ------------------------------------------------------------------------------------------- the estimates


@dataclass(frozen=True)
class Information:
    """Information between a next step and the retrieved trace, one value a history.

    Args:
        values: (H,) nats. cap: log K, nats.
    """

    values: np.ndarray
    cap: float

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean over histories, the spread of the sampled steps included; NaN for a single history."""
        n = len(self.values)
        return float(self.values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def step_divergence(
    model: StepModel, contexts: Sequence[Ids], others: Sequence[Ids], *, n_samples: int, seed: int
) -> np.ndarray:
    """KL divergence of the next step under one context against another one, for each pair, in nats.

    Equation: `KL(P || Q) = E_{s ~ P} sum_t KL(P(. | s_<t) || Q(. | s_<t))`: steps are sampled from the first context,
    the divergence of each token is exact.

    Args:
        model: whose steps.
        contexts, others: n pairs of ids, such as a history with a trace and the history alone.
        n_samples: steps sampled from each of `contexts`.
        seed: of the sampling.

    Returns:
        (n,), mean over the sampled steps; 0 exactly for equal contexts.
    """
    steps = model.sample(contexts, n_samples, seed)
    pairs = zip(contexts, others, steps, strict=True)
    return np.array([_divergence(model, a, b, own) for a, b, own in pairs])


def _divergence(model: StepModel, context: Ids, other: Ids, steps: Sequence[tuple[int, ...]]) -> float:
    sums = {s: float(token_divergence(*lines).sum()) for s, lines in _scored(model, [context, other], steps)}
    return sum(sums[s] for s in steps) / len(steps)


def conditional_information(
    model: StepModel, histories: Sequence[Sequence[Ids]], *, n_samples: int, seed: int
) -> Information:
    """Information between the next step and which of K traces was retrieved, given the history (Eq. 12).

    Equation: `I = 1/K sum_k KL(pi(. | h, z_k) || pibar(. | h))`, `pibar = 1/K sum_k pi(. | h, z_k)`
    (arXiv 2603.03078, Eq. 12, with K traces in the place of all). Along a step that is sampled from `pi(. | h, z_k)`
    the divergence from `predictive_mixture` is summed over its tokens, which estimates I without bias.

    I is capped at log K by construction: K traces cannot be told apart better than perfectly, and where the policy does
    tell them apart, more traces would give more. A single estimate may lie above the cap by its sampling error. For
    traces drawn from a larger set I is on average at most the information about the whole set. Equal traces carry none.

    Args:
        model: whose steps.
        histories: for each of H histories its K contexts: the history with each of the traces.
        n_samples: steps sampled from each context.
        seed: of the sampling.

    Returns:
        Information with one value a history and the cap.

    Raises:
        ValueError: no histories, or different numbers of contexts.
    """
    n_traces = _n_traces([len(contexts) for contexts in histories])
    steps = model.sample([c for contexts in histories for c in contexts], n_samples, seed)
    values = [
        information_along(model, contexts, steps[i * n_traces : (i + 1) * n_traces])[0]
        for i, contexts in enumerate(histories)
    ]
    return Information(np.array(values), math.log(n_traces))


def _n_traces(numbers: Sequence[int]) -> int:
    if len(set(numbers)) != 1 or numbers[0] < 1:
        raise ValueError(f"the histories have {sorted(set(numbers))} traces; give each the same number, at least 1")
    return numbers[0]


def information_along(
    model: StepModel, contexts: Sequence[Ids], steps: Sequence[Sequence[tuple[int, ...]]], without: Ids | None = None
) -> tuple[float, float]:
    """Information and mean divergence of one history, along steps that were sampled already.

    Args:
        model: whose steps.
        contexts: the history with each of K traces.
        steps: for each context the steps sampled from it, the same number of each.
        without: the history alone; None leaves the divergence out.

    Returns:
        Information in nats (see `conditional_information`), and the mean over traces of the divergence of the next step
        from the one without a trace (see `step_divergence`), NaN without `without`.
    """
    everyone = [*contexts] if without is None else [*contexts, without]
    information, divergence = 0.0, math.nan if without is None else 0.0  # nan stays nan below
    for step, lines in _scored(model, everyone, [s for own in steps for s in own]):
        mixture = predictive_mixture(lines[: len(contexts)], step)
        for k, own in enumerate(steps):
            if n := own.count(step):
                information += n * float(token_divergence(lines[k], mixture).sum())
                divergence += n * float(token_divergence(lines[k], lines[-1]).sum())
    n_steps = sum(map(len, steps))
    return information / n_steps, divergence / n_steps


def _scored(
    model: StepModel, contexts: Sequence[Ids], steps: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Each different step with its log-probabilities under all contexts, (C, T, V)."""
    different = list(dict.fromkeys(steps))
    # Steps of one pass: as many as fit, all of them for a small vocabulary.
    n = max(1, MAX_NUMBERS // (len(contexts) * model.n_vocab * max(map(len, different))))
    for first in range(0, len(different), n):
        part = different[first : first + n]
        for step, *lines in zip(part, *(model.logps(c, part) for c in contexts), strict=True):
            yield step, torch.stack(lines)


# ------------------------------------------------------------------------------------- where the value is known


class SymmetricChannel:
    """A fake policy whose next step says in a known way which of K traces was retrieved.

    A step has `silent` uniform symbols and behind them `looks` symbols of a symmetric channel: each is the number of
    the trace, shifted by the sum of the silent ones, with probability 1 - error, and else one of the K - 1 other
    symbols. With `silent` each symbol alone says nothing about the trace, only the step as a whole does.

    Args:
        n_traces: K, at least 2. error: 0 .. 1; at (K - 1) / K the step does not depend on the trace.
        looks: symbols of the channel, at least 1. silent: uniform symbols before them.
    """

    def __init__(self, n_traces: int, error: float, looks: int = 1, silent: int = 0) -> None:
        if n_traces < 2 or not 0.0 <= error <= 1.0 or looks < 1 or silent < 0:
            raise ValueError(
                f"n_traces {n_traces}, error {error}, looks {looks}, silent {silent}; allowed: at least 2, 0 to 1, at "
                "least 1, at least 0"
            )
        self.n_vocab, self.looks, self.silent = n_traces, looks, silent
        self.contexts = [(k,) for k in range(n_traces)]
        self._symbol = torch.full((n_traces, n_traces), error / (n_traces - 1), dtype=torch.float64)  # (trace, symbol)
        self._symbol.fill_diagonal_(1.0 - error)

    @property
    def information(self) -> float:
        """The exact value in nats, by going through all steps.

        Equation: log K - H(error) - error log(K - 1) for one look, H the entropy of a coin.
        """
        steps = self._symbol
        for _ in range(self.looks - 1):
            steps = (steps[:, :, None] * self._symbol[:, None]).flatten(1)  # (K, K ** looks)
        mixture = steps.mean(0).log().expand_as(steps)
        return float(token_divergence(steps.log(), mixture).mean())

    def sample(self, contexts: Sequence[Ids], n_samples: int, seed: int) -> list[list[tuple[int, ...]]]:
        draws = [[child_rng(seed, "peek.channel", c, i) for i in range(n_samples)] for c in range(len(contexts))]
        return [[self._step(k, rng) for rng in own] for (k,), own in zip(contexts, draws, strict=True)]

    def _step(self, k: int, rng: np.random.Generator) -> tuple[int, ...]:
        silent = rng.integers(self.n_vocab, size=self.silent).tolist()
        said = self._symbol[(k + sum(silent)) % self.n_vocab].numpy()
        return (*silent, *rng.choice(self.n_vocab, size=self.looks, p=said).tolist())

    def logps(self, context: Ids, steps: Sequence[Ids]) -> list[Tensor]:
        silent = torch.full((self.silent, self.n_vocab), -math.log(self.n_vocab), dtype=torch.float64)
        said = [self._symbol[(context[0] + sum(s[: self.silent])) % self.n_vocab].log() for s in steps]
        return [torch.cat([silent, line.expand(self.looks, -1)]) for line in said]


def known_channel(
    n_traces: int,
    error: float,
    *,
    looks: int = 1,
    silent: int = 0,
    n_histories: int = 64,
    n_samples: int = 2,
    seed: int = 0,
) -> dict[str, float]:
    """The estimate of `conditional_information` beside the true value, where that is known.

    Args:
        n_traces, error, looks, silent: the channel (see `SymmetricChannel`).
        n_histories: how often the estimate is made; they differ by the sampled steps only.
        n_samples, seed: as in `conditional_information`.

    Returns:
        `exact`, `estimate`, `standard_error` and `cap` in nats. With one look the estimate is exact: the divergence of
        its token does not depend on the sampled step.

    Example:
        >>> {k: round(v, 4) for k, v in known_channel(2, 0.1, n_histories=2).items()}
        {'exact': 0.3681, 'estimate': 0.3681, 'standard_error': 0.0, 'cap': 0.6931}
    """
    channel = SymmetricChannel(n_traces, error, looks, silent)
    found = conditional_information(channel, [channel.contexts] * n_histories, n_samples=n_samples, seed=seed)
    return {
        "exact": channel.information,
        "estimate": found.mean,
        "standard_error": found.standard_error,
        "cap": found.cap,
    }


# -------------------------------------------------------------------------------------------- real situations


@dataclass(frozen=True, slots=True)
class History:
    """A moment at which a rollout could retrieve: behind the observation of an own step.

    Args:
        question: its question.
        ids: prompt and completion so far.
        text: question and steps so far, as the buffer is asked.
        n_steps: steps done. steps_left: steps that the budget still allows, at least 1.
    """

    question: Question
    ids: tuple[int, ...]
    text: str
    n_steps: int
    steps_left: int


@dataclass(frozen=True, slots=True)
class Situation:
    """A history with K traces that retrieval would find and K that it would not.

    Args:
        history: where the policy stands.
        helpful: the K nearest different traces, the nearest first. random: K different ones of other questions.
    """

    history: History
    helpful: tuple[StepTrace, ...]
    random: tuple[StepTrace, ...]


def boundaries(
    rollouts: Sequence[Rollout], questions: Sequence[Question], protocol: Protocol, limits: SamplingLimits
) -> list[History]:
    """All moments of on-policy rollouts at which a trace could be retrieved (Alg. 1: before each later step).

    Args:
        rollouts: without retrievals. questions: theirs. protocol: decodes the ids. limits: of the rollouts.

    Raises:
        ValueError: a rollout with a retrieval: its history holds a trace already.
    """
    by_id = {q.id: q for q in questions}
    found = []
    for r in rollouts:
        if r.retrievals:
            raise ValueError(
                f"rollout {r.place} of question {r.question_id!r} holds a retrieved step; give on-policy rollouts"
            )
        question = by_id[r.question_id]
        budget = (limits.max_steps if question.max_steps is None else question.max_steps) + limits.extra_steps
        ends = [i for i, s in enumerate(r.segments, 1) if s.origin == "tool" and "tool" in s.info]
        for n_steps, end in enumerate(ends, 1):
            before = r.segments[:end]
            cut = end == len(r.segments) and r.end_reason == "length"
            if n_steps < budget and not cut:
                ids = (*r.prompt_ids, *(i for s in before for i in s.ids))
                text = history_text(protocol, question.text, before)
                found.append(History(question, ids, text, n_steps, budget - n_steps))
    return found


def helpful_traces(
    buffer: StepTraceBuffer, history: History, n: int, rng: np.random.Generator, *, leak_guard: bool = True
) -> tuple[StepTrace, ...]:
    """The n nearest traces of a history (Eq. 3), each text once, ties in random order.

    Teachers repeat themselves: without "each text once" most of them would be the same step. Traces that hold the gold
    answer or spend more steps than are left are passed over (retrieval itself would then insert nothing).

    Returns:
        n traces, the nearest first; fewer where the buffer has no more.
    """
    (hits,) = buffer.search([history.text], max(1, len(buffer)))
    order = sorted(rng.permutation(len(hits)), key=lambda i: -hits[i].score)
    return _different(buffer, (hits[i].trace_id for i in order), history, n, leak_guard)


def random_traces(
    buffer: StepTraceBuffer, history: History, n: int, rng: np.random.Generator, *, leak_guard: bool = True
) -> tuple[StepTrace, ...]:
    """n traces of other questions, drawn uniformly (the noise of Fig. 6); otherwise as `helpful_traces`."""
    others = (i for i in rng.permutation(len(buffer)) if buffer.traces[i].question_id != history.question.id)
    return _different(buffer, others, history, n, leak_guard)


def _different(
    buffer: StepTraceBuffer, trace_ids: Iterator[int], history: History, n: int, leak_guard: bool
) -> tuple[StepTrace, ...]:
    found: dict[str, StepTrace] = {}
    for i in trace_ids:
        if len(found) == n:
            break
        trace = buffer.traces[i]
        leaks = leak_guard and buffer.holds_answer(int(i), history.question.answers)
        if not leaks and trace.n_steps <= history.steps_left:
            found.setdefault(trace.value, trace)
    return tuple(found.values())


def collect_situations(
    policy: Policy,
    questions: Sequence[Question],
    toolbox: Toolbox,
    buffer: StepTraceBuffer,
    config: RunConfig,
    *,
    n_histories: int,
    n_traces: int,
    seed: int,
) -> list[Situation]:
    """Histories from a policy's own rollouts, one a question, each with its helpful and its random traces.

    Args:
        policy: who makes the histories; the untrained student when policies are to be compared over training.
        questions: taken in random order. toolbox: with their facts. buffer: of traces.
        config: budget, temperature and leak guard.
        n_histories: how many. n_traces: K, helpful and random ones each. seed: of all draws.

    Raises:
        ValueError: the questions give too few histories with that many different traces, none are asked for, or the
            policy never wrote a valid step with a tool call.
    """
    if n_histories < 1 or n_traces < 1:
        raise ValueError(f"{n_histories} histories with {n_traces} traces; ask for at least 1 of each")
    on_policy, limits = config.replace(group_size=1, n_hybrid=0, seed=seed), SamplingLimits.of(config)
    order = child_rng(seed, "peek.questions").permutation(len(questions))
    found: list[Situation] = []
    written: list[Rollout] = []
    for first in range(0, len(order), n_histories):
        part = [questions[i] for i in order[first : first + n_histories]]
        rollouts = sample_groups(policy, part, toolbox, None, on_policy, stream=("peek",))
        written += rollouts
        for rollout in rollouts:
            moments = boundaries([rollout], part, policy.protocol, limits)
            rng = child_rng(seed, "peek.situation", rollout.question_id)
            if moments:
                history = moments[rng.integers(len(moments))]
                helpful, random = (
                    choose(buffer, history, n_traces, rng, leak_guard=config.leak_guard)
                    for choose in (helpful_traces, random_traces)
                )
                if len(helpful) == len(random) == n_traces:
                    found.append(Situation(history, helpful, random))
        if len(found) >= n_histories:
            return found[:n_histories]
    require_steps(written, policy)
    raise ValueError(
        f"{len(questions)} questions gave {len(found)} histories with {n_traces} different traces of each kind, "
        f"{n_histories} were asked for; give more questions or a larger buffer, or ask for fewer"
    )


def listening_table(
    policy: Policy,
    situations: Sequence[Situation],
    *,
    n_samples: int = 2,
    seed: int = 0,
    temperature: float = 1.0,
    max_tokens: int = MAX_TOKENS,
) -> pd.DataFrame:
    """How much a policy's next step depends on the retrieved trace, in given situations.

    Args:
        policy: who is measured. situations: from `collect_situations`; the same ones for policies that are compared.
        n_samples: steps sampled from each context. seed: of the sampling; the same draws for every policy.
        temperature: of the policy. max_tokens: ids of a step at most.

    Returns:
        One row a history and kind of traces: history, question_id, n_steps, steps_left, kind (`helpful`, `random`),
        information (nats, see `conditional_information`), cap (log K), divergence (nats; from the next step without a
        trace, mean over traces), step_entropy (nats; of the next step without a trace, mean over its tokens, Eq. 2),
        cut_frac (sampled steps that did not end within max_tokens: their sums are too small).

    Raises:
        ValueError: no situations, or different numbers of traces.
    """
    n_traces = _n_traces([len(traces) for s in situations for traces in (s.helpful, s.random)])
    model = PolicySteps(policy, temperature, max_tokens)
    alone = [s.history.ids for s in situations]
    alone_steps = model.sample(alone, n_samples, seed)
    entropies = [_step_entropy(model, c, own) for c, own in zip(alone, alone_steps, strict=True)]
    rows = []
    for kind in ("helpful", "random"):
        sets = [[_inserted(policy.protocol, s.history, t) for t in getattr(s, kind)] for s in situations]
        steps = model.sample([c for contexts in sets for c in contexts], n_samples, seed)
        for h, (situation, contexts) in enumerate(zip(situations, sets, strict=True)):
            own = steps[h * n_traces : (h + 1) * n_traces]
            information, divergence = information_along(model, contexts, own, alone[h])
            history = situation.history
            row = {"history": h, "question_id": history.question.id, "n_steps": history.n_steps}
            row |= {"steps_left": history.steps_left, "kind": kind, "information": information}
            row |= {"cap": math.log(n_traces), "divergence": divergence, "step_entropy": entropies[h]}
            rows.append(row | {"cut_frac": float(np.mean([not model.ended(s) for k in own for s in k]))})
    return pd.DataFrame(rows)


def _inserted(protocol: Protocol, history: History, trace: StepTrace | None) -> tuple[int, ...]:
    """The context of the next step: the history, and behind it the trace, if any."""
    return (*history.ids, *(protocol.retrieval_ids(trace.value) if trace else ()))


def _step_entropy(model: StepModel, context: Ids, steps: Sequence[tuple[int, ...]]) -> float:
    """Mean token entropy in nats of sampled steps, mean over the steps."""
    lines = model.logps(context, steps)
    return float(np.mean([-(x.exp() * x.nan_to_num(neginf=0.0)).sum(-1).mean().item() for x in lines]))


def peek_table(
    policy: Policy,
    questions: Sequence[Question],
    toolbox: Toolbox,
    buffer: StepTraceBuffer,
    config: RunConfig,
    *,
    n_histories: int = 24,
    n_traces: int = 8,
    n_samples: int = 2,
    seed: int = 0,
) -> pd.DataFrame:
    """`listening_table` of one policy in situations of its own (see `collect_situations` for the arguments)."""
    how = {"n_histories": n_histories, "n_traces": n_traces, "seed": seed}
    situations = collect_situations(policy, questions, toolbox, buffer, config, **how)
    return listening_table(policy, situations, n_samples=n_samples, seed=seed, temperature=config.temperature)


# ------------------------------------------------------------------------------------------- the next action

_RESULT = re.compile(r"<result>([^<(]*)")


def agreement(policy: Policy, situations: Sequence[Situation], *, max_tokens: int = MAX_TOKENS) -> pd.DataFrame:
    """The greedy next action without a trace, behind the nearest one, and behind a random one.

    Args:
        policy: who acts. situations: from `collect_situations`. max_tokens: ids of a step at most.

    Returns:
        One row a history and kind (`none`, `helpful`, `random`): history, question_id, kind, tool (`answer` for an
        answer, empty for a step without format), query, changed (another action than without a trace), and for pocket
        questions (else missing) ahead (chain steps that the trace lies ahead of the own state: 1 is the step that is
        due; missing for a trace that is not on the chain), right_own and right_note (the right form of the step that is
        due behind the last own observation, or behind the trace's).
    """
    model, protocol = PolicySteps(policy, max_tokens=max_tokens), policy.protocol
    kinds: dict[str, Callable[[Situation], StepTrace | None]] = {
        "none": lambda s: None,
        "helpful": lambda s: s.helpful[0],
        "random": lambda s: s.random[0],
    }
    traces = [(h, s, kind, pick(s)) for kind, pick in kinds.items() for h, s in enumerate(situations)]
    contexts = [_inserted(protocol, s.history, t) for _, s, _, t in traces]
    actions = [_action(protocol.decode(own)) for (own,) in model.sample(contexts, 1, 0, greedy=True)]
    rows = []
    for (h, s, kind, trace), action in zip(traces, actions, strict=True):
        row = {"history": h, "question_id": s.history.question.id, "kind": kind, "tool": action[0], "query": action[1]}
        rows.append(row | {"changed": action != actions[h]} | _judged(s.history, trace, action))
    return pd.DataFrame(rows).astype({"ahead": "Int64", "right_own": "boolean", "right_note": "boolean"})


def _action(text: str) -> tuple[str, str]:
    """(tool, query) of a step without white space in the query, ("answer", what is boxed), or two empty texts."""
    step = parse_step(text)
    if step.answer is not None:
        return "answer", _squeezed(extract_boxed(step.answer) or "")
    return (step.action[0], _squeezed(step.action[1])) if step.action else ("", "")


def _judged(history: History, trace: StepTrace | None, action: tuple[str, str]) -> dict[str, int | bool | None]:
    """The last three columns of `agreement`."""
    if "chain" not in history.question.info:
        return {"ahead": None, "right_own": None, "right_note": None}
    value, place, _ = _state(history.question, history.text, history.n_steps)
    right_own = action == _due(history.question, value, place)
    if trace is None:
        return {"ahead": None, "right_own": right_own, "right_note": None}
    noted, after, on_chain = _state(history.question, trace.value, place + 1)
    right_note = action == _due(history.question, noted, after)
    return {"ahead": after - place if on_chain else None, "right_own": right_own, "right_note": right_note}


def _state(question: Question, text: str, expected: int) -> tuple[str, int, bool]:
    """Value of the last observation, how many steps of the chain it stands for, and whether it lies on the chain."""
    value, chain = (_RESULT.findall(text) or [""])[-1].strip(), question.info["chain"]
    places = [k for k in range(1, len(chain)) if chain[k] == value]
    return value, min(places, key=lambda k: abs(k - expected), default=expected), bool(places)


def _due(question: Question, value: str, place: int) -> tuple[str, str]:
    """The action that is right behind `place` steps of the chain which brought `value`."""
    info = question.info
    if place >= len(info["skills"]):
        return "answer", _squeezed(value)
    skill, word = SKILLS[info["skills"][place]], info["words"][place]
    right = skill.right.format(w=word, x=value, n=info["operands"][place], o=OPERATORS.get(word, ""))
    return skill.tool, _squeezed(right)


def _squeezed(text: str) -> str:
    return "".join(text.split())
