"""Gradients that do not exist. The torch operator `fa3::refuse_gradient` stands for them, and raises when it computes
one: so the forward pass runs, and compilers can trace both passes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import operator


def register(sentence: str, name: str) -> None:
    """Registers gradients of the operator of this name, which raise `NotImplementedError` with this sentence."""
    torch.library.register_autograd(
        f"fa3::{name}",
        lambda ctx, *given: gradients(ctx, sentence, *given),
        setup_context=lambda ctx, inputs, output: save(ctx, inputs),
        lib=operator.library,
    )


def save(ctx: Any, inputs: Sequence[Any]) -> None:
    """Saves the inputs whose gradients may be requested."""
    ctx.save_for_backward(*(x for x, needed in zip(inputs, ctx.needs_input_grad) if needed is True))


def gradients(ctx: Any, sentence: str, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs, which raise `NotImplementedError` with this sentence when they are computed."""
    # The refusal depends on an output's gradient. This keeps a compiler from moving the refusal into the forward pass.
    of_output = next(x for x in given if x is not None)
    saved = iter(ctx.saved_tensors)
    refuse = torch.ops.fa3.refuse_gradient
    return tuple(
        refuse(next(saved), of_output, sentence) if needed is True else none(needed) for needed in ctx.needs_input_grad
    )


def none(needed: Any) -> Any:
    """No gradient of an input; of a list of tensors, for which `needed` is a list, a list."""
    return None if isinstance(needed, bool) else [None] * len(needed)


def derivatives(names: str, why: str, *tensors: Tensor) -> None:
    """Refuses tensors inside of torch.func's transforms, which always compute derivatives: a result that silently has
    no derivative would be wrong. Elsewhere the backward pass refuses.
    """
    if operator.is_transformed() and operator.needs_grad(*tensors):
        raise NotImplementedError(f"{names} {why}")
    operator.refuse_tangents(names, *tensors)


def _refuse(x: Tensor, of_output: Tensor, sentence: str) -> Tensor:
    raise NotImplementedError(sentence)


def _fake(x: Tensor, of_output: Tensor, sentence: str) -> Tensor:
    return torch.empty_like(x)


operator.library.define(
    "refuse_gradient(Tensor x, Tensor of_output, str sentence) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
operator.library.impl("refuse_gradient", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("fa3::refuse_gradient", _fake, lib=operator.library)
