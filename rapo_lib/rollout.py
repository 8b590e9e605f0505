"""Rollouts: all questions and groups in one batch, with tools, retrieval and exact step entropies.

Notebooks 01 and 03 explain this module. The loop feeds one id a row, samples the next ones, and stops a row when
it wrote a closing tag. Rows that wait for a tool or a retrieved step are served together, and their new ids are fed
in one go but for the last, which rides along with everyone's next id. Ids only grow; nothing is encoded again.

Every rollout draws from streams of its own, keyed by seed, stream, question, place and purpose, so its tokens do
not depend on who else is in the batch.

Deviations from arXiv 2603.03078:
1. A retrieved step spends the step budget like an own one (Eq. 4: s_t is either generated or retrieved).
2. From the third time on, a repeated call is told to the agent in its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rapo_lib.config import RunConfig, child_rng
from rapo_lib.policy import Decoder, Policy, make_decoder, sample_tokens
from rapo_lib.rewards import Reward, pocket_reward
from rapo_lib.traces import STOP_TAGS, Rollout, Segment, history_text, parse_step

if TYPE_CHECKING:
    from rapo_lib.buffer import RetrievalQuery, Retrieved
    from rapo_lib.tasks import Question
    from rapo_lib.tools import Toolbox

#: Rows wait at a boundary until this share of the running rows does (or none runs): measured, see `bench rollout`.
SERVE_FRAC = 0.125
#: How often a call may be repeated before its result says so.
REPEATS_BEFORE_NOTE = 2


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout to sample.

    Args:
        question: what to answer.
        place: place in the group, 0 .. G-1; a key of the rollout's random streams.
        hybrid: whether it may retrieve.
    """

    question: Question
    place: int = 0
    hybrid: bool = False


@dataclass(frozen=True)
class SamplingLimits:
    """Where a rollout ends at the latest.

    Args:
        max_completion: completion ids, inserted ones included.
        max_calls: tool calls.
        max_steps: own and retrieved steps, for questions that do not say it themselves; the answer is not counted.
        extra_steps: steps beyond the budget.
    """

    max_completion: int
    max_calls: int
    max_steps: int
    extra_steps: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> SamplingLimits:
        """The limits of a run."""
        return cls(config.max_completion, config.max_calls, config.max_calls, config.extra_steps)


@dataclass
class RolloutStats:
    """What a batch of rollouts cost.

    Args:
        rollout_sec: all of it; of these `tools_sec` in tools and `retrieval_sec` in retrieval.
        generated_tokens: ids that the policy wrote.
        fed_tokens: ids that it read besides: each prompt once, and inserted ids.
        model_calls: forward passes.
    """

    rollout_sec: float = 0.0
    tools_sec: float = 0.0
    retrieval_sec: float = 0.0
    generated_tokens: int = 0
    fed_tokens: int = 0
    model_calls: int = 0

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """The cost of two batches, one after the other."""
        return RolloutStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class RolloutBatch:
    """Rollouts in the order of their requests, and what they cost."""

    rollouts: list[Rollout]
    stats: RolloutStats


@dataclass
class RolloutState:
    """A rollout in the making; what `when_to_retrieve` sees.

    Args:
        question: its question.
        rollout: segments so far.
        max_steps: its budget.
        n_steps: own and retrieved steps so far.
        calls: how often each (tool, query) was called.
    """

    question: Question
    rollout: Rollout
    max_steps: int
    streams: Callable[[str], np.random.Generator]
    n_steps: int = 0
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def steps_left(self) -> int:
        return self.max_steps - self.n_steps

    @property
    def last_entropy(self) -> float:
        """Step entropy in nats of the last own step."""
        return self.rollout.step_entropies[-1]

    @cached_property
    def coin_rng(self) -> np.random.Generator:
        return self.streams("coin")

    @cached_property
    def noise_rng(self) -> np.random.Generator:
        return self.streams("noise")

    @cached_property
    def ties_rng(self) -> np.random.Generator:
        return self.streams("ties")


WhenToRetrieve = Callable[[RolloutState, np.random.Generator], bool]


def coin(p: float) -> WhenToRetrieve:
    """Retrieve before a later step with probability p (arXiv 2603.03078, Eq. 4).

    Example:
        >>> coin(1.0)(None, np.random.default_rng(0)), coin(0.0)(None, np.random.default_rng(0))
        (True, False)
    """
    if not 0 <= p <= 1:
        raise ValueError(f"the retrieval probability is {p}; allowed: 0 to 1")
    return lambda state, rng: rng.random() < p


