//! The tile of a forward kernel: how a CTA computes. `budget.rs` computes the registers and shared memory that it
//! takes.

use std::fmt;

use fa3_types::{Dtype, Problem, ValueLayout};

use crate::packed::PageLayout;

/// The order of products and softmax in a consumer warpgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pipeline {
    /// QKᵀ, softmax and PV one after the other (Algorithm 1).
    Serial,
    /// QKᵀ of one block and PV of the previous block are issued together, and the softmax waits for both: Algorithm 2
    /// with line 14 before line 13. The softmax overlaps the products of other warpgroups. In 16 bits, rescaling is
    /// lazy.
    Paired,
    /// The softmax of one block overlaps PV of the previous block (Algorithm 2): S and P are live together.
    TwoStage,
    /// The softmax of one block overlaps QKᵀ of the next block and PV of the previous one (Algorithm 4): two S and P
    /// are live together.
    ThreeStage,
}

/// The threads that load Q, K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// A producer warpgroup (§3.1 of the paper: warp specialisation), which takes few registers and waits only for free
    /// stages.
    Producer,
    /// One thread of the consumers, in addition to computing. It loads a block as soon as all consumers have read the
    /// previous block of its stage.
    Consumers,
}

/// The element types of Q, K, V and P.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f16 or bf16.
    Half,
    /// 16-bit products of K and V that are e4m3 in memory (mixed input). Separate warps dequantize each block, so that
    /// consumers compute as with [`Precision::Half`].
    Converted {
        /// Whether Q is e4m3 in memory, too. Products then have the type of O.
        q: bool,
    },
    /// e4m3 products. 8-bit products read V along the keys (K-major): producer warps transpose V, unless it is
    /// transposed in memory. The tensor core keeps about 13 fraction bits of its sums, so each block's PV is added to O
    /// in binary32.
    Fp8(Fp8Inputs),
}

/// The properties of e4m3 inputs on which the code depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Inputs {
    /// Layout of V in memory.
    pub v_layout: ValueLayout,
    /// Whether blocks of rows have scales; otherwise heads have.
    pub block_scales: bool,
    /// Whether channels of V have scales and means, in place of its heads or blocks.
    pub v_channels: bool,
}

impl Fp8Inputs {
    /// V in rows, and scales per head.
    pub const HEADS: Fp8Inputs =
        Fp8Inputs { v_layout: ValueLayout::Rows, block_scales: false, v_channels: false };

    /// The same inputs, with V transposed.
    #[must_use]
    pub fn transposed(self) -> Fp8Inputs {
        Fp8Inputs { v_layout: ValueLayout::Transposed, ..self }
    }
}

impl Precision {
    /// The precision of a problem's tensors.
    pub fn of(problem: &Problem) -> Precision {
        if problem.converts_keys() {
            return Precision::Converted { q: false };
        }
        if problem.dtype() != Dtype::E4m3 {
            return Precision::Half;
        }
        let precision = Precision::Fp8(Fp8Inputs {
            v_layout: problem.v_layout(),
            block_scales: problem.has_block_scales(),
            v_channels: problem.has_v_channels(),
        });
        // If three producer warps load row by row, none is left to transpose V.
        if PageLayout::are_gathered(problem) { precision.converted() } else { precision }
    }

    /// The precision that dequantizes e4m3 with scales per head; any other precision is returned unchanged. Split-KV
    /// kernels use it: they are memory-bound, and dequantized V need not be transposed.
    #[must_use]
    pub(super) fn converted(self) -> Precision {
        if self == Precision::Fp8(Fp8Inputs::HEADS) { Precision::Converted { q: true } } else { self }
    }

    /// Whether a kernel of this precision computes a problem of precision `problem`. A kernel for transposed V takes V
    /// in rows as well, because another kernel can transpose V first.
    pub(super) fn takes(self, problem: Precision) -> bool {
        match (self, problem) {
            (Precision::Fp8(takes), Precision::Fp8(has)) => takes == has || takes == has.transposed(),
            (Precision::Half | Precision::Converted { .. } | Precision::Fp8(_), _) => self == problem,
        }
    }

