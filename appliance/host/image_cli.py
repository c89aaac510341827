"""`mjolnir image build|save|load`, and `mjolnir doctor`: what changes no container."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

image_app = typer.Typer(help="Build, save and load the appliance's image.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@image_app.command()
def build(
    target: Annotated[str, typer.Argument(help="thor or cpu.")] = "thor",
    tag: Annotated[str, typer.Option(help="Name of the image.", show_default="mjolnir:TARGET")] = "",
    base: Annotated[str, typer.Option(help="Image to build on.", show_default="the Dockerfile's")] = "",
    wheels: Annotated[Path | None, typer.Option(help="Folder of wheels; pip then asks no index.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file that pip trusts in the build.")] = None,
    as_json: Json = False,
) -> None:
    """Build the image from this checkout."""
    from appliance.image import build_image  # noqa: PLC0415

    made = build_image(target, tag, base=base, wheels=wheels, certificates=ca)
    _show({"image": tag or f"mjolnir:{target}", "id": made}, f"{tag or f'mjolnir:{target}'} {made}", as_json=as_json)


@image_app.command()
def save(image: str, file: Path, as_json: Json = False) -> None:
    """Write an image to a file, for a board without a network."""
    from appliance.image import save_image  # noqa: PLC0415

    size = save_image(image, file)
    _show({"file": str(file), "bytes": size}, f"{file}: {size} bytes", as_json=as_json)


@image_app.command()
def load(file: Path, as_json: Json = False) -> None:
    """Load a file that `mjolnir image save` wrote."""
    from appliance.image import load_image  # noqa: PLC0415

    names = load_image(file)
    _show({"images": names}, "loaded " + ", ".join(names), as_json=as_json)


def doctor(
    env_file: Annotated[Path, typer.Option(help="Settings to check.")] = Path(".env"),
    model: Annotated[str, typer.Option(help="Model folder.", show_default="MJOLNIR_MODEL")] = "",
    root: Annotated[str, typer.Option(help="Root of the file tree, for a recorded one.")] = "/",
    as_json: Json = False,
) -> None:
    """Look at what the appliance needs of this machine; each finding says what to do.

    Exit code 0: nothing fails, warnings included; 1: something does.
    """
    from appliance.host.doctor import Level, Place, board_findings  # noqa: PLC0415
    from appliance.host.doctor_docker import docker_findings  # noqa: PLC0415
    from appliance.host.spec import read_variables, spec_of  # noqa: PLC0415

    variables = read_variables(env_file)
    spec = spec_of(variables, env_file.absolute().parent, "")
    place = Place(root, spec.host, spec.port, model or variables.get("MJOLNIR_MODEL", ""))
    findings = [*board_findings(place), *docker_findings(variables.get("MJOLNIR_IMAGE", "mjolnir:thor"))]
    if as_json:
        sys.stdout.write(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2) + "\n")
    else:
        table = Table("check", "", "seen", "what to do", box=None)
        for finding in findings:
            table.add_row(finding.name, finding.level, finding.seen, finding.fix)
        Console().print(table)
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


def _show(values: dict[str, object], text: str, *, as_json: bool) -> None:
    sys.stdout.write((json.dumps(values) if as_json else text) + "\n")
