//! NaN reaches exactly the gradients that docs/backward.md lists ("How far NaN reaches").

use fa3_cuda::kernels::bwd::buffers;
use fa3_ir::BufferId;
use fa3_sched::backward::{DqBy, Plan};
use fa3_tests::bwd::{BwdCase, Form};
use fa3_tests::fwd::{Layout, dense, device};
use fa3_tests::{Case, Trial, pairs};
use fa3_types::{Dtype, KnownProblem, Mask};
use rayon::prelude::*;

use super::simulate;

const LENGTHS: (usize, usize) = (100, 140);
/// heads_q and heads_kv.
const HEADS: (usize, usize) = (4, 2);
const MASKS: [Mask; 2] = [Mask::Causal, Mask::Window { left: Some(40), right: Some(9) }];

/// The head of Q that holds the NaN. In K and V it is head 0.
const HEAD: usize = 1;
const ROW: usize = 70;
const KEY: usize = 90;

/// Every form, with additions in blocks of 64 and of 128 rows.
const FORMS: [(u32, Form); 5] = [
    (64, Form::AnyOrder),
    (64, Form::OrderOfKeys),
    (128, Form::OrderOfKeys),
    (64, Form::DqKernel),
    (256, Form::DqKernel),
];

/// A problem in one form, and its results.
struct Run {
    plan: Plan,
    problem: KnownProblem,
    trial: Trial,
    clean: Vec<Vec<u8>>,
}

impl Run {
    fn new((head_dim, form): (u32, Form), mask: Mask) -> Run {
        let options =
            form.options([head_dim; 2], &device(2)).expect("these head dimensions have these forms");
        let spec = dense(Dtype::Bf16, 1, LENGTHS, HEADS, head_dim as usize).mask(mask);
        let problem = spec.known().unwrap();
        let case = Case::normal("poison", problem.clone(), 3);
        let case = BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 };
        let plan = Plan::with(&case.problem(), &device(2), &options).unwrap();
        let trial = case.trial(&device(2), &options);
        let clean = simulate(&trial, &trial.before);
        trial.check(&clean).unwrap_or_else(|fault| panic!("{fault}"));
        Run { plan, problem, trial, clean }
    }

    /// The results with a NaN in a row of an input.
    fn with_nan(&self, BufferId(input): BufferId) -> Vec<Vec<u8>> {
        let mut before = self.trial.before.clone();
        let of_keys = [buffers::K, buffers::V].contains(&BufferId(input));
        let (heads, lengths) = (HEADS.0, LENGTHS);
        let bytes = &mut before[input];
        let row = match BufferId(input) {
            buffers::LSE | buffers::DLSE => {
                let at = HEAD * lengths.0 + ROW;
                4 * at..4 * (at + 1)
            }
            _ => {
                let (index, heads) =
                    if of_keys { (KEY * HEADS.1, HEADS.1) } else { (ROW * heads + HEAD, heads) };
                let rows = if of_keys { lengths.1 } else { lengths.0 };
                let row_bytes = bytes.len() / (rows * heads);
                index * row_bytes..(index + 1) * row_bytes
            }
        };
        bytes[row].fill(0xff);
        simulate(&self.trial, &before)
    }

    /// Numbers of rows and of keys in the blocks for which a gradient is computed.
    fn blocks(&self, gradient: BufferId) -> (usize, usize) {
        let of_dkv = (self.plan.dkv().tile.tile_m as usize, self.plan.dkv().tile.tile_n as usize);
        match self.plan.dq() {
            DqBy::Kernel(part) if gradient == buffers::DQ => {
                (part.tile.tile_m as usize, part.tile.tile_n as usize)
            }
            DqBy::Kernel(_) | DqBy::Additions | DqBy::AdditionsInOrder => of_dkv,
        }
    }

    /// Whether some row of the block of `row` sees some key of the block of `key`.
    fn meet(&self, row: usize, key: usize, (rows, keys): (usize, usize)) -> bool {
        let (row, key) = (row / rows * rows, key / keys * keys);
        (row..LENGTHS.0.min(row + rows))
            .any(|row| (key..LENGTHS.1.min(key + keys)).any(|key| self.sees(row, key)))
    }

    fn sees(&self, row: usize, key: usize) -> bool {
        self.problem.mask().allows(row, key, self.problem.lengths(0))
    }
}

/// The permitted effect of a NaN on a row of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Same,
    Nan,
    Either,
}

/// Checks every row of dQ, dK and dV. `fate` gives the permitted effect, for a gradient and a row or key of it. dQ is
/// checked in the poisoned head of Q, or in all heads of the group if K or V is poisoned.
fn assert_reach(run: &Run, input: BufferId, fate: impl Fn(BufferId, usize) -> Fate) {
    let after = run.with_nan(input);
    let of_keys = [buffers::K, buffers::V].contains(&input);
    for gradient in [buffers::DQ, buffers::DK, buffers::DV] {
        let of_q = gradient == buffers::DQ;
        let (rows, heads) = if of_q { (LENGTHS.0, HEADS.0) } else { (LENGTHS.1, HEADS.1) };
        let row_bytes = after[gradient.0].len() / (rows * heads);
        let pairs = after[gradient.0].chunks(row_bytes).zip(run.clean[gradient.0].chunks(row_bytes));
        for (index, (x, clean)) in pairs.enumerate() {
            let (row, head) = (index / heads, index % heads);
            let is_hit = match (of_q, of_keys) {
                (true, true) => head < HEADS.0 / HEADS.1,
                (true, false) => head == HEAD,
                (false, _) => head == 0,
            };
            let fate = if is_hit { fate(gradient, row) } else { Fate::Same };
            let is_nan = x.chunks(2).all(|x| x[1] & 0x7f == 0x7f && x[0] > 0x80);
            let is_right = match fate {
                Fate::Same => x == clean,
                Fate::Nan => is_nan,
                Fate::Either => x == clean || is_nan,
            };
            let name = &run.trial.program.buffers[gradient.0].name;
            let of = &run.trial.program.buffers[input.0].name;
            assert!(is_right, "NaN in {of}: row {row} of {name}, not {fate:?}\n{}", run.trial.name);
        }
    }
}

/// A NaN in a row of Q or dO reaches dQ of this row, and the keys of tiles that visit the row's block. A NaN in a key
/// reaches the key's gradients, and the rows whose block meets the key's block.
#[test]
fn a_nan_reaches_the_gradients_that_depend_on_it() {
    pairs(FORMS, MASKS).into_par_iter().for_each(|(form, mask)| {
        let run = &Run::new(form, mask);
        for input in [buffers::Q, buffers::O, buffers::LSE, buffers::DOUT, buffers::DLSE] {
            assert_reach(run, input, |gradient, at| match gradient {
                buffers::DQ if at == ROW => Fate::Nan,
                buffers::DQ => Fate::Same,
                // P does not depend on these inputs.
                buffers::DV if [buffers::O, buffers::DLSE].contains(&input) => Fate::Same,
                _ if run.sees(ROW, at) => Fate::Nan,
                _ if run.meet(ROW, at, run.blocks(gradient)) => Fate::Either,
                _ => Fate::Same,
            });
        }
        for input in [buffers::K, buffers::V] {
            assert_reach(run, input, |gradient, at| match gradient {
                buffers::DQ if run.sees(at, KEY) => Fate::Nan,
                buffers::DQ if run.meet(at, KEY, run.blocks(gradient)) => Fate::Either,
                buffers::DK if at == KEY => Fate::Nan,
                buffers::DV if at == KEY && input == buffers::K => Fate::Nan,
                _ => Fate::Same,
            });
        }
    });
}
