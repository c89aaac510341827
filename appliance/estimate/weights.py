"""Bytes of a model's weights: those of its files where they are there, else by config.json's numbers."""

import json
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ModelError
from appliance.estimate.config import ModelConfig
from appliance.estimate.quantisation import NONE, Quantisation, quantisation_of
from appliance.estimate.tensors import VISION_MARGIN, language_model, vision_tower

_INDEX = "model.safetensors.index.json"
_WIDTHS = {"bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Weights:
    """How large a model's weights are.

    Attributes:
        size: bytes.
        margin: bytes by which ``size`` may be off.
        parameters: numbers of the language model.
        vision_parameters: numbers of a vision tower, 0 without one.
        format: the quantisation, or the type of the numbers.
        source: where ``size`` comes from.
        notes: what is not in it, for people.
    """

    size: int
    margin: int
    parameters: int
    vision_parameters: int
    format: str
    source: str
    notes: tuple[str, ...] = ()


def weigh(config: ModelConfig) -> Weights:
    """Weigh a model.

    Raises:
        ModelError: the configuration lacks a number, or an index beside it can't be read.
    """
    tensors = list(language_model(config))
    parameters = sum(tensor.elements for tensor in tensors)
    tower = vision_tower(config)
    notes = (
        () if tower is not None else ("the vision tower is not counted: its numbers are not those of a transformer",)
    )
    found = _from_files(config.folder)
    if found is not None:
        size, source = found
        try:
            name = _name(quantisation_of(config), config)
        except ModelError:
            name = "quantised"  # the files' sizes need no recipe
        return Weights(size, 0, parameters, tower or 0, name, source)
    quantisation, width = quantisation_of(config), _WIDTHS[config.dtype]
    size = sum(quantisation.bytes_of(tensor, width) for tensor in tensors)
    tower_size = (tower or 0) * width
    margin = round(tower_size * VISION_MARGIN)
    return Weights(size + tower_size, margin, parameters, tower or 0, _name(quantisation, config), "config.json", notes)


def _name(quantisation: Quantisation, config: ModelConfig) -> str:
    return config.dtype if quantisation is NONE or quantisation.scheme is None else quantisation.scheme.name


def _from_files(folder: Path) -> tuple[int, str] | None:
    """Bytes of the weight files of a folder, or what their index says, and which of them it was."""
    index = folder / _INDEX
    names: list[str] = []
    total = None
    if index.is_file():
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(content["weight_map"].values()))
            total = int(content.get("metadata", {}).get("total_size", 0)) or None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: not a shard index: {error}") from None
    files = [folder / name for name in names] or sorted(folder.glob("model*.safetensors"))
    if files and all(file.is_file() for file in files):
        return sum(file.stat().st_size for file in files), "safetensors files"
    return None if total is None else (total, "safetensors index")
