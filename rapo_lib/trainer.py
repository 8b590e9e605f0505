"""RAPOTrainer: TRL's GRPOTrainer with our rollouts, advantages and shaped ratio; and SFT.

Notebook 05 explains this module. One RL step is one rollout batch and `updates_per_step` optimiser
steps; every count here, and every checkpoint, is in RL steps.

What differs from GRPOTrainer (trl 1.16), and how:
1. Rollouts come from `rapo_lib.rollout` through `rollout_func`; old log-probabilities are the sampler's.
2. After `super()._generate_and_score_completions` the advantages are ours (Eq. 9 and 10, groups by
   question) and log s is subtracted from the old log-probabilities, which scales the importance ratio
   by s, clipping included (Eq. 8).
3. `_get_per_token_logps_and_entropies` scores only where the policy wrote, on rows without padding in
   chunks of similar length: the same numbers, in a fraction of the time.
4. `_compute_loss` hides the rows whose advantage is 0 from the forward pass and trims padding, then
   calls `super()`. With beta = 0 their gradient is exactly 0.
5. The mini-batches of an RL step are drawn from a stream of (seed, RL step), so a resumed run draws the same.
6. LUFFY: the teacher's trajectories take the last places of a group; their ratio is `luffy_log_ratio`. Clipping
   never touches it: it stays below 1, and no rollout of the group earns more, so their advantage is not negative.
7. Checkpoints are those of `rapo_lib.checkpoints`: whole, checked, without pickles.
8. Where the logits of all scored tokens would be large (Qwen: 151,936 numbers a token), they are computed in chunks
   and again in the backward pass; GRPOTrainer holds them all. Large models get small micro-batches by default.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from rapo_lib.checkpoints import ExactCheckpoints, latest_checkpoint
from rapo_lib.config import RunConfig, child_rng
from rapo_lib.methods import Method
from rapo_lib.objective import (
    group_normalise,
    groups_without_signal,
    luffy_log_ratio,
    negative_factor_frac,
    rollout_retrieval_reward,
    shaping_factor,
    token_logps_and_entropies,
)
from rapo_lib.policy import Policy, has_adapter, without_known_warnings
from rapo_lib.rewards import Reward, pocket_reward
from rapo_lib.rollout import (
    RolloutBatch,
    RolloutRequest,
    SamplingLimits,
    sample_and_score,
    sample_rollouts,
)
from rapo_lib.tasks import Question
from rapo_lib.traces import Rollout
from rapo_lib.vllm_sampler import TurnSampler, check_vllm, engine_of, vllm_settings

#: Padded tokens of one forward pass on a CPU: activations of this size stay in its cache.
CPU_CHUNK_TOKENS = 2048
#: Who samples in training (`RunConfig.generator`): `rapo_lib.rollout`, or vLLM through TRL.
GENERATORS = ("own", "vllm")
#: The released code's clip range (below, above) and dual clip (arXiv 2603.03078, released scripts).
RELEASED_CLIP, RELEASED_DUAL_CLIP = (0.2, 0.28), 3.0
#: Above this many parameters activations are recomputed in the backward pass, and micro-batches are small.
CHECKPOINTING_FROM = 100_000_000
#: Completion tokens of a micro-batch of such a model at most, unless one rollout alone may be longer.
LARGE_MICRO_BATCH_TOKENS = 16_384
#: How long a process waits for another one: the first one alone evaluates, which takes hours with a large model.
DDP_TIMEOUT_SEC = 24 * 3600
#: Float32 logits held at once; above this they are computed in chunks (the work on a chunk holds about six such).
LOGITS_BYTES = 128 << 20
#: Model types whose forward ends in `lm_head(hidden)` and nothing behind it; others compute their logits whole.
PLAIN_HEADS = ("qwen2", "qwen3", "llama", "mistral")


# ---------------------------------------------------------------------------------------------- scoring


def score_tokens(
    model: Any,
    ids: Tensor,
    attention: Tensor,
    scored: Tensor,
    *,
    temperature: float = 1.0,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies at the scored completion tokens, and nothing computed elsewhere.

    Args:
        model: a causal language model, wrapped by PEFT or DistributedDataParallel or not.
        ids: prompt and completion, (B, P + T), prompts padded at the left, completions at the right.
        attention: 1 at real tokens, (B, P + T).
        scored: 1 at the completion tokens to score, (B, T).
        temperature: of the sampler.
        max_tokens: padded tokens of one forward pass at most (but one row at least); None: all rows at once.

    Returns:
        Log-probabilities and entropies in nats, (B, T), 0 where not scored; gradients flow through the first.

    Edge cases:
        Nothing to score: zeros that hang on the model's parameters, at the cost of one token's forward
        pass, so that every process takes part in the backward pass and the optimiser steps as ever.
        A large vocabulary: logits are held for LOGITS_BYTES at a time, in the backward pass too.
    """
    n_prompt, n = ids.shape[1] - scored.shape[1], ids.shape[1]
    wanted = torch.cat([scored.new_zeros(len(ids), n_prompt), scored], 1).bool()  # (B, P + T)
    start = attention.argmax(1)  # left padding ends here
    # A row ends at its last scored token: what stands behind cannot change what stands before.
    stop = torch.where(wanted.any(1), n - wanted.flip(1).int().argmax(1), start + 1)
    logps, entropies = (torch.zeros(ids.shape, device=ids.device) for _ in range(2))
    rows = wanted.any(1).nonzero().flatten().tolist() or [0]
    for chunk in _chunks(rows, (stop - start).tolist(), max_tokens):
        rows_of = torch.tensor(chunk, device=ids.device)[:, None]  # (b, 1)
        columns = start[rows_of] + torch.arange(int((stop - start)[rows_of].max()), device=ids.device)  # (b, width)
        inside, columns = columns < stop[rows_of], columns.clamp(max=n - 1)
        x, target = ids[rows_of, columns], wanted[rows_of, columns] & inside
        # Padding stands at the right only, where causal attention never looks: no attention mask. Logits at t - 1
        # predict token t; the first token of a prompt is never scored, so nothing wraps around.
        chosen, spread = _score(model, x, target, temperature)
        place = (rows_of.expand_as(columns)[target], columns[target])
        logps, entropies = logps.index_put(place, chosen), entropies.index_put(place, spread)
    return logps[:, n_prompt:], entropies[:, n_prompt:]


