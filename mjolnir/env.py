"""The backend's environment variables: one reader, one error for a bad value.

The backend runs inside vLLM's worker processes, where its only configuration channel is the environment; the
supervisor sets these variables from its own settings. A variable ``MJOLNIR_ATTN_<X>`` may also be given under
its older name ``THOR_T5_<X>``; the new name wins. An empty or blank value counts as not set.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from mjolnir.errors import ConfigurationError

PREFIX = "MJOLNIR_ATTN_"
LEGACY_PREFIX = "THOR_T5_"

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")
Q_DTYPES = {"fp8": "fp8", "e4m3": "fp8", "bf16": "bf16", "bfloat16": "bf16"}
# Not measured yet: `scripts/gpu-engine --mixed` runs a steady load of prompts and decodes with both settings.
SPLIT_MIXED = False
FA4_CHOICES = dict.fromkeys(TRUE_WORDS, "on") | dict.fromkeys(FALSE_WORDS, "off") | {"auto": "auto"}
KV_LAYOUTS = ("BHN2D", "BNH2D", "B2NHD", "B2HND", "2BNHD", "2BHND")


def read(name: str, default: str = "") -> str:
    """Value of a variable, stripped; ``default`` where it is unset or blank under both of its names."""
    return os.environ.get(given_name(name), "").strip() or default


def given_name(name: str) -> str:
    """The name under which a variable was given: the older one where only that is set, else the new one."""
    if not os.environ.get(name, "").strip() and name.startswith(PREFIX):
        legacy = LEGACY_PREFIX + name.removeprefix(PREFIX)
        if os.environ.get(legacy, "").strip():
            return legacy
    return name


def read_bool(name: str, default: bool) -> bool:
    """A switch; accepts ``1 true yes on`` and ``0 false no off`` in any case.

    Raises:
        ConfigurationError: any other word.
    """
    value = read(name).lower()
    if not value:
        return default
    if value in TRUE_WORDS:
        return True
    if value in FALSE_WORDS:
        return False
    accepted = ", ".join(TRUE_WORDS + FALSE_WORDS)
    raise ConfigurationError(f"{given_name(name)}={value!r}: not a switch; accepted: {accepted}")


def read_int(name: str, default: int, minimum: int) -> int:
    """A whole number that is at least ``minimum``.

    Raises:
        ConfigurationError: not a number, or too small.
    """
    value = read(name)
    if not value:
        return default
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise ConfigurationError(f"{given_name(name)}={value!r}: accepted: a whole number, {minimum} or more")
    return number


def read_choice(name: str, choices: dict[str, str], default: str) -> str:
    """One of ``choices`` in any case; its canonical form is returned.

    Raises:
        ConfigurationError: not one of them.
    """
    value = read(name)
    if not value:
        return default
    by_lower_case = {word.lower(): canonical for word, canonical in choices.items()}
    if value.lower() not in by_lower_case:
        raise ConfigurationError(f"{given_name(name)}={value!r}: accepted: {', '.join(choices)}")
    return by_lower_case[value.lower()]


def read_directory(name: str) -> str:
    """A directory that a switch may turn off: an absolute path, ``off``, or empty for the default one.

    Raises:
        ConfigurationError: neither a switch nor an absolute path.
    """
    value = read(name)
    if value.lower() in ("", *TRUE_WORDS):
        return ""
    if value.lower() in FALSE_WORDS:
        return "off"
    path = os.path.expanduser(value)
    if not os.path.isabs(path):  # a worker's current directory is nobody's choice
        accepted = ", ".join(TRUE_WORDS + FALSE_WORDS)
        raise ConfigurationError(f"{given_name(name)}={value!r}: accepted: {accepted}, an absolute path")
    return path


@dataclass(frozen=True)
class BackendSettings:
    """Every setting of the attention backend, read and checked at one place.

    Attributes:
        disabled: T5 is off; every step runs on the fallback.
        fallback: name of the stock backend for everything T5 does not take; empty means automatic.
        fa4: FlashAttention 4 on sm_110: ``auto`` (where it passed its probe), ``on`` (unprobed) or ``off``.
        q_dtype: precision of Q on T5 steps, ``bf16`` (as it comes) or ``fp8`` (CPU only).
        max_q_len: most query tokens a request may have in a T5 step; 0 means 1 + num_speculative_tokens.
        ctas_per_sm: programs that the planner assumes to run side by side on one SM.
        max_splits: most pieces that the KV range of one sequence is cut into.
        draft_t5: whether a drafter's own layers may run on T5.
        noncausal: whether a parallel drafter's non-causal blocks may run on T5.
        fused_draft: whether the builder offers to refresh draft metadata inside a captured graph.
        split_mixed: whether the leading decodes of a step that T5 does not take as a whole run on T5.
        kv_layout: forced logical layout of the KV cache; empty means detected from its shape.
        kernel_cache: directory of compiled kernels, or ``off``; empty means the default one.
        kv_scales: scale file of a 6-bit KV cache; empty where there is none.
        banner: whether to show the banner.
        config_name: name of the model configuration, shown in the banner.
    """

    disabled: bool = False
    fallback: str = ""
    fa4: str = "auto"
    q_dtype: str = "bf16"
    max_q_len: int = 0
    ctas_per_sm: int = 2
    max_splits: int = 16
    draft_t5: bool = True
    noncausal: bool = True
    fused_draft: bool = True
    split_mixed: bool = SPLIT_MIXED
    kv_layout: str = ""
    kernel_cache: str = ""
    kv_scales: str = ""
    banner: bool = True
    config_name: str = ""

    @classmethod
    def from_env(cls) -> "BackendSettings":
        """Read all settings.

        Raises:
            ConfigurationError: a value that can't be used; names the variable, the value and what is accepted.
        """
        return cls(
            disabled=read_bool("MJOLNIR_ATTN_DISABLE", False),
            fallback=read("MJOLNIR_ATTN_FALLBACK").upper(),
            fa4=read_choice("MJOLNIR_ATTN_FA4", FA4_CHOICES, "auto"),
            q_dtype=read_choice("MJOLNIR_ATTN_Q_DTYPE", Q_DTYPES, "bf16"),
            max_q_len=read_int("MJOLNIR_ATTN_MAX_QLEN", 0, minimum=0),
            ctas_per_sm=read_int("MJOLNIR_ATTN_CTAS", 2, minimum=1),
            max_splits=read_int("MJOLNIR_ATTN_MAX_SPLITS", 16, minimum=1),
            draft_t5=read_bool("MJOLNIR_ATTN_DRAFT_T5", True),
            noncausal=read_bool("MJOLNIR_ATTN_NONCAUSAL", True),
            fused_draft=read_bool("MJOLNIR_ATTN_FUSED_DRAFT", True),
            split_mixed=read_bool("MJOLNIR_ATTN_SPLIT_MIXED", SPLIT_MIXED),
            kv_layout=read_choice("MJOLNIR_ATTN_KV_LAYOUT", dict(zip(KV_LAYOUTS, KV_LAYOUTS, strict=True)), ""),
            kernel_cache=read_directory("MJOLNIR_ATTN_KERNEL_CACHE"),
            kv_scales=os.path.expanduser(read("MJOLNIR_KV_SCALES")),
            banner=read_bool("MJOLNIR_ATTN_BANNER", True),
            config_name=read("MJOLNIR_CONFIG"),
        )

    def require_kv_scales(self) -> str:
        """The scale file, which a 6-bit KV cache can't do without.

        Raises:
            ConfigurationError: none is set.
        """
        if not self.kv_scales:
            raise ConfigurationError(
                "MJOLNIR_KV_SCALES is not set, and kv cache dtype fp6_e2m3 needs a scale file; "
                "accepted: the path of one, made by `mjolnir calibrate`"
            )
        return self.kv_scales

    @property
    def kernel_cache_directory(self) -> Path | None:
        """Where compiled kernels are kept; None where they aren't."""
        if self.kernel_cache == "off":
            return None
        root = os.environ.get("VLLM_CACHE_ROOT", "").strip() or "~/.cache"
        return Path(self.kernel_cache or f"{root}/mjolnir/kernels").expanduser()
