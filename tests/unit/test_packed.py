"""fp6_e2m3 through builder and impl over the reference fallback: written packed, read by T5 packed, else expanded."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVQuantMode

from mjolnir import packed, scales, scratch, turning
from mjolnir.backend import backend_class
from mjolnir.errors import ConfigurationError, ScalesError
from mjolnir.metadata import MjolnirMetadata
from mjolnir.packed import ExpandedMetadata
from mjolnir.reference import e2m3
from mjolnir.reference.attention import paged_attention
from mjolnir.reference.backend import TorchReferenceBackend
from tests.unit.builder_fakes import Layer, cam, make_config, make_spec

pytestmark = pytest.mark.usefixtures("stats_dir")

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 64, 16
ROW = e2m3.row_bytes(SIZE)
Backend = backend_class(TorchReferenceBackend)
NAMES = ("model.layers.0.attn", "model.layers.1.attn")


@pytest.fixture(autouse=True)
def fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_buffers", {})
    monkeypatch.setattr(packed, "_tensor_parallel", lambda: (0, 1))


class PackedLayer(nn.Module, Layer):
    """An attention layer as vLLM makes it: an impl, vLLM's own scales, buffers of ours."""

    def __init__(self, target: str | None = None) -> None:
        nn.Module.__init__(self)
        impl = Backend.get_impl_cls()(HEADS, SIZE, 0.125, KV_HEADS, None, None, "fp6_e2m3")
        self.impl = impl
        self.num_heads, self.num_kv_heads, self.head_size = HEADS, KV_HEADS, SIZE
        self.attn_type, self.kv_cache_dtype = "decoder", "fp6_e2m3"
        self.kv_sharing_target_layer_name = target
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.register_buffer("_v_scale", torch.tensor(1.0))


def config_of(layers):
    config = make_config(layers, cache_dtype="fp6_e2m3", speculative=3)
    hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        rswa_window=None,
        max_model_len=256,
        model="org/Tiny",
        hf_config=hf_config,
        get_total_num_kv_heads=lambda: KV_HEADS,
        get_head_size=lambda: SIZE,
    )
    return config


def scale_rows(first: float) -> list[list[float]]:
    return [[first + head / 10 + channel / 400 for channel in range(SIZE)] for head in range(KV_HEADS)]


@pytest.fixture(params=["plain", "turned", "turned v"])
def scale_file(tmp_path, monkeypatch, request):
    shape = scales.ModelShape(name="Tiny", architecture="LlamaForCausalLM", num_kv_heads=KV_HEADS, head_size=SIZE)
    made = scales.Origin(method="max", tokens=10, version="0.1.0")
    turned_k, turned_v = request.param == "turned", request.param != "plain"
    factor = SIZE**0.5  # turned rows are longer
    layers = {
        name: scales.LayerScales(
            k=scale_rows((factor if turned_k else 1) * (0.4 + number)),
            v=scale_rows((factor if turned_v else 1) * (0.3 + number)),
            k_turned=turned_k,
            v_turned=turned_v,
            k_fp8=1.0,
            v_fp8=1.0,
        )
        for number, name in enumerate(NAMES)
    }
    path = tmp_path / "scales.json"
    scales.write(path, scales.ScaleFile(model=shape, made=made, layers=layers))
    monkeypatch.setenv("MJOLNIR_KV_SCALES", str(path))
    return path


def spec(**changes):
    return Backend.customize_spec(make_spec(kv_quant_mode=KVQuantMode.FP6_E2M3, **changes))


def make_builder(config):
    names = list(config.compilation_config.static_forward_context)
    return Backend.get_builder_cls()(spec(), names, config, torch.device("cpu"))


