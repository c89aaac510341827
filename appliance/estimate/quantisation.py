"""Bytes of a tensor under the quantisation that a configuration names."""

import fnmatch
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import ModelError
from appliance.estimate.config import Fields, ModelConfig
from appliance.estimate.tensors import Tensor

METHODS = ("fp8", "modelopt", "compressed-tensors", "gptq", "awq", "mxfp4")
_NAMES = {
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "fbgemm_fp8": "fp8",
}


@dataclass(frozen=True)
class Scheme:
    """How the matrices that are quantised lie in memory.

    Attributes:
        name: for people, such as "NVFP4".
        bits: bits of a number.
        block: (rows, columns) of numbers that share a scale; 0 stands for all of them.
        scale_bytes: bytes of what a block has beside its numbers (scale, and zero point where there is one).
        column_bytes: further bytes for each input feature (GPTQ's order of groups).
    """

    name: str
    bits: int
    block: tuple[int, int] = (0, 0)
    scale_bytes: float = 4.0
    column_bytes: int = 0

    def bytes_of(self, tensor: Tensor) -> int:
        """Bytes of a matrix and of its scales."""
        numbers = tensor.rows * math.ceil(tensor.columns * self.bits / 8)
        blocks = math.prod(
            1 if not wide else math.ceil(size / wide)
            for size, wide in zip((tensor.rows, tensor.columns), self.block, strict=True)
        )
        return tensor.count * (numbers + math.ceil(blocks * self.scale_bytes) + tensor.columns * self.column_bytes)


Skipped = Callable[[Tensor], bool]


@dataclass(frozen=True)
class Quantisation:
    """A scheme, and what it leaves out."""

    scheme: Scheme | None
    skipped: Skipped

    def bytes_of(self, tensor: Tensor, width: int) -> int:
        """Bytes of a tensor; ``width`` is a number's where it is not quantised."""
        if self.scheme is None or not tensor.linear or self.skipped(tensor):
            return tensor.elements * width
        return self.scheme.bytes_of(tensor)


NONE = Quantisation(None, lambda _: False)
_NVFP4 = Scheme("NVFP4", 4, (1, 16), 1)


def quantisation_of(config: ModelConfig) -> Quantisation:
    """The quantisation that a configuration names.

    Raises:
        ModelError: it is not known, or its numbers make no sense.
    """
    fields = config.quantisation
    if fields is None:
        return NONE
    said = fields.text("quant_method")
    method = _NAMES.get(said, said)
    reader = _READERS.get(method)
    if reader is None:
        raise ModelError(f"{fields.place}: quant_method is {said!r}; known: {', '.join(METHODS)}")
    return reader(fields)


def _fp8(fields: Fields) -> Quantisation:
    block = fields.values.get("weight_block_size")
    scheme = Scheme("FP8", 8)
    if block is not None:
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise ModelError(f"{fields.place}: weight_block_size is {block!r}; accepted: two whole numbers")
        scheme = Scheme(f"FP8, blocks of {block[0]}x{block[1]}", 8, (block[0], block[1]))
    return Quantisation(scheme, _skipper(fields, "modules_to_not_convert", "ignored_layers"))


def _modelopt(fields: Fields) -> Quantisation:
    name = fields.text("quant_algo").upper()
    if name not in ("FP8", "NVFP4"):
        raise ModelError(
            f"{fields.place}: quant_algo is {name!r}, whose layers differ; known: FP8, NVFP4 (others only with the "
            "weight files or their index beside config.json)"
        )
    scheme = Scheme("FP8", 8) if name == "FP8" else _NVFP4
    return Quantisation(scheme, _skipper(fields, "ignore", "exclude_modules"))


def _compressed_tensors(fields: Fields) -> Quantisation:
    groups = fields.values.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    described = [Fields(found, f"{fields.place}: weights") for found in weights if isinstance(found, dict)]
    if not described:
        raise ModelError(f"{fields.place}: config_groups names no weights; needed: num_bits, type, strategy")
    schemes = {_compressed_scheme(found, fields.text("format")) for found in described}
    if len(schemes) > 1:
        raise ModelError(
            f"{fields.place}: {len(schemes)} kinds of weights can't be told apart without the weight files"
        )
    return Quantisation(schemes.pop(), _skipper(fields, "ignore"))


