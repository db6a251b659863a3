"""Attention of a rank's rows, for which the keys of others are gathered: O and the gradient of Q need no merge.

Each row of O is computed by one launch, with its keys in the order of their positions. So it has the bits that one GPU
gives, LSE too.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Message, Pending
from .groups import groups
from .kernels import Kernels
from .plan import Copy, Launch, Schedule


class Gather(NamedTuple):
    """A call of a group of ranks."""

    group: dist.ProcessGroup
    schedule: Schedule
    kernels: Kernels

    def launches(self, local: bool) -> list[tuple[int, Launch]]:
        """The launches whose keys are the rank's own or not, with their numbers."""
        return [(n, launch) for n, launch in enumerate(self.schedule.plan.launches) if launch.is_local == local]

    def heads(self, q: Tensor, k: Tensor, v: Tensor, with_gradients: bool) -> list[slice]:
        """The groups in which heads of K and V go: by what the busiest rank has to do, so that all have the same."""
        batch, dims = q[..., 0, 0, 0].numel(), q.shape[-1] + v.shape[-1]
        flops = 2 * batch * q.shape[-2] * dims * self.schedule.scores * (2.5 if with_gradients else 1)
        sent = self.schedule.received * batch * k.shape[-2] * dims * k.itemsize
        return groups(k.shape[-2], flops, sent, sent if with_gradients else 0)


class Gathered:
    """K and V of some heads on their way from their owners."""

    def __init__(self, of: Gather, k: Tensor, v: Tensor) -> None:
        schedule, rows_first = of.schedule, of.kernels.rows_first
        k, v = rows_first(k), rows_first(v)
        self._of, self._dims = of, [k.shape[-1], v.shape[-1]]
        # A row of K and one of V beside each other, so that both go in one message.
        self._buffer = buffer = k.new_empty(schedule.plan.buffer_rows, *k.shape[1:-1], sum(self._dims))
        for to, x in zip(buffer.split(self._dims, -1), (k, v), strict=True):
            for copy in schedule.own:
                to[copy.there] = x[copy.here]
        for rows in schedule.plan.zeros:
            buffer[rows] = 0
        sends = [Message(other, _contiguous(schedule.own, copy, k, v, buffer)) for other, copy in schedule.sends]
        receives = [Message(copy.owner, buffer[copy.there]) for copy in schedule.receives]
        self._pending = Pending(of.group, sends, receives)

    def wait(self) -> tuple[Tensor, Tensor]:
        """K and V, when they have come, with the rows of the buffer."""
        self._pending.wait()
        k, v = map(self._of.kernels.rows_first, self._buffer.split(self._dims, -1))
        return k, v


