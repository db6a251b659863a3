"""FlashAttention-3's module name, for the functions of fa3."""

from fa3.flash_attn_interface import *
