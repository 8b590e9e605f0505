"""Notebooks in a real browser: `./run_all.sh browser [--all | 03 05 ..]`.

Headless Chromium opens JupyterLab, new and without settings, on copies of the notebooks with the profile smoke, chooses
Run, Run All Cells, and waits for the last cell. A notebook fails when a cell has an error output or was never run, a
widget cannot be drawn, the console shows an error, a request fails, or anything but this machine is asked. In notebook
03 a rollout is played by hand; in 05 training is stopped by its button and goes on, and the explorer is moved by
buttons and keys. Screenshots of whole notebooks go to results/browser: a person looks at them. Where no Chromium can
be had, it says so and ends with status 77.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
from PIL import Image

from rapo_lib.config import ROOT
from rapo_lib.driver import select_notebooks
from rapo_lib.reference import REFERENCE
from rapo_lib.runs import results_folder

#: Without names: the first five minutes, and the two notebooks with controls. The others use nothing more of a browser.
DEFAULT = ("00", "03", "05")
SKIPPED = 77
#: Addresses that may answer with an error, and why that is no fault of a notebook. JupyterLab asks for them itself.
HARMLESS = {
    r"/api/contents/[^?]*\.ipynb/checkpoints": "no checkpoint of a new copy",
    r"/api/me/?\?": "no identity without a login",
}
MINUTES = 12
#: Milliseconds that anything else may take: a machine may be busy with other things.
PATIENCE = 120_000
WIDTH, HEIGHT = 1400, 1000
#: Height of one screenshot; a longer notebook gets several.
PART = 4000


# ----------------------------------------------------------------------------------------- the machinery


def find_chromium() -> str | None:
    """A Chromium on this machine, or RAPO_CHROMIUM; on Debian, as root, it is installed.

    Raises:
        SystemExit: RAPO_CHROMIUM names no program.
    """
    given = os.environ.get("RAPO_CHROMIUM")
    if given and not shutil.which(given):
        raise SystemExit(f"RAPO_CHROMIUM is {given!r}, which is no program; name one, or leave it empty")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = given or next((p for n in names if (p := shutil.which(n))), None)
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        print("installing chromium with apt-get ...", flush=True)
        install = "apt-get install -y -qq chromium || (apt-get update -qq && apt-get install -y -qq chromium)"
        subprocess.run(["sh", "-c", install], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        found = shutil.which("chromium")
    return found


@contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """JupyterLab over a folder, on a free port, with settings of its own; yields its address without the token.

    At the end its kernels, and what they started, end with it.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token, home = secrets.token_hex(16), folder / "home"
    places = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
    places |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "spaces", "IPYTHONDIR": "ipython"}
    env = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"} | {k: str(home / v) for k, v in places.items()}
    env |= {"RAPO_RESULTS": str(folder / "results"), "PYTHONPATH": str(ROOT), "JUPYTER_PREFER_ENV_PATH": "1"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder / 'notebooks'}"]
    command += ["--LabApp.expose_app_in_browser=True"]
    command += ["--allow-root"] if os.geteuid() == 0 else []
    address, log = f"http://127.0.0.1:{port}", folder / "server.log"
    with open(log, "w", encoding="utf-8") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        _wait_for(lambda: urllib.request.urlopen(f"{address}/api?token={token}", timeout=2).read(), server, log)
        yield f"{address}/lab/tree/{{name}}?token={token}&reset"
    finally:
        _end(server)


