"""Saved caches: decoding goes on as it would have, in a new process too, and a file that is not whole is refused."""

import contextlib
import copy
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import CACHE, tiny_model
from safetensors.torch import load_file, save_file

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.saving import INDEX, _file_digest, _index_digest

SMALL = dict(
    min_length=16,
    min_segment_length=48,
    recent_window=9,
    buffer_tokens=16,
    sink_tokens=3,
    min_attended_tokens=32,
    open_segment_length=32,
    reorganize_lag=8,
)
CONFIGS = {
    "default": dataclasses.replace(MosaicKVConfig(), **SMALL, key_dense_channels=4, reorganize="async"),
    "paper": dataclasses.replace(MosaicKVConfig.preset("paper"), **SMALL),
    "lossless": dataclasses.replace(MosaicKVConfig.preset("lossless"), **SMALL),
    "groups, three tiers": dataclasses.replace(
        MosaicKVConfig(), **SMALL, key_dense_channels=6, value_bits=8, group_size=2
    ),
}


def tiny(name="qwen2-group3"):
    model = tiny_model(name)
    model.generation_config.eos_token_id = -1
    return model


@pytest.fixture(scope="module")
def llama():
    return tiny()


def prompt():
    """A batch of three with padding."""
    ids = torch.randint(3, 256, (3, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :30] = mask[2, :85] = 0
    return ids, mask


def begin(model, cache, new_tokens=70):
    ids, mask = prompt()
    output = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **{CACHE: cache})
    return output, torch.cat([mask, torch.ones(3, new_tokens, dtype=torch.int64)], dim=1)


def go_on(model, cache, output, mask, new_tokens=60):
    return model.generate(output, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **{CACHE: cache})


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_goes_on_as_it_would_have(llama, tmp_path, name):
    cache = MosaicKVCache(CONFIGS[name])
    output, mask = begin(llama, cache)
    cache.save_pretrained(tmp_path, model=llama, input_ids=output)
    loaded = MosaicKVCache.from_pretrained(tmp_path, model=llama, input_ids=output)
    before, after = cache.stats(), loaded.stats()
    assert after.tokens == before.tokens and after.segments == before.segments > 0
    for kind in ("values", "bitmaps", "rotations", "index"):
        assert after.bytes_by_kind[kind] == before.bytes_by_kind[kind]
    assert torch.equal(go_on(llama, loaded, output, mask), go_on(llama, cache, output, mask))
    assert loaded.stats().dense_materializations == 0


