"""The calls that give a row of O and LSE the same bits: the table of docs/bits.md."""

import copy
from pathlib import Path

import pytest
import torch

from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

ROWS = [530, 130, 1]
# Columns of the table: on the CPU, and on a GPU with these values of split_keys.
COLUMNS = ["the CPU", "None", "128", '"fixed"']
MODES = {"the CPU": None, "None": None, "128": 128, '"fixed"': "fixed"}


class Prompt:
    """Sequences whose rows see the keys up to their own position. The first one is computed in many ways."""

    def __init__(self, device, dim=64, window=-1, sinks=False, dtype=torch.bfloat16, latent=None):
        torch.manual_seed(dim)
        # One row behind the last sequence.
        total, dim_v = sum(ROWS) + 1, latent or dim
        self.q, self.k, self.v, qv = (
            torch.randn(total, n, d).to(device, dtype) for n, d in ((4, dim), (2, dim), (2, dim_v), (4, dim_v))
        )
        self.qv = qv if latent else None
        self.masks = dict(causal=True, window_size=(window, 0))
        self.masks |= dict(s_aux=torch.randn(4).to(device)) if sinks else {}

    def list(self, *numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=self.q.device)

    def queries(self, of):
        """The rows of Q that `of` takes, and options with the same rows of qv, if it is given."""
        return of(self.q), {} if self.qv is None else dict(qv=of(self.qv))

    def packed(self, order=(0, 1, 2), **options):
        """The first sequence's O (rows, heads, dim) and LSE (heads, rows) in a packed batch."""
        starts = [sum(ROWS[:i]) for i in order]
        rows = torch.cat([torch.arange(start, start + ROWS[i]) for start, i in zip(starts, order)])
        q, latent = self.queries(lambda x: x[rows.to(x.device)])
        k, v = (x[rows.to(x.device)] for x in (self.k, self.v))
        ends = self.list(0, *(sum(ROWS[i] for i in order[: n + 1]) for n in range(len(order))))
        longest = max(ROWS[i] for i in order)
        out, lse = flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, return_attn_probs=True, **self.masks, **latent, **options
        )
        place = order.index(0)
        first = int(ends[place])
        return out[first : first + ROWS[0]], lse[:, first : first + ROWS[0]]

    def dense(self, **options):
        q, latent = self.queries(lambda x: x[None, : ROWS[0]])
        k, v = (x[None, : ROWS[0]] for x in (self.k, self.v))
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **self.masks, **latent, **options)
        return out[0], lse[0]

    def halves(self, **options):
        """Each half of the heads in a call of its own, as tensor parallelism over two GPUs computes them."""
        results = []
        for half in range(2):
            of = copy.copy(self)
            of.k, of.v = (x[:, half : half + 1] for x in (self.k, self.v))
            of.q, of.qv = (None if x is None else x[:, 2 * half : 2 * half + 2] for x in (self.q, self.qv))
            sinks = self.masks.get("s_aux")
            of.masks = self.masks | ({} if sinks is None else dict(s_aux=sinks[2 * half : 2 * half + 2]))
            results.append(of.packed(**options))
        return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results])

    def cached(self, sizes, page_rows=None, padding=0, **options):
        """The first sequence's rows in calls of as many new rows as `sizes` says in turn, beside another sequence."""
        capacity = padding + ROWS[0] + 30
        keys, values = (torch.zeros(2, capacity, 2, x.shape[-1]).to(x) for x in (self.k, self.v))
        for cache, x in ((keys, self.k), (values, self.v)):
            cache[0, padding : padding + ROWS[0]] = x[: ROWS[0]]
            cache[1, padding : padding + ROWS[1]] = x[ROWS[0] : ROWS[0] + ROWS[1]]
        if padding:
            options["cache_leftpad"] = self.list(padding, padding)
        if page_rows is not None:
            pages = -(-capacity // page_rows)
            gap = pages * page_rows - capacity
            keys, values = (
                torch.nn.functional.pad(x, (0, 0, 0, 0, 0, gap)).reshape(2 * pages, page_rows, *x.shape[2:]).flip(0)
                for x in (keys, values)
            )
            options["page_table"] = torch.arange(2 * pages).flip(0).reshape(2, pages).to(self.list())
        results, end, turn = [], 0, 0
        while end < ROWS[0]:
            first, end = end, min(end + sizes[turn % len(sizes)], ROWS[0])
            turn += 1
            q, latent = self.queries(lambda x: torch.stack([x[first:end], x[: end - first]]))
            lengths = self.list(padding + end, padding + min(ROWS[1], 2 * end))
            out, lse, *_ = flash_attn_with_kvcache(
                q, keys, values, cache_seqlens=lengths, return_softmax_lse=True, **self.masks, **latent, **options
            )
            results.append((out[0], lse[0]))
        return torch.cat([x[0] for x in results]), torch.cat([x[1] for x in results], -1)

    def replayed(self, **options):
        if self.q.is_cpu:
            return self.packed(**options)
        q, latent = self.queries(lambda x: x[: ROWS[0]])
        k, v = (x[: ROWS[0]] for x in (self.k, self.v))
        ends = self.list(0, 1)
        def compute():
            return flash_attn_varlen_func(
                q, k, v, ends, ends, ROWS[0], ROWS[0], return_attn_probs=True, **self.masks, **latent, **options
            )
        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = compute()
        ends.copy_(self.list(0, ROWS[0]))
        graph.replay()
        return results


# Rows of the table: a call, whether it gives the bits of the packed batch without split_keys, too, and its results.
CELLS = {
    "the call again": (True, lambda of, **o: of.packed(**o)),
    "other sequences, another order": (False, lambda of, **o: of.packed((2, 0), **o)),
    "the sequence alone": (False, lambda of, **o: of.packed((0,), **o)),
    "`flash_attn_func`": (False, lambda of, **o: of.dense(**o)),
    "a prompt in chunks": (False, lambda of, **o: of.cached([200, 33], **o)),
    "decoding, 1 to 8 new rows": (False, lambda of, **o: of.cached([1, 2, 5, 8], **o)),
    "pages of 16 rows": (False, lambda of, **o: of.cached([97, 1], page_rows=16, **o)),
    "pages of 12 rows, behind left padding": (False, lambda of, **o: of.cached([97, 1], 12, 7, **o)),
    "half of the heads, as on two GPUs": (False, lambda of, **o: of.halves(**o)),
    "fewer SMs": (False, lambda of, **o: of.packed(sm_margin=100, **o)),
    "a replayed graph": (False, lambda of, **o: of.replayed(**o)),
}


def holds(cell, column):
    """Whether the table promises the bits of the packed batch."""
    return column != "None" or CELLS[cell][0]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("column", COLUMNS)
def test_a_row_has_the_bits_that_it_has_in_a_packed_batch(cell, column, device):
    if (column == "the CPU") != (device == "cpu"):
        pytest.skip("a column of the other device")
    if not holds(cell, column):
        pytest.skip("there is no promise")
    split_keys = MODES[column]
    half = Prompt(device, window=150, dtype=torch.float16)
    latent = Prompt(device, latent=512)
    for prompt in (Prompt(device), Prompt(device, 128, window=100, sinks=True), half, latent):
        expected = prompt.packed(split_keys=split_keys)
        for given, wanted in zip(CELLS[cell][1](prompt, split_keys=split_keys), expected, strict=True):
            assert torch.equal(given, wanted)


def test_the_table_of_the_documentation():
    titles = ["the same row in", *(x if x == "the CPU" else f"`{x}`" for x in COLUMNS)]
    rows = [[cell, *("same" if holds(cell, x) else "" for x in COLUMNS)] for cell in CELLS]
    expected = ["| " + " | ".join(row) + " |" for row in (titles, *rows)]
    text = (Path(__file__).parents[3] / "docs" / "bits.md").read_text().splitlines()
    first = text.index(expected[0])
    assert [text[first], *text[first + 2 : first + 1 + len(expected)]] == expected


@pytest.mark.parametrize("split_keys", [128, "fixed"])
def test_pieces_have_gradients(split_keys, device):
    """The backward pass takes O and LSE of any forward pass."""
    prompt = Prompt(device, sinks=True)
    gradients = []
    for options in ({}, dict(split_keys=split_keys)):
        tensors = [x.clone().requires_grad_() for x in (prompt.q, prompt.k, prompt.v)]
        ends = prompt.list(0, *(sum(ROWS[: n + 1]) for n in range(3)))
        out = flash_attn_varlen_func(*tensors, ends, ends, ROWS[0], ROWS[0], **prompt.masks, **options)
        gradients.append(torch.autograd.grad(out.square().sum(), tensors))
    for given, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(given, wanted, rtol=2e-2, atol=2e-2)
