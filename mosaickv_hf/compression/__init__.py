"""From raw K and V to a `PackedSegment`, in plain torch."""

from .compressor import compress, fit_bases
from .packing import pack, unpack_blocks, unpack_dense
from .rotation import Moments
from .strategy import States, adapt_steps

__all__ = ["Moments", "States", "adapt_steps", "compress", "fit_bases", "pack", "unpack_blocks", "unpack_dense"]
