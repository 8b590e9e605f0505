"""The second barrier: what the kernel keeps from a helper process, should its own guard (an interpreter) fail.

`confine` runs inside the helper before it reads its first request, and holds for every process that the helper
starts. It needs no root and no package: limits come from `resource`, the rest is a few system calls of Linux.
Each part that the machine offers is reported by name; a part that it lacks is not.

Why not others: PR_SET_PDEATHSIG ends a child with the *thread* that started it; user namespaces are switched off
in many containers and give nothing here that Landlock and seccomp lack; pyseccomp needs a system library.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import site
import struct
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has no process limits of this kind
    resource = None

#: Address space that a helper may add to what it has when it is confined.
MEMORY_BYTES = 1 << 30
#: Processor seconds of one interpreter process; `sandbox.py` replaces it before a well-behaved one gets there.
CPU_SEC = 600
OPEN_FILES = 64


def confine(runnable: Iterable[str | Path] = (), *, starts_processes: bool = False) -> list[str]:
    """Give up what this process does not need, for good; call it with one thread only.

    Args:
        runnable: programs that may still be started.
        starts_processes: whether it starts any; if not, it gets no new process and no new thread either.

    Returns:
        names of the parts that hold from now on.
    """
    parts: dict[str, Callable[[], bool]] = {
        "working folder empty": _empty_folder,
        "environment empty": _clear_environment,
    }
    if resource:
        parts |= {
            "memory limited": lambda: _limit("RLIMIT_AS", _address_space() + MEMORY_BYTES),
            "open files limited": lambda: _limit("RLIMIT_NOFILE", OPEN_FILES),
            "no file written": lambda: _limit("RLIMIT_FSIZE", 0),
            "no core dump": lambda: _limit("RLIMIT_CORE", 0),
            "CPU seconds limited": lambda: renew_cpu(CPU_SEC),
        }
        if not starts_processes:
            parts["no new process"] = lambda: _limit("RLIMIT_NPROC", 0) and os.getuid() != 0
    if sys.platform == "linux":
        parts |= {
            "no new privileges": _no_new_privileges,
            "no capabilities in what it starts": _no_capabilities,
            "files out of reach (Landlock)": lambda: _landlock_files(_readable(), [*runnable, *_loaders()]),
            "no TCP (Landlock)": _landlock_tcp,
            "no signals to the outside (Landlock)": _landlock_scopes,
            "no sockets, no look into other processes (seccomp)": _seccomp,
        }
    return [name for name, apply in parts.items() if _holds(apply)]


def seal(pid: int) -> bool:
    """No new process and no new thread for a child that runs already, and a hard limit of CPU seconds.

    Returns:
        whether the limit of processes holds: the kernel has none for root, and only Linux limits another process.
    """
    if not hasattr(resource, "prlimit"):
        return False
    try:
        resource.prlimit(pid, resource.RLIMIT_CPU, (CPU_SEC, CPU_SEC))
        resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))
    except ProcessLookupError:  # it has just died; whoever talks to it will notice
        return False
    return os.getuid() != 0


def renew_cpu(seconds: float) -> bool:
    """From now on this process may use so many CPU seconds more; a process that it starts gets at least as many."""
    if not resource:
        return False
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    return True


def _holds(apply: Callable[[], bool]) -> bool:
    try:
        return apply()
    except (OSError, ValueError):  # this kernel has it not, or a container forbids it
        return False


def _empty_folder() -> bool:
    """A folder that is deleted already: nothing can be made in it, and nothing is left behind."""
    folder = tempfile.mkdtemp()
    try:
        os.chdir(folder)
    finally:
        os.rmdir(folder)
    return True


def _clear_environment() -> bool:
    os.environ.clear()
    return True


def _limit(name: str, value: int) -> bool:
    kind = getattr(resource, name)
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
    return True


def _address_space() -> int:
    """Bytes of address space in use; OSError where the system does not tell (macOS, which enforces no limit either)."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _mapped() -> list[str]:
    """Files mapped into this process: Python, its libraries, the loader."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line})


def _readable() -> list[str]:
    """What a running Python reads: its library folders, packages and libraries in use; no user's files."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    for name, module in list(sys.modules.items()):  # packages may also lie on PYTHONPATH
        if "." not in name:
            folders.update(getattr(module, "__path__", ()))
    return [*sorted(folders), "/etc/ld.so.cache", *_mapped()]


