"""The estimate for people."""

from rich.console import Console
from rich.table import Table

from appliance.estimate.estimate import GIB, Estimate, FormatEstimate


def show(found: Estimate, console: Console) -> None:
    """Print what `found` says, one table for the memory and one for the formats."""
    summary = Table(show_header=False, box=None)
    for title, value in summary_rows(found):
        summary.add_row(title, value)
    console.print(summary)
    table = Table(box=None, header_style="bold")
    context = "one" if found.sequences == 1 else f"each of {found.sequences:,}"
    for title in ("KV cache", "bytes a token", "in a window", "tokens", f"longest context of {context}"):
        table.add_column(title, justify="left" if title == "KV cache" else "right")
    for each in found.formats:
        table.add_row(*format_row(each, found.limit))
    console.print(table)
    for each in found.formats:
        remark = each.problem
        if each.scratch_bytes:
            remark = f"{each.scratch_bytes / GIB:,.2f} GiB of scratch for steps that are not T5's, counted"
            remark += "" if found.machine.kv_cache is None else " beside the cache"
        if remark:
            console.print(f"{each.format}: {remark}", highlight=False, markup=False)


def summary_rows(found: Estimate) -> list[tuple[str, str]]:
    """What the model and the machine are, as titles and values."""
    weights, machine = found.weights, found.machine
    vision = f" and {weights.vision_parameters / 1e9:,.2f} of its vision tower" if weights.vision_parameters else ""
    margin = f" ± {weights.margin / GIB:.2f}" if weights.margin else ""
    rows = [
        ("model", f"{found.architecture}, {weights.parameters / 1e9:,.2f} billion parameters{vision}"),
        ("weights", f"{weights.size / GIB:,.2f}{margin} GiB, {weights.format}, by {weights.source}"),
    ]
    rows += [("", note) for note in weights.notes]
    if machine.kv_cache is None:
        left = f"{machine.memory / GIB:,.1f} GiB x {machine.utilisation} - weights - {machine.reserve / GIB:.1f} GiB"
        rows.append(("KV cache", f"{found.kv_cache / GIB:,.2f} GiB: {left} for activations and CUDA"))
    else:
        rows.append(("KV cache", f"{found.kv_cache / GIB:,.2f} GiB, as asked for"))
    states = max((each.state_bytes for each in found.formats), default=0)
    if states:
        rows.append(("states", f"{states / 2**20:,.1f} MiB for each sequence, in every format"))
    return [*rows, ("context", f"{found.limit:,} tokens at most")]


def format_row(each: FormatEstimate, limit: int) -> tuple[str, str, str, str, str]:
    """One format: name, bytes that a token takes for good and while it is in a window, tokens, longest context."""
    if each.problem:
        return each.format, "-", "-", "-", "not possible"
    longest = f"{each.longest:,}" + ("" if each.fits or not each.longest else f" of {limit:,}")
    window = f"{each.window_token_bytes:,}" if each.window_token_bytes else "-"
    return each.format, f"{each.token_bytes:,}", window, f"{each.tokens:,}", longest if each.longest else "none"
