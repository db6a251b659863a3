"""Masks as intervals of keys: the tensors that `flash_attn_func` takes as `intervals`.

    import fa3

    intervals = fa3.masks.document(ids, causal=True)
    out = fa3.flash_attn_func(q, k, v, intervals=intervals)

A mask is one int32 tensor (batch or 1, heads or 1, seqlen_q, 2 n), where n is 1 or 2. Its last axis has start0, end0
and with n = 2 start1, end1: row i sees the keys j with start0 <= j < end0 or start1 <= j < end1. The first two axes
broadcast over the batch and the heads of q.

A mask of packed sequences has no batch axis: it is (heads or 1, total_q, 2 n), as `flash_attn_varlen_func` and
`flash_attn_with_kvcache` take it, and counts keys from the first key of the row's sequence. `packed` makes what takes
the place of seqlen_q and seqlen_kv:

    rows, keys = fa3.masks.packed(cu_seqlens_q, q.shape[0], seqused_k=cache_seqlens)
    intervals = fa3.masks.sliding_window_with_sink(rows, keys, 1023, 0, 4)

All functions here return contiguous tensors. Their intervals lie within 0 and seqlen_kv, in order, with at least one
key between the two intervals of a row. A row that sees no key has zeros. If a row of a mask with n = 2 has one
interval, start1 and end1 are end0.

The last row is aligned with the last key, as in all of this package: row i has position i + seqlen_kv - seqlen_q.

Make a mask once for all layers of a step, outside of compiled code. In a trace, and while a CUDA graph is captured,
a function that has to look at numbers cannot raise: it asserts when the trace or the graph runs.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import arguments

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "PackedRows",
    "block_sparse",
    "causal",
    "chunked",
    "document",
    "document_from_cu_seqlens",
    "from_dense",
    "from_mask_mod",
    "intersection",
    "packed",
    "padding",
    "prefix_lm",
    "sliding_window",
    "sliding_window_with_sink",
    "to_dense",
    "tree_words",
    "union",
    "with_spans",
    "within_sequences",
]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# How many elements of a mask are evaluated at once. A mask function may make several int64 tensors of this size.
_AT_ONCE = 2**22


class PackedRows(NamedTuple):
    """The rows of packed sequences, which take the place of seqlen_q. Tensors are int64 (1, total_q)."""

    # The sequence of each row; for rows that have none, the number of sequences.
    sequence: Tensor
    # The key with which a row is aligned, counted in its sequence. Negative if a sequence has more rows than keys.
    position: Tensor
    # Where the keys of the row's sequence begin in packed keys.
    first_key: Tensor
    # The number of sequences.
    sequences: int
    # How many keys a sequence may have, if that is known.
    max_seqlen_k: int | None


def packed(
    cu_seqlens_q: Tensor,
    total_q: int,
    *,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[PackedRows, Tensor]:
    """Finds the rows of packed sequences, and how many keys the sequence of each row has. Functions of this module that
    take both in the place of seqlen_q and seqlen_kv make packed masks, (heads or 1, total_q, 2 n). The host waits for
    nothing.

    A dense q over a cache has cu_seqlens_q of equal lengths, and takes a mask (1, total_q, 2 n) as a view (batch, 1,
    seqlen_q, 2 n).

    Arguments:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as in `flash_attn_varlen_func`. If cu_seqlens_k is None, keys
            are packed as rows are. Over a cache seqused_k counts all keys of a sequence behind its left padding, also
            the rows that the call appends.
        total_q: the number of rows of q.
        max_seqlen_k: how many keys a sequence may have. `from_mask_mod` needs it in a trace.

    Returns: the rows, and the number of keys, int64 (1, total_q). Rows that have no sequence or are not in use have no
        keys, and see none.

    Raises:
        TypeError, ValueError: a list has another type, or another number of elements than cu_seqlens_q has.
    """
    sequences = _check_ends("cu_seqlens_q", cu_seqlens_q)
    given = dict(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)
    for name, x in given.items():
        if x is not None:
            _check_list(name, x)
            count = sequences + name.startswith("cu")
            if x.shape[0] != count:
                raise ValueError(f"{name} has {x.shape[0]} elements, expected {count} beside cu_seqlens_q")
    row = torch.arange(_size("total_q", total_q), device=cu_seqlens_q.device)[None]
    ends_q = cu_seqlens_q.to(torch.int64)
    ends_k = ends_q if cu_seqlens_k is None else cu_seqlens_k.to(torch.int64)
    sequence = (torch.searchsorted(ends_q, row, right=True) - 1) % ends_q.shape[0]
    used = ends_q.diff() if seqused_q is None else seqused_q.to(torch.int64)
    lengths = ends_k.diff() if seqused_k is None else seqused_k.to(torch.int64)
    first, used, first_key, lengths = (_at(x, sequence) for x in (ends_q[:-1], used, ends_k[:-1], lengths))
    keys = torch.where(row - first < used, lengths, 0)
    return PackedRows(sequence, row - first + keys - used, first_key, sequences, max_seqlen_k), keys


def from_mask_mod(
    mask_mod: "MaskMod | BlockMask",
    batch: int | None = None,
    heads: int | None = None,
    seqlen_q: int | PackedRows | None = None,
    seqlen_kv: int | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Makes intervals from a mask function of FlexAttention, which is evaluated for every row and key; or from a
    `BlockMask`, which needs no other argument. `within_sequences` makes packed masks from masks of all packed rows and
    keys.

    4 million elements are evaluated at a time, and the host waits for the result. In a trace all are evaluated at once.

    Arguments:
        mask_mod: gets b, h, q_idx and kv_idx, int64 tensors without dimensions, and returns a bool tensor without
            dimensions: whether row q_idx sees key kv_idx. It is called under `torch.vmap`, and in a trace with tensors
            of four dimensions that broadcast. Tensors that it captures are on the same device, and it may index them
            with its arguments.
        batch, heads: the number of batch entries, and of heads of q. None makes one mask that holds for all of them.
        seqlen_q, seqlen_kv: the number of rows, and of keys; or the results of `packed`. Then b is the sequence of a
            row, q_idx the key of the sequence with which it is aligned, and kv_idx counts the sequence's keys.
        device: the device of the result; torch's default device if None.

    Returns: int32 (batch or 1, heads or 1, seqlen_q, 2 n), packed (heads or 1, total_q, 2 n). An axis is 1 where None
        is given, or where the mask does not change along it. n is 1 if no row has two intervals. In a trace n is 2, and
        an axis is 1 where mask_mod ignores its index.

    Raises:
        ValueError: a row has three or more intervals, and the message names the first such row; or a number is
            negative.
        TypeError: mask_mod does not return a bool tensor, or an argument has a wrong type.
    """
    if hasattr(mask_mod, "kv_num_blocks"):
        if any(x is not None for x in (batch, heads, seqlen_q, seqlen_kv, device)):
            raise ValueError("there are sizes or a device beside a BlockMask, which knows its own")
        blocks: Any = mask_mod
        batch, heads, seqlen_q, seqlen_kv = blocks.shape
        mask_mod, device = _of_blocks(blocks), blocks.kv_num_blocks.device
    if isinstance(seqlen_q, PackedRows):
        if batch is not None or device is not None:
            raise ValueError("there is a batch or a device beside packed rows, which know their own")
        mask_mod, seqlen_q, seqlen_kv, device = _of_sequences(mask_mod, seqlen_q, seqlen_kv)
        return from_mask_mod(mask_mod, None, heads, seqlen_q, seqlen_kv, device)[0]
    batch, heads = (1 if x is None else _size(name, x) for name, x in (("batch", batch), ("heads", heads)))
    rows, keys = _size("seqlen_q", seqlen_q), _size("seqlen_kv", seqlen_kv)
    if not batch * heads * rows * keys:
        return torch.zeros(1, 1, rows, 2, dtype=torch.int32, device=device)
    if torch.compiler.is_compiling():
        return _traced(mask_mod, batch, heads, rows, keys, device)
    intervals, counts = _found(mask_mod, batch, heads, rows, keys, device)

    def sides(at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        b, h, row = at
        first, last = _sides(_seen(mask_mod, b, h, row, 1, keys, device))
        return first[0].nonzero()[:, 0], last[0].nonzero()[:, 0]

    _check_counts(counts, sides)
    return _shrunk(intervals[..., : 2 * max(int(counts.max()), 1)])


def of_blocks(mask: "BlockMask") -> tuple[Tensor, MaskMod | None]:
    """The intervals of a BlockMask, as `from_mask_mod` makes them. Where rows have three or more, the intervals are
    from the first key to the last, and the second result is a mask function that hides the keys between.
    """
    batch, heads, rows, keys = mask.shape
    if torch.compiler.is_compiling() or not batch * heads * rows * keys:
        return from_mask_mod(mask), None
    mask_mod, device = _of_blocks(mask), mask.kv_num_blocks.device
    intervals, counts = _found(mask_mod, batch, heads, rows, keys, device)
    most = int(counts.max())
    if most <= 2:
        return _shrunk(intervals[..., : 2 * max(most, 1)]), None
    own, sizes = mask.mask_mod, (batch, heads, rows, keys, device)
    return _shrunk(intervals[..., ::3]), own if _are_equal(own, mask_mod, *sizes) else mask_mod


def window_of(intervals: Tensor, keys: int) -> tuple[int, int] | None:
    """The window that shows every row the same keys, as `sliding_window` takes it: (-1, 0) if the mask is causal, and
    (-1, -1) if nothing is hidden. None if there is none. All rows are compared, and the host waits.
    """
    rows = intervals.shape[2]
    if intervals.shape != (1, 1, rows, 2) or not rows * keys:
        return None
    position, (start, end) = torch.arange(keys - rows, keys, device=intervals.device), intervals[0, 0].unbind(-1)
    # A side that cuts no row off is unbounded.
    left = torch.where(start > 0, position - start, -1).amax()
    right = torch.where((start < end) & (end < keys), end - 1 - position, -1).amax()
    window = int(left), int(right)
    return window if torch.equal(intervals, sliding_window(rows, keys, *window, device=intervals.device)) else None


def from_dense(mask: Tensor) -> Tensor:
    """Makes intervals of a bool mask, as torch's `scaled_dot_product_attention` takes it as attn_mask: True where a row
    sees a key, (seqlen_q, seqlen_kv) or (batch or 1, heads or 1, seqlen_q, seqlen_kv). It is the inverse of `to_dense`,
    and returns and raises as `from_mask_mod` does.
    """
    arguments.tensor("mask", mask)
    if mask.dtype != torch.bool or mask.dim() not in (2, 4):
        expected = "torch.bool (seqlen_q, seqlen_kv) or (batch, heads, seqlen_q, seqlen_kv)"
        raise ValueError(f"mask is {mask.dtype} {tuple(mask.shape)}, expected {expected}")
    mask = mask.view(1, 1, *mask.shape) if mask.dim() == 2 else mask
    batch, heads, rows, keys = mask.shape
    return from_mask_mod(lambda b, h, q, k: mask[b, h, q, k], batch, heads, rows, keys, mask.device)


def causal(
    seqlen_q: int | PackedRows, seqlen_kv: int | Tensor, *, device: torch.device | str | None = None
) -> Tensor:
    """Makes a mask in which each row sees the keys up to its own position. Returns int32 (1, 1, seqlen_q, 2). With the
    rows and keys of `packed` all functions return (1, total_q, 2 n) instead, on the device of the rows.
    """
    return sliding_window(seqlen_q, seqlen_kv, -1, 0, device=device)


def sliding_window(
    seqlen_q: int | PackedRows,
    seqlen_kv: int | Tensor,
    left: int,
    right: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Makes a mask in which each row sees `left` keys before its own position, the key at it, and `right` keys after
    it; -1 is unbounded. Returns int32 (1, 1, seqlen_q, 2).
    """
    position, keys = _positions(seqlen_q, seqlen_kv, device)
    left, right = (arguments.integer(name, x) for name, x in (("left", left), ("right", right)))
    start = torch.zeros_like(position) if left < 0 else position - left
    end = torch.zeros_like(position) + keys if right < 0 else position + right + 1
    return _one(start, end, keys)


def sliding_window_with_sink(
    seqlen_q: int | PackedRows,
    seqlen_kv: int | Tensor,
    left: int,
    right: int,
    sink: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """A sliding window together with the first `sink` keys, except keys beyond the window's right side (StreamingLLM's
    mask). Returns int32 (1, 1, seqlen_q, 4).
    """
    window = sliding_window(seqlen_q, seqlen_kv, left, right, device=device)
    start, end = window.unbind(-1)
    # A row whose window is empty may be positioned behind all keys. It still sees the first keys.
    position, keys = _positions(seqlen_q, seqlen_kv, device)
    reach = torch.zeros_like(position) + keys if right < 0 else position + right + 1
    first = reach.clamp(0, _size("sink", sink)).clamp(max=keys)
    return _united([(torch.zeros_like(start), first), (start, end)])


def prefix_lm(
    prefix: int | Tensor,
    seqlen_q: int | PackedRows,
    seqlen_kv: int | Tensor,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Makes a mask in which each row sees the first `prefix` keys, and the keys up to its own position.

    prefix is a number, or an integer tensor (batch,) or (sequences,) on the device for the result. Returns int32
    (1 or batch, 1, seqlen_q, 2).
    """
    if isinstance(prefix, Tensor):
        _check_list("prefix", prefix)
        device = prefix.device
    position, keys = _positions(seqlen_q, seqlen_kv, device)
    seen = _each("prefix", prefix, seqlen_q) if isinstance(prefix, Tensor) else arguments.integer("prefix", prefix)
    end = (position + 1).clamp(min=seen)
    return _one(torch.zeros_like(end), end, keys)


def with_spans(spans: Tensor, seqlen_q: int | PackedRows, seqlen_kv: int | Tensor, left: int = -1) -> Tensor:
    """Makes a mask in which each row sees `left` keys before its own position, or all for -1, and the key at it. A row
    whose position is in a span also sees all keys of the span, as images do in a causal prompt.

    spans is an integer tensor (batch or 1, spans, 2) or (sequences, spans, 2) on the device for the result: the start
    and the end of each span, counted in the sequence. Spans do not overlap, and empty ones count for nothing. Packed
    rows also take (total_q, 2), the span of each row. Ends are exclusive: add 1 to the ends in vLLM's `mm_prefix_range`
    and in the (N, 2) ranges of FlashInfer, whose (-1, -1) becomes empty. Returns int32 (1 or batch, 1, seqlen_q, 2).
    """
    arguments.tensor("spans", spans)
    position, keys = _positions(seqlen_q, seqlen_kv, spans.device)
    of_rows = isinstance(seqlen_q, PackedRows) and spans.shape == (position.shape[1], 2)
    if not _is_of_integers(spans) or not of_rows and (spans.dim() != 3 or spans.shape[2] != 2):
        raise ValueError(f"spans is {spans.dtype} {tuple(spans.shape)}, expected integers (batch, spans, 2)")
    # An empty span, since there may be no other.
    spans = torch.nn.functional.pad(spans[None, :, None] if of_rows else _each("spans", spans, seqlen_q), (0, 0, 0, 1))
    start, end = spans.to(torch.int64).unbind(-1)
    is_own = (start <= position[..., None]) & (position[..., None] < end)
    first = torch.where(is_own, start, torch.iinfo(torch.int64).max).amin(-1)
    last = torch.where(is_own, end, 0).amax(-1)
    before = torch.zeros_like(position) if arguments.integer("left", left) < 0 else position - left
    return _one(torch.minimum(before, first), torch.maximum(position + 1, last), keys)


def within_sequences(intervals: Tensor, rows: PackedRows, keys: Tensor) -> Tensor:
    """Makes a packed mask from a mask of all packed rows and all packed keys. A row sees no key of another sequence.

    intervals are int32 (1, heads or 1, total_q, 2 n). `from_mask_mod`, `from_dense` and `document` make them from
    functions, from a `BlockMask` and from tensors over all packed rows and keys. rows and keys are results of `packed`.
    Returns int32 (heads or 1, total_q, 2 n). The host waits for nothing.
    """
    _check_intervals("intervals", intervals)
    if intervals.dim() != 4 or intervals.shape[0] != 1 or intervals.shape[2] != rows.sequence.shape[1]:
        expected = f"(1, heads or 1, {rows.sequence.shape[1]}, 2 or 4)"
        raise ValueError(f"intervals is {tuple(intervals.shape)}, expected {expected}")
    pieces = _pieces((intervals[0] - rows.first_key[..., None]).clamp(min=0).minimum(keys[..., None]))
    return _ordered(*pieces[0]) if len(pieces) == 1 else _united(pieces)


def document(ids: Tensor, *, causal: bool = False) -> Tensor:
    """Makes a mask in which each row sees the keys of its own document; if causal, up to its own position.

    ids has the document of each token, an integer tensor (seqlen,) or (batch, seqlen). Tokens of a document must be
    neighbours. The host waits to check that, except in a trace. Returns int32 (1 or batch, 1, seqlen, 2) on the device
    of ids.

    Raises:
        ValueError: tokens of one document lie apart, or ids are of another type or rank.
    """
    arguments.tensor("ids", ids)
    if ids.dim() not in (1, 2) or not _is_of_integers(ids):
        raise ValueError(f"ids is {ids.dtype} {tuple(ids.shape)}, expected integers (seqlen,) or (batch, seqlen)")
    ids = ids[None] if ids.dim() == 1 else ids
    rows = ids.shape[1]
    if not ids.numel():
        return torch.zeros(ids.shape[0], 1, rows, 2, dtype=torch.int32, device=ids.device)
    begins, in_order = (_begins(x) for x in (ids, ids.sort(dim=1).values))
    runs, documents = (x.sum(1) for x in (begins, in_order))
    if _must_not_wait(ids):
        torch._assert_async((runs == documents).all(), "tokens of one document lie apart")
    elif not torch.equal(runs, documents):
        entry = int((runs != documents).int().argmax())
        found = f"ids[{entry}] has {int(documents[entry])} documents in {int(runs[entry])} runs of tokens"
        raise ValueError(f"{found}, expected a run for each: use from_mask_mod")
    position = torch.arange(rows, device=ids.device)
    start = torch.where(begins, position, 0).cummax(1).values
    ends = torch.where(begins.roll(-1, 1), position + 1, rows)
    end = position + 1 if causal else ends.flip(1).cummin(1).values.flip(1)
    return _one(start[:, None], end.expand_as(start)[:, None], rows)


def document_from_cu_seqlens(cu_seqlens: Tensor, seqlen: int, *, causal: bool = False) -> Tensor:
    """Makes a mask in which each row sees the keys of its own packed sequence; if causal, up to its own position.

    cu_seqlens says where sequences begin and end, an integer tensor (sequences + 1,) that does not decrease, as in
    `flash_attn_varlen_func`. seqlen is the number of all rows; rows outside all sequences see no key. The host waits
    for nothing. Returns int32 (1, 1, seqlen, 2) on the device of cu_seqlens.
    """
    _check_ends("cu_seqlens", cu_seqlens)
    rows, keys = packed(cu_seqlens, seqlen)
    end = torch.minimum(rows.position + 1, keys) if causal else keys
    return _one(rows.first_key, rows.first_key + end, seqlen)[None]


def chunked(
    seqlen_q: int | PackedRows,
    seqlen_kv: int | Tensor,
    chunk: int,
    *,
    causal: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Keys are divided into chunks of `chunk` keys. Each row sees the chunk of its own position; if causal, up to that
    position. `attention_chunk` of `flash_attn_func` has the same effect. Returns int32 (1, 1, seqlen_q, 2).
    """
    size = arguments.integer("chunk", chunk)
    if size <= 0:
        raise ValueError(f"chunk is {size}, expected a number of keys")
    position, keys = _positions(seqlen_q, seqlen_kv, device)
    start = position.div(size, rounding_mode="floor") * size
    return _one(start, position + 1 if causal else start + size, keys)


def padding(lengths: Tensor, seqlen_q: int, seqlen_kv: int, *, left: bool = False) -> Tensor:
    """Makes a mask in which a batch entry's rows see its first `lengths` keys, or its last keys if padding is left.

    lengths is an integer tensor (batch,). Returns int32 (batch, 1, seqlen_q, 2) on its device. `intersection` combines
    the mask with another.
    """
    _check_list("lengths", lengths)
    rows, keys = _size("seqlen_q", seqlen_q), _size("seqlen_kv", seqlen_kv)
    lengths = lengths.to(torch.int64).clamp(0, keys).view(-1, 1, 1).expand(-1, 1, rows)
    zero = torch.zeros_like(lengths)
    return _one(keys - lengths, zero + keys, keys) if left else _one(zero, lengths, keys)


def intersection(x: Tensor, y: Tensor) -> Tensor:
    """Makes a mask in which each row sees the keys that it sees in both given masks.

    Returns int32 of the shape to which both shapes broadcast, with the larger n. If both masks have n = 2, the host
    waits to check the result, except in a trace.

    Raises:
        ValueError: a row sees three intervals, and the message names the first such row; or the shapes of the masks do
            not broadcast.
    """
    _check_two(x, y)
    of_x, of_y = _pieces(x), _pieces(y)
    common = [(torch.maximum(a, c), torch.minimum(b, d)) for a, b in of_x for c, d in of_y]
    return _ordered(*common[0]) if len(common) == 1 else _united(common)


def union(x: Tensor, y: Tensor) -> Tensor:
    """Makes a mask in which each row sees the keys that it sees in at least one of the two given masks.

    Returns int32 (batch or 1, heads or 1, seqlen_q, 4), to which both shapes broadcast. If a mask has n = 2, the host
    waits to check the result, except in a trace.

    Raises:
        ValueError: as for `intersection`.
    """
    _check_two(x, y)
    return _united([*_pieces(x), *_pieces(y)])


def to_dense(intervals: Tensor, seqlen_kv: int) -> Tensor:
    """The mask as a bool tensor (batch or 1, heads or 1, seqlen_q, seqlen_kv), True where a row sees a key. Torch's
    `scaled_dot_product_attention` takes it as attn_mask. It is meant for tests, since it is large.
    """
    _check_intervals("intervals", intervals)
    key = torch.arange(_size("seqlen_kv", seqlen_kv), device=intervals.device)
    sides = intervals[..., None].unbind(-2)
    seen = (sides[0] <= key) & (key < sides[1])
    return seen if len(sides) == 2 else seen | (sides[2] <= key) & (key < sides[3])


def tree_words(seen: Tensor) -> Tensor:
    """Packs which new keys each row sees, bool (batch, seqlen_q, new) or packed (total_q, new), to the words that
    `flash_attn_with_kvcache` takes as tree_mask, int64 (batch, seqlen_q, words) or (total_q, words). SGLang's masks of
    drafts alone (QLEN_ONLY) are such a tensor, flattened. The host waits for nothing.
    """
    arguments.tensor("seen", seen)
    if seen.dtype != torch.bool or seen.dim() < 2 or not seen.shape[-1]:
        raise ValueError(f"seen is {seen.dtype} {tuple(seen.shape)}, expected torch.bool (batch, seqlen_q, new)")
    bits = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % 64)).unflatten(-1, (-1, 64)).to(torch.int64)
    return (bits << torch.arange(64, device=seen.device)).sum(-1)


def block_sparse(
    mask_block_cnt: Tensor,
    mask_block_idx: Tensor,
    full_block_cnt: Tensor | None = None,
    full_block_idx: Tensor | None = None,
    *,
    key_blocks: int | None = None,
    block_size: int = 128,
) -> Tensor:
    """Makes a mask in which each block of rows sees the listed blocks of keys, which `flash_attn_func` takes as
    intervals. Other blocks take no time. Causal masks, windows and chunks of the same call also hide keys of listed
    blocks. Blocks have block_size rows and keys, 128 or 64.

    Counts are integers (batch or 1, heads or 1, blocks of rows), indices (batch or 1, heads or 1, blocks of rows,
    blocks of keys): the fields of FlashAttention-4's `BlockSparseTensorsTorch`, or of a `BlockMask`, in this order, or
    FastVideo's q2k_num and q2k_idx of blocks of 64. The second lists add blocks to the first lists. A block that is
    listed twice is seen once, and an index beyond the blocks is ignored. key_blocks is the number of blocks of keys, if
    lists are shorter. The host waits for nothing.

    Returns int32 (batch or 1, heads or 1, blocks of rows, words): bit i of word w is for block 32 w + i. The number of
    words is odd for blocks of 128, and for blocks of 64 even and 6 or more.
    """
    if block_size not in (64, 128):
        raise ValueError(f"block_size is {block_size}, expected 64 or 128")
    lists: list[tuple[Any, Any]] = [(mask_block_cnt, mask_block_idx)]
    if full_block_cnt is not None or full_block_idx is not None:
        lists.append((full_block_cnt, full_block_idx))
    for count, index in lists:
        arguments.tensor("count", count)
        arguments.tensor("index", index)
        is_list = index.dim() == 4 and index.shape[:-1] == count.shape and index.shape[:-1] == lists[0][1].shape[:-1]
        if not (is_list and _is_of_integers(count) and _is_of_integers(index)):
            found = f"{count.dtype} {tuple(count.shape)} beside {index.dtype} {tuple(index.shape)}"
            expected = "(batch or 1, heads or 1, blocks of rows), and one more axis"
            raise ValueError(f"counts and indices are {found}, expected integers {expected}")
    blocks = lists[0][1].shape[-1] if key_blocks is None else _size("key_blocks", key_blocks)
    words = (blocks + 31) // 32
    words = max(3, words | 1) if block_size == 128 else max(6, words + words % 2)
    index = lists[0][1]
    # Indices that count for nothing set a bit behind all others.
    seen = torch.zeros(*index.shape[:-1], words * 32 + 1, dtype=torch.bool, device=index.device)
    for count, index in lists:
        listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
        listed = listed & (index >= 0) & (index < blocks)
        seen.scatter_(-1, index.where(listed, words * 32).to(torch.int64), True)
    bits = seen[..., :-1].unflatten(-1, (words, 32)).to(torch.int32)
    return (bits << torch.arange(32, dtype=torch.int32, device=bits.device)).sum(-1, dtype=torch.int32)


class _Indexing(TorchFunctionMode):
    """Supports indexing of tensors by tensors without dimensions, which `torch.vmap` alone does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(x, Tensor) for x in index) and all(_is_position(x) for x in index):
                return torch.ops.aten.index(tensor, [torch.as_tensor(x, device=tensor.device) for x in index])
        return func(*args, **(kwargs or {}))


def _is_position(x: Any) -> bool:
    return _is_of_integers(x) if isinstance(x, Tensor) else type(x) is int


def _is_of_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _ignores(mask_mod: MaskMod, axis: int, device: Any) -> bool:
    """Whether a mask ignores the batch index (axis 0), or the head index (axis 1)."""
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def of(x: Tensor) -> Tensor:
        index = [zero] * 4
        index[axis] = x
        return mask_mod(*index)

    try:
        with _Indexing():
            # With out_dims=None, vmap raises if the result depends on the mapped index.
            torch.vmap(of, out_dims=None)(zero[None])
    except ValueError:
        return False
    return True


def _seen(mask_mod: MaskMod, b: int, h: int, first: int, rows: int, keys: int, device: Any) -> Tensor:
    """A bool tensor (rows, keys): which keys are seen by each of `rows` rows, of which `first` is the first."""
    entry, head = (torch.tensor(x, device=device) for x in (b, h))
    of_key = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    of_row = torch.vmap(of_key, in_dims=(None, None, 0, None))
    q_idx = torch.arange(first, first + rows, device=device)
    with _Indexing():
        seen = of_row(entry, head, q_idx, torch.arange(keys, device=device))
    if seen.dtype != torch.bool or seen.shape != (rows, keys):
        found = f"{seen.dtype} {tuple(seen.shape[2:])}"
        raise TypeError(f"mask_mod returns {found} for a row and a key, expected torch.bool ()")
    return seen


def _evaluate(mask_mod: MaskMod, b: int, h: int, rows: int, keys: int, device: Any) -> tuple[Tensor, Tensor]:
    """The first and the last interval of each row, int32 (rows, 4), and the number of its intervals, (rows,)."""
    step = max(1, _AT_ONCE // keys)
    parts = [_intervals(_seen(mask_mod, b, h, i, min(step, rows - i), keys, device)) for i in range(0, rows, step)]
    intervals, counts = (torch.cat(x) for x in zip(*parts))
    return intervals, counts


def _found(mask_mod: MaskMod, batch: int, heads: int, rows: int, keys: int, device: Any) -> tuple[Tensor, Tensor]:
    """The first and the last interval of each row, int32 (batch or 1, heads or 1, rows, 4), and their numbers."""
    batch, heads = (1 if n == 1 or _ignores(mask_mod, i, device) else n for i, n in enumerate((batch, heads)))
    parts = [_evaluate(mask_mod, b, h, rows, keys, device) for b in range(batch) for h in range(heads)]
    intervals, counts = (torch.stack(x).unflatten(0, (batch, heads)) for x in zip(*parts))
    return intervals, counts


def _are_equal(x: MaskMod, y: MaskMod, batch: int, heads: int, rows: int, keys: int, device: Any) -> bool:
    """Whether two mask functions hide the same keys."""
    step = max(1, _AT_ONCE // keys)
    parts = [(b, h, i, min(step, rows - i)) for b in range(batch) for h in range(heads) for i in range(0, rows, step)]
    return all(torch.equal(_seen(x, *part, keys, device), _seen(y, *part, keys, device)) for part in parts)


def _shrunk(intervals: Tensor) -> Tensor:
    """Intervals without axes along which they do not change."""
    for axis in (0, 1):
        first = intervals.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(intervals), intervals):
            intervals = first
    return intervals.contiguous()


def _traced(mask_mod: MaskMod, batch: int, heads: int, rows: int, keys: int, device: Any) -> Tensor:
    """The two intervals of each row, computed in a trace."""
    sizes = batch, heads, rows, keys
    index = [torch.arange(n, device=device).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(sizes)]
    seen = mask_mod(*index)
    if seen.dtype != torch.bool:
        raise TypeError(f"mask_mod returns {seen.dtype}, expected torch.bool")
    seen = seen.expand(torch.broadcast_shapes(seen.shape, (1, 1, rows, keys)))
    entries, of_heads = seen.shape[:2]
    intervals, counts = _intervals(seen.flatten(0, 2))
    _assert_two(counts)
    return intervals.unflatten(0, (entries, of_heads, rows))


def _of_sequences(mask_mod: MaskMod, rows: PackedRows, keys: Any) -> tuple[MaskMod, int, int, torch.device]:
    """A mask function of packed rows, in place of the given one of rows of sequences: the function, the number of rows
    and of keys, and their device.
    """
    arguments.tensor("seqlen_kv", keys)
    longest = rows.max_seqlen_k
    if longest is None:
        if _must_not_wait(keys):
            raise ValueError("max_seqlen_k is None, expected the number of keys that a sequence may have, in a trace")
        longest = int(keys.max()) if keys.numel() else 0
    # Rows that see no key count as rows of the first sequence.
    sequence, position, length = (torch.where(keys > 0, x, 0)[0] for x in (rows.sequence, rows.position, keys))

    def of_row(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(sequence[q_idx], h, position[q_idx], kv_idx) & (kv_idx < length[q_idx])

    return of_row, keys.shape[1], longest, keys.device


def _of_blocks(mask: Any) -> MaskMod:
    """The mask function of a BlockMask: full blocks see all keys, and partial blocks follow the mask's mask_mod."""

    def dense(counts: Tensor | None, indices: Tensor | None) -> Tensor:
        if counts is None or indices is None:
            return torch.zeros_like(mask.kv_indices, dtype=torch.bool)
        columns = indices.shape[-1]
        listed = torch.where(torch.arange(columns, device=indices.device) < counts[..., None], indices, columns)
        found = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
        return found.scatter(-1, listed.long(), True)[..., :columns]

    some = dense(mask.kv_num_blocks, mask.kv_indices)
    full = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    of_rows, of_keys = mask.BLOCK_SIZE

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at = b, h, q_idx // of_rows, kv_idx // of_keys
        return full[at] | some[at] & mask.mask_mod(b, h, q_idx, kv_idx)

    return mask_mod


def _sides(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys begin an interval, and which keys end one."""
    none = torch.zeros_like(seen[:, :1])
    return seen & ~torch.cat([none, seen[:, :-1]], 1), seen & ~torch.cat([seen[:, 1:], none], 1)


def _intervals(seen: Tensor) -> tuple[Tensor, Tensor]:
    keys = seen.shape[1]
    starts, lasts = _sides(seen)
    counts = starts.sum(1)
    # Indices are int64, since Inductor mixes up the types of reductions over int32.
    key = torch.arange(keys, device=seen.device)
    start0, end0 = (torch.where(x, key, keys).amin(1) for x in (starts, lasts))
    start1, end1 = (torch.where(x, key, -1).amax(1) for x in (starts, lasts))
    end0, end1 = end0 + 1, end1 + 1
    start1, end1 = (torch.where(counts > 1, x, end0) for x in (start1, end1))
    intervals = torch.stack([start0, end0, start1, end1], 1)
    return torch.where((counts > 0)[:, None], intervals, 0).to(torch.int32), counts


def _check_counts(counts: Tensor, sides: Callable[[tuple[int, ...]], tuple[Tensor, Tensor]]) -> None:
    """Refuses a mask if a row has three or more intervals. `sides` gives the first and last keys of its intervals."""
    if _must_not_wait(counts):
        _assert_two(counts)
    elif counts.numel() and int(counts.max()) > 2:
        at = tuple((counts > 2).nonzero()[0].tolist())
        first = ", ".join(f"{start} to {last}" for start, last in zip(*(x[:3].tolist() for x in sides(at))))
        names = "row {}", "head {}", "entry {} of the batch"
        axes = zip(names, at[::-1], counts.shape[::-1])
        where = " of ".join(name.format(i) for name, i, size in axes if name is names[0] or size > 1)
        raise ValueError(f"{where} sees {int(counts[at])} intervals of keys, {first} first, expected at most 2")


def _assert_two(counts: Tensor) -> None:
    torch._assert_async((counts <= 2).all(), "a row sees three intervals of keys or more, expected at most 2")


def _begins(ids: Tensor) -> Tensor:
    """Which tokens begin a run of equal ids, bool (batch, seqlen)."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins


def _size(name: str, given: Any) -> int:
    size = arguments.integer(name, given)
    if size < 0:
        raise ValueError(f"{name} is {size}, expected 0 or more")
    return size


def _check_list(name: str, given: Any) -> None:
    arguments.tensor(name, given)
    if given.dim() != 1 or not _is_of_integers(given):
        raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}, expected integers (numbers,)")


def _check_ends(name: str, given: Any) -> int:
    """Checks cu_seqlens, and returns how many sequences there are."""
    _check_list(name, given)
    if not given.shape[0]:
        raise ValueError(f"{name} has no elements, expected (sequences + 1,)")
    return given.shape[0] - 1


def _at(x: Tensor, sequence: Tensor) -> Tensor:
    """The entry of each row's sequence in a tensor (sequences, ...), and 0 for rows that have no sequence."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[sequence]


def _each(name: str, x: Tensor, rows: int | PackedRows) -> Tensor:
    """The entries of a tensor (batch or 1, ...), with axes for heads and rows; for packed rows the entries of their
    sequences, (1, total_q, ...).
    """
    if not isinstance(rows, PackedRows):
        return x[:, None, None]
    if x.shape[0] != rows.sequences:
        raise ValueError(f"{name} has {x.shape[0]} entries, expected {rows.sequences}, one for each sequence")
    return _at(x, rows.sequence)


def _check_intervals(name: str, given: Any) -> None:
    arguments.tensor(name, given)
    if given.dtype != torch.int32 or given.dim() not in (3, 4) or given.shape[-1] not in (2, 4):
        expected = "torch.int32 (batch or 1, heads or 1, seqlen_q, 2 or 4), packed (heads or 1, total_q, 2 or 4)"
        raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}, expected {expected}")


def _check_two(x: Any, y: Any) -> None:
    _check_intervals("x", x)
    _check_intervals("y", y)
    try:
        fit = x.dim() == y.dim() and torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    except RuntimeError:
        fit = False
    if not fit:
        raise ValueError(f"x is {tuple(x.shape)} and y {tuple(y.shape)}, expected the same rows")


def _must_not_wait(x: Tensor) -> bool:
    """Whether the host must not read a tensor's numbers: in a trace, and while a CUDA graph is captured."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _positions(seqlen_q: Any, seqlen_kv: Any, device: Any) -> tuple[Tensor, Any]:
    """The position of each row, (1, 1, seqlen_q) or packed (1, total_q), and the number of keys."""
    if isinstance(seqlen_q, PackedRows):
        arguments.tensor("seqlen_kv", seqlen_kv)
        return seqlen_q.position, seqlen_kv
    rows, keys = _size("seqlen_q", seqlen_q), _size("seqlen_kv", seqlen_kv)
    return torch.arange(keys - rows, keys, device=device)[None, None], keys


def _one(start: Tensor, end: Tensor, keys: Any) -> Tensor:
    """Intervals, clamped to the keys."""
    return _ordered(*(x.clamp(min=0).clamp(max=keys) for x in torch.broadcast_tensors(start, end)))


def _ordered(start: Tensor, end: Tensor) -> Tensor:
    """Intervals, of which empty ones are replaced by zeros."""
    return torch.where((start < end)[..., None], torch.stack([start, end], -1), 0).to(torch.int32)


def _pieces(mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The start and the end of each interval of every row."""
    bounds = mask.unbind(-1)
    return list(zip(bounds[::2], bounds[1::2]))


def _united(pieces: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merges pieces, which may overlap or be empty, into two intervals for each row, in the form that the top of this
    file describes. Only three or more pieces may leave a row with more than two intervals.
    """
    starts, ends = (torch.stack(torch.broadcast_tensors(*x), -1) for x in zip(*pieces))
    behind = torch.iinfo(starts.dtype).max
    # Empty pieces are sorted behind all others.
    order = torch.where(starts < ends, starts, behind).sort(-1)
    starts, ends = order.values, torch.where(starts < ends, ends, 0).gather(-1, order.indices)
    reach = ends.cummax(-1).values
    begins = starts > torch.nn.functional.pad(reach[..., :-1], (1, 0), value=-behind)
    number = (begins & (starts < behind)).cumsum(-1)

    def sides_of(at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        are_first = begins[at] & (starts[at] < behind)
        return starts[at][are_first], reach[at][are_first.roll(-1)] - 1

    if len(pieces) > 2:
        _check_counts(number[..., -1], sides_of)
    end0 = torch.where(number == 1, reach, 0).amax(-1)
    is_second = number == 2
    start1 = torch.where(is_second, starts, behind).amin(-1)
    start1, end1 = (torch.where(is_second.any(-1), x, end0) for x in (start1, reach[..., -1]))
    sides = torch.stack([starts[..., 0], end0, start1, end1], -1)
    return torch.where((number[..., -1] > 0)[..., None], sides, 0).to(torch.int32)
