//! The tile table: one row for each kind of forward kernel.
//!
//! The rows began as FlashAttention-3's (`tile_size.h` of its public source) and changed where measurements on an H100
//! said so. Each row says which alternatives it was measured against; these ran alternately in one process. Three
//! stages gain up to 2 % where they fit, and four stages gain nothing more.

use super::MaskClass::{Causal, Dense, Window};

use super::{CtaTile, Fp8Inputs, Loads, MaskClass, Pipeline, Precision, TileRow};

const ANY_MASK: &[MaskClass] = &[Dense, Causal, Window];
const NOT_WINDOW: &[MaskClass] = &[Dense, Causal];

/// The base of most rows: 128 rows, two consumer warpgroups that take turns, paired products.
const BASE: TileRow = TileRow {
    tile: CtaTile {
        head_dim: 128,
        head_dim_v: 128,
        qv: false,
        precision: Precision::Half,
        tile_m: 128,
        tile_n: 128,
        stages: 2,
        consumers: 2,
        loads: Loads::Producer,
        pipeline: Pipeline::Paired,
        ping_pong: true,
    },
    masks: ANY_MASK,
    max_rows: None,
    min_seqlen_k: 0,
    why: "",
};

/// Three consumer warpgroups, with full registers.
const WIDE: CtaTile = CtaTile { tile_m: 192, stages: 3, consumers: 3, ..BASE.tile };

/// Three warpgroups, each with a list of blocks of 64 keys. Stages let them run apart.
const LISTED_64: CtaTile =
    CtaTile { tile_n: 64, stages: 5, pipeline: Pipeline::Serial, ping_pong: false, ..WIDE };

/// Blocks that leave registers for O of 256 columns.
const DEEP: CtaTile = CtaTile { head_dim: 256, head_dim_v: 256, tile_n: 64, ..BASE.tile };

/// Decoding: at most 64 rows, one consumer warpgroup.
const DECODE: TileRow = TileRow {
    tile: CtaTile { tile_m: 64, consumers: 1, ping_pong: false, ..BASE.tile },
    max_rows: Some(64),
    why: "64 rows occupy one warpgroup; loading K and V bounds the time, not the tile (unmeasured)",
    ..BASE
};

/// Two warpgroups for rows that would leave the third one idle.
const FEW: TileRow =
    TileRow { max_rows: Some(128), why: "128 rows occupy two warpgroups, as long as K and V may be", ..BASE };

/// Two warpgroups that share 64 rows, for O with more columns than fit one warpgroup's registers. Each half of a block
/// of K and V has a stage of its own.
const HALVES: TileRow = TileRow {
    tile: CtaTile {
        head_dim: 512,
        head_dim_v: 512,
        tile_m: 64,
        tile_n: 64,
        stages: 1,
        ping_pong: false,
        ..BASE.tile
    },
    why: "O of up to 512 columns: two warpgroups have the same rows, a half of the columns each (unmeasured)",
    ..BASE
};

/// [`HALVES`] for e4m3 K and V, which the producer converts as it loads them.
const CONVERTED_HALVES: CtaTile = CtaTile { precision: Precision::Converted { q: false }, ..HALVES.tile };

/// Latent attention: a block of V is multiplied twice, for the scores and by P.
const LATENT: TileRow = TileRow {
    tile: CtaTile { head_dim: 64, head_dim_v: 256, qv: true, tile_n: 64, stages: 3, ..BASE.tile },
    why: "as much as fits beside qv (unmeasured)",
    ..BASE
};

/// [`LATENT`] with more columns.
const LATENT_HALVES: CtaTile =
    CtaTile { head_dim_v: 512, tile_m: 64, stages: 2, ping_pong: false, ..LATENT.tile };

/// e4m3 K and V that are dequantized for 16-bit Q: two consumers leave registers for the converter warps.
const CONVERTED: TileRow = TileRow {
    tile: CtaTile { precision: Precision::Converted { q: false }, ..BASE.tile },
    why: "as much as fits beside converted blocks (unmeasured)",
    ..BASE
};

/// [`CONVERTED`] with blocks of 64 keys.
const CONVERTED_64: CtaTile = CtaTile { tile_n: 64, stages: 3, ..CONVERTED.tile };

