"""The metadata builder over the reference backend: one decision a step, counted once."""

from types import SimpleNamespace

import pytest
import torch

from mjolnir import telemetry
from mjolnir.builder import BuilderMixin
from mjolnir.metadata import MjolnirMetadata
from mjolnir.reference.backend import TorchReferenceBackend, TorchReferenceMetadata
from tests.unit.builder_fakes import Builder, Layer, cam, counted, draft_layer, make

pytestmark = pytest.mark.usefixtures("stats_dir", "banner_was_shown")


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
