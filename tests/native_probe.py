"""Native Python behind the barrier, in place of an interpreter that refuses by itself: what would an escape find?

A module for `Worker`: each request is code, its reply what the code leaves in `result`, or the name of its exception.
Where the tests run as root it becomes nobody first, so that the barrier is met as an ordinary user meets it. Code can
hold on to nothing here that Python would load later: nobody may not be able to read root's Python.
"""

import codecs
import ctypes
import os
import signal  # noqa: F401
import socket  # noqa: F401
import subprocess  # noqa: F401
import sys
import sysconfig
import tempfile
import threading  # noqa: F401

from rapo_lib.workers import serve

NOBODY = 65534


def drop_root() -> None:
    """Become nobody, after loading what Python would load on first use."""
    codecs.lookup("ascii"), codecs.lookup("idna")
    sysconfig.get_paths()
    tempfile.gettempdir()
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is its own again, as for any user


def run(code: str) -> str:
    names = {}
    try:
        exec(code, names)
    except BaseException as e:
        return type(e).__name__
    return repr(names["result"])


if __name__ == "__main__":
    drop_root()
    serve(run)
