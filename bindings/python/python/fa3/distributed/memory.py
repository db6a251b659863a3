"""Memory that all ranks of a machine read and write: torch's symmetric memory. Copy engines copy it over NVLink, beside
kernels. NCCL's messages are kernels themselves, which wait for SMs until an attention kernel ends.
"""

import importlib.util
import socket
import weakref
from typing import Any, ContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from .group import Group

# The alignment of tensors in bytes.
ALIGNMENT = 256

# The time for which a rank waits for the other ranks on the GPU before it gives up.
PATIENCE_MS = 600_000


class Memory:
    """A group's memory. Each rank has two buffers from which other ranks read: the rank writes one while other ranks
    may still read the other. It has one buffer to which other ranks write.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = Group(group), device
        self._stream = torch.cuda.Stream(device)
        self._last = torch.cuda.Event()
        self._sizes = (0, 0)
        self._handle: Any = None
        self._round = 0

    def begin(self, outgoing: int, incoming: int) -> None:
        """Begins a call in which other ranks read at most `outgoing` bytes of each rank, and write at most `incoming`
        bytes to it. All ranks give the same numbers.
        """
        torch.cuda.current_stream(self.device).wait_event(self._last)
        if outgoing > self._sizes[0] or incoming > self._sizes[1]:
            self._grow(max(outgoing, self._sizes[0]), max(incoming, self._sizes[1]))
        self._round += 1

    def outgoing(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer of a rank from which other ranks read, at a byte offset."""
        return self._tensor(rank, self._round % 2 * self._sizes[0] + offset, shape, dtype)

    def incoming(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer of a rank to which other ranks write, at a byte offset."""
        return self._tensor(rank, 2 * self._sizes[0] + offset, shape, dtype)

    def meet(self) -> None:
        """Makes the current stream wait until the streams of all ranks have reached this point."""
        self._handle.barrier(0, PATIENCE_MS)

    def copying(self) -> ContextManager[Any]:
        """A context whose copies run beside kernels, after all work on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def copied(self) -> torch.cuda.Event:
        """Records an event after all copies that have begun."""
        return self._stream.record_event()

    def wait(self) -> None:
        """Makes the current stream wait for all copies that have begun."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def end(self) -> None:
        """Ends a call, on the current stream."""
        self._last.record()

    def _grow(self, outgoing: int, incoming: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        # Other ranks may still read the old memory.
        torch.cuda.synchronize(self.device)
        dist.barrier(self._group.get(), device_ids=[self.device.index])
        self._handle, self._sizes = None, (aligned(outgoing), aligned(incoming))
        room = symmetric.empty(2 * self._sizes[0] + self._sizes[1], dtype=torch.uint8, device=self.device)
        self._handle = symmetric.rendezvous(room, self._group.get())

    def _tensor(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._handle.get_buffer(rank, shape, dtype, start // dtype.itemsize)


# Memory by group and by the rank's GPU; None if the group cannot share memory.
_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Memory | None]] = weakref.WeakKeyDictionary()


def memory_of(group: dist.ProcessGroup, device: torch.device) -> Memory | None:
    """The memory that a group shares on these GPUs. None if it cannot share memory, or while a CUDA graph is captured.
    All ranks get the same answer.
    """
    if device.type != "cuda" or dist.get_world_size(group) == 1 or torch.cuda.is_current_stream_capturing():
        return None
    known = _memories.setdefault(group, {})
    if device not in known:
        known[device] = Memory(group, device) if _can_share(group, device) else None
    return known[device]


def _can_share(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the GPUs of all ranks are in one machine and reach each other."""
    has_module = importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    mine = socket.gethostname(), device.index, torch.cuda.device_count(), has_module
    hosts, numbers, counts, have = zip(*_of_ranks(group, mine))
    if len(set(hosts)) > 1 or len(set(numbers)) < len(numbers) or max(numbers) >= min(counts) or not all(have):
        return False
    others = [other for other in numbers if other != device.index]
    return all(_of_ranks(group, all(torch.cuda.can_device_access_peer(device, other) for other in others)))


def _of_ranks(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """A list of every rank's `mine`."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found


def aligned(size: int) -> int:
    """A size, rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
