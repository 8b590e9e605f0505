"""What one run does: load, train, evaluate, and write its files. A pure function of its RunConfig.

Notebook 05 explains this module; `rapo_lib.runs` decides which runs are due and where they lie.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from rapo_lib.benchmarks import load_benchmark, make_toolbox, tools_needed
from rapo_lib.buffer import (
    TOP_K,
    Retriever,
    StepTraceBuffer,
    import_traces_jsonl,
    make_encoder,
    make_traces,
    select_trajectories,
)
from rapo_lib.checkpoints import latest_checkpoint, refuse_other_run
from rapo_lib.config import ROOT, RunConfig, child_rng
from rapo_lib.embeddings import EMBEDDINGS
from rapo_lib.evaluate import BATCH, evaluate, summarise_skills
from rapo_lib.guard import CollapseGuard
from rapo_lib.methods import Method, get_method
from rapo_lib.pocket.files import POCKET, checked
from rapo_lib.policy import Policy, add_lora, load_policy, load_tokenizer, save_adapter
from rapo_lib.rewards import get_reward
from rapo_lib.rollout import SamplingLimits
from rapo_lib.runs import WORK, buffer_teachers
from rapo_lib.tasks import SPLITS, Question, check_disjoint, load_pocket_questions, required_tools
from rapo_lib.tools import Toolbox, make_pocket_toolbox
from rapo_lib.traces import (
    Protocol,
    Rollout,
    jsonl_line,
    load_jsonl,
    load_rollouts,
    retokenise,
    write_bytes_atomic,
    write_text_atomic,
)
from rapo_lib.trainer import RAPOTrainer, score_rollouts, train_sft

#: Seed of every evaluation: all runs answer with the same random numbers.
EVALUATION_SEED = 0
#: RL steps and SFT updates between checkpoints: what a kill can cost at most.
RL_EVERY, SFT_EVERY = 1, 25
#: What the recorder knows, inside each checkpoint.
STATE = "recorder.json"


def execute_run(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Train one policy and write metrics, evaluations, some rollouts and the adapter.

    Where the folder holds a checkpoint of this run, it goes on from there and ends as if it had never stopped. Under
    torchrun every process samples and learns from its share of the rollouts; the first one evaluates and writes.

    Args:
        config: the run. folder: where metrics.parquet, evals.parquet, final.parquet, rollouts.jsonl, adapter/
            and, for RL, best/ (the adapter of the best validation) and adapters/ (of each) go; checkpoints lie below
            work/.

    Returns:
        Facts for done.json: `pass@1` on the test questions, sampled and greedy, training seconds, the best
        validation, alarms of the collapse guard, and the steps at which it was taken up again. Empty in processes
        other than the first.

    Raises:
        RuntimeError: a tool that the questions need is missing.
        ValueError: the folder holds a checkpoint of another configuration, or the buffer's questions are among those
            of the evaluation.
    """
    torch.set_num_threads(config.threads)
    method, reward = get_method(config.method), get_reward(config.reward)
    train, validation, test = (questions_of(config, split) for split in SPLITS)
    check_disjoint(train, [*validation, *test])
    toolbox = toolbox_of(config, "train")
    toolbox.require(required_tools(train) if config.questions == "pocket" else tools_needed(config.questions))
    policy = add_lora(load_policy(config.student), config.lora_r, config.seed)
    teacher = load_trajectories(config, policy.protocol, train) if method.imitates else []
    check_disjoint([r.question_id for r in teacher], [*validation, *test])
    retriever = make_retriever(config, method, policy.protocol, train)
    if retriever:  # imported traces may come from any question
        check_disjoint(retriever.buffer.question_ids + retriever.buffer.question_texts, [*validation, *test])
    recorder, work = Recorder(config, folder, policy, validation[: config.n_eval]), folder / WORK
    checkpoint = latest_checkpoint(work)
    if method.trained_by == "sft+rl" and checkpoint is None:
        train_sft(policy, teacher, config, work / "sft", checkpoint_every=SFT_EVERY)
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        recorder.begin(checkpoint)
    if method.trained_by == "sft":
        how = {"on_update": recorder.on_update, "checkpoint_every": SFT_EVERY, "on_checkpoint": recorder.save_state}
        train_sft(policy, teacher, config, work, **how)
    else:
        how = {"on_rl_step": recorder.on_rl_step, "checkpoint_every": RL_EVERY, "on_checkpoint": recorder.save_state}
        how |= {"teacher": teacher if method.off_policy else [], "reward": reward}
        trainer = RAPOTrainer(policy, train, toolbox, retriever, config, method, work, **how)
        trainer.train(resume_from_checkpoint=True)
    return recorder.finish(test[: config.n_final]) if first else {}


