"""Implementations of the forward pass: functions of Q, K, V (batch, seqlen, heads, head_dim) and `causal`."""

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def implementations(fa3_library):
    """Ours by name, and FlashAttention-3's C++ if its compiled extension is given."""
    # Imported here, so that this module can be imported where fa3 is not installed.
    from fa3 import flash_attn_func

    functions = {"ours": flash_attn_func}
    if fa3_library is not None:
        torch.ops.load_library(fa3_library)
        functions["fa3"] = _flash_attention_3
    return functions


def bind(functions, q, k, v, causal):
    """The functions, bound to these arguments."""
    return {
        name: lambda function=function: function(q, k, v, causal=causal)
        for name, function in functions.items()
    }


def _flash_attention_3(q, k, v, causal, **descales):
    options = {"is_causal": causal, "softmax_scale": q.shape[-1] ** -0.5, **descales}
    out, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options)
    return out


def _sdpa(backend, q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


# PyTorch's own kernels: cuDNN and FlashAttention-2.
TORCH = {
    "cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "fa2": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
}
