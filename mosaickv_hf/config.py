"""`MosaicKVConfig`: every knob of the cache, validated once, so that no other module checks a setting."""

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from . import hub

_SELECTIONS = ("top_r", "threshold")
_INDEXES = ("principal", "mean")
_BACKENDS = ("auto", "numba", "triton", "torch")
_BITS = ("native", 16, 8, 4, 3, 2)
_MODES = ("async", "sync", "off")


@dataclass(frozen=True, kw_only=True)
class MosaicKVConfig:
    """How a `MosaicKVCache` compresses and attends.

    "Channels" are those of the rotated space (principal components of a segment, most energy first) unless `rotate`
    is off. Sizes are in tokens. The three presets of `MosaicKVConfig.preset` are the starting points; all fields of
    one can be changed with `dataclasses.replace`.

    Args:
        selection (`str`): which elements of a rotated vector are kept. `"top_r"` keeps the same number of largest
            elements of every vector (the paper's rule); `"threshold"` keeps those that do not round to zero at the
            segment's quantization step, so that every vector gets the count it needs.
        key_channel_ratio, value_channel_ratio (`float`): share of the channels that `"top_r"` keeps, in (0, 1].
        key_step, value_step (`float`): the quantization step, in units of the segment's standard deviation (per
            KV head, its mean taken out). `"threshold"` keeps an element from `dead_zone` steps upwards.
        adapt_steps (`bool`): with `"threshold"`, choose each KV head's steps, from a quarter of `key_step` and
            `value_step` to four times as much (a tenth with 8 bits), and where 4 bits are asked for whether it takes
            3, 4 or 8: what loses least for its bytes, by how much quantization changes the attention output of a
            prompt's newest queries. Tokens whose queries are not seen (`from_cache` of a `DynamicCache`) take steps and
            bits as they are; generated ones those of the prompt.
        key_loss, value_loss (`float`): relative squared error of a head's output, from quantizing K and V, at which a
            bit an element is worth what it gains.
        memory_budget (`float`, *optional*): bytes that a prompt may take with all its layers and heads, as a share of
            its bf16 bytes, above 0 and up to 1; with `"threshold"`. Then `key_loss` and `value_loss` (the steps, if
            the prompt's queries are not seen) only say how K relates to V: both are scaled by the factor that meets
            the budget. For that a prompt stays raw in all layers until the first decode step after it. Generated
            tokens, and a later turn of less than `min_segment_length`, take the steps of what is packed before them.
        query_window (`int`): queries that this error is measured with.
        dead_zone (`float`): in (0, 1]; 0.5 is plain rounding, more drops more.
        group_size (`int`): adjacent channels that share one bit of the position bitmap and are kept together.
        key_bits, value_bits (`"native"`, 16, 8, 4, 3 or 2): bits of a kept element. `"native"` is the dtype of raw
            tokens, 16 is bf16 (fp16 in fp16 models), 8 and fewer are multiples of the segment's step.
        key_dense_channels, value_dense_channels (`int`): leading channels stored for every token, outside the
            selection, in codes of 4 to 8 bits, as many as it takes to be as fine as the other channels' step (8 where
            those are not quantized). As many more as `group_size` leaves over; more than head_dim means all.
        rotate (`bool`): rotate K and V into the principal channels of their segment. Off: channels stay as they are.
        block_index (`str`): what a decode step scores to choose blocks. `"principal"` scores every token by K's
            dense channels and takes each block's best; `"mean"` scores the mean key of the block
            (the paper's rule), kept as int8 of the leading `index_channels`.
        index_channels (`int`): channels of a mean block key; more than head_dim means all.
        token_ratio (`float`): share of the packed tokens that a decode step attends to, in (0, 1]; 1 attends to all.
        min_attended_tokens (`int`): floor on the attended packed tokens, since a tenth of a short context is little.
        block_size (`int`): tokens of a selection block.
        raw_bits (`"native"` or 16): how tokens are kept that are not packed (yet): in the model's dtype, or as bf16 if
            that is float32.
        sink_tokens (`int`): first tokens of a sequence, kept raw and always attended.
        recent_window (`int`): newest tokens, kept raw and always attended. A `crop` of at most this many tokens
            leaves no trace.
        buffer_tokens (`int`): raw tokens collected beyond the recent window before they are packed, a multiple of
            `block_size`.
        segment_length (`int`): longest prompt segment (64K in the paper).
        min_segment_length (`int`): a segment shorter than this borrows the rotation of the one before it, if there
            is one; a prompt that arrives in chunks is collected raw until it has this many.
        min_length (`int`): sequences shorter than this stay raw.
        reorganize (`str`): what becomes of the segments that generated tokens make. They are packed with the bases of
            the segment before; beside that they are kept raw until their segment closes, which is then packed anew if
            that pays. `"async"` does so in a background thread, `"sync"` in place with the same results, `"off"` not
            at all, and keeps nothing raw. It pays for segments of some thousand tokens (`docs/decisions.md`).
        reorganizer_threads (`int`): threads that the work in the background may take.
        reorganize_lag (`int`): tokens from the closing of a segment until its new form takes its place.
        open_segment_length (`int`): tokens at which a segment of generated tokens closes: the most that are kept raw
            beside it, a multiple of `buffer_tokens`.
        segment_loss (`float`): it closes earlier once the loss of packing its newest tokens, as squared error to
            energy, exceeds that of its first ones by this factor.
        backend (`str`): `"auto"` takes the compiled kernels of the device where there are some, `"numba"` insists on
            those for CPUs, `"triton"` on those for GPUs, `"torch"` is the plain implementation that they are tested
            against.

    Raises:
        ValueError: a value outside its range; the message names the argument, what was given and what is allowed.
    """

    selection: str = "threshold"
    key_channel_ratio: float = 0.25
    value_channel_ratio: float = 0.25
    key_step: float = 0.62
    value_step: float = 1.2
    adapt_steps: bool = True
    key_loss: float = 5e-4
    value_loss: float = 1.5e-3
    memory_budget: float | None = None
    query_window: int = 8
    dead_zone: float = 0.6
    group_size: int = 1
    key_bits: int | str = 4
    value_bits: int | str = 4
    key_dense_channels: int = 16
    value_dense_channels: int = 1
    rotate: bool = True
    block_index: str = "principal"
    index_channels: int = 32
    token_ratio: float = 0.1
    min_attended_tokens: int = 4096
    block_size: int = 8
    raw_bits: int | str = 16
    sink_tokens: int = 4
    recent_window: int = 32
    buffer_tokens: int = 64
    segment_length: int = 65536
    min_segment_length: int = 4096
    min_length: int = 512
    reorganize: str = "off"
    reorganizer_threads: int = 1
    reorganize_lag: int = 64
    open_segment_length: int = 512
    segment_loss: float = 1.5
    backend: str = "auto"

    def __post_init__(self):
        _one_of(self, "selection", _SELECTIONS)
        _one_of(self, "block_index", _INDEXES)
        _one_of(self, "backend", _BACKENDS)
        _one_of(self, "key_bits", _BITS)
        _one_of(self, "value_bits", _BITS)
        _one_of(self, "raw_bits", ("native", 16))
        _one_of(self, "reorganize", _MODES)
        for name in ("key_channel_ratio", "value_channel_ratio", "token_ratio", "dead_zone"):
            _number(self, name, "a number in (0, 1]", lambda x: 0 < x <= 1)
        for name in ("key_step", "value_step", "key_loss", "value_loss", "segment_loss"):
            _number(self, name, "a number > 0", lambda x: x > 0)
        for name in (
            "group_size",
            "query_window",
            "block_size",
            "buffer_tokens",
            "index_channels",
            "reorganizer_threads",
            "open_segment_length",
        ):
            _integer(self, name, 1)
        for name in (
            "key_dense_channels",
            "value_dense_channels",
            "min_attended_tokens",
            "sink_tokens",
            "recent_window",
            "segment_length",
            "min_segment_length",
            "min_length",
            "reorganize_lag",
        ):
            _integer(self, name, 0)
        for name in ("rotate", "adapt_steps"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "True or False")
        for name in ("buffer_tokens", "segment_length"):
            if getattr(self, name) % self.block_size or getattr(self, name) == 0:
                raise _error(name, getattr(self, name), f"a positive multiple of block_size ({self.block_size})")
        for name in ("key_bits", "value_bits"):
            if self.selection == "threshold" and getattr(self, name) not in (8, 4, 3, 2):
                raise _error(name, getattr(self, name), 'one of 8, 4, 3, 2 with selection="threshold", which quantizes')
        if self.memory_budget is not None:
            _number(self, "memory_budget", "None or a number in (0, 1]", lambda x: 0 < x <= 1)
            if self.selection != "threshold":
                raise _error("memory_budget", self.memory_budget, 'None with a selection other than "threshold"')
        if self.block_index == "principal" and self.token_ratio < 1 and not self.key_dense_channels:
            raise _error("block_index", "principal", '"mean" where K has no dense channels and token_ratio < 1')

    @property
    def adapts_steps(self) -> bool:
        """Whether steps depend on the queries seen."""
        return self.selection == "threshold" and self.adapt_steps

    def dense_channels(self, kind: str, head_dim: int) -> int:
        """Dense channels of K (`kind="key"`) or V (`"value"`) of this head_dim: groups fill the rest of it."""
        dense = min(getattr(self, f"{kind}_dense_channels"), head_dim)
        return dense + (head_dim - dense) % self.group_size

    @classmethod
    def preset(cls, name: str) -> "MosaicKVConfig":
        """The preset `name`: `"default"`, `"paper"`, `"lossless"` or `"raw"`.

        `default` is five times below bf16 at 4K tokens with hardly a loss. `paper` is arXiv 2607.00760 as published:
        25 % of the channels per vector as bf16, a bit per channel, block means, 10 % of the tokens, blocks of 8,
        64K segments, generated ones reorganized in the background. `lossless` keeps every element in the model's
        dtype, unrotated, through the same packed path. `raw` packs nothing: a prompt in it serves several configs
        through `MosaicKVCache.from_cache`.
        """
        if not isinstance(name, str) or name not in _PRESETS:
            raise _error("compression", name, f"a MosaicKVConfig or one of {', '.join(map(repr, _PRESETS))}")
        return cls(**_PRESETS[name])

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MosaicKVConfig":
        """The inverse of `to_dict`; fields left out take their defaults, unknown ones raise `ValueError`."""
        unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"MosaicKVConfig has no field named {', '.join(map(repr, unknown))}")
        return cls(**fields)

    def to_json(self) -> str:
        """JSON text, one field a line."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "MosaicKVConfig":
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is not a JSON object of this config's fields.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a MosaicKVConfig in JSON is an object, got {type(fields).__name__}")
        return cls.from_dict(fields)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `mosaickv_config.json` into a folder."""
        hub.write_config(self.to_json(), save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **download) -> "MosaicKVConfig":
        """Reads what `save_pretrained` or `push_to_hub` wrote.

        Args:
            pretrained_model_name_or_path: a folder or a Hub repository.
            download: arguments of `huggingface_hub.hf_hub_download`, such as `revision` and `token`.

        Raises:
            OSError: there is no such folder or repository, or no config in it.
            ValueError: the file is no config.
        """
        return cls.from_json(hub.read_config(pretrained_model_name_or_path, **download))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "MosaicKV config",
    ) -> str:
        """Uploads `mosaickv_config.json` to a Hub repository, made if it is not there; returns the commit's address."""
        return hub.push_config(self.to_json(), repo_id, private=private, token=token, message=commit_message)


