//! Fragments in tiles: what is stored is where the tile says that an element is.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Simulation};

use crate::samples::{assert_clean, floats, policies};

/// 64 x 32 numbers, 64 row + column, stored as a fragment and read back element by element.
#[test]
fn fragments_are_stored_element_by_element() {
    for (elem, swizzle) in
        [Elem::F32, Elem::Bf16].into_iter().flat_map(|elem| Swizzle::ALL.map(|s| (elem, s)))
    {
        let shape = TileShape::new(elem, 64, 32).swizzled(swizzle);
        if shape.panels() == 0 {
            continue; // A row of 64 bytes has no panel of 128.
        }
        let kernel = Kernel::build("store", Launch::threads(128), |b| {
            let y = b.param_pointer("y", Elem::F32);
            let tile = b.tile("tile", shape);
            let (row, col) = (b.frag_row(), b.frag_col());
            let mut frag = Frag::zeros(b, 32);
            frag.map_in_place(|_, at| {
                let (row, col) = (row + at.half.rows(), col + at.col);
                row.mad(64, col).to_f32()
            });
            frag.store(tile);
            b.sync_cta();
            let tid = b.tid();
            b.if_lanes(tid.lt(64), || {
                b.for_each((0, 32), 1, |col| {
                    let from = tile.element(tid, col);
                    let number = if elem == Elem::F32 {
                        b.load::<F32>(from)
                    } else {
                        b.load::<B16>(from).bf16_to_f32()
                    };
                    b.store(tid.mad(32, col).mad_wide(4, y), number);
                });
            });
        });
        for policy in policies().take(3) {
            let mut memory = Memory::new();
            let y = memory.alloc("y", 64 * 32 * 4);
            let args = vec![ArgValue::Pointer(y.address())];
            assert_clean(&Simulation::new(&kernel).args(args).policy(policy).run(&mut memory).unwrap());
            for (index, number) in floats(&memory, y).into_iter().enumerate() {
                let exact = (64 * (index / 32) + index % 32) as f32;
                let expected = if elem == Elem::F32 { exact } else { half::bf16::from_f32(exact).to_f32() };
                assert_eq!(number, expected, "{shape}, element {index}");
            }
        }
    }
}

/// Each row of an operand gets its own factor.
#[test]
fn rows_of_an_operand_are_multiplied() {
    for (ty, elem) in [(WgmmaType::F16, Elem::F16), (WgmmaType::Bf16, Elem::Bf16)] {
        let kernel = Kernel::build("scale", Launch::threads(128), |b| {
            let y = b.param_pointer("y", Elem::F32);
            let tile = b.tile("tile", TileShape::new(elem, 64, 32));
            let (row, col) = (b.frag_row(), b.frag_col());
            let mut frag = Frag::zeros(b, 32);
            frag.map_in_place(|_, at| (col + (at.col + 1)).to_f32());
            let mut operand = frag.to_a(ty);
            // 2 to the power of minus a number of each four rows, 0 to 7.
            operand.scale_rows(Rows([row, row + 8].map(|row| ((row & 28).to_f32() * -0.25).ex2())));
            operand.store(tile);
            b.sync_cta();
            let tid = b.tid();
            b.if_lanes(tid.lt(64), || {
                b.for_each((0, 32), 1, |col| {
                    let number = b.load::<B16>(tile.element(tid, col));
                    let number = if elem == Elem::F16 { number.f16_to_f32() } else { number.bf16_to_f32() };
                    b.store(tid.mad(32, col).mad_wide(4, y), number);
                });
            });
        });
        let mut memory = Memory::new();
        let y = memory.alloc("y", 64 * 32 * 4);
        let args = vec![ArgValue::Pointer(y.address())];
        assert_clean(&Simulation::new(&kernel).args(args).run(&mut memory).unwrap());
        for (index, number) in floats(&memory, y).into_iter().enumerate() {
            let (row, col) = (index / 32, index % 32);
            assert_eq!(number, (col + 1) as f32 * 0.5f32.powi(row as i32 / 4 % 8), "{elem}, element {index}");
        }
    }
}

