"""Compiles the probe's steps of FlashAttention 4 for sm_110a on a machine without a GPU, and prints what came out.

``CUTE_DSL_ARCH=sm_110a python -m mjolnir.bench.fa4_compile VLLM_FLASH_ATTN_FOLDER``: the folder of the patched CUDA
wheel, of which only ``cute`` is imported. Needs vLLM's pinned nvidia-cutlass-dsl, quack-kernels and apache-tvm-ffi,
and Triton's disassemblers. docs/fa4.md has the packages and the table.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from mjolnir.fa4_child import GROUP, KV_HEADS, WINDOW, Case, cases
from mjolnir.kernels.inspection import BINARIES

SMS = 20  # of Thor
HEAD_SIZES = (64, 128, 256)
PAGES = (16, 128)
INSTRUCTIONS = re.compile(r"\b(UTC[A-Z]*MMA|UTMALDG|LDGSTS|LDL|STL)\b")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def launcher(folder: Path) -> Any:
    """FlashAttention 4's launcher, without vLLM and the CUDA extensions that vLLM's own package imports."""
    for name, path in (("vllm", folder.parent), ("vllm.vllm_flash_attn", folder)):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module

    # The schedulers ask the driver for the device's size; without one the answer is Thor's.
    answers = {
        "get_max_active_clusters": lambda _, size, *__, **___: SMS // size,
        "get_device_multiprocessor_count": lambda _: SMS,
    }
    for place in ("cutlass.utils.hardware_info", "cutlass.utils"):
        importlib.import_module(place).__dict__["HardwareInfo"] = type("HardwareInfo", (), answers)
    from vllm.vllm_flash_attn.cute import interface  # noqa: PLC0415

    return interface


def compile_step(interface: Any, case: Case, head_size: int) -> None:
    """Compile the kernel of one step; shapes and dtypes are those that the probe passes."""
    spec, dtype = interface._make_compile_only_tensor_spec, torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    requests, width = len(case.seq_lens), -(-max(case.seq_lens) // case.page)
    heads, tokens, pages = KV_HEADS * GROUP, sum(case.query_lens), requests * width
    row = 2 * head_size
    stride = (KV_HEADS * case.page * row, row, case.page * row, 1)
    descale = spec((requests, KV_HEADS), torch.float32, 4) if case.fp8 else None
    kv = [spec((pages, case.page, KV_HEADS, head_size), dtype, stride=stride) for _ in range(2)]
    interface._flash_attn_fwd(
        spec((tokens, heads, head_size), dtype),
        *kv,
        cu_seqlens_q=spec((requests + 1,), torch.int32, 4),
        seqused_k=spec((requests,), torch.int32, 4),
        page_table=spec((requests, width), torch.int32, 4),
        max_seqlen_q=max(case.query_lens),
        max_seqlen_k=width * case.page,
        softmax_scale=head_size**-0.5,
        causal=True,
        window_size_left=WINDOW - 1 if case.windowed else None,
        window_size_right=0 if case.windowed else None,
        learnable_sink=spec((heads,), torch.bfloat16, 4) if case.windowed else None,
        num_splits=1 if head_size == max(HEAD_SIZES) else 0,
        out=spec((tokens, heads, head_size), torch.bfloat16),
        q_descale=descale,
        k_descale=descale,
        v_descale=descale,
        compile_only=True,
    )


def describe(cubin: Path, ptx: Path) -> str:
    """Registers, stack bytes, matrix instructions and other counts of a kernel, as one table row's cells."""
    usage = subprocess.run([BINARIES / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    listing = subprocess.run([BINARIES / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True)
    found = RESOURCES.search(usage.stdout + usage.stderr)
    counts = Counter(INSTRUCTIONS.findall(listing.stdout))
    kinds = Counter(re.findall(r"tcgen05\.mma\.\S*?(kind::\w+)", ptx.read_text()))
    matrix = ", ".join(f"{count} {name}" for name, count in counts.items() if name.endswith("MMA"))
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    registers, stack = found.groups() if found else ("?", "?")
    loads = f"{counts['UTMALDG']} / {counts['LDGSTS']}"
    return f"{told} | {matrix} | {loads} | {registers} | {stack} | {counts['LDL']} / {counts['STL']}"


def main() -> None:
    """Compile every step of the probe, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m mjolnir.bench.fa4_compile")
    parser.add_argument("folder", type=Path, help="vllm/vllm_flash_attn of the patched CUDA wheel")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as dump:
        # All are read when the DSL is imported.
        os.environ |= {"CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": dump}
        os.environ |= {"FLASH_ATTENTION_ARCH": "sm_110", "FLASH_ATTENTION_NUM_SMS": str(SMS)}
        interface = launcher(folder)
        sys.stdout.write("| head | step | seconds | PTX | SASS | TMA / cp.async | registers | stack | LDL / STL |\n")
        sys.stdout.write("|---|---|---|---|---|---|---|---|---|\n")
        for head_size in HEAD_SIZES:
            for case in cases(head_size, PAGES):
                for file in Path(dump).iterdir():
                    file.unlink()
                begin = time.monotonic()
                compile_step(interface, case, head_size)
                seconds = time.monotonic() - begin
                # A split step compiles its scheduler too; the attention is by far the largest.
                made = sorted(Path(dump).glob("*.cubin"), key=lambda file: file.stat().st_size)
                row = describe(made[-1], made[-1].with_suffix(".ptx")) if made else "a kernel from above | | | | | "
                sys.stdout.write(f"| {head_size} | {case} | {seconds:.1f} | {row} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
