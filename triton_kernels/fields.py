"""Places in a segment's row of a `tables.Table`, as constants that kernels can use."""

import triton.language as tl

from . import tables

KEYS, VALUES_STATES = tl.constexpr(0), tl.constexpr(tables.STATES_FIELDS)
DENSE, DENSE_TABLE = tl.constexpr(tables.DENSE), tl.constexpr(tables.DENSE_TABLE)
BITMAP, VALUES = tl.constexpr(tables.BITMAP), tl.constexpr(tables.VALUES)
OFFSETS, BITS = tl.constexpr(tables.OFFSETS), tl.constexpr(tables.BITS)
NUM_BLOCKS, LENGTH = tl.constexpr(tables.NUM_BLOCKS), tl.constexpr(tables.LENGTH)
FIRST_BLOCK, FIRST_TOKEN = tl.constexpr(tables.FIRST_BLOCK), tl.constexpr(tables.FIRST_TOKEN)
MEANS, FIELDS = tl.constexpr(tables.MEANS), tl.constexpr(tables.FIELDS)
