"""Packed e2m3 rows on a CPU: bit for bit as the plain reference, and the executor over them against the oracle."""

import pytest
import torch

from mjolnir.layouts import PagedKV, split_kv
from mjolnir.reference import e2m3
from mjolnir.reference.attention import paged_attention
from mjolnir.reference.executor import TorchRunner
from mjolnir.reference.packed_rows import CODE_FACTOR, PackedDequantiser, expand_pages, unpack_to_e4m3
from mjolnir.runner import RunnerConfig
from tests.kernels.decode_steps import LAYOUTS, in_layout

torch.set_num_threads(1)


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def cache(layout: str, *, pages=5, page_size=16, heads=2, head_size=64) -> tuple[PagedKV, torch.Tensor, torch.Tensor]:
    """A packed cache of random codes, and the values of its K and V, (pages, page_size, heads, head_size)."""
    k, v = (codes(pages, page_size, heads, head_size, seed=seed) for seed in (1, 2))
    whole = in_layout(e2m3.pack(k), e2m3.pack(v), layout)
    return split_kv(whole, layout, e2m3.row_bytes(head_size)), e2m3.decode(k), e2m3.decode(v)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 2])
def test_unpacks_every_code_in_every_place(head_size: int, rows: int) -> None:
    """Each channel holds each code once, so that every neighbour's bits are tried too."""
    steps = torch.arange(64)[:, None] + torch.arange(head_size * rows) * 7
    everything = (steps % 64).to(torch.uint8)
    packed = torch.cat([e2m3.pack(part) for part in everything.chunk(rows, dim=-1)], dim=-1)
    bytes_ = unpack_to_e4m3(packed, head_size)
    values = bytes_.view(torch.float8_e4m3fn).float() * CODE_FACTOR
    assert torch.equal(values, e2m3.decode(everything))


@pytest.mark.parametrize("tokens", [3, 700])
def test_dequantises_few_and_many(tokens: int) -> None:
    """700 rows are beyond where bits are faster than a look-up; both ways give the same."""
    some = codes(tokens, 64)
    values, factor = PackedDequantiser(64)(e2m3.pack(some))
    assert torch.equal(values * factor, e2m3.decode(some))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expands_as_the_reference_does(layout: str, dtype: torch.dtype) -> None:
    kv, _, _ = cache(layout)
    generator = torch.Generator().manual_seed(3)
    k_scale, v_scale = (torch.rand((2, 64), generator=generator) * 9 + 0.01 for _ in range(2))
    blocks = torch.tensor([4, 0, 3], dtype=torch.int32)
    expected, actual = (torch.full((4, 2, 16, 128), 7.0, dtype=dtype) for _ in range(2))
    e2m3.expand_pages(kv, blocks, expected, k_scale, v_scale)
    assert torch.equal(expand_pages(kv, blocks, actual, k_scale, v_scale), expected[:3])
    assert torch.equal(actual, expected)


def test_expansion_leaves_alone_what_no_page_goes_to() -> None:
    kv, k, _ = cache("BHN2D", pages=40)
    out = torch.full((40, 2, 16, 128), 7.0, dtype=torch.bfloat16)
    expand_pages(kv, torch.tensor([-1, 2, 40, *range(3, 36)]), out)
    assert bool((out[[0, 2, 36, 39]] == 7.0).all())
    assert torch.equal(out[1, :, :, :64].float(), k[2].transpose(0, 1))
    assert torch.equal(out[35, :, :, :64].float(), k[35].transpose(0, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("scale_kind", ["channel", "head", "tensor"])
def test_executor_agrees_with_the_oracle(layout: str, q_dtype: str, head_size: int, scale_kind: str) -> None:
    """K's scales go into Q, V's into the output: the oracle is given keys and values that have them."""
    heads, group, page_size, q_len = 2, 3, 16, 2
    lengths, tables = [70, 2, 33], [[0, 2, 4, 1, 3], [3, -1, -1, -1, -1], [4, 0, 2, -1, -1]]
    kv, k, v = cache(layout, heads=heads, head_size=head_size)
    generator = torch.Generator().manual_seed(5)
    shape = {"channel": (heads, head_size), "head": (heads,), "tensor": (1,)}[scale_kind]
    k_scale, v_scale = (torch.rand(shape, generator=generator) * 0.3 + 0.05 for _ in range(2))
    full_k, full_v = (e2m3.channel_scales(scale, heads, head_size) for scale in (k_scale, v_scale))
    query = torch.randn((3 * q_len, heads * group, head_size), generator=generator).to(torch.bfloat16)
    runner = TorchRunner(
        RunnerConfig(
            num_heads=heads * group,
            num_kv_heads=heads,
            head_size=head_size,
            page_size=page_size,
            out_dtype=torch.float32,
            max_num_seqs=4,
            device=torch.device("cpu"),
            max_q_len=q_len,
            q_dtype=q_dtype,
            kv_format="e2m3",
        )
    )
    out = torch.zeros(query.shape)
    table, live = torch.tensor(tables, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    plan = runner.plan(live, table, q_len=q_len, causal=True)
    runner.run(plan, query, out, kv, k_scale, v_scale, head_size**-0.5)
    expected, _ = paged_attention(
        query, k * full_k, v * full_v, table.clamp(min=0), live, [q_len] * 3, softmax_scale=head_size**-0.5
    )
    # Largest seen: 6e-7 of the largest value with Q as it came; 2.6 % with Q in e4m3, whose step is 6 %.
    bound = {"bf16": 3e-6, "fp8": 0.06}[q_dtype] * float((v * full_v).abs().max())
    assert float((out.double() - expected).abs().max()) < bound
