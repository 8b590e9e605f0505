"""Checkpoints of training that no kill can spoil, and resuming from them bit for bit.

Notebook 08 explains this module. `ExactCheckpoints` is mixed into a transformers Trainer. A checkpoint is
written beside its place and moved there whole; complete.json, written last, names the configuration and the
sha256 of every file, so that a half-written, damaged or foreign checkpoint is told apart. States are
safetensors and JSON: unlike in transformers' own checkpoints nothing has to be unpickled.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Trainer

from rapo_lib.traces import file_sha256, write_text_atomic

#: Written into a checkpoint folder when everything else is there.
COMPLETE = "complete.json"
#: Where a checkpoint is written before it is moved to its place.
WRITING = ".writing"
#: Finished checkpoints that are kept: the newest, and one more in case it is damaged.
KEEP = 2
OPTIMISER, SCHEDULER, PLACE = "optimizer.safetensors", "scheduler.json", "trainer_state.json"


def file_sums(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder by its relative path, complete.json left out."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != COMPLETE)
    return {p.relative_to(folder).as_posix(): file_sha256(p) for p in files}


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The newest whole checkpoint in a folder; None when there is none.

    A checkpoint whose writing never ended is passed over; so is one whose files differ from their checksums,
    with a warning that names the file.
    """
    for checkpoint in sorted(Path(folder).glob("checkpoint-*"), key=_step, reverse=True):
        if fault := _fault(checkpoint):
            warnings.warn(f"{checkpoint} is passed over: {fault}", RuntimeWarning, stacklevel=2)
        elif (checkpoint / COMPLETE).exists():
            return checkpoint
    return None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _fault(checkpoint: Path) -> str:
    """What is damaged in a finished checkpoint; empty when nothing is, or when it was never finished."""
    try:
        want = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError):
        return f"{COMPLETE} cannot be read"
    if not isinstance(want, dict):
        return f"{COMPLETE} holds no sums"
    got = file_sums(checkpoint)
    for name in sorted(want.keys() | got.keys()):
        if got.get(name) != want.get(name):
            return f"{name} has sha256 {got.get(name, '(missing)')}, expected {want.get(name, '(no such file)')}"
    return ""


def refuse_other_run(checkpoint: Path, identity: Mapping[str, Any]) -> None:
    """Raise ValueError when a checkpoint was written by a run with other values, naming the first difference."""
    there = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))["run"]
    here = json.loads(json.dumps(identity))
    for name in sorted(here):
        if there.get(name) != here[name]:
            raise ValueError(
                f"{checkpoint} belongs to another run: {name} is {there.get(name)!r} there and {here[name]!r} "
                "here; choose another folder, or move the checkpoint away to start from the beginning"
            )


