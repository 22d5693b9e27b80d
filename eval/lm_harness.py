"""lm-evaluation-harness with `MosaicKVCache`: its command line, and the model type `mosaickv_hf`.

    python -m eval.lm_harness --model mosaickv_hf --model_args pretrained=ID,compression=default --tasks ruler

Everything else is the harness' own (`pip install lm-eval`): all arguments of its model type `hf` are taken, and
`compression` names a preset or the JSON file of a `MosaicKVConfig`. Tasks that score given answers read them in one
call, which no cache changes; those that generate decode with the cache.
"""

from pathlib import Path

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from mosaickv_hf import MosaicKVCache, MosaicKVConfig


@register_model("mosaickv_hf")
class MosaicKVLM(HFLM):
    """The harness' Transformers model, generating with a `MosaicKVCache`.

    Args:
        compression: a preset's name, or the path of a config as JSON.
    """

    def __init__(self, *args, compression: str = "default", **kwargs):
        super().__init__(*args, **kwargs)
        if compression.endswith(".json"):
            self.compression = MosaicKVConfig.from_json(Path(compression).read_text(encoding="utf-8"))
        else:
            self.compression = MosaicKVConfig.preset(compression)

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        generation_kwargs["past_key_values"] = MosaicKVCache(self.compression, config=self.model.config)
        return super()._model_generate(context, max_length, stop, **generation_kwargs)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
