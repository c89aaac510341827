"""Metadata of a T5 step: what vLLM's wrappers do to it."""

import dataclasses
from typing import Protocol, runtime_checkable

import pytest
import torch

from mjolnir.metadata import MjolnirMetadata, SplitMetadata


def metadata(**changes):
    values = {
        "plan": object(),
        "runner": object(),
        "num_actual_tokens": 4,
        "num_reqs": 2,
        "max_query_len": 2,
        "max_seq_len": 40,
        "query_start_loc": torch.tensor([0, 2, 4]),
        "seq_lens": torch.tensor([40, 7]),
        "block_table": torch.zeros((2, 3), dtype=torch.int32),
        "slot_mapping": torch.arange(4),
    }
    return MjolnirMetadata(**values | changes)


def test_fields_that_generic_code_reads():
    names = [field.name for field in dataclasses.fields(MjolnirMetadata)]
    assert names == [
        "plan",
        "runner",
        "num_actual_tokens",
        "num_reqs",
        "max_query_len",
        "max_seq_len",
        "query_start_loc",
        "seq_lens",
        "block_table",
        "slot_mapping",
        "causal",
        "num_decodes",
        "num_decode_tokens",
        "num_prefills",
        "num_prefill_tokens",
        "use_cascade",
    ]


def test_dispatch_flag_is_of_the_class():
    assert MjolnirMetadata.is_t5 is True
    assert "is_t5" not in {field.name for field in dataclasses.fields(MjolnirMetadata)}


def test_defaults():
    step = metadata()
    assert (step.causal, step.use_cascade, step.num_prefills, step.num_prefill_tokens) == (True, False, 0, 0)


def test_subclass_by_copied_fields_keeps_the_flag_and_the_tensors():
    """vLLM's KV-sharing fast prefill; a plain class made ``dataclasses.fields`` raise there."""

    @runtime_checkable
    class Extra(Protocol):
        logits_indices_padded: torch.Tensor | None = None

    original = metadata()

    class Wrapped(original.__class__, Extra):
        def __init__(self, step, indices):
            for field in dataclasses.fields(step.__class__):
                setattr(self, field.name, getattr(step, field.name))
            self.logits_indices_padded = indices

    wrapped = Wrapped(original, torch.tensor([1, 3]))
    assert isinstance(wrapped, MjolnirMetadata)
    assert wrapped.is_t5 is True
    assert wrapped.plan is original.plan
    assert wrapped.seq_lens is original.seq_lens
    assert wrapped.logits_indices_padded.tolist() == [1, 3]


def test_wrappers_may_set_attributes_of_their_own_and_replace_ours():
    step = metadata()
    step.make_virtual_batches_block_table = len
    step.slot_mapping = torch.tensor([9])
    assert step.make_virtual_batches_block_table is len
    assert step.slot_mapping.tolist() == [9]


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "block_table", "slot_mapping"])
def test_tensors_are_kept_not_copied(name):
    tensor = torch.zeros((2, 2), dtype=torch.int32)
    assert getattr(metadata(**{name: tensor}), name).data_ptr() == tensor.data_ptr()


def test_split_step_shows_the_whole_step_under_the_same_names():
    """vLLM's own code looks at any metadata without asking whose it is."""
    ours = {field.name for field in dataclasses.fields(MjolnirMetadata)}
    both = {field.name for field in dataclasses.fields(SplitMetadata)}
    assert both - ours == {"head", "tail", "tail_tokens"}
    assert ours - both == {"plan", "runner"}
    assert not isinstance(SplitMetadata.__new__(SplitMetadata), MjolnirMetadata)
