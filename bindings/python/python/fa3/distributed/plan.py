"""The plan: which rank computes which rows with which keys, as plain data. Every machine computes the same plan.

A rank computes its own rows of O. It gathers the keys that these rows see into one buffer, one piece of its rows after
the other, in the order of the keys' positions. So a kernel reads them as it would read the keys of a whole sequence,
and one launch computes all pieces. The rank copies its own rows into the buffer, and receives each other row once, from
its owner. If a second piece of the document sees the same rows, they are copied within the buffer. Gradients of keys
are sent back to the owner of the keys, which adds them up.
"""

import functools
import itertools
from typing import NamedTuple

from .layout import Layout, Piece, owners

# A multiple of the KV block size of every kernel. Keys begin at multiples of GRID, so that KV blocks are the same as in
# the whole sequence, and results have the same bits. Rows of the buffer before the first visible key stay unwritten.
GRID = 26880

# The largest KV block. In the block of the first visible key, the rows before it must not be NaN: they are zeroed.
MOST_KEYS = 256


class Window(NamedTuple):
    """Number of keys before and after its position that a query sees; -1 is unbounded."""

    left: int
    right: int


class Copy(NamedTuple):
    """Rows of keys that are copied from their owner to a buffer."""

    owner: int
    """The rank that owns the rows."""
    row: int
    """The first row among the owner's rows."""
    offset: int
    """The first row among the buffer's rows."""
    rows: int
    """The number of rows."""
    again: int | None = None
    """The buffer's first row with a copy of these rows, if an earlier piece needed them."""

    @property
    def here(self) -> slice:
        """The owner's rows."""
        return slice(self.row, self.row + self.rows)

    @property
    def there(self) -> slice:
        """The buffer's rows."""
        return slice(self.offset, self.offset + self.rows)


class Call(NamedTuple):
    """Query rows of one document, and the keys that they see."""

    row: int
    """The first row among the rank's rows."""
    rows: int
    """The number of rows."""
    key: int
    """The first key among the buffer's rows, or among the rank's own rows."""
    keys: int
    """The number of keys. The last query is aligned with the last key, which the launch's window takes into account."""


class Launch(NamedTuple):
    """Calls that one kernel computes. Their rows are adjacent, and no two calls read the same rows of keys."""

    calls: tuple[Call, ...]
    window: Window
    is_local: bool
    """Whether all keys are the rank's own and adjacent, so that the launch need not wait for keys."""

    @property
    def rows(self) -> slice:
        """The rank's rows that the launch computes."""
        return slice(self.calls[0].row, self.calls[-1].row + self.calls[-1].rows)

    @property
    def scores(self) -> int:
        """The approximate number of scores that the launch computes for a head."""
        return sum(_seen(call, self.window) for call in self.calls)

    @property
    def keys(self) -> slice:
        """The rows from its first key to its last: of the rank's own keys if `is_local`, otherwise of the buffer."""
        return slice(self.calls[0].key, self.calls[-1].key + self.calls[-1].keys)


class Return(NamedTuple):
    """Gradients of adjacent keys that a launch computed, and that return to the owner of the keys."""

    rank: int
    """The rank that computed them."""
    launch: int
    """The index of the launch."""
    key: int
    """The first key, counted from the launch's first key."""
    row: int
    """The first key among the owner's rows."""
    rows: int
    """The number of keys."""


class Sum(NamedTuple):
    """A range of rows of the owner's gradients, and the terms that are added up in this range, in this order."""

    row: int
    rows: int
    terms: tuple[tuple[int, int], ...]
    """The index of a return to this owner, and its first row that belongs to this sum."""


