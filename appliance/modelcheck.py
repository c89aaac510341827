"""Is a model folder complete? Asked before every start, because an engine needs a minute to find out."""

import json
import os
import re
import struct
from pathlib import Path

from appliance.errors import ModelError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")
_INDEXES = ("model.safetensors.index.json", "consolidated.safetensors.index.json", "pytorch_model.bin.index.json")
_GGUF_SHARD = re.compile(r"^(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf$")
_LARGEST_HEADER = 100_000_000  # the format's own limit


def check_model(path: Path, *, weights: bool = True, tokenizer: bool = True) -> int:
    """Check that a model's files are all there and whole.

    Args:
        path: a model's folder, or one GGUF file.
        weights: whether the engine will read weights from there.
        tokenizer: whether it will read a tokenizer from there.

    Returns:
        Bytes of the weight files.

    Raises:
        ModelError: the first thing that is wrong.
    """
    if not path.exists():
        raise ModelError(f"{path}: no such model folder")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a model is a folder with config.json, or a .gguf file")
        return _gguf(path)
    _config(path)
    size = _weights(path) if weights else 0
    if tokenizer and not any((path / name).is_file() for name in _TOKENIZERS) and not any(path.glob("*.tiktoken")):
        raise ModelError(f"{path}: no tokenizer ({', '.join(_TOKENIZERS)})")
    return size


def _config(path: Path) -> None:
    for name in ("config.json", "params.json"):
        file = path / name
        if file.is_file():
            try:
                json.loads(file.read_text())
            except (ValueError, OSError) as error:
                raise ModelError(f"{file}: not readable as JSON: {error}") from None
            return
    raise ModelError(f"{path}: no config.json, so this is not a model folder")


def _weights(path: Path) -> int:
    for name in _INDEXES:
        if (path / name).is_file():
            return sum(_weight_file(file) for file in _indexed(path / name))
    found = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    if found:
        return sum(map(_weight_file, found))
    found = sorted(path.glob("*.gguf"))
    if found:
        return sum(map(_gguf, found))
    raise ModelError(f"{path}: no weights (*.safetensors, *.gguf or *.bin)")


def _indexed(index: Path) -> list[Path]:
    """Every shard that an index names."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a shard index: {error}") from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(f"{index.parent}: {len(missing)} of {len(names)} shards are missing, first {missing[0]}")
    return [index.parent / name for name in names]


def _weight_file(file: Path) -> int:
    size = file.stat().st_size
    if file.suffix == ".safetensors":
        expected = _safetensors_bytes(file)
        if size != expected:
            raise ModelError(f"{file}: {size} bytes, its header says {expected}: the download is not complete")
    elif size == 0:
        raise ModelError(f"{file}: empty")
    return size


def _safetensors_bytes(file: Path) -> int:
    """Size that a safetensors file has by its own header: 8 bytes of length, the header, the tensors."""
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _LARGEST_HEADER + 1
        if length > _LARGEST_HEADER:
            raise ModelError(f"{file}: not a safetensors file (a Git LFS pointer, or a broken download)")
        try:
            tensors = json.loads(stream.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{file}: its header is broken or cut off") from None
    return 8 + int(length) + max(ends, default=0)


def _gguf(file: Path) -> int:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file}: not a GGUF file")
    shard = _GGUF_SHARD.match(file.name)
    if shard:
        count = shard["count"]
        for number in range(1, int(count) + 1):
            sibling = file.with_name(f"{shard['stem']}-{number:05d}-of-{count}.gguf")
            if not sibling.is_file():
                raise ModelError(f"{sibling}: this part of the model is missing")
    return os.path.getsize(file)
