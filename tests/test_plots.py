"""Figures and displays: the same bytes from the same data, one table of labels, nothing runs that a model wrote."""

import doctest
import io
import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from rapo_lib import plots, show
from rapo_lib.config import load_profile
from rapo_lib.methods import METHODS
from rapo_lib.objective import high_rising_reward
from rapo_lib.traces import Protocol, Rollout, Segment

HOSTILE = '</span><script>alert(1)</script><img src=x onerror="alert(2)">\u202e\u200b& \' "'


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def curves(n_seeds: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {
            "variant": v,
            "seed": s,
            "rl_step": t,
            "pass@1": rng.random() * t / 10,
            "noise_prob": t / 10,
            "family": f"f{t % 2}",
        }
        for v in ("grpo", "rapo", "rapo-x")
        for s in range(n_seeds)
        for t in (0, 5, 10)
    ]
    return pd.DataFrame(rows)


def grid() -> pd.DataFrame:
    """Two seeds a cell, 0.1 apart, their mean 0.2 at the low rate and 0.6 at the high one with rank 16."""
    rows = [
        {"learning_rate": lr, "lora_r": r, "seed": s, "pass@1": base + 0.1 * s - 0.05}
        for (lr, r), base in {(1e-3, 8): 0.2, (1e-3, 16): 0.2, (2e-3, 8): 0.4, (2e-3, 16): 0.6}.items()
        for s in range(2)
    ]
    return pd.DataFrame(rows)


def progress() -> pd.DataFrame:
    """Two runs of RAPO, one of which is further on, and one of GRPO, which never retrieves."""
    rows = [
        {"variant": v, "seed": s, "rl_step": t, "reward": t / 10, "entropy": 0.5 / t, "retrieved_frac": frac}
        for v, s, n, frac in (("rapo", 0, 5, 0.4), ("rapo", 1, 3, 0.3), ("grpo", 0, 4, float("nan")))
        for t in range(1, n + 1)
    ]
    return pd.DataFrame(rows)


def rollout(protocol, *parts) -> Rollout:
    segments = []
    for i, (origin, text) in enumerate(parts):
        ids = protocol.encode(text)
        numbers = ((-0.5,) * len(ids), (0.1 * (i + 1),) * len(ids)) if origin == "policy" else ((), ())
        segments.append(
            Segment(origin, ids, *numbers, {"tool": "search", "query": HOSTILE} if origin == "tool" else {})
        )
    return Rollout("q1", (1, 2), segments, hybrid=True, end_reason="answer", reward=1.0)


@pytest.fixture
def sample(tiny_tokenizer) -> tuple[Rollout, Protocol]:
    protocol = Protocol(tiny_tokenizer)
    step = ("policy", "<think> need</think><search> code 42 hotel</search>")
    parts = (
        step,
        ("tool", "<result> Lumiro</result>"),
        ("retrieval", "<retrieve><think> x</think></retrieve>"),
        step,
        ("policy", HOSTILE),
    )
    return rollout(protocol, *parts), protocol


def png(ax) -> bytes:
    file = io.BytesIO()
    ax.figure.savefig(file, metadata={"Software": None})
    return file.getvalue()


def draw_all(sample) -> list:
    table = curves(5)
    return [
        plots.plot_learning_curves(table),
        plots.plot_noise(table, baseline=table[table.variant == "grpo"]),
        plots.plot_retrieval_reward(),
        plots.plot_entropy_around_retrieval([sample[0]]),
        plots.plot_eval_bars(table),
        plots.plot_eval_bars(table, by="family"),
        plots.plot_idea(),
        plots.plot_health(health()).flat[0],
        plots.plot_differences(table[table["rl_step"] == table["rl_step"].max()], "grpo"),
        plots.plot_grid(grid(), "learning_rate", "lora_r"),
        plots.plot_setting(grid(), "lora_r", 8),
        plots.plot_rollout(*sample),
        plots.plot_progress(progress(), 8)[0],
    ]