class Plan(NamedTuple):
    """The calls of a rank, and the keys that it needs."""

    rank: int
    buffer_rows: int
    copies: tuple[Copy, ...]
    """All copies into the buffer, in the order of offsets."""
    zeros: tuple[slice, ...]
    """Rows of the buffer that no query sees, but that are multiplied: they must not be NaN."""
    launches: tuple[Launch, ...]

    @property
    def scores(self) -> int:
        """The approximate number of scores that the rank computes for a head."""
        return sum(launch.scores for launch in self.launches)

    @property
    def local(self) -> int:
        """The approximate number of scores that the rank computes for a head with its own keys alone."""
        return sum(launch.scores for launch in self.launches if launch.is_local)

    @property
    def received(self) -> int:
        """The number of rows of keys that the rank receives from other ranks."""
        return sum(copy.rows for copy in self.brought if copy.owner != self.rank)

    @property
    def brought(self) -> list[Copy]:
        """Copies from the rows of the keys' owners. The rank itself may be an owner."""
        return [copy for copy in self.copies if copy.again is None]

    @property
    def repeated(self) -> list[tuple[slice, slice]]:
        """Rows of the buffer that are copied within it: the source and the destination."""
        given = ((copy.again, copy) for copy in self.copies)
        return [(slice(row, row + copy.rows), copy.there) for row, copy in given if row is not None]


class Schedule(NamedTuple):
    """The plan of a rank, and the matching parts of other ranks' plans."""

    plan: Plan
    own: tuple[Copy, ...]
    """Copies of its own rows into its buffer."""
    sends: tuple[tuple[int, Copy], ...]
    """Copies of its rows into buffers of other ranks, each with the rank."""
    receives: tuple[Copy, ...]
    """Copies into its buffer from other ranks."""
    returned: tuple[tuple[int, Return, int], ...]
    """Gradients that return to their owners: the owner, the return, and its first row among all that the owner
    receives.
    """
    returns: tuple[Return, ...]
    """Gradients of its own keys."""
    sums: tuple[Sum, ...]
    published: tuple[slice, ...]
    """The rows of each rank from the first to the last that ranks copy from its memory."""
    scores: int
    """The approximate number of scores that the busiest rank computes for a head."""
    local: int
    """The smallest number of them that a rank computes before it waits for keys."""
    received: int
    """The largest number of rows that a rank receives from other ranks."""
    most_published: int
    """The largest number of rows that a rank publishes."""
    most_returned: int
    """The largest number of rows of gradients that a rank receives from other ranks."""
    is_alone: bool
    """Whether no rank exchanges rows with another, or needs a buffer."""


@functools.lru_cache(maxsize=1024)
def schedule(layout: Layout, rank: int, window: Window) -> Schedule:
    """The schedule of a rank."""
    plans = [plan(layout, other, window) for other in range(layout.world)]
    others = [other for other in range(layout.world) if other != rank]
    sends = [(other, copy) for other in others for copy in plans[other].brought if copy.owner == rank]
    arrived = [_arrived(layout, owner, window) for owner in range(layout.world)]
    published = tuple(_published(plans, owner) for owner in range(layout.world))
    returned = [(owner, part, row) for owner in others for part, row in arrived[owner] if part.rank == rank]
    return Schedule(
        plan=plans[rank],
        own=tuple(copy for copy in plans[rank].brought if copy.owner == rank),
        sends=tuple(sends),
        receives=tuple(copy for copy in plans[rank].brought if copy.owner != rank),
        returned=tuple(returned),
        returns=returns(layout, rank, window),
        sums=sums(layout, rank, window),
        published=published,
        scores=max(of.scores for of in plans),
        local=min(of.local for of in plans),
        received=max(of.received for of in plans),
        most_published=max(rows.stop - rows.start for rows in published),
        most_returned=max(sum(part.rows for part, _ in parts) for parts in arrived),
        is_alone=not any(of.copies for of in plans),
    )


