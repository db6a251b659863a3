"""The rows of each rank of a group.

A document is a sequence that attends to itself alone. Its rows are split into pieces, and every piece has one owner.
In the zigzag layout a document has 2 W pieces for W ranks, and rank r has pieces r and 2 W - 1 - r: under a causal mask
all ranks then have the same number of scores. In the contiguous layout it has W pieces, and rank r has piece r.
"""

import bisect
import functools
import heapq
import itertools
from typing import NamedTuple, Sequence

ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"

# A document is not split if it is less than this fraction of a rank's work: whole documents of this size can be
# distributed evenly, and short pieces leave query tiles half empty.
PART = 1 / 20

# The work of ranks counts as even if no rank exceeds the mean by more than this fraction, of scores and of rows.
EVEN, EVEN_ROWS = 0.01, 0.04

# Smallest number of rows of a piece.
LEAST_ROWS = 16

# The cost of a row besides its scores (projections and loads), in units of one score. It balances rows if there are few
# scores.
ROW_COST = 512


class Piece(NamedTuple):
    """Rows `start` to `stop`, exclusive, of a document."""

    document: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of rows of the piece."""
        return self.stop - self.start


class Layout(NamedTuple):
    """The pieces of each rank, in the order of the rank's rows."""

    documents: tuple[int, ...]
    """Rows of each document."""
    pieces: tuple[tuple[Piece, ...], ...]
    """The pieces of each rank."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.pieces)

    def rows(self, rank: int) -> int:
        """The number of rows of a rank."""
        return sum(piece.rows for piece in self.pieces[rank])

    def starts(self, rank: int) -> list[int]:
        """For each of a rank's pieces, its first row among the rank's rows."""
        return [0, *itertools.accumulate(piece.rows for piece in self.pieces[rank])][:-1]


@functools.lru_cache(maxsize=64)
def dense(seqlen: int, world: int, layout: str) -> Layout:
    """One document of `seqlen` rows, which are shared equally by all ranks.

    Raises:
        ValueError: the rows cannot be divided like this.
    """
    pieces = _pieces_of(layout, world)
    if seqlen % pieces:
        cut = f"{pieces} pieces, which the {layout} layout has for {world} ranks"
        raise ValueError(f"the sequence has {seqlen} rows, expected a multiple of {pieces}: {cut}")
    return Layout((seqlen,), _cut(0, seqlen, world, layout))


@functools.lru_cache(maxsize=64)
def packed(cu_seqlens: tuple[int, ...], world: int, layout: str) -> Layout:
    """Documents that lie one after the other. The longest documents are split like a `dense` one, into pieces whose
    lengths may differ by a row. The number of split documents is about the smallest that makes the ranks' work even,
    because keys of whole documents are not sent. The other documents are assigned whole, the longest first, each to the
    rank with the least work.

    A rank's rows are first the pieces of split documents, then whole documents, each in the order of documents.

    Raises:
            ValueError: cu_seqlens is invalid.
    """
    documents = _lengths(cu_seqlens)
    costs = [_cost(Piece(i, 0, rows)) for i, rows in enumerate(documents)]
    least = PART * sum(costs) / world
    pieces = _pieces_of(layout, world)
    most = sum(rows >= LEAST_ROWS * pieces and cost > least for rows, cost in zip(documents, costs, strict=True))
    count, found = 0, _dealt(documents, world, layout, 0)
    while count < most and not _are_even(found):
        # The step grows with the count, so that there are few trials for many documents.
        count = min(max(count + 1, count * 5 // 4), most)
        found = _dealt(documents, world, layout, count)
    return found


def _dealt(documents: tuple[int, ...], world: int, layout: str, count: int) -> Layout:
    """The layout that splits the `count` longest documents."""
    in_order = sorted(range(len(documents)), key=lambda i: (-documents[i], i))
    long = sorted(in_order[:count])
    cuts = {i: _cut(i, documents[i], world, layout) for i in long}
    ranks = [(sum(_cost(piece) for cut in cuts.values() for piece in cut[rank]), rank) for rank in range(world)]
    heapq.heapify(ranks)
    whole: list[list[Piece]] = [[] for _ in range(world)]
    for i in in_order[count:]:
        cost, rank = ranks[0]
        whole[rank].append(Piece(i, 0, documents[i]))
        heapq.heapreplace(ranks, (cost + _cost(whole[rank][-1]), rank))
    pieces = [[piece for i in long for piece in cuts[i][rank]] + sorted(whole[rank]) for rank in range(world)]
    return Layout(documents, tuple(map(tuple, pieces)))


def _are_even(of: Layout) -> bool:
    """Whether all ranks have about the same work."""
    scores = [sum(map(_cost, pieces)) for pieces in of.pieces]
    rows = [of.rows(rank) for rank in range(of.world)]
    even = (max(each) * of.world <= (1 + more) * sum(each) for each, more in ((scores, EVEN), (rows, EVEN_ROWS)))
    return all(even)


def rows_of(layout: Layout, rank: int) -> list[range]:
    """A rank's rows, as ranges of the rows of all documents."""
    first = [0, *itertools.accumulate(layout.documents)]
    return [range(first[piece.document] + piece.start, first[piece.document] + piece.stop) for piece in layout.pieces[rank]]


def owners(layout: Layout, document: int) -> list[tuple[Piece, int, int]]:
    """The pieces of a document in order, each with its rank and its first row among the rank's rows."""
    return _owners(layout)[document]


@functools.lru_cache(maxsize=64)
def _owners(layout: Layout) -> list[list[tuple[Piece, int, int]]]:
    found: list[list[tuple[Piece, int, int]]] = [[] for _ in layout.documents]
    for rank in range(layout.world):
        for piece, start in zip(layout.pieces[rank], layout.starts(rank), strict=True):
            bisect.insort(found[piece.document], (piece, rank, start))
    return found


def _cut(document: int, rows: int, world: int, layout: str) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of a document that each rank has."""
    count = _pieces_of(layout, world)
    ends = [rows * i // count for i in range(count + 1)]
    pieces = [Piece(document, start, stop) for start, stop in itertools.pairwise(ends)]
    if layout == CONTIGUOUS:
        return tuple((piece,) for piece in pieces)
    return tuple((pieces[rank], pieces[-1 - rank]) for rank in range(world))


def _pieces_of(layout: str, world: int) -> int:
    if layout not in (ZIGZAG, CONTIGUOUS):
        raise ValueError(f"layout is {layout!r}, expected {ZIGZAG!r} or {CONTIGUOUS!r}")
    return 2 * world if layout == ZIGZAG else world


def _cost(piece: Piece) -> int:
    """The work of a piece under a causal mask, in scores."""
    return piece.rows * (piece.start + piece.rows // 2 + ROW_COST)


def _lengths(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    if not cu_seqlens or cu_seqlens[0] != 0 or any(end < start for start, end in itertools.pairwise(cu_seqlens)):
        raise ValueError(f"cu_seqlens is {list(cu_seqlens)}, expected 0 and then ends of documents, none before another")
    return tuple(end - start for start, end in itertools.pairwise(cu_seqlens))
