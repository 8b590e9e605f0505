"""Training live: what is drawn while runs go on, and stopping them by button. No browser, no real training."""

from __future__ import annotations

import asyncio
import textwrap
import threading

import pandas as pd
import pytest
from jupyter_client.manager import start_new_kernel

from rapo_lib import runs, watch
from rapo_lib.config import RunConfig
from rapo_lib.runs import partial_folder, plan_runs
from rapo_lib.show import BATCH

# An RL step at a time, going on from what it has written; from the third one on it waits for a file.
TOY = """
    import os, time
    import pandas as pd

    def run(config, folder):
        path = folder / "metrics.parquet"
        rows = pd.read_parquet(path).to_dict("records") if path.exists() else []
        resumed = len(rows)
        while len(rows) < config.rl_steps:
            since = time.time()  # a stop that is not heard fails the test and does not hang it
            while len(rows) == 2 and not os.path.exists(os.environ["TOY_GO"]) and time.time() < since + 30:
                time.sleep(0.02)
            step = len(rows) + 1
            rows.append({"rl_step": step, "reward": step / 10, "entropy": 0.5, "retrieved_frac": 0.25})
            pd.DataFrame(rows).to_parquet(str(path) + ".new")
            os.replace(str(path) + ".new", path)
        return {"pass@1": 0.5, "resumed": resumed}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A results folder of its own, an executor `toy_watch:run`, quick looks, and what is displayed as a list."""
    (tmp_path / "toy_watch.py").write_text(textwrap.dedent(TOY), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("TOY_GO", str(tmp_path / "go"))
    monkeypatch.delenv("RAPO_FRESH_SINCE", raising=False)
    monkeypatch.delenv(BATCH, raising=False)
    monkeypatch.setattr(runs, "inputs_hash", lambda config: "fixed")
    monkeypatch.setattr(runs, "LOOK_SEC", 0.05)
    shown, views = [], []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    monkeypatch.setattr(watch, "display", lambda data, **_: shown.append(data) or Handle())
    monkeypatch.setattr(watch, "show_widget", lambda view, still: views.append(view))
    toy.how = {"profile": "smoke", "experiment": "x", "executor": "toy_watch:run"}
    toy.go, toy.shown, toy.views = tmp_path / "go", shown, views
    return toy


def run_watched(*a, **k):
    return asyncio.run(watch.run_watched(*a, **k))


def configs(n: int) -> dict[str, list[RunConfig]]:
    return {"rapo": [RunConfig(seed=s, rl_steps=4) for s in range(n)]}


def test_stop_leaves_runs_that_the_same_call_goes_on_with(toy, monkeypatch):
    """The button is pressed when the figure shows the second RL step; the call after it ends the run."""

    def press(data, **_):
        toy.shown.append(data)
        if "of 2 RL steps" in data["text/plain"]:
            threading.Thread(target=toy.views[0].stop.click).start()  # as JupyterLab does, past the busy cell
        return type("Handle", (), {"update": staticmethod(press)})

    monkeypatch.setattr(watch, "display", press)
    with pytest.raises(watch.TrainingStopped, match="Stopped: 0 of 1 runs are done. Run this cell again") as stopped:
        run_watched(configs(1), **toy.how)
    assert stopped.value._render_traceback_() == [str(stopped.value)]
    (planned,) = plan_runs(configs(1), runs.runs_folder("smoke") / "x")
    assert not planned.folder.exists() and len(planned.metrics_so_far()) == 2
    assert (
        toy.views[0].stop.disabled and toy.views[0].says.value == "0 of 1 runs are done; RL steps: rapo seed 0 2 of 4"
    )

    toy.go.touch()
    (done,) = run_watched(configs(1), **toy.how)
    assert done.done["resumed"] == 2 and list(done.table("metrics")["rl_step"]) == [1, 2, 3, 4]
    assert toy.views[1].says.value == "1 of 1 runs are done" and toy.views[1].stop.disabled
    assert toy.shown[-1]["text/plain"].endswith("of 4 RL steps") and toy.shown[-1]["image/png"].startswith("iVBOR")


def test_the_kernel_s_own_stop_does_what_the_button_does(toy):
    async def cell():
        runs = asyncio.ensure_future(watch.run_watched(configs(1), **toy.how))
        while not any("of 2 RL steps" in data["text/plain"] for data in toy.shown):
            await asyncio.sleep(0.02)
        runs.cancel()  # as ipykernel does at SIGINT
        await runs

    with pytest.raises(watch.TrainingStopped, match="Stopped: 0 of 1 runs are done"):
        asyncio.run(cell())


# What a browser sends when the button is pressed, and to whom: to the main shell, while its cell goes on.
CELL = """
from rapo_lib import runs, watch
from rapo_lib.config import RunConfig
runs.inputs_hash = lambda config: "fixed"
runs.LOOK_SEC = 0.05
planned = {"rapo": [RunConfig(seed=0, rl_steps=4)]}
await watch.run_watched(planned, profile="smoke", experiment="x", executor="toy_watch:run")
"""


@pytest.mark.parametrize("how", ["button", "interrupt"])
def test_a_kernel_hears_stop_while_the_cell_goes_on(toy, how):
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(CELL)
        buttons, pressed, error = [], False, None
        while error is None:
            message = client.get_iopub_msg(timeout=60)
            content = message["content"]
            if message["msg_type"] == "comm_open" and content["data"]["state"].get("description") == "stop training":
                buttons.append(content["comm_id"])
            if not pressed and "of 2 RL steps" in content.get("data", {}).get("text/plain", ""):
                data = {"method": "custom", "content": {"event": "click"}}
                click = client.session.msg("comm_msg", {"comm_id": buttons[0], "data": data})
                client.shell_channel.send(click) if how == "button" else manager.interrupt_kernel()
                pressed = True
            if message["msg_type"] == "error":
                error = content
        assert pressed and error["ename"] == "TrainingStopped", error["traceback"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_one_figure_is_replaced_only_when_there_is_something_new(toy):
    toy.go.touch()
    done = run_watched(configs(2), **toy.how)
    counts = [int(data["text/plain"].split(" of ")[1].split()[0]) for data in toy.shown]
    assert counts == sorted(set(counts)) and counts[-1] == 8  # each picture shows more than the one before
    assert [r.label for r in done] == ["rapo seed 0", "rapo seed 1"] and len(toy.views) == 1
    run_watched(configs(2), **toy.how)
    assert len(toy.views) == 1, "there was nothing to do, so nothing to look at"


def test_stop_after_the_last_run_stops_nothing(toy):
    toy.go.touch()
    (done,) = run_watched(configs(1), **toy.how)
    view = watch.TrainingView()
    view.stop.click()
    view.look([done])
    assert view.says.value == "1 of 1 runs are done"


def test_runs_without_rl_steps_are_counted_and_not_drawn(toy):
    """SFT writes its table at the end, with optimiser steps in place of RL steps."""
    (sft,) = plan_runs({"sft": [RunConfig(method="sft")]}, runs.runs_folder("smoke") / "x")
    view = watch.TrainingView()
    view.look([sft])
    assert view.says.value == "0 of 1 runs are done" and toy.shown == []


def test_what_other_code_had_begun_is_not_shown(toy):
    (run,) = plan_runs(configs(1), runs.runs_folder("smoke") / "x")
    partial = partial_folder(run.folder)
    (partial / "work").mkdir(parents=True)
    pd.DataFrame({"rl_step": [1]}).to_parquet(partial / "metrics.parquet")
    assert run.metrics_so_far().empty
    for inputs, n in (("other", 0), ("fixed", 1)):
        (partial / "work" / "started.json").write_text(f'{{"inputs": "{inputs}"}}', encoding="utf-8")
        assert len(run.metrics_so_far()) == n
    assert list(run.metrics_so_far().columns) == ["variant", "method", "seed", "rl_step"]


def test_in_a_batch_there_is_a_line_a_run_and_no_widget(toy, monkeypatch, capsys):
    toy.go.touch()
    monkeypatch.setenv(BATCH, "1")
    run_watched(configs(2), **toy.how, jobs=1)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1].split(":")[0] for line in said] == ["rapo seed 0", "rapo seed 1"]
    assert toy.views == toy.shown == []


def test_many_runs_are_not_all_named(toy):
    planned = plan_runs(configs(9), runs.runs_folder("smoke") / "x")
    line = watch._line(10, [(run, 3) for run in planned])
    assert line.startswith("1 of 10 runs are done; RL steps: rapo seed 0 3 of 4, ") and line.endswith("4 and 3 more")
