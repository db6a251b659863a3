"""This package's attention inside of torch's own functions: `scaled_dot_product_attention`, `varlen_attn`, and all
other functions that call torch's flash attention.

Torch lets other packages replace its CUDA kernels (`torch.nn.attention.register_flash_attention_impl`). Calls that our
kernels do not support go on to torch's own kernels, so that every call is computed.
"""

import functools
import sys
import warnings
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from . import _fa3, gradient, operator
from .activation_layout import Layout, layout_of
from .sequences import Sequences

__all__ = ["NAME", "Activation", "activate"]

# This package's name in torch.nn.attention.
NAME = "FA3_RS"

_OF_SDPA = "_scaled_dot_product_flash_attention"
_OF_SDPA_IN_8_BITS = f"{_OF_SDPA}.quantized"
_OF_SDPA_BACKWARD = f"{_OF_SDPA}_backward"
_FORWARD = "_flash_attention_forward"
_BACKWARD = "_flash_attention_backward"


class Activation:
    """Torch runs this package's attention until `restore` is called, or until the `with` block of this object ends."""

    def __init__(self, before: str | None, flex: Any = None) -> None:
        self._before, self._is_over, self._flex = before, before == NAME, flex

    def restore(self) -> None:
        """Restores torch's previous implementation. A second call changes nothing, nor does a call after another
        implementation was activated.
        """
        attention = torch.nn.attention
        if self._flex is not None:
            self._flex.restore()
        if not self._is_over and attention.current_flash_attention_impl() == NAME:
            attention.restore_flash_attention_impl()
            if self._before is not None:
                attention.activate_flash_attention_impl(self._before)
        self._is_over = True

    def __enter__(self) -> "Activation":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.restore()


