"""Attention groups that T5 runs or can't run: their reasons, their self-test, and what is logged and shown of them."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVQuantMode

from mjolnir import banner, selftest, telemetry
from mjolnir.builder import attention_layers, group_label
from mjolnir.counters import GroupInfo, read
from mjolnir.errors import ConfigurationError
from mjolnir.reference.backend import TorchReferenceMetadata
from tests.unit.builder_fakes import Builder, Layer, cam, counted, draft_layer, make, make_config, make_spec, promising

pytestmark = pytest.mark.usefixtures("stats_dir", "banner_was_shown")


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
