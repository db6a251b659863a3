//! Varlen kernels in the simulator: each sequence has the bits that a kernel for that sequence alone computes, whatever
//! surrounds the sequence in memory.

use fa3_cuda::kernels::fwd::{buffers, program};
use fa3_ir::{BufferRole, Kernel, Program};
use fa3_sched::forward::{CtaTile, Fp8Inputs, Loads, Pipeline, Plan, PlanOptions, Precision};
use fa3_sched::{DeviceLimits, Longest, Order, Scheduler};
use fa3_sim::{Mode, Policy, ProgramSimulation};
use fa3_types::{Dtype, Mask, Problem, ProblemSpec, Shape, Strides, TensorDesc};
use proptest::prelude::*;

/// A byte whose repetition is NaN in every type.
const POISON: u8 = 0xFF;
const HEAD_DIM: usize = 64;
/// Number of CTAs, smaller than the number of tiles.
const CTAS: u32 = 3;

const TILE: CtaTile = CtaTile {
    head_dim: 64,
    head_dim_v: 64,
    qv: false,
    precision: Precision::Half,
    tile_m: 64,
    tile_n: 16,
    stages: 2,
    consumers: 1,
    loads: Loads::Producer,
    pipeline: Pipeline::Paired,
    ping_pong: false,
};
const TWO: CtaTile = CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TILE };
const FP8: CtaTile = CtaTile { precision: Precision::Fp8(Fp8Inputs::HEADS), tile_n: 32, ..TILE };

/// The rows of a sequence in the tensor of Q, or of K and V.
#[derive(Clone, Copy, Debug)]
struct Rows {
    batch: usize,
    first: usize,
    /// Number of all rows.
    count: usize,
    /// Number of rows that take part in attention: the first ones.
    used: usize,
}

/// A batch in memory.
struct Batch {
    tile: CtaTile,
    mask: Mask,
    heads: (usize, usize),
    q: TensorDesc,
    kv: TensorDesc,
    /// Rows of Q and of K of each sequence.
    sequences: Vec<[Rows; 2]>,
    /// cu_seqlens and seqused of Q, then cu_seqlens and seqused of K.
    lengths: [Vec<i32>; 4],
}

/// Bytes of a tensor, or of several tensors.
type Bytes = Vec<u8>;

/// Results of each sequence: rows of O, and LSE.
type Results = Vec<(Bytes, Bytes)>;

impl Batch {
    /// Packed sequences of these lengths, with rows behind them. The heads of a row lie side by side, with a gap behind
    /// them.
    fn packed(
        tile: CtaTile,
        mask: Mask,
        heads: (usize, usize),
        lengths: &[(usize, usize)],
        behind: (usize, usize),
    ) -> Batch {
        let mut at = [0, 0];
        let sequences: Vec<[Rows; 2]> = lengths
            .iter()
            .map(|&(q, k)| {
                let rows = |first, count| Rows { batch: 0, first, count, used: count };
                let rows = [rows(at[0], q), rows(at[1], k)];
                at = [at[0] + q, at[1] + k];
                rows
            })
            .collect();
        let starts = |side: usize| {
            let ends = sequences.iter().map(|rows| (rows[side].first + rows[side].count) as i32);
            std::iter::once(0).chain(ends).collect()
        };
        let total = [at[0] + behind.0, at[1] + behind.1];
        let lengths = [starts(0), vec![], starts(1), vec![]];
        Batch::new(tile, mask, heads, (1, total), sequences, lengths)
    }

    /// Sequences of equal lengths with these valid lengths (seqused).
    fn used(
        tile: CtaTile,
        mask: Mask,
        heads: (usize, usize),
        (seqlen_q, seqlen_k): (usize, usize),
        used: &[(usize, usize)],
    ) -> Batch {
        let rows = |batch, count, used| Rows { batch, first: 0, count, used };
        let sequences =
            used.iter().enumerate().map(|(i, &(q, k))| [rows(i, seqlen_q, q), rows(i, seqlen_k, k)]);
        let lengths = [
            vec![],
            used.iter().map(|used| used.0 as i32).collect(),
            vec![],
            used.iter().map(|used| used.1 as i32).collect(),
        ];
        Batch::new(tile, mask, heads, (used.len(), [seqlen_q, seqlen_k]), sequences.collect(), lengths)
    }

