"""Records what a Hopper GPU computes: lane.bin (operations of a lane), mma.bin (tensor core), operand.bin (layouts).

    python3 record.py OUTPUT_FOLDER        needs an H100 or H200, PyTorch, NumPy and cuda-bindings

Everything is little-endian.
lane.bin: for each operation the length of its name (1 byte), its name, the number of cases (2 bytes), then the cases of
each operand and of each result. A predicate has 1 byte, the other classes their size.
mma.bin: for each trial 1 byte for the type (0 f16, 1 bf16), 1 for negating A, 1 for negating B, 1 for accumulating;
A (16 x 16 codes), B (8 x 16 codes), C (16 x 8 f32), D (16 x 8 f32).
operand.bin: for each layout the descriptor of B (8 bytes) relative to the start of shared memory, 1 byte for MN-major,
1 for bytes an element; the number of the element of shared memory (2 bytes) that is B(n, k), n < 64, for all n and k.
"""
import ctypes
import pathlib
import re
import sys

import numpy as np
import torch
from cuda.bindings import driver

OUT = pathlib.Path(sys.argv[1])
TABLE = pathlib.Path(__file__).resolve().parents[4] / "fa3-ir/src/lane/table.rs"
HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
CASES = 64
RNG = np.random.default_rng(90)


def check(result):
    error, *rest = result
    if int(error):
        raise RuntimeError(f"CUDA driver error {error}")
    return rest[0] if rest else None


def load(text, name):
    return check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData((HEAD + text).encode() + b"\0")), name))


def launch(function, threads, *tensors):
    values = [ctypes.c_uint64(t.data_ptr()) for t in tensors]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    check(driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
    torch.cuda.synchronize()


def device(array):
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).cuda()


# Operations of a lane.

REGISTER = {"Pred": "pred", "B16": "b16", "B32": "b32", "B64": "b64", "F32": "f32"}
DTYPE = {"Pred": np.uint8, "B16": np.uint16, "B32": np.uint32, "B64": np.uint64, "F32": np.uint32}


def operations():
    """(name, classes of operands, classes of results, PTX) of each row of the table."""
    row = r'(\w+): (?:fn \w+)?\(([^)]*)\) -> (\w+|\([^)]*\)) = "([^"]+)";'
    for name, inputs, outputs, ptx in re.findall(row, TABLE.read_text()):
        yield name, re.findall(r": (\w+)", inputs), re.findall(r"\w+", outputs), ptx


def lane_kernel(inputs, outputs, ptx):
    """One case a thread, 8 bytes an operand."""
    text = [".visible .entry lane(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd, .param .u64 pe)\n{"]
    text.append(".reg .b64 %w, %q, %at; .reg .b32 %t; mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 8;")
    for letter, ty in zip("abc", inputs):
        text.append(f".reg .{REGISTER[ty]} %{letter}; ld.param.u64 %q, [p{letter}]; add.u64 %q, %q, %at; ld.global.b64 %w, [%q];")
        text.append({
            "Pred": f"setp.ne.u64 %{letter}, %w, 0;", "B16": f"cvt.u16.u64 %{letter}, %w;", "B64": f"mov.b64 %{letter}, %w;",
            "B32": f"cvt.u32.u64 %{letter}, %w;", "F32": f"cvt.u32.u64 %t, %w; mov.b32 %{letter}, %t;"}[ty])
    text += [f".reg .{REGISTER[ty]} %{letter};" for letter, ty in zip("de", outputs)]
    mnemonic, operands = ptx.split(" ", 1)
    text.append(mnemonic + " " + re.sub("([a-e])", r"%\1", operands) + ";")
    for letter, ty in zip("de", outputs):
        text.append({
            "Pred": f"selp.b64 %w, 1, 0, %{letter};", "B16": f"cvt.u64.u16 %w, %{letter};", "B64": f"mov.b64 %w, %{letter};",
            "B32": f"cvt.u64.u32 %w, %{letter};", "F32": f"mov.b32 %t, %{letter}; cvt.u64.u32 %w, %t;"}[ty])
        text.append(f"ld.param.u64 %q, [p{letter}]; add.u64 %q, %q, %at; st.global.b64 [%q], %w;")
    return load("\n".join(text + ["ret;\n}"]), b"lane")


FLOATS = [0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 1, 0x80000001,
          0x7FFFFF, 0x807FFFFF, 0x800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x43E80000, 0x43E80001, 0x477FEFFF, 0x477FF000, 0x4F000000, 0xCF000000,
          0x4F800000, 0x4EFFFFFF, 0x3F000000, 0x3FC00000, 0xC0200000, 0xBF000000, 0x33000000, 0x387FFFFF, 0x3F7FFFFF, 0x7E800001, 0xC2FC0000,
          0xC3160000, 0x43000000]