@functools.lru_cache(maxsize=1024)
def plan(layout: Layout, rank: int, window: Window) -> Plan:
    """The calls of a rank, and the keys that it needs."""
    joined = _joined(layout, rank)
    needs = [_needed(piece, layout.documents[piece.document], window) for piece, _ in joined]
    # If a document has a piece that needs the keys of other pieces, all its pieces here are computed from the buffer.
    divided = {piece.document for need, (piece, _) in zip(needs, joined, strict=True) if not _is_own(need, piece)}
    launches: list[Launch] = []
    copies: list[Copy] = []
    zeros: list[slice] = []
    buffered: dict[int, tuple[Piece, int]] = {}
    rows = 0
    for need, (piece, row) in zip(needs, joined, strict=True):
        is_local, first = piece.document not in divided, _on_grid(need)
        call = Call(row, piece.rows, row if is_local else rows, first.rows)
        _append(launches, Launch((call,), _shifted(window, need.stop - piece.stop), is_local))
        if not is_local:
            offset = rows + need.start - first.start
            copies += _copies(layout, need, offset, buffered.get(piece.document))
            if first.start < need.start:
                zeros.append(slice(max(rows, offset - MOST_KEYS), offset))
            buffered[piece.document] = need, offset
            rows += first.rows
    return Plan(rank, rows, tuple(copies), tuple(zeros), tuple(launches))


@functools.lru_cache(maxsize=1024)
def returns(layout: Layout, owner: int, window: Window) -> tuple[Return, ...]:
    """The gradients that an owner of keys receives: first from its own launches, then from other ranks in order."""
    found: list[Return] = []
    for rank in (owner, *(rank for rank in range(layout.world) if rank != owner)):
        of_rank = plan(layout, rank, window)
        for number, launch in enumerate(of_rank.launches):
            if launch.is_local and rank != owner:
                continue
            own = [Copy(rank, 0, 0, layout.rows(rank))]
            copies = own if launch.is_local else [copy for copy in of_rank.copies if copy.owner == owner]
            for call in launch.calls:
                for copy in copies:
                    start, stop = max(call.key, copy.offset), min(call.key + call.keys, copy.offset + copy.rows)
                    if start < stop:
                        row = copy.row + start - copy.offset
                        _append_return(found, Return(rank, number, start - launch.keys.start, row, stop - start))
    return tuple(found)


def _append_return(found: list[Return], part: Return) -> None:
    """Appends a return, or extends the last return if both the launch's keys and the owner's rows continue."""
    last = found[-1] if found else None
    if last and last[:2] == part[:2] and (last.key + last.rows, last.row + last.rows) == (part.key, part.row):
        found[-1] = last._replace(rows=last.rows + part.rows)
    else:
        found.append(part)


def _published(plans: list[Plan], owner: int) -> slice:
    """The rows of an owner from the first to the last that some rank copies."""
    copied = [copy.here for of in plans for copy in of.brought if copy.owner == owner]
    return slice(min((rows.start for rows in copied), default=0), max((rows.stop for rows in copied), default=0))


def _arrived(layout: Layout, owner: int, window: Window) -> list[tuple[Return, int]]:
    """The gradients that an owner receives from other ranks, each with its first row among all received rows."""
    parts = [part for part in returns(layout, owner, window) if part.rank != owner]
    return list(zip(parts, itertools.accumulate((part.rows for part in parts), initial=0)))


@functools.lru_cache(maxsize=1024)
def sums(layout: Layout, owner: int, window: Window) -> tuple[Sum, ...]:
    """The sums that cover all rows of an owner, each row once."""
    parts = returns(layout, owner, window)
    ends = {0, layout.rows(owner)} | {end for part in parts for end in (part.row, part.row + part.rows)}
    found = []
    in_order = sorted(ends)
    for row, end in zip(in_order, in_order[1:]):
        covers = ((number, part) for number, part in enumerate(parts) if part.row <= row and end <= part.row + part.rows)
        found.append(Sum(row, end - row, tuple((number, row - part.row) for number, part in covers)))
    return tuple(found)


