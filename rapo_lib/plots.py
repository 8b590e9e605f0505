"""Figures: one look, one colour and line style a method in all notebooks, labels from one table.

Notebooks 00 to 99 use this module. Every function draws into an axes (a new one by default) and returns
it. Bands are 95 % bootstrap intervals over seeds (five seeds or more), single seeds are drawn when there
are fewer than ten; the number of seeds stands in the legend. The same data give the same bytes.
"""

from __future__ import annotations

import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
from PIL import Image

from rapo_lib.guard import KEYS, METRIC_OF, Alarm, find_alarms
from rapo_lib.objective import retrieval_reward
from rapo_lib.show import AUTHORS, visible
from rapo_lib.stats import MIN_SEEDS, bootstrap_interval, t_interval
from rapo_lib.traces import Protocol, Rollout, Step, write_bytes_atomic

#: Name of a column -> (axis label with its unit, meaning). Labels that end in (%) are fractions shown in percent.
METRICS: dict[str, tuple[str, str]] = {
    "rl_step": ("RL step", "one rollout batch and its optimiser steps"),
    "pass@1": ("pass@1 without retrieval (%)", "held-out questions answered rightly, one sample each"),
    "reward": ("outcome reward", "mean over all rollouts of the RL step"),
    "reward_on": ("outcome reward, on-policy", "mean over the rollouts that may not retrieve"),
    "reward_hybrid": ("outcome reward, hybrid", "mean over the rollouts that may retrieve"),
    "entropy": ("entropy (nats)", "mean token entropy of what the policy wrote"),
    "retrieved_frac": (
        "retrieved fraction (%)",
        "retrieved tokens of a completion, mean over rollouts with a retrieval",
    ),
    "retrieval_reward": ("retrieval reward (nats)", "mean Z_ret of the rollouts with a retrieval"),
    "groups_no_signal_frac": ("groups without signal (%)", "groups whose rewards are all equal: they teach nothing"),
    "clip_frac": ("clip fraction (%)", "policy tokens whose importance ratio was clipped"),
    "negative_factor_frac": ("negative factors 1 + a A_ret (%)", "rollouts whose retrieval advantage turns the sign"),
    "tool_calls": ("tool calls a rollout", "mean over rollouts"),
    "tool_failures_frac": ("failed tool calls (%)", "of all tool calls of the RL step"),
    "truncated_frac": ("truncated rollouts (%)", "cut at the length limit, of all rollouts of the RL step"),
    "format_faults_frac": ("broken format (%)", "ended by a broken format, of all rollouts of the RL step"),
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

#: seaborn's palette for the colour-blind; its pale pink and yellow, hardly seen on a projector, are darker here.
_COLOURS = sns.color_palette("colorblind", 10).as_hex()
_COLOURS[6], _COLOURS[8] = "#8C2D62", "#333333"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ".s^xD"
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
    "rapo_weak": (_COLOURS[3], (0, (5, 1, 1, 1, 1, 1))),
    "rapo_spare": (_COLOURS[1], "-."),
    "rapo_to_spare": (_COLOURS[7], ":"),
    "too_fast": (_COLOURS[5], "--"),
    "teacher": (_COLOURS[1], "--"),
    "weak": (_COLOURS[3], "--"),
    "rapo_sign_aware": (_COLOURS[8], "-"),
    "rapo_no_quality": (_COLOURS[9], "-."),
    "rapo_no_timing": (_COLOURS[2], "-."),
    "rapo_released": (_COLOURS[1], ":"),
    "high_h_rising": (_COLOURS[4], ":"),
    "low_h_rising": (_COLOURS[6], "-."),
    "low_h_falling": (_COLOURS[8], "--"),
    "rapo_gated": (_COLOURS[5], ":"),
    "sft_grpo": (_COLOURS[8], "-."),
    "rapo_lr=0.001": (_COLOURS[1], (0, (5, 1, 1, 1, 1, 1))),
    "grpo_lr=0.001": (_COLOURS[9], ":"),
    "grpo_lr=0.0005": (_COLOURS[4], "-"),
    "grpo_spare": (_COLOURS[0], "-."),
    "rapo_no_guard": (_COLOURS[4], "-."),
    "rapo_other_questions": (_COLOURS[6], "--"),
    "rapo_middling": (_COLOURS[9], "--"),
    "rapo_patient": (_COLOURS[3], ":"),
    "rapo_strong_few": (_COLOURS[5], (0, (5, 1, 1, 1, 1, 1))),
    "rapo_specialists": (_COLOURS[4], (0, (5, 1, 1, 1, 1, 1))),
}
#: Names that stand in legends.
LABELS = {"grpo": "GRPO", "rapo": "RAPO", "sft": "SFT", "luffy": "LUFFY", "rapo_to": "RAPO w/ TO"}
LABELS |= {"grpo_easy": "GRPO, easy", "rapo_easy": "RAPO, easy"}
LABELS |= {"grpo_halfway": "GRPO, half-way", "rapo_halfway": "RAPO, half-way"}
LABELS |= {"rapo_spare": "RAPO, spare step", "rapo_to_spare": "RAPO w/ TO, spare step"}
LABELS |= {"rapo_halfway_p=1": "RAPO p=1, half-way"}
LABELS |= {"rapo_weak": "RAPO, weak teacher", "student": "student, untrained", "weak": "weak teacher"}
LABELS |= {"sft_grpo": "SFT, then GRPO", "rapo_gated": "RAPO, entropy gate", "rapo_sign_aware": "RAPO, sign-aware"}
LABELS |= {
    f"{m}_lr={lr}": f"{LABELS[m]}, rate {lr}" for m, lr in (("grpo", "0.0005"), ("grpo", "0.001"), ("rapo", "0.001"))
}
LABELS |= {"rapo_no_rpo": "w/o RPO", "rapo_no_reward": "w/o RR", "rapo_no_shaping": "w/o RIS"}
LABELS |= {"rapo_no_quality": "w/o RQ", "rapo_no_timing": "w/o RT"}
LABELS |= {"low_h_rising": "low H, rising", "low_h_falling": "low H, falling", "high_h_rising": "high H, rising"}
LABELS |= {"rapo_no_guard": "RAPO, no leak guard", "rapo_other_questions": "RAPO, other questions only"}
LABELS |= {"grpo_spare": "GRPO, spare step", "rapo_middling": "RAPO, middling teacher"}
LABELS |= {
    "rapo_patient": "RAPO, weak teacher, all questions",
    "rapo_strong_few": "RAPO, strong teacher, few questions",
}
LABELS |= {"rapo_specialists": "RAPO, two specialists"}
LABELS |= {
    f"{m}_{r}": f"{LABELS[m]}, {name}"
    for m in ("luffy", "sft", "sft_grpo")
    for r, name in (("halfway", "half-way"), ("easy", "easy"))
}
LABELS |= {f"{m}_n={n}": f"{LABELS[m]}, {n} trajectories" for m in ("rapo", "sft") for n in (12, 48, 240)}
LABELS |= {f"{m}_wasteful": f"{LABELS[m]}, wasteful teacher" for m in ("sft", "rapo", "luffy", "sft_grpo")}
#: Steps of 255 by which 999 of 1000 pixels may be off in a picture with a palette.
MAX_COLOUR_ERROR = 20
SIZES = {1: (6.4, 3.6), 2: (10.0, 3.6), 3: (10.0, 3.6), 4: (10.0, 6.4), 6: (10.0, 6.4)}


