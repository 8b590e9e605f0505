"""The sandbox: hostile code ends with a named result, the next call is clean, no process and no file is left.

Where the tests run as root, hostile code runs as nobody: root has rights that an ordinary user lacks, and is exempt
from a limit that others have.
"""

import asyncio
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from rapo_lib import barrier, rewards, sandbox
from rapo_lib.config import ROOT
from rapo_lib.hostile import HOSTILE
from rapo_lib.sandbox import Sandbox, SandboxLimits
from rapo_lib.tools import PythonTool
from rapo_lib.workers import Worker

LIMITS = SandboxLimits(time_sec=0.3)
#: What a busy machine may add to a limit; code that is not stopped would take hours.
SLACK_SEC = 30
LINUX = sys.platform == "linux"
IS_ROOT = hasattr(os, "getuid") and os.getuid() == 0


@pytest.fixture(scope="module")
def box():
    box = Sandbox(LIMITS)
    yield box
    box.close()


def text(box, code, prelude=""):
    return box.run([code], prelude)[0].text


# ---------------------------------------------------------------------------------------------- hostile code

#: Everything that a snippet could have patched for the next call, and what it must be.
CLEAN = """
import json, math, random
from decimal import Decimal
state = []
try:
    state.append(leaked)
except NameError:
    state.append('gone')
try:
    state.append(f)
except NameError:
    state.append('gone')
print(state, math.pi, len('abc'), sum([1, 2]), sorted([2, 1]), abs(-1), int('7'), json.loads('[1]'))
print(random.random(), Decimal(1) / 7, isinstance(ValueError(), Exception), ZeroDivisionError('x'))
"""
IS_CLEAN = """['gone', 'gone'] 3.141592653589793 3 3 [1, 2] 1 7 [1]
0.8444218515250481 0.1428571428571428571428571429 True x"""


class Arena:
    """Two sandboxes in an empty folder: short limits for what must run into them, long ones for what must not."""

    def __init__(self, folder, worker):
        self.folder = folder
        self.boxes = {sec: Sandbox(SandboxLimits(time_sec=sec)) for sec in (0.3, 10.0)}
        for box in self.boxes.values():
            box._worker = Worker(worker)
            box.run(["0"])  # warm

    def box(self, outcome):
        return self.boxes[0.3 if outcome in ("time", "output") else 10.0]

    def files(self):
        return {str(p) for p in self.folder.rglob("*")} | {p for p in ("/tmp/rapo_was_here",) if os.path.exists(p)}

    def strangers(self):
        """Processes below this one that are neither a relay nor its one interpreter."""
        found = {p.pid for p in psutil.Process().children(recursive=True)}
        for box in self.boxes.values():
            relay = psutil.Process(box._worker.pid)
            _until(lambda relay=relay: len(_interpreters(relay)) <= 1)  # one killed a moment ago may still be dying
            found -= {relay.pid, *_interpreters(relay)}
        return {pid for pid in found if _alive(pid)}


@pytest.fixture(scope="module")
def arena():
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to nobody
    folder.chmod(0o777)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as programs:
        patch.chdir(folder)
        patch.setenv("TMPDIR", str(folder))
        if IS_ROOT:
            patch.setenv("MONTY_BIN", _for_nobody(programs))
        arena = Arena(folder, "tests.sandbox_as_nobody")
        yield arena
        for box in arena.boxes.values():
            box.close()
    folder.rmdir()  # it is still empty


def _for_nobody(folder):
    """A copy of the interpreter where nobody can start it: this environment may be closed to others."""
    program = shutil.copy(shutil.which("monty", path=os.path.dirname(sys.executable)), folder)
    os.chmod(folder, 0o755)
    try:
        subprocess.run([program, "--version"], user=65534, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"nobody cannot start programs in {folder}: {e}")
    return program


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_ends_in_time_with_a_named_result_and_leaves_nothing(arena, name):
    code, outcome = HOSTILE[name]
    box = arena.box(outcome)
    strangers, files = arena.strangers(), arena.files()
    began = time.monotonic()
    (result,) = box.run([code])
    took = time.monotonic() - began
    assert result.outcome == outcome, result.text[:200]
    assert result.ok or "error: " in result.text
    assert len(result.text) < 4100
    assert took < box.limits.time_sec + SLACK_SEC
    assert text(box, f"{CLEAN}# {name}") == IS_CLEAN
    assert arena.strangers() == strangers and arena.files() == files


