//! The rows of one sequence in a tensor with other rows around them. TMA fills the rows of a tile beyond the sequence's
//! end with zeros, and reads nothing there.
//!
//! A TMA copy is clipped at the end of a dimension. So the tensor map has a dimension of rows in which the copy can
//! begin at any distance from the end. The other dimensions cancel the offset in the address, modulo 2⁶⁴:
//!
//! ```text
//! dimension    0          1            2      3           4
//! length       head_dim   2³⁰          heads  2³¹ - 1     rows + 1
//! stride       1 element  row          head   2³⁴ - row   row
//! coordinate   0          2³⁰ - valid  head   2³⁰         first + valid
//!
//! (2³⁰ - valid) row + head + 2³⁰ (2³⁴ - row) + (first + valid) row = head + first row + 2⁶⁴
//! ```
//!
//! `valid` is the number of rows, from row `first` of memory on, that TMA copies: the rows of the tile up to the
//! sequence's end. Nothing is read if `valid` is 0 or negative, or if the sequence ends beyond the last row of memory.

use fa3_ir::lang::*;
use fa3_sched::packed::MemoryRows;

use crate::kernels::params::{RowDims, TensorForm};

/// The length of dimension 1, which is the largest length of a sequence.
pub(crate) const MOST: u32 = MemoryRows::LIMIT;

/// The length of dimension 3, which only has to exceed its coordinate.
pub(crate) const BEYOND: u64 = i32::MAX as u64;

/// Bytes by which one step of dimensions 1 and 3 together moves the address.
pub(crate) const STEP: u64 = MemoryRows::STRIDE_LIMIT;

/// The form of a tensor map of [this module](self), whose tiles have shape `tile`.
pub(crate) fn form(tile: TileShape) -> TensorForm {
    TensorForm { tile, rank: 5, rows: RowDims::One(1) }
}

/// The form of such a tensor map if tiles have rows of `heads` heads: a row of each head, then the next row of each
/// head. Heads are dimension 1, and rows, which can be clipped, are dimension 2.
pub(crate) fn form_of_heads(tile: TileShape, heads: u32) -> TensorForm {
    TensorForm { tile, rank: 5, rows: RowDims::Two { first: 1, count: heads, second: 2 } }
}

/// The coordinates of a tile, except for its first column.
#[derive(Clone, Copy)]
pub(crate) struct TileCoords<'k> {
    first: U32<'k>,
    head: U32<'k>,
    end: U32<'k>,
}

impl<'k> TileCoords<'k> {
    /// All coordinates of the tile that begins with column `col`.
    pub(crate) fn at_column(self, col: u32) -> impl Coords + use<'k> {
        (col, self.first, self.head, MOST, self.end)
    }
}

/// A sequence's rows, as a span of the rows of memory.
#[derive(Clone, Copy)]
pub(crate) struct RowSpan<'k> {
    /// The coordinate in dimension 1 of the first row.
    first: U32<'k>,
    /// One past the last row.
    end: U32<'k>,
}

impl<'k> RowSpan<'k> {
    /// `count` rows from row `first` of memory on.
    #[track_caller]
    pub(crate) fn new(first: U32<'k>, count: U32<'k>) -> RowSpan<'k> {
        RowSpan { first: first.constant(MOST) - count, end: first + count }
    }

    /// The span that lane `lane` of the warp has.
    #[track_caller]
    pub(crate) fn of_lane(&self, lane: u32) -> RowSpan<'k> {
        RowSpan { first: self.first.shfl_idx(lane), end: self.end.shfl_idx(lane) }
    }

    /// The coordinates of the tile of `head` that begins with row `row` of the sequence.
    #[track_caller]
    pub(crate) fn coords(&self, head: U32<'k>, row: U32<'k>) -> TileCoords<'k> {
        TileCoords { first: self.first + row, head, end: self.end }
    }

    /// The coordinates of the tile that begins with row `row` of the sequence and has the heads from `head` on, in a
    /// tensor of the form [`form_of_heads`].
    #[track_caller]
    pub(crate) fn coords_of_heads(&self, head: U32<'k>, row: U32<'k>) -> impl Coords + use<'k> {
        (0, head, self.first + row, MOST, self.end)
    }
}

#[cfg(test)]
mod tests {
    use fa3_ir::{BufferRole, Passed, Program};
    use fa3_sim::ProgramSimulation;
    use fa3_types::{Dtype, Shape, Strides, TensorDesc};
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::params::{Declare, Pass as _};
    use crate::kernels::tensors;

    const ROWS: u32 = 16;
    const COLS: u32 = 8;
    const HEADS: usize = 2;
    const NAN: u16 = 0xFFFF;

