"""The `mjolnir` command line.

What a command needs is imported inside it: `mjolnir version` must not wait for a web framework, and only `verify` and
`bench`, which run kernels, ever import PyTorch.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from appliance.errors import ApplianceError, SettingsError
from appliance.estimate.cli import register as register_estimate
from appliance.host.cli import DEFAULT_NAME, register
from appliance.profiles.cli import profiles_app
from mjolnir import __version__
from mjolnir.errors import ConfigurationError

app = typer.Typer(
    name="mjolnir",
    help="An LLM appliance: one supervised vLLM engine behind an OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(profiles_app, name="profiles")

register(app)
register_estimate(app)


@app.command()
def serve(
    engine_args: Annotated[list[str] | None, typer.Argument(metavar="[-- VLLM FLAGS]", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the model, or its id on the hub.")] = None,
    profile: Annotated[str | None, typer.Option(help="Name of a profile: `mjolnir profiles list`.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes any free one.", show_default="8000")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use for the model.")] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="vLLM attention backend.", show_default="MJOLNIR")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Format of the KV cache.", show_default="fp8")] = None,
    calibrate: Annotated[
        bool | None, typer.Option("--calibrate", help="Make the scales of a 6-bit KV cache first if there are none.")
    ] = None,
    kv_cache_gib: Annotated[int | None, typer.Option(help="Size of the KV cache, GiB.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus answer, tokens.")] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="Time that a stop gives to streams.", show_default="30")
    ] = None,
    start_timeout_seconds: Annotated[
        float | None, typer.Option(help="Longest silence of a start.", show_default="1200")
    ] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="File with the clients' API keys.")] = None,
    admin_keys_file: Annotated[Path | None, typer.Option(help="File with the keys of /metrics and /status.")] = None,
    allow_anonymous: Annotated[
        bool | None, typer.Option("--allow-anonymous", help="Let the network in without API keys.")
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Requests inside the engine at one time.", show_default="256")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that wait for a place.", show_default="256")] = None,
    queue_seconds: Annotated[float | None, typer.Option(help="Longest wait for a place.", show_default="60")] = None,
    hold_seconds: Annotated[
        float | None, typer.Option(help="Longest wait while no engine is ready.", show_default="0")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of what is kept between starts.")] = None,
    stats_dir: Annotated[Path | None, typer.Option(help="Folder of the counters files.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="text or json.", show_default="progress on a terminal, else text")
    ] = None,
    access_log: Annotated[bool | None, typer.Option(help="One line a request.", show_default="on")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="OpenTelemetry collector for vLLM's traces.")] = None,
    offline: Annotated[bool | None, typer.Option("--offline", help="Never ask the hub for anything.")] = None,
) -> None:
    """Serve a model until Ctrl-C.

    Every option can also be set as MJOLNIR_<OPTION> in the environment or in .env.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    if engine_args is not None:
        flags["engine_args"] = tuple(engine_args)

    from appliance import settings  # noqa: PLC0415
    from appliance.serve import serve as run  # noqa: PLC0415

    run(settings.load(**flags))


