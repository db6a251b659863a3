//! The reduction of partial results of attention over disjoint sets of keys (split-KV combine).
//!
//! ```text
//! LSE = ln Σ_s exp(LSE_s)        O = Σ_s exp(LSE_s - LSE) O_s        s over the parts
//! ```
//!
//! A team of warps reduces a row, as `parts/combine.rs` explains, and a CTA has several teams. [`Spec`] builds the
//! kernel, and [`program`] lowers a plan to its launch.

mod params;
mod program;
mod spec;

pub use program::program;
pub use spec::Spec;

use fa3_ir::lang::*;
use fa3_sched::TileCoord;

use self::params::Params;
use super::KernelSpec;
use super::params::{Declare, Form};
use super::parts::combine::Combine;

impl KernelSpec for Spec {
    /// Builds the kernel of a spec that comes from [`Spec::of`].
    fn kernel(&self) -> Kernel {
        kernel(self)
    }
}

fn kernel(spec: &Spec) -> Kernel {
    Kernel::build("combine", Launch::threads(32 * spec.team.cta_warps()), |b| {
        let params = Params::<Form>::form(spec).pass(&mut Declare(b));
        let combine = Combine::declare(b, spec.input, spec.head_dim, spec.team);
        b.launch_dependents();
        b.grid_dependency_wait();

        let row = b.cta_x().mad(spec.team.rows(), combine.row_of_cta());
        let is_there = row.lt(params.rows);
        // A team of the last CTA that has no row reduces the last row, because all threads must meet at the barrier.
        let TileCoord { batch, head, m_block } = params.decoder.decode(row.min(params.rows - 1));
        let row = [batch, head, m_block];
        combine.row(params.splits, params.parts(row), None, params.combined(row, spec.output, is_there));
    })
}
