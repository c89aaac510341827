"""Split steps through real builder, real CPU runner and real fallback: leading decodes on T5, the rest as ever."""

from types import SimpleNamespace

import pytest
import torch

from mjolnir import fp8_query, packed, steps
from mjolnir.backend import backend_class
from mjolnir.builder import BuilderMixin
from mjolnir.metadata import MjolnirMetadata, SplitMetadata
from mjolnir.packed import ExpandedMetadata
from mjolnir.reference.attention import paged_attention
from mjolnir.reference.backend import TorchReferenceBackend, TorchReferenceMetadata
from tests.unit.builder_fakes import Layer, cam, counted, draft_layer, make, make_config, make_spec
from tests.unit.test_packed import Engine as PackedEngine
from tests.unit.test_packed import fresh_scratch, scale_file  # noqa: F401  (fixtures)

pytestmark = pytest.mark.usefixtures("stats_dir", "banner_was_shown")
torch.set_num_threads(1)

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 64, 16
PAGES = 64
SETTING = "MJOLNIR_ATTN_SPLIT_MIXED"
UNTOUCHED = 777.0


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv(SETTING, "1")


class Engine:
    """One layer and its builder over a cache whose pages are spread at random."""

    def __init__(self, base=TorchReferenceBackend, seed=0) -> None:
        backend = backend_class(base)
        self.generator = torch.Generator().manual_seed(seed)
        self.scales = SimpleNamespace(
            _k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0), _q_scale=torch.tensor(0.25)
        )
        self.impl = backend.get_impl_cls()(HEADS, SIZE, 0.125, KV_HEADS, None, None, "fp8")
        layer = Layer()
        layer.impl = self.impl
        config = make_config({"layers.0": layer}, speculative=3)
        self.builder = backend.get_builder_cls()(make_spec(), ["layers.0"], config, torch.device("cpu"))

    def random(self, *shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16)

    def step(self, query_lens, lengths, padding=0) -> "Step":
        return Step(self, query_lens, lengths, padding)


