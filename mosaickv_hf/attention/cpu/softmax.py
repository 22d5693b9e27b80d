"""Phases that attend: partial softmax over every source of tokens, and the merge of the partials."""

import numpy as np
from numba import cfunc, njit

from .fields import (
    A_CHOSEN,
    A_CHOSEN_COUNT,
    A_CHOSEN_STARTS,
    A_CHUNK,
    A_COUNTER,
    A_HEADS,
    A_KEY_DIM,
    A_MASK_BYTES,
    A_NUM_SLOTS,
    A_NUM_SOURCES,
    A_NUM_VALUE_BASES,
    A_OUTPUT,
    A_PARTIAL_WIDTH,
    A_PARTIALS,
    A_ROWS,
    A_SLOTS,
    A_VALUE_BASES,
    A_VALUE_DIM,
    B_DENSE,
    B_DENSE_WIDTH,
    B_HEAD_DIM,
    B_OFFSET,
    B_ROTATION,
    B_ROTATION_SCALE,
    B_ROTATION_STRIDE,
    B_SCALE,
    B_STEP,
    C_BLOCKS,
    C_FIRST_TOKEN,
    C_K,
    C_LENGTH,
    C_SELECTED,
    C_V,
    RAW_BF16,
    S_BASIS,
    S_BLOCK_SIZE,
    S_DENSE_WIDTH,
    S_KIND,
    S_WIDTH,
)
from .rows import prefetch_block, unpack_rows
from .scoring import P_CONSTANT, P_ROTATED, basis_at, join, mask_lanes, padded, prepared_row, source_at
from .simd import (
    add,
    exp,
    fma,
    get,
    keep_lanes,
    larger,
    load8,
    load8_i8,
    load_f32,
    load_i32,
    load_i64,
    load_splat,
    maximum,
    mul,
    next_item,
    splat,
    store8,
    store_f32,
    store_i64,
    sub,
    sums,
    total,
)
from .threads import SOURCES

NEG_INF = np.float32(-np.inf)
# Tokens whose logits are computed, and whose values are unpacked, before they are used: their values fit the
# first-level cache.
TILE = 32


@njit
def _attend_part(call, source, head, first_row, rows, part, parts, partial, scratch):
    """Part number `part` of `parts` of a source's blocks, for `rows` query rows of a head."""
    keys, values = source + 8 * C_K, source + 8 * C_V
    key_width, value_width = get(keys, S_WIDTH), get(values, S_WIDTH)
    size, length = get(keys, S_BLOCK_SIZE), get(source, C_LENGTH)
    per_block = (size + 7) >> 3
    packed = get(keys, S_KIND) < RAW_BF16
    masked = get(call, A_MASK_BYTES) != 0
    place, basis = get(source, C_FIRST_TOKEN), get(keys, S_BASIS)
    folded = 4 * (P_ROTATED + padded(get(call, A_KEY_DIM)))

    tops, totals, outputs = partial, partial + 4 * rows, partial + 8 * rows
    for row in range(rows):
        store_f32(tops + 4 * row, NEG_INF)
        store_f32(totals + 4 * row, 0.0)
    for i in range(0, rows * value_width, 8):
        store8(outputs + 4 * i, splat(0.0))

    # A source's blocks, or those chosen of it.
    selected = get(source, C_SELECTED)
    chosen = 0
    blocks = get(source, C_BLOCKS)
    if selected >= 0:
        starts = get(call, A_CHOSEN_STARTS) + 4 * selected
        for i in range(get(call, A_NUM_SOURCES)):
            if get(source_at(call, i), C_SELECTED) >= 0:
                starts += 4 * head
        starts += 4 * head
        begin = load_i32(starts)
        blocks = load_i32(starts + 4) - begin
        chosen = get(call, A_CHOSEN) + 4 * (head * get(call, A_CHOSEN_COUNT) + begin)
    first_group, end_group = blocks * part // parts * per_block, blocks * (part + 1) // parts * per_block

    tile_groups = TILE // 8
    spare = scratch
    line = spare + 5 * max(key_width, value_width) + 128
    where = line + 64
    lanes = where + 8 * 3 * tile_groups
    key_rows = lanes + 32 * max(get(keys, S_DENSE_WIDTH), get(values, S_DENSE_WIDTH))
    value_rows = key_rows + 32 * key_width
    weights = value_rows + 4 * TILE * value_width
    group = first_group
    while group < end_group:
        groups = 0
        while groups < tile_groups and group < end_group:
            block, token = group // per_block, 8 * (group % per_block)
            if chosen != 0:
                block = load_i32(chosen + 4 * block)
            count = min(8, min(size, length - block * size) - token)
            if packed and chosen != 0 and token == 0:
                ahead = group // per_block + 2
                if ahead < blocks:
                    prefetch_block(keys, head, load_i32(chosen + 4 * ahead))
                    prefetch_block(values, head, load_i32(chosen + 4 * ahead))
            group += 1
            if count <= 0:
                continue
            at = where + 24 * groups
            store_i64(at, block)
            store_i64(at + 8, token)
            unpack_rows(keys, head, block, token, length, key_rows, 4 * key_width, lanes, spare)
            for row in range(rows):
                query = prepared_row(call, basis, head, first_row + row)
                logits = add(
                    _dots(query + folded, key_rows, key_width, 4 * key_width), load_splat(query + 4 * P_CONSTANT)
                )
                if masked:
                    seen = place + block * size + token
                    logits = add(logits, mask_lanes(call, head, first_row + row, seen, count, line))
                if count < 8:
                    logits = keep_lanes(logits, count)
                store8(weights + 4 * (row * TILE + 8 * groups), logits)
            groups += 1
        if groups == 0:
            continue
        for row in range(rows):
            _update_weights(
                weights + 4 * row * TILE, groups, tops + 4 * row, totals + 4 * row, outputs, row, value_width
            )
        for i in range(groups):
            at = where + 24 * i
            block, token = load_i64(at), load_i64(at + 8)
            out = value_rows + 32 * i * value_width
            unpack_rows(values, head, block, token, length, out, 4 * value_width, lanes, spare)
        _accumulate(weights, rows, 8 * groups, value_rows, value_width, outputs)


