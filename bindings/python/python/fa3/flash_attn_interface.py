"""FlashAttention-3's module of that name, to be imported in its place: its functions, and the pair below them that
context parallelism calls, in which gradients are the caller's business. `flash_attn_varlen_qkvpacked_func` is
flash-attn 2's, which FlashAttention-3 has not.
"""

from typing import Any

import torch
from torch import Tensor

from . import arguments, gradient, operator, varlen_operator
from .attention import flash_attn_func, flash_attn_qkvpacked_func
from .combine import flash_attn_combine
from .kvcache import flash_attn_with_kvcache, get_scheduler_metadata
from .varlen import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: None = None,
    v_new: None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: None = None,
    kv_batch_idx: None = None,
    leftpad_k: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    seqlens_rotary: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, None, None]:
    """O and LSE of a dense batch, as `flash_attn_func` has them, or with cu_seqlens of packed sequences, as
    `flash_attn_varlen_func` has them. Arguments and their order are FlashAttention-3's.

    Arguments:
        q, k, v, qv, softmax_scale, causal, attention_chunk, softcap, sm_margin: as of these functions.
        q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as of these functions. A
            dense batch has no seqused.
        max_seqlen_q, max_seqlen_k: hints where there are cu_seqlens; a dense batch needs none.
        out_: a tensor for O, as `out` of these functions.
        window_size_left, window_size_right: both sides of window_size.
        rotary_interleaved: of a rotation, which there is none of.
        out, window_size: names of out_ and of both sides of the window in earlier versions of FlashAttention-3.
        others: None, or what changes nothing.

    Returns: (O, LSE, None, None). FlashAttention-3 has parts of split keys in place of None.

    Raises:
        NotImplementedError: an argument that is not supported yet, by its name.
        TypeError, ValueError, RuntimeError: as those functions.
    """
    arguments.refuse(
        k_new=k_new is not None,
        v_new=v_new is not None,
        cu_seqlens_k_new=cu_seqlens_k_new is not None,
        page_table=page_table is not None,
        kv_batch_idx=kv_batch_idx is not None,
        leftpad_k=leftpad_k is not None,
        rotary_cos=rotary_cos is not None,
        rotary_sin=rotary_sin is not None,
        seqlens_rotary=seqlens_rotary is not None,
        scheduler_metadata=scheduler_metadata is not None,
    )
    arguments.flag("rotary_interleaved", rotary_interleaved)
    if out is not None and out_ is not None:
        raise ValueError("there are out and out_, expected one of them")
    options: dict[str, Any] = dict(
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=_window(window_size_left, window_size_right, window_size),
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        return_attn_probs=True,
        out=out_ if out is None else out,
    )
    longest = arguments.hint("max_seqlen_q", max_seqlen_q), arguments.hint("max_seqlen_k", max_seqlen_k)
    if _is_packed(cu_seqlens_q, cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k):
        lists: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k)
        o, lse = flash_attn_varlen_func(q, k, v, *lists, **options)
    else:
        o, lse = flash_attn_func(q, k, v, **options)
    return o, lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    attention_chunk: int = 0,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Writes the gradients of q, k and v to dq, dk and dv, or to new tensors where these are None. Arguments and their
    order are FlashAttention-3's.

    Arguments:
        dout: the gradient of O, with any strides. One that kernels cannot read is copied.
        q, k, v: as given to the forward pass.
        out, softmax_lse: O and LSE: those of the forward pass, or, where keys are a part of all keys, those of all.
        cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k: as given to the forward pass, its
            seqused being sequed.
        dq, dk, dv: tensors of the shapes and dtypes of q, k and v, over none of the others. They may be slices of one
            tensor that have no element in common, such as (total, 3, heads, head_dim). The last stride is 1, and the
            others are multiples of 8 that keep rows apart.
        softmax_scale, window_size_left, window_size_right, softcap, sm_margin: as given to the forward pass.
        is_causal: its causal.
        deterministic: as of `flash_attn_func`.
        causal, window_size: names of is_causal and of both sides of the window in earlier versions of FlashAttention-3.
        attention_chunk: as given to the forward pass. FlashAttention-3 has no gradients of chunks.

    Returns: (dq, dk, dv, None). FlashAttention-3 has rowsum(dO * O) in place of None, and its later versions return
        that alone.

    Raises:
        NotImplementedError: an argument that is not supported yet, by its name; or a tensor with a tangent.
        TypeError, ValueError: arguments that make no sense, or that no kernel takes.
        RuntimeError: the driver's refusals.
    """
    is_causal = arguments.flag("is_causal", is_causal) or arguments.flag("causal", causal)
    window = _window(window_size_left, window_size_right, window_size)
    options = (
        *arguments.scores(softmax_scale, is_causal, window, attention_chunk, softcap),
        arguments.integer("sm_margin", sm_margin),
        arguments.flag("deterministic", deterministic),
    )
    longest = arguments.hint("max_seqlen_q", max_seqlen_q), arguments.hint("max_seqlen_k", max_seqlen_k)
    lists: dict[str, Any] = {}
    if _is_packed(cu_seqlens_q, cu_seqlens_k, sequed_q=sequed_q, sequed_k=sequed_k):
        lists = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sequed_q=sequed_q, sequed_k=sequed_k)
    tensors = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    for name, x in (tensors | dict(dq=dq, dk=dk, dv=dv) | lists).items():
        if x is not None or name in tensors or name.startswith("cu_seqlens"):
            arguments.tensor(name, x)
    outputs = dict(
        dq=gradient.gradient_like(q) if dq is None else dq,
        dk=gradient.gradient_like(k) if dk is None else dk,
        dv=gradient.gradient_like(v) if dv is None else dv,
    )
    given = (*tensors.values(), None, *lists.values(), *(longest if lists else ()), *options)
    if operator.is_plain(*operator.given(*tensors.values(), *lists.values(), *outputs.values())):
        write = varlen_operator.launch_backward_into if lists else gradient.launch_into
    else:
        write = torch.ops.fa3.varlen_backward_out if lists else torch.ops.fa3.backward_out
    write(*given, **outputs)
    return outputs["dq"], outputs["dk"], outputs["dv"], None


def _window(left: Any, right: Any, both: Any) -> Any:
    """The window, of which either the sides are given or both at once."""
    if both is None:
        return left, right
    if (left, right) != (-1, -1):
        raise ValueError(f"window_size is {both}, and its sides are {left} and {right}: expected one of them")
    return both


def _is_packed(cu_seqlens_q: Any, cu_seqlens_k: Any, **seqused: Any) -> bool:
    """Whether sequences are packed. Those of a dense batch are in use in full."""
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        return True
    for name, given in seqused.items():
        if given is not None:
            raise NotImplementedError(f"{name} without cu_seqlens is not supported yet")
    return False
