"""From raw K and V to a `PackedSegment`, in plain torch."""

from .compressor import compress, fit_bases
from .packing import pack, unpack_blocks, unpack_dense
from .rotation import Moments
from .strategy import adapt_steps

__all__ = ["Moments", "adapt_steps", "compress", "fit_bases", "pack", "unpack_blocks", "unpack_dense"]
