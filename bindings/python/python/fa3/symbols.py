"""Python functions of scores as texts: a function is called with symbols, which remember what it computes."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from . import operator

# The precedences of binary operators; above them are unary operators, and values.
_OPERATORS = ["||"], ["&&"], ["<", "<=", "=="], ["|"], ["^"], ["&"], ["<<", ">>"], ["+", "-"], ["*", "/", "//", "%"]
_LEVELS = {sign: level for level, signs in enumerate(_OPERATORS) for sign in signs}
_TEST, _SUM, _UNARY, _VALUE = _LEVELS["<"], _LEVELS["+"], len(_OPERATORS), len(_OPERATORS) + 1
# Longer texts are refused. A symbol that is used twice is written twice.
_MOST_CHARACTERS = 2**16


def trace(function: Callable[..., Any], leaves: Sequence[str], device: torch.device) -> tuple[str, list[Tensor]]:
    """The text of a function of a score, and the tensors that it reads. Its arguments are the symbols of `leaves`, of
    which the first one is the score. The call is computed on `device`.

    Raises:
        NotImplementedError: an operation cannot be traced. The message names it, and its line.
    """
    symbols = [Symbol(name, kind="index" if i else "number") for i, name in enumerate(leaves)]
    tables: list[Any] = []
    numbers: list[float] = []
    _read_now.tables, _read_now.numbers = tables, numbers
    try:
        with _Tracing():
            value = _symbol(function(*symbols))
    finally:
        _read_now.tables, _read_now.numbers = [], []
    if numbers:
        # A compiler takes a number as data only if it is an operand of arithmetic.
        of_numbers = torch.stack([torch.ones((), device=device, dtype=torch.float32) * x for x in numbers])
        tables = [of_numbers if x is numbers else x for x in tables]
    if value.kind == "condition":
        raise TypeError("the function of scores returns a condition, expected a number: torch.where makes one of it")
    return value.text, tables


def literal(x: Any) -> str:
    """The text of a number."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"a value of score is {type(x).__name__}, expected a number or a tensor")
    if isinstance(x, int) and -(2**31) < x < 2**31:
        return str(x)
    text = repr(float(x))
    if text == "nan":
        raise ValueError("a value of score is nan, expected a number")
    return text


def _operator(name: str) -> Any:
    return lambda *args: _apply(name, args, {})


