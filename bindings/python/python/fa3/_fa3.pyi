from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["run", "__version__"]

__version__: str

def run(
    operation: str,
    device: int,
    stream: int | None,
    # (dtype, address, shape, strides) by names
    tensors: Mapping[str, tuple[str, int, Sequence[int], Sequence[int]]],
    options: Mapping[str, Any],
    # (bytes, zeros) -> (address, owner). It may be None on the CPU, and for a call that is only checked.
    allocate: Callable[[int, int], tuple[int, object]] | None,
) -> int | None: ...
