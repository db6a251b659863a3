"""Padding taken out of a batch and put back, by the names and results of flash-attn 2's `bert_padding`."""

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
    """A tensor of so many rows, of which those at `indices` are `values` and the others 0, with gradients."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Takes padding out of (batch, seqlen, ...), which waits for a GPU.

    Arguments:
        attention_mask: which rows are no padding, (batch, seqlen) of bool, or of 1 and 0.
        unused_mask: rows that are kept besides, but not used.

    Returns: the rows that are kept (total, ...); where they lie among all rows, int64 (total,); cu_seqlens, int32
        (batch + 1,); the longest sequence; how many rows of each are used, int32 (batch,).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _ends(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Takes padding out of rows that have several sequences each.

    Arguments:
        attention_mask_in_length: the lengths of a row's sequences, and zeros behind them, (batch, seqlen).

    Returns: the first four results of `unpad_input`, with cu_seqlens of all sequences.
    """
    rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    indices = (rows < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _ends(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`, (batch, seqlen, ...). Padding is 0."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _ends(lengths: Tensor) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
