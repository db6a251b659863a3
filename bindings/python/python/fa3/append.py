"""New rows of a cache of keys and values: the torch operator `fa3::append`, which writes to the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _fa3, operator
from .cache import check_table, dense_list, dense_table, in_batch
from .sequences import check_ends, check_used


class Rotation(NamedTuple):
    """The arguments of `fa3::append` that say how new keys and queries are rotated, in this order."""

    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None
    interleaved: bool
    window_left: int
    window_right: int

    def check(self, k: Tensor, count: int) -> None:
        """Refuses what the extension module does not see, since it is given addresses."""
        cos, sin, listed, *_ = self
        if cos is None or sin is None:
            if cos is not sin:
                raise ValueError("there is one of rotary_cos and rotary_sin, expected both or none")
            if listed is not None:
                raise ValueError("rotary_seqlens is of a rotation, which needs rotary_cos and rotary_sin")
            return
        for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
            if table.dtype not in (torch.float32, k.dtype):
                raise TypeError(f"{name} is {table.dtype}, expected torch.float32 or {k.dtype}")
        if cos.dim() != 2 or operator.known(cos.shape) != operator.known(sin.shape) or cos.dtype != sin.dtype:
            given = f"rotary_cos is {cos.dtype} {tuple(cos.shape)} and rotary_sin {sin.dtype} {tuple(sin.shape)}"
            raise ValueError(f"{given}, expected both alike: (positions, rotary_dim / 2)")
        if listed is not None:
            check_used("rotary_seqlens", listed, count)


def launch(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    q: Tensor | None,
    seqused_k: Tensor,
    page_table: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    cu_seqlens_q: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_seqlens: Tensor | None,
    interleaved: bool,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor]:
    """The rows of each sequence afterwards, and the rotated queries, or an empty tensor if there is no q. Keys and
    values are written to the cache.
    """
    tensors = operator.given(k_cache, v_cache, k, v, q)
    refuse_grad(*tensors, *operator.given(rotary_cos, rotary_sin))
    operator.refuse_tangents("k_cache, v_cache, k, v or q", *tensors)
    rotation = Rotation(rotary_cos, rotary_sin, rotary_seqlens, interleaved, window_left, window_right)
    lists = operator.given(seqused_k, page_table, cu_seqlens_k_new, cu_seqlens_q, *rotation[:3])
    operator.check_places(*tensors, *lists)
    check(k_cache, v_cache, k, v, q, seqused_k, page_table, cu_seqlens_k_new, cu_seqlens_q, rotation)
    device, count = k.get_device(), seqused_k.shape[0]
    # Copies are kept until the call is over. Rows behind a part of a table have no place.
    k, v, used = operator.aligned(k), operator.aligned(v), dense_list(seqused_k)
    table = None if page_table is None else dense_table(page_table, False)
    ends_k = None if cu_seqlens_k_new is None else dense_list(cu_seqlens_k_new)
    ends_q = None if cu_seqlens_q is None else dense_list(cu_seqlens_q)
    after, rotated = outputs(seqused_k, k, q)
    queries = None
    if q is not None:
        q = operator.aligned(q)
        of_q = None if ends_q is None else ends_q.data_ptr()
        queries = in_batch(operator.raw(q)), rotated.data_ptr(), of_q, (window_left, window_right)
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        cos, sin = operator.dense(rotary_cos), operator.dense(rotary_sin)
        listed = None if rotary_seqlens is None else dense_list(rotary_seqlens)
        address = None if listed is None else listed.data_ptr()
        rows, pairs = cos.shape
        rotary = operator.name_of(cos.dtype), cos.data_ptr(), sin.data_ptr(), rows, 2 * pairs, interleaved, address
    pages = None if table is None else (table.data_ptr(), table.shape[1])
    _fa3.append(
        device,
        operator.current_stream(device),
        in_batch(operator.raw(k)),
        in_batch(operator.raw(v)),
        operator.raw(k_cache),
        operator.raw(v_cache),
        after.data_ptr(),
        (count, used.data_ptr(), pages, None if ends_k is None else ends_k.data_ptr()),
        queries,
        rotary,
        operator.workspace_for(k),
    )
    return after, rotated


def append(
    cache: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    q: Tensor | None,
    lists: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    rotation: Rotation,
) -> tuple[Tensor, Tensor]:
    """`launch` by whichever way the tensors need. Lists are seqused_k, page_table, cu_seqlens_k_new and cu_seqlens_q."""
    tensors = (*cache, *new, *operator.given(q, *lists, *rotation[:3]))
    refuse_grad(*tensors)
    if operator.is_plain(*tensors):
        return launch(*cache, *new, q, *lists, *rotation)
    if operator.is_transformed():
        raise NotImplementedError("k and v are not supported inside of torch.func's transforms: the cache is written")
    return torch.ops.fa3.append(*cache, *new, q, *lists, *rotation)


def refuse_grad(*tensors: Tensor) -> None:
    """Refuses tensors of which autograd wants to know: the cache is written, and has no gradient."""
    if operator.needs_grad(*tensors):
        sentence = "appending k and v to a cache has no gradients, but one of the arguments requires grad"
        raise NotImplementedError(sentence)


def outputs(seqused_k: Tensor, k: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
    """New tensors for the rows of each sequence afterwards, and for the rotated queries."""
    return seqused_k.new_empty(seqused_k.shape), k.new_empty(0 if q is None else q.shape)


def check(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    q: Tensor | None,
    seqused_k: Tensor,
    page_table: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    cu_seqlens_q: Tensor | None,
    rotation: Rotation,
) -> None:
    """Checks what the extension module does not see: ranks, and types and shapes of the lists."""
    if seqused_k.dim() != 1:
        raise ValueError(f"seqused_k is {tuple(seqused_k.shape)}, expected (sequences,)")
    count = seqused_k.shape[0]
    check_used("seqused_k", seqused_k, count)
    if page_table is not None:
        check_table(page_table, count)
    if not k_cache.dim() == v_cache.dim() == 4:
        given = f"k_cache has {k_cache.dim()} and v_cache {v_cache.dim()} dimensions"
        raise ValueError(f"{given}, expected 4: (batch or pages, rows, heads_kv, head_dim)")
    _check_rank(cu_seqlens_k_new, "cu_seqlens_k_new", count, k=k, v=v)
    if q is not None:
        _check_rank(cu_seqlens_q, "cu_seqlens_q", count, q=q)
        if rotation.rotary_cos is None:
            raise ValueError("q is rotated, and there is no rotary_cos")
    rotation.check(k, count)


def _check_rank(ends: Tensor | None, name: str, count: int, **tensors: Tensor) -> None:
    """They have three dimensions if there is a list of where their sequences end, else four."""
    rank, what = 4, f"(batch, rows, heads, head_dim), as there is no {name}"
    if ends is not None:
        rank, what = 3, f"(total, heads, head_dim), as there is {name}"
        check_ends(name, ends)
        if operator.known(ends.shape) != operator.known([count + 1]):
            raise ValueError(f"{name} is of {ends.shape[0] - 1} sequences, expected {count}")
    for of, x in tensors.items():
        if x.dim() != rank:
            raise ValueError(f"{of} has {x.dim()} dimensions, expected {rank}: {what}")


operator.library.define(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? q, Tensor seqused_k, "
    "Tensor? page_table, Tensor? cu_seqlens_k_new, Tensor? cu_seqlens_q, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? rotary_seqlens, bool interleaved, SymInt window_left, SymInt window_right) "
    "-> (Tensor seqused_after, Tensor q_rotated)",
    tags=operator.TAGS,
)
for _key in ("CUDA", "CPU"):
    operator.library.impl("append", launch, _key)
