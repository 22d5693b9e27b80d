"""Random sequences of everything that changes a cache, against what it was given.

The oracle keeps the raw tokens of every row. After each step the cache must hold them: those that it keeps raw exactly,
packed ones as far off as their quantization steps allow and, once packed, always the same, unless the reorganizer
replaced them. Attention must be that over what is held.
"""

import copy
import dataclasses
import os
import shutil
import tempfile

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn.functional import scaled_dot_product_attention

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

# A first segment of enough tokens to tell the leading channels of all to come.
_SMALL = dict(min_length=64, min_segment_length=48, recent_window=9, buffer_tokens=8, sink_tokens=3, token_ratio=1.0)
# Not so fine that eight bits would clip the mean, which is half of a vector here.
_FINE = dict(key_step=0.12, value_step=0.12, key_bits=8, value_bits=8, adapt_steps=False)
CONFIGS = {
    "lossless": dataclasses.replace(MosaicKVConfig.preset("lossless"), **_SMALL),
    "fine": MosaicKVConfig(**_SMALL, **_FINE, key_dense_channels=5, value_dense_channels=2),
    "reorganized": MosaicKVConfig(
        # Sixteen tokens do not tell the range of a dense channel to those that borrow their basis.
        **_SMALL,
        **_FINE,
        reorganize="async",
        open_segment_length=16,
        reorganize_lag=8,
        group_size=2,
        key_dense_channels=0,
        value_dense_channels=0,
    ),
    "16 bits, mean index": MosaicKVConfig(
        **_SMALL | dict(sink_tokens=0, segment_length=64),
        selection="top_r",
        key_channel_ratio=1.0,
        value_channel_ratio=1.0,
        key_bits=16,
        value_bits=16,
        key_dense_channels=0,
        block_index="mean",
    ),
    # What it says of the steps is that they are as coarse as can be.
    "budget": MosaicKVConfig(**_SMALL, **_FINE | dict(key_step=0.03, value_step=0.03), memory_budget=0.01),
    "native in blocks of 4": MosaicKVConfig(
        **_SMALL | dict(block_size=4, buffer_tokens=4), **_FINE, raw_bits="native", key_dense_channels=8
    ),
}
HEADS, GROUP = 2, 3
# A vector's error to all vectors' size, by root mean squares; the steps above leave a twentieth at most in a channel.
TOLERANCE = 0.1


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(CONFIGS)),
        batch=st.integers(1, 3),
        head_dim=st.sampled_from([16, 24, 64]),
        seed=st.integers(0, 2**16),
        prompt=st.integers(1, 120),
    )
    def start(self, name, batch, head_dim, seed, prompt):
        torch.manual_seed(seed)
        self.config = CONFIGS[name]
        self.cache, self.head_dim = MosaicKVCache(self.config), head_dim
        spectrum = torch.logspace(0.3, -0.7, head_dim)
        self.mixing = spectrum[:, None] * torch.linalg.qr(torch.randn(HEADS, head_dim, head_dim)).Q
        self.mean = torch.randn(HEADS, 1, head_dim)
        self.raw = [[torch.zeros(HEADS, 0, head_dim)] * 2 for _ in range(batch)]
        self.packed: list[dict] = [{} for _ in range(batch)]
        self.parked: list[tuple] = []
        self.append(prompt)

    @property
    def layer(self):
        return self.cache.layers[0]

    @rule(n=st.sampled_from([1, 1, 1, 2, 7, 9, 10, 50]))
    def append(self, n):
        batch = len(self.raw)
        states = [
            (torch.randn(batch, HEADS, n, self.head_dim) @ self.mixing + self.mean).bfloat16().float() for _ in "KV"
        ]
        query = torch.randn(batch, HEADS * GROUP, n, self.head_dim)
        keys, values = self.cache.update(*states, 0)
        dense = [self.layer.materialize(kind) for kind in ("key", "value")]
        length = dense[0].shape[2]
        mask = (torch.arange(length) <= torch.arange(length - n, length)[:, None])[None, None]
        output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        expected = scaled_dot_product_attention(query, *dense, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        for row, tokens in enumerate(self.raw):
            self.raw[row] = [torch.cat([old, new[row]], dim=1) for old, new in zip(tokens, states)]

    @precondition(lambda self: self.length)
    @rule(share=st.floats(0, 1))
    def crop(self, share):
        count = round(share**3 * self.length)
        self.cache.crop(-count)
        self.raw = [[states[:, : states.shape[1] - count] for states in tokens] for tokens in self.raw]

    @rule(data=st.data())
    def select(self, data):
        count = data.draw(st.integers(1, 4))
        rows = data.draw(st.lists(st.integers(0, len(self.raw) - 1), min_size=count, max_size=count))
        self.cache.batch_select_indices(torch.tensor(rows))
        self.raw, self.packed = [list(self.raw[i]) for i in rows], [dict(self.packed[i]) for i in rows]

    @precondition(lambda self: len(self.raw) < 3)
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        rows = [i for i in range(len(self.raw)) for _ in range(2)]
        self.raw, self.packed = [list(self.raw[i]) for i in rows], [dict(self.packed[i]) for i in rows]

    @rule(n=st.integers(1, 60))
    def reset(self, n):
        self.cache.reset()
        self.raw = [[torch.zeros(HEADS, 0, self.head_dim)] * 2 for _ in self.raw]
        self.packed = [{} for _ in self.raw]
        self.append(n)

    @rule()
    def park_a_copy(self):
        self.parked.append((copy.deepcopy(self.cache), [list(r) for r in self.raw], [dict(p) for p in self.packed]))

    @precondition(lambda self: self.parked)
    @rule()
    def take_the_copy(self):
        self.cache, self.raw, self.packed = self.parked.pop()

    @rule()
    def save_and_load(self):
        folder = tempfile.mkdtemp()
        try:
            self.cache.save_pretrained(folder)
            self.cache = MosaicKVCache.from_pretrained(folder)
        finally:
            shutil.rmtree(folder)

    @property
    def length(self):
        return self.raw[0][0].shape[1]

    @invariant()
    def holds_what_it_was_given(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.get_seq_length() == self.length
        assert len(self.layer.rows) == len(self.raw)
        dense = [self.layer.materialize(kind) for kind in ("key", "value")]
        for row, (sequence, given) in enumerate(zip(self.layer.rows, self.raw)):
            assert sequence.length == self.length
            first = 0 if sequence.sinks is None else sequence.sinks[0].shape[1]
            last = self.length - sequence.buffer.length
            for held, states in zip((d[row] for d in dense), given):
                assert torch.equal(held[:, :first], states[:, :first])
                assert torch.equal(held[:, last:], states[:, last:])
                error = (held - states)[:, first:last].square().mean(-1)
                assert (error <= (TOLERANCE**2) * states.square().mean((1, 2))[:, None]).all()
            self._check_unchanged(row, sequence, dense, first)

    def _check_unchanged(self, row, sequence, dense, place):
        known, self.packed[row] = self.packed[row], {}
        for segment in sequence.segments:
            decoded = [d[row, :, place : place + segment.length].clone() for d in dense]
            # Addresses of what the segment's bytes are in: others for a reorganized, joined or loaded one.
            key = (place, segment.keys.values.data_ptr(), segment.values.values.data_ptr())
            for before, now in zip(known.get(key, []), decoded):
                shared = min(before.shape[1], now.shape[1])
                assert torch.equal(before[:, :shared], now[:, :shared])
            self.packed[row][key] = decoded
            place += segment.length


# `MOSAICKV_FUZZ_EXAMPLES=400 pytest tests/test_fuzz.py` for twenty thousand steps.
CacheMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MOSAICKV_FUZZ_EXAMPLES", "40")),
    stateful_step_count=50,
    derandomize="MOSAICKV_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCache = CacheMachine.TestCase
