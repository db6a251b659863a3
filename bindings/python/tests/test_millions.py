"""Sequences of more than 4 million keys. They take little memory: a page table names the same pages again and again.
Needs torch.
"""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import ends, normal

from fa3 import flash_attn_varlen_func, flash_attn_with_kvcache

I32, F64 = torch.int32, torch.float64
KEYS, PAGE_ROWS = 4_800_005, 16
PAGES = KEYS // PAGE_ROWS + 1
ALL = range(KEYS)
# Options, and the keys that the last row sees.
CASES = {
    "all": (dict(), ALL),
    "fixed pieces": (dict(split_keys="fixed"), ALL),
    "one CTA": (dict(num_splits=1), ALL),
    "window": (dict(window_size=(100, 0)), ALL[-101:]),
    "chunk": (dict(attention_chunk=1 << 22), ALL[1 << 22 :]),
    "interval": (dict(intervals=[[[[4_500_003, 4_500_040, -9, 2]]]]), [*range(2), *range(4_500_003, 4_500_040)]),
    "padding": (dict(cache_leftpad=[KEYS - 40]), ALL[-40:]),
}


def judge(results, q, k, v, rows):
    """Compares with attention over `rows` (keys,) of k and v, of which many are equal."""
    out, lse, largest = results
    times = torch.bincount(rows, minlength=len(k)).to(F64)
    scores = q.to(F64) @ k.to(F64).T / math.sqrt(q.shape[-1])
    seen = scores[:, times > 0]
    weighted = scores + times.log()
    torch.testing.assert_close(out.to(F64), weighted.softmax(-1) @ v.to(F64), rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse.to(F64), weighted.logsumexp(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(largest.to(F64), seen.amax(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("appends", [False, True])
def test_pages(device, case, appends):
    """The last page is no other page, so that a new row changes one key."""
    options, seen = case
    if device == "cpu" and options.keys() & {"split_keys", "num_splits"}:
        pytest.skip("the CPU always splits keys in the same way")
    options = {name: torch.tensor(x, dtype=I32, device=device) if isinstance(x, list) else x for name, x in options.items()}
    q, k, v = (normal(n, PAGE_ROWS, 1, 64, seed=i, device=device) for i, n in enumerate((1, 4, 4)))
    q = q[:, :2].transpose(1, 2)
    table = torch.arange(PAGES, dtype=I32, device=device).remainder(3)[None]
    table[0, -1] = 3
    new = [normal(1, 1, 1, 64, seed=7 + i, device=device) for i in range(2)] if appends else []
    given = dict(page_table=table, cache_seqlens=KEYS - appends, causal=True, **options)
    found = flash_attn_with_kvcache(q, k, v, *new, return_softmax_lse=True, return_max_logits=True, **given)
    for cache, x in zip((k, v), new):
        assert torch.equal(cache[3, KEYS % PAGE_ROWS - 1], x[0, 0])
    seen = torch.tensor(seen, device=device)
    rows = table[0, seen // PAGE_ROWS].long() * PAGE_ROWS + seen % PAGE_ROWS
    judge((found[0][0, 0], found[1][0, :, 0], found[4]), q[0, 0], k.flatten(0, 2), v.flatten(0, 2), rows)


def test_packed_rows(device):
    rows = torch.arange(KEYS, device=device) % 48
    q, k, v = (normal(n, h, 8, seed=n + h, device=device) for n, h in ((2, 2), (48, 1), (48, 1)))
    keys, values = k[rows], v[rows]
    lists = ends([1, 1], device), ends([3, KEYS - 3], device)
    options = dict(causal=True, return_attn_probs=True, return_max_logits=True)
    out, lse, _ = flash_attn_varlen_func(q, keys, values, *lists, 1, KEYS, **options)
    scores = q.to(F64) @ k[:, 0].to(F64).T / math.sqrt(8)
    for i, of in enumerate((rows[:3], rows[3:])):
        largest = scores[i][:, of.unique()].amax(-1)
        judge((out[i], lse[:, i], largest), q[i], k[:, 0], v[:, 0], of)
