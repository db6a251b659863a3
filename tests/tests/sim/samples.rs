//! Small whole kernels: their results are those of a plain computation, under every policy, bit by bit.

use fa3_ir::*;
use fa3_sim::{Buffer, Memory, Outcome, Policy, Simulation};
use half::bf16;

use crate::kernels::{row_softmax, vector_add};
use crate::one_product::one_product;

/// Every kind of schedule.
pub(crate) fn policies() -> impl Iterator<Item = Policy> {
    [Policy::Eager, Policy::Lazy].into_iter().chain((0..20).map(Policy::Random))
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn floats(memory: &Memory, buffer: Buffer) -> Vec<f32> {
    memory.read(buffer).chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

pub(crate) fn assert_clean(outcome: &Outcome) {
    let findings: String = outcome.findings.iter().map(ToString::to_string).collect();
    assert!(outcome.is_clean(), "{findings}");
}

#[test]
fn vectors_are_added() {
    let kernel = vector_add();
    let (x, y): (Vec<f32>, Vec<f32>) = (0..700).map(|i| (i as f32 * 0.25, 1000.0 - i as f32)).unzip();
    for policy in policies() {
        let mut memory = Memory::new();
        let [bx, by] = [("x", &x), ("y", &y)].map(|(name, x)| memory.alloc_from(name, &bytes_of(x)));
        let z = memory.alloc("z", 4 * 700);
        memory.expect_written_once(z);
        let pointers = [bx, by, z].map(|buffer| ArgValue::Pointer(buffer.address()));
        let args = pointers.into_iter().chain([ArgValue::U32(700)]).collect();
        let outcome =
            Simulation::new(&kernel).grid([3, 1, 1]).args(args).policy(policy).run(&mut memory).unwrap();
        assert_clean(&outcome);
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert_eq!(floats(&memory, z), expected);
    }
}

#[test]
fn rows_become_distributions() {
    let (kernel, n) = (row_softmax(), 75usize);
    let x: Vec<f32> = (0..8 * n).map(|i| ((i * 37) % 101) as f32 * 0.07 - 3.0).collect();
    let mut bits = None;
    for policy in policies() {
        let mut memory = Memory::new();
        let (bx, y) = (memory.alloc_from("x", &bytes_of(&x)), memory.alloc("y", 4 * x.len()));
        memory.expect_written_once(y);
        let args =
            vec![ArgValue::Pointer(bx.address()), ArgValue::Pointer(y.address()), ArgValue::U32(n as u32)];
        let outcome =
            Simulation::new(&kernel).grid([2, 1, 1]).args(args).policy(policy).run(&mut memory).unwrap();
        assert_clean(&outcome);
        for (row, got) in x.chunks(n).zip(floats(&memory, y).chunks(n)) {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            for (&x, &got) in row.iter().zip(got) {
                let expected = f64::from(x).exp() / sum;
                assert!((f64::from(got) - expected).abs() < 1e-6, "{got} {expected}");
            }
        }
        let now = memory.read(y);
        assert_eq!(*bits.get_or_insert(now.clone()), now, "the schedule is no part of the result");
    }
}

/// Small integers, whose products are exact in every arithmetic.
fn integers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 31 + seed * 17 + i / 64 * 7) % 15) as f32 - 7.0).collect()
}

#[test]
fn matrices_are_multiplied() {
    for n in [8, 64, 256] {
        let kernel = one_product(n);
        let (a, bt) = (integers(64 * 64, 1), integers(n as usize * 64, 2));
        let codes = |x: &[f32]| x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect::<Vec<u8>>();
        for policy in policies() {
            let mut memory = Memory::new();
            let (ba, bb) = (memory.alloc_from("a", &codes(&a)), memory.alloc_from("b", &codes(&bt)));
            let d = memory.alloc("d", 64 * n as usize * 4);
            memory.expect_written_once(d);
            let view = |buffer: Buffer, rows: u64| {
                ArgValue::Tensor(TensorView::contiguous(buffer.address(), &[64, rows], Elem::Bf16))
            };
            let args = vec![view(ba, 64), view(bb, n.into()), ArgValue::Pointer(d.address())];
            let outcome = Simulation::new(&kernel).args(args).policy(policy).run(&mut memory).unwrap();
            assert_clean(&outcome);
            assert_eq!(outcome.counters.products, 4);
            assert_eq!(outcome.counters.loads.bytes, u64::from(64 + n) * 128);
            let product = floats(&memory, d);
            for (row, column) in (0..64).flat_map(|row| (0..n as usize).map(move |column| (row, column))) {
                let dot: f32 = (0..64).map(|k| a[64 * row + k] * bt[64 * column + k]).sum();
                assert_eq!(product[row * n as usize + column], dot, "({row}, {column}) under {policy:?}");
            }
        }
    }
}