/// Elements at constant distances from a thread's are where the tile says they are.
#[test]
fn elements_at_constant_distances() {
    for (elem, swizzle) in
        [Elem::F32, Elem::E4m3].into_iter().flat_map(|elem| Swizzle::ALL.map(|s| (elem, s)))
    {
        let shape = TileShape::new(elem, 72, 128).swizzled(swizzle);
        let chunk = 16 / elem.bytes();
        // A thread's element is in the first 8 rows and 4 chunks, so that distances are multiples of 4 chunks.
        let places: Vec<(u32, u32)> = [(0, 0), (8, 0), (0, 4), (24, 4), (64, 28)]
            .map(|(rows, chunks)| (rows, chunks * chunk))
            .into_iter()
            .filter(|&(_, col)| col < 128)
            .collect();
        let kernel = Kernel::build("distances", Launch::threads(32), |b| {
            let y = b.param_pointer("y", Elem::U32);
            let tile = b.tile("tile", shape);
            let tid = b.tid();
            let (row, col) = (tid & 7, (tid >> 3) * chunk);
            let elements = tile.elements(row, col);
            for (index, &(rows, cols)) in places.iter().enumerate() {
                b.store(elements.at(rows, cols), tid + 100 * index as u32);
                b.sync_cta();
                let found = b.load::<B32>(tile.element(row + rows, col + cols));
                b.store(tid.mad(4, index as u32 * 128).mad_wide(1, y), found);
                b.sync_cta();
            }
        });
        let mut memory = Memory::new();
        let y = memory.alloc("y", 5 * 128);
        let args = vec![ArgValue::Pointer(y.address())];
        assert_clean(&Simulation::new(&kernel).args(args).run(&mut memory).unwrap());
        let found: Vec<u32> = floats(&memory, y).into_iter().map(f32::to_bits).collect();
        for (index, found) in found.chunks(32).take(places.len()).enumerate() {
            let expected: Vec<u32> = (0..32).map(|thread| thread + 100 * index as u32).collect();
            assert_eq!(found, expected, "{shape}, {:?}", places[index]);
        }
    }
}

/// Blocks of columns whose number is computed are where those of a known number are, of a whole tile and of its rows.
#[test]
fn numbered_blocks_of_columns() {
    const COLS: u32 = 64;
    for (elem, swizzle) in
        [Elem::F32, Elem::Bf16].into_iter().flat_map(|elem| Swizzle::ALL.map(|s| (elem, s)))
    {
        let shape = TileShape::new(elem, 64, 4 * COLS).swizzled(swizzle);
        let kernel = Kernel::build("blocks", Launch::threads(32), |b| {
            let y = b.param_pointer("y", Elem::U32);
            let tile = b.tile("tile", shape);
            let tid = b.tid();
            // A thread has an element of a block: 4 blocks, 8 places.
            let (number, row, col) = (tid & 3, (tid >> 2) * 3, (tid >> 2) * 8);
            let whole = tile.nth_col_block(number, COLS);
            let rows = tile.rows(32, 32).nth_col_block(number, COLS);
            assert_eq!((whole.shape().rows, rows.shape().rows, rows.shape().cols), (64, 32, COLS));
            let found = [whole.element(row, col), rows.element(row, col)];
            let expected = [row, row + 32].map(|row| tile.element(row, number.mad(COLS, col)));
            for (index, (found, expected)) in found.into_iter().zip(expected).enumerate() {
                b.store(tid.mad(4, index as u32 * 128).mad_wide(1, y), found ^ expected);
            }
        });
        let mut memory = Memory::new();
        let y = memory.alloc("y", 2 * 128);
        let args = vec![ArgValue::Pointer(y.address())];
        assert_clean(&Simulation::new(&kernel).args(args).run(&mut memory).unwrap());
        let differences: Vec<u32> = floats(&memory, y).into_iter().map(f32::to_bits).collect();
        assert_eq!(differences, [0; 64], "{shape}");
    }
}