def style_of(variant: str) -> tuple[str, Any]:
    """Colour and line style of a method or variant; names not in STYLES get a fixed one from their letters.

    RAPO with noise, `rapo_p=0.4`, is the darker the more noise there is. A method looks the same in every regime:
    `grpo_halfway` and `grpo_easy` like `grpo`; likewise with another buffer, `sft_wasteful` and `sft_n=12`.
    """
    variant = re.sub("_(halfway|easy|wasteful|n=[0-9]+)$|_(halfway|easy)", "", variant)
    if variant in STYLES:
        return STYLES[variant]
    if variant.startswith("rapo_p="):
        p = float(variant.removeprefix("rapo_p="))
        return to_hex(sns.color_palette("flare", as_cmap=True)(p)), _LINES[round(4 * p)]
    draw = zlib.crc32(variant.encode())
    return _COLOURS[draw % len(_COLOURS)], _LINES[draw // len(_COLOURS) % len(_LINES)]


def label_of(variant: str) -> str:
    return LABELS.get(variant, variant.replace("rapo_", "RAPO ").replace("_", " "))


def use_style() -> None:
    """The look of all figures: seaborn's white grid, 6.4 x 3.6 inches, 100 dpi."""
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", font_scale=0.85)
    plt.rcParams.update({"figure.figsize": SIZES[1], "figure.dpi": 100, "savefig.dpi": 100, "legend.frameon": False})


def new_axes(panels: int = 1) -> Any:
    """One axes, or an array of two, three, four or six panels, in the project's sizes."""
    use_style()
    shape = {4: (2, 2), 6: (2, 3)}.get(panels, (1, panels))
    _, axes = plt.subplots(*shape, figsize=SIZES[panels], layout="constrained")
    return axes


def one_legend(axes: Axes | Iterable[Axes], ncols: int = 5) -> None:
    """One legend below all panels in place of one in each, which would lie on the curves; equal names stand once."""
    panels = list(np.ravel(np.asarray(axes, dtype=object)))
    lines = {text: line for ax in panels for line, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    for legend in (legend for ax in panels if (legend := ax.get_legend())):
        legend.remove()
    panels[0].figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=ncols)


def log_axes(ax: Axes) -> None:
    """Logarithmic axes with plain numbers at 1 and 3 of each decade; matplotlib's run together on a short range."""
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: Path | str) -> None:
    """Write a PNG whose bytes depend on the figure alone."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    write_bytes_atomic(path, with_palette(drawn.getvalue()))


def with_palette(png: bytes) -> bytes:
    """The same picture in 256 colours of its own, without dithering, alpha and metadata: a third of the bytes.

    A picture that has a palette comes back as it is, and one whose colours are too many for it (a heat map with its
    scale) in all of them.
    """
    picture = Image.open(io.BytesIO(png))
    if picture.mode == "P":
        return png
    full = picture.convert("RGB")
    few = full.quantize(256, dither=Image.Dither.NONE)
    error = np.abs(np.asarray(few.convert("RGB"), np.int16) - np.asarray(full, np.int16)).max(-1)
    smaller = io.BytesIO()
    (few if np.quantile(error, 0.999) <= MAX_COLOUR_ERROR else full).save(smaller, "PNG", optimize=True)
    return smaller.getvalue()


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
    if not ax.dataLim.height and "(%)" in ax.get_ylabel():  # one value all along: else the axis would go below 0 %
        ax.set_ylim(-0.02, 1.02)
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


def plot_noise(
    table: pd.DataFrame, *, metric: str = "pass@1", baseline: pd.DataFrame | None = None, ax: Axes | None = None
) -> Axes:
    """A result over the noise probability, with a level line for a method that does not retrieve (Fig. 6).

    Args:
        table: one row a run with variant, seed, noise_prob and the metric.
        metric: column to draw. baseline: rows of GRPO with the metric. ax: where to draw.
    """
    ax = plot_learning_curves(table, metric, x="noise_prob", ax=ax)
    if baseline is not None:
        _need(baseline, (metric, "variant", "seed"))
        for variant, part in baseline.groupby("variant", sort=False):
            colour, line = style_of(str(variant))
            label = f"{label_of(str(variant))} (n = {part['seed'].nunique()})"
            ax.axhline(part[metric].mean(), color=colour, linestyle=line, lw=2, label=label)
    ax.set_xticks(sorted(table["noise_prob"].unique()))
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.legend()
    return ax


def plot_retrieval_reward(
    reward: Callable[..., Any] = retrieval_reward,
    *,
    highest: float = 1.5,
    point: tuple[float, float] = (0.6, 0.3),
    ax: Axes | None = None,
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


def plot_entropy_around_retrieval(
    rollouts: Mapping[str, Sequence[Rollout]] | Sequence[Rollout], *, reach: int = 2, ax: Axes | None = None
) -> Axes:
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
        marks = [
            None if s.kind == "retrieved" else s.segments[0].mean_entropy
            for s in rollout.steps
            if s.kind == "retrieved" or s.segments[0].entropies
        ]
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
    table: pd.DataFrame,
    metric: str = "pass@1",
    *,
    by: str | None = None,
    group: str = "variant",
    ax: Axes | None = None,
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
                _bar(ax, place, values, width, colour, _counted(table, group, variant) if j == 0 else None)
    if by is None:
        names = [
            _counted(table, group, v).replace(", ", ",\n").replace(" p=", "\np=").replace(" (", "\n(") for v in variants
        ]
        ax.set_xticks([(i + 0.5) * width - 0.4 for i in range(len(variants))], names)
    else:
        ax.set_xticks(range(len(ticks)), list(map(str, ticks)))
        ax.set_xlabel(by.replace("_", " "))
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(4, len(variants)))  # above the bars, not on them
    _name_axis(ax, "y", metric)
    ax.set_ylim(bottom=min(0.0, float(table[metric].min())))
    ax.grid(axis="x", visible=False)
    return ax


def plot_differences(
    table: pd.DataFrame,
    baseline: str,
    variants: Sequence[str] | None = None,
    metric: str = "pass@1",
    ax: Axes | None = None,
) -> Axes:
    """Difference of each variant to a baseline, paired by seed: dots are seeds, lines 95 % t intervals of the mean.

    Args:
        table: one row a run with variant, seed and the metric (from `runs.result_table`).
        baseline: variant that is subtracted. variants: rows of the figure (default: all others in the table).
        metric: column, as a fraction; the axis shows points. ax: where to draw.

    Raises:
        ValueError: no run of the baseline, or of a variant with a seed that the baseline has.
    """
    ax = _axes(ax)
    _need(table, ("variant", "seed", metric))
    wide = table.pivot_table(index="seed", columns="variant", values=metric)
    names = list(variants if variants is not None else (v for v in table["variant"].unique() if v != baseline))
    if missing := [v for v in (baseline, *names) if v not in wide]:
        raise ValueError(f"no run of {missing[0]!r}; there are: {', '.join(map(str, wide.columns))}")
    for y, name in enumerate(names):
        d = 100 * (wide[name] - wide[baseline]).dropna().to_numpy()
        if not len(d):
            raise ValueError(f"{name} and {baseline} have no seed in common")
        colour, _ = style_of(name)
        ax.plot(d, np.full(len(d), y) + 0.18, "o", ms=4, mfc="none", color=colour)
        if len(d) >= MIN_SEEDS:
            i = t_interval(d)
            ax.plot([i.low, i.high], [y - 0.1, y - 0.1], color=colour, lw=2)
        ax.plot(d.mean(), y - 0.1, "D", ms=6, color=colour)
    ax.axvline(0, color="black", lw=1)
    ax.set_yticks(
        range(len(names)), [f"{label_of(n)} (n = {int(wide[[n, baseline]].dropna().shape[0])})" for n in names]
    )
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel(f"{METRICS[metric][0].replace(' (%)', '')}, difference to {label_of(baseline)} (points)")
    return ax


def _counted(table: pd.DataFrame, group: str, variant: Any) -> str:
    """A variant's label with its number of seeds."""
    return f"{label_of(str(variant))} (n = {table.loc[table[group] == variant, 'seed'].nunique()})"


