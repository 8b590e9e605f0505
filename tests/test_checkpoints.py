"""Checkpoints: whole or not there, checked, without pickles, and exact."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_world as w
from safetensors.torch import load_file
from transformers import TrainerCallback

from rapo_lib import checkpoints as c
from rapo_lib import trainer as t


def train(folder: Path, rl_steps: int = 3, **arguments):
    config = w.small_config(rl_steps=rl_steps)
    trainer = w.make_trainer(w.make_policy(), config, "grpo", folder, w.Canned(), checkpoint_every=1, **arguments)
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three RL steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    return train(folder, on_checkpoint=lambda f: (f / "note.json").write_text("{}", encoding="utf-8")), folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(trained[1], tmp_path / "copy"))


@pytest.mark.case(34)
def test_what_a_checkpoint_holds(trained):
    """The two newest are kept; nothing in them has to be unpickled, and each file has its sum."""
    folder = trained[1]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    newest = c.latest_checkpoint(folder)
    assert newest == folder / "checkpoint-6"
    row = json.loads((newest / c.COMPLETE).read_text(encoding="utf-8"))
    assert row["global_step"] == 6 and row["run"]["method"] == "rapo" and row["run"]["rl_steps"] == 3
    assert set(row["files"]) == {p.name for p in newest.iterdir()} - {c.COMPLETE} and "note.json" in row["files"]
    assert {p.suffix for p in newest.iterdir()} == {".safetensors", ".json", ".md"}
    weights = load_file(newest / "adapter_model.safetensors")
    mine = {n.replace(".default", ""): p for n, p in w.adapter(trained[0].policy).items()}
    assert weights.keys() == mine.keys() and all(weights[n].equal(p) for n, p in mine.items())


@pytest.mark.case(34)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "note.json", "scheduler.json"])
def test_a_damaged_checkpoint_is_named_and_passed_over(folder, name):
    path = folder / "checkpoint-6" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.warns(RuntimeWarning, match=rf"checkpoint-6 is passed over: {name} has sha256 .*, expected"):
        assert c.latest_checkpoint(folder).name == "checkpoint-4"


@pytest.mark.case(34)
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors has sha256 .missing."),
        (lambda f: (f / "extra.json").write_text("{}", encoding="utf-8"), "extra.json .* expected .no such file."),
        (lambda f: (f / c.COMPLETE).write_text("{", encoding="utf-8"), "complete.json cannot be read"),
        (lambda f: (f / c.COMPLETE).write_text("[1]", encoding="utf-8"), "complete.json cannot be read"),
        (lambda f: (f / c.COMPLETE).write_text('{"files": null}', encoding="utf-8"), "complete.json holds no sums"),
        (lambda f: (f / c.COMPLETE).write_bytes(b"\xff"), "complete.json cannot be read"),
    ],
)
def test_other_damage_is_named_too(folder, damage, text):
    damage(folder / "checkpoint-6")
    with pytest.warns(RuntimeWarning, match=text):
        assert c.latest_checkpoint(folder).name == "checkpoint-4"


@pytest.mark.case(34)
def test_unfinished_writing_is_passed_over_in_silence_and_cleared_away(folder, recwarn):
    """What a kill leaves: the folder of a checkpoint that was being written, or one that was half deleted."""
    half = folder / c.WRITING / "checkpoint-8"
    half.mkdir(parents=True)
    (half / "optimizer.safetensors").write_bytes(b"half")
    (folder / "checkpoint-6" / c.COMPLETE).unlink()
    assert c.latest_checkpoint(folder).name == "checkpoint-4" and not recwarn.list
    train(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    assert c.latest_checkpoint(folder).name == "checkpoint-6"


@pytest.mark.case(34)
def test_a_damaged_newest_checkpoint_costs_a_step_and_no_more(trained, folder):
    (folder / "checkpoint-6" / "optimizer.safetensors").write_bytes(b"")
    seen = []
    with pytest.warns(RuntimeWarning, match="passed over"):
        again = train(folder, on_rl_step=lambda row, rollouts: seen.append(row["rl_step"]))
    assert seen == [3]
    assert all(p.equal(w.adapter(trained[0].policy)[n]) for n, p in w.adapter(again.policy).items())


@pytest.mark.case(34)
def test_damaged_checkpoints_of_later_steps_do_not_push_out_the_new_ones(folder):
    """Both are damaged: the run starts again, and each new checkpoint stays."""
    for name in ("checkpoint-4", "checkpoint-6"):
        (folder / name / "optimizer.safetensors").write_bytes(b"")
    there = []
    with pytest.warns(RuntimeWarning, match="passed over"):
        train(folder, callbacks=[Look(there, folder)])
    assert there == [[2], [2, 4], [4, 6]]


class Look(TrainerCallback):
    def __init__(self, there: list, folder: Path) -> None:
        self.there, self.folder = there, folder

    def on_save(self, *args, **kwargs) -> None:
        self.there.append(sorted(int(p.name.removeprefix("checkpoint-")) for p in self.folder.glob("checkpoint-*")))


@pytest.mark.case(34)
def test_a_checkpoint_of_another_device_or_number_of_processes_is_refused(folder):
    path = folder / "checkpoint-6" / c.COMPLETE
    path.write_text(path.read_text(encoding="utf-8").replace('"device": "cpu"', '"device": "cuda"'), encoding="utf-8")
    with pytest.raises(ValueError, match="belongs to another run: device is 'cuda' there and 'cpu' here"):
        train(folder)


@pytest.mark.case(34)
def test_a_finished_training_is_not_trained_further(trained, folder):
    seen = []
    again = train(folder, on_rl_step=lambda row, rollouts: seen.append(row))
    assert seen == [] and again.state.global_step == 6
    assert all(p.equal(w.adapter(trained[0].policy)[n]) for n, p in w.adapter(again.policy).items())


def test_a_checkpoint_of_another_configuration_is_refused(folder):
    config = w.small_config(rl_steps=3, learning_rate=0.5)
    trainer = w.make_trainer(w.make_policy(), config, "grpo", folder, w.Canned(), checkpoint_every=1)
    with pytest.raises(ValueError, match="belongs to another run: learning_rate is 0.002 there and 0.5 here"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.case(34)
def test_random_generators_come_back(trained, tmp_path):
    trainer = trained[0]
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    random.gauss(0, 1), np.random.normal()  # both keep a second number for the next call
    trainer._save_rng_state(str(tmp_path))
    first = [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(1).item()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    trainer._load_rng_state(str(tmp_path))
    again = [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(1).item()]
    assert again == first


@pytest.mark.case(34)
def test_sft_goes_on_from_its_checkpoint(tmp_path):
    """Nine updates at once, and five, a stop in the middle of an epoch, and four more."""
    config, sampler = w.small_config(sft_epochs=2.25, learning_rate=0.02), w.Canned()
    policies, logs = {}, {}

    class Stop(Exception):
        pass

    def stop(row):
        logs["parts"].append(row)
        if row["update"] == 6:
            raise Stop

    def sft(name, on_update):
        policies[name] = w.make_policy()
        teacher = [sampler.rollout(policies[name], q, i, 1, False) for q in w.QUESTIONS for i in range(4)]
        t.train_sft(
            policies[name], teacher, config, tmp_path / name, batch_size=4, on_update=on_update, checkpoint_every=5
        )

    logs["whole"], logs["parts"] = [], []
    sft("whole", logs["whole"].append)
    with pytest.raises(Stop):
        sft("parts", stop)
    assert c.latest_checkpoint(tmp_path / "parts").name == "checkpoint-5"
    del logs["parts"][5:]  # update 6 belongs to no checkpoint
    sft("parts", logs["parts"].append)
    assert [row["update"] for row in logs["whole"]] == list(range(1, 10)) and logs["parts"] == logs["whole"]
    a, b = (w.adapter(policies[name]) for name in ("whole", "parts"))
    assert all(p.equal(b[n]) for n, p in a.items())


def test_nothing_is_unpickled_in_training_and_resuming(tmp_path):
    """In a process of its own, since an audit hook stays for good."""
    code = """
import sys
events = []
sys.addaudithook(lambda name, args: events.append(args) if name == "pickle.find_class" else None)
import test_checkpoints as own
from pathlib import Path
own.train(Path(sys.argv[1]), rl_steps=2)
(Path(sys.argv[1]) / "checkpoint-4" / "complete.json").unlink()
assert own.train(Path(sys.argv[1]), rl_steps=2).state.global_step == 4
assert events == [], events
import pickle
pickle.loads(pickle.dumps(Path))
assert len(events) == 1, "the hook does not see what it should"
"""
    tests = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
