from collections.abc import Callable, Mapping
from typing import Any, final

__all__ = ["Operation", "run", "__version__"]

__version__: str

@final
class Operation:
    name: str
    options: dict[str, Any]
    def __new__(cls, name: str, **options: Any) -> Operation: ...

def run(
    operation: Operation,
    device: int,
    stream: int | None,
    # Tensors, or (dtype, address, shape, strides), by names
    tensors: Mapping[str, Any],
    # (bytes, zeros) -> (address, owner). The CPU and a call that is only checked need none.
    allocate: Callable[[int, int], tuple[int, object]] | None,
) -> int | None: ...