@njit
def _dots(query, rows, width, stride):
    """Lane i: `query` times row i of eight, `stride` bytes apart."""
    a0, a1, a2, a3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    a4, a5, a6, a7 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    upper = rows + 4 * stride
    for c in range(0, 4 * width, 32):
        q = load8(query + c)
        low, high = rows + c, upper + c
        a0 = fma(q, load8(low), a0)
        a1 = fma(q, load8(low + stride), a1)
        a2 = fma(q, load8(low + 2 * stride), a2)
        a3 = fma(q, load8(low + 3 * stride), a3)
        a4 = fma(q, load8(high), a4)
        a5 = fma(q, load8(high + stride), a5)
        a6 = fma(q, load8(high + 2 * stride), a6)
        a7 = fma(q, load8(high + 3 * stride), a7)
    return sums(a0, a1, a2, a3, a4, a5, a6, a7)


@njit
def _update_weights(weights, groups, top, whole, outputs, row, width):
    """Logits of a tile to weights relative to the largest logit so far; what was summed up before follows it."""
    best = load8(weights)
    for i in range(1, groups):
        best = larger(load8(weights + 32 * i), best)
    before, largest = load_f32(top), maximum(best)
    if largest > before:
        if before > NEG_INF:
            keep = np.exp(before - largest)
            store_f32(whole, load_f32(whole) * keep)
            factor = splat(keep)
            for c in range(4 * row * width, 4 * (row + 1) * width, 32):
                store8(outputs + c, mul(load8(outputs + c), factor))
        store_f32(top, largest)
    else:
        largest = before
    if largest == NEG_INF:
        largest = np.float32(0.0)  # nothing of it is seen: weights of zero, where a NaN stays one
    shift = splat(largest)
    summed = splat(0.0)
    for i in range(groups):
        weight = exp(sub(load8(weights + 32 * i), shift))
        summed = add(summed, weight)
        store8(weights + 32 * i, weight)
    store_f32(whole, load_f32(whole) + total(summed))