class ExactCheckpoints(Trainer):
    """Mixin before a transformers Trainer: its checkpoints are whole, checked, free of pickles, and resume exactly.

    A class that uses it sets two attributes before training.

    Args:
        run_identity: JSON values that say which run it is; a checkpoint with others is refused.
        on_checkpoint: called with the folder of a checkpoint while it is being written (on the main process), to
            put more files into it.
    """

    run_identity: Mapping[str, Any] = {}
    on_checkpoint: Callable[[Path], None] | None = None

    def resume(self, checkpoint: Path | str | None) -> Any:
        """Train on from a checkpoint, from the start for None; a finished training only gets its weights back.

        Raises:
            ValueError: the checkpoint belongs to another run.
        """
        if checkpoint is None:
            return self.train()
        refuse_other_run(Path(checkpoint), self._identity())
        state = json.loads((Path(checkpoint) / PLACE).read_text(encoding="utf-8"))
        if state["global_step"] < state["max_steps"]:
            return self.train(resume_from_checkpoint=str(checkpoint))
        self._load_from_checkpoint(str(checkpoint))
        self.state = type(self.state).load_from_json(str(Path(checkpoint) / PLACE))
        return None

    def _identity(self) -> dict[str, Any]:
        """The run, and what the states of its generators belong to."""
        return {**self.run_identity, "device": self.args.device.type, "processes": self.args.world_size}

    # ------------------------------------------------------------------------- transformers' own hooks

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(self.args.output_dir, WRITING)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        writing = Path(self._get_output_dir(trial))
        if self.args.should_save:
            shutil.rmtree(writing, ignore_errors=True)  # what a kill left behind
        self.accelerator.wait_for_everyone()
        Trainer._save_checkpoint(self, model, trial)  # past TRL's, which adds a model card each time
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._complete(writing / f"checkpoint-{self.state.global_step}")

    def _complete(self, written: Path) -> None:
        """Sums last, then the move; older checkpoints go when the new one is in its place."""
        if self.on_checkpoint is not None:
            self.on_checkpoint(written)
        row = {"global_step": self.state.global_step, "run": self._identity(), "files": file_sums(written)}
        write_text_atomic(written / COMPLETE, json.dumps(row, indent=1) + "\n")
        place = Path(self.args.output_dir, written.name)
        shutil.rmtree(place, ignore_errors=True)  # a damaged one
        os.replace(written, place)
        written.parent.rmdir()
        others = sorted((p for p in place.parent.glob("checkpoint-*") if p != place), key=_step)
        # Those of later steps are damaged ones that a resumed run passed over; they come again.
        earlier = [p for p in others if _step(p) < self.state.global_step]
        for old in set(others) - set(earlier[1 - KEEP :]):
            shutil.rmtree(old)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # The adapter alone: the base model and the tokenizer do not change.
        if self.args.should_save:
            self.accelerator.unwrap_model(self.model).save_pretrained(output_dir, save_embedding_layers=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save:
            return
        state = self.optimizer.state_dict()
        tensors = {f"{i}.{k}": v.contiguous() for i, row in state["state"].items() for k, v in row.items()}
        save_file(tensors, os.path.join(output_dir, OPTIMISER), {"groups": json.dumps(state["param_groups"])})
        write_text_atomic(Path(output_dir, SCHEDULER), json.dumps(self.lr_scheduler.state_dict()) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state: dict[int, dict[str, torch.Tensor]] = {}
        with safe_open(os.path.join(checkpoint, OPTIMISER), "pt") as f:
            groups = json.loads(f.metadata()["groups"])
            for name in f.keys():  # noqa: SIM118 (no mapping)
                i, key = name.split(".", 1)
                state.setdefault(int(i), {})[key] = f.get_tensor(name)
        groups = [group | {"betas": tuple(group["betas"])} for group in groups]  # JSON knows no tuple
        self.optimizer.load_state_dict({"state": dict(sorted(state.items())), "param_groups": groups})
        self.lr_scheduler.load_state_dict(json.loads(Path(checkpoint, SCHEDULER).read_text(encoding="utf-8")))

    def _save_rng_state(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)  # another process may be here before the main one
        version, words, gauss = random.getstate()
        numpy = np.random.get_state()
        tensors = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words, dtype=torch.int64),
            "numpy": torch.from_numpy(numpy[1].astype(np.int64)),
        }
        if torch.cuda.is_available():
            tensors |= {f"cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
        rest = {"python": json.dumps([version, gauss]), "numpy": json.dumps([numpy[0], *numpy[2:]])}
        save_file(tensors, self._rng_file(output_dir), rest)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with safe_open(self._rng_file(checkpoint), "pt") as f:
            version, gauss = json.loads(f.metadata()["python"])
            name, *rest = json.loads(f.metadata()["numpy"])
            random.setstate((version, tuple(f.get_tensor("python").tolist()), gauss))
            np.random.set_state((name, f.get_tensor("numpy").numpy().astype(np.uint32), *rest))
            torch.set_rng_state(f.get_tensor("torch"))
            if torch.cuda.is_available():
                torch.cuda.set_rng_state_all([f.get_tensor(f"cuda.{i}") for i in range(torch.cuda.device_count())])

    def _rng_file(self, folder: str) -> str:
        return os.path.join(folder, f"rng-{self.args.process_index}.safetensors")
