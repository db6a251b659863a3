"""FlashAttention-3's package name, for the functions of fa3: it has `flash_attn_interface`."""
