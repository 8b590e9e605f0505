"""Side-by-side speed figures: `python -m rapo_lib.bench rollout` (one sub-bench a name, all in one process).

A bench prints ours beside what a reader would use otherwise, measured in the same run on the same machine. Times
are the best of a few rounds, in which the contestants take turns.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import faiss
import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from rapo_lib.buffer import (
    INDEXES,
    TOP_K,
    Encoder,
    MiniLMEncoder,
    StepTraceBuffer,
    TfidfEncoder,
    make_index,
    make_traces,
    select_trajectories,
)
from rapo_lib.config import DATA, RunConfig, child_rng
from rapo_lib.embeddings import EMBEDDINGS, encode_kept
from rapo_lib.execution import make_retriever
from rapo_lib.hostile import HOSTILE
from rapo_lib.local_models import SIZES, QwenSize, save_random_qwen
from rapo_lib.memory import MemoryPlan, Peak, layer_bytes, memory_plan, peak_memory, plan_table
from rapo_lib.methods import METHODS
from rapo_lib.pocket.world import WORD_SKILL
from rapo_lib.policy import Policy, add_lora, load_policy, merged_model, without_known_warnings
from rapo_lib.rollout import RolloutBatch, RolloutRequest, RolloutStats, SamplingLimits, sample_rollouts
from rapo_lib.sandbox import Sandbox
from rapo_lib.tasks import Question, load_pocket_questions
from rapo_lib.tools import Toolbox, make_pocket_toolbox
from rapo_lib.traces import STOP_TAGS, Protocol, Rollout, StepTrace, history_text, load_rollouts, parse_step
from rapo_lib.trainer import (
    LOGITS_BYTES,
    RAPOTrainer,
    _trl_columns,
    grpo_config,
    outcome_reward,
    question_order,
)


def main(argv: list[str] | None = None) -> None:
    """Run one bench by name."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.bench", description=__doc__)
    parser.add_argument("bench", choices=sorted(BENCHES))
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many rounds counts")
    parser.add_argument("--most", type=int, default=PAPER_TRACES, help="scale: keys at most (1000000 needs 8 GB)")
    qwen = parser.add_argument_group("qwen: a real model's seconds and memory")
    qwen.add_argument("--model", default="0.5b", help=f"{', '.join(SIZES)} (random weights), or a model folder")
    qwen.add_argument("--plan", action="store_true", help="print the memory plan of all sizes, and run nothing else")
    qwen.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    qwen.add_argument("--rollouts", type=int, default=4, help="rollouts of one question")
    qwen.add_argument("--tokens", type=int, default=32, help="completion tokens of a rollout at most")
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
    new_ids = round(_time_ours(policy, requests, toolbox).generated / len(requests))
    contestants: dict[str, Callable[[], RolloutTiming]] = {
        "a  our engine": lambda: _time_ours(policy, requests, toolbox),
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
        steps = [parse_step(policy.protocol.step_text(o)).action for o in outputs]
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


# -------------------------------------------------------------------------------------------- update


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def bench_update(options: argparse.Namespace) -> None:
    """Print seconds of the update of one RL step, ours beside stock GRPOTrainer's on the same rollouts.

    Sampled once with the pocket student; sampling is not counted, scoring of old log-probabilities is.
    """
    torch.set_num_threads(1)
    config = RunConfig(rl_steps=4)
    questions, toolbox = load_pocket_questions(config.regime, "train"), make_pocket_toolbox("train")
    first = question_order(len(questions), config)[: config.questions_per_step]
    requests = [RolloutRequest(questions[i], place) for i in first for place in range(config.group_size)]
    limits = SamplingLimits.of(config)
    rollouts = sample_rollouts(load_policy(config.student), requests, toolbox, limits=limits, seed=0).rollouts
    n_tokens = sum(len(r.completion_ids) for r in rollouts)
    print(f"{len(rollouts)} rollouts, {n_tokens} completion tokens, one thread, {config.updates_per_step} updates")

    def seconds(stock: bool, share_with_signal: float) -> float:
        """Fastest RL step but the first; the groups behind the share get equal rewards."""
        for n, r in enumerate(rollouts):
            r.reward = float(n % 2) if n < share_with_signal * len(rollouts) else 0.0
        policy, clock = add_lora(load_policy(config.student), config.lora_r, 0), _Clock()
        with TemporaryDirectory() as folder, without_known_warnings():
            if stock:
                data = Dataset.from_dict(
                    {"prompt": [q.text for q in questions[: config.rl_steps * config.questions_per_step]]}
                )
                settings = grpo_config(config, METHODS["grpo"], policy, folder)
                trl = dict(
                    processing_class=policy.tokenizer, rollout_func=lambda *_: _trl_columns(rollouts), callbacks=[clock]
                )
                trainer = GRPOTrainer(policy.model, outcome_reward, settings, data, **trl)
                trainer.remove_callback(PrinterCallback)
            else:
                fixed = dict(
                    reward=lambda r, q, p: r.reward, sampler=lambda *_, **__: RolloutBatch(rollouts, RolloutStats())
                )
                trainer = RAPOTrainer(
                    policy, questions, toolbox, None, config, METHODS["grpo"], folder, callbacks=[clock], **fixed
                )
            trainer.train()
        ends = clock.ends[config.updates_per_step - 1 :: config.updates_per_step]
        return min(b - a for a, b in zip(ends, ends[1:], strict=False))

    for name, stock, share in (
        ("GRPOTrainer", True, 1.0),
        ("RAPOTrainer", False, 1.0),
        ("RAPOTrainer, half of the groups without signal", False, 0.5),
        ("RAPOTrainer, no group with signal", False, 0.0),
    ):
        print(f"{name:48} {seconds(stock, share):6.2f} s")


# -------------------------------------------------------------------------------------------- buffer


def bench_buffer(options: argparse.Namespace) -> None:
    """Print quality and cost of each encoder on the pocket trajectories of the exploration regime.

    Queries are histories of trajectories that are not in the buffer (other samples of the teacher; the weak
    teacher's), apart by whether every step so far was right. The right next step is one of the same question that
    does what the chain asks for at this place.
    """
    questions = {q.id: q for q in load_pocket_questions("exploration", "train")}
    protocol = Protocol(AutoTokenizer.from_pretrained(DATA / "pocket" / "tokenizer"))
    sampled = {
        name: load_rollouts(path)
        for name in ("teacher", "weak")
        if (path := DATA / "pocket" / "trajectories" / f"{name}_exploration.jsonl").is_file()
    }
    traces = make_traces(sampled["teacher"], questions.values(), protocol, "teacher")
    kept = set(map(id, select_trajectories(sampled["teacher"], TOP_K)))
    queries = {}
    for name, rollouts in sampled.items():
        found = [
            s for r in rollouts if id(r) not in kept for s in _bench_situations(r, questions[r.question_id], protocol)
        ]
        for right in (True, False):
            some = [s for s in found if s.right_so_far == right]
            queries[f"{name}, {'right so far' if right else 'with an error'}"] = some[:: max(1, len(some) // 300)]
    encoders: dict[str, Encoder] = {
        "tfidf": TfidfEncoder(),
        "raw counts": TfidfEncoder(use_idf=False, sublinear_tf=False),
    }
    try:
        encoders["minilm"] = MiniLMEncoder(remember=0)  # a remembered text costs nothing, which is not what is asked
    except ImportError as e:
        print(e)
    rows = [row for name, encoder in encoders.items() for row in _bench_encoder(name, encoder, traces, queries)]
    leaks = StepTraceBuffer.build(traces).audit_leaks(questions.values()).leaks.mean()
    n_questions = len({t.question_id for t in traces})
    print(f"{len(traces)} traces of {n_questions} questions; {leaks:.1%} hold their own gold answer")
    print(pd.DataFrame(rows).round(3).to_string(index=False))


#: Step traces of the paper's buffer, and the dimensions of its keys (arXiv 2603.03078).
PAPER_TRACES = 169_489
#: Standard deviation of the noise on a key, whole vector; the cosine with the unmoved key is about .96.
JITTER = 0.3
#: Real histories that are encoded, and one question in this many whose histories are queries only.
REAL_KEYS, HELD_OUT_ONE_IN = 10_000, 10


def bench_scale(options: argparse.Namespace) -> None:
    """Print build time, memory, search time and recall@1 of both indexes, up to the size of the paper's buffer.

    Keys: MiniLM embeddings of histories of all pocket teachers, drawn with replacement and moved by noise of norm
    JITTER (random keys would be no test: they have no neighbours). Queries: histories of questions that no key is
    about.
    """
    real, queries = _real_rows()
    rng = child_rng(0, "bench.scale")
    queries = queries[rng.permutation(len(queries))[:1024]]
    print(f"{len(real)} real keys, {len(queries)} held-out queries, jitter {JITTER}, one thread, batches of 64")
    faiss.omp_set_num_threads(1)
    rows = []
    for n in [n for n in (10_000, 50_000, PAPER_TRACES, 1_000_000) if n <= options.most]:
        moved = real[rng.integers(len(real), size=n)]
        moved += rng.standard_normal(moved.shape, dtype=np.float32) * (JITTER / math.sqrt(moved.shape[1]))
        moved /= np.linalg.norm(moved, axis=1, keepdims=True)
        best = None
        for kind in INDEXES:
            start = time.perf_counter()
            index = make_index(kind, moved)
            built = time.perf_counter() - start
            scores, took = _searched(index, queries)
            best = scores if best is None else best
            recall = float(np.mean(scores >= best - 1e-5))
            size = len(faiss.serialize_index(index)) / 1e6
            row = {"keys": n, "index": kind, "build s": built, "MB": size, "ms of 64": took * 1e3, "recall@1": recall}
            rows.append(row | {"times exact": took / rows[-1]["ms of 64"] * 1e3 if kind != "exact" else 1.0})
            print(f"  {n:,} keys, {kind}: done in {built + took:.0f} s", flush=True)
            del index
    print(pd.DataFrame(rows).round(3).to_string(index=False))


def _searched(index: Any, queries: np.ndarray) -> tuple[np.ndarray, float]:
    """Best scores (n,), and seconds of a batch of 64 (the median)."""
    scores, seconds = [], []
    for i in range(0, len(queries), 64):
        start = time.perf_counter()
        scores.append(index.search(queries[i : i + 64], 1)[0][:, 0])
        seconds.append(time.perf_counter() - start)
    return np.concatenate(scores), float(np.median(seconds))


def _real_rows() -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of different histories: those of keys, and those of held-out questions. Kept on disk."""
    protocol = Protocol(AutoTokenizer.from_pretrained(DATA / "pocket" / "tokenizer"))
    texts: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for path in sorted((DATA / "pocket" / "trajectories").glob("*.jsonl")):
        questions = {q.id: q.text for q in load_pocket_questions(path.stem.split("_")[-1], "train")}
        for r in (r for r in load_rollouts(path) if r.question_id in questions):
            before: list[Any] = []
            held_out = zlib.crc32(r.question_id.encode()) % HELD_OUT_ONE_IN == 0
            for step in r.steps:
                texts[held_out][history_text(protocol, questions[r.question_id], before)] = None
                before.extend(step.segments)
    rng, encoder = child_rng(0, "bench.histories"), MiniLMEncoder(remember=0)
    out = []
    for held_out, n in ((False, REAL_KEYS), (True, REAL_KEYS // 8)):
        some = list(texts[held_out])
        some = [some[i] for i in rng.permutation(len(some))[:n]]
        say = functools.partial(print, "  ", flush=True)
        out.append(encode_kept(encoder, some, EMBEDDINGS, say=say))
    return out[0], out[1]


class _Situation(NamedTuple):
    """A history, the question, the place in its chain, and whether every step so far was right."""

    history: str
    question: Question
    place: int
    right_so_far: bool


def _bench_situations(rollout: Rollout, question: Question, protocol: Protocol) -> list[_Situation]:
    """Histories before each later step that the question's chain has a step for."""
    out, before, right = [], [], True
    for t, step in enumerate(rollout.steps[: len(question.info["words"])]):
        if t:
            out.append(_Situation(history_text(protocol, question.text, before), question, t, right))
        before.extend(step.segments)
        right &= f"<result> {question.info['chain'][t + 1]}</result>" in protocol.decode(step.ids)
    return out


_BENCH_MARKS = ("right next step", "step of before", "same question", "same skill")


def _bench_marks(s: _Situation, trace: StepTrace) -> dict[str, bool]:
    words = re.findall(r"\w+", trace.value)
    skill = next((WORD_SKILL[w] for w in words if w in WORD_SKILL), None)
    same = trace.question_id == s.question.id
    right = same and s.question.info["words"][s.place] in words
    marks = (right, same and trace.step < s.place, same, skill == s.question.info["skills"][s.place])
    return dict(zip(_BENCH_MARKS, marks, strict=True))


def _bench_encoder(
    name: str, encoder: Encoder, traces: Sequence[StepTrace], queries: Mapping[str, Sequence[_Situation]]
) -> list[dict[str, Any]]:
    """One row a kind of query: shares of good answers, milliseconds, seconds, megabytes."""
    tick = time.perf_counter()
    buffer = StepTraceBuffer.build(traces, encoder)
    build_sec = time.perf_counter() - tick
    rows = []
    for kind, situations in queries.items():
        tick = time.perf_counter()
        found = [buffer.search([s.history], 1)[0] for s in situations]
        query_ms = (time.perf_counter() - tick) / max(len(situations), 1) * 1e3
        marks = [_bench_marks(s, traces[hits[0].trace_id]) for s, hits in zip(situations, found, strict=True) if hits]
        shares = {mark: sum(m[mark] for m in marks) / max(len(situations), 1) for mark in _BENCH_MARKS}
        rows.append(
            {"encoder": name, "queries": kind, "n": len(situations)}
            | shares
            | {"ms/query": query_ms, "build s": build_sec, "dim": encoder.dim, "keys": buffer.index.ntotal}
            | {"MB": buffer.index.ntotal * encoder.dim * 4 / 1e6, "cut keys": buffer.cut_keys_frac}
        )
    return rows


# ------------------------------------------------------------------------------------------- sandbox


def bench_sandbox(options: argparse.Namespace) -> None:
    """Print milliseconds per call and what each hostile snippet came to."""
    box = Sandbox()
    tick = time.perf_counter()
    box.run(["0"])
    print(f"start of the worker: {(time.perf_counter() - tick) * 1e3:.0f} ms")
    print("\n  ".join(["what holds here:", *box.barrier()]))
    for n in (1, 100):
        rounds = 300 // n
        tick = time.perf_counter()
        for r in range(rounds):
            box.run([f"{r} * {n} + {i}" for i in range(n)], f"x = {n}")
        print(f"new calls, {n} at a time: {(time.perf_counter() - tick) / (rounds * n) * 1e3:.2f} ms a call")
    tick = time.perf_counter()
    for _ in range(1000):
        box.run(["0"])
    print(f"cached: {(time.perf_counter() - tick) * 1e3:.1f} us a call")
    for name, (code, outcome) in HOSTILE.items():
        tick = time.perf_counter()
        result = box.run([code])[0]
        sec = time.perf_counter() - tick
        mark = "" if result.outcome == outcome else f"  (not {outcome})"
        print(f"{name:36} {sec:6.2f} s  {result.outcome:9} {result.text[:70]!r}{mark}")
    box.close()


# ---------------------------------------------------------------------------------------------- qwen

PLANNED = ("0.5b", "qwen3-0.6b", "1.5b", "3b", "7b")


def bench_qwen(options: argparse.Namespace) -> None:
    """Print seconds, peak memory and tokens a second of loading, sampling and one RAPO update of a real-sized model.

    A name takes that Qwen's shape with random weights, which write noise: half of the rollouts are given a reward, so
    that there is something to learn.
    """
    if options.plan:
        print(plan_table([(name, _plan(SIZES[name])) for name in PLANNED]))
        print("computed for rollouts of 2,448 tokens, prompt included; only the kept bytes a token were measured, here")
        return
    dtype = getattr(torch, options.dtype) if options.dtype else None
    with TemporaryDirectory() as folder:
        source = options.model
        if source in SIZES:
            save_random_qwen(folder, SIZES[source], dtype or torch.bfloat16)
            source = folder
        with peak_memory() as loading:
            policy = add_lora(load_policy(source, dtype=dtype), r=16, seed=0)
    n_all, model = policy.model.num_parameters(), policy.model
    trained = [p for p in model.parameters() if p.requires_grad]
    n_trained = sum(p.numel() for p in trained)
    kinds = {str(p.dtype).removeprefix("torch.") for p in trained}
    print(
        f"{options.model}: {n_all - n_trained:,} parameters in {str(policy.base.dtype).removeprefix('torch.')} on "
        f"{policy.device}, adapter {n_trained:,} in {', '.join(kinds)}, {options.threads} thread(s)"
    )
    print(f"{'':44}{'sec':>8}{'peak GB':>9}{'tokens/s':>10}")
    _print_phase("load, adapter", loading)
    config = RunConfig(
        rl_steps=1,
        updates_per_step=1,
        questions_per_step=1,
        group_size=options.rollouts,
        n_hybrid=options.rollouts // 2,
        max_completion=options.tokens,
        threads=options.threads,
        learning_rate=1e-5,
    )
    questions, toolbox = load_pocket_questions(config.regime, "train"), make_pocket_toolbox("train")
    question = questions[question_order(len(questions), config)[0]]
    retriever = make_retriever(config, METHODS["rapo"], policy.protocol, questions)
    requests = [RolloutRequest(question, i, i >= config.n_hybrid) for i in range(config.group_size)]
    with peak_memory() as sampling:
        batch = sample_rollouts(
            policy, requests, toolbox, limits=SamplingLimits.of(config), seed=0, retriever=retriever
        )
    _print_phase("rollouts", sampling, batch.stats.generated_tokens)
    for n, r in enumerate(batch.rollouts):
        r.reward = float(n % 2)
    n_scored = batch.stats.generated_tokens
    read = n_scored + sum(len(r.prompt_ids) for r in batch.rollouts)
    for checkpointing in (True, False):
        with TemporaryDirectory() as folder:
            trainer = RAPOTrainer(
                policy,
                questions,
                toolbox,
                retriever,
                config,
                METHODS["rapo"],
                folder,
                reward=lambda r, q, p: r.reward,
                sampler=lambda *_, **__: batch,
            )
            trainer.args.gradient_checkpointing = checkpointing
            if not checkpointing:
                model.gradient_checkpointing_disable()
            with peak_memory() as updating:
                trainer.train()
        _print_phase(f"update, {'activations recomputed' if checkpointing else 'all activations kept'}", updating, read)
    ends = Counter(r.end_reason for r in batch.rollouts)
    print("rollouts ended by " + ", ".join(f"{reason} ({n})" for reason, n in ends.items()))
    state = trainer.optimizer.state
    held = sum(t.nbytes for moments in state.values() for t in moments.values())
    print(f"optimiser: moments of {len(state)} tensors, {held / 1e6:.1f} MB; of frozen weights: ", end="")
    print(sum(not p.requires_grad for p in state))
    whole = 4 * n_scored * policy.base.get_input_embeddings().weight.shape[0]
    print(f"float32 logits of the {n_scored} scored tokens: {whole / 1e6:.0f} MB; at once {LOGITS_BYTES / 1e6:.0f} MB")


def _print_phase(name: str, peak: Peak, n_tokens: int = 0) -> None:
    rate = f"{n_tokens / peak.sec:10,.1f}" if n_tokens else ""
    print(f"{name:44}{peak.sec:8.2f}{peak.bytes / 1e9:9.2f}{rate}", flush=True)


def _plan(size: QwenSize) -> MemoryPlan:
    kept, layer = (layer_bytes(size, checkpointing=c) for c in (True, False))
    return memory_plan(size, 16, kept, layer)


BENCHES: dict[str, Callable[[argparse.Namespace], None]] = {
    "rollout": bench_rollout,
    "update": bench_update,
    "buffer": bench_buffer,
    "scale": bench_scale,
    "sandbox": bench_sandbox,
    "qwen": bench_qwen,
}

if __name__ == "__main__":
    main()
