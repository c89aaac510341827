"""The CUDA kernels against the float64 oracle: on a GPU for real, elsewhere in the Gluon emulator."""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mjolnir.errors import ConfigurationError
from mjolnir.kernels import stream_runner
from mjolnir.kernels.compiler import KernelCache
from mjolnir.kernels.shares import merge_kernel
from mjolnir.kernels.stream_runner import StreamRunner, variants_of
from mjolnir.kernels.tuning import StreamTuning
from mjolnir.kernels.variants import Choice, Strides, shape_of, siblings
from mjolnir.layouts import PagedKV
from mjolnir.reference import e2m3
from mjolnir.runner import RunnerConfig
from tests.kernels.decode_steps import LAYOUTS, NAN_BYTE, SENTINEL, Case, Step
from tests.kernels.stream_emulation import emulated_runner

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
EXAMPLES = 10 if ON_GPU else 40  # there every example compiles its own variants

# f16 products of an f16 query with exact e4m3, f16 weights and pieces; relative to the largest |V|. Largest seen over
# 200 random cases, on an H200 and emulated: 1.7e-3 and 1.8e-3, bf16 output included.
ARITHMETIC = 2e-3
# Largest seen: 1.3e-6; by wgmma, which keeps the sums of e4m3 products to 13 bits, 1.6e-3 on an H200.
ARITHMETIC_LSE = 3e-3 if ON_GPU and torch.cuda.get_device_capability()[0] == 9 else 1e-4
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WIDE = [StreamTuning(kernel="wide", rows=rows, programs_per_sm=1) for rows in (8, 16, 32)]
WGMMA = [
    StreamTuning(kernel="wgmma", rows=rows, tokens=tokens, stages=stages, programs_per_sm=1)
    for rows, tokens, stages in ((8, 64, 2), (16, 128, 2), (32, 64, 3))
]


def runner_for(case: Case, tuning: StreamTuning | None = None, kv_format: str = "fp8") -> StreamRunner:
    config = RunnerConfig(
        num_heads=case.kv_heads * case.group,
        num_kv_heads=case.kv_heads,
        head_size=case.head_size,
        page_size=case.page_size,
        out_dtype=case.out_dtype,
        max_num_seqs=len(case.lengths),
        device=DEVICE,
        max_q_len=case.q_len,
        q_dtype="bf16",
        kv_format=kv_format,
    )
    make = StreamRunner if ON_GPU else emulated_runner
    runner = make(config, num_sms=case.num_sms, tuning=tuning)
    # What an earlier step has left in a workspace must never come out.
    runner._part_o.fill_(float("nan"))
    runner._part_ml.fill_(float("nan"))
    return runner


def attend(step: Step, runner: StreamRunner | None = None, *, k_scale=1.0, v_scale=1.0, query=None, kv=None):
    """Output, with one sentinel row behind it, and LSE as (tokens, heads), both on the CPU."""
    case = step.case
    runner = runner or runner_for(case)
    query = (step.query if query is None else query).to(DEVICE)
    out = torch.full((query.shape[0] + 1, *query.shape[1:]), SENTINEL, dtype=case.out_dtype, device=DEVICE)
    lse = torch.full((len(case.lengths), case.kv_heads, case.q_len * case.group), SENTINEL, device=DEVICE)
    kv = kv or step.cache()
    kv = PagedKV(kv.k.to(DEVICE), kv.v.to(DEVICE))
    scales = [torch.as_tensor(scale, dtype=torch.float32, device=DEVICE) for scale in (k_scale, v_scale)]
    plan = runner.plan(step.seq_lens.to(DEVICE), step.block_table.to(DEVICE), q_len=case.q_len, causal=case.causal)
    runner.run(plan, query, out, kv, *scales, case.head_size**-0.5, lse=lse)
    assert bool((out[-1] == SENTINEL).all()), "wrote behind its rows"
    assert not bool(runner._arrived.any()), "left a count of pieces behind"
    tokens = lse.view(len(case.lengths), case.kv_heads, case.q_len, case.group).transpose(1, 2)
    return out[:-1].cpu(), tokens.reshape(query.shape[:2]).cpu()


