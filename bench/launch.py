"""Launches kernels that `fa3 ptx KERNEL --json` describes, on PyTorch's tensors."""

import ctypes
import json
import subprocess

import torch
from cuda.bindings import driver as cu

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}
CU_TYPES = {
    "f32": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    "bf16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    "f16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    "e4m3": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}
SWIZZLES = {
    0: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


def check(result):
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(error)
    return values[0] if len(values) == 1 else values


def describe(fa3, *arguments):
    """The description that `fa3 ptx` prints."""
    return json.loads(subprocess.run([fa3, "ptx", *arguments, "--json"], check=True, capture_output=True).stdout)


class Kernel:
    """A compiled kernel and the problem that it computes."""

    def __init__(self, description):
        torch.cuda.current_device()
        torch.zeros(1, device="cuda")
        self.job = description
        module = check(cu.cuModuleLoadData(self.job["ptx"].encode() + b"\0"))
        self.function = check(cu.cuModuleGetFunction(module, self.job["entry"].encode()))
        shared = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(self.function, shared, self.job["smem"]))

    def tensors(self):
        """New tensors for the kernel's arrays. Inputs are standard normal, outputs are NaN, and sums are zero."""
        made = []
        for array in self.job["arrays"]:
            dtype, shape = DTYPES[array["elem"]], array["shape"]
            if array["use"] == "input":
                made.append(torch.randn(shape, device="cuda").to(dtype))
            else:
                fill = 0.0 if array["use"] == "sum" else float("nan")
                made.append(torch.full(shape, fill, device="cuda", dtype=torch.float32).to(dtype))
        return made

    def bind(self, tensors):
        """A function that launches the kernel on these tensors."""
        args = [self.arg(arg, tensors) for arg in self.job["args"]]
        pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(arg) for arg in args])
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.job["grid"]
        config.blockDimX, config.blockDimY, config.blockDimZ = self.job["threads"], 1, 1
        config.sharedMemBytes = self.job["smem"]
        if self.job["cluster"] > 1:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = self.job["cluster"]
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            config.attrs, config.numAttrs = [attribute], 1
        address = ctypes.addressof(pointers)

        def launch(kept=(args, pointers)):
            config.hStream = torch.cuda.current_stream().cuda_stream
            check(cu.cuLaunchKernelEx(config, self.function, address, 0))

        return launch

    def arg(self, arg, tensors):
        (kind, value), = arg.items()
        if kind == "u32":
            return ctypes.c_uint32(value)
        if kind == "u64":
            return ctypes.c_uint64(value)
        if kind == "f32":
            return ctypes.c_float(value)
        if kind == "pointer":
            return ctypes.c_uint64(tensors[value].data_ptr())
        rank = len(value["dims"])
        encoded = check(
            cu.cuTensorMapEncodeTiled(
                CU_TYPES[value["elem"]],
                rank,
                tensors[value["array"]].data_ptr(),
                [cu.cuuint64_t(dim) for dim in value["dims"]],
                [cu.cuuint64_t(stride) for stride in value["strides"]],
                [cu.cuuint32_t(dim) for dim in value["box"]],
                [cu.cuuint32_t(1)] * rank,
                cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                SWIZZLES[value["swizzle"]],
                cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
        # A tensor map must be aligned to 64 bytes.
        buffer = (ctypes.c_uint8 * 192)()
        offset = -ctypes.addressof(buffer) % 64
        words = (ctypes.c_uint64 * 16).from_buffer(buffer, offset)
        words[:] = [int(word) for word in encoded.opaque]
        return words