def _joined(layout: Layout, rank: int) -> list[tuple[Piece, int]]:
    """A rank's non-empty pieces, each with its first row among the rank's rows. Pieces that are adjacent in the
    document and in memory are merged.
    """
    found: list[tuple[Piece, int]] = []
    for piece, row in zip(layout.pieces[rank], layout.starts(rank), strict=True):
        if piece.rows == 0:
            continue
        if found and found[-1][0][::2] == piece[:2]:
            last, start = found.pop()
            found.append((Piece(piece.document, last.start, piece.stop), start))
        else:
            found.append((piece, row))
    return found


def _needed(piece: Piece, rows: int, window: Window) -> Piece:
    """The keys that a piece's rows see, in a document of `rows` rows."""
    start = 0 if window.left < 0 else max(0, piece.start - window.left)
    stop = rows if window.right < 0 else min(rows, piece.stop + window.right)
    return Piece(piece.document, start, stop)


def _seen(call: Call, window: Window) -> int:
    """The approximate number of visible scores of a call."""
    # The number of keys after the window of the first query, and of keys before the window of the last query.
    after = 0 if window.right < 0 else max(0, call.rows - window.right)
    before = 0 if window.left < 0 else max(0, call.keys - window.left)
    rows = min(call.rows, before)
    hidden = after**2 // 2 + before * rows - rows**2 // 2
    return max(call.rows, call.rows * call.keys - hidden)


def _is_own(need: Piece, piece: Piece) -> bool:
    """Whether a piece's rows see only the piece's own keys, and the piece begins the document."""
    return piece.start == need.start == 0 and need.stop <= piece.stop


def _on_grid(need: Piece) -> Piece:
    """The keys, extended to the left to a multiple of GRID."""
    return need._replace(start=need.start // GRID * GRID)


def _shifted(window: Window, ahead: int) -> Window:
    """The window for rows that are aligned `ahead` keys further to the right than their own positions."""
    left = -1 if window.left < 0 else window.left + ahead
    return Window(left, -1 if window.right < 0 else window.right - ahead)


def _copies(layout: Layout, need: Piece, offset: int, earlier: tuple[Piece, int] | None) -> list[Copy]:
    """Copies of the needed keys to the buffer, from row `offset` on, by the pieces of their owners. `earlier` are keys
    of this document that the buffer already has, with their first row; none of them follows the last needed key.
    """
    if earlier is None or earlier[0].stop <= need.start:
        return _owned(layout, need, offset)
    (_, start, stop), row = earlier
    first = row + need.start - start
    again = _owned(layout, need._replace(stop=stop), offset)
    rest = _owned(layout, need._replace(start=stop), offset + stop - need.start)
    return [copy._replace(again=first + copy.offset - offset) for copy in again] + rest


def _owned(layout: Layout, need: Piece, offset: int) -> list[Copy]:
    """Copies of the needed keys to the buffer, all of them from their owners."""
    found: list[Copy] = []
    for piece, rank, row in owners(layout, need.document):
        start, stop = max(piece.start, need.start), min(piece.stop, need.stop)
        if start < stop:
            _append_copy(found, Copy(rank, row + start - piece.start, offset + start - need.start, stop - start))
    return found


def _append_copy(copies: list[Copy], copy: Copy) -> None:
    """Appends a copy, or extends the last copy if both the owner's rows and the buffer's rows continue."""
    last = copies[-1] if copies else None
    if last and (last.owner, last.here.stop, last.there.stop) == (copy.owner, copy.row, copy.offset):
        copies[-1] = last._replace(rows=last.rows + copy.rows)
    else:
        copies.append(copy)


def _append(launches: list[Launch], launch: Launch) -> None:
    """Appends a launch. If the last launch can also compute the new launch's calls, adds them to the last launch."""
    last = launches[-1] if launches else None
    if last and last[1:] == launch[1:] and last.keys.stop <= launch.keys.start and last.rows.stop == launch.rows.start:
        launches[-1] = last._replace(calls=last.calls + launch.calls)
    else:
        launches.append(launch)
