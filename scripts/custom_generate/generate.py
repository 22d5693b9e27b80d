"""Generation with a MosaicKVCache: what `export_custom_generate.py` puts into a Hub repository."""

import inspect

from mosaickv_hf import MosaicKVCache, MosaicKVConfig


def generate(model, compression=None, **kwargs):
    """`model.generate(**kwargs)` with a compressed KV cache.

    Args:
        model: the model that `generate` was called on.
        compression (`MosaicKVConfig`, `dict` of its fields or `str`, *optional*): how to compress, or a preset's name;
            the default preset if not given.
        kwargs: all other arguments of `generate`. A cache that is passed is used as it is.
    """
    # The argument's name changed in Transformers.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    caches = [cache for cache in (kwargs.pop("cache", None), kwargs.pop("past_key_values", None)) if cache is not None]
    if isinstance(compression, dict):
        compression = MosaicKVConfig.from_dict(compression)
    kwargs[name] = caches[0] if caches else MosaicKVCache(compression, config=model.config)
    # The class's: a model loaded from a repository with this file has this function as its own `generate`.
    return type(model).generate(model, **kwargs)