def test_a_new_process_goes_on(llama, tmp_path):
    cache = MosaicKVCache(CONFIGS["default"])
    output, mask = begin(llama, cache)
    cache.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.save((output, mask), tmp_path / "prompt.pt")
    code = (
        "import sys, torch, test_saving as t\n"
        "from mosaickv_hf import MosaicKVCache\n"
        "output, mask = torch.load(sys.argv[1] + '/prompt.pt')\n"
        "cache = MosaicKVCache.from_pretrained(sys.argv[1])\n"
        "print(t.go_on(t.tiny(), cache, output, mask).tolist())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == go_on(llama, cache, output, mask).tolist()


def test_saving_in_mid_work_carries_it_over(tmp_path):
    """A segment that is closed and not yet swapped, and one that is open with its raw tokens."""
    model = tiny("llama-group1")
    ids = torch.randint(3, 256, (1, 60), generator=torch.Generator().manual_seed(1))
    met = False
    cache = MosaicKVCache(CONFIGS["default"])
    for step in range(120):
        model(ids, **{CACHE: cache})
        ids = torch.tensor([[3 + 7 * step % 250]])
        rows = [layer.rows[0] for layer in cache.layers]
        if any(row.closed for row in rows) and any(row.open is not None for row in rows):
            met = True
            break
    assert met
    cache.save_pretrained(tmp_path)
    loaded = MosaicKVCache.from_pretrained(tmp_path)
    assert [len(layer.rows[0].closed) for layer in loaded.layers] == [len(row.closed) for row in rows]
    for token in range(3, 63):
        one, other = (model(torch.tensor([[token]]), **{CACHE: c}).logits for c in (cache, loaded))
        assert torch.equal(one, other)
    assert loaded.stats().bytes_by_kind["open"] == cache.stats().bytes_by_kind["open"]


def test_what_rows_share_is_stored_once(llama, tmp_path):
    cache = MosaicKVCache(CONFIGS["default"])
    begin(llama, cache)
    cache.save_pretrained(tmp_path / "one")
    cache.batch_repeat_interleave(3)
    cache.save_pretrained(tmp_path / "three")
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")) for name in ("one", "three")]
    assert sizes[1] < 2 * sizes[0]
    loaded = MosaicKVCache.from_pretrained(tmp_path / "three")
    assert loaded.stats().segments == cache.stats().segments
    assert loaded.layers[0].rows[0].segments[0] is loaded.layers[0].rows[1].segments[0]


def test_an_empty_cache(tmp_path):
    MosaicKVCache().save_pretrained(tmp_path)
    assert MosaicKVCache.from_pretrained(tmp_path).get_seq_length() == 0


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """A folder with a saved cache, and what it holds."""
    folder = tmp_path_factory.mktemp("saved")
    cache = MosaicKVCache(CONFIGS["default"])
    output, _ = begin(llama, cache, 20)
    cache.save_pretrained(folder, model=llama, input_ids=output)
    return folder, [layer.materialize(kind) for layer in cache.layers for kind in ("key", "value")]


def test_no_damage_goes_unnoticed(saved, tmp_path):
    folder, truth = saved
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    choose, refused = random.Random(0), 0
    for trial in range(200):
        name = choose.choice(sorted(files))
        content = bytearray(files[name])
        if trial % 4:
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        else:
            del content[choose.randrange(len(content)) :]
        target = tmp_path / str(trial)
        target.mkdir()
        for other, whole in files.items():
            (target / other).write_bytes(content if other == name else whole)
        try:
            loaded = MosaicKVCache.from_pretrained(target)
        except (ValueError, OSError) as error:
            assert str(target) in str(error)
            refused += 1
            continue
        states = [layer.materialize(kind) for layer in loaded.layers for kind in ("key", "value")]
        assert all(torch.equal(a, b) for a, b in zip(states, truth, strict=True))
    assert refused > 150


def tampered(folder, target, change):
    """A copy of the folder whose index `change` has changed, with a right checksum."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    index = json.loads((target / INDEX).read_text())
    index.pop("sha256")
    change(index)
    (target / INDEX).write_text(json.dumps({**index, "sha256": _index_digest(index)}))
    return target


def swap_names(a, b):
    def change(index):
        keys = index["segments"][0]["keys"]
        keys[a], keys[b] = keys[b], keys[a]

    return change


def set_at(*path, to):
    def change(index):
        for name in path[:-1]:
            index = index[name]
        index[path[-1]] = to

    return change


LIES = {
    "longer segment": set_at("segments", 0, "length", to=10**9),
    "no segment length": set_at("segments", 0, "length", to=0),
    "other offsets": swap_names("offsets", "bitmap"),
    "keys' values for the bitmap": swap_names("values", "bitmap"),
    "unknown tensor": set_at("segments", 0, "keys", "values", to="t99999"),
    "unknown segment": set_at("layers", 0, "rows", 0, "segments", 0, to=7000),
    "unknown basis": set_at("segments", 0, "keys", "basis", to=-1),
    "other bits": set_at("bases", 0, "bits", to=[2, 2]),
    "other codes": set_at("bases", 0, "dense_bits", 0, 0, to=1),
    "codes of nine bits": set_at("bases", 0, "dense_bits", 0, 0, to=9),
    "fewer codes": lambda index: index["bases"][0]["dense_bits"].pop(),
    "odd bits": set_at("bases", 0, "bits", to=[3, 3]),
    "bits that are no integers": lambda index: index["bases"][0].update(
        bits=[float(b) for b in index["bases"][0]["bits"]]
    ),
    "queries of another shape": lambda index: index["layers"][0].update(queries=index["segments"][0]["keys"]["values"]),
    "no files": lambda index: index.pop("files"),
    "group size": set_at("segments", 0, "keys", "group_size", to=4),
    "head_dim": set_at("segments", 0, "values", "head_dim", to=1024),
    "more heads": set_at("layers", 1, "num_key_value_heads", to=64),
    "stored length": set_at("layers", 0, "stored_length", to=5),
    "starts": set_at("layers", 0, "starts", 0, to=-4),
    "dtype": set_at("layers", 0, "dtype", to="int8"),
    "block size": set_at("compression", "block_size", to=16),
    "unknown setting": set_at("compression", "eval", to="1"),
    "rotation for scale": lambda index: index["bases"][0].update(rotation=index["bases"][0]["rotation_scale"]),
    "values of another kind": lambda index: index["segments"][0].update(keys=index["segments"][0]["values"]),
    "a file elsewhere": lambda index: index["files"].update({"../x.safetensors": {"bytes": 1, "sha256": ""}}),
    "no layers": lambda index: index.pop("layers"),
    "other version": set_at("version", to=99),
    "other format": set_at("format", to="pickle"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(saved, tmp_path, lie):
    """Whoever writes a file can make its checksums right: kernels must still never be sent out of bounds."""
    with pytest.raises(ValueError, match=str(tmp_path)):
        MosaicKVCache.from_pretrained(tampered(saved[0], tmp_path / "cache", LIES[lie]))


def leaves(thing, path=()):
    """Paths to all numbers, names and nothings in JSON."""
    children = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    for key, child in children:
        yield from leaves(child, (*path, key))
    if not isinstance(thing, (dict, list)):
        yield path


def distort(index, choose):
    """Gives one of an index's leaves another value: a neighbour, something wild, or what another leaf has."""
    parts = {name: index[name] for name in ("layers", "segments", "bases", "compression")}
    places = list(leaves(parts))
    place = choose.choice(places)
    old = parts
    for key in place:
        old = old[key]
    other = parts
    for key in choose.choice([p for p in places if p != place]):
        other = other[key]
    wild = [0, 1, -1, 2**31, 2**63, -(10**30), 1.5, 1e308, float("inf"), None, True, "", "t0", [], {}, [[]] * 3]
    near = [old + 1, old - 1, 2 * old] if isinstance(old, int) and not isinstance(old, bool) else []
    set_at(*place, to=choose.choice([other, other, *near, *near, choose.choice(wild)]))(index)
    return place


@pytest.mark.parametrize("name", CONFIGS)
def test_a_distorted_index_or_tensor_never_reaches_a_kernel(llama, tmp_path, name):
    """Whatever a file with right checksums says: it is refused, or decoding with it works."""
    cache = MosaicKVCache(CONFIGS[name])
    begin(llama, cache, 20)
    cache.save_pretrained(tmp_path / "whole")
    length, refused, choose = cache.get_seq_length(), 0, random.Random(0)
    for trial in range(60):
        target = tampered(tmp_path / "whole", tmp_path / "changed", lambda index: None)
        index = json.loads((target / INDEX).read_text())
        index.pop("sha256")
        if trial % 3:
            what = distort(index, choose)
        else:
            (file,) = target.glob("*.safetensors")
            tensors = load_file(file)
            what = choose.choice(sorted(tensors))
            if tensors[what].numel():
                flat = tensors[what].view(-1)
                at = choose.randrange(len(flat))
                flat[at : at + choose.choice([1, 50])] = choose.choice([0, 1, 77, 127])
            save_file(tensors, file)
            index["files"][file.name] = {"bytes": file.stat().st_size, "sha256": _file_digest(file)}
        (target / INDEX).write_text(json.dumps({**index, "sha256": _index_digest(index)}))
        try:
            loaded = MosaicKVCache.from_pretrained(target)
        except (ValueError, OSError) as error:
            assert str(target) in str(error)
            refused += 1
        else:
            assert loaded.stats().bytes_by_kind.keys() == cache.stats().bytes_by_kind.keys(), what
            with contextlib.suppress(ValueError):  # another dtype, number of heads or length than the model's
                go_on(llama, loaded, torch.full((3, length + 1), 5), torch.ones(3, length + 1, dtype=torch.int64), 4)
        shutil.rmtree(target)
    assert refused > 20


def test_other_models_and_tokens_are_told(saved, llama):
    folder = saved[0]
    with pytest.raises(ValueError, match="`model`"):
        MosaicKVCache.from_pretrained(folder, model=tiny("llama-group1"))
    with pytest.raises(ValueError, match="`input_ids`"):
        MosaicKVCache.from_pretrained(folder, input_ids=torch.ones(3, 5, dtype=torch.int64))
    assert MosaicKVCache.from_pretrained(folder, model=llama.config).get_seq_length() == 109


def test_what_is_missing_is_named(tmp_path, saved):
    with pytest.raises(OSError, match="no saved cache"):
        MosaicKVCache.from_pretrained(tmp_path)
    target = tampered(saved[0], tmp_path / "cache", lambda index: None)
    next(target.glob("*.safetensors")).unlink()
    with pytest.raises(OSError, match="lacks"):
        MosaicKVCache.from_pretrained(target)


def test_saving_again_replaces_and_an_interrupted_save_does_not(llama, tmp_path, monkeypatch):
    cache = MosaicKVCache(CONFIGS["paper"])
    begin(llama, cache, 5)
    cache.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}

    def dies(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", dies)
    llama(torch.full((3, 1), 9), **{CACHE: cache})
    with pytest.raises(KeyboardInterrupt):
        cache.save_pretrained(tmp_path)
    monkeypatch.undo()
    assert MosaicKVCache.from_pretrained(tmp_path).get_seq_length() == 94
    cache.save_pretrained(tmp_path)
    assert MosaicKVCache.from_pretrained(tmp_path).get_seq_length() == 95
    left = {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(left) == 1 and not left & files


def test_layers_that_cannot_be_saved(tmp_path):
    cache = MosaicKVCache()
    cache.layers.append(object())
    with pytest.raises(ValueError, match="layer 0"):
        cache.save_pretrained(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kept", [0, 2, 50])
def test_a_copy_and_a_cropped_cache_can_be_saved(llama, tmp_path, kept):
    cache = MosaicKVCache(CONFIGS["default"])
    begin(llama, cache)
    copied = copy.deepcopy(cache)
    assert copied.stats().bytes_by_kind["rotations"] == cache.stats().bytes_by_kind["rotations"]
    copied.save_pretrained(tmp_path / "copy")
    assert MosaicKVCache.from_pretrained(tmp_path / "copy").get_seq_length() == cache.get_seq_length()
    copied.crop(kept - copied.get_seq_length())
    copied.save_pretrained(tmp_path / "cropped")
    assert MosaicKVCache.from_pretrained(tmp_path / "cropped").get_seq_length() == kept


def test_special_tokens_do_not_make_another_model(saved, llama):
    config = copy.deepcopy(llama.config)
    config.pad_token_id = 77
    assert MosaicKVCache.from_pretrained(saved[0], model=config).get_seq_length() == 109
