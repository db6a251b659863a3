"""Attention by tvm-ffi: `run` takes tensors of every framework that has DLPack. It needs apache-tvm-ffi, and no torch.

The extension module is also a module of tvm-ffi, whose one function is `run`.
"""

from itertools import chain
from typing import Any

import tvm_ffi

from . import _fa3

__all__ = ["module", "run"]

# The module, whose function is called as `module.run(operation, name, value, name, value, ...)`.
module = tvm_ffi.load_module(_fa3.__file__)


def run(operation: str, /, **named: Any) -> Any:
    """Computes an operation of `fa3.h`, on the CPU or on the stream that tvm-ffi has for the device.

    Arguments:
        operation: "forward", "backward" or another operation of docs/from-c.md.
        named: the operation's tensors and options by their names, where (-1, 0, 0) as `window` is causal. Tensors are
            not copied, and are all on one device. An output o, lse, dq, dk or dv that is None is allocated by the
            framework whose tensors are given, if it has told tvm-ffi how, as torch has.

    Returns: the outputs that were allocated: None, a tensor, or an array of tensors in the order of their names.

    Raises:
        TypeError: there is no operation, tensor or option of a name.
        ValueError: a tensor or an option is invalid, there is no allocator, or no kernel computes the call.
        RuntimeError: an error of the driver or of the allocator.
    """
    return module.run(operation, *chain.from_iterable(named.items()))
