"""The impl over the reference backend: who computes a step, on what views, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch

from mjolnir import fp8_query
from mjolnir import impl as impl_module
from mjolnir.backend import backend_class
from mjolnir.errors import LayoutError
from mjolnir.metadata import MjolnirMetadata
from mjolnir.reference.attention import paged_attention
from mjolnir.reference.backend import TorchReferenceBackend, TorchReferenceMetadata
from mjolnir.reference.executor import TorchRunner
from mjolnir.runner import RunnerConfig

torch.set_num_threads(1)

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 4, 2, 64, 16
LENGTHS = [20, 7]
Impl = backend_class(TorchReferenceBackend).get_impl_cls()


def make_impl(**changes):
    values = {
        "num_heads": HEADS,
        "head_size": HEAD_SIZE,
        "scale": 0.125,
        "num_kv_heads": KV_HEADS,
        "kv_cache_dtype": "fp8",
    }
    return Impl(**values | changes)


class Step:
    """A decode of two requests: what vLLM hands to an impl."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
        self.block_table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
        self.seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)
        pages = [3 * 16 + token for token in range(16)] + [1 * 16 + token for token in range(4)]
        self.slots = torch.tensor(pages + [4 * 16 + token for token in range(7)])
        shape = (len(self.slots), KV_HEADS, HEAD_SIZE)
        self.key = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.value = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.query = torch.randn((2, HEADS, HEAD_SIZE), generator=generator).to(torch.bfloat16)
        self.cache = torch.full((5, KV_HEADS, PAGE_SIZE, 2 * HEAD_SIZE), 0x7F, dtype=torch.uint8)

    def write(self, impl) -> None:
        impl.do_kv_cache_update(self.layer, self.key, self.value, self.cache, self.slots)

    def t5(self, page_size: int = PAGE_SIZE) -> MjolnirMetadata:
        runner = TorchRunner(
            RunnerConfig(
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_size=HEAD_SIZE,
                page_size=page_size,
                out_dtype=torch.bfloat16,
                max_num_seqs=4,
                device=torch.device("cpu"),
            )
        )
        return MjolnirMetadata(
            plan=runner.plan(self.seq_lens, self.block_table, q_len=1, causal=True),
            runner=runner,
            num_actual_tokens=2,
            num_reqs=2,
            max_query_len=1,
            max_seq_len=20,
            query_start_loc=torch.tensor([0, 1, 2]),
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slots[:2],
        )

    def fallback(self) -> TorchReferenceMetadata:
        return TorchReferenceMetadata(
            num_actual_tokens=2,
            max_query_len=1,
            max_seq_len=20,
            query_start=[0, 1, 2],
            lengths=LENGTHS,
            query_start_loc=torch.tensor([0, 1, 2]),
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slots[:2],
        )

    def forward(self, impl, metadata, *, query=None, output=None, cache=None, **more) -> torch.Tensor:
        output = torch.full_like(self.query, 777.0) if output is None else output
        query = self.query if query is None else query
        cache = self.cache if cache is None else cache
        result = impl.forward(self.layer, query, None, None, cache, metadata, output, **more)
        assert result is output
        return result

    def oracle(self) -> torch.Tensor:
        halves = self.cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
        scales = {"k_scale": self.layer._k_scale, "v_scale": self.layer._v_scale}
        rest = {"softmax_scale": 0.125, **scales}
        return paged_attention(self.query, *halves, self.block_table, self.seq_lens, [1, 1], **rest)[0]


@pytest.fixture
def step():
    return Step()


def test_t5_and_fallback_steps_agree_with_the_oracle(step):
    """The impl writes, then either of the two reads: the scales are the layer's in both."""
    impl = make_impl()
    step.write(impl)
    expected = step.oracle()
    fallback = step.forward(impl, step.fallback())
    t5 = step.forward(impl, step.t5())
    # Values reach 8, of bf16 output 2^-9 of it; T5 rounds its query to e4m3 besides.
    assert float((fallback.double() - expected).abs().max()) < 0.03
    assert 0.0 < float((t5.double() - expected).abs().max()) < 0.2


