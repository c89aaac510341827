"""Reads a model's config.json: from a folder, or from the local cache of the hub."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ModelError, SettingsError
from appliance.estimate.family import FAMILIES, family_of

CONFIG = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class Fields:
    """A JSON object whose values are asked for by name and type.

    Attributes:
        values: the object.
        place: how messages name it.
    """

    values: Mapping[str, Any]
    place: str

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number.

        Raises:
            ModelError: it is missing and there is no default, or it is no such number.
        """
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.place}: {name} is missing; needed: a whole number above 0")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.place}: {name} is {value!r}; accepted: a whole number above 0")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """A whole number that may be 0; null and a missing key give the default."""
        value = self.values.get(name)
        return default if value in (None, 0) else self.integer(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.place}: {name} is {value!r}; accepted: true, false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self.place}: {name} is {value!r}; accepted: a string")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of strings; empty when it is missing."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.place}: {name} is not a list of strings")
        return value

    def part(self, name: str) -> "Fields | None":
        """An object inside this one."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelError(f"{self.place}: {name} is {value!r}; accepted: an object")
        return Fields(value, f"{self.place}: {name}")


@dataclass(frozen=True)
class ModelConfig:
    """A config.json, taken apart.

    Attributes:
        folder: where it lies; weight files may lie beside it.
        whole: all of it.
        text: the part that describes the language model.
        vision: the part that describes a vision tower.
        model_type: kind of the language model.
    """

    folder: Path
    whole: Fields
    text: Fields
    vision: Fields | None
    model_type: str

    @property
    def architecture(self) -> str:
        """Name of the model's class, for messages."""
        return _architecture(self.whole)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value of the language model, which the outer object may hold instead."""
        return self.text.flag(name, self.whole.flag(name, default))

    @property
    def quantisation(self) -> Fields | None:
        """How the weights are quantised, or None."""
        for fields in (self.whole, self.text):
            found = fields.part("quantization_config") or fields.part("compression_config")
            if found is not None:
                return Fields(found.values, f"{fields.place}: quantization_config")
        return _modelopt(self.folder)

    @property
    def dtype(self) -> str:
        """Type of the weights that are not quantised: bfloat16, float16 or float32.

        vLLM runs what is float32 in bfloat16 (it reads the same key, ``dtype: auto``).
        """
        found = [fields.text(name) for fields in (self.text, self.whole) for name in ("dtype", "torch_dtype")]
        name = next(filter(None, found), "bfloat16").removeprefix("torch.")
        if name not in ("bfloat16", "float16", "float32"):
            raise ModelError(f"{self.whole.place}: torch_dtype is {name!r}; accepted: bfloat16, float16, float32")
        return "bfloat16" if name == "float32" else name


def load(model: str, *, online: bool = False) -> ModelConfig:
    """Read the configuration of a model.

    Args:
        model: a folder, its config.json, or an id on the hub.
        online: whether the hub may be asked for a config.json that is not in the local cache. Weights are never
            downloaded.

    Raises:
        ModelError: there is none, or it can't be used.
        SettingsError: ``model`` is neither a folder nor an id.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return parse(path)
    if path.is_file():
        raise ModelError(f"{path}: can't be estimated; accepted: a folder with {CONFIG}")
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ModelError(f"{path}: no {CONFIG}, so this is not a model folder")
        return parse(path / CONFIG)
    if not _HUB_ID.fullmatch(model):
        raise SettingsError(f"{model!r}: no such folder; accepted: a model's folder, or its id on the hub (owner/name)")
    return parse(_from_hub(model, online))


def parse(path: Path) -> ModelConfig:
    """Take a config.json apart.

    Raises:
        ModelError: it is not JSON, not an object, or says nothing of a language model.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object")
    whole = Fields(values, str(path))
    text = next(_text_parts(whole), whole)
    model_type = text.text("model_type") or whole.text("model_type")
    if not model_type:
        raise ModelError(f"{path}: model_type is missing; needed: the kind of the model, such as llama")
    # A configuration of one kind nests no text_config; vLLM and transformers call its text part so all the same.
    if model_type not in FAMILIES and f"{model_type}_text" in FAMILIES:
        model_type = f"{model_type}_text"
    unsaid = family_of(model_type, f"{path} ({_architecture(whole)})").defaults or {}
    said = {name: value for name, value in text.values.items() if value is not None}
    return ModelConfig(
        path.parent, whole, Fields({**unsaid, **said}, text.place), whole.part("vision_config"), model_type
    )


def _architecture(whole: Fields) -> str:
    return next(iter(whole.strings("architectures")), whole.text("model_type"))


def _text_parts(fields: Fields) -> Iterator[Fields]:
    """The nested descriptions of the language model, innermost first."""
    for name in _TEXT_PARTS:
        inner = fields.part(name)
        if inner is not None:
            yield from _text_parts(inner)
            yield inner


def _from_hub(model: str, online: bool) -> Path:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache  # noqa: PLC0415
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415
    except ModuleNotFoundError:
        raise SettingsError(f"{model}: huggingface_hub is not installed here; accepted: a model's folder") from None
    cached = try_to_load_from_cache(model, CONFIG)
    if isinstance(cached, str):
        return Path(cached)
    if not online or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelError(f"{model}: its {CONFIG} is not in the local cache; --online fetches that one file")
    try:
        return Path(hf_hub_download(model, CONFIG))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"{model}: can't fetch {CONFIG}: {str(error).splitlines()[0]}") from None


def _modelopt(folder: Path) -> Fields | None:
    """ModelOpt's own file, which older exports have instead of a key in config.json."""
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        inner = dict(values["quantization"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: not readable: {error}") from None
    return Fields({**inner, "quant_method": "modelopt"}, str(path))