def _bar(ax: Axes, x: float, values: np.ndarray, width: float, colour: str, label: str | None) -> None:
    ax.bar(x, values.mean(), width * 0.9, color=colour, alpha=0.7, label=label)
    if len(values) >= MIN_SEEDS:
        ax.errorbar(x, values.mean(), yerr=t_interval(values).half_width, color="black", capsize=3, lw=1)
    if 1 < len(values) < 10:
        spread = np.linspace(-0.25, 0.25, len(values)) * width
        ax.plot(x + spread, values, linestyle="", marker="o", ms=3.5, color="black", alpha=0.6)


# -------------------------------------------------------------------------------------------- health

#: Panels of `plot_health`, in reading order: metric -> name of its alarm.
_HEALTH = {metric: kind for kind, metric in METRIC_OF.items()}
#: Alarms named above a panel; the rest is counted.
_NAMED_ALARMS = 2


def plot_health(metrics: pd.DataFrame, *, group: str = "variant") -> np.ndarray:
    """Whether runs are well: six metrics over RL steps, one thin line a run, the mean of a variant, and alarms.

    An alarm of `rapo_lib.guard` is a cross at its RL step, named above the panel of its metric.

    Args:
        metrics: one row a variant, seed and RL step (`load_table(runs, "metrics")`), with as many of the guard's
            metrics as there are; a panel without values says so. group: column that separates the lines.

    Returns:
        Six axes, (2, 3).
    """
    _need(metrics, (group, "seed", "rl_step"))
    runs = {key: part.sort_values("rl_step") for key, part in metrics.groupby([group, "seed"], sort=False)}
    alarms = {key: find_alarms(part.to_dict("records")) for key, part in runs.items()}
    axes = new_axes(6)
    for ax, metric in zip(axes.flat, KEYS, strict=True):
        _name_axis(ax, "x", "rl_step")
        _name_axis(ax, "y", metric)
        if metric not in metrics or not metrics[metric].notna().any():
            why = "is NaN everywhere" if metric in metrics else "is not in the table"
            ax.text(0.5, 0.5, f"no values:\n{metric}\n{why}", ha="center", va="center", transform=ax.transAxes)
            ax.set(xticks=[], yticks=[])
            continue
        _health_lines(ax, runs, metric)
        _mark_alarms(ax, runs, alarms, metric)
        if METRICS[metric][0].endswith("(%)"):
            ax.set_ylim(-0.05, 1.05)
        else:
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    lines = {line.get_label(): line for ax in axes.flat for line in ax.lines if not line.get_label().startswith("_")}
    if lines:
        axes.flat[0].figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=4)
    return axes


