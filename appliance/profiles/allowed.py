"""Which flags and variables a profile may hand to the engine. Pure.

A profile says how a model runs. Where the engine listens, who may ask it and what code it loads is not a profile's
business: those flags are the supervisor's, and secrets would end up in logs and process lists.
"""

import re

# Flags that have a key of their own in a profile.
OWN_KEYS = {
    "model": "model",
    "served-model-name": "served_model_name",
    "kv-cache-dtype": "kv_cache_dtype",
    "kv-cache-memory-bytes": "kv_cache_gib",
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "attention-backend": "attention_backend",
    "speculative-config": "speculation",
    "tool-call-parser": "tool_call_parser",
    "enable-auto-tool-choice": "tool_call_parser",
    "reasoning-parser": "reasoning_parser",
    "default-chat-template-kwargs": "chat_template_kwargs",
}
SUPERVISOR_FLAGS = frozenset(
    (
        *("host", "port", "uds", "root-path", "headless", "grpc", "grpc-port", "config", "shutdown-timeout"),
        *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"),
        *(
            "allow-credentials",
            "allowed-origins",
            "allowed-methods",
            "allowed-headers",
            "data-parallel-supervisor-port",
        ),
    )
)
SECRET_FLAGS = frozenset(("api-key", "hf-token"))
# Each names Python code or a service that the engine would load or call.
CODE_FLAGS = frozenset(
    (
        *("middleware", "tool-parser-plugin", "reasoning-parser-plugin", "tool-server", "logits-processors"),
        *("worker-cls", "worker-extension-cls", "scheduler-cls"),
    )
)
VARIABLE_PREFIXES = (
    *("VLLM_", "MJOLNIR_ATTN_", "MJOLNIR_KV", "MJOLNIR_DRAFT_VOCAB", "MJOLNIR_LM_HEAD", "PYTORCH_", "TORCH_"),
    *("TORCHINDUCTOR_", "TRITON_", "FLASHINFER_", "CUDA_", "CUTE_DSL_", "NCCL_", "OMP_", "TOKENIZERS_", "TIKTOKEN_"),
)
VARIABLE_NAMES = frozenset(("MJOLNIR_CONFIG", "MAX_JOBS", "NVCC_THREADS"))
# The supervisor sets these itself, or they let something in.
OWNED_VARIABLES = frozenset(
    (
        *("VLLM_RPC_BASE_PATH", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CACHE_ROOT"),
        *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"),
        *("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_HOST_IP", "VLLM_PORT"),
    )
)

_FLAG = re.compile(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|API_KEYS?|KEYS?|SECRET|PASSWORD)(?:$|_)")
_SECRET_TEXT = re.compile(r"\b(?:hf|sk)[_-][A-Za-z0-9_-]{16,}")


def flag_problem(name: str) -> str | None:
    """Why a key of ``vllm`` can't be used; None when it can."""
    if not _FLAG.fullmatch(name):
        return "a vLLM flag by its long name without dashes in front, such as moe-backend"
    flag = name.replace("_", "-").partition(".")[0]
    if flag.startswith("no-"):
        return f"{flag.removeprefix('no-')}: false"
    # argparse takes an unambiguous beginning of a flag for the flag.
    for own, key in OWN_KEYS.items():
        if own.startswith(flag):
            return f"the profile's own key {key}"
    for refused, why in (
        (SUPERVISOR_FLAGS, "any flag but those that the appliance decides"),
        (SECRET_FLAGS, "no secrets: keys and tokens belong in the environment"),
        (CODE_FLAGS, "no flag that makes the engine load code"),
    ):
        if any(one.startswith(flag) for one in refused):
            return why
    return None


def variable_problem(name: str) -> str | None:
    """Why a variable can't be given to the engine by a profile; None when it can."""
    if not _VARIABLE.fullmatch(name):
        return "a variable's name in capitals"
    if name in OWNED_VARIABLES:
        return "any variable but those that the appliance decides"
    if _SECRET_VARIABLE.search(name):
        return "no secrets: they belong in the environment"
    if name in VARIABLE_NAMES or name.startswith(VARIABLE_PREFIXES):
        return None
    return f"{', '.join(f'{prefix}*' for prefix in VARIABLE_PREFIXES)}, {', '.join(sorted(VARIABLE_NAMES))}"


def looks_secret(text: str) -> bool:
    """Whether a text has the form of a hub token or of an API key."""
    return _SECRET_TEXT.search(text) is not None
