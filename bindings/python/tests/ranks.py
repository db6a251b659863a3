"""Processes that are the ranks of a group, on the CPU or a GPU each."""

import datetime
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(function, world, *arguments, device="cpu"):
    """Runs a function of a module with the device of each rank and these arguments. Fails if one of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (world, port, device, function, arguments), nprocs=world)


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
