"""Quantization to float8_e4m3fn, with optional rotary embedding and Hadamard transform before it, and its torch
operators `fa3::quantize` and `fa3::quantize_channels`.
"""

from typing import Any

import torch
from torch import Tensor

from . import arguments, operator, refusal, rotary

_DTYPES = (torch.float16, torch.bfloat16)
_SEEDS = 1 << 64
_FIELDS = "interleaved first_position hadamard_seed scale heads_per_scale block_rows transposed"
_NO_GRADIENT = "requires grad, and codes have no gradients"


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
) -> tuple[Tensor, Tensor]:
    """Quantizes a float16 or bfloat16 tensor to float8_e4m3fn, on torch's current stream of a Hopper GPU or on the CPU.

        y = x, rotated by its position, times M        M = diag(+-1) * Hadamard
        codes = e4m3(y / scale)                        scale = max |y| / 448 over the block, heads or tensor

    It is one kernel that reads x once. Scales of heads or of the tensor take three kernels, which read x twice.

    Arguments:
        x: (batch, seqlen, heads, head_dim), head_dim a multiple of 16 up to 256. The last stride is 1, and the others
            are multiples of 8; on the CPU any strides will do.
        cos, sin: tables of rotary embedding, (positions, rotary_dim / 2), rotary_dim a multiple of 16 up to head_dim.
            They are float32, or float16 or bfloat16, which are converted to float32. Without them nothing is rotated.
        interleaved: entries 2i and 2i + 1 are a pair (GPT-J), not i and i + rotary_dim / 2 (GPT-NeoX, Llama).
        positions: the position of the first row of each sequence, or an int32 or int64 tensor (batch, seqlen) with the
            position of each row. A row whose position is not in the tables has NaN codes, and does not count in a
            scale.
        hadamard_seed: the seed of M's signs, 0 to 2^64 - 1; no M if None. Give Q and K the same seed: then their scores
            are as without M.
        block_rows: how many rows of a head share a scale, 64 or 128.
        scale: one scale for all codes, instead of computed scales. Numbers beyond 448 * scale saturate.
        scales_of: what shares a scale: "blocks" of rows of a head, "heads", or the "tensor".
        heads_per_scale: with scales of heads, how many successive heads of a sequence share one, a divisor of heads.
            For `flash_attn_func` it is heads_q / heads_kv where x is q, and 1 where x is k or v.
        transposed: writes V's codes in the layout that FP8 matrix products read: (batch, heads, head_dim, keys), where
            keys is seqlen rounded up to a multiple of 128. Each 16 keys have the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7
            14 15. Codes at keys from seqlen on are 0.

    Returns:
        (codes, scales), both contiguous. codes is float8_e4m3fn, of x's shape or transposed. scales is float32:
        (batch, heads, ceil(seqlen / block_rows)) for blocks, (batch, heads / heads_per_scale) for heads, and one
        element for the tensor or a given scale. codes * scales is about y. The scale of zeros is 1.

    Raises:
        NotImplementedError: a tensor has a tangent (forward mode). The backward pass always raises it.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error.
    """
    if not isinstance(scales_of, str):
        raise TypeError(f"scales_of is {scales_of!r}, expected 'blocks', 'heads' or 'tensor'")
    listed, first = rotary.positions("positions", positions)
    options = (
        arguments.flag("interleaved", interleaved),
        first,
        given_seed(hadamard_seed),
        arguments.integer("block_rows", block_rows),
        None if scale is None else arguments.number("scale", scale),
        arguments.flag("transposed", transposed),
        scales_of,
        arguments.integer("heads_per_scale", heads_per_scale),
    )
    tensors = (x, *operator.given(cos, sin, listed))
    if operator.is_plain(*tensors) and not operator.needs_grad(*tensors):
        return _launch(x, cos, sin, listed, *options)
    return _traced(x, cos, sin, listed, *options)