def test_a_curve_that_never_moves_stands_on_an_axis_from_0_to_100_percent():
    flat = pd.DataFrame({"variant": "grpo", "seed": 0, "rl_step": [0, 1], "pass@1": [0.0, 0.0], "entropy": [0.5, 0.5]})
    assert plots.plot_learning_curves(flat).get_ylim() == (-0.02, 1.02)
    assert plots.plot_learning_curves(flat.assign(**{"pass@1": [0.0, 0.3]})).get_ylim()[1] < 0.4
    assert plots.plot_learning_curves(flat, "entropy").get_ylim() != (-0.02, 1.02)


def test_progress_draws_each_run_as_far_as_it_is():
    axes = plots.plot_progress(progress(), 8)
    drawn = [[list(line.get_xdata()) for line in ax.lines] for ax in axes]
    assert drawn[0] == drawn[1] == [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4]]
    assert drawn[2] == [[1, 2, 3, 4, 5], [1, 2, 3], []]  # GRPO has no retrieved fraction
    assert list(axes[0].lines[1].get_ydata()) == [0.1, 0.2, 0.3] and {ax.get_xlim() for ax in axes} == {(0, 8.5)}
    assert [t.get_text() for t in axes[0].figure.legends[0].get_texts()] == ["RAPO", "GRPO"]
    with pytest.raises(ValueError, match="no column 'variant'"):
        plots.plot_progress(pd.DataFrame(), 8)


def test_one_legend_names_each_line_once_below_all_panels():
    axes = plots.new_axes(4)
    for ax, variant in zip(axes.flat, ("grpo", "rapo", "grpo", "rapo"), strict=True):
        plots.plot_learning_curves(curves(5).query(f"variant == '{variant}'"), ax=ax)
    plots.one_legend(axes)
    (legend,) = axes.flat[0].figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["GRPO (n = 5)", "RAPO (n = 5)"]
    assert not any(ax.get_legend() for ax in axes.flat)
    ax = plots.plot_learning_curves(curves(5))
    plots.one_legend(ax)
    assert ax.get_legend() is None and len(ax.figure.legends) == 1


def test_progress_tells_a_method_in_two_regimes_apart_by_markers():
    one = progress().query("variant == 'rapo'")
    table = pd.concat([one.assign(variant=v) for v in ("grpo_halfway", "rapo_halfway", "rapo_easy")])
    legend = plots.plot_progress(table, 8)[0].figure.legends[0]
    marks = {t.get_text(): h.get_marker() for t, h in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    assert marks == {"GRPO, half-way": ".", "RAPO, half-way": ".", "RAPO, easy": "s"}


@pytest.mark.parametrize(("low", "top"), [(0.02, 0.45), (0.03, 2.0), (0.002, 9.0), (0.11, 0.29), (5.0, 600.0)])
def test_numbers_on_logarithmic_axes_are_plain_and_apart(low, top):
    ax = plots.new_axes()
    ax.set(xlim=(low, top), ylim=(low, top))
    plots.log_axes(ax)
    ax.figure.canvas.draw()
    for axis in (ax.xaxis, ax.yaxis):
        assert axis.get_scale() == "log" and not any(t.get_text() for t in axis.get_minorticklabels())
        texts = [t for t in axis.get_majorticklabels() if low <= float(t.get_text()) <= top]
        boxes = [t.get_window_extent() for t in texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert len(texts) >= 2 or top < 3 * low


@pytest.mark.case(42)
def test_a_figure_drawn_twice_is_byte_equal(sample):
    first = [png(ax) for ax in draw_all(sample)]
    plt.close("all")
    second = [png(ax) for ax in draw_all(sample)]
    assert first == second and len(set(first)) == len(first)
    assert len(first) > len([name for name in vars(plots) if name.startswith("plot_")])  # none is left out


def test_every_axis_has_a_label_and_legends_name_n(sample):
    for ax in draw_all(sample)[:2]:
        assert ax.get_xlabel() and ax.get_ylabel() == "pass@1 without retrieval (%)"
        assert [t.get_text().split(" (n = ")[0] for t in ax.get_legend().get_texts()][:2] == ["GRPO", "RAPO"]
        assert "(n = 5)" in ax.get_legend().get_texts()[0].get_text()


@pytest.mark.parametrize(("n", "bands", "points"), [(1, 0, 0), (3, 0, 3), (5, 3, 3), (12, 3, 0)])
def test_bands_from_five_seeds_and_points_below_ten(n, bands, points):
    ax = plots.plot_learning_curves(curves(n))
    assert len(ax.collections) == bands
    assert sum(line.get_marker() == "." for line in ax.lines) == points


def test_a_method_looks_the_same_everywhere_and_unlike_the_others():
    assert len(set(plots.STYLES.values())) == len(plots.STYLES)
    assert set(METHODS) <= set(plots.STYLES)
    assert plots.style_of("a variant") == plots.style_of("a variant") != plots.style_of("another one")
    line = plots.plot_learning_curves(curves(1)).lines[0]
    bar = plots.plot_eval_bars(curves(1)).patches[0]
    colour = plots.STYLES["grpo"][0]
    assert line.get_color() == colour and matplotlib.colors.to_hex(bar.get_facecolor()) == colour


def test_every_colour_stands_out_on_a_white_wall():
    def luminance(colour):  # WCAG 2
        rgb = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in matplotlib.colors.to_rgb(colour))
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))

    assert luminance("white") == pytest.approx(1) and luminance("black") == 0
    contrasts = {c: 1.05 / (luminance(c) + 0.05) for c, _ in plots.STYLES.values()}
    assert min(contrasts.values()) > 2.2, contrasts


