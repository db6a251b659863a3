//! The registers and shared memory that a tile takes of an SM.

use std::fmt;

use fa3_types::Problem;

use super::{CtaTile, Loads, Pipeline, Precision, TileError};
use crate::DeviceLimits;

/// Registers of one consumer thread that hold tiles, 32 bits each. A tile of a warpgroup takes rows · columns / 128
/// elements of each thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulators {
    /// S in fp32; S of two blocks in a three-stage pipeline.
    pub s: u32,
    /// P in the input type, as the left operand of PV.
    pub p: u32,
    /// O in fp32.
    pub o: u32,
    /// PV of the block in flight, with the columns of row sums, in fp32; e4m3 only. In a serial pipeline, only the part
    /// that does not fit the registers of S.
    pub pv: u32,
}

impl Accumulators {
    /// Registers of all tiles together, which are live at the same time, or nearly so in a serial pipeline.
    pub fn total(self) -> u32 {
        [self.p, self.o, self.pv].into_iter().fold(self.s, u32::saturating_add)
    }
}

/// Registers per thread (PTX `setmaxnreg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Registers of every thread at kernel entry.
    pub entry: u32,
    /// Registers of a producer thread after `setmaxnreg.dec`; `None` without a producer.
    pub producer: Option<u32>,
    /// Registers of a thread that dequantizes K and V, if there are such warps.
    pub converter: Option<u32>,
    /// Registers of a consumer thread after `setmaxnreg.inc`; without a producer, its registers at entry.
    pub consumer: u32,
    /// Registers of a thread of the second consumer, if both consumers have the same rows. The second one computes no
    /// scores.
    pub second: Option<u32>,
}

/// Shared memory of a tile in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Smem {
    /// The tile of Q, and of `qv` if there is one.
    pub q: u32,
    /// All stages of K.
    pub k: u32,
    /// All stages of V. For e4m3 these are stages of transposed V, and of V as loaded if the kernel transposes it.
    /// Where K and V are dequantized, `k` and `v` have loaded and converted blocks.
    pub v: u32,
    /// P and two factors for each row, if one warpgroup hands P to another.
    pub p: u32,
}

/// Bytes of barriers, and bytes lost to aligning tiles to 1024, the period of the 128-byte swizzle. No kernel of the
/// table's tiles uses more (`fa3-cuda/tests/cuda/budget.rs`).
pub const SMEM_RESERVE: u32 = 1024;

/// Registers of a consumer thread in addition to its tiles: row max and row sum of its two rows, descriptors, barrier
/// addresses, loop counters, mask bounds, temporaries of the softmax. The table's densest tile, 192 x 128 for head_dim
/// 64, leaves exactly this number.
pub const REGISTER_RESERVE: u32 = 32;

/// [`REGISTER_RESERVE`] for e4m3, whose row sums are a column of PV. The tile 128 x 128 at head_dim 128 leaves exactly
/// this number.
pub const FP8_REGISTER_RESERVE: u32 = 20;

/// Number of columns that transposed e4m3 V has beyond V's own: a column of ones, whose PV is the row sum, and columns
/// of zeros. It is the smallest number of columns of a product.
pub const ROW_SUM_COLS: u32 = 8;

/// Number of dequantized blocks of K, and of V, in shared memory: one is read while the other is written.
pub const CONVERTED_SLOTS: u32 = 2;

/// Extra registers of a consumer that also issues loads: its positions in three pipelines, the blocks of K and V that
/// were loaded last, the first block of the tile, its sequence and its head.
pub const LOADING_RESERVE: u32 = 10;

/// Largest number of registers that an instruction can name.
const MOST_REGISTERS: u32 = 255;

/// Largest number of stages: no SM holds more, however small they are.
const MOST_STAGES: u32 = 16;

/// Depth (K) of an instruction, in elements.
const DEPTH: u32 = 16;

/// Largest number of columns (N) of an instruction.
const WIDEST: u32 = 256;

/// Largest number of 16-bit columns of a panel of a tile in shared memory.
const PANEL: u32 = 64;

/// The largest head_dim: no SM holds a wider block.
const DEEPEST: u32 = 1024;

/// Registers of one CTA (and of one SM).
pub const REGISTER_POOL: u32 = 65536;

impl Smem {
    /// Total bytes, with [`SMEM_RESERVE`].
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
    /// Threads of a CTA: the consumers, a producer warpgroup if there is one, and the converter warpgroups.
    pub fn threads(&self) -> u32 {
        let producers = if self.loads == Loads::Producer { 1 } else { 0 };
        self.consumers.saturating_add(producers).saturating_add(self.converters()).saturating_mul(128)
    }

