"""The gradients of attention: the torch operators `fa3::backward` and `fa3::backward_out`, and the autograd functions
of attention operators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import operator, refusal
from .operator import Options
from .sequences import Sequences


def asks_for_same_bits() -> bool:
    """Whether torch's mode requires algorithms that give the same bits in every run."""
    return torch.are_deterministic_algorithms_enabled()


_FIELDS = (
    "softmax_scale window_left window_right attention_chunk softcap sm_margin deterministic max_seqlen_q max_seqlen_k"
)


def launch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
    sm_margin: int,
    deterministic: bool = False,
    intervals: Tensor | None = None,
    score: str | None = None,
    score_tables: Sequence[Tensor] | None = None,
    *,
    s_aux: Tensor | None = None,
    outputs: tuple[Tensor, Tensor, Tensor] | None = None,
    sequences: Sequences | None = None,
    hints: tuple[int | None, int | None] = (None, None),
    of_tables: Sequence[bool] | None = None,
) -> tuple[Tensor, ...]:
    """Computes dQ, dK and dV, with sinks their float32 gradient, and the gradients of the tables
    for which `of_tables` is true. The tensors are on a GPU (the launch is on torch's
    current stream of their device), on the CPU, or fake. dQ, dK and dV are written to `outputs`, if given. Tensors of
    packed `sequences` have no batch dimension. Torch's mode of deterministic algorithms is read now, as torch's own
    operators do.
    """
    given = (q, k, v, dout, o, lse, dlse, *(outputs or (None, None, None)))
    operator.refuse_tangents("a tensor of the backward pass", *operator.given(*given))
    operator.check_ranks(q, k, v, packed=sequences is not None)
    dq, dk, dv = outputs or (gradient_like(q), gradient_like(k), gradient_like(v))
    tensors: operator.Tensors = {"q": q, "k": k, "v": v, "dout": dout, "o": o, "lse": lse, "dlse": dlse}
    tensors |= {"dq": dq, "dk": dk, "dv": dv}
    ds_aux = None
    if s_aux is not None:
        tensors["sink"] = sink = operator.sinks(s_aux, q, q.shape[-2])
        tensors["dsink"] = ds_aux = torch.empty_like(sink, memory_format=torch.contiguous_format)
    if intervals is not None:
        tensors["intervals"] = operator.bounds(intervals, q)
    if sequences is not None:
        tensors |= sequences._asdict()
    window = window_left, window_right, attention_chunk
    values = softmax_scale, *window, softcap, sm_margin, deterministic or asks_for_same_bits(), *hints
    fields, values = operator.with_score(_FIELDS, values, tensors, score, score_tables)
    learned = [(i, x) for i, (x, has) in enumerate(zip(score_tables or (), of_tables or ())) if has]
    dtables = {f"score_dtable{i}": torch.zeros_like(x) for i, x in learned}
    operator.run("backward", fields, values, tensors | dtables)
    return dq, dk, dv, *operator.given(ds_aux), *dtables.values()


