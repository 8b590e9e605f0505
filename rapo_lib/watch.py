"""Training live: the curves of runs while they go on, and a button that stops them.

Notebook 05 uses it. Runs go on in their worker processes (`rapo_lib.runs`); this module looks at what they have written
every two seconds and draws it in one figure. Stopping ends the workers: what is done is done, every other run goes on
from its last RL step when the same cell runs again. In a batch it is `run_many`, with a line a run.

The cell awaits the runs, and looks at them in a thread: ipykernel hears a widget's button only from a cell that awaits.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as w
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display

from rapo_lib.config import RunConfig
from rapo_lib.plots import plot_progress, with_palette
from rapo_lib.runs import EXECUTOR, Run, run_many, work_here
from rapo_lib.show import BATCH, escape, show_widget

#: Runs that the line below the button names.
MOST_NAMED = 6


class TrainingStopped(Exception):
    """Somebody pressed stop; the message says how to go on."""

    def _render_traceback_(self) -> list[str]:
        """In a notebook: the message alone. Nothing went wrong, so there is nothing to trace."""
        return [str(self)]


class TrainingView(w.VBox):
    """The button, a line that says how far the runs are, and below it one figure that is drawn anew."""

    def __init__(self) -> None:
        self.stop = w.Button(description="stop training", icon="stop", button_style="warning")
        self.says = w.HTML("the runs are being started")
        super().__init__([w.HBox([self.stop, self.says])])
        self.stopped = threading.Event()  # pressed in one thread, looked at in another
        self.stop.on_click(lambda _: self.press())
        self.figure: Any = None
        self._done: dict[Path, pd.DataFrame] = {}
        self._drawn = 0

    def press(self) -> None:
        """The next look stops the runs."""
        self.stopped.set()
        self.stop.disabled = True

    def look(self, runs: Sequence[Run]) -> None:
        """Read what the runs have written and draw it where there is something new.

        Raises:
            TrainingStopped: stop was pressed and a run is not done.
        """
        tables = [self._table(run) for run in runs]
        going_on = [(run, len(t)) for run, t in zip(runs, tables, strict=True) if run.folder not in self._done]
        self.says.value = _line(len(runs), going_on)
        rows = pd.concat([t for t in tables if "rl_step" in t] or [pd.DataFrame()])  # SFT has no RL steps
        if len(rows) != self._drawn:
            self._drawn = len(rows)
            self._draw(rows, max(run.config.rl_steps for run in runs))
        if not going_on:
            self.stop.disabled = True
        elif self.stopped.is_set():
            raise TrainingStopped(
                f"Stopped: {len(self._done)} of {len(runs)} runs are done. Run this cell again, and the others go on "
                "where they stopped."
            )

    def _table(self, run: Run) -> pd.DataFrame:
        if run.folder not in self._done:
            table = run.metrics_so_far()
            if not run.done:
                return table
            self._done[run.folder] = run.table("metrics")
        return self._done[run.folder]

    def _draw(self, rows: pd.DataFrame, rl_steps: int) -> None:
        """One output that is replaced, so that a notebook that is saved holds the last figure and no more."""
        figure = plot_progress(rows, rl_steps)[0].figure
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=100)
        plt.close(figure)
        picture = base64.b64encode(with_palette(drawn.getvalue())).decode("ascii")
        data = {"image/png": picture, "text/plain": f"reward, entropy and retrieved fraction of {len(rows)} RL steps"}
        if self.figure is None:
            self.figure = display(data, raw=True, display_id=True)
        else:
            self.figure.update(data, raw=True)


def _line(n: int, going_on: Sequence[tuple[Run, int]]) -> str:
    """How far the runs are, those that have begun by name."""
    begun = [f"{escape(run.label)} {at} of {run.config.rl_steps}" for run, at in going_on if at]
    more = f" and {len(begun) - MOST_NAMED} more" if len(begun) > MOST_NAMED else ""
    steps = f"; RL steps: {', '.join(begun[:MOST_NAMED])}{more}" if begun else ""
    return f"{n - len(going_on)} of {n} runs are done{steps}"


async def run_watched(
    configs: Sequence[RunConfig] | Mapping[str, Sequence[RunConfig]],
    *,
    profile: str,
    experiment: str,
    jobs: int = 2,
    executor: str = EXECUTOR,
) -> list[Run]:
    """`run_many` with curves and a stop button while runs go on; in a batch with a line a run.

    The kernel's own stop does what the button does.

    Args:
        configs, profile, experiment, jobs, executor: as of `run_many`.

    Raises:
        TrainingStopped: somebody pressed stop; the same call goes on where the runs stopped.
        RunFailed: a run failed.
    """
    how = {"profile": profile, "experiment": experiment, "jobs": jobs, "executor": executor}
    if os.environ.get(BATCH):
        return run_many(configs, **how)
    view = TrainingView()
    runs = asyncio.ensure_future(asyncio.to_thread(run_many, configs, **how, work=partial(_work_watched, view)))
    try:
        while not runs.done():
            await asyncio.wait([runs], timeout=0.5)  # ipykernel's interrupt does not wake a loop that sleeps
    except asyncio.CancelledError:
        view.press()
    return await runs


def _work_watched(view: TrainingView, runs: list[Run], jobs: int, executor: str, say: Any) -> None:
    if not runs:  # all are there already
        return
    show_widget(view, "<i>Training is watched here while a kernel runs; the curves below are the last ones.</i>")
    try:
        work_here(runs, jobs, executor, say, watch=view.look)
    finally:
        view.stop.disabled = True
