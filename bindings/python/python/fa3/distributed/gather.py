"""A call of attention by a group of ranks: its schedule, kernels and memory."""

import math
from typing import NamedTuple

from torch import Tensor

from .group import Group
from .groups import COPIED, SENT, groups
from .kernels import Kernels
from .memory import Memory
from .plan import Launch, Schedule


class Gather(NamedTuple):
    """A call of attention by a group of ranks."""

    group: Group
    schedule: Schedule
    kernels: Kernels
    memory: Memory | None
    """Memory that the ranks share; without it they send messages."""

    def launches(self, local: bool) -> list[tuple[int, Launch]]:
        """Launches with their indices: if `local`, launches that read the rank's own keys, otherwise all other
        launches.
        """
        return [(n, launch) for n, launch in enumerate(self.schedule.plan.launches) if launch.is_local == local]

    def heads(self, q: Tensor, k: Tensor, v: Tensor, with_gradients: bool) -> list[slice]:
        """The groups of K and V heads to exchange, chosen by the work of the busiest rank, so that all ranks agree."""
        batch, dims = math.prod(q.shape[:-3]), q.shape[-1] + v.shape[-1]
        of_score = 2 * batch * q.shape[-2] * dims * (2.5 if with_gradients else 1)
        local, flops = (of_score * scores for scores in (self.schedule.local, self.schedule.scores))
        sent = self.schedule.received * batch * k.shape[-2] * dims * k.itemsize
        rates = SENT if self.memory is None else COPIED
        return groups(k.shape[-2], local, flops, sent, sent if with_gradients else 0, rates)

    def keys(self, buffer: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
        """K and V of these dimensions, from a buffer that has all rows of other ranks."""
        for here, there in self.schedule.plan.repeated:
            buffer[there] = buffer[here]
        k, v = map(self.kernels.rows_first, buffer.split(dims, -1))
        return k, v
