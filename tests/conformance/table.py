"""Writes `docs/compatibility.md`: PYTHONPATH=scripts:tests python tests/conformance/table.py"""

from pathlib import Path

from features import FEATURES
from others import OTHERS
from zoo import REFUSED, ZOO

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

_INTRODUCTION = (
    "# Compatibility\n\n"
    "What is done with a cache, by kind of model. Each ✓ is three tests (`tests/conformance/`) on a small random "
    "model of that kind, in which prompts and generated tokens are packed: the `lossless` preset gives the tokens of "
    "`DynamicCache`; `default` and `paper` give those of their plain torch oracle; nothing is expanded to dense K or "
    "V. A – is refused by `DynamicCache` with such a model, and by ours.\n\n"
)
_OTHERS = (
    "\nOther models, with the `lossless` preset (`tests/conformance/test_others.py`). Dense: the model works on K and "
    "V itself, so they are expanded at every step, which is right, saves memory between steps only, and is counted in "
    "`cache.stats().dense_materializations`.\n"
)
_NOTES = (
    "\n- An encoder-decoder model takes `EncoderDecoderCache(MosaicKVCache(), DynamicCache())`. A `MosaicKVCache` for "
    "cross-attention, too, is right, but keeps it raw and expands it."
    '\n- Weights (`output_attentions=True`) exist with `attn_implementation="eager"` only, as with any cache; they are '
    "those over what the cache holds, which is expanded for it."
    "\n- Gradients pass through a prompt under SDPA; asking for those of a later token raises `RuntimeError`."
    "\n- NaN, infinity and vectors too long for the dtype raise `ValueError` when their tokens are to be packed. "
    "float64 is kept as float32."
    "\n- Sliding-window and linear-attention layers keep Transformers' own caches: make the cache with "
    "`MosaicKVCache(config=model.config)`."
    "\n- Multi-token calls on a filled cache (chat turns, the verification of drafts) attend to all stored tokens, a "
    "decode step to selected blocks: under a lossy preset, prompt lookup and assisted decoding may therefore differ "
    "from greedy decoding."
    "\n- `crop` of more tokens than there are raises `ValueError`; `DynamicCache` crops to nothing."
    "\n- With the newest Transformers of the range all of this is tested (in continuous integration a third of the "
    "lossy presets' part; `MOSAICKV_CONFORMANCE=1` for all), with the oldest the part for `lossless`, less what its "
    "`DynamicCache` cannot do.\n"
)


def render() -> str:
    """The document's text."""
    lines = ["| | " + " | ".join(ZOO) + " |", "|---" * (len(ZOO) + 1) + "|"]
    for feature in FEATURES:
        cells = ("–" if (name, feature) in REFUSED else "✓" for name in ZOO)
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    others = ["| | K and V | |", "|---|---|---|"]
    for name, other in OTHERS.items():
        others.append(f"| {name} | {'packed' if other.packed else 'dense'} | {other.why} |")
    return _INTRODUCTION + "\n".join([*lines, _OTHERS, *others]) + "\n" + _NOTES


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
