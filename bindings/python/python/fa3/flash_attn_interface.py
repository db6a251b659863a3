"""A drop-in replacement for FlashAttention-3's module of this name: its functions, and `_flash_attn_forward` and
`_flash_attn_backward`, which context parallelism calls and which leave autograd to the caller.
`flash_attn_varlen_qkvpacked_func` is flash-attn 2's; FlashAttention-3 does not have it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import arguments, gradient, operator, varlen_operator
from .attention import flash_attn_func, flash_attn_qkvpacked_func
from .combine import flash_attn_combine
from .kvcache import flash_attn_with_kvcache, get_scheduler_metadata
from .sequences import Batch
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
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: Tensor | None = None,
    window_size: Sequence[int | None] | None = None,
) -> tuple[Tensor, Tensor, None, None]:
    """Computes O and LSE of a dense batch as `flash_attn_func` does, of packed sequences as `flash_attn_varlen_func`
    does, or over a cache as `flash_attn_with_kvcache` does. Arguments and their order are FlashAttention-3's.

    Arguments:
        q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, causal, attention_chunk, softcap, num_splits,
            pack_gqa, sm_margin: as in these functions.
        cu_seqlens_q, cu_seqlens_k: where sequences begin and end. A tensor without them is a dense batch.
        seqused_q, seqused_k: how many rows of each sequence are in use.
        max_seqlen_q, max_seqlen_k: hints where there are cu_seqlens; a dense batch needs none.
        page_table, kv_batch_idx, leftpad_k: page_table, cache_batch_idx and cache_leftpad of `flash_attn_with_kvcache`.
            If one of them is given, or seqused_k without cu_seqlens_k, then k and v are a cache, seqused_k is
            cache_seqlens, and there are no gradients.
        k_new, v_new, cu_seqlens_k_new, rotary_cos, rotary_sin, seqlens_rotary, rotary_interleaved: new rows that are
            first written to k and v, and their rotation. `flash_attn_with_kvcache` names them k, v, rotary_seqlens and
            so on.
        out_: a tensor for O, as `out` of these functions.
        window_size_left, window_size_right: both sides of window_size.
        scheduler_metadata: as in `flash_attn_varlen_func` where q and k are packed; ignored elsewhere, where nothing
            needs it.
        out, window_size: names of out_ and of both sides of the window in earlier versions of FlashAttention-3.

    Returns: (O, LSE, None, None). FlashAttention-3 returns its partial O and LSE in place of None.

    Raises:
        NotImplementedError, TypeError, ValueError, RuntimeError: as these functions.
    """
    if out is not None and out_ is not None:
        raise ValueError("there are out and out_, expected one of them")
    arguments.flag("rotary_interleaved", rotary_interleaved)
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
        out=out_ if out is None else out,
    )
    longest = arguments.hint("max_seqlen_q", max_seqlen_q), arguments.hint("max_seqlen_k", max_seqlen_k)
    of_cache = dict(page_table=page_table, kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k)
    of_cache |= dict(k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new)
    of_cache |= dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    names = [name for name, x in of_cache.items() if x is not None]
    if cu_seqlens_k is not None and names:
        raise ValueError(f"there are cu_seqlens_k and {names[0]}, which is of a cache: expected one of them")
    if names or (cu_seqlens_k is None and seqused_k is not None):
        o, lse, *_ = flash_attn_with_kvcache(
            q,
            k,
            v,
            k_new,
            v_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=longest[0],
            rotary_seqlens=seqlens_rotary,
            rotary_interleaved=rotary_interleaved,
            return_softmax_lse=True,
            seqused_q=seqused_q,
            **options,
        )
    elif any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, seqused_q)):
        lists: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k)
        metadata = None if cu_seqlens_q is None or cu_seqlens_k is None else scheduler_metadata
        options |= dict(return_attn_probs=True, scheduler_metadata=metadata)
        o, lse = flash_attn_varlen_func(q, k, v, *lists, **options)
    else:
        o, lse = flash_attn_func(q, k, v, **options, return_attn_probs=True)
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
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    softcap: float | None = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    attention_chunk: int | None = 0,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Writes the gradients of q, k and v to dq, dk and dv, or to new tensors where these are None. Arguments and their
    order are FlashAttention-3's.

    Arguments:
        dout: the gradient of O, with any strides. It is copied if kernels cannot read its strides.
        q, k, v: as given to the forward pass.
        out, softmax_lse: O and LSE of the forward pass. If k and v are only a part of all keys, give O and LSE over all
            keys.
        cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k: as given to the forward pass,
            where sequed is named seqused.
        dq, dk, dv: tensors of the shapes and dtypes of q, k and v that overlap no other tensor. They may be slices
            of one tensor without a common element, such as (total, 3, heads, head_dim). The last stride is 1, and
            the others are multiples of 8 that keep rows apart. In a dense batch with sequed, sequences must be
            adjacent in memory.
        softmax_scale, window_size_left, window_size_right, softcap, sm_margin: as given to the forward pass.
        is_causal: causal of the forward pass.
        deterministic: as in `flash_attn_func`.
        causal, window_size: names of is_causal and of both sides of the window in earlier versions of
            FlashAttention-3.
        attention_chunk: as given to the forward pass. FlashAttention-3 has no gradients with chunks.

    Returns: (dq, dk, dv, None). FlashAttention-3 has rowsum(dO * O) in place of None, and its later versions return
        only that sum.

    Raises:
        NotImplementedError: a tensor has a tangent.
        TypeError, ValueError: an argument is invalid, or no kernel supports it.
        RuntimeError: the driver reports an error.
    """
    is_causal = arguments.flag("is_causal", is_causal) or arguments.flag("causal", causal)
    window = _window(window_size_left, window_size_right, window_size)
    options = (
        *arguments.scores(softmax_scale, is_causal, window, attention_chunk, softcap),
        arguments.integer("sm_margin", sm_margin),
        arguments.flag("deterministic", deterministic),
    )
    longest = arguments.hint("max_seqlen_q", max_seqlen_q), arguments.hint("max_seqlen_k", max_seqlen_k)
    tensors = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    lists = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sequed_q=sequed_q, sequed_k=sequed_k)
    outputs = dict(dq=dq, dk=dk, dv=dv)
    for name, x in (tensors | outputs | lists).items():
        if x is not None or name in tensors:
            arguments.tensor(name, x)
    batches: dict[str, Batch] = {}
    if any(x is not None for x in lists.values()):
        # If a list is given, the sequences of a dense batch are computed as packed sequences.
        for like, names in (("q", ("q", "dout", "out")), ("k", ("k", "v"))):
            if lists[f"cu_seqlens_{like}"] is None:
                batch = Batch.of(tensors[like], like)
                lists[f"cu_seqlens_{like}"] = batch.ends
                tensors |= {name: batch.rows(tensors[name], name) for name in names}
                for name in ("dq",) if like == "q" else ("dk", "dv"):
                    batches[name] = batch
                    if outputs[name] is not None:
                        outputs[name] = batch.rows_of_output(outputs[name], name)
        if "dq" in batches:
            tensors["softmax_lse"] = batches["dq"].rows_of_lse(softmax_lse, "softmax_lse")
    else:
        lists = {}
    likes = dict(dq=tensors["q"], dk=tensors["k"], dv=tensors["v"])
    written = {name: gradient.gradient_like(likes[name]) if x is None else x for name, x in outputs.items()}
    given = (*tensors.values(), None, *lists.values(), *(longest if lists else ()), *options)
    if operator.is_plain(*operator.given(*tensors.values(), *lists.values(), *written.values())):
        write = varlen_operator.launch_backward_into if lists else gradient.launch_into
        write(*given, **written)
        operator.tell_autograd(*written.values())
    elif operator.is_transformed():
        raise NotImplementedError("_flash_attn_backward is not supported inside of torch.func's transforms")
    else:
        write = torch.ops.fa3.varlen_backward_out if lists else torch.ops.fa3.backward_out
        write(*given, **written)
    new = {name: batches[name].of_rows(x) if name in batches else x for name, x in written.items()}
    return (new["dq"] if dq is None else dq, new["dk"] if dk is None else dk, new["dv"] if dv is None else dv, None)


def _window(left: Any, right: Any, both: Any) -> Any:
    """The window, given as its two sides or as a pair."""
    if both is None:
        return left, right
    if not {left, right} <= {-1, None}:
        raise ValueError(f"window_size is {both}, and its sides are {left} and {right}: expected one of them")
    return both
