"""What is run: model shapes with random weights, the engines over them, and the cells that are timed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mjolnir import scales

MAX_STREAMS = 64
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64]
VERIFY_SIZES = [*CAPTURE_SIZES, 128, 256]  # tokens of as many requests with drafts
SCALE = 5 / 7.5  # of every channel of the random models: keys and values have a deviation of about 1
SPECULATIVE_TOKENS = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": SPECULATIVE_TOKENS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
# The target's own weights: all drafts are right, but for rounding.
DRAFTER = {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": SPECULATIVE_TOKENS}
SPLIT = {"MJOLNIR_ATTN_SPLIT_MIXED": "1"}
SMALL_VOCAB = 32768  # of models with a part of their layers, whose head would take too large a part of a step


@dataclass(frozen=True)
class Shape:
    """A model's shape; the architecture is one that vLLM knows, the weights are random.

    Attributes:
        name: what tables call it.
        architecture: class name of the model in vLLM.
        heads: query heads.
        kv_heads: KV heads.
        head_size: elements of a head.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward layer.
        layers: of the real model.
        vocab: tokens.
    """

    name: str
    architecture: str
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    layers: int
    vocab: int

    def small_vocab(self) -> "Shape":
        """The shape with fewer tokens."""
        return replace(self, vocab=min(self.vocab, SMALL_VOCAB))

    def kv_bytes(self, layers: int, kv: str) -> int:
        """Bytes of the cache that a token takes."""
        bits = {"fp8": 8, "fp6_e2m3": 6, "auto": 16}[kv]
        return layers * self.kv_heads * 2 * self.head_size * bits // 8


SHAPES = {
    "qwen3-8b": Shape("qwen3-8b", "Qwen3ForCausalLM", 32, 8, 128, 4096, 12288, 36, 151936),
    "qwen3-27b": Shape("qwen3-27b", "Qwen3ForCausalLM", 24, 4, 256, 5120, 17408, 64, 151936),
    "llama-70b": Shape("llama-70b", "LlamaForCausalLM", 64, 8, 128, 8192, 28672, 80, 128256),
    "smollm2": Shape("smollm2", "LlamaForCausalLM", 9, 3, 64, 576, 1536, 30, 49152),
    "tiny": Shape("tiny", "LlamaForCausalLM", 4, 2, 64, 128, 256, 2, 512),
}


@dataclass(frozen=True)
class Engine:
    """One engine in a process of its own.

    Attributes:
        name: in tables.
        shape: key of `SHAPES`.
        layers: how many of the model's layers it has.
        backend: attention backend.
        kv: KV cache dtype.
        options: further engine options.
        environment: of its process.
        against: name of the engine that its answers are compared with; empty for one that others are compared with.
    """

    name: str
    shape: str
    layers: int
    backend: str = "MJOLNIR"
    kv: str = "fp8"
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    against: str = ""

    def arguments(self, model: Path, device: str) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``, and what `mjolnir.bench.gpu.child` takes beside them."""
        common: dict[str, Any] = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "kv_cache_dtype": self.kv,
            "attention_config": {"backend": self.backend},
            "enable_prefix_caching": False,
            "max_num_seqs": MAX_STREAMS,
            "gpu_memory_utilization": 0.05,  # only what must be free at the start: engines share the GPU
            "seed": 0,
        }
        if device == "cuda":
            common["compilation_config"] = {"cudagraph_capture_sizes": CAPTURE_SIZES}
        else:
            common["enforce_eager"] = True
        return common | self.options