@njit
def _accumulate(weights, rows, tokens, values, width, outputs):
    """`outputs[row] += sum over t of weights[row, t] * values[t]`, four rows at a time where there are."""
    stride = 4 * width
    row = 0
    while row + 4 <= rows:
        w = weights + 4 * row * TILE
        out = outputs + row * stride
        c = 0
        while c + 64 <= stride:
            at = out + c
            a0, b0 = load8(at), load8(at + 32)
            a1, b1 = load8(at + stride), load8(at + stride + 32)
            a2, b2 = load8(at + 2 * stride), load8(at + 2 * stride + 32)
            a3, b3 = load8(at + 3 * stride), load8(at + 3 * stride + 32)
            v = values + c
            for t in range(tokens):
                x, y = load8(v), load8(v + 32)
                v += stride
                p = load_splat(w + 4 * t)
                a0, b0 = fma(p, x, a0), fma(p, y, b0)
                p = load_splat(w + 4 * (t + TILE))
                a1, b1 = fma(p, x, a1), fma(p, y, b1)
                p = load_splat(w + 4 * (t + 2 * TILE))
                a2, b2 = fma(p, x, a2), fma(p, y, b2)
                p = load_splat(w + 4 * (t + 3 * TILE))
                a3, b3 = fma(p, x, a3), fma(p, y, b3)
            store8(at, a0)
            store8(at + 32, b0)
            store8(at + stride, a1)
            store8(at + stride + 32, b1)
            store8(at + 2 * stride, a2)
            store8(at + 2 * stride + 32, b2)
            store8(at + 3 * stride, a3)
            store8(at + 3 * stride + 32, b3)
            c += 64
        if c < stride:
            for i in range(4):
                _accumulate_vector(w + 4 * i * TILE, tokens, values + c, stride, out + i * stride + c)
        row += 4
    while row < rows:
        w = weights + 4 * row * TILE
        out = outputs + row * stride
        c = 0
        while c + 128 <= stride:
            at = out + c
            a0, a1, a2, a3 = load8(at), load8(at + 32), load8(at + 64), load8(at + 96)
            v = values + c
            for t in range(tokens):
                p = load_splat(w + 4 * t)
                a0, a1 = fma(p, load8(v), a0), fma(p, load8(v + 32), a1)
                a2, a3 = fma(p, load8(v + 64), a2), fma(p, load8(v + 96), a3)
                v += stride
            store8(at, a0)
            store8(at + 32, a1)
            store8(at + 64, a2)
            store8(at + 96, a3)
            c += 128
        while c < stride:
            _accumulate_vector(w, tokens, values + c, stride, out + c)
            c += 32
        row += 1


@njit
def _accumulate_vector(weights, tokens, values, stride, out):
    a = load8(out)
    for t in range(tokens):
        a = fma(load_splat(weights + 4 * t), load8(values + t * stride), a)
    store8(out, a)


