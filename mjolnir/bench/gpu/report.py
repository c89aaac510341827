"""Figures from what the engines answered: agreement, what ran, times, tables."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjolnir.bench.agreement import Comparison, Step, compare
from mjolnir.bench.results import write_result

OURS = "T5"
FAR = 1.0  # nats; at the first difference, each side's choice must not be further behind the other's


def agreement_row(
    expected: list[list[Any]] | None, answers: list[list[Any]], before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """How far answers agree with the expected ones, and what ran for them.

    Args:
        expected: (token, log-probabilities) of each step of each answer; None where there is nothing to compare with.
        answers: likewise; without log-probabilities only the tokens and the expected log-probabilities are compared.
        before: counts before.
        after: counts after.
    """
    chosen = [tops[str(token)] for answer in answers for token, tops in answer if tops]
    row: dict[str, Any] = {"tokens": sum(map(len, answers))}
    row["logprob_median"] = round(statistics.median(chosen), 3) if chosen else None
    if expected is not None:
        row |= _agreement(
            [
                compare(_steps(a), _steps(b)) if _has_tops(b) else _tokens_only(a, b)
                for a, b in zip(expected, answers, strict=True)
            ]
        )
    return row | difference(before, after)


def _steps(answer: list[Any]) -> list[Step]:
    return [Step(token, {int(key): value for key, value in tops.items()}) for token, tops in answer]


def _has_tops(answer: list[Any]) -> bool:
    return bool(answer and answer[0][1])


def _tokens_only(expected: list[Any], answer: list[Any]) -> Comparison:
    reference = _steps(expected)
    for ours, (token, _) in zip(reference, answer, strict=False):
        if ours.token != token:
            behind = ours.logprobs.get(token)
            distance = None if behind is None else max(ours.logprobs.values()) - behind
            return Comparison(False, (), (), ours.margin, distance)
    return Comparison(len(expected) == len(answer), (), ())


def _agreement(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    errors = sorted(error for comparison in comparisons for error in comparison.errors)
    distances = [comparison.distance for comparison in comparisons if comparison.margin is not None]
    return {
        "prompts": len(comparisons),
        "same": sum(comparison.same for comparison in comparisons),
        "compared": len(errors),
        "logprob_error_median": round(statistics.median(errors), 4) if errors else None,
        "logprob_error_p99": round(errors[int(0.99 * (len(errors) - 1))], 4) if errors else None,
        "behind_max": max((round(d, 3) for d in distances if d is not None), default=0.0),
        "far": sum(distance is None or distance > FAR for distance in distances),
    }


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What ran between two looks at the counts."""
    steps = {name: number - before["steps"].get(name, 0) for name, number in after["steps"].items()}
    kernels = sum(after["kernels"].get(key, 0) - before["kernels"].get(key, 0) for key in ("compiled", "loaded"))
    return {
        "steps": {name: number for name, number in steps.items() if number},
        "graph_replays": after["replays"] - before["replays"],
        "kernels_compiled": int(kernels),
        "late_kernels": after["late_kernels"][len(before["late_kernels"]) :],
        "syncs": after["syncs"][len(before["syncs"]) :][:5],
        "sync_count": len(after["syncs"]) - len(before["syncs"]),
    }


def speed_rows(times: dict[str, list[dict[str, list[float]]]], streams: int) -> list[dict[str, Any]]:
    """A row an engine: medians over all rounds, and speed beside the best of the stock engines.

    By the clock small steps are the host's time, which is the same for all engines but for noise; on the GPU they are
    what the graph of the step takes.

    Args:
        times: by engine and round, times of single steps in ms: ``step_ms`` by the clock, ``gpu_ms`` on the GPU.
        streams: requests of a step.
    """
    clock = {name: _median([one["step_ms"] for one in rounds]) for name, rounds in times.items() if rounds}
    gpu = {
        name: _median([one["gpu_ms"] for one in times[name]]) for name in clock if all(r["gpu_ms"] for r in times[name])
    }
    rows = []
    for name, ms in clock.items():
        steps = sorted(step for one in times[name] for step in one["step_ms"])
        rows.append(
            {
                "engine": name,
                "output_tokens_per_s": round(1e3 * streams / ms, 1),
                "itl_ms_p50": round(statistics.median(steps), 4),
                "itl_ms_p99": round(steps[int(0.99 * (len(steps) - 1))], 4),
                "rounds_ms": [round(statistics.mean(one["step_ms"]), 4) for one in times[name]],
                "over_best_stock": _over_best(clock, name),
                "gpu_ms": round(gpu[name], 4) if name in gpu else None,
                "gpu_over_best_stock": _over_best(gpu, name) if name in gpu else None,
            }
        )
    return rows


