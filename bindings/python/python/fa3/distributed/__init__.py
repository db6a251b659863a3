"""Context parallelism: attention over sequences whose rows are spread over a group of GPUs, over torch.distributed.

    from fa3.distributed import attention, positions, shard, unshard

    local = shard(x, dim=1)                           # this rank's rows
    out = attention(q, k, v, causal=True)             # of this rank's rows, as if on one GPU
    x = unshard(local, dim=1)                         # all rows, on every rank

docs/distributed.md says how it works, and how long it takes.
"""

from .attention import attention, attention_varlen
from .sharding import positions, shard, unshard

__all__ = ["attention", "attention_varlen", "positions", "shard", "unshard"]
