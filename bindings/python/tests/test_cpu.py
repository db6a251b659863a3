"""Attention and quantization of tensors on the CPU, against their definitions. Needs torch but no GPU."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import dense
from packing import MASKS, at_once, normal
from reference import as_products_read, quantized, quantized_channels, standard

from fa3 import flash_attn_fp8_func, flash_attn_func, flash_attn_qkvpacked_func, quantize, quantize_channels

F32, F16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn

@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(1, 3), (64, 64), (72, 41), (128, 256)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_types_head_dims_and_masks(dtype, head_dim, head_dim_v, mask):
    q = normal(2, 70, 4, head_dim, dtype=dtype)
    k, v = (normal(2, 90, 2, dim, dtype=dtype, seed=dim) for dim in (head_dim, head_dim_v))
    dense.check(q, k, v, **mask)
    dense.check_gradients(q, k, v, **mask)


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 300), (300, 1), (200, 130)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 1)], ids=str)
def test_lengths_heads_and_scores(seqlens, heads):
    q = normal(2, seqlens[0], heads[0], 32)
    k, v = (normal(2, seqlens[1], heads[1], 32, seed=seed) for seed in (1, 2))
    for check in (dense.check, dense.check_gradients):
        check(q, k, v, causal=True, softmax_scale=0.3, softcap=4.0)


def strided(x):
    """The same numbers in other orders of memory: heads first, columns first, every other column, shifted."""
    wide = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan, dtype=x.dtype)
    wide[..., ::2] = x
    shifted = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype)
    shifted[1:] = x.flatten()
    orders = [x.transpose(1, 2).contiguous().transpose(1, 2), x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)]
    return [*orders, wide[..., ::2], shifted[1:].view(x.shape)]


def test_strides_are_as_they_are():
    q, k, v, dout = (normal(2, 50, 4, 32, seed=seed) for seed in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = flash_attn_func(*leaves, causal=True)
    gradients = torch.autograd.grad(expected, leaves, dout)
    for others in zip(*(strided(x.detach()) for x in (q, k, v, dout))):
        given = [x.requires_grad_() for x in others[:3]]
        out = flash_attn_func(*given, causal=True)
        assert torch.equal(out, expected) and out.is_contiguous()
        assert all(map(torch.equal, torch.autograd.grad(out, given, others[3]), gradients))
    one = normal(1, 50, 1, 32, seed=5)
    whole = one.repeat(2, 1, 4, 1)
    assert torch.equal(flash_attn_func(q, one.expand(2, -1, 4, -1), v), flash_attn_func(q, whole, v))
    qkv = torch.stack([x.detach() for x in (q, k, v)], 2)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), expected)


def test_elements_that_begin_inside_of_others():
    """Memory of a file or a message may begin anywhere."""
    x = normal(1, 20, 2, 16)
    raw = b"x" + bytes(x.view(torch.uint8).flatten().tolist())
    shifted = torch.frombuffer(bytearray(raw), dtype=BF16, offset=1, count=x.numel()).view(x.shape)
    assert shifted.data_ptr() % 2 == 1
    assert torch.equal(flash_attn_func(shifted, shifted, shifted), flash_attn_func(x, x, x))
    leaf = shifted.requires_grad_()
    [gradient] = torch.autograd.grad(flash_attn_func(leaf, leaf, leaf), leaf, x)
    leaf = x.clone().requires_grad_()
    assert torch.equal(gradient, torch.autograd.grad(flash_attn_func(leaf, leaf, leaf), leaf, x)[0])
    assert torch.equal(quantize(shifted.detach())[1], quantize(x)[1])


def test_gradients_are_slopes():
    """Gradients are the central differences of the forward pass in float64."""
    q, k, v = (normal(1, 5, 2, 4, dtype=F32, seed=seed).requires_grad_() for seed in range(3))
    out, lse = flash_attn_func(q, k, v, causal=True, softcap=2.0, return_attn_probs=True)
    dout, dlse = normal(*out.shape, dtype=F32, seed=3), normal(*lse.shape, dtype=F32, seed=4)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    exact = [x.detach().double() for x in (q, k, v)]

    def phi(*qkv):
        out, lse = standard(*qkv, window=(-1, 0), softcap=2.0)
        return (out * dout).sum() + (lse * dlse).sum()

    for x, gradient in zip(exact, gradients):
        for index in range(x.numel()):
            slopes = []
            for step in (1e-4, -1e-4):
                x.view(-1)[index] += step
                slopes.append(phi(*exact))
                x.view(-1)[index] -= step
            slope = (slopes[0] - slopes[1]) / 2e-4
            assert abs(slope - gradient.flatten()[index]) < 1e-5


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions(backend):
    has_compiler = shutil.which("g++") or shutil.which("clang++")
    if backend == "inductor" and not (has_compiler and Path(sysconfig.get_path("include"), "Python.h").exists()):
        pytest.skip("skipped: inductor needs a C++ compiler and Python's headers")

    def step(qkv):
        return torch.autograd.grad(flash_attn_qkvpacked_func(qkv.neg() * 2, causal=True).relu().sum(), qkv)[0]

    def layer(qkv):
        return flash_attn_qkvpacked_func(qkv.neg() * 2, causal=True).relu()

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for seqlen in (20, 21):
        qkv = normal(2, seqlen, 3, 2, 16, dtype=F32).requires_grad_()
        out = compiled(qkv)
        assert torch.equal(out, layer(qkv))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv)[0], step(qkv))


def test_threads_compute_at_once():
    problems = [[normal(2, 40 + i, 2, 16, seed=i)] * 3 for i in range(8)]
    expected = [flash_attn_func(*problem, causal=True) for problem in problems]

    def work(problem, right):
        assert all(torch.equal(flash_attn_func(*problem, causal=True), right) for _ in range(20))

    at_once(work, list(zip(problems, expected, strict=True)))


def test_a_forked_process_computes_too():
    """It has none of its parent's threads. Workers that load data are such."""
    x = normal(1, 300, 2, 16)
    expected = flash_attn_func(x, x, x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(flash_attn_func(x, x, x), expected) else 1)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("it waits without end")