def _health_lines(ax: Axes, runs: Mapping[tuple[Any, Any], pd.DataFrame], metric: str) -> None:
    for variant in dict.fromkeys(v for v, _ in runs):
        colour, line = style_of(str(variant))
        parts = [part for (v, _), part in runs.items() if v == variant]
        label = f"{label_of(str(variant))} (n = {len(parts)})"
        mean = pd.concat(parts).groupby("rl_step")[metric].mean()
        ax.plot(mean.index, mean, color=colour, linestyle=line, lw=2, label=label)
        if len(parts) > 1:
            for part in parts:
                ax.plot(part["rl_step"], part[metric], color=colour, lw=0.7, alpha=0.4)


def _mark_alarms(
    ax: Axes,
    runs: Mapping[tuple[Any, Any], pd.DataFrame],
    alarms: Mapping[tuple[Any, Any], Sequence[Alarm]],
    metric: str,
) -> None:
    """A cross at each alarm of this metric; above the panel the first ones by name and the number of the rest."""
    kind = _HEALTH[metric]
    found = sorted((a.rl_step, key) for key, several in alarms.items() for a in several if a.kind == kind)
    for step, key in found:
        value = runs[key].loc[runs[key]["rl_step"] <= step, metric].dropna().iloc[-1]
        ax.plot(step, value, marker="X", ms=9, color=style_of(str(key[0]))[0], markeredgecolor="black", zorder=5)
    names = [f"step {step}, {label_of(str(v))} seed {seed}" for step, (v, seed) in found[:_NAMED_ALARMS]]
    more = len(found) - len(names)
    if found:
        names[0] = f"{kind} alarm: {names[0]}"
        names[-1] += f"; and {more} more" if more else ""
        ax.set_title("\n".join(names), loc="left", fontsize=8)


