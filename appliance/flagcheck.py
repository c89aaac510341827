"""Do vLLM's own parser and rules accept the engine's flags? A program, run as a child of the supervisor.

vLLM takes seconds and hundreds of megabytes to import, which neither the supervisor's start nor its memory should
pay for. The last line of the output is the verdict: ``{"error": null}`` or ``{"error": "what is wrong"}``.
"""

import argparse
import json
import sys
from typing import Any, NoReturn

# What the appliance decides itself: value that the flag must keep.
_OWNED: dict[str, Any] = {
    "root_path": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "headless": False,
    "grpc": False,
}


class _RefusedError(Exception):
    pass


def check(arguments: list[str]) -> str | None:
    """What is wrong with the arguments of `vllm serve`, if anything."""
    from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise _RefusedError(message)

    try:
        parser = Parser(prog="vllm")
        serve = ServeSubcommand()
        serve.subparser_init(parser.add_subparsers(dest="subparser"))  # its parser is of the same class
        parsed = parser.parse_args(["serve", *arguments])
        serve.validate(parsed)
        return _owned(parsed)
    except (_RefusedError, ValueError, TypeError, OSError, argparse.ArgumentTypeError) as error:
        return " ".join(str(error).split())
    except SystemExit as error:  # --help and its kind
        return f"this is not a way to start an engine (vLLM ended with code {error.code})"


def _owned(parsed: argparse.Namespace) -> str | None:
    for name, value in _OWNED.items():
        if getattr(parsed, name, value) not in (value, "", None):
            return f"--{name.replace('_', '-')}: the appliance decides this"
    return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"error": check(sys.argv[1:])}) + "\n")
