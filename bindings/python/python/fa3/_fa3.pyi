from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

__all__ = ["Operation", "run", "warm_up", "__version__"]

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
    # Tensors by name: each is a torch tensor or a tuple (dtype, address, shape, strides).
    tensors: Mapping[str, Any],
    # Allocates a workspace: (bytes, zeros) -> (address, owner). None for the CPU, or if the call is only checked.
    allocate: Callable[[int, int], tuple[int, object]] | None,
) -> int | None: ...
def warm_up(
    device: int, calls: Sequence[tuple[Operation, Mapping[str, Any]]]
) -> list[tuple[str, str]]: ...
