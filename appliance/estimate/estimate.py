"""The estimate of a model on a machine: weights, what is left for the KV cache, and what fits there per format."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from appliance.errors import ModelError, SettingsError
from appliance.estimate import pages
from appliance.estimate.config import ModelConfig
from appliance.estimate.layers import Attention, Kept, State, kept_by_layer
from appliance.estimate.weights import Weights, weigh
from mjolnir.names import FP6_KV_DTYPE

GIB = 2**30
# What an engine holds beside weights and cache: the CUDA context, captured graphs, one step's activations. An
# assumption; vLLM measures it at each start and logs "Available KV cache memory".
RESERVE_GIB = 2.0
UTILISATION = 0.92  # vLLM's own default
PACKED_HEAD_SIZES = (64, 128, 256)  # as mjolnir/runner.py has them
_UNITS = {"": 1, "B": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_LONGEST_YARN = ("yarn", "deepseek_yarn")


@dataclass(frozen=True)
class Machine:
    """Where the model is to run.

    Attributes:
        memory: bytes that the engine's device has.
        gpu: whether it is a GPU; vLLM's page, batch and steps at a time depend on it.
        utilisation: share of the memory that the engine may take.
        reserve: bytes that it takes beside weights and cache.
        kv_cache: bytes of the cache, None for what is left.
        float32_states: whether states of linear attention are kept in float32, as vLLM does on CPUs with AVX512-BF16.
    """

    memory: int
    gpu: bool = True
    utilisation: float = UTILISATION
    reserve: int = int(RESERVE_GIB * GIB)
    kv_cache: int | None = None
    float32_states: bool = False


@dataclass(frozen=True)
class Load:
    """What the engine is to do at one time.

    Attributes:
        sequences: how many have the longest context at one time.
        max_model_len: longest context that is allowed, None for the model's own limit.
        block_size: tokens of a page, None for vLLM's default.
        batch_tokens: tokens of one step at most, None for vLLM's default.
    """

    sequences: int = 1
    max_model_len: int | None = None
    block_size: int | None = None
    batch_tokens: int | None = None


@dataclass(frozen=True)
class FormatEstimate:
    """One format of the cache.

    Attributes:
        format: as in ``--kv-cache-dtype``.
        token_bytes: bytes that every token of a sequence takes.
        window_token_bytes: bytes that a token takes on top while it is in its layers' windows.
        state_bytes: bytes of a sequence's states, whatever its length.
        block_size: tokens of a page, after alignment.
        block_bytes: bytes of a block over all layers of a group.
        groups: block tables of a sequence.
        scratch_bytes: bytes of the buffer into which steps that are not T5's expand packed pages.
        tokens: what vLLM reports as "KV cache size", for sequences of `context`.
        context: the length that `tokens` is meant for: the limit, or what one sequence can have if that is less.
        longest: longest context of all sequences at one time.
        fits: whether the limit can be served at all, one sequence of it; vLLM refuses to start otherwise.
        problem: why a model can't have the format; the figures are 0 then.
    """

    format: str
    token_bytes: int = 0
    window_token_bytes: int = 0
    state_bytes: int = 0
    block_size: int = 0
    block_bytes: int = 0
    groups: int = 0
    scratch_bytes: int = 0
    tokens: int = 0
    context: int = 0
    longest: int = 0
    fits: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Estimate:
    """All of it; bytes everywhere."""

    architecture: str
    weights: Weights
    machine: Machine
    kv_cache: int
    limit: int
    sequences: int
    formats: tuple[FormatEstimate, ...]

    @property
    def fits(self) -> bool:
        """Whether weights and a cache that serves the limit fit in at least one format."""
        return self.kv_cache > 0 and any(found.fits for found in self.formats)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``; names as in the classes, plus ``fits``."""
        return asdict(self) | {"fits": self.fits}


def estimate(config: ModelConfig, machine: Machine, load: Load) -> Estimate:
    """Estimate a model.

    Raises:
        ModelError: the configuration can't be used.
        SettingsError: a number of ``machine`` or ``load`` makes no sense.
    """
    _check(machine, load)
    weights, kept = weigh(config), kept_by_layer(config)
    limit = _limit(config, load)
    size = machine.kv_cache
    if size is None:
        size = int(machine.memory * machine.utilisation) - weights.size - weights.margin - machine.reserve
    found = tuple(_format(name, kept, max(size, 0), limit, machine, load) for name in pages.FORMATS)
    return Estimate(config.architecture, weights, machine, max(size, 0), limit, load.sequences, found)