@pytest.mark.parametrize(
    "patch",
    [
        "leaked = 1",
        "def f(): pass",
        "len = lambda x: 0",
        "def sum(x): return 7",
        "def sorted(x): return x",
        "abs = str",
        "int = float",
        "import random; random.random()",
        "from decimal import getcontext; getcontext().prec = 2",
    ],
)
def test_the_look_at_the_next_call_sees_what_a_patch_would_do(box, patch):
    assert text(box, CLEAN) == IS_CLEAN
    assert text(box, CLEAN, patch) != IS_CLEAN


def test_hostile_code_in_one_batch_spoils_no_neighbour(arena):
    box = arena.boxes[0.3]
    codes = ["'first'", "while True: pass", "print('x' * 10**6)", "[0] * 10**12", "exit()", "'last'"]
    got = box.run([f"{code} # batch" for code in codes])
    assert [r.outcome for r in got] == ["ok", "time", "output", "memory", "exception", "ok"]
    assert (got[0].text, got[-1].text) == ("'first'", "'last'")


def test_there_are_many_hostile_snippets_and_each_is_another_one():
    assert len(HOSTILE) >= 200 and len({code for code, _ in HOSTILE.values()}) == len(HOSTILE)


# --------------------------------------------------------------------------------------------- useful code


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
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, encoding="utf-8")
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
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, encoding="utf-8")
    pids = [int(p) for p in done.stdout.split()]
    assert len(pids) >= 2
    _until(lambda: not any(map(_alive, pids)))


def _until(holds, sec=30):
    deadline = time.monotonic() + sec
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {sec} s"
        time.sleep(0.05)


def _interpreters(relay):
    return [p.pid for p in relay.children() if _alive(p.pid, "monty")]


def _alive(pid, name=""):
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.name().startswith(name)
    except psutil.NoSuchProcess:
        return False


# ----------------------------------------------------------------------------------------------- the barrier