    /// Loads the tile of (head, row) of the sequence (first row, number of rows). The simulator must find no fault.
    fn loaded(tensor: &TensorDesc, memory: &[u16], sequence: [u32; 2], [head, row]: [u32; 2]) -> Vec<u16> {
        let shape = TileShape::new(Elem::F16, ROWS, COLS);
        let kernel = Kernel::build("rows", Launch::threads(32), |b| {
            let x = Declare(b).tensor("x", form(shape));
            let [first, count, head, row] = ["first", "count", "head", "row"].map(|name| b.param_u32(name));
            let out = b.param_pointer("out", Elem::F16);
            let pipeline = b.pipeline("x", 1, 1, [("x", shape)]);
            b.init_mbarriers();
            let (mut producer, mut consumer) = (pipeline.producer(), pipeline.consumer());
            b.once_per_role(|| {
                let mut stage = producer.acquire();
                stage.load(0, &x, RowSpan::new(first, count).coords(head, row).at_column(0));
                stage.commit();
            });
            let stage = consumer.wait();
            b.once_per_warp(|| {
                b.store_tile_flat(stage.tile(), out);
                b.bulk_commit();
                b.bulk_wait(0);
            });
            stage.release();
        });
        let mut program = Program::new();
        let x = program.buffer("x", Elem::F16, &[memory.len() as u32], BufferRole::Input);
        let out = program.buffer("out", Elem::F16, &[ROWS, COLS], BufferRole::Output);
        let rows = MemoryRows::of(tensor).unwrap();
        let numbers = [("first", sequence[0]), ("count", sequence[1]), ("head", head), ("row", row)];
        let mut args = numbers.map(|(name, number)| (name.to_owned(), Passed::U32(number))).to_vec();
        args.push(("x".to_owned(), tensors::ragged_view(x, tensor, rows)));
        args.push(("out".to_owned(), Passed::Pointer(out)));
        program.step(kernel, [1, 1, 1], args);
        let bytes = memory.iter().copied().flat_map(u16::to_le_bytes).collect();
        let outcome = ProgramSimulation::new(&program).run(&[bytes, vec![]]).unwrap();
        assert!(outcome.is_clean(), "{:?}", outcome.findings().collect::<Vec<_>>());
        outcome.buffers[out.0].as_chunks::<2>().0.iter().copied().map(u16::from_le_bytes).collect()
    }

    fn tensor(rows: usize, heads_inside: bool) -> TensorDesc {
        let shape = Shape { batch: 1, seqlen: rows, heads: HEADS, head_dim: COLS as usize };
        let cols = i64::from(COLS);
        let strides = match heads_inside {
            // A gap follows the heads of each row.
            true => Strides { batch: 0, seqlen: cols * (HEADS as i64 + 1), heads: cols, head_dim: 1 },
            false => Strides { batch: 0, seqlen: cols, heads: cols * rows as i64, head_dim: 1 },
        };
        TensorDesc { dtype: Dtype::F16, shape, strides }
    }

    /// Memory in which each element of the rows `sequence` holds its index plus 1, and all other elements are NaN.
    fn memory(tensor: &TensorDesc, sequence: std::ops::Range<u32>) -> Vec<u16> {
        let mut memory = vec![NAN; tensor.extent().0 as usize];
        for row in sequence {
            for (head, col) in (0..HEADS).flat_map(|head| (0..COLS as usize).map(move |col| (head, col))) {
                let at = tensor.offset(0, row as usize, head, col).0 as usize;
                memory[at] = at as u16 + 1;
            }
        }
        memory
    }

    /// Checks that a tile has the sequence's rows, and zeros below.
    fn check(rows: u32, heads_inside: bool, [first, count]: [u32; 2], [head, row]: [u32; 2]) {
        let tensor = tensor(rows as usize, heads_inside);
        let memory = memory(&tensor, first..(first + count).min(rows));
        let tile = loaded(&tensor, &memory, [first, count], [head, row]);
        for (i, j) in (0..ROWS).flat_map(|i| (0..COLS).map(move |j| (i, j))) {
            let is_inside = row + i < count && first + count <= rows;
            let at = tensor.offset(0, (first + row + i) as usize, head as usize, j as usize).0 as usize;
            let expected = if is_inside { memory[at] } else { 0 };
            let what = format!("row {i} of {row} in {count} from {first} of {rows}, head {head}");
            assert_eq!(tile[(i * COLS + j) as usize], expected, "{what}");
        }
    }

    /// Covers all numbers of valid rows, negative ones too, at the tensor's start, at an odd row and up to its end.
    #[test]
    fn rows_beyond_a_sequence_are_zeros() {
        for heads_inside in [false, true] {
            for count in [0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 3] {
                for first in [0, 5, 50 - count] {
                    for row in [0, 1, ROWS, 2 * ROWS, 3 * ROWS] {
                        check(50, heads_inside, [first, count], [first & 1, row]);
                    }
                }
            }
        }
    }

    /// A sequence that ends beyond the tensor is not read at all, wherever it begins.
    #[test]
    fn nothing_beyond_the_tensor_is_read() {
        for first in [0, 3, 49, 50, 51, 1 << 30, i32::MAX as u32 - 60] {
            check(50, true, [first, 51], [1, 0]);
        }
        check(50, true, [0, MOST], [1, 0]);
        check(50, true, [51, 0], [1, 0]);
    }

    proptest! {
        #[test]
        fn any_sequence(
            heads_inside in any::<bool>(), rows in 1_u32..70, at in 0_u32..70, count in 0_u32..70, head in 0_u32..2,
            row in 0_u32..80,
        ) {
            let first = at.min(rows - 1);
            check(rows, heads_inside, [first, count.min(rows - first)], [head, row]);
        }
    }
}
