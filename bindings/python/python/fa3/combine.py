"""The merge of partial results of attention, and its torch operators `fa3::combine` and `fa3::combine_out`."""

from typing import Any

import torch
from torch import Tensor

from . import arguments, operator, refusal

_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
_NO_GRADIENT = "requires grad, and a merge has no gradients"


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges O and LSE of attention over disjoint sets of keys (splits), on torch's current stream of a Hopper GPU or
    on the CPU. Arguments and their order are FlashAttention-3's.

        LSE = ln sum_s exp(LSE_s)        O = sum_s exp(LSE_s - LSE) O_s        s over the splits

    A split whose LSE is -inf has seen no key, and its O is ignored, even NaN. If no split has seen a key, O is 0 and
    LSE is -inf. Sums are float32, and results have the same bits in every run.

    Arguments:
        out_partial: O of the splits, (num_splits, batch, seqlen, heads, head_dim_v), or for packed sequences
            (num_splits, total, heads, head_dim_v): float32, float16 or bfloat16. head_dim_v is a multiple of 8 up to
            512, or of 4 if out_partial and O are float32. The last stride is 1, and the others are multiples of 16
            bytes; on the CPU any strides will do.
        lse_partial: LSE of the splits, (num_splits, batch, seqlen, heads) or (num_splits, total, heads), float32,
            natural logarithms, with any strides. The LSE of `flash_attn_func` must be transposed, as a view.
        out: a tensor for O, of its shape, dtype and device, that overlaps no other tensor. The last stride is 1, and
            the others are multiples of 16 bytes that keep rows apart.
        out_dtype: the dtype of O: float32, float16 or bfloat16; out_partial's if None.

    Returns: (O, LSE). O is out, or a new contiguous tensor (batch, seqlen, heads, head_dim_v) or (total, heads,
        head_dim_v). LSE is float32 (batch, seqlen, heads) or (total, heads), as FlashAttention-3 has it: a view of a
        contiguous tensor (batch, heads, seqlen) or (heads, total).

    Raises:
        NotImplementedError: a tensor has a tangent (forward mode). The backward pass always raises it.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error; or out is given, and a tensor requires grad.
    """
    if out is not None:
        arguments.tensor("out", out)
        return out, _into(out_partial, lse_partial, out_dtype, out)
    if operator.is_plain(out_partial, lse_partial) and not operator.needs_grad(out_partial, lse_partial):
        return _launch(out_partial, lse_partial, out_dtype)
    _check_types(out_partial, lse_partial)
    refusal.derivatives("out_partial or lse_partial", _NO_GRADIENT, out_partial, lse_partial)
    return torch.ops.fa3.combine(out_partial, lse_partial, out_dtype)


def _into(out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None, out: Tensor) -> Tensor:
    """Returns LSE, and writes O to `out`."""
    _check_types(out_partial, lse_partial)
    _refuse_grad(out, out_partial, lse_partial)
    if operator.is_plain(out, out_partial, lse_partial):
        lse = _launch_into(out_partial, lse_partial, out_dtype, o=out)
        operator.tell_autograd(out)
        return lse
    if operator.is_transformed():
        raise NotImplementedError("out is not supported inside of torch.func's transforms")
    return torch.ops.fa3.combine_out(out_partial, lse_partial, out_dtype, o=out)


def _launch(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """O and LSE of tensors on a GPU or on the CPU. O is written to `out`, if it is given."""
    operator.refuse_tangents("out_partial or lse_partial", out_partial, lse_partial)
    check(out_partial, lse_partial, out, out_dtype)
    o = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype or out_partial.dtype) if out is None else out
    # LSE is contiguous as (..., heads, rows), and returned transposed.
    *batch, rows, heads = lse_partial.shape[1:]
    lse = lse_partial.new_empty(*batch, heads, rows, dtype=torch.float32).transpose(-1, -2)
    tensors: operator.Tensors = {"out_partial": out_partial, "lse_partial": lse_partial, "o": o, "lse": lse}
    operator.run("combine", "", (), tensors)
    return o, lse


def _launch_into(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None = None, *, o: Tensor
) -> Tensor:
    """Returns LSE, and writes O to `o`."""
    _refuse_grad(o, out_partial, lse_partial)
    _, lse = _launch(out_partial, lse_partial, out_dtype, out=o)
    return lse


def _refuse_grad(*tensors: Tensor) -> None:
    operator.refuse_grad(*tensors, function="flash_attn_combine")


def _check_types(out_partial: Any, lse_partial: Any) -> None:
    arguments.tensor("out_partial", out_partial)
    arguments.tensor("lse_partial", lse_partial)


def check(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Refuses arguments that the extension module does not check."""
    _check_types(out_partial, lse_partial)
    if out_dtype is not None and out_dtype not in _OUTPUTS:
        expected = "torch.float32, torch.float16 or torch.bfloat16"
        raise ValueError(f"out_dtype is {out_dtype}, expected {expected}")
    if out_partial.dim() not in (4, 5) or lse_partial.dim() != out_partial.dim() - 1:
        dims = f"out_partial has {out_partial.dim()} and lse_partial {lse_partial.dim()} dimensions"
        what = "(num_splits, batch, seqlen, heads, head_dim_v) and (num_splits, batch, seqlen, heads)"
        raise ValueError(f"{dims}, expected 5 and 4: {what}, or 4 and 3 of packed sequences")
    if out is not None:
        what = "(batch, seqlen, heads, head_dim_v)" if out_partial.dim() == 5 else "(total, heads, head_dim_v)"
        dtype = out_dtype or out_partial.dtype
        operator.check_out_is(out, out_partial, tuple(out_partial.shape[1:]), what, dtype)


_ARGUMENTS = "Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype=None"
operator.define("combine", _ARGUMENTS, "(Tensor o, Tensor lse)", _launch)
operator.define("combine_out", f"{_ARGUMENTS}, *, Tensor(a!) o", "Tensor lse", _launch_into)
refusal.register(f"out_partial or lse_partial {_NO_GRADIENT}", "combine")