FILES, TCP = "files out of reach (Landlock)", "no TCP (Landlock)"
SECCOMP = "no sockets, no look into other processes (seccomp)"
#: What native code tries, the parts of which one must hold, and what must come of it (a value or an exception).
ATTACKS = {
    "read a public file": ("result = open('/etc/passwd').read(4)", (FILES,), "PermissionError"),
    "read a secret": ("result = open({secret!r}).read()", (FILES,), "PermissionError"),
    "read the environment it began with": ("result = open('/proc/self/environ').read(1)", (FILES,), "PermissionError"),
    "list a folder": ("import os\nresult = len(os.listdir('/')) > 0", (FILES,), "PermissionError"),
    "make a file": (
        "import os\nos.close(os.open({new!r}, os.O_CREAT | os.O_WRONLY))\nresult = 1",
        (FILES,),
        "PermissionError",
    ),
    "make a folder": ("import os\nos.mkdir({new!r})\nresult = os.rmdir({new!r})", (FILES,), "PermissionError"),
    "delete a file": ("import os\nresult = os.remove({victim!r})", (FILES,), "PermissionError"),
    "start a program": (
        "import os\nresult = os.spawnv(os.P_WAIT, '/bin/true', ['true'])",
        (FILES, "no new process"),
        ("BlockingIOError", "127"),
    ),
    "become a program": ("import os\nresult = os.execv('/bin/true', ['true'])", (FILES,), "PermissionError"),
    "write to an open file": ("import os\nresult = os.write(2, b'x')", ("no file written",), "OSError"),
    "write in its folder": (
        "result = open('x', 'w').close()",
        ("working folder empty",),
        ("FileNotFoundError", "PermissionError"),
    ),
    "see its folder": ("import os\nresult = os.getcwd()", ("working folder empty",), "FileNotFoundError"),
    "environment": ("import os\nresult = os.environ.get('RAPO_SECRET_TOKEN')", ("environment empty",), "None"),
    "connect to a server": (
        "import socket\nresult = socket.create_connection(('127.0.0.1', {port}), 5).close()",
        (TCP, SECCOMP),
        "PermissionError",
    ),
    "listen": (
        "import socket\nresult = socket.create_server(('127.0.0.1', 0)).close()",
        (TCP, SECCOMP),
        "PermissionError",
    ),
    "send a datagram": (
        "import socket\nresult = socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
        (SECCOMP,),
        "PermissionError",
    ),
    "new namespaces": (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nresult = c.unshare(0), ctypes.get_errno()",
        (SECCOMP,),
        "(-1, 1)",
    ),
    "other processes' memory": (
        "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
        "result = c.process_vm_readv(os.getpid(), None, 0, None, 0, 0), ctypes.get_errno()",
        (SECCOMP,),
        "(-1, 1)",
    ),
    "signal a process of the same user": (
        "import os\nresult = os.kill({bystander}, 0)",
        ("no signals to the outside (Landlock)",),
        "PermissionError",
    ),
    "fork 200 children": (
        "import os\nresult = 0\nfor _ in range(200):\n  pid = os.fork()\n  if pid == 0: os._exit(0)\n"
        "  os.waitpid(pid, 0)\n  result += 1",
        ("no new process",),
        "BlockingIOError",
    ),
    "start a thread": (
        "import threading\nt = threading.Thread(target=str)\nt.start()\nresult = t.join()",
        ("no new process",),
        "RuntimeError",
    ),
    "take 4 GB": ("result = len(bytearray(4 << 30))", ("memory limited",), "MemoryError"),
    "open 200 files": ("import os\nresult = len([os.dup(0) for _ in range(200)])", ("open files limited",), "OSError"),
    "raise a limit": (
        "import resource as r\nhard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (hard + 1, hard + 1))\nresult = 'raised'",
        ("open files limited",),
        "ValueError",
    ),
    "gain privileges": ("import ctypes\nresult = ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)", ("no new privileges",), "1"),
}


@pytest.fixture(scope="module")
def probe():
    """Native Python through the same launch as the interpreter's relay, with a secret in the caller's environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAPO_SECRET_TOKEN", "hush")
        worker = Worker("tests.native_probe")
        worker.start()
        yield worker
        worker.close()


@pytest.fixture(scope="module")
def targets():
    """Files that everyone may read and delete, a server that listens, a process of the same user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    for name in ("secret", "victim"):
        (folder / name).write_text("hush", encoding="utf-8")
        (folder / name).chmod(0o666)
    user = {"user": 65534} if IS_ROOT else {}
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "600"], **user) as bystander:
        names = {name: str(folder / name) for name in ("secret", "victim", "new")}
        yield names | {"port": server.getsockname()[1], "bystander": bystander.pid}
        bystander.kill()
    shutil.rmtree(folder)


@pytest.mark.skipif(os.name != "posix", reason="no barrier of this kind here")
@pytest.mark.parametrize("name", ATTACKS)
def test_native_code_behind_the_barrier_finds_little(probe, targets, name):
    code, parts, blocked = ATTACKS[name]
    if not set(parts) & set(probe.barrier):
        pytest.skip(f"this machine has none of: {', '.join(parts)}")
    code = code.format(**targets)
    (reply,) = probe.ask([code], 20)
    assert reply in (blocked if isinstance(blocked, tuple) else (blocked,))
    Path(targets["victim"]).touch()


