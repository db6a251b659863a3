"""The interface of flash-attn 2, to be imported in its place: the same functions, arguments, orders and results.

    from fa3.flash_attn import flash_attn_func, flash_attn_varlen_func
    from fa3.flash_attn.bert_padding import pad_input, unpad_input

It has no dropout and no ALiBi: `dropout_p` is 0 and `alibi_slopes` None, and others are refused.
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