@app.command()
def calibrate(
    model: Annotated[str | None, typer.Option(help="Folder of the model, or its id on the hub.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Scale file.", show_default="<cache_dir>/scales/<model>.json, where serve looks")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help='Prompts, a line of JSON each: {"prompt": "..."}.', show_default="64 of ours")
    ] = None,
    percentile: Annotated[
        float, typer.Option(help="Share of values, in percent, that must not saturate; 100 is the maximum.")
    ] = 100.0,
    turn: Annotated[
        bool, typer.Option(help="Turn K and V by a Hadamard matrix before they are rounded: less error.")
    ] = True,
    answer_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 96,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt plus answer, tokens.")] = 2048,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs to spread the model over.")] = 1,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of what is kept between starts.")] = None,
    offline: Annotated[bool | None, typer.Option("--offline", help="Never ask the hub for anything.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a model's K and V and write the scales that the 6-bit KV cache needs.

    An interrupted run goes on where it was when it is started again.
    """
    from appliance import settings  # noqa: PLC0415
    from appliance.calibrate import Choices, bar  # noqa: PLC0415
    from appliance.calibrate import calibrate as run  # noqa: PLC0415

    given = settings.load(model=model, cache_dir=cache_dir, offline=offline)
    choices = Choices(out, prompts_file, percentile, turn, answer_tokens, max_model_len, tensor_parallel_size)
    with bar() as follow:
        report = run(given, choices, follow)
    text = (
        json.dumps(report)
        if as_json
        else f"wrote {report['path']}: {report['layers']} layers, {report['tokens']} tokens"
    )
    sys.stdout.write(text + "\n")


@app.command()
def status(
    url: Annotated[
        str, typer.Option(help="Address of the appliance.", show_default="its container's, else http://127.0.0.1:8000")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of its container.")] = DEFAULT_NAME,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with an admin key.", show_default="MJOLNIR_ADMIN_KEY_FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a running appliance is doing, and its container where there is one."""
    from appliance.host import status as host  # noqa: PLC0415
    from appliance.host.adminkey import admin_key  # noqa: PLC0415

    # An address that was given may be another machine's, of which this machine's daemon knows nothing.
    report = host.report(url, None if url else host.look(name), admin_key(admin_key_file))
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    table = Table(show_header=False, box=None)
    for title, value in host.rows(report):
        table.add_row(title, value)
    Console().print(table)


@app.command()
def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for what decodes on a machine without a GPU.")] = "cuda",
) -> None:
    """Check T5's results on this machine against float64.

    Exit code 0: all are right; 1: one is wrong; 2: there is no usable device.
    """
    with _kernel_errors():
        from mjolnir.bench import verify as verification  # noqa: PLC0415

        right = verification.main(device, as_json=as_json)
    if not right:
        raise typer.Exit(1)


@app.command()
def precompile(
    arch: Annotated[str, typer.Option(help="Architecture to compile for: sm_110a (Thor), sm_90a.")],
    out: Annotated[Path, typer.Option(help="Directory that MJOLNIR_ATTN_KERNEL_CACHE names on the board.")],
    shapes: Annotated[str, typer.Option(help="HEADSxKV_HEADSxHEAD_SIZE,... of the models.")],
    page: Annotated[str, typer.Option(help="Tokens of a page.")] = "16",
    kv: Annotated[str, typer.Option(help="Formats of the cache: fp8, e2m3.")] = "fp8",
    q_len: Annotated[int, typer.Option(help="Most query tokens of a request: 1 + draft tokens.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests of a step, as the engine's.")] = 256,
    dtype: Annotated[str, typer.Option(help="The model's: bf16 or fp16.")] = "bf16",
    workers: Annotated[int, typer.Option(help="Processes that compile.")] = 2,
) -> None:
    """Compile T5's kernels for a board ahead of time; this machine needs no GPU.

    Exit code 0: the directory holds all of them; 2: an option or the directory can't be used.
    """
    with _kernel_errors():
        from mjolnir.bench import precompile as ahead  # noqa: PLC0415

        count = ahead.main(
            arch,
            out,
            shapes=shapes,
            page=page,
            kv=kv,
            q_len=q_len,
            max_num_seqs=max_num_seqs,
            dtype=dtype,
            workers=workers,
        )
    sys.stdout.write(f"{out}: {count} kernels for {arch}\n")


@bench_app.command()
def kernel(
    shapes: Annotated[
        str, typer.Option(help="HEADSxKV_HEADSxHEAD_SIZE,...", show_default="32x8x128,24x4x256,64x8x128,9x3x64")
    ] = "",
    q_len: Annotated[str, typer.Option(help="Query tokens of a sequence.")] = "1,4",
    page: Annotated[str, typer.Option(help="Tokens of a page.")] = "16,128",
    layout: Annotated[str, typer.Option(help="Orders of a page's dimensions: NHD, HND.")] = "NHD",
    kv: Annotated[str, typer.Option(help="Formats of the cache.")] = "fp8,e2m3",
    cells: Annotated[str, typer.Option(help="all, quick or skewed.")] = "all",
    peers: Annotated[str, typer.Option(help="auto (those that are installed) or none.")] = "auto",
    time_budget: Annotated[
        float | None, typer.Option(help="Seconds after which no further cell is begun.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Result file, written anew after each cell.")] = None,
) -> None:
    """Time T5 beside other decode-attention kernels on a GPU.

    Exit code 0: measured; 1: T5 gave a wrong result or failed; 2: an option or the device can't be used.
    """
    with _kernel_errors():
        from mjolnir.bench import kernel_cells, kernel_decode  # noqa: PLC0415

        right = kernel_decode.main(
            kernel_cells.parse_cells(shapes, q_len, page, cells, layout, kv),
            peers=peers,
            out=out,
            seconds=float("inf") if time_budget is None else time_budget,
            command=shlex.join(["mjolnir", *sys.argv[1:]]),
        )
    if not right:
        raise typer.Exit(1)


@app.command()
def version(
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the installed vLLM too: its version, and that it has our patches.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the version. With --verify it is the self-test of a new image, before `mjolnir upgrade` changes anything.

    Exit code 1: vLLM is missing, of another version, or not patched as this version wants it.
    """
    told = {"mjolnir": __version__}
    if verify:
        from appliance.patchqueue import REPOSITORY, find_root, load_queue  # noqa: PLC0415
        from appliance.patchqueue import verify as verify_patches  # noqa: PLC0415

        # An image keeps the series beside its interpreter, a checkout in its root.
        inside = Path(sys.prefix) / "patches"
        told["vllm"] = verify_patches(find_root(), load_queue(inside if inside.is_dir() else REPOSITORY / "patches"))
    sys.stdout.write((json.dumps(told) if as_json else "\n".join(" ".join(pair) for pair in told.items())) + "\n")


def main() -> None:
    """Entry point: an error of the appliance's own becomes one line and its exit code."""
    try:
        app()
    except ApplianceError as error:
        sys.stderr.write(f"mjolnir: {error}\n")
        sys.exit(error.exit_code)


@contextlib.contextmanager
def _kernel_errors() -> Iterator[None]:
    """Makes one line and exit code 2 of what a kernel command can't use."""
    try:
        yield
    except ConfigurationError as error:
        raise SettingsError(str(error)) from None
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise SettingsError(f"{error.name} is not installed here; accepted: the Python of the engine") from None


if __name__ == "__main__":
    main()
