"""What the metadata builder promises to CUDA graphs, truthfully."""

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from mjolnir import telemetry
from mjolnir.builder import BuilderMixin
from mjolnir.counters import read
from mjolnir.reference.backend import TorchReferenceBackend
from tests.unit.builder_fakes import (
    ALWAYS,
    NEVER,
    SINGLE_TOKEN,
    UNIFORM_BATCH,
    Builder,
    Layer,
    draft_layer,
    make,
    make_config,
    make_spec,
    promising,
)

pytestmark = pytest.mark.usefixtures("stats_dir", "banner_was_shown")


# What a group promises to CUDA graphs.


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
