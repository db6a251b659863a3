"""Packed sequences for tests, and the results that each sequence must have by the definition of attention."""

import itertools
import math
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from reference import gradients, judge, judge_gradients

from fa3 import flash_attn_varlen_func

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
MASKS = [dict(), dict(causal=True), dict(window_size=(37, 11)), dict(causal=True, window_size=(70, 5)), dict(window_size=(-1, 3))]
# The rows of Q and the keys of each sequence. Some have neither, one, or fewer keys than rows; some end inside a tile.
LENGTHS = [(7, 9), (0, 5), (1, 1), (33, 0), (130, 70), (0, 0), (64, 140), (129, 257)]
BEHIND = (11, 6)
USED = [
    ([7, 0, 0, 20, 130, 0, 1, 100], [9, 5, 1, 0, 1, 0, 139, 0]),
    (None, [0, 5, 1, 0, 70, 0, 33, 200]),
    ([3, 0, 1, 33, 64, 0, 63, 129], None),
    tuple([x[side] for x in LENGTHS] for side in (0, 1)),
]


def normal(*shape, dtype=BF16, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def on(device, *columns):
    """Parameters of tests on one device: (the device's name, a combination of the columns), for every combination."""
    marks = pytest.mark.hopper if device == "cuda" else ()
    return [pytest.param(device, *case, marks=marks) for case in itertools.product(*columns)]


def needs_a_compiler():
    """Skips a test if Inductor cannot compile."""
    if not (shutil.which("g++") or shutil.which("clang++")) or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("skipped: inductor needs a C++ compiler and Python's headers")


def at_once(work, problems):
    """Runs `work` for each problem in its own thread."""
    with ThreadPoolExecutor(len(problems)) as pool:
        for running in [pool.submit(work, *problem) for problem in problems]:
            running.result()


def garbage(generator):
    """Yields functions that make lists of n numbers, few or none of which are valid lengths."""
    extremes = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31), 10**6, 100, 2**30], dtype=I32)
    yield lambda n: torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator, dtype=I32)
    yield lambda n: torch.randint(-500, 500, (n,), generator=generator, dtype=I32)
    yield lambda n: extremes[torch.randint(8, (n,), generator=generator)]
    yield lambda n: torch.arange(n, 0, -1, dtype=I32)


def of_rows(options, rows):
    """The options of a sequence with these rows."""
    return options | dict(intervals=options["intervals"][None, :, rows]) if "intervals" in options else options


def ends(lengths, device):
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=I32, device=device)


