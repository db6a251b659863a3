"""Calls of XLA's handler for GPUs, over a driver that computes nothing (`stand_in_driver.c`). The frames are made here,
as XLA makes them (`xla/ffi/api/c_api.h`), so that it takes neither JAX nor a GPU. Prints what the handler answered.
Runs in a process of its own, which loads that driver.
"""

import ctypes
import json
import sys
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint, c_void_p, cast, pointer, sizeof

# The extension module needs no torch, which takes seconds to import.
sys.modules["torch"] = None  # type: ignore[assignment]

from fa3 import _fa3


def structure(name, **fields):
    """A structure that begins with its size and an extension."""
    both = [("size", c_size_t), ("extension", c_void_p)]
    return type(name, (Structure,), {"_fields_": both + list(fields.items())})


def sized(structure, **fields):
    return structure(size=sizeof(structure), **fields)


Values = structure("Values", count=c_int64, kinds=POINTER(c_int), values=POINTER(c_void_p))
Attributes = structure("Attributes", count=c_int64, kinds=POINTER(c_int), names=POINTER(c_void_p), values=POINTER(c_void_p))
Buffer = structure("Buffer", dtype=c_int, data=c_void_p, rank=c_int64, dims=POINTER(c_int64))
Frame = structure("Frame", api=c_void_p, context=c_void_p, stage=c_int, given=Values, results=Values, attributes=Attributes, future=c_void_p)
Version = structure("Version", major=c_int, minor=c_int)
NewError = structure("NewError", message=c_char_p, code=c_int)
StreamOf = structure("StreamOf", context=c_void_p, stream=c_void_p)
DeviceOf = structure("DeviceOf", context=c_void_p, ordinal=c_int)
Allocation = structure("Allocation", context=c_void_p, bytes=c_size_t, alignment=c_size_t, data=c_void_p)
Freed = structure("Freed", context=c_void_p, bytes=c_size_t, data=c_void_p)
FUNCTIONS = {0: NewError, 4: StreamOf, 9: Allocation, 10: Freed, 17: DeviceOf}
KINDS = {i: ctypes.CFUNCTYPE(c_void_p, POINTER(arguments)) for i, arguments in FUNCTIONS.items()}
Api = structure("Api", version=Version, internal=c_void_p, **{f"f{i}": KINDS.get(i, c_void_p) for i in range(18)})


class Text(Structure):
    _fields_ = [("first", c_char_p), ("bytes", c_size_t)]


class Number(Structure):
    _fields_ = [("dtype", c_int), ("value", c_void_p)]


class Extension(Structure):
    _fields_ = [("size", c_size_t), ("kind", c_int), ("next", c_void_p), ("metadata", c_void_p)]


class Metadata(Structure):
    _fields_ = [("size", c_size_t), ("version", Version), ("traits", c_uint)]


errors, allocated, freed, kept = [], [], [], []


@KINDS[0]
def new_error(given):
    errors.append((given[0].code, given[0].message.decode()))
    return 0x100 + len(errors)


@KINDS[4]
def stream_of(given):
    given[0].stream = 7
    return None


@KINDS[9]
def allocate(given):
    if refuses:
        return 0xBAD
    # An address of no alignment.
    given[0].data = (1 << 45) + 3
    allocated.append((given[0].bytes, given[0].data))
    return None


@KINDS[10]
def free(given):
    freed.append((given[0].bytes, given[0].data))
    return None


@KINDS[17]
def device_of(given):
    given[0].ordinal = 0
    return None


def array(kind, values):
    made = (kind * len(values))(*values)
    kept.append(made)
    return made


def address(x):
    kept.append(x)
    return ctypes.addressof(x)


def buffers(shapes):
    made = [sized(Buffer, dtype=dtype, data=(1 << 40) + (len(kept) << 30), rank=len(shape), dims=array(c_int64, shape)) for dtype, shape in shapes]
    return sized(Values, count=len(made), kinds=array(c_int, [1] * len(made)), values=array(c_void_p, [address(x) for x in made]))


def attributes(**given):
    kinds, values = [], []
    for value in given.values():
        kinds.append(4 if isinstance(value, str) else 3)
        x = Text(value.encode(), len(value)) if isinstance(value, str) else Number(12, address(c_double(value)))
        values.append(address(x))
    names = [address(Text(name.encode(), len(name))) for name in given]
    return sized(Attributes, count=len(given), kinds=array(c_int, kinds), names=array(c_void_p, names), values=array(c_void_p, values))


def api(major=0, minor=3, lacks=0):
    functions = dict(f0=new_error, f4=stream_of, f9=allocate, f10=free, f17=device_of)
    made = sized(Api, version=sized(Version, major=major, minor=minor), **functions)
    made.size -= lacks
    return address(made)


handler = ctypes.CFUNCTYPE(c_void_p, POINTER(Frame))(dict(_fa3.xla_handlers())["CUDA"])
refuses = False


def call(batch, rows, pass_="forward", stage=3, short=0, **of_api):
    """The handler's answer: None, or the error's number, and the error."""
    q, k, lse = (16, (batch, rows, 4, 64)), (16, (batch, rows, 2, 64)), (11, (batch, 4, rows))
    given, results = ([q, k, k], [q, lse]) if pass_ == "forward" else ([q, k, k, q, lse, q], [q, k, k])
    names = "q k v o lse" if pass_ == "forward" else "q k v o lse dout dq dk dv"
    frame = sized(Frame, api=api(**of_api), context=5, stage=stage, given=buffers(given), results=buffers(results))
    frame.attributes = attributes(operation=pass_, softcap=5.0, tensors=names)
    frame.size -= short
    answer = handler(byref(frame))
    return [answer, *errors[-1:]] if answer else None


def metadata(minor):
    """The version that the handler states to XLA of this version; None if XLA does not tell it."""
    asked = Metadata(size=36, traits=9)
    extension = Extension(32, 1, None, address(asked))
    frame = sized(Frame, api=minor and api(minor=minor), extension=address(extension), stage=9)
    assert handler(byref(frame)) is None
    return asked.version.major, asked.version.minor, asked.traits, asked.version.size


found = {
    "metadata": [metadata(None), metadata(3), metadata(9)],
    "small": call(1, 64),
    "small allocated": list(allocated),
    "large": call(8, 4096, "backward"),
    "allocated": list(allocated),
    "freed": list(freed),
    "stage": call(1, 64, stage=1),
    "major": call(1, 64, major=1),
    "without device": call(1, 64, lacks=8),
    "short frame": call(1, 64, short=16),
}
refuses = True
found["refused"] = call(8, 4096, "backward")[0]
driver = ctypes.CDLL("libcuda.so.1")
driver.noted_kernel.restype = c_char_p
found["launched"] = [(driver.noted_stream(i), driver.noted_kernel(i).decode()) for i in range(driver.noted_count())]
json.dump(found, sys.stdout)
