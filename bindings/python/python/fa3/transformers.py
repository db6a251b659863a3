"""Models of Hugging Face transformers with this package's attention.

    fa3.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa3-rs/flash-attn3")

Transformers unpads, packs and caches as for its own "flash_attention_3", and calls `flash_attn_func`,
`flash_attn_varlen_func` and `flash_attn_with_kvcache` of this package. Dropout and biases, which FlashAttention has no
argument for, would be silently ignored on that path: here they raise. So would masks of images and of users: here they
become intervals (`fa3.masks`), or raise if a row has more than two.
"""

import os
import weakref
from importlib import import_module
from typing import Any, Callable

import torch
from torch import Tensor

from . import masks
from .attention import flash_attn_func
from .kvcache import flash_attn_with_kvcache
from .varlen import flash_attn_varlen_func

__all__ = ["NAME", "register"]

# Transformers infers an implementation's properties from its name. The name of a FlashAttention contains "flash"; if it
# supports paged decoding, a 3 follows; if it comes from the hub, the name contains a "/".
NAME = "fa3-rs/flash-attn3"
OLDEST = 5, 17

# Transformers' names for FlashAttention-3. Models that list the implementations they run with use these names.
_FLASH_ATTENTION_3 = {"flash_attention_3", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"}
# Biases and selections of keys that models pass to attention, but that FlashAttention has no argument for.
_OTHERS = ("position_bias", "relative_position_bias", "attention_bias", "indices", "block_indices")
# The options by which transformers passes cu_seqlens and the longest lengths of packed sequences.
_LISTS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
# The types of models that transformers runs without FlashAttention, only because it would ignore their images' masks.
_WITH_IMAGES = {"gemma3", "paligemma"}
# The functions of transformers.masking_utils whose masks FlashAttention computes without a tensor.
_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    # `_packed` finds the sequences in the positions that attention gets.
    "packed_sequence_mask_function",
}
# The functions that make a mask of other masks.
_MASKS_OF_MASKS = {"and_masks", "remap_positions_for_packed_sequence"}


class _Positions(Tensor):
    """Positions that tell packed sequences apart, in the place of the mask: some models pass no position_ids."""


class _Intervals(Tensor):
    """A mask as intervals, int32 (batch or 1, heads or 1, rows, 2 or 4), in the place of the mask."""


def register() -> str:
    """Registers this package's attention with transformers as "fa3-rs/flash-attn3", and returns that name.

    The name is then a valid `attn_implementation` of `from_pretrained`, `from_config` and `set_attn_implementation`. It
    works on a Hopper GPU and on the CPU, for models that transformers itself runs with FlashAttention: with padded and
    packed batches, dynamic and static caches, continuous batching, training, GQA, windows, soft caps and sinks. A
    second call changes nothing.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ImportError: transformers is older than 5.17, or a newer version has no place to register an implementation.
    """
    # Imported by name, so that type checkers of code that imports this package need not read transformers, which takes
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
        # Before 5.23, transformers calls a separate attention function in continuous batching.
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
    """Whether an implementation is this package's, paged or not."""
    return implementation is not None and implementation.split("|")[-1] == NAME


def _with_our_functions(theirs: Callable[..., tuple], utils: Any) -> Callable[..., tuple]:
    """Wraps transformers' function that imports the functions of an implementation, so that it knows ours."""

    def lazy_imports(implementation: str | None, *rest: Any, **options: Any) -> tuple:
        if _is_ours(implementation):
            functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
            return *functions, utils._pad_input, utils._unpad_input
        return theirs(implementation, *rest, **options)

    lazy_imports._of_fa3 = True  # type: ignore[attr-defined]
    return lazy_imports


def _with_our_models(theirs: Callable[..., str]) -> Callable[..., str]:
    """Wraps transformers' method that checks whether a model runs with an implementation. If a model does not,
    transformers silently takes another implementation; with ours the wrapper raises.
    """

    def check_and_adjust(self: Any, attn_implementation: str | None, *rest: Any, **options: Any) -> str:
        if _is_ours(attn_implementation):
            _check_model(self)
        return theirs(self, attn_implementation, *rest, **options)

    return check_and_adjust


