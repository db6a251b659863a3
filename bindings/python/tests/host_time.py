"""How long a call takes on the host."""

import time

import torch


def microseconds(function, blocks=50, calls=50):
    """Host time of a call: the least over blocks, between which the GPU catches up,
    since others are at work on the host.
    """
    times = []
    for _ in range(blocks):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)
