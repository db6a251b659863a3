"""SGLang with this package's attention, in place of the kernels of its backend "fa3".

    FA3_SGLANG=1 python -m sglang.launch_server --model-path MODEL --attention-backend fa3

SGLang calls the plugins of the group "sglang.srt.plugins" in each of its processes. If the environment variable is 1,
this module's plugin registers the package: SGLang's backend still plans batches, and its calls of FlashAttention-3 come
here.
"""

import functools
import inspect
import os
from importlib import import_module
from typing import Any, Callable

from torch import Tensor

from . import flash_mla
from .attention import flash_attn_func
from .kvcache import flash_attn_with_kvcache as _with_kvcache
from .varlen import flash_attn_varlen_func as _varlen

__all__ = ["VARIABLE", "register"]

VARIABLE = "FA3_SGLANG"
# SGLang's function that, at each call, returns FlashAttention-3's kernels by their names.
_TARGET = "sglang.kernels.ops.attention.flash_attention_v3._load_fa3_kernels"
# The module of FlashMLA's functions.
_LATENT = "sgl_kernel.flash_mla"


def register() -> None:
    """Makes SGLang's backend "fa3" call this package, once SGLang has applied its plugins' hooks, and also its calls of
    FlashMLA over rows of 16 bits. A second call changes nothing.

    Raises:
        ModuleNotFoundError: sglang is not installed.
        ImportError: this version of SGLang has no function to replace.
    """
    # Imported by name, so that type checkers of code that imports this package need no SGLang.
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    module, _, name = _TARGET.rpartition(".")
    if not hasattr(import_module(module), name):
        raise ImportError(f"sglang has no {_TARGET}: this version of fa3 does not fit it")
    wanted: dict[str, tuple[Any, Any]] = {_TARGET: (_kernels, hooks.HookType.REPLACE)}
    try:
        theirs = import_module(_LATENT)
    except ImportError:
        theirs = None
    for name, hook in _OF_LATENT.items():
        if hasattr(theirs, name):
            wanted[f"{_LATENT}.{name}"] = hook, hooks.HookType.AROUND
    for target, (hook, kind) in wanted.items():
        if all(registered is not hook for _, registered, _ in hooks.HookRegistry._hooks[target]):
            hooks.HookRegistry.register(target, hook, kind)


def _plugin() -> None:
    """Calls `register` if the user requests it. SGLang calls this function if this package is installed."""
    if os.environ.get(VARIABLE) == "1":
        register()


def _kernels() -> dict[str, Any]:
    return dict(flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func)


_signature = functools.cache(inspect.signature)


def _around(name: str) -> Callable[..., Any]:
    """A hook around a function of FlashMLA. It calls this package's function of this name, or SGLang's own one for rows
    of 8 bits. Metadata without arguments are for either, and come from SGLang.
    """

    def hook(theirs: Callable[..., Any], *given: Any, **named: Any) -> Any:
        options = dict(_signature(theirs).bind(*given, **named).arguments)
        is_fp8, *descales = (options.pop(x, None) for x in ("is_fp8_kvcache", "descale_q", "descale_k"))
        if not options or is_fp8 or any(x is not None for x in descales):
            return theirs(*given, **named)
        return getattr(flash_mla, name)(**options)

    return hook


_OF_LATENT = {
    name: _around(name) for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata")
}


def flash_attn_with_kvcache(
    q: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *between: Any,
    only_qv: bool = False,
    sinks: Tensor | None = None,
    **options: Any,
) -> Any:
    """`fa3.flash_attn_with_kvcache` with SGLang's arguments: FlashAttention-3's, and `sinks` and `only_qv`. SGLang also
    passes cu_seqlens_k_new without new keys, an attention_chunk of None, and metadata of its own kernels.
    """
    if len(between) > len(_BETWEEN):
        raise TypeError(f"there are {5 + len(between)} arguments by their place, expected up to {5 + len(_BETWEEN)}")
    given = dict(zip(_BETWEEN, between)) | options
    if only_qv:
        q = k_cache = None
    if k is None:
        given.pop("cu_seqlens_k_new", None)
    if given.get("num_splits") == 1:
        # SGLang's deterministic mode.
        given |= dict(num_splits=0, split_keys="fixed")
    given["attention_chunk"] = given.get("attention_chunk") or 0
    given.pop("scheduler_metadata", None)
    return _with_kvcache(q, k_cache, v_cache, k, v, **given, s_aux=sinks)


# The positional arguments of SGLang's calls, after the tensors.
_BETWEEN = (
    *("qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table"),
    *("cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
    *("softmax_scale", "causal", "window_size", "attention_chunk", "softcap", "rotary_interleaved"),
    *("scheduler_metadata", "num_splits", "pack_gqa"),
)


def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    only_qv: bool = False,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    **options: Any,
) -> Any:
    """`fa3.flash_attn_varlen_func` with SGLang's arguments, or `fa3.flash_attn_func` if there is no cu_seqlens_q."""
    if only_qv:
        q = k = None
    options |= dict(return_attn_probs=return_softmax_lse, s_aux=sinks)
    options["attention_chunk"] = options.get("attention_chunk") or 0
    if cu_seqlens_q is not None:
        return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
    lists = {name: options.pop(name, None) for name in ("seqused_q", "seqused_k", "page_table")}
    for name, x in (lists | dict(cu_seqlens_k=cu_seqlens_k)).items():
        if x is not None:
            raise ValueError(f"there is {name} without cu_seqlens_q")
    return flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