def entropy_above(threshold_nats: float) -> WhenToRetrieve:
    """Retrieve where the last own step's entropy exceeds a threshold in nats (ours)."""
    return lambda state, rng: state.last_entropy > threshold_nats


# ------------------------------------------------------------------------------------------ stopping


class StopTable:
    """Which new ids can end a step: a look-up by id first, text only where the id's text holds a `>`.

    Args:
        policy: its tokenizer, protocol and end-of-sequence ids are read.
    """

    NONE, TEXT, TAG, EOS = 0, 1, 2, 3
    #: A tag has at most this many ids, since each holds at least one of its characters.
    TAIL = max(len(tag) for tag in STOP_TAGS)

    def __init__(self, policy: Policy) -> None:
        tokenizer = policy.tokenizer
        n = max(len(tokenizer), policy.base.get_input_embeddings().num_embeddings)
        self.kinds = np.zeros(n, np.int8)
        for text, i in tokenizer.get_vocab().items():
            if text in STOP_TAGS:
                self.kinds[i] = self.TAG
            elif ">" in text and _may_complete_tag(text):
                self.kinds[i] = self.TEXT
        self.kinds[list(policy.eos_ids)] = self.EOS
        self._decode = policy.protocol.decode

    def step_ended(self, ids: Sequence[int]) -> bool:
        """Whether the last id of a policy segment completed a closing action or answer tag."""
        kind = self.kinds[ids[-1]]
        return kind == self.TAG or kind == self.TEXT and any(t in self._decode(ids[-self.TAIL :]) for t in STOP_TAGS)


def _may_complete_tag(text: str) -> bool:
    """Whether a token's text, up to one of its `>`, is the end of a stop tag or ends with one.

    `<0x3E>` is how byte-fallback tokenizers write the byte `>`.
    """
    heads = [text[: i + 1] for i, c in enumerate(text) if c == ">"]
    return text == "<0x3E>" or any(tag.endswith(head) or head.endswith(tag) for head in heads for tag in STOP_TAGS)


# ---------------------------------------------------------------------------------------- the sampler


def sample_rollouts(
    policy: Policy,
    requests: Sequence[RolloutRequest],
    toolbox: Toolbox,
    *,
    limits: SamplingLimits,
    seed: int,
    stream: tuple[str | int, ...] = (),
    temperature: float = 1.0,
    greedy: bool = False,
    retriever: Callable[[Sequence[RetrievalQuery]], Sequence[Retrieved | None]] | None = None,
    when_to_retrieve: WhenToRetrieve = coin(0.5),  # noqa: B008 (a coin has no state)
) -> RolloutBatch:
    """Sample on-policy and hybrid rollouts in one batch (arXiv 2603.03078, Alg. 1).

    Args:
        policy: who writes.
        requests: any mix of questions and places; a (question, place) pair occurs once.
        toolbox: runs actions, `run([(tool, query), ..])`.
        limits: where rollouts end at the latest.
        seed: the run's seed.
        stream: further keys of the random streams, such as ("train", rl_step).
        temperature: of the distribution that is sampled from, and that entropies and log-probabilities describe.
        greedy: take the most likely token each time.
        retriever: gets the queries of all rollouts that are due at a moment; None inserts nothing.
        when_to_retrieve: decides before each later step of a hybrid rollout.

    Returns:
        Rollouts in the order of the requests, with end reasons and without rewards, and the cost.

    Raises:
        ValueError: no request, a pair twice, or a prompt that does not fit the model's context.
    """
    if not requests:
        raise ValueError("there are no rollouts to sample: requests is empty")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy=True takes the most likely token)")
    sampler = _Sampler(policy, requests, toolbox, limits, seed, stream, retriever, when_to_retrieve)
    return sampler.run(temperature, greedy)


def sample_and_score(
    policy: Policy,
    requests: Sequence[RolloutRequest],
    toolbox: Toolbox,
    *,
    reward: Reward = pocket_reward,
    sampler: Callable[..., RolloutBatch] = sample_rollouts,
    at_once: int = 0,
    **how: Any,
) -> RolloutBatch:
    """Sample rollouts and give each its outcome reward: what training, evaluation and teachers all do.

    Args:
        policy: who writes. requests: what is asked; none gives none. toolbox: runs actions. reward: (rollout, question,
            protocol) -> outcome reward. sampler: makes the rollouts. at_once: rollouts of one batch at most, for
            memory; 0 samples all in one. how: everything else that `sample_rollouts` takes.

    Returns:
        Rollouts in the order of the requests, with rewards, and the cost.
    """
    out = RolloutBatch([], RolloutStats())
    for first in range(0, len(requests), at_once or len(requests) or 1):
        part = requests[first : first + at_once] if at_once else requests
        batch = sampler(policy, part, toolbox, **how)
        for rollout, request in zip(batch.rollouts, part, strict=True):
            rollout.reward = reward(rollout, request.question, policy.protocol)
        out.rollouts += batch.rollouts
        out.stats += batch.stats
    return out


