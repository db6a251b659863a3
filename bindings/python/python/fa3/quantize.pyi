from typing import Any

from torch import Tensor

def quantize(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    positions: int | Tensor = 0,
    hadamard_seed: int | None = None,
    block_rows: int = 128,
    scale: float | None = None,
    transposed: bool = False,
    scales_of: str = "blocks",
    heads_per_scale: int = 1,
) -> tuple[Tensor, Tensor]: ...
def quantize_channels(x: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]: ...

# For attention in 8 bits.
def given_seed(hadamard_seed: Any) -> int | None: ...
def signed(hadamard_seed: int | None) -> int | None: ...

# For fake tensors.
def check_x(x: Tensor) -> None: ...
def check(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    first_position: int,
    *scaling: Any,
) -> None: ...
def codes_like(x: Tensor, transposed: bool) -> Tensor: ...
def scales_like(
    x: Tensor, block_rows: int, scale: float | None, scales_of: str, heads_per_scale: int
) -> Tensor: ...
def channels_like(x: Tensor) -> Tensor: ...
def seed(hadamard_seed: int | None) -> int | None: ...
def sharing(
    block_rows: int, scale: float | None, scales_of: str, heads_per_scale: int
) -> tuple[float | None, int | None, int | None]: ...
TENSORS: tuple[str, ...]
