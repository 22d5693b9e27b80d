"""The explicit door: `attn_implementation="mosaickv"`, for models that would otherwise use eager or flash attention."""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "mosaickv"


def register() -> None:
    """Makes the name known to Transformers: attention as with SDPA, where the handles take over, and its masks.

    Without a mask function of its own a registered name would silently get no mask.
    """
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
