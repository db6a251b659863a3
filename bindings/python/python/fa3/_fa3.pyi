__version__: str

# (dtype, address, shape, strides)
_Tensor = tuple[str, int, tuple[int, int, int, int], tuple[int, int, int, int]]

def forward(
    device: int,
    stream: int,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    o: int,
    lse: int | None,
    descales: tuple[int | None, int | None, int | None, int | None],
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float | None,
    sm_margin: int,
    fp8: tuple[bool, int | None, str | None] | None,
    workspace: tuple[int, int] | None,
) -> tuple[int, int] | None: ...
def backward(
    device: int,
    stream: int,
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
    window: tuple[int, int],
    softcap: float | None,
    sm_margin: int,
    workspace: tuple[int, int] | None,
    deterministic: bool = True,
) -> tuple[int, int] | None: ...
def quantize(
    device: int,
    stream: int,
    x: _Tensor,
    codes: int,
    scales: int | None,
    rotation: tuple[int, int, int, int, bool, int | None, int] | None,
    hadamard_seed: int | None,
    scale: float | None,
    heads_per_scale: int | None,
    block_rows: int | None,
    transposed: bool,
    workspace: tuple[int, int] | None,
) -> tuple[int, int] | None: ...
def quantize_channels(
    device: int,
    stream: int,
    x: _Tensor,
    codes: int,
    scales: int,
    mean: int,
    transposed: bool,
    workspace: tuple[int, int] | None,
) -> tuple[int, int] | None: ...
