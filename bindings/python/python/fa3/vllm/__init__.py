"""vLLM with this package's attention, as its attention backend CUSTOM.

    vllm serve MODEL --attention-backend CUSTOM
    LLM(MODEL, attention_backend="CUSTOM")

vLLM finds it by itself where both packages are installed, since `register` is a plugin of its group
"vllm.general_plugins", which each of its processes calls. The classes are in `fa3.vllm.backend`, which vLLM imports
when the backend is chosen.
"""

import logging
import re
from importlib import import_module
from typing import Any

__all__ = ["NAME", "register"]

NAME = "CUSTOM"
OLDEST = 0, 33
_BACKEND = "fa3.vllm.backend.Fa3Backend"


def register() -> str:
    """Makes vLLM know this package's attention as its backend "CUSTOM", which is returned. A second call changes
    nothing.

    Raises:
        ModuleNotFoundError: vllm is not installed.
        ImportError: it is older than 0.33, whose backends have another interface.
        RuntimeError: "CUSTOM" is another package's backend already.
    """
    # Imported like this, type checkers of code that imports this package need no vLLM.
    version = import_module("vllm").__version__
    # One that is built of sources without git has no number.
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and tuple(map(int, number.groups())) < OLDEST:
        raise ImportError(f"vllm is {version}, expected {'.'.join(map(str, OLDEST))} or newer")
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    custom = registry.AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _BACKEND:
        raise RuntimeError(f"vLLM's attention backend {NAME} is {custom.get_path()} already")
    registry.register_backend(custom, _BACKEND)
    return NAME


def _plugin() -> None:
    """`register` as vLLM calls it in each of its processes, also where nobody wants this backend: what it raises would
    end them.
    """
    try:
        register()
    except Exception as error:
        logging.getLogger(__name__).warning("fa3 is no attention backend of this vLLM: %s", error)
