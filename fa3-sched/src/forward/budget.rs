//! What a tile takes of an SM: registers and shared memory.

use std::fmt;

use fa3_types::Problem;

use super::{CtaTile, Loads, Overlap, PPlace, Precision, Rescale, TileError};
use crate::DeviceLimits;

/// Registers of one consumer thread that hold tiles, 32 bits each. Each thread of a warpgroup holds
/// rows · columns / 128 elements of its warpgroup's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulators {
    /// S in fp32, of two blocks under three-stage overlap.
    pub s: u32,
    /// P in the input type, as the left operand of PV; 0 if it is read from shared memory.
    pub p: u32,
    /// O in fp32.
    pub o: u32,
    /// Of e4m3, the part of a block's PV that is computed at a time, in fp32.
    pub pv: u32,
}

impl Accumulators {
    /// All of them: under overlap they live at the same time, without it nearly so.
    pub fn total(self) -> u32 {
        [self.p, self.o, self.pv].into_iter().fold(self.s, u32::saturating_add)
    }
}

/// Registers a thread (PTX `setmaxnreg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Of every thread when the kernel starts.
    pub entry: u32,
    /// Of the producer warpgroup's threads, if there is one, after it released what it does not need.
    pub producer: Option<u32>,
    /// Of the consumers' threads, after they took it; without a producer, what they have at the start.
    pub consumer: u32,
}

/// Shared memory of a tile in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Smem {
    /// One tile of Q.
    pub q: u32,
    /// All stages of K.
    pub k: u32,
    /// All stages of V.
    pub v: u32,
    /// P, where it passes through shared memory.
    pub p: u32,
}

/// Barriers, and the bytes lost to aligning tiles to 1024, the period of the 128-byte swizzle. The kernels of the
/// table's tiles use 512 or 1024 of it (`fa3-cuda/tests/budget.rs`).
pub const SMEM_RESERVE: u32 = 2048;

/// Registers of a consumer thread in addition to its tiles: row max and row sum of its two rows, descriptors, barrier
/// addresses, loop counters, mask bounds, temporaries of the softmax. The table's densest tile, 192 x 128 for head_dim
/// 64, leaves exactly this many.
pub const REGISTER_RESERVE: u32 = 32;

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
        let parts = [("Q", self.q), ("K", self.k), ("V", self.v), ("P", self.p)];
        for (name, bytes) in parts.into_iter().filter(|&(_, bytes)| bytes > 0) {
            write!(f, " {name} {},", bytes >> 10)?;
        }
        write!(f, " reserve {}", SMEM_RESERVE >> 10)
    }
}

impl CtaTile {
    /// Threads of a CTA: the consumers, and a producer warpgroup if there is one.
    pub fn threads(&self) -> u32 {
        let producers = if self.loads == Loads::Producer { 1 } else { 0 };
        self.consumers.saturating_add(producers).saturating_mul(128)
    }

    /// Registers that hold tiles. Each consumer warpgroup computes 64 rows of S, P and O.
    pub fn accumulators(&self) -> Accumulators {
        let p = match self.p_place {
            PPlace::Registers => self.tile_n / (8 / self.precision.bytes()),
            PPlace::Smem => 0,
        };
        let blocks = if self.overlap == Overlap::ThreeStage { 2 } else { 1 };
        let pv = match self.precision {
            Precision::Half => 0,
            // Without overlap it takes the registers that S had.
            Precision::Fp8 if self.overlap == Overlap::None => {
                (self.pv_cols() / 2).saturating_sub(self.tile_n / 2)
            }
            Precision::Fp8 => self.pv_cols() / 2,
        };
        Accumulators { s: blocks * (self.tile_n / 2), p, o: self.head_dim_v / 2, pv }
    }

    /// Columns of O for which PV of e4m3 is computed at a time: all, or half of them where registers are short.
    pub fn pv_cols(&self) -> u32 {
        if self.head_dim_v > 128 { self.head_dim_v / 2 } else { self.head_dim_v }
    }