def _loaders() -> list[str]:
    return [path for path in _mapped() if Path(path).name.startswith("ld-")]


# ---------------------------------------------------------------------------------------- system calls of Linux

# Rights of Landlock (linux/landlock.h); a kernel's version says how many of them it knows.
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version -> number of rights; 16 from version 5 on
_TCP_RIGHTS = 0b11  # bind, connect; from version 4 on
_SCOPES = 0b11  # abstract Unix sockets and signals of processes outside; from version 6 on

# linux/audit.h and the numbers of the calls that are refused, in the order of `_REFUSED_CALLS`.
_REFUSED_CALLS = (
    "socket ptrace process_vm_readv process_vm_writev mount unshare setns bpf keyctl userfaultfd perf_event_open"
    " open_by_handle_at io_uring_setup pidfd_getfd"
).split()
_ARCHITECTURES = {
    "x86_64": (0xC000003E, (41, 101, 310, 311, 165, 272, 308, 321, 250, 323, 298, 304, 425, 438)),
    "aarch64": (0xC00000B7, (198, 117, 270, 271, 40, 97, 268, 280, 219, 282, 241, 265, 425, 438)),
}


def _call(number: int, *args: int | bytes | None) -> int:
    """A system call that Python's library lacks; OSError when it fails."""
    result = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _prctl(*args: int) -> bool:
    """prctl(2); its number is one of those that differ between machines, so it goes through the C library."""
    if ctypes.CDLL(None, use_errno=True).prctl(*map(ctypes.c_ulong, args)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True


def _no_new_privileges() -> bool:
    """setuid programs give nothing any more; Landlock and seccomp ask for this."""
    return _prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS


def _no_capabilities() -> bool:
    """Root's programs start without its powers; others have none to lose."""
    if os.geteuid() == 0:
        last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="utf-8"))
        for capability in range(last + 1):
            _prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    return True


def _landlock_version() -> int:
    return _call(444, None, 0, 1)  # landlock_create_ruleset, LANDLOCK_CREATE_RULESET_VERSION


def _landlock_files(readable: list[str], runnable: list[str | Path]) -> bool:
    """Only these files and folders can be read, only these programs started, nothing written."""
    rights = (1 << _FILE_RIGHTS.get(_landlock_version(), 16)) - 1
    rules = [(path, _READ_FILE) for path in readable] + [(path, _READ_FILE | _EXECUTE) for path in runnable]
    return _restrict(struct.pack("QQQ", rights, 0, 0), rules)


def _landlock_tcp() -> bool:
    return _landlock_version() >= 4 and _restrict(struct.pack("QQQ", 0, _TCP_RIGHTS, 0))


def _landlock_scopes() -> bool:
    return _landlock_version() >= 6 and _restrict(struct.pack("QQQ", 0, 0, _SCOPES))


def _restrict(handled: bytes, rules: Sequence[tuple[str | Path, int]] = ()) -> bool:
    """Refuse the handled rights but where a rule grants them, to this process and its children."""
    ruleset = _call(444, handled, len(handled), 0)
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights)
        return _call(446, ruleset, 0) == 0  # landlock_restrict_self
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str | Path, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not there, or out of reach anyway
        return
    try:
        rights |= _READ_DIR if os.path.isdir(path) else 0
        _call(445, ruleset, 1, struct.pack("=Qi", rights, target), 0)  # landlock_add_rule, PATH_BENEATH
    finally:
        os.close(target)


def _seccomp() -> bool:
    """The calls in `_REFUSED_CALLS` fail with EPERM."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    program = _filter(*_ARCHITECTURES[platform.machine()])
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HL", len(program) // 8, ctypes.addressof(code)))
    return _prctl(22, 2, ctypes.addressof(header))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _filter(machine: int, numbers: tuple[int, ...]) -> bytes:
    """A filter for seccomp: EPERM for these system calls and for foreign tables of calls, else go on.

    Each instruction is (operation, jump if true, jump if false, value); jumps count the instructions between.
    """
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    n = len(numbers)
    lines = [
        (load, 0, 0, 4),  # seccomp_data.arch
        (equal, 0, n + 3, machine),
        (load, 0, 0, 0),  # seccomp_data.nr
        (at_least, n + 1, 0, 0x40000000),  # x32, which has numbers of its own
        *((equal, n - i, 0, number) for i, number in enumerate(numbers)),
        (end, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
        (end, 0, 0, 0x00050001),  # SECCOMP_RET_ERRNO, EPERM
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
