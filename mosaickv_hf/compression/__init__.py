"""From raw K and V to a `PackedSegment`, in plain torch."""

from .compressor import Bases, compress, fit_bases
from .packing import pack, unpack_blocks, unpack_dense
from .repack import Repack
from .rotation import Moments
from .strategy import States, adapt_steps, relative_loss

__all__ = [
    "Bases",
    "Moments",
    "Repack",
    "States",
    "adapt_steps",
    "compress",
    "fit_bases",
    "pack",
    "relative_loss",
    "unpack_blocks",
    "unpack_dense",
]
