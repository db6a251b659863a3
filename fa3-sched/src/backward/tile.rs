//! The tiles of the backward kernels, and the registers and shared memory that they take of an SM.

use std::fmt;
use std::ops::RangeInclusive;

use super::TileError;
use crate::DeviceLimits;

/// How the warpgroups of a dK/dV kernel divide the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Division {
    /// Each warpgroup has 64 keys, and computes their dK and dV.
    Keys,
    /// Both warpgroups have the same 64 keys. The first computes S and dV, and hands P to the second, which computes dP
    /// and dK. This is for head dimensions whose dK and dV do not fit one warpgroup's registers.
    Gradients,
}

/// The tile of a dK/dV kernel: a tile of keys that stays, and a loop over blocks of query rows. Each thread of a
/// warpgroup holds its part of Sᵀ, dPᵀ and Pᵀ of a block, and of dK and dV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DkvTile {
    /// The largest head dimension of Q and K. Smaller ones are padded with zeros.
    pub head_dim: u32,
    /// The largest head dimension of V and O.
    pub head_dim_v: u32,
    /// Keys per tile, N: 64 for each warpgroup, or 64 for both with [`Division::Gradients`].
    pub tile_n: u32,
    /// Rows of Q and dO per block, M.
    pub tile_m: u32,
    /// Pipeline stages of Q and dO.
    pub stages: u32,
    /// Pipeline stages of K and V: with 2, the next tile is loaded while this one is computed.
    pub kv_stages: u32,
    /// How warpgroups divide the work.
    pub division: Division,
    /// Whether the kernel adds its contributions to dQ to sums in memory, and in which order. If it does, two
    /// warpgroups divide the keys, and also the rows of dQ: each takes half of a block of 128 rows, or every other
    /// block of 64 rows.
    pub adds_dq: Option<AddOrder>,
}

/// The order in which tiles of keys add to a row of dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddOrder {
    /// Any order. The last bits of dQ differ from run to run.
    Any,
    /// Tiles add from the last keys to the first: a tile waits for the tile after it. dQ is bitwise reproducible.
    LastKeysFirst,
}

/// Number of rows of dQ that a warpgroup adds to memory at a time: the M of one product.
pub const ADDED_ROWS: u32 = 64;

/// The tile of a dQ kernel: a tile of query rows that stays, and a loop over blocks of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DqTile {
    /// The largest head dimension of Q and K. Smaller ones are padded with zeros.
    pub head_dim: u32,
    /// The largest head dimension of V and O.
    pub head_dim_v: u32,
    /// Rows of Q and dO per tile, M: 64 for each warpgroup.
    pub tile_m: u32,
    /// Keys per block, N.
    pub tile_n: u32,
    /// Pipeline stages of K.
    pub k_stages: u32,
    /// Pipeline stages of V.
    pub v_stages: u32,
}

/// Shared memory for mbarriers, alignment, and the word that passes the next tile's number.
pub(super) const SMEM_RESERVE: u32 = 1024;

/// Registers of a consumer thread in addition to its tiles.
const REGISTER_RESERVE: u32 = 32;

/// Registers of a consumer thread if there are one or two consumer warpgroups and a producer.
pub(super) const CONSUMER_REGISTERS: u32 = 240;

/// Registers of a producer thread.
pub(super) const PRODUCER_REGISTERS: u32 = 24;

/// Head dimensions of tiles are multiples of this, so that rows are whole chunks of a 64-byte swizzle.
pub(super) const HEAD_DIM_STEP: u32 = 32;

const MOST_HEAD_DIM: u32 = 256;

/// Largest number of pipeline stages: more stages make nothing faster.
const MOST_STAGES: u32 = 3;

impl DkvTile {
    /// Chooses the tile for these head dimensions on this device: the largest block of rows that fits, with as many
    /// stages as fit. `None` if nothing fits.
    pub fn choose(head_dim: u32, head_dim_v: u32, limits: &DeviceLimits) -> Option<DkvTile> {
        DkvTile::choose_among([head_dim, head_dim_v], &[96, 80, 64], limits)
    }