/// A warp lends each of two warpgroups a stage of a ring with numbers in it, round after round. The warpgroup doubles
/// them in their place, and the warp stores them.
#[test]
fn stages_that_are_lent() {
    const ROUNDS: u32 = 3;
    let shape = TileShape::new(Elem::F32, 32, 4);
    let kernel = Kernel::build("lend", Launch::threads(384), |b| {
        let (x, y) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32));
        let ring = b.stored_ring("ring", 2, [1, 4], [("tile", shape)]);
        b.init_mbarriers();
        b.role(Role::new("lends", 0..4), || {
            let warp = (b.tid() >> 5).shfl_idx(0);
            b.if_uniform(warp.lt(2), || {
                let mut place = ring.stage(warp).lender();
                b.for_each((0, ROUNDS), 1, |round| {
                    let at = (round.mad(2, warp)) * shape.bytes();
                    b.once_per_warp(|| {
                        let mut slot = place.lend();
                        slot.load_flat(0, x + at.to_u64());
                        slot.commit();
                    });
                    let [doubled] = place.back();
                    b.once_per_warp(|| {
                        b.store_tile_flat(doubled, y + at.to_u64());
                        b.bulk_commit();
                        b.bulk_wait_read(0);
                    });
                });
            });
        });
        b.role(Role::new("doubles", 4..12), || {
            let (me, thread) = (b.warpgroup(), b.tid() & 127);
            // One round late, and once in two.
            let round = Rounds::begin(b);
            let mut lent = ring.stage(me).consumer_by(round.late(1).every(2));
            round.next();
            b.for_each((0, ROUNDS), 1, |_| {
                let slot = lent.wait();
                let at = slot.tile().element(thread >> 2, thread & 3);
                b.store(at, b.load::<F32>(at) * 2.0);
                slot.release_loaded();
                round.next();
                round.next();
            });
        });
    });
    let numbers: Vec<f32> = (0..ROUNDS * 256).map(|x| x as f32).collect();
    let doubled: Vec<f32> = numbers.iter().map(|x| 2.0 * x).collect();
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    for policy in policies() {
        let mut memory = Memory::new();
        let (x, y) = (memory.alloc_from("x", &bytes), memory.alloc("y", bytes.len()));
        memory.expect_written_once(y);
        let args = [x, y].map(|buffer| ArgValue::Pointer(buffer.address())).to_vec();
        assert_clean(&Simulation::new(&kernel).args(args).policy(policy).run(&mut memory).unwrap());
        assert_eq!(floats(&memory, y), doubled, "{policy:?}");
    }
}

