"""KV caches for tests, and the results that each sequence must have by the definition of attention."""

import math

import torch
from packing import ends, normal
from reference import judge, scores_in

from fa3 import flash_attn_with_kvcache

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
# The number of keys of each sequence: none, one, whole blocks, and a part of a block.
KEYS = [200, 0, 1, 64, 129, 37]
# Page numbers that the cache does not have.
NOWHERE = [-1, 10**6, 2**31 - 1, -(2**31)]


class Cached:
    """Q and a cache for sequences with `keys` keys. Rows of the cache that belong to no sequence are NaN. `layout` is
    "seqused", "padded", "indexed" or "indexed padded"; or the number of rows of a page, after which "padded" and
    "indexed" may stand. `rows` lists the rows of Q of each sequence; it is one number if q is dense.
    """

    def __init__(self, device, dtype=BF16, keys=KEYS, layout="seqused", rows=1, heads=(4, 2), head_dims=(64, 64)):
        count = len(keys)
        self.keys, words = keys, str(layout).split()
        self.page_rows = int(words[0]) if words[0].isdigit() else None
        self.is_indexed = "indexed" in words
        self.rows = [rows] * count if isinstance(rows, int) else rows
        if isinstance(rows, int):
            self.q = normal(count, rows, heads[0], head_dims[0], dtype=dtype, device=device)
            self.ends = None
        else:
            self.q = normal(sum(rows) + 3, heads[0], head_dims[0], dtype=dtype, device=device)
            self.ends = ends(rows, device)
        longest = max(keys, default=0)
        shapes = [(count, longest, heads[1], head_dim) for head_dim in head_dims]
        self.own = [normal(*shape, dtype=dtype, seed=1 + i, device=device) for i, shape in enumerate(shapes)]
        generator = torch.Generator().manual_seed(5)
        self.pad = torch.randint(70, (count,), generator=generator).tolist() if "padded" in words else [0] * count
        longest += max(self.pad, default=0)
        if self.page_rows:
            page_rows, pages = self.page_rows, -(-longest // self.page_rows) + 2
            # A page that has only padding has no memory.
            used = [(pad // page_rows, -(-(n + pad) // page_rows)) for n, pad in zip(keys, self.pad)]
        else:
            page_rows, pages = longest + 3, 1
            used = [(0, 1)] * count
        entries = sum(end - first for first, end in used) + (2 if self.is_paged else 0)
        order = torch.randperm(entries, generator=generator).tolist() if self.is_paged else list(range(entries))
        self.table = torch.tensor(NOWHERE, dtype=I32).repeat(pages)[:pages].repeat(count, 1)
        for i, (first, end) in enumerate(used):
            self.table[i, first:end] = torch.tensor(order[: end - first], dtype=I32)
            order = order[end - first :]
        # With an index, the table also has rows that belong to no sequence.
        self.index = torch.randperm(count + 2, generator=generator)[:count]
        self.k, self.v = (self.in_memory(x, entries, page_rows) for x in self.own)
        self.lengths = torch.tensor([n + pad for n, pad in zip(keys, self.pad)], dtype=I32, device=device)
        self.table = self.table.to(device)

    @property
    def is_paged(self):
        return self.page_rows is not None or self.is_indexed

    def in_memory(self, own, entries, page_rows):
        """K or V in the layout of the cache."""
        memory = torch.full((entries, page_rows, *own.shape[2:]), math.nan, dtype=own.dtype, device=own.device)
        for i, (n, pad) in enumerate(zip(self.keys, self.pad)):
            at = torch.arange(pad, pad + n)
            memory[self.table[i, at // page_rows].long(), at % page_rows] = own[i, :n]
        return memory

    def arguments(self):
        """The arguments that say where the keys and the queries of each sequence are."""
        given = dict(cache_seqlens=self.lengths)
        if self.page_rows and self.is_indexed:
            given["page_table"] = torch.full_like(self.table[:1], -7).repeat(len(self.keys) + 2, 1)
            given["page_table"][self.index] = self.table
            given["cache_batch_idx"] = self.index.to(self.q.device, I32)
        elif self.page_rows:
            given["page_table"] = self.table
        elif self.is_paged:
            given["cache_batch_idx"] = self.table[:, 0].contiguous()
        if any(self.pad):
            given["cache_leftpad"] = torch.tensor(self.pad, dtype=I32, device=self.q.device)
        if self.ends is not None:
            given |= dict(cu_seqlens_q=self.ends, max_seqlen_q=max(self.rows))
        return given

    def call(self, tensors=None, **options):
        """O, or (O, LSE) with return_softmax_lse."""
        results = flash_attn_with_kvcache(*(tensors or (self.q, self.k, self.v)), **(self.arguments() | options))
        if not options.get("return_softmax_lse"):
            return results
        assert results[2:] == (None, None)
        return results[:2]

    def sequences(self):
        """Q, K and V of each sequence, and where its rows are in O and in LSE."""
        for i, n in enumerate(self.keys):
            if self.ends is None:
                of_o, of_lse = (slice(i, i + 1),), (slice(i, i + 1),)
            else:
                rows = slice(self.ends[i].item(), self.ends[i + 1].item())
                of_o, of_lse = (None, rows), (None, slice(None), rows)
            yield self.q[of_o], *(x[i : i + 1, :n] for x in self.own), of_o, of_lse

    def intervals(self, make):
        """The intervals that `make` gives for each sequence's rows and keys."""
        parts = [make(rows, n)[0].clamp(-(2**31), 2**31 - 1).to(I32) for rows, n in zip(self.rows, self.keys)]
        if self.ends is None:
            return torch.stack(parts).to(self.q.device)
        behind = torch.zeros(len(parts[0]), len(self.q) - sum(self.rows), parts[0].shape[2], dtype=I32)
        return torch.cat([*parts, behind], 1).to(self.q.device)

    def judge(self, out, lse, qv=None, **options):
        """Fails unless each sequence has its own results, and other rows have O = 0 and LSE = -inf."""
        *batch, rows, heads, _ = self.q.shape
        assert (out.shape, out.dtype) == ((*batch, rows, heads, self.v.shape[3]), self.q.dtype) and out.is_contiguous()
        assert (lse.shape, lse.dtype) == ((*batch, heads, rows), F32) and lse.is_contiguous()
        for q, k, v, of_o, of_lse in self.sequences():
            own = options | dict(intervals=options["intervals"][of_lse]) if "intervals" in options else options
            judge(out[of_o], lse[of_lse].contiguous(), q, k, v, None if qv is None else qv[of_o], **own)
        self.judge_behind(out, lse)

    def judge_behind(self, out, lse):
        if self.ends is not None:
            behind = self.ends[-1].item()
            assert (out[behind:] == 0).all() and (lse[:, behind:] == -math.inf).all()

    def check(self, **options):
        """Computes, judges, and returns what was computed."""
        results = self.call(return_softmax_lse=True, **options)
        self.judge(*results, **scores_in(options))
        return results