def parse_size(text: str, name: str) -> int:
    """Bytes of a size such as 122GiB or 64 GB.

    Raises:
        SettingsError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = next((value for unit, value in _UNITS.items() if match and unit.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) <= 0:
        raise SettingsError(f"{name}={text!r}: accepted: a number above 0 and a unit, such as 122GiB or 64GB")
    return int(float(match[1]) * unit)


def _check(machine: Machine, load: Load) -> None:
    if not 0 < machine.utilisation <= 1:
        raise SettingsError(f"--utilisation={machine.utilisation}: accepted: above 0, at most 1")
    if machine.reserve < 0 or not math.isfinite(machine.reserve):
        raise SettingsError(f"--reserve-gib={machine.reserve / GIB}: accepted: 0 or more")
    if machine.kv_cache is not None and machine.kv_cache <= 0:
        raise SettingsError(f"--kv-cache-gib={machine.kv_cache / GIB}: accepted: a number above 0")
    for name in ("sequences", "max_model_len", "batch_tokens"):
        value = getattr(load, name)
        if value is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')}={value}: accepted: a whole number above 0")
    if load.block_size is not None and load.block_size not in pages.KERNEL_PAGES:
        accepted = ", ".join(map(str, pages.KERNEL_PAGES))
        raise SettingsError(f"--block-size={load.block_size}: accepted: {accepted}")


def _limit(config: ModelConfig, load: Load) -> int:
    """Longest context: the user's, else the model's as vLLM derives it from its rotary embedding."""
    if load.max_model_len is not None:
        return load.max_model_len
    text = config.text
    own = text.integer("max_position_embeddings")
    scaling = text.part("rope_scaling")
    if scaling is None or config.model_type.startswith("gemma3"):
        return own
    kind = scaling.text("rope_type") or scaling.text("type")
    factor = scaling.values.get("factor", 1)
    if not isinstance(factor, int | float) or factor < 1:
        raise ModelError(f"{scaling.place}: factor is {factor!r}; accepted: 1 or more")
    if kind in _LONGEST_YARN:
        return int(scaling.integer("original_max_position_embeddings", own) * factor)
    return int(own * factor) if kind in ("linear", "dynamic") else own


def _paging(kv_format: str, kept: tuple[Kept, ...], machine: Machine, load: Load, limit: int) -> pages.Paging:
    """Defaults of vLLM: pages of 16 tokens on a GPU and 128 on a CPU, whose MLA takes 16 and nothing else."""
    latent = any(isinstance(layer, Attention) and layer.latent for layer in kept)
    block = load.block_size or (16 if machine.gpu or latent else 128)
    # GPUs of 70 GiB and more, Thor among them, take 8192 tokens a step and have two steps under way.
    batch = load.batch_tokens or (8192 if machine.gpu and machine.memory >= 70 * GIB else 2048)
    sequences = 256 if machine.gpu else 128
    in_flight = min(batch, sequences * limit) * (2 if machine.gpu else 1)
    return pages.Paging(kv_format, block, in_flight, machine.float32_states)


def scratch_bytes(layers: Sequence[Attention], max_model_len: int) -> int:
    """Bytes of the packed cache's scratch: 65,536 tokens or one sequence, of the widest layer in 16 bits.

    As ``mjolnir/scratch.py`` has it, which imports PyTorch; the engine takes it beside weights and cache.
    """
    tokens = max(65_536, max_model_len + 128)
    return tokens * max((layer.kv_heads * 2 * layer.head_size * 2 for layer in layers), default=0)


def _unpackable(layers: Sequence[Attention]) -> str:
    if any(layer.latent for layer in layers):
        return "MLA's latent vectors have no 6-bit form"
    refused = sorted({layer.head_size for layer in layers} - set(PACKED_HEAD_SIZES))
    return f"head size {refused[0]}; accepted: {', '.join(map(str, PACKED_HEAD_SIZES))}" if refused else ""


def _format(
    kv_format: str, kept: tuple[Kept, ...], size: int, limit: int, machine: Machine, load: Load
) -> FormatEstimate:
    own = [layer for layer in kept if isinstance(layer, Attention) and not layer.shared]
    scratch = 0
    if kv_format == FP6_KV_DTYPE:
        problem = _unpackable(own)
        if problem:
            return FormatEstimate(kv_format, problem=problem)
        scratch = scratch_bytes(own, limit)
        size = size if machine.kv_cache is not None else max(size - scratch, 0)
    try:
        plan = pages.plan(kept, _paging(kv_format, kept, machine, load, limit))
    except ModelError as error:
        return FormatEstimate(kv_format, problem=str(error))
    one = plan.longest(size, 1, limit)
    context = limit if one == limit else one
    return FormatEstimate(
        kv_format,
        token_bytes=sum(pages.token_bytes(layer, kv_format) for layer in own if layer.window is None),
        window_token_bytes=sum(pages.token_bytes(layer, kv_format) for layer in own if layer.window is not None),
        state_bytes=sum(
            pages.state_bytes(layer, float32=machine.float32_states) for layer in kept if isinstance(layer, State)
        ),
        block_size=max((group.page.tokens for group in plan.groups if group.page.kind != "state"), default=0),
        block_bytes=plan.block_bytes,
        groups=len(plan.groups),
        scratch_bytes=scratch,
        tokens=plan.tokens_in(size, context) if context else 0,
        context=context,
        longest=plan.longest(size, load.sequences, limit),
        fits=one == limit,
    )
