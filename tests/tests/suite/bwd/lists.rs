//! Packed sequences: each sequence has the same bits as in a problem of its own, and invalid lists cause no access out
//! of bounds.

use std::ops::Range;

use fa3_cuda::kernels::bwd::buffers;
use fa3_ir::BufferId;
use fa3_sim::Policy;
use fa3_tests::bwd::{BwdCase, Form};
use fa3_tests::fwd::{Layout, dense, device};
use fa3_tests::{Case, Trial, in_turn};
use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec, SequenceRows};
use rayon::prelude::*;

use super::simulate;

/// Rows of Q and of K of each sequence: full and partial tiles and blocks, no rows, and no keys.
const LENGTHS: [(usize, usize); 5] = [(100, 140), (0, 30), (33, 0), (130, 260), (1, 1)];
/// heads_q and heads_kv.
const HEADS: (usize, usize) = (2, 1);
/// Head dimension and form: additions in blocks of 64 rows and of 128 rows, and a separate dQ kernel.
const FORMS: [(u32, Form); 4] =
    [(128, Form::OrderOfKeys), (64, Form::OrderOfKeys), (64, Form::DqKernel), (64, Form::AnyOrder)];
const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(9) }];

/// The tensors with rows of Q (`OF_Q`), and the tensors with rows of K (`OF_K`).
const OF_Q: [BufferId; 4] = [buffers::Q, buffers::O, buffers::DOUT, buffers::DQ];
const OF_K: [BufferId; 4] = [buffers::K, buffers::V, buffers::DK, buffers::DV];

/// The problem with all sequences in one tensor.
fn packed(form: (u32, Form), mask: Mask) -> Trial {
    let (of_q, of_k): (Vec<usize>, Vec<usize>) = LENGTHS.into_iter().unzip();
    let [of_q, of_k] = [of_q, of_k].map(|lengths| SequenceRows::packed_lengths(&lengths));
    let spec = ProblemSpec::packed(Dtype::Bf16, HEADS, form.0 as usize, &of_q, &of_k).mask(mask);
    trial(form, spec.with_rows(of_q, of_k).unwrap())
}

fn trial((head_dim, form): (u32, Form), problem: KnownProblem) -> Trial {
    let device = device(2);
    let options = form.options([head_dim; 2], &device).expect("these head dimensions have these forms");
    let case = Case::normal("lists", problem, 3);
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device, &options)
}

/// Bytes of a sequence's rows in each tensor of the caller, given the sequence's first rows and the total numbers of
/// rows.
fn rows(
    before: &[Vec<u8>],
    first: (usize, usize),
    count: (usize, usize),
    all: (usize, usize),
) -> Vec<(BufferId, Vec<Range<usize>>)> {
    let of = |buffer: BufferId, first: usize, count: usize, all: usize| {
        let row = before[buffer.0].len() / all.max(1);
        let rows = first * row..(first + count) * row;
        (buffer, Vec::from([rows]))
    };
    let of_q = OF_Q.map(|buffer| of(buffer, first.0, count.0, all.0));
    let of_k = OF_K.map(|buffer| of(buffer, first.1, count.1, all.1));
    let numbers = [buffers::LSE, buffers::DLSE].map(|buffer| {
        let of_head = |head: usize| 4 * (head * all.0 + first.0)..4 * (head * all.0 + first.0 + count.0);
        (buffer, (0..HEADS.0).map(of_head).collect())
    });
    of_q.into_iter().chain(of_k).chain(numbers).collect()
}

fn of_ranges(bytes: &[u8], ranges: &[Range<usize>]) -> Vec<u8> {
    ranges.iter().flat_map(|range| bytes[range.clone()].iter().copied()).collect()
}

/// A packed sequence with NaN in the sequences beside it has the gradients of a dense problem of this sequence alone.
/// dQ is exempt if its additions are in any order.
#[test]
fn packed_sequences_have_the_bits_that_they_have_alone() {
    let all: (usize, usize) = LENGTHS.iter().fold((0, 0), |sum, rows| (sum.0 + rows.0, sum.1 + rows.1));
    in_turn(FORMS, 2, MASKS).into_par_iter().for_each(|(form, mask)| {
        let pack = packed(form, mask);
        // Every other sequence is NaN: the odd ones, then the even ones.
        let mut among_nan = [packed(form, mask), packed(form, mask)];
        let mut first = (0, 0);
        let sequences = LENGTHS.map(|count| {
            let ranges = rows(&pack.before, first, count, all);
            first = (first.0 + count.0, first.1 + count.1);
            (count, ranges)
        });
        for (index, (_, ranges)) in sequences.iter().enumerate() {
            for (BufferId(at), ranges) in ranges {
                let bytes = &mut among_nan[1 - index % 2].before[*at];
                ranges.iter().for_each(|range| bytes[range.clone()].fill(0xFF));
            }
        }
        let among_nan = among_nan.map(|trial| simulate(&trial, &trial.before));
        for (index, (count, ranges)) in sequences.iter().enumerate() {
            let spec = dense(Dtype::Bf16, 1, *count, HEADS, form.0 as usize).mask(mask);
            let mut alone = trial(form, spec.known().unwrap());
            for (BufferId(at), ranges) in ranges {
                alone.before[*at] = of_ranges(&pack.before[*at], ranges);
            }
            let alone = simulate(&alone, &alone.before);
            let gradients = [buffers::DQ, buffers::DK, buffers::DV];
            let gradients = &gradients[usize::from(form.1 == Form::AnyOrder)..];
            for (buffer, ranges) in ranges.iter().filter(|(buffer, _)| gradients.contains(buffer)) {
                let same = of_ranges(&among_nan[index % 2][buffer.0], ranges) == alone[buffer.0];
                assert!(same, "buffer {buffer:?} of sequence {index}, {count:?}, {form:?}, {mask:?}");
            }
        }
    });
}

/// Invalid lists: sequences share rows, and other rows belong to no sequence. Gradients are then unspecified, and may
/// be written twice or never, but there is no access out of bounds and no deadlock.
#[test]
fn invalid_lists_do_no_harm() {
    let lists: [[i32; 6]; 8] = [
        [0, 100, 0, 100, 0, 100],
        [200, 10, 190, 20, 180, 30],
        [-5, 1 << 30, -7, i32::MAX, i32::MIN, 3],
        [i32::MAX; 6],
        [i32::MIN; 6],
        [0, 264, 0, 264, 0, 264],
        [0, 431, 1, 430, 2, 429],
        [100, 100, 50, 264, 0, 431],
    ];
    in_turn(0..lists.len(), 2, FORMS).into_par_iter().for_each(|(index, form)| {
        let mut trial = packed(form, MASKS[index % 3]);
        for (name, list) in [("cu_seqlens_q", lists[index]), ("cu_seqlens_k", lists[(3 * index + 1) % 8])] {
            *trial.buffer_mut(name) = list.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        }
        let what = format!("{form:?}, {:?}", lists[index]);
        crate::does_no_harm(&trial.program, &trial.before, Policy::Random(7), &what);
    });
}