#: What is watched while training goes on.
PROGRESS = ("reward", "entropy", "retrieved_frac")


def plot_progress(metrics: pd.DataFrame, rl_steps: int) -> np.ndarray:
    """Training as it goes on: reward, entropy and retrieved fraction over RL steps, one line a run.

    Args:
        metrics: one row a variant, seed and RL step, of runs that may stand at different steps. rl_steps: how many
            there will be.

    Returns:
        Three axes. A variant that never retrieves has no line in the last one. Variants that look the same elsewhere,
        a method in two regimes, have markers of their own here.
    """
    _need(metrics, ("variant", "seed", "rl_step", *PROGRESS))
    axes = new_axes(3)
    lines, marks = {}, _markers(metrics["variant"].unique())
    for (variant, _), part in metrics.groupby(["variant", "seed"], sort=False):
        colour, dashes = style_of(str(variant))
        for ax, metric in zip(axes, PROGRESS, strict=True):
            shown = part.dropna(subset=metric)
            style = {"color": colour, "linestyle": dashes, "marker": marks[variant], "ms": 4, "lw": 1.2}
            (line,) = ax.plot(shown["rl_step"], shown[metric], **style)
            lines.setdefault(label_of(str(variant)), line)
    for ax, metric in zip(axes, PROGRESS, strict=True):
        _name_axis(ax, "x", "rl_step")
        _name_axis(ax, "y", metric)
        ax.set(xlim=(0, rl_steps + 0.5), ylim=(0, 1.02) if metric != "entropy" else (0, None))
    axes[0].figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=6)
    return axes


def _markers(variants: Iterable[str]) -> dict[str, str]:
    """A marker a variant; those with the same colour and line style get different ones, in their order."""
    marks, alike = {}, Counter[Any]()
    for variant in variants:
        style = style_of(variant)
        marks[variant] = _MARKERS[alike[style] % len(_MARKERS)]
        alike[style] += 1
    return marks


# ------------------------------------------------------------------------------------------ the idea

#: Edge and fill of each part of the figure of the idea; peeked steps are also dashed, so that colour is not needed.
_PARTS = {
    "own": ("#0173B2", "#D6E8F5", "-"),
    "peek": ("#DE8F05", "#FBE3BF", "--"),
    "plain": ("#222222", "white", "-"),
    "past": ("#949494", "#EEEEEE", "-"),
    "good": ("#029E73", "#D3EFE5", "-"),
    "bad": ("#D55E00", "#F9DFCF", "-"),
}


def plot_idea(ax: Axes | None = None) -> Axes:
    """The idea of RAPO in one figure: teacher, step-trace buffer, rollouts, rewards, policy."""
    if ax is None:
        ax = plt.figure(figsize=SIZES[4], dpi=100).add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 100), ylim=(0, 64))
    ax.axis("off")
    with plt.rc_context({"font.family": "DejaVu Sans"}):  # comes with matplotlib, so texts fit their boxes everywhere
        _idea_teacher(ax)
        _idea_buffer(ax)
        _idea_rollouts(ax)
        _idea_rewards(ax)
    return ax


def _idea_teacher(ax: Axes) -> None:
    _idea_head(ax, 2, 61, 1, "A teacher writes the notes")
    _idea_box(ax, 1, 48, 12, 7, "teacher", "plain", 11)
    for kind, y in (("good", 54.5), ("bad", 50), ("good", 45.5)):
        for k in range(4):
            _idea_box(ax, 19 + 4.4 * k, y, 3.6, 3, "", "peek" if kind == "good" else "past")
        mark = "✓" if kind == "good" else "✗"
        ax.text(38.3, y + 1.5, mark, fontsize=14, ha="center", va="center", color=_PARTS[kind][0], fontweight="bold")
    ax.text(27.6, 43.2, "only correct trajectories are kept", fontsize=9.5, ha="center", va="center")
    _idea_arrow(ax, (13.4, 51.5), (18.2, 51.5))


