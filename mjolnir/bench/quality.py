"""What a KV cache format costs in quality: each format beside a bf16 cache, on a held-out text, through real vLLM.

Measured are perplexity and the share of tokens whose likeliest successor stays the same, in prefill (which the fallback
runs) and in decode steps that are forced along the text (which T5 runs); the error of what the cache holds, by layer;
and a canary for drift: long answers, judged by the model over a bf16 cache. Differences are taken token by token, so
the text's own variety cancels; their standard error is over windows, whose tokens are not independent.

Each case runs in a process of its own and its raw scores are kept in the cache folder, so cases can be measured one at
a time and are not measured again until the plan changes (or ``--again``).
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.wheels import cache_root
from mjolnir.bench import heldout
from mjolnir.bench.results import write_result
from mjolnir.names import FP6_KV_DTYPE as FP6
from mjolnir.names import KV_SCALES_VARIABLE

FORMAT = 1  # of kept scores; counted up when older ones can't be used any more

Scores = dict[str, list[Any]]


@dataclass(frozen=True)
class Case:
    """One way to keep K and V.

    Attributes:
        name: as in the tables.
        kv: vLLM's ``kv_cache_dtype``.
        scales: ``max``, ``percentile`` or ``turned`` for that scale file; empty for none.
        backend: attention backend.
        emulate: round K and V to e2m3 before they are written to a bf16 cache: the format without our kernels.
        short: prefill only, for a case that explains others. (A decode step of the fallback over bf16 pages takes
            eight times T5's.)
    """

    name: str
    kv: str
    scales: str = ""
    backend: str = "MJOLNIR"
    emulate: bool = False
    short: bool = False


REFERENCE = Case("bf16", "auto", backend="CPU_ATTN")
FP8 = Case("fp8", "fp8")
CASES = (
    REFERENCE,
    # The same cache with other arithmetic: what of a difference is noise of bf16 and not the cache's.
    Case("bf16, fallback", "auto", short=True),
    FP8,
    Case("fp8, scales", "fp8", "max"),
    Case("fp6, max", FP6, "max"),
    Case("fp6, percentile", FP6, "percentile"),
    Case("fp6, turned", FP6, "turned"),
    Case("fp6, max, emulated", "auto", "max", emulate=True, short=True),
)


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        characters: of the text.
        window: tokens of a window; each is scored without what comes before it.
        windows: how many.
        probe: windows of which the cache's content is compared with what was written.
        decode_every: each which window is scored by decode steps too.
        decode_start: first token that a decode step scores.
        decode_end: the last, exclusive.
        streams: sequences at a time.
        canary_tokens: length of a canary's answer.
    """

    characters: int = 400_000
    window: int = 1024
    windows: int = 40
    probe: int = 2
    decode_every: int = 4
    decode_start: int = 512
    decode_end: int = 1024
    streams: int = 16
    canary_tokens: int = 2048


_STORY = "Tell me a long story about a lighthouse keeper and the people who visit the island, one chapter a visitor."
CHATS = (
    {"prompt": _STORY, "temperature": 0.0, "seed": 0},
    {"prompt": _STORY, "temperature": 0.8, "seed": 1},
)


def difference(reference: Sequence[Scores], other: Sequence[Scores]) -> dict[str, float]:
    """What a cache changes, from scores of the same windows.

    Returns:
        ``tokens``; ``perplexity`` of the other; ``change_pct``, by how much it is above the reference's;
        ``standard_error_pct`` of that, from the spread of the windows' means; ``top1_pct``, tokens with the same
        likeliest successor.
    """
    by_window = [
        statistics.fmean(theirs - ours for ours, theirs in zip(a["nll"], b["nll"], strict=True))
        for a, b in zip(reference, other, strict=True)
    ]
    # Windows are equally long, so the mean of their means is the mean over tokens.
    mean, tokens = statistics.fmean(by_window), sum(len(window["nll"]) for window in other)
    error = statistics.stdev(by_window) / math.sqrt(len(by_window))
    same = sum(x == y for a, b in zip(reference, other, strict=True) for x, y in zip(a["top"], b["top"], strict=True))
    return {
        "tokens": tokens,
        "perplexity": round(math.exp(statistics.fmean(x for window in other for x in window["nll"])), 4),
        "change_pct": round(100 * math.expm1(mean), 3),
        "standard_error_pct": round(100 * math.exp(mean) * error, 3),
        "top1_pct": round(100 * same / tokens, 2),
    }


def distinct(tokens: Sequence[int], length: int = 4) -> float:
    """Share of a text's runs of ``length`` tokens that are different ones: 1 for no repetition, near 0 for a loop."""
    runs = [tuple(tokens[first : first + length]) for first in range(len(tokens) - length + 1)]
    return len(set(runs)) / len(runs)


def canary_row(case: Case, answers: Sequence[dict[str, Any]], nll: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Figures of a case's long answers.

    Args:
        case: which.
        answers: ``text`` of each of `CHATS`.
        nll: of each answer's tokens, by the model over a bf16 cache.
    """
    row: dict[str, Any] = {"case": case.name}
    for kind, wanted in (("greedy", True), ("sampled", False)):
        picked = [i for i, chat in enumerate(CHATS) if (chat["temperature"] == 0) == wanted]
        half = len(nll[picked[0]]) // 2
        row[f"{kind}_distinct4"] = round(statistics.fmean(distinct(answers[i]["text"]) for i in picked), 3)
        row[f"{kind}_nll_first_half"] = round(statistics.fmean(x for i in picked for x in nll[i][:half]), 3)
        row[f"{kind}_nll_second_half"] = round(statistics.fmean(x for i in picked for x in nll[i][half:]), 3)
    return row


def layer_rows(case: Case, layers: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a layer: relative RMS error of K and V, of the whole and of the worst channel."""
    return [
        {
            "case": case.name,
            "layer": layer,
            **{f"{part}_error": round(figures[part]["all"], 4) for part in "kv"},
            **{f"{part}_worst_channel": round(figures[part]["worst_channel"], 4) for part in "kv"},
        }
        for layer, figures in enumerate(layers.values())
    ]


class Bench:
    """Measures cases of one model, and keeps what was measured.

    Args:
        model: folder of the model.
        plan: how much.
        scales: scale files by the name that cases give them.
        folder: where scores are kept; None for the cache folder.
    """

    def __init__(self, model: Path, plan: Plan, scales: dict[str, Path], folder: Path | None = None) -> None:
        self.model, self.plan, self.scales = model, plan, scales
        self.folder = folder or cache_root() / "quality" / model.name
        self._windows: list[list[int]] = []

    def possible(self, case: Case) -> bool:
        """Whether the case's scale file was given."""
        return not case.scales or case.scales in self.scales

    def measure(self, case: Case, again: bool = False) -> dict[str, Any]:
        """Scores of a case, measured unless they are there."""
        kept = self.kept(case)
        if kept is not None and not again:
            return kept
        sys.stderr.write(f"{case.name}\n")
        found = self._run(case, self._measuring(case))
        if not case.short:
            found["canary_nll"] = self._judge(found["canary"])
        document = {"key": self.key(case), "found": found}
        self.folder.mkdir(parents=True, exist_ok=True)
        staged = self._path(case).with_suffix(".partial")
        staged.write_text(json.dumps(document))
        staged.replace(self._path(case))
        return found

    def kept(self, case: Case) -> dict[str, Any] | None:
        """Scores of a case from an earlier run with the same plan and scales; None where there are none."""
        try:
            document = json.loads(self._path(case).read_text())
        except (OSError, ValueError):
            return None
        found: dict[str, Any] = document["found"]
        return found if document["key"] == self.key(case) else None

    def key(self, case: Case) -> dict[str, Any]:
        """What scores depend on, but for the code."""
        path = self.scales.get(case.scales)
        text = path.read_text() if path else ""
        return {"format": FORMAT, "case": asdict(case), "plan": asdict(self.plan), "scales": text}

    def _path(self, case: Case) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9]+', '-', case.name.lower())}.json"

    def _measuring(self, case: Case) -> dict[str, Any]:
        if not self._windows:
            self._windows = self._text_windows()
        return asdict(self.plan) | {"windows": self._windows, "chats": CHATS, "short": case.short}

    def _text_windows(self) -> list[list[int]]:
        from transformers import AutoTokenizer  # noqa: PLC0415  (seconds; a run with kept scores does without)

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        text = heldout.prose(heldout.fetch(), self.plan.characters)
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return heldout.windows(tokens, self.plan.window, self.plan.windows)

    def _judge(self, answers: Sequence[dict[str, list[int]]]) -> list[list[float]]:
        """Negative log-likelihood of each answer's tokens by the model over a bf16 cache."""
        texts = [answer["prompt"] + answer["text"] for answer in answers]
        scores = self._run(REFERENCE, {"score": texts})["score"]
        return [score["nll"][-len(answer["text"]) :] for score, answer in zip(scores, answers, strict=True)]

    def _run(self, case: Case, wanted: dict[str, Any]) -> dict[str, Any]:
        path = self.scales.get(case.scales)
        request = {
            "model": str(self.model),
            "backend": case.backend,
            "kv": case.kv,
            "scales": str(path) if path else "",
            "emulate": case.emulate,
            "streams": self.plan.streams,
            "max_model_len": 4096,
            **wanted,
        }
        if case == REFERENCE:
            request["probe"] = 0  # nothing is lost, and its cache is laid out otherwise
        environment = {KV_SCALES_VARIABLE: str(path)} if path and not case.emulate else {}
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
            asked.write_text(json.dumps(request))
            command = [sys.executable, "-m", "mjolnir.bench.quality_engine", str(asked), str(answered)]
            subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **environment})
            found: dict[str, Any] = json.loads(answered.read_text())
        return found


