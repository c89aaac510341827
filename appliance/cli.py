"""The `mjolnir` command line.

What a command needs is imported inside it: `mjolnir version` must not wait for a web framework, and nothing here
ever imports vLLM or PyTorch.
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from appliance.errors import ApplianceError, EngineError
from mjolnir import __version__

app = typer.Typer(
    name="mjolnir",
    help="An LLM appliance: one supervised vLLM engine behind an OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_STATUS_SECONDS = 5.0


@app.command()
def serve(
    engine_args: Annotated[list[str] | None, typer.Argument(metavar="[-- VLLM FLAGS]", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the model, or its id on the hub.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes any free one.", show_default="8000")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use for the model.")] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="vLLM attention backend.", show_default="MJOLNIR")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Format of the KV cache.", show_default="fp8")] = None,
    kv_cache_gib: Annotated[int | None, typer.Option(help="Size of the KV cache, GiB.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus answer, tokens.")] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="Time that a stop gives to streams.", show_default="30")
    ] = None,
    start_timeout_seconds: Annotated[
        float | None, typer.Option(help="Longest silence of a start.", show_default="1200")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of what is kept between starts.")] = None,
    stats_dir: Annotated[Path | None, typer.Option(help="Folder of the counters files.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
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
def status(
    url: Annotated[str, typer.Option(help="Address of the appliance.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
) -> None:
    """Show what a running appliance is doing."""
    report = _fetch(f"{url.rstrip('/')}/status")
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    table = Table(show_header=False, box=None)
    for name, value in _rows(report):
        table.add_row(name, value)
    Console().print(table)


@app.command()
def version() -> None:
    """Show the version."""
    sys.stdout.write(f"mjolnir {__version__}\n")


def main() -> None:
    """Entry point: an error of the appliance's own becomes one line and its exit code."""
    try:
        app()
    except ApplianceError as error:
        sys.stderr.write(f"mjolnir: {error}\n")
        sys.exit(error.exit_code)


def _fetch(url: str) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{url}: not an address; accepted: http://HOST:PORT")
    try:
        with urllib.request.urlopen(url, timeout=_STATUS_SECONDS) as answer:  # noqa: S310  (checked above)
            report = json.load(answer)
    except (urllib.error.URLError, OSError) as error:
        raise EngineError(f"no appliance answers at {url}: {getattr(error, 'reason', error)}") from None
    except ValueError:
        raise EngineError(f"what answers at {url} is no appliance") from None
    return dict(report)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    progress, fault = report["progress"], report["last_fault"]
    state = report["state"]
    if progress:
        percent = "" if progress["percent"] is None else f" {progress['percent']}%"
        state += f" ({progress['phase']}{percent})"
    counters = report["counters"]
    t5 = sum(number for name, number in counters.items() if name.startswith("t5:"))
    fallback = sum(number for name, number in counters.items() if name.startswith("fallback:"))
    rows = [
        ("state", state),
        ("model", report["model"]),
        ("url", report["url"]),
        ("uptime", f"{report['uptime_seconds']:.0f} s"),
        ("restarts", str(report["restarts"])),
        ("steps on T5", f"{t5} of {t5 + fallback}"),
    ]
    if fault:
        rows.append(("last fault", f"{fault['cause']}: {fault['text']}"))
    return rows


if __name__ == "__main__":
    main()