def _over_best(ms: dict[str, float], name: str) -> float | None:
    stock = [value for other, value in ms.items() if not other.startswith(OURS)]
    return round(min(stock) / ms[name], 3) if stock else None


def _median(rounds: list[list[float]]) -> float:
    """Time of a step in ms: the median of the rounds' means, since tokens come in bursts where steps overlap."""
    return statistics.median(statistics.mean(one) for one in rounds)


def requests_per_second(rounds: Sequence[dict[str, Any]]) -> float:
    """Requests answered a second, over all rounds."""
    return sum(len(one["requests"]) for one in rounds) / float(sum(one["seconds"] for one in rounds))


def load_row(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of an engine under a load.

    Args:
        rounds: what `mjolnir.bench.gpu.child.Service.serve` returned, a round each.
    """
    requests = [request for one in rounds for request in one["requests"]]
    gaps = sorted(gap for one in rounds for gap in one["gaps_ms"])
    first = sorted(1e3 * (first - arrival) for arrival, first, _, _ in requests)
    speeds = [sum(tokens for *_, tokens in one["requests"]) / one["seconds"] for one in rounds]
    stayed = sum(last - arrival for arrival, _, last, _ in requests)
    return {
        "requests": len(requests),
        "output_tokens_per_s": round(statistics.mean(speeds), 1),
        "rounds_tokens_per_s": [round(speed, 1) for speed in speeds],
        "itl_ms_p50": _quantile(gaps, 0.5),
        "itl_ms_p99": _quantile(gaps, 0.99),
        "ttft_ms_p50": _quantile(first, 0.5),
        "ttft_ms_p99": _quantile(first, 0.99),
        "in_flight": round(stayed / sum(one["seconds"] for one in rounds), 2),
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[int(share * (len(ordered) - 1))], 2) if ordered else None


def brief_load(row: dict[str, Any]) -> str:
    """One line of a load."""
    keys = ("requests", "output_tokens_per_s", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "ttft_ms_p99", "in_flight")
    return ", ".join([*(f"{key} {row[key]}" for key in keys), f"steps {row['steps']}"])


def brief(row: dict[str, Any]) -> str:
    """One line of an agreement row."""
    keys = (
        "logprob_median",
        "same",
        "prompts",
        "compared",
        "logprob_error_median",
        "logprob_error_p99",
        "behind_max",
        "far",
    )
    parts = [f"{key} {row[key]}" for key in keys if key in row]
    parts += [f"steps {row['steps']}", f"replays {row['graph_replays']}", f"compiled {row['kernels_compiled']}"]
    parts += [f"late {len(row['late_kernels'])}", f"syncs {row['sync_count']}"]
    parts += [f"{name} {row[name]:.0f}" for name in ("drafted", "accepted", "preempted") if name in row]
    return ", ".join(parts)


def brief_speed(times: dict[str, list[dict[str, list[float]]]], streams: int) -> str:
    """One line of a cell."""
    rows = speed_rows(times, streams)
    return ", ".join(f"{row['engine']} {row['output_tokens_per_s']}/s, {row['gpu_ms']} ms" for row in rows)


def save(path: Path, rows: list[dict[str, Any]], failures: list[dict[str, str]]) -> None:
    """Write the result file."""
    write_result(
        path,
        what="T5 inside vLLM on a GPU: agreement with the fallback, what ran, decode speed beside stock backends",
        command="scripts/gpu-engine",
        rows=rows,
        failures=failures,
        gpu=_gpu(),
    )


def _gpu() -> str:
    try:
        import torch  # noqa: PLC0415

        if not torch.cuda.is_available():
            return ""
        return f"{torch.cuda.get_device_name()}, cuda {torch.version.cuda}"
    except (ImportError, RuntimeError):
        return ""


def failed(rows: list[dict[str, Any]], failures: list[dict[str, str]]) -> bool:
    """Whether something is wrong.

    That is an engine that failed, an answer that is far off, T5 that did not run or compiled, mixed steps that were
    split where they should not be or not where they should.
    """
    ours = [row for row in rows if row["kind"] == "agreement" and row["engine"].startswith(OURS)]
    wrong = [
        row
        for row in ours
        if (row.get("far") and "fp6" not in row["engine"])
        or row["kernels_compiled"]
        or row["sync_count"]
        or not any(name.startswith("t5:") for name in row["steps"])
    ]
    loads = [row for row in rows if row["kind"] == "load"]
    wrong += [row for row in loads if ("split" in row["engine"]) is not ("t5:split" in row["steps"])]
    wrong += [row for row in loads if row["kernels_compiled"]]
    return bool(failures or wrong)
