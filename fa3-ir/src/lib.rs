//! The language that the GPU kernels are written in.
//!
//! ```text
//! kernel = parameters, shared memory, named barriers + prologue ; one of its roles for each warp
//! ```
//!
//! A kernel is a Rust function that calls a [`Builder`](lang::Builder). The result, a [`Kernel`], is plain data:
//! registers of five classes ([`Ty`]), statements with structured control flow ([`Node`]), and instructions ([`Inst`])
//! that are PTX's own, for sm_90a. Here, [`verify()`] checks it, its `Display` shows it with the source line of every
//! statement, and [`ptx::emit`] turns it into what the driver compiles. A simulator, or whatever else takes kernels,
//! matches on the same enums.
//!
//! - Handles are typed: [`V<F32>`](lang::V) is a value, assigned once; [`Var<F32>`](lang::Var) a variable, the state
//!   that a loop carries. Mixing classes does not compile. Rust numbers are constants.
//! - An address knows its space: 64-bit registers address global memory, 32-bit registers and
//!   [`Region`]s shared memory.
//! - Pure operations of a lane are rows of one table ([`LaneOp`]), from which come signature, PTX and builder method.
//!   Everything else is a family of instructions: one enum and one file each.
//! - All lanes of a warp run together. Where they may diverge, the kernel says so:
//!   [`Builder::if_lanes`](lang::Builder::if_lanes), [`Builder::guarded`](lang::Builder::guarded).
//! - [Probes](lang::Builder::probe) and [assertions](lang::Builder::assert) are executed by a simulator only.
//!
//! [A kernel of your own][own] goes from an empty crate to the simulator and to a GPU. [How to write a kernel][write]
//! explains the language.
//!
//! [own]: https://github.com/fa3-rs/fa3/blob/main/docs/a-kernel-of-your-own.md
//! [write]: https://github.com/fa3-rs/fa3/blob/main/docs/write-a-kernel.md
//!
//! ```
//! use fa3_ir::{Elem, Kernel, Launch, ptx};
//! use fa3_ir::lang::F32;
//!
//! // y = 2 x + 1, one element a thread.
//! let kernel = Kernel::build("line", Launch::threads(256), |b| {
//!     let (x, y, n) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32), b.param_u32("n"));
//!     let i = b.cta_x().mad(256, b.tid());
//!     b.if_lanes(i.lt(n), || {
//!         let [from, to] = [x, y].map(|array| i.mad_wide(4, array));
//!         b.store(to, b.load::<F32>(from).fma(2.0, 1.0));
//!     });
//! });
//!
//! println!("{kernel}");
//! let ptx = ptx::emit(&kernel).expect("a sound kernel");
//! assert!(ptx.text.contains("fma.rn.f32 %f10, %f9, 0f40000000, 0f3F800000;"));
//! assert_eq!((ptx.threads, ptx.smem_bytes), (256, 0));
//! ```
#![forbid(unsafe_code)]

// Operands.
mod address;
mod algebra;
mod ty;
mod value;

// Instructions.
mod descriptor;
mod inst;
mod lane;
mod names;

// Kernels.
mod build;
mod kernel;
mod smem;
mod tensor;
mod watch;

// Launches.
mod args;
mod program;

// The language of kernels.
pub mod lang;
mod tile;

// Output of kernels.
mod print;
pub mod ptx;
mod unobserved;
pub mod verify;

pub use address::{Address, GlobalAddr, SharedAddr, SharedBase};
pub use args::{ArgError, ArgValue, check_args, check_grid};
pub use build::TensorMap;
pub use descriptor::{Layout, Swizzle, descriptor_address};
pub use inst::barrier::{BarrierInst, BarrierRef};
pub use inst::cluster::ClusterInst;
pub use inst::fence::FenceInst;
pub use inst::mbarrier::MbarrierInst;
pub use inst::mem::{AtomicOp, Cache, MemInst};
pub use inst::misc::MiscInst;
pub use inst::observe::ObserveInst;
pub use inst::special::Special;
pub use inst::tma::{LoadOptions, TmaInst};
pub use inst::warp::{ShflMode, VoteMode, WarpInst};
pub use inst::wgmma::{Major, Mma, ScaleD, WgmmaA, WgmmaInst, WgmmaType};
pub use inst::{Access, Inst};
pub use kernel::{
    Barrier, BarrierInfo, Block, Elem, Kernel, Launch, Node, Param, ParamInfo, ParamKind, Role, RoleBody,
    Source, Stmt,
};
pub use lane::{LaneInst, LaneOp};
pub use program::{Buffer, BufferId, BufferRole, BuildKernel, Passed, Program, Step};
pub use ptx::Ptx;
pub use smem::{Region, RegionInfo, RegionKind, SmemPlan};
pub use tensor::{BoxShape, TensorMapError, TensorView};
pub use ty::Ty;
pub use value::{Condition, Imm, Operand, Value, ValueInfo};
pub use verify::{Fault, VerifyError, VerifyErrors, verify};

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