def test_t5_step_is_the_runners(step):
    impl = make_impl()
    step.write(impl)
    calls = []
    metadata = step.t5()
    metadata.runner = SimpleNamespace(config=metadata.runner.config, run=lambda *args: calls.append(args))
    step.forward(impl, metadata)
    ((plan, query, output, views, k_scale, v_scale, scale),) = calls
    assert plan is metadata.plan
    assert query.data_ptr() == step.query.data_ptr()
    assert query.shape == output.shape == (2, HEADS, HEAD_SIZE)
    assert views.k.data_ptr() == step.cache.data_ptr()
    assert views.k.shape == (5, PAGE_SIZE, KV_HEADS, HEAD_SIZE)
    assert k_scale is step.layer._k_scale
    assert v_scale is step.layer._v_scale
    assert scale == 0.125


def test_subclass_of_the_metadata_is_a_t5_step_too(step):
    """vLLM's KV-sharing wrapper."""
    impl = make_impl()
    step.write(impl)
    metadata = step.t5()
    expected = step.forward(impl, metadata)
    metadata.__class__ = type("Wrapped", (MjolnirMetadata,), {})
    assert torch.equal(step.forward(impl, metadata), expected)


def test_flat_query_and_output(step):
    impl = make_impl()
    step.write(impl)
    expected = step.forward(impl, step.t5())
    output = torch.zeros((2, HEADS * HEAD_SIZE), dtype=torch.bfloat16)
    step.forward(impl, step.t5(), query=step.query.flatten(1), output=output)
    assert torch.equal(output.view(expected.shape), expected)


def test_rows_of_a_padded_batch_are_not_touched(step):
    impl = make_impl()
    step.write(impl)
    output = torch.full((5, HEADS, HEAD_SIZE), 777.0, dtype=torch.bfloat16)
    padded = torch.cat([step.query, torch.full((3, HEADS, HEAD_SIZE), torch.nan, dtype=torch.bfloat16)])
    step.forward(impl, step.t5(), query=padded, output=output)
    assert bool((output[2:] == 777.0).all())
    assert torch.equal(output[:2], step.forward(impl, step.t5()))


def test_no_metadata_is_a_warm_up(step):
    assert bool((step.forward(make_impl(), None, cache=torch.empty(0)) == 0).all())


# What is refused.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 16}, "sliding window"),
        ({"logits_soft_cap": 30.0}, "logits soft-cap"),
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi"),
        ({"sinks": torch.zeros(HEADS)}, "attention sinks"),
    ],
)
def test_t5_step_on_a_layer_that_t5_can_not_run(step, changes, reason):
    impl = make_impl(**changes)
    step.write(impl)
    with pytest.raises(RuntimeError) as error:
        step.forward(impl, step.t5())
    assert str(error.value) == (f"a T5 step reached a layer with {reason}; set MJOLNIR_ATTN_DISABLE=1 and report this")
    assert bool(step.forward(impl, step.fallback()).isfinite().all())


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_quantised_output(step, name):
    impl = make_impl()
    step.write(impl)
    with pytest.raises(ValueError, match=r"^T5 writes no quantised output$"):
        step.forward(impl, step.t5(), **{name: torch.ones(())})
    with pytest.raises(ValueError, match=r"^TORCH_REF writes no quantised output$"):
        step.forward(impl, step.fallback(), **{name: torch.ones(())})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_query_of_another_dtype(step, dtype):
    impl = make_impl()
    with pytest.raises(ValueError, match=rf"^T5 takes a query of the model's dtype, not {dtype}$"):
        step.forward(impl, step.t5(), query=step.query.to(dtype))


def test_pages_of_another_size_than_planned(step):
    with pytest.raises(LayoutError) as error:
        step.forward(make_impl(), step.t5(page_size=32))
    assert str(error.value).startswith(
        "KV cache of shape (5, 2, 16, 128) fits no layout for 2 KV heads, pages of 32 tokens and rows of 64; "
    )