def write_model(shape: Shape, layers: int, folder: Path) -> Path:
    """A folder with the config.json of a shape, which is all that dummy weights need."""
    kind = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[shape.architecture]
    config = {
        "architectures": [shape.architecture],
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    path = folder / f"{shape.name}-{layers}-{shape.vocab}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def write_scales(shape: Shape, layers: int, model: Path) -> Path:
    """A scale file for a model of `write_model`, with one scale everywhere."""
    rows = [[SCALE] * shape.head_size] * shape.kv_heads
    layer = scales.LayerScales(k=rows, v=rows, k_fp8=1.0, v_fp8=1.0)
    file = scales.ScaleFile(
        model=scales.ModelShape(
            name=model.name,
            architecture=shape.architecture,
            num_kv_heads=shape.kv_heads,
            head_size=shape.head_size,
        ),
        made=scales.Origin(method="max", tokens=1, version="0", percentile=None),
        layers={f"model.layers.{number}.self_attn.attn": layer for number in range(layers)},
    )
    path = model / "kv-scales.json"
    scales.write(path, file)
    return path


def agreement_engines(shape: str, layers: int, max_model_len: int, device: str, few: bool = False) -> list[Engine]:
    """Engines whose answers are compared; each comes after the one that it is compared with.

    The reference decodes without T5, over the same cache, with Q as the model made it; T5's engines have the same
    fallback, so that nothing but T5 is between them and it. FlashAttention 3, which wants Q in e4m3, shows what that
    costs.

    Args:
        shape: key of `SHAPES`.
        layers: how many.
        max_model_len: of each engine.
        device: ``cuda`` or ``cpu``.
        few: only the reference and T5.
    """
    options = _agreement_options(shape, layers, max_model_len, device)
    exact = {"VLLM_GPU_SYNC_CHECK": "warn", **({"MJOLNIR_ATTN_FALLBACK": "TRITON_ATTN"} if device == "cuda" else {})}
    without = exact | {"MJOLNIR_ATTN_DISABLE": "1"}
    reference = Engine("reference", shape, layers, options=options, environment=without)
    exact |= {"MJOLNIR_ATTN_SPLIT_MIXED": "0"}
    t5 = replace(reference, name="T5", environment=exact, against="reference")
    if few:
        return [reference, t5]
    engines = [reference, t5, replace(t5, name="T5 ngram", options=options | {"speculative_config": NGRAM})]
    engines.append(replace(t5, name="T5 split", environment=exact | SPLIT))
    if device == "cuda":
        drafting = options | {"speculative_config": DRAFTER}
        flash = {"MJOLNIR_ATTN_FALLBACK": "FLASH_ATTN"}
        small = _small_cache(SHAPES[shape].kv_bytes(layers, "fp8"))
        engines += [
            replace(t5, name="T5 draft model", options=drafting),
            replace(t5, name="reference draft model", options=drafting, environment=without),
            replace(t5, name="FLASH_ATTN alone", environment=without | flash),
            replace(t5, name="T5, model runner V1", environment=exact | {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
            replace(t5, name="miscompiled T5", options=options | {"miscompiled": True}),
            replace(t5, name="T5 small cache", options=options | small),
        ]
    packed = replace(reference, name="reference fp6", kv="fp6_e2m3", options=options | {"enforce_eager": True})
    return [*engines, packed, replace(t5, name="T5 fp6", kv="fp6_e2m3", against=packed.name)]


def _agreement_options(shape: str, layers: int, max_model_len: int, device: str) -> dict[str, Any]:
    """Engine options that all engines whose answers are compared have in common."""
    options: dict[str, Any] = {
        "random_weights": True,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": (2 * max_model_len + 16384) * SHAPES[shape].kv_bytes(layers, "fp8"),
        "disable_log_stats": False,
        "enable_prefix_caching": True,
    }
    if device == "cuda":
        # Not compiled, so that it starts soon: what is asked here does not depend on it, and speed is asked compiled.
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": VERIFY_SIZES}
        options |= {"compilation_config": graphs, "query_as_it_is": True}
    return options


def _small_cache(token: int) -> dict[str, Any]:
    """A cache that holds one request of the longest kind and hardly more, so that others have to give way."""
    return {"max_model_len": 4352, "kv_cache_memory_bytes": 5120 * token}


def speed_engines(
    shape: str, layers: int, tokens: int, max_model_len: int, device: str, fp6: bool = False
) -> list[Engine]:
    """T5 and stock backends with the same flags, over a cache of ``tokens`` tokens; T5 comes first."""
    connector = {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"startup_fill": True},
    }

    def engine(name: str, backend: str, kv: str) -> Engine:
        options = {
            "max_model_len": max_model_len,
            "kv_cache_memory_bytes": tokens * SHAPES[shape].kv_bytes(layers, kv),
            "kv_transfer_config": connector,
            "max_num_batched_tokens": 8192,
        }
        return Engine(name, shape, layers, backend, kv, options)

    if device == "cpu":
        return [engine("T5", "MJOLNIR", "fp8"), engine("CPU_ATTN", "CPU_ATTN", "auto")]
    engines = [
        engine("T5", "MJOLNIR", "fp8"),
        engine("FLASH_ATTN", "FLASH_ATTN", "fp8"),
        engine("TRITON_ATTN", "TRITON_ATTN", "fp8"),
    ]
    if fp6:
        engines.append(engine("T5 fp6", "MJOLNIR", "fp6_e2m3"))
    return engines


def cells(streams: Sequence[int], contexts: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """(streams, context) of every cell that fits a cache of ``tokens`` tokens."""
    return [(many, context) for context in contexts for many in streams if many * (context + 256) <= tokens]


def prompts(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of given lengths; the same for the same arguments on every machine."""
    state = seed * 7919 + 1
    texts = []
    for length in lengths:
        tokens = []
        for _ in range(length):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            tokens.append(2 + (state >> 33) % (vocab - 2))
        texts.append(tokens)
    return texts