    fn new(
        tile: CtaTile,
        mask: Mask,
        heads: (usize, usize),
        (batch, [seqlen_q, seqlen_k]): (usize, [usize; 2]),
        sequences: Vec<[Rows; 2]>,
        lengths: [Vec<i32>; 4],
    ) -> Batch {
        let with_gap = |seqlen: usize, heads: usize| {
            let shape = Shape { batch, seqlen, heads, head_dim: HEAD_DIM };
            let of_row = ((heads + 1) * HEAD_DIM) as i64;
            let strides = Strides {
                batch: of_row * seqlen as i64,
                seqlen: of_row,
                heads: HEAD_DIM as i64,
                head_dim: 1,
            };
            TensorDesc { dtype: dtype(&tile), shape, strides }
        };
        let (q, kv) = (with_gap(seqlen_q, heads.0), with_gap(seqlen_k, heads.1));
        Batch { tile, mask, heads, q, kv, sequences, lengths }
    }

    /// The tensors as a problem.
    fn problem(&self) -> Problem {
        let mut spec = ProblemSpec::dense(self.q.dtype, self.q.shape, self.kv.shape).mask(self.mask);
        (spec.q, spec.k, spec.v) = (self.q, self.kv, self.kv);
        let count = self.sequences.len();
        let sequences = |cu_seqlens: &[i32], seqlen| match cu_seqlens {
            [] => fa3_types::Sequences::dense(count, seqlen).used(),
            _ => fa3_types::Sequences::packed(count),
        };
        let (seqs_q, seqs_k) = (
            sequences(&self.lengths[0], self.q.shape.seqlen),
            sequences(&self.lengths[2], self.kv.shape.seqlen),
        );
        spec.seqs_q(seqs_q).seqs_k(seqs_k).validate().unwrap()
    }

    /// The program for the table of these sequences.
    fn program(&self) -> Program<Kernel> {
        let section = (self.heads.0 / self.heads.1) as u32;
        let order = Order::LongestFirst { section, longest: Longest::from(self.mask) };
        let options = PlanOptions::default().tile(self.tile).order(order).sms(CTAS.try_into().unwrap());
        let plan = Plan::with(&self.problem(), &DeviceLimits::h100_sxm(), &options).unwrap();
        program(&plan).map(|spec| spec.kernel())
    }

    /// Q, K and V: random numbers in valid rows of sequences for which `is_there` is true, and NaN everywhere else.
    fn inputs(&self, is_there: impl Fn(usize) -> bool) -> [Bytes; 3] {
        [(0, &self.q, 1), (1, &self.kv, 2), (1, &self.kv, 3)].map(|(side, tensor, seed)| {
            let mut bytes = vec![POISON; tensor.extent_bytes().0 as usize];
            for (number, rows) in self.sequences.iter().enumerate().filter(|&(number, _)| is_there(number)) {
                let Rows { batch, first, used, .. } = rows[side];
                for (row, head) in each(used, tensor.shape.heads) {
                    let at = at(tensor, batch, first + row, head);
                    bytes[at].copy_from_slice(&numbers(tensor.dtype, [seed, number, row, head]));
                }
            }
            bytes
        })
    }

    /// Scales of a sequence's heads of K and V.
    fn scales(&self, number: usize) -> impl Iterator<Item = f32> {
        (0..self.heads.1).map(move |head| 0.5 + (number * 5 + head * 3) as f32 % 7.0 / 8.0)
    }

    /// Runs the program of all sequences.
    fn run(&self, inputs: [Bytes; 3], policy: Policy) -> Results {
        let program = self.program();
        let scales: Bytes =
            (0..self.sequences.len()).flat_map(|i| self.scales(i)).flat_map(f32::to_le_bytes).collect();
        let mut lengths = self.lengths.iter().filter(|lengths| !lengths.is_empty());
        let mut inputs = inputs.into_iter();
        let initial: Vec<Bytes> = program
            .buffers
            .iter()
            .map(|buffer| match (buffer.role, buffer.name) {
                (BufferRole::Input, "q" | "k" | "v") => inputs.next().unwrap(),
                (BufferRole::Input, _) => {
                    lengths.next().unwrap().iter().copied().flat_map(i32::to_le_bytes).collect()
                }
                (BufferRole::OptionalInput, _) => scales.clone(),
                _ => vec![],
            })
            .collect();
        let outcome =
            ProgramSimulation::new(&program).policy(policy).mode(Mode::Exact).run(&initial).unwrap();
        assert!(
            outcome.is_clean(),
            "{:?} {:?}",
            outcome.left_over,
            outcome.findings().next().map(ToString::to_string)
        );
        let (o, lse) = (&outcome.buffers[buffers::O.0], &outcome.buffers[buffers::LSE.0]);
        self.check_rows_behind(o, lse);
        let of_sequence =
            |[q, _]: &[Rows; 2]| self.rows_of_results(o, lse, q.batch, q.first..q.first + q.count);
        self.sequences.iter().map(of_sequence).collect()
    }

