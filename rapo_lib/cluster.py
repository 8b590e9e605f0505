"""Runs of a study as jobs of a Slurm cluster, through submitit: `python -m rapo_lib.study run training --on slurm`.

Each run is one job that does what a worker here does (`runs.do_run`): it goes on from its checkpoint, so one command
makes up for all jobs that were killed or ran out of time. The repository and the results folder have to lie on a disk
that all nodes share. `--on local` does the same as processes of this machine; with Slurm itself it was never tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rapo_lib.config import RunConfig
from rapo_lib.runs import Run, RunFailed, do_run, inputs_hash

CLUSTERS = ("slurm", "local")


def submit_runs(
    runs: Sequence[Run],
    jobs: int,
    executor: str,
    say: Callable[[str], None],
    *,
    cluster: str,
    folder: Path | str,
    parameters: Mapping[str, Any],
) -> None:
    """Do runs as jobs of a cluster and wait for them; stop submitting after the first failure.

    Args:
        runs: different ones. jobs: at once on this machine; Slurm gets them all and has limits of its own.
        executor: `module:function` of a run. say: gets a line a run.
        cluster: slurm or local. folder: of submitit's logs. parameters: of `submitit.AutoExecutor`, such as
            timeout_min, gpus_per_node, slurm_partition.

    Raises:
        ImportError: submitit is not installed.
        RunFailed: a run failed; holds what submitit knows of it.
    """
    machine = make_executor(cluster, folder, parameters)
    n = jobs if cluster == "local" else len(runs)
    for first in range(0, len(runs), n):
        wave = runs[first : first + n]
        began = [(run, machine.submit(do_run_here, *_order(run, executor))) for run in wave]
        failures = []
        for run, job in began:
            try:
                say(f"{run.label} (job {job.job_id}): {job.result()}")
            except Exception as e:  # of the job, or the cluster's own
                failures.append((run, e))
        if failures:
            run, e = failures[0]
            raise RunFailed(f"{run.label}: {type(e).__name__}: {e}\nlogs lie in {folder}") from e


def make_executor(cluster: str, folder: Path | str, parameters: Mapping[str, Any]) -> Any:
    """A submitit executor.

    Raises:
        ImportError: submitit is not installed.
        ValueError: another cluster.
    """
    if cluster not in CLUSTERS:
        raise ValueError(f"--on is {cluster!r}; allowed: {', '.join(CLUSTERS)}")
    try:
        import submitit
    except ImportError:
        raise ImportError("--on needs the package submitit: pip install submitit") from None
    machine = submitit.AutoExecutor(folder=str(folder), cluster=cluster)
    machine.update_parameters(name="rapo", **parameters)
    return machine


def _order(run: Run, executor: str) -> tuple[str, str, dict[str, Any], str]:
    return executor, str(run.folder), dataclasses.asdict(run.config), inputs_hash(run.config)


def do_run_here(executor: str, folder: str, config: Mapping[str, Any], inputs: str) -> str:
    """One run inside a job; returns its line."""
    return do_run(executor, Path(folder), RunConfig().replace(**config), inputs)
