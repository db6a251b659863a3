"""Calls of all operations from many threads, on two streams that they share, over a driver that computes nothing
(`stand_in_driver.c`). Prints what was launched: for each function the kernels of a call, and for each stream the
launches in its order, each with its thread's function. Runs in a process of its own, which loads that driver."""

import ctypes
import functools
import itertools
import json
import sys
import threading

if __name__ == "__main__":
    # The extension module needs no torch, which takes seconds to import.
    sys.modules["torch"] = None  # type: ignore[assignment]

from fa3 import _fa3

CALLS = 40
STREAMS = (0, 5)
_addresses = itertools.count(1 << 44, 1 << 32)


def address():
    """Returns an address that no other tensor has."""
    return next(_addresses)


def tensor(*shape, dtype="bf16"):
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return dtype, address(), shape, tuple(reversed(strides))


def allocate(bytes, zeros):
    return address(), None


def packed(count, rows):
    """`count` sequences: q, k, v and o (1, rows, heads, head_dim), and the lists cu_seqlens_q and cu_seqlens_k."""
    lists = {name: tensor(count + 1, dtype="i32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return dict(zip("qkvo", (tensor(1, rows, heads, 64) for heads in (4, 2, 2, 4)))) | lists


def call(operation, at, tensors, **options):
    return functools.partial(_fa3.run, _fa3.Operation(operation, **options), *at, tensors, allocate)


def forward(at, rows):
    tensors = packed(3, rows) | dict(lse=tensor(4, rows, dtype="f32"))
    return call("forward", at, tensors, max_seqlen_q=rows, max_seqlen_k=rows)


def append(at, rows):
    tensors = dict(q=tensor(4, 1, 8, 64), k=tensor(64, 16, 2, 64), v=tensor(64, 16, 2, 64), o=tensor(4, 1, 8, 64))
    tensors |= dict(k_new=tensor(4, 1, 2, 64), v_new=tensor(4, 1, 2, 64))
    tensors |= dict(seqused_k=tensor(4, dtype="i32"), page_table=tensor(4, rows, dtype="i32"))
    return call("append", at, tensors, split_keys=-1)


def fp8_forward(at, rows):
    tensors = dict(zip("qkvo", (tensor(1, rows, heads, 64) for heads in (4, 2, 2, 4))))
    return call("fp8_forward", at, tensors, hadamard_seed=1)


def backward(at, rows):
    tensors = packed(3, rows)
    tensors |= {f"d{name}": tensor(*tensors[name][2]) for name in "qkv"}
    tensors |= dict(dout=tensor(1, rows, 4, 64), lse=tensor(4, rows, dtype="f32"))
    return call("backward", at, tensors, deterministic=True, max_seqlen_q=rows, max_seqlen_k=rows)


def quantize(at, rows):
    tensors = dict(x=tensor(1, rows, 4, 64), codes=tensor(1, rows, 4, 64, dtype="e4m3"), scales=tensor(2, dtype="f32"))
    return call("quantize", at, tensors, heads_per_scale=2)


def quantize_channels(at, rows):
    tensors = dict(x=tensor(1, rows, 4, 64), codes=tensor(1, rows, 4, 64, dtype="e4m3"))
    tensors |= dict(scales=tensor(1, 4, 64, dtype="f32"), mean=tensor(1, 4, 64, dtype="f32"))
    return call("quantize", at, tensors)


def forward_table(at, rows):
    tensors = packed(3, rows)
    del tensors["o"]
    hints = dict(max_seqlen_q=rows, max_seqlen_k=rows)
    words = _fa3.run(_fa3.Operation("forward_table", **hints), *at, tensors, allocate)
    return call("forward_table", at, tensors | dict(table=tensor(words, dtype="i32")), **hints)


def combine(at, rows):
    tensors = dict(out_partial=tensor(2, 1, rows, 4, 64, dtype="f32"), lse_partial=tensor(2, 1, rows, 4, dtype="f32"))
    tensors |= dict(o=tensor(1, rows, 4, 64), lse=tensor(1, rows, 4, dtype="f32"))
    return call("combine", at, tensors)


FUNCTIONS = (forward, append, fp8_forward, backward, quantize, quantize_channels, forward_table, combine)


def main():
    driver = ctypes.CDLL("libcuda.so.1")
    driver.noted_kernel.restype = ctypes.c_char_p
    driver.noted_stream.restype = ctypes.c_uint64

    def noted():
        for i in range(driver.noted_count()):
            yield driver.noted_thread(i), driver.noted_stream(i), driver.noted_kernel(i).decode()

    # For each function, two threads on each stream, each with its own problem.
    work = [(make, make((0, stream), 64 * (1 + i)), stream) for make in FUNCTIONS for i in (0, 1) for stream in STREAMS]
    kernels = {}
    for make, call, _ in work:
        driver.forget()
        call()
        kernels[make.__name__] = [kernel for _, _, kernel in noted()]
    driver.forget()
    names, failures = {}, []

    def repeat(name, call):
        names[threading.get_native_id()] = name
        try:
            for _ in range(CALLS):
                call()
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=repeat, args=(make.__name__, call)) for make, call, _ in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = {stream: [] for stream in STREAMS}
    for thread, stream, kernel in noted():
        launches[stream].append((thread, names[thread], kernel))
    json.dump({"kernels": kernels, "launches": launches, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    main()
