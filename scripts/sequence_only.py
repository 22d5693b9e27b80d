"""The baseline that selects tokens but compresses nothing: Quest's page scores over dense rows, in numba.

Of every page of 16 tokens the elementwise minimum and maximum of the keys are kept. A page's score is the largest
logit that a key within those bounds could have, `sum_c max(q_c * min_c, q_c * max_c)` (arXiv 2406.10774); the best
pages of each KV head are attended to. The kernels use the same vector operations, top-k and thread pool as the
package's own. The query heads of a group choose together, by the largest of their scores, and share each loaded row.

The score is two multiply-adds a channel, not four operations: `max(q * min, q * max)` is `max * q` for a positive q
and `min * q` for a negative one, so the positive parts of the query go with the maxima and the negative ones with
the minima.
"""

import numpy as np
import torch
from numba import cfunc, njit

from mosaickv_hf.attention.cpu.simd import (
    add,
    exp,
    fma,
    larger,
    load8,
    load_f32,
    load_i32,
    load_i64,
    load_splat,
    maximum,
    mul,
    next_item,
    prefetch,
    splat,
    store8,
    store_f32,
    sub,
    sums,
    total,
)
from mosaickv_hf.attention.cpu.threads import SOURCES, run
from mosaickv_hf.attention.cpu.topk import SCRATCH_BYTES, kth_largest, take, to_keys
from mosaickv_hf.segments import tile

PAGE = 16
"""Tokens of a page, as in Quest."""

# Pages and tokens whose logits become weights together.
_TILE_PAGES = 4
_TILE = _TILE_PAGES * PAGE
# Pages scored as one work item: two tiles of eight, sixteen times.
_RANGE_PAGES = 256
_ITEMS_PER_THREAD = 4
_NEG_INF = np.float32(-np.inf)

# The table that a call's kernels read; `run` sets the first two fields to zero.
(
    _COUNTER,
    _UNUSED,
    _HEADS,
    _ROWS,  # query heads of a KV head
    _DIM,
    _PAGES,
    _QUERY,  # fp32 [heads, rows, dim]
    _SPLIT,  # fp32 [heads, rows, 2 * dim]: positive parts, negative parts
    _BOUNDS,  # fp32 [heads, ceil(pages / 8), 2 * dim, 8]: maxima, minima
    _SCORES,  # fp32 [heads, pages rounded up to whole tiles]
    _HISTOGRAM,  # uint8 [heads, SCRATCH_BYTES]
    _COUNT,  # pages to choose
    _CHOSEN,  # int32 [heads, count]
    _KEYS,  # fp32 [heads, pages * PAGE, dim]
    _VALUES,
    _PARTS,  # work items of a head
    _PARTIALS,  # fp32 [heads, parts, partial_width]: tops, totals, outputs, weights of a tile
    _PARTIAL_WIDTH,
    _OUTPUT,  # fp32 [heads, rows, dim]
    _FIELDS,
) = range(20)


