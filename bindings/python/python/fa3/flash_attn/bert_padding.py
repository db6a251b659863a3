"""Removes and restores padding, with the names and results of flash-attn 2's `bert_padding`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x at `indices` (rows,), with gradients."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor with first_axis_dim rows: `values` at `indices`, and 0 elsewhere, with gradients."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Removes the padding of (batch, seqlen, ...), and waits for the GPU.

    Arguments:
        attention_mask: which rows are not padding, (batch, seqlen) of bool, or of 1 and 0.
        unused_mask: further rows that are kept, but not used.

    Returns: the rows that are kept (total, ...); their indices among all rows, int64 (total,); cu_seqlens, int32
        (batch + 1,); the longest sequence; how many rows of each sequence are used, int32 (batch,).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _ends(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Removes the padding of rows that hold several sequences each.

    Arguments:
            attention_mask_in_length: (batch, seqlen), which has in each row the lengths of its sequences, then zeros.

    Returns: the first four results of `unpad_input`, with cu_seqlens of all sequences.
    """
    rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    indices = (rows < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _ends(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: returns (batch, seqlen, ...), where padding is 0."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _ends(lengths: Tensor) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
