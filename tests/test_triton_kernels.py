"""The Triton kernels, in Triton's interpreter, against the plain torch they stand in for."""

import dataclasses
import itertools

import pytest
import torch
from conftest import tiny_model, uneven_states

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.attention import reference
from mosaickv_hf.attention.selection import choose_blocks, num_chosen_blocks
from mosaickv_hf.compression.compressor import fit_bases
from mosaickv_hf.compression.rotation import with_steps
from mosaickv_hf.sequence import SequenceStore

pytest.importorskip("triton")
from mosaickv_hf import triton_kernels
from mosaickv_hf.triton_kernels import attention, packing, scores
from mosaickv_hf.triton_kernels.attend import choose
from mosaickv_hf.triton_kernels.tables import Table

# Both sum fp32 products of up to 256 channels and some hundred tokens, in another order.
TOLERANCE = 1e-4
BITS = {
    "16 bits": {"selection": "top_r", "key_bits": 16, "value_bits": 16, "key_dense_channels": 0, "block_index": "mean"},
    "native": {"selection": "top_r", "key_bits": "native", "value_bits": "native", "rotate": False},
    "8 bits": {"key_bits": 8, "value_bits": 8, "value_dense_channels": 8},
    "4 bits": {},
    "3 and 2 bits by rank": {"selection": "top_r", "key_bits": 3, "value_bits": 2, "key_channel_ratio": 0.6},
}
MASKS = (None, "causal", "random", "additive", "nothing")
SMALL = {"buffer_tokens": 32, "min_segment_length": 32, "sink_tokens": 3, "min_attended_tokens": 40}


pytestmark = pytest.mark.usefixtures("poisoned")


def make_sequence(config, lengths, dims, dtype=torch.float32, heads=2, buffer=5):
    """Segments of these lengths between sinks and a raw buffer; the steps of heads differ."""
    sequence = SequenceStore()
    for length in lengths:
        count = length + (config.sink_tokens if sequence.sinks is None else 0)
        sequence.buffer.append(*(uneven_states(heads, count, d, dtype) for d in dims))
        sequence.pack(length, config, torch.randn(heads, 1, 4, dims[0]))
    sequence.buffer.append(*(uneven_states(heads, buffer, d, dtype) for d in dims))
    return sequence


def mask_of(kind, heads, group, queries, length):
    causal = torch.arange(length) <= torch.arange(length - queries, length)[:, None]
    match kind:
        case None:
            return None
        case "causal":
            return causal[None, None]
        case "random":
            return causal & (torch.rand(heads, group, queries, length) > 0.3)
        case "additive":
            return torch.randn(heads, 1, queries, length).masked_fill(~causal, -torch.inf)
    return torch.zeros(1, 1, queries, length, dtype=torch.bool)


