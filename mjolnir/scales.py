"""Scale files: the static scales of a model's 6-bit KV cache, one for each layer, KV head and channel.

A file is one JSON object::

    {
      "format": "mjolnir.kv_scales/4",
      "model": {"name": "SmolLM2-135M-Instruct", "architecture": "LlamaForCausalLM",
                "num_kv_heads": 3, "head_size": 64},
      "made": {"method": "max", "tokens": 51200, "version": "0.1.0"},
      "layers": {"model.layers.0.self_attn.attn": {"k": [[0.31, ...], ...], "v": [[...], ...],
                                                   "k_turned": true, "v_turned": true,
                                                   "k_fp8": 0.02, "v_fp8": 0.01}, ...}
    }

``k`` and ``v`` have a row for each KV head of the whole model (not of a rank) and a number for each channel: the cache
holds ``row / scale``, rounded to e2m3, whose largest value is 7.5. A row is that of K or V, K's after its rotary
embedding, and times the matrix of `mjolnir.turning` where it is said to be turned. ``k_fp8`` and ``v_fp8`` are scales
of a whole layer for an fp8 cache, of rows as they are.

A layer that reads another's cache has no scales of its own. This module imports neither torch nor vLLM.
"""

import functools
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mjolnir.errors import ScalesError

FORMAT = "mjolnir.kv_scales/4"

Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rows = Annotated[list[Annotated[list[Scale], Field(min_length=1)]], Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelShape(_Part):
    """What a file says about its model, and what is compared with the model that is served.

    Attributes:
        name: the model's folder name, or the last part of its hub id.
        architecture: first of ``architectures`` in its config.json.
        num_kv_heads: KV heads of the whole model.
        head_size: channels of a head.
    """

    name: str
    architecture: str
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)


class Origin(_Part):
    """How the scales were made.

    Attributes:
        method: ``max``, or ``percentile`` with the share of values (in percent) that do not saturate.
        tokens: tokens that were observed.
        version: of Mjolnir.
        percentile: see ``method``.
    """

    method: Literal["max", "percentile"]
    tokens: int = Field(ge=1)
    version: str
    percentile: float | None = Field(None, gt=0, le=100)


class LayerScales(_Part):
    """Scales of one layer; see the module's text."""

    k: Rows
    v: Rows
    k_fp8: Scale
    v_fp8: Scale
    k_turned: bool = False
    v_turned: bool = False

    def shard(self, num_kv_heads: int, rank: int, world: int) -> "LayerScales":
        """The scales of one tensor-parallel rank.

        Where there are more ranks than KV heads, vLLM gives each head to several ranks in a row.

        Args:
            num_kv_heads: KV heads of this rank.
            rank: which rank.
            world: how many.
        """
        total = len(self.k)
        first = rank * num_kv_heads if total >= world else rank // (world // total)
        rows = slice(first, first + num_kv_heads)
        return self.model_copy(update={"k": self.k[rows], "v": self.v[rows]})


class ScaleFile(_Part):
    """A whole file; see the module's text."""

    format: Literal["mjolnir.kv_scales/4"] = "mjolnir.kv_scales/4"
    model: ModelShape
    made: Origin
    layers: dict[str, LayerScales] = Field(min_length=1)

    @model_validator(mode="after")
    def _shapes(self) -> "ScaleFile":
        heads, channels = self.model.num_kv_heads, self.model.head_size
        for name, layer in self.layers.items():
            for part, rows in (("k", layer.k), ("v", layer.v)):
                if len(rows) != heads or any(len(row) != channels for row in rows):
                    lengths = sorted({len(row) for row in rows})
                    raise ValueError(
                        f"layers.{name}.{part} has {len(rows)} rows of {lengths} numbers; "
                        f"accepted: {heads} rows (KV heads) of {channels} (channels)"
                    )
        return self


def load(path: str | os.PathLike[str]) -> ScaleFile:
    """Read a file; read again only when it has changed.

    Raises:
        ScalesError: it can't be read, is cut short, of another format, or has a value that can't be used.
    """
    try:
        state = os.stat(path)
    except OSError as error:
        raise ScalesError(f"scale file {os.fspath(path)}: {error.strerror}; accepted: what `{MAKE}` wrote") from None
    return _load(os.fspath(path), state.st_mtime_ns, state.st_size)


MAKE = "mjolnir calibrate"


@functools.lru_cache(maxsize=4)
def _load(path: str, _mtime_ns: int, _size: int) -> ScaleFile:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError) as error:
        raise ScalesError(f"scale file {path}: not whole JSON ({error}); accepted: what `{MAKE}` wrote") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ScalesError(f"scale file {path}: its format is {found!r}; accepted: {FORMAT!r}, what `{MAKE}` writes")
    try:
        return ScaleFile.model_validate(document)
    except ValidationError as error:
        raise ScalesError(f"scale file {path}: {_first(error)}") from None


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    detail = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in detail["loc"])
    text = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = "" if not where or isinstance(detail["input"], dict | list) else f"={detail['input']!r}"
    return f"{where}{given}: {text}" if where else text


def check_model(path: str, scales: ScaleFile, served: ModelShape) -> None:
    """Compare the model that a file was made for with the one that is served.

    Raises:
        ScalesError: they differ; names the first difference.
    """
    for field in ModelShape.model_fields:
        made_for, asked = getattr(scales.model, field), getattr(served, field)
        if made_for != asked:
            raise ScalesError(
                f"scale file {path}: made for a model with {field} {made_for!r}; accepted: {asked!r}, of the model "
                f"that is served (`{MAKE}` makes a file for it)"
            )


def check_layers(path: str, scales: ScaleFile, layers: Iterable[str]) -> None:
    """Check that a file knows all of some layers.

    Raises:
        ScalesError: names how many it lacks, and the first.
    """
    missing = sorted(set(layers) - set(scales.layers))
    if missing:
        raise ScalesError(
            f"scale file {path}: no scales for {len(missing)} of this engine's layers, the first {missing[0]}; "
            f"accepted: a file with all of them (`{MAKE}` with the same model and drafter)"
        )


def model_name(model: str) -> str:
    """The name of a model in scale files: its folder's name, or the last part of its hub id."""
    return Path(model).expanduser().resolve().name if os.path.isdir(model) else model.rstrip("/").rpartition("/")[2]


def write(path: Path, scales: ScaleFile) -> None:
    """Write a file as a whole or not at all.

    Raises:
        ScalesError: it can't be written; what was there is left as it was.
    """
    text = json.dumps(scales.model_dump(exclude_none=True), allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as staged:
            try:
                staged.write(text)
                staged.flush()
                os.fsync(staged.fileno())
                os.chmod(staged.name, 0o644)
                os.replace(staged.name, path)
            except BaseException:
                os.unlink(staged.name)
                raise
    except OSError as error:
        raise ScalesError(f"scale file {path}: can't be written: {error.strerror}") from None


def default_path(cache_dir: Path, model: str) -> Path:
    """Where `mjolnir calibrate` writes, and `mjolnir serve` looks for, the scales of a model."""
    return cache_dir / "scales" / f"{model_name(model)}.json"


def shape_of_config(name: str, config: dict[str, Any]) -> ModelShape:
    """The shape of a model from its config.json."""
    text = config.get("text_config") or config
    heads = int(text["num_attention_heads"])
    return ModelShape(
        name=name,
        architecture=(config.get("architectures") or [""])[0],
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_size=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
    )
