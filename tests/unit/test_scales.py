"""Scale files: what is written is read, what can't be used is refused in one line, ranks get their rows."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from mjolnir import scales
from mjolnir.calibration import join_ranks, merge, ranges, scale_file, spread
from mjolnir.errors import ScalesError
from mjolnir.scales import LayerScales, ModelShape, Origin, ScaleFile

HEADS, SIZE = 4, 8
SHAPE = ModelShape(name="Tiny", architecture="LlamaForCausalLM", num_kv_heads=HEADS, head_size=SIZE)


def make(layers=("layers.0", "layers.1"), **changes) -> ScaleFile:
    rows = [[0.5 + head + channel / 100 for channel in range(SIZE)] for head in range(HEADS)]
    layer = LayerScales(k=rows, v=[[2 * scale for scale in row] for row in rows], k_fp8=0.25, v_fp8=0.5)
    made = Origin(method="max", tokens=100, version="0.1.0")
    return ScaleFile(**{"model": SHAPE, "made": made, "layers": dict.fromkeys(layers, layer)} | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "scales" / "Tiny.json"
    scales.write(target, make())
    return target


def test_what_is_written_is_read(path: Path) -> None:
    assert scales.load(path) == make()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in path.parent.iterdir()] == ["Tiny.json"]


def test_a_changed_file_is_read_again(path: Path) -> None:
    scales.load(path)
    scales.write(path, make(layers=("layers.7",)))
    assert list(scales.load(path).layers) == ["layers.7"]


def edited(path: Path, edit) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def drop_row(document) -> None:
    del document["layers"]["layers.1"]["v"][0]


def drop_channel(document) -> None:
    del document["layers"]["layers.0"]["k"][2][5]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop_row,
            r"layers\.layers\.1\.v has 3 rows of \[8\] numbers; accepted: 4 rows \(KV heads\) of 8 \(channels\)",
        ),
        (drop_channel, r"layers\.layers\.0\.k has 4 rows of \[7, 8\] numbers; accepted: 4 rows"),
        (lambda d: d.update(format="mjolnir.kv_scales/9"), "format is 'mjolnir.kv_scales/9'; accepted: 'mjolnir.kv_sc"),
        (lambda d: d.pop("layers"), "layers: Field required"),
        (lambda d: d.update(extra=1), "extra=1: Extra inputs are not permitted"),
        (lambda d: d["layers"]["layers.0"]["k"][1].__setitem__(3, -0.5), r"k\.1\.3=-0\.5: should be greater than 0"),
        (lambda d: d["layers"]["layers.0"]["k"][1].__setitem__(3, 0), r"k\.1\.3=0: should be greater than 0"),
        (lambda d: d["layers"]["layers.0"].update(k_fp8=float("nan")), "NaN is no number"),
        (lambda d: d["layers"]["layers.0"].update(k_turned="x"), "k_turned='x': should be a valid boolean"),
        (lambda d: d["layers"]["layers.0"].update(k_fp8=float("inf")), "Infinity is no number"),
        (lambda d: d.update(layers={}), "layers: Dictionary should have at least 1 item"),
    ],
)
def test_what_can_not_be_used_is_one_line(path: Path, edit, message: str) -> None:
    edited(path, edit)
    with pytest.raises(ScalesError, match=message) as caught:
        scales.load(path)
    assert str(caught.value).startswith(f"scale file {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not whole JSON"),
        (b'{"format": "mjolnir.kv_scales/4", "model": {"na', "not whole JSON"),
        (b"\x80\x81", "not whole JSON"),
        (b'["a", "list"]', "its format is None; accepted: 'mjolnir.kv_scales/4'"),
        (b'{"model_type": "llama"}', "its format is None; accepted: 'mjolnir.kv_scales/4'"),
    ],
)
def test_truncated_and_foreign_files(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ScalesError, match=message):
        scales.load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match="No such file or directory; accepted: what `mjolnir calibrate` wrote"):
        scales.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("field", "value"), [("name", "Other"), ("architecture", "Qwen3"), ("num_kv_heads", 2), ("head_size", 16)]
)
def test_another_model_is_refused(field: str, value: object) -> None:
    served = SHAPE.model_copy(update={field: value})
    with pytest.raises(ScalesError, match=f"made for a model with {field} .*; accepted: {value!r}, of the model"):
        scales.check_model("x.json", make(), served)
    scales.check_model("x.json", make(), SHAPE)


def test_missing_layers_are_named() -> None:
    scales.check_layers("x.json", make(), ["layers.1"])  # one pipeline rank has a part of the layers
    with pytest.raises(ScalesError, match=r"no scales for 2 of this engine's layers, the first draft\.0"):
        scales.check_layers("x.json", make(), ["layers.0", "draft.0", "layers.9"])


@pytest.mark.parametrize(
    ("world", "local", "heads_by_rank"),
    [(1, 4, [[0, 1, 2, 3]]), (2, 2, [[0, 1], [2, 3]]), (4, 1, [[0], [1], [2], [3]]), (8, 1, [[0], [0], [1], [1]])],
)
def test_ranks_get_their_heads(world: int, local: int, heads_by_rank: list[list[int]]) -> None:
    """Eight ranks of four heads: two in a row hold the same head, as vLLM deals them out."""
    whole = make().layers["layers.0"]
    for rank, heads in enumerate(heads_by_rank):
        mine = whole.shard(local, rank, world)
        assert mine.k == [whole.k[head] for head in heads]
        assert mine.v == [whole.v[head] for head in heads]


def test_a_failed_write_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ScalesError, match="can't be written: No space left on device"):
        scales.write(path, make(layers=("layers.7",)))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["Tiny.json"]


def test_shape_of_a_config() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_attention_heads": 9}
    assert scales.shape_of_config("a", config).num_kv_heads == 9
    shape = scales.shape_of_config("a", {**config, "num_key_value_heads": 3, "head_dim": None})
    assert (shape.num_kv_heads, shape.head_size) == (3, 64)
    assert scales.shape_of_config("a", {"text_config": {**config, "head_dim": 128}}).head_size == 128


def observed(*, heads=2, layer="layers.0", tokens=10, odd=0, top=4.0) -> dict:
    """Channels whose largest value is ``top`` and all of whose other values are in the bin of 0.5."""
    arrays = {}
    for part in "kv":
        histogram = np.zeros((heads, SIZE, 128), dtype=np.int32)
        histogram[..., 60] = tokens - 1  # [2^-1, 2^-0.75)
        histogram[..., 72] = 1  # [2^2, 2^2.25)
        arrays[f"{layer}|{part}|largest"] = np.full((heads, SIZE), top, dtype=np.float32)
        arrays[f"{layer}|{part}|histogram"] = histogram
        arrays[f"{layer}|{part}|peak"] = np.full((heads, SIZE), top / 2, dtype=np.float32)
        arrays[f"{layer}|{part}|counts"] = np.array([tokens, odd])
    return arrays


def test_scales_from_the_maximum_and_from_a_percentile() -> None:
    arrays = join_ranks([observed(tokens=1000)] * 2, HEADS)
    most = scale_file(arrays, SHAPE, "max", 100.0, False)
    assert most.layers["layers.0"].k == [[4.0 / 7.5] * SIZE] * HEADS
    assert most.layers["layers.0"].k_fp8 == 2.0 / 448  # of rows as they come
    assert not most.layers["layers.0"].k_turned
    assert (most.made.method, most.made.tokens, most.made.percentile) == ("max", 1000, None)
    clipped = scale_file(arrays, SHAPE, "percentile", 99.9, True)
    assert clipped.layers["layers.0"].v_turned
    assert clipped.layers["layers.0"].v == [[2**-0.75 / 7.5] * SIZE] * HEADS
    assert np.array_equal(ranges(arrays, "layers.0|k", 99.95), np.full((HEADS, SIZE), 4.0))


def test_a_layer_with_channels_far_larger_than_the_others_is_not_turned() -> None:
    arrays = observed(heads=HEADS)
    arrays["layers.0|k|peak"][1, 3] = 100.0  # of channels of 2.0: a turn would make 35 of them
    layer = scale_file(arrays, SHAPE, "max", 100.0, True).layers["layers.0"]
    assert (layer.k_turned, layer.v_turned) == (False, True)
    assert layer.k[1][:5] == [2.0 / 7.5, 2.0 / 7.5, 2.0 / 7.5, 100.0 / 7.5, 2.0 / 7.5]
    assert layer.v == [[4.0 / 7.5] * SIZE] * HEADS
    assert layer.k_fp8 == 100.0 / 448
    assert spread(arrays["layers.0|k|peak"]) == pytest.approx(((100**2 + 7 * 2**2) / 8) ** 0.5 / 2)


def test_a_dead_channel_is_refused_where_rows_are_not_turned() -> None:
    arrays = observed(heads=HEADS)
    arrays["layers.0|k|peak"][2, :5] = 0.0
    with pytest.raises(ScalesError, match=r"K of layers\.0 has 5 channels that were always zero in 10 tokens"):
        scale_file(arrays, SHAPE, "max", 100.0, True)


def test_batches_are_merged_and_copies_of_heads_are_not() -> None:
    merged = merge([observed(top=2.0), observed(top=4.0)])
    assert merged["layers.0|k|largest"].max() == 4.0
    assert merged["layers.0|k|counts"].tolist() == [20, 0]
    assert merged["layers.0|k|peak"].tolist() == [[2.0] * SIZE] * 2
    assert merged["layers.0|k|histogram"][0, 0, 60] == 18
    ranks = [observed(heads=1, top=float(number)) for number in (1, 1, 2, 2)]
    assert join_ranks(ranks, 2)["layers.0|k|largest"][:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (observed(heads=HEADS, odd=3), "K of layers.0 has 3 values that are NaN or infinite in 10 tokens; nothing was"),
        (observed(heads=HEADS, top=0.0), "K of layers.0 has 32 channels that were always zero in 10 tokens"),
        ({}, "no layer was observed"),
    ],
)
def test_calibration_refuses(arrays: dict, message: str) -> None:
    with pytest.raises(ScalesError, match=message):
        scale_file(arrays, SHAPE, "max", 100.0, False)
