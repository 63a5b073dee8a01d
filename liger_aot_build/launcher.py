"""How the launcher, ``liger_aot._launch``, is compiled and linked: the same wherever it is built.

The flags of the Python that builds it are left out: they differ from Python to Python, and some bring that Python's own
folders into the library's search path, where they would be searched for the GPU driver before the system's. ``CC``,
``CFLAGS``, ``CPPFLAGS`` and ``LDFLAGS`` of the environment count.
"""

from __future__ import annotations

import os
import shlex
import sysconfig

LIMITED_API = "0x030A0000"  # Python 3.10's
COMPILE = (
    "-O2",
    "-g0",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",  # some compilers define it already
    "-D_FORTIFY_SOURCE=2",
    f"-DPy_LIMITED_API={LIMITED_API}",
)
# All of the driver's functions are looked up by name in a library that is opened at run time.
LINK = ("-shared", "-pthread", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack")
LIBRARIES = ("dl",)  # in the C library itself from glibc 2.34 on


def compiler() -> list[str]:
    """The C compiler: CC's, else the one that this Python was built with, without that one's flags."""
    return _words("CC") or shlex.split(sysconfig.get_config_var("CC") or "cc")[:1]


def compile_command() -> list[str]:
    """Turns a C file into an object; what is to be compiled and where to follows."""
    return [*compiler(), *COMPILE, *_words("CPPFLAGS"), *_words("CFLAGS")]


def link_command() -> list[str]:
    """Turns objects into the extension module."""
    return [*compiler(), *LINK, *_words("CFLAGS"), *_words("LDFLAGS")]


def refusal() -> str | None:
    """Why this Python can't build or run the launcher, or None."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return (
            "liger-aot does not support free-threaded Python (3.13t, 3.14t), which has no stable ABI that its "
            "launcher could use: install the Python with the global interpreter lock"
        )
    return None


def _words(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))
