"""Diversity of rollouts: hand-computed distances, clusters and radii, and groups of equal size."""

import doctest
import math

import numpy as np
import pytest

from rapo_lib import diversity
from rapo_lib.buffer import Encoder, TfidfEncoder
from rapo_lib.diversity import (
    action_sequence,
    compare_diversity,
    cosine_distances,
    equal_groups,
    neighbour_radius,
    rollout_text,
)
from rapo_lib.traces import Protocol, Rollout, Segment


class Letters(Encoder):
    """Counts of the letters a to d: rows that can be computed by hand."""

    name = "letters"
    dim = 4

    def encode(self, texts):
        rows = np.array([[t.count(c) for c in "abcd"] for t in texts], float)
        return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)).astype(np.float32)


@pytest.fixture
def protocol(tiny_tokenizer) -> Protocol:
    return Protocol(tiny_tokenizer)


@pytest.fixture
def group(protocol):
    """`group("q", ["a b"], ["c d"])`: on-policy and hybrid rollouts of a question that say these texts."""

    def make(question_id: str, on_policy: list[str], hybrid: list[str]) -> list[Rollout]:
        rollouts = []
        for place, text in enumerate(on_policy + hybrid):
            ids = protocol.encode(text)
            said = Segment("policy", ids, (0.0,) * len(ids), (0.0,) * len(ids))
            rollouts.append(Rollout(question_id, (1,), [said], place, hybrid=place >= len(on_policy)))
        return rollouts

    return make


def measured(found, question_id: str, group: str) -> tuple[float, int, int, int]:
    row = found.by_question.set_index(["question_id", "group"]).loc[(question_id, group)]
    return round(row["distance"], 6), row["clusters"], row["alone"], row["action_sequences"]


def test_doctests():
    assert doctest.testmod(diversity).failed == 0 < doctest.testmod(diversity).attempted


def test_identical_texts_have_no_distance_and_one_cluster(group, protocol, recwarn):
    said = ["<search> blue hotel</search>"] * 3
    found = compare_diversity(group("q", said, said), protocol)
    for kind in diversity.GROUPS:
        assert measured(found, "q", kind) == (0.0, 1, 0, 1)
    assert found.radius == 1e-6 and math.isnan(found.plane_frac) and not len(recwarn)
    assert found.plane[["x", "y"]].abs().max(axis=None) < 1e-9 and (found.plane["cluster"] == 0).all()


def test_disjoint_texts_are_alone(group, protocol):
    found = compare_diversity(group("q", ["a a", "b"], ["c", "d d d"]), protocol, encoder=Letters(), quantile=0.0)
    # All nearest neighbours are at distance 1, so the radius is 1: one cluster. Just below it all are alone.
    assert found.radius == 1.0 and measured(found, "q", "hybrid") == (1.0, 1, 0, 1)
    mixed = group("q", ["a", "b"], ["c", "d"]) + group("p", ["a", "a"], ["aaab", "aaab"])
    found = compare_diversity(mixed, protocol, encoder=Letters(), quantile=0.0)
    near = 1 - 3 / math.sqrt(10)  # cosine of aaab with a is 3 / sqrt(10)
    assert found.radius == pytest.approx(near, abs=1e-6)
    assert measured(found, "p", "on-policy") == measured(found, "p", "hybrid") == (0.0, 1, 0, 1)
    assert measured(found, "q", "hybrid") == (1.0, 0, 2, 1)


def test_two_clear_clusters(group, protocol):
    on_policy, hybrid = ["aaab", "aaac", "aaad"], ["bbbc", "aaab", "bbbd"]
    found = compare_diversity(group("q", on_policy, hybrid), protocol, encoder=Letters(), quantile=1.0)
    # In a cluster cosines are .9 (or 1). From one to the other, aaab is nearest: .3 + .3 = .6 with bbbc and with bbbd.
    assert found.radius == pytest.approx(0.1, abs=1e-6)
    labels = found.plane["cluster"].tolist()
    assert labels == [0, 0, 0, 1, 0, 1]
    assert measured(found, "q", "on-policy") == (0.1, 1, 0, 1)
    # pairs of the hybrids: bbbc-aaab 1 - .3, bbbc-bbbd .1, aaab-bbbd 1 - .3
    assert measured(found, "q", "hybrid") == (0.5, 2, 0, 1)
    difference = found.summary.set_index(["measure", "group"]).loc[("clusters", "difference")]
    assert (difference["mean"], difference["low"], difference["high"], difference["questions"]) == (1.0, 1.0, 1.0, 1)
    x = found.plane["x"].to_numpy()
    assert max(x[[0, 1, 2, 4]]) < min(x[[3, 5]]) or min(x[[0, 1, 2, 4]]) > max(x[[3, 5]])
    assert 0.5 < found.plane_frac < 1.0
    strict = compare_diversity(group("q", on_policy, hybrid), protocol, encoder=Letters(), quantile=1.0, min_samples=3)
    assert strict.plane["cluster"].tolist() == [0, 0, 0, -1, 0, -1]
    assert measured(strict, "q", "hybrid") == (0.5, 1, 2, 1)