def by_names(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a launch that takes an operator's arguments by the names in the operator's schema."""

    def launch_by_names(*inputs: Any) -> Any:
        arguments = getattr(torch.ops.fa3, name).default._schema.arguments
        # Torch omits trailing arguments that have their defaults.
        return launch(**{argument.name: x for argument, x in zip(arguments, inputs)})

    return launch_by_names


def launch_into(*inputs: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes dQ, dK and dV to given tensors."""
    launch(*inputs, outputs=(dq, dk, dv))


def gradient_like(x: Tensor) -> Tensor:
    """A new tensor for the gradient of x."""
    if _are_heads_outside(x):
        return torch.empty_like(x.transpose(-3, -2), memory_format=torch.contiguous_format).transpose(-3, -2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _are_heads_outside(x: Tensor) -> bool:
    """Whether heads are outside rows in memory, as in (batch, heads, seqlen, head_dim)."""
    of_rows, of_heads = x.stride()[-3:-1]
    if isinstance(of_heads, torch.SymInt) and of_heads.node.hint is None:
        # A trace may not know the number of rows. Then the stride of heads is unknown too, if heads are outside rows.
        return True
    return bool(of_heads > of_rows)


class Differentiable:
    """An attention operator. Another operator computes its gradients in q, k, v and s_aux.

    The operator takes q, k, v, then tensors that say where sequences lie (`lists` is their number), which have no
    gradient, and then the fields of `options`, including s_aux. The backward operator takes dO, Q, K, V, O, LSE, dLSE,
    the lists, `options.of_backward()`, and intervals by name if given. With sinks, a third operator also takes s_aux.
    `launch` and `launch_backward` compute the operators without torch's dispatcher.
    """

    def __init__(
        self,
        name: str,
        backward_name: str,
        options: Any,
        launch: Callable[..., Any],
        launch_backward: Callable[..., Any],
        lists: int = 0,
    ) -> None:
        self.launch, self._launch_backward = launch, launch_backward
        self._name, self._backward_name, self._options, self._tensors = name, backward_name, options, 3 + lists
        torch.library.register_autograd(f"fa3::{name}", self.gradients, setup_context=self.save, lib=operator.library)
        for backward in (backward_name, f"{backward_name}_sink", f"{backward_name}_tables"):
            torch.library.register_autograd(f"fa3::{backward}", _refuse, lib=operator.library)

    @property
    def forward_operator(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The operator in torch.ops."""
        return getattr(torch.ops.fa3, self._name)

    def backward_operator(self, with_sinks: bool) -> Callable[..., tuple[Tensor, ...]]:
        """The operator of the gradients in torch.ops."""
        return getattr(torch.ops.fa3, f"{self._backward_name}_sink" if with_sinks else self._backward_name)

    def plain(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """O and LSE of plain tensors, with autograd, without torch's dispatcher."""
        return Attention.apply(*inputs, self)

    def traced(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Computes O and LSE by the operator, which tracers, fake tensors and other tensor subclasses need to see.
        Inside of torch.func's transforms, an autograd function takes its place.
        """
        if operator.is_transformed():
            return TransformedAttention.apply(*inputs, self)
        return self.forward_operator(*inputs)

    def save(self, ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        """Saves what the backward pass needs. In the backward pass the gradient of an unused result is None."""
        ctx.set_materialize_grads(False)
        ctx.of = self
        e4m3 = torch.float8_e4m3fn
        ctx.of_float8 = next((name for name, x in zip("qk", inputs) if x.dtype == e4m3), None)
        if ctx.of_float8:
            return refusal.save(ctx, inputs)
        options = self._options(*inputs[self._tensors :])
        ctx.is_latent = options.qv is not None
        if ctx.is_latent:
            return refusal.save(ctx, inputs)
        intervals = getattr(options, "intervals", None)
        tables = options.score_tables or ()
        ctx.save_for_backward(*output, options.s_aux, intervals, *inputs[: self._tensors], *tables)
        ctx.score = options.score
        ctx.options, ctx.has_max_logits = options.of_backward(), options.max_logits

    def gradients(self, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the forward pass's arguments."""
        gradients = [refusal.none(needed) for needed in ctx.needs_input_grad]
        if dout is None and dlse is None:
            return tuple(gradients)
        if ctx.of_float8:
            sentence = f"{ctx.of_float8} is {torch.float8_e4m3fn}, for which attention has no gradients"
            return refusal.gradients(ctx, sentence, dout, dlse)
        if ctx.is_latent:
            return refusal.gradients(ctx, "there is qv, for which attention has no gradients", dout, dlse)
        o, lse, s_aux, intervals, q, k, v, *lists = ctx.saved_tensors
        lists, tables = lists[: self._tensors - 3], lists[self._tensors - 3 :]
        if ctx.has_max_logits:
            lse, dlse = lse[0], None if dlse is None else dlse[0]
        if dout is None:
            # A row of zeros, expanded.
            dout = o.new_zeros(o.shape[-1]).expand(o.shape)
        tensors = (dout, q, k, v, o, lse, dlse, *lists)
        given = operator.given(*tensors, s_aux, intervals, *tables)
        inputs = (*tensors, *ctx.options)
        named: dict[str, Any] = dict(intervals=intervals, s_aux=s_aux, score=ctx.score)
        named = {name: x for name, x in named.items() if x is not None}
        named |= dict(score_tables=tables) if tables else {}
        of_table = self._tensors + self._options._fields.index("score_tables")
        needed = ctx.needs_input_grad[of_table] if len(ctx.needs_input_grad) > of_table else False
        learned = [] if isinstance(needed, bool) else list(needed)
        backward = self.backward_operator(s_aux is not None)
        if any(learned):
            named["of_tables"] = learned
            backward = getattr(torch.ops.fa3, f"{self._backward_name}_tables")
        is_plain = operator.is_plain(*given) and not _are_batched(dout, dlse)
        if is_plain and not operator.needs_grad(*given):
            computed = self._launch_backward(*inputs, **named)
        elif operator.is_transformed():
            computed = _TransformedGradient.apply(*inputs, *named.values(), tuple(named), backward)
        else:
            computed = backward(*inputs, **named)
        gradients[:3] = computed[:3]
        if any(learned):
            of_learned = iter(computed[-sum(learned) :])
            gradients[of_table] = [next(of_learned) if has else None for has in learned]
        if s_aux is not None:
            gradients[self._tensors + self._options._fields.index("s_aux")] = computed[3].to(s_aux.dtype)
        return tuple(gradients)


def _are_batched(*gradients: Tensor | None) -> bool:
    """Whether autograd computes several gradients at once (`is_grads_batched`). Its batched tensors look like ordinary
    tensors, but have no memory.
    """
    return any(x is not None and _is_batched(x) for x in gradients)


_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)


class Attention(torch.autograd.Function):
    """A launch with gradients. The last argument is the `Differentiable` that is launched."""

    @staticmethod
    def forward(ctx, *inputs):
        *inputs, of = inputs
        output = of.launch(*inputs)
        of.save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.of.gradients(ctx, dout, dlse)


class TransformedAttention(torch.autograd.Function):
    """`Attention` for torch.func's transforms, which need forward and setup_context as separate functions. It is slower
    than `Attention`, and vmap computes one entry after the other.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        *inputs, of = inputs
        return of.forward_operator(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *inputs, of = inputs
        of.save(ctx, inputs, output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        _refuse_forward_mode(ctx, *tangents)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.of.gradients(ctx, dout, dlse)


class _TransformedGradient(torch.autograd.Function):
    """The backward pass for torch.func's transforms. The last arguments are the keyword arguments, their names, and the
    operator.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        *inputs, names, backward = inputs
        first = len(inputs) - len(names)
        return backward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        _refuse_forward_mode(ctx, *tangents)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        _refuse(ctx, *gradients)


def _refuse_forward_mode(ctx: Any, *tangents: Tensor | None) -> None:
    raise NotImplementedError("attention has no derivative in forward mode")


def _refuse(ctx, *gradients: Tensor | None) -> None:
    raise NotImplementedError("attention has no second derivative: its gradients cannot be differentiated")


def define(name: str, lists: str, launch: Callable[..., Any], launch_into: Callable[..., Any]) -> None:
    """Defines an operator of gradients, a variant that writes to given tensors, and a variant with sinks. `lists` are
    arguments that say where sequences lie.
    """
    arguments = (
        f"Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, {lists}float? softmax_scale, "
        "SymInt window_left, SymInt window_right, SymInt attention_chunk, float softcap, SymInt sm_margin, "
        "bool deterministic"
    )
    more = f", Tensor? intervals=None, {operator.OF_SCORE}"
    by_default = f"{arguments}=False{more}"
    outputs = "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv"
    operator.define(name, by_default, "(Tensor dq, Tensor dk, Tensor dv)", launch)
    operator.define(f"{name}_out", f"{by_default}, *, {outputs}", "()", launch_into)
    of_sink = "(Tensor dq, Tensor dk, Tensor dv, Tensor ds_aux)"
    of_launch = by_names(f"{name}_sink", launch)
    operator.define(f"{name}_sink", f"{arguments}, Tensor s_aux{more}", of_sink, of_launch)
    of_launch = by_names(f"{name}_tables", lambda *inputs, **named: list(launch(*inputs, **named)))
    of_tables = "Tensor? s_aux=None, bool[]? of_tables=None"
    operator.define(f"{name}_tables", f"{by_default}, {of_tables}", "Tensor[]", of_launch)


define("backward", "", launch, launch_into)
# Autograd for `fa3::forward`.
ATTENTION = Differentiable("forward", "backward", Options, operator.launch, launch)
