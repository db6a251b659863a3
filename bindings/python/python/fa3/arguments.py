"""Converts arguments to numbers, and checks them before any operator sees them. An invalid argument raises, with a
sentence."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import operator

_FLOAT32 = torch.float32
# The dtypes of tensors that have scales.
_SCALED = (torch.float8_e4m3fn, torch.int8)
# While torch.compile traces, a number may be a symbol.
_INTEGERS = (int, torch.SymInt)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
# The number of keys of a piece (split_keys) is a multiple of this.
_KEYS_OF_PIECES = 128
# Number by which operators know the pieces that split_keys="fixed" means.
_FIXED = -2
# The columns of Q and K in the tiles of kernels with `qv`.
_COLUMNS = 64


def under_autocast(*given: Any) -> tuple[Any, ...]:
    """Casts float32 tensors to the dtype of `torch.autocast`, as torch does for its own attention."""
    for x in given:
        if x is not None and getattr(x, "dtype", None) is _FLOAT32:
            kind = x.device.type
            if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
                to = torch.get_autocast_dtype(kind)
                return tuple(x.to(to) if getattr(x, "dtype", None) is _FLOAT32 else x for x in given)
            break
    return given


def scores_of_values(q: Any, k: Any, v: Any, qv: Any, softmax_scale: Any) -> tuple[Any, Any, Any]:
    """Q, K and the factor on scores. If Q and K are None, scores are the product of `qv` and V alone: then Q is zeros,
    K is a part of V's columns, and their product adds nothing.
    """
    if not (q is k is None) or not all(isinstance(x, Tensor) and x.dim() for x in (qv, v)):
        return q, k, softmax_scale
    columns = min(qv.shape[-1], v.shape[-1], _COLUMNS)
    q = qv.new_zeros(*qv.shape[:-1], columns)
    return q, v[..., :columns], qv.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def number(name: str, given: Any) -> float:
    """Converts a number to a float. A symbol of torch.compile stays as it is."""
    if type(given) is float:
        return given
    given = _scalar(name, given)
    if not isinstance(given, _NUMBERS):
        raise TypeError(f"{name} is {_words(given)}, expected a number")
    try:
        return torch.sym_float(given)  # type: ignore[return-value]
    except OverflowError:
        raise ValueError(f"{name} {given} is too large or too small a number") from None


def integer(name: str, given: Any) -> int:
    """Converts an integer that fits into 64 bits with a sign."""
    given = whole(name, given)
    # A symbol of torch.compile, whose value is not known, cannot be compared.
    if isinstance(given, int) and not is_compiling() and not -(2**63) <= given < 2**63:
        raise ValueError(f"{name} {given} is too large or too small a number")
    return given


def whole(name: str, given: Any) -> int:
    """Converts an integer of any size."""
    if type(given) is int:
        return given
    given = _scalar(name, given)
    if not isinstance(given, _INTEGERS):
        raise TypeError(f"{name} is {_words(given)}, expected an integer")
    return given  # type: ignore[return-value]


def hint(name: str, given: Any) -> int | None:
    """Converts a hint, which changes no result. Returns None if to read it would wait for a GPU or break a trace."""
    if isinstance(given, Tensor) and given.dim() == 0 and not (given.is_cpu and operator.is_plain(given)):
        return None
    return None if given is None else integer(name, given)


def flag(name: str, given: Any) -> bool:
    """Converts a bool."""
    if type(given) is bool:
        return given
    given = _scalar(name, given)
    if not isinstance(given, int):
        raise TypeError(f"{name} is {_words(given)}, expected True or False")
    return bool(given)


def window(given: Any) -> tuple[int, int]:
    """Both sides of a window, given as a pair, as a tensor of two, or as None for no window."""
    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            raise ValueError(f"window_size is {given}, expected (left, right)")
    elif isinstance(given, Tensor):
        if given.shape != (2,):
            raise TypeError(f"window_size is a tensor of shape {tuple(given.shape)}, expected (left, right)")
    elif given is None:
        return -1, -1
    else:
        raise TypeError(f"window_size is {_words(given)}, expected (left, right)")
    return _side("the left side of window_size", given[0]), _side("the right side of window_size", given[1])


def _side(name: str, given: Any) -> int:
    """Number of keys of a window on one side. None, a negative number, and 2^31 or more mean all keys, and become -1.
    """
    keys = -1 if given is None else whole(name, given)
    return keys if 0 <= keys < 2**31 else -1


def scores(
    softmax_scale: Any, causal: Any, window_size: Any, attention_chunk: Any, softcap: Any
) -> tuple[float | None, int, int, int, float]:
    """The scale of Q K^T, both sides of the window, the keys of a chunk and the soft cap, as operators take them. None
    means the default scale, no window, no chunks and no cap.
    """
    left, right = window(window_size)
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale)
    chunk = 0 if attention_chunk is None else integer("attention_chunk", attention_chunk)
    cap = 0.0 if softcap is None else number("softcap", softcap)
    return scale, left, 0 if flag("causal", causal) else right, chunk, cap


def mask_of_data(causal: Any, intervals: Any, q: Any = None, tree_mask: Any = None) -> tuple[Any, Any]:
    """Whether all sequences are causal, and the mask that is data, as operators take it: intervals; numbers that say
    which sequences are causal, int32 (batch, 1, 1, 1); or the words of a tree, int32 (batch, seqlen_q, words, 1).
    """
    numbers = causal if isinstance(causal, Tensor) and causal.dim() > 0 else None
    if numbers is None and tree_mask is None:
        return causal, intervals
    given = dict(intervals=intervals, tree_mask=tree_mask, causal=numbers)
    names = [name for name, x in given.items() if x is not None]
    if len(names) > 1:
        raise ValueError(f"there are {' and '.join(names)} as tensors, expected one of them")
    if numbers is None:
        return causal, _words_of_tree(tree_mask, q)
    if numbers.dim() != 1 or numbers.dtype not in (torch.bool, torch.int32):
        found = f"{numbers.dtype} {tuple(numbers.shape)}"
        raise ValueError(f"causal is {found}, expected True, False, or torch.bool (batch,)")
    return False, numbers.to(torch.int32).contiguous()[:, None, None, None] if numbers.shape[0] else None


def _words_of_tree(tree: Any, q: Any) -> Tensor:
    """The words of a tree of a dense or packed q, checked, as 32-bit words."""
    tensor("tree_mask", tree)
    tensor("q", q)
    words = tree.unsqueeze(-1) if tree.dim() == q.dim() - 2 else tree
    if tree.dtype != torch.int64 or words.shape[:-1] != q.shape[:-2] or words.shape[-1] == 0:
        what = "(total_q,) or (total_q, words)" if q.dim() == 3 else "(batch, seqlen_q) or (batch, seqlen_q, words)"
        found = f"{tree.dtype} {tuple(tree.shape)}"
        raise ValueError(f"tree_mask is {found}, expected torch.int64 {what} beside q of {tuple(q.shape)}")
    words = words.contiguous().view(torch.int32).unsqueeze(-1)
    return words.unsqueeze(0) if q.dim() == 3 else words


def descales(q: Any, k: Any, v: Any, *given: Any) -> list[Tensor | None]:
    """The descales of float8_e4m3fn and int8 tensors. For other tensors they are None, and given descales are ignored
    as in FlashAttention-3.
    """
    if given[0] is given[1] is given[2] is None:
        return [None, None, None]
    kept: list[Tensor | None] = []
    for name, x, descale in zip(("q_descale", "k_descale", "v_descale"), (q, k, v), given, strict=True):
        if descale is not None:
            tensor(name, descale)
        kept.append(descale if getattr(x, "dtype", None) in _SCALED else None)
    return kept


def split_keys(given: Any, num_splits: Any) -> int:
    """How CTAs split the keys of a cache, as operators take it: as `pieces` does, or else 0 for no split and -1 for
    equal shares.
    """
    splits, keys = integer("num_splits", num_splits), pieces(given)
    if keys is None:
        return 0 if splits == 1 else -1
    if splits != 0:
        raise ValueError(f"there are split_keys and num_splits {splits}, expected one of them")
    return keys


def pieces(given: Any) -> int | None:
    """The pieces into which keys are cut, as operators take them: -2 for "fixed", or the number of keys of a piece;
    None if keys are not cut.
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "fixed":
        return _FIXED
    keys = 0 if isinstance(given, str) else integer("split_keys", given)
    if isinstance(keys, int) and (keys <= 0 or keys % _KEYS_OF_PIECES != 0):
        expected = f"'fixed', a multiple of {_KEYS_OF_PIECES}, or None"
        raise ValueError(f"split_keys is {_words(given)}, expected {expected}")
    return keys


