"""Registers this package's attention as vLLM's attention backend CUSTOM.

    vllm serve MODEL --attention-backend CUSTOM
    LLM(MODEL, attention_backend="CUSTOM")

vLLM finds it by itself if both packages are installed: each of its processes calls the plugins of the group
"vllm.general_plugins", and one of them calls `register`. The classes are in `fa3.vllm.backend`, which vLLM imports when
the backend is chosen.
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
    """Registers this package's attention as vLLM's backend "CUSTOM", and returns that name. A second call changes
    nothing.

    Raises:
        ModuleNotFoundError: vllm is not installed.
        ImportError: vllm is older than 0.33, whose backends have another interface.
        RuntimeError: another package is registered as "CUSTOM" already.
    """
    # Imported by name, so that type checkers of code that imports this package need no vLLM.
    version = import_module("vllm").__version__
    # A version that was built from sources without git has no number.
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
    """Calls `register` in each of vLLM's processes, also if another backend is chosen. It logs exceptions, which would
    otherwise end the process.
    """
    try:
        register()
    except Exception as error:
        logging.getLogger(__name__).warning("fa3 is no attention backend of this vLLM: %s", error)
