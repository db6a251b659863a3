//! The registers and shared memory that a tile takes of an SM.

use std::fmt;

use fa3_types::Problem;

use super::{CtaTile, Loads, Pipeline, Precision, TileError};
use crate::DeviceLimits;

/// Registers of one consumer thread that hold tiles, 32 bits each. Each thread of a warpgroup holds
/// rows · columns / 128 elements of its warpgroup's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulators {
    /// S in fp32, of two blocks in a three-stage pipeline.
    pub s: u32,
    /// P in the input type, as the left operand of PV.
    pub p: u32,
    /// O in fp32.
    pub o: u32,
    /// The PV of a block in flight, with the row sums' columns, in fp32; of e4m3 only. In a serial pipeline, the part
    /// of it that the registers of S do not hold.
    pub pv: u32,
}

impl Accumulators {
    /// All of them: they live at the same time, in a serial pipeline nearly so.
    pub fn total(self) -> u32 {
        [self.p, self.o, self.pv].into_iter().fold(self.s, u32::saturating_add)
    }
}

/// Registers a thread (PTX `setmaxnreg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Every thread's when the kernel starts.
    pub entry: u32,
    /// The producer's after it released those that it does not need, if there is a producer.
    pub producer: Option<u32>,
    /// A converting thread's, if there are warps that convert K and V.
    pub converter: Option<u32>,
    /// The consumers' after they took more; without a producer, those they have at the start.
    pub consumer: u32,
    /// The second consumer's, if it has the rows of the first: it has no scores.
    pub second: Option<u32>,
}

/// Shared memory of a tile in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Smem {
    /// One tile of Q, and of `qv`, if there is one.
    pub q: u32,
    /// All stages of K.
    pub k: u32,
    /// All stages of V; of e4m3 transposed, and as it is loaded if that is not so. Of K and V that are converted, what
    /// is loaded and what is converted.
    pub v: u32,
    /// P and two factors of its rows, if one warpgroup hands them over to another.
    pub p: u32,
}

/// Barriers, and the bytes lost to aligning tiles to 1024, the period of the 128-byte swizzle. No kernel of the table's
/// tiles uses more (`fa3-cuda/tests/cuda/budget.rs`).
pub const SMEM_RESERVE: u32 = 1024;

/// Registers of a consumer thread in addition to its tiles: row max and row sum of its two rows, descriptors, barrier
/// addresses, loop counters, mask bounds, temporaries of the softmax. The table's densest tile, 192 x 128 for head_dim
/// 64, leaves exactly this many.
pub const REGISTER_RESERVE: u32 = 32;

/// [`REGISTER_RESERVE`] for e4m3, whose row sums are a column of PV. 128 x 128 at head_dim 128 leaves exactly this
/// many.
pub const FP8_REGISTER_RESERVE: u32 = 20;

/// Columns of transposed e4m3 V in addition to V's own, as few as a product computes: one of ones, whose PV is the row
/// sum, and zeros.
pub const ROW_SUM_COLS: u32 = 8;

/// Converted blocks of K, and of V, in shared memory: one that is read and one that is written.
pub const CONVERTED_SLOTS: u32 = 2;

/// Extra registers of a consumer that also issues loads: its positions in three rings, the blocks of K and V that were
/// loaded last, the first block of the tile, its sequence and its head.
pub const LOADING_RESERVE: u32 = 10;

/// An instruction cannot name more.
const MOST_REGISTERS: u32 = 255;

/// No SM holds more, however small they are.
const MOST_STAGES: u32 = 16;

/// Elements that an instruction sums over.
const DEPTH: u32 = 16;

/// Columns that an instruction computes, at most.
const WIDEST: u32 = 256;

/// Columns of 16 bits in a panel of a tile in shared memory, at most.
const PANEL: u32 = 64;

/// The largest head_dim: no SM holds a block with more columns.
const DEEPEST: u32 = 1024;

/// Registers of one CTA (and of one SM).
pub const REGISTER_POOL: u32 = 65536;

