"""Students that come from outside: other ids than the shipped one's, and one that never writes a valid step.

The shipped student with its ids moved goes down the path of real weights: nothing that was stored with the shipped
ids fits it, and everything is encoded again.
"""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file, save_file

from rapo_lib.buffer import Retriever
from rapo_lib.config import DATA, load_profile
from rapo_lib.execution import make_buffer, protocol_of
from rapo_lib.hybrids import require_steps, retrieval_table, rollout_table, sample_groups
from rapo_lib.peek import agreement, collect_situations, listening_table
from rapo_lib.policy import Policy, add_lora, load_adapter, load_policy, save_adapter
from rapo_lib.runs import buffer_paths
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import Protocol, Rollout, Segment

SHIPPED = DATA / "pocket" / "models" / "student"
N_MOVED, SHIFT = 571, 564  # all ids but those of special tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The shipped student with id i at (i + SHIFT) mod N_MOVED, in weights and tokenizer."""
    folder = tmp_path_factory.mktemp("moved") / "student"
    shutil.copytree(SHIPPED, folder)
    moved = {old: (old + SHIFT) % N_MOVED for old in range(N_MOVED)}
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {t: moved[i] for t, i in tokenizer["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]  # the output layer is tied to it
    new = rows.clone()
    new[list(moved.values())] = rows[list(moved)]
    save_file(weights | {"model.embed_tokens.weight": new}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def moved(folder):
    return load_policy(folder)


@pytest.fixture(scope="module")
def world(moved):
    config = load_profile("smoke").config("rapo")
    questions = load_pocket_questions("exploration", "train")
    return config, questions, make_pocket_toolbox("train"), make_buffer(config, moved.protocol, questions)


@pytest.fixture(scope="module")
def mute():
    """Random weights: noise that is never a step."""
    tokenizer = make_tokenizer()
    return Policy(make_model(tokenizer), tokenizer, Protocol(tokenizer), "mute")


def test_moved_ids_say_the_same(moved, world):
    config, questions, toolbox, buffer = world
    shipped = load_policy(SHIPPED)
    text = questions[0].text
    ids, ours = shipped.protocol.prompt_ids(text), moved.protocol.prompt_ids(text)
    assert ids != ours and shipped.protocol.decode(ids) == moved.protocol.decode(ours)
    with torch.no_grad():
        one, two = (p.model(input_ids=torch.tensor([i])).logits[0, -1] for p, i in ((shipped, ids), (moved, ours)))
    assert torch.allclose(one[:N_MOVED], two[[(i + SHIFT) % N_MOVED for i in range(N_MOVED)]], atol=1e-4)
    (path,) = buffer_paths(config)
    written = protocol_of(path, moved.protocol)  # the teacher's trajectories keep the ids they were written with
    assert written.prompt_ids(text) == ids


def test_notebooks_tables_of_moved_ids(moved, world):
    config, questions, toolbox, buffer = world
    rollouts = sample_groups(moved, questions[:4], toolbox, Retriever(buffer), config, stream=("standin",))
    notes, each = retrieval_table(rollouts, moved.protocol), rollout_table(rollouts, questions, moved.protocol)
    assert len(notes) and notes["same_question"].all() and (each["own_calls"] > 0).mean() > 0.5
    assert not each[~each["hybrid"]]["retrievals"].any() and each["retrievals"].sum() == len(notes)
    how = {"n_histories": 2, "n_traces": 2, "seed": 0}
    situations = collect_situations(moved, questions[:24], toolbox, buffer, config, **how)
    heard = listening_table(moved, situations, n_samples=1, seed=0)
    assert len(situations) == 2 and np.isfinite(heard["information"]).all() and len(agreement(moved, situations))


def test_a_student_without_a_valid_step_is_named(mute, world):
    config, questions, toolbox, buffer = world
    config = config.replace(max_completion=24)
    few = questions[:2]
    message = r"the student 'mute' wrote no valid step with a tool call in 16 rollouts \(their ends: .*\d\)"
    with pytest.raises(ValueError, match=message):
        sample_groups(mute, few, toolbox, Retriever(buffer), config)
    how = {"n_histories": 2, "n_traces": 1, "seed": 0}
    with pytest.raises(ValueError, match=message.replace("16", "2")):
        collect_situations(mute, few, toolbox, buffer, config, **how)
    # Where nothing may be retrieved nothing is asked for, and a trained policy that came to this is a result.
    assert len(sample_groups(mute, few, toolbox, None, config)) == 16
    assert len(sample_groups(mute, few, toolbox, Retriever(buffer), config.replace(n_hybrid=0))) == 16
    assert len(sample_groups(mute, few, toolbox, Retriever(buffer), config.replace(retrieval_prob=0.0))) == 16
    tokenizer = mute.tokenizer
    trained = add_lora(Policy(make_model(tokenizer), tokenizer, mute.protocol, "trained"), 2, 0)
    rollouts = sample_groups(trained, few, toolbox, Retriever(buffer), config)
    notes = retrieval_table(rollouts, mute.protocol)
    assert notes.empty and notes["h_before"].dtype == notes["h_after"].dtype == float
    assert np.isnan(notes["h_before"].mean())


def test_one_call_is_enough_and_ends_are_counted(mute):
    call = Segment("tool", (3,), info={"tool": "search", "query": "x", "ok": False, "error": "none found"})
    silent = [Rollout("q", (1,), [], end_reason=e) for e in ("format", "length", "format")]
    require_steps([*silent, Rollout("q", (1,), [call])], mute)
    with pytest.raises(ValueError, match=r"in 3 rollouts \(their ends: format 2, length 1\), so there is nothing"):
        require_steps(silent, mute)
    with pytest.raises(ValueError, match="in 0 rollouts"):
        require_steps([], mute)


def test_adapters_come_without_the_warning_of_a_renamed_attribute(mute, tmp_path):
    tokenizer = mute.tokenizer
    fresh = [Policy(make_model(tokenizer), tokenizer, mute.protocol, "x") for _ in range(2)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        policy = add_lora(fresh[0], 2, 0)
        save_adapter(policy, tmp_path)
        load_adapter(fresh[1], tmp_path)
        warnings.warn("`other` is deprecated", FutureWarning, stacklevel=1)
    assert [str(w.message) for w in seen if w.category is FutureWarning] == ["`other` is deprecated"]
