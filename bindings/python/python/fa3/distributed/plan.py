"""Who computes which rows with which keys: plain data, the same on every machine.

A rank computes its own rows of O. It needs the keys that these rows see, and puts them into one buffer, piece by piece
of its rows, in the order of their positions. So a kernel reads them where they lie, as it would read the keys of a
whole sequence, and one launch computes all pieces. Rows of the buffer that are its own it copies, the others come from
the ranks that have them, once: those that a second piece of a document sees as well are copied from the first one's.
Gradients of keys go the same ways back, where their owner adds them up.
"""

import functools
import itertools
from typing import NamedTuple

from .layout import Layout, Piece, owners

# A multiple of the keys of a block of every kernel. Keys begin at multiples of it, so that blocks are those of the
# whole sequence, and results have the same bits. Rows before the first key that is seen are there, but nobody fills
# them.
GRID = 26880

# No block has more keys. In the block of the first key that is seen, those before it must be numbers.
MOST_KEYS = 256


class Window(NamedTuple):
    """How many keys before and after its position a query sees; -1 is unbounded."""

    left: int
    right: int


class Copy(NamedTuple):
    """Rows of keys that go from their owner to a buffer."""

    owner: int
    """The rank that has them."""
    row: int
    """The first one among the owner's rows."""
    offset: int
    """The first one among the buffer's rows."""
    rows: int
    """How many they are."""
    again: int | None = None
    """The first of the buffer's rows that an earlier copy has filled with the same, if one has."""

    @property
    def here(self) -> slice:
        """The owner's rows."""
        return slice(self.row, self.row + self.rows)

    @property
    def there(self) -> slice:
        """The buffer's rows."""
        return slice(self.offset, self.offset + self.rows)


class Call(NamedTuple):
    """Rows of queries of one document, and the keys that they see."""

    row: int
    """The first one among the rank's rows."""
    rows: int
    """How many they are."""
    key: int
    """The first key among the buffer's rows, or among the rank's own."""
    keys: int
    """How many they are. The last query stands at the last key, as the launch's window says."""


class Launch(NamedTuple):
    """Calls that one kernel computes. Their rows follow each other, and no two read the same rows of keys."""

    calls: tuple[Call, ...]
    window: Window
    is_local: bool
    """Whether all keys are the rank's own, and lie together: then nothing needs to have arrived."""

    @property
    def rows(self) -> slice:
        """The rank's rows that it computes."""
        return slice(self.calls[0].row, self.calls[-1].row + self.calls[-1].rows)

    @property
    def keys(self) -> slice:
        """Rows of the buffer, or of the rank's keys, from the first key that it reads to the last."""
        return slice(self.calls[0].key, self.calls[-1].key + self.calls[-1].keys)


class Return(NamedTuple):
    """Gradients of keys that a launch computed, on their way back to the owner."""

    rank: int
    """The rank that computed them."""
    launch: int
    """The number of the launch."""
    key: int
    """The first key, counted from the launch's first."""
    row: int
    """The first key among the owner's rows."""
    rows: int
    """How many they are."""


class Sum(NamedTuple):
    """Rows of the owner's gradients, and all that is added up there, in this order."""

    row: int
    rows: int
    terms: tuple[tuple[int, int], ...]
    """The number of a return to this owner, and the first of its rows that counts here."""


class Plan(NamedTuple):
    """The calls of a rank, and the keys that it needs."""

    rank: int
    buffer_rows: int
    copies: tuple[Copy, ...]
    """All copies into the buffer, in the order of offsets."""
    zeros: tuple[slice, ...]
    """Rows of the buffer that nobody sees, and that are multiplied all the same."""
    launches: tuple[Launch, ...]

    @property
    def scores(self) -> int:
        """How many scores it computes for a head, about."""
        return sum(_seen(call, launch.window) for launch in self.launches for call in launch.calls)

    @property
    def received(self) -> int:
        """How many rows of keys it has from others."""
        return sum(copy.rows for copy in self.brought if copy.owner != self.rank)

    @property
    def brought(self) -> list[Copy]:
        """Copies from the rows of their owners, the rank among them."""
        return [copy for copy in self.copies if copy.again is None]

    @property
    def repeated(self) -> list[tuple[slice, slice]]:
        """Rows of the buffer that are copied, and those that they are copied to."""
        given = ((copy.again, copy) for copy in self.copies)
        return [(slice(row, row + copy.rows), copy.there) for row, copy in given if row is not None]