def document(model: str, found: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Tables of a model. A case has the rows of what was measured of it.

    Args:
        model: its name.
        found: scores by the name of the case, those of the reference among them.

    Returns:
        ``rows`` (perplexity), ``layers`` and ``canary``.
    """
    reference = found[REFERENCE.name]
    rows, layers, canary = [], [], []
    for case in (case for case in CASES if case.name in found):
        scores = found[case.name]
        head = {"model": model, "case": case.name, "backend": case.backend, "kv": case.kv, "scales": case.scales}
        for part in (part for part in ("prefill", "decode") if part in scores):
            row = {**head, "part": part, **difference(reference[part], scores[part])}
            if case.kv == FP6 and FP8.name in found:
                over = difference(found[FP8.name][part], scores[part])
                row |= {"over_fp8_pct": over["change_pct"], "over_fp8_error_pct": over["standard_error_pct"]}
            rows.append(row)
        if case != REFERENCE and "layers" in scores:
            layers += layer_rows(case, scores["layers"])
        if "canary_nll" in scores:
            canary.append(canary_row(case, scores["canary"], scores["canary_nll"]))
    return {"rows": rows, "layers": layers, "canary": canary}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see ``--help``."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="folder of the model")
    parser.add_argument("--out", type=Path, help="result file; without it the rows are only printed")
    parser.add_argument("--case", action="append", choices=names, help="measure only this (repeatable)")
    parser.add_argument("--scales-turned", type=Path, help="scale file from `mjolnir calibrate`")
    parser.add_argument("--scales-max", type=Path, help="likewise, with --no-turn")
    parser.add_argument("--scales-percentile", type=Path, help="likewise, with --no-turn --percentile 99.9")
    parser.add_argument("--again", action="store_true", help="measure even what was measured before")
    options = parser.parse_args(arguments)
    given = {"turned": options.scales_turned, "max": options.scales_max, "percentile": options.scales_percentile}
    bench = Bench(options.model, Plan(), {name: path for name, path in given.items() if path})
    wanted = [case for case in CASES if bench.possible(case) and case.name in (options.case or names)]
    for case in wanted:
        bench.measure(case, options.again)
    found = {case.name: kept for case in CASES if bench.possible(case) and (kept := bench.kept(case)) is not None}
    if REFERENCE.name not in found:
        return
    tables = document(options.model.name, found)
    for row in tables["rows"]:
        sys.stderr.write(f"{row}\n")
    if options.out:
        write_result(
            options.out,
            what="quality of KV cache formats against a bf16 cache, on entries of The Jargon File",
            command="scripts/bench quality",
            plan=asdict(bench.plan),
            **tables,
        )


if __name__ == "__main__":
    main()