class Step:
    """A step of requests of ``lengths`` tokens, the last ``query_lens`` of which are new; all of them are written.

    What no sequence holds is NaN, so reading it shows. ``padding`` query tokens follow, as in a padded batch.
    """

    def __init__(self, engine, query_lens, lengths, padding) -> None:
        self.engine, self.query_lens, self.lengths = engine, query_lens, lengths
        self.tokens = sum(query_lens)
        pages = torch.randperm(PAGES, generator=engine.generator).tolist()
        width = max(-(-length // PAGE) for length in lengths) + 1
        self.table = torch.full((len(lengths), width), PAGES - 1, dtype=torch.int32)
        used = [page for page in pages if page != PAGES - 1]
        slots, new = [], []
        for row, (query_len, length) in enumerate(zip(query_lens, lengths, strict=True)):
            for column in range(-(-length // PAGE)):
                self.table[row, column] = used.pop()
            mine = [int(self.table[row, token // PAGE]) * PAGE + token % PAGE for token in range(length)]
            slots += mine[: length - query_len]
            new += mine[length - query_len :]
        self.cache = torch.full((PAGES, KV_HEADS, PAGE, 2 * SIZE), 0x7F, dtype=torch.uint8)
        self.slots = torch.tensor(new)
        rows = engine.random(2, len(slots), KV_HEADS, SIZE)
        engine.impl.do_kv_cache_update(engine.scales, *rows, self.cache, torch.tensor(slots, dtype=torch.int64))
        self.key, self.value = engine.random(2, self.tokens, KV_HEADS, SIZE)
        engine.impl.do_kv_cache_update(engine.scales, self.key, self.value, self.cache, self.slots)
        self.query = torch.cat([engine.random(self.tokens, HEADS, SIZE), torch.full((padding, HEADS, SIZE), torch.nan)])
        self.query = self.query.to(torch.bfloat16)

    def cam(self, **changes):
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        flags = [length > 4 for length in self.query_lens]
        known = {"seq_lens": lengths, "seq_lens_cpu_upper_bound": lengths, "max_seq_len": max(self.lengths)}
        known |= {"block_table_tensor": self.table, "slot_mapping": self.slots, "prefilling": flags}
        return cam(self.query_lens, **known | changes)

    def forward(self, metadata) -> torch.Tensor:
        output = torch.full_like(self.query, UNTOUCHED)
        before = self.cache.clone()
        engine = self.engine
        result = engine.impl.forward(engine.scales, self.query, self.key, self.value, self.cache, metadata, output)
        assert result is output
        assert torch.equal(self.cache, before), "a forward wrote to the cache"
        assert bool((output[self.tokens :] == UNTOUCHED).all()), "padding was touched"
        return output[: self.tokens]

    def oracle(self) -> torch.Tensor:
        halves = self.cache.transpose(1, 2).split(SIZE, dim=-1)
        rest = {"softmax_scale": 0.125, "k_scale": torch.tensor(0.5), "v_scale": torch.tensor(2.0)}
        lengths = torch.tensor(self.lengths)
        return paged_attention(self.query[: self.tokens], *halves, self.table, lengths, self.query_lens, **rest)[0]


def worst(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


# Query lengths, lengths, query length and number of the decodes that T5 runs.
SPLIT = {
    "a prompt beside decodes": ([1, 1, 1, 1, 30], [20, 7, 33, 1, 30], 1, 4),
    "prompts and chunks of prompts": ([1] * 5 + [17, 9], [20, 7, 33, 16, 48, 80, 9], 1, 5),
    "a chunk in the middle of a long prompt": ([1] * 4 + [33], [100, 7, 33, 16, 150], 1, 4),
    "verification beside a prompt": ([4, 4, 4, 4, 21], [20, 7, 33, 4, 21], 4, 4),
    "verification, and requests without drafts": ([4, 4, 4, 4, 1, 1], [20, 7, 33, 48, 12, 5], 4, 4),
    "verification, fewer drafts, a prompt": ([3, 3, 3, 3, 2, 18], [20, 7, 33, 48, 12, 40], 3, 4),
    "longer than T5 takes behind": ([2, 2, 2, 2, 5], [20, 7, 33, 48, 12], 2, 4),
    "padding requests at the end": ([1, 1, 1, 1, 12, 0, 0], [20, 7, 33, 5, 12, 0, 0], 1, 4),
    "padding requests in between": ([1, 1, 1, 1, 0, 12], [20, 7, 33, 5, 0, 12], 1, 4),
    "decodes behind a prompt too": ([1, 1, 1, 1, 9, 1], [20, 7, 33, 5, 30, 64], 1, 4),
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("padding", [0, 5])
def test_split_step_is_both_parts_by_themselves(monkeypatch, name, padding):
    query_lens, lengths, q_len, decodes = SPLIT[name]
    engine = Engine()
    step = engine.step(query_lens, lengths, padding)
    metadata = engine.builder.build(0, step.cam(num_actual_tokens=step.tokens + padding))
    assert type(metadata) is SplitMetadata
    assert type(metadata.tail) is TorchReferenceMetadata
    begin = q_len * decodes
    assert counted() == {"t5:split": 1, "t5_tokens": begin, "fallback_tokens": step.tokens - begin}
    assert (metadata.head.num_reqs, metadata.head.plan.q_len, metadata.tail_tokens) == (
        decodes,
        q_len,
        step.tokens - begin,
    )
    out = step.forward(metadata)
    assert worst(out, step.oracle()) < 0.03
    # Beside the same batch, which the fallback has whole: its own rows are the same to the last bit.
    monkeypatch.setenv(SETTING, "0")
    other = Engine()
    whole = step.forward(other.builder.build(0, step.cam()))
    assert torch.equal(out[begin:], whole[begin:])
    assert worst(out[:begin], whole[:begin]) < 0.03
    # Beside a batch of its decodes alone, which T5 has whole.
    alone = step.cam(
        num_reqs=decodes,
        num_actual_tokens=begin,
        max_query_len=q_len,
        query_start_loc_cpu=torch.arange(0, begin + 1, q_len, dtype=torch.int32),
    )
    t5 = step.forward(metadata.head)
    assert torch.equal(out[:begin], t5[:begin])
    decode = other.builder.build(0, alone)
    assert type(decode) is MjolnirMetadata
    assert torch.equal(out[:begin], step.forward(decode)[:begin])


@pytest.mark.parametrize(
    ("query_lens", "lengths", "counts"),
    [
        ([12, 1, 1, 1, 1], [12, 9, 9, 9, 9], {"fallback:mixed": 1, "fallback_tokens": 16}),
        ([1, 1, 1, 12], [9, 9, 9, 12], {"fallback:mixed": 1, "fallback_tokens": 15}),
        ([4, 3, 4, 4, 4], [9, 9, 9, 9, 9], {"fallback:non_uniform": 1, "fallback_tokens": 19}),
        ([0, 1, 1, 1, 1, 7], [0, 9, 9, 9, 9, 7], {"fallback:mixed": 1, "fallback_tokens": 11}),
        ([9, 7], [9, 7], {"fallback:prefill": 1, "fallback_tokens": 16}),
        ([6, 6, 6, 6, 9], [9, 9, 9, 9, 9], {"fallback:prefill": 1, "fallback_tokens": 33}),
        ([1, 1, 1, 1, 1], [9, 9, 9, 9, 9], {"t5:decode": 1, "t5_tokens": 5}),
    ],
    ids=["no decode leads", "too few", "short run", "padding first", "prompts", "long", "decodes"],
)
def test_other_steps_are_what_they_were(query_lens, lengths, counts):
    engine = Engine()
    step = engine.step(query_lens, lengths)
    metadata = engine.builder.build(0, step.cam())
    assert type(metadata) is (MjolnirMetadata if "t5_tokens" in counts else TorchReferenceMetadata)
    assert counted() == counts
    assert worst(step.forward(metadata), step.oracle()) < 0.03


@pytest.mark.parametrize(("query_lens", "kind"), [([4, 4, 4, 4, 4, 0], "t5:verify"), ([1, 1, 1, 1, 0, 0], "t5:decode")])
def test_decodes_and_padding_are_t5s_altogether(query_lens, kind):
    assert type(make(speculative=3).build(0, cam(query_lens))) is MjolnirMetadata
    assert counted() == {kind: 1, "t5_tokens": sum(query_lens)}


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"rswa_prefix_lens": torch.ones(5)},
        {"mm_req_doc_ranges": {4: [(0, 7)]}},
        {"dcp_local_seq_lens": torch.ones(5)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_t5_would_refuse_anywhere_is_not_split(changes):
    metadata = make(speculative=3).build(0, cam([1, 1, 1, 1, 30], **changes))
    assert type(metadata) is TorchReferenceMetadata
    assert "t5:split" not in counted()


def test_a_shared_prefix_is_not_split():
    assert type(make().build(16, cam([1, 1, 1, 1, 30]))) is TorchReferenceMetadata


def test_off_by_default_and_where_t5_is_off(monkeypatch):
    step = cam([1, 1, 1, 1, 30])
    monkeypatch.delenv(SETTING)
    assert type(make().build(0, step)) is TorchReferenceMetadata
    monkeypatch.setenv(SETTING, "1")
    assert type(make().build(0, step)) is SplitMetadata
    assert type(make({"layers.0": Layer(sliding_window=(16, 0))}).build(0, step)) is TorchReferenceMetadata
    assert type(make({"layers.0": draft_layer()}).build(0, step)) is TorchReferenceMetadata
    monkeypatch.setenv("MJOLNIR_ATTN_DISABLE", "1")
    assert type(make().build(0, step)) is TorchReferenceMetadata
    assert counted() == {
        "t5:split": 1,
        "t5_tokens": 4,
        "fallback:non_uniform": 2,
        "fallback:ineligible": 1,
        "fallback:disabled": 1,
        "fallback_tokens": 30 + 4 * 34,
    }


# What each part is given.


class Recording(TorchReferenceBackend):
    """A fallback that wants Q in e4m3 and tells what it was given."""

    @staticmethod
    def get_impl_cls():
        class Impl(TorchReferenceBackend.get_impl_cls()):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.supports_quant_query_input = True
                self.seen = []

            def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
                self.seen.append((query.dtype, query.shape[0], key, value))
                query = (query.float() * layer._q_scale).to(torch.bfloat16)
                return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

        return Impl


def test_fallback_gets_its_own_rows_and_q_in_e4m3(monkeypatch):
    engine = Engine(Recording)
    monkeypatch.setattr(fp8_query, "quantise", lambda q, scale, _: (q.float() / scale).to(torch.float8_e4m3fn))
    step = engine.step([1, 1, 1, 1, 1, 12, 7], [20, 7, 33, 16, 48, 40, 7], padding=3)
    out = step.forward(engine.builder.build(0, step.cam()))
    ((dtype, rows, key, value),) = engine.impl.seen
    assert (dtype, rows) == (torch.float8_e4m3fn, 19)
    assert torch.equal(key, step.key[5:])
    assert torch.equal(value, step.value[5:])
    expected = step.oracle()
    assert worst(out[:5], expected[:5]) < 0.03
    error = (out[5:].double() - expected[5:]).norm() / expected[5:].norm()
    assert 1e-3 < float(error) < 0.06


def test_common_metadata_of_the_parts_is_made_anew(monkeypatch):
    """The longest sequence, query and context, is in one of them only."""
    seen = []
    base = TorchReferenceBackend.get_builder_cls()

    class Base(base):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            seen.append((common_attn_metadata, fast_build))
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    target = make(speculative=3, cls=type("Composed", (BuilderMixin, Base), {"fallback_name": "BASE"}))
    lengths = torch.tensor([50, 7, 33, 16, 30, 12, 0], dtype=torch.int32)
    step = cam(
        [2, 2, 2, 2, 30, 5, 0],
        prefilling=[False] * 4 + [True, True, False],
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        positions=torch.arange(43) + 100,
        num_actual_tokens=48,
        slot_mapping=torch.arange(48) * 3,
        _num_computed_tokens_cache=torch.ones(7),
    )
    metadata = target.build(0, step, fast_build=True)
    ((tail, fast_build),) = seen
    assert fast_build is True
    assert (tail.num_reqs, tail.num_actual_tokens, tail.max_query_len, tail.max_seq_len) == (3, 35, 30, 30)
    assert tail.query_start_loc.tolist() == tail.query_start_loc_cpu.tolist() == [0, 30, 35, 35]
    assert tail.seq_lens.tolist() == [30, 12, 0]
    assert tail.slot_mapping.tolist() == [3 * token for token in range(8, 43)]
    assert tail.positions.tolist() == list(range(108, 143))
    assert tail.is_prefilling.tolist() == [True, True, False]
    assert torch.equal(tail.block_table_tensor, step.block_table_tensor[4:])
    assert tail.compute_num_computed_tokens().tolist() == [0, 7, 0]
    # A view would begin at 16 bytes of a buffer here, elsewhere at any multiple of 4, which Triton compiles for anew.
    assert tail.seq_lens.untyped_storage().data_ptr() != lengths.untyped_storage().data_ptr()
    assert tail.seq_lens.data_ptr() == tail.seq_lens.untyped_storage().data_ptr()
    assert tail.block_table_tensor.storage_offset() == tail.query_start_loc.storage_offset() == 0
    head = metadata.head
    assert (head.num_reqs, head.num_actual_tokens, head.max_query_len, head.max_seq_len) == (4, 8, 2, 50)
    assert head.query_start_loc.tolist() == [0, 2, 4, 6, 8]
    assert head.seq_lens.data_ptr() == lengths.data_ptr()
    # The whole step is what others see.
    assert (metadata.num_reqs, metadata.num_actual_tokens, metadata.max_query_len) == (7, 48, 30)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills, metadata.num_prefill_tokens) == (
        4,
        8,
        3,
        35,
    )
    assert metadata.query_start_loc is step.query_start_loc
    assert metadata.slot_mapping is step.slot_mapping
    assert metadata.block_table is step.block_table_tensor


def test_buffers_longer_than_the_step_are_not_read():
    step = cam([1, 1, 1, 1, 30])
    step.query_start_loc_cpu = torch.cat([step.query_start_loc_cpu, torch.tensor([777, 777])])
    step.seq_lens = torch.cat([step.seq_lens, torch.tensor([999])])
    step.block_table_tensor = torch.cat([step.block_table_tensor, step.block_table_tensor])
    metadata = make().build(0, step)
    assert metadata.tail.lengths == [50]
    assert metadata.tail.block_table.shape == (1, 4)
    assert metadata.head.plan.num_seqs == 4


def test_packed_pages_are_expanded_for_the_fallbacks_requests_alone(monkeypatch, scale_file):  # noqa: F811
    monkeypatch.setattr(steps, "MIN_SPLIT_DECODES", 2)
    engine = PackedEngine()
    query_lens = (1, 1, 17)
    metadata = engine.metadata(query_lens)
    assert type(metadata) is SplitMetadata
    assert type(metadata.tail) is ExpandedMetadata
    (run,) = metadata.tail.runs
    assert run.pages.sources.tolist() == [1, 3, 6]  # not page 4, which is the second decode's
    expanded = []
    write, expand = packed.store_for(torch.device("cpu"))

    def expanding(views, sources, *rest):
        expanded.append(sources.tolist())
        expand(views, sources, *rest)

    monkeypatch.setattr(packed, "store_for", lambda _: (write, expanding))
    out = engine.forward(metadata, 19)
    assert expanded == [[1, 3, 6]]
    assert worst(out, engine.oracle(query_lens)) < 0.03
    monkeypatch.setenv(SETTING, "0")
    whole = PackedEngine()
    assert worst(out, whole.forward(whole.metadata(query_lens), 19)) < 0.03
    assert torch.equal(out[:2], engine.forward(engine.metadata((1, 1, 1)), 3)[:2])


# Graphs, drafts, and vLLM's order of a batch.


def test_captures_are_never_split():
    target = make(speculative=3)
    for query_lens in ([1, 1, 1, 1, 30], [4, 4, 4, 4, 1]):
        assert type(target.build_for_cudagraph_capture(cam(query_lens))) is TorchReferenceMetadata
    assert type(target.build_for_cudagraph_capture(cam([4] * 4))) is MjolnirMetadata
    assert counted() == {}


def test_fallback_that_captures_by_its_build_is_not_split():
    class Base(TorchReferenceBackend.get_builder_cls()):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            return self.build(0, common_attn_metadata)

    cls = type("Composed", (BuilderMixin, Base), {"fallback_name": "BASE"})
    assert type(make(cls=cls).build_for_cudagraph_capture(cam([1, 1, 1, 1, 30]))) is TorchReferenceMetadata


def test_split_step_can_not_be_captured(monkeypatch):
    engine = Engine()
    step = engine.step([1, 1, 1, 1, 9], [9, 9, 9, 9, 9])
    metadata = engine.builder.build(0, step.cam())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    query = SimpleNamespace(is_cuda=True)
    with pytest.raises(RuntimeError, match=r"^a split step is being captured; set MJOLNIR_ATTN_SPLIT_MIXED=0 and"):
        engine.impl.forward(engine.scales, query, None, None, step.cache, metadata, step.query)


def test_split_step_is_no_captured_draft():
    target = make()
    metadata = target.build(0, cam([1, 1, 1, 1, 30]))
    with pytest.raises(RuntimeError, match=r"^a split step reached a captured draft; set MJOLNIR_ATTN_SPLIT_MIXED=0"):
        target.update_draft_decode_metadata(metadata)


def test_each_group_builds_its_own():
    """vLLM would put another group's block table into metadata of the first; T5's plan has its own already."""
    first, second = make(), make()
    assert first.supports_update_block_table is False
    table = torch.arange(100, 120, dtype=torch.int32).view(5, 4)
    one = first.build(0, cam([1, 1, 1, 1, 30]))
    other = second.build(0, cam([1, 1, 1, 1, 30], block_table_tensor=table))
    assert one.head.plan is not other.head.plan
    assert (one.tail.block_table.tolist(), other.tail.block_table.tolist()) == ([[16, 17, 18, 19]], [table[4].tolist()])
    assert other.head.block_table.tolist() == table[:4].tolist()


def test_vllm_is_asked_to_put_decodes_first(monkeypatch):
    """Model Runner V1 does so only where a builder wants it."""
    assert make(speculative=3).reorder_batch_threshold == 4
    assert make().reorder_batch_threshold == 1
    assert make({"layers.0": draft_layer()}).reorder_batch_threshold is None
    assert make({"layers.0": Layer(logits_soft_cap=30.0)}).reorder_batch_threshold is None
    base = type("Base", (TorchReferenceBackend.get_builder_cls(),), {"reorder_batch_threshold": 1})
    own = type("Composed", (BuilderMixin, base), {"fallback_name": "BASE"})
    assert make(speculative=3, cls=own).reorder_batch_threshold == 1
    monkeypatch.setenv(SETTING, "0")
    assert make(speculative=3).reorder_batch_threshold is None