def test_the_plane_is_that_of_the_largest_variance(group, protocol):
    found = compare_diversity(group("q", ["a", "a"], ["b", "b"]), protocol, encoder=Letters())
    # Rows (1, 0) and (0, 1) lie 1 / sqrt(2) from their mean, on one line.
    np.testing.assert_allclose(np.abs(found.plane["x"]), math.sqrt(0.5), atol=1e-6)
    np.testing.assert_allclose(found.plane["y"], 0.0, atol=1e-6)
    assert found.plane_frac == pytest.approx(1.0)


def test_summary_is_paired_by_question(group, protocol):
    rollouts = group("p", ["a", "a"], ["a", "b"]) + group("q", ["c", "d"], ["c", "ccccd"])
    found = compare_diversity(rollouts, protocol, encoder=Letters())
    table = found.summary.set_index(["measure", "group"])
    shrunk = 1 - 4 / math.sqrt(17)
    means = [table.loc[("distance", g), "mean"] for g in ("on-policy", "hybrid", "difference")]
    assert means == pytest.approx([0.5, (1 + shrunk) / 2, shrunk / 2], abs=1e-6)
    # Resamples of two questions: both the first (+1), both the second, or one of each.
    low, high = table.loc[("distance", "difference"), ["low", "high"]]
    assert (low, high) == pytest.approx((shrunk - 1, 1.0), abs=1e-6)
    assert (found.by_question["rollouts"] == 2).all() and (table["questions"] == 2).all()
    other = compare_diversity(rollouts, protocol, encoder=Letters(), n_resamples=3, seed=1).summary
    assert not other["low"].equals(found.summary["low"])


def test_groups_of_equal_size_from_the_same_questions(group):
    rollouts = group("p", ["a"] * 4, ["b"] * 2) + group("q", ["a"] * 2, ["b"] * 3) + group("r", ["a"] * 5, ["b"])
    chosen = equal_groups(rollouts[::-1])
    counts = {(r.question_id, r.hybrid): 0 for r in chosen}
    for r in chosen:
        counts[r.question_id, r.hybrid] += 1
    assert counts == {(q, h): 2 for q in "pq" for h in (False, True)}
    assert sorted(r.place for r in chosen if r.question_id == "p") == [0, 1, 4, 5]
    with pytest.raises(ValueError, match="none of 1 questions has two on-policy and two hybrid"):
        equal_groups(group("r", ["a"] * 5, ["b"]))
    with pytest.raises(ValueError, match="none of 0 questions"):
        equal_groups([])


def test_own_text_and_whole_text(group, protocol):
    (rollout,) = group("q", ["<search> a</search>"], [])
    rollout.segments.append(Segment("tool", protocol.observation_ids("found")))
    rollout.segments.append(Segment("retrieval", protocol.retrieval_ids("<python> 1 + 2</python><result> 3</result>")))
    assert rollout_text(rollout, protocol) == "<search> a</search>"
    whole = rollout_text(rollout, protocol, own_only=False)
    assert whole.startswith("<search> a</search><result> found</result><retrieve>")
    assert action_sequence(whole) == (("search", "a"), ("python", "1+2"))
    # A text that only the whole completion holds moves the distance of the whole text alone.
    rollouts = group("q", ["a", "a"], ["a", "a"])
    rollouts[3].segments.append(Segment("tool", protocol.encode("b")))
    own, both = (compare_diversity(rollouts, protocol, own_only=o, encoder=Letters()) for o in (True, False))
    assert measured(own, "q", "hybrid")[0] == 0.0
    assert measured(both, "q", "hybrid")[0] == pytest.approx(1 - math.sqrt(0.5), abs=1e-6)


def test_different_action_sequences_are_counted(group, protocol):
    a, b = "<search> a</search>", "<python> 1 +  2</python>"
    on_policy, hybrid = [a + b, b + a, a + b], ["no action", a, "<python> 1+2</python>" + a]
    found = compare_diversity(group("q", on_policy, hybrid), protocol)
    assert measured(found, "q", "on-policy")[3] == 2 and measured(found, "q", "hybrid")[3] == 3


def test_radius_is_a_quantile_over_different_texts():
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    distances = cosine_distances(rows)  # nearest different ones: .4, .2, .2 for the three texts
    assert [neighbour_radius(distances, q) for q in (0.0, 0.5, 1.0)] == pytest.approx([0.2, 0.2, 0.4])
    with pytest.raises(ValueError, match="quantile is 1.5; allowed: 0 to 1"):
        neighbour_radius(distances, 1.5)


def test_texts_that_say_nothing_are_refused(group, protocol):
    with pytest.raises(ValueError, match="letters knows no word of the text 'xyz'"):
        compare_diversity(group("q", ["a", "xyz"], ["b", "c"]), protocol, encoder=Letters())
    with pytest.raises(ValueError, match="tfidf gives rows of 1 dimension"):
        compare_diversity(group("q", ["word"] * 2, ["word"] * 2), protocol)


def test_the_default_encoder_is_fitted_on_both_groups(group, protocol):
    on_policy, hybrid = ["red door", "blue door"], ["red wall", "green door"]
    found = compare_diversity(group("q", on_policy, hybrid), protocol)
    encoder = TfidfEncoder()
    encoder.fit([*on_policy, *hybrid])
    one, two = encoder.encode(on_policy).astype(float)
    assert measured(found, "q", "on-policy")[0] == pytest.approx(1 - one @ two, abs=1e-5)
