"""Segments reorganized in the background: the same tokens as in place, whatever the thread does or suffers."""

import copy
import dataclasses
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from conftest import CACHE, tiny_model
from transformers.generation import BaseStreamer

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.compression import Repack, unpack_blocks
from mosaickv_hf.layer import MosaicKVLayer
from mosaickv_hf.reorganizer import Reorganizer, Ticket
from mosaickv_hf.sequence import SequenceStore

CONFIG = MosaicKVConfig(
    min_length=16,
    min_segment_length=48,
    recent_window=9,
    buffer_tokens=16,
    sink_tokens=3,
    key_dense_channels=4,
    min_attended_tokens=32,
    open_segment_length=32,
    reorganize_lag=8,
    key_step=0.03,
    value_step=0.03,
    reorganize="async",
)
SYNC = dataclasses.replace(CONFIG, reorganize="sync")


@pytest.fixture(scope="module")
def llama():
    model = tiny_model("llama-group1")
    model.generation_config.eos_token_id = -1
    return model


def run(model, cache, new_tokens=150, **kwargs):
    ids = torch.randint(3, 256, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **{CACHE: cache}, **kwargs
    )


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "mosaickv"]


@pytest.fixture(scope="module")
def expected(llama):
    """What the answer is without a thread."""
    cache = MosaicKVCache(SYNC)
    answer = run(llama, cache)
    assert cache.stats().swaps > 4 and not workers()
    return answer


def fails_in_the_thread(monkeypatch, error):
    """Repacking raises in the background, and works in place."""
    work = Repack.__call__

    def failing(self):
        if threading.current_thread() is not threading.main_thread():
            raise error
        return work(self)

    monkeypatch.setattr(Repack, "__call__", failing)


def test_the_thread_changes_no_token(llama, expected):
    for _ in range(2):
        cache = MosaicKVCache(CONFIG)
        assert torch.equal(run(llama, cache), expected)
        stats = cache.stats()
        assert stats.swaps > 4 and stats.dense_materializations == 0
    assert len(workers()) == 1
    del cache
    gc.collect()
    assert not workers()


def test_reorganizing_is_seen_in_what_is_stored(llama, expected):
    """Otherwise the tests here would prove nothing."""
    off = MosaicKVCache(dataclasses.replace(CONFIG, reorganize="off"))
    run(llama, off)
    sync = MosaicKVCache(SYNC)
    run(llama, sync)
    assert off.stats().swaps == off.stats().bytes_by_kind["open"] == 0
    assert sync.stats().swaps > 4
    keys = [cache.layers[0].materialize("key") for cache in (off, sync)]
    assert keys[0].shape == keys[1].shape and not torch.equal(*keys)


def test_raw_tokens_are_bounded_and_counted(llama):
    cache = MosaicKVCache(SYNC)
    run(llama, cache)
    stats = cache.stats()
    per_token = 2 * 4 * 16 * 2  # K and V, heads, head_dim, bf16
    # Two rows, two layers: the open segment and one that waits for its swap, and its queries.
    assert 0 < stats.bytes_by_kind["open"] <= 2 * 2 * (2 * 32 * per_token + 4 * 8 * 16 * 2)
    assert stats.ratio < stats.ratio_without_open