def _wait_for(answer: Callable[[], Any], server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        with suppress(OSError):
            answer()
            return
        if server.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError("JupyterLab did not start:\n" + log.read_text(encoding="utf-8")[-2000:])


def _end(server: subprocess.Popen) -> None:
    """End the server; kernels live in sessions of their own, so each is ended by its number."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        for child in psutil.wait_procs(children, timeout=20)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def smoke_copy(path: Path, folder: Path) -> None:
    """Write a copy whose parameters cell says `profile = "smoke"`.

    Raises:
        ValueError: there is no such line to change.
    """
    nb = nbformat.read(path, as_version=4)
    cell = next(c for c in nb.cells if "parameters" in c.metadata.get("tags", ()))
    cell.source, n = re.subn(r'^profile = "\w+"', 'profile = "smoke"', cell.source, flags=re.MULTILINE)
    if n != 1:
        raise ValueError(f'{path.name}: the parameters cell has {n} lines `profile = ".."`; expected one')
    folder.mkdir(exist_ok=True)
    nbformat.write(nb, folder / path.name)


# ------------------------------------------------------------------------------------------ in the browser

# The indicator in the toolbar says idle before there is a kernel.
_READY = "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
# JupyterLab draws only the cells in view; its model knows all of them.
_STATE = """() => {
    const cells = window.jupyterapp?.shell?.currentWidget?.content?.model?.cells;
    if (!cells) return {todo: -1, errors: []};
    const code = [...cells].filter(c => c.type === 'code' && c.sharedModel.source.trim());
    const outputs = code.flatMap(c => c.sharedModel.toJSON().outputs);
    const errors = outputs.filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue);
    return {todo: code.filter(c => c.executionCount === null).length, errors};
}"""


def start_all(page: Any) -> None:
    """Run, Run All Cells."""
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function(_READY)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()


def run_all(page: Any) -> None:
    """Run, Run All Cells, and wait for the last cell.

    Raises:
        AssertionError: a cell has an error output, or was not run in time.
    """
    start_all(page)
    deadline = time.monotonic() + 60 * MINUTES
    while (state := page.evaluate(_STATE))["todo"] and not state["errors"]:
        assert time.monotonic() < deadline, f"{state['todo']} cells are not done after {MINUTES} minutes"
        page.wait_for_timeout(500)
    assert not state["errors"], state["errors"][0]


def stop_training(page: Any) -> None:
    """Notebook 05: the button stops training while the cell is busy; all cells can then be run."""
    start_all(page)
    into_view(page, 'experiment="positive_control"')
    page.get_by_role("button", name="stop training").wait_for()
    page.wait_for_timeout(1500)  # JupyterLab opens the way past the busy cell when it draws the button
    page.get_by_role("button", name="stop training").click()
    _until(page, lambda: page.evaluate(_STATE)["errors"], "the button stops nothing")
    (said,) = page.evaluate(_STATE)["errors"]
    assert said.startswith("TrainingStopped: Stopped: 0 of "), said


def play_by_hand(page: Any) -> None:
    """Notebook 03: a text that is no question gets a kind answer; a question gets an own step and a peek by button."""
    begin, box = page.get_by_role("button", name="begin", exact=True), page.get_by_placeholder("or type one")
    into_view(page, "play(")
    box.fill("hello there")
    box.press("Enter")
    begin.click()
    page.get_by_text("This world does not know").wait_for()
    first = page.locator("select option", has_text="what is").first.text_content()
    page.locator("select", has_text="what is").first.select_option(label=first)
    begin.click()
    page.get_by_text("notes that lie nearest now").wait_for()
    page.get_by_role("button", name="peek at a note").click()
    page.get_by_text("2. retrieved step").wait_for()
    shown = page.get_by_text(re.compile(r"^\d+\. own step"))
    before = shown.count()
    page.get_by_role("button", name="own step", exact=True).click()
    _until(page, lambda: shown.count() > before, "no own step after the button")


def walk_through(page: Any) -> None:
    """Notebook 05: search, step by button and by key, choose another rollout, and see the cards change."""
    into_view(page, "explore(")
    search = page.get_by_placeholder("hybrid, on-policy")
    search.fill("hybrid")
    search.press("Enter")
    page.get_by_text(re.compile(r"^[1-9]\d* of \d+ rollouts")).first.wait_for()
    page.get_by_role("button", name="forward", exact=True).click()
    _until(page, lambda: marked(page).startswith("2."), "the button marks no second step")
    page.locator(".widget-slider .noUi-handle, .widget-hslider .noUi-handle").first.press("ArrowRight")
    _until(page, lambda: marked(page).startswith("3."), "the key marks no third step")
    page.get_by_role("button", name="back", exact=True).click()
    _until(page, lambda: marked(page).startswith("2."), "the button does not go back")
    page.get_by_role("button", name="change", exact=True).click()
    page.get_by_text("log-probability after the update minus before").first.wait_for()
    # By mouse: in JupyterLab the keys up and down belong to the notebook, also when a list has the focus.
    options = page.locator("select[size] option")
    head = page.get_by_text(re.compile(r"place \d+, ended by")).first
    before = head.text_content()
    page.locator("select[size]").first.select_option(index=options.count() - 1)
    _until(page, lambda: head.text_content() != before, "another rollout changes nothing")
    search.fill("many")
    search.press("Enter")
    page.get_by_text("is nothing that can be searched for").wait_for()
    search.fill("hybrid")
    search.press("Enter")


def marked(page: Any) -> str:
    """The text of the marked card."""
    return page.evaluate(
        "() => [...document.querySelectorAll('div')].filter(d => d.style.borderWidth === '3px')"
        ".map(d => d.textContent).join()"
    )


def into_view(page: Any, code: str) -> None:
    """Scroll to the cell whose source contains some code."""
    page.evaluate(
        """code => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const at = notebook.widgets.findIndex(c => c.model.sharedModel.source.includes(code));
            notebook.activeCellIndex = at;
            notebook.scrollToItem(at, 'start');  // not waited for: it need not say when it is there
        }""",
        code,
    )


def _until(page: Any, true: Callable[[], bool], otherwise: str) -> None:
    for _ in range(PATIENCE // 200):
        if true():
            return
        page.wait_for_timeout(200)
    raise AssertionError(otherwise)


BEFORE = {"05": stop_training}
AFTER = {"03": play_by_hand, "05": walk_through}


# Where the view begins, how high it is, and where the last cell ends (or the panel, while that cell is not drawn).
_PLACE = """e => {
    const n = window.jupyterapp.shell.currentWidget.content.widgets.length;
    const last = e.querySelector(`[data-windowed-list-index="${n - 1}"]`);
    const top = e.getBoundingClientRect().top - e.scrollTop;
    const below = last ? last.getBoundingClientRect().bottom - top : e.scrollHeight;
    return [e.scrollTop, e.clientHeight, below].map(Math.ceil);
}"""


def take_pictures(page: Any, stem: str, folder: Path) -> None:
    """Pictures of the whole notebook, from its beginning, each at most PART high."""
    for old in folder.glob(f"{stem}*.png"):
        old.unlink()
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")  # more room
    page.set_viewport_size({"width": WIDTH, "height": PART})
    panel = page.locator(".jp-WindowedPanel-outer").first
    panel.evaluate("e => { e.scrollTop = 0; }")
    part, seen = 1, 0
    while True:
        page.wait_for_timeout(1500)
        name = f"{stem}.png" if part == 1 else f"{stem}_{part}.png"
        top, view, end = panel.evaluate(_PLACE)
        picture = Image.open(io.BytesIO(page.screenshot(clip=panel.bounding_box())))
        # Pixels seen on the picture before are cut off, and the empty space that follows the last cell.
        picture.crop((0, seen - top, picture.width, min(view, end - top))).save(folder / name)
        seen = top + view
        if seen >= end:
            return
        panel.evaluate("(e, y) => { e.scrollTop = y; }", seen)
        part += 1


def visit(browser: Any, address: str, path: Path, pictures: Path) -> list[str]:
    """Open a notebook, run it, use its controls; what went wrong, one line each."""
    faults: list[str] = []
    host = address.split("/lab")[0]
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda m: faults.append(f"console: {m.text}") if _is_fault(m) else None)
    page.on("pageerror", lambda e: faults.append(f"page: {e}"))
    page.on("requestfailed", lambda r: faults.append(f"request failed: {r.url} {r.failure}"))
    page.on("response", lambda r: faults.append(f"request: {r.status} {r.url}") if r.status >= 400 else None)
    page.on("request", lambda r: faults.append(f"asks another machine: {r.url}") if _is_foreign(r.url, host) else None)
    try:
        page.goto(address.format(name=path.name))
        if path.name[:2] in BEFORE:
            BEFORE[path.name[:2]](page)
        run_all(page)
        if path.name[:2] in AFTER:
            AFTER[path.name[:2]](page)
        if page.get_by_text(re.compile("Error (displaying|creating) widget|Loading widget")).count():
            faults.append("a widget cannot be drawn")
        state = page.evaluate(_STATE)
        faults += [f"error output: {e}" for e in state["errors"]]
    except Exception as e:  # the pictures of what was there say more than the traceback
        faults.append(f"{type(e).__name__}: {str(e)[:600]}")
    try:
        take_pictures(page, path.stem, pictures)
        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")  # its memory
    except Exception as e:
        faults.append(f"no picture: {type(e).__name__}: {str(e)[:600]}")
    page.close(run_before_unload=False)
    return [f for f in faults if not any(re.search(h, f) for h in HARMLESS)]


def look_at_slides(browser: Any, folder: Path, pictures: Path) -> list[str]:
    """Slides and page of the committed notebook 04, from a file: keys move, notes appear, nothing is asked for."""
    from rapo_lib import pages

    faults: list[str] = []
    copy = REFERENCE / "notebooks" / "04_retrieval_aware_objective.ipynb"
    nb = nbformat.read(copy, as_version=4)
    (folder / "slides.html").write_text(pages.slides_html(nb, copy.stem), encoding="utf-8")
    (folder / "page.html").write_text(pages.page_html(nb, copy.stem, [copy.stem]), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda m: faults.append(f"console: {m.text}"))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else faults.append(f"asks: {r.url}"))
    page.goto((folder / "page.html").as_uri())
    page.screenshot(path=pictures / "page_04.png")
    page.goto((folder / "slides.html").as_uri())
    number, shown = page.locator("#number"), page.locator(".slide:visible")
    for key, expected in (
        ("ArrowRight", "2 /"),
        (" ", "3 /"),
        ("ArrowLeft", "2 /"),
        ("Home", "1 /"),
        ("PageDown", "2 /"),
    ):
        page.keyboard.press(key)
        if not (number.text_content() or "").startswith(expected) or shown.count() != 1:
            faults.append(f"slides: after {key!r} the number is {number.text_content()}, expected {expected}")
    page.keyboard.press("n")
    if not page.locator(".slide.now .notes").is_visible():
        faults.append("slides: the key n shows no notes")
    page.screenshot(path=pictures / "slides_04.png")
    page.close()
    return faults


def _is_fault(message: Any) -> bool:
    """Console errors; what a request's own line tells already is not told twice."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def _is_foreign(url: str, host: str) -> bool:
    return not url.startswith((host, host.replace("http", "ws", 1), "data:", "blob:", "about:"))