def test_the_reward_is_an_argument():
    ours, inverted = plots.plot_retrieval_reward(), plots.plot_retrieval_reward(high_rising_reward)
    assert ours.texts[0].get_text() == "0.457" and inverted.texts[0].get_text() == "-0.457"


def test_entropies_stand_on_their_side_of_the_retrieval(sample):
    places = plots._around([sample[0]], 2)
    assert list(places) == [-1, 1, 2]
    assert (
        places[-1][0] == pytest.approx(0.1)
        and places[1][0] == pytest.approx(0.4)
        and places[2][0] == pytest.approx(0.5)
    )
    with pytest.raises(ValueError, match="no rollout holds a retrieval"):
        plots.plot_entropy_around_retrieval([Rollout("q", ())])


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match="no column 'entropy'; it has: variant"):
        plots.plot_learning_curves(curves(1), "entropy")
    with pytest.raises(ValueError, match="empty"):
        plots.plot_eval_bars(curves(1).iloc[:0])


def health(n_seeds: int = 2, n_steps: int = 30) -> pd.DataFrame:
    """Two variants; GRPO's seed 0 has broken tools from step 5 on and its entropy is not known."""
    rng = np.random.default_rng(0)
    rows = []
    for variant in ("grpo", "rapo"):
        for seed in range(n_seeds):
            for t in range(1, n_steps + 1):
                broken = variant == "grpo" and seed == 0 and t >= 5
                row = {"variant": variant, "seed": seed, "rl_step": t, "reward": rng.random() / 2 + 0.2}
                row |= {"entropy": np.nan, "completion_tokens": 100 + rng.random()}
                rows.append(row | {"tool_failures_frac": 1.0 if broken else 0.02, "groups_no_signal_frac": 0.2})
    return pd.DataFrame(rows)


