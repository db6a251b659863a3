//! The forward kernels in the simulator: right for every tile, form and mask, clean under every schedule, and nothing
//! where nothing may be.

mod decoded;
mod extremes;
mod growth;
mod matrix;
mod poison;
mod random;
mod schedules;
mod tiles;

use fa3::sched::forward::{CtaTile, PlanOptions};
use fa3::types::Problem;
use fa3_tests::fwd::{Fault, Launch, dense, device};
use fa3_tests::{Arithmetic, Case, Dist, Judge, Poison, Values};

/// (query heads, key/value heads): alone, of one, of groups that are no power of two.
const HEADS: [(usize, usize); 4] = [(1, 1), (3, 1), (6, 2), (5, 5)];

/// A case of `problem` with standard normal numbers.
fn normal(name: &str, problem: Problem, seed: u64) -> Case {
    Case { name: name.to_owned(), problem, dist: Dist::Normal, poison: Poison::None, seed }
}

/// PlanOptions with this tile for any problem that it is large enough for.
fn with_tile(shape: CtaTile) -> PlanOptions {
    PlanOptions::default().tile(shape)
}

/// The problem with these options on a device of three SMs.
fn launch(problem: &Problem, options: &PlanOptions) -> Result<Launch, Fault> {
    Launch::new(problem, &device(3), options)
}

/// The largest error over what the error law allows.
fn judged(case: &Case, values: &Values, answer: &fa3::reference::Forward<f32>) -> Result<f64, String> {
    let verdict =
        Judge::new(case, values).forward(Arithmetic::OfInputs, answer, "cargo test -p fa3-tests --test fwd");
    let parts = verdict.map_err(|violation| violation.to_string())?;
    Ok(parts.iter().map(|part| part.ratio).fold(0.0, f64::max))
}