# ---------------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """0, 1 when a notebook failed, or SKIPPED."""
    parser = argparse.ArgumentParser(prog="./run_all.sh browser", description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", help=f"notebooks by number (default: {' '.join(DEFAULT)})")
    parser.add_argument("--all", action="store_true", help="every notebook")
    a = parser.parse_args(arguments)
    try:
        chosen = select_notebooks([] if a.all else a.numbers or DEFAULT)
    except ValueError as e:
        parser.error(str(e))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and its kernels end with us
    chromium = find_chromium()
    if chromium is None:
        print("skipped: no Chromium here (chromium, google-chrome, or RAPO_CHROMIUM), and none could be installed")
        return SKIPPED
    return _visit_all(chromium, chosen, results_folder() / "browser")


def _visit_all(chromium: str, chosen: Sequence[Path], pictures: Path) -> int:
    from playwright.sync_api import sync_playwright

    bad: list[str] = []
    flags = ["--disable-gpu", "--disable-dev-shm-usage"] + (["--no-sandbox"] if os.geteuid() == 0 else [])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp, sync_playwright() as p:
        folder = Path(tmp)
        for path in chosen:
            smoke_copy(path, folder / "notebooks")
        browser = p.chromium.launch(executable_path=chromium, args=flags)
        pictures.mkdir(parents=True, exist_ok=True)
        _told("slides and pages", look_at_slides(browser, folder, pictures), bad)
        with jupyter(folder) as address:
            for path in chosen:
                began = time.monotonic()
                faults = visit(browser, address, path, pictures)
                _told(path.stem, faults, bad, f" in {time.monotonic() - began:.0f} s")
        browser.close()
    n = len(chosen) + 1
    print(f"{n - len(bad)} of {n} passed (slides, and {len(chosen)} notebooks); look at the screenshots in {pictures}")
    return int(bool(bad))


def _told(name: str, faults: Sequence[str], bad: list[str], after: str = "") -> None:
    print(f"{name:32} {'failed' if faults else 'passed'}{after}", flush=True)
    for fault in dict.fromkeys(faults):
        print(f"    {fault}", flush=True)
    bad += [name] if faults else []


if __name__ == "__main__":
    sys.exit(main())
