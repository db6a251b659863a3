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
