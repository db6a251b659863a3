"""Functions that torch.compile leaves out."""

import functools
import sys
from typing import Any, Callable, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorates a function that torch.compile does not trace. `torch.compiler.disable` does this too, but it imports
    the compiler at once, which takes as long as importing torch. Nothing is traced before it is imported.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        if not hasattr(function, "_disabled"):
            function._disabled = torch.compiler.disable(function)  # type: ignore[attr-defined]
        return function._disabled(*arguments, **options)  # type: ignore[attr-defined]

    return call  # type: ignore[return-value]