@njit
def _merge_row(call, head, row, scratch):
    chunk, slots, width = get(call, A_CHUNK), get(call, A_NUM_SLOTS), get(call, A_PARTIAL_WIDTH)
    rows, value_dim = get(call, A_ROWS), get(call, A_VALUE_DIM)
    chunks = (rows + chunk - 1) // chunk
    count = min(chunk, rows - row // chunk * chunk)
    partials = get(call, A_PARTIALS) + 4 * (head * chunks + row // chunk) * slots * width
    row_in_chunk = row % chunk
    output = get(call, A_OUTPUT) + 4 * (head * rows + row) * value_dim
    for d in range(value_dim):
        store_f32(output + 4 * d, 0.0)

    largest = NEG_INF
    for slot in range(slots):
        largest = max(largest, load_f32(partials + 4 * (slot * width + row_in_chunk)))
    if largest == NEG_INF:
        largest = np.float32(0.0)  # nothing is seen: zero, or NaN if there was one
    whole = np.float32(0.0)
    collected = scratch
    plain = collected + 4 * (padded(value_dim) + 16)
    for place in range(get(call, A_NUM_VALUE_BASES)):
        basis = basis_at(get(call, A_VALUE_BASES), place)
        basis_total = np.float32(0.0)
        for c in range(padded(value_dim) + 16):
            store_f32(collected + 4 * c, 0.0)
        for slot in range(slots):
            source = source_at(call, load_i64(get(call, A_SLOTS) + 24 * slot))
            if get(source + 8 * C_V, S_BASIS) != place:
                continue
            partial = partials + 4 * slot * width
            weight = np.exp(load_f32(partial + 4 * row_in_chunk) - largest)
            basis_total += weight * load_f32(partial + 4 * (count + row_in_chunk))
            value_width = get(source + 8 * C_V, S_WIDTH)
            values = partial + 4 * (2 * count + row_in_chunk * value_width)
            for c in range(0, 4 * value_width, 32):
                store8(collected + c, fma(splat(weight), load8(values + c), load8(collected + c)))
        whole += basis_total
        _add_back(basis, head, collected, basis_total, plain, output)
    if whole != 0.0:
        for d in range(value_dim):
            store_f32(output + 4 * d, load_f32(output + 4 * d) / whole)


@njit
def _add_back(basis, head, collected, weight, plain, output):
    """Adds weighted units of one basis, whose weights' sum is `weight`, to an output row in the model's channels."""
    dense, head_dim = get(basis, B_DENSE), get(basis, B_HEAD_DIM)
    offset, scale = get(basis, B_OFFSET) + 4 * head * dense, get(basis, B_SCALE) + 4 * head * dense
    step = load_f32(get(basis, B_STEP) + 4 * head)
    for c in range(head_dim, padded(head_dim)):
        store_f32(plain + 4 * c, 0.0)
    for c in range(dense):
        zero, unit = load_f32(offset + 4 * c), load_f32(scale + 4 * c)
        store_f32(plain + 4 * c, load_f32(collected + 4 * c) * unit + weight * zero)
    sparse = collected + 4 * get(basis, B_DENSE_WIDTH)
    for c in range(head_dim - dense):
        store_f32(plain + 4 * (dense + c), load_f32(sparse + 4 * c) * step)
    if get(basis, B_ROTATION) == 0:
        for d in range(head_dim):
            store_f32(output + 4 * d, load_f32(output + 4 * d) + load_f32(plain + 4 * d))
        return
    stride = get(basis, B_ROTATION_STRIDE)
    rotation = get(basis, B_ROTATION) + head * head_dim * stride
    units = get(basis, B_ROTATION_SCALE) + 4 * head * stride
    for c in range(0, head_dim, 8):
        store8(plain + 4 * c, mul(load8(plain + 4 * c), load8(units + 4 * c)))
    for d in range(head_dim):
        a, b = splat(0.0), splat(0.0)
        c = 0
        while c + 16 <= head_dim:
            a = fma(load8(plain + 4 * c), load8_i8(rotation + c), a)
            b = fma(load8(plain + 4 * c + 32), load8_i8(rotation + c + 8), b)
            c += 16
        for rest in range(c, head_dim, 8):
            a = fma(load8(plain + 4 * rest), load8_i8(rotation + rest), a)
        store_f32(output + 4 * d, load_f32(output + 4 * d) + total(add(a, b)))
        rotation += stride


def _compile(sources: int):
    """The phases, whose compiled forms are kept on disk until `sources` changes."""

    @cfunc("void(int64)", cache=True)
    def attend(call):
        """`A_PARTIALS`: every KV head's and query chunk's softmax over every slot, in the values' rotated space."""
        sources  # noqa: B018
        heads, rows, chunk, slots = get(call, A_HEADS), get(call, A_ROWS), get(call, A_CHUNK), get(call, A_NUM_SLOTS)
        chunks = (rows + chunk - 1) // chunk
        scratch = join(call)
        while True:
            item = next_item(call + 8 * A_COUNTER)
            if item >= heads * chunks * slots:
                return
            partial = get(call, A_PARTIALS) + 4 * item * get(call, A_PARTIAL_WIDTH)
            slot, item = get(call, A_SLOTS) + 24 * (item % slots), item // slots
            first = (item % chunks) * chunk
            count = min(chunk, rows - first)
            source = source_at(call, load_i64(slot))
            _attend_part(
                call, source, item // chunks, first, count, load_i64(slot + 8), load_i64(slot + 16), partial, scratch
            )

    @cfunc("void(int64)", cache=True)
    def merge(call):
        """`A_OUTPUT`: all slots' partials as one softmax, each basis' part rotated back."""
        sources  # noqa: B018
        heads, rows = get(call, A_HEADS), get(call, A_ROWS)
        scratch = join(call)
        while True:
            item = next_item(call + 8 * A_COUNTER)
            if item >= heads * rows:
                return
            _merge_row(call, item // rows, item % rows, scratch)

    return attend, merge


attend, merge = _compile(SOURCES)
