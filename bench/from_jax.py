"""`fa3.jax.attention` beside JAX's own attention by cuDNN: one GPU, one process, in turns. It needs JAX, and no torch.

    python3 bench/from_jax.py

Inputs are bf16 under a causal mask, 16 heads of 128 columns; a time is the least of `ROUNDS` mean times of 20 calls of
a jitted function, in milliseconds. The ratio is cuDNN's time divided by ours. The exit code is 1 if both results
differ, and 2 without a Hopper GPU.
"""

import sys
import time

import jax
import jax.numpy as jnp

from fa3.jax import attention

ROUNDS = 5
CALLS = 20
# The largest relative distance of two right results.
WRONG = 0.02


def ours(q, k, v):
    """O by this package."""
    return attention(q, k, v, causal=True)


def cudnn(q, k, v):
    """O by cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def both_passes(function):
    """O and the gradients of a sum of O."""
    return lambda *x: (function(*x), jax.grad(lambda *x: function(*x).astype(jnp.float32).sum(), (0, 1, 2))(*x))


def milliseconds(function, x):
    """The mean time of a call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        results = function(*x)
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / CALLS * 1e3


def distance(x, right):
    """The relative distance of results."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(right), strict=True)
    norm = jnp.linalg.norm
    pairs = [(a.astype(jnp.float32).ravel(), b.astype(jnp.float32).ravel()) for a, b in pairs]
    return max(float(norm(a - b) / norm(b)) for a, b in pairs)


def measure(batch, seqlen, form):
    """Measures a setting and prints a line. Returns whether results agree."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = [jax.random.normal(key, (batch, seqlen, 16, 128), jnp.bfloat16) for key in keys]
    functions = {function.__name__: jax.jit(form(function)) for function in (ours, cudnn)}
    results = {by: jax.block_until_ready(function(*x)) for by, function in functions.items()}
    times = {by: [] for by in functions}
    for _ in range(ROUNDS):
        for by, function in functions.items():
            times[by].append(milliseconds(function, x))
    ms, apart = {by: min(of) for by, of in times.items()}, distance(results["ours"], results["cudnn"])
    text = "  ".join(f"{by} {of:7.3f} ms" for by, of in ms.items())
    name = "forward" if form is forward else "both passes"
    print(f"{batch:3} x {seqlen:5} {name:11}  {text}  ratio {ms['cudnn'] / ms['ours']:.3f}  apart {apart:.4f}", flush=True)
    return apart < WRONG


def forward(function):
    """O alone."""
    return function


def main():
    """Measures all settings. Returns the exit code."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        print("this benchmark needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    print(f"{device.device_kind}, JAX {jax.__version__}")
    settings = [(batch, 16384 // batch) for batch in (1, 4, 16)] + [(1, 16)]
    return 0 if all([measure(*setting, form) for setting in settings for form in (forward, both_passes)]) else 1


if __name__ == "__main__":
    sys.exit(main())
