"""Policies, adapters, the two decoders and token sampling."""

import copy
import hashlib
import json

import numpy as np
import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rapo_lib.policy import (
    BASE_FILE,
    FusedDecoder,
    GenericDecoder,
    Policy,
    add_lora,
    base_checksum,
    load_adapter,
    load_policy,
    make_decoder,
    merged_model,
    sample_tokens,
    save_adapter,
)
from rapo_lib.traces import SYSTEM_PROMPT, Protocol

PROMPTS = [[5, 9, 100, 7, 3, 250, 11], [300, 4, 8, 15, 16, 23, 42, 99, 12, 1, 2, 60]]
ROWS = [0, 1, 1, 0]
CONTINUED = [list(range(10 + r, 22 + r)) for r in range(4)]


def decode_raggedly(decoder):
    """Logits after feeding 1, 5, 1 and 3 ids to four rows; rows 1 and 3 get all but the last in one go."""
    decoder.start(PROMPTS, ROWS, 40)
    at = torch.tensor([len(PROMPTS[r]) - 1 for r in ROWS])
    first = decoder.step(torch.tensor([PROMPTS[r][-1] for r in ROWS]), at)
    lines = torch.tensor([CONTINUED[1][:4], [*CONTINUED[3][:2], 0, 0]])
    decoder.extend(torch.tensor([1, 3]), lines, at[[1, 3]] + 1, torch.tensor([4, 2]))
    at = at + 1 + torch.tensor([0, 4, 0, 2])
    last = [CONTINUED[0][0], CONTINUED[1][4], CONTINUED[2][0], CONTINUED[3][2]]
    second = decoder.step(torch.tensor(last), at)
    decoder.keep([0, 3, 2])
    third = decoder.step(torch.tensor([CONTINUED[0][1], CONTINUED[3][3], CONTINUED[2][1]]), at[[0, 3, 2]] + 1)
    return torch.cat([first, second, third])


@torch.no_grad()
def fresh_logits(model):
    fed = [0, 0, 0, 0, 1, 5, 1, 3]
    sequences = [PROMPTS[ROWS[i % 4]] + CONTINUED[i % 4][:n] for i, n in enumerate(fed)]
    sequences += [PROMPTS[ROWS[r]] + CONTINUED[r][:n] for r, n in ((0, 2), (3, 4), (2, 2))]
    return torch.stack([model(torch.tensor([s])).logits[0, -1] for s in sequences])


