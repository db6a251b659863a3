//! A ring that a warp fills by copies of 16 bytes a thread, each from where it likes, and another warp fences.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Outcome, Policy, Simulation};
use half::bf16;

use crate::samples::{assert_clean, floats, policies};

/// Matrices, and the slots through which they go.
const ROUNDS: u32 = 5;
const STAGES: u32 = 2;

/// Rows and columns of a matrix.
const SIZE: u32 = 64;

/// Columns of a matrix that are in memory; the others are zeros.
const THERE: u32 = 40;

/// Matrices of bf16 numbers, the rows of each from the last to the first, times their transposes.
pub(crate) fn squares() -> Kernel {
    let shape = TileShape::new(Elem::Bf16, SIZE, SIZE);
    Kernel::build("squares", Launch::threads(256), |b| {
        let (x, y) = (b.param_pointer("x", Elem::Bf16), b.param_pointer("y", Elem::F32));
        let ring = b.copied_ring("ring", STAGES, 4, [("matrix", shape)]);
        b.init_mbarriers();
        b.role(Role::new("copies", 0..4), || {
            let warp = (b.tid() >> 5).shfl_idx(0);
            b.if_uniform(warp.eq(0), || {
                let mut copier = ring.copier();
                let (row, chunk) = (b.lane_id() >> 3, b.lane_id() & 7);
                b.for_each((0, ROUNDS), 1, |round| {
                    copier.fill(|[matrix]| {
                        for first in (0..SIZE).step_by(4) {
                            let below = (round + 1) * SIZE - (row + (first + 1));
                            let from = below.mad(THERE / 8, chunk).mad_wide(16, x);
                            let bytes = chunk.lt(THERE / 8).select::<B32>(16, 0);
                            b.copy_async(matrix.element(row + first, chunk * 8).at(0), from, bytes);
                        }
                    });
                });
            });
            b.if_uniform(warp.eq(1), || {
                let mut fencer = ring.fencer();
                b.for_each((0, ROUNDS), 1, |_| fencer.pass());
            });
        });
        b.role(Role::new("multiplies", 4..8), || {
            let (mut consumer, row, col) = (ring.ring().consumer(), b.frag_row(), b.frag_col());
            b.for_each((0, ROUNDS), 1, |round| {
                let slot = consumer.wait();
                let mut square = gemm(slot.tile(), slot.tile().t(), Fresh).wait();
                slot.release();
                square.map_in_place(|number, at| {
                    let row = round.mad(SIZE, row + at.half.rows());
                    b.store(row.mad(SIZE, col + at.col).mad_wide(4, y), number);
                    number
                });
            });
        });
    })
}

/// Numbers of x: small, so that sums are exact.
fn number(round: u32, row: u32, col: u32) -> f32 {
    ((round * 7 + row * 3 + col * 5) % 11) as f32 - 5.0
}

/// A run, and what it wrote.
pub(crate) fn run_squares(kernel: &Kernel, policy: Policy) -> (Outcome, Vec<f32>) {
    let rows = (0..ROUNDS).flat_map(|round| (0..SIZE).map(move |row| (round, row)));
    let numbers = rows.flat_map(|(round, row)| (0..THERE).map(move |col| number(round, row, col)));
    let x: Vec<u8> = numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
    let mut memory = Memory::new();
    let (x, y) = (memory.alloc_from("x", &x), memory.alloc("y", (ROUNDS * SIZE * SIZE * 4) as usize));
    memory.expect_written_once(y);
    let args = [x, y].map(|buffer| ArgValue::Pointer(buffer.address())).to_vec();
    let outcome = Simulation::new(kernel).args(args).policy(policy).run(&mut memory).unwrap();
    (outcome, floats(&memory, y))
}

#[test]
fn rows_are_copied_from_where_they_are() {
    let kernel = squares();
    for policy in policies() {
        let (outcome, y) = run_squares(&kernel, policy);
        assert_clean(&outcome);
        for (index, given) in (0..).zip(y) {
            let (round, row, col) = (index / (SIZE * SIZE), index / SIZE % SIZE, index % SIZE);
            let of = |row: u32, k: u32| number(round, SIZE - 1 - row, k);
            let expected: f32 = (0..THERE).map(|k| of(row, k) * of(col, k)).sum();
            assert_eq!(given, expected, "({row}, {col}) of {round} under {policy:?}");
        }
    }
}
