"""Sends keys and gradients between ranks as messages of their process group, while kernels run."""

import torch
from torch import Tensor

from .exchange import Message, Pending
from .gather import Gather
from .plan import Copy
from .sums import write_sums


class Messages:
    """The exchange of a call by messages, one group of K and V heads after the other."""

    def __init__(self, of: Gather, parts: list[slice], k: Tensor, v: Tensor) -> None:
        self._of = of
        self._gathered = [Gathered(of, k[..., part, :], v[..., part, :]) for part in parts]
        self._returned: list[Returned] = []

    def gather(self) -> list["Gathered"]:
        """Returns the keys that the rank needs, for each group of heads, while they are still being received."""
        return self._gathered

    def give_back(self, part: int, computed: dict[int, list[Tensor]]) -> None:
        """Sends gradients to their owners. `computed` has the gradients of each launch, by its index."""
        self._returned.append(Returned(self._of, computed))

    def complete(self) -> None:
        """Does nothing: `add` waits for each part."""

    def add(self, part: int, dk: Tensor, dv: Tensor) -> None:
        """Waits for all gradients of the rank's rows, and writes their sums."""
        self._returned[part].add(dk, dv)

    def end(self) -> None:
        """Does nothing: messages need no memory that calls share."""


class Gathered:
    """K and V of some heads, which are being received from their owners."""

    def __init__(self, of: Gather, k: Tensor, v: Tensor) -> None:
        schedule, rows_first = of.schedule, of.kernels.rows_first
        k, v = rows_first(k), rows_first(v)
        self._of, self._dims = of, [k.shape[-1], v.shape[-1]]
        # Each row of K lies beside its row of V, so that one message has both.
        self._buffer = buffer = k.new_empty(schedule.plan.buffer_rows, *k.shape[1:-1], sum(self._dims))
        for to, x in zip(buffer.split(self._dims, -1), (k, v), strict=True):
            for copy in schedule.own:
                to[copy.there] = x[copy.here]
        for rows in schedule.plan.zeros:
            buffer[rows] = 0
        sends = [Message(other, _contiguous(schedule.own, copy, k, v, buffer)) for other, copy in schedule.sends]
        receives = [Message(copy.owner, buffer[copy.there]) for copy in schedule.receives]
        self._pending = Pending(of.group.get(), sends, receives)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Waits for K and V, and returns them with the rows of the buffer."""
        self._pending.wait()
        return self._of.keys(self._buffer, self._dims)


class Returned:
    """Gradients of K and V of some heads, which are being sent to their owners."""

    def __init__(self, of: Gather, computed: dict[int, list[Tensor]]) -> None:
        """Sends the gradients. `computed` has the gradients of each launch, by the launch's index."""
        schedule, rows_first = of.schedule, of.kernels.rows_first
        self._of = of
        computed = {number: [rows_first(x) for x in gradients] for number, gradients in computed.items()}
        sends = [
            Message(owner, x[part.key : part.key + part.rows].contiguous())
            for owner, part, _ in schedule.returned
            for x in computed[part.launch]
        ]
        self._parts: list[list[Tensor]] = []
        receives = []
        # A rank without launches has no rows, and so receives no gradients.
        like = next(iter(computed.values()), [])
        for part in schedule.returns:
            if part.rank == schedule.plan.rank:
                self._parts.append([x[part.key : part.key + part.rows] for x in computed[part.launch]])
            else:
                self._parts.append([x.new_empty(part.rows, *x.shape[1:]) for x in like])
                receives += [Message(part.rank, x) for x in self._parts[-1]]
        self._pending = Pending(of.group.get(), sends, receives)

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Waits for all parts, and writes their sums to the gradients of the rank's rows."""
        self._pending.wait()
        write_sums(self._of.schedule.sums, self._parts, [self._of.kernels.rows_first(x) for x in (dk, dv)])


def _contiguous(own: tuple[Copy, ...], copy: Copy, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    """The rows of K and V that a copy sends: a slice of the rank's buffer if it has them, otherwise a new tensor."""
    for its in own:
        if its.row <= copy.row and copy.here.stop <= its.here.stop:
            first = its.offset + copy.row - its.row
            return buffer[first : first + copy.rows]
    return torch.cat([k[copy.here], v[copy.here]], -1)
