"""All operations from many threads at once on a GPU, on one shared stream and on a stream for each thread. Each result
has the bits that it has alone. `FA3_SECONDS` is the length of the test in seconds, 5 if it is not set.
"""

import contextlib
import itertools
import os
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import fa3

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("nan_in_new_tensors")]

SECONDS = float(os.environ.get("FA3_SECONDS", "5"))


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def ends(lengths):
    return int32([0, *itertools.accumulate(lengths)])


def dense(randn, i):
    q, k, v = randn(2, 300 + 64 * i, 8, 64), randn(2, 700, 2, 64), randn(2, 700, 2, 64)
    return lambda: fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)


def packed(randn, i):
    lengths = [[64] * 40, [3000, 70, 1], [1, 0, 900]][i % 3]
    q, k, v = (randn(sum(lengths), heads, 64) for heads in (8, 2, 2))
    lists = ends(lengths), ends(lengths), max(lengths), max(lengths)
    return lambda: fa3.flash_attn_varlen_func(q, k, v, *lists, causal=True, return_attn_probs=True)


def gradients(randn, i):
    """A backward pass, which autograd runs in another thread, on the stream of the forward pass."""
    lengths = [[64] * 20, [900, 70, 1]][i % 2]
    q, k, v = (randn(sum(lengths), heads, 64).requires_grad_() for heads in (8, 2, 2))
    lists, dout = (ends(lengths), ends(lengths), max(lengths), max(lengths)), randn(sum(lengths), 8, 64)

    def call():
        out = fa3.flash_attn_varlen_func(q, k, v, *lists, causal=True, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    return call


def appended(randn, i):
    """A decoding step that appends rows to pages. It writes the same rows in every call."""
    pages, rows, count = 64, 16, 6
    q, new = randn(count, 1, 8, 128), [randn(count, 1, 2, 128) for _ in "kv"]
    cache = [randn(pages, rows, 2, 128) for _ in "kv"]
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(i))[: 10 * count]
    table = table.to("cuda", torch.int32).view(count, 10)
    lengths = int32([0, 1, 150, 37, 90, 16 + i])
    options = dict(cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True)

    def call():
        return (*fa3.flash_attn_with_kvcache(q, *cache, *new, **options)[:2], *cache)

    return call


def in_fp8(randn, i):
    q, k, v = randn(1, 300 + i, 4, 128), randn(1, 500, 4, 128), randn(1, 500, 4, 128)
    return lambda: fa3.flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True)


def quantized(randn, i):
    x = randn(2, 400 + i, 4, 64)
    return lambda: (*fa3.quantize(x, scales_of="heads"), *fa3.quantize_channels(x))


def combined(randn, i):
    parts, lse = randn(4, 2, 100 + i, 4, 64, dtype=torch.float32), randn(4, 2, 100 + i, 4, dtype=torch.float32)
    return lambda: fa3.flash_attn_combine(parts, lse)


MAKE = [dense, packed, gradients, appended, in_fp8, quantized, combined, packed]


def same(results, expected):
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("shared", [True, False], ids=["one stream", "streams of their own"])
def test_threads_compute_what_each_computes_alone(randn, shared):
    calls = [make(randn, i) for i, make in enumerate(MAKE)]
    expected = []
    for call in calls:
        call()
        expected.append([x.clone() for x in call()])
    torch.cuda.synchronize()
    end, failures, counts = time.monotonic() + SECONDS / 2, [], [0] * len(calls)

    def work(i):
        stream = contextlib.nullcontext() if shared else torch.cuda.stream(torch.cuda.Stream())
        try:
            with stream:
                while time.monotonic() < end and not failures:
                    results = [calls[i]() for _ in range(10)]
                    assert all(same(result, expected[i]) for result in results), f"{MAKE[i].__name__} differs"
                    counts[i] += len(results)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 60)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert all(counts), counts
