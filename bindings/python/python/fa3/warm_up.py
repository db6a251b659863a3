"""`warm_up`: compiles the kernels of later calls in the background."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import _fa3, operator
from .attention import flash_attn_func
from .kvcache import flash_attn_with_kvcache

# Numbers of rows of a model's sequences: kernels for short, long and very long sequences differ.
_LENGTHS = (512, 2048, 8192)


def warm_up(*work: Any, training: bool = False, device: int | None = None) -> Future[dict[str, int]]:
    """Compiles the kernels of calls in background threads, side by side, so that the calls find them.

        def step():
            q = torch.empty(1, 4096, 32, 128, dtype=torch.bfloat16, requires_grad=True)
            k, v = (torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16) for _ in "kv")
            fa3.flash_attn_func(q, k, v, causal=True).sum().backward()

        warming = fa3.warm_up(step)
        ...  # loads weights
        warming.result()

    Arguments:
        work: functions without arguments, and models' configurations. A function is called at once, with "meta" as
            torch's default device: its tensors have no memory, and nothing is computed. It calls functions of this
            package, or a model on that device. Only shapes, strides, dtypes and options matter. A configuration is any
            object with the attributes of Hugging Face's: num_attention_heads, num_key_value_heads, head_dim or
            hidden_size, dtype, and sliding_window. Its calls are causal attention of sequences of several lengths, and
            decoding over a dense cache.
        training: whether a configuration's calls have gradients.
        device: the number of the GPU, or None for torch's current one.

    Returns: a future of how many kernels come from where: "archive" (the package's file of compiled kernels), "driver's
        cache" (on disk) and "compiler". A call that comes earlier waits for the kernels that are being compiled and
        compiles others itself. Python waits for the threads before it ends.

    Raises:
        NotImplementedError, TypeError, ValueError: a call is refused as it would be on a GPU, or a configuration lacks
            numbers. If there is no GPU or the driver reports an error, `result` of the future raises RuntimeError.
    """
    calls: list[tuple[_fa3.Operation, operator.Tensors]] = []
    with operator.recorded(calls), torch.device("meta"):
        for item in work:
            for call in (item,) if callable(item) else _of_model(item, training):
                call()
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    # Its thread is joined before Python ends.
    pool = ThreadPoolExecutor(1, thread_name_prefix="fa3.warm_up")
    warming = pool.submit(_compile, device, calls)
    pool.shutdown(wait=False)
    return warming


def _compile(device: int, calls: list[tuple[_fa3.Operation, operator.Tensors]]) -> dict[str, int]:
    return dict(Counter(place for _, place in _fa3.warm_up(device, calls)))


def _of_model(config: Any, training: bool) -> Iterator[Callable[[], None]]:
    """The calls of a model's attention."""
    heads = _number(config, "num_attention_heads")
    heads_kv = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or _number(config, "hidden_size") // heads
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    window = getattr(config, "sliding_window", None)
    windows = [(-1, -1), (window - 1, 0)] if window else [(-1, -1)]

    def make(rows: int, heads: int) -> Tensor:
        return torch.empty(1, rows, heads, head_dim, dtype=dtype, requires_grad=training)

    def attend(rows: int, window_size: tuple[int, int]) -> None:
        q, k, v = make(rows, heads), make(rows, heads_kv), make(rows, heads_kv)
        out = flash_attn_func(q, k, v, causal=True, window_size=window_size)
        if training:
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))

    def decode(window_size: tuple[int, int]) -> None:
        with torch.no_grad():
            q, k, v = make(1, heads), make(_LENGTHS[-1], heads_kv), make(_LENGTHS[-1], heads_kv)
            flash_attn_with_kvcache(q, k, v, cache_seqlens=1, causal=True, window_size=window_size)

    for window_size, rows in itertools.product(windows, _LENGTHS):
        yield lambda rows=rows, window_size=window_size: attend(rows, window_size)  # type: ignore[misc]
    for window_size in windows:
        yield lambda window_size=window_size: decode(window_size)  # type: ignore[misc]


def _number(config: Any, name: str) -> int:
    number = getattr(config, name, None)
    if not isinstance(number, int):
        raise TypeError(f"{type(config).__name__} is neither a function nor a configuration: it has no number {name}")
    return number
