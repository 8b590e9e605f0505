"""Figures: one look, one colour and line style a method in all notebooks, labels from one table.

Notebooks 05 to 99 use this module. Every function draws into an axes (a new one by default) and returns
it. Bands are 95 % bootstrap intervals over seeds (five seeds or more), single seeds are drawn when there
are fewer than ten; the number of seeds stands in the legend. The same data give the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rapo_lib.objective import retrieval_reward
from rapo_lib.stats import MIN_SEEDS, bootstrap_interval, t_interval
from rapo_lib.traces import Rollout

#: Name of a column -> (axis label with its unit, meaning). Labels that end in (%) are fractions shown in percent.
METRICS: dict[str, tuple[str, str]] = {
    "rl_step": ("RL step", "one rollout batch and its optimiser steps"),
    "pass@1": ("pass@1 without retrieval (%)", "held-out questions answered rightly, one sample each"),
    "reward": ("outcome reward", "mean over all rollouts of the RL step"),
    "reward_on": ("outcome reward, on-policy", "mean over the rollouts that may not retrieve"),
    "reward_hybrid": ("outcome reward, hybrid", "mean over the rollouts that may retrieve"),
    "entropy": ("entropy (nats)", "mean token entropy of what the policy wrote"),
    "retrieved_frac": ("retrieved fraction (%)", "retrieved tokens of a completion, mean over rollouts with a retrieval"),
    "retrieval_reward": ("retrieval reward (nats)", "mean Z_ret of the rollouts with a retrieval"),
    "groups_no_signal_frac": ("groups without signal (%)", "groups whose rewards are all equal: they teach nothing"),
    "clip_frac": ("clip fraction (%)", "policy tokens whose importance ratio was clipped"),
    "negative_factor_frac": ("negative factors 1 + a A_ret (%)", "rollouts whose retrieval advantage turns the sign"),
    "tool_calls": ("tool calls a rollout", "mean over rollouts"),
    "tool_failures_frac": ("failed tool calls (%)", "of all tool calls of the RL step"),
    "completion_tokens": ("completion (tokens)", "mean length, inserted tokens included"),
    "generated_tokens": ("generated tokens", "tokens that the policy wrote in the RL step"),
    "retrievals": ("retrievals", "inserted step traces of the RL step"),
    "rollout_sec": ("rollout time (s)", "sampling with tools and retrieval"),
    "update_sec": ("update time (s)", "optimiser steps"),
    "retrieval_sec": ("retrieval time (s)", "part of the rollout time"),
    "tools_sec": ("tool time (s)", "part of the rollout time"),
    "step_sec": ("time of an RL step (s)", "rollout and update"),
    "train_sec": ("training time (s)", "sum since the start, evaluations left out"),
    "nan_rewards": ("rollouts without a reward", "left out of the loss"),
    "noise_prob": ("noise probability (%)", "retrieved traces that are replaced by a random one"),
    "loss": ("cross-entropy (nats a token)", "SFT on the teacher's trajectories"),
    "update": ("optimiser step", "of SFT"),
}

_COLOURS = sns.color_palette("colorblind", 10).as_hex()
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
#: Colour and line style of each method, the same in every figure.
STYLES: dict[str, tuple[str, Any]] = {
    "grpo": (_COLOURS[0], "--"),
    "rapo": (_COLOURS[1], "-"),
    "sft": (_COLOURS[2], ":"),
    "luffy": (_COLOURS[3], "-."),
    "rapo_no_rpo": (_COLOURS[4], "--"),
    "rapo_no_reward": (_COLOURS[5], "-."),
    "rapo_no_shaping": (_COLOURS[6], ":"),
    "rapo_to": (_COLOURS[7], "--"),
    "rapo_sign_aware": (_COLOURS[8], "-"),
    "rapo_no_quality": (_COLOURS[9], "-."),
    "rapo_no_timing": (_COLOURS[9], ":"),
}
#: Names that stand in legends.
LABELS = {"grpo": "GRPO", "rapo": "RAPO", "sft": "SFT", "luffy": "LUFFY", "rapo_to": "RAPO w/ TO"}
SIZES = {1: (6.4, 3.6), 2: (10.0, 3.6), 3: (10.0, 3.6), 4: (10.0, 6.4)}


def style_of(variant: str) -> tuple[str, Any]:
    """Colour and line style of a method or variant; names not in STYLES get a fixed one from their letters."""
    if variant in STYLES:
        return STYLES[variant]
    draw = zlib.crc32(variant.encode())
    return _COLOURS[draw % len(_COLOURS)], _LINES[draw // len(_COLOURS) % len(_LINES)]


def label_of(variant: str) -> str:
    return LABELS.get(variant, variant.replace("rapo_", "RAPO ").replace("_", " "))


def use_style() -> None:
    """The look of all figures: seaborn's white grid, 6.4 x 3.6 inches, 100 dpi."""
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", font_scale=0.85)
    plt.rcParams.update({"figure.figsize": SIZES[1], "figure.dpi": 100, "savefig.dpi": 100, "legend.frameon": False})


