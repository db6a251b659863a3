//! Attention over a KV cache in the simulator: properties that hold for every layout of the cache.

use fa3_cuda::kernels::{Spec, fwd};
use fa3_sched::forward::{Plan, PlanOptions, SplitKeys};
use fa3_sim::{Loaded, Mode, Policy};
use fa3_tests::cache::{Case, Keys, Pages, Queries, paged};
use fa3_tests::fwd::{Layout, dense, device};
use fa3_tests::intervals::Kind;
use fa3_tests::memory::{Memory, before, number_bytes};
use fa3_tests::{Trial, pairs};
use fa3_types::{Dtype, Mask, Sequences};

/// Sequences with these keys, and with `rows` queries each.
fn case(keys: Keys, split_keys: Option<SplitKeys>, rows: usize) -> Case {
    let (lengths, queries, layout) = (vec![150, 3, 64, 0], Queries::Dense(rows), Layout::HeadsFirst);
    Case { lengths, keys, queries, sink: false, layout, split_keys, seed: 11, ..paged((64, 64)) }
}

/// The KV blocks do not depend on how rows are stored or copied, so the bits of the results do not, either.
#[test]
fn pages_of_any_size_have_the_bits_of_contiguous_rows() {
    let pages = [Pages::of(1), Pages::of(3).indexed(), Pages::of(64), Pages::of(16).padded()];
    for (split_keys, rows) in [(Some(SplitKeys::Even), 2), (None, 70)] {
        let of = |keys| {
            let trial = case(keys, split_keys, rows).trial();
            crate::o_and_lse(&trial.program, &trial.before, Policy::Lazy)
        };
        let contiguous = of(Keys::Dense);
        for pages in pages {
            assert!(of(Keys::Pages(pages)) == contiguous, "{pages:?}, {rows} rows of Q");
        }
    }
}

/// Gives the numbers of all rows of a sequence with these keys and rows.
type OfRows = fn(i32, i32) -> Vec<i32>;

/// Masks of data that say what a causal mask says.
const CAUSAL: [(Kind, OfRows); 4] = [
    (Kind::Everything, |keys, rows| (keys - rows..keys).flat_map(|at| [0, at + 1]).collect()),
    (Kind::FarApart, |keys, rows| (keys - rows..keys).flat_map(|at| [at / 2, at + 1, 0, at / 2]).collect()),
    // Three words, of which a row has a bit for each new key up to its own.
    (Kind::Tree, |_, rows| {
        let word = |bits: i32| ((1_i64 << bits.clamp(0, 32)) - 1) as i32;
        (1..=rows).flat_map(|bits| [0, 32, 64].map(|first| word(bits - first))).collect()
    }),
    (Kind::Causal, |_, _| vec![-1]),
];

/// Intervals, trees that are chains, and numbers that make all sequences causal have the bits of a causal mask.
#[test]
fn masks_that_say_causal_have_its_bits() {
    let run = |trial: &Trial| crate::o_and_lse(&trial.program, &trial.before, Policy::Lazy);
    let fixed = Some(SplitKeys::FixedSize { keys: 128 });
    let keys = [Keys::Padded, Keys::Pages(Pages::of(16)), Keys::Pages(Pages::of(1))];
    let narrow = pairs(keys, [(Some(SplitKeys::Even), 2), (fixed, 5), (None, 70)]);
    let narrow = narrow.into_iter().map(|(keys, (split_keys, rows))| case(keys, split_keys, rows));
    let wide = [(keys[1], None, 70), (keys[2], Some(SplitKeys::Even), 2)];
    let wide = wide.map(|(keys, split_keys, rows)| Case {
        heads: (1, 1),
        columns: (512, 512),
        ..case(keys, split_keys, rows)
    });
    for causal in narrow.chain(wide) {
        let expected = run(&causal.clone().trial());
        let Queries::Dense(rows) = causal.queries else { unreachable!("its queries are dense") };
        for (kind, of_rows) in CAUSAL {
            let case = Case { mask: Mask::None, intervals: Some((kind, false)), ..causal.clone() };
            let numbers = causal.lengths.iter().flat_map(|&keys| of_rows(keys as i32, rows as i32));
            let numbers = numbers.flat_map(i32::to_le_bytes);
            let (mut trial, numbers) = (case.trial(), numbers.collect::<Vec<u8>>());
            assert_eq!(trial.buffer_mut("intervals").len(), numbers.len());
            *trial.buffer_mut("intervals") = numbers;
            assert!(run(&trial) == expected, "{kind:?}, {causal:?}");
        }
    }
}

