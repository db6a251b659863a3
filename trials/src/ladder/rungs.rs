//! The problems of every rung.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::ladder::{
    GemmSize, gemm, gemm_cluster, gemm_fp8, gemm_ring, gemm_simple, gemm_split_k, row_softmax, tile_copy,
    transpose, vector_add,
};
use fa3_ir::{Elem, Program, Swizzle};
use fa3_ref::plain::{self, Expected, TensorCore};

use super::Rung;
use crate::family::Bits;

/// Every kernel with every shape class: whole tiles, ragged in each dimension, less than one
/// tile, more tiles than CTAs.
pub fn rungs() -> Vec<Rung> {
    let sizes = [(64, 128, 64), (128, 256, 192), (200, 264, 72), (8, 16, 8), (264, 520, 328)];
    let sizes = sizes.map(|(m, n, k)| GemmSize { m, n, k });
    let mut rungs =
        vec![vector(1000), softmax(5, 100), softmax(9, 32), transposed(72, 136), transposed(64, 64)];
    rungs.extend(
        Swizzle::ALL.into_iter().flat_map(|swizzle| [copy(swizzle, 64, 64), copy(swizzle, 100, 136)]),
    );
    for (elem, size) in [Elem::Bf16, Elem::F16].into_iter().flat_map(|elem| sizes.map(|size| (elem, size))) {
        rungs.extend([
            product("gemm_simple", elem, size, gemm_simple::program(elem, size)),
            product("gemm_ring", elem, size, gemm_ring::program(elem, size)),
            product("gemm", elem, size, gemm::program(elem, size, 3)),
            product("gemm_cluster", elem, size, gemm_cluster::program(elem, size, 4)),
            product("gemm_split_k", elem, size, gemm_split_k::program(elem, size, 3)),
        ]);
    }
    let sizes = sizes.map(|GemmSize { m, n, k }| GemmSize { m, n, k: k.next_multiple_of(16) });
    rungs.extend(sizes.map(|size| product("gemm_fp8", Elem::E4m3, size, gemm_fp8::program(size, 3))));
    rungs
}

/// Every kernel once, with a problem small enough to run thousands of times: several tiles a CTA and more slots than a
/// ring has, where there are such.
pub fn small_rungs() -> Vec<Rung> {
    let size = GemmSize { m: 136, n: 264, k: 392 };
    let fp8 = GemmSize { m: 136, n: 136, k: 784 };
    let elem = Elem::Bf16;
    vec![
        vector(300),
        softmax(5, 70),
        copy(Swizzle::B128, 72, 72),
        transposed(72, 72),
        product("gemm_simple", elem, size, gemm_simple::program(elem, size)),
        product("gemm_ring", elem, size, gemm_ring::program(elem, size)),
        product("gemm", elem, size, gemm::program(elem, size, 1)),
        product("gemm_cluster", elem, size, gemm_cluster::program(elem, size, 2)),
        product("gemm_split_k", elem, size, gemm_split_k::program(elem, size, 2)),
        product("gemm_fp8", Elem::E4m3, fp8, gemm_fp8::program(fp8, 1)),
    ]
}

fn vector(n: u32) -> Rung {
    Rung {
        name: format!("vector_add {n}"),
        program: vector_add::program(n).map(Spec::kernel),
        bits: Bits::Inputs,
        expected: Box::new(|inputs| plain::sum(&inputs[0], &inputs[1])),
    }
}

fn softmax(rows: u32, n: u32) -> Rung {
    let (name, program) = (format!("row_softmax {rows} x {n}"), row_softmax::program(rows, n));
    Rung {
        name,
        program: program.map(Spec::kernel),
        bits: Bits::Approximations,
        expected: Box::new(move |inputs| plain::softmax(&inputs[0], n as usize)),
    }
}

fn copy(swizzle: Swizzle, rows: u32, cols: u32) -> Rung {
    let expected = |inputs: &[Vec<f64>]| inputs[0].iter().copied().map(Expected::exactly).collect();
    let (name, program) =
        (format!("tile_copy {rows} x {cols}, {swizzle}"), tile_copy::program(swizzle, rows, cols));
    Rung { name, program: program.map(Spec::kernel), bits: Bits::Inputs, expected: Box::new(expected) }
}

fn transposed(rows: u32, cols: u32) -> Rung {
    let expected = move |inputs: &[Vec<f64>]| plain::transposed(&inputs[0], cols as usize);
    let (name, program) = (format!("transpose {rows} x {cols}"), transpose::program(rows, cols));
    Rung { name, program: program.map(Spec::kernel), bits: Bits::Inputs, expected: Box::new(expected) }
}

/// C = A · Bᵀ.
fn product(kernel: &str, elem: Elem, size: GemmSize, program: Program<Spec>) -> Rung {
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
    Rung {
        name: format!("{kernel} {elem} {m} x {n} x {k}"),
        program: program.map(Spec::kernel),
        bits,
        expected: Box::new(expected),
    }
}
