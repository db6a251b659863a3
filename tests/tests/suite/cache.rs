//! Attention over a KV cache in the simulator: properties that hold for every layout of the cache.

use fa3_sched::forward::SplitKeys;
use fa3_sim::{Mode, Policy};
use fa3_tests::cache::{Case, Keys, Pages, Queries, paged};
use fa3_tests::fwd::Layout;

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
