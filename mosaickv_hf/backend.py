"""Which kernels serve a device: the compiled ones where there are some, else plain torch."""

import importlib
import logging
from functools import cache

import torch

from .config import MosaicKVConfig

_logger = logging.getLogger(__name__)


@cache
def _has_numba() -> bool:
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True


@cache
def _warn_once() -> None:
    _logger.warning("numba is not installed: attention on CPU runs in plain torch, which is slow (pip install numba)")


def uses_numba(device: torch.device, config: MosaicKVConfig) -> bool:
    """Whether tensors on this device are attended to, and packed, by the numba kernels.

    Raises:
        ImportError: the config asks for numba, which is not installed.
    """
    if device.type != "cpu" or config.backend not in ("auto", "numba"):
        return False
    if _has_numba():
        return True
    if config.backend == "numba":
        raise ImportError('backend="numba" needs the numba package: pip install numba')
    _warn_once()
    return False
