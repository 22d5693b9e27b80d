"""From raw K and V to a `PackedSegment`, in plain torch."""

from .budget import fit_budget
from .compressor import Bases, compress
from .packing import pack, unpack_blocks, unpack_dense
from .prompt import Prompt
from .repack import Repack
from .strategy import States

__all__ = [
    "Bases",
    "Prompt",
    "Repack",
    "States",
    "compress",
    "fit_budget",
    "pack",
    "unpack_blocks",
    "unpack_dense",
]
