"""The weights of a model as a list of tensors, without a file of them: from config.json's numbers alone.

Names are those of the checkpoints, because quantisation recipes name what they leave out. Tensors of the same shape
in one place (a layer's experts) are one entry with a count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.estimate.config import ModelConfig
from appliance.estimate.family import Family, family_of
from appliance.estimate.layers import Attention, Kind, kept_by_layer, kinds

# Error that `vision_tower` is given, as a fraction. Counted with transformers 5.19, its result is off by: Qwen2-VL,
# Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Gemma 3 less than 0.1 %, Mistral 3 4 %, LLaVA 1.5 5 %.
VISION_MARGIN = 0.1


@dataclass(frozen=True)
class Tensor:
    """One tensor, or several of one shape.

    Attributes:
        name: as in a checkpoint.
        rows: output features of a matrix; length of a vector.
        columns: input features of a matrix; 1 for a vector.
        count: how many there are.
        linear: whether it is a linear layer's matrix, which a quantisation may touch.
        expert: whether it belongs to the routed experts.
    """

    name: str
    rows: int
    columns: int = 1
    count: int = 1
    linear: bool = False
    expert: bool = False

    @property
    def elements(self) -> int:
        """Numbers in all of them."""
        return self.rows * self.columns * self.count


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Iterator[Tensor]:
    """A linear layer's tensors."""
    yield Tensor(f"{name}.weight", rows, columns, linear=True)
    if bias:
        yield Tensor(f"{name}.bias", rows)