@pytest.mark.skipif(os.name != "posix", reason="no barrier of this kind here")
@pytest.mark.parametrize("name", sorted(set(ATTACKS) - {"become a program", "take 4 GB", "raise a limit"}))
def test_the_same_native_code_without_the_barrier_succeeds(targets, name):
    code, _, blocked = ATTACKS[name]
    script = "import sys\nfrom tests.native_probe import drop_root, run\ndrop_root()\nprint(run(sys.argv[1]))"
    argv = [sys.executable, "-c", script, code.format(**targets)]
    env = os.environ | {"RAPO_SECRET_TOKEN": "hush", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd="/tmp", env=env, capture_output=True, encoding="utf-8", timeout=60, check=True)
    assert done.stdout.strip() not in (blocked if isinstance(blocked, tuple) else (blocked,))


def test_the_environment_s_secrets_do_not_reach_the_worker_at_all(probe):
    assert "RAPO_SECRET_TOKEN" in os.environ
    assert "RAPO_SECRET_TOKEN" not in psutil.Process(probe.pid).environ()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_the_interpreter_runs_behind_the_barrier(arena):
    box = arena.boxes[10.0]
    assert text(box, "1 + 1 # alive") == "2"
    (interpreter,) = psutil.Process(box._worker.pid).children()
    folder = Path(f"/proc/{interpreter.pid}")
    limits = {
        row[:26].strip(): row[26:].split()[:2] for row in (folder / "limits").read_text(encoding="utf-8").splitlines()
    }
    assert limits["Max processes"] == limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
    assert limits["Max cpu time"] == ["600", "600"] and limits["Max open files"] == ["64", "64"]
    assert int(limits["Max address space"][1]) < 2 << 30
    status = dict(
        row.split(":\t", 1) for row in (folder / "status").read_text(encoding="utf-8").splitlines() if ":\t" in row
    )
    assert status["CapEff"].strip("0") == "" and status["Uid"].split()[0] != "0"
    for part, row, value in (("no new privileges", "NoNewPrivs", "1"), (SECCOMP, "Seccomp", "2")):
        assert status[row] == value or part not in box.barrier()
    assert interpreter.environ() == {}
    assert os.readlink(folder / "cwd").endswith(" (deleted)")


@pytest.mark.skipif(not (LINUX and IS_ROOT), reason="root has capabilities, others have none")
def test_the_interpreter_of_root_has_no_capabilities(box):
    assert text(box, "2 + 1 # alive") == "3"
    (interpreter,) = psutil.Process(box._worker.pid).children()
    status = Path(f"/proc/{interpreter.pid}/status").read_text(encoding="utf-8")
    assert re.findall(r"Cap(?:Prm|Eff|Bnd):\t(\w+)", status) == ["0" * 16] * 3


def test_the_barrier_names_its_parts(arena, monkeypatch):
    named = arena.boxes[10.0].barrier()
    assert named[:3] == list(sandbox.MANDATORY) and len(named) == len(set(named))
    monkeypatch.setattr(sandbox, "shared_sandbox", lambda: arena.boxes[10.0])
    assert sandbox.barrier() == named
    if LINUX:
        assert {"memory limited", "no file written", "environment empty", "no new process"} <= set(named)


@pytest.mark.skipif(not LINUX, reason="Linux only")
def test_every_part_that_this_kernel_offers_is_in_use(probe):
    try:
        version = barrier._landlock_version()
    except OSError:
        version = 0
    offered = {FILES} if version >= 1 else set()
    offered |= {TCP} if version >= 4 else set()
    offered |= {"no signals to the outside (Landlock)"} if version >= 6 else set()
    offered |= {SECCOMP} if platform.machine() in barrier._ARCHITECTURES else set()
    assert offered <= set(probe.barrier)


def test_cpu_seconds_end_a_worker_that_nobody_is_left_to_kill():
    script = "from rapo_lib.barrier import renew_cpu\nrenew_cpu(0.5)\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60)
    assert done.returncode < 0


