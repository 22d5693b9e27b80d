"""Attention by the implementation that serves the device."""

from typing import TYPE_CHECKING

import torch

from ..backend import uses_numba, uses_triton
from ..config import MosaicKVConfig
from . import reference

if TYPE_CHECKING:
    from ..sequence import SequenceStore


def attend(
    query: torch.Tensor, sequence: "SequenceStore", mask: torch.Tensor | None, config: MosaicKVConfig
) -> torch.Tensor:
    """See `attention.reference.attend`."""
    if uses_numba(query.device, config):
        from .cpu import attend as attend_on_cpu  # compiling, or loading what is compiled, takes a moment

        return attend_on_cpu(query, sequence, mask, config)
    if uses_triton(query.device, config):
        from ..triton_kernels import attend as attend_on_gpu

        return attend_on_gpu(query, sequence, mask, config)
    return reference.attend(query, sequence, mask, config)