class Returned:
    """Gradients of K and V of some heads on their way to their owners."""

    def __init__(self, of: Gather, computed: dict[int, list[Tensor]]) -> None:
        """`computed` has the gradients that each launch computed, by its number."""
        schedule, rows_first = of.schedule, of.kernels.rows_first
        self._of = of
        computed = {number: [rows_first(x) for x in gradients] for number, gradients in computed.items()}
        sends = [
            Message(owner, x[part.key : part.key + part.rows].contiguous())
            for owner, part in schedule.returned
            for x in computed[part.launch]
        ]
        self._parts: list[list[Tensor]] = []
        receives = []
        like = next(iter(computed.values()))
        for part in schedule.returns:
            if part.rank == schedule.plan.rank:
                self._parts.append([x[part.key : part.key + part.rows] for x in computed[part.launch]])
            else:
                self._parts.append([x.new_empty(part.rows, *x.shape[1:]) for x in like])
                receives += [Message(part.rank, x) for x in self._parts[-1]]
        self._pending = Pending(of.group, sends, receives)

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Writes the sums of all parts, when they have come, to the gradients of the rank's rows."""
        self._pending.wait()
        for which, to in enumerate([dk, dv]):
            for total in self._of.schedule.sums:
                terms = [self._parts[part][which][row : row + total.rows] for part, row in total.terms]
                _add(self._of.kernels.rows_first(to)[total.row : total.row + total.rows], terms)


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
    gathered = _gather(of, parts, k, v)
    for _, launch in of.launches(local=True):
        run(launch, slice(0, k.shape[-2]), *_keys(launch, k, v))
    for part, keys in zip(parts, gathered):
        k_of, v_of = keys.wait()
        for _, launch in of.launches(local=False):
            run(launch, part, *_keys(launch, k_of, v_of))
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
    """The gradients of a rank's rows of Q, K and V by the rows of all ranks; and of the sinks by its own rows."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = None if s_aux is None else torch.zeros_like(s_aux, dtype=torch.float32)

    def run(launch: Launch, heads: slice, k_of: Tensor, v_of: Tensor) -> list[Tensor]:
        of_q = _queries(heads, q, k)
        at = (..., launch.rows, of_q, slice(None))
        gradients = [_like(of, k_of), _like(of, v_of)]
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
    gathered = _gather(of, parts, k, v)
    local = {n: run(launch, slice(0, k.shape[-2]), *_keys(launch, k, v)) for n, launch in of.launches(local=True)}
    if not gathered:
        # Nothing comes and nothing goes.
        Returned(of, local).add(dk, dv)
    returned = []
    for part, keys in zip(parts, gathered):
        k_of, v_of = keys.wait()
        computed = {n: [x[..., part, :] for x in gradients] for n, gradients in local.items()}
        for n, launch in of.launches(local=False):
            computed[n] = run(launch, part, *_keys(launch, k_of, v_of))
        returned.append((part, Returned(of, computed)))
    for part, gradients in returned:
        gradients.add(dk[..., part, :], dv[..., part, :])
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
        # Other ranks may want gradients of this one's keys, whatever is wanted here.
        q, k, v, out, lse, s_aux = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dsinks = backward(ctx.of, dout, q, k, v, out, lse, dlse, s_aux)
        return dq, dk, dv, None if dsinks is None else dsinks.to(s_aux.dtype), None


def _gather(of: Gather, parts: list[slice], k: Tensor, v: Tensor) -> list[Gathered]:
    """Begins to gather all heads, a group after the other; none, if no rank needs keys of another."""
    if of.schedule.is_alone:
        return []
    return [Gathered(of, k[..., part, :], v[..., part, :]) for part in parts]


def _contiguous(own: tuple[Copy, ...], copy: Copy, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    """The rows that a copy takes, as they lie in the rank's own buffer, or else as a new tensor."""
    for its in own:
        if its.row <= copy.row and copy.here.stop <= its.here.stop:
            first = its.offset + copy.row - its.row
            return buffer[first : first + copy.rows]
    return torch.cat([k[copy.here], v[copy.here]], -1)


def _queries(heads: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads of heads of K."""
    group = q.shape[-2] // k.shape[-2]
    return slice(heads.start * group, heads.stop * group)


def _of_heads(s_aux: Tensor | None, heads: slice) -> Tensor | None:
    return None if s_aux is None else s_aux[heads]


def _keys(launch: Launch, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that a launch reads."""
    return k[..., launch.keys, :, :], v[..., launch.keys, :, :]


def _like(of: Gather, x: Tensor) -> Tensor:
    """A new tensor for the gradient of one, whose rows lie in memory one after the other."""
    rows_first = of.kernels.rows_first
    return rows_first(torch.empty_like(rows_first(x), memory_format=torch.contiguous_format))


def _add(to: Tensor, terms: list[Tensor]) -> None:
    """Writes a sum, which is rounded once."""
    if not terms:
        to.zero_()
    elif len(terms) == 1:
        to.copy_(terms[0])
    elif len(terms) == 2:
        torch.add(*terms, out=to)
    else:
        to.copy_(torch.stack(terms).sum(0, dtype=torch.float32))