class Schedule(NamedTuple):
    """All that a rank does, with what others do for it."""

    plan: Plan
    own: tuple[Copy, ...]
    """Copies of its own rows into its buffer."""
    sends: tuple[tuple[int, Copy], ...]
    """Copies of its rows into buffers of others, which are named."""
    receives: tuple[Copy, ...]
    """Copies into its buffer from others."""
    returned: tuple[tuple[int, Return, int], ...]
    """Gradients that go back to their owners, which are named, and their first row among all that reach the owner from
    others.
    """
    returns: tuple[Return, ...]
    """Gradients of its own keys."""
    sums: tuple[Sum, ...]
    scores: int
    """The scores that the busiest rank computes for a head, about."""
    received: int
    """The most rows that a rank has from others."""
    most_rows: int
    """The most rows that are a rank's own."""
    most_returned: int
    """The most rows of gradients that reach a rank from others."""
    is_alone: bool
    """Whether no rank has anything from another, or in a buffer."""


@functools.lru_cache(maxsize=1024)
def schedule(layout: Layout, rank: int, window: Window) -> Schedule:
    """All that a rank does."""
    plans = [plan(layout, other, window) for other in range(layout.world)]
    others = [other for other in range(layout.world) if other != rank]
    sends = [(other, copy) for other in others for copy in plans[other].brought if copy.owner == rank]
    arrived = [_arrived(layout, owner, window) for owner in range(layout.world)]
    returned = [(owner, part, row) for owner in others for part, row in arrived[owner] if part.rank == rank]
    return Schedule(
        plan=plans[rank],
        own=tuple(copy for copy in plans[rank].brought if copy.owner == rank),
        sends=tuple(sends),
        receives=tuple(copy for copy in plans[rank].brought if copy.owner != rank),
        returned=tuple(returned),
        returns=returns(layout, rank, window),
        sums=sums(layout, rank, window),
        scores=max(of.scores for of in plans),
        received=max(of.received for of in plans),
        most_rows=max(map(layout.rows, range(layout.world))),
        most_returned=max(sum(part.rows for part, _ in parts) for parts in arrived),
        is_alone=not any(of.copies for of in plans),
    )


@functools.lru_cache(maxsize=1024)
def plan(layout: Layout, rank: int, window: Window) -> Plan:
    """The calls of a rank, and the keys that it needs."""
    joined = _joined(layout, rank)
    needs = [_needed(piece, layout.documents[piece.document], window) for piece, _ in joined]
    # A piece that needs its own keys alone goes with the other piece of its document, if there is one.
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
    """The gradients that reach an owner of keys, its own launches' first, then those of other ranks in their order."""
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
    """Adds gradients, or their rows to the last ones, if they follow in memory at both ends."""
    last = found[-1] if found else None
    if last and last[:2] == part[:2] and (last.key + last.rows, last.row + last.rows) == (part.key, part.row):
        found[-1] = last._replace(rows=last.rows + part.rows)
    else:
        found.append(part)


def _arrived(layout: Layout, owner: int, window: Window) -> list[tuple[Return, int]]:
    """The gradients that reach an owner from others, and the first row of each among all of them."""
    parts = [part for part in returns(layout, owner, window) if part.rank != owner]
    return list(zip(parts, itertools.accumulate((part.rows for part in parts), initial=0)))