def _idea_buffer(ax: Axes) -> None:
    _idea_head(ax, 53, 61, 2, "The step-trace buffer: the book of notes")
    _idea_box(ax, 52, 43, 46, 15, "", "peek", line=2.0, fill="#FFFAF0", dash="-")
    ax.text(63.5, 56, "key: the history so far", fontsize=9.5, ha="center", va="center")
    ax.text(87.5, 56, "value: the next step", fontsize=9.5, ha="center", va="center")
    for n, y in ((1, 52), (2, 48.4), (3, 44.8)):
        for k in range(n):
            _idea_box(ax, 56 + 4.4 * k, y, 3.6, 2.4, "", "past")
        _idea_arrow(ax, (72.5, y + 1.2), (82, y + 1.2), color="#949494")
        _idea_box(ax, 85.6, y, 3.6, 2.4, "", "peek")
    _idea_arrow(ax, (40.8, 51.5), (51.2, 51.5))
    ax.text(46, 53, "cut into steps", fontsize=9.5, ha="center", va="center")


def _idea_rollouts(ax: Axes) -> None:
    _idea_head(ax, 2, 39, 3, "The policy answers, in training")
    _idea_box(ax, 1, 23.5, 12, 9, "policy\n(student)", "own", 11)
    for y, name, steps, kind in (
        (31, "hybrid rollout", ("own", "own", "peek", "own", "own"), "good"),
        (21.5, "on-policy rollout", ("own",) * 5, "bad"),
    ):
        _idea_arrow(ax, (13.4, 28), (18.2, y + 2.2))
        ax.text(19, y + 5.7, name, fontsize=10, ha="left", va="center")
        for k, step in enumerate(steps):
            _idea_box(ax, 19 + 11.4 * k, y, 9.4, 4.4, f"{step} step" if step == "own" else "peek", step, 9.5)
            _idea_arrow(ax, (28.7 + 11.4 * k, y + 2.2), (30.1 + 11.4 * k, y + 2.2), head=8)
        word = "right answer" if kind == "good" else "wrong answer"
        _idea_box(ax, 76, y, 14, 4.4, word, kind, 9.5)
    _idea_arrow(ax, (40, 35.9), (57, 42.4), color="#666666", style=":")
    ax.text(
        44.5, 40.2, "asks with its\nhistory", fontsize=9.5, ha="right", va="center", color="#666666", linespacing=1.1
    )
    _idea_arrow(ax, (66, 42.4), (48.5, 35.9), color=_PARTS["peek"][0])
    ax.text(46.5, 29.4, "read, but not trained on", fontsize=9, ha="center", va="center", color="#9A6200")
    ax.text(62.5, 38.4, "the nearest key's step comes back", fontsize=9.5, ha="left", va="center", color="#9A6200")


def _idea_rewards(ax: Axes) -> None:
    _idea_head(ax, 20.5, 16.5, 4, "Two rewards, one update")
    _idea_box(ax, 19, 3, 20, 10, "outcome reward $R$\nwas the answer right?", "good", 10)
    _idea_box(ax, 43, 3, 31, 10, "", "peek", dash="-")
    ax.text(
        62,
        8,
        "retrieval reward $Z_{ret}$\nunsure before the peek,\nsure after it?",
        fontsize=10,
        ha="center",
        va="center",
        linespacing=1.3,
    )
    for x, height, label in ((46, 6, "before"), (50, 2, "after")):
        ax.bar(x, height, 2.4, 5.4, color=_PARTS["own"][0])
        ax.text(x, 4.3, label, fontsize=7.5, ha="center", va="center")
    _idea_box(ax, 78, 3, 20, 10, "advantage\n$(1 + a\\,A_{ret})\\,A_{acc}$", "plain", 10)
    ax.text(41, 8, "and", fontsize=10, ha="center", va="center")
    _idea_arrow(ax, (74.3, 8), (77.5, 8))
    ax.plot([88, 88, 7], [2.6, 1, 1], color="#222222", lw=1.8, solid_joinstyle="round")
    _idea_arrow(ax, (7, 1), (7, 22.8))
    ax.text(8.2, 9, "learn", fontsize=10, ha="left", va="center", style="italic")