    /// Number of warpgroups that dequantize K and V: one warpgroup for both, or one for each beside a single consumer,
    /// so that blocks are dequantized as fast as memory delivers them. With 512 threads, a product of more than 192
    /// columns does not compile for the registers at entry.
    pub fn converters(&self) -> u32 {
        match (self.precision, self.consumers) {
            _ if self.converts_rows() => 0,
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
        // In a serial pipeline PV reuses the registers of S.
        let pv = if self.pipeline == Pipeline::Serial { pv.saturating_sub(self.tile_n / 2) } else { pv };
        Accumulators { s: blocks * (self.tile_n / 2), p, o: self.columns() / 2, pv }
    }

    /// Columns of O for which e4m3 PV is computed at a time: all, or half where registers are short.
    pub fn pv_cols(&self) -> u32 {
        if self.head_dim_v > 128 { self.head_dim_v / 2 } else { self.head_dim_v }
    }

    /// Registers per thread. At entry the pool is shared evenly, in units of 8.
    pub fn registers(&self) -> Registers {
        self.registers_of(1, false)
    }

    /// Registers per thread if an SM holds `ctas` such CTAs (one or two), and if the producer may load keys row by row.
    pub fn registers_of(&self, ctas: u32, gathers: bool) -> Registers {
        let entry = (REGISTER_POOL / ctas.max(1) / self.threads().max(1) / 8 * 8).min(256);
        let converts = self.converters() > 0;
        // The warps that transpose V, or that find rows of `qv` tiles, need more registers.
        let busy = self.qv || self.precision.transposes_v();
        let hands_over = self.column_groups() > 1;
        let (producer, consumer) = match (self.loads, self.consumers) {
            // The sum of all threads' registers is the sum at entry.
            (Loads::Producer, 1) if ctas > 1 => (Some(56), 200),
            (Loads::Consumers, _) => (None, entry),
            (Loads::Producer, 1) => (Some(56), 256),
            (Loads::Producer, 2) if self.converts_rows() && self.qv => (Some(128), 208),
            (Loads::Producer, 2) if self.converts_rows() => (Some(104), 208),
            (Loads::Producer, 2) if converts => (Some(56), 200),
            (Loads::Producer, 2) if hands_over => (Some(56), 240),
            // Warps that load row by row need this number of registers to have several copies in flight.
            (Loads::Producer, 2) if gathers => (Some(56), 224),
            (Loads::Producer, 2) if busy => (Some(40), 232),
            (Loads::Producer, 2) => (Some(24), 240),
            (Loads::Producer, _) if gathers && self.accumulators().total() <= 112 => (Some(56), 152),
            (Loads::Producer, _) => (Some(32), 160),
        };
        // Beside one consumer there are at most two converter warpgroups, and beside two consumers at most one.
        let converter = converts.then_some(if self.consumers == 1 { 96 } else { 56 });
        let second = match (self.converts_rows(), self.qv) {
            (true, true) => 168,
            (true, false) => 192,
            (false, _) => 208,
        };
        Registers { entry, producer, converter, consumer, second: hands_over.then_some(second) }
    }

    /// Bytes of shared memory. O needs none: it goes from registers to global memory.
    pub fn smem(&self) -> Smem {
        let tile =
            |rows: u32, columns: u32| rows.saturating_mul(columns).saturating_mul(self.precision.bytes());
        let keys = self.stages.saturating_mul(self.tile_n);
        let (loaded, transposed) =
            (tile(keys, self.head_dim_v), tile(keys, self.head_dim_v.saturating_add(ROW_SUM_COLS)));
        if let Precision::Converted { q: is_loaded } = self.precision
            && !self.converts_rows()
        {
            // e4m3 blocks as loaded have half the bytes.
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

    /// Checks that the tensor cores can compute the tile and that an SM of the device can hold it.
    ///
    /// # Errors
    /// Instruction limits (PTX ISA, `wgmma.mma_async`: M = 64, K = 16, N up to 256 in multiples of 8):
    /// - [`TileError::Shape`] unless one to three warpgroups have 64 rows each, or two warpgroups share 64 rows, and
    ///   tile_n is a valid N of QKᵀ and a multiple of the K of PV;
    /// - [`TileError::HeadDim`] unless head_dim is a multiple of K, and a warpgroup's part of head_dim_v is a valid N.
    ///
    /// Limits of the kernels:
    /// - [`TileError::Columns`] if warpgroups cannot share rows in this form;
    /// - [`TileError::Latent`] if no main loop computes `qv` in this form;
    /// - [`TileError::Converted`] and [`TileError::Fp8`] if no main loop has this form in this precision;
    /// - [`TileError::PingPong`] if there is only one warpgroup to take turns.
    ///
    /// [`TileError::Registers`] and [`TileError::SharedMemory`] if the tile needs more than an SM has.
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
        let (most, multiple) = match self.converts_rows() {
            true => (2, PANEL),
            false => (if self.head_dim_v <= 192 { 2 } else { 1 }, 32),
        };
        let is_converted = has_producer
            && self.consumers <= most
            && self.tile_n.is_multiple_of(self.precision.key_multiple())
            && [self.head_dim, self.head_dim_v].iter().all(|columns| columns.is_multiple_of(multiple));
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

    /// Whether a kernel computes `qv` with this tile. Paired products hold a block of V beside the next one.
    fn can_multiply_v_twice(&self) -> bool {
        self.pipeline == Pipeline::Paired
            && self.stages > 1
            && (self.precision == Precision::Half || self.converts_rows())
            && self.loads == Loads::Producer
            && self.head_dim_v.is_multiple_of(DEPTH)
    }

    /// Whether warpgroups can share rows in this tile: they need whole panels of V's columns, and they synchronise
    /// instead of taking turns (ping-pong).
    fn can_share_rows(&self) -> bool {
        matches!(self.precision, Precision::Half | Precision::Converted { q: false })
            && self.loads == Loads::Producer
            && self.pipeline == Pipeline::Paired
            && !self.ping_pong
            && self.columns().is_multiple_of(PANEL)
    }
}

#[cfg(test)]
mod tests;
