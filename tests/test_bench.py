"""The benches run and print all contestants; their figures are not tested."""

import argparse

import pytest

from rapo_lib.bench import bench_rollout, fp32_peak, main


def test_rollout_bench_prints_all_contestants(capsys):
    bench_rollout(argparse.Namespace(threads=1, rounds=1), n_questions=1, group_size=2)
    out = capsys.readouterr().out
    for line in ("a  our engine", "b  one model.generate a step", "c  plain model.generate", "GFLOP/s", "a/b ="):
        assert line in out


def test_unknown_bench_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_fp32_peak_is_positive():
    assert fp32_peak(seconds=0.01, n=64) > 0
