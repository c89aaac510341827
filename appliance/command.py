"""The engine's command line and environment."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import SettingsError
from appliance.settings import Settings
from appliance.tracing import tracing
from mjolnir import scales
from mjolnir.errors import ScalesError
from mjolnir.names import FP6_KV_DTYPE, FP8_KV_DTYPES, KV_SCALES_VARIABLE, STATS_DIR_VARIABLE

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")

_GPU_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvgpu", "/dev/nvmap", "/dev/nvhost-gpu")
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SECRETS = ("VLLM_API_KEY", "OPENAI_API_KEY")
_CPU_KV_CACHE_GIB = 1


@dataclass(frozen=True)
class Launch:
    """All that is needed to start an engine.

    Attributes:
        command: program and arguments.
        environment: the whole environment of the child.
        socket: Unix socket on which the engine will answer.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    socket: Path


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA device (Thor's integrated GPU shows as nvgpu or nvmap)."""
    return any(os.path.exists(node) for node in _GPU_NODES)


def is_local(model: str) -> bool:
    """Whether a model is named by its folder and not by its id on the hub (``name`` or ``owner/name``)."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).exists()


def served_name(settings: Settings) -> str:
    """Name that clients use for the model."""
    if settings.served_model_name:
        return settings.served_model_name
    return Path(settings.model).expanduser().resolve().name if is_local(settings.model) else settings.model


def build(settings: Settings, inherited: dict[str, str], runtime_dir: Path, stats_dir: Path) -> Launch:
    """Put together the launch of an engine.

    Args:
        settings: the appliance's settings.
        inherited: environment to start from, see ``settings.engine_environment``.
        runtime_dir: private folder of this supervisor; the engine's sockets go there.
        stats_dir: folder of the counters files of this supervisor's engines.
    """
    socket = runtime_dir / "engine.sock"
    gpu = has_gpu()
    traces = tracing(settings.otlp_endpoint, inherited)
    command = (*(settings.engine_command or SERVE), *arguments(settings, gpu), *_logging(settings, traces.endpoint))
    command = (*command, "--uds", str(socket))
    # The environment is the operator's and wins over a profile's variables; a blank value counts as not set.
    inherited = inherited | {n: value for n, value in settings.engine_variables.items() if not inherited.get(n)}
    environment = inherited | _environment(settings, gpu, inherited) | scales_environment(settings, inherited)
    # What an engine that was killed leaves in its temporary folder goes when ours goes.
    private = dict.fromkeys(("TMPDIR", "VLLM_RPC_BASE_PATH"), str(runtime_dir))
    environment |= {STATS_DIR_VARIABLE: str(stats_dir), **private, **traces.environment}
    if is_local(settings.model) or settings.offline:
        _drop(environment, _HUB_TOKENS)
    _drop(environment, _SECRETS)
    return Launch(command, environment, socket)


def tool_environment(settings: Settings, inherited: dict[str, str]) -> dict[str, str]:
    """Environment of a tool that runs a model by itself, with the engine's caches and without the clients' secrets."""
    environment = inherited | _environment(settings, has_gpu(), inherited)
    _drop(environment, _SECRETS if not (is_local(settings.model) or settings.offline) else (*_SECRETS, *_HUB_TOKENS))
    return environment


def arguments(settings: Settings, gpu: bool) -> tuple[str, ...]:
    """The flags of `vllm serve`; a flag that the user gave takes the place of ours."""
    flags = {"--served-model-name": served_name(settings), "--kv-cache-dtype": settings.kv_cache_dtype}
    if settings.attention_backend:
        flags["--attention-backend"] = settings.attention_backend
    if settings.max_model_len is not None:
        flags["--max-model-len"] = str(settings.max_model_len)
    if gpu and settings.kv_cache_gib is not None:
        flags["--kv-cache-memory-bytes"] = str(settings.kv_cache_gib << 30)
    if not gpu:
        flags["--dtype"] = "bfloat16"
        # On a CPU inductor needs a C++ compiler and minutes at every start; --no-enforce-eager asks for it.
        flags["--enforce-eager"] = ""
    given = flag_names(settings.engine_args)
    if "--no-enforce-eager" in given:
        flags.pop("--enforce-eager", None)
    model = str(Path(settings.model).expanduser()) if is_local(settings.model) else settings.model
    ours = [word for name, value in flags.items() if name not in given for word in (name, value) if word]
    return (model, *ours, *settings.engine_args)


def _logging(settings: Settings, traces: str) -> tuple[str, ...]:
    """Flags of what the engine tells about requests."""
    given = flag_names(settings.engine_args)
    # Our access log tells more, and a request should stand in the log once.
    quiet = settings.access_log and "--disable-uvicorn-access-log" not in given
    words = ("--disable-uvicorn-access-log",) if quiet else ()
    return (*words, "--otlp-traces-endpoint", traces) if traces and "--otlp-traces-endpoint" not in given else words


def flag_names(words: Iterable[str]) -> set[str]:
    """Names of the flags among command line words, spelled with dashes."""
    return {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}


def _environment(settings: Settings, gpu: bool, inherited: dict[str, str]) -> dict[str, str]:
    caches = settings.cache_dir.absolute()
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        # Process titles overwrite the environment in /proc otherwise, by which we recognise the engine's processes.
        "SPT_NOENV": "1",
        "VLLM_CACHE_ROOT": inherited.get("VLLM_CACHE_ROOT", str(caches / "vllm")),
        "TRITON_CACHE_DIR": inherited.get("TRITON_CACHE_DIR", str(caches / "triton")),
        "TORCHINDUCTOR_CACHE_DIR": inherited.get("TORCHINDUCTOR_CACHE_DIR", str(caches / "inductor")),
    }
    if settings.offline:
        wanted |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if not gpu:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib or _CPU_KV_CACHE_GIB)
        if "LD_PRELOAD" not in inherited:
            wanted |= engine_libraries()
        # vLLM's sampler compiles a function of its own for whoever asks for log-probabilities, eager or not; without a
        # compiler that would be the end of the engine.
        if "TORCH_COMPILE_DISABLE" not in inherited and shutil.which(inherited.get("CXX", "g++")) is None:
            wanted["TORCH_COMPILE_DISABLE"] = "1"
    return wanted


def engine_libraries() -> dict[str, str]:
    """Environment with the OpenMP runtime that vLLM asks for on an x86 CPU; it comes with vLLM's CPU wheel."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    found = platform.machine() == "x86_64" and library.is_file()
    return {"LD_PRELOAD": str(library)} if found else {}


def kv_cache_dtype(settings: Settings) -> str:
    """Format of the KV cache: a flag for the engine takes the place of the setting."""
    words = settings.engine_args
    for position, word in enumerate(words):
        name, _, value = word.replace("_", "-", 2).partition("=") if word.startswith("--") else ("", "", "")
        if name == "--kv-cache-dtype":
            return word.partition("=")[2] if value else (words[position + 1] if position + 1 < len(words) else "")
    return settings.kv_cache_dtype


def scales_environment(settings: Settings, inherited: dict[str, str]) -> dict[str, str]:
    """Environment that names the scale file: of a 6-bit KV cache, or of an 8-bit one where the user names a file.

    Raises:
        SettingsError: there is none, or it can't be used.
    """
    given = inherited.get(KV_SCALES_VARIABLE, "").strip()
    dtype = kv_cache_dtype(settings)
    if dtype != FP6_KV_DTYPE and not (given and dtype in FP8_KV_DTYPES):
        return {}
    path = Path(given).expanduser() if given else scales.default_path(settings.cache_dir, settings.model)
    if not given and not path.exists():
        raise SettingsError(
            f"kv_cache_dtype={FP6_KV_DTYPE}: there are no scales for {settings.model}: {path} is missing; make it with "
            f"`mjolnir calibrate --model {settings.model}`, or start with --calibrate, which does that first, or set "
            f"{KV_SCALES_VARIABLE}"
        )
    check_scales(settings, path)
    return {KV_SCALES_VARIABLE: str(path.absolute())}


def check_scales(settings: Settings, path: Path) -> None:
    """Check that a scale file can be read, and that it was made for the model as far as its folder tells.

    Raises:
        SettingsError: it can't be used.
    """
    try:
        file = scales.load(path)
        config = Path(settings.model).expanduser() / "config.json"
        if config.is_file():
            served = scales.shape_of_config(scales.model_name(settings.model), json.loads(config.read_text()))
            scales.check_model(str(path), file, served)
    except ScalesError as error:
        raise SettingsError(str(error)) from None


def _drop(environment: dict[str, str], names: tuple[str, ...]) -> None:
    for name in names:
        environment.pop(name, None)
