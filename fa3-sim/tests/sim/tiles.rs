//! Fragments in tiles: what is stored is where the tile says that an element is.

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
        let mut b = Builder::new("store", Launch::threads(128));
        let y = b.param_pointer("y", Elem::F32);
        let tile = b.tile("tile", shape);
        let (row, col) = (b.frag_row(), b.frag_col());
        let mut frag = Frag::zeros(&mut b, 32);
        frag.map(&mut b, |b, _, at| {
            let (row, col) = (b.add(row, 8 * at.half), b.add(col, at.col));
            let number = b.mad_u32(row, 64, col);
            b.f32_of_u32(number)
        });
        frag.store(&mut b, &tile);
        b.sync_cta();
        let tid = b.tid();
        let mine = b.lt_u32(tid, 64);
        b.if_lanes(mine, |b| {
            b.for_each((0, 32), 1, |b, col| {
                let from = b.element_address(&tile, tid, col);
                let number = if elem == Elem::F32 {
                    b.load::<F32>(from)
                } else {
                    let code = b.load::<B16>(from);
                    b.f32_of_bf16(code)
                };
                let to = b.mad_u32(tid, 32, col);
                let to = b.mad_wide_u32(to, 4, y);
                b.store(to, number);
            });
        });
        let kernel = b.finish();
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
