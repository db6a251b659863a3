"""The torch operator of attention over listed keys (sparse attention), `fa3::sparse_forward`, and its variant that
writes O to a given tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cached_operator, operator, refusal
from .cache import Cache

NAMES = "q, a cache or attn_sink"
NO_GRADIENT = "requires grad, and attention over a cache has no gradients"


class Lists(NamedTuple):
    """The arguments of `fa3::sparse_forward` that say which rows are keys, in this order. An index that is no row of
    its cache is no key.
    """

    indices: Tensor
    seqused_k: Tensor | None = None
    extra_k: Tensor | None = None
    extra_v: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_seqused_k: Tensor | None = None


class Options(NamedTuple):
    """The arguments of `fa3::sparse_forward` behind the lists, in this order."""

    softmax_scale: float | None
    sm_margin: int
    split_keys: int
    s_aux: Tensor | None = None
    qv: Tensor | None = None

    @property
    def out_dtype(self) -> None:
        """O has the dtype of Q."""


# Options for the extension module.
_SCORES = cached_operator.Options._fields[:7]


def launch(
    q: Tensor, k: Tensor, v: Tensor, *inputs: Any, out: Tensor | None = None, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `compute` with the arguments of `fa3::sparse_forward`."""
    of_lists = len(Lists._fields)
    return compute((q, k, v), Lists(*inputs[:of_lists]), Options(*inputs[of_lists:], **named), out=out)


def compute(
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: Lists,
    options: Options,
    with_lse: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE, as in `operator.compute`: of q (tokens, 1, heads_q, head_dim), and caches (pages,
    page_rows, heads_kv, ...).
    """
    q, k, v = tensors
    operator.refuse_tangents(NAMES, *_floats(tensors, lists, options))
    operator.check_ranks(q, k, v)
    if out is not None:
        expected = *q.shape[:3], v.shape[3]
        operator.check_out_is(out, q, expected, "(tokens, 1, heads_q, head_dim_v)", None)
    scores = options.softmax_scale, -1, -1, 0, 0.0, options.sm_margin, options.split_keys
    if q.is_cuda:
        pages = _pages_of_one_row(k, v, lists)
        of_cache = cached_operator.Options(*scores, s_aux=options.s_aux, qv=options.qv)
        return cached_operator.compute((q, *pages[0]), None, pages[1], of_cache, with_lse, out)
    given: operator.Tensors = {"q": q, "k": k, "v": v, **lists._asdict()}
    return operator.attend("forward", " ".join(_SCORES), scores, given, options, v.shape[3], with_lse, out)


def _pages_of_one_row(k: Tensor, v: Tensor, lists: Lists) -> tuple[tuple[Tensor, Tensor], Cache]:
    """The cache as pages of one row each, which kernels read today. Entries that are no key are moved behind the
    others, and are not in use.
    """
    if lists.extra_indices is not None:
        raise NotImplementedError("a second cache is not supported on a GPU yet")
    pages, page_rows = k.shape[:2]
    # Rows from a page to the next.
    apart = k.stride(0) // max(1, k.stride(1)) if pages > 1 and page_rows > 1 else page_rows
    if pages > 1 and page_rows > 1 and any(x.stride(0) != apart * x.stride(1) for x in (k, v)):
        raise NotImplementedError("pages that are not whole rows apart are not supported on a GPU yet")
    indices, keys = lists.indices, lists.indices.shape[1]
    is_key = (indices >= 0) & (indices < pages * page_rows)
    if lists.seqused_k is not None:
        is_key &= torch.arange(keys, device=k.device) < lists.seqused_k[:, None]
    order = is_key.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    listed = indices.gather(1, order)
    table = listed if apart == page_rows else listed // max(1, page_rows) * apart + listed % max(1, page_rows)
    rows = (pages - 1) * apart + page_rows if pages else 0

    def flat(x: Tensor) -> Tensor:
        of_row = x.stride(1) if page_rows > 1 else x.stride(0)
        return x.as_strided((rows, 1, *x.shape[2:]), (of_row, of_row, *x.stride()[2:]))

    used = is_key.sum(1, dtype=torch.int32)
    return (flat(k), flat(v)), Cache(used, table, None, None, None, None, None, keys)


def attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: Lists,
    options: Options,
    with_lse: bool = True,
    out: Tensor | None = None,
    function: str = "flash_mla_with_kvcache",
) -> tuple[Tensor, Tensor | None]:
    """Returns O and, if wanted, LSE: computed into `out`, by the operators for traces, or directly. `function` is the
    caller's name for errors.
    """
    floats = _floats(tensors, lists, options)
    given = (*floats, *operator.given(lists.indices, lists.seqused_k, lists.extra_indices, lists.extra_seqused_k, out))
    for x in given:
        operator.refuse_nested("an argument", x)
    is_plain = operator.is_plain(*given)
    inputs: tuple[Any, ...] = (*tensors, *lists, *options)
    if out is None and not (is_plain and not operator.needs_grad(*floats)):
        refusal.derivatives(NAMES, NO_GRADIENT, *floats)
        return torch.ops.fa3.sparse_forward(*inputs)
    if out is not None:
        operator.refuse_grad(out, *floats, function=function)
    if is_plain:
        results = compute(tensors, lists, options, with_lse, out)
        operator.tell_autograd(*operator.given(out))
        return results
    assert out is not None
    if operator.is_transformed():
        raise NotImplementedError("out is not supported inside of torch.func's transforms")
    return out, torch.ops.fa3.sparse_forward_out(*inputs, o=out)


def _floats(tensors: tuple[Tensor, Tensor, Tensor], lists: Lists, options: Options) -> list[Tensor]:
    """The tensors that may require grad."""
    return operator.given(*tensors, lists.extra_k, lists.extra_v, options.s_aux, options.qv)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor? seqused_k, Tensor? extra_k, Tensor? extra_v, "
    "Tensor? extra_indices, Tensor? extra_seqused_k, float? softmax_scale, SymInt sm_margin, SymInt split_keys, "
    "Tensor? s_aux=None, Tensor? qv=None"
)
operator.define_attention("sparse_forward", _ARGUMENTS, launch, "flash_mla_with_kvcache")
refusal.register(f"{NAMES} {NO_GRADIENT}", "sparse_forward")
