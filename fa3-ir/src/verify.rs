//! The verifier: the rules that every kernel must keep, however it was built.
//!
//! Values:
//! - V-1: an operand has the class that its instruction reads or writes.
//! - V-2: a value is read after its definition, in the block that defines it or a block within. A value that a loop's
//!   body or a branch defines does not exist outside of it; a role sees the prologue's values, but no other role's. A
//!   value that a guarded instruction defines is undefined in the lanes that its guard excludes: reading it there is a
//!   simulator's finding.
//! - V-3: a value is assigned once.
//! - V-4: a variable is assigned on every path to where it is read. A guarded assignment does not count, and a product
//!   that overwrites its accumulator under a run-time predicate may find it unassigned.
//! - V-5: handles belong to this kernel: values, parameters, regions, barriers exist.
//!
//! Shapes:
//! - V-6: constants are in the range that PTX allows (parities, lanes, byte counts, pending groups, wgmma's N,
//!   setmaxnreg).
//! - V-7: vectors have 1, 2 or 4 elements and at most 16 bytes.
//! - V-8: an instruction has as many registers as its shape says (an accumulator N / 2, all different).
//! - V-9: operands of 8-bit products are K-major.
//! - V-10: a tensor copy has one coordinate for each dimension of its tensor map.
//!
//! Warps:
//! - V-11: an instruction that needs the whole warp (`.aligned`, full masks) is neither in a branch that lanes may take
//!   differently nor guarded; and a guard is on single instructions only, not on a wait loop.
//! - V-12: a loop has a break; a break is in a loop, and not in a branch within it that lanes may take differently.
//! - V-13: roles are not empty, disjoint, and cover the warps of the CTA.
//! - V-14: wgmma and setmaxnreg run in whole warpgroups: warps 4i to 4i + 3.
//! - V-15: setmaxnreg is in no branch and no loop, and decreases or increases the number of registers as its name says.
//! - V-16: the registers of all roles after their last setmaxnreg fit the CTA's registers at entry.
//!
//! Declarations:
//! - V-17: a CTA has 32 to 1024 threads in whole warps; a cluster has 1 to 16 CTAs; an SM has 1 to 32 CTAs and at
//!   most 2048 threads.
//! - V-18: named barriers have different numbers from 1 to 15 and whole warps, no more than the CTA has.
//! - V-19: regions are aligned to a power of two up to 1024, and share bytes only where one is declared to overlay the
//!   other.
//! - V-20: shared memory is at most 227 KiB.
//! - V-21: an access at a constant shared address lies in its region and is aligned.
//! - V-22: a constant address that an mbarrier operation uses is the address of an mbarrier, initialised for the
//!   declared arrivals; nothing else touches mbarriers.
//! - V-23: names of the kernel, its parameters and its roles are identifiers; the kernel's name is not one that PTX
//!   needs itself; no two parameters or roles have the same name.
//! - V-24: the box of a tensor map is one that the driver encodes.
//!
//! Found by the builder:
//! - V-25: a token that a block acquires (a stage of a pipeline, a staged tile of a staging buffer) is given back in
//!   that block, once; an operation that it begins (a product, the sum of a chain) is not left to a branch or a loop
//!   within.
//! - V-26: products in flight are waited for.
//! - V-27: the shapes of a product, of a tile and its tensor map, of a fragment and its tile fit.
//! - V-28: roles are declared in the prologue.
//! - V-29: as many warps release a pipeline's stages as the pipeline was declared for. If warps release in a branch, or
//!   if each warp releases only some stages, only the simulator can tell.
//!
//! The verifier does not check properties that depend on data or on time: whether a condition that is declared uniform
//! is uniform, bounds of computed addresses, races, phases, missing waits. The simulator checks these.

mod declarations;
mod errors;
mod fault;
mod walk;

pub use errors::VerifyErrors;
pub use fault::{Fault, VerifyError};

use crate::Kernel;

/// Checks every rule.
///
/// # Errors
/// All violations, in the order of the kernel.
pub fn verify(kernel: &Kernel) -> Result<(), VerifyErrors> {
    let mut errors = declarations::check(kernel);
    errors.append(&mut walk::check(kernel));
    errors.extend(kernel.misuse.iter().cloned());
    if errors.is_empty() { Ok(()) } else { Err(VerifyErrors(errors)) }
}
