"""Steps that follow what the newest queries attend to."""

import dataclasses

import pytest
import torch
from conftest import CACHE, tiny_model
from transformers import DynamicCache

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.compression import Prompt, compress, fit_budget, unpack_blocks
from mosaickv_hf.compression.candidates import Candidates, _tried
from mosaickv_hf.compression.compressor import fit_bases
from mosaickv_hf.compression.strategy import output_weights
from mosaickv_hf.sequence import SequenceStore

# Eight bits: uniform steps that clip nothing, as the theory has them.
CONFIG = MosaicKVConfig(
    key_bits=8,
    value_bits=8,
    key_step=0.2,
    value_step=0.2,
    key_dense_channels=4,
    backend="torch",
)


def setting(seed=0, config=CONFIG, heads=2, group=3, n=4, length=400, head_dim=64):
    """Queries, states before, packed and after, and bases; the first head looks tokens up, the second spreads out."""
    torch.manual_seed(seed)
    keys, values = torch.randn(heads, length, head_dim), torch.randn(heads, length, head_dim)
    queries = torch.randn(heads, group, n, head_dim) / head_dim**0.5
    queries[0] *= 3
    queries[1] *= 0.3
    parts = [tuple(states[:, a:b] for states in (keys, values)) for a, b in ((0, 4), (4, 372), (372, length))]
    return queries, parts, fit_bases(*parts[1], config)


def candidates(queries, before, packed, after, bases, config=CONFIG):
    weights = output_weights(bases[0].axes(), queries, before, packed, after)
    return [Candidates.of(*given, config) for given in zip(bases, packed, weights)]