def questions_of(config: RunConfig, split: str) -> list[Question]:
    """The questions of one split of a run's question set."""
    if config.questions == "pocket":
        return load_pocket_questions(config.regime, split)
    return load_benchmark(_place_of(config.questions), split)


def _place_of(questions: str) -> str:
    """A name, or the folder: as given, else below the repository, since notebooks run in a folder of their own."""
    return str(ROOT / questions) if (ROOT / questions).is_dir() else questions


def toolbox_of(config: RunConfig, split: str) -> Toolbox:
    """The tools of a run's question set, over the facts of one split where splits differ in them."""
    if config.questions != "pocket":
        return make_toolbox(_place_of(config.questions), split, config.search)
    if config.search:
        raise ValueError(f"search is {config.search!r}, but pocket questions are about facts that no server knows")
    return make_pocket_toolbox(split)


def load_trajectories(config: RunConfig, protocol: Protocol, questions: Sequence[Question]) -> list[Rollout]:
    """The best correct trajectories of each question from the buffer's teachers, in the policy's ids (to imitate)."""
    texts, out = {q.id: q.text for q in questions}, []
    for path, chosen in choose_trajectories(config, protocol):
        source = protocol_of(path, protocol)
        same = source.tokenizer.get_vocab() == protocol.tokenizer.get_vocab()
        out += chosen if same else [retokenise(r, texts[r.question_id], source, protocol) for r in chosen]
    return out


def choose_trajectories(config: RunConfig, protocol: Protocol) -> list[tuple[Path, list[Rollout]]]:
    """Each teacher's file with what is kept of it: the best correct trajectories of each question.

    Where the buffer says `teacher&weak`, it is at most as many of a question as the second one has. Of what is left of
    all teachers, `n_trajectories` are drawn by the seed, so that every method gets the same ones.

    Raises:
        ValueError: n_trajectories is above what there is, or counts trajectories where a file holds single steps.
    """
    found = [_choose(paths, protocol) for paths in buffer_teachers(config)]
    total = sum(len(chosen) for _, chosen in found)
    if not config.n_trajectories:
        return found
    if not 0 < config.n_trajectories <= total:
        raise ValueError(f"n_trajectories is {config.n_trajectories}; allowed: 1 to {total}, or 0 for all of them")
    drawn = child_rng(config.seed, "buffer.trajectories").permutation(total)[: config.n_trajectories]
    keep, out, at = set(drawn.tolist()), [], 0
    for path, chosen in found:
        out.append((path, [r for i, r in enumerate(chosen, at) if i in keep]))
        at += len(chosen)
    return out


def _choose(paths: Sequence[Path], protocol: Protocol) -> tuple[Path, list[Rollout]]:
    """The trajectories kept of one teacher's file; further files limit how many of a question."""
    kept = []
    for path in map(checked, paths):
        n_ids = len(protocol_of(path, protocol).tokenizer)
        kept.append(select_trajectories(load_rollouts(path, n_ids), TOP_K))
    chosen, *limits = kept
    for limit in limits:
        chosen = _at_most_as_many(chosen, limit)
    return paths[0], chosen


def _at_most_as_many(rollouts: Sequence[Rollout], limit: Sequence[Rollout]) -> list[Rollout]:
    """Of each question the first ones, at most as many as the limit holds of it."""
    left, kept = Counter(r.question_id for r in limit), []
    for r in rollouts:
        if left[r.question_id] > 0:
            left[r.question_id] -= 1
            kept.append(r)
    return kept


def protocol_of(path: Path, protocol: Protocol) -> Protocol:
    """Whose ids a file of trajectories holds: the pocket tokenizer's for those that ship, else the policy's own."""
    if path.parent != POCKET / "trajectories":
        return protocol
    return Protocol(load_tokenizer(POCKET / "tokenizer"))


