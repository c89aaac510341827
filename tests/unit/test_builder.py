"""The metadata builder over the reference backend: one decision a step, counted once, promised truthfully."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from mjolnir import banner, selftest, telemetry
from mjolnir.backend import backend_class
from mjolnir.builder import BuilderMixin, attention_layers, group_label
from mjolnir.counters import GroupInfo, read
from mjolnir.errors import ConfigurationError
from mjolnir.metadata import MjolnirMetadata
from mjolnir.reference.backend import TorchReferenceBackend, TorchReferenceMetadata

pytestmark = pytest.mark.usefixtures("stats_dir")

Builder = backend_class(TorchReferenceBackend).get_builder_cls()
ALWAYS, UNIFORM_BATCH = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH
SINGLE_TOKEN, NEVER = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.NEVER


@pytest.fixture(autouse=True)
def banner_was_shown(monkeypatch):
    monkeypatch.setattr(banner, "_shown", [True])


class Layer(AttentionLayerBase):
    """An attention layer as the builder looks at it."""

    def __init__(self, **impl) -> None:
        self.impl = SimpleNamespace(**impl)
        self.num_heads = 4
        self.attn_type = "decoder"
        self.kv_cache_dtype = "fp8"

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


def make_spec(**changes) -> FullAttentionSpec:
    values = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.uint8,
        "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
    }
    return FullAttentionSpec(**values | changes)


def make_config(layers=None, *, speculative=0, parallel_drafting=False, **cache):
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, rswa_window=None),
        cache_config=SimpleNamespace(**{"cache_dtype": "fp8"} | cache),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=parallel_drafting)
        if speculative
        else None,
        compilation_config=SimpleNamespace(static_forward_context={"layers.0": Layer()} if layers is None else layers),
    )


def make(layers=None, spec=None, cls=Builder, **config):
    config = make_config(layers, **config)
    names = list(config.compilation_config.static_forward_context)
    return cls(spec or make_spec(), names, config, torch.device("cpu"))


def cam(query_lens, *, prefilling=None, max_query_len=None, **changes) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    values = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor([20 + length if length else 0 for length in query_lens], dtype=torch.int32),
        "num_reqs": len(query_lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(query_lens) if max_query_len is None else max_query_len,
        "max_seq_len": 64,
        "block_table_tensor": torch.arange(len(query_lens) * 4, dtype=torch.int32).view(len(query_lens), 4),
        "slot_mapping": torch.arange(int(starts[-1])),
        "is_prefilling": None if prefilling is None else torch.tensor(prefilling),
    }
    return CommonAttentionMetadata(**values | changes)


def counted() -> dict[str, int]:
    counters = read(telemetry.process_counters().path).counters
    return {name: number for name, number in counters.items() if number}


# One decision a step.


@pytest.mark.parametrize(
    ("step", "counts"),
    [
        (lambda: cam([1, 1, 1]), {"t5:decode": 1, "t5_tokens": 3}),
        (lambda: cam([4, 4]), {"t5:verify": 1, "t5_tokens": 8}),
        (lambda: cam([4, 4, 0, 0]), {"t5:verify": 1, "t5_tokens": 8}),
        (lambda: cam([4, 4], causal=False), {"t5:noncausal": 1, "t5_tokens": 8}),
        (lambda: cam([1, 1], mm_req_doc_ranges={0: [(2, 9)]}), {"t5:decode": 1, "t5_tokens": 2}),
        (lambda: cam([9, 7], prefilling=[True, True]), {"fallback:prefill": 1, "fallback_tokens": 16}),
        (lambda: cam([1, 7], prefilling=[False, True]), {"fallback:mixed": 1, "fallback_tokens": 8}),
        (lambda: cam([5, 5]), {"fallback:q_len": 1, "fallback_tokens": 10}),
        (lambda: cam([4, 3]), {"fallback:non_uniform": 1, "fallback_tokens": 7}),
        (lambda: cam([0, 1, 1]), {"fallback:non_uniform": 1, "fallback_tokens": 2}),
        (lambda: cam([1] * 9), {"fallback:batch": 1, "fallback_tokens": 9}),
        (
            lambda: cam([1, 1], dcp_local_seq_lens=torch.ones(2)),
            {"fallback:context_parallel": 1, "fallback_tokens": 2},
        ),
        (lambda: cam([2, 2], mm_req_doc_ranges={0: [(2, 9)]}), {"fallback:causal_tensor": 1, "fallback_tokens": 4}),
        (
            lambda: cam([1, 1], rswa_prefix_lens=torch.ones(2)),
            {"fallback:causal_tensor": 1, "fallback_tokens": 2},
        ),
    ],
)
def test_each_step_is_one_decision_and_counted_once(step, counts):
    metadata = make(speculative=3).build(0, step())
    assert counted() == counts
    assert isinstance(metadata, MjolnirMetadata if "t5_tokens" in counts else TorchReferenceMetadata)


def test_mask_tensor_goes_to_the_fallback(monkeypatch):
    """Which refuses it by itself here; what is counted is the decision."""
    metadata = cam([1, 1], causal=torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="one causal flag a step"):
        make().build(0, metadata)
    assert counted() == {"fallback:causal_tensor": 1, "fallback_tokens": 2}


def test_empty_ranges_of_images_are_none():
    make(speculative=3).build(0, cam([2, 2], mm_req_doc_ranges={}))
    assert counted() == {"t5:verify": 1, "t5_tokens": 4}


def test_prefill_flags_on_a_device_are_not_read():
    """That would be a synchronisation, for the sake of a label."""
    flags = torch.zeros(2, dtype=torch.bool, device="meta")
    make().build(0, cam([9, 7], is_prefilling=flags))
    assert counted() == {"fallback:non_uniform": 1, "fallback_tokens": 16}


def test_padding_behind_the_requests_of_a_longer_buffer_is_not_read():
    step = cam([1, 1])
    step.query_start_loc_cpu = torch.tensor([0, 1, 2, 777, 777], dtype=torch.int32)
    make().build(0, step)
    assert counted() == {"t5:decode": 1, "t5_tokens": 2}


def test_steps_add_up():
    target = make(speculative=3)
    for query_lens in ([1], [1, 1], [4, 4], [9, 2]):
        target.build(0, cam(query_lens))
    assert counted() == {
        "t5:decode": 2,
        "t5:verify": 1,
        "t5_tokens": 11,
        "fallback:non_uniform": 1,
        "fallback_tokens": 11,
    }


@pytest.mark.parametrize(
    ("query_lens", "kind"),
    [
        ([1, 1], MjolnirMetadata),
        ([4, 3], TorchReferenceMetadata),
    ],
)
def test_capture_is_classified_alike_and_not_counted(query_lens, kind):
    target = make(speculative=3)
    assert type(target.build_for_cudagraph_capture(cam(query_lens))) is kind
    assert counted() == {}
    assert type(target.build(0, cam(query_lens))) is kind


def test_fallback_capture_is_the_fallbacks_own():
    """Its capture metadata may differ from that of a step, as the Triton backend's does."""

    class Base(TorchReferenceBackend.get_builder_cls()):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            return "the base's own"

    cls = type("Composed", (BuilderMixin, Base), {"fallback_name": "BASE"})
    assert make(cls=cls).build_for_cudagraph_capture(cam([4, 3])) == "the base's own"


