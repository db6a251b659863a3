"""Type checkers run on the package. Needs torch and mypy, but no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="skipped: torch is not installed")
pytest.importorskip("mypy", reason="skipped: mypy is not installed")

USE = """
import fa3
from fa3 import activate, masks, transformers, vllm
from fa3 import flash_attn_fp8_func, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from fa3 import flash_attn_combine, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
from fa3 import flex_attention, get_scheduler_metadata, quantize, quantize_channels
from fa3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from torch import Tensor
from typing_extensions import assert_type

def use(x: Tensor, qkv: Tensor, both: bool) -> None:
    plain = flash_attn_func(x, x, x) + flash_attn_qkvpacked_func(qkv) + flash_attn_fp8_func(x, x, x)
    o, lse = flash_attn_func(x, x, x, return_attn_probs=True)
    o, lse = flash_attn_qkvpacked_func(qkv, return_attn_probs=True)
    o, lse = flash_attn_fp8_func(x, x, x, return_attn_probs=True)
    alibi = fa3.Score("s + slope[h] * (k - q)", slope=x)
    plain += flash_attn_func(x, x, x, score=alibi) + flash_attn_with_kvcache(x, x, x, score=lambda s, b, h, q, k: s * x[h])
    plain += flex_attention(x, x, x, lambda s, b, h, q, k: s + x[h]) + flex_attention(x, x, x, alibi, enable_gqa=True)
    o, lse = flex_attention(x, x, x, return_lse=True)
    plain += flash_attn_varlen_func(x, x, x, x, x, 5, None)
    o, lse = flash_attn_varlen_func(x, x, x, x, x, x, 5, return_attn_probs=True)
    plain += flash_attn_varlen_qkvpacked_func(qkv, x, 5)
    o, lse = flash_attn_varlen_qkvpacked_func(qkv, x, None, return_attn_probs=True)
    plain += flash_attn_varlen_func(x, x, x, x, None, None, None, page_table=x)
    plain += flash_attn_with_kvcache(x, x, x, cache_seqlens=5, out=x)
    metadata = get_scheduler_metadata(2, 1, 100, 8, 2, 128, x)
    o, lse, _, _ = flash_attn_with_kvcache(x, x, x, scheduler_metadata=metadata, return_softmax_lse=True)
    o, lse, _, _ = _flash_attn_forward(x, x, x, cu_seqlens_q=x, cu_seqlens_k=x)
    dq, dk, dv, _ = _flash_attn_backward(x, x, x, x, o, lse, dq=x)
    plain += dq + dk + dv
    sides: list[int] = [5, 0]
    plain += flash_attn_func(x, x, x, window_size=sides, softcap=None, attention_chunk=None)
    plain += flash_attn_varlen_func(x, x, x, None, None, None, None, window_size=None)
    plain += flash_attn_with_kvcache(x, x, x, window_size=(None, 0), seqused_q=x)
    o, lse = flash_attn_combine(x, x, out=x)
    codes, scales = quantize(x)
    codes, scales, mean = quantize_channels(x)
    assert_type(plain + o + lse + codes + scales + mean, Tensor)
    with activate() as active:
        active.restore()
    name: str = transformers.register() + vllm.register()
    plain += masks.to_dense(masks.from_mask_mod(lambda b, h, q, k: q >= k, 1, None, 8, 8), 8)
    plain += masks.intersection(masks.document(x, causal=True), masks.padding(x, 8, 8))
    flash_attn_fp8_func(x, x, x, return_attn_probs=both)
    o, largest = flash_attn_func(x, x, x, return_max_logits=True)
    o, lse, largest = flash_attn_varlen_func(x, x, x, x, x, 5, 5, return_attn_probs=both, return_max_logits=True)
    o, largest = flash_attn_with_kvcache(x, x, x, return_max_logits=True)
    plain += fa3.distributed.attention(x, x, x, causal=True)
    plain += fa3.distributed.attention_varlen(x, x, x, [0, 5])
    o, lse = fa3.distributed.attention(x, x, x, return_lse=True)
    o, lse = fa3.distributed.attention_varlen(x, x, x, x, return_attn_probs=True)
"""

# Names that stubtest skips. The first modules cannot be imported without vLLM, JAX and tvm-ffi. The other names have no
# stubs, or are cached functions, whose arguments mypy does not know.
WITHOUT = """
fa3\\.vllm\\.(backend|mla|mla_sparse)
fa3\\.jax
fa3\\.tvm_ffi
fa3\\.activation_layout\\.layout_of
fa3\\.kvcache\\._filled
fa3\\.operator\\.made
fa3\\.distributed\\.(kernels|layout|plan)\\..*
"""


# What mypy's `--strict` adds for one module.
CONFIG = """
[mypy]
[mypy-vllm.*]
ignore_missing_imports = True
[mypy-jax.*]
ignore_missing_imports = True
follow_imports = skip
[mypy-tvm_ffi.*]
ignore_missing_imports = True
follow_imports = skip
[mypy-fa3_is_used]
disallow_any_generics = True
disallow_untyped_calls = True
warn_return_any = True
"""


def test_stubs_are_what_the_package_is(tmp_path):
    """Stubs have the package's names, signatures and defaults, its code has the types that it declares, and calls have
    exact types."""
    config, without = tmp_path / "mypy.ini", tmp_path / "without"
    config.write_text(CONFIG)
    without.write_text(WITHOUT)
    (tmp_path / "fa3_is_used.py").write_text(USE)
    options = "--mypy-config-file", str(config), "--allowlist", str(without), "--ignore-unused-allowlist"
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "mypy.stubtest", "fa3", "fa3_is_used", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=paths, MYPYPATH=paths))
    assert done.returncode == 0, done.stdout + done.stderr
