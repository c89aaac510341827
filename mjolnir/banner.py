"""The banner that a worker logs once, and the one-line identity of this build."""

import logging

from mjolnir import __version__

logger = logging.getLogger("vllm.mjolnir")

_HAMMER = r"""
   ______________
  |  |        |  |
  |  |  T5    |  |
  |__|________|__|
        |##|
        |##|
        |##|
        [__]
"""

_shown: list[bool] = []


def banner(config_name: str = "") -> str:
    """The drawing with an info block to its right.

    Args:
        config_name: name of the model configuration, or empty.
    """
    info = [f"Mjolnir v{__version__}", "decode attention on T5 for vLLM"]
    if config_name:
        info.append(f"Model: {config_name}")
    drawing = _HAMMER.strip("\n").splitlines()
    top = (len(drawing) - len(info)) // 2
    lines = []
    for number, line in enumerate(drawing):
        text = info[number - top] if 0 <= number - top < len(info) else ""
        lines.append(f"{line:<22}{text}".rstrip())
    return "\n".join(lines)


def show_once(config_name: str = "") -> None:
    """Log the banner, once a process."""
    if not _shown:
        _shown.append(True)
        logger.info("\n%s", banner(config_name))
