//! The tile table: one row for each kind of forward kernel.
//!
//! The rows began as FlashAttention-3's (`tile_size.h` of its public source) and changed where measurements
//! on an H100 said so. Latent attention with head dimensions 576 and 512 has no row: K and V as separate
//! tiles of 64 keys leave room for one stage only, and a kernel that reads V out of K's tile is another one.

use crate::MaskClass::{Causal, Dense, Window};
use crate::{Inputs, Loads, MaskClass, Overlap, PPlace, TileRow, TileShape};

const ANY_MASK: &[MaskClass] = &[Dense, Causal, Window];
const NOT_WINDOW: &[MaskClass] = &[Dense, Causal];

/// What most rows have in common: 128 rows, two consumer warpgroups, P in registers under two-stage overlap.
const BASE: TileRow = TileRow {
    shape: TileShape {
        inputs: Inputs::Bits16,
        head_dim: 128,
        head_dim_v: 128,
        tile_m: 128,
        tile_n: 128,
        stages: 2,
        consumers: 2,
        loads: Loads::Producer,
        overlap: Overlap::TwoStage,
        p_place: PPlace::Registers,
        ping_pong: false,
        promoted_columns: 0,
    },
    masks: ANY_MASK,
    max_rows: None,
    min_seqlen_k: 0,
    why: "",
};

/// Decoding: at most 64 rows, one consumer warpgroup.
const DECODE: TileRow = TileRow {
    shape: TileShape { tile_m: 64, consumers: 1, ..BASE.shape },
    max_rows: Some(64),
    why: "64 rows occupy one warpgroup; loading K and V bounds the time, not the tile (unmeasured)",
    ..BASE
};

/// 8-bit inputs.
const E4M3: TileRow =
    TileRow { shape: TileShape { inputs: Inputs::E4m3, promoted_columns: 64, ..BASE.shape }, ..BASE };

/// Decoding with 8-bit inputs.
const E4M3_DECODE: TileRow =
    TileRow { shape: TileShape { inputs: Inputs::E4m3, promoted_columns: 64, ..DECODE.shape }, ..DECODE };

