"""Causal attention through fa3's C library, from Python without torch: python3 attention.py path/to/libfa3_c.so"""

import ctypes
import sys


class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    ]


class Option(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("values", ctypes.c_double * 3)]


F32, CPU = 0, -1
fa3 = ctypes.CDLL(sys.argv[1])
fa3.fa3_last_error.restype = fa3.fa3_version.restype = ctypes.c_char_p


def check(code):
    if code:
        raise RuntimeError(f"fa3: {fa3.fa3_last_error().decode()}")


def tensor(name, *shape):
    return Tensor(name, F32, len(shape), (ctypes.c_int64 * len(shape))(*shape), None)


def floats(numbers):
    return (ctypes.c_float * len(numbers))(*numbers)


# Two keys, whose scores differ by ln 3 for the second query: O is a quarter of the first value and three of the second.
batch, seqlen, heads, head_dim = shape = (1, 2, 1, 8)
q = floats([0] * head_dim + [1.0986123] + [0] * 7)
k = floats([0] * head_dim + [1] + [0] * 7)
v = floats([4] * head_dim + [8] * head_dim)
o, lse = floats([0] * 16), floats([0] * 2)

tensors = (Tensor * 5)(*(tensor(name, *shape) for name in (b"q", b"k", b"v", b"o")), tensor(b"lse", 1, 1, 2))
options = (Option * 2)((b"window", (-1, 0, 0)), (b"softmax_scale", (1, 0, 0)))
data = (ctypes.c_void_p * 5)(*(ctypes.addressof(x) for x in (q, k, v, o, lse)))
plan = ctypes.c_void_p()
check(fa3.fa3_plan_new(b"forward", CPU, tensors, 5, options, 2, ctypes.byref(plan)))
check(fa3.fa3_launch(plan, None, data, None))
fa3.fa3_free(plan)
print([round(x, 4) for x in (o[0], o[8], lse[0], lse[1])])
assert [round(x, 4) for x in (o[0], o[8], lse[0], lse[1])] == [4.0, 7.0, 0.0, 1.3863]
