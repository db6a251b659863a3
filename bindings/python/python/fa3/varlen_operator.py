"""The torch operators of packed sequences, `fa3::varlen_forward` and `fa3::varlen_backward`, and their variants that
write to given tensors.
"""

from collections.abc import Sequence
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
    split_keys: int | None = None
    intervals: Tensor | None = None
    max_logits: bool = False
    score: str | None = None
    score_tables: Sequence[Tensor] | None = None

    def of_backward(self) -> tuple[int | None, int | None, float | None, int, int, int, float, int, bool]:
        """The arguments of `fa3::varlen_backward` besides tensors, in its order."""
        hints = self.max_seqlen_q, self.max_seqlen_k
        window = self.window_left, self.window_right, self.attention_chunk
        return *hints, self.softmax_scale, *window, self.softcap, self.sm_margin, self.deterministic


# The names of the options that the extension module takes: the first fields of `Options`.
SCORES = " ".join(Options._fields[:8])


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
    """Computes O and, if wanted, LSE, as `operator.compute` does. `table` is a result of `make_table`, on a GPU."""
    descales = options.q_descale, options.k_descale, options.v_descale
    operator.refuse_tangents(NAMES, q, k, v, *operator.given(*descales))
    operator.check_ranks(q, k, v, packed=True)
    if out is not None:
        expected = *q.shape[:2], v.shape[2]
        operator.check_out_is(out, q, expected, "(total_q, heads_q, head_dim_v)", options.out_dtype)
    tensors: operator.Tensors = {"q": q, "k": k, "v": v, **sequences._asdict(), "table": table}
    tensors |= operator.checked_descales(q, k, sequences.cu_seqlens_q, *descales)
    if options.intervals is not None:
        tensors["intervals"] = operator.bounds(options.intervals, q)
    fields: str = SCORES
    values: tuple[Any, ...] = options[:8]
    if options.split_keys is not None:
        fields, values = f"{fields} split_keys", (*values, options.split_keys)
    fields, values = operator.with_score(fields, values, tensors, options.score, options.score_tables)
    return operator.attend("forward", fields, values, tensors, options, v.shape[2], with_lse, out)


def make_table(
    q: tuple[torch.dtype, int, int, int],
    kv: tuple[int, int, int],
    sequences: Sequences,
    options: dict[str, Any],
) -> Tensor:
    """Makes the table of work tiles for packed sequences. It has no elements on the CPU. `q` has the dtype, rows, heads
    and head_dim of Q, and `kv` has the rows, heads and head_dim_v of K and V.
    """
    dtype, rows, heads, head_dim = q
    keys, heads_kv, head_dim_v = kv
    like = sequences.cu_seqlens_q
    shapes = {"q": (rows, heads, head_dim), "k": (keys, heads_kv, head_dim), "v": (keys, heads_kv, head_dim_v)}
    tensors: dict[str, Any] = sequences._asdict()
    tensors |= {x: (dtype, 0, shape, (shape[1] * shape[2], shape[2], 1)) for x, shape in shapes.items()}
    operation, device = _fa3.Operation("forward_table", **options), like.get_device()
    where, allocate = (device, operator.current_stream(device)), operator.workspace_for(like)
    words = _fa3.run(operation, *where, tensors, allocate)
    # The CPU needs no table.
    tensors["table"] = table = like.new_empty(words or 0)
    if words:
        _fa3.run(operation, *where, tensors, allocate)
    return table


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
    """Computes the gradients by `gradient.launch`, whose options are `options`."""
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
    f"Tensor? qv=None, SymInt? split_keys=None, Tensor? intervals=None, bool max_logits=False, {operator.OF_SCORE}"
)
operator.define_attention("varlen_forward", _ARGUMENTS, launch, "flash_attn_varlen_func")
gradient.define("varlen_backward", _LISTS, launch_backward, launch_backward_into)
# Autograd for `fa3::varlen_forward`.
ATTENTION = gradient.Differentiable("varlen_forward", "varlen_backward", Options, launch, launch_backward, lists=4)