impl Smem {
    /// All of it, with [`SMEM_RESERVE`].
    pub fn total(self) -> u32 {
        [self.q, self.k, self.v, self.p].into_iter().fold(SMEM_RESERVE, u32::saturating_add)
    }
}

impl fmt::Display for Smem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KiB:", self.total() >> 10)?;
        let [q, k, v, p, reserve] = [self.q, self.k, self.v, self.p, SMEM_RESERVE].map(|bytes| bytes >> 10);
        write!(f, " Q {q}, K {k}, V {v}, ")?;
        if self.p > 0 {
            write!(f, "P {p}, ")?;
        }
        write!(f, "reserve {reserve}")
    }
}

impl CtaTile {
    /// Threads of a CTA: the consumers, a producer warpgroup if there is one, and those that convert.
    pub fn threads(&self) -> u32 {
        let producers = if self.loads == Loads::Producer { 1 } else { 0 };
        self.consumers.saturating_add(producers).saturating_add(self.converters()).saturating_mul(128)
    }

    /// Warpgroups that convert K and V: one for both, or one each beside a lone consumer, so that blocks are read as
    /// fast as memory brings them. A product of more than 192 columns is not compiled for the registers that 512
    /// threads have at the start.
    pub fn converters(&self) -> u32 {
        match (self.precision, self.consumers) {
            (Precision::Converted { .. }, 1) if self.head_dim_v <= 192 => 2,
            (Precision::Converted { .. }, _) => 1,
            (Precision::Half | Precision::Fp8(_), _) => 0,
        }
    }

    /// Registers that hold tiles. Each consumer warpgroup computes 64 rows of S, P and its columns of O.
    pub fn accumulators(&self) -> Accumulators {
        let p = self.tile_n / (8 / self.precision.bytes());
        let blocks = if self.pipeline == Pipeline::ThreeStage { 2 } else { 1 };
        let pv = match self.precision {
            Precision::Half | Precision::Converted { .. } => 0,
            Precision::Fp8(_) => (self.pv_cols() + ROW_SUM_COLS) / 2,
        };
        // In turn with S it takes the registers that S had.
        let pv = if self.pipeline == Pipeline::Serial { pv.saturating_sub(self.tile_n / 2) } else { pv };
        Accumulators { s: blocks * (self.tile_n / 2), p, o: self.columns() / 2, pv }
    }

    /// Columns of O for which PV of e4m3 is computed at a time: all, or a half where registers are short.
    pub fn pv_cols(&self) -> u32 {
        if self.head_dim_v > 128 { self.head_dim_v / 2 } else { self.head_dim_v }
    }

    /// Registers a thread. At the start the pool is shared evenly, in units of 8.
    pub fn registers(&self) -> Registers {
        self.registers_of(1, false)
    }

    /// The same where an SM has registers for so many CTAs, one or two, and where the producer loads keys row by row.
    pub fn registers_of(&self, ctas: u32, gathers: bool) -> Registers {
        let entry = (REGISTER_POOL / ctas.max(1) / self.threads().max(1) / 8 * 8).min(256);
        let converts = self.precision.is_converted();
        // More for the warps that transpose V, or that find rows of tiles of `qv`.
        let busy = self.qv || self.precision.transposes_v();
        let hands_over = self.column_groups() > 1;
        let (producer, consumer) = match (self.loads, self.consumers) {
            // Together as many as at the start.
            (Loads::Producer, 1) if ctas > 1 => (Some(56), 200),
            (Loads::Consumers, _) => (None, entry),
            (Loads::Producer, 1) => (Some(56), 256),
            (Loads::Producer, 2) if converts => (Some(56), 200),
            (Loads::Producer, 2) if hands_over => (Some(56), 240),
            // Warps that find rows have several copies under way only with so many.
            (Loads::Producer, 2) if gathers => (Some(56), 224),
            (Loads::Producer, 2) if busy => (Some(40), 232),
            (Loads::Producer, 2) => (Some(24), 240),
            (Loads::Producer, _) if gathers && self.accumulators().total() <= 112 => (Some(56), 152),
            (Loads::Producer, _) => (Some(32), 160),
        };
        // At most two warpgroups beside one consumer, and one beside two.
        let converter = converts.then_some(if self.consumers == 1 { 96 } else { 56 });
        Registers { entry, producer, converter, consumer, second: hands_over.then_some(208) }
    }

