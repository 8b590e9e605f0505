"""The table of all runs, its time, and taking over runs of an earlier version of the code."""

import doctest
import json
import re
import textwrap

import nbformat
import pandas as pd
import pytest

from rapo_lib import runs, study
from rapo_lib.config import ROOT, RunConfig, load_profile
from rapo_lib.methods import METHODS
from rapo_lib.runs import Run, find_runs, run_many
from rapo_lib.traces import file_sha256

TOY = """
    import os
    import pandas as pd

    def run(config, folder):
        with open(os.environ["TOY_LOG"], "a", encoding="utf-8") as f:
            f.write(f"{config.method} {config.noise_prob} {config.seed}\\n")
        shift = float(os.environ.get("TOY_SHIFT", "0")) * (config.method == "rapo")
        rows = {"rl_step": [1, 2], "reward": [shift, float(config.seed)], "step_sec": [float(os.getpid()), 1.0]}
        for name in ("metrics", "evals", "final"):
            pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
        return {"pass@1": 0.5}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_study.py").write_text(textwrap.dedent(TOY), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "toy.log"))
    monkeypatch.delenv("RAPO_FRESH_SINCE", raising=False)

    def code(name):
        """The version of the code that runs and results are of."""
        for module in (runs, study):
            monkeypatch.setattr(module, "inputs_hash", lambda config: name)
        monkeypatch.setenv("RAPO_RESULTS", str(tmp_path / name))
        (tmp_path / "toy.log").unlink(missing_ok=True)

    def done():
        log = tmp_path / "toy.log"
        return sorted(log.read_text(encoding="utf-8").splitlines()) if log.exists() else []

    code.done = done
    code.how = {"jobs": 2, "executor": "toy_study:run", "say": lambda text: None}
    return code


def seeds(method, n, **settings):
    return [RunConfig(method=method, seed=seed).replace(**settings) for seed in range(n)]


def test_examples_in_docstrings():
    assert doctest.testmod(study).failed == 0


def test_a_variant_means_the_same_wherever_it_stands():
    for name in ("smoke", "pocket", "study"):
        meaning = {}
        for plan in study.everything(load_profile(name)).values():
            for variant, configs in plan.items():
                short, long = sorted((meaning.setdefault(variant, configs), configs), key=len)
                assert long[: len(short)] == short, (name, variant)
                runs.plan_runs({variant: configs}, runs.runs_folder(name))  # a plain folder name, no run twice
                assert configs[0].method in METHODS


def test_profiles_with_few_seeds_leave_the_long_rows_out():
    study_profile, pocket = load_profile("study"), load_profile("pocket")
    assert set(study.planned(pocket, "components")) == {"rapo_no_rpo"}
    assert len(study.planned(study_profile, "components")) == 5 and study.planned(pocket, "tuning") == {}
    assert [c.seed for c in study.planned(study_profile, "tuning")["grpo_easy_lr=0.002_r=16"]] == [100, 101]
    assert len(study.planned(pocket, "noise")) == 7 and len(study.planned(load_profile("smoke"), "noise")) == 3
    assert [c.seed for c in study.planned(pocket, "positive_control")["grpo_easy"]] == [0, 1]
    assert all(len(c) >= 5 for e, p in study.everything(study_profile).items() for c in p.values() if e in LONG)
    assert set(study.planned(study_profile, "parameters")) == {v.name for v in study.EXPERIMENTS["parameters"]}
    with pytest.raises(ValueError, match="unknown experiment 'x'; allowed: training, "):
        study.planned(pocket, "x")


#: Experiments whose variants are compared with each other: five seeds each in the study.
LONG = set(study.EXPERIMENTS) - {"positive_control", "health", "tuning"}


def test_the_default_rate_and_rank_stand_in_the_tuning_grid():
    default = RunConfig()
    grid = [c for configs in study.planned(load_profile("study"), "tuning").values() for c in configs]
    assert len({(c.learning_rate, c.lora_r) for c in grid}) == 12
    assert (default.learning_rate, default.lora_r) in {(c.learning_rate, c.lora_r) for c in grid}
    assert not {c.seed for c in grid} & set(range(50))  # seeds that are used for nothing else


def test_seconds_of_a_run_by_hand():
    """100 rollouts in 50 s by its own method and regime; others are worse guesses, in that order."""
    measured = pd.DataFrame(
        [("grpo", "easy", 50.0, 100), ("grpo", "halfway", 20.0, 100), ("sft", "easy", 10.0, 100)],
        columns=["method", "regime", "seconds", "work"],
    )
    config = RunConfig(rl_steps=2, questions_per_step=3, group_size=4, eval_every=2, n_eval=10, n_final=3)
    assert study.work_of(config) == 2 * 3 * 4 + 2 * 10 + 2 * 3 == 50
    seconds = [
        study.estimate_seconds(config.replace(method=m, regime=r), measured)
        for m, r in (("grpo", "easy"), ("grpo", "exploration"), ("rapo", "easy"))
    ]
    assert seconds == pytest.approx([25.0, 17.5, 80 / 300 * 50])
    assert pd.isna(study.estimate_seconds(config, measured[:0]))


def test_the_plan_counts_a_shared_run_once_and_what_is_there(toy, monkeypatch):
    toy("now")
    monkeypatch.setattr(study, "REFERENCE", study.RESULTS / "nowhere")
    profile = load_profile("smoke")
    table = study.plan_table(profile, jobs=2).set_index("experiment")
    assert table.loc["training", ["runs", "there", "missing"]].tolist() == [3, 0, 3]
    assert table.loc["noise", "runs"] == 1  # GRPO and RAPO are those of `training`
    assert pd.isna(table["minutes"]["training"])
    run_many(study.planned(profile, "training"), profile="smoke", experiment="training", **toy.how)
    table = study.plan_table(profile, jobs=2).set_index("experiment")
    assert table.loc["training", ["runs", "there", "missing"]].tolist() == [3, 3, 0]
    total = table["runs"].sum()
    said = f"{total} training runs in all notebooks, 3 there, {total - 3} missing: about "
    assert study.time_line(profile, 2).startswith(said)
    assert study.time_line(profile, 2, ["05_training"]).startswith("8 training runs in these notebooks, 3 there, 5 ")


def test_what_a_notebook_needs_is_what_its_code_plans():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        code = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
        calls = re.findall(r"(?:planned\(settings, |runs_of\(|experiment=)\"(\w+)\"((?:, \"\w+\")*)", code)
        calls = [call for call in calls if call[0] in study.EXPERIMENTS]  # the exercises have names of their own
        if path.stem.startswith("09"):  # looks for noisy runs, and does none
            assert ("noise", "") in calls
            calls.remove(("noise", ""))
        parts = [(name, re.findall(r"\w+", variants)) for name, variants in calls]
        named = {part for name, variants in parts for part in ([f"{name}/{v}" for v in variants] or [name])}
        assert named == set(study.NEEDED_BY.get(path.stem[:2], ())), path.stem


def test_runs_of_some_notebooks_are_a_part_of_all():
    profile = load_profile("study")
    every = study.everything(profile)
    assert study.everything(profile, ["00_start_here"]) == {}
    part = study.everything(profile, ["10_components"])
    for name, variant in (("training", "grpo"), ("training", "rapo"), ("weak_teacher", "rapo_spare")):
        assert part.pop(f"{name}/{variant}") == {variant: every[name][variant]}
    assert part == {name: every[name] for name in part} and "regimes" not in part


def earlier_runs(toy):
    toy("old")
    plan = {"grpo": seeds("grpo", 3), "rapo": seeds("rapo", 2), "noisy": seeds("rapo", 2, noise_prob=0.5)}
    run_many(plan, profile="study", experiment="main", **toy.how)
    return runs.runs_folder("study").parent, [c for configs in plan.values() for c in configs]


def test_runs_of_an_earlier_version_are_taken_over_after_one_of_each_kind_was_equal(toy):
    source, configs = earlier_runs(toy)
    toy("new")
    assert study.carry("study", source, **toy.how) == {"there": 0, "same": 0, "again": 3, "carried": 4, "changed": 0}
    assert toy.done() == ["grpo 0.0 0", "rapo 0.0 0", "rapo 0.5 0"]
    found = find_runs({"x": configs}, profile="study")
    assert [r.config for r in found] == configs
    for run in found:
        mark = run.done.get("carried")
        assert (mark is None) == (run.config.seed == 0)
        assert mark is None or (mark["inputs_hash"] == "old" and mark["checked"].endswith("seed 0"))
        assert run.table("metrics")["reward"].tolist() == [0.0, run.config.seed] and run.file("config.json")
    toy("new")
    assert study.carry("study", source, **toy.how)["there"] == 7 and toy.done() == []
    # From there on to a third version: the hash of the code that really made them stays.
    third = runs.runs_folder("study").parent
    toy("third")
    study.carry("study", third, **toy.how)
    marks = {r.config.seed: r.done.get("carried") for r in find_runs({"x": seeds("grpo", 3)}, profile="study")}
    assert marks[0] is None and marks[1]["inputs_hash"] == "old"


def test_without_a_check_runs_come_over_as_they_are_and_say_so(toy, monkeypatch):
    source, configs = earlier_runs(toy)
    toy("new")
    run_many({"grpo": seeds("grpo", 1)}, profile="study", experiment="main", **toy.how)
    monkeypatch.setenv("TOY_SHIFT", "0.25")  # nothing would be equal
    counts = study.carry("study", source, check=False, **toy.how)
    assert counts == {"there": 1, "same": 0, "again": 0, "carried": 6, "changed": 0}
    assert toy.done() == ["grpo 0.0 0"]  # and no other
    found = find_runs({"x": configs}, profile="study")
    assert [r.config for r in found] == configs
    marks = {(r.config.method, r.config.seed): r.done.get("carried") for r in found}
    assert marks.pop(("grpo", 0)) is None and {m["checked"] for m in marks.values()} == {"not checked"}
    assert study.carry("study", source, check=False, **toy.how) == counts | {"there": 7, "carried": 0}


def test_an_earlier_check_does_not_cover_a_later_version(toy):
    source, configs = earlier_runs(toy)
    toy("new")
    study.carry("study", source, **toy.how)
    checked = runs.runs_folder("study").parent
    toy("third")
    study.carry("study", checked, check=False, **toy.how)
    marks = [r.done["carried"] for r in find_runs({"x": configs}, profile="study")]
    assert {m["checked"] for m in marks} == {"not checked"}
    assert {m["inputs_hash"] for m in marks} == {"old", "new"}  # the code that really made them


def test_a_kind_whose_results_changed_is_left_out(toy, monkeypatch):
    source, configs = earlier_runs(toy)
    toy("new")
    monkeypatch.setenv("TOY_SHIFT", "0.25")
    said = []
    counts = study.carry("study", source, **(toy.how | {"say": said.append}))
    assert counts == {"there": 0, "same": 0, "again": 3, "carried": 2, "changed": 2}
    assert "rapo seed 0 differs from the earlier run (metrics, reward): 1 others are left out" in said
    carried = [r.config for r in find_runs({"x": configs}, profile="study") if "carried" in r.done]
    assert {c.method for c in carried} == {"grpo"}


def test_a_configuration_of_an_earlier_version_gets_the_fields_it_lacked(toy):
    source, configs = earlier_runs(toy)
    for path in source.rglob("config.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        del row["gate_nats"]
        path.write_text(json.dumps(row), encoding="utf-8")
        done = json.loads((path.parent / "done.json").read_text(encoding="utf-8"))
        done["files"]["config.json"] = file_sha256(path)
        (path.parent / "done.json").write_text(json.dumps(done), encoding="utf-8")
    toy("new")
    assert study.carry("study", source, **toy.how)["carried"] == 4
    assert len(find_runs({"x": configs}, profile="study")) == len(configs)


@pytest.mark.parametrize("seed", [0, 1])  # one that is done again, and one that is not
def test_a_damaged_run_is_not_taken_over(toy, seed):
    source, _ = earlier_runs(toy)
    toy("new")
    path = next((source / "runs" / "main" / "grpo").glob(f"seed{seed}-*/metrics.parquet"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="metrics.parquet: sha256 is .*, done.json expects"):
        study.carry("study", source, **toy.how)


def test_runs_of_the_first_version_had_no_checksums(toy):
    source, configs = earlier_runs(toy)
    for path in source.rglob("done.json"):
        done = json.loads(path.read_text(encoding="utf-8"))
        del done["files"]
        path.write_text(json.dumps(done), encoding="utf-8")
    toy("new")
    assert study.carry("study", source, **toy.how)["carried"] == 4
    for run in find_runs({"x": configs}, profile="study"):
        assert run.file("metrics.parquet") and run.file("config.json")


def test_collected_results_are_held_against_their_manifest(toy):
    source, _ = earlier_runs(toy)
    paths = [p for p in source.rglob("*") if p.is_file()]
    sums = {p.relative_to(source).as_posix(): file_sha256(p) for p in paths}
    (source / "MANIFEST.json").write_text(json.dumps({"files": sums}), encoding="utf-8")
    paths[-1].write_bytes(b"damaged")
    toy("new")
    with pytest.raises(ValueError, match=paths[-1].name):
        study.carry("study", source, **toy.how)


def test_runs_of_the_present_code_are_copied_as_they_are(toy, tmp_path):
    source, configs = earlier_runs(toy)
    kept = tmp_path / "kept"
    source.rename(kept)
    toy("old")  # the same code, and an empty results folder
    counts = study.carry("study", kept, **toy.how)
    assert counts == {"there": 0, "same": 7, "again": 0, "carried": 0, "changed": 0} and toy.done() == []
    found = find_runs({"x": configs}, profile="study")
    assert [r.config for r in found] == configs and not any("carried" in r.done for r in found)


def test_nothing_to_carry_is_said(tmp_path):
    with pytest.raises(ValueError, match="holds no finished run; name a results folder"):
        study.carry("study", tmp_path)


def test_difference_names_table_and_column_and_passes_over_clocks(toy):
    toy("now")
    (a,) = run_many({"grpo": seeds("grpo", 1)}, profile="study", experiment="main", **toy.how)
    toy("later")
    (b,) = run_many({"grpo": seeds("grpo", 1)}, profile="study", experiment="main", **toy.how)
    assert study.difference(a, b) == ""  # step_sec holds the process's number
    c = Run("grpo", seeds("grpo", 2)[1], b.folder)
    assert study.difference(a, c) == ""
    (other,) = run_many({"grpo": seeds("grpo", 2)[1:]}, profile="study", experiment="main", **toy.how)
    assert study.difference(a, other) == "metrics, reward"


def test_the_command_line_shows_the_plan(toy, capsys):
    toy("now")
    assert study.main(["plan", "--profile", "smoke"]) == 0
    out = capsys.readouterr().out
    assert "training" in out and "training runs in all notebooks, 0 there" in out
