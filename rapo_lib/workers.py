"""Helper processes that may hang, crash or be killed without harm to the caller.

Python code of a policy (`sandbox.py`) and symbolic mathematics (`rewards.py`) run behind a `Worker`: a
child process that answers JSON lines, behind the barrier of `barrier.py`. It starts at the first request, is
killed and replaced when it overruns, and ends when its standard input closes, so also when the parent is
killed. It needs neither signals nor the main thread nor an event loop, and a forked child simply starts its own.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from .barrier import CPU_SEC, confine, renew_cpu

#: What Python needs to find its packages; whatever else the environment holds (tokens, keys) stays out. The worker
#: empties even this before its first request, so that nothing it starts inherits any of it.
_KEPT_ENV = tuple("PATH PYTHONPATH MONTY_BIN HOME USERPROFILE SYSTEMROOT TEMP TMP TMPDIR".split())
_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()
#: What stands in place of a reply that never came; both are false.
DIED, TIMED_OUT = None, False


class Worker:
    """A child process that runs `module` and answers each request, or is killed.

    Args:
        module: name of a module whose main part calls `serve`.
        start_sec: seconds that its start may take.
    """

    def __init__(self, module: str, start_sec: float = 60.0) -> None:
        self.module = module
        self.start_sec = start_sec
        #: Names of the parts of the barrier that hold in the worker; known when it has started.
        self.barrier: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._lock = threading.Lock()
        _WORKERS.add(self)

    def ask(self, requests: Sequence[Any], limit_sec: float) -> list[Any]:
        """The replies, in order; DIED where the worker died, TIMED_OUT where it was killed at the limit.

        Args:
            requests: JSON values, answered one after the other by one process.
            limit_sec: wall-clock seconds for each request.
        """
        replies: list[Any] = []
        with self._lock:
            try:
                while len(replies) < len(requests):
                    rest = requests[len(replies) :]
                    replies += self._exchange(rest, limit_sec)
            except BaseException:  # an interrupt leaves a reply in the pipe that belongs to nobody
                self._stop()
                raise
        return replies

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            RuntimeError: it does not start, or refuses to work; the reason is the message.
        """
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        with self._lock:
            self._stop()

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process else None

    def _exchange(self, requests: Sequence[Any], limit_sec: float) -> list[Any]:
        """Replies up to the first that did not come; fewer than requests when the process was lost."""
        self._started()
        got, unsent = [], json.dumps(list(requests)).encode() + b"\n"
        for _ in requests:
            # A limit for each: one that hangs costs its neighbours nothing.
            with _killed_after(self._process, limit_sec) as limit:
                self._write(unsent)
                line, unsent = self._read_line(), b""
            if line is None:
                self._stop()
                return [*got, TIMED_OUT if limit.passed else DIED]
            got.append(json.loads(line))
        return got

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except OSError:
            pass  # the process is gone; reading its reply says so

    def _read_line(self) -> bytes | None:
        """The next line, None when the process is gone.

        The pipes have no buffer of Python's: such a buffer has a lock, which a fork can leave locked for ever.
        """
        while b"\n" not in self._unread:
            data = self._process.stdout.read(1 << 16)
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _started(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._start()

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        env = {k: os.environ[k] for k in _KEPT_ENV if k in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
        env["PYTHONHASHSEED"] = "0"  # a set is shown in the same order by every worker
        self._unread = b""
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                start_new_session=True,  # an interrupt of the notebook is not meant for it
            )
            try:
                with _killed_after(self._process, self.start_sec):
                    first = self._read_line()
            except BaseException:  # an interrupt: the line would be taken for a reply
                self._stop()
                raise
            if first is None:
                self._stop()
                errors.seek(0)
                tail = errors.read().decode("utf-8", "replace").strip()[-800:]
                raise RuntimeError(f"{self.module} did not start within {self.start_sec:g} s: {tail or 'no message'}")
        word, content = json.loads(first)
        if word != "ready":
            self._stop()
            raise RuntimeError(content)
        self.barrier = tuple(content)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process:
            _end(process)

    def _forget(self) -> None:
        """In a forked child: the process belongs to the parent, and a lock may be held by a thread that is not here."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        if process:
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # not a child of this process, so nothing to wait for


class _killed_after:
    """Kill the process when the block takes longer than this; after the block it is dead or out of danger.

    `passed` tells then whether it was killed.
    """

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self.process = process
        self.over = self.passed = False
        self.lock = threading.Lock()
        self.timer = threading.Timer(seconds, self._overrun)
        self.timer.daemon = True

    def __enter__(self) -> _killed_after:
        self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        with self.lock:  # a reply in the last moment: the next request must not go to a process that is being killed
            self.passed, self.over = self.over, True
        if self.passed:
            self.process.wait()

    def _overrun(self) -> None:
        with self.lock:
            if not self.over:
                self.over = True
                _kill(self.process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closed input lets the worker end its own children; one that does not listen is killed."""
    for pipe in (process.stdin, process.stdout):
        try:
            pipe.close()
        except OSError:
            pass
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and what it started: one that hangs does not read the end of its own input."""
    if not hasattr(os, "killpg"):
        process.kill()
    elif process.poll() is None:  # else its number may belong to another process by now
        os.killpg(process.pid, signal.SIGKILL)


def _close_all() -> None:
    for worker in list(_WORKERS):
        worker.close()


def _forget_all() -> None:
    for worker in list(_WORKERS):
        worker._forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def serve(
    answer: Callable[[Any], Any],
    *,
    check: Callable[[], list[str]] = list,
    runnable: Iterable[str] = (),
    cpu_sec: float = CPU_SEC,
) -> None:
    """The worker's side: give up all rights, say ready, then answer each line of requests until the input closes.

    Whatever a library prints goes to standard error, so it cannot be mistaken for a reply.

    Args:
        answer: reply to one request.
        check: tries the worker behind the barrier; its names join those of the barrier. A RuntimeError means that the
            worker must not be used, and its text reaches the caller of `Worker.ask`.
        runnable: programs that the worker starts.
        cpu_sec: CPU seconds for one request, after which the kernel ends the worker: also when nobody is left to kill
            it. A program that it starts gets at least as many for its whole life.
    """
    out = os.fdopen(os.dup(1), "w", encoding="ascii", newline="\n")
    os.dup2(2, 1)
    runnable = list(runnable)
    parts = confine(runnable, starts_processes=bool(runnable))
    try:
        first = ["ready", [*check(), *parts]]
    except RuntimeError as e:
        first = ["refused", str(e)]
    _send(out, first)
    if first[0] == "refused":
        return
    for line in sys.stdin.buffer:
        for request in json.loads(line):
            renew_cpu(cpu_sec)
            _send(out, answer(request))


def refuse(reason: str) -> None:
    """The worker's side when it cannot work at all: say why."""
    _send(sys.stdout, ["refused", reason])


def _send(out: TextIO, message: Any) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