@pytest.mark.parametrize("limits", [{"time_sec": 0}, {"time_sec": 61}, {"memory_bytes": 0}, {"memory_bytes": 1 << 30}])
def test_limits_that_the_process_limits_cannot_hold_are_refused(limits):
    (name, value) = next(iter(limits.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}; more than 0 and at most"):
        SandboxLimits(**limits)


def test_an_interpreter_process_is_replaced_before_its_cpu_limit_and_no_result_changes():
    box = Sandbox(SandboxLimits(time_sec=60))  # 600 s are enough for four calls of at most 121 s
    pids = []
    for i in range(12):
        assert text(box, f"{i} + 1") == str(i + 1)
        pids += [p.pid for p in psutil.Process(box._worker.pid).children()]
    box.close()
    assert 3 <= len(set(pids)) <= 4


def test_sets_come_out_in_the_same_order_from_every_worker():
    boxes = [Sandbox(LIMITS) for _ in range(3)]
    assert len({text(box, "{'a', 'b', 'c', 'dd', 'ee', 'fff'}") for box in boxes}) == 1
    [box.close() for box in boxes]


# ------------------------------------------------------------------------------------- it refuses to start

FAKE = """
class MontyError(Exception):
    def display(self, form): return str(self)
class MontyCrashedError(MontyError): pass
class CollectString:
    def __init__(self, max_bytes): self.output = ""
class Monty:
    worker_pid = None
    def __init__(self, **_): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def checkout(self, **_): return self
    def feed_run(self, code, print_callback=None):
        if code == {hangs!r}:
            while True: pass
        value = ({right!r} | {wrong!r})[code]
        if isinstance(value, str): raise MontyError(value)
        return value
"""
RIGHT = {
    "while 1: pass": "TimeoutError: feed time limit exceeded",
    "6 * 7": 42,
    "open('/etc/passwd').read()": "PermissionError: no",
    "import subprocess": "ModuleNotFoundError: no",
    "import os\nos.environ": "RuntimeError: not supported in this environment",
    "import os\nos.system('exit 0')": "AttributeError: no",
    "[0] * 10**10": "MemoryError: memory limit exceeded",
    "print('x' * 100_000)": "MemoryError: memory limit exceeded: 100001 > 16000 bytes",
    "def f(): return f()\nf()": "RecursionError: no",
}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put another interpreter in place of pydantic-monty; the sandbox in front of it."""
    boxes = []

    def install(source):
        (tmp_path / "pydantic_monty.py").write_text(source, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        boxes.append(Sandbox(LIMITS))
        return boxes[0]

    yield install
    boxes[0].close()


def test_an_interpreter_that_answers_rightly_is_used(fake):
    box = fake(FAKE.format(hangs=None, right=RIGHT, wrong={}))
    assert list(RIGHT) == list(sandbox._CHECKS)
    assert box.barrier()[:3] == list(sandbox.MANDATORY)
    assert text(box, "6 * 7") == "42"


@pytest.mark.parametrize("code", RIGHT)
def test_an_interpreter_that_answers_wrongly_is_refused(fake, code):
    box = fake(FAKE.format(hangs=None, right=RIGHT, wrong={code: 43}))
    with pytest.raises(RuntimeError, match=f"no sandbox: {re.escape(repr(code))} must .* came to 'ok' with '43'"):
        box.run(["1"])
    with pytest.raises(RuntimeError, match="python cannot work: the interpreter is no sandbox"):
        PythonTool(sandbox=box).check()
    assert box._worker.pid is None


def test_an_interpreter_that_hangs_is_refused(fake):
    box = fake(FAKE.format(hangs="while 1: pass", right=RIGHT, wrong={}))
    box._worker.start_sec = 2
    with pytest.raises(RuntimeError, match="python cannot work: rapo_lib.sandbox did not start within 2 s"):
        PythonTool(sandbox=box).check()


def test_a_missing_package_is_named(fake):
    box = fake("raise ImportError('No module named pydantic_monty')")
    with pytest.raises(
        RuntimeError, match="python cannot work: the interpreter cannot be started: No module.*pip install"
    ):
        PythonTool(sandbox=box).check()


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


# -------------------------------------------------------------------------------- hostile LaTeX (rewards.py)

MATH = {
    "tower of powers": "9^{9^{9^{9}}}",
    "factorial": "(10^{8})!",
    "garbage": "\\frac{" * 333,
    "nested roots": ("\\sqrt{x^{2}+" * 200)[:2000],
    "closing braces": "}{" * 1000,
    "opening braces": "{" * 2000,
    "brackets": "(" * 2000,
    "long sum": "\\sum_{n=1}^{10^{9}} \\frac{1}{n}",
    "big polynomial": "(x+y+z+w+1)^{200}",
    "many numbers": "\\{" + ",".join(map(str, range(400))) + "\\}",
    "chain of powers": "^".join("9" * 500),
    "deep fraction": "\\frac{1}{1+" * 120 + "1" + "}" * 120,
    "digits": "9" * 2000,
    "NUL": "1\0^2",
    "lone surrogate": "\ud800^2",
    "bidirectional override": "\u202e^2",
    "too long": "9^" * 1001,
    "reads a file": "\\input{/etc/passwd}",
    "runs a shell": "\\immediate\\write18{touch /tmp/rapo_was_here}",
    "Python": "__import__('os').system('touch /tmp/rapo_was_here')",
    "Python in an operator": "\\operatorname{__import__}('os').mkdir('/tmp/rapo_was_here')",
    "Python in a text": "\\text{__import__('os').mkdir('/tmp/rapo_was_here')}",
    "Python in brackets": "(__import__('os').mkdir('/tmp/rapo_was_here'))",
    "Python after a number": "1 + __import__('os').mkdir('/tmp/rapo_was_here')",
    "Python in a set": "\\{__import__('os').mkdir('/tmp/rapo_was_here'), 2\\}",
    "lambda": "(lambda: open('/etc/passwd').read())()",
    "eval": "eval('1')",
}


@pytest.mark.parametrize("name", MATH)
def test_hostile_latex_is_no_answer_and_leaves_nothing(name):
    worker = rewards._math_worker()
    worker.start()
    began = time.monotonic()
    assert rewards.math_equal(MATH[name], "x^2") is False
    assert time.monotonic() - began < rewards.MATH_LIMIT_SEC + SLACK_SEC
    worker.start()
    assert worker.ask([[f"x^2 + {len(name)}", f"{len(name)} + x^2"]], 30) == [True]
    assert psutil.Process(worker.pid).children() == []
    assert not os.path.exists("/tmp/rapo_was_here")
    if LINUX:
        assert {"memory limited", "no file written", "environment empty"} <= set(worker.barrier)


def test_sympy_evaluates_no_python_but_arithmetic():
    script = f"""
import re, sys
from rapo_lib.rewards import _verify
_verify(["x^2", "1 + 1"])  # whatever is imported on first use
seen, on = [], True
sys.addaudithook(lambda event, args: seen.append(args[0]) if on and event == "compile" else None)
for pred in {[m for name, m in MATH.items() if name.startswith(("Python", "lambda", "eval", "reads", "runs"))]!r}:
    assert not _verify([pred, "x^2"]) and not _verify(["x^2", pred])
assert _verify(["1/2 + 1", "3/2"])
on = False
sources = [s.decode() if isinstance(s, bytes) else s for s in seen if isinstance(s, (str, bytes))]
print(*{{w for s in sources for w in re.findall("[a-z_]\\\\w*", s, re.IGNORECASE)}})
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    words = set(done.stdout.split())
    assert "Integer" in words  # plain arithmetic does go through Python's parser, as text of digits and operators
    assert not words & set(
        "__import__ os mkdir system open read eval lambda touch tmp etc passwd rapo_was_here".split()
    )


def test_the_sandbox_bench_prints_every_snippet(monkeypatch, capsys):
    from rapo_lib import bench

    monkeypatch.setattr(bench, "HOSTILE", {name: HOSTILE[name] for name in ("read a file", "huge power")})
    bench.bench_sandbox(None)
    out = capsys.readouterr().out
    for line in (
        "start of the worker",
        "process of its own",
        "new calls, 1 at a time",
        "new calls, 100 at a time",
        "cached",
    ):
        assert line in out
    assert re.search(r"read a file +\d.* refused", out) and re.search(r"huge power +\d.* memory", out)
    assert "(not " not in out