@pytest.mark.parametrize("error", [ValueError("injected"), SystemExit(), MemoryError()])
def test_a_failure_in_the_thread_costs_no_token(llama, expected, monkeypatch, error):
    fails_in_the_thread(monkeypatch, error)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    cache = MosaicKVCache(CONFIG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(run(llama, cache), expected)
    ours = [w for w in caught if "background thread failed" in str(w.message)]
    assert len(ours) == (0 if isinstance(error, SystemExit) else 1)  # a dead thread has failed at nothing


def test_a_failure_in_place_reaches_the_user_and_leaves_a_usable_cache(llama, monkeypatch):
    def failing(self):
        raise ValueError("injected")

    cache = MosaicKVCache(SYNC)
    monkeypatch.setattr(Repack, "__call__", failing)
    with pytest.raises(ValueError, match="injected"):
        run(llama, cache)
    monkeypatch.undo()
    length = cache.get_seq_length()
    llama(torch.full((2, 1), 7), **{CACHE: cache})
    assert cache.get_seq_length() == length + 1


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_full_queue_is_worked_off_in_place(llama, expected, monkeypatch, waiting):
    monkeypatch.setattr("mosaickv_hf.reorganizer._MOST_WAITING", waiting)
    assert torch.equal(run(llama, MosaicKVCache(CONFIG)), expected)


def test_a_thread_that_ends_between_packing_and_swap(llama, expected, monkeypatch):
    swap = SequenceStore.swap

    def swap_without(self, reorganizer):
        if self.closed:
            reorganizer.close()
        return swap(self, reorganizer)

    monkeypatch.setattr(SequenceStore, "swap", swap_without)
    assert torch.equal(run(llama, MosaicKVCache(CONFIG)), expected)


def test_a_slow_thread_is_waited_for(llama, expected, monkeypatch):
    work = Repack.__call__

    def slow(self):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return work(self)

    monkeypatch.setattr(Repack, "__call__", slow)
    cache = MosaicKVCache(CONFIG)
    assert torch.equal(run(llama, cache), expected)
    assert cache.stats().waits > 0 and cache.stats().wait_seconds > 0


def test_caches_come_and_go():
    gc.collect()
    before = threading.active_count()
    for seed in range(200):
        feed(MosaicKVLayer(CONFIG), 90, seed)
    gc.collect()
    assert threading.active_count() == before


def feed(layer, tokens, seed=0, prompt=60):
    """A prompt and then tokens one at a time through a layer of two rows."""
    torch.manual_seed(seed)
    for n in [prompt] + [1] * (tokens - prompt):
        layer.update(torch.randn(2, 2, n, 16), torch.randn(2, 2, n, 16))
        layer.attend(torch.randn(2, 2, n, 16), None, 0.25, n)
    return layer


@pytest.fixture(scope="module")
def mid_work():
    """A number of tokens after which a segment is closed and not yet swapped."""
    return next(n for n in range(90, 140) if any(row.closed for row in feed(MosaicKVLayer(SYNC), n).rows))


def test_a_copy_in_mid_work_goes_its_own_way(mid_work):
    layer = feed(MosaicKVLayer(CONFIG), mid_work)
    other = copy.deepcopy(layer)
    alone = feed(MosaicKVLayer(SYNC), mid_work)
    for one in (layer, other, alone):
        feed(one, 40, seed=5, prompt=1)
        one.settle()
    for kind in ("key", "value"):
        assert torch.equal(layer.materialize(kind), alone.materialize(kind))
        assert torch.equal(other.materialize(kind), alone.materialize(kind))
    assert other.reorganizer is not layer.reorganizer


def test_reset_in_mid_work(mid_work):
    layer = feed(MosaicKVLayer(CONFIG), mid_work)
    layer.reset()
    assert layer.rows == [] and not layer.is_initialized
    fresh = feed(MosaicKVLayer(SYNC), 150)
    assert torch.equal(feed(layer, 150).materialize("key"), fresh.materialize("key"))


def test_an_error_while_packing_loses_no_token(monkeypatch):
    """Whatever packing raises, the row is as it was, and packs when it is asked again."""
    sequence, reference = SequenceStore(), SequenceStore()
    torch.manual_seed(0)
    states = torch.randn(2, 2, 200, 16)
    compress = SequenceStore.pack.__globals__["compress"]

    def fails(*args):
        raise MemoryError

    for first, end in ((0, 70), (70, 100), (100, 140)):
        for one in (sequence, reference):
            one.buffer.append(*states[:, :, first:end])
        due = sequence.ripe(SYNC, prompt=False)
        assert due
        monkeypatch.setattr("mosaickv_hf.sequence.compress", fails)
        before = contents(sequence)
        with pytest.raises(MemoryError):
            sequence.pack(due, SYNC)
        assert sequence.length == end
        assert all(torch.equal(a, b) for a, b in zip(contents(sequence), before, strict=True))
        monkeypatch.setattr("mosaickv_hf.sequence.compress", compress)
        for one in (sequence, reference):
            one.pack(due, SYNC)
    assert all(torch.equal(a, b) for a, b in zip(contents(sequence), contents(reference), strict=True))


def test_a_long_prompt_closes_the_open_segment():
    sequence, reorganizer = SequenceStore(), Reorganizer(background=False)
    torch.manual_seed(0)
    states = torch.randn(2, 2, 300, 16)
    for first, end, count in ((0, 70, 56), (70, 100, 16), (100, 200, 96)):
        sequence.buffer.append(*states[:, :, first:end])
        sequence.pack(count, SYNC, None, reorganizer)
        assert (sequence.open is not None) == (count == 16)
    assert [closed.provisional for closed in sequence.closed] == [sequence.segments[1]]


def test_pickling_is_refused():
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(MosaicKVCache(CONFIG))


class Reader(BaseStreamer):
    """Hands tokens to another thread, as Transformers' TextIteratorStreamer does, which looks at the cache."""

    def __init__(self, cache):
        self.cache, self.seen, self.ended = cache, 0, threading.Event()

    def put(self, value):
        self.seen += 1

    def end(self):
        self.ended.set()


def test_generating_in_a_thread(llama, expected):
    cache = MosaicKVCache(CONFIG)
    reader, answers = Reader(cache), []
    kwargs = dict(streamer=reader)
    row = run_row(llama, MosaicKVCache(SYNC))
    thread = threading.Thread(target=lambda: answers.append(run_row(llama, cache, **kwargs)))
    thread.start()
    assert reader.ended.wait(60)
    thread.join()
    assert torch.equal(answers[0], row) and reader.seen > 100


def run_row(model, cache, **kwargs):
    ids = torch.randint(3, 256, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=120, do_sample=False, **{CACHE: cache}, **kwargs)


def in_a_process(code):
    code = "import os, time, torch, threading\nfrom mosaickv_hf.reorganizer import Reorganizer\n" + code
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_interpreter_exit_in_mid_work():
    done = in_a_process(
        "r = Reorganizer()\n"
        "work = lambda: [torch.linalg.eigh(torch.rand(64, 64).double()) for _ in range(100)]\n"
        "tickets = [r.submit(work) for _ in range(50)]\n"
        "time.sleep(0.1)\nprint('end')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_does_the_work_itself():
    done = in_a_process(
        "torch.set_num_threads(1)\n"
        "r, begun = Reorganizer(), threading.Event()\n"
        "def slow():\n    begun.set()\n    time.sleep(0.5)\n    return 7\n"
        "first, second = r.submit(slow), r.submit(lambda: 8)\n"
        "begun.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    third = r.submit(lambda: 9)\n"
        "    os._exit(0 if [r.result(t) for t in (first, second, third)] == [7, 8, 9] else 1)\n"
        "print(os.waitpid(child, 0)[1], r.result(first), r.result(second))\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 7 8\n", "")


def test_the_thread_takes_no_more_than_its_threads():
    """Torch's number of threads is set where the work runs, and nowhere else."""
    before = torch.get_num_threads()
    reorganizer = Reorganizer(threads=1)
    ticket = reorganizer.submit(torch.get_num_threads)
    deadline = time.monotonic() + 30
    while not ticket.done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ticket.outcome == 1 and torch.get_num_threads() == before
    assert Reorganizer(threads=1, background=False).result(Ticket(torch.get_num_threads, 1)) == 1
    assert torch.get_num_threads() == before


def contents(sequence):
    """All that a sequence holds, decoded, and how it is cut."""
    parts = list(sequence.sinks or ()) + list(sequence.buffer.states())
    for segment in sequence.segments:
        for states in (segment.keys, segment.values):
            blocks = torch.arange(segment.num_blocks).expand(2, -1)
            parts.append(states.basis.rotate_back(unpack_blocks(states, blocks))[:, : segment.length])
    return parts


# A sample in CI; `MOSAICKV_STRESS_SEEDS=1000 pytest -k interleavings` for all.
@pytest.mark.parametrize("seed", range(int(os.environ.get("MOSAICKV_STRESS_SEEDS", "40"))))
def test_random_interleavings(seed, monkeypatch):
    """Appending, cropping, sharing and swapping, against the same without a thread, which sleeps now and then."""
    work, pause = Repack.__call__, random.Random(seed)

    def sometimes_late(self):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(pause.choice([0, 0, 0.001, 0.01]))
        return work(self)

    monkeypatch.setattr(Repack, "__call__", sometimes_late)
    choose = random.Random(seed + 1)
    torch.manual_seed(seed)
    both = [([SequenceStore()], Reorganizer()), ([SequenceStore()], Reorganizer(background=False))]
    config = dataclasses.replace(CONFIG, backend="torch", open_segment_length=choose.choice([16, 32]))
    for _ in range(40):
        action = choose.choice(["append"] * 6 + ["crop", "fork", "drop", "sleep"])
        count, row = choose.choice([1, 1, 8, 16, 70]), choose.random()
        states = torch.randn(2, 2, count, 16)
        for rows, reorganizer in both:
            sequence = rows[int(row * len(rows))]
            if action == "append":
                sequence.buffer.append(*states)
                sequence.swap(reorganizer)
                while due := sequence.ripe(config, prompt=False):
                    sequence.pack(due, config, states[0][:, None, -2:], reorganizer)
            elif action == "crop":
                if sequence.buffer.tensors():
                    sequence.crop(min(count, sequence.length))
            elif action == "fork" and len(rows) < 4 and sequence.buffer.tensors():
                rows.append(sequence.copy() if row < 0.5 else copy.deepcopy(sequence))
            elif action == "drop" and len(rows) > 1:
                rows.remove(sequence)
        if action == "sleep":
            time.sleep(0.002)
    for ours, theirs in zip(both[0][0], both[1][0]):
        assert ours.length == theirs.length and len(ours.closed) == len(theirs.closed)
        if ours.length:
            for a, b in zip(contents(ours), contents(theirs), strict=True):
                assert torch.equal(a, b)
