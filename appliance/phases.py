"""How far a start has come, read from the engine's log. Pure.

The lines are vLLM 0.32.0's; a line that is not known changes nothing, so a reworded log costs detail and never
a start.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Stages of a start in their order: the values of ``appliance_engine_phase``."""

    IMPORT = "import"  # Python reads vLLM and PyTorch
    CONFIGURE = "configure"  # the model's configuration is resolved, worker processes come up
    LOAD = "load"  # weights
    COMPILE = "compile"  # torch.compile
    KV_CACHE = "kv_cache"  # profiling and allocation
    CAPTURE = "capture"  # CUDA graphs
    WARM_UP = "warm_up"
    SERVER = "server"  # the HTTP server comes up
    SELF_TEST = "self_test"  # it answers its first request


ORDER = {phase: position for position, phase in enumerate(Phase)}

_HEAD = 400  # characters of a line that are looked at: a flood of long lines must not cost more than short ones
_PERCENT = r"[^\r\n]*?(?P<percent>\d{1,3})%"
_LINES: tuple[tuple[re.Pattern[str], Phase], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (rf"Loading [\w ]*checkpoint shards:{_PERCENT}", Phase.LOAD),
        (rf"Capturing [\w ]*CUDA graphs?[^:\r\n]*:{_PERCENT}", Phase.CAPTURE),
        (r"Resolved architecture: ", Phase.CONFIGURE),
        (r"Initializing a V1 LLM engine", Phase.CONFIGURE),
        (r"Starting to load model ", Phase.LOAD),
        (r"Loading weights took ", Phase.LOAD),
        (r"Model loading took ", Phase.LOAD),
        (r"Dynamo bytecode transform time", Phase.COMPILE),
        (r"Compiling a graph for compile range", Phase.COMPILE),
        (r"Directly load the compiled graph", Phase.COMPILE),
        (r"torch\.compile took ", Phase.COMPILE),
        (r"Using \w+ KV cache layout", Phase.KV_CACHE),
        (r"(?:GPU|CPU) KV cache size: ", Phase.KV_CACHE),
        (r"Graph capturing finished in ", Phase.CAPTURE),
        (r"Warming up model", Phase.WARM_UP),
        (r"init engine \(profile, create kv cache, warmup model\) took ", Phase.WARM_UP),
        (r"Starting vLLM server on ", Phase.SERVER),
        (r"Application startup complete", Phase.SERVER),
    )
)


@dataclass(frozen=True)
class Progress:
    """A stage of the start and, where the engine tells it, how much of it is done (percent)."""

    phase: Phase = Phase.IMPORT
    percent: int | None = None


def parse(line: str) -> Progress | None:
    """What a log line says about the start, if anything."""
    head = line[:_HEAD]
    for pattern, phase in _LINES:
        match = pattern.search(head)
        if match:
            percent = match.groupdict().get("percent")
            return Progress(phase, min(100, int(percent)) if percent else None)
    return None


class ProgressTracker:
    """Follows one start: where it is, and when it last moved.

    Several processes write into one log and each loads its own weights, so a stage never goes back to an earlier
    one; within a stage the latest percentage counts. A line counts as movement when it says something new: a
    stuck engine that repeats "still waiting" with another time stamp every minute does not move.
    """

    MOST_LINES = 20_000  # remembered as shapes; a start that says more new things than that is alive anyway

    def __init__(self) -> None:
        self.progress = Progress()
        self._shapes: set[int] = set()

    def feed(self, line: str) -> bool:
        """Take in a line; True where the start has moved."""
        seen = parse(line)
        if seen is not None and self._is_news(seen):
            self.progress = seen
            return True
        shape = hash(re.sub(r"\d+", "0", line[:_HEAD]))
        if shape in self._shapes:
            return False
        if len(self._shapes) < self.MOST_LINES:
            self._shapes.add(shape)
        return True

    def _is_news(self, seen: Progress) -> bool:
        if seen.phase is self.progress.phase:
            return seen.percent not in (None, self.progress.percent)
        return ORDER[seen.phase] > ORDER[self.progress.phase]