def assert_right(step: Step, out: torch.Tensor, lse: torch.Tensor, **scales) -> None:
    expected, expected_lse = step.oracle(step.query, **scales)
    largest = step.largest_value() * float(torch.as_tensor(scales.get("v_scale", 1.0)).abs().max())
    bound = ARITHMETIC * largest + HALF_ULP[step.case.out_dtype] * expected.abs()
    error = (out.double() - expected).abs()
    assert bool((error <= bound).all()), float((error - bound).max())
    dead = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead)
    errors = (lse.double() - expected_lse)[~dead].abs()
    assert float(errors.max() if errors.numel() else 0.0) <= ARITHMETIC_LSE


LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 300])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    q_len = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    return Case(
        lengths=tuple(length + q_len if length else 0 for length in draw(st.lists(LENGTHS, min_size=1, max_size=5))),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16])),
        head_size=draw(st.sampled_from([64, 128, 256])),
        page_size=draw(st.sampled_from([16, 32, 64, 128])),
        q_len=q_len,
        causal=draw(st.booleans()),
        out_dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        layout=draw(st.sampled_from(LAYOUTS)),
        num_sms=draw(st.sampled_from([1, 3, 20])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.booleans())
@example(Case(lengths=(0,), out_dtype=torch.bfloat16), True)
@example(Case(lengths=(0, 5, 0), num_sms=1, out_dtype=torch.bfloat16), False)
@example(Case(lengths=(700, *[40] * 6), kv_heads=1, num_sms=3, out_dtype=torch.bfloat16), True)
@example(Case(lengths=(90, 33), kv_heads=1, group=16, q_len=7, out_dtype=torch.bfloat16), False)
def test_agrees_with_the_oracle(case: Case, merge_here: bool) -> None:
    shape = runner_for(case).shapes[case.q_len]
    step = Step(case)
    assert_right(step, *attend(step, runner_for(case, dataclasses.replace(shape.tuning, merge_here=merge_here))))


@pytest.mark.parametrize("tuning", WIDE + WGMMA, ids=lambda tuning: f"{tuning.kernel} {tuning.rows} rows")
@pytest.mark.parametrize("head_size", [128, 256])
@pytest.mark.parametrize("merge_here", [True, False])
def test_kernels_whose_warps_share_tokens_with_any_number_of_rows(
    head_size: int, tuning: StreamTuning, merge_here: bool
) -> None:
    case = Case(
        lengths=(300, 4, 0, 77), kv_heads=1, group=6, q_len=4, head_size=head_size, num_sms=3, out_dtype=torch.bfloat16
    )
    step = Step(case)
    assert_right(step, *attend(step, runner_for(case, dataclasses.replace(tuning, merge_here=merge_here))))


@pytest.mark.parametrize("page_size", [16, 128])
def test_sequence_of_five_thousand_tokens(page_size: int) -> None:
    case = Case(lengths=(5000, 3), kv_heads=1, group=4, head_size=128, page_size=page_size, out_dtype=torch.bfloat16)
    step = Step(case)
    assert_right(step, *attend(step))


@pytest.mark.parametrize("num_sms", [1, 2, 7, 20, 132])
def test_any_number_of_programs_gives_the_same(num_sms: int) -> None:
    step = Step(Case(lengths=(300, 1, 130), q_len=2, num_sms=num_sms, out_dtype=torch.bfloat16))
    assert_right(step, *attend(step))


