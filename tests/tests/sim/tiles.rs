//! Fragments in tiles: stored elements lie where the tile's layout puts them.

use fa3_ir::lang::*;
use fa3_sim::Policy;
use half::bf16;

use crate::runs::{policies, results};

/// Every combination of these types with a swizzle.
fn swizzled(elems: [Elem; 2]) -> impl Iterator<Item = (Elem, Swizzle)> {
    elems.into_iter().flat_map(|elem| Swizzle::ALL.map(|swizzle| (elem, swizzle)))
}

/// Stores a tile of 64 x 32 to y, element by element.
fn write_out(b: &Builder, tile: Tile) {
    let (tid, y, elem) = (b.tid(), b.param_pointer("y", Elem::F32), tile.shape().elem);
    b.sync_cta();
    b.if_lanes(tid.lt(64), || {
        b.for_each((0, 32), 1, |col| {
            let from = tile.element(tid, col);
            let number = if elem == Elem::F32 {
                b.load::<F32>(from)
            } else {
                let code = b.load::<B16>(from);
                if elem == Elem::F16 { code.f16_to_f32() } else { code.bf16_to_f32() }
            };
            b.store(tid.mad(32, col).mad_wide(4, y), number);
        });
    });
}

/// The 64 x 32 numbers 64 row + column are stored as a fragment, and read back element by element.
#[test]
fn fragments_are_stored_element_by_element() {
    for (elem, swizzle) in swizzled([Elem::F32, Elem::Bf16]) {
        let shape = TileShape::new(elem, 64, 32).swizzled(swizzle);
        if shape.panels() == 0 {
            continue; // A row of 64 bytes cannot have panels of 128 bytes.
        }
        let kernel = Kernel::build("store", Launch::threads(128), |b| {
            let tile = b.tile("tile", shape);
            let (row, col) = (b.frag_row(), b.frag_col());
            let mut frag = Frag::zeros(b, 32);
            frag.map_in_place(|_, at| (row + at.half.rows()).mad(64, col + at.col).to_f32());
            frag.store(tile);
            write_out(b, tile);
        });
        let exact = (0..64 * 32).map(|index| (64 * (index / 32) + index % 32) as f32);
        let rounded = |x| if elem == Elem::F32 { x } else { bf16::from_f32(x).to_f32() };
        let expected: Vec<f32> = exact.map(rounded).collect();
        for policy in policies().take(3) {
            assert_eq!(results(&kernel, policy, &[], 64 * 32), expected, "{shape}");
        }
    }
}

/// Each row of an operand is multiplied by its own factor.
#[test]
fn rows_of_an_operand_are_multiplied() {
    for (ty, elem) in [(WgmmaType::F16, Elem::F16), (WgmmaType::Bf16, Elem::Bf16)] {
        let kernel = Kernel::build("scale", Launch::threads(128), |b| {
            let tile = b.tile("tile", TileShape::new(elem, 64, 32));
            let (row, col) = (b.frag_row(), b.frag_col());
            let mut frag = Frag::zeros(b, 32);
            frag.map_in_place(|_, at| (col + (at.col + 1)).to_f32());
            let mut operand = frag.to_a(ty);
            // The factor is 2^-i; i, from 0 to 7, is the index of four rows.
            operand.scale_rows(Rows([row, row + 8].map(|row| ((row & 28).to_f32() * -0.25).ex2())));
            operand.store(tile);
            write_out(b, tile);
        });
        let scaled = |index: i32| (index % 32 + 1) as f32 * 0.5f32.powi(index / 128 % 8);
        let expected: Vec<f32> = (0..64 * 32).map(scaled).collect();
        assert_eq!(results(&kernel, Policy::Eager, &[], 64 * 32), expected, "{elem}");
    }
}

/// Elements at constant offsets from a thread's element lie where the tile's layout puts them.
#[test]
fn elements_at_constant_distances() {
    for (elem, swizzle) in swizzled([Elem::F32, Elem::E4m3]) {
        let shape = TileShape::new(elem, 72, 128).swizzled(swizzle);
        let chunk = 16 / elem.bytes();
        // A thread's element is in the first 8 rows and 4 chunks. Offsets are multiples of 8 rows and 4 chunks.
        let mut places: Vec<(u32, u32)> =
            [(0, 0), (8, 0), (0, 4), (24, 4), (64, 28)].map(|(rows, chunks)| (rows, chunks * chunk)).into();
        places.retain(|&(_, col)| col < 128);
        let kernel = Kernel::build("distances", Launch::threads(32), |b| {
            let y = b.param_pointer("y", Elem::F32);
            let tile = b.tile("tile", shape);
            let tid = b.tid();
            let (row, col) = (tid & 7, (tid >> 3) * chunk);
            let elements = tile.elements(row, col);
            for (index, &(rows, cols)) in (0..).zip(&places) {
                b.store(elements.at(rows, cols), tid + 100 * index);
                b.sync_cta();
                let found = b.load::<B32>(tile.element(row + rows, col + cols));
                b.store((tid + 32 * index).mad_wide(4, y), found.to_f32());
                b.sync_cta();
            }
        });
        let of = |index: usize| (0..32).map(move |thread| (thread + 100 * index) as f32);
        let expected: Vec<f32> = (0..places.len()).flat_map(of).collect();
        assert_eq!(results(&kernel, Policy::Eager, &[], expected.len()), expected, "{shape}, {places:?}");
    }
}

/// A computed index of a column block finds the same block as a constant index, in a tile and in rows of it.
#[test]
fn numbered_blocks_of_columns() {
    const COLS: u32 = 64;
    for (elem, swizzle) in swizzled([Elem::F32, Elem::Bf16]) {
        let shape = TileShape::new(elem, 64, 4 * COLS).swizzled(swizzle);
        let kernel = Kernel::build("blocks", Launch::threads(32), |b| {
            let y = b.param_pointer("y", Elem::U32);
            let tile = b.tile("tile", shape);
            let tid = b.tid();
            // A thread has an element of one of 4 blocks, at one of 8 positions of the block.
            let (number, row, col) = (tid & 3, (tid >> 2) * 3, (tid >> 2) * 8);
            let whole = tile.nth_col_block(number, COLS);
            let rows = tile.rows(32, 32).nth_col_block(number, COLS);
            assert_eq!((whole.shape().rows, rows.shape().rows, rows.shape().cols), (64, 32, COLS));
            let found = [whole.element(row, col), rows.element(row, col)];
            let expected = [row, row + 32].map(|row| tile.element(row, number.mad(COLS, col)));
            for (index, (found, expected)) in (0..).zip(found.into_iter().zip(expected)) {
                b.store((tid + 32 * index).mad_wide(4, y), found ^ expected);
            }
        });
        assert_eq!(results(&kernel, Policy::Eager, &[], 64), [0.0; 64], "{shape}");
    }
}

/// The maximum of the bits is the maximum of the numbers. The numbers have either sign or both signs, or are zeros or
/// masked.
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
    // In one run the rows of a warp have all kinds of numbers. In each of the other runs they have one kind.
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
        for (thread, maxima) in results(&kernel, Policy::Eager, &numbers, 128 * 4).chunks(4).enumerate() {
            assert_eq!(maxima[..2], maxima[2..], "{kinds} kinds, thread {thread}");
        }
    }
}