def make_buffer(config: RunConfig, protocol: Protocol, questions: Sequence[Question]) -> StepTraceBuffer:
    """The step-trace buffer of a run, from its teachers' sampled trajectories or from imported traces."""
    (first, *_), *_ = buffer_teachers(config)
    if "segments" not in next(load_jsonl(checked(first))):
        if config.n_trajectories:
            raise ValueError(f"n_trajectories is {config.n_trajectories}, but {first} holds single steps; allowed: 0")
        return StepTraceBuffer.build(import_traces_jsonl(first), make_encoder(config.encoder), config.index, EMBEDDINGS)
    traces = []
    for path, chosen in choose_trajectories(config, protocol):
        traces += make_traces(chosen, questions, protocol_of(path, protocol), path.stem.split("_")[0], TOP_K)
    return StepTraceBuffer.build(traces, make_encoder(config.encoder), config.index, EMBEDDINGS)


def make_retriever(
    config: RunConfig, method: Method, protocol: Protocol, questions: Sequence[Question]
) -> Retriever | None:
    """The retriever of a run; None for a method that does not retrieve."""
    if not method.retrieves:
        return None
    return Retriever(
        make_buffer(config, protocol, questions),
        noise_prob=config.noise_prob,
        leak_guard=config.leak_guard,
        exclude_same_question=config.exclude_same_question,
        unit=method.unit,
    )