def test_arguments_reach_the_fallback_as_they_came():
    class Base(TorchReferenceBackend.get_builder_cls()):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return common_prefix_len, common_attn_metadata, fast_build

    step = cam([4, 3])
    target = make(cls=type("Composed", (BuilderMixin, Base), {"fallback_name": "BASE"}))
    assert target.build(5, step, fast_build=True) == (5, step, True)


# What a T5 step's metadata holds.


def test_metadata_holds_vllms_own_tensors():
    step = cam([2, 2, 0])
    target = make(speculative=3)
    metadata = target.build(0, step)
    assert metadata.seq_lens.data_ptr() == step.seq_lens.data_ptr()
    assert metadata.block_table.data_ptr() == step.block_table_tensor.data_ptr()
    assert metadata.query_start_loc.data_ptr() == step.query_start_loc.data_ptr()
    assert metadata.slot_mapping.data_ptr() == step.slot_mapping.data_ptr()
    assert metadata.runner is target.runner
    assert (metadata.num_actual_tokens, metadata.num_reqs) == (4, 3)
    assert (metadata.max_query_len, metadata.max_seq_len) == (2, 64)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 4)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("query_lens", "causal", "planned"), [([2], True, True), ([2], False, False), ([1], True, True), ([1], False, True)]
)
def test_causal_flag(monkeypatch, query_lens, causal, planned):
    """The metadata says what the step is. The plan of one token is causal: both masks are the same there."""
    target = make(speculative=3)
    wanted = []
    plan = target.runner.plan

    def recording(*args, **kwargs):
        wanted.append(kwargs)
        return plan(*args, **kwargs)

    monkeypatch.setattr(target.runner, "plan", recording)
    assert target.build(0, cam(query_lens, causal=causal)).causal is causal
    assert wanted == [{"q_len": query_lens[0], "causal": planned}]


