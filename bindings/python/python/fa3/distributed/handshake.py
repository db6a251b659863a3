"""Checks that all ranks make the same call. Ranks that differ would wait for each other's messages forever."""

import datetime
import os
import weakref

import torch.distributed as dist

# The environment variable that makes ranks compare every call, and not only new calls. It costs some milliseconds for
# each call.
VARIABLE = "FA3_DISTRIBUTED_CHECK"

# The time for which a rank waits for the other ranks when it makes a new call.
PATIENCE = datetime.timedelta(seconds=120)

# Number of calls of a group that are remembered: the most recent calls, equal on all ranks.
MOST = 4096

# Calls on which a group has agreed, in the order of their last use; and the number of times that the group was asked to
# agree.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, None]] = weakref.WeakKeyDictionary()
_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def compares_every_call() -> bool:
    """Whether the environment requires that every call is compared. All ranks must have the same value of the variable.
    """
    return os.environ.get(VARIABLE) == "1"


def agree(group: dist.ProcessGroup, call: str) -> None:
    """Waits until all ranks of a group have described their call, if this call has not been described before, or if
    every call is compared.

    Raises:
        ValueError: ranks have different calls.
        RuntimeError: a rank has not described its call in time.
    """
    rank, world, name = dist.get_rank(group), dist.get_world_size(group), group.group_name
    known = _agreed.setdefault(group, {})
    if world == 1:
        return
    if call in known and not compares_every_call():
        known[call] = known.pop(call)
        return
    store = dist.distributed_c10d._get_default_store()
    number = _asked[group] = _asked.get(group, 0) + 1
    keys, read = ([f"fa3/{name}/{number}/{other}{what}" for other in range(world)] for what in ("", "/read"))
    store.set(keys[rank], call)
    missing: list[int] = []
    for other in range(world):
        try:
            store.wait([keys[other]], PATIENCE if not missing else datetime.timedelta(milliseconds=10))
        except RuntimeError:
            missing.append(other)
    if missing:
        what = "this call" if compares_every_call() else "a call that is new to it"
        waited = f"{PATIENCE.total_seconds():.0f} s"
        raise RuntimeError(f"rank {rank} waited {waited} for ranks {missing} to begin {what}: {call}")
    calls = [store.get(key).decode() for key in keys]
    # The first rank may keep the store in its process. So it leaves last, when all have read.
    store.set(read[rank], "")
    if rank == 0:
        store.wait(read, PATIENCE)
        for key in (*keys, *read):
            store.delete_key(key)
    if len(set(calls)) > 1:
        each = "; ".join(f"rank {other}: {its}" for other, its in enumerate(calls))
        raise ValueError(f"ranks have different calls, expected the same of all. {each}")
    known.pop(call, None)
    known[call] = None
    if len(known) > MOST:
        del known[next(iter(known))]