    /// Whether K and V are e4m3, and products are of 16 bits.
    pub fn is_converted(self) -> bool {
        matches!(self, Precision::Converted { .. })
    }

    /// Whether products are of e4m3.
    pub fn is_fp8(self) -> bool {
        matches!(self, Precision::Fp8(_))
    }

    /// Whether V is e4m3 and warps of the producer transpose it.
    pub fn transposes_v(self) -> bool {
        matches!(self, Precision::Fp8(Fp8Inputs { v_layout: ValueLayout::Rows, .. }))
    }

    /// The number of keys of a block is a multiple of this: the depth of a product. With block scales it is 64, so that
    /// a block's keys divide the 128 keys that share a scale.
    pub(super) fn key_multiple(self) -> u32 {
        match self {
            Precision::Half => 16,
            // Each of four warps dequantizes a quarter of the keys, 8 or 16 keys at a time.
            Precision::Converted { .. } => 64,
            Precision::Fp8(Fp8Inputs { block_scales: false, .. }) => 32,
            Precision::Fp8(Fp8Inputs { block_scales: true, .. }) => 64,
        }
    }

    /// Bytes of an element as it is multiplied.
    pub fn bytes(self) -> u32 {
        match self {
            Precision::Half | Precision::Converted { .. } => 2,
            Precision::Fp8(_) => 1,
        }
    }
}

/// The tile of a forward kernel. [`CtaTile::check`] says whether a kernel can have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CtaTile {
    /// The largest head dimension of Q and K. Smaller ones are padded with zeros.
    pub head_dim: u32,
    /// The largest head dimension of V and O. Warpgroups that share rows divide its columns
    /// ([`CtaTile::column_groups`]).
    pub head_dim_v: u32,
    /// Whether scores have a second product, `qv` times V ([`Problem::qv`]).
    pub qv: bool,
    /// The element types.
    pub precision: Precision,
    /// Query rows per tile, M.
    pub tile_m: u32,
    /// Keys per block, N.
    pub tile_n: u32,
    /// Pipeline stages of K and V. Where other warps than the producer's dequantize K and V, each has
    /// [`CONVERTED_SLOTS`](super::CONVERTED_SLOTS) dequantized blocks as well.
    pub stages: u32,
    /// Number of consumer warpgroups: one for each 64 rows, or two that share 64 rows and have half of O's columns
    /// each.
    pub consumers: u32,
    /// Which threads issue the loads.
    pub loads: Loads,
    /// The order of products and softmax.
    pub pipeline: Pipeline,
    /// Ping-pong: warpgroups take turns on the tensor cores (§3.1 of the paper), so that the softmax of each overlaps
    /// the GEMMs of the others.
    pub ping_pong: bool,
}

impl CtaTile {
    /// Whether rescaling is lazy: the softmax computes a new row_max only for the first block, and where exponentials
    /// relative to the old row_max have become large. For all other blocks it skips the comparisons and the rescaling
    /// of O. The only effect on P is that it may be rounded relative to another power of 2. Without lazy rescaling
    /// every block has a new row_max, as in the paper.
    pub fn rescales_lazily(&self) -> bool {
        self.pipeline == Pipeline::Paired && !self.precision.is_fp8()
    }

    /// Warpgroups that share 64 rows, each with a part of O's columns: one, or two where O does not fit one warpgroup's
    /// registers. If there are two, the first computes all scores and hands P to the second.
    pub fn column_groups(&self) -> u32 {
        self.consumers.saturating_mul(64).checked_div(self.tile_m).unwrap_or(1).max(1)
    }

    /// Whether warps load e4m3 rows of K and V to registers and store them converted: the producer's warps, and without
    /// `qv` also the second consumer's, which convert V. Where two warpgroups share rows, shared memory has no room for
    /// blocks as they are loaded, and registers have none for more warps.
    pub fn converts_rows(&self) -> bool {
        self.precision.is_converted() && self.column_groups() > 1
    }

    /// Columns of O per warpgroup.
    pub fn columns(&self) -> u32 {
        self.head_dim_v / self.column_groups()
    }

    /// Whether V is loaded before the next block of K. If K has one stage, the next block waits until this block's
    /// scores are complete, and a serial pipeline needs V by then. With `qv`, scores need V as well.
    pub fn loads_v_first(&self) -> bool {
        self.qv || (self.stages == 1 && self.pipeline == Pipeline::Serial)
    }

