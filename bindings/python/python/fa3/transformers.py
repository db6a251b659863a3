"""Models of Hugging Face transformers with this package's attention.

    fa3.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa3-rs/flash-attn3")

Transformers unpads, packs and caches as for its own "flash_attention_3", and calls `flash_attn_func`,
`flash_attn_varlen_func` and `flash_attn_with_kvcache` of this package. What that path would leave out in silence is
refused here: dropout, and masks and biases that FlashAttention has no argument for.
"""

from importlib import import_module
from typing import Any, Callable

import torch
from torch import Tensor

from .attention import flash_attn_func
from .kvcache import flash_attn_with_kvcache
from .varlen import flash_attn_varlen_func

__all__ = ["NAME", "register"]

# Transformers tells by its name what an implementation is: one of FlashAttention has "flash" in it, one that decodes
# over pages "flash" and later a 3, one of the hub a "/".
NAME = "fa3-rs/flash-attn3"
OLDEST = 5, 17

# FlashAttention-3 by its names there. Models that list implementations that they run with, list it by these.
_FLASH_ATTENTION_3 = {"flash_attention_3", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"}
# Biases and choices of keys that models give to attention, and that FlashAttention has no argument for.
_OTHERS = ("position_bias", "relative_position_bias", "attention_bias", "indices", "block_indices")
# The functions of transformers.masking_utils that make masks which FlashAttention has, or which its callers see to.
_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    # Refused elsewhere where it is more than a causal mask.
    "chunked_overlay",
}
# Those that make a mask of others.
_MASKS_OF_MASKS = {"and_masks", "remap_positions_for_packed_sequence"}
_PACKED = "packed_sequence_mask_function"


def register() -> str:
    """Makes transformers know this package's attention by the name "fa3-rs/flash-attn3", which is returned.

    The name is then an `attn_implementation` of `from_pretrained`, `from_config` and `set_attn_implementation`, on a
    Hopper GPU and on the CPU, for models that transformers itself runs with FlashAttention: with padded and packed
    batches, dynamic and static caches, continuous batching, training, GQA, windows, soft caps and sinks. A second call
    changes nothing.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ImportError: it is older than 5.17, or a newer version has no place for another attention.
    """
    # Imported like this, type checkers of code that imports this package need not read transformers, which takes them
    # minutes.
    theirs: Any = import_module("transformers")
    utils: Any = import_module("transformers.modeling_flash_attention_utils")
    _check_version(theirs, utils)
    if not getattr(utils._lazy_imports, "_of_fa3", False):
        utils._lazy_imports = _with_our_functions(utils._lazy_imports, utils)
        model = theirs.PreTrainedModel
        model._check_and_adjust_attn_implementation = _with_our_models(model._check_and_adjust_attn_implementation)
    dense = import_module("transformers.integrations.flash_attention").flash_attention_forward
    mask = _mask(import_module("transformers.masking_utils").flash_attention_mask)
    theirs.AttentionInterface.register(NAME, _attention(dense))
    theirs.AttentionMaskInterface.register(NAME, mask)
    if _version(theirs) < (5, 23):
        # Continuous batching has a function of its own.
        paged = import_module("transformers.integrations.flash_paged").paged_attention_forward
        theirs.AttentionInterface.register(f"paged|{NAME}", _paged_attention(paged))
        theirs.AttentionMaskInterface.register(f"paged|{NAME}", mask)
    return NAME


def _version(theirs: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in theirs.__version__.split(".")[:2])


def _check_version(theirs: Any, utils: Any) -> None:
    version = theirs.__version__
    if _version(theirs) < OLDEST:
        raise ImportError(f"transformers is {version}, expected {'.'.join(map(str, OLDEST))} or newer")
    names = (utils, "_lazy_imports"), (theirs.PreTrainedModel, "_check_and_adjust_attn_implementation")
    for of, name in names:
        if not hasattr(of, name):
            raise ImportError(f"transformers {version} has no {name}: this version of fa3 does not fit it")


def _is_ours(implementation: str | None) -> bool:
    """Whether an implementation is this package's, over pages or not."""
    return implementation is not None and implementation.split("|")[-1] == NAME


def _with_our_functions(theirs: Callable[..., tuple], utils: Any) -> Callable[..., tuple]:
    """Transformers' function that imports those of an implementation, which knows ours besides."""

    def lazy_imports(implementation: str | None, *rest: Any, **options: Any) -> tuple:
        if _is_ours(implementation):
            functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
            return *functions, utils._pad_input, utils._unpad_input
        return theirs(implementation, *rest, **options)

    lazy_imports._of_fa3 = True  # type: ignore[attr-defined]
    return lazy_imports


def _with_our_models(theirs: Callable[..., str]) -> Callable[..., str]:
    """Transformers' method that looks whether a model runs with an implementation. Where it does not, transformers
    takes another one in silence.
    """

    def check_and_adjust(self: Any, attn_implementation: str | None, *rest: Any, **options: Any) -> str:
        if _is_ours(attn_implementation):
            _check_model(type(self))
        return theirs(self, attn_implementation, *rest, **options)

    return check_and_adjust