def language_model(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the language model; prediction heads for speculation (MTP) are not among them."""
    text = config.text
    family = family_of(config.model_type, config.whole.place)
    hidden, vocabulary = text.integer("hidden_size"), text.integer("vocab_size")
    yield Tensor("model.embed_tokens.weight", vocabulary, hidden)
    kept = kept_by_layer(config)
    for index, kind in enumerate(kinds(config)):
        name = f"model.layers.{index}"
        yield Tensor(f"{name}.norms", hidden, count=family.norms)
        layer = kept[index]
        if isinstance(layer, Attention):
            yield from _attention(config, family, f"{name}.self_attn", layer)
        elif kind is Kind.LINEAR:
            yield from _delta_net(config, f"{name}.linear_attn")
        elif kind is Kind.MAMBA:
            yield from _mamba(config, f"{name}.mixer")
        shared = isinstance(layer, Attention) and layer.shared
        yield from _feed_forward(config, name, index, kind, doubled=shared and text.flag("use_double_wide_mlp"))
        if config.model_type == "gemma4_text":
            yield from _gemma4_layer(config, name)
    yield Tensor("model.norm.weight", hidden)
    if config.model_type == "gemma4_text":
        yield from _gemma4_embeddings(config)
    if not config.flag("tie_word_embeddings", family.tied):
        yield Tensor("lm_head.weight", vocabulary, hidden, linear=True)


def _attention(config: ModelConfig, family: Family, name: str, layer: Attention) -> Iterator[Tensor]:
    if layer.latent:
        yield from _latent_attention(config, name)
        return
    text = config.text
    hidden, heads, size = text.integer("hidden_size"), text.integer("num_attention_heads"), layer.head_size
    said = text.flag("attention_bias", config.model_type == "gpt_oss")
    bias = said if family.qkv_bias is None else family.qkv_bias
    # Qwen3-Next's attention has an output gate, as wide as Q, in the same projection.
    gate = 2 if family.pattern == "interval" else 1
    yield from linear(f"{name}.q_proj", heads * size * gate, hidden, bias=bias)
    if not layer.shared:
        yield from linear(f"{name}.k_proj", layer.kv_heads * size, hidden, bias=bias)
        if not (text.flag("attention_k_eq_v") and layer.window is None):
            yield from linear(f"{name}.v_proj", layer.kv_heads * size, hidden, bias=bias)
    o_bias = said and config.model_type != "glm4_moe" if family.o_bias is None else family.o_bias
    yield from linear(f"{name}.o_proj", hidden, heads * size, bias=o_bias)
    if family.qk_norm or text.flag("use_qk_norm"):
        yield Tensor(f"{name}.qk_norm.weight", size, count=1 if layer.shared else 2)
    if config.model_type == "gpt_oss":
        yield Tensor(f"{name}.sinks", heads)


def _latent_attention(config: ModelConfig, name: str) -> Iterator[Tensor]:
    """MLA: Q through a small space or not, K and V through one latent vector and a rotated part."""
    text = config.text
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    plain, rotated, value = (text.integer(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = text.integer("kv_lora_rank")
    queries = text.count("q_lora_rank")
    if queries:
        yield from linear(f"{name}.q_a_proj", queries, hidden)
        yield Tensor(f"{name}.q_a_layernorm.weight", queries)
        yield from linear(f"{name}.q_b_proj", heads * (plain + rotated), queries)
    else:
        yield from linear(f"{name}.q_proj", heads * (plain + rotated), hidden)
    yield from linear(f"{name}.kv_a_proj_with_mqa", rank + rotated, hidden)
    yield Tensor(f"{name}.kv_a_layernorm.weight", rank)
    yield from linear(f"{name}.kv_b_proj", heads * (plain + value), rank)
    yield from linear(f"{name}.o_proj", hidden, heads * value)


def _delta_net(config: ModelConfig, name: str) -> Iterator[Tensor]:
    text = config.text
    hidden, value_heads = text.integer("hidden_size"), text.integer("linear_num_value_heads")
    values = value_heads * text.integer("linear_value_head_dim")
    width = 2 * text.integer("linear_num_key_heads") * text.integer("linear_key_head_dim") + values
    yield from linear(f"{name}.in_proj_qkvz", width + values, hidden)
    yield from linear(f"{name}.in_proj_ba", 2 * value_heads, hidden)
    yield Tensor(f"{name}.conv1d.weight", width, text.integer("linear_conv_kernel_dim"))
    yield Tensor(f"{name}.A_log_and_dt_bias", value_heads, count=2)
    yield Tensor(f"{name}.norm.weight", text.integer("linear_value_head_dim"))
    yield from linear(f"{name}.out_proj", hidden, values)


def _mamba(config: ModelConfig, name: str) -> Iterator[Tensor]:
    text = config.text
    hidden, heads = text.integer("hidden_size"), text.integer("mamba_num_heads")
    inner = heads * text.integer("mamba_head_dim")
    width = inner + 2 * text.integer("n_groups") * text.integer("ssm_state_size")
    yield from linear(f"{name}.in_proj", inner + width + heads, hidden, bias=text.flag("mamba_proj_bias"))
    yield Tensor(f"{name}.conv1d.weight", width, text.integer("conv_kernel"))
    if text.flag("use_conv_bias", True):
        yield Tensor(f"{name}.conv1d.bias", width)
    yield Tensor(f"{name}.A_log_D_and_dt_bias", heads, count=3)
    yield Tensor(f"{name}.norm.weight", inner)
    yield from linear(f"{name}.out_proj", hidden, inner, bias=text.flag("use_bias"))


def _feed_forward(config: ModelConfig, name: str, index: int, kind: Kind, *, doubled: bool) -> Iterator[Tensor]:
    """The part after the attention; Nemotron's mixers have none, its MLPs and experts are layers of their own."""
    if config.model_type == "nemotron_h":
        if kind is Kind.MLP:
            yield from _mlp(config, f"{name}.mixer", config.text.integer("intermediate_size"), gated=False)
        elif kind is Kind.MOE:
            yield from _nemotron_experts(config, f"{name}.mixer")
        return
    sparse = _is_sparse(config, index)
    if not sparse or config.model_type == "gemma4_text":
        size = config.text.integer("intermediate_size") * (2 if doubled else 1)
        yield from _mlp(config, f"{name}.mlp", size)
    if sparse:
        yield from _experts(config, name)


def _mlp(config: ModelConfig, name: str, size: int, *, gated: bool = True) -> Iterator[Tensor]:
    hidden, bias = config.text.integer("hidden_size"), config.text.flag("mlp_bias")
    for part in ("gate_proj", "up_proj") if gated else ("up_proj",):
        yield from linear(f"{name}.{part}", size, hidden, bias=bias)
    yield from linear(f"{name}.down_proj", hidden, size, bias=bias)


def experts_of(config: ModelConfig) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next(filter(None, (config.text.count(name) for name in names)), 0)


def _is_sparse(config: ModelConfig, index: int) -> bool:
    text = config.text
    if not experts_of(config) or index < text.count("first_k_dense_replace"):
        return False
    skipped = text.values.get("mlp_only_layers") or []
    return index not in skipped and (index + 1) % text.integer("decoder_sparse_step", 1) == 0


def _experts(config: ModelConfig, name: str) -> Iterator[Tensor]:
    text, count = config.text, experts_of(config)
    hidden = text.integer("hidden_size")
    size = text.count("moe_intermediate_size") or text.integer("intermediate_size")
    inside = f"{name}.mlp.experts"
    yield Tensor(f"{inside}.gate_up_proj", 2 * size, hidden, count, linear=True, expert=True)
    yield Tensor(f"{inside}.down_proj", hidden, size, count, linear=True, expert=True)
    yield Tensor(f"{name}.mlp.router.weight", count, hidden)
    if config.model_type == "gpt_oss":
        yield Tensor(f"{inside}.biases", 2 * size + hidden, count=count)
        yield Tensor(f"{name}.mlp.router.bias", count)
    if config.model_type == "glm4_moe" or text.text("topk_method") == "noaux_tc":
        yield Tensor(f"{name}.mlp.gate.e_score_correction_bias", count)
    if config.model_type == "gemma4_text":
        yield Tensor(f"{name}.router.scales", hidden + count)
        yield Tensor(f"{name}.expert_norms", hidden, count=3)
    shared = text.count("shared_expert_intermediate_size")
    if shared:
        yield from linear(f"{name}.mlp.shared_expert_gate", 1, hidden)
    shared = shared or text.count("n_shared_experts") * size
    if shared:
        yield from _mlp(config, f"{name}.mlp.shared_experts", shared)


def _nemotron_experts(config: ModelConfig, name: str) -> Iterator[Tensor]:
    text, count = config.text, experts_of(config)
    hidden, size = text.integer("hidden_size"), text.integer("moe_intermediate_size")
    width = text.count("moe_latent_size") or hidden
    yield Tensor(f"{name}.experts.up_proj", size, width, count, linear=True, expert=True)
    yield Tensor(f"{name}.experts.down_proj", width, size, count, linear=True, expert=True)
    yield Tensor(f"{name}.gate.weight", count, hidden)
    yield Tensor(f"{name}.gate.e_score_correction_bias", count)
    if width != hidden:
        yield from linear(f"{name}.fc1_latent_proj", width, hidden)
        yield from linear(f"{name}.fc2_latent_proj", hidden, width)
    shared = text.count("n_shared_experts") * text.count("moe_shared_expert_intermediate_size")
    if shared:
        yield from _mlp(config, f"{name}.shared_experts", shared, gated=False)


def _gemma4_layer(config: ModelConfig, name: str) -> Iterator[Tensor]:
    """What a layer does with the embeddings that each layer has of its own."""
    hidden, own = config.text.integer("hidden_size"), config.text.count("hidden_size_per_layer_input")
    yield Tensor(f"{name}.layer_scalar", 1)
    if own:
        yield from linear(f"{name}.per_layer_input_gate", own, hidden)
        yield from linear(f"{name}.per_layer_projection", hidden, own)
        yield Tensor(f"{name}.post_per_layer_input_norm.weight", hidden)


def _gemma4_embeddings(config: ModelConfig) -> Iterator[Tensor]:
    text = config.text
    own = text.count("hidden_size_per_layer_input")
    if own:
        width = own * text.integer("num_hidden_layers")
        yield Tensor("model.embed_tokens_per_layer.weight", text.integer("vocab_size_per_layer_input", 262144), width)
        yield from linear("model.per_layer_model_projection", width, text.integer("hidden_size"))
        yield Tensor("model.per_layer_projection_norm.weight", own)


def vision_tower(config: ModelConfig) -> int | None:
    """Elements of a vision tower, by the formula of a plain vision transformer; see `VISION_MARGIN`.

    Returns:
        0 without a tower; None where its numbers are not those of a plain transformer.
    """
    vision = config.vision
    if vision is None:
        return 0
    hidden = vision.count("hidden_size") or vision.count("embed_dim") or vision.count("width")
    depth = vision.count("num_hidden_layers") or vision.count("depth") or vision.count("layers")
    if not hidden or not depth:
        return None
    # Qwen2-VL's names: `hidden_size` is the language model's and `embed_dim` the tower's.
    hidden = vision.count("embed_dim") or hidden
    inner = vision.count("intermediate_size") or hidden * vision.count("mlp_ratio", 4)
    gated = vision.text("hidden_act") == "silu"
    layer = 4 * hidden * hidden + (3 if gated else 2) * hidden * inner + 10 * hidden + inner
    patch = vision.count("patch_size", 14)
    pixels = vision.count("in_channels", 3) * vision.count("temporal_patch_size", 1) * patch * patch
    positions = vision.count("num_position_embeddings") or (vision.count("image_size") // patch) ** 2
    merged = hidden * vision.count("spatial_merge_size", 1) ** 2
    out = config.text.integer("hidden_size")
    bridge = merged * (merged if merged != hidden else 0) + merged * out
    # Qwen3-VL has one more bridge for each of the inner layers that the language model is shown.
    taps = vision.values.get("deepstack_visual_indexes") or ()
    return depth * layer + hidden * (pixels + positions) + bridge * (1 + len(taps))