def cases():
    """Every head_dim with every group; the rest takes turns that shift against each other, so that pairs meet."""
    lengths, dtypes = ((104, 61), (1,), (40, 7, 33)), (torch.float32, torch.bfloat16, torch.float16)
    for i, case in enumerate(itertools.product((1, 5), (64, 96, 128, 256), (1, 3, 4, 8))):
        bits, mask = list(BITS)[i % 5], MASKS[(i + i // 5) % 5]
        group_size, dtype, block = (1, 2, 4)[i % 3], dtypes[(i + i // 3) % 3], (8, 16, 4)[(i + i // 9) % 3]
        yield *case, bits, group_size, mask, dtype, block, lengths[(i + i // 2) % 3]


@pytest.mark.parametrize(
    ("queries", "head_dim", "group", "bits", "group_size", "mask", "dtype", "block", "lengths"), cases()
)
def test_attend_equals_the_reference(queries, head_dim, group, bits, group_size, mask, dtype, block, lengths):
    torch.manual_seed(0)
    config = MosaicKVConfig(**SMALL | BITS[bits] | {"group_size": group_size, "block_size": block})
    sequence = make_sequence(config, lengths, (head_dim, head_dim), dtype)
    queries = min(queries, sequence.length)
    query = torch.randn(2, group, queries, head_dim) * head_dim**-0.5
    mask = mask_of(mask, 2, group, queries, sequence.length)
    expected = reference.attend(query, sequence, mask, config)
    actual = triton_kernels.attend(query, sequence, mask, config)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_kv_heads_of_other_widths_and_fp16():
    """V narrower than K, tokens in fp16, and more query rows than a tile holds."""
    torch.manual_seed(0)
    config = MosaicKVConfig(**SMALL)
    sequence = make_sequence(config, (64, 9), (96, 64), torch.float16, heads=1)
    query = torch.randn(1, 8, 7, 96) / 10
    expected = reference.attend(query, sequence, None, config)
    torch.testing.assert_close(
        triton_kernels.attend(query, sequence, None, config), expected, atol=TOLERANCE, rtol=TOLERANCE
    )


def test_a_cropped_segment():
    torch.manual_seed(0)
    config = MosaicKVConfig(**SMALL)
    sequence = make_sequence(config, (64, 40), (64, 64))
    sequence.crop(5 + 11)
    query = torch.randn(2, 3, 1, 64) / 8
    expected = reference.attend(query, sequence, None, config)
    torch.testing.assert_close(
        triton_kernels.attend(query, sequence, None, config), expected, atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("index", ["principal", "mean"])
@pytest.mark.parametrize(("head_dim", "block"), [(64, 8), (96, 16), (128, 4), (256, 8)])
def test_scores_equal_the_oracle(head_dim, block, index, mask):
    torch.manual_seed(0)
    config = MosaicKVConfig(**SMALL | {"block_index": index, "block_size": block, "index_channels": 20})
    sequence = make_sequence(config, (104, 37), (head_dim, head_dim))
    query = torch.randn(2, 3, head_dim) / head_dim**0.5
    mask = mask_of(mask, 2, 3, 1, sequence.packed_length)
    flat = None if mask is None else mask.expand(2, 3, 1, -1)[:, :, 0]
    actual = scores.score_segments(query, sequence.segments, Table(sequence.segments), flat)
    expected = scores.oracle(query, sequence.segments, mask)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("splits", [1, 3, 50])
def test_splits_and_an_empty_selection(splits):
    """However blocks are split, and where a head takes none of a segment's."""
    torch.manual_seed(0)
    config = MosaicKVConfig(**SMALL)
    sequence = make_sequence(config, (64, 40), (64, 64))
    table = Table(sequence.segments)
    query = torch.randn(2, 3, 1, 64) / 8
    chosen = torch.tensor([[0, 3, 7], [9, 10, 12]], dtype=torch.int32)
    starts = torch.tensor([[0, 3, 3], [0, 0, 3]], dtype=torch.int32)
    parts = attention.attend_segments(query, sequence.segments, table, (chosen, starts), None, splits)
    blocks = [torch.tensor([[0, 3, 7], [-1, -1, -1]]), torch.tensor([[-1, -1, -1], [1, 2, 4]])]
    expected = attention.oracle(query, sequence.segments, blocks, None)
    torch.testing.assert_close(reference.merge(parts), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_choosing_equals_the_reference():
    torch.manual_seed(0)
    config = MosaicKVConfig(**SMALL)
    sequence = make_sequence(config, (104, 37), (64, 64))
    query = torch.randn(2, 3, 64) / 8
    table = Table(sequence.segments)
    k = num_chosen_blocks(sequence.packed_length, table.num_blocks, config)
    chosen, starts = choose(scores.oracle(query, sequence.segments, None), k, table.first_blocks)
    for i, expected in enumerate(choose_blocks(query, sequence.segments, None, config)):
        for head in range(2):
            own = chosen[head, starts[head, i] : starts[head, i + 1]] - table.first_blocks[i]
            assert own.tolist() == [block for block in expected[head].tolist() if block >= 0]


def packing_cases():
    """Every way with every width and group size; the rest takes turns that shift against those of group sizes."""
    ways = [("threshold", 1.0), ("top_r", 0.4), ("top_r", 1.0)]
    bits = [(8, 2), (3, 3), (4, 4), (16, 16), (32, 32)]
    served = [(way, widths) for way in ways for widths in bits if way[0] == "top_r" or widths[0] <= 8]
    for i, (head_dim, (way, widths), group_size) in enumerate(itertools.product((64, 96), served, (1, 2, 4))):
        n, dense = (61, 1, 8)[(i + i // 3) % 3], (0, 16, 5)[(i + i // 9) % 3]
        yield head_dim, *way, widths, group_size, dense, n, (torch.float32, torch.bfloat16)[i % 2]
    yield 128, "threshold", 1.0, (4, 4), 1, 16, 33, torch.float16
    yield 256, "top_r", 0.25, (16, 16), 1, 0, 33, torch.float16


@pytest.mark.parametrize(
    ("head_dim", "selection", "ratio", "bits", "group_size", "dense", "n", "dtype"), packing_cases()
)
def test_pack_equals_the_torch_packer(head_dim, selection, ratio, bits, group_size, dense, n, dtype):
    torch.manual_seed(0)
    dense += -dense % group_size
    config = MosaicKVConfig(key_dense_channels=dense, block_index="mean")
    fitted = fit_bases(*[uneven_states(2, 200, head_dim)] * 2, config)[0]
    basis = with_steps(fitted, fitted.step * torch.tensor([0.2, 2.0]), bits)
    given = uneven_states(2, n, head_dim, dtype)
    for block_size in (8, 6, 16):
        arguments = {
            "selection": selection,
            "channel_ratio": ratio,
            "dead_zone": 0.5,
            "group_size": group_size,
            "block_size": block_size,
        }
        expected, actual = (f(given, basis, **arguments) for f in (packing.oracle, packing.pack))
        for name in ("dense", "bitmap", "offsets", "values"):
            a, b = getattr(actual, name), getattr(expected, name)
            assert a.dtype == b.dtype and torch.equal(a, b), (name, block_size)


@pytest.mark.parametrize("preset", ["default", "paper", "lossless"])
def test_generate_gives_the_reference_backends_tokens(preset):
    """The way that a cache on a GPU takes, end to end: prompt, packing, decode steps, a left-padded batch."""
    model = tiny_model("llama-group1", num_key_value_heads=2)
    model.generation_config.eos_token_id = -1
    small = dict(min_length=16, min_segment_length=48, recent_window=9, buffer_tokens=8, sink_tokens=3)
    config = dataclasses.replace(MosaicKVConfig.preset(preset), **small, min_attended_tokens=24)
    config = dataclasses.replace(config, reorganize="off")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 256, (2, 100), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    answers = []
    for backend in ("torch", "triton"):
        cache = MosaicKVCache(dataclasses.replace(config, backend=backend))
        arguments = dict(attention_mask=mask, max_new_tokens=16, do_sample=False)
        answers.append(model.generate(ids, past_key_values=cache, **arguments))
        assert cache.stats().segments > 0 and cache.stats().dense_materializations == 0
    assert torch.equal(*answers)


def test_operations_have_fake_kernels():
    """What a compiled model needs of them."""
    torch.manual_seed(0)
    config = MosaicKVConfig(**SMALL)
    sequence = make_sequence(config, (40,), (64, 64))
    table, (segment,) = Table(sequence.segments), sequence.segments
    query = torch.randn(1, 2, 3, 64)
    sizes = list(attention.shape_constants(table.keys, table.values).values())
    checks = ("test_schema", "test_faketensor")
    arguments = (table.rows, query, query[..., 0].contiguous(), None, None, None, sizes, 2, 8)
    torch.library.opcheck(attention.packed_attention, arguments, test_utils=checks)
    arguments = (table.rows, query[..., :16].contiguous(), query[..., 0].contiguous(), None, 5, 5, 8, False)
    torch.library.opcheck(scores.block_scores, arguments, test_utils=checks)
    basis = segment.keys.basis
    bits = torch.tensor(basis.bits, dtype=torch.int32)
    places = packing.dense_table(basis, 5)
    rotated, numbers = torch.randn(2, 40, 64), (basis.offset, basis.scale, basis.step)
    arguments = (rotated, *numbers, bits, places, segment.keys.dense.numel(), -1, 0.5, 1, 8, False)
    torch.library.opcheck(packing.select, arguments, test_utils=checks)
    starts = torch.zeros(2, 40, dtype=torch.int64)
    arguments = (rotated, basis.step, bits, segment.keys.bitmap, starts, 100, 16, 1, False)
    torch.library.opcheck(packing.encode, arguments, test_utils=checks)


@pytest.mark.parametrize("changes", [{"block_size": 6, "buffer_tokens": 12, "segment_length": 60}, {"group_size": 8}])
def test_what_the_kernels_do_not_serve_is_refused_if_asked_for(changes):
    config = MosaicKVConfig(backend="triton", min_length=8, min_segment_length=12, recent_window=4, **changes)
    model = tiny_model("llama-group1")
    with pytest.raises(ValueError, match='backend="triton" needs'):
        model.generate(torch.full((1, 60), 5), past_key_values=MosaicKVCache(config), max_new_tokens=2)
