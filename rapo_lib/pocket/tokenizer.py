"""A real tokenizer for the pocket world: byte-level BPE, digits apart, tags as single added tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from rapo_lib.pocket.world import vocabulary_texts
from rapo_lib.traces import TAGS

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: Names split after their first syllable, numbers into digits, so that unseen names use known pieces.
PIECES = r" ?[A-Z][a-z]{2}| ?[a-z]+| ?[0-9]| ?\\boxed\{| ?[^\sA-Za-z0-9]|\s"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the world's own words (one token a word, syllable or digit)."""
    tok = Tokenizer(BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=4096, min_frequency=2, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tok.train_from_iterator(vocabulary_texts(), trainer)
    tok.add_special_tokens([PAD, START, END])
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 512
    return fast


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    return tokenizer
