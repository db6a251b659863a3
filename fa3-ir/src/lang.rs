//! The language that kernels are written in: kernels import all of this module. The crate's root has kernels as data.
//!
//! ```
//! use fa3_ir::lang::*;
//!
//! let kernel = Kernel::build("double", Launch::threads(32), |b| {
//!     let at = b.tid().mad_wide(4, b.param_pointer("x", Elem::F32));
//!     b.store(at, b.load::<F32>(at) * 2.0);
//! });
//! assert_eq!(fa3_ir::verify(&kernel), Ok(()));
//! ```

// Kernels, warps, memory.
pub use crate::build::{Builder, TensorMap};
pub use crate::descriptor::Swizzle;
pub use crate::kernel::{Elem, Kernel, Launch, Role};
pub use crate::smem::Region;

// Values.
pub use crate::address::{GlobalAddr, SharedAddr};
pub use crate::lane::{Bits, Number, Select};
pub use crate::ty::{B16, B32, B64, Class, F32, Pred, Stored, Word};
pub use crate::value::{Arg, Condition, Reg, U32, U64, V, Var};

// Observations.
pub use crate::inst::observe::Observed;

// Copies, fences, barriers.
pub use crate::inst::fence::FenceInst;
pub use crate::inst::tma::{Coords, LoadOptions};
pub use crate::tensor::BoxShape;
pub use crate::tile::warpgroup_barriers::{WarpgroupBarrier, WarpgroupBarriers};

// Tiles, pipelines, and staging buffers of TMA stores.
pub use crate::tile::copy::TileMap;
pub use crate::tile::pipeline::{
    Consumer, CpAsyncFence, CpAsyncPipeline, CpAsyncProducer, EmptyStage, FullStage, HeldStage, Pipeline,
    Producer, Rounds, StageHandoff,
};
pub use crate::tile::staging_buffer::{StagedTile, StagingBuffer, StagingBuffers};
pub use crate::tile::{Matrix, Tile, TileShape};

// Products and fragments.
pub use crate::inst::wgmma::WgmmaType;
pub use crate::tile::frag::{AFrag, At, Frag, Half};
pub use crate::tile::gemm::{Chain, Destination, Fresh, InFlight, Left, gemm};
pub use crate::tile::quad::QuadTranspose;
pub use crate::tile::rows::{Rows, RowsVar};
pub use crate::tile::store::Packed;
