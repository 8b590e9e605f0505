"""How different rollouts are: embeddings, their plane, clusters, distances and action sequences (Fig. 4).

The paper says that hybrid rollouts are more diverse than on-policy ones (arXiv 2603.03078, Fig. 4: BGE-M3 embeddings,
PCA, DBSCAN clusters). Here both groups have the same questions and the same number of rollouts of each, and every
number comes with its interval over questions. This module looks at rollouts and acts on no run.

Deviations from arXiv 2603.03078:
1. The default encoder is tf-idf over the texts at hand; any `Encoder` may be passed (MiniLM is an extra).
2. Clusters are found in all dimensions, over both groups together, so that both are counted in the same clusters; the
   plane is for the eye.
3. The radius of DBSCAN follows from the data by a stated rule (`neighbour_radius`); the paper names none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from sklearn.cluster import DBSCAN
from sklearn.decomposition import PCA

from rapo_lib.buffer import Encoder, TfidfEncoder
from rapo_lib.stats import bootstrap_interval
from rapo_lib.traces import ACTIONS, Protocol, Rollout

GROUPS: tuple[str, str] = ("on-policy", "hybrid")
#: Columns of `Diversity.by_question` that `Diversity.summary` averages.
MEASURES: tuple[str, ...] = ("distance", "clusters", "alone", "action_sequences")
#: Distances are rounded to this many decimals, so that equal texts are at 0.
DECIMALS = 6
_ACTION = re.compile(rf"<(?P<tool>{'|'.join(ACTIONS)})>(?P<query>.*?)</(?P=tool)>", re.DOTALL)


@dataclass(frozen=True)
class Diversity:
    """What `compare_diversity` found.

    Args:
        plane: one row a rollout: question_id, place, group, x, y (the first two principal components), cluster (-1: in
            none).
        by_question: one row a question and group: question_id, group, rollouts, distance (mean cosine distance of the
            pairs of rollouts), clusters (that the rollouts lie in), alone (rollouts in no cluster), action_sequences
            (different ones).
        summary: one row a measure and group, and one for `difference` (hybrid less on-policy, paired by question):
            measure, group, mean over questions, low, high (95 % bootstrap over questions), questions.
        radius: of DBSCAN, a cosine distance.
        plane_frac: share of the variance that the plane shows.
    """

    plane: pd.DataFrame
    by_question: pd.DataFrame
    summary: pd.DataFrame
    radius: float
    plane_frac: float


def compare_diversity(
    rollouts: Sequence[Rollout],
    protocol: Protocol,
    *,
    own_only: bool = True,
    encoder: Encoder | None = None,
    quantile: float = 0.5,
    min_samples: int = 2,
    seed: int = 0,
    n_resamples: int = 2000,
) -> Diversity:
    """Diversity of on-policy and of hybrid rollouts of the same questions.

    Args:
        rollouts: both kinds; of each question the first n of each are taken, n what both have (see `equal_groups`).
        protocol: decodes their ids.
        own_only: look at what the policy wrote; else at the whole completion, with observations and retrieved steps. A
            retrieved step leaves a hole in the own text, which then differs from others by it alone: look at both.
        encoder: fitted, gives a row a text; None: tf-idf, fitted on the texts of both groups.
        quantile: 0 .. 1, of the rule for the radius (see `neighbour_radius`).
        min_samples: rollouts within the radius, itself included, that make a rollout the core of a cluster.
        seed: of the bootstrap. n_resamples: of it.

    Returns:
        Tables for a figure. The distance compares rollouts of the same question with each other; between questions it
        would only tell that questions differ.

    Raises:
        ValueError: no question with at least two rollouts of each kind, a text that says nothing to the encoder, or an
            encoder of a single dimension.
    """
    chosen = equal_groups(rollouts)
    texts = [rollout_text(r, protocol, own_only) for r in chosen]
    rows = _rows(texts, encoder)
    distances = cosine_distances(rows)
    radius = neighbour_radius(distances, quantile)
    labels = DBSCAN(eps=radius, min_samples=min_samples, metric="precomputed").fit_predict(distances)
    with np.errstate(invalid="ignore"):  # equal texts have no variance to explain
        pca = PCA(n_components=2, svd_solver="full").fit(rows)
    points = pca.transform(rows)
    columns = {"question_id": [r.question_id for r in chosen], "place": [r.place for r in chosen]}
    columns |= {"group": [GROUPS[r.hybrid] for r in chosen], "x": points[:, 0], "y": points[:, 1], "cluster": labels}
    plane = pd.DataFrame(columns)
    by_question = _by_question(plane, distances, [action_sequence(t) for t in texts])
    plane_frac = float(pca.explained_variance_ratio_.sum())
    return Diversity(plane, by_question, _summary(by_question, seed, n_resamples), radius, plane_frac)


def equal_groups(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """As many on-policy as hybrid rollouts of each question: the first n of each kind by place.

    Hybrid is what may retrieve, also where it happened not to: by what happened, long rollouts, which pass more moments
    of retrieval, would all be on one side. Questions with fewer than two of a kind are left out.

    Raises:
        ValueError: no question is left.
    """
    kinds: dict[str, tuple[list[Rollout], list[Rollout]]] = {}
    for r in sorted(rollouts, key=lambda r: r.place):
        kinds.setdefault(r.question_id, ([], []))[r.hybrid].append(r)
    sizes = {q: min(map(len, both)) for q, both in kinds.items()}
    chosen = [r for q, both in kinds.items() if sizes[q] >= 2 for kind in both for r in kind[: sizes[q]]]
    if not chosen:
        raise ValueError(
            f"none of {len(kinds)} questions has two on-policy and two hybrid rollouts; sample groups with both kinds"
        )
    return chosen


def rollout_text(rollout: Rollout, protocol: Protocol, own_only: bool = True) -> str:
    """What the policy wrote, or the whole completion; without the question, which is the same in both groups."""
    return "".join(protocol.decode(s.ids) for s in rollout.segments if s.origin == "policy" or not own_only)


def action_sequence(text: str) -> tuple[tuple[str, str], ...]:
    """The actions of a text, in order: (tool, query without white space).

    Example:
        >>> action_sequence("<think> a</think><python> 1 + 2</python><result> 3</result><answer> 3</answer>")
        (('python', '1+2'),)
    """
    return tuple((m["tool"], "".join(m["query"].split())) for m in _ACTION.finditer(text))


def _rows(texts: Sequence[str], encoder: Encoder | None) -> np.ndarray:
    """(n, D), float64, of length 1."""
    if encoder is None:
        encoder = TfidfEncoder()
        encoder.fit(texts)
    rows = encoder.encode(texts).astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    for i in np.flatnonzero(length == 0)[:1]:
        raise ValueError(
            f"{encoder.name} knows no word of the text {texts[i][:60]!r}, so it has no distance to others; take an "
            "encoder that was fitted on such texts (encoder=None fits one)"
        )
    if rows.shape[1] < 2:
        raise ValueError(f"{encoder.name} gives rows of {rows.shape[1]} dimension; a plane needs at least 2")
    return rows / length


def cosine_distances(rows: np.ndarray) -> np.ndarray:
    """1 - cosine of all pairs, (n, n), of rows of length 1 (n, D); 0 for equal rows, 2 at most.

    Example:
        >>> cosine_distances(np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])).tolist()
        [[0.0, 1.0, 0.4], [1.0, 0.0, 0.2], [0.4, 0.2, 0.0]]
    """
    return np.round(np.clip(1.0 - rows @ rows.T, 0.0, None), DECIMALS)


def neighbour_radius(distances: np.ndarray, quantile: float) -> float:
    """The radius of DBSCAN: a quantile of the distances from each text to the nearest other one, in both groups.

    Texts at distance 0 count once, as one text: else the radius of rollouts that repeat themselves would be 0.

    Args:
        distances: (n, n). quantile: 0 .. 1.

    Returns:
        A radius above 0; the smallest distance that is told from 0 when all texts are equal.

    Example:
        >>> line = np.array([0.0, 0.1, 0.3, 0.6])
        >>> round(neighbour_radius(abs(line[:, None] - line), quantile=0.5), 6)
        0.15
    """
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"quantile is {quantile}; allowed: 0 to 1")
    first = ~np.tril(distances == 0, -1).any(1)
    distances = distances[np.ix_(first, first)]
    if len(distances) == 1:
        return 10.0**-DECIMALS
    return float(np.quantile(np.where(distances > 0, distances, np.inf).min(1), quantile))


def _by_question(
    plane: pd.DataFrame, distances: np.ndarray, actions: Sequence[tuple[tuple[str, str], ...]]
) -> pd.DataFrame:
    rows = []
    for (question_id, group), at in plane.groupby(["question_id", "group"], sort=False).indices.items():
        labels = plane["cluster"].to_numpy()[at]
        pairs = distances[np.ix_(at, at)][np.triu_indices(len(at), 1)]
        row = {"question_id": question_id, "group": group, "rollouts": len(at), "distance": float(pairs.mean())}
        row |= {"clusters": len(set(labels) - {-1}), "alone": int((labels == -1).sum())}
        rows.append(row | {"action_sequences": len({actions[i] for i in at})})
    return pd.DataFrame(rows)


def _summary(by_question: pd.DataFrame, seed: int, n_resamples: int) -> pd.DataFrame:
    rows = []
    for measure in MEASURES:
        wide = by_question.pivot(index="question_id", columns="group", values=measure).astype(float)
        values = {group: wide[group] for group in GROUPS} | {"difference": wide["hybrid"] - wide["on-policy"]}
        for group, x in values.items():
            i = bootstrap_interval(x, seed=seed, n_resamples=n_resamples)
            row = {"measure": measure, "group": group, "mean": i.mean, "low": i.low, "high": i.high}
            rows.append(row | {"questions": i.n})
    return pd.DataFrame(rows)
