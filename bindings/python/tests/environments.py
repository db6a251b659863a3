"""Calls of the function of tvm-ffi for a GPU, over a driver that computes nothing (`stand_in_driver.c`). Tensors are
made here, without memory, so that it takes neither torch nor a GPU. Prints "ok". Runs in a process of its own.
"""

import ctypes
import sys
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

# Neither tvm-ffi nor the extension module needs torch, which takes seconds to import.
sys.modules["torch"] = None  # type: ignore[assignment]

import tvm_ffi
from fa3.tvm_ffi import run


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", c_int32 * 2),
        ("ndim", c_int32),
        ("dtype", c_uint32),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Managed(Structure):
    _fields_ = [("tensor", DLTensor), ("context", c_void_p), ("deleter", c_void_p)]


class Versioned(Structure):
    _fields_ = [("version", c_uint32 * 2), ("context", c_void_p), ("deleter", c_void_p), ("flags", c_uint64), ("tensor", DLTensor)]


BF16, F32, BYTE = 4 | 16 << 8 | 1 << 16, 2 | 32 << 8 | 1 << 16, 1 | 8 << 8 | 1 << 16
CUDA = 2
kept, allocated, freed = [], [], []
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [c_void_p, c_char_p, c_void_p]


def described(dtype, shape, number=0):
    """A tensor without memory, on a GPU of this number."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    arrays = [(c_int64 * len(shape))(*numbers) for numbers in (shape, strides)]
    kept.extend(arrays)
    return DLTensor((1 << 40) + (len(kept) << 30), (CUDA, number), len(shape), dtype, *arrays)


def tensor(dtype, *shape, number=0):
    kept.append(Managed(described(dtype, shape, number)))
    capsule = ctypes.pythonapi.PyCapsule_New(ctypes.addressof(kept[-1]), b"dltensor", None)
    return tvm_ffi.from_dlpack(capsule)


@CFUNCTYPE(None, c_void_p)
def free(managed):
    freed.append(managed)


@CFUNCTYPE(c_int, POINTER(DLTensor), POINTER(c_void_p), c_void_p, c_void_p)
def allocate(like, made, _context, _set_error):
    shape = like[0].shape[: like[0].ndim]
    managed = Versioned((1, 1), None, ctypes.cast(free, c_void_p), 0, described(like[0].dtype, shape, like[0].device[1]))
    kept.append(managed)
    made[0] = ctypes.addressof(managed)
    allocated.append((list(like[0].device), like[0].dtype, shape))
    return 0


def named(batch, rows, **more):
    q, k, v = (tensor(BF16, batch, rows, heads, 64) for heads in (4, 2, 2))
    return dict(q=q, k=k, v=v, softcap=5.0, **more)


def backward(batch, rows):
    given = named(batch, rows, o=tensor(BF16, batch, rows, 4, 64), dout=tensor(BF16, batch, rows, 4, 64))
    run("backward", **given, lse=tensor(F32, batch, 4, rows), dq=None, dk=None, dv=None)


def refused(*arguments, **named):
    try:
        run(*arguments, **named)
    except (ValueError, RuntimeError) as error:
        return str(error)


library = ctypes.CDLL("libtvm_ffi.so")
library.TVMFFIEnvSetDLPackManagedTensorAllocator(allocate, 0, None)
driver = ctypes.CDLL("libcuda.so.1")
driver.noted_kernel.restype, driver.noted_stream.restype = c_char_p, c_uint64

with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 7):
    o, lse = run("forward", **named(1, 64), o=None, lse=None)
    assert (o.shape, lse.shape, str(o.device)) == ((1, 64, 4, 64), (1, 4, 64), "cuda:0")
    assert allocated == [([CUDA, 0], BF16, [1, 64, 4, 64]), ([CUDA, 0], F32, [1, 4, 64])], allocated
    del o, lse
    assert len(freed) == 2
    allocated.clear()

    # A large workspace is freed after the launch, and so are the outputs, which are not kept.
    backward(8, 4096)
    assert [dtype for _, dtype, _ in allocated] == [BF16, BF16, BF16, BYTE] and len(freed) == 6, (allocated, freed)
    assert allocated[-1][2][0] > 1 << 20

    # Without an allocator it is the driver's memory.
    library.TVMFFIEnvSetDLPackManagedTensorAllocator(None, 0, None)
    assert refused("forward", **named(1, 64), o=None).startswith("o is None, and tvm-ffi has no allocator here")
    q, k = ([8, 4096, heads, 64] for heads in (4, 2))
    given = named(8, 4096, o=tensor(BF16, *q), dout=tensor(BF16, *q), lse=tensor(F32, 8, 4, 4096))
    run("backward", **given, dq=tensor(BF16, *q), dk=tensor(BF16, *k), dv=tensor(BF16, *k))

launched = [(driver.noted_stream(i), driver.noted_kernel(i).decode()) for i in range(driver.noted_count())]
assert {stream for stream, _ in launched} == {7} and launched[0][1].startswith("fwd") and len(launched) >= 5, launched
driver.forget()
run("forward", **named(1, 64), o=tensor(BF16, 1, 64, 4, 64))
assert driver.noted_stream(0) == 0

other = tensor(BF16, 1, 64, 2, 64, number=1)
assert refused("forward", **named(1, 64) | dict(k=other)) == "k is on DLPack's device 2:1, and q on 2:0"
assert "device" in refused("forward", q=other, k=other, v=other, o=tensor(BF16, 1, 64, 2, 64, number=1))
print("ok")
