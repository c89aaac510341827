"""fp6_e2m3 in vLLM: the size of its pages, the scales of its layers, and its fallback steps.

The fallback never sees a packed page. Its builder and impl are made for a cache in the model's dtype, and its steps run
on a scratch into which the pages that they use have been expanded, with their scales: so any stock backend will do,
none needs a descale per head, and the values lose nothing more than a rounding to 16 bits.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mjolnir import scales, scratch, turning
from mjolnir.env import BackendSettings
from mjolnir.errors import ConfigurationError, ScalesError
from mjolnir.names import FP6_KV_DTYPE
from mjolnir.pagemap import PageMap, map_pages, runs_of_requests
from mjolnir.reference import e2m3, packed_rows
from mjolnir.reference.e2m3 import row_bytes
from mjolnir.split import requests_of

# Buffers of a layer: scales to write by and to read by, (num_kv_heads, head_size) float32, and the matrix of
# `mjolnir.turning` in the model's dtype, None where rows are not turned.
K_SCALE, V_SCALE = "mjolnir_k_scale", "mjolnir_v_scale"
K_READ_SCALE, V_READ_SCALE = "mjolnir_k_read_scale", "mjolnir_v_read_scale"
K_TURN, V_TURN = "mjolnir_k_turn", "mjolnir_v_turn"
_KV_CACHE_DTYPE = 6  # position among the arguments of an impl


def is_packed(spec: Any) -> bool:
    """Whether a KV cache spec is of packed 6-bit pages; never in a vLLM without our patch."""
    return bool(getattr(spec.kv_quant_mode, "is_fp6", False))


def packed_spec(spec: Any) -> Any:
    """A spec with the size of a packed cell."""
    if spec.state_content_bytes is not None:
        return spec
    return dataclasses.replace(spec, state_content_bytes=row_bytes(spec.head_size) + row_bytes(spec.head_size_v))


def expanded_spec(spec: Any, dtype: torch.dtype) -> Any:
    """The spec of the scratch: what the fallback is told about its cache."""
    plain = type(spec.kv_quant_mode).NONE
    return dataclasses.replace(spec, dtype=dtype, kv_quant_mode=plain, state_content_bytes=None)


def for_fallback(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
    """Whether an impl is made for packed pages, and the arguments with which the fallback's impl is made."""
    given = args[_KV_CACHE_DTYPE] if len(args) > _KV_CACHE_DTYPE else kwargs.get("kv_cache_dtype")
    if given != FP6_KV_DTYPE:
        return False, args, kwargs
    if len(args) > _KV_CACHE_DTYPE:
        return True, (*args[:_KV_CACHE_DTYPE], "auto", *args[_KV_CACHE_DTYPE + 1 :]), kwargs
    return True, args, kwargs | {"kv_cache_dtype": "auto"}


