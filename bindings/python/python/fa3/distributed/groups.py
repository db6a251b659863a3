"""Groups of heads, to overlap the exchange of their keys with computation.

A kernel waits for keys of other ranks. So heads of K and V are sent in groups: kernels compute with one group while the
next groups are sent. A launch for few heads does not fill a GPU, so there are only as many groups as hide most of the
transfer. The transfer of the first group is not hidden; the group is just large enough that the others arrive while it
is computed. With gradients there is a last group, whose gradients are not hidden. If the whole transfer is short, there
is one group.
"""

from typing import NamedTuple


class Rates(NamedTuple):
    """Bytes per second, by which the sizes of groups are chosen."""

    keys: float
    gradients: float


# The assumed speeds of a GPU and of its links. Measured on two H100: 560 to 700 TFLOP/s; messages of 16 MB at 72 to 142
# GB/s, and messages of 128 MB and more at 214 to 293 GB/s, or 91 GB/s beside a kernel of the backward pass. Measured on
# two H200: copies beside kernels at 326 to 329 GB/s.
FLOPS = 600e12
SENT = Rates(180e9, 90e9)
COPIED = Rates(300e9, 300e9)

# The cost of an additional group in seconds: a launch with few heads, which does not fill a GPU, and the host's time
# for it and for its copies. A shorter wait is not worth a group.
COST = 350e-6


def groups(heads: int, local: float, flops: float, sent: float, returned: float, rates: Rates) -> list[slice]:
    """The groups of heads of K and V, in the order in which they are sent, for a call of `flops` operations, where a
    rank receives `sent` bytes of keys and `returned` bytes of gradients. Each rank computes `local` of the operations
    while the first keys arrive.
    """
    compute = (flops - local) / FLOPS
    first = _heads(heads, compute, sent / rates.keys - local / FLOPS)
    last = _heads(heads, compute, returned / rates.gradients)
    if first + last >= heads:
        ends = [0, first, heads] if 0 < first < heads else [0, heads]
    else:
        ends = sorted({0, first, heads - last, heads})
    return [slice(start, stop) for start, stop in zip(ends, ends[1:])]


def _heads(heads: int, compute: float, transfer: float) -> int:
    """Smallest number of heads whose computation hides the transfer of all other heads; 0 if that transfer is short."""
    if transfer <= COST or heads == 1:
        return 0
    return min(max(1, round(heads * transfer / (compute + transfer))), heads)
