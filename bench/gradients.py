"""Implementations of the backward pass, and exact gradients.

An implementation is a function of dO, Q, K, V (batch, seqlen, heads, head_dim), `causal` and `deterministic`.
It returns a function without arguments, which is timed and returns dQ, dK and dV.
"""

import functools

import torch

import implementations
import judge

# The operations of the backward pass, and of both passes together, relative to the forward pass.
BACKWARD, STEP = 2.5, 3.5


def backward(fa3_library, peers):
    """Backward passes by name: ours, FlashAttention-3's C++ if it is given, and `peers` from PyTorch."""
    return _all(fa3_library, peers, _ours_backward, _flash_attention_3_backward, _autograd_backward)


def step(fa3_library, peers):
    """Implementations of a forward and a backward pass, as training runs them, by name as in `backward`."""
    return _all(fa3_library, peers, _ours_step, _flash_attention_3_step, _autograd_step)


def exact(dout, q, k, v, causal):
    """dQ, dK and dV in float64 of one head, whose tensors are (seqlen, head_dim)."""
    q, k, v = leaves = _leaves(q.double(), k.double(), v.double())
    return torch.autograd.grad(judge.exact(q, k, v, causal), leaves, dout.double())


def _all(fa3_library, peers, ours, flash_attention_3, autograd):
    made = {"ours": ours}
    if fa3_library is not None:
        torch.ops.load_library(fa3_library)
        made["fa3"] = flash_attention_3
    return made | {name: functools.partial(autograd, implementations.TORCH[name]) for name in peers}


def _ours_backward(dout, q, k, v, causal, deterministic):
    # Imported here, so that this module can be imported where fa3 is not installed.
    from fa3 import flash_attn_func

    o, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    options = (None, q.shape[-1] ** -0.5, -1, 0 if causal else -1, 0, 0.0, 0, deterministic)
    return lambda: torch.ops.fa3.backward(dout, q, k, v, o, lse, *options)


def _ours_step(dout, q, k, v, causal, deterministic):
    from fa3 import flash_attn_func

    attention = functools.partial(flash_attn_func, deterministic=deterministic)
    return _autograd_step(attention, dout, q, k, v, causal)


def _flash_attention_3_backward(dout, q, k, v, causal, deterministic):
    o, lse = _flash_attention_3_forward(q, k, v, causal)
    return lambda: _flash_attention_3_gradients(dout, q, k, v, o, lse, causal, deterministic)


def _flash_attention_3_step(dout, q, k, v, causal, deterministic):
    def run():
        o, lse = _flash_attention_3_forward(q, k, v, causal)
        return _flash_attention_3_gradients(dout, q, k, v, o, lse, causal, deterministic)

    return run


def _flash_attention_3_forward(q, k, v, causal):
    o, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, softmax_scale=q.shape[-1] ** -0.5)
    return o, lse


def _flash_attention_3_gradients(dout, q, k, v, o, lse, causal, deterministic):
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    torch.ops.flash_attn_3.bwd(
        dout,
        q,
        k,
        v,
        o,
        lse,
        *gradients,
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=causal,
        deterministic=deterministic,
    )
    return gradients


def _autograd_backward(attention, dout, q, k, v, causal, deterministic=False):
    _refuse_deterministic(deterministic)
    leaves = _leaves(q, k, v)
    out = attention(*leaves, causal=causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _autograd_step(attention, dout, q, k, v, causal, deterministic=False):
    _refuse_deterministic(deterministic)
    leaves = _leaves(q, k, v)
    return lambda: torch.autograd.grad(attention(*leaves, causal=causal), leaves, dout)


def _refuse_deterministic(deterministic):
    """Refuses to measure PyTorch's deterministic forms, since PyTorch's switch for them is global."""
    if deterministic:
        raise NotImplementedError("it is not measured in a deterministic form")


def _leaves(*tensors):
    return [x.detach().requires_grad_() for x in tensors]
