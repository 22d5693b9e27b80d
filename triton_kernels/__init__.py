"""Triton kernels for GPUs; installed as `mosaickv_hf.triton_kernels`.

One file a kernel, each with its launch wrapper, registered as a torch operation, and the plain torch it is tested
against. `attend` and `pack` put them together as `attention.reference.attend` and `compression.packing.pack` do.
"""

from .attend import attend
from .packing import pack

__all__ = ["attend", "pack"]
