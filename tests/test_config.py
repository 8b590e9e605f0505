"""Run configurations and profiles: one dial, no unknown names, hashes that follow every field."""

import dataclasses
import doctest

import pytest

from rapo_lib import config
from rapo_lib.config import PROFILES, Profile, RunConfig, field_table, load_profile


def test_examples_in_docstrings():
    assert doctest.testmod(config).failed == 0


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RunConfig)])
def test_every_field_changes_the_hash(field):
    value = getattr(RunConfig(), field)
    other = (not value) if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1
    assert RunConfig().replace(**{field: other}).hash() != RunConfig().hash()


def test_every_field_has_a_meaning():
    for cls in (RunConfig, Profile):
        assert all(row["doc"] for row in field_table(cls))


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_make_valid_runs(name):
    profile = load_profile(name)
    for method in ("grpo", "rapo", "sft"):
        configs = profile.configs(method)
        assert [c.seed for c in configs] == list(range(len(configs))) and configs[0].method == method
    c = profile.config("rapo")
    assert 0 < c.n_hybrid < c.group_size and c.eval_every <= c.rl_steps


def test_profiles_as_designed():
    assert (PROFILES["pocket"].seeds_main, PROFILES["pocket"].seeds) == (5, 1)
    assert PROFILES["pocket"].noise_probs == PROFILES["study"].noise_probs == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert PROFILES["study"].seeds_main >= 5 and PROFILES["study"].seeds >= 5
    assert PROFILES["smoke"].config("grpo").rl_steps <= 3
    assert [p.name for p in PROFILES.values() if not p.offline] == ["qwen", "paper"]


def test_overrides_reach_profile_or_run_and_unknown_ones_raise():
    p = load_profile("pocket", rl_steps=3, learning_rate=1, noise_probs=[0.0], jobs=1)
    assert p.config("grpo").rl_steps == 3 and p.config("grpo").learning_rate == 1.0 and p.noise_probs == (0.0,)
    for wrong, text in (
        ({"rl_stepz": 3}, "unknown setting 'rl_stepz'; allowed"),
        ({"rl_steps": "3"}, "int is expected"),
    ):
        with pytest.raises(ValueError, match=text):
            load_profile("pocket", **wrong)
    for wrong in ("pockte", "", "..", "a/b"):
        with pytest.raises(
            ValueError, match="allowed: smoke, pocket, study, qwen, paper, or your own: NAME stands for"
        ):
            load_profile(wrong)


def test_a_profile_of_ones_own_stands_beside_its_results(tmp_path, monkeypatch):
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path))
    path = tmp_path / "mine" / "profile.json"
    path.parent.mkdir()
    path.write_text('{"like": "qwen", "student": "/data/qwen", "rl_steps": 3, "noise_probs": [0, 1]}', encoding="utf-8")
    mine, qwen = load_profile("mine", jobs=3), load_profile("qwen")
    assert (mine.name, mine.jobs, mine.noise_probs, mine.offline) == ("mine", 3, (0, 1), False)
    assert mine.config("rapo") == qwen.config("rapo").replace(student="/data/qwen", rl_steps=3)
    for text, message in (
        ('{"like": "mine"}', "expected an object with like, one of smoke"),
        ("[1]", "expected an object"),
        ('{"like": "smoke", "rl_stepz": 3}', "unknown setting 'rl_stepz'"),
        ("{", "profile.json: "),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_profile("mine")


def test_hash_of_a_profile_ignores_jobs_alone():
    assert load_profile("pocket", jobs=7).hash() == PROFILES["pocket"].hash()
    assert load_profile("pocket", rl_steps=7).hash() != PROFILES["pocket"].hash()
    assert load_profile("pocket", seeds=7).hash() != PROFILES["pocket"].hash()
