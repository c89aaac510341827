"""The reference backend's arithmetic: any step, any mask rule, any cache format, against the float64 oracle.

The oracle knows windows and soft-caps; ALiBi and sinks have a small formula of their own here. Caches start out as
NaN everywhere, so reading a row that nobody wrote shows.
"""

import dataclasses
import itertools
import math

import pytest
import torch

from mjolnir.reference.attention import paged_attention
from mjolnir.reference.paged_sdpa import MaskRules, attend, write_kv

torch.set_num_threads(1)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [E4M3, E5M2, None]
ONE = torch.ones(())
# Relative to the largest |V|, for float32 queries and a float32 or 8-bit cache; largest seen: 6e-7.
EXACT = 3e-6


@dataclasses.dataclass
class Step:
    """Requests of any query lengths: prompts, chunks of prompts and decodes; tensors as vLLM hands them over."""

    seq_lens: list[int]
    query_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    page_size: int = 16
    float8: torch.dtype | None = E4M3
    dtype: torch.dtype = torch.float32
    token_major: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.seq_lens) + self.head_size)
        counts = [-(-length // self.page_size) for length in self.seq_lens]
        pages = sum(counts) + 1
        shuffled = torch.randperm(pages, generator=generator).tolist()
        cache_dtype = self.dtype if self.float8 is None else torch.uint8
        poison = math.nan if self.float8 is None else 0x7F
        order = (self.page_size, self.kv_heads) if self.token_major else (self.kv_heads, self.page_size)
        self.cache = torch.full((pages, *order, 2 * self.head_size), poison, dtype=cache_dtype)
        if self.token_major:
            self.cache = self.cache.transpose(1, 2)
        self.block_table = torch.full((len(counts), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
        self.slots = []
        for seq, (length, count) in enumerate(zip(self.seq_lens, counts, strict=True)):
            blocks = [shuffled.pop() for _ in range(count)]
            self.block_table[seq, :count] = torch.tensor(blocks, dtype=torch.int32)
            self.slots += [
                blocks[token // self.page_size] * self.page_size + token % self.page_size for token in range(length)
            ]
        shape = (sum(self.seq_lens), self.kv_heads, self.head_size)
        self.key = torch.randn(shape, generator=generator).to(self.dtype)
        self.value = torch.randn(shape, generator=generator).to(self.dtype)
        queries = (sum(self.query_lens), self.heads, self.head_size)
        self.query = torch.randn(queries, generator=generator).to(self.dtype)

    def write(self, k_scale=ONE, v_scale=ONE) -> None:
        slots = torch.tensor(self.slots, dtype=torch.int64)
        write_kv(self.key, self.value, self.cache, slots, k_scale, v_scale, self.float8)

    def attend(self, *, causal=True, k_scale=ONE, v_scale=ONE, **rules) -> torch.Tensor:
        out = torch.full_like(self.query, 777.0)
        starts = list(itertools.accumulate(self.query_lens, initial=0))
        attend(
            self.query,
            out,
            self.cache,
            self.block_table,
            starts,
            self.seq_lens,
            softmax_scale=self.head_size**-0.5,
            causal=causal,
            rules=MaskRules(**rules),
            k_scale=k_scale,
            v_scale=v_scale,
            float8=self.float8,
        )
        return out

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of K and V in the cache, (pages, page_size, KV heads, head_size), without descale."""
        cache = self.cache.contiguous()
        values = (cache if self.float8 is None else cache.view(self.float8)).float().transpose(1, 2)
        return values[..., : self.head_size], values[..., self.head_size :]

    def oracle(self, **options) -> torch.Tensor:
        lens = torch.tensor(self.seq_lens)
        options = {"softmax_scale": self.head_size**-0.5} | options
        return paged_attention(self.query, *self.halves(), self.block_table, lens, self.query_lens, **options)[0]

    def check(self, out: torch.Tensor, expected: torch.Tensor, bound: float = EXACT) -> None:
        largest = float(self.halves()[1].nan_to_num(0.0).abs().max())
        assert float((out.double() - expected).abs().max()) <= bound * largest


STEPS = {
    "one decode": ([40], [1]),
    "decodes": ([1, 17, 129, 64], [1, 1, 1, 1]),
    "prompts": ([7, 16, 33], [7, 16, 33]),
    "chunk of a prompt": ([100], [30]),
    "all at once": ([50, 20, 65, 130, 9], [1, 20, 15, 4, 1]),
    "a request without tokens": ([30, 12, 8], [1, 0, 8]),
}


@pytest.mark.parametrize("float8", FORMATS)
@pytest.mark.parametrize(("seq_lens", "query_lens"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("causal", [True, False])
def test_steps(seq_lens, query_lens, float8, causal):
    step = Step(seq_lens, query_lens, float8=float8)
    step.write()
    step.check(step.attend(causal=causal), step.oracle(causal=causal))


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (16, 1)])
@pytest.mark.parametrize("float8", FORMATS)
def test_head_sizes_and_groups(head_size, heads, float8):
    step = Step([20, 50], [1, 12], heads=heads[0], kv_heads=heads[1], head_size=head_size, float8=float8)
    step.write()
    step.check(step.attend(), step.oracle())


@pytest.mark.parametrize("page_size", [16, 48, 128])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("float8", FORMATS)
def test_pages_and_strides(page_size, token_major, float8):
    step = Step([50, 17, 129], [3, 1, 129], page_size=page_size, token_major=token_major, float8=float8)
    step.write()
    step.check(step.attend(), step.oracle())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("float8", FORMATS)
def test_sixteen_bit_models(dtype, float8):
    """PyTorch's fused attention rounds its weights and its output to the query's dtype."""
    step = Step([50, 20, 130], [1, 20, 4], dtype=dtype, float8=float8)
    step.write()
    # Output and weights rounded once each; largest seen: 0.3 of it.
    step.check(step.attend(), step.oracle(), bound=2 * torch.finfo(dtype).eps)


# Mask rules.


@pytest.mark.parametrize("window", [1, 2, 16, 33, 1000])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize(("seq_lens", "query_lens"), [STEPS["all at once"], STEPS["prompts"]])
def test_sliding_window(window, soft_cap, seq_lens, query_lens):
    step = Step(seq_lens, query_lens)
    step.write()
    out = step.attend(sliding_window=window, soft_cap=soft_cap)
    step.check(out, step.oracle(sliding_window=window, soft_cap=soft_cap))


def test_window_of_one_is_the_tokens_own_value():
    step = Step([9], [9], heads=2)
    step.write()
    value = step.value.to(E4M3).float()
    torch.testing.assert_close(step.attend(sliding_window=1), value)


@pytest.mark.parametrize("soft_cap", [1.0, 30.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_lens", "query_lens"), [STEPS["all at once"], STEPS["prompts"]])
def test_soft_cap(soft_cap, causal, seq_lens, query_lens):
    step = Step(seq_lens, query_lens)
    step.write()
    step.check(step.attend(soft_cap=soft_cap, causal=causal), step.oracle(soft_cap=soft_cap, causal=causal))


def by_hand(step: Step, *, slopes=None, sinks=None, window=None, soft_cap=None) -> torch.Tensor:
    """One query token and head at a time, in float64: ALiBi adds ``slope * (key - position)`` to a score, a sink is
    a score of its own whose value is 0."""
    keys, values = (half.double() for half in step.halves())
    out, row = torch.zeros(step.query.shape, dtype=torch.float64), 0
    for seq, (length, count) in enumerate(zip(step.seq_lens, step.query_lens, strict=True)):
        places = [
            (int(step.block_table[seq, token // step.page_size]), token % step.page_size) for token in range(length)
        ]
        for position in range(length - count, length):
            for head in range(step.heads):
                kv_head = head * step.kv_heads // step.heads
                scores, seen = [], []
                for token in range(0 if window is None else max(0, position - window + 1), position + 1):
                    page, place = places[token]
                    score = float(step.query[row, head].double() @ keys[page, place, kv_head]) * step.head_size**-0.5
                    if soft_cap is not None:
                        score = soft_cap * math.tanh(score / soft_cap)
                    if slopes is not None:
                        score += float(slopes[head]) * (token - position)
                    scores.append(score)
                    seen.append(values[page, place, kv_head])
                weights = [math.exp(score) for score in scores]
                total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
                out[row, head] = sum(weight / total * value for weight, value in zip(weights, seen, strict=True))
            row += 1
    return out


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.0, 2.0, -3.0, 5.0])


@pytest.mark.parametrize("float8", FORMATS)
@pytest.mark.parametrize(
    "rules",
    [
        {"slopes": SLOPES},
        {"slopes": SLOPES, "window": 7},
        {"slopes": SLOPES, "soft_cap": 2.0},
        {"sinks": SINKS},
        {"sinks": SINKS, "window": 7},
        {"sinks": SINKS, "soft_cap": 2.0},
        {"sinks": SINKS, "slopes": SLOPES, "window": 7, "soft_cap": 2.0},
    ],
    ids="+".join,
)
@pytest.mark.parametrize(("seq_lens", "query_lens"), [([20, 9, 33], [1, 9, 5]), ([12], [12])])
def test_alibi_and_sinks(rules, seq_lens, query_lens, float8):
    step = Step(seq_lens, query_lens, float8=float8)
    step.write()
    out = step.attend(
        alibi_slopes=rules.get("slopes"),
        sinks=rules.get("sinks"),
        sliding_window=rules.get("window"),
        soft_cap=rules.get("soft_cap"),
    )
    step.check(out, by_hand(step, **rules))


def test_sinks_in_a_sixteen_bit_model():
    step = Step([20, 33], [1, 5], dtype=torch.bfloat16)
    step.write()
    step.check(step.attend(sinks=SINKS.to(torch.bfloat16)), by_hand(step, sinks=SINKS), bound=2.0**-7)


# Scales.


@pytest.mark.parametrize("float8", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [
        (torch.tensor(0.5), torch.tensor(3.0)),
        (torch.tensor([0.7]), ONE),
        (ONE, torch.tensor([0.3])),
        (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.1])),
        (torch.tensor([0.5, 2.0]), torch.tensor(3.0)),
    ],
)
def test_scales_are_divided_by_at_the_write_and_multiplied_at_the_read(float8, k_scale, v_scale):
    step = Step([20, 50], [1, 12], float8=float8)
    step.write(k_scale, v_scale)
    slot = step.slots[5]
    for half, given, scale in zip(step.halves(), (step.key, step.value), (k_scale, v_scale), strict=True):
        expected = (given[5] / scale.view(-1, 1)).to(float8).float()
        assert torch.equal(half[slot // 16, slot % 16], expected)
    out = step.attend(k_scale=k_scale, v_scale=v_scale)
    step.check(out, step.oracle(k_scale=k_scale, v_scale=v_scale), bound=EXACT * float(v_scale.max().clamp_min(1.0)))


def test_float_cache_takes_no_scales():
    step = Step([20], [3], float8=None)
    step.write(torch.tensor(0.5), torch.tensor(0.5))
    slot = step.slots[5]
    assert torch.equal(step.halves()[0][slot // 16, slot % 16], step.key[5])
    out = step.attend(k_scale=torch.tensor(0.5), v_scale=torch.tensor(0.5))
    step.check(out, step.oracle())


# Writing.


def empty_cache(float8: torch.dtype | None, *, pages: int = 3) -> torch.Tensor:
    if float8 is None:
        return torch.full((pages, 2, 16, 8), 777.0)
    return torch.full((pages, 2, 16, 8), 0xAB, dtype=torch.uint8)


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = torch.randn((2, count, 2, 4), generator=torch.Generator().manual_seed(count))
    return key, value


@pytest.mark.parametrize("float8", FORMATS)
def test_write_reaches_its_slots_and_no_other_byte(float8):
    key, value = rows_of(4)
    cache = empty_cache(float8)
    expected = cache.clone()
    slots = [47, 0, 17, 15]
    write_kv(key, value, cache, torch.tensor(slots), ONE, ONE, float8)
    for token, slot in enumerate(slots):
        for head in range(2):
            row = torch.cat([key[token, head], value[token, head]])
            expected[slot // 16, head, slot % 16] = row if float8 is None else row.to(float8).view(torch.uint8)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("float8", FORMATS)
def test_slots_below_zero_are_not_written(float8):
    """Padding; a slot of -1 as an index would be the last one of the cache."""
    key, value = rows_of(4)
    cache, expected = empty_cache(float8), empty_cache(float8)
    write_kv(key, value, cache, torch.tensor([-1, 5, -1, 6]), ONE, ONE, float8)
    write_kv(key[[1, 3]], value[[1, 3]], expected, torch.tensor([5, 6]), ONE, ONE, float8)
    assert torch.equal(cache, expected)
    only_padding = empty_cache(float8)
    write_kv(key, value, only_padding, torch.full((4,), -1), ONE, ONE, float8)
    assert torch.equal(only_padding, empty_cache(float8))


@pytest.mark.parametrize("float8", FORMATS)
def test_more_rows_than_slots(float8):
    key, value = rows_of(4)
    key[2:], value[2:] = math.nan, math.nan
    cache, expected = empty_cache(float8), empty_cache(float8)
    write_kv(key, value, cache, torch.tensor([3, 4]), ONE, ONE, float8)
    write_kv(key[:2], value[:2], expected, torch.tensor([3, 4]), ONE, ONE, float8)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("float8", FORMATS)
def test_no_token_writes_nothing(float8):
    key, value = rows_of(4)
    for rows in (0, 4):
        cache = empty_cache(float8)
        write_kv(key[:rows], value[:rows], cache, torch.empty(0, dtype=torch.int64), ONE, ONE, float8)
        assert torch.equal(cache, empty_cache(float8))


@pytest.mark.parametrize(("float8", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_too_large_values_saturate(float8, largest):
    """e5m2 has infinities, e4m3 a NaN in their place: neither may get into a cache from a large activation."""
    key = torch.full((1, 2, 4), 1e9)
    cache = empty_cache(float8)
    write_kv(key, -key, cache, torch.tensor([7]), ONE, ONE, float8)
    row = cache[0, 0, 7].view(float8).float()
    assert row.tolist() == [largest] * 4 + [-largest] * 4


def test_input_is_left_alone():
    key, value = rows_of(3)
    before = key.clone(), value.clone()
    write_kv(key, value, empty_cache(E4M3), torch.arange(3), torch.tensor(0.5), torch.tensor(0.5), E4M3)
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


def test_rows_of_a_request_without_tokens_are_not_written():
    """Padding of a CUDA graph, whose rows stand behind those of the step."""
    step = Step([30, 5], [2, 0])
    step.write()
    step.query = torch.cat([step.query, step.query])
    out = step.attend()
    assert bool((out[2:] == 777.0).all())
    assert not bool((out[:2] == 777.0).any())
