"""FlashAttention-3 for NVIDIA Hopper: exact attention, with FlashAttention-3's own interface.

    O = softmax(mask(cap(softmax_scale * Q K^T))) V        LSE = ln sum_k exp(score)

`flash_attn_func` and `flash_attn_qkvpacked_func` take torch tensors on a Hopper GPU or on the CPU, and are
differentiable. `flash_attn_varlen_func` and `flash_attn_varlen_qkvpacked_func` take sequences of different lengths,
packed into one tensor. `flash_attn_with_kvcache` computes attention over a contiguous or paged KV cache, as decoding
does. Context parallelism calls `_flash_attn_forward` and `_flash_attn_backward`, which are also in
`fa3.flash_attn_interface`.
`flash_attn_fp8_func` takes float16 and bfloat16 tensors and computes in 8 bits, without gradients. `quantize` converts
a tensor to float8_e4m3fn, with a scale for each block of rows, for each head or for the tensor; it optionally applies
rotary embedding and a random-sign Hadamard transform first. `quantize_channels` quantizes V with a mean and a scale for
each channel. `flash_attn_combine` merges attention over disjoint sets of keys.
`activate` runs torch's own `scaled_dot_product_attention` on these kernels. `fa3.transformers.register` does so for
models of Hugging Face transformers. `fa3.flash_attn_interface` has FlashAttention-3's names, `fa3.flash_attn` has
flash-attn 2's, and `fa3.flash_mla` has FlashMLA's. `fa3.masks` makes masks that are intervals of keys, also from
FlexAttention's mask functions. `fa3.distributed` is context parallelism. `fa3.jax` has attention for JAX, and
`fa3.tvm_ffi` every operation by tvm-ffi; neither is imported here. The driver compiles a kernel when a call first needs
it, in a second or less; there is nothing else to build. `warm_up` compiles kernels beforehand, in the background.
"""

from typing import TYPE_CHECKING, Any

from ._fa3 import __version__

if TYPE_CHECKING:
    from . import distributed as distributed

__all__ = [
    "Score",
    "__version__",
    "activate",
    "flash_attn_combine",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_fp8_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "get_scheduler_metadata",
    "quantize",
    "quantize_channels",
    "warm_up",
]

try:
    from . import flash_attn, flash_mla, flops, masks, sglang, transformers, vllm
    from .activation import activate
    from .attention import flash_attn_func, flash_attn_qkvpacked_func
    from .combine import flash_attn_combine
    from .flex import flex_attention
    from .flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    from .fp8 import flash_attn_fp8_func
    from .kvcache import flash_attn_with_kvcache, get_scheduler_metadata
    from .quantize import quantize, quantize_channels
    from .score import Score
    from .varlen import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
    from .varlen_fp8 import flash_attn_varlen_fp8_func
    from .warm_up import warm_up
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    from ._without_torch import stand_in

    activate = stand_in("activation", "activate")
    flash_attn_combine = stand_in("combine", "flash_attn_combine")
    flash_attn_fp8_func = stand_in("fp8", "flash_attn_fp8_func")
    flash_attn_func = stand_in("attention", "flash_attn_func")
    flash_attn_qkvpacked_func = stand_in("attention", "flash_attn_qkvpacked_func")
    flash_attn_varlen_fp8_func = stand_in("varlen_fp8", "flash_attn_varlen_fp8_func")
    flash_attn_varlen_func = stand_in("varlen", "flash_attn_varlen_func")
    flash_attn_varlen_qkvpacked_func = stand_in("varlen", "flash_attn_varlen_qkvpacked_func")
    flash_attn_with_kvcache = stand_in("kvcache", "flash_attn_with_kvcache")
    flex_attention = stand_in("flex", "flex_attention")
    get_scheduler_metadata = stand_in("kvcache", "get_scheduler_metadata")
    _flash_attn_backward = stand_in("flash_attn_interface", "_flash_attn_backward")
    _flash_attn_forward = stand_in("flash_attn_interface", "_flash_attn_forward")
    quantize = stand_in("quantize", "quantize")
    quantize_channels = stand_in("quantize", "quantize_channels")
    Score = stand_in("score", "Score")  # type: ignore[assignment, misc]
    warm_up = stand_in("warm_up", "warm_up")


def __getattr__(name: str) -> Any:
    # `fa3.distributed` is imported only when it is used: it imports torch's compiler, which takes seconds.
    if name == "distributed":
        from importlib import import_module

        return import_module(f"{__name__}.distributed")
    raise AttributeError(f"module 'fa3' has no attribute {name!r}")
