//! What a tile takes of an SM: registers and shared memory.

use std::fmt;

use crate::{CtaTile, DeviceLimits, Inputs, Loads, Overlap, PPlace, PlanError, Rescale};

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
    /// The part of O on its way to fp32: see [`CtaTile::promoted_columns`].
    pub promoted: u32,
}

impl Accumulators {
    /// All of them: under overlap they live at the same time, without it nearly so.
    pub fn total(self) -> u32 {
        self.s + self.p + self.o + self.promoted
    }
}

/// Registers a thread (PTX `setmaxnreg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Of every thread when the kernel starts.
    pub entry: u32,
    /// Of the producer warpgroup's threads, if there is one, after it gave back what it does not need.
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
    /// All stages of V transposed.
    pub v_transposed: u32,
    /// P, where it passes through shared memory.
    pub p: u32,
}

/// Barriers, and the bytes lost to aligning tiles to 1024, the period of the 128-byte swizzle.
pub const SMEM_RESERVE: u32 = 2048;

/// Registers of a consumer thread besides its tiles: maxima and sums of its two rows, descriptors, barrier
/// addresses, loop counters, mask bounds, temporaries of the softmax. The table's densest
/// tile, 192 x 128 for head_dim 64, leaves just this many over.
pub const REGISTER_RESERVE: u32 = 32;

/// What consumers need on top of them who load for themselves: their places in three rings, the blocks of K and V that were loaded
/// last, the first one of the tile, its sequence and its head.
pub const LOADING_RESERVE: u32 = 10;

/// An instruction cannot name more.
const MOST_REGISTERS: u32 = 255;

/// No SM holds more, however small they are.
const MOST_STAGES: u32 = 16;
const MOST_COLUMNS: u32 = 1024;

/// Registers of one CTA (and of one SM).
pub const REGISTER_POOL: u32 = 65536;

impl Smem {
    /// All of it, with [`SMEM_RESERVE`].
    pub fn total(self) -> u32 {
        self.q + self.k + self.v + self.v_transposed + self.p + SMEM_RESERVE
    }
}

impl fmt::Display for Smem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KiB:", self.total() >> 10)?;
        let parts =
            [("Q", self.q), ("K", self.k), ("V", self.v), ("transposed V", self.v_transposed), ("P", self.p)];
        for (name, bytes) in parts.into_iter().filter(|&(_, bytes)| bytes > 0) {
            write!(f, " {name} {},", bytes >> 10)?;
        }
        write!(f, " reserve {}", SMEM_RESERVE >> 10)
    }
}

impl CtaTile {
    /// Threads of a CTA: the consumers, and a producer warpgroup if there is one.
    pub fn threads(&self) -> u32 {
        match self.loads {
            Loads::Producer => 128 * (1 + self.consumers),
            Loads::Consumers => 128 * self.consumers,
        }
    }

    /// Bytes of one element of Q, K and V.
    fn bytes(&self) -> u32 {
        match self.inputs {
            Inputs::Bits16 => 2,
            Inputs::E4m3 => 1,
        }
    }

    /// Registers that hold tiles. Each consumer warpgroup computes 64 rows of S and P, and O for them in
    /// all columns or, where warpgroups share columns, in its part.
    pub fn accumulators(&self) -> Accumulators {
        let p = match self.p_place {
            PPlace::Registers | PPlace::Both => self.tile_n / 2 * self.bytes() / 4,
            PPlace::Smem => 0,
        };
        let blocks = if self.overlap == Overlap::ThreeStage { 2 } else { 1 };
        Accumulators {
            s: blocks * self.tile_n / 2,
            p,
            o: self.columns() / 2,
            promoted: self.promoted_columns / 2,
        }
    }

    /// Whether two warpgroups compute the same 64 rows, each in half of O's columns.
    fn shares_rows(&self) -> bool {
        self.tile_m < 64 * self.consumers
    }

    /// Columns of O that a warpgroup computes.
    fn columns(&self) -> u32 {
        self.head_dim_v * self.tile_m / (64 * self.consumers)
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
        let (bytes, keys) = (self.bytes(), self.stages * self.tile_n);
        let v = keys * self.head_dim_v * bytes;
        let v_transposed = match self.inputs {
            Inputs::Bits16 => 0,
            Inputs::E4m3 => v,
        };
        let p = match self.p_place {
            PPlace::Registers => 0,
            PPlace::Smem | PPlace::Both => self.tile_m * self.tile_n * bytes,
        };
        let q = self.tile_m * self.head_dim * bytes;
        Smem { q, k: keys * self.head_dim * bytes, v, v_transposed, p }
    }

