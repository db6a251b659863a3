from collections.abc import Callable, Sequence

__all__ = [
    "forward",
    "forward_table",
    "cached_forward",
    "fp8_forward",
    "backward",
    "quantize",
    "quantize_channels",
    "combine",
    "__version__",
]

__version__: str

# (dtype, address, shape, strides)
_Tensor = tuple[str, int, Sequence[int], Sequence[int]]

# (sequences, cu_seqlens, seqused, longest)
_Packed = tuple[int, tuple[int, int], tuple[int | None, int | None], tuple[int | None, int | None]]

# (sequences, cu_seqlens_q, seqused, leftpad_k, (page_table, pages, stride, index), longest)
_Cache = tuple[
    int,
    int | None,
    tuple[int | None, int | None],
    int | None,
    tuple[int, int, int, tuple[int, int] | None] | None,
    tuple[int | None, int | None],
]

# (dtype of the tables, cos, sin, table_rows, rotary_dim, interleaved, rotary_seqlens)
_AppendRotation = tuple[str, int, int, int, int, bool, int | None]

# (k_new, v_new, cu_seqlens_k_new, rotation)
_NewRows = tuple[_Tensor, _Tensor, int | None, _AppendRotation | None]

# The addresses of the scales of q, k and v, and of the means of v's channels.
_Descales = tuple[int | None, int | None, int | None, int | None]

# (positions, first_position)
_Positions = tuple[int | None, int]

# (bytes, zeros) -> (address, owner). The CPU and a call that is only checked need none.
_Allocate = Callable[[int, int], tuple[int, object]]

def forward(
    device: int,
    stream: int | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    o: int,
    lse: int | None,
    descales: _Descales,
    softmax_scale: float | None,
    window: tuple[int, int, int],
    softcap: float | None,
    sm_margin: int,
    fp8: tuple[bool, int | None, str | None] | None,
    allocate: _Allocate | None,
    o_strides: Sequence[int] | None = None,
    packed: _Packed | None = None,
    sink: int | None = None,
    table: tuple[int, int] | None = None,
    qv: _Tensor | None = None,
    intervals: tuple[int, Sequence[int]] | None = None,
) -> None: ...
def forward_table(
    device: int,
    stream: int | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    window: tuple[int, int, int],
    has_softcap: bool,
    sm_margin: int,
    packed: _Packed,
    table: int | None,
    allocate: _Allocate | None,
) -> int: ...
def cached_forward(
    device: int,
    stream: int | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    o: int,
    lse: int | None,
    descales: tuple[int | None, int | None, int | None],
    softmax_scale: float | None,
    window: tuple[int, int, int],
    softcap: float | None,
    sm_margin: int,
    allocate: _Allocate | None,
    cache: _Cache,
    split_keys: int,
    o_dtype: str | None = None,
    o_strides: Sequence[int] | None = None,
    sink: int | None = None,
    new: _NewRows | None = None,
    qv: _Tensor | None = None,
) -> None: ...
def fp8_forward(
    device: int,
    stream: int | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    o: int,
    lse: int | None,
    rotation: tuple[int, int, int, int, bool, _Positions, _Positions] | None,
    hadamard_seed: int | None,
    v_channels: bool,
    softmax_scale: float | None,
    window: tuple[int, int, int],
    softcap: float | None,
    allocate: _Allocate | None,
    packed: _Packed | None = None,
) -> None: ...
def backward(
    device: int,
    stream: int | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    dout: _Tensor,
    o: int,
    lse: int,
    dlse: int | None,
    dq: int,
    dk: int,
    dv: int,
    softmax_scale: float | None,
    window: tuple[int, int, int],
    softcap: float | None,
    sm_margin: int,
    allocate: _Allocate | None,
    deterministic: bool = True,
    gradient_strides: Sequence[Sequence[int] | None] | None = None,
    packed: _Packed | None = None,
    sink: tuple[int, int] | None = None,
    o_strides: Sequence[int] | None = None,
    intervals: tuple[int, Sequence[int]] | None = None,
) -> None: ...
def quantize(
    device: int,
    stream: int | None,
    x: _Tensor,
    codes: int,
    scales: int | None,
    rotation: tuple[int, int, int, int, bool, int | None, int] | None,
    hadamard_seed: int | None,
    scale: float | None,
    heads_per_scale: int | None,
    block_rows: int | None,
    transposed: bool,
    allocate: _Allocate | None,
) -> None: ...
def quantize_channels(
    device: int,
    stream: int | None,
    x: _Tensor,
    codes: int,
    scales: int,
    mean: int,
    transposed: bool,
    allocate: _Allocate | None,
) -> None: ...
def combine(
    device: int,
    stream: int | None,
    out_partial: _Tensor,
    lse_partial: _Tensor,
    o: _Tensor,
    lse: _Tensor,
    allocate: _Allocate | None,
) -> None: ...
