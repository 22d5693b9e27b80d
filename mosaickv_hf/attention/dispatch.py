"""Which implementation attends: compiled kernels where there are some for the device, else the torch reference."""

import importlib.util
import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..config import MosaicKVConfig
from . import reference

if TYPE_CHECKING:
    from ..sequence import SequenceStore

_logger = logging.getLogger(__name__)


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


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


def attend(
    query: torch.Tensor, sequence: "SequenceStore", mask: torch.Tensor | None, config: MosaicKVConfig
) -> torch.Tensor:
    """See `attention.reference.attend`."""
    if uses_numba(query.device, config):
        from .cpu import attend as attend_on_cpu  # compiling, or loading what is compiled, takes a moment

        return attend_on_cpu(query, sequence, mask, config)
    return reference.attend(query, sequence, mask, config)