def _check_model(self: Any) -> None:
    """Refuses a model that does not support FlashAttention, or lists other implementations than FlashAttention-3."""
    model = type(self)
    if self.config.model_type in _WITH_IMAGES and "_supports_flash_attn" not in vars(self):
        # The class keeps its own attribute: with transformers' FlashAttention it would ignore masks.
        self._supports_flash_attn = True
        self.register_forward_pre_hook(_check_images, with_kwargs=True)
    if not self._supports_flash_attn:
        raise ValueError(f"{model.__name__} does not support FlashAttention in transformers: {NAME} cannot run it")
    known = getattr(model, "_compatible_flash_implementations", None)
    if known is None or NAME in known:
        return
    if _FLASH_ATTENTION_3.isdisjoint(known):
        raise ValueError(f"{model.__name__} runs with {', '.join(known)} alone: {NAME} cannot run it")
    known.append(NAME)


def _check_images(model: Any, given: Any, options: dict[str, Any]) -> None:
    """Refuses images in a trace without attention_mask: their mask then looks like a mask of packed sequences. An error
    would only break the graph, so this is an assertion.
    """
    types = options.get("token_type_ids")
    if torch.compiler.is_compiling() and types is not None and options.get("attention_mask") is None:
        sentence = f"token_type_ids without attention_mask are not supported by {NAME} in a graph"
        torch._assert_async(torch.zeros((), dtype=torch.bool, device=types.device), sentence)


