"""Saved caches: a folder with a JSON index and safetensors files, written so that it is whole or not there.

The index tells how the tensors make up a cache. It is written last, under a temporary name, and renamed; the files
that it names are new ones each time, so that an interrupted save leaves the older cache as it was. It holds the size
and SHA-256 of every file and of itself, and everything that kernels rely on is checked again when it is read
(`checks.py`): a changed file is refused, never half loaded.
"""

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from .checks import check_layer
from .compression import States
from .config import MosaicKVConfig
from .layer import MosaicKVLayer, make_reorganizer
from .open_segment import ClosedSegment, OpenSegment
from .reorganizer import Reorganizer, Ticket
from .segments import Basis, PackedSegment, PackedStates
from .sequence import SequenceStore

INDEX = "mosaickv_cache.json"
FORMAT, VERSION = "mosaickv-cache", 3


def save(
    layers: list,
    compression: MosaicKVConfig,
    folder: str | os.PathLike,
    *,
    model: PreTrainedModel | PreTrainedConfig | None,
    input_ids: torch.Tensor | None,
    max_shard_size: int | str,
) -> None:
    """See `MosaicKVCache.save_pretrained`."""
    writer = _Writer()
    written = [writer.layer(layer, i) for i, layer in enumerate(layers)]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    older = _files_of(folder / INDEX)
    pattern = f"mosaickv_cache-{secrets.token_hex(4)}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(writer.tensors, filename_pattern=pattern, max_shard_size=max_shard_size)
    temporary = folder / f"{INDEX}.{os.getpid()}.tmp"
    try:
        files = {}
        for name, tensors in split.filename_to_tensors.items():
            save_file({tensor: writer.tensors[tensor] for tensor in tensors}, folder / name)
            files[name] = {"bytes": (folder / name).stat().st_size, "sha256": _file_digest(folder / name)}
        index = {
            "format": FORMAT,
            "version": VERSION,
            "compression": compression.to_dict(),
            "model": None if model is None else fingerprint(model),
            "input_ids": None if input_ids is None else _tokens_digest(input_ids),
            "files": files,
            "bases": writer.bases,
            "segments": writer.segments,
            "layers": written,
        }
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({**index, "sha256": _index_digest(index)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / INDEX)
    except BaseException:
        for name in (temporary.name, *split.filename_to_tensors):
            (folder / name).unlink(missing_ok=True)
        raise
    for name in older:
        (folder / name).unlink(missing_ok=True)


def load(
    folder: str | os.PathLike,
    *,
    device: torch.device | str | None,
    model: PreTrainedModel | PreTrainedConfig | None,
    input_ids: torch.Tensor | None,
) -> tuple[MosaicKVConfig, list[MosaicKVLayer], Reorganizer]:
    """See `MosaicKVCache.from_pretrained`; returns the config, the layers and the reorganizer they share."""
    folder = Path(folder)
    index = _read_index(folder / INDEX)
    for name, given, digest in (("model", model, fingerprint), ("input_ids", input_ids, _tokens_digest)):
        if given is not None and index[name] is not None and digest(given) != index[name]:
            raise ValueError(f"`{name}` is not what the cache in {folder} was made with")
    try:
        tensors: dict[str, torch.Tensor] = {}
        for name, about in index["files"].items():
            tensors |= _read_tensors(folder, name, about, device)
        compression = MosaicKVConfig.from_dict(index["compression"])
        reorganizer = make_reorganizer(compression)
        reader = _Reader(index, tensors, compression, reorganizer)
        layers = [reader.layer(about, i) for i, about in enumerate(index["layers"])]
        for i, layer in enumerate(layers):
            check_layer(layer, f"layer {i}")
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder / INDEX} does not describe a cache: {error}") from error
    return compression, layers, reorganizer


def fingerprint(model: PreTrainedModel | PreTrainedConfig) -> str:
    """Of what K and V depend on as far as the config tells it: a hash of its fields, less those that name versions."""
    config = getattr(model, "config", model).to_dict()
    return hashlib.sha256(json.dumps(_telling(config), sort_keys=True, default=str).encode()).hexdigest()


def _telling(fields):
    """A config's fields without those that K and V do not depend on."""
    if not isinstance(fields, dict):
        return fields
    other = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
    return {k: _telling(v) for k, v in fields.items() if k not in other and not str(k).endswith("_token_id")}


