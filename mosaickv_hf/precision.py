"""Numbers stay as exact as they are given, whatever the model around them computes in."""

import functools
from collections.abc import Callable

import torch


def outside_autocast(function: Callable) -> Callable:
    """Runs a function out of `torch.autocast`, which would hand kernels half precision where they read fp32."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):  # entering takes its time
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run