    /// Shared memory. O needs none: it goes from registers to global memory.
    pub fn smem(&self) -> Smem {
        let tile =
            |rows: u32, columns: u32| rows.saturating_mul(columns).saturating_mul(self.precision.bytes());
        let keys = self.stages.saturating_mul(self.tile_n);
        let (loaded, transposed) =
            (tile(keys, self.head_dim_v), tile(keys, self.head_dim_v.saturating_add(ROW_SUM_COLS)));
        if let Precision::Converted { q: is_loaded } = self.precision {
            // What is loaded has half of the bytes.
            let slots = CONVERTED_SLOTS.saturating_mul(self.tile_n);
            let both = |columns| (tile(keys, columns) / 2).saturating_add(tile(slots, columns));
            let q = tile(self.tile_m, self.head_dim);
            return Smem {
                q: if is_loaded { q.saturating_add(q / 2) } else { q },
                k: both(self.head_dim),
                v: both(self.head_dim_v),
                p: 0,
            };
        }
        let v = match self.precision {
            Precision::Half | Precision::Converted { .. } => loaded,
            Precision::Fp8(_) if self.precision.transposes_v() => loaded.saturating_add(transposed),
            Precision::Fp8(_) => transposed,
        };
        let latent = if self.qv { tile(self.tile_m, self.head_dim_v) } else { 0 };
        let q = tile(self.tile_m, self.head_dim).saturating_add(latent);
        let p = match self.column_groups() {
            1 => 0,
            _ => tile(self.tile_m, self.tile_n).saturating_add(self.tile_m.saturating_mul(8)),
        };
        Smem { q, k: tile(keys, self.head_dim), v, p }
    }

    /// Whether the tile is for the inputs of `problem` and large enough for its head dimensions.
    pub(super) fn takes(&self, problem: &Problem) -> bool {
        self.precision.takes(Precision::of(problem))
            && self.qv == problem.qv().is_some()
            && self.holds(problem)
    }

    /// Whether the tile is large enough for the head dimensions of `problem`.
    pub(super) fn holds(&self, problem: &Problem) -> bool {
        problem.head_dim() <= self.head_dim as usize && problem.head_dim_v() <= self.head_dim_v as usize
    }

    /// Whether the tensor cores can compute the tile and an SM of the device can hold it.
    ///
    /// # Errors
    /// Refused for what the instructions cannot do (PTX ISA, `wgmma.mma_async`: 64 rows, a depth of 16 elements, a
    /// width of up to 256 in multiples of 8):
    /// - [`TileError::Shape`] unless each of one to three warpgroups has 64 rows, or two have the same, and N is a
    ///   width of QKᵀ's and a multiple of the depth of PV's;
    /// - [`TileError::HeadDim`] unless head_dim is a multiple of the depth and a warpgroup's part of head_dim_v a
    ///   width.
    ///
    /// [`TileError::Columns`] for what warpgroups of the same rows cannot do, [`TileError::Latent`] for what no loop
    /// with `qv` does.
    ///
    /// [`TileError::PingPong`] unless there are several warpgroups to take turns.
    ///
    /// [`TileError::Registers`] and [`TileError::SharedMemory`] where the tile needs more than there is.
    pub fn check(&self, limits: &DeviceLimits) -> Result<(), TileError> {
        self.check_instructions()?;
        self.check_warpgroups()?;
        let loading = if self.loads == Loads::Consumers { LOADING_RESERVE } else { 0 };
        let reserve = match self.precision {
            Precision::Half | Precision::Converted { .. } => REGISTER_RESERVE,
            Precision::Fp8(_) => FP8_REGISTER_RESERVE,
        };
        let needed = self.accumulators().total() + reserve + loading;
        let available = self.registers().consumer.min(MOST_REGISTERS);
        if needed > available {
            return Err(TileError::Registers { needed, available });
        }
        let (needed, available) = (self.smem().total(), limits.smem_bytes);
        if needed > available {
            return Err(TileError::SharedMemory { needed, available });
        }
        Ok(())
    }

