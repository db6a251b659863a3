//! Small problems for which an off-by-one bound matters.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::ladder::{
    GemmSize, gemm, gemm_cluster, gemm_fp8, gemm_pipeline, gemm_simple, gemm_split_k, row_softmax,
};
use fa3_ir::Elem;
use fa3_ir::{Buffer, BufferRole, Kernel, Program};

/// Further problems for a kernel, with the bytes of their arrays. Sizes are multiples of a step, just above a multiple,
/// or end at each column and row of a warp's fragment. Matrix products have 1 to 3 steps along K, or 16.
pub(super) fn edges(kernel: &str) -> Vec<(Program<Kernel>, Vec<Vec<u8>>)> {
    let with_buffers = |program: Program<Spec>| {
        let buffers = program.buffers.iter().map(rising).collect();
        (program.map(Spec::kernel), buffers)
    };
    programs(kernel).into_iter().map(with_buffers).collect()
}

/// Bytes of an array. Rows of binary32 numbers rise so steeply that exp(last - second to last) is infinite: a softmax
/// that skips the last number cannot be right. All other arrays are zero.
fn rising(array: &Buffer) -> Vec<u8> {
    let columns = array.shape.last().copied().unwrap_or(1) as usize;
    if array.elem != Elem::F32 || array.role != BufferRole::Input {
        return vec![0; array.bytes()];
    }
    (0..array.len()).flat_map(|index| (100.0 * (index % columns) as f32).to_le_bytes()).collect()
}

fn programs(kernel: &str) -> Vec<Program<Spec>> {
    let elem = Elem::Bf16;
    let size = |m, n, k| GemmSize { m, n, k };
    // The rows end at both rows of a thread, and the columns at every pair of columns of a fragment.
    let corners = || (0..16).map(|index| size(12, 8 * index + 2, 8)).chain([size(4, 8, 8)]);
    let (whole, long) = (size(128, 128, 192), size(64, 128, 1024));
    let steps = [64, 128, 192].map(|k| size(64, 128, k));
    match kernel {
        "row_softmax" => vec![row_softmax::program(3, 32), row_softmax::program(3, 33)],
        "gemm_simple" => {
            [whole].into_iter().chain(corners()).map(|size| gemm_simple::program(elem, size)).collect()
        }
        "gemm_pipeline" => {
            steps.into_iter().chain(corners()).map(|size| gemm_pipeline::program(elem, size)).collect()
        }
        "gemm" => vec![gemm::program(elem, whole, 1)],
        "gemm_cluster" => vec![gemm_cluster::program(elem, size(256, 256, 192), 2)],
        "gemm_split_k" => {
            [long].into_iter().chain(steps).map(|size| gemm_split_k::program(elem, size, 1)).collect()
        }
        "gemm_fp8" => vec![gemm_fp8::program(size(128, 128, 384), 1)],
        _ => Vec::new(),
    }
}