class SequenceOnly:
    """Dense K and V with their page bounds.

    Args:
        keys, values: `[num_kv_heads, length, head_dim]` fp32, contiguous, kept by reference; a batch's heads may be
            put one behind the other. Whole pages, head_dim a multiple of 64.
        num_tokens: tokens to select, rounded up to whole pages.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_tokens: int):
        heads, length, dim = keys.shape
        if length % PAGE or dim % 64:
            raise ValueError(f"`keys` must have whole pages of {PAGE} and head_dim a multiple of 64, got {keys.shape}")
        self.heads, self.dim, self.num_pages = heads, dim, length // PAGE
        self.count = min(self.num_pages, -(-num_tokens // PAGE))
        pages = keys.unflatten(1, (-1, PAGE))
        self.bounds = tile(torch.cat([pages.amax(2), pages.amin(2)], dim=-1), 8)
        self.keys, self.values = keys.contiguous(), values.contiguous()
        self.threads = torch.get_num_threads()
        self.scores = torch.empty(heads, 8 * self.bounds.shape[1])
        self.histogram = torch.empty(heads, SCRATCH_BYTES, dtype=torch.uint8)
        self.chosen = torch.empty(heads, self.count, dtype=torch.int32)

    def begin(self, query: torch.Tensor) -> None:
        """Takes the query `[num_kv_heads, group, head_dim]`, fp32, already multiplied by the softmax scale."""
        rows = query.shape[1]
        self._query = query.contiguous()
        self._split = torch.cat([query.clamp_min(0), query.clamp_max(0)], dim=-1)
        parts = max(1, min(-(-_ITEMS_PER_THREAD * self.threads // self.heads), self.count // _TILE_PAGES))
        width = rows * (2 + self.dim + _TILE)
        self._partials = torch.empty(self.heads * parts * width)
        self._output = torch.empty(self.heads, rows, self.dim)
        call = self._call = np.zeros(_FIELDS, dtype=np.int64)
        call[_HEADS : _QUERY + 1] = self.heads, rows, self.dim, self.num_pages, self._query.data_ptr()
        tensors = (self._split, self.bounds, self.scores, self.histogram)
        call[_SPLIT : _HISTOGRAM + 1] = [tensor.data_ptr() for tensor in tensors]
        call[_COUNT : _VALUES + 1] = self.count, *(x.data_ptr() for x in (self.chosen, self.keys, self.values))
        call[_PARTS : _OUTPUT + 1] = parts, self._partials.data_ptr(), width, self._output.data_ptr()

    def score(self) -> None:
        """`scores[head, page]`."""
        run(_score_phase.address, self._call, self.threads)

    def select(self) -> None:
        """`chosen[head]`: the best pages, in order."""
        run(_select_phase.address, self._call, self.threads)

    def attend(self) -> torch.Tensor:
        """`[num_kv_heads, group, head_dim]`: attention to the chosen pages."""
        run(_attend_phase.address, self._call, self.threads)
        run(_merge_phase.address, self._call, self.threads)
        return self._output

    def __call__(self, query: torch.Tensor) -> torch.Tensor:
        """All of it, for one token's query as in `begin`."""
        self.begin(query)
        self.score()
        self.select()
        return self.attend()

    def cost(self, group: int) -> dict[str, tuple[int, int]]:
        """Bytes read and multiply-adds of a step, by stage, with `group` query heads for each KV head."""
        rows, scores = self.count * PAGE, self.heads * group * self.num_pages
        return {
            "score": (self.bounds.nbytes, 2 * scores * self.dim),
            "top_k": (8 * scores, scores),
            "attend": (2 * self.heads * rows * self.dim * 4, 2 * self.heads * group * self.dim * rows),
        }


@njit(forceinline=True)
def _get(call, field):
    return load_i64(call + 8 * field)