    /// O and LSE of these rows.
    fn rows_of_results(
        &self,
        o: &[u8],
        lse: &[u8],
        batch: usize,
        rows: std::ops::Range<usize>,
    ) -> (Bytes, Bytes) {
        let o_of = self.output();
        let [_, heads, seqlen] = self.problem().lse_shape();
        let (mut of_o, mut of_lse) = (vec![], vec![]);
        for (row, head) in rows.flat_map(|row| (0..heads).map(move |head| (row, head))) {
            of_o.extend(&o[at(&o_of, batch, row, head)]);
            let at = 4 * ((batch * heads + head) * seqlen + row);
            of_lse.extend(&lse[at..at + 4]);
        }
        (of_o, of_lse)
    }

    fn output(&self) -> TensorDesc {
        *self.problem().o()
    }

    /// Checks that rows behind all sequences have the results of rows that see no key.
    fn check_rows_behind(&self, o: &[u8], lse: &[u8]) {
        if self.q.shape.batch > 1 {
            return;
        }
        let end = self.sequences.last().map_or(0, |[q, _]| q.first + q.count);
        let (o, lse) = self.rows_of_results(o, lse, 0, end..self.q.shape.seqlen);
        assert!(o.iter().all(|&byte| byte == 0), "O of rows behind all sequences is not 0");
        assert!(lse.as_chunks().0.iter().all(|&lse| f32::from_le_bytes(lse) == f32::NEG_INFINITY));
    }

    /// The results of one sequence, from a kernel for sequences of one length with the same tile.
    fn alone(&self, number: usize, [q, k, v]: &[Bytes; 3]) -> (Bytes, Bytes) {
        let [rows_q, rows_k] = self.sequences[number];
        let shape = |rows: usize, heads: usize| Shape { batch: 1, seqlen: rows, heads, head_dim: HEAD_DIM };
        let (q_shape, k_shape) = (shape(rows_q.used, self.heads.0), shape(rows_k.used, self.heads.1));
        let problem = ProblemSpec::dense(self.q.dtype, q_shape, k_shape).mask(self.mask).validate().unwrap();
        let options = PlanOptions::default().tile(self.tile).scheduler(Scheduler::OneTile);
        let plan = Plan::with(&problem, &DeviceLimits::h100_sxm(), &options).unwrap();
        let program = program(&plan).map(|spec| spec.kernel());
        let copied = |tensor: &TensorDesc, bytes: &Bytes, rows: Rows| -> Bytes {
            let each = each(rows.used, tensor.shape.heads);
            each.flat_map(|(row, head)| bytes[at(tensor, rows.batch, rows.first + row, head)].to_vec())
                .collect()
        };
        let mut inputs = [(&self.q, q, rows_q), (&self.kv, k, rows_k), (&self.kv, v, rows_k)]
            .map(|(tensor, bytes, rows)| copied(tensor, bytes, rows))
            .into_iter();
        let scales: Bytes = self.scales(number).flat_map(f32::to_le_bytes).collect();
        let initial = program.buffers.iter().map(|buffer| match buffer.role {
            BufferRole::Input => inputs.next().unwrap(),
            BufferRole::OptionalInput => scales.clone(),
            BufferRole::Output
            | BufferRole::OptionalOutput
            | BufferRole::InOut
            | BufferRole::Scratch
            | BufferRole::TileCounter => vec![],
        });
        let (mut o, mut lse) = (vec![], vec![]);
        if !program.steps.is_empty() {
            let outcome = ProgramSimulation::new(&program).run(&initial.collect::<Vec<_>>()).unwrap();
            assert!(outcome.is_clean());
            o.clone_from(&outcome.buffers[buffers::O.0]);
            // Converts from (heads, rows) to (rows, heads), the order of the results.
            let of_lse = &outcome.buffers[buffers::LSE.0].as_chunks::<4>().0;
            lse = each(rows_q.used, self.heads.0)
                .flat_map(|(row, head)| of_lse[head * rows_q.used + row])
                .collect();
        }
        // Padding rows have the results of rows that see no key.
        let unused = (rows_q.count - rows_q.used) * self.heads.0;
        o.extend(std::iter::repeat_n(0, 2 * unused * HEAD_DIM));
        lse.extend(std::iter::repeat_n(f32::NEG_INFINITY.to_le_bytes(), unused).flatten());
        (o, lse)
    }

    /// Checks that each sequence has the bits that it has without the others, even if the other sequences hold NaN.
    fn check(&self) {
        let inputs = self.inputs(|_| true);
        let expected: Results = (0..self.sequences.len()).map(|number| self.alone(number, &inputs)).collect();
        for policy in [Policy::Eager, Policy::Lazy, Policy::Random(5)] {
            same(&self.run(inputs.clone(), policy), &expected, |_| true);
        }
        for parity in [0, 1] {
            let is_there = |number: usize| number % 2 == parity;
            same(&self.run(self.inputs(is_there), Policy::Random(7)), &expected, is_there);
        }
    }
}

