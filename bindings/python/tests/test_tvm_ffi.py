"""The module of tvm-ffi: tensors of torch, numpy, JAX and CuPy beside the definitions, on the CPU and on a GPU. Needs
torch and tvm-ffi, and for a part of the tests JAX, CuPy or a C compiler.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
tvm_ffi = pytest.importorskip("tvm_ffi", reason="skipped: tvm_ffi is not installed")

import fa3
from fa3.tvm_ffi import module, run
from reference import judge, judge_gradients

CAUSAL = (-1, 0, 0)
CASES = {
    "causal": (dict(window=CAUSAL), dict(causal=True)),
    "window, cap and scale": (
        dict(window=(9, 3, 0), softcap=2, softmax_scale=0.3),
        dict(window_size=(9, 3), softcap=2.0, softmax_scale=0.3),
    ),
}


def randn(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def qkv(shape=(2, 33, 4, 32), keys=40, heads_kv=2, head_dim_v=24, **like):
    batch, _, _, head_dim = shape
    shapes = shape, (batch, keys, heads_kv, head_dim), (batch, keys, heads_kv, head_dim_v)
    return [randn(*shape, seed=seed, **like) for seed, shape in enumerate(shapes)]


def of_numpy(*tensors):
    return [x.numpy() for x in tensors]


def of_jax(*tensors):
    jax = pytest.importorskip("jax", reason="skipped: jax is not installed")
    try:
        device = jax.devices("gpu" if tensors[0].is_cuda else "cpu")[0]
    except RuntimeError:
        pytest.skip("skipped: no GPU that jax can use")
    return [jax.block_until_ready(jax.device_put(x.cpu().numpy(), device)) for x in tensors]


def of_cupy(*tensors):
    cupy = pytest.importorskip("cupy", reason="skipped: cupy is not installed")
    with cupy.cuda.Device(tensors[0].device.index):
        return [cupy.asarray(x.cpu().numpy()) for x in tensors]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_of_torchs_allocator(case, dtype, device):
    given, options = CASES[case]
    q, k, v = qkv(dtype=dtype, device=device)
    o, lse = run("forward", q=q, k=k, v=v, o=None, lse=None, **given)
    judge(*(x.cpu() for x in (o, lse, q, k, v)), **options)
    dout, names = randn(*o.shape, dtype=dtype, device=device, seed=3), ("dq", "dk", "dv")
    found = run("backward", q=q, k=k, v=v, o=o, lse=lse, dout=dout, **dict.fromkeys(names), **given)
    judge_gradients([x.cpu() for x in found], *(x.cpu() for x in (q, k, v, dout)), **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework", [of_numpy, of_jax])
def test_outputs_of_the_caller(case, framework):
    given, options = CASES[case]
    x = dict(zip("qkv", qkv(dtype=torch.float32))) | dict(dout=randn(2, 33, 4, 24, dtype=torch.float32, seed=3))
    q, k, v, dout = framework(*x.values())
    o, lse, dq, dk, dv = (np.empty(shape, np.float32) for shape in (dout.shape, (2, 4, 33), q.shape, k.shape, v.shape))
    assert run("forward", q=q, k=k, v=v, o=o, lse=lse, **given) is None
    assert run("backward", q=q, k=k, v=v, o=o, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, **given) is None
    o, lse, *gradients = (torch.from_numpy(x) for x in (o, lse, dq, dk, dv))
    judge(o, lse, x["q"], x["k"], x["v"], **options)
    judge_gradients(gradients, *x.values(), **options)


def test_strides_and_packed_sequences():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(keys=33, head_dim_v=32))
    o, expected = torch.empty_like(q), run("forward", q=q.contiguous(), k=k, v=v, o=None, window=tvm_ffi.Shape((5, 0, 0)))
    assert run("forward", q=q, k=k, v=v, o=o, window=[5, 0, 0]) is None and not o.is_contiguous()
    assert torch.equal(o, expected)
    ends = torch.tensor([0, 33, 66], dtype=torch.int32)
    packed = dict(q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1), cu_seqlens_q=ends, cu_seqlens_k=ends)
    o, lse = run("forward", **packed, o=None, lse=None, window=(5, 0, 0), max_seqlen_q=33)
    assert torch.equal(o, expected.flatten(0, 1)) and lse.shape == (4, 66)


def test_other_operations():
    """They write to what is given, and return nothing."""
    q, k, v = qkv(keys=64, head_dim_v=32)
    new = [x[:, :33].clone() for x in (k, v)]
    expected, used = run("forward", q=q, k=k[:, :33], v=v[:, :33], o=None), torch.zeros(2, dtype=torch.int32)
    for x in (k, v):
        x.fill_(torch.nan)
    o, pages = torch.empty_like(q), torch.arange(2, dtype=torch.int32)[:, None]
    assert run("append", q=q, k=k, v=v, k_new=new[0], v_new=new[1], page_table=pages, seqused_k=used, o=o) is None
    assert torch.equal(k[:, :33], new[0]) and torch.equal(v[:, :33], new[1]) and torch.equal(o, expected)


def test_a_function_of_scores_is_a_text():
    q, k, v = qkv()
    assert not torch.equal(run("forward", q=q, k=k, v=v, o=None, score="s + 0.125 * (k - q)"), run("forward", q=q, k=k, v=v, o=None))


def test_threads_call_at_the_same_time():
    q, k, v = qkv()
    expected, found = run("forward", q=q, k=k, v=v, o=None, window=CAUSAL), []
    call = lambda: found.extend(run("forward", q=q, k=k, v=v, o=None, window=CAUSAL) for _ in range(10))
    threads = [threading.Thread(target=call) for _ in range(10)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 100 and all(torch.equal(x, expected) for x in found)


Q, K, V = qkv()
GIVEN = dict(q=Q, k=K, v=V, o=None)
ODD = np.frombuffer(bytearray(Q.numel() * 2 + 1), np.uint8)[1:].view(np.float16).reshape(Q.shape)
REFUSALS = [
    (dict(v=V.half()), ValueError, "v is f16, expected bf16 like q"),
    (dict(o=torch.empty(2, 33, 4, 24)), ValueError, "o cannot be f32 when q is bf16"),
    (dict(q=Q.int()), ValueError, "a tensor is i32, expected one of f32, f16, bf16 and e4m3"),
    (dict(q=Q.long(), o=Q), ValueError, "a tensor is DLPack's type 0 of 64 bits, 1 lanes, expected one of f32, f16, bf16 and e4m3"),
    (dict(k=K[..., :16]), ValueError, "k has head_dim 16, expected 32"),
    (dict(q=Q[0, 0]), ValueError, "q has 2 dimensions, expected 4"),
    (dict(q=Q[None, None]), ValueError, "q has 6 dimensions, expected up to 5"),
    (dict(lse=torch.empty(2, 33, 4)), ValueError, "lse has shape [2, 33, 4], expected [2, 4, 33]"),
    (dict(lse=torch.empty(2, 33, 4).mT), ValueError, "lse is f32 (2, 4, 33), expected no gaps, which strides [132, 1, 4] do not have"),
    (dict(lse=torch.empty(2, 4, 33).double()), ValueError, "lse is DLPack's type 2 of 64 bits, 1 lanes (2, 4, 33), expected f32"),
    (dict(q=ODD, k=K.half(), v=V.half()), ValueError, "q lies at 0x"),
    (dict(v=K, o=Q), ValueError, "output o [0x"),
    (dict(dq=None), ValueError, "dq is None, and forward does not make it"),
    (dict(sofcap=1.0), TypeError, "the operation has no option sofcap"),
    (dict(bias=Q), TypeError, "the operation has no tensor bias"),
    (dict(q={}), TypeError, "the operation has no option q"),
    (dict(softcap=-1.0), ValueError, "soft cap -1 is outside 1e-18 to 1e18"),
    (dict(softcap="1"), ValueError, "softcap has tvm-ffi's type 11, expected a number"),
    (dict(window=(1, 2)), ValueError, "window has tvm-ffi's type 71, expected three integers"),
    (dict(max_seqlen_q=1.0), ValueError, "max_seqlen_q has tvm-ffi's type 3, expected an integer"),
    (dict(lse_base_two=1), ValueError, "lse_base_two has tvm-ffi's type 1, expected a bool"),
    (dict(score=1), ValueError, "score has tvm-ffi's type 1, expected a text"),
]


@pytest.mark.parametrize("given, kind, sentence", REFUSALS, ids=[sentence for *_, sentence in REFUSALS])
def test_invalid_calls_are_refused(given, kind, sentence):
    with pytest.raises(kind) as raised:
        run("forward", **GIVEN | given)
    assert str(raised.value).startswith(sentence)


CALLS = [
    ([], ValueError, "there is no operation: run(operation, name, value, ...)"),
    (["attend", "q", Q], TypeError, "there is no operation attend"),
    (["forward"], ValueError, "there is no tensor"),
    (["forward", "k", K], ValueError, "there is no q"),
    (["forward", "k", K, "o", None], ValueError, "there is no q"),
    (["forward", "q"], ValueError, "q has no value: run(operation, name, value, ...)"),
    (["forward", "q", Q, "q", Q], ValueError, "there are two q"),
    (["forward", Q, "q"], ValueError, "argument 1 has tvm-ffi's type 70, expected a name"),
    ([1], ValueError, "argument 0 has tvm-ffi's type 1, expected a name"),
]


@pytest.mark.parametrize("given, kind, sentence", CALLS, ids=[sentence for *_, sentence in CALLS])
def test_the_function_refuses_other_calls(given, kind, sentence):
    with pytest.raises(kind) as raised:
        module.run(*given)
    assert str(raised.value) == sentence


def test_without_an_allocator_outputs_are_refused():
    with pytest.raises(ValueError) as raised:
        run("forward", **dict(zip("qkv", of_numpy(*qkv(dtype=torch.float32)))), o=None)
    assert str(raised.value) == "o is None, and tvm-ffi has no allocator here: give a tensor for it, or tensors of torch"


def test_a_process_without_tvm_ffi():
    """The extension module does not need tvm-ffi. A call without it says what is missing, where it can."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).__tvm_ffi_run(None, None, 0, None))"
    done = subprocess.run([sys.executable, "-c", code, fa3._fa3.__file__], capture_output=True, text=True)
    assert done.stdout == "-1\n", done.stderr
    assert done.stderr == (
        "fa3: there is no operation: run(operation, name, value, ...); "
        "this process has no TVMFFIErrorCreate: tvm-ffi is not loaded, or is older\n"
    )


