"""What each layer of a model keeps in the KV cache."""

from dataclasses import dataclass
from enum import StrEnum

from appliance.errors import ModelError
from appliance.estimate.config import ModelConfig
from appliance.estimate.family import family_of


class Kind(StrEnum):
    """What a layer is."""

    FULL = "full attention"
    SLIDING = "sliding window"
    LINEAR = "linear attention"  # gated delta net
    MAMBA = "mamba"
    MLP = "mlp"
    MOE = "moe"


@dataclass(frozen=True)
class Attention:
    """A layer that keeps K and V of every token, or of a window.

    Attributes:
        kv_heads: heads of K and V; 1 for MLA, whose heads share one latent vector.
        head_size: elements of a K row.
        head_size_v: elements of a V row; 0 for MLA, which keeps no V.
        window: tokens that stay, None for all.
        shared: the layer reads another layer's rows and keeps none of its own.
    """

    kv_heads: int
    head_size: int
    head_size_v: int
    window: int | None = None
    shared: bool = False

    @property
    def latent(self) -> bool:
        """Whether it is MLA."""
        return self.head_size_v == 0


@dataclass(frozen=True)
class State:
    """A layer that keeps a state of fixed size for each sequence.

    Attributes:
        convolution: elements of the convolution's state, in the model's type.
        recurrent: elements of the recurrent state.
        recurrent_dtype: type of the recurrent state, "auto" for the model's.
        checkpoints: further states that vLLM keeps of a sequence whose prompt it may use again.
    """

    convolution: int
    recurrent: int
    recurrent_dtype: str = "auto"
    checkpoints: int = 0


STATE_DTYPES = ("auto", "bfloat16", "float16", "float32")
Kept = Attention | State | None

_BY_NAME = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "linear_attention": Kind.LINEAR,
}
_BY_LETTER = {"*": Kind.FULL, "M": Kind.MAMBA, "-": Kind.MLP, "E": Kind.MOE}
_NEMOTRON_NAMES = {"linear_attention": Kind.MAMBA, "mamba": Kind.MAMBA, "mlp": Kind.MLP, "moe": Kind.MOE}


def kinds(config: ModelConfig) -> tuple[Kind, ...]:
    """The kind of each layer.

    Raises:
        ModelError: the configuration names a kind that is not known, or for another number of layers.
    """
    text, pattern = config.text, family_of(config.model_type, config.whole.place).pattern
    names = text.strings("layer_types") or text.strings("layers_block_type")
    if pattern == "letters":
        known = _BY_NAME | _NEMOTRON_NAMES
        letters = text.text("hybrid_override_pattern")
        if not names and not letters:
            raise ModelError(f"{text.place}: hybrid_override_pattern is missing; needed: a letter for each layer")
        found = [_kind(known, name, text.place) for name in names] or [
            _kind(_BY_LETTER, letter, text.place) for letter in letters
        ]
    else:
        count = text.integer("num_hidden_layers")
        known = _BY_NAME
        found = [_kind(known, name, text.place) for name in names] or _from_pattern(config, pattern, count)
        if len(found) != count:
            raise ModelError(f"{text.place}: layer_types names {len(found)} layers, num_hidden_layers is {count}")
    if not text.count("sliding_window"):
        found = [Kind.FULL if kind is Kind.SLIDING else kind for kind in found]
    return tuple(found)


def kept_by_layer(config: ModelConfig) -> tuple[Kept, ...]:
    """What each layer keeps; None for one that keeps nothing."""
    own = kinds(config)
    first_shared = len(own) - config.text.count("num_kv_shared_layers")
    found: list[Kept] = []
    for index, kind in enumerate(own):
        if kind in (Kind.FULL, Kind.SLIDING):
            found.append(attention_of(config, kind, shared=0 < first_shared <= index))
        elif kind is Kind.LINEAR:
            found.append(_delta_net_state(config))
        else:
            found.append(_mamba_state(config) if kind is Kind.MAMBA else None)
    return tuple(found)