def _idea_head(ax: Axes, x: float, y: float, number: int, text: str) -> None:
    circle = {"boxstyle": "circle,pad=0.25", "fc": "#222222", "ec": "none"}
    ax.text(x, y, str(number), fontsize=10, color="white", fontweight="bold", ha="center", va="center", bbox=circle)
    ax.text(x + 2.4, y, text, fontsize=12, fontweight="bold", ha="left", va="center")


def _idea_box(
    ax: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    text: str,
    part: str,
    size: float = 10,
    *,
    line: float = 1.6,
    fill: str = "",
    dash: str = "",
) -> None:
    edge, inside, style = _PARTS[part]
    shape = f"round,pad=0,rounding_size={min(1.0, h / 4)}"
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=shape, fc=fill or inside, ec=edge, lw=line, ls=dash or style))
    ax.text(x + w / 2, y + h / 2, text, fontsize=size, ha="center", va="center", linespacing=1.3)


def _idea_arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = "#222222",
    style: str = "-",
    head: float = 14,
) -> None:
    line = {"arrowstyle": "-|>", "mutation_scale": head, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, color=color, linestyle=style, **line))


# -------------------------------------------------------------------------------------- settings of a run


def plot_grid(
    table: pd.DataFrame,
    x: str,
    y: str,
    metric: str = "pass@1",
    *,
    marks: Iterable[tuple[Any, Any]] = (),
    ax: Axes | None = None,
) -> Axes:
    """A result over two settings as a heat map: the mean of each cell's runs, written into it.

    Args:
        table: one row a run with both settings and the metric. x, y: columns of the axes.
        metric: column to draw. marks: (x, y) of each cell that gets a frame. ax: where to draw.

    Raises:
        KeyError: a mark that is no cell.
    """
    _need(table, (x, y, metric))
    ax = _axes(ax)
    wide = table.pivot_table(index=y, columns=x, values=metric, aggfunc="mean")
    label = METRICS.get(metric, (metric, ""))[0]
    factor = 100.0 if label.endswith("(%)") else 1.0
    mesh = sns.heatmap(factor * wide, annot=True, fmt=".0f" if factor > 1 else ".3g", cmap="viridis", ax=ax)
    mesh.collections[0].colorbar.set_label(label)
    for column, row in marks:
        corner = (wide.columns.get_loc(column), wide.index.get_loc(row))
        ax.add_patch(Rectangle(corner, 1, 1, fill=False, ec="black", lw=4, clip_on=False))
    ax.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    ax.set_xticklabels([f"{v:g}" for v in wide.columns])
    ax.set_yticklabels([f"{v:g}" for v in wide.index], rotation=0)
    return ax


def plot_setting(
    table: pd.DataFrame,
    setting: str,
    default: float,
    metric: str = "pass@1",
    *,
    variant: str = "rapo",
    ax: Axes | None = None,
) -> Axes:
    """A result over the values of one setting: dots are seeds, diamonds means, lines 95 % t intervals.

    Args:
        table: one row a run with the setting, seed and the metric. setting: column of the horizontal axis; its values
            stand at equal distances. default: value that the other experiments have; it gets a grey ground.
        metric: column to draw. variant: whose colour. ax: where to draw.

    Raises:
        ValueError: no run with the default value.
    """
    _need(table, (setting, "seed", metric))
    ax = _axes(ax)
    values = sorted(table[setting].unique())
    if default not in values:
        raise ValueError(f"no run with {setting} = {default}; there are: {', '.join(map(str, values))}")
    colour, _ = style_of(variant)
    ax.axvspan(values.index(default) - 0.4, values.index(default) + 0.4, color="#DDDDDD", lw=0)
    for place, value in enumerate(values):
        y = table.loc[table[setting] == value, metric].to_numpy(float)
        ax.plot(np.full(len(y), place + 0.12), y, "o", ms=4, mfc="none", color=colour)
        if len(y) >= MIN_SEEDS:
            i = t_interval(y)
            ax.plot([place - 0.12] * 2, [i.low, i.high], color=colour, lw=2)
        ax.plot(place - 0.12, y.mean(), "D", ms=6, color=colour)
    ax.set_xticks(range(len(values)), [f"{v:g}" for v in values])
    ax.set_xlim(-0.6, len(values) - 0.4)
    ax.set_xlabel(setting.replace("_", " "))
    _name_axis(ax, "y", metric)
    ax.grid(axis="x", visible=False)
    return ax


# ---------------------------------------------------------------------------------------- one rollout

#: Characters of a line of `plot_rollout`: of its labels, of the text beside them, and of the entropies at the right.
LABEL_CHARS, TEXT_CHARS, ENTROPY_CHARS = 12, 85, 11
#: Width of a character of the monospace font that comes with matplotlib, in parts of its size.
_CHAR_EM = 0.602


