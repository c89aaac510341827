"""`mjolnir precompile`: kernels for a board, built on a machine that need not have a GPU."""

from pathlib import Path

from mjolnir.bench.kernel_cells import parse_cells
from mjolnir.errors import ConfigurationError
from mjolnir.kernels.ahead import DTYPES, Model, architecture, build


def main(
    arch: str, out: Path, *, shapes: str, page: str, kv: str, q_len: int, max_num_seqs: int, dtype: str, workers: int
) -> int:
    """Compile the kernels of models; see `mjolnir.kernels.ahead`.

    Args:
        arch: ``sm_110a`` and the like.
        out: directory of the kernel cache.
        shapes: heads, as ``mjolnir bench kernel`` takes them.
        page: page sizes, likewise.
        kv: KV formats, likewise.
        q_len: most query tokens of a request.
        max_num_seqs: most requests of a step.
        dtype: ``bf16`` or ``fp16``.
        workers: processes that compile.

    Returns:
        How many kernels the directory holds for these models.

    Raises:
        ConfigurationError: an option can't be used.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype {dtype}: accepted: {', '.join(DTYPES)}")
    if not 1 <= q_len <= 32:
        raise ConfigurationError(f"--q-len {q_len}: accepted: 1 to 32")
    if max_num_seqs < 1:
        raise ConfigurationError(f"--max-num-seqs {max_num_seqs}: accepted: 1 or more")
    models = dict.fromkeys(
        Model(
            cell.shape.num_heads,
            cell.shape.num_kv_heads,
            cell.shape.head_size,
            page_size=cell.page_size,
            kv_format=cell.kv_format,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_q_len=q_len,
        )
        for cell in parse_cells(shapes, "1", page, "quick", "HND", kv)
    )
    return build(models, architecture(arch), out, workers=workers)
