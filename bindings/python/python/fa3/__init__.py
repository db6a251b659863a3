"""FlashAttention-3 for NVIDIA Hopper: exact attention, with FlashAttention-3's own interface.

    O = softmax(mask(cap(softmax_scale * Q K^T))) V        LSE = ln sum_k exp(score)

`flash_attn_func` and `flash_attn_qkvpacked_func` take torch tensors on a Hopper GPU, and are differentiable.
`flash_attn_fp8_func` takes float16 and bfloat16 tensors, and computes in 8 bits, without gradients. `quantize` makes
float8_e4m3fn codes of a tensor, with scales of blocks of rows, of heads or of the tensor, and with rotary embedding and
a random-sign Hadamard transform before it if you want. `quantize_channels` makes those of V with a mean and a scale for
each channel. The driver compiles a kernel at the first call of a new kind, in a second or less; there is nothing else
to build.
"""

from ._fa3 import __version__

__all__ = [
    "__version__",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "quantize",
    "quantize_channels",
]

try:
    from .attention import flash_attn_func, flash_attn_qkvpacked_func
    from .fp8 import flash_attn_fp8_func
    from .quantize import quantize, quantize_channels
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise

    def _needs_torch(name: str):
        def function(*_arguments, **_options):
            raise ImportError(f"fa3.{name} needs PyTorch, which is not installed")

        return function

    flash_attn_fp8_func = _needs_torch("flash_attn_fp8_func")
    flash_attn_func = _needs_torch("flash_attn_func")
    flash_attn_qkvpacked_func = _needs_torch("flash_attn_qkvpacked_func")
    quantize = _needs_torch("quantize")
    quantize_channels = _needs_torch("quantize_channels")