pub(crate) const TABLE: &[TileRow] = &[
    TileRow {
        shape: TileShape {
            head_dim: 64,
            head_dim_v: 64,
            tile_m: 192,
            consumers: 3,
            ping_pong: true,
            ..BASE.shape
        },
        masks: NOT_WINDOW,
        why: "S, P and O fill three warpgroups' registers exactly; exp2 takes as long as the GEMMs, so turns pay 3 to 8 %",
        ..BASE
    },
    TileRow {
        shape: TileShape {
            head_dim: 64,
            head_dim_v: 64,
            tile_m: 192,
            tile_n: 112,
            consumers: 3,
            ping_pong: true,
            ..BASE.shape
        },
        masks: &[Window],
        why: "as dense, but a mask with two sides takes registers that 128 keys do not leave",
        ..BASE
    },
    TileRow { shape: TileShape { head_dim: 64, head_dim_v: 64, ..DECODE.shape }, ..DECODE },
    TileRow {
        shape: TileShape {
            head_dim: 64,
            head_dim_v: 256,
            tile_n: 96,
            overlap: Overlap::None,
            ping_pong: true,
            ..BASE.shape
        },
        why: "as published; the softmax runs under the other warpgroup's GEMMs (two-stage overlap would fit, unmeasured)",
        ..BASE
    },
    TileRow {
        shape: TileShape {
            head_dim: 64,
            head_dim_v: 512,
            tile_m: 64,
            tile_n: 64,
            overlap: Overlap::None,
            p_place: PPlace::Both,
            ..BASE.shape
        },
        why: "two warpgroups share the 512 columns of O, which one cannot hold; the second reads P from shared memory",
        ..BASE
    },
    TileRow {
        shape: TileShape {
            head_dim: 96,
            head_dim_v: 96,
            tile_m: 192,
            tile_n: 144,
            consumers: 3,
            p_place: PPlace::Smem,
            ping_pong: true,
            ..BASE.shape
        },
        masks: NOT_WINDOW,
        why: "P in registers would spill at 160 a thread",
        ..BASE
    },
    TileRow {
        shape: TileShape {
            head_dim: 96,
            head_dim_v: 96,
            tile_m: 192,
            consumers: 3,
            p_place: PPlace::Smem,
            ping_pong: true,
            ..BASE.shape
        },
        masks: &[Window],
        why: "as dense, but narrower blocks waste less at the window's edges",
        ..BASE
    },
    TileRow { shape: TileShape { head_dim: 96, head_dim_v: 96, ..DECODE.shape }, ..DECODE },
    TileRow {
        shape: TileShape { tile_n: 176, ping_pong: true, ..BASE.shape },
        masks: &[Dense],
        why: "fewer, wider blocks while registers are left over; ping-pong gains up to 1 %",
        ..BASE
    },
    TileRow {
        masks: &[Causal, Window],
        why: "square tiles waste least on the diagonal; ping-pong costs 1 %",
        ..BASE
    },
    TileRow {
        shape: TileShape { tile_n: 176, ..BASE.shape },
        masks: &[Causal],
        min_seqlen_k: 8192,
        why: "from 8192 keys on, width gains more than the diagonal wastes",
        ..BASE
    },
    DECODE,
    TileRow {
        shape: TileShape { head_dim: 192, head_dim_v: 128, ..BASE.shape },
        masks: NOT_WINDOW,
        why: "the widest block that fits shared memory",
        ..BASE
    },
    TileRow {
        shape: TileShape { head_dim: 192, head_dim_v: 128, tile_n: 96, ..BASE.shape },
        masks: &[Window],
        why: "narrower blocks waste less at the window's edges",
        ..BASE
    },
    TileRow {
        shape: TileShape { head_dim: 192, head_dim_v: 192, tile_n: 112, ..BASE.shape },
        masks: NOT_WINDOW,
        why: "the widest block that fits shared memory",
        ..BASE
    },
    TileRow {
        shape: TileShape { head_dim: 192, head_dim_v: 192, tile_n: 96, ..BASE.shape },
        masks: &[Window],
        why: "narrower blocks waste less at the window's edges",
        ..BASE
    },
    TileRow { shape: TileShape { head_dim: 192, head_dim_v: 128, ..DECODE.shape }, ..DECODE },
    TileRow { shape: TileShape { head_dim: 192, head_dim_v: 192, tile_n: 112, ..DECODE.shape }, ..DECODE },
    TileRow {
        shape: TileShape { head_dim: 256, head_dim_v: 256, tile_n: 80, ..BASE.shape },
        masks: &[Causal],
        min_seqlen_k: 2048,
        why: "as dense: beyond 2048 keys width gains more than the diagonal wastes",
        ..BASE
    },
    TileRow {
        shape: TileShape { head_dim: 256, head_dim_v: 256, tile_n: 80, ..BASE.shape },
        masks: &[Dense],
        why: "the widest block that fits shared memory; ping-pong costs 1 to 4 %",
        ..BASE
    },
    TileRow {
        shape: TileShape { head_dim: 256, head_dim_v: 256, tile_n: 64, ..BASE.shape },
        masks: &[Causal, Window],
        why: "below 2048 keys 3 % ahead of 80: less waste on the diagonal",
        ..BASE
    },
    TileRow { shape: TileShape { head_dim: 256, head_dim_v: 256, tile_n: 80, ..DECODE.shape }, ..DECODE },
    TileRow {
        shape: TileShape { head_dim: 64, head_dim_v: 64, tile_n: 224, ..E4M3.shape },
        why: "the widest block whose S and P leave registers for fp32 sums (unmeasured)",
        ..E4M3
    },
    TileRow {
        shape: TileShape { head_dim: 96, head_dim_v: 96, tile_n: 192, promoted_columns: 48, ..E4M3.shape },
        why: "the widest block whose S and P leave registers for fp32 sums, in two halves of O (unmeasured)",
        ..E4M3
    },
    TileRow {
        shape: TileShape { tile_n: 160, ping_pong: true, ..E4M3.shape },
        why: "224 keys, as without fp32 sums, would leave no registers for them (unmeasured)",
        ..E4M3
    },
    TileRow {
        shape: TileShape { head_dim: 192, head_dim_v: 192, ping_pong: true, ..E4M3.shape },
        why: "160 keys, as without fp32 sums, would leave no registers for them (unmeasured)",
        ..E4M3
    },
    TileRow {
        shape: TileShape { head_dim: 256, head_dim_v: 256, tile_n: 64, ping_pong: true, ..E4M3.shape },
        why: "128 keys, as without fp32 sums, would leave no registers for them (unmeasured)",
        ..E4M3
    },
    TileRow { shape: TileShape { head_dim: 64, head_dim_v: 64, ..E4M3_DECODE.shape }, ..E4M3_DECODE },
    TileRow {
        shape: TileShape { head_dim: 96, head_dim_v: 96, promoted_columns: 48, ..E4M3_DECODE.shape },
        ..E4M3_DECODE
    },
    E4M3_DECODE,
    TileRow { shape: TileShape { head_dim: 192, head_dim_v: 192, ..E4M3_DECODE.shape }, ..E4M3_DECODE },
    TileRow {
        shape: TileShape { head_dim: 256, head_dim_v: 256, tile_n: 96, ..E4M3_DECODE.shape },
        ..E4M3_DECODE
    },
];