@pytest.mark.parametrize("tuning", [None, WIDE[0], *WGMMA[:2]], ids=lambda tuning: tuning.kernel if tuning else "tuned")
@pytest.mark.parametrize("merge_here", [True, False])
def test_a_captured_step_follows_the_live_lengths(tuning: StreamTuning | None, merge_here: bool) -> None:
    """The lengths change on the device after the plan was made: a launch works on what they are when it runs."""
    step = Step(Case(lengths=(127, 300, 64), head_size=128 if tuning else 64, out_dtype=torch.bfloat16))
    tuning = tuning or runner_for(step.case).shapes[1].tuning
    runner = runner_for(step.case, dataclasses.replace(tuning, merge_here=merge_here))
    lengths = torch.tensor([3, 17, 0], dtype=torch.int32, device=DEVICE)
    plan = runner.plan(lengths, step.block_table.to(DEVICE), q_len=1, causal=True)
    query, out = step.query.to(DEVICE), torch.empty_like(step.query, device=DEVICE)
    kv, one = step.cache(), torch.ones(1, device=DEVICE)
    arguments = (plan, query, out, PagedKV(kv.k.to(DEVICE), kv.v.to(DEVICE)), one, one, step.case.head_size**-0.5)
    runner.run(*arguments)
    replay = functools.partial(runner.run, *arguments)
    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner.run(*arguments)
        replay = graph.replay
    for now in ((3, 17, 0), (127, 300, 64), (0, 300, 1), (127, 2, 64)):
        step.seq_lens = torch.tensor(now, dtype=torch.int32)
        lengths.copy_(step.seq_lens)
        out.fill_(float("nan"))
        replay()
        afresh, lse = attend(step, runner)
        assert torch.equal(out.cpu(), afresh)
        assert_right(step, afresh, lse)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=["tensor", "head", "sequence and head"])
@pytest.mark.parametrize("merge_here", [True, False])
def test_descales(shape: tuple[int, ...], merge_here: bool) -> None:
    step = Step(Case(lengths=(200, 40), kv_heads=3, out_dtype=torch.bfloat16))
    tuning = dataclasses.replace(runner_for(step.case).shapes[1].tuning, merge_here=merge_here)
    generator = torch.Generator().manual_seed(1)
    scales = {name: torch.rand(shape, generator=generator) + 0.5 for name in ("k_scale", "v_scale")}
    assert_right(step, *attend(step, runner_for(step.case, tuning), **scales), **scales)


def test_k_scale_of_zero_averages_the_values() -> None:
    step = Step(Case(lengths=(77,), out_dtype=torch.bfloat16))
    assert_right(step, *attend(step, k_scale=0.0), k_scale=0.0)


def test_query_that_is_a_view_of_a_fused_qkv() -> None:
    step = Step(Case(lengths=(140, 17), group=3, q_len=2, out_dtype=torch.bfloat16))
    tokens, heads, size = step.query.shape
    fused = torch.full((tokens, (heads + 4) * size), float("nan"), dtype=torch.bfloat16)
    fused[:, : heads * size] = step.query.flatten(1)
    view = fused.to(DEVICE)[:, : heads * size].view(tokens, heads, size)
    assert_right(step, *attend(step, query=view))


def test_query_and_output_at_odd_addresses() -> None:
    step = Step(Case(lengths=(140, 17), q_len=2, out_dtype=torch.bfloat16))
    runner = runner_for(step.case)
    expected, lse = attend(step, runner)
    assert_right(step, expected, lse)
    query, out = (
        torch.empty(step.query.numel() + 3, dtype=torch.bfloat16, device=DEVICE)[3:].view(step.query.shape)
        for _ in range(2)
    )
    query.copy_(step.query)
    kv, one = step.cache(), torch.ones(1, device=DEVICE)
    plan = runner.plan(step.seq_lens.to(DEVICE), step.block_table.to(DEVICE), q_len=2, causal=True)
    kv = PagedKV(kv.k.to(DEVICE), kv.v.to(DEVICE))
    runner.run(plan, query, out, kv, one, one, step.case.head_size**-0.5)
    assert torch.equal(out.cpu(), expected)
    assert len({choice.strides for choice in runner._compiled}) == 1  # those at even addresses: nothing else compiles


