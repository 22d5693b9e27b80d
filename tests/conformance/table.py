"""Writes `docs/compatibility.md`: PYTHONPATH=scripts:tests python tests/conformance/table.py"""

from pathlib import Path

from features import FEATURES
from zoo import REFUSED, ZOO

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

_INTRODUCTION = (
    "# Compatibility\n\n"
    "What is done with a cache, by kind of model. Each ✓ is three tests (`tests/conformance/`) on a small random "
    "model of that kind, in which prompts and generated tokens are packed: the `lossless` preset gives the tokens of "
    "`DynamicCache`; `default` and `paper` give those of their plain torch oracle; nothing is expanded to dense K or "
    "V. A – is refused by `DynamicCache` with such a model, and by ours.\n\n"
)
_NOTES = (
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
    return _INTRODUCTION + "\n".join(lines) + "\n" + _NOTES


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
