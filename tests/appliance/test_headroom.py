"""Memory for a start, over a tree that stands for /proc."""

import logging
from pathlib import Path

import pytest

from appliance.errors import NoRoomError, SettingsError
from appliance.headroom import GIB, Headroom, settled
from appliance.settings import Settings


def machine(root: Path, total: float, available: float) -> str:
    (root / "proc").mkdir(exist_ok=True)
    lines = {"MemTotal": total, "MemFree": 0, "MemAvailable": available, "Cached": 0}
    (root / "proc" / "meminfo").write_text("".join(f"{n}: {int(v * 2**20)} kB\n" for n, v in lines.items()))
    return str(root)


def headroom(root: str, shared: bool = True, **settings) -> Headroom:
    return Headroom(Settings(model="m", **settings), root, shared)


@pytest.mark.parametrize(("total", "floor"), [(8, 0.5), (24, 0.72), (122, 3.66), (512, 4)])
def test_the_default_floor_grows_with_the_machine(tmp_path, total, floor):
    assert headroom(machine(tmp_path, total, 4)).floor == pytest.approx(floor * GIB, rel=1e-6)


def test_a_floor_that_was_set(tmp_path):
    seen = headroom(machine(tmp_path, 122, 4), memory_floor_gib=4.5)
    assert (seen.floor, seen.below_floor()) == (4.5 * GIB, 4 * GIB)
    assert headroom(machine(tmp_path, 122, 5), memory_floor_gib=4.5).below_floor() is None


def test_a_machine_that_does_not_tell_has_no_floor(tmp_path):
    seen = headroom(str(tmp_path))
    assert (seen.available(), seen.below_floor()) == (None, None)
    seen.check(100 * GIB)


def test_a_model_that_fits_and_one_that_may_hold_twice_its_size(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "appliance.headroom")
    root = machine(tmp_path, 122, 100)
    headroom(root, kv_cache_gib=8).check(40 * GIB)
    assert caplog.records == []
    headroom(root, kv_cache_gib=8).check(70 * GIB)
    (warning,) = caplog.messages
    assert "the weights twice for a while: 151.7 GiB, and 100.0 are available" in warning


def test_one_line_for_a_model_that_never_fits(tmp_path):
    with pytest.raises(SettingsError) as caught:
        headroom(machine(tmp_path, 122, 100), kv_cache_gib=8).check(111 * GIB)
    assert str(caught.value) == (
        "model='m': 111.0 GiB of weights, 8.0 of KV cache and 3.7 of floor do not fit into 122.0 GiB of memory; "
        "accepted: a smaller model, kv_cache_gib or memory_floor_gib"
    )


def test_one_line_for_a_model_that_does_not_fit_now(tmp_path):
    with pytest.raises(NoRoomError, match=r"70\.0 GiB of weights, .* are needed and 60\.0 GiB available"):
        headroom(machine(tmp_path, 122, 60)).check(70 * GIB)


@pytest.mark.parametrize(
    ("shared", "settings", "weights"),
    [
        (False, {}, 500),  # a GPU with memory of its own
        (True, {"engine_args": ("--quantization", "fp8")}, 500),  # smaller in memory than on the disk
        (True, {}, 0),  # not known: a model of the hub
    ],
)
def test_what_can_not_be_judged_is_let_through(tmp_path, shared, settings, weights):
    headroom(machine(tmp_path, 122, 50), shared, **settings).check(weights * GIB)


async def test_settling_waits_while_memory_comes_back():
    seen = iter([1, 2, 3, 8, 8, 8, 8, 8, 8])
    looks = []

    def available() -> int:
        looks.append(next(seen))
        return looks[-1] * GIB

    await settled(available, limit=60.0, look=0.001)
    assert looks == [1, 2, 3, 8, 8, 8, 8]  # three looks without a rise


async def test_settling_is_bounded_and_takes_nothing_where_it_is_off():
    rising = iter(range(10**6))
    assert await settled(lambda: next(rising) * GIB, limit=0.05, look=0.01) <= 0.06
    assert await settled(lambda: next(rising) * GIB, limit=0.0, look=0.01) < 0.01
    assert await settled(lambda: None, limit=60.0) < 1