def quantize_channels(x: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes V to float8_e4m3fn per channel, in three kernels on torch's current stream. A channel is a column of a
    head of a sequence.

        codes = e4m3((x - mean) / scale)        scale = max |x - mean| / 448 of each channel

    The part that all rows of V have in common goes into the means, and is not rounded. O has the same means and scales:
    `flash_attn_func` takes them as `v_mean` and `v_descale`.

    Arguments:
        x, transposed: as in `quantize`.

    Returns:
        (codes, scales, mean), all contiguous. codes is float8_e4m3fn, of x's shape or transposed; scales and mean are
        float32 (batch, heads, head_dim). codes * scales + mean is about x. NaN and infinities become NaN, count as 0 in
        a mean, and do not count in a scale. A mean is 0 where a number minus it would not be finite. A scale is 1 where
        all numbers equal the mean.

    Raises:
        NotImplementedError: a tensor has a tangent (forward mode). The backward pass always raises it.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error.
    """
    transposed = arguments.flag("transposed", transposed)
    if operator.is_plain(x) and not operator.needs_grad(x):
        return _launch_channels(x, transposed)
    arguments.tensor("x", x)
    refusal.derivatives("x", _NO_GRADIENT, x)
    return torch.ops.fa3.quantize_channels(x, transposed)


def given_seed(hadamard_seed: Any) -> int | None:
    """Checks a seed that a caller gave."""
    if hadamard_seed is None:
        return None
    hadamard_seed = arguments.whole("hadamard_seed", hadamard_seed)
    if not 0 <= hadamard_seed < _SEEDS:
        raise ValueError(f"hadamard_seed {hadamard_seed} is outside 0 to 2^64 - 1")
    return hadamard_seed


def _traced(x, cos, sin, positions, interleaved, first_position, hadamard_seed, *options):
    """Calls the operator, which tracers, fake tensors and other tensor subclasses need to see."""
    arguments.tensor("x", x)
    rotary.check_types(cos, sin)
    refusal.derivatives("x, cos or sin", _NO_GRADIENT, x, *operator.given(cos, sin))
    hadamard_seed = signed(hadamard_seed)
    return torch.ops.fa3.quantize(x, cos, sin, positions, interleaved, first_position, hadamard_seed, *options)


def _launch(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    first_position: int,
    hadamard_seed: int | None,
    block_rows: int,
    scale: float | None,
    transposed: bool,
    scales_of: str = "blocks",
    heads_per_scale: int = 1,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of tensors on a GPU or on the CPU. hadamard_seed is taken modulo 2^64, since an operator's
    integers are signed.
    """
    operator.refuse_tangents("x, cos or sin", *operator.given(x, cos, sin, positions))
    _check_x(x)
    _check_scaling(x, block_rows, scale, scales_of, heads_per_scale)
    rotary.check(cos, sin, interleaved, ("positions", positions, first_position, x))
    codes, scales = _codes_like(x, transposed), _scales_like(x, block_rows, scale, scales_of, heads_per_scale)
    of_heads = heads_per_scale if scales_of == "heads" else None
    of_blocks = block_rows if scales_of == "blocks" else None
    values = interleaved, first_position, seed(hadamard_seed), scale, of_heads, of_blocks, transposed
    tensors = {"x": x, "codes": codes, "scales": scales if scale is None else None}
    tensors["positions"] = rotary.positions_as_read(positions)
    operator.run("quantize", _FIELDS, values, tensors | rotary.tables(cos, sin))
    return codes, scales if scale is None else scales.fill_(scale)


def _launch_channels(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and means of a tensor on a GPU or on the CPU."""
    operator.refuse_tangents("x", x)
    _check_x(x)
    batch, _, heads, head_dim = x.shape
    codes = _codes_like(x, transposed)
    scales, mean = (x.new_empty(batch, heads, head_dim, dtype=torch.float32) for _ in range(2))
    tensors: operator.Tensors = {"x": x, "codes": codes, "scales": scales, "mean": mean}
    operator.run("quantize", "transposed", (transposed,), tensors)
    return codes, scales, mean


def _check_x(x: Tensor) -> None:
    """Refuses tensors that do not have 16 bits and four dimensions."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"x is {x.dtype}, expected torch.float16 or torch.bfloat16")
    if x.dim() != 4:
        raise ValueError(f"x has {x.dim()} dimensions, expected 4: (batch, seqlen, heads, head_dim)")


def _check_scaling(x: Tensor, block_rows: int, scale: float | None, scales_of: str, heads_per_scale: int) -> None:
    """Refuses options that contradict each other, or that do not fit x."""
    if block_rows not in (64, 128):
        raise ValueError(f"block_rows is {block_rows}, expected 64 or 128")
    if scales_of not in ("blocks", "heads", "tensor"):
        raise ValueError(f"scales_of is {scales_of!r}, expected 'blocks', 'heads' or 'tensor'")
    if scales_of != "blocks":
        if scale is not None:
            raise ValueError(f"scale is {scale} and scales_of {scales_of!r}, expected only one of them")
        if block_rows != 128:
            raise ValueError(f"block_rows {block_rows} is of scales of blocks, scales_of is {scales_of!r}")
    if scales_of != "heads" and heads_per_scale != 1:
        raise ValueError(f"heads_per_scale {heads_per_scale} is of scales of heads, scales_of is {scales_of!r}")
    if heads_per_scale < 1 or operator.differ([x.shape[2] % heads_per_scale], [0]):
        raise ValueError(f"a scale for each {heads_per_scale} heads, of which the tensor has {x.shape[2]}")


def _codes_like(x: Tensor, transposed: bool) -> Tensor:
    """A new, contiguous tensor for codes: of x's shape, or (batch, heads, head_dim, keys)."""
    batch, seqlen, heads, head_dim = x.shape
    shape = (batch, heads, head_dim, (seqlen + 127) // 128 * 128) if transposed else x.shape
    return x.new_empty(shape, dtype=torch.float8_e4m3fn)


def _scales_like(x: Tensor, block_rows: int, scale: float | None, scales_of: str, heads_per_scale: int) -> Tensor:
    """A new, contiguous tensor for scales: (batch, heads, blocks), (batch, groups of heads) or one element."""
    batch, seqlen, heads, _ = x.shape
    shape: tuple[int, ...]
    if scale is not None or scales_of == "tensor":
        shape = (1,)
    elif scales_of == "heads":
        shape = (batch, heads // heads_per_scale)
    else:
        shape = (batch, heads, (seqlen + block_rows - 1) // block_rows)
    return x.new_empty(shape, dtype=torch.float32)


def signed(hadamard_seed: int | None) -> int | None:
    """A seed as operators take it: a signed integer with the same 64 bits."""
    if hadamard_seed is None or hadamard_seed < _SEEDS // 2:
        return hadamard_seed
    return hadamard_seed - _SEEDS


def seed(hadamard_seed: int | None) -> int | None:
    """A seed as an unsigned number."""
    return None if hadamard_seed is None else hadamard_seed % _SEEDS


operator.define(
    "quantize",
    "Tensor x, Tensor? cos, Tensor? sin, Tensor? positions, bool interleaved, SymInt first_position, "
    "int? hadamard_seed, int block_rows, float? scale, bool transposed, str scales_of=\"blocks\", int heads_per_scale=1",
    "(Tensor codes, Tensor scales)",
    _launch,
)
operator.define(
    "quantize_channels",
    "Tensor x, bool transposed",
    "(Tensor codes, Tensor scales, Tensor mean)",
    _launch_channels,
)
refusal.register(f"x, cos or sin {_NO_GRADIENT}", "quantize")
refusal.register(f"x {_NO_GRADIENT}", "quantize_channels")
