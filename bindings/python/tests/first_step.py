"""The first forward pass with gradients, dense and packed, over a driver that computes nothing (`stand_in_driver.c`).
Prints the kernels that were compiled by the end of the forward pass and of its threads, and after the backward pass.
Runs in a process of its own.
"""

import ctypes
import json
import pathlib
import re
import sys
import threading

sys.path.append(str(pathlib.Path(__file__).parents[3] / "bench"))

import host
import torch

import fa3


def dense(of_q, of_k):
    return fa3.flash_attn_func(of_q[None], of_k[None], of_k[None], causal=True)


def packed(of_q, of_k):
    ends = torch.tensor([0, 100, 256], dtype=torch.int32)
    return fa3.flash_attn_varlen_func(of_q, of_k, of_k, ends, ends, 156, 156, causal=True)


def main():
    host.pretend()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.noted_compiled.restype = ctypes.c_char_p

    def compiled():
        texts = [driver.noted_compiled(i).decode() for i in range(driver.noted_compiled_count())]
        return sorted(re.search(r"\.entry (\w+)", text)[1] for text in texts)

    found = {}
    for function in dense, packed:
        driver.forget()
        x = [torch.zeros(256, heads, 128, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2)]
        out = function(*x)
        for thread in threading.enumerate():
            if thread.name == "fa3.gradient":
                thread.join()
        found[function.__name__] = [compiled()]
        out.sum().backward()
        found[function.__name__].append(compiled())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