/// No values of lengths, page table or index cause an access outside of the tensors.
#[test]
fn invalid_numbers_lead_nowhere() {
    let pages =
        [Pages::of(1), Pages::of(4).padded().indexed(), Pages::of(16).indexed(), Pages::of(24).padded()];
    let lists = ["page_table", "cache_batch_idx", "seqused_k", "leftpad_k"];
    for (number, pages) in pages.into_iter().enumerate() {
        for (split_keys, rows) in [(Some(SplitKeys::Even), 2), (None, 5)] {
            let mut trial = case(Keys::Pages(pages), split_keys, rows).trial();
            for (buffer, bytes) in trial.program.buffers.iter().zip(&mut trial.before) {
                if lists.contains(&buffer.name) {
                    for (at, entry) in bytes.chunks_mut(4).enumerate() {
                        let small = (at * 17 + number * 5) as i32 % 40 - 4;
                        let any = [small, i32::MIN, small, i32::MAX, 160, 1 << 30, small][(at + number) % 7];
                        entry.copy_from_slice(&any.to_le_bytes());
                    }
                }
            }
            let run = trial.simulate(Policy::Random(number as u64), Mode::Fast);
            assert!(run.is_ok(), "{pages:?}, {rows} rows of Q: {}", run.unwrap_err());
        }
    }
}

/// A row sees the last 100 of 5,000,001 keys. The last one has the value 3, and the other ones have 1. Pages of earlier
/// keys have 1000.
#[test]
fn a_sequence_may_have_millions_of_keys() {
    const KEYS: usize = 5_000_001;
    let fixed = SplitKeys::FixedSize { keys: 4096 };
    for (page, split_keys) in
        [(64, Some(SplitKeys::Even)), (64, Some(fixed)), (64, None), (1, Some(SplitKeys::Even))]
    {
        let pages = KEYS.div_ceil(page);
        let mask = Mask::Window { left: Some(99), right: Some(0) };
        let spec = dense(Dtype::Bf16, 1, (1, page), (2, 1), 64).mask(mask);
        let mut spec = spec.seqs_k(Sequences::paged(1, pages).used());
        for x in [&mut spec.k, &mut spec.v] {
            x.shape.batch = 3;
        }
        let problem = spec.validate().unwrap();
        let mut options = PlanOptions::default();
        options.split_keys = split_keys;
        let program = fwd::program(&Plan::with(&problem, &device(3), &options).unwrap()).map(Spec::kernel);
        let list = |list: Vec<i32>| list.into_iter().flat_map(i32::to_le_bytes).collect();
        let of_keys = |numbers: [f32; 3]| {
            number_bytes(Dtype::Bf16, numbers.into_iter().flat_map(|x| vec![x; 64 * page]))
        };
        let before = before(&program, |buffer| match buffer.name {
            "q" => Some(number_bytes(Dtype::Bf16, vec![0.0; 128])),
            "k" => Some(of_keys([0.0; 3])),
            "v" => Some(of_keys([1.0, 1000.0, 3.0])),
            "page_table" => {
                let first_seen = (KEYS - 100) / page;
                let mut table = vec![1; pages];
                table[first_seen..].fill(0);
                table[pages - 1] = 2;
                Some(list(table))
            }
            "seqused_k" => Some(list(vec![KEYS as i32])),
            _ => None,
        });
        let run = fa3_tests::simulate(&program.map(Loaded::new), &before, Policy::Lazy, Mode::Fast);
        let after = run.unwrap_or_else(|fault| panic!("pages of {page} rows, {split_keys:?}: {fault}"));
        let after = Memory::new(&program, &after);
        let (o, lse) = (after.tensor("o"), after.floats("lse").unwrap());
        let is_near = |x: f32, y: f32| (x - y).abs() < 4e-3;
        let is_right =
            o.iter().all(|&o| is_near(o, 1.02)) && lse.iter().all(|&lse| is_near(lse, 100_f32.ln()));
        assert!(is_right, "pages of {page} rows, {split_keys:?}: {o}, LSE {lse:?}");
    }
}
