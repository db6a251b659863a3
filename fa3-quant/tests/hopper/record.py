"""Records what a Hopper GPU computes: mma.bin (tensor-core instructions) and cvt.bin (conversions to e4m3).

    python3 record.py OUTPUT_FOLDER        needs an H100 or H200, PyTorch, NumPy and cuda-bindings

mma.bin: for each trial A (64 x 32 codes), B (8 x 32 codes), C (64 x 8 f32), D (64 x 8 f32), little-endian.
cvt.bin: pairs of an f32 and its code, 5 bytes each.
"""
import ctypes
import pathlib
import sys

import numpy as np
import torch
from cuda.bindings import driver

HERE = pathlib.Path(__file__).parent


def check(result):
    error, *rest = result
    if int(error):
        raise RuntimeError(f"CUDA driver error {error}")
    return rest[0] if rest else None


def launch(function, grid, block, *args):
    values = [ctypes.c_uint64(a.data_ptr()) if torch.is_tensor(a) else ctypes.c_uint32(a) for a in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    check(driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
    torch.cuda.synchronize()


def decode_table():
    """The value of every code."""
    code = np.arange(256)
    field, mantissa = (code >> 3) & 15, code & 7
    value = np.where(field == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (field - 10.0))
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code < 128, value, -value)


def codes_near(rng, values):
    """The codes nearest to the values: near enough for making inputs."""
    table = decode_table()
    finite = np.array([c for c in range(256) if c & 127 != 127])
    order = finite[np.argsort(table[finite], kind="stable")]
    place = np.clip(np.searchsorted(table[order], values), 0, len(order) - 1)
    return order[place].astype(np.uint8)


def trials(rng):
    """Yields (A, B, C) of each trial, with a comment on its purpose."""
    finite = np.array([c for c in range(256) if c & 127 != 127], dtype=np.uint8)
    some = lambda pool, *shape: rng.choice(np.array(pool, dtype=np.uint8), shape)
    normal = lambda scale, *shape: codes_near(rng, rng.normal(0, scale, shape))
    f32 = lambda x: np.asarray(x, dtype=np.float32)
    wide = lambda *shape: f32(rng.normal(0, 1, shape) * 2.0 ** rng.integers(-40, 40, shape))
    c0 = np.zeros((64, 8), np.float32)
    yield some(finite, 64, 32), some(finite, 8, 32), c0  # any products
    yield some(finite, 64, 32), some(finite, 8, 32), f32(rng.normal(0, 1e4, (64, 8)))  # any products and accumulator
    yield some(finite, 64, 32), some(finite, 8, 32), wide(64, 8)  # an accumulator of any size
    yield normal(1, 64, 32), normal(1, 8, 32), c0  # ordinary numbers
    yield normal(1, 64, 32), normal(1, 8, 32), f32(rng.normal(0, 10, (64, 8)))
    yield codes_near(rng, rng.uniform(0, 256, (64, 32))), normal(1, 8, 32) & 127, f32(rng.uniform(0, 1e6, (64, 8)))  # P V
    yield codes_near(rng, rng.uniform(0, 256, (64, 32))), normal(1, 8, 32), f32(rng.normal(0, 1e5, (64, 8)))
    yield some(range(16), 64, 32), some([*range(8), *range(128, 136)], 8, 32), c0  # subnormal numbers
    yield some(range(16), 64, 32), some(finite, 8, 32), f32(rng.normal(0, 2.0**-12, (64, 8)))
    a = some(finite, 64, 32)
    a[:, 16:] = a[:, :16] ^ 128  # products that cancel
    b = some(finite, 8, 32)
    b[:, 16:] = b[:, :16]
    yield a, b, wide(64, 8)
    yield a, b, -c0  # products that cancel to zero, and a negative zero
    yield np.zeros((64, 32), np.uint8), some(finite, 8, 32), wide(64, 8)  # zero products and any accumulator
    a = normal(1, 64, 32)
    a[::8, 5], a[1::8, 6] = 0x7F, 0xFF  # NaN
    yield a, normal(1, 8, 32), f32(rng.normal(0, 1, (64, 8)))
    c = wide(64, 8)
    c[::4, 0], c[1::4, 1], c[2::4, 2] = np.inf, -np.inf, np.nan
    yield normal(1, 64, 32), normal(1, 8, 32), c  # special accumulators
    yield some(finite, 64, 32), some(finite, 8, 32), f32(2.0 ** rng.integers(-149, 127, (64, 8)))  # powers of two, subnormal too
    sparse = np.where(rng.random((64, 32)) < 0.1, some(finite, 64, 32), 0).astype(np.uint8)
    yield sparse, some(finite, 8, 32), wide(64, 8)  # mostly zeros


def core_matrices(x):
    """Rows of 32 codes as 8 x 16-byte core matrices: [row / 8][k / 16][row % 8][k % 16]."""
    return x.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).copy()


def accumulator_places():
    """(row, column) of each thread's four registers."""
    thread, v = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    lane = thread % 32
    return 16 * (thread // 32) + lane // 4 + 8 * (v // 2), 2 * (lane % 4) + v % 2


def record_mma(module, folder):
    function = check(driver.cuModuleGetFunction(module, b"mma"))
    rows, columns = accumulator_places()
    out = []
    for a, b, c in trials(np.random.default_rng(7)):
        device = lambda x: torch.from_numpy(np.ascontiguousarray(x)).cuda()
        d = torch.full((128, 4), float("nan"), device="cuda")
        launch(function, 1, 128, device(core_matrices(a)), device(core_matrices(b)), device(c[rows, columns]), d)
        result = np.zeros((64, 8), np.float32)
        result[rows, columns] = d.cpu().numpy()
        out += [a.tobytes(), b.tobytes(), np.asarray(c, np.float32).tobytes(), result.tobytes()]
    (folder / "mma.bin").write_bytes(b"".join(out))


def record_cvt(module, folder):
    function = check(driver.cuModuleGetFunction(module, b"cvt"))
    values = decode_table()
    positive = np.array(sorted(v for v in values[:127]), np.float64)
    middles = (positive[:-1] + positive[1:]) / 2
    x = np.concatenate([positive, middles, [464.0, 480.0, 1e30, np.inf, 2.0**-10, 2.0**-11, 2.0**-149]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    x = np.concatenate([x, -x])
    bits = np.concatenate([x.view(np.uint32), np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)])
    code = torch.zeros(len(bits), dtype=torch.uint8, device="cuda")
    launch(function, -(-len(bits) // 128), 128, torch.from_numpy(bits.view(np.int32)).cuda(), code, len(bits))
    pairs = np.zeros(len(bits), dtype=[("x", "<u4"), ("code", "u1")])
    pairs["x"], pairs["code"] = bits, code.cpu().numpy()
    (folder / "cvt.bin").write_bytes(pairs.tobytes())


def main():
    folder = pathlib.Path(sys.argv[1])
    torch.zeros(1, device="cuda")
    module = check(driver.cuModuleLoadData((HERE / "mma.ptx").read_bytes() + b"\0"))
    record_mma(module, folder)
    record_cvt(module, folder)
    print(torch.cuda.get_device_name(), [(p.name, p.stat().st_size) for p in sorted(folder.glob("*.bin"))])


main()