def store_for(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What writes new rows to, and expands pages of, a packed cache on a device."""
    if device.type == "cpu":
        return e2m3.write_kv, packed_rows.expand_pages
    from mjolnir.kernels import store  # noqa: PLC0415  (imports Triton)

    return store.write_kv, store.expand_pages


def prepare_layer(impl: Any, vllm_config: Any, dtype: torch.dtype) -> None:
    """Give a layer its scales, and its device the scratch; called whenever the layer's weights have been loaded.

    The scales are buffers of the layer, so vLLM keeps them through a sleep; a copy that was lost with other weights
    is written again, into the same memory, which captured graphs refer to.

    Raises:
        ConfigurationError: no scale file is set, or a request's cache is spread over ranks.
        ScalesError: the file can't be used for this model.
    """
    _check_parallel(vllm_config.parallel_config)
    layers = _packed_layers(vllm_config)
    name = next(name for name, layer in layers.items() if layer.impl is impl)
    layer = layers[name]
    path = BackendSettings.from_env().require_kv_scales()
    file = checked_file(path, vllm_config, layers)
    rank, world = _tensor_parallel()
    mine = file.layers[layer.kv_sharing_target_layer_name or name].shard(layer.num_kv_heads, rank, world)
    device = layer._k_scale.device
    shape = layer.num_kv_heads, layer.head_size
    parts = (
        (K_SCALE, K_READ_SCALE, K_TURN, mine.k, mine.k_turned),
        (V_SCALE, V_READ_SCALE, V_TURN, mine.v, mine.v_turned),
    )
    for buffer, reading, turn, rows, turned in parts:
        values = torch.tensor(rows, dtype=torch.float32)
        if values.shape != shape:
            raise ScalesError(
                f"scale file {path}: {tuple(values.shape)} scales for layer {name} on this rank; accepted: {shape} "
                "(KV heads, head size): models whose layers differ in these have no fp6_e2m3"
            )
        _put(layer, buffer, values, device)
        _put(layer, reading, values / layer.head_size if turned else values, device)
        _put(layer, turn, turning.matrix(layer.head_size, dtype) if turned else None, device)
    scratch.reserve(device, scratch.tokens_for(vllm_config.model_config.max_model_len), *shape, dtype)


def _check_parallel(parallel: Any) -> None:
    # Pages are expanded by a request's whole length, of which a rank would hold only its share.
    for way in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, way, 1)) > 1:
            raise ConfigurationError(f"kv cache dtype fp6_e2m3: {way.replace('_', ' ')} is {size}; accepted: 1")


def checked_file(path: str, vllm_config: Any, layers: Mapping[str, Any]) -> scales.ScaleFile:
    """A scale file that is for this model and knows these layers, or those whose cache they read.

    Raises:
        ScalesError: the file can't be read, or is for another model or other layers.
    """
    file = scales.load(path)
    scales.check_model(path, file, served_shape(vllm_config.model_config))
    owners = {getattr(layer, "kv_sharing_target_layer_name", None) or name for name, layer in layers.items()}
    scales.check_layers(path, file, owners)
    return file


def served_shape(model_config: Any) -> scales.ModelShape:
    """The model that vLLM serves, as a scale file describes it."""
    return scales.ModelShape(
        name=scales.model_name(model_config.model),
        architecture=(model_config.hf_config.architectures or [""])[0],
        num_kv_heads=model_config.get_total_num_kv_heads(),
        head_size=model_config.get_head_size(),
    )


def write_scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What K's and V's rows of a layer are divided by, (num_kv_heads, head_size) float32."""
    return getattr(layer, K_SCALE), getattr(layer, V_SCALE)


def read_scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What K's and V's codes of a layer are multiplied by, for a query and an output that are turned as the rows."""
    return getattr(layer, K_READ_SCALE), getattr(layer, V_READ_SCALE)


def written_rows(layer: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (tokens, num_kv_heads, head_size), as they go to the cache before they are divided."""
    k_turn, v_turn = getattr(layer, K_TURN), getattr(layer, V_TURN)
    return key if k_turn is None else key @ k_turn, value if v_turn is None else value @ v_turn


def turned_attention(
    layer: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    tokens: int,
    attend: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    """Attention over pages of turned rows.

    Args:
        layer: whose pages they are.
        query: (>= tokens, num_heads * head_size), or with heads apart.
        output: likewise; written to.
        tokens: how many are real.
        attend: computes attention of a query, (tokens, num_heads, head_size), over the rows as they are kept, into an
            output of that shape.
    """
    k_turn, v_turn = getattr(layer, K_TURN), getattr(layer, V_TURN)
    rows, into = (part.view(-1, layer.num_heads, layer.head_size)[:tokens] for part in (query, output))
    rows = rows if k_turn is None else rows @ k_turn
    if v_turn is None:
        attend(rows, into)
        return
    result = torch.empty_like(into)
    attend(rows, result)
    torch.matmul(result, v_turn, out=into)


@dataclass(frozen=True)
class ExpandedRun:
    """A run of requests of a fallback step, whose pages fit the scratch together.

    Attributes:
        tokens: their query tokens.
        pages: where their pages go.
        metadata: the fallback's, over the scratch.
    """

    tokens: slice
    pages: PageMap
    metadata: Any


@dataclass
class ExpandedMetadata:
    """A fallback step over packed pages; besides its runs it has what vLLM's own code reads of any metadata."""

    runs: list[ExpandedRun]
    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True


def expanded_metadata(cam: Any, page_size: int, max_model_len: int, build: Callable[[Any], Any]) -> ExpandedMetadata:
    """Metadata of a fallback step.

    Args:
        cam: vLLM's common metadata.
        page_size: tokens of a page.
        max_model_len: longest sequence.
        build: makes the fallback's metadata from common metadata.
    """
    width = cam.block_table_tensor.shape[1]
    lengths = cam.seq_lens_cpu_upper_bound
    lengths = cam.seq_lens.cpu() if lengths is None else lengths
    counts = [min(-(-int(length) // page_size), width) for length in lengths[: cam.num_reqs].tolist()]
    cuts = runs_of_requests(counts, scratch.tokens_for(max_model_len) // page_size)
    runs = []
    for first, last in cuts:
        part = cam if len(cuts) == 1 else requests_of(cam, first, last)
        table = part.block_table_tensor[: last - first]
        pages = map_pages(table, part.seq_lens[: last - first], page_size, sum(counts[first:last]))
        metadata = build(part.replace(block_table_tensor=pages.block_table))
        if len(cuts) > 1 and isinstance(getattr(metadata, "scheduler_metadata", None), torch.Tensor):
            metadata.scheduler_metadata = metadata.scheduler_metadata.clone()  # the next run's goes to the same memory
        begin = int(cam.query_start_loc_cpu[first])
        runs.append(ExpandedRun(slice(begin, begin + part.num_actual_tokens), pages, metadata))
    fields = [field.name for field in dataclasses.fields(ExpandedMetadata) if hasattr(cam, field.name)]
    values = {name: getattr(cam, name) for name in fields}
    return ExpandedMetadata(runs=runs, block_table=cam.block_table_tensor, **values)


def _packed_layers(vllm_config: Any) -> dict[str, Any]:
    """Every layer of the engine that is made for packed pages, by name."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if getattr(getattr(layer, "impl", None), "packed", False)}


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed import (  # noqa: PLC0415
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def _put(layer: Any, name: str, values: torch.Tensor | None, device: torch.device) -> None:
    present = getattr(layer, name, None)
    if isinstance(present, torch.Tensor) and values is not None:
        present.copy_(values)
    else:
        layer.register_buffer(name, None if values is None else values.to(device), persistent=False)
