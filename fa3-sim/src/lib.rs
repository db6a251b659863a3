//! Runs kernels of fa3-ir on the CPU and finds what is wrong with them.
//!
//! ```text
//! (kernel, arguments, grid, schedule, memory) → memory, findings, counters
//! ```
//!
//! It answers one question: does this kernel compute the right thing, whatever the timing? A Hopper kernel is a
//! protocol of warps, TMA copies and wgmma that run asynchronously, and most of its bugs are silent on the hardware:
//! code with a missing fence works until it does not. Here every access is checked against the synchronisation that
//! orders it. One run finds a race even if its results are right, and names the line, the rule, and what is missing.
//!
//! ```
//! use fa3_ir::lang::*;
//! use fa3_ir::*;
//! use fa3_sim::{Memory, Policy, Rule, Simulation};
//!
//! // A warp writes 128 bytes of shared memory, which the tensor memory accelerator copies to global memory.
//! let kernel = Kernel::build("store", Launch::threads(32), |b| {
//!     let (y, tile) = (b.param_pointer("y", Elem::F32), b.region("tile", 128, 128));
//!     let lane = b.lane_id();
//!     b.store(lane.mad(4, b.address(tile)), 1.0);
//!     // Missing: b.fence(FenceInst::ProxyAsyncShared);
//!     b.warp_sync();
//!     b.if_lanes(lane.eq(0), || {
//!         b.bulk_store(y, tile, 128);
//!         b.bulk_commit();
//!         b.bulk_wait_read(0);
//!     });
//! });
//!
//! let mut memory = Memory::new();
//! let y = memory.alloc("y", 128);
//! memory.expect_written_once(y);
//! let args = vec![ArgValue::Pointer(y.address())];
//! let outcome = Simulation::new(&kernel).args(args).policy(Policy::Random(7)).run(&mut memory)?;
//!
//! println!("{}", outcome.findings[0]);
//! assert_eq!(outcome.findings[0].rule, Rule::W4);
//! assert!(outcome.findings[0].missing.unwrap().starts_with("fence.proxy.async"));
//! # Ok::<(), fa3_sim::SimError>(())
//! ```
//!
//! [A kernel of your own][own] goes from an empty crate to a kernel that is right under twenty schedules. What its
//! probes show is in [`Outcome::probes`].
//!
//! [own]: https://github.com/fa3-rs/fa3/blob/main/docs/a-kernel-of-your-own.md
//!
//! How it works:
//! - A warp is 32 lanes in step; registers, shared and global memory know which of their lanes and bytes are
//!   initialised. A kernel is decoded into flat steps first.
//! - Copies, products and completions are agents of their own. A [`Policy`] decides when they happen, within the rules,
//!   and which warp runs next: eagerly, as late as possible, or at random from a seed, which a finding prints. Data in
//!   flight are poisoned. The result of a correct kernel is the same bit by bit.
//! - Races are found by happens-before, not by luck. Every warp and every asynchronous agent has a component of a
//!   vector clock, separately for the generic and the asynchronous proxy, and the last accesses to every 16 bytes of
//!   memory are remembered. If synchronisation does not depend on data, one schedule shows the races of all schedules.
//! - Lanes of a warp are agents, too ([`Rule::Lanes`]): byte by byte, an access is checked against the accesses of
//!   other lanes. `bar.warp.sync` and wider barriers order lanes, and so does an mbarrier at which some lanes arrive
//!   and for which others wait. Shuffles, votes and warpgroup instructions do not. The arrival of one lane releases the
//!   work of that lane, and only the part of the other lanes' work that a barrier has ordered before it. Lanes of one
//!   store may write equal values to the same bytes.
//! - Rules that are not about the order of accesses (registers of products, phases of mbarriers, bulk groups, named
//!   barriers) have their own checks. [`Rule`] lists all rules.
//! - Arithmetic is in [`data`]: pure functions, with the tensor core as it was measured.
//!
//! What it does not model:
//! - time;
//! - the allocation of registers (registers gained by setmaxnreg are undefined, but in the IR registers have no
//!   numbers, so no kernel can break this);
//! - divergence within a warp beyond structured branches;
//! - the scope of a remote arrival at an mbarrier: here it always releases in the scope of the cluster;
//! - what single lanes know: if one lane waits for a copy or acquires a flag, its warp counts as having waited; and if
//!   one lane has initialised an mbarrier, all lanes of its warp may use it;
//! - the tile within a region for which an address was meant: an element outside its tile's rows or columns is found
//!   only if it lies in no region, is not initialised, or races.
#![forbid(unsafe_code)]

// The interface of the simulator.
mod finding;
mod loaded;
mod memory;
mod probe;
mod rule;
mod schedule;
mod simulation;
mod steps;
mod timeline;
pub mod trace;

mod counters;
pub mod data;

// The kernel, decoded.
mod decoded;

// The order of accesses.
mod clock;
mod lanes;
mod shadow;

// The parts of the simulated machine.
mod barrier;
mod copies;
mod costs;
mod flight;
mod mbarrier;
mod shared;
mod warp;

// The simulated machine.
mod exec;
mod machine;

// Reports.
mod deadlock;
mod report;

pub use costs::{Constant, Costs};
pub use counters::{Count, Counters, Line, Wavefronts};
pub use finding::{Finding, Replay, Site};
pub use loaded::Loaded;
pub use memory::{Buffer, Memory};
pub use probe::Probe;
pub use rule::Rule;
pub use schedule::Policy;
pub use simulation::{Mode, Outcome, SimError, Simulation};
pub use steps::{ProgramOutcome, ProgramSimulation};
pub use timeline::{Activity, Cause, Engine, EngineTrack, RoleTrack, Span, Timeline};
pub use trace::Trace;

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
