"""The memory plan's arithmetic against numbers computed by hand, and against Hugging Face's and PEFT's own counts."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rapo_lib.local_models import SIZES, QwenSize, qwen_config
from rapo_lib.memory import (
    RESERVE_BYTES,
    MemoryPlan,
    kv_bytes,
    layer_bytes,
    memory_plan,
    n_adapter,
    n_linear,
    n_parameters,
    peak_memory,
    plan_table,
)

TINY = QwenSize("qwen2.5", 32, 48, 2, 4, 2, 8)


def on_meta(size):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(qwen_config(size))


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("0.5b", 494_032_768),
        ("1.5b", 1_543_714_304),
        ("3b", 3_085_938_688),
        ("7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_parameters_are_the_published_ones(name, n):
    model = on_meta(SIZES[name])
    assert n_parameters(SIZES[name]) == model.num_parameters() == n
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert n_adapter(SIZES[name], 16) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_half_a_billion_by_hand():
    # embedding 151,936 x 896; a layer: q and o 896 x 896, k and v 896 x 128, three of 896 x 4,864; biases 896 + 2 x 128
    layer = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    assert n_linear(SIZES["0.5b"]) == 24 * layer == 357_826_560
    assert n_parameters(SIZES["0.5b"]) == 151_936 * 896 + 24 * (layer + 896 + 256 + 2 * 896) + 896 == 494_032_768
    # rank x (inputs + outputs): q, o 1,792; k, v 1,024; gate, up, down 5,760
    assert n_adapter(SIZES["0.5b"], 16) == 24 * 16 * (2 * 1792 + 2 * 1024 + 3 * 5760) == 8_798_208
    assert kv_bytes(SIZES["0.5b"]) == 2 * 24 * 2 * 64 * 2 == 12_288
    assert kv_bytes(SIZES["3b"]) == 2 * 36 * 2 * 128 * 2 == 36_864


def test_bytes_kept_for_the_backward_pass():
    assert layer_bytes(TINY, checkpointing=True, n_tokens=32) == 32 * 2  # the layer's input in bfloat16
    everything = layer_bytes(TINY, checkpointing=False, n_tokens=32)
    assert everything > 8 * 32 * 2  # inputs of seven linear layers at the least, two of them of 48
    wider = layer_bytes(dataclasses.replace(TINY, intermediate=96), checkpointing=False, n_tokens=32)
    assert wider - everything >= 3 * 48 * 2  # gate, up and their product are kept


def test_plan_by_hand():
    plan = memory_plan(SIZES["0.5b"], 16, 1792, 80_000)
    assert plan.weights == 988_065_536 and plan.adapter == 8_798_208 * 16 and plan.merged == 715_653_120
    assert plan.kv_token == 12_288 + 512 * 7  # one layer's for 14 heads in place of 2
    assert plan.sampling_row == 5 * 151_936 * 4 and plan.token == 43_008 and plan.layer_token == 160_000
    assert plan.logits == 6 * 128 * 2**20


def test_what_fits_is_what_is_left():
    plan = MemoryPlan(10**9, 10**8, 5 * 10**8, 10_000, 10**6, 40_000, 60_000, 9 * 10**8)
    assert plan.sampling(3, 100) == 1_600_000_000 + 3 * (1_000_000 + 10**6) + RESERVE_BYTES
    assert plan.update(1000) == 2_000_000_000 + 10**8 + RESERVE_BYTES
    assert plan.most_rollouts(4 * 10**9, 100) == 200 and plan.most_tokens(5 * 10**9) == 10_000
    assert plan.most_rollouts(10**9, 100) == plan.most_tokens(10**9) == 0
    table = plan_table([("x", plan)], gpus_gb=(4, 5), tokens=100)
    assert (
        "| x | 1.00 | 0.10 | 0.50 | 10.0 | 40.0 | 60.0 | 0.90 |" in table and "| x | 200 | 0 | 700 | 10,000 |" in table
    )


def test_peak_memory_sees_a_block():
    with peak_memory() as small:
        pass
    with peak_memory() as large:
        x = torch.ones(25_000_000)
        x += 1
    assert large.bytes - small.bytes > 90_000_000 and large.sec > 0
