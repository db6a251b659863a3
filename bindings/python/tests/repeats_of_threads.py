"""Calls that functions make again, by four threads on two streams of torch at once, and while the stream is captured,
over a driver that computes nothing (`stand_in_driver.c`). Prints the launches of each thread, with its stream, and how
many counters calls zeroed. Runs in a process of its own, which loads that driver.
"""

import ctypes
import json
import pathlib
import sys
import threading

sys.path.append(str(pathlib.Path(__file__).parents[3] / "bench"))

import host
import torch

import fa3
from fa3 import _fa3

CALLS = 20
STREAMS = 5, 6


def main():
    host.pretend()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.noted_kernel.restype = ctypes.c_char_p
    driver.noted_stream.restype = ctypes.c_uint64
    zeroed, longer, zero, run = [], [], torch.Tensor.zero_, _fa3.run
    torch.Tensor.zero_ = lambda x: zeroed.append(x) or zero(x)
    _fa3.run = lambda *given: longer.append(given) or run(*given)
    # A table of sequences in the workspace, and then attention.
    call = host.calls("cpu")["packed"]
    call()
    driver.forget()
    del longer[:], zeroed[:]
    names = {}

    def repeat(stream):
        driver.use_stream(ctypes.c_void_p(stream))
        names[threading.get_native_id()] = stream
        for _ in range(CALLS):
            call()

    threads = [threading.Thread(target=repeat, args=(stream,)) for stream in (*STREAMS, *STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = [
        (driver.noted_thread(i), names[driver.noted_thread(i)], driver.noted_stream(i), driver.noted_kernel(i).decode())
        for i in range(driver.noted_count())
    ]
    found = {"launches": launches, "zeroed": len(zeroed), "longer": len(longer)}
    driver.capture(1)
    call()
    json.dump(found | {"captured": len(zeroed), "longer at last": len(longer)}, sys.stdout)


if __name__ == "__main__":
    main()
