//! A batch of sequences with its lengths and the expected table.

use fa3_cuda::kernels::{Spec, packed};
use fa3_sched::packed::{Arrays, LengthArrays, Plan, Side};
use fa3_types::Mask;

use crate::memory::{UNWRITTEN, before, words};
use crate::values::Rng;
use crate::{Bits, Trial};

/// Number of rows of Q and of K after the last sequence, if there are such rows. It is larger than a tile.
const BEHIND: i32 = 200;

/// Lengths of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// 0, 1, and lengths around the tile size.
    Edges,
    /// Equal lengths.
    Equal,
    /// One long sequence and short ones.
    OneLong,
    /// Random lengths up to a few tiles.
    Any,
    /// Invalid lengths: negative ones, cu_seqlens that decrease, and rows outside of the tensor.
    Garbage,
}

/// A batch with the seed of its lengths.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Number of sequences.
    pub count: usize,
    /// The length arrays of Q, and of K and V.
    pub arrays: [Arrays; 2],
    /// The lengths.
    pub lengths: Lengths,
    /// Whether packed tensors have rows after the last sequence.
    pub behind: bool,
    /// Rows per tile, and keys per block.
    pub tile: [u32; 2],
    /// The mask.
    pub mask: Mask,
    /// Whether the kernel also writes each sequence's first row in arrays that pad sequences to whole row blocks.
    pub firsts: bool,
    /// Seed of the lengths.
    pub seed: u64,
}

/// The lengths of Q, or of K and V: the part that the host knows, and the contents of the arrays.
struct Batch {
    side: Side,
    cu_seqlens: Vec<i32>,
    seqused: Vec<i32>,
    leftpad: Vec<i32>,
}

impl Case {
    /// Builds the trial of this case.
    ///
    /// # Panics
    /// If the planner refuses the case.
    pub fn trial(self) -> Trial {
        let [q, k] = [0, 1].map(|side| self.batch(side));
        let plan = Plan::new(self.count, [q.side, k.side], self.tile, self.mask);
        let plan = plan.unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let values = LengthArrays {
            cu_seqlens_q: &q.cu_seqlens,
            cu_seqlens_k: &k.cu_seqlens,
            seqused_q: &q.seqused,
            seqused_k: &k.seqused,
            leftpad_k: &k.leftpad,
        };
        let table = plan.table(&values).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let firsts = plan.first_places(&values).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let program = packed::program(&plan, self.firsts).map(Spec::kernel);
        let before = before(&program, |buffer| {
            let list = match buffer.name {
                "cu_seqlens_q" => &q.cu_seqlens,
                "cu_seqlens_k" => &k.cu_seqlens,
                "seqused_q" => &q.seqused,
                "seqused_k" => &k.seqused,
                "leftpad_k" => &k.leftpad,
                _ => return None,
            };
            Some(words(list.iter().copied(), i32::to_le_bytes))
        });
        let expected = [("table", table), ("first_places", firsts)];
        Trial::new(format!("{self:?}"), Bits::Inputs, program, before, move |after| {
            let given = expected.iter().filter_map(|(name, words)| Some((name, words, after.bytes(name)?)));
            given.into_iter().try_for_each(|(name, expected, given)| judge(name, expected, given))
        })
    }

    /// The lengths of Q (0) or of K and V (1).
    fn batch(&self, side: usize) -> Batch {
        let mut rng = Rng::new(self.seed * 2 + side as u64);
        let (arrays, tile) = (self.arrays[side], self.tile[side] as usize);
        let rows: Vec<i32> = (0..self.count).map(|sequence| self.rows(sequence, tile, &mut rng)).collect();
        let mut end = 0;
        let mut cu_seqlens: Vec<i32> = [0]
            .into_iter()
            .chain(rows.iter().map(|&rows| {
                end += rows;
                end
            }))
            .collect();
        let all = end + if self.behind { BEHIND } else { 0 };
        let longest = rows.iter().copied().max().unwrap_or(0);
        let capacity = |rows: i32| if arrays.cu_seqlens { rows } else { longest };
        let mut seqused: Vec<i32> =
            rows.iter().map(|&rows| rng.below(capacity(rows) as u64 + 1) as i32).collect();
        if self.lengths == Lengths::Garbage {
            cu_seqlens.iter_mut().chain(&mut seqused).for_each(|entry| *entry = garbage(*entry, &mut rng));
        }
        let mut leftpad = Vec::new();
        if arrays.leftpad {
            // Some paddings are longer than their sequences.
            leftpad.extend(rows.iter().map(|&rows| rng.below(rows as u64 + 3) as i32));
            if self.lengths == Lengths::Garbage {
                leftpad.iter_mut().for_each(|entry| *entry = garbage(*entry, &mut rng));
            }
        }
        let rows = if arrays.cu_seqlens { all } else { longest } as usize;
        Batch {
            side: Side { rows, arrays },
            cu_seqlens: if arrays.cu_seqlens { cu_seqlens } else { Vec::new() },
            seqused: if arrays.seqused { seqused } else { Vec::new() },
            leftpad,
        }
    }

    /// The rows of a sequence.
    fn rows(&self, sequence: usize, tile: usize, rng: &mut Rng) -> i32 {
        let rows = match self.lengths {
            Lengths::Edges => [0, 1, tile - 1, tile, tile + 1][rng.below(5)],
            Lengths::Equal => 2 * tile + 1,
            Lengths::OneLong if sequence == self.count / 2 => 40 * tile,
            Lengths::OneLong => rng.below(tile as u64),
            Lengths::Any | Lengths::Garbage => rng.below(4 * tile as u64),
        };
        rows as i32
    }
}

/// Replaces one entry in three by another number.
fn garbage(entry: i32, rng: &mut Rng) -> i32 {
    match rng.below(9) {
        0 => -entry,
        1 => rng.below(1 << 32) as u32 as i32,
        2 => [i32::MIN, -1, i32::MAX][rng.below(3)],
        _ => entry,
    }
}

/// Compares the device's words with the host's words. The memory after them must not be written.
fn judge(name: &str, expected: &[u32], given: &[u8]) -> Result<(), String> {
    let unwritten = u32::from_le_bytes([UNWRITTEN; 4]);
    let given = given.as_chunks().0.iter().copied().map(u32::from_le_bytes);
    let expected = expected.iter().copied().chain(std::iter::repeat(unwritten));
    match given.zip(expected).enumerate().find(|(_, (given, expected))| given != expected) {
        Some((at, (given, expected))) => Err(format!("word {at} of {name} is {given}, not {expected}")),
        None => Ok(()),
    }
}