def output(name: str, given: Any) -> torch.dtype:
    """Checks a dtype of O."""
    if given not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name} is {given}, expected torch.float16 or torch.bfloat16")
    return given


def metadata(given: Any) -> Tensor | None:
    """The table given as scheduler_metadata, or None if it has no elements."""
    if given is None:
        return None
    tensor("scheduler_metadata", given)
    if given.dtype != torch.int32 or given.dim() != 1:
        raise ValueError(f"scheduler_metadata is {given.dtype} {tuple(given.shape)}, expected torch.int32 (numbers,)")
    return given if given.shape[0] > 0 else None


def page_table(given: Any, older: Any) -> Any:
    """The page table, under either of its names."""
    if given is not None and older is not None:
        raise ValueError("there are page_table and block_table, expected one of them")
    return older if given is None else given


def check_hints(num_splits: Any, pack_gqa: Any) -> None:
    """Checks hints, which may change how a call is computed, but no result beyond its rounding."""
    integer("num_splits", num_splits)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)


def refuse(**given: bool) -> None:
    """Refuses the arguments of these names whose conditions are True."""
    for name, is_given in given.items():
        if is_given:
            raise NotImplementedError(f"{name} is not supported yet")


def unpacked(qkv: Any, num_heads_q: Any, rows: str) -> tuple[Tensor, ...]:
    """Q, K and V as views of a tensor (rows, 3, heads, head_dim), or (rows, heads_q + 2 * heads_kv, head_dim) with
    num_heads_q. `rows` names its first dimensions.
    """
    tensor("qkv", qkv)
    outer = rows.count(",") + 1
    if num_heads_q is None:
        if qkv.dim() != outer + 3 or qkv.shape[outer] != 3:
            raise ValueError(f"qkv is {tuple(qkv.shape)}, expected ({rows}, 3, heads, head_dim)")
        return qkv.unbind(outer)
    num_heads_q = integer("num_heads_q", num_heads_q)
    heads_kv = (qkv.shape[outer] - num_heads_q) // 2 if qkv.dim() == outer + 2 else 0
    if not (heads_kv > 0 and num_heads_q + 2 * heads_kv == qkv.shape[outer]):
        wanted = f"({rows}, {num_heads_q} + 2 * heads_kv, head_dim)"
        raise ValueError(f"qkv is {tuple(qkv.shape)}, expected {wanted} with num_heads_q {num_heads_q}")
    return qkv.split([num_heads_q, heads_kv, heads_kv], dim=outer)


def tensor(name: str, given: Any) -> None:
    """Refuses anything but a tensor."""
    if type(given).__name__ == "BlockMask":
        raise TypeError(f"{name} is BlockMask, expected torch.Tensor: fa3.masks.from_mask_mod makes one of it")
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is {type(given).__name__}, expected torch.Tensor")
    operator.refuse_nested(name, given)


def _scalar(name: str, given: Any) -> Any:
    """Returns the number in a tensor or array without dimensions, and any other argument unchanged."""
    if isinstance(given, Tensor):
        if operator.needs_grad(given):
            raise NotImplementedError(f"{name} requires grad, and has no gradient: give a number")
        operator.refuse_tangents(name, given)
        if given.dim() != 0:
            raise TypeError(f"{name} is a tensor of shape {tuple(given.shape)}, expected a number")
        if given.device.type != "cpu":
            raise TypeError(f"{name} is a tensor on {given.device}, for which the call would wait: give a number")
    elif getattr(given, "ndim", None) != 0:
        return given
    return given.item()


def _words(given: Any) -> str:
    """A short description of an argument."""
    return repr(given) if isinstance(given, (str, int, float, complex, type(None))) else f"a {type(given).__name__}"
