"""The kernel launches of a plan, for a dense batch or for packed documents."""

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import gradient, operator, varlen_operator
from .plan import Call, Launch


class Scores(NamedTuple):
    """The options that all launches of a call share."""

    softmax_scale: float | None
    softcap: float
    sm_margin: int
    deterministic: bool


class Kernels(NamedTuple):
    """The forward and the backward pass of a launch. Rows are dimension 1 of a dense batch, and 0 of packed
    documents.
    """

    is_packed: bool
    scores: Scores

    def rows_first(self, x: Tensor) -> Tensor:
        """A view of a tensor with its rows as dimension 0; a second call undoes it."""
        return x if self.is_packed else x.transpose(0, 1)

    def forward(self, launch: Launch, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, out: Tensor) -> Tensor:
        """Computes a launch: writes O to `out`, and returns LSE (..., heads_q, rows)."""
        if self._are_several(launch):
            packed = self._replace(is_packed=True)
            return torch.stack([packed.forward(launch, q[i], k[i], v[i], s_aux, out[i]) for i in range(len(q))])
        scale, softcap, sm_margin, _ = self.scores
        numbers = scale, *launch.window, 0, softcap, sm_margin
        by_name: dict[str, Any] = dict(s_aux=s_aux, out=out)
        if self.is_packed:
            lists: tuple[Any, ...] = (*_lists(launch.calls, q.device), *numbers)
            _, lse = varlen_operator.launch(q, k, v, *lists, **by_name)
        else:
            _, lse = operator.launch(q, k, v, *numbers, **by_name)
        assert lse is not None
        return lse

    def backward(
        self,
        launch: Launch,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        s_aux: Tensor | None,
        outputs: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor | None:
        """Writes a launch's gradients of Q, K and V to `outputs`, and returns its gradient of the sinks."""
        if self._are_several(launch):
            packed, (dq, dk, dv) = self._replace(is_packed=True), outputs
            found = []
            for i in range(len(q)):
                dlse_of = None if dlse is None else dlse[i]
                inputs = dout[i], q[i], k[i], v[i], out[i], lse[i], dlse_of, s_aux
                found.append(packed.backward(launch, *inputs, (dq[i], dk[i], dv[i])))
            return torch.stack(operator.given(*found)).sum(0) if s_aux is not None else None
        scale, softcap, sm_margin, deterministic = self.scores
        numbers = scale, *launch.window, 0, softcap, sm_margin, deterministic
        named: dict[str, Any] = dict(s_aux=s_aux, outputs=outputs)
        if self.is_packed:
            lists = _lists(launch.calls, q.device)
            gradients = varlen_operator.launch_backward(dout, q, k, v, out, lse, dlse, *lists, *numbers, **named)
        else:
            gradients = gradient.launch(dout, q, k, v, out, lse, dlse, *numbers, **named)
        return gradients[3] if s_aux is not None else None

    def _are_several(self, launch: Launch) -> bool:
        """Whether a launch of a dense batch has several calls. For each batch entry these are computed as packed
        sequences.
        """
        return not self.is_packed and len(launch.calls) > 1


@functools.lru_cache(maxsize=256)
def _lists(calls: tuple[Call, ...], device: torch.device) -> tuple:
    """The rows and keys of calls, as arguments of packed sequences: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    max_seqlen_q, max_seqlen_k.
    """
    first = calls[0]
    of_q = [0, *itertools.accumulate(call.rows for call in calls)]
    of_k = [call.key - first.key for call in calls]
    of_k.append(of_k[-1] + calls[-1].keys)
    used = [call.keys for call in calls]

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    longest = max(call.rows for call in calls), max(used)
    return on_device(of_q), on_device(of_k), None, on_device(used), *longest