    /// Whether the tensor cores can compute the tile and an SM of the device can hold it.
    ///
    /// # Errors
    /// What the instructions cannot do (PTX ISA, `wgmma.mma_async`: 64 rows, a depth of 32 bytes, a width of up
    /// to 256 in multiples of 8):
    /// - [`PlanError::TileShape`] unless each warpgroup has 64 rows, or two share 64, and N is a width of QKᵀ's
    ///   and a multiple of the depth of PV's;
    /// - [`PlanError::TileHeadDim`] unless head_dim is a multiple of the depth and head_dim_v of 8;
    /// - [`PlanError::TileColumns`] unless a warpgroup's part of O is a width, and so is what it sums at a time,
    ///   if it does, and a divisor of it.
    ///
    /// What warpgroups cannot do:
    /// - [`PlanError::TilePPlace`] where two share rows and one's P stays in its registers, or is put in both
    ///   places for nobody;
    /// - [`PlanError::TilePingPong`] unless there are several to take turns, each with rows of its own;
    /// - [`PlanError::TileRescale`] where lazy rescaling would meet O in flight.
    ///
    /// [`PlanError::Registers`] and [`PlanError::SharedMemory`] where the tile needs more than there is.
    pub fn check(&self, limits: &DeviceLimits) -> Result<(), PlanError> {
        self.check_instructions()?;
        self.check_warpgroups()?;
        let loading = if self.loads == Loads::Consumers { LOADING_RESERVE } else { 0 };
        let needed = self.accumulators().total() + REGISTER_RESERVE + loading;
        let available = self.registers().consumer.min(MOST_REGISTERS);
        if needed > available {
            return Err(PlanError::Registers { needed, available });
        }
        let (needed, available) = (self.smem().total(), limits.smem_bytes);
        if needed > available {
            return Err(PlanError::SharedMemory { needed, available });
        }
        Ok(())
    }

    fn check_instructions(&self) -> Result<(), PlanError> {
        let CtaTile { tile_m, tile_n, stages, consumers, head_dim, head_dim_v, promoted_columns, .. } = *self;
        let depth = 32 / self.bytes();
        let is_width = |columns: u32| (8..=256).contains(&columns) && columns.is_multiple_of(8);
        let warpgroups = match consumers {
            1 | 3 => tile_m == 64 * consumers,
            2 => tile_m == 128 || tile_m == 64,
            _ => false,
        };
        let keys = is_width(tile_n) && tile_n.is_multiple_of(depth);
        if !warpgroups || !keys || !(1..=MOST_STAGES).contains(&stages) {
            return Err(PlanError::TileShape { tile_m, tile_n, stages, consumers });
        }
        let fits = |columns: u32, multiple| {
            (1..=MOST_COLUMNS).contains(&columns) && columns.is_multiple_of(multiple)
        };
        if !fits(head_dim, depth) || !fits(head_dim_v, 8) {
            let (multiple, limit) = (depth, MOST_COLUMNS);
            return Err(PlanError::TileHeadDim { head_dim, head_dim_v, multiple, limit });
        }
        let columns = self.columns();
        let promotes =
            promoted_columns == 0 || is_width(promoted_columns) && columns.is_multiple_of(promoted_columns);
        if !is_width(columns) || !promotes {
            return Err(PlanError::TileColumns { columns, promoted_columns });
        }
        Ok(())
    }