class Packed:
    """Q, K and V of packed sequences with these lengths. `behind` is the number of rows behind the last sequence."""

    def __init__(self, device, dtype=BF16, lengths=LENGTHS, heads=(4, 2), head_dims=(64, 64), behind=BEHIND, used=None):
        self.lengths, (of_q, of_k) = lengths, ([x[side] for x in lengths] for side in (0, 1))
        total_q, total_k = sum(of_q) + behind[0], sum(of_k) + behind[1]
        self.q = normal(total_q, heads[0], head_dims[0], dtype=dtype, device=device)
        self.k, self.v = (normal(total_k, heads[1], d, dtype=dtype, seed=1 + i, device=device) for i, d in enumerate(head_dims))
        self.ends = ends(of_q, device), ends(of_k, device)
        # seqused_q and seqused_k.
        self.used = used if used is None else tuple(None if x is None else torch.tensor(x, dtype=I32, device=device) for x in used)

    def call(self, hints=(None, None), tensors=None, **options):
        q, k, v = tensors or (self.q, self.k, self.v)
        used = dict(zip(("seqused_q", "seqused_k"), self.used or (None, None), strict=True))
        return flash_attn_varlen_func(q, k, v, *self.ends, *hints, **used, **options)

    def sequences(self):
        """For each sequence, the slices of its rows in use of Q and of K."""
        starts = [x.tolist() for x in self.ends]
        for i, lengths in enumerate(self.lengths):
            of_q, of_k = (n if not self.used or u is None else u[i].item() for n, u in zip(lengths, self.used or (0, 0)))
            yield slice(starts[0][i], starts[0][i] + of_q), slice(starts[1][i], starts[1][i] + of_k)

    def intervals(self, make):
        """The intervals that `make` gives for each sequence's rows and keys in use. Other rows have garbage."""
        parts = [(q, make(q.stop - q.start, k.stop - k.start)[0]) for q, k in self.sequences()]
        heads, _, numbers = parts[0][1].shape
        bounds = next(garbage(torch.Generator().manual_seed(0)))(heads * len(self.q) * numbers).view(heads, -1, numbers)
        for rows, part in parts:
            bounds[:, rows] = part.clamp(-(2**31), 2**31 - 1).to(I32)
        return bounds.to(self.q.device)

    def in_use(self):
        """Masks of the rows in use of Q, and of K."""
        masks = torch.zeros(len(self.q), dtype=torch.bool), torch.zeros(len(self.k), dtype=torch.bool)
        for rows in self.sequences():
            for mask, part in zip(masks, rows, strict=True):
                mask[part] = True
        return tuple(mask.to(self.q.device) for mask in masks)

    def judge(self, out, lse, qv=None, **options):
        """Fails unless each sequence has its own results, and other rows have the results of rows without keys."""
        total, heads, _ = self.q.shape
        assert (out.shape, out.dtype) == ((total, heads, self.v.shape[2]), self.q.dtype) and out.is_contiguous()
        assert (lse.shape, lse.dtype) == ((heads, total), F32) and lse.is_contiguous()
        for q, k in self.sequences():
            given = self.q[None, q], self.k[None, k], self.v[None, k], None if qv is None else qv[None, q]
            judge(out[None, q], lse[None, :, q].contiguous(), *given, **of_rows(options, q))
        self.judge_behind(out, lse)

    def judge_behind(self, out, lse):
        used, _ = self.in_use()
        assert (out[~used] == 0).all() and (lse[:, ~used] == -math.inf).all()

    def check(self, hints=(None, None), **options):
        """Computes, judges, and returns what was computed."""
        results = self.call(hints, return_attn_probs=True, **options)
        self.judge(*results, **options)
        assert torch.equal(self.call(hints, **options), results[0])
        return results

    def given(self, of_lse=True):
        """Random gradients of O, and of LSE."""
        total, heads, _ = self.q.shape
        dout = normal(total, heads, self.v.shape[2], dtype=self.q.dtype, seed=3, device=self.q.device)
        return dout, normal(heads, total, dtype=F32, seed=4, device=self.q.device) if of_lse else None

    def gradients(self, dout, dlse=None, hints=(None, None), tensors=None, s_aux=None, **options):
        """The gradients of Q, K, V and the sinks, for gradients of O and LSE, of which one may be None."""
        tensors = [*(tensors or (self.q, self.k, self.v)), *([] if s_aux is None else [s_aux])]
        leaves = [x.detach().requires_grad_() for x in tensors]
        sinks = {} if s_aux is None else dict(s_aux=leaves[3])
        results = self.call(hints, leaves[:3], return_attn_probs=True, **sinks, **options)
        used = [(result, given) for result, given in zip(results, (dout, dlse), strict=True) if given is not None]
        return torch.autograd.grad([result for result, _ in used], leaves, [given for _, given in used])

    def judge_gradients(self, results, dout, dlse=None, **options):
        """Fails unless each sequence has its own gradients, other rows have 0, and the sinks have sums over all."""
        of_sinks = 0
        for q, k in self.sequences():
            given = self.q[None, q], self.k[None, k], self.v[None, k]
            given += None if dout is None else dout[None, q], None if dlse is None else dlse[None, :, q]
            judge_gradients([x[None, rows] for x, rows in zip(results, (q, k, k))], *given, **of_rows(options, q))
            if len(results) > 3:
                of_sinks += gradients(*given, **of_rows(options, q))[3]
        of_q, of_k = self.in_use()
        for name, x, used in zip(("dq", "dk", "dv"), results, (of_q, of_k, of_k)):
            assert (x[~used] == 0).all(), f"{name} of rows that are not in use"
        if len(results) > 3:
            bound = 1e-4 if self.q.dtype == F32 else 3e-2
            torch.testing.assert_close(results[3].double(), of_sinks, rtol=bound, atol=bound)

    def check_gradients(self, of_o=True, of_lse=True, hints=(None, None), deterministic=True, **options):
        """Computes gradients from random gradients of O and LSE, judges them, and returns them."""
        dout, dlse = self.given(of_lse)
        dout = dout if of_o else None
        results = self.gradients(dout, dlse, hints, deterministic=deterministic, **options)
        self.judge_gradients(results, dout, dlse, **options)
        return results


def assert_equal(results, expected):
    for result, right in zip(results, expected, strict=True):
        assert (result.dtype, result.shape) == (right.dtype, right.shape) and torch.equal(result, right)