@pytest.mark.parametrize(
    ("head_size", "tuning"), [(64, None), (128, None), (256, None), (128, WIDE[0]), (128, WGMMA[0])]
)
def test_all_e4m3_bytes_come_through(head_size: int, tuning: StreamTuning | None) -> None:
    """One key a sequence: its value is the output, whatever its byte."""
    for first in range(0, 256, 64):
        step = Step(Case(lengths=(1,), kv_heads=1, group=1, head_size=head_size, out_dtype=torch.float16))
        page, row = step.place(0, 0)
        codes = (first + torch.arange(head_size) % 64).to(torch.uint8)
        codes[(codes & 0x7F) == NAN_BYTE] = 0
        step.v[page, row, 0] = codes
        out, _ = attend(step, runner_for(step.case, tuning))
        assert torch.equal(out[0, 0].float(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("tuning", WGMMA, ids=lambda tuning: f"{tuning.tokens} tokens, {tuning.stages} stages")
def test_wgmma_kernel_follows_scores_that_rise_and_fall(tuning: StreamTuning) -> None:
    """Between some tiles by more than the maximum of the weights may be out of date, between others by less."""
    case = Case(lengths=(500,), kv_heads=1, group=1, head_size=128, out_dtype=torch.bfloat16, num_sms=1)
    step = Step(case)
    tall = torch.tensor([0.125, 0.25, 1.0, 1.25, 0.125, 2.0, 1.0, 0.5]).repeat_interleave(64)
    for token in range(500):
        codes = (tall[token] * step.query[0, 0].float().sign()).to(torch.float8_e4m3fn).view(torch.uint8)
        step.k[(*step.place(0, token), 0)] = codes
    assert_right(step, *attend(step, runner_for(case, tuning)))


def test_wgmma_kernel_computes_with_all_bits_of_a_bf16_query() -> None:
    """One key a sequence, with a 1 in one channel: its score is the query's element."""
    case = Case(lengths=(1,) * 12, kv_heads=1, group=8, head_size=128, out_dtype=torch.bfloat16, num_sms=1)
    step = Step(case)
    step.query *= torch.logspace(-6, 6, 8)[:, None].to(torch.bfloat16)  # heads of very different size
    for seq in range(12):
        page, row = step.place(seq, 0)
        step.k[page, row, 0] = 0
        step.k[page, row, 0, 10 * seq] = 0x38  # 1.0
    _, lse = attend(step, runner_for(case, WGMMA[0]))
    wanted = torch.stack([step.query[seq, :, 10 * seq] for seq in range(12)]).double()
    largest = step.query.double().abs().amax(-1)
    error = (lse.double() * case.head_size**0.5 - wanted).abs()
    assert float((error / largest).max()) <= 2.0**-17


def test_same_inputs_give_the_same_bits() -> None:
    step = Step(Case(lengths=(300, 65, 5), out_dtype=torch.bfloat16))
    first, again = attend(step), attend(step)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("tuning", [None, WIDE[0], WGMMA[0]], ids=["stream", "wide", "wgmma"])
def test_a_page_outside_of_the_pool_counts_as_past_the_end(tuning: StreamTuning | None) -> None:
    """The keys of a page that does not exist have no weight: the others' output is as if they were alone."""
    case = Case(lengths=(40,), kv_heads=1, group=2, head_size=128, out_dtype=torch.bfloat16, num_sms=1)
    step = Step(case)
    step.block_table[0, 1] = step.k.shape[0]
    out, _ = attend(step, runner_for(case, tuning))
    alone = Step(case)
    tokens = [*range(16), *range(32, 40)]
    k, v = (torch.stack([cache[alone.place(0, t)] for t in tokens]) for cache in (alone.k, alone.v))
    k, v = (x.view(torch.float8_e4m3fn).double()[:, 0] for x in (k, v))
    weights = torch.softmax(step.query[0].double() @ k.T * case.head_size**-0.5, -1)
    assert float((out[0].double() - weights @ v).abs().max()) <= 0.01


class TestPacked:
    """e2m3 pages: planar 6-bit rows."""

    @staticmethod
    def steps(case: Case) -> tuple[Step, PagedKV, torch.Tensor, torch.Tensor]:
        """A step, its cache packed, and what the codes say as float64 (pages, page_size, heads, head_size)."""
        step = Step(case)
        generator = torch.Generator().manual_seed(case.seed)
        codes = [torch.randint(0, 64, step.k.shape, generator=generator, dtype=torch.uint8) for _ in range(2)]
        row = e2m3.row_bytes(case.head_size)
        both = torch.cat([e2m3.pack(c) for c in codes], -1).transpose(1, 2).contiguous()
        assert both.shape[-1] == 2 * row
        views = both.transpose(1, 2)
        return step, PagedKV(views[..., :row], views[..., row:]), *(e2m3.decode(c).double() for c in codes)

    @pytest.mark.parametrize("head_size", [128, 256])
    @pytest.mark.parametrize(("group", "q_len"), [(4, 1), (3, 4), (8, 4)])
    @pytest.mark.parametrize("by_channel", [False, True])
    def test_agrees_with_attention_over_the_decoded_cache(self, head_size, group, q_len, by_channel) -> None:
        case = Case(
            lengths=(150, 5),
            kv_heads=2,
            group=group,
            q_len=q_len,
            head_size=head_size,
            out_dtype=torch.bfloat16,
            num_sms=3,
        )
        step, kv, k, v = self.steps(case)
        generator = torch.Generator().manual_seed(7)
        shape = (2, head_size) if by_channel else ()
        k_scale, v_scale = (torch.rand(shape, generator=generator) * 0.2 + 0.1 for _ in range(2))
        out, lse = attend(step, runner_for(case, kv_format="e2m3"), k_scale=k_scale, v_scale=v_scale, kv=kv)
        k, v = k * k_scale.double(), v * v_scale.double()
        for seq, length in enumerate(case.lengths):
            places = torch.tensor([step.place(seq, t) for t in range(length)])
            keys, values = k[places[:, 0], places[:, 1]], v[places[:, 0], places[:, 1]]
            for i, head in itertools.product(range(q_len), range(2 * group)):
                seen = length - q_len + i + 1
                q = step.query[seq * q_len + i, head].double()
                scores = keys[:seen, head // group] @ q * head_size**-0.5
                expected = torch.softmax(scores, -1) @ values[:seen, head // group]
                bound = ARITHMETIC * float(values.abs().max()) + HALF_ULP[torch.bfloat16] * expected.abs()
                assert bool(((out[seq * q_len + i, head].double() - expected).abs() <= bound).all())
                assert abs(float(lse[seq * q_len + i, head] - torch.logsumexp(scores, -1))) <= 2e-3

    def test_all_64_codes_come_through(self) -> None:
        case = Case(lengths=(1,), kv_heads=1, group=1, head_size=128, out_dtype=torch.float16)
        step, kv, _, _ = self.steps(case)
        page, row = step.place(0, 0)
        kv.v[page, row, 0] = e2m3.pack((torch.arange(128) % 64).to(torch.uint8))
        out, _ = attend(step, runner_for(case, kv_format="e2m3"), kv=kv)
        assert torch.equal(out[0, 0].float(), e2m3.decode((torch.arange(128) % 64).to(torch.uint8)))

    def test_refuses_a_head_size_that_it_cannot_read(self) -> None:
        with pytest.raises(ConfigurationError, match="e2m3 with head size 64"):
            runner_for(Case(lengths=(1,)), kv_format="e2m3")


class Compiler:
    """A cache that compiles nothing, and knows when it was asked to."""

    def __init__(self) -> None:
        self.frozen = False

    def precompile(self, variants, *, workers: int):
        assert not self.frozen, [variant.label for variant in variants]
        return list(variants)

    def freeze(self) -> None:
        self.frozen = True


@pytest.mark.parametrize("group", [1, 4])
def test_after_the_first_step_no_launch_compiles(monkeypatch, group: int) -> None:
    """Odd batches, all query lengths and masks, addresses of any alignment, other descales and tables."""
    config = RunnerConfig(2 * group, 2, 128, 16, torch.bfloat16, 9, DEVICE, max_q_len=3)
    cache = KernelCache(None) if ON_GPU else Compiler()
    if not ON_GPU:
        monkeypatch.setattr(stream_runner, "launch_compiled", lambda *_arguments: None)
    runner = StreamRunner(config, num_sms=5, cache=cache)
    kv = torch.zeros((4, 2, 16, 256), dtype=torch.uint8, device=DEVICE).transpose(1, 2)
    kv = PagedKV(kv[..., :128], kv[..., 128:])

    def step(num_seqs: int, q_len: int, *, causal: bool, offset: int, scale: torch.Tensor) -> None:
        size = num_seqs * q_len * 2 * group * 128
        query, out = (torch.zeros(size + offset, dtype=torch.bfloat16, device=DEVICE)[offset:] for _ in range(2))
        query, out = (x.view(num_seqs * q_len, 2 * group, 128) for x in (query, out))
        lengths = torch.full((num_seqs + 1,), 20, dtype=torch.int32, device=DEVICE)[1:]
        table = torch.ones((num_seqs, 2 + offset), dtype=torch.int32, device=DEVICE)
        plan = runner.plan(lengths, table, q_len=q_len, causal=causal)
        runner.run(plan, query, out, kv, scale, scale, 0.1)

    one = torch.ones(1, device=DEVICE)
    step(1, 1, causal=True, offset=0, scale=one)
    cache.freeze()
    for num_seqs, q_len, causal in itertools.product((1, 2, 3, 7, 9), (1, 2, 3), (True, False)):
        for offset, scale in ((0, one), (1, torch.ones(2, device=DEVICE)), (3, torch.ones(num_seqs, 2, device=DEVICE))):
            step(num_seqs, q_len, causal=causal, offset=offset, scale=scale)


def test_refuses_an_fp8_query() -> None:
    with pytest.raises(ConfigurationError, match="Q dtype fp8"):
        StreamRunner(RunnerConfig(4, 2, 64, 16, torch.bfloat16, 1, DEVICE, q_dtype="fp8"), num_sms=1)


def test_refuses_a_cache_that_is_not_aligned() -> None:
    storage = torch.zeros(2 * 16 * 2 * 128 + 8, dtype=torch.uint8, device=DEVICE)[8:]
    step = Step(Case(lengths=(20,), out_dtype=torch.bfloat16))
    cache = storage.view(2, 2, 16, 128).transpose(1, 2)
    runner = runner_for(step.case)
    plan = runner.plan(step.seq_lens, step.block_table, q_len=1, causal=True)
    query, one = step.query.to(DEVICE), torch.ones(1, device=DEVICE)
    with pytest.raises(ConfigurationError, match="multiples of 16 bytes"):
        runner.run(plan, query, torch.empty_like(query), PagedKV(cache[..., :64], cache[..., 64:]), one, one, 0.125)


class TestShares:
    """The division of work, from the launch's own numbers."""

    def test_every_choice_of_a_runner_is_prepared(self) -> None:
        config = RunnerConfig(32, 8, 128, 16, torch.bfloat16, 64, DEVICE, max_q_len=3, q_dtype="bf16")
        shapes = {n: shape_of(config, n, 132) for n in (1, 2, 3)}
        first = Choice(1, True, False, False, False, torch.bfloat16, Strides(*range(7)))
        found = set(siblings(first, shapes))
        wanted = {
            first._replace(q_len=q_len, causal=causal, merge_here=shapes[q_len].merge_here(num_seqs))
            for q_len, num_seqs in itertools.product((1, 2, 3), range(1, 65))
            for causal in (True, False)
            if causal or q_len > 1
        }
        assert found == wanted

    def test_variants_that_a_step_needs(self) -> None:
        """Nothing is compiled to tell: a batch of one on 132 SMs has its pieces merged by a launch of its own."""
        step = Step(Case(lengths=(300,), kv_heads=2, group=4, head_size=128, out_dtype=torch.bfloat16))
        config = RunnerConfig(8, 2, 128, 16, torch.bfloat16, 1, DEVICE, q_dtype="bf16")

        def attend_once(runner: StreamRunner) -> None:
            plan = runner.plan(step.seq_lens, step.block_table, q_len=1, causal=True)
            kv, one = step.cache(), torch.ones(1)
            runner.run(plan, step.query, torch.empty_like(step.query), kv, one, one, 1.0)

        labels = [variant.label for variant in variants_of(config, attend_once, num_sms=132)]
        assert labels == ["8:2 d 128 fp8, page 16, q_len 1", "merge 8:2 d 128 fp8, page 16, q_len 1"]

    def test_merge_kernel_leaves_whole_pairs_alone(self) -> None:
        """One program, nothing is cut: the merge must not touch what the decode kernel wrote."""
        case = Case(lengths=(100, 30), kv_heads=1, num_sms=1, out_dtype=torch.bfloat16)
        step = Step(case)
        tuning = StreamTuning(tokens=32, programs_per_sm=1, merge_here=False)
        assert_right(step, *attend(step, runner_for(case, tuning)))
        assert merge_kernel.arg_names[0] == "OUT"
