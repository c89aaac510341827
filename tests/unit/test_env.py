"""Settings from the environment: which name wins, what counts as unset, what a bad value says."""

import dataclasses
from pathlib import Path

import pytest

from mjolnir import env
from mjolnir.env import BackendSettings
from mjolnir.errors import ConfigurationError

# Every variable with a value that is not its default, and the setting it must arrive in.
VARIABLES = [
    ("MJOLNIR_ATTN_DISABLE", "1", "disabled", True),
    ("MJOLNIR_ATTN_FALLBACK", "flash_attn", "fallback", "FLASH_ATTN"),
    ("MJOLNIR_ATTN_FA4", "0", "fa4", "off"),
    ("MJOLNIR_ATTN_Q_DTYPE", "fp8", "q_dtype", "fp8"),
    ("MJOLNIR_ATTN_MAX_QLEN", "3", "max_q_len", 3),
    ("MJOLNIR_ATTN_CTAS", "1", "ctas_per_sm", 1),
    ("MJOLNIR_ATTN_MAX_SPLITS", "8", "max_splits", 8),
    ("MJOLNIR_ATTN_DRAFT_T5", "0", "draft_t5", False),
    ("MJOLNIR_ATTN_NONCAUSAL", "0", "noncausal", False),
    ("MJOLNIR_ATTN_FUSED_DRAFT", "0", "fused_draft", False),
    ("MJOLNIR_ATTN_SPLIT_MIXED", str(int(not env.SPLIT_MIXED)), "split_mixed", not env.SPLIT_MIXED),
    ("MJOLNIR_ATTN_KV_LAYOUT", "B2HND", "kv_layout", "B2HND"),
    ("MJOLNIR_ATTN_KERNEL_CACHE", "/srv/kernels", "kernel_cache", "/srv/kernels"),
    ("MJOLNIR_KV_SCALES", "/srv/scales.json", "kv_scales", "/srv/scales.json"),
    ("MJOLNIR_ATTN_BANNER", "0", "banner", False),
    ("MJOLNIR_CONFIG", "qwen3-8b-fp8", "config_name", "qwen3-8b-fp8"),
]
WITH_ALIAS = [row for row in VARIABLES if row[0].startswith("MJOLNIR_ATTN_")]


def legacy(name: str) -> str:
    return name.replace("MJOLNIR_ATTN_", "THOR_T5_")


def test_defaults_without_any_variable():
    assert BackendSettings.from_env() == BackendSettings(
        disabled=False,
        fallback="",
        fa4="auto",
        q_dtype="bf16",
        max_q_len=0,
        ctas_per_sm=2,
        max_splits=16,
        draft_t5=True,
        noncausal=True,
        fused_draft=True,
        split_mixed=env.SPLIT_MIXED,
        kv_layout="",
        kernel_cache="",
        kv_scales="",
        banner=True,
        config_name="",
    )


@pytest.mark.parametrize(("name", "value", "field", "setting"), VARIABLES)
def test_each_variable_sets_its_field_and_no_other(monkeypatch, name, value, field, setting):
    monkeypatch.setenv(name, value)
    assert BackendSettings.from_env() == dataclasses.replace(BackendSettings(), **{field: setting})


def test_every_setting_has_a_variable_in_the_table():
    assert {row[2] for row in VARIABLES} == {field.name for field in dataclasses.fields(BackendSettings)}


@pytest.mark.parametrize(("name", "value", "field", "setting"), WITH_ALIAS)
def test_older_name_is_read_where_the_new_one_is_unset(monkeypatch, name, value, field, setting):
    monkeypatch.setenv(legacy(name), value)
    assert BackendSettings.from_env() == dataclasses.replace(BackendSettings(), **{field: setting})


