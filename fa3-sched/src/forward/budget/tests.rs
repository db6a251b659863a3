use super::*;
use crate::forward::{Fp8Inputs, TileRow};
use fa3_types::ValueLayout;
use proptest::prelude::*;

const H100: DeviceLimits = DeviceLimits::h100_sxm();

fn shapes() -> impl Iterator<Item = CtaTile> {
    TileRow::table().iter().map(|row| row.tile)
}

/// The tile 128 x 176 with two stages, head_dim 128, f16.
fn dense128() -> CtaTile {
    let is_it = |tile: &CtaTile| (tile.head_dim, tile.tile_m) == (128, 128);
    CtaTile { tile_n: 176, stages: 2, ..shapes().find(is_it).unwrap() }
}

#[test]
fn every_row_fits() {
    for TileRow { tile: row, why, .. } in TileRow::table() {
        row.check(&H100).unwrap_or_else(|error| panic!("{row}: {error}"));
        let Registers { entry, producer, converter, consumer, second } = row.registers();
        let producer = producer.unwrap_or_else(|| panic!("{row} has no producer"));
        assert_eq!(converter.is_some(), row.converters() > 0);
        let converting = row.converters() * converter.unwrap_or(0);
        assert_eq!(second.is_some(), row.column_groups() > 1);
        let consuming = second.map_or(row.consumers * consumer, |second| consumer + second);
        assert!(128 * (producer + converting + consuming) <= REGISTER_POOL, "{row}");
        assert!(entry * row.threads() <= REGISTER_POOL, "{row}");
        assert!([entry, producer, consumer].iter().all(|n| n % 8 == 0 && (24..=256).contains(n)), "{row}");
        assert!(producer <= entry && entry <= consumer, "{row}");
        assert!(!why.is_empty(), "{row}");
    }
    assert_eq!(H100.smem_bytes, 232_448);
}

