"""Phases of a decode step that decide what is attended to: queries into each basis, block scores, top-k.

A phase is a function of a call's table (`A_*` fields). Threads run it together and take work items from a counter.
"""

import numpy as np
from numba import cfunc, njit

from .fields import (
    A_CHOSEN,
    A_CHOSEN_COUNT,
    A_CHOSEN_STARTS,
    A_COUNTER,
    A_GROUP,
    A_HEADS,
    A_KEY_BASES,
    A_KEY_DIM,
    A_MASK,
    A_MASK_BYTES,
    A_MASK_GROUP,
    A_MASK_HEAD,
    A_MASK_QUERY,
    A_NUM_BLOCKS,
    A_NUM_KEY_BASES,
    A_NUM_RANGES,
    A_NUM_SOURCES,
    A_PREPARED,
    A_PREPARED_WIDTH,
    A_QUERIES,
    A_QUERY,
    A_RANGE_SUMS,
    A_RANGES,
    A_ROWS,
    A_SCORES,
    A_SCORES_WIDTH,
    A_SCRATCH,
    A_SCRATCH_BYTES,
    A_SOURCES,
    A_WORKERS,
    B_DENSE,
    B_DENSE_WIDTH,
    B_OFFSET,
    B_ROTATION,
    B_ROTATION_SCALE,
    B_ROTATION_STRIDE,
    B_SCALE,
    B_STEP,
    BASIS_FIELDS,
    C_BLOCKS,
    C_FIRST_BLOCK,
    C_FIRST_TOKEN,
    C_INDEX_CHANNELS,
    C_K,
    C_LENGTH,
    C_MEAN_SCALE,
    C_MEAN_TILES,
    C_MEANS,
    C_SELECTED,
    D_CHANNELS,
    S_BASIS,
    S_BLOCK_SIZE,
    S_DENSE,
    SOURCE_FIELDS,
)
from .rows import dense_head, dense_tile
from .simd import (
    add,
    exp,
    fma,
    get,
    keep_lanes,
    larger,
    load8,
    load8_bool,
    load8_codes,
    load8_i8,
    load_f32,
    load_i64,
    load_splat,
    load_u8,
    maxima,
    maximum,
    mul,
    next_item,
    splat,
    store8,
    store_f32,
    store_i32,
    sub,
    total,
)
from .threads import SOURCES
from .topk import kth_largest, take, to_keys

NEG_INF = np.float32(-np.inf)
# A prepared query row: what all its logits have in common, then the query in the basis, then the same with the worth
# of a unit and of a step folded in, as wide as an unpacked row.
P_CONSTANT, P_ROTATED = 0, 8


@njit(forceinline=True)
def join(call):
    """The calling thread's scratch memory in this phase."""
    return get(call, A_SCRATCH) + next_item(call + 8 * A_WORKERS) * get(call, A_SCRATCH_BYTES)


@njit(forceinline=True)
def basis_at(table, place):
    return table + 8 * BASIS_FIELDS * place


@njit(forceinline=True)
def source_at(call, place):
    return get(call, A_SOURCES) + 8 * SOURCE_FIELDS * place


@njit(forceinline=True)
def prepared_row(call, basis, head, row):
    """Address of a prepared query row."""
    place = (basis * get(call, A_HEADS) + head) * get(call, A_ROWS) + row
    return get(call, A_PREPARED) + 4 * place * get(call, A_PREPARED_WIDTH)


@njit(forceinline=True)
def padded(n):
    return (n + 7) >> 3 << 3


