# ruff: noqa: E501  (log lines as they come)
"""Classes of failure by lines as vLLM 0.32, PyTorch, Triton and CUDA write them."""

import pytest

from appliance import faults
from appliance.classify import Cause, of_log, of_text
from appliance.errors import EngineError, ModelError, NoRoomError, SettingsError
from appliance.faults import Stage
from appliance.phases import Phase, Progress
from appliance.rootcause import RootCause

CORE = "(EngineCore pid=211) ERROR 12-01 04:06:58 [core.py:1207] "


def traceback(exception: str) -> list[str]:
    lines = ["Traceback (most recent call last):", '  File "core.py", line 1198, in run_engine_core', "    init()"]
    return [CORE + line for line in (*lines, *exception.splitlines())]


@pytest.mark.parametrize(
    ("cause", "exception"),
    [
        (Cause.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total"),
        (Cause.OUT_OF_MEMORY, "RuntimeError: CUDA error: out of memory"),
        (Cause.OUT_OF_MEMORY, "RuntimeError: Triton Error [CUDA]: out of memory"),
        (Cause.OUT_OF_MEMORY, "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                              "allocate memory: you tried to allocate 68719476736 bytes. Error code 12"),
        (Cause.OUT_OF_MEMORY, "OSError: [Errno 12] Cannot allocate memory"),
        (Cause.OUT_OF_MEMORY, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        (Cause.OUT_OF_MEMORY, "ValueError: No available memory for the cache blocks. Try increasing "
                              "`gpu_memory_utilization` when initializing the engine"),
        (Cause.OUT_OF_MEMORY, "ValueError: Free memory on device cuda:0 (11.02/122.82 GiB) on startup is less than "
                              "desired GPU memory utilization (0.92, 112.99 GiB)."),
        (Cause.PROFILING_RACE, "AssertionError: Error in memory profiling. Initial free memory 60.1 GiB, current free "
                               "memory 61.7 GiB. This happens when other processes sharing the same container release"),
        (Cause.KERNEL_IMAGE, "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"),
        (Cause.KERNEL_IMAGE, "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error `ptxas` "
                             "stderr: ptxas fatal   : Value 'sm_110a' is not defined for option 'gpu-name'"),
        (Cause.KERNEL_IMAGE, "RuntimeError: sm_110a not defined"),
        (Cause.KERNEL_IMAGE, "RuntimeError: Ninja build failed: nvcc fatal   : Unsupported gpu architecture 'compute_110a'"),
        (Cause.BAD_FLAG, "ValueError: To serve at least one request with the model's max seq len (131072), (18.0 GiB KV "
                         "cache is needed, which is larger than the available KV cache memory (4.0 GiB)."),
        (Cause.BAD_FLAG, "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
                         "  Value error, max_num_batched_tokens must be at least max_num_seqs [type=value_error]"),
        (Cause.BAD_FLAG, "mjolnir.errors.ConfigurationError: MJOLNIR_ATTN_MAX_SPLITS='x': accepted: a whole number"),
        (Cause.BAD_FLAG, "ModuleNotFoundError: No module named 'bitsandbytes'"),
        (Cause.BAD_MODEL, "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata"),
        (Cause.BAD_MODEL, "ValueError: There is no module or parameter named 'model.layers.0.mlp.w' in Qwen3ForCausalLM"),
        (Cause.BAD_MODEL, "ValueError: Model architectures ['FooForCausalLM'] are not supported for now."),
        (Cause.BAD_MODEL, "OSError: /models/x does not appear to have a file named config.json."),
        (Cause.BAD_MODEL, "KeyError: 'layers.0.self_attn.qkv_proj.weight_scale'"),
        (Cause.BAD_MODEL, "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
        (Cause.POISONED_CACHE, "ImportError: /cache/triton/5ZRQ/cuda_utils.so: file too short"),
        (Cause.POISONED_CACHE, "torch._inductor.exc.InductorError: FileNotFoundError: [Errno 2] No such file or "
                               "directory: '/cache/inductor/xy/cxyz.py'"),
        (Cause.POISONED_CACHE, "_pickle.UnpicklingError: pickle data was truncated"),
        (Cause.POISONED_CACHE, "EOFError: Ran out of input"),
        (Cause.POISONED_CACHE, "RuntimeError: CUDA error: device kernel image is invalid"),
        (Cause.CUDA_ERROR, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        (Cause.CUDA_ERROR, "RuntimeError: Triton Error [CUDA]: unspecified launch failure"),
        (Cause.CUDA_ERROR, "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        (Cause.CUDA_ERROR, "torch.AcceleratorError: CUDA error: device-side assert triggered"),
        (Cause.DISK_FULL, "OSError: [Errno 28] No space left on device: '/cache/vllm/torch_compile_cache/a1'"),
        (Cause.UNKNOWN, "RuntimeError: NCCL error: unhandled system error"),
        (Cause.UNKNOWN, "AssertionError"),
    ],
)  # fmt: skip
def test_the_class_of_an_exception_that_ended_a_start(cause, exception):
    fault = faults.of_exit(Stage.START, 1, traceback(exception))
    assert fault.cause is cause
    assert fault.text.startswith("the engine ended (exit code 1)")
    assert fault.stage is Stage.START


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (Cause.CUDA_ERROR, "[rank0]:[E1201 04:06:58.1 ProcessGroupNCCL.cpp:2057] CUDA error: an illegal memory access"),
        (Cause.OUT_OF_MEMORY, "NvMapMemAllocInternalTagged: 1075072515 error 12"),
        (Cause.UNKNOWN, "(EngineCore pid=2) WARNING 12-01 04:06:58 [x.py:1] CUDA out of memory is near"),
        (Cause.UNKNOWN, "(EngineCore pid=2) INFO 12-01 04:06:58 [x.py:1] CUDA error handling is on"),
        (Cause.UNKNOWN, "/x/torch/cuda/__init__.py:2: UserWarning: no kernel image is available for sm_121"),
        (Cause.UNKNOWN, "No tokenizer was given"),
    ],
)
def test_a_line_beside_the_first_exception_counts_only_where_it_is_clear(cause, line):
    assert of_log(None, [line]) is cause
    assert of_log(RootCause("RuntimeError: worker died"), [line]) is cause


def test_the_first_exception_wins_over_later_lines():
    log = [*traceback("torch.OutOfMemoryError: CUDA out of memory."), CORE + "CUDA error: an illegal memory access"]
    assert faults.of_exit(Stage.START, 1, log).cause is Cause.OUT_OF_MEMORY


@pytest.mark.parametrize("exception", ["ValueError: max_tokens is too large", "KeyError: 'layers.0.weight'"])
def test_a_bad_request_is_not_taken_for_bad_settings_when_a_serving_engine_dies(exception):
    assert faults.of_exit(Stage.READY, 137, traceback(exception)).cause is Cause.UNKNOWN


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (SettingsError("x"), Cause.BAD_FLAG, 2),
        (ModelError("x"), Cause.BAD_MODEL, 1),
        (NoRoomError("x"), Cause.OUT_OF_MEMORY, 1),
        (EngineError("fork: Cannot allocate memory"), Cause.OUT_OF_MEMORY, 1),
        (EngineError("x"), Cause.UNKNOWN, 1),
    ],
)
def test_the_class_of_a_failed_check(error, cause, code):
    fault = faults.of_check(error)
    assert (fault.cause, fault.text, fault.exit_code) == (cause, str(error), code)
    assert str(fault.last_word()) == str(error)
    assert fault.last_word("3 failed starts").exit_code == code


def test_faults_that_no_log_tells():
    stall = faults.of_stall(Progress(Phase.COMPILE), 61.4)
    assert (stall.cause, stall.text) == (
        Cause.HANG, "the start stands still: nothing new from the engine for 61 s, in phase compile"
    )  # fmt: skip
    floor = faults.of_floor(Progress(Phase.LOAD), 2**29, 2**30)
    assert floor.cause is Cause.OUT_OF_MEMORY
    assert "fell to 0.50 GiB in phase load, below the floor of 1.00 GiB" in floor.text
    hang = faults.of_hang(3, 180.2, "4 requests and no step")
    assert (hang.cause, hang.stage) == (Cause.HANG, Stage.READY)
    assert "no progress in 3 looks over 180 s (4 requests and no step)" in hang.text


@pytest.mark.parametrize(
    ("exception", "cause"),
    [
        ("ValueError: Out of range float values are not JSON compliant: nan", Cause.SELF_TEST),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", Cause.CUDA_ERROR),
    ],
)
def test_a_failed_self_test_is_of_the_class_that_the_log_tells_or_of_its_own(exception, cause):
    fault = faults.of_self_test("/v1/chat/completions answered 500", traceback(exception))
    assert (fault.cause, fault.stage) == (cause, Stage.START)
    assert "the self-test failed: /v1/chat/completions answered 500" in fault.text


def test_a_long_line_costs_no_more_than_its_head():
    assert of_text("x" * 5000 + "CUDA error") is None