def _check_model(model: type) -> None:
    """Refuses a model that has no FlashAttention, or another one than the third."""
    if not getattr(model, "_supports_flash_attn", False):
        raise ValueError(f"{model.__name__} does not support FlashAttention in transformers: {NAME} cannot run it")
    known = getattr(model, "_compatible_flash_implementations", None)
    if known is None or NAME in known:
        return
    if _FLASH_ATTENTION_3.isdisjoint(known):
        raise ValueError(f"{model.__name__} runs with {', '.join(known)} alone: {NAME} cannot run it")
    known.append(NAME)


def _attention(theirs: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Transformers' function of attention, which refuses what it would leave out."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        _refuse(attention_mask, dropout, options)
        if attention_mask is None:
            if torch.compiler.is_compiling():
                _assert_one_sequence_a_row(query.shape[0], options.get("position_ids"))
        elif not _is_causal(module, options) and not _is_window(options.get("sliding_window"), key):
            key, value, packed = _without_padding(key, value, attention_mask, query.shape[2])
            options |= packed
            attention_mask = None
        return theirs(module, query, key, value, attention_mask, dropout=dropout, **options)

    return attention


def _paged_attention(theirs: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Transformers' function of continuous batching, which refuses what it would leave out."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        _refuse(attention_mask, dropout, options)
        if options.get("softcap"):
            raise NotImplementedError("a softcap is lost in the continuous batching of transformers before 5.23")
        return theirs(module, query, key, value, attention_mask, **options)

    return attention


def _is_causal(module: Any, options: dict[str, Any]) -> bool:
    """Whether attention is causal, as transformers finds it."""
    is_causal = options.get("is_causal")
    return module.is_causal if is_causal is None else is_causal


def _is_window(width: int | None, key: Tensor) -> bool:
    """Whether a window hides something."""
    return width is not None and key.shape[2] > width


def _without_padding(
    key: Tensor, value: Tensor, mask: Tensor, seqlen_q: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and values that are no padding, (1, heads, total, head_dim), and where those of each row lie.

    Transformers takes the padding of K for that of Q as well, and computes no rows of Q there. In cross-attention those
    are rows of another sequence, which is not padded there.
    """
    batch, keys = mask.shape
    rows = mask.flatten().nonzero().squeeze(1)
    key, value = (x[:, :, :keys].transpose(1, 2).flatten(0, 1)[rows].transpose(0, 1)[None] for x in (key, value))
    ends_q = torch.arange(0, (batch + 1) * seqlen_q, seqlen_q, dtype=torch.int32, device=mask.device)
    ends_k = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    lists = dict(cu_seq_lens_q=ends_q, cu_seq_lens_k=ends_k, max_length_q=seqlen_q, max_length_k=keys)
    return key, value, lists | dict(position_ids=None)


def _assert_one_sequence_a_row(batch: int, positions: Tensor | None) -> None:
    """Puts an assertion into a trace, in which nobody knows positions, that several rows are not packed."""
    if batch > 1 and positions is not None and positions.dim() == 2 and positions.shape[1] > 1:
        is_next = positions[:, 1:] - positions[:, :-1] == 1
        torch._assert_async(is_next.all(), f"packed sequences in {batch} rows are not supported: put them into one")


def _refuse(attention_mask: Any, dropout: float, options: dict[str, Any]) -> None:
    """Refuses what FlashAttention has no argument for."""
    if dropout:
        raise NotImplementedError(f"dropout is {dropout}, and {NAME} has none: set attention_dropout to 0")
    if attention_mask is not None and attention_mask.dim() != 2:
        found = f"attention_mask is {tuple(attention_mask.shape)}"
        raise NotImplementedError(f"{found}, and {NAME} takes masks of padding alone: (batch, keys)")
    for name in _OTHERS:
        if options.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported by {NAME}")


def _mask(theirs: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Transformers' function of the mask that attention gets: which keys are no padding, (batch, keys), or None where
    all are. What else is masked says `mask_function`, which it does not look at.
    """

    def mask(
        batch_size: int, *rest: Any, mask_function: Callable[..., Any] | None = None, **options: Any
    ) -> Tensor | None:
        if mask_function is not None:
            # A compiler does not know who made a function, but for those of users.
            if not torch.compiler.is_compiling():
                _check_mask(mask_function, batch_size)
            elif options.get("use_vmap"):
                raise NotImplementedError(f"a mask function is not supported by {NAME}, use sdpa or eager")
        return theirs(batch_size, *rest, **options)

    return mask


def _check_mask(mask: Callable[..., Any], batch: int) -> None:
    """Refuses masks that FlashAttention has not. A mask is known by the function that made it."""
    maker = mask.__qualname__.split(".")[0]
    if maker in _MASKS and mask.__module__ == "transformers.masking_utils":
        return
    if maker == _PACKED:
        # Only one row is cut into sequences.
        if batch > 1:
            raise NotImplementedError(f"packed sequences in {batch} rows are not supported: put them into one")
    elif maker in _MASKS_OF_MASKS:
        for cell in mask.__closure__ or ():
            inside = cell.cell_contents
            for part in inside if isinstance(inside, tuple) else (inside,):
                if callable(part):
                    _check_mask(part, batch)
    else:
        raise NotImplementedError(f"a mask of {mask.__qualname__} is not supported by {NAME}, use sdpa or eager")