@pytest.mark.case(8)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_both_decoders_equal_a_fresh_forward_for_ragged_rows(tiny_tokenizer, family, tied):
    model = make_model(tiny_tokenizer, family, tied=tied)
    want = fresh_logits(model)
    assert FusedDecoder.applies(model)
    for decoder in (FusedDecoder(model), GenericDecoder(model)):
        torch.testing.assert_close(decode_raggedly(decoder), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "model_class, config",
    [
        (LlamaForCausalLM, LlamaConfig(vocab_size=380, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
                                       num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)),
        (GPT2LMHeadModel, GPT2Config(vocab_size=380, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    ],
)  # fmt: skip
def test_generic_decoder_runs_other_architectures(model_class, config):
    torch.manual_seed(0)
    model = model_class(config).eval()
    assert not FusedDecoder.applies(model)
    torch.testing.assert_close(decode_raggedly(GenericDecoder(model)), fresh_logits(model), atol=1e-4, rtol=0)


def test_prompt_of_one_id_and_unequal_prompts(tiny_qwen3):
    for decoder in (FusedDecoder(tiny_qwen3), GenericDecoder(tiny_qwen3)):
        decoder.start([[7], [8]], [0, 1, 1], 8)
        got = decoder.step(torch.tensor([7, 8, 8]), torch.zeros(3, dtype=torch.long))
        want = tiny_qwen3(torch.tensor([[7], [8], [8]])).logits[:, -1]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_sliding_window_shorter_than_the_sequences_is_refused(tiny_tokenizer):
    window = dict(use_sliding_window=True, sliding_window=16, max_window_layers=0)
    model = make_model(tiny_tokenizer, **window)
    assert not FusedDecoder.applies(model)
    with pytest.raises(ValueError, match="looks back 16 only"):
        GenericDecoder(model).start([[1, 2]], [0], 40)


# ------------------------------------------------------------------------------------------- adapter


def trained_lora(policy, seed=0):
    """An adapter whose B is not 0, as after training."""
    policy = add_lora(policy, 4, seed)
    torch.manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return policy


def test_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone(tiny_tokenizer, tiny_policy):
    ids = torch.tensor([PROMPTS[0]])
    want = tiny_policy.model(ids).logits
    state = torch.random.get_rng_state()
    lora = add_lora(tiny_policy, 4, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(lora.model(ids).logits, want)

    def weights(seed):
        policy = Policy(make_model(tiny_tokenizer), tiny_tokenizer, tiny_policy.protocol, "tiny")
        return [p for n, p in add_lora(policy, 4, seed).model.named_parameters() if "lora_A" in n]

    assert all(map(torch.equal, weights(1), weights(1)))
    assert not any(map(torch.equal, weights(1), weights(2)))
    with pytest.raises(ValueError, match="has an adapter already"):
        add_lora(lora, 4, seed=1)


@pytest.mark.case(33)
def test_sampling_reads_the_merged_adapter_and_writes_no_weight(tiny_policy):
    policy = trained_lora(tiny_policy)
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    want = fresh_logits(policy.model)
    torch.testing.assert_close(decode_raggedly(make_decoder(policy)), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(decode_raggedly(GenericDecoder(merged_model(policy))), want, atol=1e-4, rtol=0)
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())
    assert not any("lora" in n for n, _ in merged_model(policy).named_parameters())
    shared = merged_model(policy).get_input_embeddings().weight
    assert shared.data_ptr() == policy.base.get_input_embeddings().weight.data_ptr()


@pytest.mark.case(33)
def test_adapter_round_trip(tmp_path, tiny_tokenizer, tiny_policy):
    base = tiny_policy.model(torch.tensor([PROMPTS[1]])).logits
    policy = trained_lora(tiny_policy)
    save_adapter(policy, tmp_path / "adapter")
    fresh = Policy(make_model(tiny_tokenizer), tiny_tokenizer, tiny_policy.protocol, "tiny")
    loaded = load_adapter(fresh, tmp_path / "adapter")
    got = loaded.model(torch.tensor([PROMPTS[1]])).logits
    torch.testing.assert_close(got, policy.model(torch.tensor([PROMPTS[1]])).logits)
    assert (got - base).abs().max() > 0.01
    assert list(loaded.model.peft_config) == ["default"]
    assert all(p.norm() > 0 for n, p in loaded.model.named_parameters() if "lora_B" in n)


@pytest.mark.case(33)
def test_adapter_of_another_base_model_is_refused(tmp_path, tiny_tokenizer, tiny_policy):
    save_adapter(trained_lora(tiny_policy), tmp_path)
    other = Policy(make_model(tiny_tokenizer, seed=1), tiny_tokenizer, tiny_policy.protocol, "other")
    with pytest.raises(ValueError, match=r"trained on 'tiny' .* is 'other'"):
        load_adapter(other, tmp_path)
    (tmp_path / BASE_FILE).unlink()
    with pytest.raises(ValueError, match="no adapter written by save_adapter"):
        load_adapter(other, tmp_path)
    with pytest.raises(ValueError, match="has no adapter to save"):
        save_adapter(other, tmp_path)


@pytest.mark.case(33)
@pytest.mark.parametrize("change", ["missing", "more"])
def test_an_adapter_with_another_set_of_weights_is_refused(tmp_path, tiny_tokenizer, tiny_policy, change):
    """PEFT alone loads what fits and leaves the rest as it was."""
    save_adapter(trained_lora(tiny_policy), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    weights = load_file(path)
    name = min(weights)
    first = weights.pop(name) if change == "missing" else weights[name].clone()
    save_file(weights if change == "missing" else {**weights, name.replace("layers.0", "layers.7"): first}, path)
    base = json.loads((tmp_path / "base_model.json").read_text(encoding="utf-8"))
    base["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()  # whoever changed it did so on purpose
    (tmp_path / "base_model.json").write_text(json.dumps(base), encoding="utf-8")
    fresh = Policy(make_model(tiny_tokenizer), tiny_tokenizer, tiny_policy.protocol, "tiny")
    with pytest.raises(ValueError, match=r"does not fit the model; first weight on one side only: base_model"):
        load_adapter(fresh, tmp_path)


def test_base_checksum_ignores_adapter_and_load_precision(tiny_tokenizer, tiny_policy):
    want = base_checksum(tiny_policy)
    half = Policy(make_model(tiny_tokenizer).bfloat16(), tiny_tokenizer, tiny_policy.protocol, "half")
    assert base_checksum(half) == want == base_checksum(add_lora(tiny_policy, 4, 0))


# ------------------------------------------------------------------------------------------- loading


def save_model(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_load_policy_from_a_folder(tmp_path, tiny_tokenizer, split_tokenizer, tiny_qwen3):
    save_model(tmp_path / "tags", tiny_qwen3, tiny_tokenizer)
    save_model(tmp_path / "plain", make_model(split_tokenizer), split_tokenizer)
    policy = load_policy(tmp_path / "tags", device="cpu")
    assert policy.model.dtype == torch.float32 and policy.name == "tags" and policy.context == 512
    assert policy.protocol.system_prompt == ""
    assert load_policy(tmp_path / "plain", device="cpu").protocol.system_prompt == SYSTEM_PROMPT
    brief = load_policy(tmp_path / "plain", device="cpu", system_prompt="Be brief.")
    assert brief.protocol.system_prompt == "Be brief."


def test_a_name_that_cannot_be_loaded_says_how_to_pass_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot load the model 'nobody/no-model'.*pass the folder that holds"):
        load_policy("nobody/no-model")
    with pytest.raises(ValueError, match="no config.json"):
        load_policy(tmp_path)


@pytest.mark.case(3)
def test_several_eos_ids(tiny_policy):
    tiny_policy.model.generation_config.eos_token_id = [3, 7]
    assert set(tiny_policy.eos_ids) == {3, 7, tiny_policy.tokenizer.eos_token_id}


@pytest.mark.case(10)
def test_prompt_goes_through_the_chat_template(tiny_tokenizer, split_tokenizer):
    text = Protocol(tiny_tokenizer).prompt_text("who?")
    assert text == "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
    bare = copy.deepcopy(split_tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Protocol(bare)


# ------------------------------------------------------------------------------------------ sampling


@pytest.mark.case(19)
def test_temperature():
    _, logps, _ = sample_tokens(torch.tensor([[2.0, 0.0]]), torch.tensor([0.0]), temperature=0.5)
    assert logps.item() == pytest.approx(-0.0181, abs=5e-5)


@pytest.mark.case(25)
def test_entropy_over_the_full_vocabulary():
    h = sample_tokens(torch.zeros(3, 4), torch.rand(3))[2]
    assert h.tolist() == pytest.approx([1.386294] * 3, abs=1e-6)
    holes = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]])
    ids, logps, h = sample_tokens(holes, torch.tensor([0.9999999]))
    assert (ids.item(), h.item(), logps.item()) == (2, pytest.approx(np.log(2)), pytest.approx(-np.log(2)))


def test_inverse_cdf_draws_the_token_whose_interval_holds_u():
    torch.manual_seed(0)
    logits = torch.randn(1, 50) * 2
    u = torch.linspace(0, 0.99999, 997)
    ids, logps, h = sample_tokens(logits.expand(997, -1), u)
    p = torch.softmax(logits[0].double(), -1).numpy()
    # a uniform within rounding of an edge may fall on either side
    edges = np.cumsum(p)
    clear = np.abs(edges[None] - u.double().numpy()[:, None]).min(1) > 1e-6
    assert (ids.numpy() == np.searchsorted(edges, u.double().numpy(), side="right"))[clear].all()
    assert logps.numpy() == pytest.approx(np.log(p[ids.numpy()]), abs=1e-5)
    assert h.numpy() == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(2, -1)
    assert sample_tokens(logits, torch.tensor([0.0, 1.0]))[0].tolist() == [1, 2]


def test_greedy_takes_the_most_likely_and_keeps_entropy_and_logp():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    ids, logps, h = sample_tokens(logits, torch.tensor([0.99]), greedy=True)
    assert ids.item() == 1
    assert logps.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())
    assert h.item() == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().item())


def test_a_damaged_model_folder_is_named(tmp_path, tiny_policy):
    tiny_policy.base.save_pretrained(tmp_path)
    tiny_policy.tokenizer.save_pretrained(tmp_path)
    load_policy(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ValueError, match=f"{weights} is damaged: expected a complete safetensors file"):
        load_policy(tmp_path)