def _score(model: Any, x: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the ids x where target is True, (scored,) each."""
    keep = dict(logits_to_keep=target.roll(-1, 1), use_cache=False)
    base, chosen = _causal_model(model), x[target]
    n_tokens = LOGITS_BYTES // (4 * base.get_output_embeddings().weight.shape[0])
    if len(chosen) <= n_tokens or base.config.model_type not in PLAIN_HEADS:
        logits = model(input_ids=x, **keep).logits  # (scored, V)
        return token_logps_and_entropies(logits.float(), chosen, temperature)
    with _without_head(base) as head:
        hidden = model(input_ids=x, **keep).logits  # (scored, hidden)

    def of(part: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return token_logps_and_entropies(head(part.to(head.weight.dtype)).float(), ids, temperature)

    if hidden.requires_grad:
        of = functools.partial(checkpoint, of, use_reentrant=False)
    pieces = [of(*piece) for piece in zip(hidden.split(n_tokens), chosen.split(n_tokens), strict=True)]
    logps, entropies = zip(*pieces, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _causal_model(model: Any) -> Any:
    """The Hugging Face model inside of DistributedDataParallel and PEFT."""
    model = extract_model_from_parallel(model, keep_fp32_wrapper=True)
    return model.get_base_model() if has_adapter(model) else model


@contextmanager
def _without_head(model: Any) -> Iterator[torch.nn.Module]:
    """The model's forward gives hidden states in place of logits; the head that was left out is handed over."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: hidden
    try:
        yield head
    finally:
        del head.forward


def _chunks(rows: Sequence[int], lengths: Sequence[int], max_tokens: int | None) -> Iterator[list[int]]:
    """Rows by length, in chunks whose padded size stays under the limit."""
    chunk: list[int] = []
    for row in sorted(rows, key=lambda i: lengths[i]):
        if chunk and max_tokens is not None and (len(chunk) + 1) * lengths[row] > max_tokens:
            yield chunk
            chunk = []
        chunk.append(row)
    yield chunk


def score_rollouts(policy: Policy, rollouts: Sequence[Rollout], temperature: float = 1.0) -> list[list[float]]:
    """Log-probabilities in nats of given rollouts under the policy as it is now.

    Returns:
        One list a rollout, one number a completion token; 0.0 where the policy did not write.
    """
    return logps_and_entropies(policy, rollouts, temperature)[0]


def logps_and_entropies(
    policy: Policy, rollouts: Sequence[Rollout], temperature: float = 1.0
) -> tuple[list[list[float]], list[list[float]]]:
    """As `score_rollouts`, and entropies in nats of the distributions that the tokens came from."""
    prompts = [torch.tensor(r.prompt_ids) for r in rollouts]
    rest = [torch.tensor(r.completion_ids) for r in rollouts]
    masks = [torch.tensor(r.policy_mask) for r in rollouts]
    left, right = dict(batch_first=True, padding_side="left"), dict(batch_first=True)
    ids = torch.cat([pad_sequence(prompts, **left), pad_sequence(rest, **right)], 1)
    ones = [[torch.ones_like(x) for x in part] for part in (prompts, rest)]
    attention = torch.cat([pad_sequence(ones[0], **left), pad_sequence(ones[1], **right)], 1)
    arguments = (x.to(policy.device) for x in (ids, attention, pad_sequence(masks, **right)))
    with torch.no_grad():
        scored = score_tokens(policy.model, *arguments, temperature=temperature, max_tokens=CPU_CHUNK_TOKENS)
    logps, entropies = ([row[: len(c)].tolist() for row, c in zip(x, rest, strict=True)] for x in scored)
    return logps, entropies


# ------------------------------------------------------------------------------------------ the trainer


def optimiser_settings(config: RunConfig, policy: Policy) -> dict[str, Any]:
    """Settings of the optimiser and the loop that RL and SFT share.

    TRL's and transformers' defaults differ in nearly all of them: bf16 (on a CPU it makes a step 6
    times slower and moves log-probabilities by .02), linear decay, betas (.9, .999), gradient checkpointing.
    """
    return dict(
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=next(policy.model.parameters()).dtype == torch.bfloat16,
        use_cpu=policy.device.type == "cpu",
        gradient_checkpointing=policy.model.num_parameters() > CHECKPOINTING_FROM,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # processes run different numbers of forward passes, and no buffer changes
        ddp_timeout=DDP_TIMEOUT_SEC,
        seed=config.seed,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def grpo_config(
    config: RunConfig,
    method: Method,
    policy: Policy,
    output_dir: Path | str,
    checkpoint_every: int | None = None,
) -> GRPOConfig:
    """The GRPOConfig of a run: every setting in which TRL's default is not ours.

    Args:
        config: the run.
        method: whose loss it is.
        policy: the policy to train.
        output_dir: folder of checkpoints.
        checkpoint_every: RL steps between checkpoints; None: no checkpoints.

    Raises:
        ValueError: the rollouts of an RL step do not divide into optimiser steps, processes and micro-batches.
    """
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    rollouts, parts = config.questions_per_step * config.group_size, config.updates_per_step * n_processes
    rows = rollouts // parts
    micro_batch = config.micro_batch or default_micro_batch(rows, config.max_completion, policy.model.num_parameters())
    if rollouts % parts or rows % micro_batch:
        raise ValueError(
            f"{rollouts} rollouts do not divide into {config.updates_per_step} optimiser steps x {n_processes} "
            f"processes x micro-batches of {micro_batch}; change group_size, questions_per_step or micro_batch"
        )
    loss: dict[str, Any] = dict(loss_type="grpo", epsilon=config.clip, epsilon_high=config.clip)
    if method.released_loss:
        loss = dict(loss_type="dapo", epsilon=RELEASED_CLIP[0], epsilon_high=RELEASED_CLIP[1], delta=RELEASED_DUAL_CLIP)
    saving: dict[str, Any] = dict(save_strategy="no")
    if checkpoint_every is not None:
        saving = dict(save_strategy="steps", save_steps=checkpoint_every * config.updates_per_step)
    if config.generator not in GENERATORS:
        raise ValueError(f"generator is {config.generator!r}; allowed: {', '.join(GENERATORS)}")
    return GRPOConfig(
        output_dir=str(output_dir),
        **optimiser_settings(config, policy),
        **loss,
        **saving,
        **(vllm_settings(policy.context) if config.generator == "vllm" else {}),
        beta=config.kl_coef,
        use_bias_correction_kl=False,  # TRL multiplies the KL by the ratio, which is shaped here; Eq. 11 does not
        scale_rewards="group",
        temperature=config.temperature,
        max_completion_length=config.max_completion,
        num_generations=config.group_size,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        steps_per_generation=config.updates_per_step * (rows // micro_batch),
        num_iterations=1,
        max_steps=config.rl_steps * config.updates_per_step,
        shuffle_dataset=False,  # the order of the questions is made by question_order
    )


def default_micro_batch(rows: int, max_completion: int, n_parameters: int) -> int:
    """Rollouts of one backward pass: all of an optimiser step, or what fits for a large model.

    Args:
        rows: rollouts of an optimiser step and process. max_completion: completion tokens of one at most.
        n_parameters: of the model; above CHECKPOINTING_FROM the largest divisor of `rows` is taken whose rollouts have
            at most LARGE_MICRO_BATCH_TOKENS completion tokens. Gradients do not depend on it.

    Example:
        >>> default_micro_batch(256, 2048, 494_032_768), default_micro_batch(48, 224, 500_000)
        (8, 48)
    """
    if n_parameters <= CHECKPOINTING_FROM:
        return rows
    most = max(1, LARGE_MICRO_BATCH_TOKENS // max_completion)
    return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most)


def question_order(n_questions: int, config: RunConfig) -> list[int]:
    """Which questions each RL step takes: a seeded permutation an epoch, the same for every method.

    Returns:
        rl_steps x questions_per_step indices; no RL step holds a question twice (the rest of an epoch
        that does not fill an RL step is left out).

    Raises:
        ValueError: fewer questions than one RL step needs.

    Example:
        >>> order = question_order(5, RunConfig(rl_steps=4, questions_per_step=2))
        >>> len(order), len(set(order[:4])), len(set(order[4:]))
        (8, 4, 4)
    """
    per_step = config.questions_per_step
    if n_questions < per_step:
        raise ValueError(f"{n_questions} questions, but an RL step needs questions_per_step = {per_step}")
    order: list[int] = []
    epoch = 0
    while len(order) < config.rl_steps * per_step:
        permutation = child_rng(config.seed, "questions", epoch).permutation(n_questions)
        order += permutation[: n_questions // per_step * per_step].tolist()
        epoch += 1
    return order[: config.rl_steps * per_step]


class RAPOTrainer(ExactCheckpoints, GRPOTrainer):
    """GRPOTrainer with hybrid rollouts, the retrieval advantage and the shaped ratio.

    With a = m = 0 and no retrieval it is GRPO: a test holds its gradients to GRPOTrainer's. Groups may be
    split over processes, rewards and retrieval rewards are gathered before they are normalised.

    Args:
        policy: the policy to train, with its adapter.
        questions: training questions.
        toolbox: runs the tool calls.
        retriever: the step-trace buffer's; None for methods that do not retrieve.
        config: the run.
        method: arguments of rollout and objective.
        output_dir: folder of checkpoints.
        reward: outcome reward of a rollout.
        on_rl_step: called at the end of each RL step, on the main process, with a row of metrics (those of
            `rollout_metrics`, clip_frac, negative_factor_frac and seconds) and the RL step's rollouts of all processes.
        callbacks: further transformers callbacks.
        checkpoint_every: RL steps between checkpoints; None: no checkpoints.
        on_checkpoint: called with the folder of each checkpoint while it is written, to put more files into it.
        when_to_retrieve: draws at each boundary; None: what the method says.
        sampler: makes the rollouts.
        teacher: correct trajectories in the policy's ids, for a method that mixes them into the groups.

    Raises:
        ValueError: arguments that do not fit each other, or a model with dropout.
    """

    def __init__(
        self,
        policy: Policy,
        questions: Sequence[Question],
        toolbox: Any,
        retriever: Any | None,
        config: RunConfig,
        method: Method,
        output_dir: Path | str,
        *,
        reward: Reward = pocket_reward,
        on_rl_step: Callable[[dict[str, float], list[Rollout]], None] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        checkpoint_every: int | None = None,
        on_checkpoint: Callable[[Path], None] | None = None,
        when_to_retrieve: Callable[..., bool] | None = None,
        sampler: Callable[..., RolloutBatch] = sample_rollouts,
        teacher: Sequence[Rollout] = (),
    ) -> None:
        _check(policy, retriever, config, method, teacher)
        self.policy, self.questions, self.toolbox = policy, list(questions), toolbox
        self.retriever, self.config, self.method = retriever, config, method
        self.reward, self.on_rl_step, self.sampler = reward, on_rl_step, sampler
        self.when_to_retrieve = when_to_retrieve or method.when_to_retrieve(config)
        self.teacher = list(teacher)
        self.run_identity, self.on_checkpoint = dataclasses.asdict(config), on_checkpoint
        self.chunk_tokens = CPU_CHUNK_TOKENS if policy.device.type == "cpu" else None
        self._rollouts: list[Rollout] = []  # of this process and RL step, in the order of its inputs
        self._is_teachers: list[bool] = []  # likewise: True where the teacher wrote it
        self._off_policy: Tensor | None = None  # (B,), set while _compute_loss runs
        self._question_rows: list[int] = []
        self._scored: Tensor | None = None  # (B, T), set while _compute_loss runs
        self._skip_old_logps = False
        self._clipped = self._clippable = 0.0
        order = question_order(len(self.questions), config)
        dataset = Dataset.from_dict({"prompt": [self.questions[i].text for i in order], "question": order})
        with without_known_warnings():
            super().__init__(
                model=policy.model,
                reward_funcs=outcome_reward,
                args=grpo_config(config, method, policy, output_dir, checkpoint_every),
                train_dataset=dataset,
                processing_class=policy.tokenizer,
                rollout_func=sample_for_trl,
                callbacks=[*callbacks, _RLStepEnd(self)],
            )
        if config.generator == "vllm":
            self.sampler = TurnSampler(engine_of(self), self._score)
        self.remove_callback(PrinterCallback)
        if self.aux_loss_enabled:
            raise ValueError(
                "the model asks for a router loss (mixture of experts), which RAPOTrainer does not compute"
            )

    @property
    def rl_step(self) -> int:
        """Number of the RL step that is running, from 1."""
        return self.state.global_step // self.config.updates_per_step + 1

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **kwargs: Any) -> Any:
        """Train; True goes on from the newest whole checkpoint of output_dir, or starts when there is none.

        Raises:
            ValueError: the checkpoint belongs to another configuration.
        """
        if resume_from_checkpoint is True:
            return self.resume(latest_checkpoint(self.args.output_dir))
        with without_known_warnings():
            return super().train(resume_from_checkpoint, **kwargs)

    def sample(self) -> list[Rollout]:
        """Sample and score the rollouts of this process for the running RL step; some may be the teacher's."""
        offset = self.accelerator.process_index * len(self._question_rows)
        n_on = self.config.group_size - self.method.n_hybrid(self.config)
        requests = []
        for i, row in enumerate(self._question_rows):
            place = (offset + i) % self.config.group_size  # a call may hold only part of a group
            requests.append(RolloutRequest(self.questions[row], place, hybrid=place >= n_on))
        taught = [self._teachers_rollout(r) for r in requests]
        mine = [r for r, t in zip(requests, taught, strict=True) if t is None]
        # A process of several may hold nothing but the teacher's rollouts: then there is nothing to sample.
        batch = sample_and_score(
            self.policy,
            mine,
            self.toolbox,
            reward=self.reward,
            sampler=self.sampler,
            at_once=self.config.rollouts_at_once,
            limits=SamplingLimits.of(self.config),
            seed=self.config.seed,
            stream=("train", self.rl_step),
            temperature=self.config.temperature,
            retriever=self.retriever,
            when_to_retrieve=self.when_to_retrieve,
        )
        own = iter(batch.rollouts)
        rollouts = [next(own) if t is None else t for t in taught]
        self._rollouts, self._is_teachers, self._stats = rollouts, [t is not None for t in taught], batch.stats
        return rollouts

    def _score(self, rollouts: Sequence[Rollout]) -> tuple[list[list[float]], list[list[float]]]:
        return logps_and_entropies(self.policy, rollouts, self.config.temperature)

    def _teachers_rollout(self, request: RolloutRequest) -> Rollout | None:
        """The teacher's trajectory at a place of a group; None where the policy samples."""
        turn = request.place - (self.config.group_size - self.method.n_off_policy(self.config))
        if turn < 0:
            return None
        written = [r for r in self.teacher if r.question_id == request.question.id]
        if turn >= len(written):  # fewer trajectories than places: the policy fills up
            return None
        rng = child_rng(self.config.seed, "off-policy", self.rl_step, request.question.id)
        rollout = dataclasses.replace(written[rng.permutation(len(written))[turn]], place=request.place)
        rollout.reward = self.reward(rollout, request.question, self.policy.protocol)
        return rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started = time.perf_counter()
        self._question_rows = [row["question"] for row in inputs]
        # TRL asks for old log-probabilities exactly then; the sampler has them already.
        generate_every = self.args.steps_per_generation * self.num_iterations
        self._skip_old_logps = self.args.gradient_accumulation_steps % generate_every != 0
        batch = super()._generate_and_score_completions(inputs)
        device = self.accelerator.device
        retrieved_frac = torch.tensor([r.retrieved_frac for r in self._rollouts], device=device)
        shaping = shaping_factor(retrieved_frac, self.method.shaping_weight(self.config))
        batch["advantages"] = self._advantages(device)
        # exp(logp - (old - log s)) = s exp(logp - old): the shaped ratio of Eq. 8, before any clipping.
        batch["old_per_token_logps"] = batch.pop("sampling_per_token_logps") - shaping.log()[:, None]
        batch["off_policy"] = torch.tensor(self._is_teachers, device=device)
        batch["old_per_token_logps"][batch["off_policy"]] = 0.0  # the ratio there is f(p), not p / p_old
        self._clipped = self._clippable = 0.0
        # TRL shuffles the rollouts into mini-batches with torch's global generator.
        torch.manual_seed(int(child_rng(self.config.seed, "mini-batches", self.rl_step).integers(2**63)))
        self._generated_at = time.perf_counter()
        self._rollout_sec = self._generated_at - started
        return batch

    def _advantages(self, device: torch.device) -> Tensor:
        """Advantages of this process's rollouts (arXiv 2603.03078, Eq. 9 and 10); groups by question."""
        rewards = [math.nan if r.reward is None else r.reward for r in self._rollouts]
        retrieval = [rollout_retrieval_reward(r, self.method.retrieval_reward) for r in self._rollouts]
        local = torch.tensor([rewards, retrieval, self._question_rows], dtype=torch.float32, device=device).T
        rewards, retrieval, questions = self.accelerator.gather(local.contiguous()).T
        weight = self.method.advantage_weight(self.config)
        a_ret = group_normalise(retrieval, questions)
        advantages = self.method.advantage(group_normalise(rewards, questions), a_ret, weight)
        self._negative_frac = negative_factor_frac(a_ret, weight)
        first = self.accelerator.process_index * len(self._rollouts)
        return advantages[first : first + len(self._rollouts)]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        if self.beta == 0.0:
            # The gradient of these rows is exactly 0; they stay in the mean over rollouts.
            mask = mask * (inputs["advantages"] != 0)[:, None]
        used = mask.any(0).nonzero().flatten()
        width = int(used[-1]) + 1 if len(used) else 1
        start = int(inputs["prompt_mask"].any(0).int().argmax())
        inputs = inputs | {"tool_mask": mask}
        inputs |= {k: inputs[k][:, start:] for k in ("prompt_ids", "prompt_mask")}
        inputs |= {k: inputs[k][:, :width] for k in PER_TOKEN if k in inputs}
        self._scored, self._off_policy = inputs["tool_mask"], inputs["off_policy"]
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._scored = self._off_policy = None
        tokens = self.accelerator.reduce(mask.sum(), "sum").item()
        self._clippable += tokens
        self._clipped += tokens * self._metrics["train"]["clip_ratio/region_mean"][-1]
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **modalities: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        completion = attention_mask[:, -logits_to_keep:]
        if self._skip_old_logps:
            self._skip_old_logps = False  # a reference policy is asked for next, and must be scored
            return torch.zeros_like(completion, dtype=torch.float32), None, None
        scored = completion if self._scored is None else self._scored
        with self.accelerator.autocast():
            logps, entropies = score_tokens(
                model, input_ids, attention_mask, scored, temperature=self.temperature, max_tokens=self.chunk_tokens
            )
        if self._off_policy is not None:
            logps = torch.where(self._off_policy[:, None], luffy_log_ratio(logps), logps)
        return logps, entropies if compute_entropy else None, None

    def _finish_rl_step(self) -> None:
        """Hand the metrics of the RL step that just ended to `on_rl_step`."""
        update_sec = time.perf_counter() - self._generated_at
        everyone = gather_object(list(zip(self._rollouts, self._is_teachers, strict=True)))
        rollouts = [r for r, is_teachers in everyone if not is_teachers]
        if self.on_rl_step is None or not self.accelerator.is_main_process:
            return
        row = {"rl_step": self.state.global_step // self.config.updates_per_step} | rollout_metrics(
            rollouts, self.method
        )
        row |= dict(
            groups_no_signal_frac=_groups_no_signal_frac([r for r, _ in everyone]),
            clip_frac=self._clipped / self._clippable if self._clippable else math.nan,
            negative_factor_frac=self._negative_frac,
            rollout_sec=self._rollout_sec,
            update_sec=update_sec,
            retrieval_sec=self._stats.retrieval_sec,
            tools_sec=self._stats.tools_sec,
            step_sec=self._rollout_sec + update_sec,
        )
        self.on_rl_step(row, rollouts)


#: Per-token columns of a TRL batch that are trimmed together.
PER_TOKEN = ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")


def sample_for_trl(prompts: list[str], trainer: RAPOTrainer) -> dict[str, list[Any]]:
    """TRL's `rollout_func`: samples the rollouts of this process."""
    return _trl_columns(trainer.sample())


def _trl_columns(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Rollouts in TRL's words, one list a column."""
    return {
        "prompt_ids": [list(r.prompt_ids) for r in rollouts],
        "completion_ids": [r.completion_ids for r in rollouts],
        "logprobs": [r.logps for r in rollouts],
        "env_mask": [r.policy_mask for r in rollouts],
        "outcome": [r.reward for r in rollouts],
    }


def outcome_reward(completions: list[str], outcome: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the rewards that the rollouts have already."""
    return outcome


def _check(
    policy: Policy, retriever: Any | None, config: RunConfig, method: Method, teacher: Sequence[Rollout]
) -> None:
    if method.trained_by == "sft":
        raise ValueError(f"method {method.name!r} is trained by {method.trained_by}; use train_sft")
    if bool(teacher) != method.off_policy:
        needs = "needs the teacher's trajectories" if method.off_policy else "takes no teacher's trajectories"
        raise ValueError(f"method {method.name!r} {needs}, and got {len(teacher)}")
    if method.off_policy and config.kl_coef:
        raise ValueError(
            f"kl_coef is {config.kl_coef}; method {method.name!r} allows 0: its ratio is not a probability's"
        )
    if method.off_policy and config.reward != "pocket":
        raise ValueError(
            f"reward is {config.reward!r}, of which a rollout may earn more than the teacher's; method {method.name!r} "
            "never clips the teacher's ratio and allows pocket"
        )
    if config.generator == "vllm":
        check_vllm()
        if method.trigger == "entropy":
            raise ValueError(f"method {method.name!r} retrieves by entropy, which vllm tells too late; allowed: own")
    if not 0 <= method.n_off_policy(config) < config.group_size:
        raise ValueError(
            f"n_off_policy is {config.n_off_policy}; allowed: 0 to group_size - 1 = {config.group_size - 1}"
        )
    if (retriever is None) == method.retrieves:
        had = "no retriever" if retriever is None else "a retriever"
        raise ValueError(
            f"method {method.name!r} {'retrieves' if method.retrieves else 'does not retrieve'}, and got {had}"
        )
    if retriever is not None and retriever.unit != method.unit:
        raise ValueError(f"the retriever inserts a {retriever.unit}, method {method.name!r} needs a {method.unit}")
    if not 0 <= method.n_hybrid(config) <= config.group_size:
        raise ValueError(f"n_hybrid is {config.n_hybrid}; allowed: 0 to group_size = {config.group_size}")
    dropout = [name for name, m in policy.model.named_modules() if _drops(m)]
    if dropout:
        raise ValueError(
            f"dropout in {len(dropout)} modules ({dropout[0]}, ..): the ratio to the sampler's log-probabilities would "
            "not start at 1; make the adapter with lora_dropout=0, and set attention_dropout to 0 in config.json"
        )


def _drops(module: torch.nn.Module) -> bool:
    """Whether a module drops values in training: as a layer, or by a setting, as for attention weights."""
    own = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
    attention = getattr(module, "attention_dropout", 0.0)
    return own or (isinstance(attention, float) and attention > 0)


def rollout_metrics(rollouts: Sequence[Rollout], method: Method) -> dict[str, float]:
    """Metrics of one RL step that follow from its rollouts alone; NaN where there is nothing to average.

    Args:
        rollouts: all rollouts of the RL step, with their rewards.
        method: whose retrieval reward is reported.

    Returns:
        reward, reward_on, reward_hybrid: mean outcome reward of all, on-policy and hybrid rollouts (NaN left
        out); nan_rewards: rollouts without a reward; groups_no_signal_frac; entropy: mean token entropy of
        the policy's tokens in nats; retrieved_frac: mean F_ret and retrieval_reward: mean Z_ret of the rollouts
        with a retrieval; retrievals: number of them; tool_calls: mean of a rollout; tool_failures_frac: of all
        calls; completion_tokens: mean length with inserted tokens; generated_tokens: sum of the policy's;
        truncated_frac and format_faults_frac: rollouts that ended by their length or by a broken format.
    """
    rewards = [math.nan if r.reward is None else r.reward for r in rollouts]
    calls = [s for r in rollouts for s in r.tool_calls]
    helped = [r for r in rollouts if r.retrievals]
    entropies = [x for r in rollouts for s in r.segments for x in s.entropies]
    return {
        "reward": _mean(rewards),
        "reward_on": _mean([x for x, r in zip(rewards, rollouts, strict=True) if not r.hybrid]),
        "reward_hybrid": _mean([x for x, r in zip(rewards, rollouts, strict=True) if r.hybrid]),
        "nan_rewards": sum(not math.isfinite(x) for x in rewards),
        "groups_no_signal_frac": _groups_no_signal_frac(rollouts),
        "entropy": _mean(entropies),
        "retrieved_frac": _mean([r.retrieved_frac for r in helped]),
        "retrieval_reward": _mean([rollout_retrieval_reward(r, method.retrieval_reward) for r in helped]),
        "retrievals": sum(len(r.retrievals) for r in rollouts),
        "tool_calls": len(calls) / len(rollouts),
        "tool_failures_frac": _mean([float(not s.info["ok"]) for s in calls]),
        "completion_tokens": _mean([float(len(r.policy_mask)) for r in rollouts]),
        "generated_tokens": len(entropies),
        "truncated_frac": _mean([float(r.end_reason == "length") for r in rollouts]),
        "format_faults_frac": _mean([float(r.end_reason == "format") for r in rollouts]),
    }


def _groups_no_signal_frac(rollouts: Sequence[Rollout]) -> float:
    rewards = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])
    return groups_without_signal(rewards, [r.question_id for r in rollouts])


def _mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN when there is none."""
    kept = [x for x in values if math.isfinite(x)]
    return sum(kept) / len(kept) if kept else math.nan


class _RLStepEnd(TrainerCallback):
    """Counts RL steps."""

    def __init__(self, trainer: RAPOTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.trainer.config.updates_per_step == 0:
            self.trainer._finish_rl_step()


# -------------------------------------------------------------------------------------------------- SFT


def train_sft(
    policy: Policy,
    rollouts: Sequence[Rollout],
    config: RunConfig,
    output_dir: Path | str,
    *,
    batch_size: int = 16,
    on_update: Callable[[dict[str, float]], None] | None = None,
    checkpoint_every: int | None = None,
    on_checkpoint: Callable[[Path], None] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Supervised fine-tuning of the adapter on the teacher's selected trajectories.

    The loss is the cross-entropy of the ids that the teacher wrote; observations are seen and not learned.
    Optimiser and adapter are those of the RL runs. It goes on from the newest whole checkpoint of output_dir.

    Args:
        policy: the policy to train, with its adapter.
        rollouts: the teacher's trajectories, already selected, in the policy's own ids.
        config: the run; `sft_epochs` passes over the trajectories.
        output_dir: folder of checkpoints.
        batch_size: trajectories of one optimiser step.
        on_update: called after each optimiser step with its row: update, epoch, loss (nats a token).
        checkpoint_every: optimiser steps between checkpoints; None: no checkpoints.
        on_checkpoint: called with the folder of each checkpoint while it is written.
        callbacks: further transformers callbacks.

    Raises:
        ValueError: no trajectory, one in which the policy wrote nothing, or a checkpoint of another configuration.
    """
    if not rollouts:
        raise ValueError("no trajectories to learn from; select at least one")
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows = batch_size // n_processes
    default = default_micro_batch(rows, config.max_completion, policy.model.num_parameters()) if rows else 1
    micro_batch = min(config.micro_batch or default, rows)
    if batch_size % n_processes or rows % micro_batch:
        raise ValueError(
            f"{batch_size} trajectories of an update do not divide into {n_processes} processes x micro-batches of "
            f"{micro_batch}; change micro_batch or the number of processes"
        )
    saving: dict[str, Any] = dict(save_strategy="no")
    if checkpoint_every is not None:
        saving = dict(save_strategy="steps", save_steps=checkpoint_every)
    with without_known_warnings():
        trainer = _SFTTrainer(
            model=policy.model,
            args=TrainingArguments(
                output_dir=str(output_dir),
                **optimiser_settings(config, policy),
                num_train_epochs=config.sft_epochs,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=rows // micro_batch,
                **saving,
            ),
            train_dataset=Dataset.from_list([_sft_row(r) for r in rollouts]),
            data_collator=_collate,
            callbacks=[*callbacks, _SFTLog(on_update)],
        )
        trainer.run_identity, trainer.on_checkpoint = dataclasses.asdict(config), on_checkpoint
        trainer.remove_callback(PrinterCallback)
        trainer.resume(latest_checkpoint(output_dir))


class _SFTTrainer(ExactCheckpoints):
    """The models' own cross-entropy; with a large vocabulary the same number without all logits at once."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids, learned = inputs["input_ids"], inputs["labels"] != -100
        n_vocab = _causal_model(model).get_output_embeddings().weight.shape[0]
        if return_outputs or 4 * ids.numel() * n_vocab <= LOGITS_BYTES:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # All rows in one forward pass: no row is padded at the left, and what stands behind is not learned.
        logps, _ = score_tokens(model, ids, torch.ones_like(ids), learned[:, 1:])
        if num_items_in_batch is None:
            return -logps.sum() / learned.sum()
        # Items are counted over all processes, whose gradients are averaged.
        return -logps.sum() * self.accelerator.num_processes / num_items_in_batch


def _sft_row(rollout: Rollout) -> dict[str, list[int]]:
    if not any(rollout.policy_mask):
        raise ValueError(f"a trajectory of question {rollout.question_id!r} holds no id that the teacher wrote")
    learned = [i if m else -100 for i, m in zip(rollout.completion_ids, rollout.policy_mask, strict=True)]
    prompt = list(rollout.prompt_ids)
    return {"input_ids": prompt + rollout.completion_ids, "labels": [-100] * len(prompt) + learned}


def _collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad at the right; padding is neither learned (label -100) nor ever looked at by an earlier token."""
    ids, labels = ([torch.tensor(row[k]) for row in rows] for k in ("input_ids", "labels"))
    return {"input_ids": pad_sequence(ids, True), "labels": pad_sequence(labels, True, padding_value=-100)}


class _SFTLog(TrainerCallback):
    def __init__(self, on_update: Callable[[dict[str, float]], None] | None) -> None:
        self.on_update = on_update

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        # The closing summary has no loss.
        if "loss" in logs and self.on_update is not None:
            self.on_update({"update": state.global_step, "epoch": logs["epoch"], "loss": logs["loss"]})
