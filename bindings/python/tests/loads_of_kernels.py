"""Both passes over a driver that computes nothing (`stand_in_driver.c`), or their kernels alone. Prints what the driver
compiled, and the kernels with the places where their machine code comes from. Runs in a process of its own, which loads
that driver.
"""

import ctypes
import json
import sys

# The extension module needs no torch, which takes seconds to import.
sys.modules["torch"] = None  # type: ignore[assignment]

import calls_of_threads

from fa3 import _fa3

calls = [make((0, 0), 64) for make in (calls_of_threads.forward, calls_of_threads.backward)]
kernels, failures = [], []


def warm_up():
    kernels[:] = sorted(_fa3.warm_up(0, [(call.args[0], call.args[3]) for call in calls]))


try:
    if "warm" in sys.argv:
        warm_up()
    for call in calls:
        call()
    warm_up()
except RuntimeError as error:
    failures.append(str(error))
driver = ctypes.CDLL("libcuda.so.1")
driver.noted_compiled.restype = ctypes.c_char_p
compiled = [driver.noted_compiled(i).decode() for i in range(driver.noted_compiled_count())]
found = {"compiled": sorted(compiled), "kernels": kernels, "failures": failures}
json.dump(found | {"at once": driver.noted_at_once()}, sys.stdout)