    /// Chooses the tile for sequences whose lengths are data, and for listed blocks: its blocks of rows divide the
    /// tiles of the dQ kernel, and listed blocks.
    pub fn choose_even(head_dim: u32, head_dim_v: u32, limits: &DeviceLimits) -> Option<DkvTile> {
        DkvTile::choose_among([head_dim, head_dim_v], &[64], limits)
    }

    fn choose_among(dims: [u32; 2], rows: &[u32], limits: &DeviceLimits) -> Option<DkvTile> {
        let divisions = [(Division::Keys, 128), (Division::Gradients, 64)];
        let mut tiles = divisions
            .into_iter()
            .flat_map(|division| rows.iter().flat_map(move |&tile_m| tiles(dims, division, tile_m)));
        tiles.find(|tile| tile.check(limits).is_ok())
    }

    /// Chooses the tile of a kernel that adds to dQ in this order; `None` if a warpgroup cannot hold dK and dV.
    pub fn choose_adding(dims: [u32; 2], order: AddOrder, limits: &DeviceLimits) -> Option<DkvTile> {
        DkvTile::choose_adding_among(dims, &[2 * ADDED_ROWS, ADDED_ROWS], order, limits)
    }

    /// Chooses the tile of a kernel that adds to dQ, with one of these numbers of rows of a block.
    pub(super) fn choose_adding_among(
        dims: [u32; 2],
        rows: &[u32],
        order: AddOrder,
        limits: &DeviceLimits,
    ) -> Option<DkvTile> {
        let mut tiles = rows
            .iter()
            .flat_map(|&tile_m| tiles(dims, (Division::Keys, 128), tile_m))
            .map(|tile| DkvTile { adds_dq: Some(order), ..tile });
        tiles.find(|tile| tile.check(limits).is_ok())
    }

    /// Number of consumer warpgroups.
    pub fn consumers(&self) -> u32 {
        match self.division {
            Division::Keys => self.tile_n / 64,
            Division::Gradients => 2,
        }
    }

    /// Whether it adds to dQ in a fixed order.
    pub fn adds_in_order(&self) -> bool {
        self.adds_dq == Some(AddOrder::LastKeysFirst)
    }

    /// Whether each warpgroup adds half of every block's dQ.
    pub fn adds_halves(&self) -> bool {
        self.adds_dq.is_some() && self.tile_m == 2 * ADDED_ROWS
    }

    /// Threads of a CTA: consumers, and a producer warpgroup.
    pub fn threads(&self) -> u32 {
        128 * (self.consumers() + 1)
    }

    /// Registers of a producer thread and of a consumer thread.
    pub fn registers(&self) -> [u32; 2] {
        [PRODUCER_REGISTERS, CONSUMER_REGISTERS]
    }

    /// Registers of a consumer thread that hold tiles.
    fn accumulators(&self) -> u32 {
        let gradients = match self.division {
            Division::Keys => self.head_dim + self.head_dim_v,
            Division::Gradients => self.head_dim.max(self.head_dim_v),
        };
        // First come Sᵀ and dPᵀ in f32, and Pᵀ in 16 bits; where blocks are large, Pᵀ reuses the registers of Sᵀ. Later
        // the registers hold dQ in f32 and dSᵀ in 16 bits.
        let p = if self.adds_halves() { 0 } else { self.tile_m / 4 };
        let of_dq = if self.adds_dq.is_some() { self.head_dim / 2 + self.tile_m / 4 } else { 0 };
        gradients / 2 + of_dq.max(self.tile_m + p)
    }

    /// Bytes of shared memory: K and V; stages of Q, of dO and of two numbers for each row; P in f32 if it is handed
    /// over; dS, and dQ of each consumer, if the kernel adds to dQ.
    pub fn smem_bytes(&self) -> u32 {
        let dims = self.head_dim + self.head_dim_v;
        let handed_over = match self.division {
            Division::Keys => 0,
            Division::Gradients => 4 * self.tile_n * self.tile_m,
        };
        // dS of two blocks, and dQ of each warpgroup in f32.
        let ds = 2 * 2 * self.tile_n * self.tile_m;
        let of_dq = match self.adds_dq {
            Some(_) => ds + self.consumers() * 4 * ADDED_ROWS * self.head_dim,
            None => 0,
        };
        self.kv_stages * 2 * self.tile_n * dims
            + self.stages * self.tile_m * (2 * dims + 8)
            + handed_over
            + of_dq
            + SMEM_RESERVE
    }