/// [`CONVERTED_64`] with one consumer, for O of 256 columns.
const CONVERTED_DEEP: CtaTile =
    CtaTile { head_dim_v: 256, tile_m: 64, consumers: 1, ping_pong: false, ..CONVERTED_64 };

/// e4m3: blocks of 128 keys, whose sums of products have a bias under 0.1 %.
const FP8: CtaTile = CtaTile { precision: Precision::Fp8(Fp8Inputs::HEADS), ..BASE.tile };

/// Three consumer warpgroups without ping-pong, whose work overlaps.
const FP8_WIDE: CtaTile =
    CtaTile { tile_m: 192, consumers: 3, pipeline: Pipeline::Serial, ping_pong: false, ..FP8 };

/// A row for masks, any number of query rows, and sequences with at least `min_seqlen_k` keys.
const fn row(tile: CtaTile, masks: &'static [MaskClass], min_seqlen_k: u32, why: &'static str) -> TileRow {
    TileRow { tile, masks, min_seqlen_k, why, ..BASE }
}

#[rustfmt::skip]
pub(super) const TABLE: &[TileRow] = &[
    row(CtaTile { head_dim: 64, head_dim_v: 64, ..WIDE }, &[Dense], 0,
        "three warpgroups with full registers; against two of 128 keys +5 % at 512 keys, +25 % at 4096; without turns -5 to -13 %"),
    row(CtaTile { head_dim: 64, head_dim_v: 64, ..WIDE }, &[Causal], 1536,
        "as dense: from 2048 keys on 10 to 28 % ahead of two warpgroups"),
    row(CtaTile { head_dim: 64, head_dim_v: 64, stages: 3, ..BASE.tile }, &[Causal], 0,
        "square tiles waste least on the diagonal: below 1536 keys 12 % ahead of 192 rows"),
    row(CtaTile { head_dim: 64, head_dim_v: 64, tile_n: 112, ..WIDE }, &[Window], 0,
        "as dense, but a mask with two sides takes registers that 128 keys do not leave"),
    TileRow { tile: CtaTile { head_dim: 64, head_dim_v: 64, ..BASE.tile }, ..FEW },
    TileRow { tile: CtaTile { head_dim: 64, head_dim_v: 64, ..DECODE.tile }, ..DECODE },
    row(CtaTile { head_dim: 64, head_dim_v: 256, tile_n: 80, ..BASE.tile }, ANY_MASK, 0,
        "the widest block whose S and P leave registers for O"),
    row(CtaTile { head_dim: 96, head_dim_v: 96, tile_n: 96, ..WIDE }, &[Dense, Window], 0,
        "three warpgroups with full registers: 0 to 10 % ahead of 144 keys with P in shared memory, 18 % of two warpgroups"),
    row(CtaTile { head_dim: 96, head_dim_v: 96, tile_n: 96, ..WIDE }, &[Causal], 1536,
        "as dense: from 4096 keys on 9 to 19 % ahead of two warpgroups"),
    row(CtaTile { head_dim: 96, head_dim_v: 96, stages: 3, ..BASE.tile }, &[Causal], 0,
        "square tiles waste least on the diagonal: at 1024 keys 17 % ahead of 192 rows"),
    TileRow { tile: CtaTile { head_dim: 96, head_dim_v: 96, ..BASE.tile }, ..FEW },
    TileRow { tile: CtaTile { head_dim: 96, head_dim_v: 96, ..DECODE.tile }, ..DECODE },
    row(CtaTile { tile_n: 80, ..WIDE }, &[Dense], 1536,
        "three warpgroups with full registers: from 2048 keys on 5 to 6 % ahead of two; 64 keys are as good"),
    row(CtaTile { tile_n: 80, ..WIDE }, &[Causal], 6144,
        "as dense: from 8192 keys on 4 to 6 % ahead of two warpgroups"),
    row(CtaTile { stages: 3, ..BASE.tile }, ANY_MASK, 0,
        "fewer rows and square tiles waste less where sequences are short; without turns -2 to -9 %"),
    FEW,
    DECODE,
    row(CtaTile { head_dim: 64, head_dim_v: 64, stages: 6, ..LISTED_64 }, &[], 0,
        "lists of blocks of 64: three warpgroups share loads of K and V, each computes its own list (docs/masks.md)"),
    row(LISTED_64, &[], 0, "as with 64 columns"),
    row(CtaTile { head_dim: 192, head_dim_v: 128, ..BASE.tile }, NOT_WINDOW, 0,
        "the widest block that fits shared memory"),
    row(CtaTile { head_dim: 192, head_dim_v: 128, tile_n: 96, ..BASE.tile }, &[Window], 0,
        "narrower blocks waste less at the window's edges"),
    row(CtaTile { head_dim: 192, head_dim_v: 192, tile_n: 96, ..BASE.tile }, ANY_MASK, 0,
        "up to 8 % ahead of 112 keys, the widest block that fits shared memory, and 0 to 7 % of 80"),
    TileRow { tile: CtaTile { head_dim: 192, head_dim_v: 128, ..DECODE.tile }, ..DECODE },
    TileRow { tile: CtaTile { head_dim: 192, head_dim_v: 192, tile_n: 112, ..DECODE.tile }, ..DECODE },
    row(DEEP, &[Dense, Window], 0,
        "1 to 5 % ahead of 80 keys, the widest block that fits shared memory; turns gain up to 2 %"),
    row(DEEP, &[Causal], 768, "as dense"),
    row(CtaTile { pipeline: Pipeline::TwoStage, ..DEEP }, &[Causal], 0,
        "row maxima often change in a tile's first blocks: at 512 keys 2 % ahead of lazy rescaling, at 1024 2 % behind"),
    TileRow { tile: CtaTile { head_dim: 256, head_dim_v: 256, tile_n: 80, ..DECODE.tile }, ..DECODE },
    HALVES,
    TileRow { tile: CtaTile { head_dim: 576, ..HALVES.tile }, ..HALVES },
    LATENT,
    row(LATENT_HALVES, ANY_MASK, 0,
        "two warpgroups have the same rows, a half of the columns each (unmeasured)"),
    TileRow { tile: CtaTile { head_dim: 64, head_dim_v: 64, stages: 3, ..CONVERTED.tile }, ..CONVERTED },
    TileRow { tile: CtaTile { head_dim: 64, ..CONVERTED_DEEP }, ..CONVERTED },
    TileRow { tile: CtaTile { head_dim: 96, head_dim_v: 96, stages: 3, ..CONVERTED.tile }, ..CONVERTED },
    CONVERTED,
    TileRow { tile: CtaTile { head_dim: 192, head_dim_v: 128, ..CONVERTED_64 }, ..CONVERTED },
    TileRow { tile: CtaTile { head_dim: 192, head_dim_v: 192, ..CONVERTED_64 }, ..CONVERTED },
    TileRow { tile: CtaTile { head_dim: 256, stages: 2, ..CONVERTED_DEEP }, ..CONVERTED },
    row(CONVERTED_HALVES, ANY_MASK, 0, "as in 16 bits: the producer converts rows (unmeasured)"),
    row(CtaTile { precision: Precision::Converted { q: false }, ..LATENT_HALVES }, ANY_MASK, 0,
        "as in 16 bits: the producer converts rows (unmeasured)"),
    row(CtaTile { head_dim: 64, head_dim_v: 64, ..FP8_WIDE }, &[Dense, Window], 0,
        "three warpgroups hide each other's waits: from 4096 keys on 4 to 10 % ahead of two with overlap"),
    row(CtaTile { head_dim: 64, head_dim_v: 64, ..FP8_WIDE }, &[Causal], 6144,
        "as dense: at 16384 keys 7 % ahead of two warpgroups"),
    row(CtaTile { head_dim: 64, head_dim_v: 64, stages: 3, ..FP8 }, &[Causal], 0,
        "square tiles waste least on the diagonal: at 512 keys 18 % ahead of 192 rows, at 4096 5 %"),
    row(CtaTile { tile_n: 96, ..FP8 }, &[Window], 0,
        "a mask with two sides takes registers that 128 keys do not leave"),
    row(FP8, NOT_WINDOW, 0,
        "turns gain 4 to 10 % with V in rows; three warpgroups of 96 keys were 15 % slower at 512, measured without turns"),
    row(CtaTile { head_dim: 256, head_dim_v: 256, pipeline: Pipeline::Serial, ..FP8 }, ANY_MASK, 0,
        "all that fits; turns and PV in halves: -3 to +4 %, and no spilled registers"),
];
