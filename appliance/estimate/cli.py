"""``mjolnir estimate``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from appliance.errors import ModelError, SettingsError


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(estimate)


def estimate(
    model: Annotated[str, typer.Argument(help="Folder with config.json, or id on the hub.", show_default=False)],
    memory: Annotated[
        str, typer.Option(help="Memory of the engine's device, such as 122GiB.", show_default="this machine's")
    ] = "",
    utilisation: Annotated[float, typer.Option(help="Share of it that the engine may take.")] = 0.92,
    kv_cache_gib: Annotated[
        float | None, typer.Option(help="Size of the KV cache, GiB.", show_default="what is left; 1 on a CPU")
    ] = None,
    reserve_gib: Annotated[float, typer.Option(help="For activations, CUDA and its graphs, GiB.")] = 2.0,
    sequences: Annotated[int, typer.Option(help="Sequences of the longest context at one time.")] = 1,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus answer, tokens.", show_default="the model's")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a page.", show_default="16; 128 on a CPU")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one step.", show_default="8192 from 70 GiB on, else 2048")
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="Fetch config.json, no weights, from the hub.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what a model needs of the memory, and how many tokens of KV cache fit, per format.

    Exit code 0: it fits in at least one format; 1: it does not, or the model can't be estimated; 2: an option can't
    be used.
    """
    from appliance.estimate.config import load  # noqa: PLC0415
    from appliance.estimate.estimate import GIB, Load, Machine, parse_size  # noqa: PLC0415
    from appliance.estimate.estimate import estimate as run  # noqa: PLC0415
    from appliance.estimate.table import show  # noqa: PLC0415

    gpu, size, wide = _device(parse_size(memory, "--memory") if memory else None)
    kv_cache = 1.0 if kv_cache_gib is None and not gpu else kv_cache_gib
    machine = Machine(
        memory=size,
        gpu=gpu,
        utilisation=utilisation,
        reserve=_bytes(reserve_gib, "--reserve-gib", GIB),
        kv_cache=None if kv_cache is None else _bytes(kv_cache, "--kv-cache-gib", GIB),
        float32_states=wide,
    )
    found = run(load(model, online=online), machine, Load(sequences, max_model_len, block_size, batch_tokens))
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        show(found, Console())
    if not found.fits:
        raise ModelError(_misfit(model, found.weights.size, found.kv_cache, found.limit))


def _bytes(gib: float, name: str, unit: int) -> int:
    if not 0 <= gib < 2**20:  # false for NaN too
        raise SettingsError(f"{name}={gib}: accepted: GiB, 0 or more")
    return int(gib * unit)


def _misfit(model: str, weights: int, kv_cache: int, limit: int) -> str:
    if kv_cache == 0:
        return f"{model}: {weights / 2**30:.1f} GiB of weights leave nothing for the KV cache"
    return f"{model}: no format serves a context of {limit:,} in {kv_cache / 2**30:.2f} GiB; --max-model-len lowers it"


def _device(memory: int | None) -> tuple[bool, int, bool]:
    """Whether the engine runs on a GPU, the memory it has, and whether states are kept in float32.

    A memory that was asked for is a board's: it is estimated for a GPU on any machine.

    Raises:
        SettingsError: the GPU has memory of its own, whose size only its driver knows.
    """
    from appliance.board.memory import memory as of_machine  # noqa: PLC0415
    from appliance.command import has_gpu  # noqa: PLC0415
    from appliance.headroom import shares_memory  # noqa: PLC0415

    if memory is not None:
        return True, memory, False
    total = of_machine("/").total
    if not shares_memory() or total is None:
        raise SettingsError("--memory: this machine's GPU has memory of its own; accepted: its size, such as 80GiB")
    gpu = has_gpu()
    return gpu, total, not gpu and "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