class _Sampler:
    """One batch. Requests are numbered 0 .. N-1; the rows of the decoder are the requests that still run.

    Arrays over requests: `ids`, `logps`, `entropies` (N, L + 1) by place in the completion. Arrays over rows:
    `who` (request), `token` (to be fed), `length` (completion ids so far), `waiting` (at a boundary).
    """

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[RolloutRequest],
        toolbox: Toolbox,
        limits: SamplingLimits,
        seed: int,
        stream: tuple[str | int, ...],
        retriever: Any,
        when_to_retrieve: WhenToRetrieve,
    ) -> None:
        self.began = time.perf_counter()
        self.policy, self.toolbox, self.limits = policy, toolbox, limits
        self.retriever, self.when_to_retrieve = retriever, when_to_retrieve
        self.protocol = _CachedProtocol(policy.protocol)
        self.stops = StopTable(policy)
        self.stats = RolloutStats()
        self.states = _make_states(policy, requests, limits, seed, stream)
        n, width = len(requests), limits.max_completion + 1
        self.uniforms = np.stack([s.streams("tokens").random(width, np.float32) for s in self.states])
        self.ids = np.zeros((n, width), np.int64)
        self.logps = np.zeros((n, width), np.float32)
        self.entropies = np.zeros((n, width), np.float32)
        self.prompt_length = np.array([len(s.rollout.prompt_ids) for s in self.states])
        self.written = np.zeros(n, np.int64)  # completion ids that stand in segments
        self.who = np.arange(n)
        self.token = np.array([s.rollout.prompt_ids[-1] for s in self.states])
        self.length = np.zeros(n, np.int64)
        self.waiting = np.zeros(n, bool)

    def run(self, temperature: float, greedy: bool) -> RolloutBatch:
        decoder = self._start_decoder()
        while len(self.who):
            self._step(decoder, temperature, greedy)
            n_waiting = int(self.waiting.sum())
            if n_waiting and n_waiting >= SERVE_FRAC * len(self.who):
                self._serve(decoder)
        inserted = sum(len(seg.ids) for s in self.states for seg in s.rollout.segments if seg.origin != "policy")
        self.stats.fed_tokens += inserted
        self.stats.model_calls = decoder.model_calls
        self.stats.rollout_sec = time.perf_counter() - self.began
        return RolloutBatch([s.rollout for s in self.states], self.stats)

    def _start_decoder(self) -> Decoder:
        decoder = make_decoder(self.policy)
        prompts = list(dict.fromkeys(s.rollout.prompt_ids for s in self.states))
        place = {p: i for i, p in enumerate(prompts)}
        rows = [place[s.rollout.prompt_ids] for s in self.states]
        self.stats.fed_tokens = sum(map(len, prompts))
        decoder.start(prompts, rows, int(self.prompt_length.max()) + self.limits.max_completion + 1)
        return decoder

    def _step(self, decoder: Decoder, temperature: float, greedy: bool) -> None:
        """Feed one id a row and sample the next. Waiting rows ride along; what they write is overwritten later."""
        positions = self.prompt_length[self.who] + self.length - 1
        logits = decoder.step(torch.from_numpy(self.token), torch.from_numpy(positions))
        uniforms = torch.from_numpy(self.uniforms[self.who, self.length]).to(logits.device)
        ids, logps, entropies = sample_tokens(logits, uniforms, temperature, greedy)
        ids = ids.cpu().numpy()
        at = self.who, self.length
        self.ids[at], self.logps[at], self.entropies[at] = ids, logps.cpu().numpy(), entropies.cpu().numpy()
        running = ~self.waiting
        self.token = ids
        self.length += running
        self.stats.generated_tokens += int(running.sum())
        notable = (self.stops.kinds[ids] > 0) | (self.length >= self.limits.max_completion)
        for row in np.flatnonzero(running & notable):
            self.waiting[row] = self._ends_step(row)

    def _ends_step(self, row: int) -> bool:
        request, length = self.who[row], self.length[row]
        if length >= self.limits.max_completion or self.stops.kinds[self.ids[request, length - 1]] == StopTable.EOS:
            return True
        return self.stops.step_ended(self.ids[request, self.written[request] : length].tolist())

    def _serve(self, decoder: Decoder) -> None:
        """Take all waiting rows over their boundary: close the step, run tools, retrieve, feed, drop the finished."""
        rows = np.flatnonzero(self.waiting)
        starts = self.length[rows] - 1  # the policy's last id is not in the cache yet
        due = [(r, action) for r in rows.tolist() if (action := self._close_step(r)) is not None]
        self._run_tools(due)
        self._retrieve([r for r, _ in due if not self.states[self.who[r]].rollout.end_reason])
        going = [not self.states[w].rollout.end_reason for w in self.who[rows]]
        self._feed(decoder, rows[going], starts[going])
        self._drop_finished(decoder)
        self.waiting[:] = False

    def _close_step(self, row: int) -> tuple[str, str] | None:
        """Make the policy's segment; returns the action to run, or None when the rollout ended here."""
        request = self.who[row]
        state, rollout = self.states[request], self.states[request].rollout
        a, b = self.written[request], self.length[row]
        ids = self.ids[request, a:b].tolist()
        logps, entropies = self.logps[request, a:b].tolist(), self.entropies[request, a:b].tolist()
        rollout.segments.append(Segment("policy", tuple(ids), tuple(logps), tuple(entropies)))
        self.written[request] = b
        if self.stops.kinds[ids[-1]] == StopTable.EOS:
            rollout.end_reason = "eos"
        elif not self.stops.step_ended(ids):
            rollout.end_reason = "length"
        else:
            step = parse_step(self.protocol.step_text(ids))
            if step.error is None and step.action is not None:
                rollout.end_reason = self._refusal(state, b)
                return None if rollout.end_reason else step.action
            rollout.end_reason = "format" if step.error else "answer"
        return None

    def _refusal(self, state: RolloutState, length: int) -> str:
        """Why this action is not run; empty when it is."""
        if state.n_steps >= state.max_steps:
            return "budget"
        if sum(state.calls.values()) >= self.limits.max_calls:
            return "calls"
        return "length" if length >= self.limits.max_completion else ""

    def _run_tools(self, due: Sequence[tuple[int, tuple[str, str]]]) -> None:
        if not due:
            return
        began = time.perf_counter()
        results = self.toolbox.run([action for _, action in due])
        self.stats.tools_sec += time.perf_counter() - began
        for (row, (tool, query)), result in zip(due, results, strict=True):
            state = self.states[self.who[row]]
            state.n_steps += 1
            repeats = state.calls[tool, query] = state.calls.get((tool, query), 0) + 1
            note = f" (this call was made {repeats} times)" if repeats > REPEATS_BEFORE_NOTE else ""
            info = {"tool": tool, "query": query, "ok": result.ok, "error": result.error, "repeats": repeats}
            self._insert(row, "tool", self.protocol.observation_ids(result.text + note), info)

    def _retrieve(self, rows: Sequence[int]) -> None:
        """One decision a boundary for each hybrid rollout with budget left; all queries go out together."""
        if self.retriever is None:
            return
        began = time.perf_counter()
        once = getattr(self.retriever, "once_per_rollout", False)
        states = [(r, self.states[self.who[r]]) for r in rows]
        due = [
            (r, s)
            for r, s in states
            if s.rollout.hybrid
            and s.steps_left >= 1
            and not (once and s.rollout.retrievals)
            and self.when_to_retrieve(s, s.coin_rng)
        ]
        if due:
            found = self.retriever([self._query(s) for _, s in due])
            for (row, state), hit in zip(due, found, strict=True):
                if hit is not None and hit.trace.n_steps <= state.steps_left:
                    self._insert_step(row, state, hit)
        self.stats.retrieval_sec += time.perf_counter() - began

    def _query(self, state: RolloutState) -> RetrievalQuery:
        from rapo_lib.buffer import RetrievalQuery

        return RetrievalQuery(
            question_id=state.question.id,
            golds=tuple(state.question.answers),
            history=history_text(self.protocol, state.question.text, state.rollout.segments),
            rng=state.noise_rng,
            ties_rng=state.ties_rng,
            steps_left=state.steps_left,
        )

    def _insert_step(self, row: int, state: RolloutState, hit: Retrieved) -> None:
        trace = hit.trace
        info = {"trace_id": hit.trace_id, "score": hit.score, "teacher": trace.teacher, "noisy": hit.noisy}
        info |= {"source_question_id": trace.question_id, "n_steps": trace.n_steps}
        state.n_steps += trace.n_steps
        self._insert(row, "retrieval", self.protocol.retrieval_ids(trace.value), info)

    def _insert(self, row: int, origin: str, ids: Sequence[int], info: Mapping[str, Any]) -> None:
        """Append forced ids, cut at the length limit, which ends the rollout."""
        request = self.who[row]
        a = self.length[row]
        ids = ids[: self.limits.max_completion - a]
        self.ids[request, a : a + len(ids)] = ids
        self.length[row] = self.written[request] = a + len(ids)
        rollout = self.states[request].rollout
        rollout.segments.append(Segment(origin, tuple(ids), info=info))
        if self.length[row] >= self.limits.max_completion:
            rollout.end_reason = "length"

    def _feed(self, decoder: Decoder, rows: np.ndarray, starts: np.ndarray) -> None:
        """Feed the ids from `starts` on, but for each row's last one, which the next step feeds."""
        if not len(rows):
            return
        lengths = self.length[rows] - 1 - starts
        at = starts[:, None] + np.arange(lengths.max())  # (rows, longest)
        lines = self.ids[self.who[rows, None], at.clip(max=self.ids.shape[1] - 1)]
        positions = self.prompt_length[self.who[rows]] + starts
        decoder.extend(*map(torch.from_numpy, (rows, lines, positions, lengths)))
        self.token[rows] = self.ids[self.who[rows], self.length[rows] - 1]

    def _drop_finished(self, decoder: Decoder) -> None:
        """Close the gaps of finished rows with rows from the end, so that few cache lines are copied."""
        ended = np.array([bool(self.states[w].rollout.end_reason) for w in self.who])
        n = int((~ended).sum())
        if n == len(ended):
            return
        slots = np.arange(n)
        slots[ended[:n]] = np.flatnonzero(~ended[n:]) + n
        decoder.keep(slots.tolist())
        self.who, self.token, self.length = self.who[slots], self.token[slots], self.length[slots]
        self.waiting = self.waiting[slots]


