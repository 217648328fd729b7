"""Builds and loads the C kernels of this folder, once for each machine and source, into the user's cache folder.

`library()` gives the loaded kernels, or None where they cannot run (no compiler, OUTRIDER_NATIVE=0); callers then take
their plain PyTorch reference. Nothing is built at install time, so a wheel works on any machine. This is not the place
for torch: kernels take addresses and sizes, and models/ and sampling own their meaning.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

from outrider.config import cache_folder

_SOURCES = ("kernels.c", "kernels.inc", "parallel.h")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-pthread", "-fPIC", "-shared", "-Wno-psabi")
_ARGUMENTS = {
    "pack_linear": (c_void_p, c_int64, c_int64, c_void_p),
    "linear": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int),
    "add_rms_norm": (c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "silu_mul": (c_void_p, c_int64, c_int64, c_void_p),
    "gelu_mul": (c_void_p, c_int64, c_int64, c_void_p),
    "rope_store": (*(c_void_p,) * 7, c_float, *(c_int64,) * 4, c_void_p, c_void_p),
    "attend": (
        *(c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_int64, c_int64, c_void_p),
    ),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if this machine has not built them yet (about a second); None where they cannot run."""
    if os.environ.get("OUTRIDER_NATIVE") == "0":
        return None
    try:
        loaded = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"C kernels are off, plain PyTorch runs instead: {reason.strip()[:500]}", stacklevel=2)
        return None
    for name, arguments in _ARGUMENTS.items():
        for suffix in ("bf16", "f32"):
            function = getattr(loaded, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
    loaded.set_threads.argtypes, loaded.set_threads.restype = (c_int,), None
    loaded.set_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for function in (loaded.gather_rows, loaded.scatter_rows):
        function.argtypes, function.restype = (c_void_p, c_int64, c_void_p, c_int64, c_void_p), None
    return loaded


def set_threads(count: int) -> None:
    """Let the kernels use that many threads, the caller's included (at first: every core that the process may use)."""
    loaded = library()
    if loaded is not None:
        loaded.set_threads(count)


def _built() -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler found (looked for $CC, cc and gcc)")
    here = Path(__file__).parent
    key = hashlib.sha256("\0".join((compiler, *_FLAGS, _processor())).encode())
    for source in _SOURCES:
        key.update((here / source).read_bytes())
    target = cache_folder() / "native" / f"kernels-{key.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Built aside and renamed, so that two processes starting together never load half a file.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            command = [compiler, *_FLAGS, str(here / _SOURCES[0]), "-lm", "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            built.replace(target)
    return target


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return platform.machine() + flags
