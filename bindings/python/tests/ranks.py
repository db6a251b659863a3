"""Starts processes as the ranks of a group, on the CPU or with a GPU for each."""

import contextlib
import datetime
import multiprocessing
import os
import pathlib
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fa3.distributed.memory import Memory, aligned


def run(function, world, *arguments, device="cpu"):
    """Runs a module's function in `world` processes, with the rank's device and arguments. Fails if a rank fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # On the CPU ranks are forks of a process that has imported the slow modules. CUDA does not survive a fork.
    multiprocessing.set_forkserver_preload(["fa3.distributed", "torch.distributed"])
    method = "forkserver" if device == "cpu" else "spawn"
    mp.start_processes(_rank, (world, port, device, function, arguments), nprocs=world, start_method=method)


def _rank(rank, world, port, device, function, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120))
    try:
        function(torch.device(device), *arguments)
    finally:
        dist.destroy_process_group()


class Files(Memory):
    """Memory that ranks share on the CPU: files, from and to which tensors are copied at once."""

    def __init__(self, folder):
        self.device, self._folder = torch.device("cpu"), pathlib.Path(folder)
        self._sizes, self._round, self._rooms = (0, 0), 0, []

    def begin(self, outgoing, incoming):
        if outgoing > self._sizes[0] or incoming > self._sizes[1]:
            self._grow(max(outgoing, self._sizes[0]), max(incoming, self._sizes[1]))
        self._round += 1

    def _grow(self, outgoing, incoming):
        dist.barrier()
        self._sizes = aligned(outgoing), aligned(incoming)
        size = 2 * self._sizes[0] + self._sizes[1]
        names = [self._folder / f"{rank}-{size}" for rank in range(dist.get_world_size())]
        self._rooms = [torch.from_file(str(name), True, size, dtype=torch.uint8) for name in names]
        dist.barrier()

    def _tensor(self, rank, start, shape, dtype):
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        return self._rooms[rank][start:stop].view(dtype).view(shape)

    def meet(self):
        dist.barrier()

    def copying(self):
        return contextlib.nullcontext()

    def copied(self):
        return self

    def wait(self):
        pass

    def end(self):
        pass