@functools.lru_cache(maxsize=1024)
def sums(layout: Layout, owner: int, window: Window) -> tuple[Sum, ...]:
    """Where an owner adds up which gradients: all of its rows, of which each is in one sum."""
    parts = returns(layout, owner, window)
    ends = {0, layout.rows(owner)} | {end for part in parts for end in (part.row, part.row + part.rows)}
    found = []
    in_order = sorted(ends)
    for row, end in zip(in_order, in_order[1:]):
        covers = ((number, part) for number, part in enumerate(parts) if part.row <= row and end <= part.row + part.rows)
        found.append(Sum(row, end - row, tuple((number, row - part.row) for number, part in covers)))
    return tuple(found)


def _joined(layout: Layout, rank: int) -> list[tuple[Piece, int]]:
    """A rank's pieces that have rows, and the first of its rows of each. Those that follow each other in a document as
    in memory are one.
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
    """The keys that a piece's rows see, of a document of so many rows."""
    start = 0 if window.left < 0 else max(0, piece.start - window.left)
    stop = rows if window.right < 0 else min(rows, piece.stop + window.right)
    return Piece(piece.document, start, stop)


def _seen(call: Call, window: Window) -> int:
    """Scores of a call that are not hidden, about."""
    # Behind the reach of the first query, and before that of the last one.
    after = 0 if window.right < 0 else max(0, call.rows - window.right)
    before = 0 if window.left < 0 else max(0, call.keys - window.left)
    rows = min(call.rows, before)
    hidden = after**2 // 2 + before * rows - rows**2 // 2
    return max(call.rows, call.rows * call.keys - hidden)


def _is_own(need: Piece, piece: Piece) -> bool:
    """Whether the keys that a piece's rows see are the piece's own, from the first one of the document on."""
    return piece.start == need.start == 0 and need.stop <= piece.stop


def _on_grid(need: Piece) -> Piece:
    """The same keys, and those before them that a kernel counts along."""
    return need._replace(start=need.start // GRID * GRID)


def _shifted(window: Window, ahead: int) -> Window:
    """The window of rows of which the last one counts as `ahead` keys further on than it stands."""
    left = -1 if window.left < 0 else window.left + ahead
    return Window(left, -1 if window.right < 0 else window.right - ahead)


def _copies(layout: Layout, need: Piece, offset: int, earlier: tuple[Piece, int] | None) -> list[Copy]:
    """Keys that go to the buffer, from a row on, by the pieces in which their owners have them. `earlier` are keys of
    the document that it has before, none of them behind the last one of these, and their first row.
    """
    if earlier is None or earlier[0].stop <= need.start:
        return _owned(layout, need, offset)
    (_, start, stop), row = earlier
    first = row + need.start - start
    again = _owned(layout, need._replace(stop=stop), offset)
    rest = _owned(layout, need._replace(start=stop), offset + stop - need.start)
    return [copy._replace(again=first + copy.offset - offset) for copy in again] + rest


def _owned(layout: Layout, need: Piece, offset: int) -> list[Copy]:
    """The same, all of them from their owners."""
    found: list[Copy] = []
    for piece, rank, row in owners(layout, need.document):
        start, stop = max(piece.start, need.start), min(piece.stop, need.stop)
        if start < stop:
            _append_copy(found, Copy(rank, row + start - piece.start, offset + start - need.start, stop - start))
    return found


def _append_copy(copies: list[Copy], copy: Copy) -> None:
    """Adds a copy, or its rows to the last one, if they follow in memory at both ends."""
    last = copies[-1] if copies else None
    if last and (last.owner, last.here.stop, last.there.stop) == (copy.owner, copy.row, copy.offset):
        copies[-1] = last._replace(rows=last.rows + copy.rows)
    else:
        copies.append(copy)


def _append(launches: list[Launch], launch: Launch) -> None:
    """Adds a launch, or its call to the last one, if that can compute it, too."""
    last = launches[-1] if launches else None
    if last and last[1:] == launch[1:] and last.keys.stop <= launch.keys.start and last.rows.stop == launch.rows.start:
        launches[-1] = last._replace(calls=last.calls + launch.calls)
    else:
        launches.append(launch)
