"""Messages between ranks, which are sent while kernels run."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A tensor that is sent to a rank of the group or received from it. Both ranks list their messages in the same
    order.
    """

    rank: int
    tensor: Tensor


class Pending:
    """Messages in flight. Before `wait`, sent tensors must not change, and received tensors must not be read."""

    def __init__(self, group: dist.ProcessGroup, sends: list[Message], receives: list[Message]) -> None:
        given = [(dist.isend, message) for message in sends] + [(dist.irecv, message) for message in receives]
        self._given = given
        # Both ranks skip an empty message.
        operations = [
            dist.P2POp(way, message.tensor, dist.get_global_rank(group, message.rank), group)
            for way, message in given
            if message.tensor.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Makes the current stream, or on the CPU the caller, wait until all messages have arrived."""
        for work in self._works:
            work.wait()
        self._works, self._given = [], []
