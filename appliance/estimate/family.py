"""The kinds of models that can be estimated, by ``model_type``, and what their configurations leave unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import ModelError


@dataclass(frozen=True)
class Family:
    """What tells one kind of decoder from another, as far as sizes go.

    Attributes:
        norms: vectors as wide as the hidden state in a layer's normalisations.
        qkv_bias: whether Q, K and V have biases; None: the configuration's ``attention_bias`` says so.
        o_bias: the same for the attention's output.
        qk_norm: whether Q and K of a head are normalised.
        tied: whether embedding and head are one tensor when the configuration does not say.
        pattern: how layers alternate when there is no ``layer_types``; see ``appliance.estimate.layers``.
        defaults: values that public config.json files of the family leave out.
    """

    norms: int = 2
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    tied: bool = False
    pattern: str = "full"
    defaults: Mapping[str, Any] | None = None


_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}
_LLAMA = Family()
_QWEN3 = Family(qk_norm=True)
# Mistral's and Mixtral's first releases slide on every layer where the window is not null.
_MISTRAL = Family(pattern="window")
_QWEN2 = Family(qkv_bias=True, o_bias=False, pattern="upper window")
_QWEN3_NEXT = Family(qk_norm=True, pattern="interval")

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral3": _MISTRAL,
    "mixtral": _MISTRAL,
    "smollm3": _LLAMA,
    "granite": Family(tied=True),
    "phi3": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True, pattern="alternate"),
    "gemma3_text": Family(norms=4, qk_norm=True, tied=True, pattern="five to one", defaults=_GEMMA3),
    "gemma4_text": Family(norms=4, qk_norm=True, tied=True, pattern="five to one"),
    "gpt_oss": Family(pattern="alternate"),
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _LLAMA,
    "glm4_moe": _LLAMA,
    "nemotron_h": Family(norms=1, pattern="letters"),
}


def family_of(model_type: str, place: str) -> Family:
    """The family of a ``model_type``.

    Raises:
        ModelError: none is known.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"{place}: model_type {model_type!r} can't be estimated, because which layers it has and what they keep "
            f"is not known; known: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
