"""Which rungs there are, and what each changes in the engine's launch."""

from pathlib import Path

import pytest

from appliance.command import Launch
from appliance.ladder import Ladder, Rung, rungs_of
from appliance.settings import Settings

F, T, O, E = Rung.FULL, Rung.T5_OFF, Rung.OTHER_FALLBACK, Rung.EAGER  # noqa: E741
COMMAND = ("vllm", "serve", "model", "--uds", "/s")


@pytest.mark.parametrize(
    ("settings", "environment", "command", "gpu", "rungs"),
    [
        ({}, {}, COMMAND, True, [F, T, O, E]),
        ({}, {}, COMMAND, False, [F, T, E]),
        ({}, {}, (*COMMAND, "--enforce-eager"), False, [F, T]),
        ({}, {"MJOLNIR_ATTN_DISABLE": "1"}, COMMAND, True, [F, O, E]),
        ({}, {"MJOLNIR_ATTN_DISABLE": "0"}, COMMAND, True, [F, T, O, E]),
        ({}, {"MJOLNIR_ATTN_FALLBACK": "triton_attn"}, COMMAND, True, [F, T, E]),
        ({}, {"MJOLNIR_ATTN_FALLBACK": "FLASH_ATTN"}, COMMAND, True, [F, T, O, E]),
        ({"attention_backend": "FLASH_ATTN"}, {}, COMMAND, True, [F, E]),
        ({"engine_args": ("--attention-backend=FLASHINFER",)}, {}, COMMAND, True, [F, E]),
    ],
)
def test_the_rungs_of_an_engine(settings, environment, command, gpu, rungs):
    assert rungs_of(Settings(**settings), environment, command, gpu) == rungs


def test_each_rung_keeps_what_those_above_gave_up():
    launch = Launch(("vllm", "--no-enforce-eager", "--uds", "/s"), {"HOME": "/h"}, Path("/s"))
    ladder = Ladder([F, T, O, E])
    seen = []
    for _ in range(4):
        applied = ladder.applied_to(launch)
        seen.append((ladder.rung, sorted(set(applied.environment.items()) - {("HOME", "/h")}), applied.command[1:]))
        ladder.descend()
    off, other = ("MJOLNIR_ATTN_DISABLE", "1"), ("MJOLNIR_ATTN_FALLBACK", "TRITON_ATTN")
    plain = ("--no-enforce-eager", "--uds", "/s")
    assert seen == [
        (F, [], plain),
        (T, [off], plain),
        (O, [off, other], plain),
        (E, [off, other], ("--uds", "/s", "--enforce-eager")),
    ]
    assert (ladder.rung, ladder.below) == (E, None)
    ladder.restore()
    assert (ladder.rung, ladder.below, ladder.applied_to(launch)) == (F, T, launch)