def _compressed_scheme(weights: Fields, form: str) -> Scheme:
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    group = weights.count("group_size")
    if kind == "float" and bits == 4:
        return Scheme("MXFP4", 4, (1, group or 32), 1) if "mxfp4" in form else Scheme("NVFP4", 4, (1, group or 16), 1)
    name = f"{'FP' if kind == 'float' else 'INT'}{bits}"
    strategy = weights.text("strategy", "tensor")
    if strategy == "block":
        block = weights.values.get("block_structure")
        rows, columns = block if isinstance(block, list) and len(block) == 2 else (128, 128)
        return Scheme(f"{name}, blocks of {rows}x{columns}", bits, (rows, columns), 2)
    zero = 0 if weights.flag("symmetric", True) else bits / 8
    if strategy == "group" and group:
        return Scheme(f"{name}, groups of {group}", bits, (1, group), 2 + zero)
    return Scheme(name, bits, (1, 0) if strategy == "channel" else (0, 0), 2 + zero)


def _gptq(fields: Fields) -> Quantisation:
    scheme = _grouped(fields, "GPTQ", column_bytes=4)
    quantises_head = fields.flag("lm_head")
    return Quantisation(scheme, lambda tensor: _is_head(tensor) and not quantises_head)


def _awq(fields: Fields) -> Quantisation:
    skips = _skipper(fields, "modules_to_not_convert")
    return Quantisation(_grouped(fields, "AWQ"), lambda tensor: _is_head(tensor) or skips(tensor))


def _grouped(fields: Fields, name: str, column_bytes: int = 0) -> Scheme:
    """16-bit scales and packed zero points for each group of input features; group_size -1 is one group."""
    values: Mapping[str, Any] = fields.values
    bits = Fields({"bits": values.get("bits", values.get("w_bit"))}, fields.place).integer("bits")
    group = values.get("group_size", values.get("q_group_size", 128))
    if bits not in (2, 3, 4, 8) or not isinstance(group, int) or (group < 1 and group != -1):
        raise ModelError(
            f"{fields.place}: bits {bits!r}, group_size {group!r}; accepted: 2, 3, 4 or 8 bits, groups above 0 or -1"
        )
    size = max(group, 0)
    return Scheme(f"{name}, {bits} bits", bits, (1, size), 2 + bits / 8, column_bytes)


def _mxfp4(fields: Fields) -> Quantisation:
    del fields  # gpt-oss quantises the routed experts and nothing else
    return Quantisation(Scheme("MXFP4 experts", 4, (1, 32), 1), lambda tensor: not tensor.expert)


_READERS: Mapping[str, Callable[[Fields], Quantisation]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


def _is_head(tensor: Tensor) -> bool:
    return tensor.name.startswith("lm_head")


def _skipper(fields: Fields, *keys: str) -> Skipped:
    """Whether a recipe leaves a tensor out: a module's name, the start of one, a glob, or ``re:`` and a pattern.

    The head is left out as well unless its recipe quantises it on purpose, which none of the public ones does.
    """
    named = [entry for key in keys for entry in fields.strings(key)]
    tests = [_test(entry, fields.place) for entry in named]

    def skipped(tensor: Tensor) -> bool:
        module = tensor.name.removesuffix(".weight")
        return _is_head(tensor) or any(test(module) for test in tests)

    return skipped


def _test(entry: str, place: str) -> Callable[[str], bool]:
    if entry.startswith("re:"):
        try:
            pattern = re.compile(entry[3:])
        except re.error as error:
            raise ModelError(f"{place}: {entry!r} is no pattern: {error}") from None
        return lambda module: pattern.match(module) is not None
    # Checkpoints of models with a vision tower say model.language_model.layers, or language_model.model.layers.
    plain = entry.replace("language_model.", "").removesuffix(".weight")
    plain = plain if plain.startswith(("model.", "lm_head", "*")) else f"*{plain}"
    return lambda module: fnmatch.fnmatchcase(module, plain) or fnmatch.fnmatchcase(module, f"{plain}.*")