class Recorder:
    """Writes what a run leaves behind, as it comes: a run that dies has lost nothing that it measured.

    Args:
        config: the run. folder: where its files go. policy: who is trained. questions: for validation.
    """

    def __init__(self, config: RunConfig, folder: Path, policy: Policy, questions: Sequence[Question]) -> None:
        self.config, self.folder, self.policy, self.questions = config, folder, policy, list(questions)
        self.limits = SamplingLimits.of(config)
        self.toolbox = toolbox_of(config, "validation")
        self.guard = CollapseGuard()
        self.metrics: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.kept: list[str] = []  # lines of rollouts.jsonl
        self.alarms: list[str] = []
        self.best: dict[str, float] = {}
        self.resumed_at: list[int] = []
        self.train_sec = 0.0
        self.since = time.perf_counter()

    def begin(self, checkpoint: Path | None) -> None:
        """Go on from a checkpoint, or evaluate the untrained policy.

        Raises:
            ValueError: the checkpoint belongs to another configuration, or the rollouts kept so far have changed.
        """
        if checkpoint is None:
            self._pause()  # what came before the first RL step counts
            self.evaluate(0)
            self._save_rollouts()
        else:
            refuse_other_run(checkpoint, dataclasses.asdict(self.config))
            self._restore(checkpoint)
        self.since = time.perf_counter()

    def save_state(self, checkpoint: Path) -> None:
        """Put what was measured so far into a checkpoint that is being written."""
        self._pause()
        state = {k: getattr(self, k) for k in ("metrics", "evals", "best", "resumed_at", "train_sec")}
        state |= {"kept": len(self.kept), "kept_sha256": _sha256(self.kept)}
        write_text_atomic(checkpoint / STATE, json.dumps(state) + "\n")

    def _restore(self, checkpoint: Path) -> None:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        path = self.folder / "rollouts.jsonl"
        # Rows behind the checkpoint's come again.
        self.kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[: state.pop("kept")]
        if (want := state.pop("kept_sha256")) != (got := _sha256(self.kept)):
            raise ValueError(
                f"{path}: sha256 of its first {len(self.kept)} rows is {got}, the checkpoint {checkpoint.name} expects "
                f"{want}; delete {self.folder} to do the run again"
            )
        for name, value in state.items():
            setattr(self, name, value)
        rows = (row for row in self.metrics if "rl_step" in row)  # SFT has none
        self.alarms = [alarm.text for row in rows if (alarm := self.guard.update(row))]
        self.resumed_at.append(int(self.metrics[-1].get("rl_step") or self.metrics[-1]["update"]))
        print(f"taken up again after {checkpoint.name}", flush=True)

    def on_rl_step(self, row: dict[str, float], rollouts: list[Rollout]) -> None:
        """One RL step has ended: note its metrics, keep some rollouts, evaluate now and then."""
        self._pause()
        self.metrics.append(row)
        step, last = int(row["rl_step"]), self.config.rl_steps
        due = step % self.config.eval_every == 0
        if due or step in (1, last):
            self._keep(step, rollouts)
        if due or step == last:
            self._keep_adapter(step, self.evaluate(step))
        else:
            self._write_table("metrics", pd.DataFrame(self.metrics))
        print(f"RL step {step}/{last}: reward {row['reward']:.3f}, entropy {row['entropy']:.3f}", flush=True)
        if alarm := self.guard.update(row):
            self.alarms.append(alarm.text)
            print(f"WARNING: {alarm.text}", flush=True)
        self.since = time.perf_counter()

    def on_update(self, row: dict[str, float]) -> None:
        """One optimiser step of SFT has ended."""
        self.metrics.append(row)

    def evaluate(self, rl_step: int) -> float:
        """Pass@1 on the validation questions, with temperature 1 and without retrieval."""
        table = self._answer(self.questions, self.toolbox, greedy=False)
        self._add("validation", rl_step, table, greedy=False)
        self._save()
        return self.evals[-1]["pass@1"]

    def finish(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Answer the test questions, sampled and greedy, and save everything."""
        self._pause()
        toolbox, tables, facts = toolbox_of(self.config, "test"), [], {}
        for greedy in (False, True):
            table = self._answer(questions, toolbox, greedy=greedy)
            tables.append(table.assign(greedy=greedy))
            self._add("test", self.config.rl_steps, table, greedy=greedy)
            facts["pass@1 greedy" if greedy else "pass@1"] = float(table["correct"].mean())
        self._write_table("final", pd.concat(tables, ignore_index=True))
        self._save()
        save_adapter(self.policy, self.folder / "adapter")
        facts["processes"] = int(os.environ.get("WORLD_SIZE", "1"))
        facts |= {"n_final": len(questions), "train_sec": round(self.train_sec, 1), "alarms": self.alarms}
        return facts | {"best": self.best, "resumed_at": self.resumed_at}

    def _pause(self) -> None:
        now = time.perf_counter()
        self.train_sec += now - self.since
        self.since = now

    def _keep_adapter(self, step: int, rate: float) -> None:
        """Save the adapter of an evaluated RL step, and that of the best validation so far; of equals the first."""
        save_adapter(self.policy, self.folder / "adapters" / f"step{step}")
        if rate > self.best.get("pass@1", -1.0):
            self.best = {"rl_step": step, "pass@1": rate}
            save_adapter(self.policy, self.folder / "best")

    def _answer(self, questions: Sequence[Question], toolbox: Any, *, greedy: bool) -> pd.DataFrame:
        c = self.config
        return evaluate(
            self.policy,
            questions,
            toolbox,
            limits=self.limits,
            seed=EVALUATION_SEED,
            greedy=greedy,
            temperature=c.temperature,
            at_once=c.rollouts_at_once or BATCH,
        )

    def _add(self, split: str, rl_step: int, table: pd.DataFrame, *, greedy: bool) -> None:
        generated = sum(m.get("generated_tokens", 0) for m in self.metrics)
        row = {
            "rl_step": rl_step,
            "split": split,
            "greedy": greedy,
            "n": len(table),
            "pass@1": float(table["correct"].mean()),
        }
        skills = {f"rate_{r['skill']}": r["rate"] for r in summarise_skills(table).to_dict("records")}
        self.evals.append(row | {"train_sec": self.train_sec, "generated_tokens": generated} | skills)

    def _keep(self, step: int, rollouts: list[Rollout]) -> None:
        """All rollouts of one question, if possible one with a signal, with log-probabilities after the update."""
        groups: dict[str, list[Rollout]] = {}
        for r in rollouts:
            groups.setdefault(r.question_id, []).append(r)
        signals = {
            q: float(np.nanstd([np.nan if r.reward is None else r.reward for r in g])) for q, g in groups.items()
        }
        chosen = groups[max(groups, key=lambda q: (signals[q] > 0, sum(len(r.retrievals) for r in groups[q]) > 0))]
        after = score_rollouts(self.policy, chosen, self.config.temperature)
        rows = zip(chosen, after, strict=True)
        self.kept += [jsonl_line({"rl_step": step, "logps_after": a, "rollout": r.to_dict()}) for r, a in rows]
        self._save_rollouts()

    def _save(self) -> None:
        self._write_table("metrics", pd.DataFrame(self.metrics))
        self._write_table("evals", pd.DataFrame(self.evals))

    def _save_rollouts(self) -> None:
        write_text_atomic(self.folder / "rollouts.jsonl", "".join(self.kept))

    def _write_table(self, name: str, table: pd.DataFrame) -> None:
        write_bytes_atomic(self.folder / f"{name}.parquet", table.to_parquet())


def _sha256(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()
