"""The degrade ladder: what is given up, one rung at a time, to keep an engine that fails alive. Pure.

A rung keeps what the rungs above it gave up. The operator climbs back, always to the top.
"""

import dataclasses
from collections.abc import Mapping
from enum import StrEnum

from appliance.command import Launch, flag_names
from appliance.settings import Settings

DISABLE = "MJOLNIR_ATTN_DISABLE"
FALLBACK = "MJOLNIR_ATTN_FALLBACK"
_OURS = "MJOLNIR"
# The stock backend with the least to go wrong: no binary of its own, compiled on the spot by the same Triton as T5.
_SAFEST_FALLBACK = "TRITON_ATTN"
_EAGER, _NOT_EAGER = "--enforce-eager", "--no-enforce-eager"
_ON = ("1", "true", "yes", "on")


class Rung(StrEnum):
    """How much is given up: the values of ``appliance_engine_rung``."""

    FULL = "full"  # nothing
    T5_OFF = "t5_off"  # decode steps run on the fallback
    OTHER_FALLBACK = "other_fallback"
    EAGER = "eager"  # no compilation, no CUDA graphs


def rungs_of(settings: Settings, environment: Mapping[str, str], command: tuple[str, ...], gpu: bool) -> list[Rung]:
    """The rungs that there are for an engine; what its settings give up themselves is none."""
    given = flag_names(settings.engine_args)
    ours = settings.attention_backend.upper() == _OURS and "--attention-backend" not in given
    rungs = [Rung.FULL]
    if ours and environment.get(DISABLE, "").strip().lower() not in _ON:
        rungs.append(Rung.T5_OFF)
    if ours and gpu and environment.get(FALLBACK, "").strip().upper() != _SAFEST_FALLBACK:
        rungs.append(Rung.OTHER_FALLBACK)
    if _EAGER not in command:
        rungs.append(Rung.EAGER)
    return rungs


class Ladder:
    """Where one engine stands on its ladder.

    Args:
        rungs: from the top; the first is FULL.
    """

    def __init__(self, rungs: list[Rung]) -> None:
        self._rungs = rungs
        self._at = 0

    @property
    def rung(self) -> Rung:
        """The present rung."""
        return self._rungs[self._at]

    @property
    def below(self) -> Rung | None:
        """The next rung down, None on the last."""
        return self._rungs[self._at + 1] if self._at + 1 < len(self._rungs) else None

    def descend(self) -> Rung:
        """One rung down; stays on the last."""
        self._at = min(self._at + 1, len(self._rungs) - 1)
        return self.rung

    def restore(self) -> None:
        """Back to the top."""
        self._at = 0

    def applied_to(self, launch: Launch) -> Launch:
        """The launch with everything given up that the present rung and those above it give up."""
        given_up = self._rungs[: self._at + 1]
        environment, command = dict(launch.environment), launch.command
        if Rung.T5_OFF in given_up:
            environment[DISABLE] = "1"
        if Rung.OTHER_FALLBACK in given_up:
            environment[FALLBACK] = _SAFEST_FALLBACK
        if Rung.EAGER in given_up:
            command = (*(word for word in command if word != _NOT_EAGER), _EAGER)
        return dataclasses.replace(launch, command=command, environment=environment)