# What `src/tvm_ffi/abi.rs` takes from the header.
LAYOUTS = """
#include <stddef.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#define IS(x, number) _Static_assert((x) == (number), #x)
IS(TVM_FFI_VERSION_MAJOR, 0);
IS(sizeof(TVMFFIAny), 16); IS(offsetof(TVMFFIAny, small_str_len), 4); IS(offsetof(TVMFFIAny, v_obj), 8);
IS(sizeof(TVMFFIObject), 24); IS(offsetof(TVMFFIObject, type_index), 8);
IS(offsetof(TVMFFIByteArray, size), 8); IS(offsetof(TVMFFIShapeCell, size), 8); IS(offsetof(TVMFFISeqCell, size), 8);
IS(sizeof(DLTensor), 48); IS(offsetof(DLTensor, dtype), 20); IS(offsetof(DLTensor, byte_offset), 40);
IS(kTVMFFINone, 0); IS(kTVMFFIInt, 1); IS(kTVMFFIBool, 2); IS(kTVMFFIFloat, 3); IS(kTVMFFIDLTensorPtr, 7);
IS(kTVMFFIRawStr, 8); IS(kTVMFFISmallStr, 11); IS(kTVMFFIStr, 65); IS(kTVMFFIError, 67); IS(kTVMFFIFunction, 68); IS(kTVMFFIShape, 69);
IS(kTVMFFITensor, 70); IS(kTVMFFIArray, 71); IS(kTVMFFIList, 75); IS(kDLCPU, 1); IS(kDLCUDA, 2);
TVMFFISafeCallType run; int __tvm_ffi_run(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);
void use(void) {
    run = __tvm_ffi_run;
    int (*create)(const TVMFFIByteArray *, const TVMFFIByteArray *, const TVMFFIByteArray *, void **) = TVMFFIErrorCreate;
    void (*raise)(void *) = TVMFFIErrorSetRaised;
    void *(*stream)(int32_t, int32_t) = TVMFFIEnvGetStream;
    DLPackManagedTensorAllocator (*allocator)() = TVMFFIEnvGetDLPackManagedTensorAllocator;
    int (*allocate)(DLTensor *, void **) = TVMFFIEnvTensorAlloc, (*release)(void *) = TVMFFIObjectDecRef;
    int (*find)(const TVMFFIByteArray *, void **) = TVMFFIFunctionGetGlobal;
    int (*call)(void *, TVMFFIAny *, int32_t, TVMFFIAny *) = TVMFFIFunctionCall;
}
"""


