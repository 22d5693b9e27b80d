"""Which kernels serve a device: the compiled ones where there are some, else plain torch."""

import importlib
import logging
import os
from functools import cache

import torch

from .config import MosaicKVConfig

_logger = logging.getLogger(__name__)


@cache
def _has(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


@cache
def _warn_once(package: str, device: str) -> None:
    _logger.warning(
        "%s is not installed: attention on %s runs in plain torch, which is slow (pip install %s)",
        package,
        device,
        package,
    )


def uses_numba(device: torch.device, config: MosaicKVConfig) -> bool:
    """Whether tensors on this device are attended to, and packed, by the numba kernels.

    Raises:
        ImportError: the config asks for numba, which is not installed.
    """
    if device.type != "cpu" or config.backend not in ("auto", "numba"):
        return False
    return _installed("numba", device, config)


def uses_triton(device: torch.device, config: MosaicKVConfig) -> bool:
    """Whether tensors on this device are attended to, and packed, by the Triton kernels; plain torch does what those
    cannot (odd block sizes).

    Raises:
        ImportError: the config asks for Triton, which is not installed.
        ValueError: the config asks for Triton, and the device or the config is none that it serves.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if config.backend not in ("auto", "triton") or (device.type == "cpu" and config.backend == "auto"):
        return False
    serves = config.block_size & (config.block_size - 1) == 0 and config.block_size <= 32
    serves = serves and config.group_size in (1, 2, 4) and (device.type == "cuda" or interpreted)
    if not serves and config.backend == "triton":
        raise ValueError(
            'backend="triton" needs a GPU, a block_size that is a power of two up to 32 and a group_size of 1, 2 or 4; '
            f"got {device.type}, {config.block_size} and {config.group_size}"
        )
    return serves and _installed("triton", device, config)


def _installed(package: str, device: torch.device, config: MosaicKVConfig) -> bool:
    if _has(package):
        return True
    if config.backend == package:
        raise ImportError(f'backend="{package}" needs the {package} package: pip install {package}')
    _warn_once(package, device.type)
    return False
