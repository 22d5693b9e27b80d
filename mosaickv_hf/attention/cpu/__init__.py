"""Attention on packed data, and packing, for CPUs, in numba. Imported on first use."""

from .attention import attend
from .packing import pack

__all__ = ["attend", "pack"]
