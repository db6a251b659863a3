"""Registers this package's attention as vLLM's attention backend CUSTOM.

    vllm serve MODEL --attention-backend CUSTOM
    LLM(MODEL, attention_backend="CUSTOM")

vLLM finds it by itself if both packages are installed: each of its processes calls the plugins of the group
"vllm.general_plugins", and the plugin of this package calls `register`. The classes are in `fa3.vllm.backend`, which
vLLM imports when the backend is chosen.

With FA3_VLLM_MLA=1 models with multi-head latent attention (DeepSeek's, Kimi's, GLM's) are computed by this package,
too. vLLM tells a backend for latent attention by its class, not by its name. So the classes in `mla` and `mla_sparse`
take the place of vLLM's first choices on Hopper: FLASH_ATTN_MLA and FLASH_ATTN_MLA_SPARSE, and FLASH_ATTN for prompts.
"""

import logging
import os
import re
from importlib import import_module
from typing import Any

__all__ = ["NAME", "register"]

NAME = "CUSTOM"
OLDEST = 0, 33
_BACKEND = "fa3.vllm.backend.Fa3Backend"
# The classes of latent attention, by the names of vLLM's backends whose place they take.
_LATENT = {
    "FLASH_ATTN_MLA": "fa3.vllm.mla.Fa3MLABackend",
    "FLASH_ATTN_MLA_SPARSE": "fa3.vllm.mla_sparse.Fa3MLASparseBackend",
}
_PREFILL = "fa3.vllm.mla.Fa3MLAPrefill"


def register(mla: bool | None = None) -> str:
    """Registers this package's attention as vLLM's backend "CUSTOM", and returns that name. A second call changes
    nothing.

    Arguments:
        mla: whether latent attention is also computed by this package. None reads the environment variable
            FA3_VLLM_MLA, which is "1" for True.

    Raises:
        ModuleNotFoundError: vllm is not installed.
        ImportError: vllm is older than 0.33, whose backends have another interface.
        RuntimeError: another package has registered one of the backends already.
    """
    # Imported by name, so that type checkers of code that imports this package need no vLLM.
    version = import_module("vllm").__version__
    # A version that was built from sources without git has no number.
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and tuple(map(int, number.groups())) < OLDEST:
        raise ImportError(f"vllm is {version}, expected {'.'.join(map(str, OLDEST))} or newer")
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    attention = registry.AttentionBackendEnum
    wanted = [(attention[NAME], _BACKEND, registry.register_backend)]
    if os.environ.get("FA3_VLLM_MLA") == "1" if mla is None else mla:
        prefill: Any = import_module("vllm.v1.attention.backends.mla.prefill.registry")
        wanted += [(attention[name], path, registry.register_backend) for name, path in _LATENT.items()]
        wanted += [(prefill.MLAPrefillBackendEnum.FLASH_ATTN, _PREFILL, prefill.register_mla_prefill_backend)]
    for backend, path, _ in wanted:
        if backend.is_overridden() and backend.get_path() != path:
            raise RuntimeError(f"vLLM's attention backend {backend.name} is {backend.get_path()} already")
    for backend, path, put in wanted:
        put(backend, path)
    return NAME


def _plugin() -> None:
    """Calls `register` in each of vLLM's processes, also if another backend is chosen. It logs exceptions, which would
    otherwise end the process.
    """
    try:
        register()
    except Exception as error:
        logging.getLogger(__name__).warning("fa3 is no attention backend of this vLLM: %s", error)
