"""Notebooks in a real browser: `./run_all.sh browser [03 05 ..]`.

Headless Chromium opens JupyterLab on copies of the notebooks (profile smoke), runs all cells, and looks for error
outputs, console errors and failed requests. In notebook 03 it plays a rollout by hand, in notebook 05 it walks through
the explorer. Screenshots go to results/browser; look at them. Where no Chromium can be had, it ends with status 77.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "results" / "browser"
#: Notebooks that are opened when none is named: the two with widgets.
DEFAULT = ("03", "05")
SKIPPED = 77
#: Console messages that are no fault of a notebook, with the reason.
HARMLESS = {
    "favicon": "the page's icon",
    "responded with a status of 404": "JupyterLab looks for settings that nobody made",
}
MINUTES = 12


def find_chromium() -> str | None:
    """A Chromium on this machine; on Debian, as root, it is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("RAPO_CHROMIUM") or next((p for n in names if (p := shutil.which(n))), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing chromium with apt-get ...", flush=True)
        install = "apt-get install -y -qq chromium || (apt-get update -qq && apt-get install -y -qq chromium)"
        subprocess.run(["sh", "-c", install], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        found = shutil.which("chromium")
    return found


@contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """JupyterLab over a folder, with settings of its own; its address with the token."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token, home = "browser-test", folder / ".home"
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data")}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "spaces")}
    env |= {"IPYTHONDIR": str(home / "ipython"), "RAPO_RESULTS": str(folder / "results"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1"]
    command += [
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.news_url=None",
        "--LabApp.expose_app_in_browser=True",
    ]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = open(folder / "server.log", "w", encoding="utf-8")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api?token={token}", timeout=2).read()
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise RuntimeError(
                "JupyterLab did not start:\n" + (folder / "server.log").read_text(encoding="utf-8")[-2000:]
            )
        yield f"{address}/lab/tree/{{name}}?token={token}&reset"
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)
        log.close()


def smoke_copy(path: Path, folder: Path) -> Path:
    """A copy with the profile smoke in its parameters cell."""
    nb = nbformat.read(path, as_version=4)
    cell = next(c for c in nb.cells if "parameters" in c.metadata.get("tags", ()))
    cell.source = "\n".join(
        'profile = "smoke"' if line.startswith("profile =") else line for line in cell.source.splitlines()
    )
    nbformat.write(nb, folder / path.name)
    return folder / path.name


def run_all(page, name: str) -> None:
    """Run > Run All Cells, and wait for the last cell."""
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    page.wait_for_selector('[data-status="idle"], .jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=120_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
    deadline = time.monotonic() + 60 * MINUTES
    # JupyterLab draws cells when they come into view; the model knows all of them.
    state = """() => {
        const panel = window.jupyterapp?.shell?.currentWidget;
        const cells = panel?.content?.model?.cells; if (!cells) return null;
        let todo = 0, errors = [];
        for (const cell of cells) {
            if (cell.type !== 'code' || !cell.sharedModel.source.trim()) continue;
            if (cell.executionCount === null) todo += 1;
            const data = cell.sharedModel.toJSON();
            for (const o of data.outputs || []) if (o.output_type === 'error') errors.push(o.ename + ': ' + o.evalue);
        }
        return {todo, errors};
    }"""
    while time.monotonic() < deadline:
        found = page.evaluate(state)
        if found and found["errors"]:
            raise AssertionError(f"{name}: {found['errors'][0]}")
        if found and found["todo"] == 0:
            return
        time.sleep(1)
    raise AssertionError(f"{name}: not done after {MINUTES} minutes; {found}")


def play_by_hand(page) -> None:
    """Notebook 03: begin a rollout, peek, and see a retrieved step; a wrong question gets a kind answer."""
    begin = page.get_by_role("button", name="begin", exact=True)
    begin.scroll_into_view_if_needed()
    box = page.get_by_placeholder("or type one")
    box.fill("hello there")
    box.press("Enter")
    begin.click()
    page.get_by_text("This world does not know").wait_for(timeout=30_000)
    texts = "() => Array.from(document.querySelectorAll('select option')).map(o => o.textContent)"
    question = next(t for t in page.evaluate(texts) if "what is" in t)
    box.fill(question.split(": ", 1)[1])
    box.press("Enter")
    begin.click()
    page.get_by_text("notes that lie nearest now").wait_for(timeout=60_000)
    page.get_by_role("button", name="peek at a note").click()
    page.get_by_text("2. retrieved step").wait_for(timeout=60_000)


def walk_through(page) -> None:
    """Notebook 05: search, step by button and by key, and see the marked card move."""
    search = page.get_by_placeholder("hybrid, on-policy")
    search.scroll_into_view_if_needed()
    search.fill("hybrid")
    search.press("Enter")
    page.locator("text=/[1-9][0-9]* of [0-9]+ rollouts/").first.wait_for(timeout=30_000)
    marked = lambda: page.evaluate(  # noqa: E731
        "() => Array.from(document.querySelectorAll('div')).filter(d => d.style.borderWidth === '3px')"
        ".map(d => d.textContent.slice(0, 2)).join()"
    )
    page.get_by_role("button", name="forward", exact=True).click()
    page.wait_for_timeout(800)
    first = marked()
    handle = page.locator(".widget-slider .noUi-handle, .widget-hslider .noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    page.wait_for_timeout(800)
    assert first.startswith("2.") and marked() != first, (first, marked())


AFTER = {"03": play_by_hand, "05": walk_through}


def one(browser, address: str, path: Path) -> list[str]:
    """Run a notebook; what went wrong."""
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.on("console", lambda m: faults.append(f"console: {m.text}") if m.type == "error" else None)
    page.on("requestfailed", lambda r: faults.append(f"request: {r.url} {r.failure}"))
    number = path.name[:2]
    try:
        page.goto(address.format(name=path.name))
        run_all(page, path.name)
        if number in AFTER:
            AFTER[number](page)
    except Exception as e:  # a screenshot of what was there is worth more than the traceback alone
        faults.append(f"{type(e).__name__}: {str(e)[:600]}")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{path.stem}.png")
    page.close()
    return [f for f in faults if not any(h in f for h in HARMLESS)]


def main(numbers: list[str]) -> int:
    chromium = find_chromium()
    if chromium is None:
        print("skipped: no Chromium here (chromium, google-chrome, or RAPO_CHROMIUM), and none could be installed")
        return SKIPPED
    from playwright.sync_api import sync_playwright

    chosen = [p for p in sorted((ROOT / "notebooks").glob("*.ipynb")) if p.name[:2] in (numbers or DEFAULT)]
    if not chosen:
        print(f"no notebook begins with {', '.join(numbers)}")
        return 2
    bad = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp, sync_playwright() as p:
        folder = Path(tmp)
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = p.chromium.launch(executable_path=chromium, args=[*flags, "--disable-gpu", "--disable-dev-shm-usage"])
        with jupyter(folder) as address:
            for path in chosen:
                began = time.monotonic()
                faults = one(browser, address, smoke_copy(path, folder))
                print(
                    f"{path.stem:28} {'failed' if faults else 'passed'} in {time.monotonic() - began:.0f} s", flush=True
                )
                for fault in faults:
                    print(f"    {fault}")
                bad += bool(faults)
        browser.close()
    print(json.dumps({"notebooks": len(chosen), "failed": bad, "screenshots": str(SHOTS.relative_to(ROOT))}))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
