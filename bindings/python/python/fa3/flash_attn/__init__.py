"""A drop-in replacement for flash-attn 2: its functions, with their arguments, argument orders and results.

    from fa3.flash_attn import flash_attn_func, flash_attn_varlen_func
    from fa3.flash_attn.bert_padding import pad_input, unpad_input

There is no dropout and no ALiBi: a `dropout_p` other than 0, or `alibi_slopes` other than None, raises.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