    /// Whether the tensor cores can compute the tile and an SM of the device can hold it.
    ///
    /// # Errors
    /// [`TileError`].
    pub fn check(&self, limits: &DeviceLimits) -> Result<(), TileError> {
        let keys = match self.division {
            Division::Keys => [64, 128].contains(&self.tile_n),
            Division::Gradients => self.tile_n == 64,
        };
        let shares_rows = self.division == Division::Keys && self.consumers() == 2;
        let adds = self.adds_dq.is_none() || shares_rows && (self.tile_m == ADDED_ROWS || self.adds_halves());
        if !keys || !is_block(self.tile_m) || !adds {
            return Err(TileError::Shape { tile_m: self.tile_m, tile_n: self.tile_n });
        }
        check_head_dims(self.head_dim, self.head_dim_v)?;
        check_stages(self.stages, 1)?;
        // Half of dQ of a tile's last block is computed after the next tile has begun, so K of both tiles must be
        // there.
        check_stages(self.kv_stages, if self.adds_halves() { 2 } else { 1 })?;
        check_budget(self.accumulators(), self.smem_bytes(), limits)
    }
}

/// Candidate tiles, by falling number of stages of Q and dO, then of K and V.
fn tiles(dims: [u32; 2], (division, tile_n): (Division, u32), tile_m: u32) -> impl Iterator<Item = DkvTile> {
    let [head_dim, head_dim_v] = dims.map(|dim| dim.next_multiple_of(HEAD_DIM_STEP));
    let stages = (2..=MOST_STAGES).rev().flat_map(|stages| [(stages, 2), (stages, 1)]);
    stages.map(move |(stages, kv_stages)| DkvTile {
        head_dim,
        head_dim_v,
        tile_n,
        tile_m,
        stages,
        kv_stages,
        division,
        adds_dq: None,
    })
}

impl DqTile {
    /// Chooses the tile for these head dimensions on this device: the largest block of keys that fits, with as many
    /// stages as fit. `None` if nothing fits.
    pub fn choose(head_dim: u32, head_dim_v: u32, limits: &DeviceLimits) -> Option<DqTile> {
        DqTile::choose_among([head_dim, head_dim_v], &[128, 112, 96, 80, 64], 2..=2, limits)
    }

    /// Chooses the tile for listed blocks of 128, which its blocks of keys divide.
    pub fn choose_even(head_dim: u32, head_dim_v: u32, limits: &DeviceLimits) -> Option<DqTile> {
        DqTile::choose_among([head_dim, head_dim_v], &[128, 64], 2..=2, limits)
    }

    /// Chooses the tile for listed blocks of 64: each warpgroup has its own list, and stages let them run apart.
    pub fn choose_own_lists(head_dim: u32, head_dim_v: u32, limits: &DeviceLimits) -> Option<DqTile> {
        DqTile::choose_among([head_dim, head_dim_v], &[64], 2..=5, limits)
    }

    fn choose_among(
        dims: [u32; 2],
        keys: &[u32],
        stages: RangeInclusive<u32>,
        limits: &DeviceLimits,
    ) -> Option<DqTile> {
        let [head_dim, head_dim_v] = dims.map(|dim| dim.next_multiple_of(HEAD_DIM_STEP));
        let stages = stages.rev().map(|stages| [stages; 2]).chain([[2, 1]]);
        let mut tiles = keys.iter().flat_map(|&tile_n| {
            stages.clone().map(move |[k_stages, v_stages]| DqTile {
                head_dim,
                head_dim_v,
                tile_m: 128,
                tile_n,
                k_stages,
                v_stages,
            })
        });
        tiles.find(|tile| tile.check(limits).is_ok())
    }