HALVES = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0x7FFF, 0xFFFF, 0x7F80,
          0xFF80, 0x7F81, 0x7F7F, 0x3F80, 0xBF80, 0x5F41, 0x7F7E, 0x7E7F]
INTEGERS = [0, 1, 7, 15, 31, 32, 33, 63, 64, 65, 128, 224, 255, 256, 257, 0x120, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x5410,
            0x7632, 0xFEDC, 0x89AB]


def cases(ty):
    """Half of them special, half random."""
    pick = lambda pool: RNG.choice(np.array(pool, np.uint64), CASES)
    bits = lambda n: RNG.integers(0, 2**n - 1, CASES, np.uint64, endpoint=True)
    mix = lambda *pools: np.choose(RNG.integers(0, len(pools), CASES), [np.asarray(p, np.uint64) for p in pools])
    f32 = lambda x: x.astype(np.float32).view(np.uint32)
    normal = lambda scale: RNG.normal(0, 1, CASES) * scale
    if ty == "Pred":
        return bits(1)
    if ty == "F32":
        return mix(pick(FLOATS), pick(FLOATS), f32(normal(10)), f32(normal(2.0 ** RNG.integers(-30, 34, CASES))), f32(np.round(normal(100)) / 2), bits(32))
    halves = lambda: mix(pick(HALVES), bits(16), normal(3).astype(np.float16).view(np.uint16), f32(normal(3)) >> 16)
    if ty == "B16":
        return halves()
    if ty == "B32":
        return mix(pick(INTEGERS), bits(32), halves() | halves() << np.uint64(16), bits(6), bits(9))
    return mix(pick(INTEGERS), bits(64), bits(6), ~bits(33), pick(INTEGERS) << np.uint64(32))


def record_lanes(out):
    for name, inputs, outputs, ptx in operations():
        operands = [cases(ty) for ty in inputs]
        if len(inputs) > 1 and inputs[0] == inputs[1]:
            operands[1] = np.where(RNG.random(CASES) < 0.1, operands[0], operands[1])
        results = [torch.zeros(CASES, dtype=torch.int64, device="cuda") for _ in range(2)]
        sources = [device(x) for x in operands] + [results[0]] * (3 - len(operands))
        launch(lane_kernel(inputs, outputs, ptx), CASES, *sources, *results)
        out.write(bytes([len(name)]) + name.encode() + CASES.to_bytes(2, "little"))
        for ty, x in zip(inputs, operands):
            out.write(x.astype(DTYPE[ty]).tobytes())
        for ty, x in zip(outputs, results):
            out.write(x.cpu().numpy().astype(DTYPE[ty]).tobytes())


# The tensor core.