def test_layouts_are_those_of_the_installed_header():
    include = [f"-I{path}" for path in (tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path())]
    try:
        done = subprocess.run(["cc", "-fsyntax-only", "-Werror", *include, "-xc", "-"], input=LAYOUTS, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("skipped: no C compiler")
    assert done.returncode == 0, done.stderr


def test_calls_of_a_stand_in_for_a_gpu(stand_in_driver):
    """Kernels are launched on the stream of tvm-ffi's environment. A large workspace is memory of its allocator."""
    script = Path(__file__).with_name("environments.py")
    done = subprocess.run([sys.executable, script], env=stand_in_driver, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.hopper
@pytest.mark.parametrize("number", range(2))
def test_the_stream_and_the_device_of_torch(number):
    if number >= torch.cuda.device_count():
        pytest.skip(f"skipped: no GPU {number}")
    device = torch.device("cuda", number)
    q, k, v = qkv((2, 2000, 8, 128), 2000, 8, 128, device=device)
    dout, none = randn(*q.shape, device=device, seed=3), dict.fromkeys(("dq", "dk", "dv"))
    expected, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    given, stream = [torch.zeros_like(x) for x in (q, k, v)], torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # The kernels read what the stream writes before, and are on the tensors' device, not on the current one.
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for x, new in zip(given, (q, k, v)):
            x.copy_(new)
        named = dict(zip("qkv", given), window=CAUSAL)
        with torch.cuda.device(0):
            for _ in range(3):
                o, found = run("forward", **named, o=None, lse=None)
                gradients = run("backward", **named, o=o, lse=found, dout=dout, deterministic=True, **none)
    stream.synchronize()
    assert o.device == device and torch.equal(o, expected) and torch.equal(found, lse)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    of_torch = torch.autograd.grad(fa3.flash_attn_func(*leaves, causal=True, deterministic=True), leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip(gradients, of_torch))


@pytest.mark.hopper
@pytest.mark.parametrize("framework", [of_cupy, of_jax])
def test_arrays_of_other_frameworks_on_a_gpu(framework):
    """CuPy has no allocator for tvm-ffi, so that the workspace is the driver's. JAX's arrays are read, not written."""
    # JAX has its arrays on the first GPU, and may have made another one current.
    like = dict(device="cuda:0", dtype=torch.float16)
    leaves = [x.requires_grad_() for x in qkv((2, 2000, 8, 128), 2000, 8, 128, **like)]
    dout = randn(2, 2000, 8, 128, seed=3, **like)
    o, lse = fa3.flash_attn_func(*leaves, causal=True, deterministic=True, return_attn_probs=True)
    expected = o, lse, *torch.autograd.grad(o, leaves, dout)
    q, k, v, given = framework(*(x.detach() for x in (*leaves, dout)))
    found = [torch.zeros_like(x) for x in expected]
    outputs = framework(*found) if framework is of_cupy else found
    o, lse, dq, dk, dv = outputs
    run("forward", q=q, k=k, v=v, o=o, lse=lse, window=CAUSAL)
    run("backward", q=q, k=k, v=v, o=o, lse=lse, dout=given, dq=dq, dk=dk, dv=dv, window=CAUSAL, deterministic=True)
    torch.cuda.synchronize()
    assert all(torch.equal(torch.from_dlpack(x), y) for x, y in zip(outputs, expected))


@pytest.mark.hopper
def test_tensors_of_another_device_are_refused():
    q, k, v = qkv(device="cuda:0")
    with pytest.raises(ValueError, match="^k is on DLPack's device 1:0, and q on 2:0$"):
        run("forward", q=q, k=k.cpu(), v=v, o=None)
    with pytest.raises(ValueError, match="^the forward kernels take"):
        run("forward", q=q.float(), k=k.float(), v=v.float(), o=None)