    /// Number of consumer warpgroups.
    pub fn consumers(&self) -> u32 {
        self.tile_m / 64
    }

    /// Threads of a CTA: consumers, and a producer warpgroup.
    pub fn threads(&self) -> u32 {
        128 * (self.consumers() + 1)
    }

    /// Registers of a producer thread and of a consumer thread.
    pub fn registers(&self) -> [u32; 2] {
        [PRODUCER_REGISTERS, CONSUMER_REGISTERS]
    }

    /// Registers of a consumer thread that hold tiles: dQ, S and dP in f32, dS in 16 bits.
    fn accumulators(&self) -> u32 {
        self.head_dim / 2 + self.tile_n + self.tile_n / 4
    }

    /// Bytes of shared memory: Q and dO, blocks of K and V.
    pub fn smem_bytes(&self) -> u32 {
        let stays = self.tile_m * (self.head_dim + self.head_dim_v);
        let blocks = self.tile_n * (self.k_stages * self.head_dim + self.v_stages * self.head_dim_v);
        2 * (stays + blocks) + SMEM_RESERVE
    }

    /// Whether the tensor cores can compute the tile and an SM of the device can hold it.
    ///
    /// # Errors
    /// [`TileError`].
    pub fn check(&self, limits: &DeviceLimits) -> Result<(), TileError> {
        if ![64, 128].contains(&self.tile_m) || !is_block(self.tile_n) {
            return Err(TileError::Shape { tile_m: self.tile_m, tile_n: self.tile_n });
        }
        check_head_dims(self.head_dim, self.head_dim_v)?;
        // A stage of K is released only after the next stage has been read.
        check_stages(self.k_stages, 2)?;
        check_stages(self.v_stages, 1)?;
        check_budget(self.accumulators(), self.smem_bytes(), limits)
    }
}

/// Whether `extent` can be the N of one product and the depth of another.
pub(super) fn is_block(extent: u32) -> bool {
    (16..=256).contains(&extent) && extent.is_multiple_of(16)
}

pub(super) fn check_head_dims(head_dim: u32, head_dim_v: u32) -> Result<(), TileError> {
    let fits = |dim: u32| (16..=MOST_HEAD_DIM).contains(&dim) && dim.is_multiple_of(16);
    if fits(head_dim) && fits(head_dim_v) { Ok(()) } else { Err(TileError::HeadDim { head_dim, head_dim_v }) }
}

pub(super) fn check_stages(given: u32, least: u32) -> Result<(), TileError> {
    if (least..=16).contains(&given) { Ok(()) } else { Err(TileError::Stages { given, least }) }
}

pub(super) fn check_budget(accumulators: u32, smem: u32, limits: &DeviceLimits) -> Result<(), TileError> {
    let (needed, available) = (accumulators + REGISTER_RESERVE, CONSUMER_REGISTERS);
    if needed > available {
        return Err(TileError::Registers { needed, available });
    }
    let (needed, available) = (smem, limits.smem_bytes);
    if needed > available { Err(TileError::SharedMemory { needed, available }) } else { Ok(()) }
}

impl fmt::Display for DkvTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DkvTile { tile_n, tile_m, stages, kv_stages, .. } = self;
        write!(f, "{tile_n} keys, blocks of {tile_m} rows, {stages} stages")?;
        if *kv_stages > 1 {
            write!(f, " and {kv_stages} of keys")?;
        }
        match self.division {
            Division::Keys => {}
            Division::Gradients => write!(f, ", a warpgroup for dV and one for dK")?,
        }
        match self.adds_dq {
            None => Ok(()),
            Some(AddOrder::Any) => write!(f, ", adds to dQ"),
            Some(AddOrder::LastKeysFirst) => write!(f, ", adds to dQ in order"),
        }
    }
}

