"""Splits of a fixed number of keys: a sequence has the same bits in any batch."""

import pytest
import torch
from caching import Cached



@pytest.mark.parametrize("rows", [1, [2, 0, 7, 1, 3, 1], [40, 1, 0, 3, 70, 1]], ids=str)
@pytest.mark.parametrize("layout", ["seqused", "padded", 16])
def test_results_are_those_of_their_own(device, layout, rows):
    cached = Cached(device, layout=layout, rows=rows)
    out, lse = cached.call(return_softmax_lse=True, causal=True, split_keys=128)
    cached.judge(out, lse, causal=True)


@pytest.mark.parametrize("margin", [0, 100])
@pytest.mark.parametrize("count", [1, 30])
def test_a_sequence_has_the_same_bits_in_any_batch(count, margin, device):
    """The first sequences have the same bits beside any other sequences, and on any number of SMs."""
    if device == "cpu" and margin:
        pytest.skip("the CPU has no SMs")
    keys = [2000, 129, 1]
    alone = Cached(device, keys=keys, layout=16)
    expected = alone.call(return_softmax_lse=True, causal=True, split_keys=256)
    # In the same cache, other sequences use the pages of the first ones.
    others = torch.arange(count, device=alone.q.device) % 2
    q = torch.cat([alone.q, alone.q[others]])
    table = torch.cat([alone.table, alone.table[others]])
    lengths = torch.cat([alone.lengths, torch.arange(1, count + 1, dtype=torch.int32, device=q.device)])
    given = dict(cache_seqlens=lengths, page_table=table, sm_margin=margin)
    out, lse = alone.call((q, alone.k, alone.v), return_softmax_lse=True, causal=True, split_keys=256, **given)
    assert torch.equal(out[:3], expected[0]) and torch.equal(lse[:3], expected[1])
