//! Tile tables of packed sequences that the caller provides. Results equal the results of a call that makes its own
//! table, and invalid tables cause no access out of bounds.

use fa3_cuda::kernels::fwd::buffers;
use fa3_ir::BufferId;
use fa3_sched::forward::PlanOptions;
use fa3_sched::packed::LengthArrays as Lists;
use fa3_sim::{Loaded, Mode, Policy};
use fa3_tests::fwd::{Launch, device, initial, results};
use fa3_tests::{Case, Values, pairs, simulate};
use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec, SequenceRows};
use rayon::prelude::*;

/// Rows of Q and of K of each sequence. `BEHIND` gives the rows after all sequences.
const LENGTHS: [(usize, usize); 6] = [(100, 140), (0, 30), (33, 0), (130, 260), (1, 1), (70, 20)];
const BEHIND: (usize, usize) = (70, 9);

fn problem(dtype: Dtype, mask: Mask) -> KnownProblem {
    let (of_q, of_k): (Vec<usize>, Vec<usize>) = LENGTHS.into_iter().unzip();
    let [of_q, of_k] = [of_q, of_k].map(|lengths| SequenceRows::packed_lengths(&lengths));
    let mut spec = ProblemSpec::packed(dtype, (2, 1), 64, &of_q, &of_k).mask(mask);
    for x in [&mut spec.q, &mut spec.o] {
        x.shape.seqlen += BEHIND.0;
    }
    for x in [&mut spec.k, &mut spec.v] {
        x.shape.seqlen += BEHIND.1;
    }
    let spec = if dtype == Dtype::E4m3 { spec.block_scales(64) } else { spec };
    spec.with_rows(of_q, of_k).unwrap()
}

/// A launch with a given table, the initial contents of its buffers, and the index of the table's buffer.
fn given(problem: &KnownProblem, values: &Values) -> (Launch, Vec<Vec<u8>>, usize) {
    let launch = Launch::new(problem, &device(3), &PlanOptions::default().given_table()).unwrap();
    let BufferId(table) = launch.program.find(buffers::TABLE).unwrap();
    assert!(launch.program.find("cu_seqlens_q").is_none() && launch.program.steps.len() == 1);
    let before = initial(problem, &launch.program, values);
    (launch, before, table)
}

/// Random numbers from a seed (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn a_given_table_has_the_results_of_an_own_one() {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(9) }];
    pairs([Dtype::Bf16, Dtype::E4m3], masks).into_par_iter().for_each(|(dtype, mask)| {
        let problem = problem(dtype, mask);
        let values = Case::normal("given", problem.clone(), 5).values();
        let own = Launch::new(&problem, &device(3), &PlanOptions::default()).unwrap();
        let expected = own.simulate(&values, Policy::Random(3), Mode::Fast).unwrap();
        let (launch, mut before, at) = given(&problem, &values);
        let [q, k] = [problem.rows_q(), problem.rows_k()].map(|rows| rows.cu_seqlens());
        let lists = Lists { cu_seqlens_q: &q, cu_seqlens_k: &k, ..Lists::default() };
        let table = launch.plan.table().unwrap().table(&lists).unwrap();
        before[at][..4 * table.len()].copy_from_slice(&words(&table));
        let program = launch.program.map(Loaded::new);
        let after = simulate(&program, &before, Policy::Random(3), Mode::Fast).unwrap();
        let found = results(&problem, &launch.program, &after);
        assert!(found == expected, "{dtype} {mask:?}");
    });
}

/// The tables belong to other calls, are random, or are nearly valid. Rows may be computed twice or never, but there is
/// no access outside of the tensors and no deadlock.
#[test]
fn invalid_tables_do_no_harm() {
    pairs([Dtype::Bf16, Dtype::E4m3], 0..40).into_par_iter().for_each(|(dtype, seed)| {
        let problem = problem(dtype, [Mask::None, Mask::Causal][seed as usize % 2]);
        let values = Case::normal("given", problem.clone(), 5).values();
        let (launch, mut before, at) = given(&problem, &values);
        let (table, mut rng) = (launch.plan.table().unwrap(), Numbers(seed));
        let [q, k] = [problem.rows_q(), problem.rows_k()].map(|rows| rows.cu_seqlens());
        let lists = Lists { cu_seqlens_q: &q, cu_seqlens_k: &k, ..Lists::default() };
        let mut numbers = table.table(&lists).unwrap();
        numbers.resize(table.words() as usize, 3);
        for number in &mut numbers {
            let near =
                [0, 1, 63, 64, 333, 334, 404, 459, 460, 461, 1 << 20, 1 << 31, u32::MAX, u32::MAX - 63];
            match (seed % 4, rng.below(8)) {
                (0, _) | (2, 0) => *number = rng.next() as u32,
                (1, _) | (2, 1) => *number = near[rng.below(near.len())],
                (3, 0) => *number = number.wrapping_add([1, u32::MAX, 64][rng.below(3)]),
                _ => {}
            }
        }
        // The number of tiles stays above 0.
        numbers[0] = [numbers[0], u32::MAX, 7, 2][rng.below(4)];
        before[at] = words(&numbers);
        crate::does_no_harm(&launch.program, &before, Policy::Random(seed), &format!("{dtype}, {seed}"));
    });
}
