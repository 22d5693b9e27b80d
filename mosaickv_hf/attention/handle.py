"""What `MosaicKVCache.update` returns instead of K and V: tensors that stand for all stored tokens.

A `Handle` has the logical shape, dtype and device of K or V. `scaled_dot_product_attention` on two of them attends on
the packed data. The views that Transformers takes before that call (`repeat_kv`) are followed; any other operation
gets a dense tensor, which is right and slow, and is counted in `cache.stats()`. Gradients end here: what is packed has
none, and asking for them is an error.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from ..layer import MosaicKVLayer


class Handle(torch.Tensor):
    """K or V of one layer after an update.

    Args:
        layer: the layer that was updated.
        kind: `"key"` or `"value"`.
        num_queries: new tokens of that update.
        first: the update's own `(key_states, value_states)` if no token was stored before; then they are all
            there is, and attention over them is exact.
        shape: if not the shape of all tokens' K or V, a view of it as `repeat_kv` takes.
    """

    @classmethod
    def pair(
        cls, layer: "MosaicKVLayer", num_queries: int, states: tuple[torch.Tensor, torch.Tensor], is_first: bool
    ) -> tuple["Handle", "Handle"]:
        """K and V after an update with these `(key_states, value_states)`."""
        first = states if is_first else None
        return tuple(_ungraded(lambda kind=kind: cls(layer, kind, num_queries, first), *states) for kind in _KINDS)

    @staticmethod
    def __new__(cls, layer, kind, num_queries, first=None, shape=None):
        if shape is None:
            head_dim = layer.key_head_dim if kind == "key" else layer.value_head_dim
            shape = (len(layer.rows), layer.num_key_value_heads, layer.get_seq_length(), head_dim)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=layer.device)

    def __init__(self, layer: "MosaicKVLayer", kind: str, num_queries: int, first=None, shape=None):
        self._layer, self._kind, self._num_queries, self._first = layer, kind, num_queries, first
        self._length = layer.get_seq_length()

    def __repr__(self):
        return f"Handle({self._kind}, shape={list(self.shape)})"

    def with_shape(self, shape: torch.Size) -> "Handle":
        """The same K or V under the shape of a `repeat_kv` view."""
        return _ungraded(lambda: Handle(self._layer, self._kind, self._num_queries, self._first, shape), self)

    def dense(self) -> torch.Tensor:
        """The tensor this handle stands for.

        Raises:
            RuntimeError: the cache has moved on since the update that made this handle.
        """
        self._check_current()
        if self._first is not None:
            states = self._first[0 if self._kind == "key" else 1]
        else:
            self._layer.materializations += 1
            states = self._layer.materialize(self._kind)
        if self.ndim == 5:
            return states[:, :, None].expand(self.shape)
        return states.repeat_interleave(self.shape[1] // states.shape[1], dim=1)

    def _check_current(self) -> None:
        if self._first is None and self._layer.get_seq_length() != self._length:
            raise RuntimeError(
                "K or V returned by MosaicKVCache.update() was used after a later change of the cache; "
                "use it before the next update, crop or reset"
            )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        follow = _FOLLOWED.get(func)
        if follow is not None:
            result = follow(*args, **kwargs)
            if result is not None:
                return result
        # Not torch.Tensor's own: that would make handles of dense results.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def dense(x: Any) -> Any:
            return x.dense() if isinstance(x, Handle) else x

        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))


_KINDS = ("key", "value")


class _Ungraded(torch.autograd.Function):
    """Something made from tensors that cannot be differentiated by them, and says so when that is tried."""

    @staticmethod
    def forward(ctx, make, *inputs):
        return make()

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "attention to a MosaicKVCache has no gradients: its tokens are packed; "
            "train with use_cache=False or a DynamicCache, and generate under torch.no_grad()"
        )


def _ungraded(make: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """What `make` returns, without gradients; where one of the inputs has some, asking for them later is an error."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Ungraded.apply(make, *inputs)
    return make()


# Each returns None where it does not apply: then the operation gets dense tensors.


def _attend(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> torch.Tensor | None:
    if not (isinstance(key, Handle) and isinstance(value, Handle)) or isinstance(query, Handle):
        return None
    layer, n = key._layer, key._num_queries
    if key.ndim != 4 or layer is not value._layer or query.ndim != 4:
        return None
    # One token's heads may come grouped, in the dimension of tokens. Cross-attention has tokens of its own.
    is_self_attention = n == 1 or query.shape[2] == n
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if key._first is not None:
        output = scaled_dot_product_attention(
            query, key.dense(), value.dense(), attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if is_self_attention:
            layer.finish_prompt(query, attn_mask, scale, n)
        return output
    if not is_self_attention:
        raise ValueError(
            f"`query` has {query.shape[2]} tokens where the last update had {n}: for cross-attention give the model "
            "a cache of its own, EncoderDecoderCache(MosaicKVCache(), DynamicCache())"
        )
    # Dropout is for training, and torch aligns `is_causal` to the first token, which no cached call means.
    if dropout_p > 0 or (is_causal and n > 1):
        return None
    key._check_current()
    return _ungraded(lambda: layer.attend(query, attn_mask, scale, n), query, key, value)


def _getitem(handle, index) -> Handle | None:
    everything = slice(None)
    if index == (everything, everything, None, everything, everything) and handle.ndim == 4:
        batch, heads, length, head_dim = handle.shape
        return handle.with_shape((batch, heads, 1, length, head_dim))
    return None


def _expand(handle, *shape) -> Handle | None:
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    before = tuple(handle.shape)
    if handle.ndim == 5 and len(shape) == 5 and before[:2] + before[3:] == shape[:2] + shape[3:]:
        return handle.with_shape(shape)
    return None


def _reshape(handle, *shape) -> Handle | None:
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if handle.ndim == 5:
        batch, heads, repeats, length, head_dim = handle.shape
        if shape == (batch, heads * repeats, length, head_dim):
            return handle.with_shape(shape)
    return None


_FOLLOWED = {
    scaled_dot_product_attention: _attend,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.expand: _expand,
    torch.Tensor.reshape: _reshape,
}