def test_plan_covers_the_requests_of_the_step_only(monkeypatch):
    """V1's buffers may be longer than the step."""
    target = make()
    step = cam([1, 1])
    step.seq_lens = torch.tensor([21, 40, 999], dtype=torch.int32)
    step.block_table_tensor = torch.zeros((3, 64), dtype=torch.int32)
    plan = target.build(0, step).plan
    assert plan.num_seqs == 2
    assert sorted({item.seq for item in plan.splits.work}) == [0, 1]


# Refreshing a draft step inside a graph.


def test_draft_update_replans_a_t5_step(monkeypatch):
    target = make()
    metadata = target.build(0, cam([1]))
    plans = []
    monkeypatch.setattr(target.runner, "replan", plans.append)
    target.update_draft_decode_metadata(metadata)
    assert plans == [metadata.plan]


def test_draft_update_of_a_fallback_step_is_the_fallbacks():
    class Base(TorchReferenceBackend.get_builder_cls()):
        def update_draft_decode_metadata(self, metadata):
            self.updated = metadata

    target = make(cls=type("Composed", (BuilderMixin, Base), {"fallback_name": "BASE"}))
    metadata = target.build(0, cam([4, 3]))
    target.update_draft_decode_metadata(metadata)
    assert target.updated is metadata


def test_fused_drafting_can_be_refused_by_one_builder(monkeypatch):
    class Base(TorchReferenceBackend.get_builder_cls()):
        supports_draft_decode_metadata_update = True

    cls = type("Composed", (BuilderMixin, Base), {"fallback_name": "BASE"})
    assert make(cls=cls).supports_draft_decode_metadata_update is True
    monkeypatch.setenv("MJOLNIR_ATTN_FUSED_DRAFT", "0")
    assert make(cls=cls).supports_draft_decode_metadata_update is False
    assert cls.supports_draft_decode_metadata_update is True


def test_metadata_is_not_shared_between_groups():
    assert Builder.supports_update_block_table is False
    assert make().use_cascade_attention(1, 2, something=3) is False


# Drafters. vLLM marks their layers; names say nothing, as EAGLE's layers are named like the target's.


def draft_layer() -> Layer:
    layer = Layer()
    layer.is_draft_layer = True
    return layer


def test_steps_of_a_drafter_are_draft_steps():
    drafter = make({"layers.32": draft_layer()})
    drafter.build(0, cam([1, 1]))
    assert counted() == {"t5:draft": 1, "t5_tokens": 2}