/// Two rings whose slots are those of a round: one of 4 stages that is full in the round it is counted by, one of 2 of
/// which a round reads the slot of the round before, too. Every second round goes on to the next slot of the latter.
#[test]
fn slots_of_a_round_and_of_the_one_before() {
    const ROUNDS: u32 = 12;
    let shape = TileShape::new(Elem::F32, 8, 4);
    let kernel = Kernel::build("rounds", Launch::threads(160), |b| {
        let y = b.param_pointer("y", Elem::F32);
        let many = b.stored_ring("many", 4, [1, 4], [("tile", shape)]);
        let few = b.stored_ring("few", 2, [1, 4], [("tile", shape)]);
        b.init_mbarriers();
        b.role(Role::new("fills", 0..1), || {
            let lane = b.tid();
            let rounds = Rounds::begin(b);
            let (mut many, mut few) = (many.producer_by(rounds), few.producer());
            let fill = |slot: EmptySlot<'_, 1>, number: V<'_, B32>| {
                b.store(slot.tiles()[0].element(lane >> 2, lane & 3), number.to_f32());
                slot.commit_stored();
            };
            b.for_each((0, ROUNDS), 1, |round| {
                b.if_uniform((round & 1).eq(0), || fill(few.acquire(), round * 100));
                fill(many.acquire(), round);
                rounds.next();
            });
        });
        b.role(Role::new("empties", 1..5), || {
            let thread = b.tid() - 32;
            let rounds = Rounds::begin(b);
            let (mut many, mut few) = (many.consumer_by(rounds), few.consumer());
            let mut before = few.held_beside();
            b.for_each((0, ROUNDS / 2), 1, |pair| {
                let of_pair = few.wait();
                b.if_uniform(pair.eq(0), || before.begin(&of_pair));
                b.for_each((0, 2), 1, |half| {
                    let slot = many.wait();
                    let at = |tile: Tile<'_, '_>| b.load::<F32>(tile.element((thread >> 2) & 7, thread & 3));
                    let sum = at(before.tile()) + at(slot.tile());
                    b.store(pair.mad(2, half).mad(128, thread).mad_wide(4, y), sum);
                    of_pair.fence_loads();
                    before.advance(&of_pair);
                    slot.release();
                    rounds.next();
                });
                before.keep(of_pair);
            });
        });
    });
    for policy in policies() {
        let mut memory = Memory::new();
        let y = memory.alloc("y", (4 * 128 * ROUNDS) as usize);
        let args = vec![ArgValue::Pointer(y.address())];
        assert_clean(&Simulation::new(&kernel).args(args).policy(policy).run(&mut memory).unwrap());
        for (index, sum) in floats(&memory, y).into_iter().enumerate() {
            let round = index as u32 / 128;
            // The first round of a pair still has the slot of the pair before.
            let of_pair = if round.is_multiple_of(2) { round.saturating_sub(2) } else { round - 1 };
            assert_eq!(sum, (100 * of_pair + round) as f32, "round {round}, {policy:?}");
        }
    }
}

/// The maximum of bits is that of the numbers: of either sign, of both, of zeros, and of numbers that are hidden.
#[test]
fn maxima_of_bits_are_maxima() {
    const COLS: u32 = 24;
    let kernel = Kernel::build("maxima", Launch::threads(128), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let tid = b.tid();
        let mut frag = Frag::zeros(b, COLS);
        frag.map_in_place(|_, at| b.load::<F32>(tid.mad(COLS / 2, at.index() as u32).mad_wide(4, x)));
        let (numbers, bits) = (frag.partial_row_max(), frag.partial_row_max_of_bits());
        for (index, max) in [numbers, bits].into_iter().flat_map(|rows| rows.0).enumerate() {
            b.store(tid.mad(4, index as u32).mad_wide(4, y), max);
        }
    });
    // A warp has rows of each kind in one run, and of one kind in another.
    for kinds in 1..=6 {
        let number = |index: usize| {
            let (thread, place) = (index / 12, index % 12);
            let size = 0.1 + (index * 7 % 31) as f32;
            match (thread % kinds, place % 5) {
                (0, _) => size,
                (1, _) => -size,
                (2, 0..3) | (3, 4) | (4, _) => f32::NEG_INFINITY,
                (5, 0) => 0.0,
                (5, _) => -0.0,
                (2, _) => -size,
                _ => size - 15.0,
            }
        };
        let numbers: Vec<f32> = (0..128 * 12).map(number).collect();
        let mut memory = Memory::new();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let x = memory.alloc_from("x", &bytes);
        let y = memory.alloc("y", 128 * 4 * 4);
        let args = [x, y].map(|array| ArgValue::Pointer(array.address())).to_vec();
        assert_clean(&Simulation::new(&kernel).args(args).run(&mut memory).unwrap());
        for (thread, maxima) in floats(&memory, y).chunks(4).enumerate() {
            let [upper, lower, of_bits @ ..] = maxima else { unreachable!() };
            assert_eq!([*upper, *lower], *of_bits, "{kinds} kinds, thread {thread}");
        }
    }
}
