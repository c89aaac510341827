"""What vLLM itself says fits: ``python vllm_capacity.py GIB FORMAT FOLDER...`` prints one JSON object.

No engine and no weights: the model is built on PyTorch's meta device, which gives every layer's KV-cache spec, and
vLLM's own functions page them. A program of its own, so that no test process imports vLLM.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def capacity(folder: str, kv_format: str, gib: int) -> dict[str, Any]:
    """Tokens, bytes of the weights and longest context of a model in a cache of ``gib``."""
    arguments = {"skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True, "dtype": "bfloat16"}
    # MJOLNIR takes no MLA, and vLLM's CPU backend only unquantised MLA caches.
    latent = "kv_lora_rank" in (json.load(open(f"{folder}/config.json")))  # noqa: SIM115
    if not latent:
        arguments["attention_backend"] = "MJOLNIR"
    made = EngineArgs(model=folder, kv_cache_dtype=kv_format, **arguments)
    config = made.create_engine_config(UsageContext.OPENAI_API_SERVER)
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            model = initialize_model(config)
        torch.set_default_dtype(torch.float32)
        current_platform.update_block_size_for_backend(config)
        runner = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
        specs = GPUModelRunner.get_kv_cache_spec(runner)
        resolve_kv_cache_layout(config, [["LBHNC"]], specs.values())
        (made_config,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [gib << 30])
        whole = kv_cache_utils.generate_scheduler_kv_cache_config([made_config])
        tokens, _ = kv_cache_utils.get_kv_cache_capacity(config, whole)
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
        room = (gib << 30) - kv_cache_utils._pool_bytes_per_block(config, groups)
        config.model_config.max_model_len = 1 << 30
        longest = kv_cache_utils._estimate_max_model_len_from_groups(config, groups, room)
        destroy_model_parallel()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"tokens": tokens, "longest": longest, "weights": size, "wide": torch.cpu._is_avx512_bf16_supported()}


if __name__ == "__main__":
    init_distributed_environment(1, 0, f"file://{sys.argv[1]}", 0, "gloo")
    found = {path: capacity(path, sys.argv[3], int(sys.argv[2])) for path in sys.argv[4:]}
    sys.stdout.write(f"\nCAPACITY {json.dumps(found)}\n")