impl fmt::Display for DqTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DqTile { tile_m, tile_n, k_stages, v_stages, .. } = self;
        write!(f, "{tile_m} rows, blocks of {tile_n} keys, {k_stages} stages of K and {v_stages} of V")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: DeviceLimits = DeviceLimits::h100_sxm();

    #[test]
    fn every_head_dim_has_tiles() {
        for (head_dim, head_dim_v) in
            (8..=256).step_by(8).flat_map(|d| (8..=256).step_by(8).map(move |v| (d, v)))
        {
            let (dkv, dq) =
                (DkvTile::choose(head_dim, head_dim_v, &H100), DqTile::choose(head_dim, head_dim_v, &H100));
            let (dkv, dq) = (dkv.unwrap(), dq.unwrap());
            assert!(dkv.head_dim >= head_dim && dkv.head_dim_v >= head_dim_v, "{dkv:?}");
            assert_eq!(DkvTile::choose_even(head_dim, head_dim_v, &H100).map(|tile| tile.tile_m), Some(64));
            assert!(dq.head_dim >= head_dim && dq.head_dim_v >= head_dim_v, "{dq:?}");
        }
        assert_eq!(DkvTile::choose(264, 64, &H100), None);
        assert_eq!(DqTile::choose(64, 264, &H100), None);
    }

    #[test]
    fn the_usual_head_dims() {
        let dkv = |dim| DkvTile::choose(dim, dim, &H100).unwrap();
        let shape = |tile: DkvTile| (tile.tile_n, tile.tile_m, tile.stages, tile.division);
        assert_eq!(shape(dkv(64)), (128, 96, 3, Division::Keys));
        assert_eq!(shape(dkv(128)), (128, 64, 3, Division::Keys));
        assert_eq!(shape(dkv(256)), (64, 64, 2, Division::Gradients));
        let dq = |dim| DqTile::choose(dim, dim, &H100).unwrap();
        let shape = |tile: DqTile| (tile.tile_m, tile.tile_n, tile.k_stages, tile.v_stages);
        assert_eq!(shape(dq(64)), (128, 128, 2, 2));
        assert_eq!(shape(dq(128)), (128, 112, 2, 2));
        assert_eq!(shape(dq(256)), (128, 64, 2, 1));
        let own_lists = |dim| DqTile::choose_own_lists(dim, dim, &H100).unwrap();
        assert_eq!(shape(own_lists(128)), (128, 64, 5, 5));
        assert_eq!(shape(own_lists(256)), (128, 64, 2, 1));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = DkvTile::choose(128, 128, &H100).unwrap();
        let dkv = |tile: DkvTile| tile.check(&H100).unwrap_err();
        assert_eq!(dkv(DkvTile { tile_n: 96, ..good }), TileError::Shape { tile_m: 64, tile_n: 96 });
        assert_eq!(dkv(DkvTile { tile_m: 72, ..good }), TileError::Shape { tile_m: 72, tile_n: 128 });
        assert_eq!(dkv(DkvTile { stages: 0, ..good }), TileError::Stages { given: 0, least: 1 });
        let registers = TileError::Registers { needed: 260, available: 240 };
        assert_eq!(dkv(DkvTile { tile_m: 80, ..good }), registers);
        let both = DkvTile { division: Division::Gradients, ..good };
        assert_eq!(dkv(both), TileError::Shape { tile_m: 64, tile_n: 128 });
        let wide = DkvTile { head_dim: 272, ..good };
        assert_eq!(dkv(wide), TileError::HeadDim { head_dim: 272, head_dim_v: 128 });
        let dq = DqTile { k_stages: 5, ..DqTile::choose(256, 256, &H100).unwrap() };
        assert!(matches!(dq.check(&H100), Err(TileError::SharedMemory { .. })));
        let adding = DkvTile::choose_adding([128, 128], AddOrder::Any, &H100).unwrap();
        assert_eq!((adding.tile_n, adding.tile_m, adding.stages), (128, 64, 2));
        assert_eq!(DkvTile::choose_adding([256, 256], AddOrder::Any, &H100), None);
        let shape = TileError::Shape { tile_m: 48, tile_n: 128 };
        assert_eq!(dkv(DkvTile { tile_m: 48, ..adding }), shape);
        let small = H100.smem_bytes(100 << 10);
        assert_eq!(DqTile::choose(256, 256, &small), None);
    }
}
