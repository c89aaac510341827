"""Which part of a 6-bit cache costs what, and what helps: K and V rounded inside transformers, in float32.

A small subset of what `mjolnir.bench.quality` measures through vLLM, without the noise of bf16 logits, so that ways to
make scales can be told apart in minutes. Measured are the change of perplexity and, with far less noise, the mean
Kullback-Leibler divergence from the distributions of an exact cache. Nothing here runs a kernel of ours.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mjolnir import turning
from mjolnir.bench import heldout
from mjolnir.bench.results import write_result
from mjolnir.calibration_prompts import PROMPTS
from mjolnir.reference import e2m3

CHARACTERS, WINDOW, WINDOWS = 400_000, 1024, 40  # as in `mjolnir.bench.quality`
ANSWER = 48  # tokens generated for each prompt of the calibration
BATCH = 16  # prompts at a time
TRIED = [2 ** (-step / 8) for step in range(13)]  # shares of the range that a clip may leave

# Rows are (1, num_kv_heads, tokens, head_size).
Rounding = Callable[[int, torch.Tensor], torch.Tensor]  # (layer, rows): what the cache would hold of them


@dataclass(frozen=True)
class Way:
    """How K or V is kept.

    Attributes:
        center: whether the mean is subtracted first. (Of K that is exact: the softmax does not see it.)
        clip: ``max``, ``percentile`` (99.9) or ``least`` (the clip of least squared error).
        turn: whether rows are turned first, see `mjolnir.turning`.
    """

    center: bool = False
    clip: str = "max"
    turn: bool = False


def rounded(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As `mjolnir.bench.kv_probe.through_e2m3`, by arithmetic: ten times as fast."""
    scaled = rows / scale
    size = scaled.abs().clamp_max(e2m3.MAX)
    steps = torch.where(size < 2, 8.0, torch.where(size < 4, 4.0, 2.0))  # of a unit
    return torch.copysign(torch.ceil(size * steps - 0.5) / steps, scaled) * scale


def scale_of(rows: torch.Tensor, clip: str) -> torch.Tensor:
    """Scales (1, heads, 1, head_size) of centred rows: see `Way`."""
    magnitudes = rows.abs()
    if clip == "percentile":
        index = max(1, round(0.999 * rows.shape[2]))
        return magnitudes.kthvalue(index, dim=2, keepdim=True).values / e2m3.MAX
    largest = magnitudes.amax(dim=2, keepdim=True) / e2m3.MAX
    if clip == "max":
        return largest
    errors = [(rounded(rows, largest * share) - rows).square().sum(2, keepdim=True) for share in TRIED]
    best = torch.stack(errors).argmin(dim=0)
    return largest * torch.tensor(TRIED)[best]


def rounding(seen: Sequence[torch.Tensor], way: Way) -> Rounding:
    """Rounds rows of a layer as an e2m3 cache would that is kept this way.

    Args:
        seen: rows of each layer, from which scales are made.
        way: see there.
    """
    size = seen[0].shape[-1]
    turn = turning.matrix(size) / size**0.5 if way.turn else None
    turned = [rows if turn is None else rows @ turn for rows in seen]
    centers = [rows.mean(dim=2, keepdim=True) * way.center for rows in turned]
    scales = [scale_of(rows - center, way.clip) for rows, center in zip(turned, centers, strict=True)]

    def kept(layer: int, rows: torch.Tensor) -> torch.Tensor:
        rows = rows if turn is None else rows @ turn
        held = rounded(rows - centers[layer], scales[layer]) + centers[layer]
        return held if turn is None else held @ turn

    return kept


def exact(_layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Loses nothing."""
    return rows


def fp8(_layer: int, rows: torch.Tensor) -> torch.Tensor:
    """An e4m3 cache without scales."""
    return rows.to(torch.float8_e4m3fn).float()


class Model:
    """A model whose attention reads K and V as a cache would hold them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attend_rounded(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> Any:
            key, value = self._k(module.layer_idx, key), self._v(module.layer_idx, value)
            if self._seen is not None:
                real = self._real if query.shape[2] > 1 else torch.ones(len(query), 1, dtype=torch.bool)
                for rows, into in zip((key, value), self._seen, strict=True):
                    new = rows[:, :, -query.shape[2] :].transpose(1, 2)[real]  # (tokens, heads, head_size)
                    into.setdefault(module.layer_idx, []).append(new.transpose(0, 1)[None])
            return attend(module, query, key, value, mask, **rest)

        ALL_ATTENTION_FUNCTIONS.register("mjolnir_rounded", attend_rounded)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="mjolnir_rounded"
        ).eval()
        self._k: Rounding = exact
        self._v: Rounding = exact
        self._seen: tuple[dict[int, list[torch.Tensor]], ...] | None = None
        self._real = torch.ones(0)  # which tokens of the prompts are no padding

    def keep(self, k: Rounding, v: Rounding) -> None:
        """Keep K and V so from now on."""
        self._k, self._v = k, v

    def log_probabilities(self, tokens: Sequence[int]) -> torch.Tensor:
        """(tokens - 1, vocabulary) of the successors of all tokens but the last."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0, :-1]
        return logits.log_softmax(-1)

    def observe(self, prompts: Sequence[str]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V of each layer, (1, heads, tokens, head_size), of prompts and of answers to them."""
        self._seen = {}, {}
        torch.manual_seed(0)
        ordered = sorted(prompts, key=len)
        for first in range(0, len(ordered), BATCH):
            chats = [[{"role": "user", "content": prompt}] for prompt in ordered[first : first + BATCH]]
            given = self.tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
            )
            self._real = given["attention_mask"].bool()
            self._model.generate(
                **given, min_new_tokens=ANSWER, max_new_tokens=ANSWER, do_sample=True, temperature=0.8, top_p=0.95
            )
        found, self._seen = self._seen, None
        k, v = ([torch.cat(part[layer], dim=2) for layer in sorted(part)] for part in found)
        return k, v