    fn check_instructions(&self) -> Result<(), TileError> {
        let CtaTile { tile_m, tile_n, stages, consumers, head_dim, head_dim_v, .. } = *self;
        let fits =
            |columns: u32, multiple, most| (1..=most).contains(&columns) && columns.is_multiple_of(multiple);
        let groups = self.column_groups();
        let warpgroups =
            (1..=3).contains(&consumers) && (tile_m == 64 * consumers || (tile_m == 64 && groups == 2));
        if !warpgroups || !fits(tile_n, DEPTH, WIDEST) || !(1..=MOST_STAGES).contains(&stages) {
            return Err(TileError::Shape { tile_m, tile_n, stages, consumers });
        }
        let (most, most_v) = (DEEPEST, groups * WIDEST);
        if !fits(head_dim, DEPTH, most) || !fits(head_dim_v, 8, most_v) {
            return Err(TileError::HeadDim { head_dim, head_dim_v, most, most_v });
        }
        Ok(())
    }

    fn check_warpgroups(&self) -> Result<(), TileError> {
        if self.ping_pong && self.consumers == 1 {
            return Err(TileError::PingPong { consumers: self.consumers });
        }
        if self.column_groups() > 1 && !self.can_share_rows() {
            let CtaTile { head_dim_v, precision, .. } = *self;
            return Err(TileError::Columns { head_dim_v, precision });
        }
        if self.qv && !self.can_multiply_v_twice() {
            let CtaTile { head_dim_v, stages, precision, .. } = *self;
            return Err(TileError::Latent { head_dim_v, stages, precision });
        }
        let has_loop = match self.pipeline {
            Pipeline::Serial => true,
            Pipeline::Paired => self.head_dim_v <= 128,
            Pipeline::TwoStage | Pipeline::ThreeStage => false,
        };
        let has_producer = self.loads == Loads::Producer;
        let is_converted = has_producer
            && self.consumers <= if self.head_dim_v <= 192 { 2 } else { 1 }
            && self.tile_n.is_multiple_of(self.precision.key_multiple())
            && [self.head_dim, self.head_dim_v].iter().all(|columns| columns.is_multiple_of(32));
        if self.precision.is_converted() && !is_converted {
            let CtaTile { tile_n, consumers, head_dim, head_dim_v, .. } = *self;
            return Err(TileError::Converted { tile_n, consumers, head_dim, head_dim_v });
        }
        let whole = self.tile_n.is_multiple_of(self.precision.key_multiple())
            && self.tile_n <= 128
            && self.head_dim_v >= 32
            && self.head_dim_v.is_power_of_two();
        if self.precision.is_fp8() && !(has_loop && has_producer && whole) {
            let CtaTile { tile_n, head_dim_v, .. } = *self;
            return Err(TileError::Fp8 { tile_n, head_dim_v });
        }
        Ok(())
    }

    /// Whether a kernel takes `qv` in this form. A paired product holds a block of V beside the next one.
    fn can_multiply_v_twice(&self) -> bool {
        self.pipeline == Pipeline::Paired
            && self.stages > 1
            && self.precision == Precision::Half
            && self.loads == Loads::Producer
            && self.head_dim_v.is_multiple_of(DEPTH)
    }

    /// Whether a kernel has warpgroups of the same rows in this form: they take turns of their own, and have whole
    /// panels of V's columns.
    fn can_share_rows(&self) -> bool {
        self.precision == Precision::Half
            && self.loads == Loads::Producer
            && self.pipeline == Pipeline::Paired
            && !self.ping_pong
            && self.columns().is_multiple_of(PANEL)
    }
}

#[cfg(test)]
mod tests;