/// Asserts that the results are equal for the sequences for which `is_there` is true.
fn same(results: &Results, expected: &Results, is_there: impl Fn(usize) -> bool) {
    for (number, (found, expected)) in results.iter().zip(expected).enumerate().filter(|&(i, _)| is_there(i))
    {
        assert!(found.0 == expected.0, "O of sequence {number} differs from that of the sequence alone");
        assert!(found.1 == expected.1, "LSE of sequence {number} differs from that of the sequence alone");
    }
}

/// Pairs of a row and a head.
fn each(rows: usize, heads: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..heads).map(move |head| (row, head)))
}

/// The bytes of one row of a head.
fn at(tensor: &TensorDesc, batch: usize, row: usize, head: usize) -> std::ops::Range<usize> {
    let start = tensor.dtype.bytes() * tensor.offset(batch, row, head, 0).0 as usize;
    start..start + tensor.dtype.bytes() * tensor.shape.head_dim
}

/// A row of numbers around 0.
fn numbers(dtype: Dtype, place: [usize; 4]) -> Bytes {
    let seed =
        place.into_iter().fold(1_u32, |seed, n| (seed ^ n as u32).wrapping_mul(0x9E37_79B1).rotate_left(13));
    let random =
        |col: u32| (seed ^ col).wrapping_mul(0x85EB_CA6B).rotate_left(15).wrapping_mul(0xC2B2_AE35) >> 8;
    let number = |col: u32| random(col) as f32 / (1 << 22) as f32 - 2.0;
    match dtype {
        // Codes from -2 to 2.
        Dtype::E4m3 => (0..HEAD_DIM as u32).map(|col| (random(col) & 0xBF) as u8 | 0x08).collect(),
        Dtype::Int8 => unreachable!("no problem has q of int8"),
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
            (0..HEAD_DIM as u32).flat_map(|col| half::bf16::from_f32(number(col)).to_le_bytes()).collect()
        }
    }
}

fn dtype(tile: &CtaTile) -> Dtype {
    if tile.precision.is_fp8() { Dtype::E4m3 } else { Dtype::Bf16 }
}

/// Lengths around the sizes of tiles and blocks; sequences with more queries than keys; and sequences without queries
/// or keys.
const LENGTHS: [(usize, usize); 9] =
    [(63, 15), (64, 16), (65, 17), (0, 30), (30, 0), (1, 1), (150, 40), (0, 0), (5, 90)];

#[test]
fn packed_sequences_have_the_bits_that_they_have_alone() {
    for mask in [Mask::None, Mask::Causal, Mask::Window { left: Some(20), right: Some(3) }] {
        Batch::packed(TILE, mask, (4, 2), &LENGTHS, (70, 5)).check();
    }
    Batch::packed(TWO, Mask::Causal, (2, 1), &LENGTHS, (3, 0)).check();
    Batch::packed(TWO, Mask::None, (1, 1), &LENGTHS[1..3], (0, 0)).check();
}

#[test]
fn sequences_in_e4m3_have_the_bits_that_they_have_alone() {
    Batch::packed(FP8, Mask::Causal, (2, 1), &LENGTHS, (70, 5)).check();
    let serial = CtaTile { pipeline: Pipeline::Serial, stages: 1, ..FP8 };
    Batch::packed(serial, Mask::None, (2, 2), &LENGTHS, (0, 0)).check();
}

#[test]
fn sequences_in_part_have_the_bits_that_they_have_alone() {
    let used = [(100, 70), (3, 70), (100, 2), (0, 50), (64, 0), (65, 33)];
    for mask in [Mask::None, Mask::Causal] {
        Batch::used(TILE, mask, (4, 2), (100, 70), &used).check();
    }
    Batch::used(FP8, Mask::Causal, (2, 1), (100, 70), &used).check();
}

/// CTAs that find no tile leave the tile counter at 0.
#[test]
fn nothing_to_do_is_done() {
    Batch::packed(TILE, Mask::None, (2, 1), &[], (0, 4)).check();
    Batch::packed(TILE, Mask::None, (2, 1), &[(0, 30), (0, 0)], (0, 4)).check();
    Batch::packed(TILE, Mask::Causal, (2, 1), &[], (100, 0)).check();
    Batch::packed(TILE, Mask::Causal, (1, 1), &[(0, 3), (1, 0)], (0, 0)).check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_sequences_have_the_bits_that_they_have_alone(
        lengths in proptest::collection::vec((0_usize..140, 0_usize..80), 1..6), behind in (0_usize..80, 0_usize..20),
        (left, right) in (proptest::option::of(0_u32..60), proptest::option::of(0_u32..20)), group in 1_usize..3,
    ) {
        Batch::packed(TILE, Mask::window(left, right), (2 * group, 2), &lengths, behind).check();
    }
}
