"""Kernels built ahead of time: that a board's steps find theirs, and what the command accepts."""

import dataclasses
import sys

import pytest
import torch
from triton.backends.compiler import GPUTarget
from typer.testing import CliRunner

from appliance import cli
from mjolnir.kernels import ahead
from mjolnir.kernels.stream_runner import StreamRunner
from mjolnir.kernels.tuning import StreamTuning
from mjolnir.kernels.variants import shape_of
from mjolnir.layouts import split_kv
from mjolnir.reference import e2m3

THOR = GPUTarget("cuda", 110, 32)


def keys(variants) -> set[str]:
    return {variant.key(THOR) for variant in variants}


def met(model: ahead.Model, *, q_len: int, num_seqs: int, fused: bool, tuning: StreamTuning) -> set[str]:
    """Keys of what a step launches on a device like Thor, with tensors as vLLM makes them."""
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_size
    row = e2m3.row_bytes(size) if model.kv_format == "e2m3" else size
    launched = []
    config = dataclasses.replace(model.config(), device=torch.device("cpu"))
    runner = StreamRunner(
        config,
        num_sms=ahead.SMS[110],
        tuning=tuning,
        launch=lambda variant, _grid, _arguments: launched.append(variant),
        ahead=False,
    )
    cache = torch.zeros((3, kv_heads, model.page_size, 2 * row), dtype=torch.uint8)
    width = (heads + (2 * kv_heads if fused else 0)) * size
    query = torch.zeros((num_seqs * q_len, width), dtype=ahead.DTYPES[model.dtype])
    query = query[:, : heads * size].view(-1, heads, size)
    lengths, table = torch.zeros(num_seqs, dtype=torch.int32), torch.zeros((num_seqs, 1), dtype=torch.int32)
    scale = torch.ones((kv_heads, size) if model.kv_format == "e2m3" else (1,))
    plan = runner.plan(lengths, table, q_len=q_len, causal=True)
    runner.run(plan, query, torch.zeros_like(query).contiguous(), split_kv(cache, "BHN2D", row), scale, scale, 0.1)
    return keys(launched)


@pytest.mark.parametrize(
    "model",
    [
        ahead.Model(32, 8, 128, max_q_len=4, max_num_seqs=64),
        ahead.Model(24, 4, 256, page_size=128, dtype="fp16"),
        ahead.Model(32, 8, 128, kv_format="e2m3", max_q_len=2),
    ],
    ids=str,
)
def test_every_step_of_a_board_finds_its_kernels(model: ahead.Model) -> None:
    built = keys(ahead.variants_of(model, 110))
    for q_len in range(1, model.max_q_len + 1):
        tuning = shape_of(model.config(), q_len, ahead.SMS[110], "sm_110").tuning
        for num_seqs in (1, 3, model.max_num_seqs):
            for fused in (False, True):
                found = met(model, q_len=q_len, num_seqs=num_seqs, fused=fused, tuning=tuning)
                assert found
                assert found <= built, (q_len, num_seqs, fused)


def test_each_variant_is_built_once() -> None:
    variants = ahead.variants_of(ahead.Model(32, 8, 128, max_q_len=3), 110)
    assert len(keys(variants)) == len(variants)


def test_hopper_gets_its_own_kernel() -> None:
    model = ahead.Model(64, 8, 128, max_q_len=4)
    names = {arch: {variant.kernel.__name__ for variant in ahead.variants_of(model, arch)} for arch in (90, 110)}
    assert "wgmma_kernel" in names[90]
    assert "wgmma_kernel" not in names[110]


@pytest.mark.parametrize("name", ["sm_110a", "sm_110", "110"])
def test_names_of_an_architecture(name: str) -> None:
    assert ahead.architecture(name) == 110


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_87", "--shapes", "32x8x128"], "--arch sm_87: accepted: sm_90a, sm_110a"),
        (["--arch", "sm_110a", "--shapes", "32x8"], "--shapes 32x8: accepted: HEADSxKV_HEADSxHEAD_SIZE"),
        (["--arch", "sm_110a", "--shapes", "32x8x128", "--q-len", "0"], "--q-len 0: accepted: 1 to 32"),
        (["--arch", "sm_110a", "--shapes", "32x8x128", "--dtype", "fp8"], "--dtype fp8: accepted: bf16, fp16"),
        (["--arch", "sm_110a", "--shapes", "9x3x64", "--kv", "e2m3"], "e2m3 with head size 64: accepted"),
        (["--arch", "sm_110a", "--shapes", "32x8x128", "--max-num-seqs", "0"], "--max-num-seqs 0: accepted: 1 or more"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "kernels"
    monkeypatch.setattr(sys, "argv", ["mjolnir", "precompile", *arguments, "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"mjolnir: {message}")
    assert printed.err.count("\n") == 1
    assert not out.exists()


def test_command_builds_what_it_was_told_to(monkeypatch, tmp_path) -> None:
    built = []
    monkeypatch.setattr(ahead, "build_for", lambda *arguments, **options: built.append((*arguments, options)))
    options = ["--shapes", "32x8x128,24x4x256", "--page", "16,64", "--q-len", "2", "--max-num-seqs", "8"]
    result = CliRunner().invoke(cli.app, ["precompile", "--arch", "sm_110a", "--out", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    [(variants, target, directory, others)] = built
    assert (target, directory, others) == (THOR, tmp_path, {"workers": 2})
    assert result.output == f"{tmp_path}: {len(variants)} kernels for sm_110a\n"
    models = [
        ahead.Model(*shape, page_size=page, max_q_len=2, max_num_seqs=8)
        for shape in ((32, 8, 128), (24, 4, 256))
        for page in (16, 64)
    ]
    assert keys(variants) == set().union(*(keys(ahead.variants_of(model, 110)) for model in models))
