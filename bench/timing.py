"""Measures how long calls on a GPU take: in turns of some milliseconds, or for seconds, with power and clock."""

import contextlib
import dataclasses
import statistics
import time

import torch

# The number of calls that measure how long one takes, and the least number of calls that are timed.
FEW = 3

# The milliseconds of calls between two readings of power and clock.
READING_MS = 25.0


def in_turns(functions, rounds, slice_ms, contexts=None):
    """Median milliseconds of a call of each function, by name.

    In each round every function runs for about `slice_ms`, and each round begins with another function, so that
    throttling affects all alike. `contexts[name]`, if it exists, makes a context manager, within which the function of
    this name runs. Entering and leaving it are not timed.
    """
    contexts = contexts or {}
    calls, times = {}, {name: [] for name in functions}
    for name, function in functions.items():
        with contexts.get(name, contextlib.nullcontext)():
            calls[name] = _calls_within(function, slice_ms)
    for turn in range(rounds):
        for name in rotated(list(functions), turn):
            with contexts.get(name, contextlib.nullcontext)():
                times[name].append(_milliseconds(functions[name], calls[name]))
    return {name: statistics.median(taken) for name, taken in times.items()}


def rotated(names, turn):
    """The names, beginning with another one in each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


@dataclasses.dataclass
class Sustained:
    """The measurements of a function that ran for seconds."""

    # Milliseconds of a call.
    ms: float
    # The board's average power in watts. None without NVML, or if its energy counter was updated less than twice.
    watts: float | None
    # The SMs' average clock in MHz. None without NVML.
    sm_mhz: float | None

    @property
    def millijoules(self):
        """The energy of a call."""
        return None if self.watts is None else self.watts * self.ms

    def numbers(self):
        """All measurements, by name."""
        return {**dataclasses.asdict(self), "millijoules": self.millijoules}


def sustain(function, warm_up, seconds, meter):
    """Runs a function alone: `warm_up` seconds until the clock has settled, then `seconds` that are timed."""
    calls = _calls_within(function, READING_MS)
    _run_for(function, calls, warm_up, None)
    ms, readings = _run_for(function, calls, seconds, meter)
    sm_mhz = statistics.fmean(mhz for _, _, mhz in readings) if readings else None
    return Sustained(ms, watts([(now, joules) for now, joules, _ in readings]), sm_mhz)


def watts(readings):
    """The mean power between the first and the last time that the energy counter moved.

    A reading is a time in seconds and the counter in joules. The counter is constant between its updates, so only the
    first reading after an update has the right time.
    """
    updates = [after for before, after in zip(readings, readings[1:]) if after[1] != before[1]]
    if len(updates) < 2:
        return None
    (first_time, first_joules), (last_time, last_joules) = updates[0], updates[-1]
    return (last_joules - first_joules) / (last_time - first_time)


def _run_for(function, calls, seconds, meter):
    """Milliseconds of a call, and readings of time, energy and clock, one after each `calls` calls."""
    readings = []
    total = 0
    torch.cuda.synchronize()
    start = before = _event()
    began = time.monotonic()
    while True:
        for _ in range(calls):
            function()
        total += calls
        end = _event()
        # Waits for the previous calls, so that the GPU always has work, but not too much of it.
        before.synchronize()
        before = end
        now = time.monotonic()
        if meter is not None:
            readings.append((now, meter.joules(), meter.sm_mhz()))
        if now - began >= seconds:
            break
    end.synchronize()
    return start.elapsed_time(end) / total, readings


def _calls_within(function, milliseconds):
    """The number of calls that take this many milliseconds."""
    _milliseconds(function, FEW)
    return max(FEW, int(milliseconds / max(_milliseconds(function, FEW), 1e-3)))


def _milliseconds(function, calls):
    """Milliseconds of a call, from calls that follow each other without a pause."""
    torch.cuda.synchronize()
    start = _event()
    for _ in range(calls):
        function()
    end = _event()
    end.synchronize()
    return start.elapsed_time(end) / calls


def _event():
    """An event that is recorded now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
