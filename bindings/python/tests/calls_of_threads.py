"""Calls of all operations from many threads, on two streams that they share, over a driver that computes nothing
(`stand_in_driver.c`). Prints what was launched: for each function the kernels of a call, and for each stream the
launches in its order, each with its thread's function. Runs in a process of its own, which loads that driver."""

import ctypes
import itertools
import json
import sys
import threading

from fa3 import _fa3

CALLS = 40
STREAMS = (0, 5)
_addresses = itertools.count(1 << 44, 1 << 32)


def address():
    """Memory that no other tensor has."""
    return next(_addresses)


def tensor(*shape, dtype="bf16"):
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return dtype, address(), shape, tuple(reversed(strides))


def allocate(bytes, zeros):
    return address(), None


UNBOUNDED = (-1, -1, 0)
SCORES = (None, UNBOUNDED, None)  # softmax_scale, window, softcap


def packed(count, rows):
    """`count` sequences of q, and of k and v: tensors of (1, rows, heads, head_dim), and their lists."""
    tensors = [tensor(1, rows, heads, 64) for heads in (4, 2, 2)]
    return tensors, (count, (address(), address()), (None, None), (rows, rows))


def forward(at, rows):
    qkv, lists = packed(3, rows)
    o, lse = address(), address()
    options = (*SCORES, 0, None, allocate, None, lists)
    return lambda: _fa3.forward(*at, *qkv, o, lse, (None,) * 4, *options)


def cached_forward(at, rows):
    q, k, v = tensor(4, 1, 8, 64), tensor(64, 16, 2, 64), tensor(64, 16, 2, 64)
    new = (tensor(4, 1, 2, 64), tensor(4, 1, 2, 64), None, None)
    cache = (4, None, (None, address()), None, (address(), rows, rows, None), (None, None))
    o, lse = address(), address()
    return lambda: _fa3.cached_forward(
        *at, q, k, v, o, lse, (None,) * 3, *SCORES, 0, allocate, cache, -1, None, None, None, new
    )


def fp8_forward(at, rows):
    qkv = [tensor(1, rows, heads, 64) for heads in (4, 2, 2)]
    o, lse = address(), address()
    return lambda: _fa3.fp8_forward(*at, *qkv, o, lse, None, 1, False, *SCORES, allocate)


def backward(at, rows):
    (q, k, v), lists = packed(3, rows)
    dout = tensor(1, rows, 4, 64)
    gradients = [address() for _ in ("o", "lse", "dq", "dk", "dv")]
    o, lse, dq, dk, dv = gradients
    options = (*SCORES, 0, allocate, True, None, lists)
    return lambda: _fa3.backward(*at, q, k, v, dout, o, lse, None, dq, dk, dv, *options)


def quantize(at, rows):
    x = tensor(1, rows, 4, 64)
    codes, scales = address(), address()
    return lambda: _fa3.quantize(*at, x, codes, scales, None, None, None, 2, None, False, allocate)


def quantize_channels(at, rows):
    x = tensor(1, rows, 4, 64)
    codes, scales, mean = address(), address(), address()
    return lambda: _fa3.quantize_channels(*at, x, codes, scales, mean, False, allocate)


def forward_table(at, rows):
    qkv, lists = packed(3, rows)
    table = address()
    return lambda: _fa3.forward_table(*at, *qkv, UNBOUNDED, False, 0, lists, table, allocate)


def combine(at, rows):
    partial, lse_partial = tensor(2, 1, rows, 4, 64, dtype="f32"), tensor(2, 1, rows, 4, 1, dtype="f32")
    o, lse = tensor(1, rows, 4, 64), tensor(1, rows, 4, 1, dtype="f32")
    return lambda: _fa3.combine(*at, partial, lse_partial, o, lse, allocate)


FUNCTIONS = (forward, cached_forward, fp8_forward, backward, quantize, quantize_channels, forward_table, combine)


def main():
    driver = ctypes.CDLL("libcuda.so.1")
    driver.noted_kernel.restype = ctypes.c_char_p
    driver.noted_stream.restype = ctypes.c_uint64

    def noted():
        for i in range(driver.noted_count()):
            yield driver.noted_thread(i), driver.noted_stream(i), driver.noted_kernel(i).decode()

    # Two threads each on each stream, with problems of their own.
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
