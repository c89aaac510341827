"""Which class of failure a line of the engine's log tells. Pure.

The patterns are vLLM 0.32.0's, PyTorch's, Triton's and CUDA's words. A line that is not known is of class
``unknown``, whose policy is to try again a few times, so a reworded message costs a better answer and nothing else.
"""

import re
from collections.abc import Iterable
from enum import StrEnum

from appliance.rootcause import RootCause


class Cause(StrEnum):
    """Why an engine was lost: label ``cause`` of ``appliance_engine_restarts_total``."""

    OUT_OF_MEMORY = "out_of_memory"
    PROFILING_RACE = "profiling_race"  # the memory in use changed while vLLM measured it
    KERNEL_IMAGE = "kernel_image"  # compiled code that this GPU or this assembler does not know
    BAD_FLAG = "bad_flag"  # settings that the engine does not take
    BAD_MODEL = "bad_model"  # model files that it can't use
    POISONED_CACHE = "poisoned_cache"  # a file of a compile cache that can't be read back
    CUDA_ERROR = "cuda_error"
    DISK_FULL = "disk_full"
    HANG = "hang"  # it runs and gets nothing done
    SELF_TEST = "self_test"  # it answered the first request wrongly
    UNKNOWN = "unknown"


_CACHE_PATH = r"(?:torch_?inductor|inductor|torch_compile_cache|[./]triton|mjolnir/kernels|cached_ops|\.cubin)"
_BROKEN = (
    r"file too short|invalid ELF header|undefined symbol|No such file or directory|cannot open shared object|"
    r"unexpected end|JSONDecodeError|not a valid|truncated|corrupt"
)
# In the order in which they are asked: the special before the general.
_PATTERNS: tuple[tuple[Cause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(pattern, re.IGNORECASE))
    for cause, pattern in (
        (Cause.PROFILING_RACE, r"Error in memory profiling"),
        (Cause.DISK_FULL, r"No space left on device|Disk quota exceeded|\[Errno 28\]"),
        (
            Cause.KERNEL_IMAGE,
            r"no kernel image is available|NoKernelImageForDevice|NoBinaryForGpu|"
            r"sm_\d+[af]?'? (?:is )?not defined|Unsupported gpu architecture|unsupported toolchain|"
            r"UnsupportedPtxVersion|is not a recognized processor|Unsupported \.version",
        ),
        (
            Cause.BAD_FLAG,
            r"larger than the available KV cache memory|is larger than the maximum number of tokens that can be stored",
        ),
        (
            Cause.OUT_OF_MEMORY,
            r"out of memory|OutOfMemory|No available memory for the cache blocks|Free memory on device|"
            r"can't allocate memory|Cannot allocate memory|std::bad_alloc|\bMemoryError\b|"
            r"CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|NvMapMem\w*.*error|NVML_ERROR_MEMORY",
        ),
        (
            Cause.POISONED_CACHE,
            r"UnpicklingError|pickle data was truncated|EOFError: Ran out of input|bad marshal data|"
            r"device kernel image is invalid|InvalidKernelImage|"
            rf"{_CACHE_PATH}.*(?:{_BROKEN})|(?:{_BROKEN}).*{_CACHE_PATH}",
        ),
        (
            Cause.CUDA_ERROR,
            r"CUDA error|Triton Error \[CUDA\]|CUDA driver error|cudaError\w+|CUDA_ERROR_\w+|CUBLAS_STATUS_\w+|"
            r"cuDNN error|illegal memory access|unspecified launch failure|misaligned address|device-side assert|"
            r"illegal instruction was encountered",
        ),
        (
            Cause.BAD_MODEL,
            r"SafetensorError|does not appear to have a file named|Can't load (?:the )?(?:tokenizer|config)|"
            r"No tokenizer|model architectures? .* (?:are|is) not supported|There is no module or parameter named|"
            r"PytorchStreamReader failed|were not initialized from checkpoint|is not a valid model identifier|"
            r"RepositoryNotFoundError|GatedRepoError|LocalEntryNotFoundError|Unrecognized model in|"
            r"does not recognize this architecture|Cannot find any model weights|Invalid repository ID|"
            r"(?:size|shape) mismatch|FileNotFoundError|KeyError: '[\w.]*(?:layers|weight|scale)",
        ),
    )
)
# Clear enough to be believed anywhere in the log and not only in its first exception.
_CLEAR = (Cause.PROFILING_RACE, Cause.DISK_FULL, Cause.KERNEL_IMAGE, Cause.OUT_OF_MEMORY, Cause.CUDA_ERROR)
_HARMLESS = re.compile(r"(?:^|\) ?)(?:DEBUG|INFO|WARNING) \d\d-\d\d |\bUserWarning\b|\[W\d")
_HEAD = 1000  # characters of a line that are looked at


def of_text(text: str) -> Cause | None:
    """The class that one line tells, None where it tells none."""
    return next((cause for cause, pattern in _PATTERNS if pattern.search(text[:_HEAD])), None)


def of_log(found: RootCause | None, lines: Iterable[str]) -> Cause:
    """The class of a loss.

    Args:
        found: the first exception of the log.
        lines: the log, for what its first exception does not tell.
    """
    if found is not None:
        cause = of_text(found.text)
        if cause is not None:
            return cause
        if found.settings:
            return Cause.BAD_FLAG
    for line in lines:
        cause = None if _HARMLESS.search(line[:_HEAD]) else of_text(line)
        if cause in _CLEAR:
            return cause
    return Cause.UNKNOWN
