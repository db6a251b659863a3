"""Messages between ranks, on the way while kernels run."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A tensor that goes to a rank of the group or comes from it. Both ranks list what goes between them in the same
    order.
    """

    rank: int
    tensor: Tensor


class Pending:
    """Messages on their way. What is sent must not change, and what is received not be read, before `wait`."""

    def __init__(self, group: dist.ProcessGroup, sends: list[Message], receives: list[Message]) -> None:
        given = [(dist.isend, message) for message in sends] + [(dist.irecv, message) for message in receives]
        self._given = given
        # An empty message is none, to either rank.
        operations = [
            dist.P2POp(way, message.tensor, dist.get_global_rank(group, message.rank), group)
            for way, message in given
            if message.tensor.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Lets the current stream wait until all have arrived; on the CPU, the caller."""
        for work in self._works:
            work.wait()
        self._works, self._given = [], []
