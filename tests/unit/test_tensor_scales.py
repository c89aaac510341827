"""Per-tensor scales of a scale file on an fp8 cache: in place before any step, also after weights were loaded anew."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mjolnir import scales, tensor_scales
from mjolnir.backend import backend_class
from mjolnir.errors import ScalesError
from mjolnir.reference import e4m3
from mjolnir.reference.backend import TorchReferenceBackend
from tests.unit.builder_fakes import Layer, cam, make_config, make_spec

pytestmark = pytest.mark.usefixtures("stats_dir")

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 64, 16
NAME, OTHER = "model.layers.0.attn", "model.layers.1.attn"
K_SCALE, V_SCALE = 0.03125, 0.5  # of layer 0; layer 1 has twice these
Backend = backend_class(TorchReferenceBackend)


class Fp8Layer(nn.Module, Layer):
    """An attention layer as vLLM makes it for an fp8 cache."""

    def __init__(self, kv_cache_dtype: str = "fp8", target: str | None = None) -> None:
        nn.Module.__init__(self)
        self.impl = Backend.get_impl_cls()(HEADS, SIZE, 0.125, KV_HEADS, None, None, kv_cache_dtype)
        self.num_heads, self.num_kv_heads, self.head_size = HEADS, KV_HEADS, SIZE
        self.attn_type, self.kv_cache_dtype = "decoder", kv_cache_dtype
        self.kv_sharing_target_layer_name = target
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.register_buffer("_v_scale", torch.tensor(1.0))
        self._k_scale_cpu, self._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)
        self._k_scale_float = self._v_scale_float = 1.0

    def load_weights(self) -> None:
        """What vLLM does of it, in its order: the impl first, then the scales that no checkpoint had."""
        self.impl.process_weights_after_loading(torch.bfloat16)
        self._k_scale.fill_(1.0)
        self._v_scale.fill_(1.0)
        self._k_scale_float = self._v_scale_float = 1.0

    @property
    def scales(self) -> tuple[float, ...]:
        on_host = self._k_scale_float, self._v_scale_float, float(self._k_scale_cpu), float(self._v_scale_cpu)
        return float(self._k_scale), float(self._v_scale), *on_host


@pytest.fixture
def scale_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shape = scales.ModelShape(name="Tiny", architecture="LlamaForCausalLM", num_kv_heads=KV_HEADS, head_size=SIZE)
    rows = [[1.0] * SIZE] * KV_HEADS
    layers = {
        name: scales.LayerScales(k=rows, v=rows, k_fp8=factor * K_SCALE, v_fp8=factor * V_SCALE)
        for name, factor in ((NAME, 1), (OTHER, 2))
    }
    made = scales.Origin(method="max", tokens=10, version="0.1.0")
    path = tmp_path / "scales.json"
    scales.write(path, scales.ScaleFile(model=shape, made=made, layers=layers))
    monkeypatch.setenv("MJOLNIR_KV_SCALES", str(path))
    return path


def config_of(layers, name="org/Tiny"):
    config = make_config(layers)
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        rswa_window=None,
        model=name,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        get_total_num_kv_heads=lambda: KV_HEADS,
        get_head_size=lambda: SIZE,
    )
    return config


def make_builder(config):
    names = list(config.compilation_config.static_forward_context)
    return Backend.get_builder_cls()(make_spec(), names, config, torch.device("cpu"))


def test_the_cache_is_written_with_the_files_scales(scale_file: Path) -> None:
    layer = Fp8Layer()
    layer.load_weights()
    make_builder(config_of({NAME: layer}))
    assert layer.scales == (K_SCALE, V_SCALE) * 3
    key, value = torch.randn((2, 3, KV_HEADS, SIZE), generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = torch.zeros(2, KV_HEADS, PAGE, 2 * SIZE, dtype=torch.uint8)
    layer.impl.do_kv_cache_update(layer, key, value, cache, torch.tensor([5, 6, 7]))
    written = cache[0, :, 5:8].transpose(0, 1)
    expected = [e4m3.quantise(rows.float() / scale) for rows, scale in ((key, K_SCALE), (value, V_SCALE))]
    assert torch.equal(written, torch.cat(expected, dim=-1))


def test_scales_come_back_before_the_next_step_of_reloaded_weights(scale_file: Path) -> None:
    layer = Fp8Layer()
    builder = make_builder(config_of({NAME: layer}))
    address = layer._k_scale.data_ptr()
    layer.load_weights()
    assert layer.scales[0] == 1.0
    builder.build(0, cam([1, 1]))
    assert layer.scales == (K_SCALE, V_SCALE) * 3
    assert layer._k_scale.data_ptr() == address


def test_a_step_without_a_load_writes_nothing(scale_file: Path) -> None:
    layer = Fp8Layer()
    builder = make_builder(config_of({NAME: layer}))
    layer._k_scale.fill_(7.0)
    builder.build(0, cam([1, 1]))
    assert layer.scales[0] == 7.0


def test_layers_have_their_own_scales_and_a_sharing_one_its_targets(scale_file: Path) -> None:
    layers = {NAME: Fp8Layer(), OTHER: Fp8Layer(), "model.layers.9.attn": Fp8Layer(target=OTHER)}
    make_builder(config_of(layers))
    assert [layer.scales[0] for layer in layers.values()] == [K_SCALE, 2 * K_SCALE, 2 * K_SCALE]


def test_layers_that_skip_the_format_are_left_alone(scale_file: Path) -> None:
    layers = {NAME: Fp8Layer(), "model.layers.7.attn": Fp8Layer("auto")}
    make_builder(config_of(layers))
    assert [layer.scales[0] for layer in layers.values()] == [K_SCALE, 1.0]


def test_without_a_file_they_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MJOLNIR_KV_SCALES", raising=False)
    layer = Fp8Layer()
    layer._k_scale.fill_(0.25)  # a checkpoint's
    config = config_of({NAME: layer})
    make_builder(config).build(0, cam([1, 1]))
    assert layer.scales[0] == 0.25
    assert tensor_scales.of_group(config, None) is None


@pytest.mark.parametrize(
    ("layers", "name", "message"),
    [
        ((NAME,), "org/Other", "made for a model with name 'Tiny'; accepted: 'Other'"),
        ((NAME, "draft.0"), "org/Tiny", r"no scales for 1 of this engine's layers, the first draft\.0"),
    ],
)
def test_a_file_for_something_else_stops_the_start(scale_file: Path, layers, name: str, message: str) -> None:
    with pytest.raises(ScalesError, match=message):
        make_builder(config_of({layer: Fp8Layer() for layer in layers}, name))
