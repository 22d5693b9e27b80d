"""MosaicKV for Hugging Face Transformers: a KV cache compressed along tokens and channels at once."""

from .attention.interface import register as _register
from .cache import MosaicKVCache
from .config import MosaicKVConfig
from .stats import CacheStats

__version__ = "0.1.0"
__all__ = ["CacheStats", "MosaicKVCache", "MosaicKVConfig"]

_register()