def _tokens_digest(input_ids: torch.Tensor) -> str:
    return hashlib.sha256(json.dumps(input_ids.tolist()).encode()).hexdigest()


def _index_digest(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_of(path: Path) -> list[str]:
    """The files that an index names, if it is a whole one."""
    try:
        return [name for name in _read_index(path)["files"] if Path(name).name == name]
    except (OSError, ValueError):
        return []


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise OSError(f"{path.parent} holds no saved cache: there is no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{path} is not the index of a saved cache")
    if index.get("version") != VERSION:
        raise ValueError(f"{path} has format version {index.get('version')!r}, this release reads {VERSION}")
    if index.pop("sha256", None) != _index_digest(index):
        raise ValueError(f"{path} is damaged: its checksum is another")
    return index


def _read_tensors(folder: Path, name: str, about: dict, device) -> dict[str, torch.Tensor]:
    path = folder / name
    if Path(name).name != name:
        raise ValueError(f"{folder / INDEX} names a file outside of its folder: {name}")
    if not path.is_file():
        raise OSError(f"{folder} lacks {name}, which its {INDEX} names")
    if path.stat().st_size != about["bytes"] or _file_digest(path) != about["sha256"]:
        raise ValueError(f"{path} is damaged: its size or checksum is another than {INDEX} says")
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            # Copies, so that the cache does not depend on the file, which is mapped into memory here.
            return {key: file.get_tensor(key).clone() for key in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None


class _Writer:
    """Turns layers into JSON and named tensors; what is shared is written once."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}
        self.bases: list[dict] = []
        self.segments: list[dict] = []
        self._places: dict[int, Any] = {}
        self._held: list[Any] = []  # so that no id is given to another object

    def layer(self, layer, index: int) -> dict | None:
        if not isinstance(layer, MosaicKVLayer):
            raise ValueError(f"only attention over all tokens can be saved, layer {index} is a {type(layer).__name__}")
        layer.settle()
        if not layer.is_initialized:
            return None
        return {
            "dtype": str(layer.dtype).removeprefix("torch."),
            "num_key_value_heads": layer.num_key_value_heads,
            "head_dims": [layer.key_head_dim, layer.value_head_dim],
            "stored_length": layer.stored_length,
            "starts": layer.starts,
            "queries": self._tensor(layer.queries),
            "rows": [self._row(row, layer.reorganizer) for row in layer.rows],
        }

    def _row(self, row: SequenceStore, reorganizer: Reorganizer) -> dict:
        return {
            "sinks": self._states(row.sinks),
            "segments": [self._segment(segment) for segment in row.segments],
            "open": None if row.open is None else self._open(row.open),
            # What the reorganizer is at is waited for.
            "closed": [
                {
                    "provisional": self._segment(closed.provisional),
                    "outcome": self._segment(reorganizer.finish(closed.ticket)),
                    "due": closed.due,
                }
                for closed in row.closed
            ],
            "buffer": self._states(row.buffer.states() if row.buffer.tensors() else None),
        }

    def _open(self, segment: OpenSegment) -> dict:
        return {
            "bases": [self._basis(basis) for basis in segment.bases],
            "length": segment.length,
            "raw": [self._states(part) for part in segment.raw],
            "losses": [segment.first_loss, segment.last_loss],
        }

    def _segment(self, segment: PackedSegment) -> int:
        def write() -> int:
            self.segments.append(
                {
                    "keys": self._packed(segment.keys),
                    "values": self._packed(segment.values),
                    "block_means": self._tensor(segment.block_means),
                    "mean_scale": self._tensor(segment.mean_scale),
                    "length": segment.length,
                    "losses": segment.losses,
                }
            )
            return len(self.segments) - 1

        return self._once(segment, write)

    def _packed(self, states: PackedStates) -> dict:
        tensors = {name: self._tensor(getattr(states, name)) for name in _PACKED_TENSORS}
        return {**tensors, "basis": self._basis(states.basis), **{n: getattr(states, n) for n in _PACKED_NUMBERS}}

    def _basis(self, basis: Basis) -> int:
        def write() -> int:
            tensors = {name: self._tensor(getattr(basis, name)) for name in _BASIS_TENSORS}
            self.bases.append({**tensors, "bits": basis.bits, "dense_bits": basis.dense_bits})
            return len(self.bases) - 1

        return self._once(basis, write)

    def _states(self, states: States | None) -> list[str] | None:
        return None if states is None else [self._tensor(part) for part in states]

    def _tensor(self, tensor: torch.Tensor | None) -> str | None:
        def write() -> str:
            name = f"t{len(self.tensors)}"
            # A copy of its own: a view would bring its whole buffer with it.
            self.tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            return name

        return None if tensor is None else self._once(tensor, write)

    def _once(self, thing, write):
        if id(thing) not in self._places:
            self._held.append(thing)
            self._places[id(thing)] = write()
        return self._places[id(thing)]


_PACKED_TENSORS = ("dense", "bitmap", "values", "offsets")
_PACKED_NUMBERS = ("group_size", "head_dim")
_BASIS_TENSORS = ("rotation", "rotation_scale", "offset", "scale", "step")


class _Reader:
    """The way back. What it makes is not to be trusted before `check_layer`."""

    def __init__(self, index: dict, tensors: dict[str, torch.Tensor], config: MosaicKVConfig, reorganizer: Reorganizer):
        self._tensors, self._config, self._reorganizer = tensors, config, reorganizer
        self._bases = [self._basis(about) for about in index["bases"]]
        self._segments = [self._segment(about) for about in index["segments"]]

    def layer(self, about: dict | None, index: int) -> MosaicKVLayer:
        layer = MosaicKVLayer(self._config, index, self._reorganizer)
        if about is None:
            return layer
        queries = self._tensor(about["queries"])
        layer.restore(
            rows=[self._row(row) for row in about["rows"]],
            starts=about["starts"],
            stored_length=about["stored_length"],
            queries=queries,
            dtype=_dtype(about["dtype"]),
            device=next((t.device for t in self._tensors.values()), torch.device("cpu")),
            num_key_value_heads=about["num_key_value_heads"],
            head_dims=tuple(about["head_dims"]),
        )
        return layer

    def _row(self, about: dict) -> SequenceStore:
        row = SequenceStore()
        row.sinks = self._states(about["sinks"])
        row.segments = [self._at(self._segments, i) for i in about["segments"]]
        if about["open"] is not None:
            fields = about["open"]
            bases = tuple(self._at(self._bases, i) for i in fields["bases"])
            row.open = OpenSegment(bases, fields["length"], [self._states(p) for p in fields["raw"]], *fields["losses"])
        for closed in about["closed"]:
            provisional, outcome = (self._at(self._segments, closed[name]) for name in ("provisional", "outcome"))
            row.closed.append(ClosedSegment(provisional, Ticket.of(outcome), closed["due"]))
        if about["buffer"] is not None:
            row.buffer.append(*self._states(about["buffer"]))
        return row

    def _segment(self, about: dict) -> PackedSegment:
        return PackedSegment(
            keys=self._packed(about["keys"]),
            values=self._packed(about["values"]),
            block_means=self._tensor(about["block_means"]),
            mean_scale=self._tensor(about["mean_scale"]),
            length=about["length"],
            losses=_losses(about["losses"]),
        )

    def _packed(self, about: dict) -> PackedStates:
        tensors = {name: self._tensors[about[name]] for name in _PACKED_TENSORS}
        numbers = {name: about[name] for name in _PACKED_NUMBERS}
        return PackedStates(**tensors, **numbers, basis=self._at(self._bases, about["basis"]))

    def _basis(self, about: dict) -> Basis:
        tensors = {name: self._tensor(about[name]) for name in _BASIS_TENSORS}
        dense_bits = tuple(tuple(bits) for bits in about["dense_bits"])
        return Basis(**tensors, bits=tuple(about["bits"]), dense_bits=dense_bits)

    def _states(self, names: list[str] | None) -> States | None:
        if names is None:
            return None
        keys, values = names
        return self._tensors[keys], self._tensors[values]

    def _tensor(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._tensors[name]

    @staticmethod
    def _at(table: list, place: int):
        if not isinstance(place, int) or not 0 <= place < len(table):
            raise ValueError(f"{place!r} is not one of {len(table)}")
        return table[place]


def _losses(about: list) -> tuple[float, float]:
    keys, values = about
    return float(keys), float(values)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is no floating dtype")
    return dtype
