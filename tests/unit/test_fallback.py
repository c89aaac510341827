"""Which stock backend serves what T5 does not take: the choice as a table, and when it is kept."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mjolnir import fallback
from mjolnir.errors import ConfigurationError
from mjolnir.fallback import Choice, ModelNeeds, choose

FP8 = ModelNeeds("cuda", 128, torch.bfloat16, "fp8")
CPU = ModelNeeds("cpu", 64, torch.bfloat16, "fp8")


def refusing(**reasons: str):
    """Every backend serves, but those named here say why not."""
    return lambda name, needs: reasons.get(name)


def must_not_be_asked(name: str, needs: ModelNeeds) -> str | None:
    raise AssertionError(f"{name} was asked")


@pytest.mark.parametrize(
    ("refusals", "choice"),
    [
        ({}, Choice("FLASH_ATTN", "first in order")),
        ({"FLASH_ATTN": "no fp8"}, Choice("FLASHINFER", "FLASH_ATTN: no fp8")),
        (
            {"FLASH_ATTN": "no fp8", "FLASHINFER": "not installed"},
            Choice("TRITON_ATTN", "FLASH_ATTN: no fp8; FLASHINFER: not installed"),
        ),
        ({"FLASHINFER": "not installed", "TRITON_ATTN": "too old"}, Choice("FLASH_ATTN", "first in order")),
        ({"FLASH_ATTN": "no fp8", "TRITON_ATTN": "too old"}, Choice("FLASHINFER", "FLASH_ATTN: no fp8")),
    ],
)
def test_first_in_order_that_serves(refusals, choice):
    assert choose("", FP8, refusing(**refusals)) == choice


def test_nobody_serves():
    with pytest.raises(ConfigurationError) as error:
        choose("", FP8, refusing(FLASH_ATTN="a", FLASHINFER="b", TRITON_ATTN="c"))
    assert str(error.value) == "no fallback can serve this model: FLASH_ATTN: a; FLASHINFER: b; TRITON_ATTN: c"


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"])
@pytest.mark.parametrize("needs", [FP8, None])
def test_explicit_choice_is_never_gated(name, needs):
    assert choose(name, needs, must_not_be_asked) == Choice(name, "chosen by MJOLNIR_ATTN_FALLBACK")


@pytest.mark.parametrize("name", ["CUSTOM", "MJOLNIR"])
@pytest.mark.parametrize("needs", [FP8, CPU, None])
def test_mjolnir_is_no_fallback_of_itself(name, needs):
    with pytest.raises(ConfigurationError) as error:
        choose(name, needs, must_not_be_asked)
    assert str(error.value) == (
        f"MJOLNIR_ATTN_FALLBACK={name}: is no fallback; accepted: a stock backend, as "
        "FLASH_ATTN, FLASHINFER, TRITON_ATTN"
    )


def test_without_a_model_the_first_in_order_answers_unasked():
    choice = choose("", None, must_not_be_asked)
    assert choice == Choice("FLASH_ATTN", "first in order; the model is not known yet")


@pytest.mark.parametrize("explicit", ["", "TORCH_REF"])
def test_cpu_has_one_fallback(explicit):
    assert choose(explicit, CPU, must_not_be_asked) == Choice("TORCH_REF", "the only fallback on a CPU")


def test_another_fallback_on_a_cpu_is_refused():
    with pytest.raises(ConfigurationError, match=r"^MJOLNIR_ATTN_FALLBACK=FLASH_ATTN: .*; accepted: TORCH_REF$"):
        choose("FLASH_ATTN", CPU, must_not_be_asked)


# How the decision is asked for, kept and logged.


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for vLLM: ``needs`` is what the config context says, ``refusals`` what the backends say."""
    state = SimpleNamespace(needs=FP8, refusals={}, asked=[])

    def refusal(name, needs):
        state.asked.append(name)
        return state.refusals.get(name)

    monkeypatch.setattr(fallback, "_current_needs", lambda: state.needs)
    monkeypatch.setattr(fallback, "_refusal", refusal)
    monkeypatch.setattr(fallback, "_backend_class", lambda name: name)
    fallback._decide.cache_clear()
    yield state
    fallback._decide.cache_clear()