    /// Registers a thread. At the start the pool is shared evenly, in units of 8.
    pub fn registers(&self) -> Registers {
        let entry = (REGISTER_POOL / self.threads().max(1) / 8 * 8).min(256);
        let (producer, consumer) = match (self.loads, self.consumers) {
            (Loads::Consumers, _) => (None, entry),
            (Loads::Producer, 1) => (Some(56), 256),
            (Loads::Producer, 2) => (Some(24), 240),
            (Loads::Producer, _) => (Some(32), 160),
        };
        Registers { entry, producer, consumer }
    }

    /// Shared memory. O needs none: it goes from registers to global memory.
    pub fn smem(&self) -> Smem {
        let tile =
            |rows: u32, columns: u32| rows.saturating_mul(columns).saturating_mul(self.precision.bytes());
        let keys = self.stages.saturating_mul(self.tile_n);
        let p = match self.p_place {
            PPlace::Registers => 0,
            PPlace::Smem => tile(self.tile_m, self.tile_n),
        };
        // As it is loaded, and transposed.
        let copies_of_v = if self.precision == Precision::Fp8 { 2 } else { 1 };
        Smem {
            q: tile(self.tile_m, self.head_dim),
            k: tile(keys, self.head_dim),
            v: tile(keys, self.head_dim_v).saturating_mul(copies_of_v),
            p,
        }
    }

    /// Whether the tile is large enough for the head dimensions of `problem`.
    pub(super) fn takes(&self, problem: &Problem) -> bool {
        self.precision == Precision::of(problem.dtype())
            && problem.head_dim() <= self.head_dim as usize
            && problem.head_dim_v() <= self.head_dim_v as usize
    }

    /// Whether the tensor cores can compute the tile and an SM of the device can hold it.
    ///
    /// # Errors
    /// What the instructions cannot do (PTX ISA, `wgmma.mma_async`: 64 rows, a depth of 16 elements, a width of up to
    /// 256 in multiples of 8):
    /// - [`TileError::Shape`] unless each of one to three warpgroups has 64 rows, and N is a width of QKᵀ's and a
    ///   multiple of the depth of PV's;
    /// - [`TileError::HeadDim`] unless head_dim is a multiple of the depth and head_dim_v a width.
    ///
    /// What warpgroups cannot do:
    /// - [`TileError::PingPong`] unless there are several to take turns;
    /// - [`TileError::Rescale`] where lazy rescaling would meet O in flight.
    ///
    /// [`TileError::Registers`] and [`TileError::SharedMemory`] where the tile needs more than there is.
    pub fn check(&self, limits: &DeviceLimits) -> Result<(), TileError> {
        self.check_instructions()?;
        self.check_warpgroups()?;
        let loading = if self.loads == Loads::Consumers { LOADING_RESERVE } else { 0 };
        let needed = self.accumulators().total() + REGISTER_RESERVE + loading;
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
        let warpgroups = (1..=3).contains(&consumers) && tile_m == 64 * consumers;
        if !warpgroups || !fits(tile_n, DEPTH, WIDEST) || !(1..=MOST_STAGES).contains(&stages) {
            return Err(TileError::Shape { tile_m, tile_n, stages, consumers });
        }
        if !fits(head_dim, DEPTH, DEEPEST) || !fits(head_dim_v, 8, WIDEST) {
            let (most, most_v) = (DEEPEST, WIDEST);
            return Err(TileError::HeadDim { head_dim, head_dim_v, most, most_v });
        }
        Ok(())
    }

