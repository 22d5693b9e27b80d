"""The numba kernels against the torch implementations they stand in for."""

import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import uneven_states
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mosaickv_hf.attention import dispatch, reference
from mosaickv_hf.attention.selection import block_shares, num_chosen_blocks
from mosaickv_hf.compression import packing
from mosaickv_hf.compression.compressor import fit_bases
from mosaickv_hf.compression.rotation import with_steps
from mosaickv_hf.config import MosaicKVConfig
from mosaickv_hf.sequence import SequenceStore

pytest.importorskip("numba")

# Both sum fp32 products of about a hundred channels and some hundred tokens, in another order.
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def two_threads():
    """Kernels share their work out, whatever number of threads the tests run with."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


pytestmark = pytest.mark.usefixtures("poisoned")


def mask_of(kind: str, heads: int, group: int, queries: int, length: int) -> torch.Tensor | None:
    """A mask of one of the kinds that models and callers make."""
    if kind == "none":
        return None
    causal = torch.arange(length) <= torch.arange(length - queries, length)[:, None]
    if kind == "causal":
        return causal[None, None]
    if kind == "random":
        return causal & (torch.rand(heads, group, queries, length) > 0.4)
    if kind == "most hidden":
        return (torch.rand(1, 1, 1, length) > 0.97).expand(1, 1, queries, length)
    if kind == "nothing":
        return torch.zeros(1, 1, queries, length, dtype=torch.bool)
    bias = torch.randn(heads, 1, queries, length)
    return bias.masked_fill(~causal, torch.finfo(torch.float32).min if kind == "finite" else -torch.inf)


MASKS = ["none", "none", "causal", "random", "most hidden", "nothing", "additive", "finite"]


@st.composite
def cases(draw):
    """A config, and the shape of a sequence that goes with it."""
    key_dim = draw(st.sampled_from([64, 96, 128, 256, 28]))
    value_dim = draw(st.sampled_from([key_dim, key_dim, 64]))
    block_size = draw(st.sampled_from([8, 8, 16, 6, 2, 32]))
    group_size = draw(st.sampled_from([1, 1, 2, 4, 3]))
    selection = draw(st.sampled_from(["threshold", "top_r"]))
    bits = st.sampled_from([4, 3, 2, 8] if selection == "threshold" else [16, "native", 4, 8, 3, 2])
    key_dense, value_dense = draw(st.sampled_from([0, 4, 7, 27])), draw(st.sampled_from([0, 8, 16]))
    # Sparse channels come in whole groups.
    key_dense += (key_dim - key_dense) % group_size
    value_dense += (value_dim - value_dense) % group_size
    config = MosaicKVConfig(
        selection=selection,
        key_channel_ratio=draw(st.sampled_from([0.3, 1.0])),
        value_channel_ratio=0.25,
        key_dense_channels=key_dense,
        value_dense_channels=value_dense,
        key_bits=draw(bits),
        value_bits=draw(bits),
        group_size=group_size,
        block_size=block_size,
        rotate=draw(st.booleans()),
        block_index="mean" if key_dense == 0 else draw(st.sampled_from(["principal", "mean"])),
        index_channels=draw(st.sampled_from([32, 1000])),
        token_ratio=draw(st.sampled_from([0.2, 0.2, 1.0])),
        min_attended_tokens=draw(st.sampled_from([0, 64])),
        sink_tokens=draw(st.sampled_from([1, 4])),
        buffer_tokens=96,
        segment_length=96 * 1024,
        min_segment_length=96,
    )
    return {
        "config": config,
        "dims": (key_dim, value_dim),
        "heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 3, 4, 8])),
        # Segments in blocks; a short last one shares the basis before it.
        "segments": draw(st.sampled_from([[], [1], [200], [97, 40], [200, 3, 150]])),
        # Whether steps and bits differ from head to head.
        "adapted": draw(st.booleans()),
        "buffer": draw(st.sampled_from([1, 37])),
        "crop": draw(st.sampled_from([0, 0, 1, 11])),
        "queries": draw(st.sampled_from([1, 1, 1, 2, 5, 70])),
        "mask": draw(st.sampled_from(MASKS)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "seed": draw(st.integers(0, 1000)),
    }


def sequence_of(case) -> SequenceStore:
    """A sequence of the case's segments and raw tokens, shortened from its end by `crop`."""
    config, (key_dim, value_dim), sequence = case["config"], case["dims"], SequenceStore()
    for blocks in case["segments"]:
        count = blocks * config.block_size + (config.sink_tokens if sequence.sinks is None else 0)
        sequence.buffer.append(*(uneven_states(case["heads"], count, d, case["dtype"]) for d in (key_dim, value_dim)))
        queries = torch.randn(case["heads"], 1, 4, key_dim) if case["adapted"] else None
        sequence.pack(blocks * config.block_size, config, queries)
    sequence.buffer.append(
        *(uneven_states(case["heads"], case["buffer"], d, case["dtype"]) for d in (key_dim, value_dim))
    )
    if case["crop"] < sequence.length:
        sequence.crop(case["crop"])
    return sequence


def has_ties(query, sequence, mask, config) -> bool:
    """Whether the last chosen block scores as the first one left out: rounding then decides which of them it is."""
    k = num_chosen_blocks(sequence.packed_length, sum(s.num_blocks for s in sequence.segments), config)
    if query.shape[2] > 1 or not sequence.segments or k == sum(s.num_blocks for s in sequence.segments):
        return False
    first = 0 if sequence.sinks is None else sequence.sinks[0].shape[1]
    seen = None if mask is None else mask[..., first : first + sequence.packed_length]
    best = block_shares(query[:, :, 0], sequence.segments, seen).topk(k + 1).values
    return bool(((best[:, -2] - best[:, -1]).abs() < 1e-5).any())