#[test]
fn a_row_too_large_is_refused() {
    let row = dense128();
    let shape = |row: CtaTile| {
        let CtaTile { tile_m, tile_n, stages, consumers, .. } = row;
        assert_eq!(row.check(&H100), Err(TileError::Shape { tile_m, tile_n, stages, consumers }));
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
    assert_eq!(CtaTile { tile_n: 192, ..row }.check(&H100), Ok(()));
    let registers = TileError::Registers { needed: 104 + 52 + 64 + 32, available: 240 };
    assert_eq!(CtaTile { tile_n: 208, ..row }.check(&H100), Err(registers));
    let smem = TileError::SharedMemory { needed: ((32 + 3 * 88) << 10) + 1024, available: 232_448 };
    assert_eq!(CtaTile { stages: 3, ..row }.check(&H100), Err(smem));
    // Three warpgroups have no registers for P of 192 keys.
    let wide = CtaTile { tile_m: 192, consumers: 3, head_dim: 64, head_dim_v: 64, tile_n: 192, ..row };
    assert_eq!(wide.check(&H100), Err(TileError::Registers { needed: 176 + 32, available: 160 }));
    assert_eq!(CtaTile { tile_n: 128, ..wide }.check(&H100), Ok(()));
}

#[test]
fn converted_blocks_lie_beside_those_that_are_loaded() {
    let is_it = |tile: &CtaTile| tile.precision == Precision::Converted { q: false } && tile.head_dim == 128;
    let two = shapes().find(is_it).unwrap();
    assert_eq!((two.threads(), two.converters(), two.rescales_lazily()), (512, 1, true));
    // Blocks have 128 keys of 128 bytes each: two stages as loaded, and two dequantized blocks of twice the bytes.
    let keys = (2 + 2 * 2) * 128 * 128;
    assert_eq!(two.smem(), Smem { q: 128 * 128 * 2, k: keys, v: keys, p: 0 });
    // e4m3 Q takes the memory of a block of K; V then has one block less as well.
    let of_q = two.of_converted_queries();
    let fewer = (1 + 2 * 2) * 128 * 128;
    assert_eq!(of_q.smem(), Smem { q: 128 * 128 * (2 + 1), k: fewer, v: fewer, p: 0 });
    assert_eq!((of_q.check(&H100), of_q.threads(), of_q.registers()), (Ok(()), 512, two.registers()));
    let registers =
        Registers { entry: 128, producer: Some(56), converter: Some(56), consumer: 200, second: None };
    assert_eq!(two.registers(), registers);
    assert_eq!(two.accumulators(), CtaTile { precision: Precision::Half, ..two }.accumulators());
    let one = CtaTile { tile_m: 64, tile_n: 64, consumers: 1, ping_pong: false, ..two };
    assert_eq!((one.check(&H100), one.threads(), one.converters()), (Ok(()), 512, 2));
    let wide = CtaTile { head_dim_v: 256, ..one };
    assert_eq!((wide.check(&H100), wide.threads(), wide.registers().entry), (Ok(()), 384, 168));
    for tile in [
        CtaTile { head_dim_v: 256, tile_n: 64, ..two },
        CtaTile { tile_m: 192, consumers: 3, ..two },
        CtaTile { tile_n: 96, ..two },
        CtaTile { head_dim: 80, ..two },
        CtaTile { loads: Loads::Consumers, ..two },
    ] {
        let CtaTile { tile_n, consumers, head_dim, head_dim_v, .. } = tile;
        let error = TileError::Converted { tile_n, consumers, head_dim, head_dim_v };
        assert_eq!(tile.check(&H100), Err(error));
    }
}

#[test]
fn what_no_instruction_computes_is_refused() {
    let row = CtaTile { tile_n: 64, ..dense128() };
    for (head_dim, head_dim_v) in
        [(72, 128), (u32::MAX, 128), (0, 128), (128, 68), (128, 264), (128, 0), (128, u32::MAX)]
    {
        let error = TileError::HeadDim { head_dim, head_dim_v, most: 1024, most_v: 256 };
        assert_eq!(CtaTile { head_dim, head_dim_v, ..row }.check(&H100), Err(error));
    }
    assert_eq!(CtaTile { head_dim: 80, ..row }.check(&H100), Ok(()));
    assert_eq!(CtaTile { head_dim_v: 72, ..row }.check(&H100), Ok(()));
}

/// Two warpgroups share 64 rows, and each holds the registers of 256 columns.
#[test]
fn columns_of_o_are_shared() {
    let is_it = |tile: &CtaTile| (tile.head_dim, tile.head_dim_v) == (512, 512);
    let row = shapes().find(is_it).unwrap();
    assert_eq!((row.column_groups(), row.columns(), row.threads()), (2, 256, 384));
    assert_eq!(row.accumulators(), Accumulators { s: 32, p: 16, o: 128, pv: 0 });
    let Registers { producer, consumer, second, .. } = row.registers();
    assert_eq!((producer, consumer, second), (Some(56), 240, Some(208)));
    assert_eq!(row.smem(), Smem { q: 64 << 10, k: 64 << 10, v: 64 << 10, p: (8 << 10) + 512 });
    assert!(row.rescales_lazily() && !row.loads_v_first());
    let others = shapes().filter(|tile| tile.head_dim_v <= 256 && !tile.qv);
    assert!(others.into_iter().all(|tile| tile.column_groups() == 1 && !tile.loads_v_first()));
    let small = CtaTile { head_dim: 64, head_dim_v: 128, tile_n: 16, stages: 2, ..row };
    // Where the producer converts rows of e4m3, blocks are as in 16 bits, and it has more registers.
    let converted = CtaTile { precision: Precision::Converted { q: false }, ..row };
    let few = CtaTile { head_dim: 64, head_dim_v: 128, ..converted };
    let Registers { producer, converter, consumer, second, .. } = converted.registers();
    assert_eq!((producer, converter, consumer, second), (Some(104), None, 208, Some(192)));
    assert_eq!((converted.smem(), converted.threads()), (row.smem(), row.threads()));
    assert!([row, small, converted, few].into_iter().all(|tile| tile.check(&H100).is_ok()));
    for tile in [
        CtaTile { head_dim_v: 192, ..small },
        CtaTile { pipeline: Pipeline::Serial, ..small },
        CtaTile { pipeline: Pipeline::TwoStage, ..small },
        CtaTile { ping_pong: true, ..small },
        CtaTile { loads: Loads::Consumers, ..small },
        CtaTile { precision: Precision::Converted { q: true }, ..few },
        CtaTile { precision: Precision::Fp8(Fp8Inputs::HEADS), tile_n: 64, ..small },
    ] {
        let CtaTile { head_dim_v, precision, .. } = tile;
        assert_eq!(tile.check(&H100), Err(TileError::Columns { head_dim_v, precision }));
    }
    for tile in [CtaTile { head_dim: 96, ..few }, CtaTile { tile_n: 32, ..few }] {
        let CtaTile { tile_n, consumers, head_dim, head_dim_v, .. } = tile;
        let error = TileError::Converted { tile_n, consumers, head_dim, head_dim_v };
        assert_eq!(tile.check(&H100), Err(error));
    }
    let (head_dim, head_dim_v) = (512, 528);
    let error = TileError::HeadDim { head_dim, head_dim_v, most: 1024, most_v: 512 };
    assert_eq!(CtaTile { head_dim_v, ..row }.check(&H100), Err(error));
    let stages = CtaTile { stages: 2, ..row };
    let memory = TileError::SharedMemory { needed: ((5 * 64 + 8 + 1) << 10) + 512, available: 232_448 };
    assert_eq!(stages.check(&H100), Err(memory));
}

/// `qv` lies beside Q, and two blocks of V are present at a time, which a paired pipeline needs.
#[test]
fn latent_attention_multiplies_v_twice() {
    let is_it = |tile: &CtaTile| tile.qv && tile.head_dim_v == 512;
    let row = shapes().find(is_it).unwrap();
    assert_eq!(row.smem(), Smem { q: (8 + 64) << 10, k: 16 << 10, v: 128 << 10, p: (8 << 10) + 512 });
    assert_eq!(row.accumulators(), Accumulators { s: 32, p: 16, o: 128, pv: 0 });
    assert!(row.loads_v_first() && row.rescales_lazily());
    let small = CtaTile { head_dim_v: 128, tile_n: 16, ..row };
    let one = CtaTile { consumers: 1, head_dim_v: 48, ..small };
    assert!([row, small, one].into_iter().all(|tile| tile.check(&H100).is_ok()));
    for tile in [
        CtaTile { stages: 1, ..small },
        CtaTile { pipeline: Pipeline::TwoStage, ..one },
        CtaTile { loads: Loads::Consumers, ..one },
        CtaTile { head_dim_v: 40, ..one },
        CtaTile { precision: Precision::Converted { q: false }, tile_n: 64, ..one },
    ] {
        let CtaTile { head_dim_v, stages, precision, .. } = tile;
        assert_eq!(tile.check(&H100), Err(TileError::Latent { head_dim_v, stages, precision }));
    }
}

#[test]
fn what_no_warpgroup_computes_is_refused() {
    let one = CtaTile { tile_n: 64, tile_m: 64, consumers: 1, ping_pong: false, ..dense128() };
    assert_eq!(one.check(&H100), Ok(()));
    let turns = CtaTile { ping_pong: true, ..one };
    assert_eq!(turns.check(&H100), Err(TileError::PingPong { consumers: 1 }));
}

/// KiB of Q, K and V, and registers of S, P and O, for FlashAttention-3's own tiles. They are computed by hand from the
/// tile sizes in its source. Two of its tiles keep P in shared memory, and have no kernel here.
#[test]
#[rustfmt::skip]
fn published_tiles_need_what_they_need() {
    let cases = [
        ( 64,  64, 192, 128, 3, [24, 32,  32], [64,  32,  32]),
        (128, 128, 128, 176, 2, [32, 88,  88], [88,  44,  64]),
        (128, 128, 128, 128, 2, [32, 64,  64], [64,  32,  64]),
        (192, 192, 128, 112, 2, [48, 84,  84], [56,  28,  96]),
        (192, 128, 128, 128, 2, [48, 96,  64], [64,  32,  64]),
        (256, 256, 128,  80, 2, [64, 80,  80], [40,  20, 128]),
        ( 64, 256, 128,  96, 2, [16, 24,  96], [48,  24, 128]),
    ];
    let base = CtaTile { ping_pong: false, ..dense128() };
    for (head_dim, head_dim_v, tile_m, tile_n, consumers, kib, registers) in cases {
        let row = CtaTile { head_dim, head_dim_v, tile_m, tile_n, consumers, ..base };
        let Smem { q, k, v, .. } = row.smem();
        assert_eq!([q, k, v], kib.map(|kib| kib << 10), "{row}");
        let Accumulators { s, p, o, .. } = row.accumulators();
        assert_eq!([s, p, o], registers, "{row}");
        row.check(&H100).unwrap();
    }
}

/// The tile 128 x 128 of e4m3 at head_dim 128, with two stages and paired products.
fn fp8() -> CtaTile {
    let is_it = |tile: &CtaTile| tile.precision.is_fp8() && (tile.head_dim, tile.tile_n) == (128, 128);
    shapes().find(is_it).unwrap()
}

/// KiB of Q, K and V, and registers of S, P, O and PV, for e4m3 tiles, computed by hand. V is stored twice: as loaded,
/// and transposed with 8 more columns. PV has registers of its own if products are paired, and otherwise only where S's
/// registers do not suffice.
#[test]
#[rustfmt::skip]
fn fp8_tiles_need_what_they_need() {
    use Pipeline::{Paired, Serial};
    let cases = [
        ( 64,  64, 192, 128, 3, Serial, [12, 16,  34], [64, 16,  32,  0], 160),
        ( 64,  64, 192,  64, 3, Paired, [12,  8,  17], [32,  8,  32, 36], 160),
        (128, 128, 128, 128, 2, Paired, [16, 32,  66], [64, 16,  64, 68], 232),
        (128, 128, 128,  64, 2, Serial, [16, 16,  33], [32,  8,  64, 36], 232),
        ( 64, 128,  64,  64, 1, Paired, [ 4,  8,  33], [32,  8,  64, 68], 255),
        (256, 256, 128, 128, 2, Serial, [32, 64, 130], [64, 16, 128,  4], 232),
        (256, 256, 128,  64, 2, Serial, [32, 32,  65], [32,  8, 128, 36], 232),
    ];
    for (head_dim, head_dim_v, tile_m, tile_n, consumers, pipeline, kib, registers, available) in cases {
        let ping_pong = consumers > 1;
        let tile = CtaTile {
            head_dim, head_dim_v, tile_m, tile_n, consumers, pipeline, ping_pong, ..fp8()
        };
        let smem = tile.smem();
        assert_eq!([smem.q, smem.k, smem.v], kib.map(|kib| kib << 10), "{tile}");
        let Accumulators { s, p, o, pv } = tile.accumulators();
        assert_eq!([s, p, o, pv], registers, "{tile}");
        assert!(s + p + o + pv + FP8_REGISTER_RESERVE <= available, "{tile}");
        assert_eq!(tile.registers().consumer.min(255), available, "{tile}");
        tile.check(&H100).unwrap();
    }
}

/// An e4m3 tile is refused in forms that a 16-bit tile may have.
#[test]
fn what_fp8_does_not_compute_is_refused() {
    let fp8 = CtaTile { tile_n: 64, ..fp8() };
    let refused = |tile: CtaTile, error| {
        assert_eq!(tile.check(&H100), Err(error), "{tile}");
        assert_eq!(CtaTile { precision: Precision::Half, ..tile }.check(&H100), Ok(()), "{tile}");
    };
    let form = TileError::Fp8 { tile_n: 64, head_dim_v: 128 };
    assert_eq!(fp8.check(&H100), Ok(()));
    refused(CtaTile { loads: Loads::Consumers, ..fp8 }, form.clone());
    refused(CtaTile { pipeline: Pipeline::TwoStage, ..fp8 }, form.clone());
    refused(CtaTile { pipeline: Pipeline::ThreeStage, ..fp8 }, form);
    // There are not enough registers for PV, which is in flight as a whole if it is paired with QK.
    refused(CtaTile { head_dim_v: 256, ..fp8 }, TileError::Fp8 { tile_n: 64, head_dim_v: 256 });
    // A warp transposes 32 keys at a time, a thread writes 16 bytes of O at a time, and the number of columns is a
    // power of two.
    for tile_n in [16, 48, 80] {
        refused(CtaTile { tile_n, ..fp8 }, TileError::Fp8 { tile_n, head_dim_v: 128 });
    }
    for head_dim_v in [8, 16, 24, 48, 96, 120] {
        refused(CtaTile { head_dim_v, ..fp8 }, TileError::Fp8 { tile_n: 64, head_dim_v });
    }
    for head_dim_v in [32, 64, 128] {
        assert_eq!(CtaTile { head_dim_v, ..fp8 }.check(&H100), Ok(()));
    }
    assert_eq!(CtaTile { head_dim_v: 256, pipeline: Pipeline::Serial, ..fp8 }.check(&H100), Ok(()));
}

/// Three warpgroups have too few registers at head_dim 128, three stages need too much memory at head_dim 256, and a
/// sum over 160 keys is too long.
#[test]
fn fp8_tiles_too_large_are_refused() {
    let three = CtaTile { tile_m: 192, consumers: 3, pipeline: Pipeline::Serial, ..fp8() };
    let registers = TileError::Registers { needed: 64 + 16 + 64 + 4 + 20, available: 160 };
    assert_eq!(three.check(&H100), Err(registers));
    assert_eq!(CtaTile { tile_n: 64, head_dim_v: 64, ..three }.check(&H100), Ok(()));
    let long = TileError::Fp8 { tile_n: 160, head_dim_v: 64 };
    assert_eq!(CtaTile { tile_n: 160, head_dim_v: 64, ..fp8() }.check(&H100), Err(long));
    let deep = CtaTile { head_dim: 256, head_dim_v: 256, pipeline: Pipeline::Serial, stages: 3, ..fp8() };
    let needed = ((32 + 3 * 96) << 10) + 3 * 8 * 128 + 1024;
    let smem = TileError::SharedMemory { needed, available: 232_448 };
    assert_eq!(deep.check(&H100), Err(smem));
}

proptest! {
    /// For any numbers in a tile, its checks neither overflow nor divide by zero.
    #[test]
    fn any_tile_is_checked(
        numbers in proptest::array::uniform6(prop_oneof![0u32..600, any::<u32>()]), ping_pong: bool,
        three_stage: bool, no_producer: bool, is_fp8: bool,
        transposed: bool, block_scales: bool, v_channels: bool,
    ) {
        let v_layout = if transposed { ValueLayout::Transposed } else { ValueLayout::Rows };
        let inputs = Fp8Inputs { v_layout, block_scales, v_channels };
        let [tile_m, tile_n, stages, consumers, head_dim, head_dim_v] = numbers;
        let tile = CtaTile {
            ping_pong,
            pipeline: if three_stage { Pipeline::ThreeStage } else { Pipeline::Paired },
            loads: if no_producer { Loads::Consumers } else { Loads::Producer },
            precision: if is_fp8 { Precision::Fp8(inputs) } else { Precision::Half },
            ..dense128()
        };
        let any = CtaTile { tile_m, tile_n, stages, consumers, head_dim, head_dim_v, ..tile };
        // Numbers that pass the first checks reach the other checks.
        let consumers = consumers % 5;
        let near = CtaTile { tile_m: 64 * consumers, tile_n: 64, stages: 2, consumers, ..any };
        for tile in [any, near] {
            let _ = (tile.check(&H100), tile.threads(), tile.registers());
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
    // A kernel has 256 registers for each thread, but an instruction can name only 255.
    assert_eq!(registers(Loads::Consumers), [(256, None, 256), (256, None, 256), (168, None, 168)]);
}

/// Without a producer, two consumers have more registers.
#[test]
fn what_a_producer_leaves() {
    let wide = CtaTile { head_dim: 64, head_dim_v: 256, tile_n: 112, ..dense128() };
    let needed = 56 + 28 + 128 + 32;
    assert_eq!(wide.check(&H100), Err(TileError::Registers { needed, available: 240 }));
    let wide = CtaTile { loads: Loads::Consumers, ..wide };
    assert_eq!((wide.check(&H100), wide.threads()), (Ok(()), 256));
    let wider = CtaTile { tile_n: 128, ..wide };
    let needed = 64 + 32 + 128 + 32 + 10;
    assert_eq!(wider.check(&H100), Err(TileError::Registers { needed, available: 255 }));
}