def cases(k: list[torch.Tensor], v: list[torch.Tensor]) -> dict[str, tuple[Rounding, Rounding]]:
    """Ways to keep K and V, by name, from what was seen of them."""
    layers = len(k)
    plain_k, plain_v = rounding(k, Way()), rounding(v, Way())
    turned_k, turned_v = rounding(k, Way(turn=True)), rounding(v, Way(turn=True))

    def part(first: int, last: int) -> Rounding:
        return lambda layer, rows: plain_k(layer, rows) if first <= layer < last else rows

    thirds = [(0, layers // 3), (layers // 3, 2 * layers // 3), (2 * layers // 3, layers)]
    return {
        "fp8, K and V": (fp8, fp8),
        "fp6, K and V": (plain_k, plain_v),
        "fp6, K and V, turned": (turned_k, turned_v),
        "fp6, K and V, turned, K centred": (rounding(k, Way(center=True, turn=True)), turned_v),
        "fp8, K alone": (fp8, exact),
        "fp6, K alone": (plain_k, exact),
        **{f"fp6, K of layers {a} to {b - 1} alone": (part(a, b), exact) for a, b in thirds},
        "fp6, K alone, 99.9 %": (rounding(k, Way(clip="percentile")), exact),
        "fp6, K alone, least squares": (rounding(k, Way(clip="least")), exact),
        "fp6, K alone, centred": (rounding(k, Way(center=True)), exact),
        "fp6, K alone, turned": (turned_k, exact),
        "fp8, V alone": (exact, fp8),
        "fp6, V alone": (exact, plain_v),
        "fp6, V alone, 99.9 %": (exact, rounding(v, Way(clip="percentile"))),
        "fp6, V alone, least squares": (exact, rounding(v, Way(clip="least"))),
        "fp6, V alone, turned": (exact, turned_v),
    }


def measure(model: Model, windows: Sequence[list[int]], wanted: dict[str, tuple[Rounding, Rounding]]) -> Any:
    """One row a case: change of perplexity with its standard error over windows, and KL divergence."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in wanted}
    for number, window in enumerate(windows):
        model.keep(exact, exact)
        reference = model.log_probabilities(window)
        truth = torch.tensor(window[1:])[:, None]
        for name, (k, v) in wanted.items():
            model.keep(k, v)
            other = model.log_probabilities(window)
            change = (reference.gather(1, truth) - other.gather(1, truth)).mean()
            divergence = (reference.exp() * (reference - other)).sum(-1).mean()
            found[name].append((float(change), float(divergence)))
        sys.stderr.write(f"window {number + 1} of {len(windows)}\n")
    return [row(name, values) for name, values in found.items()]


def row(name: str, values: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Figures of a case from each window's mean change (nats a token) and divergence."""
    changes, divergences = zip(*values, strict=True)
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return {
        "case": name,
        "perplexity_pct": round(100 * math.expm1(statistics.fmean(changes)), 2),
        "standard_error_pct": round(100 * error, 2),
        "divergence_millinats": round(1000 * statistics.fmean(divergences), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="folder of the model")
    parser.add_argument("--every", type=int, default=5, help="each which window of the text is read")
    parser.add_argument("--out", type=Path, required=True, help="result file")
    options = parser.parse_args(arguments)
    model = Model(options.model)
    tokens = model.tokenizer(
        heldout.prose(heldout.fetch(), CHARACTERS), add_special_tokens=False, verbose=False
    ).input_ids
    windows = heldout.windows(tokens, WINDOW, WINDOWS)[:: options.every]
    rows = measure(model, windows, cases(*model.observe(PROMPTS)))
    for each in rows:
        sys.stderr.write(f"{each}\n")
    write_result(
        options.out,
        what=f"what each part of a 6-bit cache costs, and what helps: {options.model.name} in float32",
        command="scripts/bench quality-parts",
        windows=len(windows),
        rows=rows,
    )


if __name__ == "__main__":
    main()
