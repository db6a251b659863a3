//! What a tile takes of an SM: registers and shared memory.

use std::fmt;

use crate::{Inputs, Limits, PPlace, PlanError, TileRow};

/// Registers of one consumer thread that hold tiles, 32 bits each. Each thread of a warpgroup holds
/// rows · columns / 128 elements of its warpgroup's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulators {
    /// S in fp32.
    pub s: u32,
    /// P in the input type, as the left operand of PV; 0 if it is read from shared memory.
    pub p: u32,
    /// O in fp32.
    pub o: u32,
    /// The part of O on its way to fp32: see [`TileRow::promoted_columns`].
    pub promoted: u32,
}

impl Accumulators {
    /// All of them: under two-stage overlap they live at the same time, without it nearly so.
    pub fn total(self) -> u32 {
        self.s + self.p + self.o + self.promoted
    }
}

/// Registers a thread (PTX `setmaxnreg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Of every thread when the kernel starts.
    pub entry: u32,
    /// Of the producer warpgroup's threads, after it gave back what it does not need.
    pub producer: u32,
    /// Of the consumers' threads, after they took it.
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
/// addresses, loop counters, mask bounds, temporaries of the softmax. What the densest of these tiles have
/// left over without spills.
pub const REGISTER_RESERVE: u32 = 32;

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

impl TileRow {
    /// Threads of a CTA: a producer warpgroup and the consumers.
    pub fn threads(&self) -> u32 {
        128 * (1 + self.consumers)
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
        let o = self.tile_m * self.head_dim_v / (128 * self.consumers);
        Accumulators { s: self.tile_n / 2, p, o, promoted: self.promoted_columns / 2 }
    }

