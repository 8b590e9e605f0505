"""Runs Python code that a policy wrote: bounded time, memory, output and recursion, and nothing of the host.

Notebook 02 shows it at work; `hostile.py` holds what it is tried with. `barrier()` names the parts that hold here.

Always (`MANDATORY`; a self-test proves it at each start, else nothing runs and the error says why):
- The interpreter is pydantic-monty (Python written anew in Rust) in a process of its own, behind a second one that
  only relays and can be killed. Code gets no files, network, processes, environment or imports beyond Monty's own.
- A call ends within its time limit + 1 s with a named outcome, and nothing of it is left: no process, no file, no
  state. Clock and random numbers are fixed and sleeping costs no time, so a result is a function of (prelude, code)
  alone and is cached.

Should a bug in the interpreter let code out, `barrier.py` decides what it finds:
- Linux and macOS: an empty environment, a deleted working folder, no file can grow (so none can be written), no core
  dumps, 64 open files, bounded CPU seconds. Windows: the environment only.
- Linux adds: 1 GB of memory, no new privileges; as an ordinary user no new process or thread; as root no capability.
- With Landlock (kernel 5.13): no file is read but Python's libraries and the interpreter, none made, changed or
  deleted, no other program started. Kernel 6.7: no TCP. Kernel 6.12: no signals to other processes. Names, sizes
  and times of files (stat) stay visible.
- With seccomp (x86-64, aarch64): no socket of any kind, no look into other processes, no namespaces.
- Linux without either (old kernels, some containers), and macOS: an escape reads what the user can read, reaches the
  network and can signal the user's processes. macOS also bounds neither its memory nor its processes. The rule of
  macOS was not tried.

Not held anywhere: bugs of the kernel, and time measured from outside (other work on the machine slows a call down).
Monty knows no `yield`, class inheritance, numpy or sympy, and its `round(x, n)` differs from CPython's in ties.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import Any, Literal

from .barrier import CPU_SEC, MEMORY_BYTES, seal
from .workers import DIED, TIMED_OUT, Worker, refuse, serve

#: Parts of the barrier without which nothing runs; a self-test proves them at each start.
MANDATORY = ("process of its own", "interpreter without access to the host", "time, memory and output limited")

Outcome = Literal["ok", "time", "memory", "output", "recursion", "syntax", "refused", "exception", "crash"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one call may use.

    Args:
        time_sec: seconds of execution, at most 60; a hung interpreter is killed half a second later.
        memory_bytes: heap of the interpreter, at most a quarter of what its process may have.
        output_chars: characters that it may print or return.
        recursion: depth of the call stack.
        code_chars: length of the code.
    """

    time_sec: float = 1.0
    memory_bytes: int = 64 << 20
    output_chars: int = 4000
    recursion: int = 200
    code_chars: int = 20_000

    def __post_init__(self) -> None:
        if not 0 < self.time_sec <= 60:
            raise ValueError(f"time_sec is {self.time_sec}; more than 0 and at most 60")
        if not 0 < self.memory_bytes <= MEMORY_BYTES // 4:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; more than 0 and at most {MEMORY_BYTES // 4}")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What a call printed, or the value of its last expression; `outcome` names how it ended."""

    text: str
    outcome: Outcome = "ok"

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


class Sandbox:
    """A cache and a worker process in front of the interpreter; safe with threads, forks and event loops.

    Example:
        >>> box = Sandbox()
        >>> [r.text for r in box.run(["2003 % 10", "print('a')", "1 / 0"])]
        ['3', 'a', 'error: ZeroDivisionError: division by zero']
        >>> box.run(["while True: pass"])[0].outcome
        'time'
        >>> box.close()
    """

    def __init__(self, limits: SandboxLimits = SandboxLimits()) -> None:
        self.limits = limits
        self._worker = Worker("rapo_lib.sandbox")
        self._cache: dict[tuple[str, str], SandboxResult] = {}

    def run(self, codes: Sequence[str], prelude: str = "") -> list[SandboxResult]:
        """Run each piece of code in a fresh interpreter.

        Args:
            codes: Python source; nothing is left behind from one to the next.
            prelude: trusted source that runs before each of them (definitions for the agent).

        Raises:
            ValueError: the prelude itself fails.
            RuntimeError: the interpreter cannot be started.
        """
        new = [c for c in dict.fromkeys(codes) if (prelude, c) not in self._cache]
        if new:
            limits = asdict(self.limits)
            # Room for the interpreter's own limit, the kill after it, and a prelude.
            replies = self._worker.ask([[prelude, c, limits] for c in new], self.limits.time_sec + 0.75)
            results = {c: _result(r, self.limits.time_sec) for c, r in zip(new, replies, strict=True)}
            self._cache |= {(prelude, c): r for c, r in results.items() if r.outcome != "crash"}
            return [results.get(c) or self._cache[prelude, c] for c in codes]
        return [self._cache[prelude, c] for c in codes]

    def barrier(self) -> list[str]:
        """Names of what holds here around the code: the mandatory parts first, then what this kernel adds.

        Raises:
            RuntimeError: a mandatory part does not hold.
        """
        self._worker.start()
        return list(self._worker.barrier)

    def close(self) -> None:
        """End the worker process (this also happens at exit)."""
        self._worker.close()