def test_decision_is_made_once_and_logged_once(gpu, backend_log):
    assert [fallback.current_fallback() for _ in range(3)] == ["FLASH_ATTN"] * 3
    assert gpu.asked == ["FLASH_ATTN"]
    assert [(r.levelname, r.getMessage()) for r in backend_log.records] == [
        ("INFO", "Mjolnir: fallback=FLASH_ATTN (first in order)")
    ]


def test_second_choice_is_one_warning_with_the_reason(gpu, backend_log):
    gpu.refusals = {"FLASH_ATTN": "FlashAttention can't read this fp8 KV cache on this GPU"}
    assert [fallback.current_fallback() for _ in range(2)] == ["FLASHINFER"] * 2
    assert [(r.levelname, r.getMessage()) for r in backend_log.records] == [
        (
            "WARNING",
            "Mjolnir: fallback=FLASHINFER (FLASH_ATTN: FlashAttention can't read this fp8 KV cache on this GPU)",
        )
    ]


def test_explicit_second_in_order_is_no_warning(gpu, backend_log, monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_FALLBACK", " triton_attn ")
    assert fallback.current_fallback() == "TRITON_ATTN"
    assert gpu.asked == []
    assert [(r.levelname, r.getMessage()) for r in backend_log.records] == [
        ("INFO", "Mjolnir: fallback=TRITON_ATTN (chosen by MJOLNIR_ATTN_FALLBACK)")
    ]


def test_answer_without_a_config_is_not_kept(gpu, backend_log):
    """The reference decided at import: a tool that imported it early froze the wrong backend for the process."""
    gpu.needs, gpu.refusals = None, {"FLASH_ATTN": "no fp8"}
    assert fallback.current_fallback() == "FLASH_ATTN"
    assert backend_log.records == []
    gpu.needs = FP8
    assert fallback.current_fallback() == "FLASHINFER"


def test_another_models_needs_are_another_decision(gpu):
    gpu.refusals = {"FLASH_ATTN": "no fp8"}
    assert fallback.current_fallback() == "FLASHINFER"
    gpu.needs, gpu.refusals = ModelNeeds("cuda", 128, torch.bfloat16, "auto"), {}
    assert fallback.current_fallback() == "FLASH_ATTN"


def test_unknown_name_lists_what_vllm_knows(monkeypatch):
    monkeypatch.setattr(fallback, "_current_needs", lambda: FP8)
    monkeypatch.setenv("MJOLNIR_ATTN_FALLBACK", "flash_atn")
    fallback._decide.cache_clear()
    with pytest.raises(ValueError, match=r"Unknown attention backend: 'FLASH_ATN'.*FLASH_ATTN, .*TRITON_ATTN"):
        fallback.current_fallback()


# What a stock backend is asked.


class Backend:
    """A stock backend that keeps what it was asked and answers with ``reasons``."""

    reasons: tuple[str, ...] = ()
    asked: dict[str, object]

    @classmethod
    def validate_configuration(cls, **wanted: object) -> list[str]:
        cls.asked = wanted
        return list(cls.reasons)


@pytest.fixture
def backend(monkeypatch):
    fresh = type("Fresh", (Backend,), {})
    monkeypatch.setattr(fallback, "_backend_class", lambda name: fresh)
    return fresh


def flash_attention_answers(monkeypatch, answer: bool) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    from vllm.v1.attention.backends import fa_utils

    signature, calls = inspect.signature(fa_utils.flash_attn_supports_kv_cache_dtype), []

    def helper(*args, **kwargs):
        signature.bind(*args, **kwargs)
        calls.append((args, kwargs))
        return answer

    monkeypatch.setattr(fa_utils, "flash_attn_supports_kv_cache_dtype", helper)
    return calls


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_flash_attention_is_asked_about_the_models_head_size(monkeypatch, backend, dtype):
    calls = flash_attention_answers(monkeypatch, answer=False)
    needs = ModelNeeds("cuda", 256, torch.bfloat16, dtype)
    assert fallback._refusal("FLASH_ATTN", needs) == "FlashAttention can't read this fp8 KV cache on this GPU"
    assert calls == [((dtype,), {"head_size": 256, "supports_fa4_hd256": True})]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8_e5m2"])
def test_flash_attention_is_not_gated_for_another_cache(monkeypatch, backend, dtype):
    calls = flash_attention_answers(monkeypatch, answer=False)
    assert fallback._refusal("FLASH_ATTN", ModelNeeds("cuda", 128, torch.bfloat16, dtype)) is None
    assert calls == []


def test_flash_attention_that_reads_the_cache_is_asked_the_rest(monkeypatch, backend):
    flash_attention_answers(monkeypatch, answer=True)
    backend.reasons = ("dtype not supported", "block_size not supported")
    assert fallback._refusal("FLASH_ATTN", FP8) == "dtype not supported, block_size not supported"


def test_validation_is_asked_in_vllms_terms(backend):
    from vllm.v1.attention.backend import AttentionBackend

    needs = ModelNeeds("cuda", 64, torch.float16, "fp8", block_size=128)
    assert fallback._refusal("FLASHINFER", needs) is None
    inspect.signature(AttentionBackend.validate_configuration).bind(**backend.asked)
    assert {name: backend.asked[name] for name in ("head_size", "dtype", "kv_cache_dtype", "block_size")} == {
        "head_size": 64,
        "dtype": torch.float16,
        "kv_cache_dtype": "fp8",
        "block_size": 128,
    }
    assert backend.asked["attn_type"] == "decoder"


def test_backend_that_can_not_be_imported_is_not_installed(monkeypatch):
    def missing(name):
        raise ImportError("No module named 'flashinfer'")

    monkeypatch.setattr(fallback, "_backend_class", missing)
    assert fallback._refusal("FLASHINFER", FP8) == "not installed (No module named 'flashinfer')"


def test_cpu_without_a_config_still_gets_the_reference_backend():
    """This machine: vLLM's CPU build, no model yet."""
    from vllm.platforms import current_platform

    from mjolnir.reference.backend import TorchReferenceBackend

    if not current_platform.is_cpu():
        pytest.skip("vLLM's CPU build only")
    assert fallback.current_fallback() is TorchReferenceBackend


def test_needs_come_from_the_config_context(monkeypatch):
    import vllm.config

    model = SimpleNamespace(get_head_size=lambda: 96, dtype=torch.float16)
    cache = SimpleNamespace(cache_dtype="fp8_e4m3", block_size=32, user_specified_block_size=True)
    config = SimpleNamespace(model_config=model, cache_config=cache)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
    needs = fallback._current_needs()
    assert (needs.head_size, needs.dtype, needs.kv_cache_dtype, needs.block_size) == (96, torch.float16, "fp8_e4m3", 32)
    cache.user_specified_block_size = False
    assert fallback._current_needs().block_size is None


# Thor: FlashAttention 4 where it passed its probe.


@pytest.fixture
def thor(monkeypatch):
    """Major 11 with every stock backend installed and willing; ``verdict`` is what the probe found."""
    from vllm.v1.attention.backends import fa_utils

    from mjolnir import fa4_probe

    state = SimpleNamespace(needs=FP8, verdict=fa4_probe.Verdict(True, "passed"), missing=set())

    def backend_class(name):
        if name in state.missing:
            raise ImportError(f"No module named '{name.lower()}'")
        return type(name, (Backend,), {})

    monkeypatch.setattr(fallback, "_current_needs", lambda: state.needs)
    monkeypatch.setattr(fallback, "_backend_class", backend_class)
    monkeypatch.setattr(fallback, "_on_thor", lambda: True)
    monkeypatch.setattr(fa4_probe, "verdict", lambda head_size, pages: state.verdict)
    monkeypatch.setattr(fa4_probe, "_config", lambda: None)
    monkeypatch.setenv(fa4_probe.KERNELS_VARIABLE, "/srv/kernels")
    monkeypatch.setattr(
        fa_utils,
        "flash_attn_supports_kv_cache_dtype",
        lambda dtype, head_size, supports_fa4_hd256: fa4_probe.usable(head_size, fp8=True),
    )
    fa4_probe._tell.cache_clear()
    fallback._decide.cache_clear()
    yield state
    fallback._decide.cache_clear()


def warnings_of(backend_log) -> list[str]:
    return [record.getMessage() for record in backend_log.records if record.levelname == "WARNING"]


FAILED = "THOR FA4 128 probe: failed: NaN"
NO_DESCALES = "THOR FA4 256 probe: not run: the kernel for this head size takes no descales, so no fp8 KV cache"


@pytest.mark.parametrize(
    ("passed", "head_size", "missing", "name", "reasons"),
    [
        (True, 128, set(), "FLASH_ATTN", None),
        (True, 64, {"FLASHINFER"}, "FLASH_ATTN", None),
        (False, 128, set(), "FLASHINFER", f"FLASH_ATTN: {FAILED}"),
        (
            False,
            128,
            {"FLASHINFER"},
            "TRITON_ATTN",
            f"FLASH_ATTN: {FAILED}; FLASHINFER: not installed (No module named 'flashinfer')",
        ),
        (True, 256, set(), "FLASHINFER", f"FLASH_ATTN: {NO_DESCALES}"),
        (
            True,
            256,
            {"FLASHINFER"},
            "TRITON_ATTN",
            f"FLASH_ATTN: {NO_DESCALES}; FLASHINFER: not installed (No module named 'flashinfer')",
        ),
    ],
)
def test_thor_takes_what_passed_and_warns_once_of_anything_else(
    thor, backend_log, passed, head_size, missing, name, reasons
):
    thor.verdict = replace(thor.verdict, passed=passed, detail="passed" if passed else "failed: NaN")
    thor.needs, thor.missing = replace(FP8, head_size=head_size), missing
    assert [fallback.current_fallback().__name__ for _ in range(3)] == [name] * 3
    assert warnings_of(backend_log) == ([f"Mjolnir: fallback={name} ({reasons})"] if reasons else [])
    assert fallback.fallback_name() == fallback.fallback_name(head_size) == name


def test_float16_models_have_no_flash_attention_with_fp8_pages_on_thor(thor, backend_log):
    """Its kernel writes bf16 then, and asserts that the output is."""
    thor.needs = replace(FP8, dtype=torch.float16)
    assert fallback.current_fallback().__name__ == "FLASHINFER"
    (warning,) = warnings_of(backend_log)
    assert "writes bf16 where the KV cache is fp8, but the model's dtype is float16" in warning


def test_a_cache_without_quantisation_is_not_gated_on_thor(thor):
    thor.verdict, thor.needs = replace(thor.verdict, passed=False), replace(FP8, kv_cache_dtype="auto")
    assert fallback.current_fallback().__name__ == "FLASH_ATTN"


def test_thors_rules_hold_on_thor_only(thor, monkeypatch, backend_log):
    monkeypatch.setattr(fallback, "_on_thor", lambda: False)
    thor.verdict = replace(thor.verdict, passed=False)
    assert fallback.current_fallback().__name__ == "FLASHINFER"
    assert warnings_of(backend_log) == [
        "Mjolnir: fallback=FLASHINFER (FLASH_ATTN: FlashAttention can't read this fp8 KV cache on this GPU)"
    ]
    fallback._decide.cache_clear()
    thor.verdict, thor.needs = replace(thor.verdict, passed=True), replace(FP8, dtype=torch.float16)
    assert fallback.current_fallback().__name__ == "FLASH_ATTN"


def test_a_name_can_be_asked_for_another_head_size(thor):
    assert [fallback.fallback_name(), fallback.fallback_name(64)] == ["FLASH_ATTN"] * 2
    assert fallback.fallback_name(256) == "FLASHINFER"


def test_a_name_can_be_asked_for_without_a_model(thor):
    thor.needs = None
    assert [fallback.fallback_name(), fallback.fallback_name(128)] == ["FLASH_ATTN"] * 2
    assert fallback.fallback_name(256) == "FLASHINFER"
    thor.verdict = replace(thor.verdict, passed=False)
    assert fallback.fallback_name(128) == "FLASHINFER"