    /// This tile with its keys per block rounded down to a multiple of 64 (fewer than 64 stay), as paged K and V need
    /// it.
    #[must_use]
    pub fn of_whole_blocks(self) -> CtaTile {
        CtaTile { tile_n: (self.tile_n / 64 * 64).max(self.tile_n.min(64)), ..self }
    }

    /// This tile for pages of `rows` rows: blocks have 64 or 128 keys, so that they take few copies. If a copy moves
    /// fewer than 32 rows, blocks of 128 keys and several panels take more copies than their products can hide. On an
    /// H100, prefill from pages of 16 rows ran at 0.70 of a contiguous cache's speed. Tiles of 192 rows and 64 keys
    /// hide the copies.
    #[must_use]
    pub fn of_pages(self, rows: usize) -> CtaTile {
        let whole = self.of_whole_blocks();
        let takes_many =
            !rows.is_multiple_of(32) && whole.tile_n == 128 && (65..=128).contains(&whole.head_dim);
        if takes_many && whole.consumers == 2 && whole.stages == 3 && self.precision == Precision::Half {
            return CtaTile { tile_m: 192, tile_n: 64, consumers: 3, ..whole };
        }
        whole
    }

    /// This tile for keys that are loaded row by row. Three consumers leave the loading warps few registers, unless
    /// blocks have 64 keys.
    #[must_use]
    pub fn of_gathered_rows(self) -> CtaTile {
        let whole = self.of_whole_blocks();
        match whole.consumers {
            3 if whole.tile_n == 128 => CtaTile { tile_n: 64, stages: 2 * whole.stages, ..whole },
            _ => whole,
        }
    }

    /// This dequantizing tile for e4m3 Q, which takes the memory of a block of K.
    #[must_use]
    pub(super) fn of_converted_queries(self) -> CtaTile {
        CtaTile { precision: Precision::Converted { q: true }, stages: (self.stages - 1).max(1), ..self }
    }

    /// This tile for other e4m3 inputs. If blocks of keys share scales, a KV block of the tile lies within one such
    /// block, and may have fewer keys.
    #[must_use]
    pub fn of_inputs(self, inputs: Fp8Inputs) -> CtaTile {
        let precision = Precision::Fp8(inputs);
        let multiple = precision.key_multiple();
        CtaTile { precision, tile_n: self.tile_n / multiple * multiple, ..self }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fp8Inputs { v_layout, block_scales, v_channels } = match *self {
            Precision::Half => return f.write_str("16 bits"),
            Precision::Converted { q: false } => return f.write_str("16 bits, converted from e4m3"),
            Precision::Converted { q: true } => return f.write_str("16 bits, Q, too, converted from e4m3"),
            Precision::Fp8(inputs) => inputs,
        };
        f.write_str("FP8")?;
        if v_layout == ValueLayout::Transposed {
            f.write_str(" with V transposed")?;
        }
        if block_scales {
            f.write_str(" with scales of blocks")?;
        }
        if v_channels {
            f.write_str(" with scales of V's channels")?;
        }
        Ok(())
    }
}

impl fmt::Display for CtaTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {} stages", self.tile_m, self.tile_n, self.stages)?;
        match self.pipeline {
            Pipeline::Serial => {}
            Pipeline::Paired => write!(f, ", QK and PV issued together")?,
            Pipeline::TwoStage => write!(f, ", softmax under PV")?,
            Pipeline::ThreeStage => write!(f, ", softmax under QK and PV")?,
        }
        if self.precision != Precision::Half {
            write!(f, ", {}", self.precision)?;
        }
        if self.rescales_lazily() {
            write!(f, ", lazy rescaling")?;
        }
        if self.qv {
            write!(f, ", qv")?;
        }
        if self.column_groups() > 1 {
            write!(f, ", columns of O shared by {} warpgroups", self.column_groups())?;
        }
        if self.loads == Loads::Consumers {
            write!(f, ", no producer")?;
        }
        if self.ping_pong {
            write!(f, ", ping-pong")?;
        }
        Ok(())
    }
}
