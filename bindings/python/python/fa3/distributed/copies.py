"""Copies keys from the memory of their owners, and gradients to it."""

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .gather import Gather
from .memory import Memory, aligned
from .plan import Copy
from .sums import copy_rows, write_sums


class Room(NamedTuple):
    """The byte offsets of a group of heads in the memory of a rank, equal on all ranks."""

    keys: int
    """The first byte of K and of V, which lie beside each other."""
    dk: int
    dv: int
    heads: int


class Copies:
    """Exchanges keys and gradients of a call by copies, one group of K and V heads after the other. When all ranks have
    written a group, they copy it from each other while they write the next group.
    """

    def __init__(self, of: Gather, memory: Memory, parts: list[slice], k: Tensor, v: Tensor, returns: bool) -> None:
        self._of, self._memory = of, memory
        schedule, rows_first = of.schedule, of.kernels.rows_first
        self._dims, self._dtype = [k.shape[-1], v.shape[-1]], k.dtype
        self._batch = rows_first(k).shape[1:-2]
        self._rooms, outgoing, incoming = [], 0, 0
        for part in parts:
            heads = part.stop - part.start
            keys = outgoing
            outgoing += self._bytes(schedule.most_published, heads, sum(self._dims))
            dk = incoming
            dv = dk + self._bytes(schedule.most_returned, heads, self._dims[0])
            incoming = dv + self._bytes(schedule.most_returned, heads, self._dims[1])
            self._rooms.append(Room(keys, dk, dv, heads))
        memory.begin(outgoing, incoming if returns else 0)
        of_parts = zip(self._rooms, parts, strict=True)
        self._pulled = [self._pull(room, k[..., part, :], v[..., part, :]) for room, part in of_parts]
        self._computed: list[dict[int, list[Tensor]]] = []

    def gather(self) -> list["Pulled"]:
        """Returns the keys that the rank needs, for each group of heads, while they are still being copied."""
        return self._pulled

    def _pull(self, room: Room, k: Tensor, v: Tensor) -> "Pulled":
        """Publishes these heads of the rank's K and V, and begins to copy the rows that it needs."""
        plan, rows_first = self._of.schedule.plan, self._of.kernels.rows_first
        shape = plan.buffer_rows, *self._batch, room.heads, sum(self._dims)
        buffer = torch.empty(shape, dtype=self._dtype, device=self._memory.device)
        for rows in plan.zeros:
            buffer[rows] = 0
        its = self._of.schedule.published[plan.rank]
        for to, x in zip(self._keys(plan.rank, room).split(self._dims, -1), (k, v), strict=True):
            copy_rows(rows_first(x)[its], to[: its.stop - its.start])
        # Copies within a GPU are kernels. Beside a launch of the rank's own keys they would wait for its SMs.
        with nullcontext() if plan.local else self._memory.copying():
            self._bring(room, buffer, self._of.schedule.own)
        self._memory.meet()
        with self._memory.copying():
            self._bring(room, buffer, self._of.schedule.receives)
            return Pulled(self._of, buffer, self._dims, self._memory.copied())

    def _bring(self, room: Room, buffer: Tensor, copies: tuple[Copy, ...]) -> None:
        """Copies published rows to the buffer."""
        owners = {copy.owner: self._keys(copy.owner, room) for copy in copies}
        for copy in copies:
            row = copy.row - self._of.schedule.published[copy.owner].start
            buffer[copy.there].copy_(owners[copy.owner][row : row + copy.rows], non_blocking=True)

    def give_back(self, part: int, computed: dict[int, list[Tensor]]) -> None:
        """Begins to copy gradients to their owners. `computed` has the gradients of each launch, by its index."""
        schedule, rows_first = self._of.schedule, self._of.kernels.rows_first
        with self._memory.copying():
            owners = {owner: self._gradients(owner, self._rooms[part]) for owner, _, _ in schedule.returned}
            for owner, its, row in schedule.returned:
                for to, x in zip(owners[owner], computed[its.launch], strict=True):
                    to[row : row + its.rows].copy_(rows_first(x)[its.key : its.key + its.rows], non_blocking=True)
        # Keeps the tensors alive until the copies have ended.
        self._computed.append(computed)

    def complete(self) -> None:
        """Makes the current stream wait until all gradients of the rank's rows have arrived."""
        self._memory.wait()
        self._memory.meet()

    def add(self, part: int, dk: Tensor, dv: Tensor) -> None:
        """Writes the sums of all gradients of the rank's rows, after `complete`."""
        schedule, rows_first = self._of.schedule, self._of.kernels.rows_first
        rank, computed = schedule.plan.rank, self._computed[part]
        arrived, row = self._gradients(rank, self._rooms[part]), 0
        parts: list[list[Tensor]] = []
        for its in schedule.returns:
            if its.rank == rank:
                parts.append([rows_first(x)[its.key : its.key + its.rows] for x in computed[its.launch]])
            else:
                parts.append([x[row : row + its.rows] for x in arrived])
                row += its.rows
        write_sums(schedule.sums, parts, [rows_first(dk), rows_first(dv)])

    def end(self) -> None:
        """Ends the call."""
        self._memory.end()

    def _bytes(self, rows: int, heads: int, dim: int) -> int:
        return aligned(rows * math.prod(self._batch) * heads * dim * self._dtype.itemsize)

    def _keys(self, rank: int, room: Room) -> Tensor:
        shape = self._of.schedule.most_published, *self._batch, room.heads, sum(self._dims)
        return self._memory.outgoing(rank, room.keys, shape, self._dtype)

    def _gradients(self, rank: int, room: Room) -> list[Tensor]:
        shape = self._of.schedule.most_returned, *self._batch, room.heads
        offsets = zip((room.dk, room.dv), self._dims)
        return [self._memory.incoming(rank, offset, (*shape, dim), self._dtype) for offset, dim in offsets]


class Pulled:
    """K and V of some heads, which are being copied from their owners."""

    def __init__(self, of: Gather, buffer: Tensor, dims: list[int], copied: torch.cuda.Event) -> None:
        self._of, self._buffer, self._dims, self._copied = of, buffer, dims, copied

    def wait(self) -> tuple[Tensor, Tensor]:
        """Waits for K and V, and returns them with the rows of the buffer."""
        self._copied.wait()
        return self._of.keys(self._buffer, self._dims)