def test_new_name_beats_the_older_one(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_SPLITS", "4")
    monkeypatch.setenv("THOR_T5_MAX_SPLITS", "8")
    assert BackendSettings.from_env().max_splits == 4


def test_blank_new_name_does_not_hide_the_older_one(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_SPLITS", "  ")
    monkeypatch.setenv("THOR_T5_MAX_SPLITS", "8")
    assert BackendSettings.from_env().max_splits == 8


def test_name_outside_the_prefix_has_no_older_name(monkeypatch):
    monkeypatch.setenv("THOR_T5_CONFIG", "elsewhere")
    monkeypatch.setenv("THOR_T5_MJOLNIR_CONFIG", "elsewhere")
    assert BackendSettings.from_env().config_name == ""


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
@pytest.mark.parametrize("name", [row[0] for row in VARIABLES])
def test_blank_counts_as_unset(monkeypatch, name, blank):
    """The reference parsed ``int("")`` and flipped switches that are on by default."""
    monkeypatch.setenv(name, blank)
    assert BackendSettings.from_env() == BackendSettings()


def test_surrounding_white_space_is_dropped(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_CTAS", " 3\n")
    monkeypatch.setenv("MJOLNIR_ATTN_FALLBACK", "\ttriton_attn ")
    settings = BackendSettings.from_env()
    assert (settings.ctas_per_sm, settings.fallback) == (3, "TRITON_ATTN")


def test_read_gives_the_default_as_it_is(monkeypatch):
    assert env.read("MJOLNIR_ATTN_ANYTHING", "a default") == "a default"
    monkeypatch.setenv("MJOLNIR_ATTN_ANYTHING", " set ")
    assert env.read("MJOLNIR_ATTN_ANYTHING", "a default") == "set"


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize(
    ("word", "meaning"),
    [(word, True) for word in ("1", "true", "TRUE", "Yes", "On")]
    + [(word, False) for word in ("0", "false", "FALSE", "No", "oFf")],
)
def test_switch_words_in_any_case(monkeypatch, word, meaning, default):
    monkeypatch.setenv("MJOLNIR_ATTN_SWITCH", word)
    assert env.read_bool("MJOLNIR_ATTN_SWITCH", default) is meaning


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [("fp8", "fp8"), ("E4M3", "fp8"), ("bf16", "bf16"), ("BFloat16", "bf16")],
)
def test_q_dtype_spellings(monkeypatch, spelling, canonical):
    monkeypatch.setenv("MJOLNIR_ATTN_Q_DTYPE", spelling)
    assert BackendSettings.from_env().q_dtype == canonical


@pytest.mark.parametrize("layout", ["BHN2D", "BNH2D", "B2NHD", "B2HND", "2BNHD", "2BHND"])
def test_all_six_layouts_in_any_case(monkeypatch, layout):
    monkeypatch.setenv("MJOLNIR_ATTN_KV_LAYOUT", layout.lower())
    assert BackendSettings.from_env().kv_layout == layout


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("MJOLNIR_ATTN_DISABLE", "maybe", "1, true, yes, on, 0, false, no, off"),
        ("MJOLNIR_ATTN_BANNER", "2", "1, true, yes, on, 0, false, no, off"),
        ("MJOLNIR_ATTN_DRAFT_T5", "maybe", "1, true, yes, on, 0, false, no, off"),
        ("MJOLNIR_ATTN_Q_DTYPE", "int8", "fp8, e4m3, bf16, bfloat16"),
        ("MJOLNIR_ATTN_KV_LAYOUT", "NHD", "BHN2D, BNH2D, B2NHD, B2HND, 2BNHD, 2BHND"),
        ("MJOLNIR_ATTN_KERNEL_CACHE", "kernels", "1, true, yes, on, 0, false, no, off, an absolute path"),
        ("MJOLNIR_ATTN_CTAS", "two", "a whole number, 1 or more"),
        ("MJOLNIR_ATTN_CTAS", "0", "a whole number, 1 or more"),
        ("MJOLNIR_ATTN_CTAS", "1.5", "a whole number, 1 or more"),
        ("MJOLNIR_ATTN_MAX_SPLITS", "-4", "a whole number, 1 or more"),
        ("MJOLNIR_ATTN_MAX_QLEN", "-1", "a whole number, 0 or more"),
    ],
)
def test_bad_value_names_variable_value_and_what_is_accepted(monkeypatch, name, value, accepted):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as error:
        BackendSettings.from_env()
    assert str(error.value).startswith(f"{name}={value!r}: ")
    assert str(error.value).endswith(f"accepted: {accepted}")


def test_smallest_accepted_numbers(monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_QLEN", "0")
    monkeypatch.setenv("MJOLNIR_ATTN_CTAS", "1")
    monkeypatch.setenv("MJOLNIR_ATTN_MAX_SPLITS", "1")
    settings = BackendSettings.from_env()
    assert (settings.max_q_len, settings.ctas_per_sm, settings.max_splits) == (0, 1, 1)


@pytest.mark.parametrize(
    ("value", "root", "directory"),
    [
        ("", None, "/home/thor/.cache/mjolnir/kernels"),
        ("", "/data/vllm", "/data/vllm/mjolnir/kernels"),
        ("On", "/data/vllm", "/data/vllm/mjolnir/kernels"),
        ("1", " ", "/home/thor/.cache/mjolnir/kernels"),
        ("/srv/kernels", "/data/vllm", "/srv/kernels"),
        ("~/kernels", "/data/vllm", "/home/thor/kernels"),
        ("off", "/data/vllm", None),
        ("0", None, None),
    ],
)
def test_directory_of_compiled_kernels(monkeypatch, value, root, directory):
    monkeypatch.setenv("HOME", "/home/thor")
    monkeypatch.setenv("MJOLNIR_ATTN_KERNEL_CACHE", value)
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    if root is not None:
        monkeypatch.setenv("VLLM_CACHE_ROOT", root)
    assert BackendSettings.from_env().kernel_cache_directory == (Path(directory) if directory else None)


def test_configuration_error_is_a_value_error():
    """vLLM turns a ValueError into a readable message."""
    assert issubclass(ConfigurationError, ValueError)


def test_scales_are_asked_for_by_name(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"MJOLNIR_KV_SCALES is not set, .* accepted: .* `mjolnir calibrate`"):
        BackendSettings.from_env().require_kv_scales()
    monkeypatch.setenv("MJOLNIR_KV_SCALES", " ~/scales.json ")
    monkeypatch.setenv("HOME", "/home/thor")
    assert BackendSettings.from_env().require_kv_scales() == "/home/thor/scales.json"
