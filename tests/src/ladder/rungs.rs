//! Which problems.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::ladder::{
    GemmSize, gemm, gemm_cluster, gemm_fp8, gemm_ring, gemm_simple, gemm_split_k, row_softmax, tile_copy,
    transpose, vector_add,
};
use fa3_ir::{Elem, Program, Swizzle};

use super::{Expected, Rung};
use crate::family::Bits;

/// Every kernel with every shape class: whole tiles, ragged in each dimension, less than one tile, more tiles than CTAs.
pub fn rungs() -> Vec<Rung> {
    let sizes = [(64, 128, 64), (128, 256, 192), (200, 264, 72), (8, 16, 8), (392, 520, 520)];
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

fn exactly(value: f64) -> Expected {
    Expected { value, error: 0.0 }
}

fn vector(n: u32) -> Rung {
    // The sum of two binary32 numbers, rounded once.
    let expected = |inputs: &[Vec<f64>]| {
        let sums = inputs[0].iter().zip(&inputs[1]).map(|(x, y)| exactly((x + y) as f32 as f64));
        sums.collect()
    };
    Rung {
        name: format!("vector_add {n}"),
        program: vector_add::program(n).map(Spec::kernel),
        bits: Bits::Inputs,
        expected: Box::new(expected),
    }
}

/// The exponential and the reciprocal have a few units in the last place each, the sum one a term.
fn softmax(rows: u32, n: u32) -> Rung {
    let expected = move |inputs: &[Vec<f64>]| {
        let row = |row: &[f64]| -> Vec<Expected> {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let powers: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
            let sum: f64 = powers.iter().sum();
            let error = f64::from(16 + n.div_ceil(32)) * f64::powi(2.0, -23);
            powers.iter().map(|p| Expected { value: p / sum, error: error * p / sum + 1e-30 }).collect()
        };
        inputs[0].chunks_exact(n as usize).flat_map(row).collect()
    };
    let (name, program) = (format!("row_softmax {rows} x {n}"), row_softmax::program(rows, n));
    Rung {
        name,
        program: program.map(Spec::kernel),
        bits: Bits::Approximations,
        expected: Box::new(expected),
    }
}

fn copy(swizzle: Swizzle, rows: u32, cols: u32) -> Rung {
    let expected = |inputs: &[Vec<f64>]| inputs[0].iter().copied().map(exactly).collect();
    let (name, program) =
        (format!("tile_copy {rows} x {cols}, {swizzle}"), tile_copy::program(swizzle, rows, cols));
    Rung { name, program: program.map(Spec::kernel), bits: Bits::Inputs, expected: Box::new(expected) }
}

fn transposed(rows: u32, cols: u32) -> Rung {
    let expected = move |inputs: &[Vec<f64>]| {
        let at = |row: u32, col: u32| exactly(inputs[0][(row * cols + col) as usize]);
        (0..cols).flat_map(|col| (0..rows).map(move |row| at(row, col))).collect()
    };
    let (name, program) = (format!("transpose {rows} x {cols}"), transpose::program(rows, cols));
    Rung { name, program: program.map(Spec::kernel), bits: Bits::Inputs, expected: Box::new(expected) }
}

/// C = A · Bᵀ. A tensor core truncates every addend of a sum of K + 1 at 2^-25, or 2^-13 for e4m3, of the largest; its
/// result, and every further sum of results, is off by as much again. The largest addend is at most the sum of all.
fn product(kernel: &str, elem: Elem, size: GemmSize, program: Program<Spec>) -> Rung {
    let GemmSize { m, n, k } = size;
    let out = program.buffers[2].elem;
    let (depth, unit) = if elem == Elem::E4m3 { (32usize, -13) } else { (16, -25) };
    let unit = f64::powi(2.0, unit);
    let rounding = match out {
        Elem::Bf16 => f64::powi(2.0, -8),
        Elem::F16 => f64::powi(2.0, -11),
        Elem::U8 | Elem::U32 | Elem::U64 | Elem::F32 | Elem::E4m3 => f64::powi(2.0, -24),
    };
    let expected = move |inputs: &[Vec<f64>]| {
        let (a, b) = (&inputs[0], &inputs[1]);
        let element = |i: u32, j: u32| {
            let (k, i, j) = (k as usize, i as usize, j as usize);
            let (mut value, mut size) = (0.0, 0.0);
            for (x, y) in a[i * k..][..k].iter().zip(&b[j * k..][..k]) {
                value += x * y;
                size += (x * y).abs();
            }
            // What truncation loses is proportional to the largest addend, of which there are few.
            let steps = (k.div_ceil(depth) + 1) as f64;
            let error = unit * size * (steps + 8.0) + rounding * value.abs() + 1e-30;
            Expected { value, error }
        };
        (0..m).flat_map(|i| (0..n).map(move |j| element(i, j))).collect()
    };
    let bits = if kernel == "gemm_split_k" { Bits::Schedule } else { Bits::Inputs };
    Rung {
        name: format!("{kernel} {elem} {m} x {n} x {k}"),
        program: program.map(Spec::kernel),
        bits,
        expected: Box::new(expected),
    }
}
