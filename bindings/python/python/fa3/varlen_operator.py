"""The torch operators of packed sequences, `fa3::varlen_forward` and `fa3::varlen_backward`, and their variants that
write to given tensors.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _fa3, gradient, operator
from .sequences import Sequences

NAMES = "q, k, v or a descale"


class Options(NamedTuple):
    """The arguments of `fa3::varlen_forward` besides q, k, v and the lists, in this order."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    window_left: int
    window_right: int
    attention_chunk: int
    softcap: float
    sm_margin: int
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    deterministic: bool = False
    s_aux: Tensor | None = None
    qv: Tensor | None = None

    def of_backward(self) -> tuple[int | None, int | None, float | None, int, int, int, float, int, bool]:
        """The arguments of `fa3::varlen_backward` besides tensors, in its order."""
        hints = self.max_seqlen_q, self.max_seqlen_k
        window = self.window_left, self.window_right, self.attention_chunk
        return *hints, self.softmax_scale, *window, self.softcap, self.sm_margin, self.deterministic


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    *options: Any,
    out: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls `compute` with the arguments of `fa3::varlen_forward`."""
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return compute(q, k, v, sequences, Options(*options, **named), out=out)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    options: Options,
    with_lse: bool = True,
    out: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and, if wanted, LSE, as in `operator.compute`. `table` is a result of `make_table`, on a GPU."""
    descales = options.q_descale, options.k_descale, options.v_descale
    operator.refuse_tangents(NAMES, q, k, v, *operator.given(*descales))
    operator.check_ranks(q, k, v, packed=True)
    sequences.check()
    if out is not None:
        expected = *q.shape[:2], v.shape[2]
        operator.check_out_is(out, q, expected, "(total_q, heads_q, head_dim_v)", options.out_dtype)
    dense = operator.checked_descales(q, k, sequences.batch, *descales)
    numbers = operator.scores(options)
    numbers["max_seqlen_q"], numbers["max_seqlen_k"] = options.max_seqlen_q, options.max_seqlen_k
    dense |= sequences._asdict()
    if table is not None:
        dense["table"] = table
    return operator.attend("forward", {"q": q, "k": k, "v": v}, options, numbers, dense, {}, v.shape[2], with_lse, out)


def make_table(
    q: tuple[torch.dtype, int, int, int],
    kv: tuple[int, int, int],
    sequences: Sequences,
    options: dict[str, Any],
) -> Tensor:
    """The table of work tiles for packed sequences on a GPU. `q` are the dtype, rows, heads and head_dim of Q, `kv` the
    rows, heads and head_dim_v of K and V.
    """
    dtype, rows, heads, head_dim = q
    keys, heads_kv, head_dim_v = kv
    name, like = operator.name_of(dtype), sequences.cu_seqlens_q
    shapes = {"q": (rows, heads, head_dim), "k": (keys, heads_kv, head_dim), "v": (keys, heads_kv, head_dim_v)}
    given: dict[str, Any] = {x: (name, 0, shape, (shape[1] * shape[2], shape[2], 1)) for x, shape in shapes.items()}
    # Copies live until the launch.
    lists = {name: x.contiguous() for name, x in sequences._asdict().items() if x is not None}
    given |= {name: ("i32", x.data_ptr(), x.shape, x.stride()) for name, x in lists.items()}
    device, allocate = like.get_device(), operator.workspace_for(like)
    at = device, operator.current_stream(device)
    words = _fa3.run("forward_table", *at, given, options, allocate)
    assert words is not None
    table = like.new_empty(words)
    _fa3.run("forward_table", *at, given | {"table": ("i32", table.data_ptr(), (words,), (1,))}, options, allocate)
    return table


def launch_into(*inputs: Any, o: Tensor) -> Tensor:
    """Returns LSE, and writes O to `o`."""
    operator.refuse_grad(o, *(x for x in inputs if isinstance(x, Tensor)), function="flash_attn_varlen_func")
    _, lse = launch(*inputs, out=o)
    assert lse is not None
    return lse


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *options: Any,
    **outputs: Any,
) -> tuple[Tensor, ...]:
    """The gradients, computed by `gradient.launch`. `options` are its options."""
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    named = dict(sequences=sequences, hints=(max_seqlen_q, max_seqlen_k), **outputs)
    return gradient.launch(dout, q, k, v, o, lse, dlse, *options, **named)


def launch_backward_into(*inputs: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes dQ, dK and dV to given tensors."""
    launch_backward(*inputs, outputs=(dq, dk, dv))


_LISTS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, "
)
_ARGUMENTS = (
    f"Tensor q, Tensor k, Tensor v, {_LISTS}float? softmax_scale, SymInt window_left, SymInt window_right, "
    "SymInt attention_chunk, float softcap, SymInt sm_margin, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, ScalarType? out_dtype=None, bool deterministic=False, Tensor? s_aux=None, "
    "Tensor? qv=None"
)
operator.define("varlen_forward", _ARGUMENTS, "(Tensor o, Tensor lse)", launch)
# Not named `out`: torch.compile would assume that it is contiguous.
operator.define("varlen_forward_out", f"{_ARGUMENTS}, *, Tensor(a!) o", "Tensor lse", launch_into)
gradient.define("varlen_backward", _LISTS, launch_backward, launch_backward_into)
# Autograd of `fa3::varlen_forward`.
ATTENTION = gradient.Differentiable("varlen_forward", "varlen_backward", Options, launch, launch_backward, lists=4)
