"""Measures the time of a call on the host."""

import math
import time

import torch


def microseconds(function, blocks=50, calls=50):
    """The host time of a call: the least over blocks of calls, since other processes use the host too. Between blocks
    the GPU, if there is one, catches up.
    """
    [least] = microseconds_in_turns([function], blocks, calls)
    return least


def microseconds_in_turns(functions, blocks=50, calls=50):
    """The host times of several functions. Blocks of calls take turns, so that other processes slow all alike."""
    least = [math.inf] * len(functions)
    for _ in range(blocks):
        for i, function in enumerate(functions):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            least[i] = min(least[i], (time.perf_counter() - start) / calls * 1e6)
    return least
