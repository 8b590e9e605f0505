"""The sandbox: hostile code ends with a named result, the next call is clean, no process is left."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from rapo_lib.bench import HOSTILE
from rapo_lib.config import ROOT
from rapo_lib.sandbox import Sandbox, SandboxLimits
from rapo_lib.workers import Worker

#: What each hostile snippet must come to; whatever is not here is an error raised inside the sandbox.
EXPECTED = {
    "endless loop": "time",
    "endless loop that catches": "time",
    "huge power": "memory",
    "memory bomb": "memory",
    "long string": "memory",
    "endless print": "output",
    "deep recursion": "recursion",
    "deep nesting": "syntax",
    "lone surrogate": "syntax",
    "read a file": "refused",
    "list a folder": "refused",
    "write a file": "refused",
    "environment": "refused",
    "socket": "refused",
    "subprocess": "refused",
    "ctypes": "refused",
    "regex bomb": "ok",
    "sleep": "ok",
    "leave state": "ok",
    "forged reply": "ok",
}
LIMITS = SandboxLimits(time_sec=0.3)


@pytest.fixture(scope="module")
def box():
    box = Sandbox(LIMITS)
    yield box
    box.close()


def text(box, code, prelude=""):
    return box.run([code], prelude)[0].text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_ends_with_a_named_result_and_the_next_call_is_clean(box, name):
    result = box.run([HOSTILE[name]])[0]
    assert result.outcome == EXPECTED.get(name, "exception")
    assert result.ok or "error: " in result.text
    assert text(box, f"len({name!r})") == str(len(name))


def test_no_file_is_written_and_no_state_is_left(box):
    assert not os.path.exists("/tmp/rapo_was_here")
    box.run(["leaked = 1"])
    assert "NameError" in text(box, "leaked + 1")
    assert "NameError" in text(box, "prelude_name", "other_name = 1")


def test_results_read_like_python(box):
    codes = ["42 + 17", "7 / 2", "print(3)", "print('a')\n5", "'ab'", "x = 1", "1 / 0", "[1, 2]", "print('a'); 1 / 0"]
    want = ["59", "3.5", "3", "a", "'ab'", "no output", "error: ZeroDivisionError: division by zero", "[1, 2]"]
    got = [r.text for r in box.run(codes)]
    assert got[:-1] == want
    assert got[-1] == "a\nerror: ZeroDivisionError: division by zero"


def test_results_are_a_function_of_prelude_and_code():
    code = "import random, time\nfrom datetime import datetime\n(random.random(), time.time(), str(datetime.now()))"
    first, second = Sandbox(LIMITS), Sandbox(LIMITS)
    assert text(first, code) == text(second, code)
    assert text(first, "convert(4)", "def convert(v): return v * 2") == "8"
    assert text(first, "convert(4)", "def convert(v): return v * 3") == "12"
    pid = first._worker.pid
    assert text(first, code) == text(first, code) and first._worker.pid == pid
    first.close(), second.close()


def test_a_failing_prelude_is_the_caller_s_fault(box):
    with pytest.raises(ValueError, match="prelude .* fails: ZeroDivisionError"):
        box.run(["1"], "1 / 0")


def test_long_output_and_long_code_are_named(box):
    result = box.run(["print('ab' * 2500)"])[0]
    assert result.outcome == "output" and result.text.endswith("error: output has more than 4000 characters")
    assert box.run(["1 + " * 10_000 + "1"])[0].outcome == "refused"


def test_a_killed_worker_is_replaced_and_nothing_of_it_is_cached():
    box = Sandbox(LIMITS)
    assert text(box, "1 + 1") == "2"
    (interpreter,) = psutil.Process(box._worker.pid).children()
    interpreter.kill()
    assert box.run(["2 + 2"])[0].outcome in ("crash", "ok")  # ok when its death was seen before the call
    assert text(box, "2 + 2") == "4"
    worker = psutil.Process(box._worker.pid)
    worker.kill()
    worker.wait(5)
    assert text(box, "3 + 3") == "6"
    box.close()


def test_threads_share_one_worker(box):
    got = {}

    def run(i):
        got[i] = [r.text for r in box.run([f"{i} * {j}" for j in range(20)])]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert got == {i: [str(i * j) for j in range(20)] for i in range(6)}


def test_it_runs_inside_a_running_event_loop(box):
    async def cell():
        return text(box, "5 * 5")

    assert asyncio.run(cell()) == "25"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_starts_its_own_worker_and_the_parent_keeps_its_own(box):
    assert text(box, "10 + 1") == "11"
    pid = box._worker.pid
    script = textwrap.dedent("""
        import os, sys
        from rapo_lib.sandbox import Sandbox
        box = Sandbox()
        assert box.run(["1 + 1"])[0].text == "2"
        mine = box._worker.pid
        child = os.fork()
        if child == 0:
            ok = box.run(["2 + 2"])[0].text == "4" and box._worker.pid != mine
            box.close()
            sys.exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert box.run(["3 + 3"])[0].text == "6" and box._worker.pid == mine
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert box._worker.pid == pid


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="POSIX only")
@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_the_one_that_started_it(end):
    script = f"""
import os, sys, psutil
from rapo_lib.sandbox import Sandbox
box = Sandbox()
box.run(["1"])
print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True, encoding="utf-8"
    )
    pids = [int(p) for p in done.stdout.split()]
    assert len(pids) >= 2
    for _ in range(100):
        if not any(map(_alive, pids)):
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {[p for p in pids if _alive(p)]}")


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_environment_s_secrets_do_not_reach_the_worker(monkeypatch):
    monkeypatch.setenv("RAPO_SECRET_TOKEN", "hush")
    box = Sandbox(LIMITS)
    box.run(["1"])
    assert "RAPO_SECRET_TOKEN" not in psutil.Process(box._worker.pid).environ()
    box.close()


def test_an_interpreter_that_is_not_there_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setenv("MONTY_BIN", "/nonexistent/monty")
    box = Sandbox(LIMITS)
    with pytest.raises(RuntimeError, match="cannot be started.*nonexistent"):
        box.run(["1"])
    box.close()


def test_a_worker_module_that_cannot_start_shows_its_error():
    worker = Worker("rapo_lib.no_such_module", start_sec=20)
    with pytest.raises(RuntimeError, match="did not start.*no_such_module"):
        worker.ask([1], 1)
