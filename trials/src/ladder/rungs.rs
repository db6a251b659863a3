//! The problems of every kernel of the ladder.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::ladder::{
    GemmSize, gemm, gemm_cluster, gemm_fp8, gemm_pipeline, gemm_simple, gemm_split_k, row_softmax, tile_copy,
    transpose, vector_add,
};
use fa3_ir::{Elem, Program, Swizzle};
use fa3_ref::plain::{self, Expected, TensorCore};

use super::trial;
use crate::{Bits, Trial};

/// Every kernel on every class of shapes: whole tiles, partial tiles in each dimension, less than one tile, and more
/// tiles than CTAs.
pub fn rungs(seed: u64) -> Vec<Trial> {
    let sizes = [(64, 128, 64), (128, 256, 192), (200, 264, 72), (8, 16, 8), (264, 520, 328)];
    let sizes = sizes.map(|(m, n, k)| GemmSize { m, n, k });
    let mut rungs = vec![vector(1000, seed), softmax(5, 100, seed), softmax(9, 32, seed)];
    rungs.extend([(72, 136), (64, 64)].map(|(rows, cols)| transposed(rows, cols, seed)));
    rungs.extend(
        Swizzle::ALL
            .into_iter()
            .flat_map(|swizzle| [(64, 64), (100, 136)].map(|(rows, cols)| copy(swizzle, rows, cols, seed))),
    );
    for (elem, size) in [Elem::Bf16, Elem::F16].into_iter().flat_map(|elem| sizes.map(|size| (elem, size))) {
        let products = [
            ("gemm_simple", gemm_simple::program(elem, size)),
            ("gemm_pipeline", gemm_pipeline::program(elem, size)),
            ("gemm", gemm::program(elem, size, 3)),
            ("gemm_cluster", gemm_cluster::program(elem, size, 4)),
            ("gemm_split_k", gemm_split_k::program(elem, size, 3)),
        ];
        rungs.extend(products.map(|(name, program)| product(name, elem, size, &program, seed)));
    }
    let sizes = sizes.map(|GemmSize { m, n, k }| GemmSize { m, n, k: k.next_multiple_of(16) });
    let of_fp8 = |size| product("gemm_fp8", Elem::E4m3, size, &gemm_fp8::program(size, 3), seed);
    rungs.extend(sizes.map(of_fp8));
    rungs
}

/// Every kernel once, on a problem small enough to run thousands of times. If the kernel permits, there are several
/// tiles per CTA and more tiles than pipeline stages.
pub fn small_rungs(seed: u64) -> Vec<Trial> {
    let size = GemmSize { m: 136, n: 264, k: 392 };
    let fp8 = GemmSize { m: 136, n: 136, k: 784 };
    let elem = Elem::Bf16;
    let products = [
        ("gemm_simple", elem, size, gemm_simple::program(elem, size)),
        ("gemm_pipeline", elem, size, gemm_pipeline::program(elem, size)),
        ("gemm", elem, size, gemm::program(elem, size, 1)),
        ("gemm_cluster", elem, size, gemm_cluster::program(elem, size, 2)),
        ("gemm_split_k", elem, size, gemm_split_k::program(elem, size, 2)),
        ("gemm_fp8", Elem::E4m3, fp8, gemm_fp8::program(fp8, 1)),
    ];
    let others = [
        vector(300, seed),
        softmax(5, 70, seed),
        copy(Swizzle::B128, 72, 72, seed),
        transposed(72, 72, seed),
    ];
    let products = products.map(|(name, elem, size, program)| product(name, elem, size, &program, seed));
    others.into_iter().chain(products).collect()
}

fn vector(n: u32, seed: u64) -> Trial {
    let name = format!("vector_add {n}");
    let expected = |inputs: &[Vec<f64>]| plain::sum(&inputs[0], &inputs[1]);
    trial(name, Bits::Inputs, &vector_add::program(n), seed, expected)
}

fn softmax(rows: u32, n: u32, seed: u64) -> Trial {
    let (name, program) = (format!("row_softmax {rows} x {n}"), row_softmax::program(rows, n));
    let expected = move |inputs: &[Vec<f64>]| plain::softmax(&inputs[0], n as usize);
    trial(name, Bits::Approximations, &program, seed, expected)
}

fn copy(swizzle: Swizzle, rows: u32, cols: u32, seed: u64) -> Trial {
    let expected = |inputs: &[Vec<f64>]| inputs[0].iter().copied().map(Expected::exactly).collect();
    let name = format!("tile_copy {rows} x {cols}, {swizzle}");
    trial(name, Bits::Inputs, &tile_copy::program(swizzle, rows, cols), seed, expected)
}

fn transposed(rows: u32, cols: u32, seed: u64) -> Trial {
    let expected = move |inputs: &[Vec<f64>]| plain::transposed(&inputs[0], cols as usize);
    let name = format!("transpose {rows} x {cols}");
    trial(name, Bits::Inputs, &transpose::program(rows, cols), seed, expected)
}

/// C = A · Bᵀ.
fn product(kernel: &str, elem: Elem, size: GemmSize, program: &Program<Spec>, seed: u64) -> Trial {
    let GemmSize { m, n, k } = size;
    let core = if elem == Elem::E4m3 { TensorCore::E4M3 } else { TensorCore::HALF };
    let rounding = match program.buffers[2].elem {
        Elem::Bf16 => f64::powi(2.0, -8),
        Elem::F16 => f64::powi(2.0, -11),
        Elem::U8 | Elem::U32 | Elem::U64 | Elem::F32 | Elem::E4m3 => f64::powi(2.0, -24),
    };
    let expected =
        move |inputs: &[Vec<f64>]| plain::product(&inputs[0], &inputs[1], k as usize, core, rounding);
    let bits = if kernel == "gemm_split_k" { Bits::Schedule } else { Bits::Inputs };
    trial(format!("{kernel} {elem} {m} x {n} x {k}"), bits, program, seed, expected)
}