@pytest.mark.case(36, 38)
def test_health_marks_and_names_an_alarm_at_its_step_and_on_its_panel():
    axes = plots.plot_health(health())
    by_metric = dict(zip(plots.KEYS, axes.flat, strict=True))
    failures = by_metric.pop("tool_failures_frac")
    assert failures.get_title("left") == "tools alarm: step 7, GRPO seed 0"
    (cross,) = [line for line in failures.lines if line.get_marker() == "X"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (7, 1.0)
    for ax in by_metric.values():
        assert ax.get_title("left") == "" and not [line for line in ax.lines if line.get_marker() == "X"]


def test_health_draws_each_run_and_counts_alarms_beyond_the_named_ones():
    table = health(n_seeds=3).assign(tool_failures_frac=1.0)
    axes = plots.plot_health(table)
    assert len(axes.flat[0].lines) == 2 * (1 + 3)
    title = axes.flat[4].get_title("left")
    assert title == "tools alarm: step 3, GRPO seed 0\nstep 3, GRPO seed 1; and 4 more"
    labels = [t.get_text() for t in axes.flat[0].figure.legends[0].get_texts()]
    assert labels == ["GRPO (n = 3)", "RAPO (n = 3)"]


def test_health_says_which_metric_is_missing_or_nan_and_still_draws_the_others():
    axes = plots.plot_health(health())
    texts = [[t.get_text() for t in ax.texts] for ax in axes.flat]
    assert texts[1] == ["no values:\nentropy\nis NaN everywhere"]
    assert texts[3] == ["no values:\ntruncated_frac\nis not in the table"]
    assert [t for i, t in enumerate(texts) if i not in (1, 3)] == [[]] * 4
    nothing = plots.plot_health(health()[["variant", "seed", "rl_step"]])
    assert all(ax.texts for ax in nothing.flat) and not nothing.flat[0].figure.legends
    with pytest.raises(ValueError, match="no column 'seed'"):
        plots.plot_health(health().drop(columns="seed"))
    with pytest.raises(ValueError, match="empty"):
        plots.plot_health(health().iloc[:0])


@pytest.mark.case(42)
def test_health_drawn_twice_is_byte_equal():
    assert png(plots.plot_health(health()).flat[0]) == png(plots.plot_health(health()).flat[0])
    assert png(plots.plot_health(health()).flat[0]) != png(plots.plot_health(health(n_seeds=1)).flat[0])


@pytest.mark.case(42)
def test_saved_figures_hold_no_version(tmp_path):
    ax = plots.plot_learning_curves(curves(1))
    plots.save_figure(ax.figure, tmp_path / "new" / "a.png")
    saved = (tmp_path / "new" / "a.png").read_bytes()
    assert b"Software" not in saved


def test_saved_figures_have_a_palette_and_look_the_same(tmp_path):
    ax = plots.plot_learning_curves(curves(5))
    plots.save_figure(ax.figure, tmp_path / "a.png")
    ax.figure.savefig(tmp_path / "b.png", dpi=100)
    ours, full = (Image.open(tmp_path / f"{name}.png") for name in "ab")
    assert ours.mode == "P" and ours.size == full.size
    difference = np.abs(np.asarray(ours.convert("RGB"), dtype=int) - np.asarray(full.convert("RGB"), dtype=int))
    assert difference.mean() < 1 and np.quantile(difference, 0.999) < 24
    saved = (tmp_path / "a.png").read_bytes()
    assert len(saved) < (tmp_path / "b.png").stat().st_size
    assert plots.with_palette(saved) == saved


def test_a_heat_map_keeps_its_colours(tmp_path):
    plots.save_figure(plots.plot_retrieval_reward().figure, tmp_path / "a.png")
    picture = Image.open(tmp_path / "a.png")
    assert picture.mode == "RGB" and len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 512


# ------------------------------------------------------------------------------------------------ show


def displayed(monkeypatch) -> list[dict]:
    shown: list[dict] = []
    monkeypatch.setattr(show, "display", lambda data, raw: shown.append(data))
    return shown


def test_examples_in_docstrings():
    assert doctest.testmod(show).failed == 0


def test_the_live_source_is_shown(monkeypatch):
    shown = displayed(monkeypatch)
    show.show_source(load_profile)
    show.show_source(Rollout)
    assert "def load_profile" in shown[0]["text/plain"] and shown[0]["text/plain"].startswith(
        "# rapo_lib/config.py, line "
    )
    assert "load_profile" in shown[0]["text/html"] and "class Rollout" in shown[1]["text/plain"]


def test_what_a_model_wrote_is_never_interpreted(monkeypatch, sample):
    shown = displayed(monkeypatch)
    show.show_rollout(*sample)
    show.show_aligned_rows(*sample, n=10_000)
    for page in (s["text/html"] for s in shown):
        assert "<script" not in page and "<img" not in page and 'onerror="' not in page
        assert "\u202e" not in page and "\u200b" not in page
    assert (
        "&lt;script&gt;" in shown[0]["text/html"].replace("<wbr>", "") and "retrieved fraction" in shown[0]["text/html"]
    )
    assert all("\u202e" not in s["text/plain"] for s in shown)
    assert shown[0]["text/plain"].splitlines()[1].startswith("[tool] <result>")


def test_rows_are_aligned(sample):
    r, protocol = sample
    table = show.aligned_rows(r, protocol)
    assert list(table["id"]) == r.completion_ids and list(table["mask"]) == r.policy_mask
    assert (table["origin"].eq("policy") == table["mask"].astype(bool)).all()
    assert table["entropy"].isna().eq(table["mask"] == 0).all()
    assert sorted(table["step"].unique()) == [0, 1, 2, 3]
    json.dumps(table["token"].tolist())


@pytest.mark.parametrize(
    "variant, method", [("grpo_halfway", "grpo"), ("rapo_easy", "rapo"), ("rapo_halfway_p=1", "rapo_p=1")]
)
def test_a_method_looks_the_same_in_every_regime(variant, method):
    assert plots.style_of(variant) == plots.style_of(method)


def test_differences_are_paired_by_seed():
    """Two seeds: 0.2 - 0.5 and 0.9 - 0.6 are -30 and +30 points, whatever order the rows have."""
    rows = [("rapo", 0, 0.5), ("rapo", 1, 0.6), ("w", 1, 0.9), ("w", 0, 0.2), ("w", 2, 0.4)]
    table = pd.DataFrame(rows, columns=["variant", "seed", "pass@1"])
    ax = plots.plot_differences(table, "rapo")
    dots = ax.lines[0].get_xdata()
    assert sorted(np.round(dots, 6)) == [-30, 30] and ax.lines[1].get_xdata()[0] == pytest.approx(0)
    assert ax.get_yticklabels()[0].get_text() == "w (n = 2)"
    with pytest.raises(ValueError, match="no run of 'x'; there are: rapo, w"):
        plots.plot_differences(table, "rapo", ["x"])
    alone = pd.concat([table, pd.DataFrame([("y", 7, 0.1)], columns=table.columns)])
    with pytest.raises(ValueError, match="y and rapo have no seed in common"):
        plots.plot_differences(alone, "rapo", ["y"])


def test_every_variant_of_the_study_has_a_name_and_a_look():
    """Two variants of one experiment never look the same; a method keeps its look in every regime."""
    from rapo_lib.study import EXPERIMENTS

    for name, rows in EXPERIMENTS.items():
        assert len({plots.label_of(v.name) for v in rows}) == len(rows), name
    assert plots.style_of("luffy_halfway") == plots.style_of("luffy_wasteful") == plots.style_of("luffy")
    assert plots.label_of("sft_n=12") == "SFT, 12 trajectories"


def test_a_grid_shows_the_means_of_its_cells_and_frames_one():
    ax = plots.plot_grid(grid(), "learning_rate", "lora_r", marks=[(2e-3, 16)])
    assert [t.get_text() for t in ax.texts] == ["20", "40", "20", "60"]  # rows are ranks 8 and 16
    (frame,) = ax.patches
    assert frame.get_xy() == (1, 1) and not frame.get_fill()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0.001", "0.002"] and ax.get_ylabel() == "lora r"
    with pytest.raises(ValueError, match="no column 'rank'"):
        plots.plot_grid(grid(), "learning_rate", "rank")
    with pytest.raises(KeyError):
        plots.plot_grid(grid(), "learning_rate", "lora_r", marks=[(3e-3, 16)])


def test_values_of_a_setting_stand_in_order_with_the_default_on_grey():
    ax = plots.plot_setting(grid(), "lora_r", 16)
    means = [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "D"]
    assert means == pytest.approx([0.3, 0.4])
    assert ax.patches[0].get_x() == pytest.approx(0.6) and [t.get_text() for t in ax.get_xticklabels()] == ["8", "16"]
    assert len(ax.lines) == 4  # dots and a mean for each value; no interval below five seeds
    five = pd.concat([grid().assign(seed=s) for s in range(2)])
    assert len(plots.plot_setting(five, "lora_r", 16).lines) == 6
    with pytest.raises(ValueError, match="no run with lora_r = 4; there are: 8, 16"):
        plots.plot_setting(grid(), "lora_r", 4)