    fn check_warpgroups(&self) -> Result<(), TileError> {
        if self.ping_pong && self.consumers == 1 {
            return Err(TileError::PingPong { consumers: self.consumers });
        }
        if (self.overlap, self.rescale) == (Overlap::ThreeStage, Rescale::Lazy) {
            return Err(TileError::Rescale);
        }
        let as_printed = self.rescale == Rescale::EveryBlock
            && (self.overlap == Overlap::None || self.overlap == Overlap::TwoStage && self.head_dim_v <= 128);
        let in_place = (self.loads, self.p_place) == (Loads::Producer, PPlace::Registers);
        let whole =
            self.tile_n.is_multiple_of(32) && self.head_dim_v >= 16 && self.head_dim_v.is_power_of_two();
        if self.precision == Precision::Fp8 && !(as_printed && in_place && whole) {
            let CtaTile { tile_n, head_dim_v, .. } = *self;
            return Err(TileError::Fp8 { tile_n, head_dim_v });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::TileRow;
    use proptest::prelude::*;

    fn shapes() -> impl Iterator<Item = CtaTile> {
        TileRow::table().iter().map(|row| row.tile)
    }

    /// 128 x 176, two stages, head_dim 128, f16, P in registers.
    fn dense128() -> CtaTile {
        let is_it = |tile: &CtaTile| (tile.head_dim, tile.tile_m) == (128, 128);
        CtaTile { tile_n: 176, stages: 2, ..shapes().find(is_it).unwrap() }
    }

    #[test]
    fn every_row_fits() {
        for TileRow { tile: row, masks, why, .. } in TileRow::table() {
            row.check(&DeviceLimits::h100_sxm()).unwrap_or_else(|error| panic!("{row}: {error}"));
            let Registers { entry, producer, consumer } = row.registers();
            let producer = producer.unwrap_or_else(|| panic!("{row} has no producer"));
            assert!(128 * (producer + row.consumers * consumer) <= REGISTER_POOL, "{row}");
            assert!(entry * row.threads() <= REGISTER_POOL, "{row}");
            assert!(
                [entry, producer, consumer].iter().all(|n| n % 8 == 0 && (24..=256).contains(n)),
                "{row}"
            );
            assert!(producer <= entry && entry <= consumer, "{row}");
            assert!(!why.is_empty() && !masks.is_empty(), "{row}");
        }
        assert_eq!(DeviceLimits::h100_sxm().smem_bytes, 232_448);
    }

    #[test]
    fn a_row_too_large_is_refused() {
        let row = dense128();
        let limits = DeviceLimits::h100_sxm();
        let shape = |row: CtaTile| {
            let CtaTile { tile_m, tile_n, stages, consumers, .. } = row;
            assert_eq!(row.check(&limits), Err(TileError::Shape { tile_m, tile_n, stages, consumers }));
        };
        shape(CtaTile { tile_m: 192, ..row });
        shape(CtaTile { tile_n: 8, ..row });
        shape(CtaTile { tile_n: 272, ..row });
        shape(CtaTile { stages: 0, ..row });
        shape(CtaTile { stages: u32::MAX, ..row });
        shape(CtaTile { consumers: 4, tile_m: 256, ..row });
        shape(CtaTile { consumers: 3, tile_m: 64, ..row });
        shape(CtaTile { consumers: 0, tile_m: 0, ..row });
        // 128 x 192 needs 224 KiB of tiles and fits; 208 keys do not.
        assert_eq!(CtaTile { tile_n: 192, ..row }.check(&limits), Ok(()));
        let registers = TileError::Registers { needed: 104 + 52 + 64 + 32, available: 240 };
        assert_eq!(CtaTile { tile_n: 208, ..row }.check(&limits), Err(registers));
        let smem = TileError::SharedMemory { needed: ((32 + 3 * 88) << 10) + 2048, available: 232_448 };
        assert_eq!(CtaTile { stages: 3, ..row }.check(&limits), Err(smem));
        // Three warpgroups of 64 rows by 192 keys keep P in shared memory or not at all.
        let wide = CtaTile { tile_m: 192, consumers: 3, head_dim: 64, head_dim_v: 64, tile_n: 192, ..row };
        assert_eq!(wide.check(&limits), Err(TileError::Registers { needed: 176 + 32, available: 160 }));
        assert_eq!(CtaTile { p_place: PPlace::Smem, ..wide }.check(&limits), Ok(()));
    }

    #[test]
    fn what_no_instruction_computes_is_refused() {
        let (row, limits) = (CtaTile { tile_n: 64, ..dense128() }, DeviceLimits::h100_sxm());
        for (head_dim, head_dim_v) in
            [(72, 128), (u32::MAX, 128), (0, 128), (128, 68), (128, 264), (128, 0), (128, u32::MAX)]
        {
            let error = TileError::HeadDim { head_dim, head_dim_v, most: 1024, most_v: 256 };
            assert_eq!(CtaTile { head_dim, head_dim_v, ..row }.check(&limits), Err(error));
        }
        assert_eq!(CtaTile { head_dim: 80, ..row }.check(&limits), Ok(()));
        assert_eq!(CtaTile { head_dim_v: 72, ..row }.check(&limits), Ok(()));
    }

    #[test]
    fn what_no_warpgroup_computes_is_refused() {
        let limits = DeviceLimits::h100_sxm();
        let one = CtaTile { tile_n: 64, tile_m: 64, consumers: 1, ping_pong: false, ..dense128() };
        assert_eq!(one.check(&limits), Ok(()));
        let turns = CtaTile { ping_pong: true, ..one };
        assert_eq!(turns.check(&limits), Err(TileError::PingPong { consumers: 1 }));
        let lazy = CtaTile { overlap: Overlap::ThreeStage, rescale: Rescale::Lazy, ..one };
        assert_eq!(lazy.check(&limits), Err(TileError::Rescale));
        assert_eq!(CtaTile { rescale: Rescale::EveryBlock, ..lazy }.check(&limits), Ok(()));
    }

    /// KiB of Q, K, V and P, and registers of S, P and O, of FlashAttention-3's own tiles, worked
    /// out by hand from the tile sizes in its source.
    #[test]
    #[rustfmt::skip]
    fn published_tiles_need_what_they_need() {
        use PPlace::*;
        let cases = [
            ( 64,  64, 192, 192, 3, Smem,      [24, 48,  48, 72], [96,   0,  32]),
            ( 64,  64, 192, 128, 3, Registers, [24, 32,  32,  0], [64,  32,  32]),
            ( 96,  96, 192, 144, 3, Smem,      [36, 54,  54, 54], [72,   0,  48]),
            (128, 128, 128, 176, 2, Registers, [32, 88,  88,  0], [88,  44,  64]),
            (128, 128, 128, 128, 2, Registers, [32, 64,  64,  0], [64,  32,  64]),
            (192, 192, 128, 112, 2, Registers, [48, 84,  84,  0], [56,  28,  96]),
            (192, 128, 128, 128, 2, Registers, [48, 96,  64,  0], [64,  32,  64]),
            (256, 256, 128,  80, 2, Registers, [64, 80,  80,  0], [40,  20, 128]),
            ( 64, 256, 128,  96, 2, Registers, [16, 24,  96,  0], [48,  24, 128]),
        ];
        let base = CtaTile { ping_pong: false, ..dense128() };
        for (head_dim, head_dim_v, tile_m, tile_n, consumers, p_place, kib, registers) in cases {
            let row = CtaTile { head_dim, head_dim_v, tile_m, tile_n, consumers, p_place, ..base };
            let super::Smem { q, k, v, p } = row.smem();
            assert_eq!([q, k, v, p], kib.map(|kib| kib << 10), "{row}");
            let Accumulators { s, p, o, .. } = row.accumulators();
            assert_eq!([s, p, o], registers, "{row}");
            row.check(&DeviceLimits::h100_sxm()).unwrap();
        }
    }

    /// 128 x 128 of e4m3 at head_dim 128, two stages, softmax under GEMM, with turns.
    fn fp8() -> CtaTile {
        let is_it = |tile: &CtaTile| (tile.precision, tile.head_dim) == (Precision::Fp8, 128);
        shapes().find(is_it).unwrap()
    }

    /// KiB of Q, K and V, and registers of S, P, O and PV, of tiles of e4m3, by hand: V lies there twice, as it is
    /// loaded and transposed. PV has registers of its own under overlap, and else those that S leaves it too few.
    #[test]
    #[rustfmt::skip]
    fn fp8_tiles_need_what_they_need() {
        use Overlap::{None, TwoStage};
        let cases = [
            ( 64,  64, 192, 128, 3, None,     [12, 16,  32], [64, 16,  32,  0], 160),
            ( 64,  64, 192,  96, 3, TwoStage, [12, 12,  24], [48, 12,  32, 32], 160),
            (128, 128, 128, 128, 2, TwoStage, [16, 32,  64], [64, 16,  64, 64], 240),
            (128, 128, 128, 160, 2, None,     [16, 40,  80], [80, 20,  64,  0], 240),
            ( 64, 128,  64,  32, 1, TwoStage, [ 4,  4,  16], [16,  4,  64, 64], 255),
            (256, 256, 128, 128, 2, None,     [32, 64, 128], [64, 16, 128,  0], 240),
            (256, 256, 128,  32, 2, None,     [32, 16,  32], [16,  4, 128, 48], 240),
        ];
        for (head_dim, head_dim_v, tile_m, tile_n, consumers, overlap, kib, registers, available) in cases {
            let ping_pong = consumers > 1;
            let tile = CtaTile {
                head_dim, head_dim_v, tile_m, tile_n, consumers, overlap, ping_pong, ..fp8()
            };
            let smem = tile.smem();
            assert_eq!([smem.q, smem.k, smem.v, smem.p], [kib[0], kib[1], kib[2], 0].map(|kib| kib << 10), "{tile}");
            let Accumulators { s, p, o, pv } = tile.accumulators();
            assert_eq!([s, p, o, pv], registers, "{tile}");
            assert!(s + p + o + pv + REGISTER_RESERVE <= available, "{tile}");
            assert_eq!(tile.registers().consumer.min(255), available, "{tile}");
            tile.check(&DeviceLimits::h100_sxm()).unwrap();
        }
    }

    /// What a tile of e4m3 cannot be, and that it could be so with 16-bit elements.
    #[test]
    fn what_fp8_does_not_compute_is_refused() {
        let limits = DeviceLimits::h100_sxm();
        let fp8 = CtaTile { tile_n: 64, ..fp8() };
        let refused = |tile: CtaTile, error| {
            assert_eq!(tile.check(&limits), Err(error), "{tile}");
            assert_eq!(CtaTile { precision: Precision::Half, ..tile }.check(&limits), Ok(()), "{tile}");
        };
        let form = TileError::Fp8 { tile_n: 64, head_dim_v: 128 };
        assert_eq!(fp8.check(&limits), Ok(()));
        refused(CtaTile { loads: Loads::Consumers, ..fp8 }, form.clone());
        refused(CtaTile { p_place: PPlace::Smem, ..fp8 }, form.clone());
        refused(CtaTile { rescale: Rescale::Lazy, ..fp8 }, form.clone());
        refused(CtaTile { overlap: Overlap::ThreeStage, ..fp8 }, form);
        // Of two parts of PV, only one could be in flight.
        refused(CtaTile { head_dim_v: 256, ..fp8 }, TileError::Fp8 { tile_n: 64, head_dim_v: 256 });
        // A warp transposes 32 keys, and 16 columns, at a time; the columns are a power of two.
        for tile_n in [16, 48, 80] {
            refused(CtaTile { tile_n, ..fp8 }, TileError::Fp8 { tile_n, head_dim_v: 128 });
        }
        for head_dim_v in [8, 24, 48, 96, 120] {
            refused(CtaTile { head_dim_v, ..fp8 }, TileError::Fp8 { tile_n: 64, head_dim_v });
        }
        for head_dim_v in [16, 32, 64, 128] {
            assert_eq!(CtaTile { head_dim_v, ..fp8 }.check(&limits), Ok(()));
        }
        assert_eq!(CtaTile { head_dim_v: 256, overlap: Overlap::None, ..fp8 }.check(&limits), Ok(()));
    }

    /// 160 keys have too many registers under overlap, three stages at head_dim 256 too much memory.
    #[test]
    fn fp8_tiles_too_large_are_refused() {
        let limits = DeviceLimits::h100_sxm();
        let wide = CtaTile { tile_n: 160, ..fp8() };
        let registers = TileError::Registers { needed: 80 + 20 + 64 + 64 + 32, available: 240 };
        assert_eq!(wide.check(&limits), Err(registers));
        assert_eq!(CtaTile { overlap: Overlap::None, ..wide }.check(&limits), Ok(()));
        let deep = CtaTile { head_dim: 256, head_dim_v: 256, overlap: Overlap::None, stages: 3, ..fp8() };
        let smem = TileError::SharedMemory { needed: ((32 + 3 * 96) << 10) + 2048, available: 232_448 };
        assert_eq!(deep.check(&limits), Err(smem));
    }

    proptest! {
        /// Whatever numbers a tile has, nothing of it overflows or divides by zero.
        #[test]
        fn any_tile_is_checked(
            numbers in proptest::array::uniform6(prop_oneof![0u32..600, any::<u32>()]), ping_pong: bool,
            three_stage: bool, p_in_smem: bool, no_producer: bool, is_fp8: bool,
        ) {
            let [tile_m, tile_n, stages, consumers, head_dim, head_dim_v] = numbers;
            let tile = CtaTile {
                ping_pong,
                overlap: if three_stage { Overlap::ThreeStage } else { Overlap::TwoStage },
                p_place: if p_in_smem { PPlace::Smem } else { PPlace::Registers },
                loads: if no_producer { Loads::Consumers } else { Loads::Producer },
                precision: if is_fp8 { Precision::Fp8 } else { Precision::Half },
                ..dense128()
            };
            let any = CtaTile { tile_m, tile_n, stages, consumers, head_dim, head_dim_v, ..tile };
            // Behind what passes, the other checks are reached.
            let consumers = consumers % 5;
            let near = CtaTile { tile_m: 64 * consumers, tile_n: 64, stages: 2, consumers, ..any };
            for tile in [any, near] {
                let _ = (tile.check(&DeviceLimits::h100_sxm()), tile.threads(), tile.registers());
                let _ = (tile.smem().total(), tile.accumulators().total(), tile.to_string());
            }
        }
    }

    #[test]
    fn the_register_split() {
        let registers = |loads| {
            [1, 2, 3].map(|consumers| {
                let row = CtaTile { consumers, loads, ..dense128() }.registers();
                (row.entry, row.producer, row.consumer)
            })
        };
        let split = [(256, Some(56), 256), (168, Some(24), 240), (128, Some(32), 160)];
        assert_eq!(registers(Loads::Producer), split);
        // An instruction names 255 of the 256.
        assert_eq!(registers(Loads::Consumers), [(256, None, 256), (256, None, 256), (168, None, 168)]);
    }

    /// Without a producer two consumers have more registers.
    #[test]
    fn what_a_producer_leaves() {
        let limits = DeviceLimits::h100_sxm();
        let wide = CtaTile { head_dim: 64, head_dim_v: 256, tile_n: 112, ..dense128() };
        let needed = 56 + 28 + 128 + 32;
        assert_eq!(wide.check(&limits), Err(TileError::Registers { needed, available: 240 }));
        let wide = CtaTile { loads: Loads::Consumers, ..wide };
        assert_eq!((wide.check(&limits), wide.threads()), (Ok(()), 256));
        let wider = CtaTile { tile_n: 128, ..wide };
        let needed = 64 + 32 + 128 + 32 + 10;
        assert_eq!(wider.check(&limits), Err(TileError::Registers { needed, available: 255 }));
    }
}
