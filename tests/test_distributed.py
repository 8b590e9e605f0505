"""Two processes do what one does: the same groups, rollouts, advantages and weights."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer_world as w

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """What each rank saw: of one fresh process, and of two. (tests/test_launch.py starts them with torchrun.)"""
    folder = tmp_path_factory.mktemp("processes")
    for name in ("one", "two"):
        (folder / name).mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "trainer_world.py"), str(folder), str(port)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = {"one": 1, "two": 2}
    return [
        [torch.load(folder / name / f"rank{rank}.pt", weights_only=False) for rank in range(n)]
        for name, n in ranks.items()
    ]


@pytest.mark.case(15)
def test_groups_split_over_two_processes_give_the_same_advantages(one_and_two):
    one, two = (outs[0]["split"] for outs in one_and_two)
    assert (one["n_processes"], two["n_processes"]) == (1, 2)
    assert len(one["advantages"]) == 2
    for a, b in zip(one["advantages"], two["advantages"], strict=True):
        assert a.shape == b.shape == (6,) and a.any()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.case(24)
def test_one_rank_may_hold_only_the_hybrid_half(one_and_two):
    for outs in one_and_two:
        for rollouts in outs[0]["split"]["rollouts"]:
            assert [r["place"] for r in rollouts] == [0, 1, 2, 3, 4, 5]
            assert [r["hybrid"] for r in rollouts] == [False] * 3 + [True] * 3
            assert len({r["question_id"] for r in rollouts}) == 1


@pytest.mark.case(35)
@pytest.mark.parametrize("case", w.CASES)
def test_both_sample_the_same_ids_and_end_with_the_same_weights(one_and_two, case):
    one, two = (outs[0][case] for outs in one_and_two)
    # What is sampled depends on seed, step, question and place alone; after an update the weights agree to rounding.
    for a, b in zip(one["rollouts"], two["rollouts"], strict=True):
        assert [ids(r) for r in a] == [ids(r) for r in b]
    start = w.adapter(w.make_policy())
    for name, weight in one["adapter"].items():
        torch.testing.assert_close(two["adapter"][name], weight, rtol=0, atol=2e-6)
        assert weight.equal(start[name]) is False
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert a == pytest.approx(b, rel=1e-4, nan_ok=True)


def test_a_rank_without_signal_takes_part_in_the_update(one_and_two):
    ranks = one_and_two[1]
    assert [r["idle"]["local_signal"] for r in ranks] == [[True], [False]]
    assert all(p.equal(ranks[1]["idle"]["adapter"][name]) for name, p in ranks[0]["idle"]["adapter"].items())


@pytest.mark.case(35)
def test_another_process_gives_the_same_bits(one_and_two, tmp_path):
    other = one_and_two[0][0]["split"]
    here = w.train_and_keep(tmp_path / "split", **w.CASES["split"])
    assert here["rollouts"] == other["rollouts"]
    assert all(weight.equal(other["adapter"][name]) for name, weight in here["adapter"].items())


def ids(rollout: dict) -> list[tuple]:
    return [(s["origin"], s["ids"]) for s in rollout["segments"]]