@cache
def shared_sandbox() -> Sandbox:
    """The sandbox of this process: every tool shares its worker and its cache."""
    return Sandbox()


def barrier() -> list[str]:
    """Names of what holds on this machine around model-written code (`Sandbox.barrier` of the shared sandbox)."""
    return shared_sandbox().barrier()


def _result(reply: list[str] | bool | None, time_sec: float) -> SandboxResult:
    if reply is DIED:
        return SandboxResult("error: the interpreter crashed and was replaced", "crash")
    if reply is TIMED_OUT:  # its result was so large that handing it over took for ever
        return SandboxResult(f"error: time limit of {time_sec:g} s exceeded", "time")
    outcome, text = reply
    if outcome == "start":
        raise RuntimeError(f"the interpreter cannot be started: {text}")
    if outcome == "prelude":
        raise ValueError(f"the prelude of the python tool fails: {text}")
    return SandboxResult(text, outcome)


# ------------------------------------------------------------------------------- inside the worker process


class _Interpreter:
    """The worker's side: one pool with one interpreter process, a fresh session for each call."""

    def __init__(self, binary: str) -> None:
        from pydantic_monty import Monty

        self._monty = Monty
        self._binary = binary
        self._pool: Any = None
        self._time_sec = 0.0
        self._sealed: tuple[int | None, bool] = (None, False)

    def __call__(self, request: list[Any]) -> list[str]:
        """`[outcome, text]` of `[prelude, code, limits]`."""
        from pydantic_monty import CollectString, MontyCrashedError, MontyError

        prelude, code, limits = request
        if len(code) > limits["code_chars"]:
            return ["refused", f"error: code has {len(code)} characters, at most {limits['code_chars']} are allowed"]
        printed = CollectString(max_bytes=4 * limits["output_chars"])
        try:
            pool = self._pool_for(limits["time_sec"])
        except (RuntimeError, OSError) as e:
            return ["start", str(e)]
        feeding_prelude = True
        try:
            with _session(pool, limits) as session:
                self._seal(session.worker_pid)
                if prelude:
                    session.feed_run(prelude)
                feeding_prelude = False
                value = session.feed_run(code, print_callback=printed)
                return _shown(printed.output, value, limits["output_chars"])
        except MontyCrashedError as e:
            if e.timed_out:
                return _over_time(limits)
            return ["crash", f"error: the interpreter was replaced ({e})"]
        except MontyError as e:
            text = e.display("type-msg")
            if feeding_prelude:
                return ["prelude", text]
            return _named_error(text, printed.output, limits)
        except MemoryError:  # of this process, while it takes over the result
            return _over_memory(limits)
        except (ValueError, TypeError, RecursionError, UnicodeError) as e:  # code or value that cannot cross the border
            return ["exception", f"error: {type(e).__name__}: {str(e)[:300]}"]

    def check(self) -> list[str]:
        """Names of what the interpreter has shown to hold.

        Raises:
            RuntimeError: it does not start, or gave a wrong answer to one of `_CHECKS`.
        """
        for code, wanted in _CHECKS.items():
            limits = SandboxLimits(time_sec=0.02) if wanted == "time" else SandboxLimits()
            outcome, text = self(["", code, asdict(limits)])
            if outcome == "start":
                raise RuntimeError(f"the interpreter cannot be started: {text}; is pydantic-monty installed?")
            if wanted != (text if outcome == "ok" else outcome):
                raise RuntimeError(
                    f"the interpreter is no sandbox: {code!r} must come to {wanted!r} and came to {outcome!r} with"
                    f" {text!r}; install pydantic-monty anew (pip install --force-reinstall pydantic-monty)"
                )
        return [*MANDATORY, *["no new process"] * self._sealed[1]]

    def _pool_for(self, time_sec: float) -> Any:
        if self._pool is None or self._time_sec != time_sec:
            if self._pool is not None:
                self._pool.__exit__(None, None, None)
            # A hung interpreter is killed half a second after its own limit should have ended the code. Prelude and
            # code take that long at most, so a process is replaced before it could reach its CPU limit.
            kill_sec = time_sec + 0.5
            self._pool = self._monty(
                binary_path=self._binary,
                max_processes=1,
                request_timeout=kill_sec,
                max_checkouts_per_worker=int(CPU_SEC // (2 * kill_sec)),
            ).__enter__()
            self._time_sec = time_sec
        return self._pool

    def _seal(self, pid: int | None) -> None:
        if pid is not None and pid != self._sealed[0]:
            self._sealed = (pid, seal(pid))


#: What a sandbox must answer before it is used: code and its text, or its outcome where that is not "ok".
_CHECKS = {
    "while 1: pass": "time",
    "6 * 7": "42",
    "open('/etc/passwd').read()": "refused",
    "import subprocess": "refused",
    "import os\nos.environ": "refused",
    "import os\nos.system('exit 0')": "exception",
    "[0] * 10**10": "memory",
    "print('x' * 100_000)": "output",
    "def f(): return f()\nf()": "recursion",
}


def _session(pool: Any, limits: dict[str, Any]) -> Any:
    """A fresh interpreter state: limits, a fixed clock, sleeps that cost nothing, seeded random numbers."""
    return pool.checkout(
        limits={
            "max_feed_duration_secs": limits["time_sec"],
            "max_memory": limits["memory_bytes"],
            "max_recursion_depth": limits["recursion"],
        },
        os_policy={"datetime": datetime(2026, 1, 1), "sleep": "zero", "random_start": {"seed": 0}},
        assert_message_annotations=False,
    )


def _shown(printed: str, value: Any, max_chars: int) -> list[str]:
    """Printed output, else the value of the last expression."""
    text = printed.rstrip("\n") if printed else "no output" if value is None else repr(value)
    if len(text) > max_chars:
        return ["output", f"{text[:max_chars]}\nerror: output has more than {max_chars} characters"]
    return ["ok", text]


def _named_error(message: str, printed: str, limits: dict[str, Any]) -> list[str]:
    """Outcome and text of an exception; the texts of limits are fixed, since Monty's hold measured numbers."""
    kind = message.split(":", 1)[0]
    if message.startswith("TimeoutError: feed time limit"):
        return _over_time(limits)
    if message.startswith(("MemoryError: memory limit", "MemoryError: the worker exceeded its memory limit")):
        if message.endswith(f"> {4 * limits['output_chars']} bytes"):
            return ["output", f"error: output has more than {limits['output_chars']} characters"]
        return _over_memory(limits)
    if kind == "RecursionError":
        return ["recursion", f"error: recursion limit of {limits['recursion']} calls exceeded"]
    if kind == "SyntaxError":
        return ["syntax", f"error: {message[:300]}"]
    refused = kind in ("PermissionError", "ModuleNotFoundError", "ImportError") or "not supported in this" in message
    return ["refused" if refused else "exception", f"{printed[: limits['output_chars']]}error: {message[:300]}"]


def _over_time(limits: dict[str, Any]) -> list[str]:
    return ["time", f"error: time limit of {limits['time_sec']:g} s exceeded"]


def _over_memory(limits: dict[str, Any]) -> list[str]:
    return ["memory", f"error: memory limit of {limits['memory_bytes'] >> 20} MB exceeded"]


def main() -> None:
    """Serve as the worker process."""
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    binary = os.environ.get("MONTY_BIN") or shutil.which("monty", path=os.pathsep.join(places))
    try:
        interpreter = _Interpreter(binary or "")
    except ImportError as e:
        refuse(f"the interpreter cannot be started: {e}; pip install pydantic-monty")
        return
    if not binary:
        refuse(f"the interpreter cannot be started: no program monty in {places}; pip install pydantic-monty")
        return
    serve(interpreter, check=interpreter.check, runnable=[binary])


if __name__ == "__main__":
    main()
