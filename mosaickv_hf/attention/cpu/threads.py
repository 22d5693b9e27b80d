"""Running a compiled phase on several threads, and what its compiled form on disk depends on."""

import ctypes
import os
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch


def _digest() -> int:
    folder = os.path.dirname(__file__)
    digest = 0
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                digest = zlib.crc32(file.read(), digest)
    return digest


SOURCES = _digest()
"""Changes with any file of this folder. Numba compares only the file of a compiled function itself with its cache, but
also what the function closes over: every phase closes over this."""


@cache
def _openmp():
    """`GOMP_parallel` of the OpenMP library that torch itself runs on, or None where it has another interface.

    One pool for both: torch's workers spin for a while after an operation, and a second pool (numba's) would have to
    share the cores with them. OpenMP keeps a pool per calling thread, so calls from several threads are safe.
    """
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        run = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="mosaickv")


_PLAIN = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def run(phase: int, call: np.ndarray, threads: int) -> None:
    """Runs the function at address `phase` on the table `call`, whose first two fields are counters, in `threads`
    threads; they share the work by taking numbers from the counters."""
    call[:2] = 0
    address = call.ctypes.data
    if threads == 1:
        _PLAIN(phase)(address)
        return
    openmp = _openmp()
    if openmp is not None:
        openmp(phase, address, threads, 0)
        return
    function = _PLAIN(phase)
    others = [_pool(threads).submit(function, address) for _ in range(threads - 1)]
    function(address)
    for other in others:
        other.result()