class _CachedProtocol:
    """The protocol with its results kept for one batch: groups repeat texts, and histories their segments."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._kept: dict[tuple[str, Any], Any] = {}

    def step_text(self, ids: Sequence[int]) -> str:
        return self._keep("step_text", tuple(ids))

    def segment_text(self, segment: Segment) -> str:
        return self.step_text(segment.ids) if segment.origin == "policy" else self._keep("decode", segment.ids)

    def observation_ids(self, text: str) -> tuple[int, ...]:
        return self._keep("observation_ids", text)

    def retrieval_ids(self, value: str) -> tuple[int, ...]:
        return self._keep("retrieval_ids", value)

    def _keep(self, name: str, argument: Any) -> Any:
        key = name, argument
        if key not in self._kept:
            self._kept[key] = getattr(self._protocol, name)(argument)
        return self._kept[key]


def _make_states(
    policy: Policy,
    requests: Sequence[RolloutRequest],
    limits: SamplingLimits,
    seed: int,
    stream: tuple[str | int, ...],
) -> list[RolloutState]:
    prompts: dict[str, tuple[int, ...]] = {}
    states, seen = [], set()
    for request in requests:
        question = request.question
        if (key := (question.id, request.place)) in seen:
            raise ValueError(f"question {question.id!r} is asked twice for place {request.place}")
        seen.add(key)
        if question.id not in prompts:
            prompts[question.id] = _checked_prompt(policy, question, limits)
        rollout = Rollout(question.id, prompts[question.id], [], request.place, request.hybrid)
        budget = (limits.max_steps if question.max_steps is None else question.max_steps) + limits.extra_steps
        states.append(RolloutState(question, rollout, budget, _streams(seed, *stream, *key)))
    return states


def _streams(seed: int, *keys: str | int) -> Callable[[str], np.random.Generator]:
    return lambda purpose: child_rng(seed, *keys, purpose)


def _checked_prompt(policy: Policy, question: Question, limits: SamplingLimits) -> tuple[int, ...]:
    ids = policy.protocol.prompt_ids(question.text)
    if len(ids) + limits.max_completion > policy.context:
        raise ValueError(
            f"question {question.id!r} has a prompt of {len(ids)} ids; with up to {limits.max_completion} completion "
            f"ids it does not fit the {policy.context} ids of {policy.name!r}; shorten the question or max_completion"
        )
    return ids