def output(queries, keys, values):
    n, length = queries.shape[2], keys.shape[1]
    logits = queries.flatten(1, 2) @ keys.transpose(1, 2)
    positions = torch.arange(length)
    hidden = (positions > positions[-n:, None]).repeat(queries.shape[1], 1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("bits, group_size", [(8, 1), (4, 1), (3, 1), (4, 4)])
@pytest.mark.parametrize("which", ["key", "value"])
def test_the_loss_of_a_candidate_is_the_measured_one(which, bits, group_size):
    """First-order theory against quantization itself, averaged over seeds."""
    config = dataclasses.replace(CONFIG, key_bits=bits, value_bits=bits, key_step=0.3, value_step=0.3)
    config = dataclasses.replace(config, group_size=group_size)
    expected, measured = [], []
    for seed in range(12):
        queries, (before, packed, after), bases = setting(seed, config)
        i = int(which == "value")
        given = candidates(queries, before, packed, after, bases, config)[i]
        # The very steps and bits.
        place = ((given.bits == bits) & ((given.factors - 1).abs() < 1e-6)).nonzero().item()
        expected.append(given.losses[:, place])
        states = compress(*packed, bases, config)
        states = states.values if i else states.keys
        blocks = torch.arange(states.num_blocks).expand(2, -1)
        noisy = states.basis.rotate_back(unpack_blocks(states, blocks))[:, : packed[0].shape[1]]
        exact = [torch.cat(parts, dim=1) for parts in zip(before, packed, after)]
        changed = list(exact)
        changed[i] = torch.cat([before[i], noisy, after[i]], dim=1)
        true = output(queries, *exact)
        error = (output(queries, *changed) - true).square().sum(-1).mean(1)
        measured.append(error / true.square().sum(-1).mean())
        taken = 8 * torch.tensor(states.head_dense_bytes()) + 8 * torch.tensor(states.head_units())
        # Rows are filled up to whole bytes, by less than one.
        rest = taken / len(blocks[0]) / 8 - given.rates[:, place]
        assert ((rest > -0.02 * given.rates[:, place]) & (rest < 8 + 0.02 * given.rates[:, place])).all()
    ratio = torch.stack(measured).mean(0) / torch.stack(expected).mean(0)
    # The 48 queries of a head in twelve settings give the ratio to about a fifth.
    assert ((ratio > 0.6) & (ratio < 1.6)).all(), ratio


def test_the_head_that_looks_tokens_up_gets_the_finer_step():
    queries, (before, packed, after), bases = setting()
    for given, basis in zip(candidates(queries, before, packed, after, bases), bases):
        factors = given.choose(basis, 1e-4).step / basis.step
        assert factors[0] < factors[1]


def test_a_bit_more_is_taken_where_it_gains_what_it_is_worth():
    """Of n elements a bit each divides a loss by four, so what is lost is n channels' share of the config's loss."""
    queries, (before, packed, after), bases = setting()
    for given, basis, kind in zip(candidates(queries, before, packed, after, bases), bases, ("key", "value")):
        for head in range(2):
            # Between the ends of what is tried.
            loss = float((given.losses[head].amin() * given.losses[head].amax()).sqrt())
            factor = given.choose(basis, loss).step[head] / basis.step[head]
            lost = given.losses[head, (given.factors - factor).abs().argmin()]
            share = lost / (loss * (64 - CONFIG.dense_channels(kind, 64)) / 64)
            # Less at steps so coarse that elements are dropped: another bit then keeps more of them.
            assert 1 / 8 < share < 2, (kind, head, share)


def test_heads_take_three_four_and_eight_bits():
    queries, (before, packed, after), _ = setting()
    config = MosaicKVConfig()
    bases = fit_bases(*packed, config)
    given = candidates(queries, before, packed, after, bases, config)[0]
    assert {bits for loss in (10.0, 1e-3, 1e-4, 1e-5, 1e-6) for bits in given.choose(bases[0], loss).bits} == {3, 4, 8}


@pytest.mark.parametrize("broken", ["queries", "nothing to lose"])
def test_what_tells_nothing_takes_the_coarsest_steps(broken):
    queries, (before, packed, after), _ = setting()
    if broken == "queries":
        queries = queries * torch.nan
    else:
        before, packed, after = ((keys, torch.zeros_like(values)) for keys, values in (before, packed, after))
    bases = fit_bases(*packed, CONFIG)
    chosen = candidates(queries, before, packed, after, bases)[1].choose(bases[1], 1e-4)
    torch.testing.assert_close(chosen.step, bases[1].step * 4)


@pytest.mark.parametrize(
    "setter, default", [(torch.set_default_dtype, torch.float64), (torch.set_default_device, "meta")]
)
def test_torchs_defaults_do_not_change_what_is_chosen(setter, default):
    queries, (before, packed, after), bases = setting()
    usual = candidates(queries, before, packed, after, bases)
    _tried.cache_clear()
    setter(default)
    try:
        others = candidates(queries, before, packed, after, bases)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("cpu")
        _tried.cache_clear()
    for one, other in zip(usual, others):
        for name in ("bits", "factors", "rates", "losses"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_a_smaller_loss_takes_more_and_loses_less():
    """Along the lower hull of rates and losses, each head by itself, to the ends of what is tried."""
    queries, (before, packed, after), _ = setting()
    config = MosaicKVConfig()
    bases = fit_bases(*packed, config)
    for given, basis in zip(candidates(queries, before, packed, after, bases, config), bases):
        losses, rates = [], []
        for loss in (1e3, 1e-2, 1e-3, 1e-4, 1e-5, 1e-12):
            chosen = given.choose(basis, loss)
            at = (given.bits == torch.tensor(chosen.bits)[:, None]) & torch.isclose(
                given.factors, (chosen.step / basis.step)[:, None]
            )
            assert (at.sum(1) == 1).all()
            losses.append(given.losses[at])
            rates.append(given.rates[at])
        losses, rates = torch.stack(losses), torch.stack(rates)
        assert (losses[1:] <= losses[:-1]).all() and (rates[1:] >= rates[:-1]).all()
        assert torch.equal(losses[-1], given.losses.amin(1)) and torch.equal(rates[0], given.rates.amin(1))
        assert chosen.bits == (8, 8)


def test_bits_that_are_not_four_are_kept():
    queries, (before, packed, after), _ = setting()
    for bits in (2, 3, 8):
        config = MosaicKVConfig(key_bits=bits, value_bits=bits)
        bases = fit_bases(*packed, config)
        for given, basis in zip(candidates(queries, before, packed, after, bases, config), bases):
            assert all(given.choose(basis, loss).bits == (bits, bits) for loss in (10.0, 1e-3, 1e-9))


def test_what_is_generated_is_packed_as_its_predecessor():
    queries, (before, packed, after), _ = setting()
    config = MosaicKVConfig(min_length=32, recent_window=20, min_segment_length=512)
    sequence = SequenceStore()
    sequence.buffer.append(*(torch.cat(parts, dim=1) for parts in zip(before, packed, after)))
    sequence.pack(304, config, queries)
    first = sequence.segments[0]
    sequence.pack(32, config)
    sequence.pack(32, config)
    assert sequence.segments[0] is first and len(sequence.segments) == 2
    assert sequence.segments[1].length == 64 and sequence.segments[1].keys.basis is first.keys.basis


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama-group1")


SMALL = dict(min_length=32, recent_window=8, buffer_tokens=16, min_segment_length=64, key_dense_channels=4)


def steps(cache):
    return torch.stack([layer.rows[0].segments[0].keys.basis.step for layer in cache.layers])


@pytest.mark.parametrize("length", [50, 90], ids=["packed with the first decode step", "packed in the prompt's call"])
def test_a_prompt_is_packed_as_its_queries_ask(llama, length):
    config = MosaicKVConfig(**SMALL)
    ids = torch.randint(64, (1, length))
    packed = {}
    for name, compression in {"seen": config, "not": dataclasses.replace(config, adapt_steps=False)}.items():
        cache = MosaicKVCache(compression)
        llama(ids, **{CACHE: cache})
        llama(ids[:, :1], **{CACHE: cache})
        packed[name] = steps(cache)
        assert all(layer.queries is None for layer in cache.layers)  # they have served
    factors = packed["seen"] / packed["not"]
    assert (factors != 1).any() and ((factors > 0.096) & (factors < 4.001)).all()


def test_one_raw_prefill_serves_several_configs(llama):
    ids = torch.randint(64, (2, 90))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    raw, full, own = MosaicKVCache("raw"), DynamicCache(), MosaicKVCache(MosaicKVConfig(**SMALL))
    for cache in (raw, full, own):
        llama(ids, attention_mask=mask, **{CACHE: cache})
    assert raw.stats().segments == 0
    for i, layer in enumerate(raw.to_dynamic_cache().layers):
        assert torch.equal(layer.keys[0], full.layers[i].keys[0])
        assert torch.equal(layer.values[1, :, 20:], full.layers[i].values[1, :, 20:])
    served = MosaicKVCache.from_cache(raw, compression=MosaicKVConfig(**SMALL))
    assert served.stats().segments > 0
    # The queries are kept in another precision than here, so the steps agree to that of bf16.
    torch.testing.assert_close(steps(served), steps(own), rtol=2**-6, atol=0)
    assert [layer.starts for layer in served.layers] == [[0, 20]] * 2


def test_a_row_of_fewer_tokens_than_queries():
    """As in a padded batch: the queries of padding do not count."""
    queries, parts, bases = setting(n=16, length=376)
    before, packed, after = (tuple(states[:, :k] for states in part) for part, k in zip(parts, (2, 6, 4)))
    axes = bases[0].axes()
    few = output_weights(axes, queries, before, packed, after)
    for weights, own in zip(few, output_weights(axes, queries[:, :, -12:], before, packed, after)):
        assert torch.equal(weights, own) and (weights > 0).all()


def budgeted(budget, **changes):
    return MosaicKVConfig(**SMALL, memory_budget=budget, **changes)


@pytest.mark.parametrize("adapt", [True, False], ids=["losses", "steps"])
@pytest.mark.parametrize("length", [300, 700], ids=["short", "long"])
def test_a_budget_is_filled_and_not_exceeded(llama, length, adapt):
    raw = MosaicKVCache("raw")
    llama(torch.randint(64, (2, length)), **{CACHE: raw})
    for budget in (0.28, 0.32):
        stats = MosaicKVCache.from_cache(raw, compression=budgeted(budget, adapt_steps=adapt)).stats()
        assert stats.segments
        # Measured on a sample of 128 tokens of each head and layer, to about a hundredth. What is left of the budget is
        # less than a change of bits of one of the model's sixteen heads takes.
        assert 0.95 * budget < stats.bytes / stats.bytes_bf16 < 1.015 * budget


def test_a_budget_may_be_filled_with_eight_bits(llama, recwarn):
    raw = MosaicKVCache("raw")
    llama(torch.randint(64, (1, 700)), **{CACHE: raw})
    stats = MosaicKVCache.from_cache(raw, compression=budgeted(0.5, key_bits=8, value_bits=8)).stats()
    assert 0.95 * 0.5 < stats.bytes / stats.bytes_bf16 < 1.015 * 0.5
    assert not [w for w in recwarn if "memory_budget" in str(w.message)]


def test_a_budget_weighs_a_segment_by_its_tokens():
    """A bit more for each token of a longer one costs as much more, so it pays there at a larger loss only."""
    queries, (before, packed, after), _ = setting(length=3000)
    packed = [torch.cat(states, dim=1) for states in zip(packed, after)]
    config = MosaicKVConfig(memory_budget=0.4, key_dense_channels=4)
    cuts = ((0, 2600), (2600, 2964), (2964, 2996))
    *packed, after = (tuple(states[:, a:b] for states in packed) for a, b in cuts)
    prompts = [Prompt(before, part, after, queries, config) for part in packed]
    long, short = list(map(fit_budget([prompts], config), prompts))
    worth = []
    for prompt, bases in zip(prompts, (long, short)):
        given, basis = prompt.candidates[0], bases[0]
        at = torch.isclose(given.factors, (basis.step / prompt.fitted[0].step)[:, None])
        at &= given.bits == torch.tensor(basis.bits)[:, None]
        # What the next cheaper candidates on the hull would lose more for each bit of the segment that they save.
        saved, more = given.rates[at][:, None] - given.rates, given.losses - given.losses[at][:, None]
        slopes = torch.where(saved > 0, more / saved, torch.inf).amin(1) / prompt.packed[0].shape[1]
        worth.append(float(slopes[1]))  # the other head is at the end of what is tried
    assert 0.5 < worth[0] / worth[1] < 2, worth


def test_a_smaller_budget_loses_more_everywhere(llama):
    raw = MosaicKVCache("raw")
    llama(torch.randint(64, (1, 400)), **{CACHE: raw})
    wide, tight = (MosaicKVCache.from_cache(raw, compression=budgeted(b)).stats().losses() for b in (0.36, 0.3))
    for layer, losses in wide.items():
        assert all(0 < a < b for a, b in zip(losses, tight[layer]))


@pytest.mark.parametrize("lengths", [(400,), (100, 300), (80, 20)], ids=str)
def test_generation_waits_raw_until_the_budget_can_be_fitted(llama, lengths):
    """All layers at once, so with the first decode step, however the prompt came."""
    cache = MosaicKVCache(budgeted(0.36))
    for length in lengths:
        llama(torch.randint(64, (1, length)), **{CACHE: cache})
    if lengths[-1] > 8:
        assert cache.stats().segments == 0
    llama(torch.randint(64, (1, 1)), **{CACHE: cache})
    stats = cache.stats()
    assert [segment.layer for segment in stats.strategies] == list(range(len(cache.layers)))
    assert all(layer.queries is None for layer in cache.layers)  # they have served


def test_every_long_prompt_of_a_chat_is_fitted(llama):
    """Also after an answer, and again after a crop to nothing or a reset."""
    cache = MosaicKVCache(budgeted(0.3))

    def go_on(length):
        before = cache.stats()
        llama(torch.randint(64, (1, length)), **{CACHE: cache})
        llama(torch.randint(64, (1, 1)), **{CACHE: cache})
        stats = cache.stats()
        return (stats.bytes - before.bytes) / (stats.bytes_bf16 - before.bytes_bf16)

    # The buffers have room to grow, once there has been a step; without a budget it would be 0.4.
    assert 0.27 < go_on(600) < 0.34
    for _ in range(40):
        llama(torch.randint(64, (1, 1)), **{CACHE: cache})
    assert 0.26 < go_on(900) < 0.34
    cache.crop(-cache.get_seq_length())
    assert 0.27 < go_on(900) < 0.34
    cache.reset()
    assert 0.27 < go_on(700) < 0.34


@pytest.mark.parametrize("queries", ["seen", "not"])
def test_a_prompt_of_several_segments_fills_its_budget(llama, queries):
    raw = MosaicKVCache("raw")
    llama(torch.randint(64, (1, 1500)), **{CACHE: raw})
    for layer in raw.layers:
        layer.queries = layer.queries if queries == "seen" else None
    stats = MosaicKVCache.from_cache(raw, compression=budgeted(0.3, segment_length=400)).stats()
    assert stats.segments == 4 * len(raw.layers)
    assert 0.29 < stats.bytes / stats.bytes_bf16 < 0.305


def test_rows_of_a_batch_are_fitted_when_all_their_layers_can_be(llama):
    """The second row has too few tokens at first; layers take turns at packing, which must not part them."""
    config = budgeted(0.6, adapt_steps=False)
    ids = torch.randint(64, (2, 60))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    cache = MosaicKVCache(config)
    llama(ids, attention_mask=mask, **{CACHE: cache})
    seen = []
    for _ in range(60):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        llama(torch.randint(64, (2, 1)), attention_mask=mask, **{CACHE: cache})
        seen.append([[bool(row.segments) for row in layer.rows] for layer in cache.layers])
    assert all(layers[0] == layers[1] for layers in seen)
    assert seen[0][0] == [True, False] and seen[-1][0] == [True, True]


def test_rows_that_are_equal_are_fitted_and_packed_once(llama):
    cache = MosaicKVCache(budgeted(0.36))
    llama(torch.randint(64, (1, 400)), **{CACHE: cache})
    cache.batch_repeat_interleave(3)
    llama(torch.randint(64, (3, 1)), **{CACHE: cache})
    assert cache.stats().segments == len(cache.layers)


def test_an_error_while_packing_leaves_the_rest_for_the_next_step(llama, monkeypatch):
    cache = MosaicKVCache(budgeted(0.36))
    ids = torch.randint(64, (1, 400))
    llama(ids, **{CACHE: cache})
    pack, calls = SequenceStore.pack, []

    def failing(self, *args):
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        pack(self, *args)

    monkeypatch.setattr(SequenceStore, "pack", failing)
    with pytest.raises(MemoryError):
        llama(ids[:, :1], **{CACHE: cache})
    llama(ids[:, :1], **{CACHE: cache})
    stats = cache.stats()
    assert stats.segments == len(cache.layers) and stats.bytes < 0.42 * stats.bytes_bf16


def test_a_budget_that_cannot_be_met_is_said(llama):
    raw = MosaicKVCache("raw")
    llama(torch.randint(64, (1, 300)), **{CACHE: raw})
    with pytest.warns(UserWarning, match="memory_budget` is 0.01, but the coarsest steps take 0"):
        cache = MosaicKVCache.from_cache(raw, compression=budgeted(0.01))
    assert cache.stats().segments


def test_a_saved_cache_keeps_what_its_budget_came_to(llama, tmp_path):
    cache = MosaicKVCache(budgeted(0.36))
    llama(torch.randint(64, (1, 300)), **{CACHE: cache})
    llama(torch.randint(64, (1, 1)), **{CACHE: cache})
    cache.save_pretrained(tmp_path)
    loaded = MosaicKVCache.from_pretrained(tmp_path)
    assert loaded.compression == cache.compression
    assert loaded.stats().strategies == cache.stats().strategies


@pytest.mark.parametrize("selection", ["threshold", "top_r"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_loss_that_is_told_is_the_one_that_is_made(selection, bits):
    _, (_, packed, _), _ = setting()
    config = MosaicKVConfig(
        selection=selection, key_bits=bits, value_bits=bits, key_step=0.4, value_step=0.4, value_dense_channels=6
    )
    segment = compress(*packed, fit_bases(*packed, config), config)
    for states, given, told in zip((segment.keys, segment.values), packed, segment.losses):
        blocks = torch.arange(states.num_blocks).expand(2, -1)
        decoded = states.basis.rotate_back(unpack_blocks(states, blocks))[:, : given.shape[1]]
        made = (decoded - given).square().sum() / given.square().sum()
        # A sample of the tokens.
        assert made / 1.1 < told < made * 1.1


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "0.2"])
def test_a_budget_is_a_share(budget):
    with pytest.raises(ValueError, match="`memory_budget` must be"):
        MosaicKVConfig(memory_budget=budget)
    with pytest.raises(ValueError, match="`memory_budget` must be"):
        MosaicKVConfig(memory_budget=0.5, selection="top_r")


def test_stats_tell_every_segment(llama):
    cache = MosaicKVCache(MosaicKVConfig(**SMALL))
    ids = torch.randint(64, (2, 90))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    llama(ids, attention_mask=mask, **{CACHE: cache})
    llama(ids[:, :1], **{CACHE: cache})
    strategies = cache.stats().strategies
    heads = cache.layers[0].num_key_value_heads
    assert [(s.layer, s.row) for s in strategies] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [s.start for s in strategies] == [4, 24, 4, 24]
    for s in strategies:
        assert s.length % 8 == 0 and s.length <= 90 - 4 - 8
        for states in (s.keys, s.values):
            assert len(states.bits) == len(states.steps) == len(states.bits_per_element) == heads
            assert all(1 < bits < 10 for bits in states.bits_per_element) and 0 < states.loss < 1
    total = sum(
        s.length * sum(s.keys.bits_per_element + s.values.bits_per_element) / 8 * cache.layers[0].key_head_dim
        for s in strategies
    )
    held = cache.stats().bytes_by_kind
    # Besides the few bytes behind the codes.
    assert held["values"] + held["bitmaps"] == pytest.approx(total, rel=0.02)
