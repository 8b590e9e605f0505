"""Fixtures for all tests: a tiny tokenizer, tiny random models, a fake toolbox and a scripted sampler.

Nothing here needs files or a network. Models are random: what they write is noise, so tests that need certain
tokens use `script`, which replaces the decoder by one that writes given steps.

`@pytest.mark.case(7)` says that a test guards against fault 7 of the 44 that users of comparable projects reported;
`pytest --case 7` runs these tests alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rapo_lib.policy import Policy
from rapo_lib.traces import TAGS, Protocol

# Generated examples: the same ones each time, or (`--hypothesis-profile campaign`) ten times as many of a new seed.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("campaign", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case", type=int, help="run only the tests that guard against this known fault (1 to 44)")
    parser.addoption("--slow", action="store_true", help="also run tests marked slow: minutes, and large packages")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, slow = config.getoption("--case"), config.getoption("--slow")
    other = [i for i in items if not slow and i.get_closest_marker("slow")]
    if number is not None:
        other += [i for i in items if not any(number in mark.args for mark in i.iter_markers("case"))]
    config.hook.pytest_deselected(items=other)
    items[:] = [i for i in items if i not in set(other)]


CORPUS = [
    "need employer of Kavelo search browse python answer code 42 hotel convert(42, feet) blog of Lumiro link second",
    "what is the town of the employer of Kavelo? <search> </search> <answer> \\boxed{ Lumiro} done find the result",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(tags_are_tokens: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 400 ids; the protocol's tags are single ids, or split into several."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if tags_are_tokens:
        tokenizer.add_tokens(list(TAGS))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, family: str = "qwen3", *, tied: bool = True, seed: int = 0, **settings: Any) -> Any:
    """A random Qwen2 or Qwen3 of two layers whose logits are far from uniform."""
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(intermediate_size=48, max_position_embeddings=512, initializer_range=0.3)
    if family == "qwen3":
        sizes["head_dim"] = 12
    config = config_class(
        vocab_size=len(tokenizer), tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id, **(sizes | settings)
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for parameter in model.parameters():  # biases and norms start at 0 and 1: make them matter
            if parameter.ndim == 1:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    """A campaign gets a random seed, which the summary prints."""
    config.addinivalue_line("markers", "slow: minutes, and a large optional package; runs with --slow")
    if config.getoption("hypothesis_profile") == "campaign" and config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("hypothesis_profile") == "campaign":
        terminalreporter.write_line(f"campaign with --hypothesis-seed={config.getoption('hypothesis_seed')}")


@dataclass
class FakeResult:
    text: str
    ok: bool = True
    error: str | None = None


@dataclass
class FakeToolbox:
    """Answers every call with its own query in capitals and keeps a log of the calls."""

    log: list[tuple[str, str]] = field(default_factory=list)
    answer: Callable[[str, str], str] = lambda tool, query: f" {query.upper()}"
    names: tuple[str, ...] = ("search", "browse", "python")

    def run(self, calls: Sequence[tuple[str, str]]) -> list[FakeResult]:
        self.log += calls
        return [
            FakeResult(self.answer(tool, query)) if query else FakeResult("error: empty query", False, "empty query")
            for tool, query in calls
        ]


@dataclass(frozen=True)
class FakeQuestion:
    id: str
    text: str
    answer: str = " Lumiro"
    max_steps: int | None = None

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.answer,)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def split_tokenizer() -> PreTrainedTokenizerFast:
    """Here `</search>` is several ids, as with the Qwen tokenizers."""
    return make_tokenizer(tags_are_tokens=False)


@pytest.fixture
def tiny_qwen3(tiny_tokenizer: Any) -> Qwen3ForCausalLM:
    return make_model(tiny_tokenizer, "qwen3")


@pytest.fixture
def tiny_policy(tiny_tokenizer: Any, tiny_qwen3: Any) -> Policy:
    return Policy(tiny_qwen3, tiny_tokenizer, Protocol(tiny_tokenizer), "tiny")


@pytest.fixture
def split_policy(split_tokenizer: Any) -> Policy:
    return Policy(make_model(split_tokenizer), split_tokenizer, Protocol(split_tokenizer), "tiny-split")


@pytest.fixture
def fake_toolbox() -> FakeToolbox:
    return FakeToolbox()


@pytest.fixture
def questions() -> list[FakeQuestion]:
    return [FakeQuestion("q1", "employer of Kavelo?"), FakeQuestion("q2", "what is the code of the hotel of Lumiro?")]


class ScriptedDecoder:
    """Writes given steps instead of a model's: row r writes turns[r][0], is fed something, writes turns[r][1], ..

    It keeps the ids that each row was fed, so a test can hold the sampler's ids against them. A turn that is over
    without a stop tag is followed by the end-of-sequence id. All other logits are -inf. At a FREE id the sampler
    chooses among 20 ids with equal logits.
    """

    FREE = -1

    def __init__(self, turns: Sequence[Sequence[Sequence[int]]], eos: int, n_vocab: int) -> None:
        self.turns, self.eos, self.n_vocab = turns, eos, n_vocab
        self.fed: dict[int, list[int]] = {}
        self.plan: dict[int, dict[int, tuple[int, int]]] = {}
        self.model_calls = 0

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], capacity: int) -> None:
        self.order = list(range(len(rows)))
        for r, p in enumerate(rows):
            self.fed[r], self.plan[r] = list(prompts[p][:-1]), {}

    def extend(self, rows: Any, ids: Any, positions: Any, lengths: Any) -> None:
        for slot, line, start, n in zip(rows.tolist(), ids.tolist(), positions.tolist(), lengths.tolist(), strict=True):
            r = self.order[slot]
            self._write(r, line[:n], start)
            self.plan[r] = {q: v for q, v in self.plan[r].items() if q <= start}

    def _write(self, r: int, ids: list[int], start: int) -> None:
        assert start <= len(self.fed[r]), "a hole in the cache"
        self.fed[r][start:] = ids

    def step(self, ids: Any, positions: Any) -> torch.Tensor:
        logits = torch.full((len(self.order), self.n_vocab), float("-inf"))
        for slot, (token, p) in enumerate(zip(ids.tolist(), positions.tolist(), strict=True)):
            r = self.order[slot]
            self._write(r, [token], p)
            following = self._next(r, token, p)
            logits[slot, slice(40, 60) if following == self.FREE else following] = 0.0
        return logits

    def _next(self, r: int, token: int, p: int) -> int:
        plan = {q: v for q, v in self.plan[r].items() if q <= p}
        turn, i = plan.get(p, (None, None))
        if turn is not None and self.turns[r][turn][i] in (token, self.FREE):
            i += 1
        else:
            turn, i = 1 + max((t for t, _ in plan.values()), default=-1), 0
        self.plan[r] = plan
        if turn >= len(self.turns[r]) or i >= len(self.turns[r][turn]):
            return self.eos
        plan[p + 1] = (turn, i)
        return self.turns[r][turn][i]

    def keep(self, slots: Sequence[int]) -> None:
        self.order = [self.order[s] for s in slots]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedDecoder]:
    """`script(policy, turns)` makes the sampler write turns[row][step]; a step is a text or a list of ids."""

    def use(policy: Policy, turns: Sequence[Sequence[str | Sequence[int]]]) -> ScriptedDecoder:
        encode = policy.protocol.encode
        ids = [[encode(t) if isinstance(t, str) else tuple(t) for t in row] for row in turns]
        decoder = ScriptedDecoder(ids, policy.tokenizer.eos_token_id, len(policy.tokenizer))
        monkeypatch.setattr("rapo_lib.rollout.make_decoder", lambda _policy: decoder)
        return decoder

    return use
