"""Attention of a rank's rows over gathered keys: O and the gradient of Q need no merge.

One launch computes each row of O, with its keys in the order of their positions. So O and LSE have the same bits as on
one GPU with the same tile.
"""

from typing import Any, Sequence

import torch
from torch import Tensor

from .copies import Copies, Pulled
from .gather import Gather
from .messages import Gathered, Messages
from .plan import Launch


def forward(of: Gather, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
    """O (..., rows, heads_q, head_dim_v) and LSE (..., heads_q, rows) of a rank's rows."""
    *batch, rows, heads_q, _ = q.shape
    out = q.new_empty(*batch, rows, heads_q, v.shape[-1])
    lse = q.new_empty(*batch, heads_q, rows, dtype=torch.float32)

    def run(launch: Launch, heads: slice, k_of: Tensor, v_of: Tensor) -> None:
        of_q = _queries(heads, q, k)
        at = (..., launch.rows, of_q, slice(None))
        lse[..., of_q, launch.rows] = of.kernels.forward(launch, q[at], k_of, v_of, _of_heads(s_aux, of_q), out[at])

    parts = of.heads(q, k, v, False)
    exchange = _exchange(of, parts, k, v, False)
    gathered: Sequence[Pulled | Gathered] = exchange.gather()
    for _, launch in of.launches(local=True):
        run(launch, slice(0, k.shape[-2]), *_keys(launch, k, v))
    for part, keys in zip(parts, gathered):
        k_of, v_of = keys.wait()
        for _, launch in of.launches(local=False):
            run(launch, part, *_keys(launch, k_of, v_of))
    exchange.end()
    return out, lse


def backward(
    of: Gather,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    s_aux: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes gradients of a rank's rows of Q, K and V from all ranks' rows, and of the sinks from its own rows."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = None if s_aux is None else torch.zeros_like(s_aux, dtype=torch.float32)

    def run(launch: Launch, heads: slice, k_of: Tensor, v_of: Tensor) -> list[Tensor]:
        of_q = _queries(heads, q, k)
        at = (..., launch.rows, of_q, slice(None))
        gradients = [*_keys(launch, dk, dv)] if launch.is_local else [_like(of, k_of), _like(of, v_of)]
        of_lse = (..., of_q, launch.rows)
        found = of.kernels.backward(
            launch,
            dout[at],
            q[at],
            k_of,
            v_of,
            out[at],
            lse[of_lse],
            None if dlse is None else dlse[of_lse],
            _of_heads(s_aux, of_q),
            (dq[at], gradients[0], gradients[1]),
        )
        if dsinks is not None and found is not None:
            dsinks[of_q] += found
        return gradients

    parts = of.heads(q, k, v, True)
    exchange = _exchange(of, parts, k, v, True)
    gathered: Sequence[Pulled | Gathered] = exchange.gather()
    local = {n: run(launch, slice(0, k.shape[-2]), *_keys(launch, k, v)) for n, launch in of.launches(local=True)}
    if not gathered:
        # Nothing is exchanged.
        parts = [slice(0, k.shape[-2])]
        exchange.give_back(0, local)
    for number, (part, keys) in enumerate(zip(parts, gathered)):
        k_of, v_of = keys.wait()
        computed = {n: [x[..., part, :] for x in gradients] for n, gradients in local.items()}
        for n, launch in of.launches(local=False):
            computed[n] = run(launch, part, *_keys(launch, k_of, v_of))
        exchange.give_back(number, computed)
    exchange.complete()
    for number, part in enumerate(parts):
        exchange.add(number, dk[..., part, :], dv[..., part, :])
    exchange.end()
    return dq, dk, dv, dsinks


class Attention(torch.autograd.Function):
    """O and LSE of a rank's rows, with gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, of: Gather) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse = forward(of, q, k, v, s_aux)
        ctx.save_for_backward(q, k, v, out, lse, s_aux)
        ctx.of = of
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Other ranks may need gradients from this rank, even if this rank needs none.
        q, k, v, out, lse, s_aux = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dsinks = backward(ctx.of, dout, q, k, v, out, lse, dlse, s_aux)
        return dq, dk, dv, None if dsinks is None else dsinks.to(s_aux.dtype), None


def _exchange(of: Gather, parts: list[slice], k: Tensor, v: Tensor, with_gradients: bool) -> Copies | Messages:
    """Begins to exchange keys, by groups of heads. Nothing is sent if no rank needs keys of another."""
    if of.schedule.is_alone:
        return Messages(of, [], k, v)
    if of.memory is None:
        return Messages(of, parts, k, v)
    return Copies(of, of.memory, parts, k, v, with_gradients)


def _queries(heads: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that share these heads of K."""
    group = q.shape[-2] // k.shape[-2]
    return slice(heads.start * group, heads.stop * group)


def _of_heads(s_aux: Tensor | None, heads: slice) -> Tensor | None:
    return None if s_aux is None else s_aux[heads]


def _keys(launch: Launch, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that a launch reads."""
    return k[..., launch.keys, :, :], v[..., launch.keys, :, :]


def _like(of: Gather, x: Tensor) -> Tensor:
    """A new tensor for the gradient of x, with its rows outermost in memory."""
    rows_first = of.kernels.rows_first
    return rows_first(torch.empty_like(rows_first(x), memory_format=torch.contiguous_format))