    fn check_warpgroups(&self) -> Result<(), PlanError> {
        let CtaTile { tile_m: rows, consumers, p_place, .. } = *self;
        let finds_p = match p_place {
            PPlace::Registers => !self.shares_rows(),
            PPlace::Smem => true,
            PPlace::Both => self.shares_rows(),
        };
        if !finds_p {
            return Err(PlanError::TilePPlace { p_place, consumers, rows });
        }
        if self.ping_pong && (consumers == 1 || self.shares_rows()) {
            return Err(PlanError::TilePingPong { consumers, rows });
        }
        if (self.overlap, self.rescale) == (Overlap::ThreeStage, Rescale::Lazy) {
            return Err(PlanError::TileRescale);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TileRow;
    use proptest::prelude::*;

    fn shapes() -> impl Iterator<Item = CtaTile> {
        TileRow::table().iter().map(|row| row.shape)
    }

    /// 128 x 176, two stages, head_dim 128, f16, P in registers.
    fn dense128() -> CtaTile {
        let is_it =
            |shape: &CtaTile| (shape.head_dim, shape.tile_m, shape.inputs) == (128, 128, Inputs::Bits16);
        CtaTile { tile_n: 176, stages: 2, ..shapes().find(is_it).unwrap() }
    }

    #[test]
    fn every_row_fits() {
        for TileRow { shape: row, masks, why, .. } in TileRow::table() {
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
            assert_eq!(row.promoted_columns > 0, row.inputs == Inputs::E4m3, "{row}");
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
            assert_eq!(row.check(&limits), Err(PlanError::TileShape { tile_m, tile_n, stages, consumers }));
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
        let registers = PlanError::Registers { needed: 104 + 52 + 64 + 32, available: 240 };
        assert_eq!(CtaTile { tile_n: 208, ..row }.check(&limits), Err(registers));
        let smem = PlanError::SharedMemory { needed: ((32 + 3 * 88) << 10) + 2048, available: 232_448 };
        assert_eq!(CtaTile { stages: 3, ..row }.check(&limits), Err(smem));
        // Three warpgroups of 64 rows by 192 keys keep P in shared memory or not at all.
        let wide = CtaTile { tile_m: 192, consumers: 3, head_dim: 64, head_dim_v: 64, tile_n: 192, ..row };
        assert_eq!(wide.check(&limits), Err(PlanError::Registers { needed: 176 + 32, available: 160 }));
        assert_eq!(CtaTile { p_place: PPlace::Smem, ..wide }.check(&limits), Ok(()));
    }

    #[test]
    fn what_no_instruction_computes_is_refused() {
        let (row, limits) = (dense128(), DeviceLimits::h100_sxm());
        let head_dims = |row: CtaTile, multiple| {
            let CtaTile { head_dim, head_dim_v, .. } = row;
            let error = PlanError::TileHeadDim { head_dim, head_dim_v, multiple, limit: 1024 };
            assert_eq!(row.check(&limits), Err(error));
        };
        head_dims(CtaTile { head_dim: 72, ..row }, 16);
        head_dims(CtaTile { head_dim: u32::MAX, ..row }, 16);
        head_dims(CtaTile { head_dim: 0, ..row }, 16);
        head_dims(CtaTile { head_dim_v: 68, ..row }, 16);
        let e4m3 = CtaTile { inputs: Inputs::E4m3, tile_n: 128, ..row };
        head_dims(CtaTile { head_dim: 80, ..e4m3 }, 32);
        assert_eq!(CtaTile { head_dim: 80, ..row }.check(&limits), Ok(()));
        assert_eq!(CtaTile { head_dim_v: 72, ..row }.check(&limits), Ok(()));
        assert_eq!(CtaTile { head_dim: 96, ..e4m3 }.check(&limits), Ok(()));

        let columns = |row: CtaTile, columns| {
            let promoted_columns = row.promoted_columns;
            assert_eq!(row.check(&limits), Err(PlanError::TileColumns { columns, promoted_columns }));
        };
        let narrow = CtaTile { tile_n: 64, ..row };
        columns(CtaTile { promoted_columns: 5, ..narrow }, 128);
        columns(CtaTile { promoted_columns: 48, ..narrow }, 128);
        columns(CtaTile { promoted_columns: 256, ..narrow }, 128);
        columns(CtaTile { head_dim_v: 264, ..narrow }, 264);
        columns(CtaTile { head_dim_v: 72, tile_m: 64, p_place: PPlace::Smem, ..narrow }, 36);
        assert_eq!(CtaTile { promoted_columns: 64, ..narrow }.check(&limits), Ok(()));
    }

    #[test]
    fn what_no_warpgroup_computes_is_refused() {
        let limits = DeviceLimits::h100_sxm();
        let sharing = CtaTile { tile_n: 64, tile_m: 64, ping_pong: false, ..dense128() };
        let p_place = |row: CtaTile| {
            let CtaTile { p_place, consumers, tile_m: rows, .. } = row;
            assert_eq!(row.check(&limits), Err(PlanError::TilePPlace { p_place, consumers, rows }));
        };
        p_place(sharing);
        p_place(CtaTile { tile_m: 128, p_place: PPlace::Both, ..sharing });
        assert_eq!(CtaTile { p_place: PPlace::Both, ..sharing }.check(&limits), Ok(()));
        assert_eq!(CtaTile { p_place: PPlace::Smem, ..sharing }.check(&limits), Ok(()));

        let one = CtaTile { consumers: 1, ..sharing };
        assert_eq!(one.check(&limits), Ok(()));
        for row in [one, CtaTile { p_place: PPlace::Both, ..sharing }] {
            let error = PlanError::TilePingPong { consumers: row.consumers, rows: 64 };
            assert_eq!(CtaTile { ping_pong: true, ..row }.check(&limits), Err(error));
        }
    }

    /// 128 threads hold 64 rows of 64 columns in 32 registers each, of 48 columns in 24.
    #[test]
    fn e4m3_sums_take_registers_of_their_own() {
        for row in shapes().filter(|row| row.inputs == Inputs::E4m3) {
            let registers = if row.head_dim_v == 96 { 24 } else { 32 };
            assert_eq!(row.accumulators().promoted, registers, "{row}");
        }
    }

    /// KiB of Q, K, V, transposed V and P, and registers of S, P and O, of FlashAttention-3's own tiles, worked
    /// out by hand from the tile sizes in its source.
    #[test]
    #[rustfmt::skip]
    fn published_tiles_need_what_they_need() {
        use {Inputs::*, PPlace::*};
        let cases = [
            (Bits16,  64,  64, 192, 192, 3, Smem,      [24, 48,  48,  0, 72], [96,   0,  32]),
            (Bits16,  64,  64, 192, 128, 3, Registers, [24, 32,  32,  0,  0], [64,  32,  32]),
            (Bits16,  96,  96, 192, 144, 3, Smem,      [36, 54,  54,  0, 54], [72,   0,  48]),
            (Bits16, 128, 128, 128, 176, 2, Registers, [32, 88,  88,  0,  0], [88,  44,  64]),
            (Bits16, 128, 128, 128, 128, 2, Registers, [32, 64,  64,  0,  0], [64,  32,  64]),
            (Bits16, 192, 192, 128, 112, 2, Registers, [48, 84,  84,  0,  0], [56,  28,  96]),
            (Bits16, 192, 128, 128, 128, 2, Registers, [48, 96,  64,  0,  0], [64,  32,  64]),
            (Bits16, 256, 256, 128,  80, 2, Registers, [64, 80,  80,  0,  0], [40,  20, 128]),
            (Bits16,  64, 256, 128,  96, 2, Registers, [16, 24,  96,  0,  0], [48,  24, 128]),
            (Bits16,  64, 512,  64,  64, 2, Both,      [ 8, 16, 128,  0,  8], [32,  16, 128]),
            (E4m3,   128, 128, 128, 224, 2, Registers, [16, 56,  56, 56,  0], [112, 28,  64]),
            (E4m3,   192, 192, 128, 160, 2, Registers, [24, 60,  60, 60,  0], [80,  20,  96]),
            (E4m3,   256, 256, 128, 128, 2, Registers, [32, 64,  64, 64,  0], [64,  16, 128]),
        ];
        let base = CtaTile { ping_pong: false, ..dense128() };
        for (inputs, head_dim, head_dim_v, tile_m, tile_n, consumers, p_place, kib, registers) in cases {
            let row = CtaTile { inputs, head_dim, head_dim_v, tile_m, tile_n, consumers, p_place, ..base };
            let super::Smem { q, k, v, v_transposed, p } = row.smem();
            assert_eq!([q, k, v, v_transposed, p], kib.map(|kib| kib << 10), "{row}");
            let Accumulators { s, p, o, promoted } = row.accumulators();
            assert_eq!(([s, p, o], promoted), (registers, 0), "{row}");
            row.check(&DeviceLimits::h100_sxm()).unwrap();
        }
    }

    proptest! {
        /// Whatever numbers a shape has, they are checked before they are multiplied.
        #[test]
        fn any_shape_is_checked(
            numbers in proptest::array::uniform7(prop_oneof![0u32..600, any::<u32>()]), e4m3: bool, ping_pong: bool,
        ) {
            let [tile_m, tile_n, stages, consumers, head_dim, head_dim_v, promoted_columns] = numbers;
            let inputs = if e4m3 { Inputs::E4m3 } else { Inputs::Bits16 };
            let shape = CtaTile { tile_m, tile_n, stages, inputs, ping_pong, ..dense128() };
            let _ = shape.check(&DeviceLimits::h100_sxm());
            // Behind a shape that passes, the others are reached.
            let (consumers, tile_m) = (consumers % 5, tile_m % 4 * 64);
            for tile_n in [tile_n, 64] {
                let shape = CtaTile { tile_m, tile_n, stages: 2, consumers, head_dim, head_dim_v, promoted_columns, ..shape };
                let _ = shape.check(&DeviceLimits::h100_sxm());
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
        assert_eq!(wide.check(&limits), Err(PlanError::Registers { needed, available: 240 }));
        let wide = CtaTile { loads: Loads::Consumers, ..wide };
        assert_eq!((wide.check(&limits), wide.threads()), (Ok(()), 256));
        let wider = CtaTile { tile_n: 128, ..wide };
        let needed = 64 + 32 + 128 + 32 + 10;
        assert_eq!(wider.check(&limits), Err(PlanError::Registers { needed, available: 255 }));
    }
}
