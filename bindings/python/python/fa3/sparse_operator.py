"""The torch operator of attention over listed keys (sparse attention), `fa3::sparse_forward`, and its variant that
writes O to a given tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operator, refusal

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
    lse_base_two: bool = False
    lse_without_sink: bool = False
    lse_empty_is_infinite: bool = False
    # Whether LSE has the largest scores behind it: (2, tokens, heads_q, 1).
    max_logits: bool = False
    # The scales of rows of v, if v is float8_e4m3fn beside k of bfloat16: float32 (pages, page_rows, 1, groups of 128
    # columns), as far apart as rows of v. On a GPU.
    v_scales: Tensor | None = None

    @property
    def out_dtype(self) -> None:
        """O has the dtype of Q."""


# The names of the extension module's options.
_NAMES = "softmax_scale sm_margin split_keys"


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
    fields, values = operator.with_lse_form(_NAMES, options[:3], options)
    given: operator.Tensors = {"q": q, "k": k, "v": v, "v_scales": options.v_scales, **lists._asdict()}
    return operator.attend("forward", fields, values, given, options, v.shape[3], with_lse, out)


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
    return operator.given(*tensors, lists.extra_k, lists.extra_v, options.s_aux, options.qv, options.v_scales)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor? seqused_k, Tensor? extra_k, Tensor? extra_v, "
    "Tensor? extra_indices, Tensor? extra_seqused_k, float? softmax_scale, SymInt sm_margin, SymInt split_keys, "
    "Tensor? s_aux=None, Tensor? qv=None, bool lse_base_two=False, bool lse_without_sink=False, "
    "bool lse_empty_is_infinite=False, bool max_logits=False, Tensor? v_scales=None"
)
operator.define_attention("sparse_forward", _ARGUMENTS, launch, "flash_mla_with_kvcache")
refusal.register(f"{NAMES} {NO_GRADIENT}", "sparse_forward")
