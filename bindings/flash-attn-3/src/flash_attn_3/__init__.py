"""FlashAttention-3's package, by fa3: it has `flash_attn_interface`."""