def _attention(theirs: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Wraps transformers' attention function, and refuses arguments that it would ignore."""

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
        if isinstance(attention_mask, _Intervals):
            return _with_intervals(module, (query, key, value), attention_mask, options), None
        if isinstance(attention_mask, _Positions):
            if options.get("position_ids") is None and _is_causal(module, options):
                options["position_ids"] = attention_mask
            attention_mask = None
        if attention_mask is None:
            options |= _packed(query, key, options)
        elif _is_window(options.get("sliding_window"), key):
            _refuse_holes(attention_mask)
        elif not _is_causal(module, options):
            key, value, packed = _without_padding(key, value, attention_mask, query.shape[2])
            options |= packed
            attention_mask = None
        return theirs(module, query, key, value, attention_mask, dropout=dropout, **options)

    return attention


def _with_intervals(module: Any, tensors: tuple[Tensor, ...], mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention under a mask of intervals. It is the layer's whole mask, with its window and its padding."""
    query = tensors[0]
    dtype = import_module("transformers.integrations.flash_attention").get_target_dtype(query, module) or query.dtype
    q, k, v = (x.transpose(1, 2).to(dtype) for x in tensors)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=options.get("scaling"),
        softcap=options.get("softcap") or 0.0,
        deterministic=os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1",
        s_aux=options.get("s_aux"),
        intervals=mask.as_subclass(Tensor),
    )


def _paged_attention(theirs: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Wraps transformers' attention function for continuous batching, and refuses arguments that it would ignore."""

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
    """Whether attention is causal, by transformers' rule."""
    is_causal = options.get("is_causal")
    return module.is_causal if is_causal is None else is_causal


def _is_window(width: int | None, key: Tensor) -> bool:
    """Whether a window hides any key."""
    return width is not None and key.shape[2] > width


def _without_padding(
    key: Tensor, value: Tensor, mask: Tensor, seqlen_q: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and values without padding, (1, heads, total, head_dim), and the options that give the rows of each
    sequence.

    Transformers assumes that Q has the same padding as K, and computes no padded rows of Q. In cross-attention Q is
    another sequence, without this padding.
    """
    batch, keys = mask.shape
    rows = mask.flatten().nonzero().squeeze(1)
    key, value = (x[:, :, :keys].transpose(1, 2).flatten(0, 1)[rows].transpose(0, 1)[None] for x in (key, value))
    ends_q = torch.arange(0, (batch + 1) * seqlen_q, seqlen_q, dtype=torch.int32, device=mask.device)
    ends_k = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    return key, value, dict(zip(_LISTS, (ends_q, ends_k, seqlen_q, keys)), position_ids=None)


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Caches a function's last result for the same tensor. All layers of a model need the same result, and each
    computation waits for the GPU.
    """
    last: tuple[Any, ...] = (lambda: None, None, None)

    def ask(x: Tensor, *rest: Any) -> Any:
        nonlocal last
        # Tensors of inference mode have no version counter, so a result for such a tensor is not reused.
        version = None if x.is_inference() else (x._version, *rest)
        of, its_version, result = last
        if of() is not x or version is None or its_version != version:
            result = function(x, *rest)
            last = weakref.ref(x), version, result
        return result

    return ask


def _must_not_wait(x: Tensor) -> bool:
    """Whether the host must not read a tensor's numbers: in a trace, and while a CUDA graph is captured."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _packed(query: Tensor, key: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The options that give the rows of packed sequences in a batch, found from position_ids; no options if each row is
    one sequence.
    """
    positions, batch, rows = options.get("position_ids"), query.shape[0], query.shape[2]
    if positions is None or all(options.get(name) is not None for name in _LISTS):
        return {}
    if rows == 1 or positions.shape not in ((1, rows), (batch, rows)):
        return {}
    if _must_not_wait(positions):
        _assert_packed_as_transformers_knows(positions, batch)
        return {}
    found = _ends(positions, batch)
    if found is None:
        return dict(position_ids=None)
    if key.shape[2] != rows:
        raise NotImplementedError(f"packed sequences of {rows} rows with {key.shape[2]} keys are not supported")
    ends, longest = found
    return dict(zip(_LISTS, (ends, ends, longest, longest)), position_ids=None)


@_remembered
def _ends(positions: Tensor, batch: int) -> tuple[Tensor, int] | None:
    """The cu_seqlens and the longest length of the packed sequences of a batch, or None if each row is one sequence. A
    sequence begins at the start of a row, and where a position is not its predecessor plus 1, as in transformers'
    masks.
    """
    positions = positions.as_subclass(Tensor)
    begins = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True).expand(batch, -1)
    starts = begins.flatten().nonzero().squeeze(1)
    if len(starts) == batch:
        return None
    ends = torch.nn.functional.pad(starts, (0, 1), value=begins.numel())
    return ends.int(), int(ends.diff().max())


def _assert_packed_as_transformers_knows(positions: Tensor, batch: int) -> None:
    """Asserts, in a trace, where positions are unknown, that transformers finds the same sequences. Transformers cuts
    only a batch of one row into sequences, at each occurrence of the row's smallest position.
    """
    if batch > 1:
        are_known = (positions.diff(dim=1) == 1).all()
        torch._assert_async(are_known, f"packed sequences in {batch} rows are not supported: put them into one")
    else:
        are_known = positions[0, 0] == positions.min()
        torch._assert_async(are_known, "the first packed sequence does not begin at the least position")


def _refuse_holes(mask: Tensor) -> None:
    """Refuses a mask with padding between keys, beside a sliding window, which would count padding as keys."""
    sentence = f"padding between keys beside a sliding window is not supported by {NAME}, use sdpa or eager"
    if _must_not_wait(mask):
        torch._assert_async(~_hole(mask), sentence)
    elif _has_hole(mask):
        raise NotImplementedError(sentence)


def _hole(mask: Tensor) -> Tensor:
    """Whether the keys of any row have a gap."""
    is_key = torch.nn.functional.pad(mask.bool(), (1, 0))
    return ((is_key[:, 1:] & ~is_key[:, :-1]).sum(1) > 1).any()


@_remembered
def _has_hole(mask: Tensor) -> bool:
    return bool(_hole(mask))


def _refuse(attention_mask: Any, dropout: float, options: dict[str, Any]) -> None:
    """Refuses arguments that FlashAttention does not have."""
    if dropout:
        raise NotImplementedError(f"dropout is {dropout}, and {NAME} has none: set attention_dropout to 0")
    if attention_mask is not None and attention_mask.dim() != 2 and not isinstance(attention_mask, _Intervals):
        found = f"attention_mask is {tuple(attention_mask.shape)}"
        raise NotImplementedError(f"{found}, and {NAME} takes masks of padding alone: (batch, keys)")
    for name in _OTHERS:
        if options.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported by {NAME}")


def _mask(theirs: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wraps transformers' function that makes the mask for attention: which keys are not padding, (batch, keys), or
    None if there is no padding. That function ignores `mask_function`, which masks further keys: if it does, the
    wrapper makes intervals.
    """

    def mask(
        batch_size: int, *rest: Any, mask_function: Callable[..., Any] | None = None, **options: Any
    ) -> Tensor | None:
        if mask_function is not None:
            # In a trace the parts of a mask function are unknown: images and users' functions are told from others by
            # the outermost function and by transformers' options.
            if torch.compiler.is_compiling():
                is_union = mask_function.__name__ == "or_mask"
                if (options.get("use_vmap") or is_union) and not _is_bidirectional(options):
                    return _intervals(mask_function, batch_size, options)
                if options.get("attention_mask") is None and isinstance(options.get("q_offset"), Tensor):
                    raise NotImplementedError(
                        f"a static cache without attention_mask is not supported by {NAME} in a graph"
                    )
            else:
                leaves = _leaves(mask_function, options)
                if not all(_is_plain(leaf, options) for leaf in leaves):
                    return _intervals(mask_function, batch_size, options)
                positions = _positions_of(mask_function)
                if positions is not None:
                    return positions
                is_causal = any(leaf.__qualname__ == "causal_mask_function" for leaf in leaves)
                if options.get("attention_mask") is None and is_causal:
                    options["attention_mask"] = _of_static_cache(batch_size, options)
        return theirs(batch_size, *rest, **options)

    return mask


def _intervals(mask_function: Callable[..., Any], batch: int, options: dict[str, Any]) -> Tensor:
    """The intervals of a mask function and of padding."""
    q_offset, keys, kv_offset = (options[name] for name in ("q_offset", "kv_length", "kv_offset"))
    is_key = options.get("attention_mask")
    if is_key is not None:
        # A static cache has memory for more keys.
        is_key = torch.nn.functional.pad(is_key, (0, max(0, kv_offset + keys - is_key.shape[1])))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_idx, kv_idx = q_idx + q_offset, kv_idx + kv_offset
        sees = mask_function(b, h, q_idx, kv_idx)
        return sees if is_key is None else sees & is_key[b, kv_idx]

    intervals = masks.from_mask_mod(mask_mod, batch, None, options["q_length"], keys, options["device"])
    return intervals.as_subclass(_Intervals)


def _of_static_cache(batch: int, sizes: dict[str, Any]) -> Tensor | None:
    """The mask of the keys in use, if a static cache has memory for more."""
    keys = int(sizes["q_offset"]) + sizes["q_length"]
    if sizes["kv_offset"] + sizes["kv_length"] <= keys:
        return None
    return torch.ones(batch, keys, dtype=torch.bool, device=sizes["device"])


def _positions_of(mask: Callable[..., Any]) -> Tensor | None:
    """Positions that tell packed sequences apart as the mask does, or None if it is not a mask of packed sequences."""
    for part in _parts(mask):
        if part.__qualname__.startswith("packed_sequence_mask_function."):
            # The index of each token's sequence. The positions returned jump from one sequence to the next.
            [numbers] = [x for x in _insides(part) if isinstance(x, Tensor)]
            rows = numbers.shape[1]
            return (torch.arange(rows, device=numbers.device) + numbers * (rows + 1)).as_subclass(_Positions)
    return None


def _insides(mask: Callable[..., Any]) -> list[Any]:
    """The values that a mask function captures."""
    insides = [cell.cell_contents for cell in mask.__closure__ or ()]
    return [x for inside in insides for x in (inside if isinstance(inside, tuple) else (inside,))]


def _parts(mask: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The mask functions that a mask function captures."""
    return [x for x in _insides(mask) if callable(x)]


def _is_bidirectional(options: dict[str, Any]) -> bool:
    """Whether a mask is for a bidirectional model."""
    return getattr(options.get("config"), "use_bidirectional_attention", None) is True


def _leaves(mask: Callable[..., Any], options: dict[str, Any]) -> list[Callable[..., Any]]:
    """The functions that a mask combines. Bidirectional models (EmbeddingGemma) unite a causal mask with functions of
    their own, and tell attention that it is not causal.
    """
    maker = mask.__qualname__.split(".")[0]
    if maker in _MASKS_OF_MASKS or maker == "or_masks" and _is_bidirectional(options):
        return [leaf for part in _parts(mask) for leaf in _leaves(part, options)]
    return [mask]


def _is_plain(mask: Callable[..., Any], options: dict[str, Any]) -> bool:
    """Whether FlashAttention computes a mask without a tensor. Attention gets the layer's window and no chunks, so
    chunks may not hide keys.
    """
    maker = mask.__qualname__.split(".")[0]
    if maker in _MASKS and mask.__module__ == "transformers.masking_utils":
        if not maker.endswith("_overlay"):
            return True
        [width] = [x for x in _insides(mask) if isinstance(x, int)]
        if maker == "chunked_overlay":
            return options["kv_offset"] + options["kv_length"] <= width
        return options.get("local_size") == width
    return _is_bidirectional(options) and mask.__module__.startswith("transformers.models.")
