"""Runs Python code that a policy wrote: bounded time, memory, output and recursion, and nothing of the host.

The interpreter is pydantic-monty (Python written anew in Rust) in a process of its own, behind a second
process that only relays. Code gets no files, network, processes, environment or imports beyond Monty's own
modules; clock and random numbers are fixed and sleeping costs no time, so a result is a function of
(prelude, code) alone and is cached. Notebook 02 shows it at work.

Limits of the guarantee: Monty knows no `yield`, class inheritance, numpy or sympy, and its `round(x, n)`
differs from CPython's in ties. It is no virtual machine: a memory-safety bug in it would be an escape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import Any, Literal

from .workers import Worker, serve

Outcome = Literal["ok", "time", "memory", "output", "recursion", "syntax", "refused", "exception", "crash"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one call may use.

    Args:
        time_sec: seconds of execution; a hung interpreter is killed half a second later.
        memory_bytes: heap of the interpreter.
        output_chars: characters that it may print or return.
        recursion: depth of the call stack.
        code_chars: length of the code.
    """

    time_sec: float = 1.0
    memory_bytes: int = 64 << 20
    output_chars: int = 4000
    recursion: int = 200
    code_chars: int = 20_000


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
            replies = self._worker.ask([[prelude, c, limits] for c in new], self.limits.time_sec + 0.9)
            results = {c: _result(r) for c, r in zip(new, replies, strict=True)}
            self._cache |= {(prelude, c): r for c, r in results.items() if r.outcome != "crash"}
            return [results.get(c) or self._cache[prelude, c] for c in codes]
        return [self._cache[prelude, c] for c in codes]

    def close(self) -> None:
        """End the worker process (this also happens at exit)."""
        self._worker.close()


@cache
def shared_sandbox() -> Sandbox:
    """The sandbox of this process: every tool shares its worker and its cache."""
    return Sandbox()


def _result(reply: list[str] | None) -> SandboxResult:
    if reply is None:
        return SandboxResult("error: the interpreter crashed or hung and was replaced", "crash")
    outcome, text = reply
    if outcome == "start":
        raise RuntimeError(f"the interpreter cannot be started: {text}; is pydantic-monty installed?")
    if outcome == "prelude":
        raise ValueError(f"the prelude of the python tool fails: {text}")
    return SandboxResult(text, outcome)


# ------------------------------------------------------------------------------- inside the worker process


class _Interpreter:
    """The worker's side: one pool with one interpreter process, a fresh session for each call."""

    def __init__(self) -> None:
        from pydantic_monty import Monty

        self._monty = Monty
        self._pool: Any = None
        self._time_sec = 0.0

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
                if prelude:
                    session.feed_run(prelude)
                feeding_prelude = False
                value = session.feed_run(code, print_callback=printed)
                return _shown(printed.output, value, limits["output_chars"])
        except MontyCrashedError as e:
            return ["time" if e.timed_out else "crash", f"error: the interpreter was replaced ({e})"]
        except MontyError as e:
            text = e.display("type-msg")
            if feeding_prelude:
                return ["prelude", text]
            return _named_error(text, printed.output, limits)
        except (ValueError, TypeError, RecursionError, UnicodeError) as e:  # code or value that cannot cross the border
            return ["exception", f"error: {type(e).__name__}: {str(e)[:300]}"]

    def _pool_for(self, time_sec: float) -> Any:
        if self._pool is None or self._time_sec != time_sec:
            if self._pool is not None:
                self._pool.__exit__(None, None, None)
            # A hung interpreter is killed half a second after its own limit should have ended the code.
            self._pool = self._monty(max_processes=1, request_timeout=time_sec + 0.5).__enter__()
            self._time_sec = time_sec
        return self._pool


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
        return ["time", f"error: time limit of {limits['time_sec']:g} s exceeded"]
    if message.startswith("MemoryError: memory limit"):
        if message.endswith(f"> {4 * limits['output_chars']} bytes"):
            return ["output", f"error: output has more than {limits['output_chars']} characters"]
        return ["memory", f"error: memory limit of {limits['memory_bytes'] >> 20} MB exceeded"]
    if kind == "RecursionError":
        return ["recursion", f"error: recursion limit of {limits['recursion']} calls exceeded"]
    if kind == "SyntaxError":
        return ["syntax", f"error: {message[:300]}"]
    refused = kind in ("PermissionError", "ModuleNotFoundError", "ImportError") or "not supported in this" in message
    return ["refused" if refused else "exception", f"{printed[: limits['output_chars']]}error: {message[:300]}"]


if __name__ == "__main__":
    serve(_Interpreter())
