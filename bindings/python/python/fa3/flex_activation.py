"""This package's `flex_attention` inside of torch's function of this name.

Torch has no place for another FlexAttention, and code holds its function in many ways: by name, imported, or compiled.
So the code of the function object is replaced, and that of `create_block_mask`, which then keeps what kernels need.
"""

import types
from typing import Any

import torch
from torch import Tensor

from . import _fa3, activation, flex, operator

__all__ = ["FlexActivation", "put"]


class FlexActivation:
    """Torch's functions have the code of this module until `restore` is called."""

    def __init__(self, codes: list[tuple[Any, types.CodeType]]) -> None:
        self._codes = codes

    def restore(self) -> None:
        """Gives torch's functions their own code."""
        for function, code in self._codes:
            function.__code__ = code
        self._codes = []


def put() -> FlexActivation:
    """Puts this module's functions in the place of torch's. If they are there, the result has nothing to restore.

    Raises:
        NotImplementedError: torch has another FlexAttention.
    """
    try:
        from torch.nn.attention import flex_attention as torchs
    except ImportError:
        raise NotImplementedError(f"torch {torch.__version__} has no FlexAttention") from None
    pairs = (torchs.flex_attention, _flex_attention), (torchs.create_block_mask, _create_block_mask)
    codes = []
    for function, ours in pairs:
        if function.__code__ is ours.__code__:
            continue
        if _parameters(function.__code__) != _parameters(ours.__code__) or function.__closure__:
            raise NotImplementedError(f"torch {torch.__version__} has another {function.__name__}, expected 2.11's")
        codes.append((function, function.__code__))
    for function, code in codes:
        own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        own.__kwdefaults__ = function.__kwdefaults__
        _torchs[function.__name__] = own
    for function, ours in pairs:
        function.__code__ = ours.__code__
    return FlexActivation(codes)


# Torch's own functions, by name.
_torchs: dict[str, Any] = {}


def _parameters(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# Functions for their code, which finds global names in torch's module.
def _flex_attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    from fa3 import flex_activation

    options = scale, enable_gqa, return_lse, kernel_options, return_aux
    return flex_activation.attend(query, key, value, score_mod, block_mask, *options)


def _create_block_mask(
    mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False
):  # type: ignore[no-untyped-def]  # fmt: skip
    from fa3 import flex_activation

    return flex_activation.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """Computes a call of torch's `flex_attention`, or hands it to torch's own function."""
    is_ours = _is_ours(query, key, value, enable_gqa) and _can_trace(block_mask)
    if return_aux is not None and (return_lse or return_aux.max_scores):
        is_ours = False
    if kernel_options is not None and kernel_options.get("BACKEND", "AUTO") != "AUTO":
        is_ours = False
    if is_ours:
        found = _attend(query, key, value, score_mod, block_mask, scale, enable_gqa)
        if found is not None:
            out, lse = found
            if query.stride(1) > query.stride(2):
                # Torch's O has the order of query's axes in memory.
                out = out.contiguous()
            if return_aux is not None:
                from torch.nn.attention.flex_attention import AuxOutput

                return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
            return (out, lse) if return_lse else out
    return _torchs["flex_attention"](
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: Any
) -> tuple[Tensor, Tensor] | None:
    """O and LSE; None if this package refuses the call."""
    try:
        if torch.compiler.is_compiling():
            score, mask = flex.prepared(query, key, score_mod, block_mask)
            # A compiler cannot catch what operators raise.
            if score is not None and not _is_accepted(score.text, tuple(x.dim() for x in score.tables)):
                return None
            return flex.attend(query, key, value, score, mask, scale)
        return flex.flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse=True)
    except (NotImplementedError, TypeError, ValueError):
        return None


def create_block_mask(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any, BLOCK_SIZE: Any, _compile: Any
) -> Any:
    """Makes a mask by torch's own function. It keeps its intervals, which compiled calls cannot find."""
    mask = _torchs["create_block_mask"](mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile)
    if not torch.compiler.is_compiling() and _has_kernels(mask.kv_num_blocks.get_device()):
        try:
            flex.keep_seen_keys(mask)
        except (NotImplementedError, TypeError, ValueError):
            pass
    return mask


def _is_ours(query: Any, key: Any, value: Any, enable_gqa: Any) -> bool:
    """Whether our kernels compute such tensors, forward and backward, without copies of K and V."""
    tensors = query, key, value
    if not all(type(x) is Tensor and x.dim() == 4 and x.dtype == query.dtype for x in tensors):
        return False
    device = query.get_device()
    if not _has_kernels(device) or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    (batch, heads, _, head_dim), (batch_k, heads_kv, keys, head_dim_k), of_v = query.shape, key.shape, value.shape
    if tuple(of_v[:3]) != (batch_k, heads_kv, keys) or head_dim_k != head_dim or batch_k not in (1, batch):
        return False
    if heads % heads_kv or (heads != heads_kv and not enable_gqa) or 0 in (*query.shape, *of_v):
        return False
    if any(x.get_device() != device or x.stride(3) != 1 or any(n % 8 for n in x.stride()[:3]) for x in tensors):
        return False
    return all(n <= 256 and n % 8 == 0 for n in (head_dim, of_v[3]))


def _can_trace(mask: Any) -> bool:
    """Whether the intervals of a mask are known where they cannot be found."""
    return mask is None or not torch.compiler.is_compiling() or flex.known_seen_keys(mask) is not None


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernels(device: int) -> bool:
    """Whether our kernels run on the device with this index."""
    return bool(activation._has_kernels(device))  # type: ignore[attr-defined]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_accepted(text: str, axes: tuple[int, ...]) -> bool:
    """Whether kernels compute the function of scores with this text, given the number of axes of each table."""
    x = torch.bfloat16, 0, (1, 8, 1, 64), (512, 64, 64, 1)
    tensors = dict.fromkeys("qkvo", x) | {
        f"score_table{i}": (torch.float32, 0, (1,) * n, (1,) * n) for i, n in enumerate(axes)
    }
    try:
        operation = operator.made("forward", f"{operator.SCORES} score", None, -1, -1, 0, 0.0, 0, text)
        _fa3.run(operation, 0, None, tensors, None)
    except ValueError:
        return False
    return True
