from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

__all__ = ["Operation", "Repeats", "run", "warm_up", "xla_handlers", "__version__"]

__version__: str

@final
class Operation:
    name: str
    options: dict[str, Any]
    def __new__(cls, name: str, **options: Any) -> Operation: ...

@final
class Repeats:
    # Allocates a workspace: (like, bytes, zeros) -> (address, owner).
    def __new__(cls, names: Sequence[str], allocate: Callable[[Any, int, int], tuple[int, object]]) -> Repeats: ...
    def keep(
        self, tensors: tuple[Any, ...], options: tuple[Any, ...], operation: Operation, with_lse: bool
    ) -> None: ...
    def keep_of_torch(
        self, tensors: tuple[Any, ...], options: tuple[Any, ...], operation: Operation, is_heads_first: bool
    ) -> None: ...
    # O, or (O, LSE); None if the call is not made again.
    def attend(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any: ...

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

# The addresses of handlers, by the names of XLA's platforms.
def xla_handlers() -> list[tuple[str, int]]: ...