def plot_rollout(rollout: Rollout, protocol: Protocol, question: str = "", ax: Axes | None = None) -> Axes:
    """A rollout as a picture: one line a step, each text on its author's colour, step entropies at the right.

    The author's name stands in the legend and beside the step, and retrieved steps are framed: colour alone carries
    nothing.

    Args:
        rollout: with at least one segment. protocol: decodes its ids. question: its text, put above.
        ax: where to draw, ten inches wide; by default a figure of the height that the rollout needs.

    Raises:
        ValueError: a rollout without a segment.
    """
    if not rollout.segments:
        raise ValueError("the rollout has no segment: there is nothing to draw")
    steps = list(zip(_step_names(rollout), map(lambda step: _lines(step, protocol), rollout.steps), strict=True))
    n_chars, n_lines = LABEL_CHARS + TEXT_CHARS + ENTROPY_CHARS, 2 + sum(len(lines) + 0.5 for _, lines in steps)
    if ax is None:
        ax = plt.figure(figsize=(10, 0.22 * (n_lines + 1)), dpi=100).add_axes((0.01, 0, 0.98, 1))
    # A character is drawn at whole pixels, so its width must be a whole number of them to fit the ground behind it.
    n_pixels = ax.figure.dpi * ax.figure.get_size_inches()[0] * ax.get_position().width
    char_pixels = max(1, int(n_pixels / n_chars))
    size = 72 * char_pixels / ax.figure.dpi / _CHAR_EM
    ax.set(xlim=(0, n_pixels / char_pixels), ylim=(n_lines + 0.5, -0.7))
    ax.axis("off")
    say = {"family": "DejaVu Sans Mono", "fontsize": size, "va": "center", "parse_math": False}
    ax.text(0, 0, visible(question or f"question {rollout.question_id}"), fontweight="bold", **say)
    y = 1.7
    for (name, entropy), lines in steps:
        if name == "retrieved":
            corner, edge = (LABEL_CHARS - 0.5, y - 0.62), _PARTS["peek"][0]
            ax.add_patch(Rectangle(corner, TEXT_CHARS + 1, len(lines) + 0.24, fill=False, ec=edge, lw=1.5, ls="--"))
        ax.text(0, y, name, color="#444444", **say)
        ax.text(n_chars, y, entropy, color="#444444", ha="right", **say)
        for line in lines:
            _draw_line(ax, y, line, say)
            y += 1
        y += 0.5
    _rollout_legend(ax, n_lines, rollout, say)
    return ax


def _step_names(rollout: Rollout) -> list[tuple[str, str]]:
    """(name, entropy of the policy's tokens) of each step."""
    names, n = [], 0
    for step in rollout.steps:
        if step.kind == "retrieved":
            names.append(("retrieved", ""))
            continue
        n += 1
        last = len(step.segments) == 1 and rollout.end_reason == "answer"
        entropy = f"{step.segments[0].mean_entropy:.3f} nats" if step.segments[0].entropies else ""
        names.append(("answer" if last else f"own step {n}", entropy))
    return names


def _lines(step: Step, protocol: Protocol) -> list[list[tuple[str, str]]]:
    """The texts of a step in lines of TEXT_CHARS: each a list of (author, piece)."""
    lines: list[list[tuple[str, str]]] = [[]]
    for segment in step.segments:
        text = visible(" ".join(protocol.decode(segment.ids).split()))
        while text:
            room = TEXT_CHARS - sum(len(piece) for _, piece in lines[-1])
            if room <= 0:
                lines.append([])
                continue
            cut = text if len(text) <= room else text[: text.rfind(" ", 0, room) + 1] or text[:room]
            lines[-1].append((segment.origin, cut))
            text = text[len(cut) :]
            if text:
                lines.append([])
    return lines


def _draw_line(ax: Axes, y: float, line: Iterable[tuple[str, str]], say: Mapping[str, Any]) -> None:
    x = LABEL_CHARS
    for author, piece in line:
        ax.add_patch(Rectangle((x, y - 0.5), len(piece), 0.96, fc=AUTHORS[author][0], ec="none"))
        ax.text(x, y, piece, color="#111111", **say)
        x += len(piece)


def _rollout_legend(ax: Axes, y: float, rollout: Rollout, say: Mapping[str, Any]) -> None:
    x = LABEL_CHARS
    for colour, name in AUTHORS.values():
        ax.add_patch(Rectangle((x, y - 0.5), 2, 0.96, fc=colour, ec="none"))
        ax.text(x + 2.7, y, name, color="#444444", **say)
        x += len(name) + 5
    reward = "" if rollout.reward is None else f", reward {rollout.reward:g}"
    facts = f"{rollout.retrieved_frac:.0%} of the tokens retrieved{reward}"
    ax.text(LABEL_CHARS + TEXT_CHARS + ENTROPY_CHARS, y, facts, color="#444444", ha="right", **say)