def attention_of(config: ModelConfig, kind: Kind, *, shared: bool = False) -> Attention:
    """Heads of an attention layer.

    Raises:
        ModelError: the heads do not divide the hidden state, or the KV heads the heads.
    """
    text = config.text
    if text.count("kv_lora_rank"):
        return Attention(1, text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim"), 0)
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{text.place}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_size = head_size_of(config)
    # Gemma 4's global layers have wider and, where K is V, fewer KV heads.
    if config.model_type == "gemma4_text" and kind is Kind.FULL:
        head_size = text.integer("global_head_dim", 512)
        if text.flag("attention_k_eq_v"):
            kv_heads = text.integer("num_global_key_value_heads", kv_heads)
    window = text.integer("sliding_window") if kind is Kind.SLIDING else None
    return Attention(kv_heads, head_size, head_size, window, shared)


def head_size_of(config: ModelConfig) -> int:
    """Elements of a head, as the configuration says or by dividing the hidden state."""
    text = config.text
    heads = text.integer("num_attention_heads")
    if text.count("head_dim"):
        return text.integer("head_dim")
    hidden = text.integer("hidden_size")
    if hidden % heads:
        raise ModelError(f"{text.place}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return hidden // heads


def _kind(known: dict[str, Kind], name: str, place: str) -> Kind:
    if name not in known:
        raise ModelError(f"{place}: can't estimate a layer of type {name!r}; known: {', '.join(known)}")
    return known[name]


def _from_pattern(config: ModelConfig, pattern: str, count: int) -> list[Kind]:
    """Layer kinds of a configuration that does not list them, as vLLM takes them."""
    text = config.text
    if pattern == "alternate":
        return [Kind.FULL if index % 2 else Kind.SLIDING for index in range(count)]
    if pattern == "five to one":
        every = text.integer("sliding_window_pattern", 6)
        return [Kind.SLIDING if (index + 1) % every else Kind.FULL for index in range(count)]
    if pattern == "interval":
        every = text.integer("full_attention_interval", 4)
        return [Kind.LINEAR if (index + 1) % every else Kind.FULL for index in range(count)]
    if pattern == "window" and text.count("sliding_window"):
        return [Kind.SLIDING] * count
    if pattern == "upper window" and text.flag("use_sliding_window"):
        first = text.count("max_window_layers", count)
        return [Kind.SLIDING if index >= first else Kind.FULL for index in range(count)]
    return [Kind.FULL] * count


def _delta_net_state(config: ModelConfig) -> State:
    text = config.text
    key_heads, key_size = text.integer("linear_num_key_heads"), text.integer("linear_key_head_dim")
    value_heads, value_size = text.integer("linear_num_value_heads"), text.integer("linear_value_head_dim")
    width = 2 * key_heads * key_size + value_heads * value_size
    dtype = _state_dtype(config, "mamba_ssm_dtype", "auto") if config.model_type.startswith("qwen3_5") else "auto"
    return State((text.integer("linear_conv_kernel_dim") - 1) * width, value_heads * value_size * key_size, dtype)


def _mamba_state(config: ModelConfig) -> State:
    text = config.text
    heads, head_size = text.integer("mamba_num_heads"), text.integer("mamba_head_dim")
    state = text.integer("ssm_state_size")
    width = heads * head_size + 2 * text.integer("n_groups") * state
    dtype = _state_dtype(config, "mamba_ssm_cache_dtype", "float32")
    # vLLM's Mamba-2 layers write one state at a block's boundary in the middle of a prompt, its delta nets do not.
    return State((text.integer("conv_kernel") - 1) * width, heads * head_size * state, dtype, checkpoints=1)


def _state_dtype(config: ModelConfig, name: str, default: str) -> str:
    dtype = config.text.text(name, default)
    if dtype not in STATE_DTYPES:
        raise ModelError(f"{config.text.place}: {name} is {dtype!r}; accepted: {', '.join(STATE_DTYPES)}")
    return dtype