def check(case) -> None:
    torch.manual_seed(case["seed"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several are slower at many small matrices
    sequence, config = sequence_of(case), case["config"]
    torch.set_num_threads(threads)
    queries = min(case["queries"], sequence.length)
    query = torch.randn(case["heads"], case["group"], queries, case["dims"][0])
    query *= case["dims"][0] ** -0.5
    mask = mask_of(case["mask"], case["heads"], case["group"], queries, sequence.length)
    assume(not has_ties(query, sequence, mask, config))
    expected = reference.attend(query, sequence, mask, config)
    actual = dispatch.attend(query, sequence, mask, config)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_attend_equals_the_reference(case):
    check(case)


@pytest.mark.parametrize("dense", [0, 5, 24, 96])
@pytest.mark.parametrize("block_size", [1, 6, 8, 16])
def test_pack_equals_the_torch_packer(block_size, dense):
    torch.manual_seed(0)
    from mosaickv_hf.attention.cpu import pack

    given_states = uneven_states(2, 157, 96)
    config = MosaicKVConfig(key_dense_channels=dense, block_index="mean")
    fitted = fit_bases(given_states, given_states, config)[0]
    ways = [("threshold", 0.4), ("top_r", 0.4), ("top_r", 0.05), ("top_r", 1.0)]
    widths = (2, 3, 4, 8, 16, 32, (8, 4), (3, 8))
    for (selection, ratio), bits, group_size in itertools.product(ways, widths, (1, 2, 3, 8)):
        if (96 - dense) % group_size:
            continue
        bits = bits if isinstance(bits, tuple) else (bits, bits)
        # Codes of four to eight bits.
        basis = with_steps(fitted, fitted.step * torch.tensor([0.2, 2.0]), bits)
        arguments = {
            "selection": selection,
            "channel_ratio": ratio,
            "dead_zone": 0.5,
            "group_size": group_size,
            "block_size": block_size,
        }
        expected, actual = (f(given_states, basis, **arguments) for f in (packing.pack, pack))
        for name in ("dense", "bitmap", "offsets", "values"):
            a, b = getattr(actual, name), getattr(expected, name)
            assert a.dtype == b.dtype and torch.equal(a, b), (name, bits, arguments)


@pytest.mark.parametrize("count", [1, 7, 8, 100, 1003])
@pytest.mark.parametrize("kind", ["all different", "many equal", "some never"])
def test_top_k(count, kind):
    """The k largest in order of place, the first of equal ones; also where several sources share the places."""
    from mosaickv_hf.attention.cpu.topk import SCRATCH_BYTES, kth_largest, take, to_keys

    random = np.random.default_rng(count)
    scores = random.normal(size=count).astype(np.float32)
    if kind == "many equal":
        scores = scores.round(0) + 0.0  # no negative zeros, which sort before zeros
    elif kind == "some never":
        scores[random.random(count) < 0.7] = -np.inf
    for k in {1, count // 3 + 1, count}:
        keys = np.full(-(-count // 8) * 8, np.nan, dtype=np.float32)
        keys[:count] = scores
        scratch = np.empty(SCRATCH_BYTES, dtype=np.uint8)
        to_keys(keys.ctypes.data, count)
        kth, ties = kth_largest(keys.ctypes.data, count, k, scratch.ctypes.data)
        found = []
        for first, end in ((0, count // 2), (count // 2, count)):
            out = np.full(count + 8, -1, dtype=np.int32)
            taken, ties = take(keys.ctypes.data, first, end, kth, ties, out.ctypes.data)
            found += (out[:taken] + first).tolist()
            assert (out[taken:] == -1).all()
        assert found == sorted(np.argsort(-scores, kind="stable")[:k].tolist())


SMALL = {
    "config": MosaicKVConfig(min_attended_tokens=64, min_segment_length=96, buffer_tokens=96),
    "dims": (64, 64),
    "heads": 2,
    "group": 4,
    "segments": [97, 40],
    "buffer": 5,
    "crop": 0,
    "queries": 1,
    "mask": "none",
    "dtype": torch.float32,
    "seed": 0,
    "adapted": False,
}


def test_threads_may_attend_at_once():
    torch.manual_seed(0)
    sequence = sequence_of(SMALL)
    queries = [torch.randn(2, 4, 1, 64) for _ in range(4)]
    expected = [dispatch.attend(query, sequence, None, SMALL["config"]) for query in queries]
    wrong = []

    def work(query, output):
        for _ in range(50):
            if not torch.equal(dispatch.attend(query, sequence, None, SMALL["config"]), output):
                wrong.append(query)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(queries, expected)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_nan_is_not_hidden():
    torch.manual_seed(0)
    sequence = sequence_of(SMALL)
    query = torch.full((2, 4, 1, 64), torch.nan)
    assert dispatch.attend(query, sequence, None, SMALL["config"]).isnan().all()


@pytest.mark.slow
def test_cpus_without_avx2(tmp_path):
    """The same kernels, compiled for a CPU with nothing but the baseline."""
    code = "import test_cpu_kernels as t, torch\n"
    code += "from mosaickv_hf.attention.cpu import simd\nassert not simd._has('avx2')\n"
    code += "for bits in (2, 3, 4, 8, 16, 'native'):\n"
    code += "    for dtype in (torch.float32, torch.float16):\n"
    code += (
        "        config = t.MosaicKVConfig(selection='top_r', key_bits=bits, value_bits=bits, min_attended_tokens=64)\n"
    )
    code += "        t.check({**t.SMALL, 'config': config, 'dtype': dtype})\n"
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
