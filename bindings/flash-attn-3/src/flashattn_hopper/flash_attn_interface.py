"""FlashAttention-3's module, by fa3."""

from fa3.flash_attn_interface import *
