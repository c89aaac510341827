"""``scripts/image``: build, save and load the image without the installed command line."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from appliance.errors import ApplianceError
from appliance.image import TARGETS, build_image, load_image, save_image
from appliance.image_wheels import fill


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/image", description="Builds, saves and loads the image.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="build|save|load|wheels")
    build = commands.add_parser("build", help="build the image from this checkout")
    build.add_argument("target", choices=TARGETS)
    build.add_argument("--tag", default="", help="name of the image (default: mjolnir:TARGET)")
    build.add_argument("--base", default="", help="image to build on (default: the Dockerfile's)")
    build.add_argument("--wheels", type=Path, help="folder of wheels, filled first where needed; pip asks no index")
    build.add_argument("--no-fill", action="store_true", help="take the folder of wheels as it is: no network")
    build.add_argument("--ca", type=Path, help="PEM file that pip trusts in the build (default: PIP_CERT)")
    build.add_argument("--platform", help="of the image; '' is the daemon's (default: thor: linux/arm64)")
    build.add_argument("--no-cache", action="store_true", help="run every step again")
    save = commands.add_parser("save", help="write an image to a file")
    save.add_argument("tag")
    save.add_argument("file", type=Path)
    load = commands.add_parser("load", help="load a file that save wrote")
    load.add_argument("file", type=Path)
    wheels = commands.add_parser("wheels", help="fill a folder of wheels for a build without a network")
    wheels.add_argument("target", choices=TARGETS)
    wheels.add_argument("folder", type=Path)
    return parser


def _build(arguments: argparse.Namespace) -> str:
    if arguments.wheels is not None and not arguments.no_fill:
        fill(arguments.wheels, arguments.target, _say)
    begin = time.monotonic()
    image = build_image(
        arguments.target,
        arguments.tag,
        base=arguments.base,
        wheels=arguments.wheels,
        certificates=arguments.ca,
        platform=arguments.platform,
        no_cache=arguments.no_cache,
    )
    return f"{arguments.tag or f'mjolnir:{arguments.target}'} {image} in {time.monotonic() - begin:.0f} s"


def _run(arguments: argparse.Namespace) -> str:
    if arguments.command == "build":
        return _build(arguments)
    if arguments.command == "save":
        return f"{arguments.file}: {save_image(arguments.tag, arguments.file)} bytes"
    if arguments.command == "load":
        return "loaded " + ", ".join(load_image(arguments.file))
    return f"{fill(arguments.folder, arguments.target, _say)} wheels in {arguments.folder}"


def _say(line: str) -> None:
    sys.stderr.write(f"image: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 1 (2 for wrong usage) with one line on stderr when it failed."""
    arguments = _parser().parse_args(argv)
    try:
        sys.stdout.write(_run(arguments) + "\n")
    except ApplianceError as error:
        _say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
