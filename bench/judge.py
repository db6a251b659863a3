"""Errors of results, and the results that are wrong."""

import math

import torch


def exact(q, k, v, causal=True):
    """Float64 O of one head of one sequence. Under a causal mask the last row of Q is aligned with the last key."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def distance(x, right):
    """The relative error of x."""
    return ((x.double() - right).norm() / right.norm()).item()


def largest(errors):
    """The largest error. NaN is larger than any number."""
    return max(errors, key=lambda error: (error != error, error))


def print_wrong(errors, bound):
    """Prints the errors that are NaN or too large. `errors` are by implementation. Returns whether there are none."""
    wrong = {name: error for name, error in errors.items() if not error < bound}
    for name, error in wrong.items():
        print(f"WRONG: {name} has a relative error of {error:.3g}", flush=True)
    return not wrong
