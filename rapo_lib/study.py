"""What is run to answer which question, how long it takes, and which earlier runs still hold.

Every notebook takes its runs from `planned`, so this table is the whole study. The regimes, grids and rates below
were written down before their runs; notebook 10 says why each stands here. `python -m rapo_lib.study plan` shows
what is missing and how long it will take; `carry` takes over the runs of an earlier version of the code, after doing
the first seed of each again and finding it equal.
"""

# ruff: noqa: E501 (EXPERIMENTS is a table, one row a line)
from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from rapo_lib.config import PROFILE_HELP, RESULTS, Profile, RunConfig, load_profile
from rapo_lib.pocket.files import compare_checksums
from rapo_lib.runs import EXECUTOR, UNCHECKED, Run, find_runs, inputs_hash, load_config, run_many, runs_folder
from rapo_lib.traces import file_sha256, write_text_atomic

REFERENCE = RESULTS / "reference"
#: Where `carry` does runs again, before they are moved beside the others of their variant.
CHECKS = "checks"
#: What done.json says of a run that was taken over without a check.
NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Variant:
    """One row of an experiment: a method with some settings.

    Args:
        name: of the variant, unique in the study. method: key in METHODS.
        settings: RunConfig fields that differ from the profile's.
        long: only profiles that give five or more seeds run it.
        seeds: these seeds instead of the profile's.
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    long: bool = False
    seeds: tuple[int, ...] = ()

    def configs(self, profile: Profile) -> list[RunConfig]:
        """One configuration a seed."""
        if self.seeds:
            return [profile.config(self.method, seed, **self.settings) for seed in self.seeds]
        return profile.configs(self.method, **self.settings)


def _v(name: str, method: str = "", *, long: bool = False, seeds: tuple[int, ...] = (), **settings: Any) -> Variant:
    return Variant(name, method or name, settings, long, seeds)


_RATES, _RANKS = (5e-4, 1e-3, 2e-3, 4e-3), (8, 16, 32)
#: Seeds that choose learning rate and rank and are used for nothing else.
TUNING_SEEDS = (100, 101)
#: Profiles that give a variant this many seeds run the whole table.
LONG_FROM = 5

EXPERIMENTS: dict[str, tuple[Variant, ...]] = {
    # 05: the comparison, the positive control, the other regimes
    "training": (_v("grpo"), _v("rapo"), _v("sft")),
    "positive_control": (_v("grpo_easy", "grpo", regime="easy", seeds=(0, 1)),),
    "regimes": tuple(_v(f"{m}_{r}", m, regime=r) for r in ("halfway", "easy") for m in ("grpo", "rapo")),
    # 06: the noise grid is the profile's
    "noise": (_v("grpo"), _v("rapo")),
    "noise_halfway": (_v("grpo_halfway", "grpo", regime="halfway", long=True), _v("rapo_halfway", "rapo", regime="halfway", long=True),
                      _v("rapo_halfway_p=1", "rapo", regime="halfway", noise_prob=1.0, long=True)),
    # 07: teachers and units
    "weak_teacher": (_v("grpo"), _v("rapo"), _v("rapo_weak", "rapo", buffer="weak"), _v("rapo_spare", "rapo", extra_steps=1),
                     _v("rapo_to_spare", "rapo_to", extra_steps=1)),
    "teachers": (_v("rapo_middling", "rapo", buffer="middling", long=True), _v("rapo_patient", "rapo", buffer="patient", long=True),
                 _v("rapo_strong_few", "rapo", buffer="teacher&weak", long=True), _v("rapo_specialists", "rapo", buffer="searcher+reckoner", long=True)),
    # 08
    "health": (_v("grpo", seeds=(0,)), _v("rapo_easy", "rapo", regime="easy", seeds=(0,)),
               _v("too_fast", "rapo", regime="easy", learning_rate=5e-3, seeds=(0,))),
    # 10: components, inversions, our own variants, parameters, our own choices, tuning
    "components": tuple(_v(f"rapo_no_{part}", long=part not in ("rpo",)) for part in ("rpo", "reward", "shaping", "quality", "timing")),
    "inversions": tuple(_v(name, long=name != "low_h_rising") for name in ("low_h_rising", "low_h_falling", "high_h_rising")),
    "ours": (_v("rapo_sign_aware", long=True), _v("rapo_gated")),
    "parameters": (_v("rapo_m=0.5", "rapo", shaping_weight=0.5, long=True), _v("rapo_a=1", "rapo", advantage_weight=1.0, long=True),
                   _v("rapo_hybrid=4", "rapo", n_hybrid=4, long=True), _v("rapo_hybrid=12", "rapo", n_hybrid=12, long=True),
                   _v("rapo_prob=0.25", "rapo", retrieval_prob=0.25, long=True), _v("rapo_prob=1", "rapo", retrieval_prob=1.0, long=True)),
    "guards": (_v("rapo_no_guard", "rapo", leak_guard=False), _v("rapo_other_questions", "rapo", exclude_same_question=True, long=True),
               _v("grpo_spare", "grpo", extra_steps=1, long=True)),
    "tuning": tuple(_v(f"grpo_easy_lr={lr:g}_r={r}", "grpo", regime="easy", learning_rate=lr, lora_r=r, seeds=TUNING_SEEDS, long=True)
                    for r in _RANKS for lr in _RATES),
    "rates": tuple(_v(f"{m}_lr={lr:g}", m, learning_rate=lr, long=True) for m, lr in (("grpo", 5e-4), ("grpo", 1e-3), ("rapo", 1e-3))),
    # 11: practise or copy
    "imitation": (_v("luffy"), _v("sft_grpo"))
    + tuple(_v(f"{m}_{r}", m, regime=r, long=True) for r in ("halfway", "easy") for m in ("luffy", "sft", "sft_grpo")),
    # SFT gets as many optimiser steps as with all trajectories (about 202, 16 trajectories each), whatever their number
    "buffer_size": tuple(_v(f"rapo_n={n}", "rapo", n_trajectories=n, long=n != 12) for n in (12, 48, 240))
    + tuple(_v(f"sft_n={n}", "sft", n_trajectories=n, sft_epochs=epochs, long=n != 12) for n, epochs in ((12, 202.0), (48, 67.4), (240, 13.5))),
    "wasteful": tuple(_v(f"{m}_wasteful", m, buffer="wasteful", long=m != "sft") for m in ("sft", "rapo", "luffy", "sft_grpo")),
}  # fmt: skip


#: Experiments, or one variant of them, whose runs a notebook does where no earlier one did.
NEEDED_BY: dict[str, tuple[str, ...]] = {
    "05": ("training", "positive_control", "regimes"),
    "06": ("noise", "noise_halfway"),
    "07": ("weak_teacher", "teachers"),
    "08": ("health",),
    "09": ("training",),
    "10": (
        *("tuning", "training/grpo", "training/rapo", "rates", "components", "inversions", "ours", "parameters", "guards"),
        "weak_teacher/rapo_spare",
    ),
    "11": ("training", "regimes", "imitation", "buffer_size", "wasteful"),
}  # fmt: skip
#: The first notebook that runs an experiment.
MADE_BY = {name: notebook for notebook, names in reversed(NEEDED_BY.items()) for name in names if "/" not in name}


def planned(profile: Profile, experiment: str) -> dict[str, list[RunConfig]]:
    """The runs of one experiment: for each variant one configuration a seed.

    Args:
        profile: how much is run; one with fewer than five seeds leaves the long rows out.
        experiment: key in EXPERIMENTS.

    Raises:
        ValueError: an unknown experiment.

    Example:
        >>> {name: len(configs) for name, configs in planned(load_profile("pocket"), "training").items()}
        {'grpo': 5, 'rapo': 5, 'sft': 1}
    """
    if experiment not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {experiment!r}; allowed: {', '.join(EXPERIMENTS)}")
    rows = [v for v in EXPERIMENTS[experiment] if not v.long or profile.seeds >= LONG_FROM]
    configs = {v.name: v.configs(profile) for v in rows}
    if experiment == "noise":
        configs |= {f"rapo_p={p:g}": profile.configs("rapo", noise_prob=p) for p in profile.noise_probs if p}
    if experiment in ("positive_control", "regimes") and profile.seeds < 2 and "grpo_easy" in configs:
        configs["grpo_easy"] = profile.configs("grpo", 2, regime="easy")  # the control is about two seeds
    return configs


def everything(profile: Profile, notebooks: Sequence[str] = ()) -> dict[str, dict[str, list[RunConfig]]]:
    """All experiments of a profile, or what some notebooks need of them.

    Args:
        profile: how much is run. notebooks: names that begin with a number, such as 05_training; empty for all.
    """
    needed = [name for n in notebooks for name in NEEDED_BY.get(n[:2], ())]
    return {name: plan for name in (needed if notebooks else EXPERIMENTS) if (plan := _part(profile, name))}


def _part(profile: Profile, name: str) -> dict[str, list[RunConfig]]:
    """The runs of an experiment, or of `experiment/variant`."""
    experiment, _, variant = name.partition("/")
    return {v: configs for v, configs in planned(profile, experiment).items() if variant in ("", v)}


# ------------------------------------------------------------------------------------------------ time


def work_of(config: RunConfig) -> int:
    """Rollouts of a run, in training and evaluation: what its time is in proportion to."""
    n_evals = 1 + -(-config.rl_steps // config.eval_every)
    return (
        config.rl_steps * config.questions_per_step * config.group_size + n_evals * config.n_eval + 2 * config.n_final
    )


def measured_seconds(folders: Iterable[Path], student: str = RunConfig.student) -> pd.DataFrame:
    """One row a finished run of a student below some `runs` folders: method, regime, seconds and work (`work_of`).

    Runs that were taken up again are left out: their seconds are those of the last process alone.
    """
    rows = []
    for path in (p for folder in folders for p in sorted(folder.rglob("done.json"))):
        done = json.loads(path.read_text(encoding="utf-8"))
        if not done.get("resumed_at"):
            config = load_config(path.parent)
            if config.student == student:
                rows.append((config.method, config.regime, done["seconds"], work_of(config)))
    return pd.DataFrame(rows, columns=["method", "regime", "seconds", "work"])


def estimate_seconds(config: RunConfig, measured: pd.DataFrame) -> float:
    """Seconds of one run: from runs of its method and regime, else of its method, else of any.

    Returns:
        NaN when nothing was measured.

    Example:
        >>> seen = pd.DataFrame([("grpo", "easy", 50.0, 100)], columns=["method", "regime", "seconds", "work"])
        >>> estimate_seconds(RunConfig(method="grpo"), seen) == 0.5 * work_of(RunConfig())
        True
    """
    same = measured["method"] == config.method
    for rows in (measured[same & (measured["regime"] == config.regime)], measured[same], measured):
        if len(rows):
            return float((rows["seconds"] / rows["work"]).mean() * work_of(config))
    return float("nan")


def plan_table(profile: Profile, jobs: int | None = None, notebooks: Sequence[str] = ()) -> pd.DataFrame:
    """One row an experiment: runs planned, there, missing, and minutes that the missing ones will take.

    A run that several experiments share counts in the first one. Seconds come from the profile's finished runs and
    from results/reference.
    """
    measured = measured_seconds([runs_folder(profile.name), REFERENCE / "runs"], profile.config("grpo").student)
    seen: set[RunConfig] = set()
    rows = []
    for name, plan in everything(profile, notebooks).items():
        configs = [c for c in dict.fromkeys(c for cs in plan.values() for c in cs) if c not in seen]
        seen |= set(configs)
        there = {r.config for r in find_runs({"x": configs}, profile=profile.name)}
        missing = [c for c in configs if c not in there]
        seconds = sum(estimate_seconds(c, measured) for c in missing) / (jobs or profile.jobs)
        rows.append((name, len(configs), len(configs) - len(missing), len(missing), seconds / 60))
    return pd.DataFrame(rows, columns=["experiment", "runs", "there", "missing", "minutes"])


def time_line(profile: Profile, jobs: int | None = None, notebooks: Sequence[str] = ()) -> str:
    """One sentence on what is missing and how long it will take, for all notebooks or for some of them."""
    table = plan_table(profile, jobs, notebooks)
    total, missing, minutes = table["runs"].sum(), table["missing"].sum(), table["minutes"].sum(skipna=False)
    where = f"in {'these' if notebooks else 'all'} notebooks"
    if not total:
        return f"no training runs {where}"
    line = f"{total} training runs {where}, {total - missing} there, {missing} missing"
    if not missing:
        return line
    if pd.isna(minutes):
        return f"{line}; no run of this student was timed yet"
    long = f"{minutes / 60:.1f} hours" if minutes > 100 else f"{minutes:.0f} minutes" if minutes >= 1.5 else "a minute"
    return f"{line}: about {long} with {jobs or profile.jobs} at once, by the times of earlier runs"


# ----------------------------------------------------------------------------------------------- carry


def carry(
    profile: str,
    source: Path,
    *,
    check: bool = True,
    jobs: int = 2,
    executor: str = EXECUTOR,
    say: Callable[[str], None] = print,
) -> dict[str, int]:
    """Take over runs that an earlier version of the code did, after doing some of them again.

    A change of code makes every run stale, although most changes change no result. Of runs that differ in nothing but
    their seed the first one is done again; when its tables are equal to the earlier ones in every number but the
    clock's, the others are taken over. Their done.json says so, with the hash of the code that made them. Runs of the
    present code are copied as they are.

    Args:
        profile: whose results folder they go to. source: a folder that holds `runs` of the same profile.
        check: whether runs are done again. Another processor rounds otherwise, and no run is equal there; without a
            check runs come over as they are, to draw figures and tables of them, and done.json says "not checked".
        jobs: training runs at once. executor: `module:function` of a run. say: gets one line a step.

    Returns:
        Numbers of runs `there` already, of the `same` code, done `again`, `carried`, and `changed` (left out, since
        the run that was done again differs).

    Raises:
        ValueError: the source holds no finished run, or a file that differs from its checksum.
    """
    _check_manifest(source)
    earlier = sorted(_earlier_runs(source), key=lambda r: r.config.seed)
    if not earlier:
        raise ValueError(f"{source}/runs holds no finished run; name a results folder such as results/reference")
    kinds: dict[RunConfig, list[tuple[str, Run]]] = {}  # by everything but the seed
    for run in earlier:
        kinds.setdefault(run.config.replace(seed=0), []).append((run.folder.parent.parent.name, run))
    there = {r.config for r in find_runs({"x": list({r.config for r in earlier})}, profile=profile)}
    same = [r for r in earlier if r.done and r.config not in there]
    for run in same:
        _copy_checked(run, runs_folder(profile) / run.folder.parent.parent.name / run.variant / run.folder.name)
    counts = {"there": len(there), "same": len(same)}
    there |= {r.config for r in same}
    due = {kind: runs for kind, runs in kinds.items() if any(r.config not in there for _, r in runs)}
    if not check:
        missing = [(e, r) for runs in due.values() for e, r in runs if r.config not in there]
        for experiment, run in missing:
            _take_over(run, runs_folder(profile) / experiment / run.variant, checked=NOT_CHECKED)
        return counts | {"again": 0, "carried": len(missing), "changed": 0}
    first = {kind: runs[0][1] for kind, runs in due.items()}
    again = {"check": list(dict.fromkeys(r.config for r in first.values()))}
    counts |= {"again": sum(c not in there for c in again["check"]), "carried": 0, "changed": 0}
    how = {"profile": profile, "experiment": CHECKS, "jobs": jobs, "executor": executor, "say": say}
    redone = {r.config: r for r in run_many(again, **how)}
    for kind, runs in due.items():
        one = first[kind]
        _move(redone[one.config], runs_folder(profile) / runs[0][0] / one.variant)
        missing = [(e, r) for e, r in runs if r.config not in there and r.config != one.config]
        if fault := difference(one, _find_run(one, profile)):
            counts["changed"] += len(missing)
            say(f"{one.label} differs from the earlier run ({fault}): {len(missing)} others are left out")
            continue
        for experiment, run in missing:
            _take_over(run, runs_folder(profile) / experiment / run.variant, checked=one.label)
        counts["carried"] += len(missing)
    return counts


def _find_run(run: Run, profile: str) -> Run:
    (found,) = find_runs({run.variant: [run.config]}, profile=profile)
    return found


def _move(run: Run, folder: Path) -> None:
    """Put a run that was done again beside the others of its variant."""
    if run.folder.parent != folder and run.folder.parent.parent.name == CHECKS:
        folder.mkdir(parents=True, exist_ok=True)
        run.folder.rename(folder / run.folder.name)


def _check_manifest(source: Path) -> None:
    """Hold collected results against the sums in their manifest; other folders have none."""
    if (manifest := source / "MANIFEST.json").exists():
        sums = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        compare_checksums(source, sums, manifest.name, f"restore {source} from the repository")


def _earlier_runs(source: Path) -> Iterator[Run]:
    for path in sorted((source / "runs").glob("*/*/*/done.json")):
        yield Run(path.parent.parent.name, load_config(path.parent), path.parent)


def difference(one: Run, other: Run) -> str:
    """The first table and column in which two runs differ, clocks left out; empty when there is none.

    Columns that only the later version writes do not count.
    """
    for name in ("metrics", "evals", "final"):
        a, b = (pd.read_parquet(_checked_file(run, f"{name}.parquet")) for run in (one, other))
        for column in (c for c in a.columns if not c.endswith("_sec")):
            if column not in b or not a[column].equals(b[column]):
                return f"{name}, {column}"
    return ""


def _checked_file(run: Run, name: str) -> Path:
    """A file of a run, compared with its checksum; runs of the first version hold none in their done.json."""
    has_sums = "files" in json.loads((run.folder / "done.json").read_text(encoding="utf-8"))
    return run.file(name) if has_sums else run.folder / name


def _copy_checked(run: Run, target: Path) -> dict[str, str]:
    """Copy a run's folder after comparing its files with their checksums, and return the sums.

    Nothing damaged is copied; files that were not kept, such as adapters, may be missing.
    """
    files = [p.relative_to(run.folder).as_posix() for p in run.folder.rglob("*") if p.is_file()]
    sums = {name: file_sha256(_checked_file(run, name)) for name in files if name not in UNCHECKED}
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run.folder, target)
    return sums


def _take_over(run: Run, folder: Path, checked: str) -> None:
    """Copy a run to its place under the present code, its configuration with all present fields."""
    done = json.loads((run.folder / "done.json").read_text(encoding="utf-8"))
    target = folder / f"seed{run.config.seed}-{run.config.hash()}"
    partial = target.with_name(f".{target.name}.carried")
    sums = _copy_checked(run, partial)
    write_text_atomic(partial / "config.json", json.dumps(dataclasses.asdict(run.config), indent=1) + "\n")
    done["files"] = done.get("files", {}) | sums | {"config.json": file_sha256(partial / "config.json")}
    source = {"inputs_hash": done["inputs_hash"], "checked": checked} | done.get("carried", {})
    if checked == NOT_CHECKED:  # an earlier check was of other code
        source["checked"] = checked
    done |= {"config_hash": run.config.hash(), "inputs_hash": inputs_hash(run.config), "carried": source}
    write_text_atomic(partial / "done.json", json.dumps(done, indent=1) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


# ---------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m rapo_lib.study plan|run|carry`; see --help."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.study", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    about = {
        "plan": "what is missing, and how long it takes",
        "run": "do the training runs of the notebooks without the notebooks",
        "carry": "take over runs of an earlier version of the code that does the same",
    }
    for name, text in about.items():
        p = commands.add_parser(name, help=text)
        p.add_argument("--profile", default="study", help=PROFILE_HELP)
        p.add_argument("--jobs", type=int, help="training runs at once (default: the profile's)")
        if name == "plan":
            p.add_argument("--tokens-per-sec", type=float, help="for the hours of one run (default: an assumption)")
        if name == "run":
            p.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; none: all")
            p.add_argument("--on", help="slurm or local: each run is a job, through submitit")
            p.add_argument("--job", action="append", default=[], metavar="NAME=VALUE", help="submitit's parameters")
        if name == "carry":
            p.add_argument("source", type=Path, help="a results folder with runs/, such as results/reference")
            p.add_argument("--unchecked", action="store_true", help="do no run again: to draw figures and tables only")
    a = parser.parse_args(arguments)
    try:
        profile = load_profile(a.profile)
    except ValueError as e:
        parser.error(str(e))
    jobs = a.jobs or profile.jobs
    if a.command == "plan":
        from rapo_lib import launch  # which itself reads this table

        return launch.print_plans(profile, jobs, a.tokens_per_sec)
    if a.command == "run":
        for name in a.experiments or everything(profile):
            print(f"{name}:", flush=True)
            run_many(planned(profile, name), profile=profile.name, experiment=name, jobs=jobs, work=_workers(a))
    else:
        print(carry(profile.name, a.source, check=not a.unchecked, jobs=jobs))
    return 0


def _workers(a: argparse.Namespace) -> Callable[..., None] | None:
    """Who does the runs: processes of this machine, or jobs of a cluster."""
    if not a.on:
        return None
    from rapo_lib import cluster, launch

    folder = runs_folder(a.profile).parent / "jobs"
    return partial(cluster.submit_runs, cluster=a.on, folder=folder, parameters=launch.parse_pairs(a.job))


if __name__ == "__main__":
    sys.exit(main())
