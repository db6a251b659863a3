"""`fa3.warm_up` over a driver that computes nothing (`stand_in_driver.c`). Prints what it returns, and how many kernels
were compiled by then, after the first call, and after a call that it was not told of. Runs in a process of its own.
"""

import ctypes
import json
import sys
from types import SimpleNamespace

import calls_of_threads
import torch

import fa3

Q, KV = (1, 64, 4, 64), (1, 64, 2, 64)


def step():
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (Q, KV, KV))
    fa3.flash_attn_func(q, k, v, causal=True).sum().backward()


def forward(causal):
    tensors = dict(zip("qkvo", (calls_of_threads.tensor(*shape) for shape in (Q, KV, KV, Q))))
    window = (-1, 0, 0) if causal else (-1, -1, 0)
    calls_of_threads.call("forward", (0, 0), tensors, window=window)()


driver = ctypes.CDLL("libcuda.so.1")
counts = []
config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=1024, sliding_window=256)
warmed = [fa3.warm_up(step, device=0).result(), fa3.warm_up(config, training=True, device=0).result()]
for call in (lambda: None, lambda: forward(causal=True), lambda: forward(causal=False)):
    call()
    counts.append(driver.noted_compiled_count())
json.dump({"warmed": warmed, "compiled": counts}, sys.stdout)