    /// Registers a thread. At the start the pool is shared evenly, in units of 8.
    pub fn registers(&self) -> Registers {
        let (producer, consumer) = match self.consumers {
            1 => (56, 256),
            2 => (24, 240),
            _ => (32, 160),
        };
        Registers { entry: REGISTER_POOL / self.threads() / 8 * 8, producer, consumer }
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
    /// [`PlanError::TileShape`] unless each warpgroup has 64 rows, or an equal share of their columns, and N
    /// is a depth of PV's instructions and a width of QKᵀ's; [`PlanError::TileHeadDim`] for head dimensions
    /// that no tile can have; [`PlanError::Registers`] and
    /// [`PlanError::SharedMemory`] where the tile needs more than there is.
    pub fn check(&self, limits: &Limits) -> Result<(), PlanError> {
        let TileRow { tile_m, tile_n, stages, consumers, head_dim, head_dim_v, promoted_columns, .. } = *self;
        let warpgroups = (1..=3).contains(&consumers) && [64, 64 * consumers].contains(&tile_m);
        let keys = (1..=256).contains(&tile_n) && tile_n.is_multiple_of(32 / self.bytes());
        if !warpgroups || !keys || !(1..=MOST_STAGES).contains(&stages) {
            return Err(PlanError::TileShape { tile_m, tile_n, stages, consumers });
        }
        let width = |columns: u32| (8..=MOST_COLUMNS).contains(&columns) && columns.is_multiple_of(8);
        if !width(head_dim) || !width(head_dim_v) || promoted_columns > head_dim_v {
            return Err(PlanError::TileHeadDim { head_dim, head_dim_v, limit: MOST_COLUMNS });
        }
        let (needed, available) =
            (self.accumulators().total() + REGISTER_RESERVE, self.registers().consumer.min(MOST_REGISTERS));
        if needed > available {
            return Err(PlanError::Registers { needed, available });
        }
        let (needed, available) = (self.smem().total(), limits.smem_bytes);
        if needed > available {
            return Err(PlanError::SharedMemory { needed, available });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 128 x 176, two stages, head_dim 128, f16, P in registers.
    fn dense128() -> TileRow {
        let row = |row: &&TileRow| (row.head_dim, row.tile_n, row.inputs) == (128, 176, Inputs::Bits16);
        *TileRow::table().iter().find(row).unwrap()
    }

    #[test]
    fn every_row_fits() {
        for row in TileRow::table() {
            row.check(&Limits::h100_sxm()).unwrap_or_else(|error| panic!("{row}: {error}"));
            let Registers { entry, producer, consumer } = row.registers();
            assert!(128 * (producer + row.consumers * consumer) <= REGISTER_POOL, "{row}");
            assert!(entry * row.threads() <= REGISTER_POOL, "{row}");
            assert!(
                [entry, producer, consumer].iter().all(|n| n % 8 == 0 && (24..=256).contains(n)),
                "{row}"
            );
            assert!(producer <= entry && entry <= consumer, "{row}");
            // O's columns reach the tensor cores in parts of at most 256, a multiple of 8.
            let columns = row.head_dim_v * row.tile_m / (64 * row.consumers);
            assert!(columns <= 256 && columns % 8 == 0, "{row}");
            assert!(row.promoted_columns == 0 || columns.is_multiple_of(row.promoted_columns), "{row}");
            assert_eq!(row.promoted_columns > 0, row.inputs == Inputs::E4m3, "{row}");
            assert!(!row.why.is_empty() && !row.masks.is_empty(), "{row}");
            assert!(!row.ping_pong || row.consumers > 1, "{row}");
        }
        assert_eq!(Limits::h100_sxm().smem_bytes, 232_448);
    }

    #[test]
    fn a_row_too_large_is_refused() {
        let row = dense128();
        let limits = Limits::h100_sxm();
        let shape = |row: TileRow| {
            let TileRow { tile_m, tile_n, stages, consumers, .. } = row;
            assert_eq!(row.check(&limits), Err(PlanError::TileShape { tile_m, tile_n, stages, consumers }));
        };
        shape(TileRow { tile_m: 192, ..row });
        shape(TileRow { tile_n: 8, ..row });
        shape(TileRow { tile_n: 272, ..row });
        shape(TileRow { stages: 0, ..row });
        shape(TileRow { stages: u32::MAX, ..row });
        let wide = PlanError::TileHeadDim { head_dim: u32::MAX, head_dim_v: 128, limit: 1024 };
        assert_eq!(TileRow { head_dim: u32::MAX, ..row }.check(&limits), Err(wide));
        shape(TileRow { consumers: 4, tile_m: 256, ..row });
        // 128 x 192 needs 224 KiB of tiles and fits; 208 keys do not.
        assert_eq!(TileRow { tile_n: 192, ..row }.check(&limits), Ok(()));
        let registers = PlanError::Registers { needed: 104 + 52 + 64 + 32, available: 240 };
        assert_eq!(TileRow { tile_n: 208, ..row }.check(&limits), Err(registers));
        let smem = PlanError::SharedMemory { needed: ((32 + 3 * 88) << 10) + 2048, available: 232_448 };
        assert_eq!(TileRow { stages: 3, ..row }.check(&limits), Err(smem));
        // Three warpgroups of 64 rows by 192 keys keep P in shared memory or not at all.
        let wide = TileRow { tile_m: 192, consumers: 3, head_dim: 64, head_dim_v: 64, tile_n: 192, ..row };
        assert_eq!(wide.check(&limits), Err(PlanError::Registers { needed: 176 + 32, available: 160 }));
        assert_eq!(TileRow { p_place: PPlace::Smem, ..wide }.check(&limits), Ok(()));
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
        let base = dense128();
        for (inputs, head_dim, head_dim_v, tile_m, tile_n, consumers, p_place, kib, registers) in cases {
            let row = TileRow { inputs, head_dim, head_dim_v, tile_m, tile_n, consumers, p_place, ..base };
            let super::Smem { q, k, v, v_transposed, p } = row.smem();
            assert_eq!([q, k, v, v_transposed, p], kib.map(|kib| kib << 10), "{row}");
            let Accumulators { s, p, o, promoted } = row.accumulators();
            assert_eq!(([s, p, o], promoted), (registers, 0), "{row}");
            row.check(&Limits::h100_sxm()).unwrap();
        }
    }

    #[test]
    fn the_register_split() {
        let registers = |consumers| {
            let row = TileRow { consumers, ..TileRow::table()[0] }.registers();
            (row.entry, row.producer, row.consumer)
        };
        assert_eq!([1, 2, 3].map(registers), [(256, 56, 256), (168, 24, 240), (128, 32, 160)]);
    }
}