class Engine:
    """One layer, its builder, and a cache with three sequences in it."""

    lengths = (20, 7, 40)

    def __init__(self) -> None:
        self.layer = PackedLayer()
        self.config = config_of({NAMES[0]: self.layer})
        packed.prepare_layer(self.layer.impl, self.config, torch.bfloat16)
        self.builder = make_builder(self.config)
        generator = torch.Generator().manual_seed(0)
        # The first two pages of the last sequence are those of the first; unused memory is all ones.
        self.table = torch.tensor([[3, 1, -1, -1], [4, -1, -1, -1], [3, 1, 6, -1]], dtype=torch.int32)
        self.cache = torch.full((8, KV_HEADS, PAGE, 2 * ROW), 0xFF, dtype=torch.uint8)
        slots = [int(self.table[2, token // PAGE]) * PAGE + token % PAGE for token in range(40)]
        slots += [4 * PAGE + token for token in range(7)]
        rows = torch.randn((2, len(slots), KV_HEADS, SIZE), generator=generator).to(torch.bfloat16)
        self.slots, self.rows = slots, rows
        self.layer.impl.do_kv_cache_update(self.layer, *rows, self.cache, torch.tensor(slots))
        self.query = torch.randn((64, HEADS, SIZE), generator=generator).to(torch.bfloat16)

    def metadata(self, query_lens, **changes):
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        values = {"seq_lens": lengths, "seq_lens_cpu_upper_bound": lengths, "block_table_tensor": self.table}
        return self.builder.build(0, cam(query_lens, **values | changes))

    def forward(self, metadata, tokens):
        output = torch.full((tokens, HEADS, SIZE), 777.0, dtype=torch.bfloat16)
        self.layer.impl.forward(self.layer, self.query[:tokens], None, None, self.cache, metadata, output)
        return output.double()

    def oracle(self, query_lens):
        k, v = self.cache.transpose(1, 2).split(ROW, dim=-1)
        values = [e2m3.decode(e2m3.unpack(part.contiguous())) for part in (k, v)]
        keys, values = (part * scale for part, scale in zip(values, packed.read_scales(self.layer), strict=True))
        turns = self.layer.mjolnir_k_turn, self.layer.mjolnir_v_turn
        keys, values = (
            part if turn is None else part @ turn.float() for part, turn in zip((keys, values), turns, strict=True)
        )
        lengths = torch.tensor(self.lengths)
        tokens = sum(query_lens)
        arguments = (self.query[:tokens], keys, values, self.table.clamp(min=0), lengths, list(query_lens))
        return paged_attention(*arguments, softmax_scale=0.125)[0]


@pytest.fixture
def engine(scale_file):
    return Engine()


def test_the_cache_holds_the_rows(engine, scale_file):
    """Turned back, they have the error of the format."""
    layer = scales.load(scale_file).layers[NAMES[0]]
    k, v = engine.cache.transpose(1, 2).split(ROW, dim=-1)
    slots = torch.tensor(engine.slots)
    parts = zip((k, v), packed.read_scales(engine.layer), engine.rows, (layer.k_turned, layer.v_turned), strict=True)
    for cells, scale, rows, turned in parts:
        held = e2m3.decode(e2m3.unpack(cells[slots // PAGE, slots % PAGE].contiguous())) * scale
        held = held @ turning.matrix(SIZE) if turned else held
        error = (held - rows.float()).square().sum() / rows.float().square().sum()
        assert 0.02 < float(error.sqrt()) < 0.06


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (4, 4, 4)])
def test_t5_reads_packed_pages(engine, query_lens):
    metadata = engine.metadata(query_lens)
    assert isinstance(metadata, MjolnirMetadata)
    assert metadata.runner.config.kv_format == "e2m3"
    error = engine.forward(metadata, sum(query_lens)) - engine.oracle(query_lens)
    assert (
        float(error.abs().max()) < 0.012
    )  # the rounding of an output of 2 to bf16 is 0.004, and turned ones are rounded twice


def test_a_fallback_step_expands_each_page_once(engine, monkeypatch):
    query_lens = (9, 1, 17)
    metadata = engine.metadata(query_lens)
    assert isinstance(metadata, ExpandedMetadata)
    (run,) = metadata.runs
    assert run.pages.sources.tolist() == [1, 3, 4, 6, -1, -1]
    assert run.metadata.block_table.tolist() == [[1, 0, 0, 0], [2, 0, 0, 0], [1, 0, 3, 0]]
    assert metadata.block_table is engine.table
    error = engine.forward(metadata, sum(query_lens)) - engine.oracle(query_lens)
    assert float(error.abs().max()) < 0.03  # keys, values and probabilities in bf16


def test_a_step_that_does_not_fit_the_scratch_is_cut(engine, monkeypatch):
    query_lens = (9, 1, 17)
    whole = engine.forward(engine.metadata(query_lens), sum(query_lens))
    monkeypatch.setattr(scratch, "tokens_for", lambda _: 3 * PAGE)
    metadata = engine.metadata(query_lens)
    assert [(run.tokens.start, run.tokens.stop) for run in metadata.runs] == [(0, 10), (10, 27)]
    assert [run.pages.sources.tolist() for run in metadata.runs] == [[1, 3, 4], [1, 3, 6]]
    assert metadata.runs[1].metadata.query_start_loc.tolist() == [0, 17]
    assert torch.equal(engine.forward(metadata, sum(query_lens)), whole)


def test_lengths_come_from_the_device_where_the_host_has_none(engine):
    metadata = engine.metadata((9, 1, 17), seq_lens_cpu_upper_bound=None)
    assert metadata.runs[0].pages.sources.tolist() == [1, 3, 4, 6, -1, -1]


def test_profiling_comes_through(engine):
    output = engine.forward(None, 5)
    assert not output.any()


def test_the_fallback_is_told_of_a_plain_cache(engine):
    seen = engine.builder.kv_cache_spec
    assert (seen.dtype, seen.kv_quant_mode, seen.state_content_bytes) == (torch.bfloat16, KVQuantMode.NONE, None)
    assert engine.layer.impl.kv_cache_dtype == "auto"
    assert engine.layer.impl.packed


def buffers(engine):
    return {name: buffer for name, buffer in engine.layer.named_buffers() if name.startswith("mjolnir_")}


def test_scales_survive_a_reload_and_keep_their_memory(engine, scale_file):
    """vLLM sets its own scales to 1 after a reload, and a sleep of level 2 loses what is not written again."""
    before = {name: buffer.clone() for name, buffer in buffers(engine).items()}
    addresses = [buffer.data_ptr() for buffer in buffers(engine).values()]
    layer = scales.load(scale_file).layers[NAMES[0]]
    assert before["mjolnir_k_scale"].tolist() == torch.tensor(layer.k).tolist()
    assert len(before) == 2 + 2 * (
        layer.k_turned + layer.v_turned
    )  # one of a kind where both ways have the same scales
    for buffer in buffers(engine).values():
        buffer.fill_(float("nan"))
    packed.prepare_layer(engine.layer.impl, engine.config, torch.bfloat16)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers(engine).items())
    assert [buffer.data_ptr() for buffer in buffers(engine).values()] == addresses
    assert not any(name.startswith("mjolnir_") for name in engine.layer.state_dict())  # no checkpoint has them


def test_a_sharing_layer_has_its_targets_scales(scale_file):
    layers = {NAMES[1]: PackedLayer(), "model.layers.9.attn": PackedLayer(target=NAMES[1])}
    config = config_of(layers)
    for layer in layers.values():
        packed.prepare_layer(layer.impl, config, torch.bfloat16)
    owner, sharer = layers.values()
    assert torch.equal(packed.write_scales(sharer)[0], packed.write_scales(owner)[0])
    expected = scales.load(scale_file).layers[NAMES[1]].v[0][0]
    assert float(packed.write_scales(sharer)[1][0, 0]) == pytest.approx(expected)


def test_missing_scales_are_one_line(monkeypatch):
    layer = PackedLayer()
    with pytest.raises(ConfigurationError, match="MJOLNIR_KV_SCALES is not set"):
        packed.prepare_layer(layer.impl, config_of({NAMES[0]: layer}), torch.bfloat16)


def test_a_layer_without_scales_is_named(scale_file):
    layers = {NAMES[0]: PackedLayer(), "model.layers.7.attn": PackedLayer()}
    with pytest.raises(ScalesError, match=r"no scales for 1 of this engine's layers, the first model\.layers\.7\.attn"):
        packed.prepare_layer(layers[NAMES[0]].impl, config_of(layers), torch.bfloat16)


def test_another_model_is_refused(scale_file):
    layer = PackedLayer()
    config = config_of({NAMES[0]: layer})
    config.model_config.model = "org/Tiny-Finetuned"
    with pytest.raises(ScalesError, match="made for a model with name 'Tiny'; accepted: 'Tiny-Finetuned'"):
        packed.prepare_layer(layer.impl, config, torch.bfloat16)


@pytest.mark.parametrize("way", ["decode", "prefill"])
def test_context_parallel_is_refused(scale_file, way):
    layer = PackedLayer()
    config = config_of({NAMES[0]: layer})
    setattr(config.parallel_config, f"{way}_context_parallel_size", 2)
    with pytest.raises(ConfigurationError, match=f"fp6_e2m3: {way} context parallel size is 2; accepted: 1"):
        packed.prepare_layer(layer.impl, config, torch.bfloat16)


def test_it_is_not_calibrated_on(monkeypatch):
    """What would be observed has been rounded by the format already."""
    monkeypatch.setattr("mjolnir.impl.observer", object)
    with pytest.raises(ConfigurationError, match="fp6_e2m3: can't be calibrated on; accepted: auto"):
        PackedLayer()


def test_a_group_that_t5_can_not_run_is_never_captured(engine, monkeypatch):
    """Its steps are expanded, which depends on the host's lengths; T5's own are captured as with fp8."""
    assert Backend.get_builder_cls().get_cudagraph_support(engine.config, spec()) is AttentionCGSupport.UNIFORM_BATCH
    monkeypatch.setenv("MJOLNIR_ATTN_DISABLE", "1")
    builder = make_builder(engine.config)
    assert builder.get_cudagraph_support(engine.config, spec()) is AttentionCGSupport.NEVER
    assert not builder.supports_draft_decode_metadata_update
    engine.builder = builder
    metadata = engine.metadata((1, 1, 1))
    assert isinstance(metadata, ExpandedMetadata)
    assert float((engine.forward(metadata, 3) - engine.oracle((1, 1, 1))).abs().max()) < 0.03
    with pytest.raises(RuntimeError, match="can't be captured"):
        builder.build_for_cudagraph_capture(cam([1, 1, 1]))


def test_backend_takes_the_format_with_t5s_head_sizes_only():
    assert Backend.supports_kv_cache_dtype("fp6_e2m3")
    assert not Backend.supports_kv_cache_dtype("nvfp4")
    rest = (None, False, False, False, False, None)
    assert Backend.supports_combination(64, torch.bfloat16, "fp6_e2m3", *rest[:5], rest[5]) is None
    reason = Backend.supports_combination(80, torch.bfloat16, "fp6_e2m3", *rest[:5], rest[5])
    assert reason == "fp6_e2m3 with head size 80 (accepted: 64, 128, 256)"
    assert spec(head_size=128).state_content_bytes == 192
    assert Backend.customize_spec(make_spec()).state_content_bytes is None