@njit
def _score(call):
    heads, pages = _get(call, _HEADS), _get(call, _PAGES)
    ranges = (pages + _RANGE_PAGES - 1) // _RANGE_PAGES
    while True:
        item = next_item(call + 8 * _COUNTER)
        if item >= heads * ranges:
            return
        first = item % ranges * _RANGE_PAGES
        _score_range(call, item // ranges, first // 8, (min(first + _RANGE_PAGES, pages) + 7) // 8)


@njit
def _score_range(call, head, first, end):
    """Scores two tiles of eight pages at a time."""
    rows, width = _get(call, _ROWS), 2 * _get(call, _DIM)
    tiles = (_get(call, _PAGES) + 7) // 8
    queries = _get(call, _SPLIT) + 4 * head * rows * width
    for i in range(first, end, 2):
        left = _get(call, _BOUNDS) + 32 * width * (head * tiles + i)
        # The last of an odd number is scored twice.
        right = left + 32 * width if i + 1 < end else left
        best_left, best_right = splat(_NEG_INF), splat(_NEG_INF)
        row = 0
        while row + 4 <= rows:
            best_left, best_right = _score_four(queries + 4 * row * width, left, right, width, best_left, best_right)
            row += 4
        while row < rows:
            best_left, best_right = _score_one(queries + 4 * row * width, left, right, width, best_left, best_right)
            row += 1
        scores = _get(call, _SCORES) + 32 * (head * tiles + i)
        store8(scores, best_left)
        if i + 1 < end:
            store8(scores + 32, best_right)


@njit
def _score_four(query, left, right, width, best_left, best_right):
    a0, a1, a2, a3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    b0, b1, b2, b3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    stride = 4 * width
    for c in range(width):
        x, y = load8(left + 32 * c), load8(right + 32 * c)
        at = query + 4 * c
        q = load_splat(at)
        a0, b0 = fma(q, x, a0), fma(q, y, b0)
        q = load_splat(at + stride)
        a1, b1 = fma(q, x, a1), fma(q, y, b1)
        q = load_splat(at + 2 * stride)
        a2, b2 = fma(q, x, a2), fma(q, y, b2)
        q = load_splat(at + 3 * stride)
        a3, b3 = fma(q, x, a3), fma(q, y, b3)
    best_left = larger(larger(larger(a0, a1), larger(a2, a3)), best_left)
    return best_left, larger(larger(larger(b0, b1), larger(b2, b3)), best_right)


@njit
def _score_one(query, left, right, width, best_left, best_right):
    a0, a1, b0, b1 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for c in range(0, width, 2):
        q, at = load_splat(query + 4 * c), 32 * c
        a0, b0 = fma(q, load8(left + at), a0), fma(q, load8(right + at), b0)
        q, at = load_splat(query + 4 * c + 4), at + 32
        a1, b1 = fma(q, load8(left + at), a1), fma(q, load8(right + at), b1)
    return larger(add(a0, a1), best_left), larger(add(b0, b1), best_right)


@njit
def _select(call):
    while True:
        head = next_item(call + 8 * _COUNTER)
        if head >= _get(call, _HEADS):
            return
        _choose(call, head)


@njit
def _choose(call, head):
    pages, count = _get(call, _PAGES), _get(call, _COUNT)
    keys = _get(call, _SCORES) + 4 * head * ((pages + 7) // 8 * 8)
    to_keys(keys, pages)
    kth, ties = kth_largest(keys, pages, count, _get(call, _HISTOGRAM) + SCRATCH_BYTES * head)
    take(keys, 0, pages, kth, ties, _get(call, _CHOSEN) + 4 * head * count)


@njit
def _attend(call):
    parts = _get(call, _PARTS)
    while True:
        item = next_item(call + 8 * _COUNTER)
        if item >= _get(call, _HEADS) * parts:
            return
        _attend_part(call, item, item // parts, item % parts, parts)


@njit
def _attend_part(call, item, head, part, parts):
    rows, dim, count = _get(call, _ROWS), _get(call, _DIM), _get(call, _COUNT)
    page_bytes = 4 * PAGE * dim
    query = _get(call, _QUERY) + 4 * head * rows * dim
    keys = _get(call, _KEYS) + head * _get(call, _PAGES) * page_bytes
    values = _get(call, _VALUES) + head * _get(call, _PAGES) * page_bytes
    chosen = _get(call, _CHOSEN) + 4 * head * count
    tops = _get(call, _PARTIALS) + 4 * item * _get(call, _PARTIAL_WIDTH)
    totals = tops + 4 * rows
    outputs = totals + 4 * rows
    weights = outputs + 4 * rows * dim
    for row in range(rows):
        store_f32(tops + 4 * row, _NEG_INF)
        store_f32(totals + 4 * row, 0.0)
    for i in range(0, rows * dim, 8):
        store8(outputs + 4 * i, splat(0.0))
    at, end = count * part // parts, count * (part + 1) // parts
    while at < end:
        pages = min(_TILE_PAGES, end - at)
        for i in range(pages):
            page = load_i32(chosen + 4 * (at + i)) * page_bytes
            _page_logits(query, rows, dim, keys + page, weights + 4 * PAGE * i, values + page)
        for row in range(rows):
            _weigh(weights + 4 * row * _TILE, 2 * pages, tops + 4 * row, totals + 4 * row, outputs + 4 * row * dim, dim)
        for i in range(pages):
            page = load_i32(chosen + 4 * (at + i)) * page_bytes
            ahead = load_i32(chosen + 4 * min(at + pages + i, end - 1)) * page_bytes
            _page_sums(weights + 4 * PAGE * i, rows, dim, values + page, outputs, keys + ahead)
        at += pages


@njit
def _page_logits(query, rows, dim, keys, weights, ahead):
    """Logits of a page; meanwhile the page at `ahead` is fetched."""
    lines = (dim + 2 * rows - 1) // (2 * rows)  # a page has `dim` cache lines
    for half in range(2):
        for row in range(rows):
            _fetch(ahead, lines)
            ahead += 64 * lines
            logits = _dots(query + 4 * row * dim, keys + half * 32 * dim, dim)
            store8(weights + 4 * (row * _TILE + 8 * half), logits)


@njit
def _dots(query, keys, dim):
    """Lane i: `query` times row i of eight."""
    a0, a1, a2, a3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    a4, a5, a6, a7 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    stride = 4 * dim
    for c in range(0, stride, 32):
        q, at = load8(query + c), keys + c
        a0, a1 = fma(q, load8(at), a0), fma(q, load8(at + stride), a1)
        a2, a3 = fma(q, load8(at + 2 * stride), a2), fma(q, load8(at + 3 * stride), a3)
        a4, a5 = fma(q, load8(at + 4 * stride), a4), fma(q, load8(at + 5 * stride), a5)
        a6, a7 = fma(q, load8(at + 6 * stride), a6), fma(q, load8(at + 7 * stride), a7)
    return sums(a0, a1, a2, a3, a4, a5, a6, a7)


@njit
def _weigh(weights, vectors, top, whole, output, dim):
    """Logits to weights relative to the largest logit so far; what was summed up before follows it."""
    best = load8(weights)
    for i in range(1, vectors):
        best = larger(load8(weights + 32 * i), best)
    before, largest = load_f32(top), maximum(best)
    if largest > before:
        keep = np.exp(before - largest)
        store_f32(whole, load_f32(whole) * keep)
        for c in range(0, 4 * dim, 32):
            store8(output + c, mul(load8(output + c), splat(keep)))
        store_f32(top, largest)
    else:
        largest = before
    summed = splat(0.0)
    for i in range(vectors):
        weight = exp(sub(load8(weights + 32 * i), splat(largest)))
        summed = add(summed, weight)
        store8(weights + 32 * i, weight)
    store_f32(whole, load_f32(whole) + total(summed))


@njit
def _page_sums(weights, rows, dim, values, outputs, ahead):
    """Adds the weighted rows of a page; meanwhile the page at `ahead` is fetched."""
    stride = 4 * dim
    row = 0
    while row + 4 <= rows:
        for c in range(0, stride, 64):
            if row == 0:
                _fetch(ahead + 16 * c, 16)
            _sums_four(weights + 4 * row * _TILE, values + c, stride, outputs + row * stride + c)
        row += 4
    while row < rows:
        for c in range(0, stride, 256):
            if row == 0:
                _fetch(ahead + 16 * c, 64)
            _sums_one(weights + 4 * row * _TILE, values + c, stride, outputs + row * stride + c)
        row += 1


@njit
def _fetch(address, lines):
    for i in range(0, lines, 4):
        prefetch(address + 64 * i)
        prefetch(address + 64 * i + 64)
        prefetch(address + 64 * i + 128)
        prefetch(address + 64 * i + 192)


@njit
def _sums_four(weights, values, stride, out):
    """Sixteen channels of four outputs."""
    a0, b0 = load8(out), load8(out + 32)
    a1, b1 = load8(out + stride), load8(out + stride + 32)
    a2, b2 = load8(out + 2 * stride), load8(out + 2 * stride + 32)
    a3, b3 = load8(out + 3 * stride), load8(out + 3 * stride + 32)
    for t in range(PAGE):
        x, y = load8(values + t * stride), load8(values + t * stride + 32)
        w = load_splat(weights + 4 * t)
        a0, b0 = fma(w, x, a0), fma(w, y, b0)
        w = load_splat(weights + 4 * (t + _TILE))
        a1, b1 = fma(w, x, a1), fma(w, y, b1)
        w = load_splat(weights + 4 * (t + 2 * _TILE))
        a2, b2 = fma(w, x, a2), fma(w, y, b2)
        w = load_splat(weights + 4 * (t + 3 * _TILE))
        a3, b3 = fma(w, x, a3), fma(w, y, b3)
    store8(out, a0)
    store8(out + 32, b0)
    store8(out + stride, a1)
    store8(out + stride + 32, b1)
    store8(out + 2 * stride, a2)
    store8(out + 2 * stride + 32, b2)
    store8(out + 3 * stride, a3)
    store8(out + 3 * stride + 32, b3)


@njit
def _sums_one(weights, values, stride, out):
    """Sixty-four channels of one output."""
    a0, a1, a2, a3 = load8(out), load8(out + 32), load8(out + 64), load8(out + 96)
    a4, a5, a6, a7 = load8(out + 128), load8(out + 160), load8(out + 192), load8(out + 224)
    for t in range(PAGE):
        w, at = load_splat(weights + 4 * t), values + t * stride
        a0, a1 = fma(w, load8(at), a0), fma(w, load8(at + 32), a1)
        a2, a3 = fma(w, load8(at + 64), a2), fma(w, load8(at + 96), a3)
        a4, a5 = fma(w, load8(at + 128), a4), fma(w, load8(at + 160), a5)
        a6, a7 = fma(w, load8(at + 192), a6), fma(w, load8(at + 224), a7)
    store8(out, a0)
    store8(out + 32, a1)
    store8(out + 64, a2)
    store8(out + 96, a3)
    store8(out + 128, a4)
    store8(out + 160, a5)
    store8(out + 192, a6)
    store8(out + 224, a7)


@njit
def _merge(call):
    """The outputs: all parts' sums as one softmax."""
    heads, rows, dim, parts = _get(call, _HEADS), _get(call, _ROWS), _get(call, _DIM), _get(call, _PARTS)
    stride = 4 * _get(call, _PARTIAL_WIDTH)
    while True:
        item = next_item(call + 8 * _COUNTER)
        if item >= heads * rows:
            return
        head, row = item // rows, item % rows
        partials = _get(call, _PARTIALS) + head * parts * stride
        output = _get(call, _OUTPUT) + 4 * item * dim
        largest, whole = _NEG_INF, np.float32(0.0)
        for part in range(parts):
            largest = max(largest, load_f32(partials + part * stride + 4 * row))
        for part in range(parts):
            at = partials + part * stride + 4 * row
            whole += np.exp(load_f32(at) - largest) * load_f32(at + 4 * rows)
        for c in range(0, 4 * dim, 32):
            summed = splat(0.0)
            for part in range(parts):
                at = partials + part * stride
                weight = np.exp(load_f32(at + 4 * row) - largest) / whole
                summed = fma(splat(weight), load8(at + 8 * rows + 4 * row * dim + c), summed)
            store8(output + c, summed)


def _compile(sources: int):
    """The phases, whose compiled forms are kept on disk until `sources` changes."""

    @cfunc("void(int64)", cache=True)
    def score(call):
        sources  # noqa: B018
        _score(call)

    @cfunc("void(int64)", cache=True)
    def select(call):
        sources  # noqa: B018
        _select(call)

    @cfunc("void(int64)", cache=True)
    def attend(call):
        sources  # noqa: B018
        _attend(call)

    @cfunc("void(int64)", cache=True)
    def merge(call):
        sources  # noqa: B018
        _merge(call)

    return score, select, attend, merge


_score_phase, _select_phase, _attend_phase, _merge_phase = _compile(SOURCES)