class Symbol:
    """A number, an index or a condition of a function of a score.

    Its text is of a precedence. Types are torch's. In the text an index that was converted to a number is still an
    index, and an element of a table of integers is a number (`is_index`).
    """

    def __init__(self, text: str, level: int = _VALUE, kind: str = "number", is_index: bool | None = None) -> None:
        if len(text) > _MOST_CHARACTERS:
            _refuse("an expression", "it is too large")
        self.text, self.level, self.kind = text, level, kind
        self.is_index = kind == "index" if is_index is None else is_index

    def above(self, level: int) -> str:
        """The text, in parentheses if its precedence is below `level`."""
        return self.text if self.level >= level else f"({self.text})"

    @property
    def dtype(self) -> torch.dtype:
        """The type of elements, as torch has it."""
        return {"number": torch.float32, "index": torch.int32, "condition": torch.bool}[self.kind]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(function.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.rstrip("_") not in _FUNCTIONS:
            _refuse(name, "there is no such operation in functions of scores")
        return lambda *args, **kwargs: _apply(name, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        _refuse("an element of a symbol", "it is a number")

    def __bool__(self) -> bool:
        _refuse("if, and, or, not or a chain of comparisons", "write torch.where, &, | and ~")

    def __index__(self) -> int:
        _refuse("the number of a symbol", "it is known in kernels only: index a tensor, not a list")

    __int__ = __index__

    def __float__(self) -> float:
        _refuse("the number of a symbol", "it is known in kernels only: call functions of torch, not of math")

    __add__, __radd__ = _operator("add"), _operator("radd")
    __sub__, __rsub__ = _operator("sub"), _operator("rsub")
    __mul__, __rmul__ = _operator("mul"), _operator("rmul")
    __truediv__, __rtruediv__ = _operator("truediv"), _operator("rtruediv")
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _operator("rfloordiv")
    __mod__, __rmod__ = _operator("mod"), _operator("rmod")
    __pow__, __rpow__ = _operator("pow"), _operator("rpow")
    __and__, __rand__ = _operator("and"), _operator("rand")
    __or__, __ror__ = _operator("or"), _operator("ror")
    __xor__, __rxor__ = _operator("xor"), _operator("rxor")
    __lshift__, __rlshift__ = _operator("lshift"), _operator("rlshift")
    __rshift__, __rrshift__ = _operator("rshift"), _operator("rrshift")
    __neg__, __pos__, __abs__, __invert__ = (_operator(name) for name in ("neg", "pos", "abs", "invert"))
    __lt__, __le__, __gt__, __ge__ = (_operator(name) for name in ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class _Rows:
    """A tensor that is read by fewer indices than it has axes."""

    def __init__(self, tensor: Tensor, at: tuple[Symbol, ...]) -> None:
        self.tensor, self.at = tensor, at

    def __getitem__(self, index: Any) -> Any:
        return _read(self.tensor, (*self.at, *(index if isinstance(index, tuple) else (index,))))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"{name} of a row of a tensor", "index its other axes as well")


class _Tracing(TorchFunctionMode):
    """Sees torch's functions of symbols."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, (Symbol, _Rows)) for x in _flat((*args, *kwargs.values()))):
            return _apply(function.__name__, args, kwargs)
        return function(*args, **kwargs)


class _ReadNow(threading.local):
    """The tables that this thread's trace reads: tensors, and a list of numbers."""

    def __init__(self) -> None:
        self.tables: list[Any] = []
        self.numbers: list[float] = []

    def place(self, table: Any) -> int:
        """The number of a table."""
        place = next((i for i, x in enumerate(self.tables) if x is table), len(self.tables))
        if place == len(self.tables):
            self.tables.append(table)
        return place


_read_now = _ReadNow()


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    for x in arguments:
        yield from _flat(x) if isinstance(x, (tuple, list)) else (x,)


def _apply(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Symbol:
    """The symbol of an operation, by the name of torch's function, of a method or of an operator."""
    plain = name.strip("_")
    if plain in _REFLECTED:
        plain, args = plain[1:], args[::-1]
    function = _FUNCTIONS.get(plain)
    if function is None or name.endswith("_") and not name.startswith("__"):
        _refuse(plain if function is None else name, "there is no such operation in functions of scores")
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        _refuse(plain, str(error))


def _symbol(x: Any) -> Symbol:
    """An operand."""
    if isinstance(x, Symbol):
        return x
    if isinstance(x, Tensor):
        if x.dim() == 0:
            return _symbol(x.item()) if _is_known(x) else _read(x[None], (_symbol(0),))
        _refuse(f"a tensor of shape {tuple(x.shape)} beside a symbol", "index it by symbols")
    if isinstance(x, _Rows):
        _refuse(f"a row of a tensor of shape {tuple(x.tensor.shape)}", "index its other axes as well")
    if isinstance(x, bool):
        return Symbol(f"0 == {0 if x else 1}", _TEST, "condition")
    if isinstance(x, float) and is_compiling():
        # It may be another number in the next call, for which nothing should be compiled anew.
        _read_now.numbers.append(x)
        return Symbol(f"t{_read_now.place(_read_now.numbers)}[{len(_read_now.numbers) - 1}]")
    text = literal(x)
    kind = "index" if text.lstrip("-").isdecimal() else "number"
    return Symbol(text, _UNARY if text[0] == "-" else _VALUE, kind)


def _is_known(x: Tensor) -> bool:
    """Whether a number can be read now, and has no gradient."""
    return x.is_cpu and not x.requires_grad and not is_compiling() and not operator.is_fake(x)


def _read(tensor: Tensor, index: Any) -> Any:
    """An element of a tensor, or its rows if there are fewer indices than axes."""
    at = tuple(_symbol(x) for x in (index if isinstance(index, (tuple, list)) else (index,)))
    if len(at) < tensor.dim():
        return _Rows(tensor, at)
    if len(at) > tensor.dim() or tensor.dim() > 4:
        _refuse(f"{len(at)} indices of a tensor of shape {tuple(tensor.shape)}", "tensors have one to four axes")
    if any(x.kind != "index" for x in at):
        _refuse("an index that is a number or a condition", "indices are b, h, q_idx, kv_idx and integers of them")
    kind = "number" if tensor.is_floating_point() or tensor.dtype == torch.bool else "index"
    indices = ", ".join(_integer(x).text for x in at)
    element = Symbol(f"t{_read_now.place(tensor)}[{indices}]", _VALUE, kind, False)
    return _test("!=", element, 0) if tensor.dtype == torch.bool else element


def _binary(sign: str, x: Any, y: Any, kind: str | None = None) -> Symbol:
    x, y = _number(x), _number(y)
    common = "index" if x.kind == y.kind == "index" and sign != "/" else "number"
    are_indices = x.is_index and y.is_index
    if sign == "*" and common == "number" and are_indices:
        # The text multiplies indices in 32 bits.
        x, are_indices = Symbol(f"{x.above(_SUM)} + 0.0", _SUM), False
    level = _LEVELS[sign]
    return Symbol(f"{x.above(level)} {sign} {y.above(level + 1)}", level, common, are_indices and sign != "/")


def _call(name: str, *operands: Any) -> Symbol:
    of = [_number(x) for x in operands]
    keeps = name in ("abs", "min", "max")
    kind = "index" if keeps and all(x.kind == "index" for x in of) else "number"
    is_index = keeps and all(x.is_index for x in of)
    return Symbol(f"{name}({', '.join(x.text for x in of)})", _VALUE, kind, is_index)


def _number(x: Any) -> Symbol:
    """An operand of arithmetic; a condition counts as 0 or 1."""
    x = _symbol(x)
    return _where(x, 1, 0) if x.kind == "condition" else x


def _integer(x: Any) -> Symbol:
    """An operand of the arithmetic of integers, which is one in the text, too."""
    x = _number(x)
    if x.kind != "index":
        raise TypeError("it takes integers")
    return x if x.is_index else Symbol(f"int({x.text})", _VALUE, "index")


def _condition(x: Any) -> Symbol:
    x = _symbol(x)
    return x if x.kind == "condition" else _test("!=", x, 0)


def _test(sign: str, x: Any, y: Any) -> Symbol:
    x, y = _number(x), _number(y)
    return Symbol(f"{x.above(_SUM)} {sign} {y.above(_SUM)}", _TEST, "condition")


def _bits(sign: str, x: Any, y: Any) -> Symbol:
    """An operation of integers."""
    x, y, level = _integer(x), _integer(y), _LEVELS[sign]
    return Symbol(f"{x.above(level)} {sign} {y.above(level + 1)}", level, "index")


def _logic(sign: str, x: Any, y: Any) -> Symbol:
    x, y = _symbol(x), _symbol(y)
    if not x.kind == y.kind == "condition":
        return _bits(sign[0], x, y)
    level = _LEVELS[sign]
    return Symbol(f"{x.above(level)} {sign} {y.above(level + 1)}", level, "condition")


def _not(x: Any) -> Symbol:
    x = _symbol(x)
    if x.kind != "condition":
        return _binary("-", -1, _integer(x))
    return Symbol(f"!{x.above(_VALUE)}", _UNARY, "condition")


def _xor(x: Any, y: Any) -> Symbol:
    x, y = _symbol(x), _symbol(y)
    if not x.kind == y.kind == "condition":
        return _bits("^", x, y)
    return _logic("||", _logic("&&", x, _not(y)), _logic("&&", _not(x), y))


def _where(condition: Any, x: Any, y: Any) -> Symbol:
    condition, x, y = _condition(condition), _symbol(x), _symbol(y)
    if x.kind == y.kind == "condition":
        return _logic("||", _logic("&&", condition, x), _logic("&&", _not(condition), y))
    x, y = _number(x), _number(y)
    kind = "index" if x.kind == y.kind == "index" else "number"
    return Symbol(f"(if {condition.text} then {x.text} else {y.text})", _VALUE, kind, x.is_index and y.is_index)


def _negative(x: Any) -> Symbol:
    x = _number(x)
    return Symbol(f"-{x.above(_VALUE)}", _UNARY, x.kind, x.is_index)


def _floor_divide(x: Any, y: Any) -> Symbol:
    x, y = _number(x), _number(y)
    if x.kind == y.kind == "index":
        return _bits("//", x, y)
    return _call("floor", _binary("/", x, y))


def _remainder(x: Any, y: Any) -> Symbol:
    x, y = _number(x), _number(y)
    if x.kind == y.kind == "index":
        return _bits("%", x, y)
    return _binary("-", x, _binary("*", _floor_divide(x, y), y))


def _truncated(x: Any) -> Symbol:
    x = _number(x)
    return x if x.kind == "index" else _where(_test("<", x, 0), _ceil(x), _call("floor", x))


def _ceil(x: Any) -> Symbol:
    return _negative(_call("floor", _negative(x)))


def _rounded(x: Any, decimals: int = 0) -> Symbol:
    if decimals:
        raise TypeError("decimals is another number than 0")
    up = _call("floor", _binary("+", x, 0.5))
    # Halves become even numbers.
    is_odd = _test("!=", _binary("*", _call("floor", _binary("/", up, 2)), 2), up)
    return _where(_logic("&&", _test("==", _binary("-", up, x), 0.5), is_odd), _binary("-", up, 1), up)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode not in (None, "floor", "trunc"):
        raise TypeError(f"rounding_mode is {rounding_mode!r}, expected 'floor', 'trunc' or None")
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    quotient = _binary("/", x, y)
    if rounding_mode is None:
        return quotient
    x, y = _number(x), _number(y)
    if x.kind == y.kind == "index":
        quotient = _bits("//", _call("abs", x), _call("abs", y))
        return _where(_test("<", _binary("*", _sign(x), y), 0), _negative(quotient), quotient)
    return _truncated(quotient)


def _sign(x: Any) -> Symbol:
    return _where(_test(">", x, 0), 1, _where(_test("<", x, 0), -1, 0))


def _exp(x: Any) -> Symbol:
    return _call("exp2", _binary("*", x, math.log2(math.e)))


def _log(x: Any) -> Symbol:
    return _binary("*", _call("log2", x), math.log(2))


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Symbol:
    """Without the threshold, beyond which torch drops what 32 bits have no room for."""
    scaled = _binary("*", x, beta)
    rest = _log(_binary("+", 1, _exp(_negative(_call("abs", scaled)))))
    return _binary("/", _binary("+", _call("max", scaled, 0), rest), beta)


def _gelu(x: Any, approximate: str = "none") -> Symbol:
    if approximate != "tanh":
        raise TypeError(f"approximate is {approximate!r}, expected 'tanh'")
    cube = _binary("*", _binary("*", x, x), x)
    inner = _binary("*", math.sqrt(2 / math.pi), _binary("+", x, _binary("*", 0.044715, cube)))
    return _binary("*", _binary("*", 0.5, x), _binary("+", 1, _call("tanh", inner)))


def _power(x: Any, exponent: Any) -> Symbol:
    if isinstance(exponent, float) and abs(exponent) == 0.5:
        root = _call("sqrt", x)
        return root if exponent == 0.5 else _binary("/", 1, root)
    if not isinstance(exponent, (int, float)) or exponent != int(exponent) or not 1 <= abs(exponent) <= 8:
        raise TypeError("the exponent is another number than -8 to -1, 1 to 8, 0.5 and -0.5")
    product = x
    for _ in range(abs(int(exponent)) - 1):
        product = _binary("*", product, x)
    return _number(product) if exponent > 0 else _binary("/", 1, product)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Symbol:
    x = x if min is None else _call("max", x, min)
    return _number(x if max is None else _call("min", x, max))


def _sigmoid(x: Any) -> Symbol:
    half = Symbol("0.5")
    return _binary("+", _binary("*", half, _call("tanh", _binary("*", half, x))), half)


def _to(x: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Symbol:
    """The value as another type of numbers. Numbers keep 32 bits, whatever the type of floats is."""
    x, dtype = _symbol(x), getattr(dtype, "dtype", dtype)
    if args or kwargs or not isinstance(dtype, torch.dtype):
        raise TypeError("it takes a type of elements alone")
    if dtype == torch.bool:
        return _condition(x)
    x = _number(x)
    if dtype.is_floating_point:
        return Symbol(x.text, x.level, "number", x.is_index)
    if x.kind == "index":
        return x
    return Symbol(x.text, x.level, "index") if x.is_index else Symbol(f"int({x.text})", _VALUE, "index")


def _refuse(operation: str, why: str) -> NoReturn:
    """Refuses an operation, with the line of the function that has it, which a compiler does not know."""
    if is_compiling():
        raise NotImplementedError(f"a function of scores has {operation}, which kernels cannot compute: {why}")
    frame = sys._getframe()
    ours = (__file__, torch.__path__[0])
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    raise NotImplementedError(f"a function of scores has {operation} in {line}, which kernels cannot compute: {why}")


def _of_type(dtype: torch.dtype) -> Callable[..., Symbol]:
    return lambda x: _to(x, dtype)


def _constant(value: Any) -> Callable[..., Symbol]:
    return lambda like, *shape, **kwargs: _symbol(value)


_REFLECTED = frozenset("radd rsub rmul rdiv rtruediv rfloordiv rmod rpow rand ror rxor rlshift rrshift".split())
# Operations by the names of torch's functions, of methods and of Python's operators.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": _read,
    "index": _read,
    "pos": _symbol,
    "neg": _negative,
    "where": _where,
    "masked_fill": lambda x, condition, value: _where(condition, value, x),
    "logical_not": lambda x: _not(_condition(x)),
    "logical_xor": lambda x, y: _xor(_condition(x), _condition(y)),
    "invert": _not,
    "xor": _xor,
    "eq": lambda x, y: _test("==", x, y),
    "ne": lambda x, y: _test("!=", x, y),
    "lt": lambda x, y: _test("<", x, y),
    "le": lambda x, y: _test("<=", x, y),
    "gt": lambda x, y: _test(">", x, y),
    "ge": lambda x, y: _test(">=", x, y),
    "add": lambda x, y: _binary("+", x, y),
    "sub": lambda x, y: _binary("-", x, y),
    "rsub": lambda x, y: _binary("-", y, x),
    "mul": lambda x, y: _binary("*", x, y),
    "div": _divide,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "lshift": lambda x, y: _bits("<<", x, y),
    "rshift": lambda x, y: _bits(">>", x, y),
    "pow": _power,
    "square": lambda x: _binary("*", x, x),
    "reciprocal": lambda x: _binary("/", 1, x),
    "abs": lambda x: _call("abs", x),
    "sign": _sign,
    "floor": lambda x: _call("floor", x),
    "ceil": _ceil,
    "trunc": _truncated,
    "round": _rounded,
    "fmod": lambda x, y: _binary("-", x, _binary("*", _divide(x, y, "trunc"), y)),
    "exp2": lambda x: _call("exp2", x),
    "exp": _exp,
    "expm1": lambda x: _binary("-", _exp(x), 1),
    "log2": lambda x: _call("log2", x),
    "log": _log,
    "log1p": lambda x: _log(_binary("+", 1, x)),
    "sqrt": lambda x: _call("sqrt", x),
    "rsqrt": lambda x: _binary("/", 1, _call("sqrt", x)),
    "tanh": lambda x: _call("tanh", x),
    "sigmoid": _sigmoid,
    "silu": lambda x, inplace=False: _binary("*", x, _sigmoid(x)),
    "relu": lambda x, inplace=False: _call("max", x, 0),
    "leaky_relu": lambda x, negative_slope=0.01, inplace=False: _where(
        _test(">", x, 0), x, _binary("*", x, negative_slope)
    ),
    "softplus": _softplus,
    "gelu": _gelu,
    "minimum": lambda x, y: _call("min", x, y),
    "maximum": lambda x, y: _call("max", x, y),
    "clamp": _clamp,
    "to": _to,
    "float": _of_type(torch.float32),
    "int": _of_type(torch.int32),
    "bool": _of_type(torch.bool),
    "clone": _symbol,
    "zeros_like": _constant(0.0),
    "ones_like": _constant(1.0),
    "full_like": lambda like, value, **kwargs: _symbol(value),
    "new_zeros": _constant(0.0),
    "new_ones": _constant(1.0),
    "new_full": lambda like, shape, value, **kwargs: _symbol(value),
}
for _name, _of_conditions in (("and", "&&"), ("or", "||")):
    _FUNCTIONS[_name] = _FUNCTIONS[f"bitwise_{_name}"] = lambda x, y, sign=_of_conditions: _logic(sign, x, y)
    _FUNCTIONS[f"logical_{_name}"] = lambda x, y, sign=_of_conditions: _logic(sign, _condition(x), _condition(y))
# Other names of these operations.
for _other, _name in dict(
    subtract="sub", multiply="mul", divide="div", true_divide="div", truediv="div", floor_divide="floordiv",
    negative="neg", absolute="abs", bitwise_not="invert", remainder="mod", bitwise_xor="xor", sgn="sign", fix="trunc",
    bitwise_left_shift="lshift", bitwise_right_shift="rshift", min="minimum", max="maximum", fmin="minimum",
    fmax="maximum", clip="clamp", long="int", double="float", type_as="to", detach="clone", contiguous="clone",
).items():
    _FUNCTIONS[_other] = _FUNCTIONS[_name]