def new_axes(panels: int = 1) -> Any:
    """One axes, or an array of two, three or four panels, in the project's sizes."""
    use_style()
    shape = (2, 2) if panels == 4 else (1, panels)
    _, axes = plt.subplots(*shape, figsize=SIZES[panels], layout="constrained")
    return axes


def save_figure(figure: Figure, path: Path | str) -> None:
    """Write a PNG whose bytes depend on the figure alone."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _axes(ax: Axes | None) -> Axes:
    return new_axes() if ax is None else ax


def _name_axis(ax: Axes, which: str, metric: str) -> None:
    label = METRICS.get(metric, (metric, ""))[0]
    ax.set(**{f"{which}label": label})
    if label.endswith("(%)"):
        getattr(ax, f"{which}axis").set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=""))


def _need(table: pd.DataFrame, columns: Iterable[str]) -> None:
    if missing := [c for c in columns if c not in table]:
        raise ValueError(f"the table has no column {missing[0]!r}; it has: {', '.join(map(str, table.columns))}")
    if table.empty:
        raise ValueError("the table is empty: there is nothing to draw")


def plot_learning_curves(
    table: pd.DataFrame, metric: str = "pass@1", *, x: str = "rl_step", group: str = "variant", ax: Axes | None = None
) -> Axes:
    """A metric over training, one line a variant: the mean over seeds, its band, and single seeds.

    Args:
        table: one row a variant, seed and x (from `load_table`). metric: column to draw.
        x: column of the horizontal axis. group: column that separates the lines. ax: where to draw.
    """
    _need(table, (metric, x, group, "seed"))
    ax = _axes(ax)
    for variant, part in table.groupby(group, sort=False):
        wide = part.pivot_table(index=x, columns="seed", values=metric, aggfunc="mean").dropna()
        if wide.empty:
            continue
        _line(ax, wide.index.to_numpy(float), wide.to_numpy(float), str(variant))
    _name_axis(ax, "x", x)
    _name_axis(ax, "y", metric)
    ax.legend()
    return ax


def _line(ax: Axes, x: np.ndarray, y: np.ndarray, variant: str) -> None:
    """y: (points, seeds)."""
    colour, line = style_of(variant)
    n = y.shape[1]
    ax.plot(x, y.mean(1), color=colour, linestyle=line, lw=2, label=f"{label_of(variant)} (n = {n})")
    if n >= MIN_SEEDS:
        intervals = [bootstrap_interval(row) for row in y]
        ax.fill_between(x, [i.low for i in intervals], [i.high for i in intervals], color=colour, alpha=0.2, lw=0)
    if 1 < n < 10:
        ax.plot(np.repeat(x, n), y.ravel(), linestyle="", marker=".", ms=4, color=colour, alpha=0.5)


def plot_noise(table: pd.DataFrame, *, metric: str = "pass@1", baseline: pd.DataFrame | None = None, ax: Axes | None = None) -> Axes:
    """A result over the noise probability, with a level line for a method that does not retrieve (Fig. 6).

    Args:
        table: one row a run with variant, seed, noise_prob and the metric.
        metric: column to draw. baseline: rows of GRPO with the metric. ax: where to draw.
    """
    ax = plot_learning_curves(table, metric, x="noise_prob", ax=ax)
    if baseline is not None:
        _need(baseline, (metric, "variant"))
        for variant, part in baseline.groupby("variant", sort=False):
            colour, line = style_of(str(variant))
            label = f"{label_of(str(variant))} (n = {len(part)})"
            ax.axhline(part[metric].mean(), color=colour, linestyle=line, lw=2, label=label)
    ax.set_xticks(sorted(table["noise_prob"].unique()))
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.legend()
    return ax


def plot_retrieval_reward(
    reward: Callable[..., Any] = retrieval_reward, *, highest: float = 1.5, point: tuple[float, float] = (0.6, 0.3), ax: Axes | None = None
) -> Axes:
    """The retrieval reward over entropy before and after the retrieval (arXiv 2603.03078, Eq. 5-7).

    Args:
        reward: (H_before, H_after) -> Z_ret, tensors in nats. highest: largest entropy shown, nats.
        point: a (H_before, H_after) to mark with its value. ax: where to draw.
    """
    ax = _axes(ax)
    grid = torch.linspace(0, highest, 121, dtype=torch.float64)
    before, after = torch.meshgrid(grid, grid, indexing="xy")
    z = np.asarray(reward(before, after))
    reach = float(np.abs(z).max())
    mesh = ax.pcolormesh(grid, grid, z, cmap="RdBu", vmin=-reach, vmax=reach, shading="nearest", rasterized=True)
    ax.figure.colorbar(mesh, ax=ax, label=METRICS["retrieval_reward"][0])
    ax.plot([0, highest], [0, highest], color="black", lw=1, linestyle=":")
    value = float(reward(*(torch.tensor(p, dtype=torch.float64) for p in point)))
    ax.plot(*point, marker="o", color="black")
    ax.annotate(f"{value:.3f}", point, xytext=(6, 4), textcoords="offset points")
    ax.set(xlabel="entropy before (nats)", ylabel="entropy after (nats)", xlim=(0, highest), ylim=(0, highest))
    ax.grid(False)
    return ax


def plot_entropy_around_retrieval(rollouts: Mapping[str, Sequence[Rollout]] | Sequence[Rollout], *, reach: int = 2, ax: Axes | None = None) -> Axes:
    """Step entropy of the own steps next to a retrieval: means over retrievals with 95 % intervals.

    Args:
        rollouts: rollouts, or for each variant's name its rollouts.
        reach: own steps shown on either side. ax: where to draw.

    Raises:
        ValueError: no rollout has a retrieval.
    """
    ax = _axes(ax)
    groups = rollouts if isinstance(rollouts, Mapping) else {"rapo": rollouts}
    n_drawn = 0
    for variant, group in groups.items():
        places = _around([r for r in group if r.retrievals], reach)
        if places:
            n_drawn += 1
            _around_line(ax, places, variant, sum(len(r.retrievals) for r in group))
    if not n_drawn:
        raise ValueError("no rollout holds a retrieval: there is nothing to draw")
    ax.axvline(0, color="black", lw=1, linestyle=":")
    ax.set(xlabel="own steps from the retrieval (0: the retrieved step)", ylabel="step entropy (nats)")
    ax.set_xticks(range(-reach, reach + 1))
    ax.legend()
    return ax


def _around(rollouts: Iterable[Rollout], reach: int) -> dict[int, list[float]]:
    """Step entropies by place: -1 the own step before a retrieval, 1 the one after it."""
    places: dict[int, list[float]] = {}
    for rollout in rollouts:
        marks = [None if s.kind == "retrieved" else s.segments[0].mean_entropy for s in rollout.steps if s.kind == "retrieved" or s.segments[0].entropies]
        for i in (i for i, m in enumerate(marks) if m is None):
            for side, part in ((-1, marks[:i][::-1]), (1, marks[i + 1 :])):
                own = [m for m in part if m is not None][:reach]
                for k, entropy in enumerate(own, 1):
                    places.setdefault(side * k, []).append(entropy)
    return dict(sorted(places.items()))


def _around_line(ax: Axes, places: dict[int, list[float]], variant: str, n: int) -> None:
    colour, line = style_of(variant)
    intervals = [bootstrap_interval(values, n_resamples=500) for values in places.values()]
    means = np.array([i.mean for i in intervals])
    spread = np.abs(np.array([[i.low, i.high] for i in intervals]).T - means)
    label = f"{label_of(variant)} ({n} retrievals)"
    ax.errorbar(list(places), means, yerr=spread, color=colour, linestyle=line, marker="o", capsize=3, label=label)


def plot_eval_bars(
    table: pd.DataFrame, metric: str = "pass@1", *, by: str | None = None, group: str = "variant", ax: Axes | None = None
) -> Axes:
    """A result of each variant: mean over seeds as a bar, single seeds as points, t interval from five seeds on.

    Args:
        table: one row a variant and seed, and a value of `by` when given; rows of one seed are averaged.
        metric: column to draw. by: column of the horizontal axis (`family`, `n_hard`, `skill`); None: the variants.
        group: column of the bars. ax: where to draw.
    """
    _need(table, (metric, group, "seed", *([by] if by else [])))
    ax = _axes(ax)
    variants, ticks = list(dict.fromkeys(table[group])), sorted(table[by].unique()) if by else [None]
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        colour, _ = style_of(str(variant))
        for j, tick in enumerate(ticks):
            rows = table[(table[group] == variant) & ((table[by] == tick) if by else True)]
            values = rows.groupby("seed")[metric].mean().dropna().to_numpy()
            if len(values):
                place = j + (i + 0.5) * width - 0.4
                _bar(ax, place, values, width, colour, f"{label_of(str(variant))} (n = {len(values)})" if j == 0 else None)
    places = [(i + 0.5) * width - 0.4 for i in range(len(variants))] if by is None else range(len(ticks))
    names = [label_of(str(v)) for v in variants] if by is None else list(map(str, ticks))
    ax.set_xticks(list(places), names)
    _name_axis(ax, "y", metric)
    ax.set_xlabel("" if by is None else by.replace("_", " "))
    ax.grid(axis="x", visible=False)
    ax.legend()
    return ax


def _bar(ax: Axes, x: float, values: np.ndarray, width: float, colour: str, label: str | None) -> None:
    ax.bar(x, values.mean(), width * 0.9, color=colour, alpha=0.7, label=label)
    if len(values) >= MIN_SEEDS:
        ax.errorbar(x, values.mean(), yerr=t_interval(values).half_width, color="black", capsize=3, lw=1)
    if 1 < len(values) < 10:
        spread = np.linspace(-0.25, 0.25, len(values)) * width
        ax.plot(x + spread, values, linestyle="", marker="o", ms=3.5, color="black", alpha=0.6)
