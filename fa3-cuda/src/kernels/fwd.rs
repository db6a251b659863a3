//! The forward pass: a producer warpgroup loads, and one to three consumer warpgroups compute 64 rows each. A kernel
//! without a producer loads in its consumers. Where a tile of O is too wide for the registers of one warpgroup, two
//! warpgroups compute the same rows, and each of them has half of O's columns.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//! ```
//!
//! [`FwdSpec`] builds the kernel, and [`program`] lowers a plan to its launches. The roles are in `producer.rs` and
//! `consumer.rs`. `A1:4` is line 4 of the paper's Algorithm 1 (arXiv 2407.08608), which that code implements.

// The launch: key, parameters and program.
pub mod buffers;
mod combine;
mod descales;
mod params;
mod program;
mod spec;

// State and data paths that the roles share.
mod dequantized;
mod f16_queries;
mod hand_over;
mod p_type;
mod scales;
mod sources;
mod state;
mod tile_rows;
mod token_scales;
mod transpose;

// The roles.
mod chains;
mod channels;
mod constants;
mod consumer;
mod converted_rows;
mod epilogue;
mod merged;
mod producer;
mod row_softmax;

// The consumer's main loops.
mod algorithm1;
mod algorithm2;
mod algorithm4;
mod attend;
mod first;
mod latent;
mod query;
mod self_loading;
mod two_levels;
mod wide;

pub use super::parts::lookup::SequenceForm;
pub use super::parts::shares::ShareForm;
pub use combine::FwdCombineSpec;
pub use program::program;
pub use row_softmax::{Finished, RowSoftmax};
pub use spec::FwdSpec;

use fa3_ir::lang::{Kernel, Launch, Role};

use super::KernelSpec;
use state::Fwd;

impl KernelSpec for FwdSpec {
    /// Builds the kernel. The spec must come from [`FwdSpec::of`], but its tile may be replaced by any tile that passes
    /// [`CtaTile::check`](fa3_sched::forward::CtaTile::check) and has a producer.
    fn kernel(&self) -> Kernel {
        kernel(self)
    }
}

fn kernel(spec: &FwdSpec) -> Kernel {
    let tile = &spec.tile;
    let launch = Launch::threads(tile.threads()).cluster(spec.cluster).per_sm(spec.per_sm);
    Kernel::build("fwd", launch, |b| {
        if spec.guards_all() {
            b.guard_all();
        }
        let fwd = Fwd::declare(b, spec);
        fwd.prefetch();
        fwd.store_constants();
        b.init_mbarriers();
        // PDL: CTAs of the next kernel become resident as CTAs of this one leave, and wait until all of these have
        // ended.
        b.launch_dependents();
        b.grid_dependency_wait();

        let (registers, all) = (tile.registers_of(spec.per_sm, spec.has_busy_loaders()), tile.threads() / 32);
        if let Some(registers) = registers.producer {
            b.role(Role::new("producer", 0..4).registers(registers), || {
                producer::run(&fwd);
                fwd.leave_together();
            });
        }
        let consumers = all - 4 * tile.consumers..all;
        if let (Some(dequantized), Some(registers)) = (&fwd.dequantized, registers.converter) {
            b.role(Role::new("converter", 4..consumers.start).registers(registers), || {
                dequantized.run(&fwd);
                fwd.leave_together();
            });
        }
        let of_first = consumers.start..registers.second.map_or(consumers.end, |_| consumers.start + 4);
        let second = of_first.end..consumers.end;
        b.role(Role::new("consumer", of_first).registers(registers.consumer), || {
            consumer::run(&fwd);
            fwd.leave_together();
        });
        if let (Some(hand_over), Some(registers)) = (&fwd.hand_over, registers.second) {
            b.role(Role::new("second", second).registers(registers), || {
                wide::run_second(&fwd, hand_over);
                fwd.leave_together();
            });
        }
    })
}