COUNT_THREADS = """
import os, time, torch
from fa3 import flash_attn_func

def threads():
    return len(os.listdir("/proc/self/task"))

x = torch.ones(1, 300, 2, 16)
before = threads()
for wanted, count in [(1, {0}), (4, {1}), (2, {2})]:
    torch.set_num_threads(wanted)
    flash_attn_func(x, x, x)
    # Those of a call before end by themselves.
    end = time.monotonic() + 30
    while threads() != before + count and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == before + count, (wanted, threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="skipped: there is no list of threads")
@pytest.mark.parametrize("environment, counts", [({}, [1, 4, 2]), ({"RAYON_NUM_THREADS": "3"}, [3, 3, 3])], ids=str)
def test_it_computes_with_as_many_threads_as_torch(environment, counts):
    inherited = {name: value for name, value in os.environ.items() if name != "RAYON_NUM_THREADS"}
    run = subprocess.run([sys.executable, "-c", COUNT_THREADS.format(*counts)], env=inherited | environment, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 0, run.stderr


# e4m3, by the definition on what codes and scales stand for. P is rounded to e4m3, which costs up to 1/16 of it.


def near(out, lse, q, k, v, **options):
    right, right_lse = standard(q, k, v, **options)
    seen = right_lse.isfinite()
    assert ((lse - right_lse)[seen].abs() < 0.1).all() and (lse[~seen] == -math.inf).all()
    error = (out - right).norm() / right.norm()
    assert error < 0.05, f"o is {error:.3f} from the definition"


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("scales_of", ["heads", "blocks of 64", "blocks of 128", "channels", "nothing", "heads, some of 0"])
def test_codes_and_their_scales(scales_of, transposed):
    q, k, v = normal(2, 150, 4, 32), normal(2, 200, 2, 32, seed=1), 3 + normal(2, 200, 2, 48, seed=2)
    options = dict(scales_of="heads")
    if scales_of in ("blocks of 64", "blocks of 128", "channels"):
        options = dict()
    q_options = options | (dict(heads_per_scale=2) if options else dict(block_rows=64 if "64" in scales_of else 128))
    (q, of_q), (k, of_k) = quantize(q, **q_options), quantize(k, **options)
    v_mean, scales = None, dict()
    if scales_of == "channels":
        v, of_v, v_mean = quantize_channels(v)
    else:
        v, of_v = quantize(v, **options)
    if scales_of == "nothing":
        of_q, of_k, of_v = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2)
    else:
        scales = dict(q_descale=of_q, k_descale=of_k, v_descale=of_v, v_mean=v_mean)
    if "some of 0" in scales_of:
        of_q[0, 1], of_k[1, 0], of_v[1, 1] = 0.0, 0.0, 0.0

    def stood_for(codes, scale, rows):
        heads = codes.shape[2] // scale.shape[1]
        if scale.dim() == 3 and rows is None:
            return codes.float() * scale.unsqueeze(1) + v_mean.unsqueeze(1)
        scale = scale.repeat_interleave(heads, 1)
        if scale.dim() == 2:
            return codes.float() * scale[:, None, :, None]
        return codes.float() * scale.transpose(1, 2).repeat_interleave(rows, 1)[:, : codes.shape[1], :, None]

    exact = stood_for(q, of_q, 64 if "64" in scales_of else 128), stood_for(k, of_k, 128)
    exact_v = stood_for(v, of_v, None if v_mean is not None else 128)
    given = as_products_read(v) if transposed else v
    softmax_scale = 0.002 if scales_of == "nothing" else None
    for dtype in (F16, BF16):
        out, lse = flash_attn_func(
            q, k, given, softmax_scale, True, **scales, v_transposed=transposed, out_dtype=dtype, return_attn_probs=True
        )
        assert out.dtype == dtype
        near(out, lse, *exact, exact_v, scale=softmax_scale, window=(-1, 0))


@pytest.mark.parametrize("head_dim, head_dim_v", [(1, 3), (30, 41)])
def test_codes_of_any_head_dim(head_dim, head_dim_v):
    q, k = (normal(2, rows, 2, head_dim, seed=rows).to(E4M3) for rows in (20, 30))
    v = normal(2, 30, 2, head_dim_v, seed=1).to(E4M3)
    near(*flash_attn_func(q, k, v, causal=True, return_attn_probs=True), q.float(), k.float(), v.float(), window=(-1, 0))


@pytest.mark.parametrize("v_channels", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_16_bits_in_8(dtype, v_channels):
    q, k, v = normal(2, 140, 4, 64, dtype=dtype), *(normal(2, 150, 2, 64, dtype=dtype, seed=seed) for seed in (1, 2))
    out, lse = flash_attn_fp8_func(q, k, v, causal=True, softcap=20.0, v_channels=v_channels, return_attn_probs=True)
    assert out.dtype == dtype
    right, _ = standard(q, k, v, window=(-1, 0), softcap=20.0)
    assert (out - right).norm() / right.norm() < 0.07


def test_scales_that_make_no_sense_are_named():
    codes = normal(1, 20, 2, 32).to(E4M3)
    for scale, sentence in ((-1.0, "scale 1 is -1"), (math.nan, "NaN"), (math.inf, "inf")):
        scales = torch.tensor([[1.0, scale]])
        with pytest.raises(ValueError, match=re.escape(sentence)):
            flash_attn_func(codes, codes, codes, k_descale=scales)


# Quantization.


def steps(codes):
    bits = codes.view(torch.uint8).to(torch.int16)
    return torch.where(bits > 0x7F, -(bits & 0x7F), bits)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(block_rows=64),
        dict(scale=0.5),
        dict(scales_of="heads"),
        dict(scales_of="heads", heads_per_scale=3),
        dict(scales_of="tensor"),
        dict(hadamard_seed=2**64 - 1),
        dict(rotate=True, positions=5, interleaved=True),
        dict(rotate=True, positions="listed", hadamard_seed=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_quantization(dtype, options, transposed):
    options = dict(options)
    for seqlen in (0, 1, 130):
        x = normal(2, seqlen, 3, 32, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
        given = dict(options)
        if given.pop("rotate", False):
            angles = torch.arange(200)[:, None] * 100.0 ** (-torch.arange(8) / 8)
            given |= dict(cos=angles.cos(), sin=angles.sin())
        if given.get("positions") == "listed":
            given["positions"] = torch.randint(0, 200, (2, seqlen), generator=torch.Generator().manual_seed(0))
        codes, scales = quantize(x, transposed=transposed, **given)
        right, right_scales = quantized(x, transposed=transposed, **given)
        torch.testing.assert_close(scales, right_scales, rtol=1e-5, atol=0)
        assert codes.shape == right.shape and ((steps(codes) - steps(right)).abs() <= 1).all()
        codes, scales, mean = quantize_channels(x, transposed=transposed)
        right, right_scales, right_mean = quantized_channels(x, transposed)
        torch.testing.assert_close((scales, mean), (right_scales, right_mean), rtol=1e-5, atol=1e-6)
        assert codes.shape == right.shape and ((steps(codes) - steps(right)).abs() <= 1).all()