@njit
def mask_lanes(call, head, row, token, count, scratch):
    """What is added to the logits of `count` tokens, at most eight, from `token` on."""
    queries = get(call, A_QUERIES)
    place = head * get(call, A_MASK_HEAD) + (row // queries) * get(call, A_MASK_GROUP)
    place += (row % queries) * get(call, A_MASK_QUERY) + token
    size = get(call, A_MASK_BYTES)
    address = get(call, A_MASK) + size * place
    if count == 8:
        return load8_bool(address) if size == 1 else load8(address)
    for i in range(count):
        if size == 1:
            store_f32(scratch + 4 * i, 0.0 if load_u8(address + i) else NEG_INF)
        else:
            store_f32(scratch + 4 * i, load_f32(address + 4 * i))
    return keep_lanes(load8(scratch), count)


@njit
def _prepare_rows(call, place, head, first, end):
    basis = basis_at(get(call, A_KEY_BASES), place)
    head_dim = get(call, A_KEY_DIM)
    query = get(call, A_QUERY) + 4 * (head * get(call, A_ROWS) + first) * head_dim
    out = prepared_row(call, place, head, first)
    stride = 4 * get(call, A_PREPARED_WIDTH)
    if get(basis, B_ROTATION) == 0:
        for row in range(end - first):
            for c in range(head_dim):
                store_f32(out + row * stride + 4 * (P_ROTATED + c), load_f32(query + 4 * (row * head_dim + c)))
    else:
        # Four rows at a time; the last ones may be the same row again.
        width = get(basis, B_ROTATION_STRIDE)
        rotation = get(basis, B_ROTATION) + head * head_dim * width
        rotation_scale = get(basis, B_ROTATION_SCALE) + 4 * head * width
        r1, r2, r3 = min(1, end - first - 1), min(2, end - first - 1), min(3, end - first - 1)
        for c in range(0, head_dim, 8):
            a0, a1, a2, a3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
            for d in range(head_dim):
                column = load8_i8(rotation + d * width + c)
                a0 = fma(load_splat(query + 4 * d), column, a0)
                a1 = fma(load_splat(query + 4 * (r1 * head_dim + d)), column, a1)
                a2 = fma(load_splat(query + 4 * (r2 * head_dim + d)), column, a2)
                a3 = fma(load_splat(query + 4 * (r3 * head_dim + d)), column, a3)
            at, unit = out + 4 * (P_ROTATED + c), load8(rotation_scale + 4 * c)
            store8(at, mul(a0, unit))
            store8(at + r1 * stride, mul(a1, unit))
            store8(at + r2 * stride, mul(a2, unit))
            store8(at + r3 * stride, mul(a3, unit))
    dense = get(basis, B_DENSE)
    offset, scale = get(basis, B_OFFSET) + 4 * head * dense, get(basis, B_SCALE) + 4 * head * dense
    step = load_f32(get(basis, B_STEP) + 4 * head)
    units = 4 * (P_ROTATED + padded(head_dim))
    for row in range(end - first):
        rotated, folded = out + row * stride + 4 * P_ROTATED, out + row * stride + units
        constant = np.float32(0.0)
        for c in range(dense):
            q, unit = load_f32(rotated + 4 * c), load_f32(scale + 4 * c)
            constant += q * load_f32(offset + 4 * c)
            store_f32(folded + 4 * c, q * unit)
        for c in range(dense, get(basis, B_DENSE_WIDTH)):
            store_f32(folded + 4 * c, 0.0)
        folded += 4 * get(basis, B_DENSE_WIDTH)
        for c in range(head_dim - dense):
            store_f32(folded + 4 * c, load_f32(rotated + 4 * (dense + c)) * step)
        for c in range(head_dim - dense, padded(head_dim - dense)):
            store_f32(folded + 4 * c, 0.0)
        store_f32(out + row * stride + 4 * P_CONSTANT, constant)


# Block scores


@njit(forceinline=True)
def _scores_at(call, source, head, row):
    place = (head * get(call, A_GROUP) + row) * get(call, A_SCORES_WIDTH) + get(source, C_FIRST_BLOCK)
    return get(call, A_SCORES) + 4 * place


def _dot_kernel(fetch):
    """A function that multiplies eight lanes of keys, as `fetch` loads them, by query rows."""

    @njit
    def dots(queries, query_stride, rows, channels, first, second, table, out):
        """Products of two groups of eight keys to `out[row, 0]` and `out[row, 1]`; a row of `out` has eight groups."""
        for row in range(0, rows, 4):
            # Four rows at a time; the last ones may be the same row again.
            r1, r2, r3 = min(row + 1, rows - 1), min(row + 2, rows - 1), min(row + 3, rows - 1)
            q0, q1 = queries + row * query_stride, queries + r1 * query_stride
            q2, q3 = queries + r2 * query_stride, queries + r3 * query_stride
            a0, a1, a2, a3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
            b0, b1, b2, b3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
            for c in range(channels):
                x, y = fetch(first, c, table), fetch(second, c, table)
                q = load_splat(q0 + 4 * c)
                a0, b0 = fma(q, x, a0), fma(q, y, b0)
                q = load_splat(q1 + 4 * c)
                a1, b1 = fma(q, x, a1), fma(q, y, b1)
                q = load_splat(q2 + 4 * c)
                a2, b2 = fma(q, x, a2), fma(q, y, b2)
                q = load_splat(q3 + 4 * c)
                a3, b3 = fma(q, x, a3), fma(q, y, b3)
            store8(out + _GROUPS * row, a0)
            store8(out + _GROUPS * row + 32, b0)
            store8(out + _GROUPS * r1, a1)
            store8(out + _GROUPS * r1 + 32, b1)
            store8(out + _GROUPS * r2, a2)
            store8(out + _GROUPS * r2 + 32, b2)
            store8(out + _GROUPS * r3, a3)
            store8(out + _GROUPS * r3 + 32, b3)

    return dots


# Bytes of a query row's products with eight groups of keys.
_GROUPS = 256


@njit(forceinline=True)
def _fetch_mean(keys, channel, _):
    return load8_i8(keys + 8 * channel)


@njit(forceinline=True)
def _fetch_codes(keys, channel, table):
    return load8_codes(keys + get(table, 2 * channel), get(table, 2 * channel + 1))


_dots_of_means, _dots_of_codes = _dot_kernel(_fetch_mean), _dot_kernel(_fetch_codes)


@njit
def _score_means(call, source, head, first, end, scratch):
    """By the mean keys of blocks `first` (a multiple of eight) to `end`."""
    channels, group = get(source, C_INDEX_CHANNELS), get(call, A_GROUP)
    means = get(source, C_MEANS) + (head * get(source, C_MEAN_TILES) + (first >> 3)) * channels * 8
    scale = get(source, C_MEAN_SCALE) + 4 * head * channels
    basis = get(source + 8 * C_K, S_BASIS)
    products, line = scratch, scratch + _GROUPS * group
    queries = line + 64
    for row in range(group):
        rotated = prepared_row(call, basis, head, row) + 4 * P_ROTATED
        for c in range(channels):
            store_f32(queries + 4 * (row * channels + c), load_f32(rotated + 4 * c) * load_f32(scale + 4 * c))
    for start in range(first, end, 64):
        count = min(64, end - start)
        groups = (count + 7) >> 3
        for i in range(0, groups, 2):
            one, two = means + 8 * channels * i, means + 8 * channels * min(i + 1, groups - 1)
            _dots_of_means(queries, 4 * channels, group, channels, one, two, 0, products + 32 * i)
        means += 64 * channels
        for row in range(group):
            scores, mine = _scores_at(call, source, head, row) + 4 * start, products + _GROUPS * row
            whole = count & ~7
            for i in range(0, whole, 8):
                store8(scores + 4 * i, load8(mine + 4 * i))
            for i in range(whole, count):
                store_f32(scores + 4 * i, load_f32(mine + 4 * i))
    if get(call, A_MASK_BYTES) != 0:
        size = get(source + 8 * C_K, S_BLOCK_SIZE)
        for row in range(group):
            for block in range(first, end):
                best = splat(NEG_INF)
                for token in range(block * size, min((block + 1) * size, get(source, C_LENGTH)), 8):
                    count = min(8, min((block + 1) * size, get(source, C_LENGTH)) - token)
                    bias = mask_lanes(call, head, row, get(source, C_FIRST_TOKEN) + token, count, line)
                    best = larger(bias, best)
                at = _scores_at(call, source, head, row) + 4 * block
                store_f32(at, load_f32(at) + maximum(best))


@njit
def _score_tokens(call, source, head, first, end, scratch):
    """By the best dense channels' logit of the tokens of blocks `first` to `end`."""
    keys, group = source + 8 * C_K, get(call, A_GROUP)
    size, length = get(keys, S_BLOCK_SIZE), get(source, C_LENGTH)
    dense = get(keys, S_DENSE)
    queries = prepared_row(call, get(keys, S_BASIS), head, 0)
    query_stride = 4 * get(call, A_PREPARED_WIDTH)
    units = queries + 4 * (P_ROTATED + padded(get(call, A_KEY_DIM)))
    per_block = (size + 7) >> 3
    products, line = scratch, scratch + _GROUPS * group
    table = dense_head(keys, head)
    masked = get(call, A_MASK_BYTES) != 0
    place = get(source, C_FIRST_TOKEN)
    if per_block > 1:
        for row in range(group):
            for block in range(first, end):
                store_f32(_scores_at(call, source, head, row) + 4 * block, NEG_INF)
    for start in range(first * per_block, end * per_block, 8):
        groups = min(8, end * per_block - start)
        last_block = (start + groups - 1) // per_block
        whole = groups == 8 and size % 8 == 0 and (last_block + 1) * size <= length
        for i in range(0, groups, 2):
            j = min(i + 1, groups - 1)
            block, token = (start + i) // per_block, 8 * ((start + i) % per_block)
            block2, token2 = (start + j) // per_block, 8 * ((start + j) % per_block)
            one, two = dense_tile(keys, table, block, token), dense_tile(keys, table, block2, token2)
            channels = table + 8 * D_CHANNELS
            _dots_of_codes(units, query_stride, group, dense, one, two, channels, products + 32 * i)
        for row in range(group):
            mine, prepared = products + _GROUPS * row, queries + row * query_stride
            if masked or not whole:
                for i in range(groups):
                    block, token = (start + i) // per_block, 8 * ((start + i) % per_block)
                    count = min(8, min(size, length - block * size) - token)
                    x = load8(mine + 32 * i)
                    if count <= 0:
                        x = splat(NEG_INF)
                    else:
                        if masked:
                            x = add(x, mask_lanes(call, head, row, place + block * size + token, count, line))
                        x = keep_lanes(x, count)
                    store8(mine + 32 * i, x)
            best = maxima(
                load8(mine),
                load8(mine + 32),
                load8(mine + 64),
                load8(mine + 96),
                load8(mine + 128),
                load8(mine + 160),
                load8(mine + 192),
                load8(mine + 224),
            )
            best = add(best, load_splat(prepared + 4 * P_CONSTANT))
            scores = _scores_at(call, source, head, row)
            if per_block == 1 and groups == 8:
                store8(scores + 4 * start, best)
            else:
                store8(line, best)
                for i in range(groups):
                    at = scores + 4 * ((start + i) // per_block)
                    if per_block == 1:
                        store_f32(at, load_f32(line + 4 * i))
                    else:
                        store_f32(at, max(load_f32(at), load_f32(line + 4 * i)))


@njit
def _sum_exp(scores, count, out, scratch):
    """The largest of `count` scores and the sum of `exp(score - largest)`."""
    tail = count & 7
    for i in range(tail):
        store_f32(scratch + 4 * i, load_f32(scores + 4 * (count - tail + i)))
    last = keep_lanes(load8(scratch), tail)
    best = last
    for i in range(0, count - tail, 8):
        best = larger(load8(scores + 4 * i), best)
    largest = maximum(best)
    store_f32(out, largest)
    if largest == NEG_INF:
        store_f32(out + 4, 0.0)
        return
    shift = splat(largest)
    sums = exp(sub(last, shift))
    for i in range(0, count - tail, 8):
        sums = add(sums, exp(sub(load8(scores + 4 * i), shift)))
    store_f32(out + 4, total(sums))


# Top-k


@njit
def _best_shares(call, head):
    """In place of the first query head's scores: every block's largest share, log-softmax, of the group's heads."""
    heads, group, ranges = get(call, A_HEADS), get(call, A_GROUP), get(call, A_NUM_RANGES)
    count, width = get(call, A_NUM_BLOCKS), get(call, A_SCORES_WIDTH)
    scores = get(call, A_SCORES) + 4 * head * group * width
    for row in range(group):
        largest = NEG_INF
        for i in range(ranges):
            largest = max(largest, load_f32(get(call, A_RANGE_SUMS) + 8 * ((i * heads + head) * group + row)))
        whole = np.float32(0.0)
        if largest > NEG_INF:
            for i in range(ranges):
                at = get(call, A_RANGE_SUMS) + 8 * ((i * heads + head) * group + row)
                whole += load_f32(at + 4) * np.exp(load_f32(at) - largest)
            # A head that sees nothing has no share in any block.
            shift = splat(-(largest + np.log(whole)))
        else:
            shift = splat(NEG_INF)
        mine = scores + 4 * row * width
        if row == 0:
            for i in range(0, count, 8):
                store8(scores + 4 * i, add(load8(scores + 4 * i), shift))
        else:
            for i in range(0, count, 8):
                share = add(load8(mine + 4 * i), shift)
                store8(scores + 4 * i, larger(share, load8(scores + 4 * i)))


@njit
def _choose(call, head, scratch):
    blocks, k = get(call, A_NUM_BLOCKS), get(call, A_CHOSEN_COUNT)
    keys = get(call, A_SCORES) + 4 * head * get(call, A_GROUP) * get(call, A_SCORES_WIDTH)
    to_keys(keys, blocks)
    kth, ties = kth_largest(keys, blocks, k, scratch)
    chosen, starts = get(call, A_CHOSEN) + 4 * head * k, get(call, A_CHOSEN_STARTS)
    selected = 0
    for i in range(get(call, A_NUM_SOURCES)):
        if get(source_at(call, i), C_SELECTED) >= 0:
            selected += 1
    starts += 4 * head * (selected + 1)
    count = 0
    for i in range(get(call, A_NUM_SOURCES)):
        source = source_at(call, i)
        if get(source, C_SELECTED) < 0:
            continue
        store_i32(starts + 4 * get(source, C_SELECTED), count)
        first = get(source, C_FIRST_BLOCK)
        taken, ties = take(keys, first, first + get(source, C_BLOCKS), kth, ties, chosen + 4 * count)
        count += taken
    store_i32(starts + 4 * selected, count)


def _compile(sources: int):
    """The phases, whose compiled forms are kept on disk until `sources` changes."""

    @cfunc("void(int64)", cache=True)
    def prepare(call):
        """The queries in every basis of the keys."""
        sources  # noqa: B018
        heads, rows, bases = get(call, A_HEADS), get(call, A_ROWS), get(call, A_NUM_KEY_BASES)
        chunks = (rows + 3) >> 2
        while True:
            item = next_item(call + 8 * A_COUNTER)
            if item >= bases * heads * chunks:
                return
            chunk, item = item % chunks, item // chunks
            _prepare_rows(call, item // heads, item % heads, 4 * chunk, min(4 * chunk + 4, rows))

    @cfunc("void(int64)", cache=True)
    def score(call):
        """`A_SCORES` and `A_RANGE_SUMS`: every head's score of every packed block."""
        sources  # noqa: B018
        heads, group = get(call, A_HEADS), get(call, A_GROUP)
        scratch = join(call)
        while True:
            item = next_item(call + 8 * A_COUNTER)
            if item >= get(call, A_NUM_RANGES) * heads:
                return
            place, head = item // heads, item % heads
            span = get(call, A_RANGES) + 24 * place
            source, first, end = source_at(call, load_i64(span)), load_i64(span + 8), load_i64(span + 16)
            if get(source, C_MEANS) != 0:
                _score_means(call, source, head, first, end, scratch)
            else:
                _score_tokens(call, source, head, first, end, scratch)
            for row in range(group):
                scores = _scores_at(call, source, head, row) + 4 * first
                _sum_exp(scores, end - first, get(call, A_RANGE_SUMS) + 8 * (item * group + row), scratch)

    @cfunc("void(int64)", cache=True)
    def select(call):
        """`A_CHOSEN` and `A_CHOSEN_STARTS`: the best blocks of every KV head."""
        sources  # noqa: B018
        heads = get(call, A_HEADS)
        scratch = join(call)
        while True:
            head = next_item(call + 8 * A_COUNTER)
            if head >= heads:
                return
            _best_shares(call, head)
            _choose(call, head, scratch)

    return prepare, score, select


prepare, score, select = _compile(SOURCES)
