"""Scales of a model's KV cache from what its K and V look like; run inside an engine's environment.

``python -m mjolnir.calibration REQUEST`` runs the prompts of a request (JSON, see `Request`) through real vLLM on
MJOLNIR with a cache in the model's dtype, so that what is observed is not yet rounded by a cache format. Whole batches
are kept in ``folder``, so an interrupted run goes on where it was. Progress is told on stdout, a line of JSON each.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mjolnir import __version__
from mjolnir.errors import MjolnirError, ScalesError
from mjolnir.observation import BINS_PER_OCTAVE, LOWEST_OCTAVE
from mjolnir.reference.e2m3 import MAX as E2M3_MAX
from mjolnir.reference.e4m3 import MAX as E4M3_MAX
from mjolnir.scales import LayerScales, ModelShape, Origin, ScaleFile, write

MARK = "MJOLNIR-CALIBRATION "
BATCH = 8  # prompts at a time; what an interruption loses at most

Arrays = dict[str, npt.NDArray[Any]]


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
    tensor_parallel_size: int = 1


def merge(parts: list[Arrays]) -> Arrays:
    """Observations of the same ranks at other times, put together."""
    merged: Arrays = {}
    for part in parts:
        for name, array in part.items():
            kind = name.rpartition("|")[2]
            if name not in merged:
                merged[name] = array.astype(np.int64) if kind != "largest" else array
            else:
                merged[name] = np.maximum(merged[name], array) if kind == "largest" else merged[name] + array
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


def scale_file(arrays: Arrays, model: ModelShape, method: str, percentile: float) -> ScaleFile:
    """Scales from observations of all ranks.

    Raises:
        ScalesError: nothing was seen, a channel was always zero, or a value was NaN or infinite.
    """
    names = sorted({name.partition("|")[0] for name in arrays})
    if not names:
        raise ScalesError("calibration: no layer was observed; accepted: a model whose attention runs on MJOLNIR")
    layers = {}
    for layer in names:
        values = {}
        for part in "kv":
            tokens, odd = (int(count) for count in arrays[f"{layer}|{part}|counts"])
            unseen = int((arrays[f"{layer}|{part}|largest"] == 0).sum())
            if odd or unseen:
                what = f"{odd} values that are NaN or infinite" if odd else f"{unseen} channels that were always zero"
                raise ScalesError(
                    f"calibration: {part.upper()} of {layer} has {what} in {tokens} tokens; nothing was written; "
                    "accepted: prompts that reach every channel, and a model that computes finite numbers"
                )
            reach = ranges(arrays, f"{layer}|{part}", percentile)
            values[part] = (reach / E2M3_MAX).tolist()
            values[f"{part}_fp8"] = float(reach.max() / E4M3_MAX)
        layers[layer] = LayerScales(**values)
    tokens = max(int(arrays[f"{layer}|k|counts"][0]) for layer in names)
    origin = Origin(
        method="max" if method == "max" else "percentile",
        tokens=tokens,
        version=__version__,
        percentile=None if method == "max" else percentile,
    )
    return ScaleFile(model=model, made=origin, layers=layers)


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
    chat = engine.get_tokenizer().chat_template is not None
    for first in range(0, len(request.prompts), BATCH):
        batch = folder / f"batch-{first // BATCH:04d}"
        if not batch.is_dir():
            engine.collective_rpc("mjolnir_forget")
            prompts = request.prompts[first : first + BATCH]
            if chat:
                messages: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts]
                engine.chat(messages, sampling, use_tqdm=False)
            else:
                engine.generate(prompts, sampling, use_tqdm=False)
            staged = batch.with_suffix(".part")
            staged.mkdir(parents=True, exist_ok=True)
            engine.collective_rpc("mjolnir_save", args=(str(staged),))
            staged.rename(batch)
        tell(done=min(first + BATCH, len(request.prompts)), total=len(request.prompts))
    shape = served_shape(engine.llm_engine.model_config)
    ranks = saved(folder)
    arrays = join_ranks(ranks, shape.num_kv_heads) if ranks and ranks[0] else {}
    write(Path(request.out), scale_file(arrays, shape, request.method, request.percentile))
    return Path(request.out)


def tell(**what: Any) -> None:
    """One line of progress for whoever started this."""
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def request_words(request: Request) -> tuple[str, ...]:
    """The command line for a request, without the interpreter."""
    return "-m", "mjolnir.calibration", json.dumps(asdict(request))


def main() -> int:
    """Run a request; a failure of our own is one more line of progress."""
    os.environ["MJOLNIR_KV_OBSERVE"] = "1"
    try:
        tell(written=str(run(Request(**json.loads(sys.argv[1])))))
    except MjolnirError as error:
        tell(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