def test_forced_layout_that_contradicts_the_plan(step, monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_KV_LAYOUT", "BNH2D")
    with pytest.raises(LayoutError) as error:
        step.forward(make_impl(), step.t5())
    assert str(error.value) == (
        "KV cache of shape (5, 2, 16, 128) read as BNH2D has pages of 2 tokens, the plan has 16; "
        "set MJOLNIR_ATTN_KV_LAYOUT or MJOLNIR_ATTN_DISABLE=1"
    )


def test_forced_layout_is_used(step, monkeypatch):
    impl = make_impl()
    step.write(impl)
    expected = step.forward(impl, step.t5())
    monkeypatch.setenv("MJOLNIR_ATTN_KV_LAYOUT", "BNH2D")
    token_major = step.cache.transpose(1, 2).contiguous()
    assert torch.equal(step.forward(make_impl(), step.t5(), cache=token_major), expected)


# A fallback that wants Q in e4m3, as FlashAttention 3 and 4 do over an fp8 cache.


class EightBit(TorchReferenceBackend.get_impl_cls()):
    """Multiplies e4m3 by e4m3, and believes its flag as FlashAttention does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = True
        self.seen = []

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        assert attn_metadata is None or query.dtype == torch.float8_e4m3fn
        self.seen.append((query.dtype, self.supports_quant_query_input))
        query = query.to(torch.bfloat16) * layer._q_scale.to(torch.bfloat16)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)


class EightBitBackend(TorchReferenceBackend):
    @staticmethod
    def get_impl_cls():
        return EightBit


@pytest.fixture
def eight_bit(monkeypatch):
    """An impl over it; vLLM's quantisation, which a CPU build lacks, in its own words."""
    from vllm import _custom_ops

    def scaled_fp8_quant(rows, scale, group_shape=None):
        assert rows.dim() == 2
        if group_shape is None:
            return (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
        assert group_shape == (-1, HEADS // KV_HEADS * HEAD_SIZE)
        columns = scale.repeat_interleave(group_shape[1])
        return (rows.float() / columns).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)
    cls = backend_class(EightBitBackend).get_impl_cls()
    return lambda **changes: cls(
        **{"num_heads": HEADS, "head_size": HEAD_SIZE, "scale": 0.125}
        | {"num_kv_heads": KV_HEADS, "kv_cache_dtype": "fp8"}
        | changes
    )


def test_layer_leaves_the_query_alone(step, eight_bit):
    """Once it was quantised for T5's steps as well, which T5 refuses: no T5 step ever ran over FlashAttention 3."""
    impl = eight_bit()
    impl.do_kv_cache_update(step.layer, step.key, step.value, step.cache, step.slots)
    step.layer._q_scale = torch.tensor(0.25)
    assert impl.supports_quant_query_input is False
    expected = step.oracle()
    t5 = step.forward(impl, step.t5())
    assert float((t5.double() - expected).abs().max()) < 0.2
    assert impl.seen == []


def test_fallback_gets_it_in_e4m3_and_believes_its_layer_did_that(step, eight_bit):
    impl = eight_bit()
    impl.do_kv_cache_update(step.layer, step.key, step.value, step.cache, step.slots)
    step.layer._q_scale = torch.tensor(0.25)
    expected = step.oracle()
    out = step.forward(impl, step.fallback())
    assert impl.seen == [(torch.float8_e4m3fn, True)]
    assert impl.supports_quant_query_input is False  # still, for whoever looks meanwhile
    assert 1e-3 < float((out.double() - expected).norm() / expected.norm()) < 0.06


def test_one_scale_a_kv_head(step, eight_bit):
    impl = eight_bit()
    impl.do_kv_cache_update(step.layer, step.key, step.value, step.cache, step.slots)
    codes = fp8_query.quantise(step.query, torch.tensor([0.5, 2.0]), KV_HEADS).float()
    assert codes.shape == step.query.shape
    group = HEADS // KV_HEADS
    torch.testing.assert_close(codes[:, :group] * 0.5, step.query[:, :group].float(), rtol=0.07, atol=0.01)
    torch.testing.assert_close(codes[:, group:] * 2.0, step.query[:, group:].float(), rtol=0.07, atol=0.01)


def test_warm_up_without_metadata_quantises_nothing(step, eight_bit):
    impl = eight_bit()
    step.layer._q_scale = torch.tensor(0.25)
    assert bool((step.forward(impl, None, cache=torch.empty(0)) == 0).all())
    assert impl.seen == [(torch.bfloat16, False)]


def test_twin_has_no_state_of_its_own(eight_bit):
    impl = eight_bit()
    twin = impl._of_quantised_query
    impl.scale = 0.5
    assert twin.scale == 0.5
    twin.later = 7
    assert impl.later == 7
    assert (twin.supports_quant_query_input, impl.supports_quant_query_input) == (True, False)
    assert type(twin).forward is EightBit.forward


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "auto"}, {"logits_soft_cap": 30.0}])
def test_where_t5_does_not_run_the_layer_quantises_as_ever(eight_bit, changes):
    impl = eight_bit(**changes)
    assert impl.supports_quant_query_input is True
    assert impl._of_quantised_query is None


