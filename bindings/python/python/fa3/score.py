"""Functions of scores: their texts, and the tables that they read."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import arguments, operator, symbols

# The words of the language, which are no names of values.
_WORDS = frozenset("s b h row q k if then else inf int abs min max exp2 log2 sqrt tanh floor".split())
# The names in a text, beside the letters of exponents.
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


class Score:
    """A function of scores, as `score` of `flash_attn_func` and `score_mod` of `flex_attention` take it.

        alibi = fa3.Score("s + slope[h] * (k - q)", slope=slopes)

    The text describes the score that takes the place of s, softmax_scale * Q K^T: of the sequence b, the query head h,
    the query q and the key k. q counts from the bottom right, as masks do: the last query stands at the last key. `row`
    counts from the first query. docs/expressions.md has the language.

    Arguments:
        text: the expression.
        values: the values of other names in it: numbers, and tensors of one to four axes, which are read by as many
            indices. A number is a constant if it is an integer beside indices. Another value of it is another kernel
            then. Tensors are read as float32, when the function is used.

    Raises:
        TypeError, ValueError: a value is neither a number nor a tensor, or its name has a meaning of its own. Other
            errors of the text raise where the function is used.
    """

    def __init__(self, text: str, **values: Any) -> None:
        if taken := _WORDS.intersection(values):
            raise ValueError(f"score gives {min(taken)} a value, and it has a meaning of its own")
        tables = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        places = {name: f"t{i}" for i, name in enumerate(tables)}
        for name, x in values.items():
            if name not in tables:
                places[name] = f"({symbols.literal(x)})"
        self.text = _NAME.sub(lambda found: places.get(found[0], found[0]), text)
        self.tables = tuple(tables.values())

    def __repr__(self) -> str:
        return f"Score({self.text!r}, {', '.join(f't{i}={tuple(x.shape)}' for i, x in enumerate(self.tables))})"


# A function of a score, as `flash_attn_func` takes it.
ScoreMod = Score | Callable[[Any, Any, Any, Any, Any], Any]


def given(
    score: ScoreMod | None, q: Any, has_gradients: bool = False, are_packed: bool = False
) -> tuple[str | None, list[Tensor] | None]:
    """A function of scores as operators take it: its text and its tables, float32, contiguous, on the device of q. They
    may require grad if the operator has gradients. Sequences may be packed.
    """
    if score is None:
        return None, None
    score = traced(score, q)
    tables = [_table(x, q, has_gradients) for x in score.tables]
    learned = tuple(i for i, x in enumerate(score.tables) if operator.needs_grad(x))
    if learned and q.is_cuda:
        # The import of torch's compiler takes a second.
        from .learned import refused_gradient

        refusal = refused_gradient(score.text, tuple(x.dim() for x in score.tables), learned, are_packed)
        if refusal:
            raise NotImplementedError(f"a tensor that score reads requires grad, and {refusal}: detach it")
    return score.text, tables


def traced(score: ScoreMod, q: Any, leaves: str = "s b h q k") -> Score:
    """A function of scores as a Score. A Python function is called with symbols, the names of which in texts are
    `leaves`.
    """
    if isinstance(score, Score):
        return score
    if not callable(score):
        raise TypeError(f"score is {type(score).__name__}, expected a function or fa3.Score")
    found = Score("")
    found.text, tables = symbols.trace(score, leaves.split(), q.device)
    found.tables = tuple(tables)
    return found


def alibi(slopes: Any, causal: Any, window_size: Any) -> Score | None:
    """flash-attn 2's alibi_slopes as a function of scores. They are float32 (heads_q,) or (batch, heads_q)."""
    if slopes is None:
        return None
    arguments.tensor("alibi_slopes", slopes)
    if slopes.dtype != torch.float32 or slopes.dim() not in (1, 2):
        found = f"{slopes.dtype} {tuple(slopes.shape)}"
        raise ValueError(f"alibi_slopes is {found}, expected torch.float32 (heads_q,) or (batch, heads_q)")
    at = "h" if slopes.dim() == 1 else "b, h"
    # Where no key is behind the query, the distance needs no absolute value, and is cheaper.
    is_before = causal is True or arguments.window(window_size)[1] == 0
    return Score(f"s + slope[{at}] * {'(k - q)' if is_before else '-abs(k - q)'}", slope=slopes)


def _table(x: Tensor, q: Tensor, has_gradients: bool) -> Tensor:
    if x.device != q.device:
        operator.refuse_place("q", q, "a tensor that score reads", x)
    if operator.needs_grad(x):
        if operator.is_transformed():
            raise NotImplementedError("a tensor that score reads requires grad, and torch.func has none: detach it")
        if not has_gradients:
            sentence = "a tensor that score reads requires grad, and attention over a cache has no gradients: detach it"
            raise NotImplementedError(sentence)
    operator.refuse_tangents("a tensor that score reads", x)
    return x.to(torch.float32).contiguous()
