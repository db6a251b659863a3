"""Stand-ins for the package's functions if torch is not installed: documentation tools and `from fa3 import` find them,
and a call raises and says that it needs torch.
"""

import __future__

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any


def stand_in(module: str, name: str) -> Callable[..., Any]:
    """A function with the signature and the docstring of a function or class in a module that cannot be imported."""
    path = Path(__file__).with_name(f"{module}.py")
    kinds = ast.FunctionDef, ast.ClassDef
    *_, definition = [x for x in ast.parse(path.read_text()).body if isinstance(x, kinds) and x.name == name]
    # Keeps only the docstring of the function's body. The types in its signature stay text.
    definition.body = definition.body[:1]
    namespace: dict[str, Any] = {"__name__": f"fa3.{module}"}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([definition], []), path, "exec", flags), namespace)

    @functools.wraps(namespace[name])
    def function(*_arguments: Any, **_options: Any) -> Any:
        raise ImportError(f"fa3.{name} needs PyTorch, which is not installed")

    return function