def test_disabled_leaves_it_to_the_layer(eight_bit, monkeypatch):
    monkeypatch.setenv("MJOLNIR_ATTN_DISABLE", "1")
    assert eight_bit().supports_quant_query_input is True


# Views of the cache.


def test_views_are_made_once_until_another_cache_is_bound(step, monkeypatch):
    """vLLM binds a small cache first, to measure memory, and the real one afterwards."""
    impl = make_impl()
    step.write(impl)
    expected = step.forward(impl, step.t5())
    split = []

    def counting(cache, layout, row):
        split.append(tuple(cache.shape))
        return split_kv(cache, layout, row)

    split_kv = impl_module.split_kv
    monkeypatch.setattr(impl_module, "split_kv", counting)
    for _ in range(3):
        step.forward(impl, step.t5())
    assert split == []
    larger = torch.cat([step.cache, step.cache])
    assert torch.equal(step.forward(impl, step.t5(), cache=larger), expected)
    assert split == [(10, KV_HEADS, PAGE_SIZE, 2 * HEAD_SIZE)]
    same_memory = larger[:5]
    assert torch.equal(step.forward(impl, step.t5(), cache=same_memory), expected)
    assert len(split) == 2
    elsewhere = larger[5:]
    assert torch.equal(step.forward(impl, step.t5(), cache=elsewhere), expected)
    assert len(split) == 3


def test_views_see_what_is_written_later(step):
    impl = make_impl()
    step.write(impl)
    before = step.forward(impl, step.t5())
    step.value = step.value * 2
    step.write(impl)
    after = step.forward(impl, step.t5())
    torch.testing.assert_close(after.float(), 2 * before.float(), rtol=0.02, atol=0.02)


# What vLLM's fusions are told.


@pytest.mark.parametrize(
    "name",
    [
        "fused_rope_kvcache_supported",
        "fused_qk_norm_rope_kvcache_supported",
        "fused_qk_norm_mrope_kvcache_supported",
    ],
)
def test_fusions_that_write_the_cache_are_refused(name):
    assert getattr(make_impl(), name)() is False


def test_other_abilities_that_a_fallback_may_have():
    impl = make_impl()
    assert impl.fused_output_quant_supported(object()) is False
    assert impl.can_return_lse_for_decode is False


def test_names_of_the_fusions_are_vllms():
    """An override of a name that vLLM does not ask for would refuse nothing."""
    from vllm.v1.attention.backend import AttentionImpl

    for name in vars(impl_module.ImplMixin):
        if name.startswith("fused_") or name == "can_return_lse_for_decode":
            assert hasattr(AttentionImpl, name), name
