"""Per-tensor scales of an fp8 KV cache from a scale file, where one is given; without one they stay vLLM's.

vLLM writes a layer's own scales (the checkpoint's, else 1) after it has called the layer's impl, whenever weights have
been loaded. So ours are put in place when the builder is made, and before the first step after another load: impls
count loads, builders compare. The tensors keep their memory, which captured graphs refer to.
"""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from mjolnir import scales
from mjolnir.env import BackendSettings
from mjolnir.names import FP8_KV_DTYPES
from mjolnir.packed import checked_file

logger = logging.getLogger("vllm.mjolnir")

_loads = itertools.count(1)
_latest = 0


def weights_loaded() -> None:
    """Called by impls: whatever scales their layers have will be overwritten."""
    global _latest  # noqa: PLW0603  (one count a process, as vLLM loads for the whole process)
    _latest = next(_loads)


class TensorScales:
    """The scales of a group's layers.

    Args:
        path: of the file, for messages.
        layers: the group's layers that keep an fp8 cache, by name.
        file: the file.
    """

    def __init__(self, path: str, layers: Mapping[str, Any], file: scales.ScaleFile) -> None:
        self._layers = {
            name: (layer, file.layers[getattr(layer, "kv_sharing_target_layer_name", None) or name])
            for name, layer in layers.items()
        }
        self._seen = -1
        logger.info("Mjolnir: fp8 scales of %d layers from %s", len(self._layers), path)
        self.put()

    def put(self) -> None:
        """Put them in place, unless nothing was loaded since."""
        if self._seen == _latest:
            return
        self._seen = _latest
        for layer, found in self._layers.values():
            for part, value in (("k", found.k_fp8), ("v", found.v_fp8)):
                getattr(layer, f"_{part}_scale").fill_(value)
                setattr(layer, f"_{part}_scale_float", value)  # FlashInfer reads this one
                if (on_host := getattr(layer, f"_{part}_scale_cpu", None)) is not None:
                    on_host.fill_(value)


def of_group(vllm_config: Any, layers: Mapping[str, Any] | None) -> TensorScales | None:
    """The scales of a group's layers; None where they have no fp8 cache, or no file was given.

    Raises:
        ScalesError: the file can't be used for this model.
    """
    path = BackendSettings.from_env().kv_scales
    ours = {
        name: layer for name, layer in (layers or {}).items() if getattr(layer, "kv_cache_dtype", None) in FP8_KV_DTYPES
    }
    if not path or not ours:
        return None
    return TensorScales(path, ours, checked_file(path, vllm_config, ours))
