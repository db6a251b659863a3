"""How long a call takes on the host."""

import math
import time

import torch


def microseconds(function, blocks=50, calls=50):
    """Host time of a call: the least over blocks, between which the GPU catches up,
    since others are at work on the host.
    """
    [least] = microseconds_in_turns([function], blocks, calls)
    return least


def microseconds_in_turns(functions, blocks=50, calls=50):
    """Host times of calls that are compared: their blocks take turns, so that others' work slows all of them."""
    least = [math.inf] * len(functions)
    for _ in range(blocks):
        for i, function in enumerate(functions):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            least[i] = min(least[i], (time.perf_counter() - start) / calls * 1e6)
    return least