_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "selection": "top_r",
        "key_bits": 16,
        "value_bits": 16,
        "key_dense_channels": 0,
        "value_dense_channels": 0,
        "block_index": "mean",
        "min_attended_tokens": 0,
        "reorganize": "async",
    },
    "lossless": {
        "selection": "top_r",
        "key_channel_ratio": 1.0,
        "value_channel_ratio": 1.0,
        "key_bits": "native",
        "value_bits": "native",
        "key_dense_channels": 0,
        "value_dense_channels": 0,
        "raw_bits": "native",
        "rotate": False,
        "token_ratio": 1.0,
    },
    "raw": {"raw_bits": "native", "min_length": 1 << 62},
}


def _error(name: str, given: Any, allowed: str) -> ValueError:
    return ValueError(f"`{name}` must be {allowed}, got {given!r}")


def _one_of(config: MosaicKVConfig, name: str, allowed: tuple) -> None:
    given = getattr(config, name)
    if isinstance(given, bool) or given not in allowed:
        raise _error(name, given, "one of " + ", ".join(map(repr, allowed)))


def _number(config: MosaicKVConfig, name: str, allowed: str, test) -> None:
    given = getattr(config, name)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not test(given):
        raise _error(name, given, allowed)


def _integer(config: MosaicKVConfig, name: str, minimum: int) -> None:
    given = getattr(config, name)
    if isinstance(given, bool) or not isinstance(given, int) or given < minimum:
        raise _error(name, given, f"an integer >= {minimum}")
