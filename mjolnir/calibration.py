"""Scales of a model's KV cache from what its K and V look like; run inside an engine's environment.

``python -m mjolnir.calibration REQUEST`` runs the prompts of a request (JSON, see `Request`) through real vLLM on
MJOLNIR with a cache in the model's dtype, so that what is observed is not yet rounded by a cache format. Whole batches
are kept in ``folder``, so an interrupted run goes on where it was. Progress is told on stdout, a line of JSON each.
"""

import json
import os
import shutil
import sys
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mjolnir import __version__
from mjolnir.errors import MjolnirError, ScalesError
from mjolnir.observation import BINS_PER_OCTAVE, LOWEST_OCTAVE, PLAIN, TURNED
from mjolnir.reference.e2m3 import MAX as E2M3_MAX
from mjolnir.reference.e4m3 import MAX as E4M3_MAX
from mjolnir.scales import LayerScales, ModelShape, Origin, ScaleFile, write

MARK = "MJOLNIR-CALIBRATION "
BATCH = 8  # prompts at a time; what an interruption loses at most

Arrays = dict[str, npt.NDArray[Any]]
_SUMS = ("histogram", "counts")
# A turn gives all channels the same error, which harms the small ones where a few are far larger (see the larger shapes
# in docs/quality.md). SmolLM2-135M, on which it was measured, has 1.2 in most layers and 2.5 in the worst.
MOST_SPREAD = 3.0


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        model: folder or hub id.
        out: the scale file.
        folder: where whole batches are kept.
        prompts: one user's message each.
        answer_tokens: tokens generated for each.
        max_model_len: longest prompt plus answer.
        method: ``max`` or ``percentile``.
        percentile: share of values, in percent, that do not saturate.
        turn: whether rows are to be turned, see `mjolnir.turning`.
        tensor_parallel_size: ranks.
    """

    model: str
    out: str
    folder: str
    prompts: list[str]
    answer_tokens: int = 96
    max_model_len: int = 2048
    method: str = "max"
    percentile: float = 100.0
    turn: bool = True
    tensor_parallel_size: int = 1


def merge(parts: list[Arrays]) -> Arrays:
    """Observations of the same ranks at other times, put together."""
    merged: Arrays = {}
    for part in parts:
        for name, array in part.items():
            kind = name.rpartition("|")[2]
            if name not in merged:
                merged[name] = array.astype(np.int64) if kind in _SUMS else array
            elif kind in _SUMS:
                merged[name] = merged[name] + array
            else:
                merged[name] = np.maximum(merged[name], array)
    return merged


def join_ranks(ranks: list[Arrays], total_heads: int) -> Arrays:
    """The KV heads of all ranks side by side; where several ranks hold the same head, one of them counts."""
    first = next(array for name, array in ranks[0].items() if name.endswith("largest"))
    copies = max(1, len(ranks) * len(first) // total_heads)
    joined: Arrays = {}
    for name, array in ranks[0].items():
        whole = [rank[name] for rank in ranks[::copies]]
        joined[name] = array if name.endswith("counts") else np.concatenate(whole)
    return joined


def ranges(arrays: Arrays, name: str, percentile: float) -> npt.NDArray[np.float64]:
    """(heads, channels): the magnitude that is to become the largest code; 100 % is the maximum."""
    largest: npt.NDArray[np.float64] = arrays[f"{name}|largest"].astype(np.float64)
    if percentile >= 100:
        return largest
    seen = arrays[f"{name}|histogram"].cumsum(axis=-1)
    index = (seen < np.ceil(seen[..., -1:] * percentile / 100)).sum(axis=-1)
    reach: npt.NDArray[np.float64] = np.minimum(largest, np.exp2(LOWEST_OCTAVE + (index + 1) / BINS_PER_OCTAVE))
    return reach


def spread(peaks: npt.NDArray[Any]) -> float:
    """By how much a turn would raise the level of a median channel, of the worst head; ``peaks`` is by channel."""
    level: npt.NDArray[Any] = np.sqrt(np.square(peaks.astype(np.float64)).mean(axis=-1))
    median = np.median(peaks, axis=-1)
    return float((level / median).max()) if median.all() else np.inf


def scale_file(arrays: Arrays, model: ModelShape, method: str, percentile: float, turn: bool) -> ScaleFile:
    """Scales from observations of all ranks.

    What is too uneven to be turned has the maximum's scales, by channel.

    Args:
        arrays: see `join_ranks`; of turned rows where ``turn`` is true.
        model: what was observed.
        method: see `Request`.
        percentile: likewise.
        turn: likewise.

    Raises:
        ScalesError: nothing was seen, a channel was always zero, or a value was NaN or infinite.
    """
    names = sorted({name.partition("|")[0] for name in arrays})
    if not names:
        raise ScalesError("calibration: no layer was observed; accepted: a model whose attention runs on MJOLNIR")
    layers = {
        layer: LayerScales(
            **{**_of_rows(arrays, layer, "k", percentile, turn), **_of_rows(arrays, layer, "v", percentile, turn)}
        )
        for layer in names
    }
    tokens = max(int(arrays[f"{layer}|k|counts"][0]) for layer in names)
    origin = Origin(
        method="max" if method == "max" else "percentile",
        tokens=tokens,
        version=__version__,
        percentile=None if method == "max" else percentile,
    )
    return ScaleFile(model=model, made=origin, layers=layers)


def _of_rows(arrays: Arrays, layer: str, part: str, percentile: float, turn: bool) -> dict[str, Any]:
    """What a scale file says of the K or V of a layer; see `scale_file`."""
    peaks = arrays[f"{layer}|{part}|peak"].astype(np.float64)
    tokens, odd = (int(count) for count in arrays[f"{layer}|{part}|counts"])
    turned = turn and not odd and spread(peaks) <= MOST_SPREAD
    reach = peaks if turn and not turned else ranges(arrays, f"{layer}|{part}", percentile)
    unseen = int((reach == 0).sum())
    if odd or unseen:
        what = f"{odd} values that are NaN or infinite" if odd else f"{unseen} channels that were always zero"
        raise ScalesError(
            f"calibration: {part.upper()} of {layer} has {what} in {tokens} tokens; nothing was written; "
            "accepted: prompts that reach every channel, and a model that computes finite numbers"
        )
    return {
        part: (reach / E2M3_MAX).tolist(),
        f"{part}_turned": turned,
        f"{part}_fp8": float(peaks.max()) / E4M3_MAX,
    }


def saved(folder: Path) -> list[Arrays]:
    """What the ranks have seen, over all batches that are in a folder."""
    by_rank: dict[str, list[Arrays]] = {}
    for file in sorted(folder.glob("batch-*/rank-*.npz")):
        with np.load(file) as arrays:
            by_rank.setdefault(file.name, []).append(dict(arrays))
    return [merge(by_rank[name]) for name in sorted(by_rank, key=lambda name: int(name[5:-4]))]


def run(request: Request) -> Path:
    """Observe the model and write its scales.

    Raises:
        ScalesError: see `scale_file`.
    """
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    from mjolnir.packed import served_shape  # noqa: PLC0415

    folder = Path(request.folder)
    engine = LLM(
        model=request.model,
        attention_backend="MJOLNIR",
        kv_cache_dtype="auto",
        enforce_eager=True,
        max_model_len=request.max_model_len,
        max_num_seqs=BATCH,
        enable_prefix_caching=False,
        tensor_parallel_size=request.tensor_parallel_size,
        worker_extension_cls="mjolnir.observation.WorkerExtension",
        disable_log_stats=True,
        seed=0,
    )
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=request.answer_tokens)
    for first in range(0, len(request.prompts), BATCH):
        batch = folder / f"batch-{first // BATCH:04d}"
        if not _whole(batch):
            engine.collective_rpc("mjolnir_forget")
            _answer(engine, request.prompts[first : first + BATCH], sampling)
            _keep(engine, batch)
        tell(done=min(first + BATCH, len(request.prompts)), total=len(request.prompts))
    shape = served_shape(engine.llm_engine.model_config)
    ranks = saved(folder)
    arrays = join_ranks(ranks, shape.num_kv_heads) if ranks and ranks[0] else {}
    write(Path(request.out), scale_file(arrays, shape, request.method, request.percentile, request.turn))
    return Path(request.out)


def _answer(engine: Any, prompts: list[str], sampling: Any) -> None:
    """Have a batch answered, as a chat where the model knows chats."""
    if engine.get_tokenizer().chat_template is None:
        engine.generate(prompts, sampling, use_tqdm=False)
        return
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    engine.chat(messages, sampling, use_tqdm=False)


def _whole(batch: Path) -> bool:
    """Whether a batch was kept; one that can't be read, after a power cut say, goes."""
    try:
        for file in batch.glob("rank-*.npz"):
            with file.open("rb") as raw, np.load(raw) as arrays:  # of a bad file, np.load would leave its own open
                dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        shutil.rmtree(batch)
    return batch.is_dir()


def _keep(engine: Any, batch: Path) -> None:
    """Have all ranks write what they saw.

    Raises:
        ScalesError: one could not; earlier batches are as they were.
    """
    staged = batch.with_suffix(".part")
    try:
        staged.mkdir(parents=True, exist_ok=True)
        reason = next((reason for reason in engine.collective_rpc("mjolnir_save", args=(str(staged),)) if reason), "")
        if not reason:
            staged.rename(batch)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        shutil.rmtree(staged, ignore_errors=True)
        raise ScalesError(f"calibration: {batch}: can't be written: {reason}; what was kept before is whole")


def tell(**what: Any) -> None:
    """One line of progress for whoever started this."""
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def request_words(request: Request) -> tuple[str, ...]:
    """The command line for a request, without the interpreter."""
    return "-m", "mjolnir.calibration", json.dumps(asdict(request))


def main() -> int:
    """Run a request; a failure of our own is one more line of progress."""
    request = Request(**json.loads(sys.argv[1]))
    os.environ["MJOLNIR_KV_OBSERVE"] = TURNED if request.turn else PLAIN
    try:
        tell(written=str(run(request)))
    except MjolnirError as error:
        tell(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