def activate(*, flex: bool = False) -> Activation:
    """Makes torch's own functions run on this package's kernels, from now on or in a `with` block.

        fa3.activate()
        with fa3.activate(): ...

    On Hopper GPUs `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn` then
    compute float16 and bfloat16 with our kernels, with gradients. So do other callers of torch's flash attention:
    nested tensors, `torch.nn.MultiheadAttention`, context parallelism. Until the activation ends, flash attention has
    priority over cuDNN. Nothing is copied: kernels read and write torch's strides. `torch.use_deterministic_algorithms`
    has the same effect as on `flash_attn_func`.

    With flex=True `torch.nn.attention.flex_attention.flex_attention` runs on them as well, however it is held: imported
    before, or compiled. Calls go on to torch's own function where this package's `flex_attention` refuses them, with
    max_scores or a BACKEND; and in `torch.compile` with a block mask that was not made by torch's `create_block_mask`
    while this is active, outside of compiled code. docs/torch.md has the details.

    Calls with masks or dropout, and with other dtypes, head dimensions, strides or devices, go to torch's own kernels.
    Where there is a GPU, torch initializes CUDA here: call this after a fork.

    Returns: an Activation, whose `restore()` or `with` block ends it.

    Raises:
        NotImplementedError: torch is older than 2.11, or has no CUDA, or with flex=True has another `flex_attention`.
    """
    attention = torch.nn.attention
    has_places = hasattr(attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")
    if not has_places:
        raise NotImplementedError(f"torch {torch.__version__} has no place for another flash attention, expected 2.11")
    if torch.version.cuda is None:
        raise NotImplementedError(f"torch {torch.__version__} is built without CUDA, and has no flash attention")
    before = attention.current_flash_attention_impl()
    if before != NAME:
        if NAME not in attention.list_flash_attention_impls():
            attention.register_flash_attention_impl(NAME, register_fn=_register)
        attention.activate_flash_attention_impl(NAME)
    if not flex:
        return Activation(before)
    from . import flex_activation

    try:
        return Activation(before, flex_activation.put())
    except NotImplementedError:
        Activation(before).restore()
        raise


class _Handle:
    """The state that an activation changes: our kernels, the priority of backends, and the tag of compiled graphs."""

    def __init__(self, library: Any, order: tuple[list[int], list[int]] | None, tags: tuple[str, str]) -> None:
        self._library, self._order, self._tags = library, order, tags

    def remove(self) -> None:
        """Restores torch's own state. A priority or a tag that other code has changed since then stays."""
        self._library._destroy()
        tag, ours = self._tags
        if torch.compiler.config.cache_key_tag == ours:
            torch.compiler.config.cache_key_tag = tag
        if self._order is not None:
            before, ours = self._order
            if torch._C._get_sdp_priority_order() == ours:
                torch._C._set_sdp_priority_order(before)


def _register() -> _Handle:
    """Activates our kernels. Torch calls this function."""
    library = _put("CUDA", _torchs())
    order = _put_flash_first() if any(map(_has_kernels, range(torch.cuda.device_count()))) else None
    _make_seeds()
    return _Handle(library, order, _tag_compiled_graphs())


def _tag_compiled_graphs() -> tuple[str, str]:
    """Gives graphs that torch.compile caches on disk a tag of their own: earlier graphs may use cuDNN, and their cache
    keys do not show it. Returns the tag before and after.
    """
    before = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = f"{before}{NAME}"
    return before, torch.compiler.config.cache_key_tag


def _put_flash_first() -> tuple[list[int], list[int]]:
    """Puts flash attention first in torch's priority of backends. Returns the priority before and after."""
    _let_torch_find_its_order()
    before = torch._C._get_sdp_priority_order()
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    torch._C._set_sdp_priority_order([flash, *(backend for backend in before if backend != flash)])
    return before, torch._C._get_sdp_priority_order()


def _let_torch_find_its_order() -> None:
    """Makes torch set its default priority now. Otherwise its first call would set it later, and overwrite ours."""
    x = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
    torch._fused_sdp_choice(x, x, x)


def _torchs() -> dict[str, Any]:
    """Torch's own kernels. They must be looked up before ours replace them."""
    names = _OF_SDPA, _OF_SDPA_IN_8_BITS, _OF_SDPA_BACKWARD, _FORWARD, _BACKWARD
    return {name: torch.library.get_kernel(f"aten::{name}", "CUDA") for name in names}


def _put(key: str, torchs: dict[str, Any]) -> torch.library.Library:
    """Registers our kernels in place of torch's, for a dispatch key, as long as the library lives."""
    library = torch.library.Library("aten", "IMPL", key)
    kernels = _Kernels(torchs)
    with warnings.catch_warnings():
        # Torch warns that a kernel is overridden. This is the purpose here.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, kernel in kernels.by_name().items():
            library.impl(name, kernel, key, with_keyset=True)
    return library


class _Kernels:
    """Kernels in place of torch's operators: each takes the dispatch keys, and then the operator's arguments. A call
    that our kernels do not support goes to torch's own kernel. A forward pass and its backward pass decide this by the
    same tensors, and both implementations have the same LSE anyway.
    """

    def __init__(self, torchs: dict[str, Any]) -> None:
        self._torchs = torchs
        names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"
        self._of_sdpa, self._forward = operator.repeats(*names[:3]), operator.repeats(*names)

    def by_name(self) -> dict[str, Any]:
        """The kernels, by the names of their operators."""
        return {
            _OF_SDPA: self.of_sdpa,
            _OF_SDPA_IN_8_BITS: self.of_sdpa_in_8_bits,
            _OF_SDPA_BACKWARD: self.of_sdpa_backward,
            _FORWARD: self.forward,
            _BACKWARD: self.backward,
        }

    def of_sdpa(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple:
        """Computes O (batch, heads, seqlen, head_dim), LSE, and the results that torch's dropout needs."""
        tensors, options = (query, key, value), (dropout_p, is_causal, return_debug_mask, scale, _margin())
        if (again := self._of_sdpa.attend(tensors, options)) is not None:
            return *again, None, None, query.shape[2], key.shape[2], *_others(query)
        call = _Call(query, key, value, _window(None, None, is_causal), is_heads_first=True)
        if dropout_p or return_debug_mask or not call.is_ours():
            given = query, key, value, dropout_p, is_causal, return_debug_mask
            return self._torchs[_OF_SDPA].call_boxed(keys, *given, scale=scale)
        out = torch.empty_like(query)
        lse = call.launch(scale, out)
        self._of_sdpa.keep_of_torch(tensors, options, call.operation(scale), True)
        return out, lse, None, None, query.shape[2], key.shape[2], *_others(query)

    def of_sdpa_in_8_bits(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_descale: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple:
        """Computes O in bfloat16, and LSE, from float8_e4m3fn Q, K and V with per-head scales (batch, heads_kv)."""
        call = _Call(query, key, value, _window(None, None, is_causal), is_heads_first=True)
        descales = q_descale, k_descale, v_descale
        is_ours = query.dtype == torch.float8_e4m3fn and call.is_ours() and _are_of_heads(key, *descales)
        if dropout_p or return_debug_mask or not is_ours:
            given = query, key, value, *descales, dropout_p, is_causal, return_debug_mask
            return self._torchs[_OF_SDPA_IN_8_BITS].call_boxed(keys, *given, scale=scale)
        out = torch.empty_like(query, dtype=torch.bfloat16)
        lse = call.launch(scale, out, *descales)
        return out, lse, None, None, query.shape[2], key.shape[2], *_others(out)

    def of_sdpa_backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple:
        """Computes dQ, dK and dV, which have the strides of Q, K and V."""
        call = _Call(query, key, value, _window(None, None, is_causal), is_heads_first=True)
        if dropout_p or not call.is_ours():
            given = grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k
            options = dropout_p, is_causal, philox_seed, philox_offset
            return self._torchs[_OF_SDPA_BACKWARD].call_boxed(keys, *given, *options, scale=scale)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        call.launch_backward(grad_out, out, logsumexp, scale, gradients)
        return gradients

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        **newer: Any,
    ) -> tuple:
        """Computes O, LSE, and the results that torch's dropout needs. O is (batch, seqlen, heads, head_dim), or
        (total, heads, head_dim) if sequences are packed. `newer` has arguments that later versions of torch add.
        """
        tensors = query, key, value, cum_seq_q, cum_seq_k, seqused_k
        options = (
            *(max_q, max_k, dropout_p, is_causal, return_debug_mask, scale, window_size_left, window_size_right),
            *(alibi_slopes, *newer.values(), _margin()),
        )
        if (again := self._forward.attend(tensors, options)) is not None:
            return *again, *_others(query)
        window = _window(window_size_left, window_size_right, is_causal)
        call = _Call(query, key, value, window, _sequences(cum_seq_q, cum_seq_k, seqused_k), (max_q, max_k))
        others = dropout_p or return_debug_mask or alibi_slopes is not None or _are_given(newer)
        # A dense batch with seqused_k goes to torch's own kernel.
        others = others or (cum_seq_q is None and seqused_k is not None)
        if others or not call.is_ours():
            given = query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask
            named: dict[str, Any] = dict(window_size_left=window_size_left, window_size_right=window_size_right)
            named |= dict(scale=scale, seqused_k=seqused_k, alibi_slopes=alibi_slopes)
            return self._torchs[_FORWARD].call_boxed(keys, *given, **named, **newer)
        out = torch.empty_like(query)
        lse = call.launch(scale, out)
        # Of lists for either Q or K alone nothing is read.
        if (cum_seq_q is None) is (cum_seq_k is None):
            self._forward.keep_of_torch(tensors, options, call.operation(scale), False)
        return out, lse, *_others(query)

    def backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple:
        """Computes dQ, dK and dV, which have the strides of Q, K and V."""
        window = _window(window_size_left, window_size_right, is_causal)
        call = _Call(query, key, value, window, _sequences(cum_seq_q, cum_seq_k, None), (max_q, max_k))
        if dropout_p or not call.is_ours():
            given = grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k
            options = dict(window_size_left=window_size_left, window_size_right=window_size_right, scale=scale)
            own = self._torchs[_BACKWARD]
            return own.call_boxed(keys, *given, dropout_p, is_causal, rng_state, unused, **options)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        call.launch_backward(grad_out, out, logsumexp, scale, gradients)
        return gradients


class _Call:
    """A call of attention. Its layout is computed once, decides whether our kernels compute the call, and serves the
    launch. The host limits the speed of a small call, and reading a property of a tensor takes time.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: tuple[int, int, int],
        sequences: Sequences | None = None,
        longest: tuple[int | None, int | None] = (None, None),
        is_heads_first: bool = False,
    ) -> None:
        """Takes tensors (batch, seqlen, heads, head_dim), or (total, heads, head_dim) of packed sequences; or tensors
        (batch, heads, seqlen, head_dim), if is_heads_first.
        """
        self._tensors, self._window, self._sequences, self._longest = (q, k, v), window, sequences, longest
        self._is_heads_first, self._device = is_heads_first, q.get_device()
        self._margin = _margin()
        self._addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        self._layout = self._find_layout()

    def is_ours(self) -> bool:
        """Whether our kernels compute this call, forward and backward, without copies."""
        return self._layout is not None

    def _find_layout(self) -> Layout | None:
        (q, k, v), (of_q, of_k, of_v) = self._tensors, self._addresses
        device, dtype, sequences = self._device, q.dtype, self._sequences
        if not (_has_kernels(device) and k.get_device() == device and v.get_device() == device):
            return None
        if dtype not in _DTYPES or k.dtype != dtype or v.dtype != dtype or (of_q | of_k | of_v) % 16 != 0:
            return None
        if sequences is not None and not _are_readable(sequences, device):
            return None
        extents = q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()
        count = None if sequences is None else sequences.batch
        return layout_of(dtype, self._window, count, self._margin, self._is_heads_first, *extents)

    def launch(self, scale: float | None, out: Tensor, *descales: Tensor | None) -> Tensor:
        """Writes O to `out`, which has Q's strides, and returns LSE. `is_ours` must hold."""
        assert self._layout is not None
        q, device = self._tensors[0], self._device
        dtype, of_q, of_k, of_v, of_o, of_lse = self._layout
        at_q, at_k, at_v = self._addresses
        # Torch parses sizes faster as separate arguments than as a tuple.
        lse = q.new_empty(*of_lse, dtype=torch.float32)
        given: dict[str, Any] = {
            "q": (dtype, at_q, *of_q),
            "k": (dtype, at_k, *of_k),
            "v": (dtype, at_v, *of_v),
            "o": (out.dtype, out.data_ptr(), *of_o),
            "lse": lse,
        }
        given |= zip(("q_descale", "k_descale", "v_descale"), descales)
        if self._sequences is not None:
            given |= self._sequences._asdict()
        _fa3.run(self.operation(scale), device, operator.current_stream(device), given, operator.workspace_for(q))
        return lse

    def operation(self, scale: float | None) -> _fa3.Operation:
        """The operation of the forward pass."""
        return operator.made("forward", _FIELDS, scale, *self._window, self._margin, *self._longest)

    def launch_backward(
        self, dout: Tensor, o: Tensor, lse: Tensor, scale: float | None, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Writes dQ, dK and dV to `outputs`, which have the strides of Q, K and V. `is_ours` must hold."""
        tensors = dout, *self._tensors, o, *outputs
        if self._is_heads_first:
            tensors = tuple(x.transpose(1, 2) for x in tensors)
        dout, q, k, v, o, *outputs = tensors
        options = scale, *self._window, 0.0, self._margin
        named: dict[str, Any] = dict(outputs=tuple(outputs), sequences=self._sequences, hints=self._longest)
        gradient.launch(dout, q, k, v, o, lse, None, *options, **named)


def _margin() -> int:
    """The number of SMs that torch leaves to other kernels."""
    return torch._C._get_sm_carveout_experimental() or 0


def _others(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Placeholders for the seed, the offset and the mask of dropout: our kernels have no dropout, and torch reads them
    only for dropout. All calls on a device share the seed that its activation made. Where graphs may be captured by
    torch's compiler, each call has its own: their results must lie in the memory pool of the graphs.
    """
    seed = _seeds.get(like.get_device())
    if seed is None or "torch._inductor.cudagraph_trees" in sys.modules:
        own = like.new_empty(2, dtype=torch.uint64)
        # A view takes a third of the time of an allocation.
        seed = own, own[0]
    return *seed, _no_mask(like.dtype, like.device)


# A seed with its first element, by the numbers of devices.
_seeds: dict[int, tuple[Tensor, Tensor]] = {}


def _make_seeds() -> None:
    """Makes the seeds of devices that this process uses already. They are made outside of inference mode, as the mask
    is, and not by the first call, which may be captured into a graph.
    """
    for device in range(torch.cuda.device_count()):
        if device not in _seeds and _has_kernels(device) and _is_used(device):
            with torch.inference_mode(False):
                seed = torch.zeros(2, dtype=torch.uint64, device=torch.device("cuda", device))
                _seeds[device] = seed, seed[0]


@functools.cache
def _no_mask(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements, shared by all calls. It is made outside of inference mode, since autograd refuses
    inference tensors.
    """
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _is_used(device: int) -> bool:
    """Whether this process has a context on a GPU."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(has_context(device)) if has_context else device == torch.cuda.current_device()


def _window(left: int | None, right: int | None, is_causal: bool) -> tuple[int, int, int]:
    """(window_left, window_right, attention_chunk) for the extension module. attention_chunk is 0."""
    return -1 if left is None else left, 0 if is_causal else -1 if right is None else right, 0


def _sequences(ends_q: Tensor | None, ends_k: Tensor | None, used_k: Tensor | None) -> Sequences | None:
    """The lists of packed sequences, or None for a dense batch."""
    if ends_q is None or ends_k is None:
        return None
    return Sequences(ends_q, ends_k, None, used_k)


def _are_given(options: dict[str, Any]) -> bool:
    return any(x is not None for x in options.values())


def _are_of_heads(key: Tensor, *descales: Tensor | None) -> bool:
    """Whether all given scales are per head of K (batch, heads, seqlen, head_dim)."""
    for x in descales:
        if x is not None and (x.dtype != torch.float32 or x.shape != key.shape[:2] or x.device != key.device):
            return False
    return True


_FIELDS = "softmax_scale window_left window_right attention_chunk sm_margin max_seqlen_q max_seqlen_k"
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float8_e4m3fn))


def _are_readable(sequences: Sequences, device: int) -> bool:
    """Whether kernels on the device can read the lists of the sequences."""
    ends_q, ends_k, _, used = sequences
    if not (_is_list(ends_q, device) and (ends_k is ends_q or _is_list(ends_k, device))):
        return False
    if used is not None and not (_is_list(used, device) and used.shape[0] == sequences.batch):
        return False
    return ends_k.shape == ends_q.shape


def _is_list(x: Tensor, device: int) -> bool:
    return x.dtype == torch.int32 and x.get_device() == device and x.dim() == 1 and x.is_contiguous()


@functools.cache
def _has_kernels(device: int) -> bool:
    """Whether our kernels run on the device with this index, as they do on Hopper GPUs. The CPU's index is negative."""
    return device >= 0 and torch.cuda.get_device_capability(device) == (9, 0)
