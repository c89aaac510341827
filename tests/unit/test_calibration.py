"""The process that calibrates, around a stand-in for vLLM: batches are kept, gone on from, and never half."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mjolnir import calibration, observation, scales, turning
from mjolnir.calibration import BATCH, MARK, Request
from mjolnir.errors import ScalesError

HEADS, SIZE = 2, 32
PROMPTS = [f"prompt {number}" for number in range(3 * BATCH)]


class FakeEngine(observation.WorkerExtension):
    """An engine of one rank, one layer, whose K and V follow from the prompts."""

    asked: list[str]
    fails_at: str | None
    spoil: Callable[[torch.Tensor], None]

    def __init__(self, **options: Any) -> None:
        FakeEngine.options = options
        config = SimpleNamespace(
            model="org/Tiny",
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
            get_total_num_kv_heads=lambda: HEADS,
            get_head_size=lambda: SIZE,
        )
        self.llm_engine = SimpleNamespace(model_config=config)
        self._step(["warm-up"] * 3, factor=1000.0)

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(chat_template=None)

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self, name)(*args)]

    def generate(self, prompts: list[str], *_: Any, **__: Any) -> None:
        if self.fails_at in prompts:
            raise KeyboardInterrupt
        self.asked.extend(prompts)
        self._step(prompts)

    def _step(self, prompts: list[str], factor: float = 1.0) -> None:
        for prompt in prompts:
            generator = torch.Generator().manual_seed(sum(map(ord, prompt)))
            rows = torch.randn((2, 5, HEADS, SIZE), generator=generator) * factor
            FakeEngine.spoil(rows)
            seen = observation.observer()
            assert seen is not None
            seen.see("layers.0", *rows, torch.tensor([3, 4, 5, -1, -1]))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setenv("MJOLNIR_KV_OBSERVE", "turned")
    observation.observer.cache_clear()
    vllm = SimpleNamespace(LLM=FakeEngine, SamplingParams=lambda **_: None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    FakeEngine.asked, FakeEngine.fails_at, FakeEngine.spoil = [], None, lambda rows: rows[:, 3:].fill_(1e9)
    yield FakeEngine
    observation.observer.cache_clear()


def request(folder: Path, **changes: Any) -> Request:
    return Request(**{"model": "org/Tiny", "out": str(folder / "out.json"), "folder": str(folder / "parts")} | changes)


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(tmp_path: Path, engine: type[FakeEngine]) -> None:
    whole = calibration.run(request(tmp_path / "whole", prompts=PROMPTS)).read_text()
    engine.asked, engine.fails_at = [], PROMPTS[2 * BATCH + 1]
    with pytest.raises(KeyboardInterrupt):
        calibration.run(request(tmp_path, prompts=PROMPTS))
    assert not (tmp_path / "out.json").exists()
    assert engine.asked == PROMPTS[: 2 * BATCH]
    engine.asked, engine.fails_at = [], None
    observation.observer.cache_clear()  # another process
    assert calibration.run(request(tmp_path, prompts=PROMPTS)).read_text() == whole
    assert engine.asked == PROMPTS[2 * BATCH :]
    assert scales.load(tmp_path / "out.json").made.tokens == 3 * len(PROMPTS)  # padding and the warm-up don't count


def test_a_batch_that_can_not_be_read_is_made_anew(tmp_path: Path, engine: type[FakeEngine]) -> None:
    whole = calibration.run(request(tmp_path, prompts=PROMPTS)).read_text()
    torn = tmp_path / "parts" / "batch-0001" / "rank-0.npz"
    torn.write_bytes(torn.read_bytes()[:-100])
    engine.asked = []
    assert calibration.run(request(tmp_path, prompts=PROMPTS)).read_text() == whole
    assert engine.asked == PROMPTS[BATCH : 2 * BATCH]


@pytest.mark.parametrize("turn", [True, False])
def test_scales_cover_every_row_that_was_seen(
    tmp_path: Path, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, turn: bool
) -> None:
    """By the definition: the largest code is what the largest (turned) value of a channel becomes."""
    monkeypatch.setenv("MJOLNIR_KV_OBSERVE", "turned" if turn else "plain")
    seen: list[torch.Tensor] = []

    def keep(rows: torch.Tensor) -> None:
        seen.append(rows[:, :3].clone())

    engine.spoil = keep
    file = scales.load(calibration.run(request(tmp_path, prompts=PROMPTS, turn=turn)))
    layer = file.layers["layers.0"]
    key, value = torch.cat(seen[3:], dim=1)  # without the warm-up
    assert layer.k_turned is layer.v_turned is turn
    assert layer.k_fp8 == pytest.approx(float(key.abs().max()) / 448)
    if turn:
        key, value = ((rows @ turning.matrix(SIZE)) for rows in (key, value))
    for rows, found in ((key, layer.k), (value, layer.v)):
        torch.testing.assert_close(torch.tensor(found), rows.abs().amax(0) / 7.5)


def test_a_full_disk_is_one_line_and_loses_no_batch(
    tmp_path: Path, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ScalesError) as caught:
        calibration.run(request(tmp_path, prompts=PROMPTS))
    batch = tmp_path / "parts" / "batch-0001"
    assert str(caught.value) == (
        f"calibration: {batch}: can't be written: No space left on device; what was kept before is whole"
    )
    assert sorted(path.name for path in (tmp_path / "parts").rglob("*")) == ["batch-0000", "rank-0.npz"]


@pytest.mark.parametrize(("value", "count"), [(torch.nan, 24), (-torch.inf, 24)])
def test_nan_activations_are_one_line_and_write_nothing(
    tmp_path: Path, engine: type[FakeEngine], value: float, count: int
) -> None:
    engine.spoil = lambda rows: rows[1, 0, 0, 0].fill_(value)
    with pytest.raises(ScalesError, match=f"V of layers.0 has {count} values that are NaN or infinite in 72 tokens"):
        calibration.run(request(tmp_path, prompts=PROMPTS))
    assert not (tmp_path / "out.json").exists()


def test_what_fails_is_told_in_a_line(
    tmp_path: Path, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.spoil = lambda rows: rows[0, :, 1].zero_()
    given = {"model": "org/Tiny", "out": str(tmp_path / "x"), "folder": str(tmp_path / "parts"), "prompts": PROMPTS}
    monkeypatch.setattr("sys.argv", ["calibration", json.dumps(given)])
    assert calibration.main() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last.removeprefix(MARK))["error"].startswith("calibration: K of layers.0 has 32 channels that we")


def test_the_engine_that_is_watched_rounds_nothing(tmp_path: Path, engine: type[FakeEngine]) -> None:
    calibration.run(request(tmp_path, prompts=PROMPTS[:BATCH], tensor_parallel_size=2))
    assert engine.options["kv_cache_dtype"] == "auto"
    assert engine.options["tensor_parallel_size"] == 2
    assert not engine.options["enable_prefix_caching"]