def accumulator_places(n):
    """(row, column) of each thread's registers."""
    thread, v = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    lane = thread % 32
    return 16 * (thread // 32) + lane // 4 + 8 * (v // 2 % 2), 8 * (v // 4) + 2 * (lane % 4) + v % 2


def wgmma_kernel(ty, n, k, a_in_registers, descriptor, flags, smem_bytes):
    """One product. A comes as core matrices without swizzle or as 4 registers a thread,
    B as the bytes of shared memory (whole 2048).
    """
    d = [f"%f{i}" for i in range(n // 2)]
    regs = "{" + ", ".join(d) + "}"
    a = "{%a0, %a1, %a2, %a3}" if a_in_registers else "%da"
    moves = [f"ld.global.b32 {x}, [%pc+{4 * i}];" for i, x in enumerate(d)]
    stores = [f"st.global.b32 [%pd+{4 * i}], {x};" for i, x in enumerate(d)]
    return load(f"""
.visible .entry mma(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd)
.maxntid 128, 1, 1
{{
    .reg .pred %p, %more; .reg .b32 %r<8>; .reg .b32 %a<4>; .reg .b64 %pa, %pb, %pc, %pd, %at, %da, %db; .reg .f32 %f<{n // 2}>;
    .shared .align 1024 .b8 smem_b[{smem_bytes}];
    .shared .align 1024 .b8 smem_a[4096];
    ld.param.u64 %pa, [pa]; ld.param.u64 %pb, [pb]; ld.param.u64 %pc, [pc]; ld.param.u64 %pd, [pd];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %at, %r0, {4 * (n // 2)};
    add.u64 %pc, %pc, %at; add.u64 %pd, %pd, %at;
    {" ".join(moves)}
    mul.wide.u32 %at, %r0, 16;
    add.u64 %pa, %pa, %at; add.u64 %pb, %pb, %at;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%pa];
    mov.u32 %r1, smem_a; shl.b32 %r2, %r0, 4; add.u32 %r3, %r1, %r2;
    st.shared.v4.b32 [%r3], {{%a0, %a1, %a2, %a3}};
    mov.u32 %r3, smem_b; add.u32 %r4, %r3, %r2; add.u32 %r5, %r3, {smem_bytes};
more:
    .reg .b32 %x<4>;
    ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%pb];
    st.shared.v4.b32 [%r4], {{%x0, %x1, %x2, %x3}};
    add.u64 %pb, %pb, 2048; add.u32 %r4, %r4, 2048;
    setp.lt.u32 %more, %r4, %r5;
    @%more bra more;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r1, %r1, 4; cvt.u64.u32 %da, %r1; or.b64 %da, %da, 0x0000001000080000;
    shr.u32 %r3, %r3, 4; cvt.u64.u32 %db, %r3; add.u64 %db, %db, {descriptor};
    setp.ne.u32 %p, {int(flags["accumulate"])}, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{ty}.{ty} {regs}, {a}, %db, %p, {-1 if flags["negate_a"] else 1}, {-1 if flags["negate_b"] else 1}{flags["majors"]};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {" ".join(stores)}
    ret;
}}""", b"mma")


def core_matrices(x):
    """Rows of 32 bytes as 8 x 16-byte core matrices: [row / 8][chunk][row % 8][byte]."""
    return x.view(np.uint8).reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).copy()


def multiply(kernel, n, a, b, c):
    rows, columns = accumulator_places(n)
    d = torch.full((128, n // 2), float("nan"), device="cuda")
    launch(kernel, 128, device(a), device(b), device(c[rows, columns]), d)
    result = np.zeros((64, n), np.float32)
    result[rows, columns] = d.cpu().numpy()
    return result


def codes(ty, x):
    x = np.asarray(x, np.float32)
    return x.astype(np.float16).view(np.uint16) if ty == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16)


def mma_trials(ty):
    """(A, B, C) of each trial, with what it is for. Only the first 16 rows count."""
    A, B, C = (64, 16), (8, 16), (64, 8)
    exponent, mantissa = (0x7C00, 0x3FF) if ty == "f16" else (0x7F80, 0x7F)
    largest = exponent - 1
    f32 = lambda x: np.asarray(x, np.float32)
    zero = np.zeros(C, np.float32)
    normal = lambda scale, shape: codes(ty, RNG.normal(0, scale, shape))

    def finite(shape):
        x = RNG.integers(0, 65536, shape).astype(np.uint16)
        return np.where(x & exponent == exponent, x & 0xBFFF, x).astype(np.uint16)

    wide = lambda: f32(RNG.normal(0, 1, C) * 2.0 ** RNG.integers(-40, 40, C))
    any_c = lambda: RNG.integers(0, 2**31 - 2**23, C).astype(np.uint32).view(np.float32)
    subnormal = lambda shape: (RNG.integers(0, mantissa + 1, shape) | RNG.integers(0, 2, shape) << 15).astype(np.uint16)
    yield finite(A), finite(B), zero  # any products
    yield finite(A), finite(B), wide()  # and an accumulator
    yield finite(A), finite(B), any_c()  # of any size
    yield normal(1, A), normal(1, B), zero  # ordinary numbers
    yield normal(1, A), normal(1, B), f32(RNG.normal(0, 10, C))
    yield codes(ty, RNG.uniform(0, 1, A)), normal(1, B), f32(RNG.normal(0, 1e5, C))  # P V
    yield subnormal(A), subnormal(B), zero
    yield subnormal(A), finite(B), f32(RNG.normal(0, 2.0**-20, C))
    a, b = finite(A), finite(B)
    a[:, 8:], b[:, 8:] = a[:, :8] ^ 0x8000, b[:, :8]  # products that cancel
    yield a, b, wide()
    yield a, b, -zero  # to zero, with a negative zero
    yield np.zeros(A, np.uint16), np.full(B, largest, np.uint16), any_c()  # zero times anything does not hide an accumulator
    a = np.where(RNG.random(A) < 0.1, finite(A), 0).astype(np.uint16)
    yield a, finite(B), wide()  # mostly zeros
    a, b = normal(1, A), normal(1, B)
    a[0, 5], a[1, 6], a[2, 6:8], a[3, 3], a[3, 4], a[4, 3] = exponent | 1, exponent | 0x8000, exponent, exponent, exponent | 0x8000, exponent
    b[0, 6], b[1, 3], b[2, 0] = 0, exponent, exponent | 3
    yield a, b, f32(RNG.normal(0, 1, C))  # infinities and NaN
    c = wide()
    c[::4, 0], c[1::4, 1], c[2::4, 2], c[3::4, 3] = np.inf, -np.inf, np.nan, 3.4028235e38
    yield normal(1, A), normal(1, B), c
    a = np.full(A, largest, np.uint16)
    a[::2] |= 0x8000
    b = np.full(B, largest, np.uint16)
    b[4:] = codes(ty, 1.0)
    yield a, b, f32(np.where(RNG.random(C) < 0.5, 3.4028235e38, -3.4028235e38))  # overflow
    a, b = np.zeros(A, np.uint16), np.zeros(B, np.uint16)
    a[:, 0] = codes(ty, 2.0**-14 if ty == "f16" else 2.0**-75)
    b[:, 0] = codes(ty, -(2.0 ** -np.arange(1, 9)) if ty == "f16" else -(2.0 ** -np.arange(71, 79)))
    yield a, b, RNG.integers(0, 16, C).astype(np.uint32).view(np.float32)  # subnormal sums


def record_mma(out):
    kernels = {}
    for number, ty in enumerate(("f16", "bf16")):
        for trial, (a, b, c) in enumerate(mma_trials(ty)):
            for negate_a, negate_b, accumulate in [(0, 0, 1)] + ([(1, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0)] if trial in (4, 13) else []):
                key = (ty, negate_a, negate_b, accumulate)
                flags = dict(negate_a=negate_a, negate_b=negate_b, accumulate=accumulate, majors=", 0, 0")
                if key not in kernels:
                    kernels[key] = wgmma_kernel(ty, 8, 16, False, 0x0000001000080000, flags, 2048)
                d = multiply(kernels[key], 8, core_matrices(a), np.pad(core_matrices(b).ravel(), (0, 2048 - 256)), c)
                out.write(bytes([number, negate_a, negate_b, accumulate]))
                out.write(a[:16].tobytes() + b.tobytes() + c[:16].tobytes() + d[:16].tobytes())


# Layouts: A is the identity, so that D is B, and B's elements are numbers' digits.

def layouts():
    """(type, MN-major, descriptor) of what kernels use, first and later steps along K."""
    code = {16: 0, 128: 1, 64: 2, 32: 3}
    make = lambda row, leading, stride, start=0: code[row] << 62 | stride // 16 << 32 | leading // 16 << 16 | start // 16
    for ty in ("f16", "e4m3"):
        yield ty, False, make(16, 128, 1024)
        yield ty, False, make(16, 128, 1024, 256)
        for row in (32, 64, 128):
            for start in range(0, row, 32):
                yield ty, False, make(row, 16, 8 * row, start)
    yield "f16", True, make(16, 1024, 128)
    yield "f16", True, make(16, 1024, 128, 2048)
    for row in (32, 64, 128):
        for step in (0, 3):
            yield "f16", True, make(row, 64 * row, 8 * row, step * 16 * row)
    yield "f16", True, make(128, 64 * 128, 8 * 128, 32)


def record_layouts(out):
    smem, n = 16384, 64
    thread = np.arange(128)[:, None, None]
    lane = thread % 32
    for ty, mn, descriptor in layouts():
        bytes_, k = (2, 16) if ty == "f16" else (1, 32)
        register, part = np.arange(4)[None, :, None], np.arange(4 // bytes_)[None, None, :]
        row = 16 * (thread // 32) + lane // 4 + 8 * (register % 2)
        column = 4 // bytes_ * (lane % 4) + part + k // 2 * (register // 2)
        one = codes("f16", 1.0) if ty == "f16" else np.uint8(0x38)
        a = np.where(row == column, one, 0).astype(one.dtype)
        kernel = wgmma_kernel(ty, n, k, True, descriptor, dict(negate_a=0, negate_b=0, accumulate=0, majors=f", {int(mn)}" if ty == "f16" else ""), smem)
        index, base = np.arange(smem // bytes_), 1024 if ty == "f16" else 8
        found, scale = np.zeros((n, k), np.int64), 1
        while scale < len(index):
            digit = (index // scale % base).astype(np.float32)
            b = codes("f16", digit) if ty == "f16" else np.array([0, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E], np.uint8)[digit.astype(int)]
            d = multiply(kernel, n, a, b, np.zeros((64, n), np.float32))
            found += scale * d[:k].T.astype(np.int64)
            scale *= base
        out.write(descriptor.to_bytes(8, "little") + bytes([mn, bytes_]) + found.astype(np.uint16).tobytes())


torch.zeros(1, device="cuda")
for name, record in ("lane", record_lanes), ("mma", record_mma), ("operand", record_layouts):
    with open(OUT / f"{name}.bin", "wb") as out:
        record(out)
print(torch.cuda.get_device_name(), [(p.name, p.stat().st_size) for p in sorted(OUT.glob("*.bin"))])