def test_drafter_can_be_kept_on_the_fallback(monkeypatch, backend_log):
    monkeypatch.setenv("MJOLNIR_ATTN_DRAFT_T5", "0")
    drafter = make({"layers.32": draft_layer(), "layers.33": draft_layer()})
    assert drafter.runner is None
    drafter.build(0, cam([1, 1]))
    assert counted() == {"fallback:draft": 1, "fallback_tokens": 2}
    assert [(record.levelname, record.getMessage()) for record in backend_log.records] == [
        (
            "INFO",
            "Mjolnir decode disabled for layers.32 (2 layers): MJOLNIR_ATTN_DRAFT_T5 is off -> TORCH_REF for all steps",
        )
    ]


def test_target_whose_group_holds_draft_layers_stays_on_t5(monkeypatch):
    """vLLM gives the target's builder the draft layers too; the reference then turned T5 off for the target."""
    monkeypatch.setenv("MJOLNIR_ATTN_DRAFT_T5", "0")
    target = make({"layers.31": Layer(), "mtp.draft.0": draft_layer()})
    target.build(0, cam([1, 1]))
    assert counted() == {"t5:decode": 1, "t5_tokens": 2}


def test_names_do_not_make_a_drafter(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_DRAFT_T5", "0")
    make({"draft.mtp.0": Layer()}).build(0, cam([1]))
    assert counted() == {"t5:decode": 1, "t5_tokens": 1}


# Groups that T5 can't run.


def test_group_by_the_rules_of_its_pages(backend_log):
    target = make(spec=make_spec(head_size=96))
    target.build(0, cam([1]))
    assert target.runner is None
    assert counted() == {"fallback:ineligible": 1, "fallback_tokens": 1}
    reason = "head_size 96 is not one of 64, 128, 256"
    assert [(record.levelname, record.getMessage()) for record in backend_log.records] == [
        ("WARNING", f"Mjolnir decode disabled for layers.0: {reason} -> TORCH_REF for all steps")
    ]
    assert read(telemetry.process_counters().path).groups == (
        GroupInfo("layers.0", "fp8", 96, 16, "TORCH_REF", reason),
    )


def test_group_by_the_rules_of_one_of_its_layers():
    make({"layers.0": Layer(), "layers.1": Layer(logits_soft_cap=30.0)}).build(0, cam([1]))
    assert counted() == {"fallback:ineligible": 1, "fallback_tokens": 1}
    (group,) = read(telemetry.process_counters().path).groups
    assert (group.group, group.reason) == ("layers.0 (2 layers)", "layer layers.1: logits soft-cap")


def test_group_of_a_float_cache_over_an_fp8_one():
    """--kv-cache-dtype-skip-layers."""
    make(spec=make_spec(dtype=torch.bfloat16, kv_quant_mode=KVQuantMode.NONE)).build(0, cam([1]))
    assert counted() == {"fallback:ineligible": 1, "fallback_tokens": 1}


def test_disabled_by_its_variable(monkeypatch, backend_log):
    monkeypatch.setenv("MJOLNIR_ATTN_DISABLE", "1")
    make().build(0, cam([1]))
    assert counted() == {"fallback:disabled": 1, "fallback_tokens": 1}
    (record,) = backend_log.records
    assert record.getMessage() == (
        "Mjolnir decode disabled for layers.0: MJOLNIR_ATTN_DISABLE set -> TORCH_REF for all steps"
    )


@pytest.mark.parametrize("known", [{}, {"layers.0": Layer()}], ids=["none", "one of two"])
def test_layers_that_vllm_does_not_know_make_the_group_ineligible(known):
    """vLLM passes over unknown names: the rules of those layers would have been skipped, or nothing left to ask."""
    config = make_config(known)
    target = Builder(make_spec(), ["layers.0", "layers.1"], config, torch.device("cpu"))
    assert target.runner is None
    (group,) = read(telemetry.process_counters().path).groups
    assert group.reason == "the layers of this group could not be looked up in this vLLM"


def test_vllm_without_the_lookup_makes_the_group_ineligible(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.attention_layer_base", None)
    assert attention_layers(make_config(), ["layers.0"]) is None
    assert make().runner is None


def test_lookup_that_fails_otherwise_is_not_hidden(monkeypatch):
    with pytest.raises(AttributeError):
        attention_layers(SimpleNamespace(), ["layers.0"])


# The self-test before serving.


@pytest.fixture
def failing(monkeypatch):
    outcome = selftest.Outcome(3, 0.7, 0.1, "self-test failed: relative error 0.7 at q_len 1, 4 sequences")
    monkeypatch.setattr(selftest, "run", lambda runner, token_major: outcome)
    return outcome


def test_group_that_fails_its_self_test_stays_on_the_fallback(failing, backend_log):
    target = make()
    assert isinstance(target.build(0, cam([1])), TorchReferenceMetadata)
    assert target.runner is None
    assert counted() == {"fallback:ineligible": 1, "fallback_tokens": 1}
    (group,) = read(telemetry.process_counters().path).groups
    assert group.reason == failing.failure
    assert [(record.levelname, record.getMessage()) for record in backend_log.records] == [
        ("ERROR", f"Mjolnir: T5 is OFF for layers.0: {failing.failure}. Decoding goes on without it."),
        ("WARNING", f"Mjolnir decode disabled for layers.0: {failing.failure} -> TORCH_REF for all steps"),
    ]


@pytest.mark.parametrize("base", AttentionCGSupport)
def test_group_that_fails_its_self_test_promises_what_the_fallback_does(failing, base):
    target = make(cls=promising(base))
    assert target.get_cudagraph_support(target.vllm_config, target.kv_cache_spec) is base


@pytest.mark.parametrize(
    ("layout", "token_major"), [(None, True), ("LBNHC", True), ("NHD", True), ("LBHNC", False), ("BLHNC", False)]
)
def test_self_test_uses_the_caches_layout(monkeypatch, layout, token_major):
    asked = []

    def run(runner, token_major):
        asked.append((runner.config.head_size, token_major))
        return selftest.Outcome(1, 0.0, 0.0)

    monkeypatch.setattr(selftest, "run", run)
    make(kv_cache_layout=layout)
    assert asked == [(64, token_major)]


def test_no_self_test_where_t5_does_not_run(monkeypatch):
    def run(runner, token_major):
        raise AssertionError

    monkeypatch.setattr(selftest, "run", run)
    make(spec=make_spec(head_size=96))
    monkeypatch.setenv("MJOLNIR_ATTN_DISABLE", "1")
    make()


# What is counted on a GPU, whose worker warms up with steps like any other.


def test_steps_of_the_warm_up_are_not_counted(monkeypatch):
    from vllm.utils import jit_monitor

    monkeypatch.setattr(jit_monitor, "_active", False)
    target = make()
    target.device = torch.device("cuda")
    target.vllm_config.kernel_config = SimpleNamespace(enable_jit_warmup=True)
    target.build(0, cam([1]))
    assert counted() == {}
    monkeypatch.setattr(jit_monitor, "_active", True)
    target.build(0, cam([1]))
    assert counted() == {"t5:decode": 1, "t5_tokens": 1}


def test_without_a_warm_up_every_step_is_counted(monkeypatch):
    from vllm.utils import jit_monitor

    monkeypatch.setattr(jit_monitor, "_active", False)
    target = make()
    target.device = torch.device("cuda")
    target.vllm_config.kernel_config = SimpleNamespace(enable_jit_warmup=False)
    target.build(0, cam([1]))
    assert counted() == {"t5:decode": 1, "t5_tokens": 1}


def test_kernels_are_counted_as_they_are_made(monkeypatch):
    import sys

    compiler = SimpleNamespace(CACHE_STATS={"loaded": 3, "compiled": 2, "compile_seconds": 1.5})
    monkeypatch.setitem(sys.modules, "mjolnir.kernels.compiler", compiler)
    monkeypatch.setattr(telemetry, "_kernels", {})
    target = make()
    monkeypatch.setattr(target, "_serving", lambda: False)
    target.build(0, cam([1]))
    assert counted() == {"kernels:loaded": 3, "kernels:compiled": 2}  # most of them come before there are users
    monkeypatch.setattr(target, "_serving", lambda: True)
    target.build(0, cam([1]))
    assert counted() == {"t5:decode": 1, "t5_tokens": 1, "kernels:loaded": 3, "kernels:compiled": 2}
    compiler.CACHE_STATS["compiled"] += 4
    target.build(0, cam([1]))
    target.build(0, cam([1]))
    assert counted() == {"t5:decode": 3, "t5_tokens": 3, "kernels:loaded": 3, "kernels:compiled": 6}


def test_flags_of_a_padded_batch_are_shorter_than_the_batch(monkeypatch):
    """A captured graph's batch is padded, vLLM's flags are not: the step's reason was an error about shapes."""
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_QLEN", "1")
    target = make(speculative=3)
    target.build(0, cam([4, 4, 0, 0], is_prefilling=torch.tensor([False, False])))
    assert counted() == {"fallback:q_len": 1, "fallback_tokens": 8}
    target.build(0, cam([4, 4, 0, 0], is_prefilling=torch.tensor([True, True])))
    target.build(0, cam([4, 4, 0, 0], is_prefilling=torch.tensor([False, True])))
    seen = counted()
    assert (seen["fallback:prefill"], seen["fallback:mixed"]) == (1, 1)


# What is logged and shown.


def test_enabled_line_has_every_field_and_is_logged_once(backend_log):
    make({f"layers.{number}.attn": Layer() for number in (10, 2, 1)}, speculative=3)
    tested, *others = [(record.levelname, record.getMessage()) for record in backend_log.records]
    assert tested[1].startswith("Mjolnir self-test of layers.1.attn (3 layers): 7 steps, relative error at most 0.00")
    assert others == [
        (
            "INFO",
            "Mjolnir decode enabled for layers.1.attn (3 layers): h_q=4 h_k=2 d=64 page=16 q_len<=4 Q=bf16 "
            "ctas/SM=2 max_splits=16 kv=fp8 device=cpu fallback=TORCH_REF",
        )
    ]
    assert read(telemetry.process_counters().path).groups == (
        GroupInfo("layers.1.attn (3 layers)", "fp8", 64, 16, "TORCH_REF"),
    )


def test_settings_reach_the_runner(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_Q_DTYPE", "fp8")
    monkeypatch.setenv("MJOLNIR_ATTN_CTAS", "3")
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_SPLITS", "5")
    config = make(spec=make_spec(block_size=32)).runner.config
    assert (config.q_dtype, config.ctas_per_sm, config.max_splits) == ("fp8", 3, 5)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.page_size) == (4, 2, 64, 32)
    assert (config.out_dtype, config.max_num_seqs, config.device.type) == (torch.bfloat16, 8, "cpu")


@pytest.mark.parametrize(
    ("cap", "speculative", "max_q_len"), [("0", 0, 1), ("0", 3, 4), ("2", 3, 2), ("9", 3, 4), ("9", 0, 1)]
)
def test_longest_query(monkeypatch, cap, speculative, max_q_len):
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_QLEN", cap)
    target = make(speculative=speculative)
    assert target.runner.config.max_q_len == target.limits.max_q_len == max_q_len


@pytest.mark.parametrize(("method", "longest"), [("draft_model", 5), ("eagle", 4)])
def test_first_step_of_a_draft_model_is_one_longer(method, longest):
    config = make_config({"layers.0": draft_layer()}, speculative=3)
    config.speculative_config.method = method
    drafter = Builder(make_spec(), ["layers.0"], config, torch.device("cpu"))
    drafter.build(0, cam([5, 5]))
    assert drafter.limits.max_q_len == longest
    assert counted() == (
        {"t5:draft": 1, "t5_tokens": 10} if longest == 5 else {"fallback:q_len": 1, "fallback_tokens": 10}
    )
    target = make_config(speculative=3)
    target.speculative_config.method = method
    assert Builder(make_spec(), ["layers.0"], target, torch.device("cpu")).limits.max_q_len == 4


def test_non_causal_steps_can_be_kept_on_the_fallback(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_NONCAUSAL", "0")
    make(speculative=3).build(0, cam([4, 4], causal=False))
    assert counted() == {"fallback:causal_tensor": 1, "fallback_tokens": 8}


def test_bad_setting_is_readable(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_Q_DTYPE", "fp4")
    accepted = "fp8, e4m3, bf16, bfloat16"
    with pytest.raises(ConfigurationError, match=rf"^MJOLNIR_ATTN_Q_DTYPE='fp4': accepted: {accepted}$"):
        make()


def test_builder_made_twice_is_shown_once():
    """vLLM makes every builder once more, before, to measure the memory of CUDA graphs."""
    for _ in range(2):
        make()
    assert [group.group for group in read(telemetry.process_counters().path).groups] == ["layers.0"]


def test_builders_do_not_share_their_runners():
    assert make().runner is not make().runner


@pytest.mark.parametrize(("setting", "shown"), [("1", ["\nbanner of qwen"]), ("0", [])])
def test_banner(monkeypatch, backend_log, setting, shown):
    monkeypatch.setattr(banner, "_shown", [])
    monkeypatch.setattr(banner, "banner", lambda name: f"banner of {name}")
    monkeypatch.setenv("MJOLNIR_CONFIG", "qwen")
    monkeypatch.setenv("MJOLNIR_ATTN_BANNER", setting)
    make()
    make()
    assert [text for text in (record.getMessage() for record in backend_log.records) if "banner" in text] == shown


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["layers.0"], "layers.0"),
        (["model.layers.10.attn", "model.layers.9.attn"], "model.layers.9.attn (2 layers)"),
        (["b.0", "a.1", "a.0"], "a.0 (3 layers)"),
    ],
)
def test_group_label(names, label):
    assert group_label(names) == group_label(names[::-1]) == label


# What a group promises to CUDA graphs.


def promising(support: AttentionCGSupport) -> type:
    """Our builder over a fallback that promises ``support``."""
    base = type("Base", (TorchReferenceBackend.get_builder_cls(),), {"_cudagraph_support": support})
    return type("Composed", (BuilderMixin, base), {"fallback_name": "BASE"})


@pytest.mark.parametrize("base", AttentionCGSupport)
@pytest.mark.parametrize("speculative", [0, 3])
def test_where_t5_runs_uniform_batches_are_promised(base, speculative):
    """Never ALWAYS: at replay a uniform step would be T5's, with the fallback's captured state stale."""
    promise = promising(base).get_cudagraph_support(make_config(speculative=speculative), make_spec())
    assert promise is UNIFORM_BATCH


@pytest.mark.parametrize("base", AttentionCGSupport)
def test_where_t5_does_not_run_the_fallback_is_believed(base):
    assert promising(base).get_cudagraph_support(make_config(), make_spec(head_size=96)) is base
    assert promising(base).get_cudagraph_support(make_config(cache_dtype="auto"), make_spec()) is base


@pytest.mark.parametrize("base", AttentionCGSupport)
def test_disabled_is_the_fallbacks_answer(monkeypatch, base):
    monkeypatch.setenv("MJOLNIR_ATTN_DISABLE", "1")
    assert promising(base).get_cudagraph_support(make_config(), make_spec()) is base


@pytest.mark.parametrize(
    ("cap", "speculative", "promise"),
    [("2", 3, SINGLE_TOKEN), ("3", 3, SINGLE_TOKEN), ("4", 3, UNIFORM_BATCH), ("1", 0, UNIFORM_BATCH)],
)
def test_capped_below_the_verification_step(monkeypatch, cap, speculative, promise):
    """It runs on the fallback then."""
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_QLEN", cap)
    config = make_config(speculative=speculative)
    assert promising(SINGLE_TOKEN).get_cudagraph_support(config, make_spec()) is promise


@pytest.mark.parametrize(
    ("noncausal", "parallel", "promise"), [("0", True, NEVER), ("0", False, UNIFORM_BATCH), ("1", True, UNIFORM_BATCH)]
)
def test_parallel_drafting_without_non_causal_steps(monkeypatch, noncausal, parallel, promise):
    monkeypatch.setenv("MJOLNIR_ATTN_NONCAUSAL", noncausal)
    config = make_config(speculative=3, parallel_drafting=parallel)
    assert promising(NEVER).get_cudagraph_support(config, make_spec()) is promise


@pytest.mark.parametrize("base", AttentionCGSupport)
def test_builder_of_layers_that_t5_can_not_run_promises_what_the_fallback_does(base):
    """Rules of layers are unknown to the class; the promise was raised although every step was the fallback's."""
    target = make({"layers.0": Layer(sinks=torch.zeros(4))}, cls=promising(base))
    assert target.get_cudagraph_support(target.vllm_config, target.kv_cache_spec) is base


@pytest.mark.parametrize("base", AttentionCGSupport)
def test_builder_of_a_drafter_on_the_fallback_promises_what_the_fallback_does(monkeypatch, base):
    monkeypatch.setenv("MJOLNIR_ATTN_DRAFT_T5", "0")
    target = make({"layers.0": draft_layer()}, cls=promising(base), speculative=3)
    assert target.get_cudagraph_support(target.vllm_config, target.kv_cache_spec) is base


def test_builder_on_t5_promises_what_its_class_does():
    target = make(cls=promising(NEVER))
    assert target.get_cudagraph_support(target.vllm_config, target.kv_cache_spec) is UNIFORM_BATCH


@pytest.mark.parametrize("base", AttentionCGSupport)
def test_group_on_t5_beside_layers_that_t5_can_not_run(base):
    """Their rules made the fallback's promise that of T5's group, whose steps would have replayed its graphs."""
    layers = {"layers.0": Layer(), "layers.1": Layer(sliding_window=(64, 0))}
    config = make_config(layers)
    target = promising(base)(make_spec(), ["layers.0"], config, torch.device("cpu"))
    assert target.runner is not None
    assert target.get_cudagraph_support(config, make_spec()) is UNIFORM_BATCH
    # The class speaks for both groups, of which one may be T5's.
    expected = base if base.value < UNIFORM_BATCH.value else UNIFORM_BATCH
    assert promising(base).get_cudagraph_support(config, make_spec()) is expected


@pytest.mark.parametrize("block_size", [544, 784, 32, 128])
def test_pages_that_are_several_of_the_kernels(block_size):
    """Hybrid models have such; the kernel's pages are what counts, which vLLM chooses as the largest that divides."""
    assert promising(ALWAYS).get_cudagraph_support(make_config(), make_spec(block_size=block_size)) is UNIFORM_BATCH
    target = make(cls=promising(ALWAYS))
    assert target.get_cudagraph_support(target.vllm_config, make_spec(block_size=block_size)) is UNIFORM_BATCH


@pytest.mark.parametrize("base", AttentionCGSupport)
def test_partly_on_t5_is_never_always(monkeypatch, base):
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_QLEN", "1")
    expected = base if base.value < UNIFORM_BATCH.value else UNIFORM_BATCH
    assert promising(base).get_cudagraph_support(make_config(speculative=3), make_spec()) is expected


def test_no_graph_has_query_lengths_that_vary():
    assert Builder.get_varlen_cudagraph_max_query_len(make_config(), make_spec()) is None


def test_constructor_passes_what_it_does_not_know_to_the_fallback():
    class Base(TorchReferenceBackend.get_builder_cls()):
        def __init__(self, *args, block_table_width):
            super().__init__(*args)
            self.width = block_table_width

    cls = type("Composed", (BuilderMixin, Base), {"fallback_name": "BASE"})
    config = make_config()
    assert cls(make_spec(), ["layers.0"], config, torch.device("cpu"), block_table_width=7).width == 7


def test_device_without_kernels_stays_on_the_fallback():
    """A GPU build of vLLM with this package and no kernels for it."""
    target = Builder(make_spec(), ["layers.0"], make_config(), torch.device("meta"))
    assert target.runner is None
    (group,) = read(telemetry.process_counters().path).groups
    assert group.reason == "no T5 kernels for device type 'meta' in this build"
