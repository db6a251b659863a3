use std::collections::BTreeSet;

use fa3_ir::{Layout, descriptor_address};
use proptest::prelude::*;

use super::*;

const SWIZZLED: [Swizzle; 3] = [Swizzle::B32, Swizzle::B64, Swizzle::B128];

/// Every byte of the tile is in exactly one element, and every element where the tile is.
fn fills(operand: &Operand, rows: u32, k: u32, bytes: BTreeSet<u32>) {
    let elements: BTreeSet<u32> =
        (0..rows).flat_map(|r| (0..k).map(move |k| (r, k))).map(|(r, k)| operand.address(r, k)).collect();
    assert_eq!(elements.len() as u32, rows * k, "two elements at one address");
    let covered = elements.iter().flat_map(|&address| address..address + operand.elem_bytes).collect();
    assert_eq!(bytes, covered);
}

#[test]
fn k_major_tiles_are_bijections() {
    for swizzle in SWIZZLED {
        for elem_bytes in [1, 2] {
            let (start, row) = (4096, swizzle.row_bytes());
            let layout = Layout::k_major(swizzle);
            let tile: BTreeSet<u32> = (0..row / 32)
                .flat_map(|step| {
                    let descriptor = layout.descriptor()
                        + descriptor_address(start)
                        + u64::from(step) * layout.k_step(Major::K);
                    let operand = Operand::decode(descriptor, Major::K, elem_bytes).unwrap();
                    let chunks = operand.chunks(0..64, 32 / elem_bytes);
                    assert_eq!(chunks.len(), 2 * 64, "2 chunks of each row");
                    chunks
                })
                .collect();
            assert_eq!(tile, (start..start + 64 * row).step_by(16).collect());
            // The steps together cover whole rows; so does a single one as deep as a row.
            let operand =
                Operand::decode(layout.descriptor() + descriptor_address(start), Major::K, elem_bytes)
                    .unwrap();
            fills(&operand, 64, row / elem_bytes, (start..start + 64 * row).collect());
        }
    }
}

#[test]
fn mn_major_tiles_are_bijections() {
    for swizzle in SWIZZLED {
        let (start, rows) = (2048, 64);
        let layout = Layout::mn_major(swizzle, rows);
        let operand = Operand::decode(layout.descriptor() + descriptor_address(start), Major::Mn, 2).unwrap();
        fills(&operand, 128, rows, (start..start + 128 * rows * 2).collect());
    }
}

#[test]
fn tiles_without_swizzle_are_bijections() {
    // 8 x 16-byte matrices, the next along K 128 bytes on, the next 8 rows 1024.
    let layout = Layout { swizzle: Swizzle::None, leading: 128, stride: 1024 };
    for (major, elem_bytes) in [(Major::K, 1), (Major::K, 2)] {
        let operand = Operand::decode(layout.descriptor(), major, elem_bytes).unwrap();
        fills(&operand, 32, 128 / elem_bytes, (0..4096).collect());
        assert_eq!(operand.address(9, 16 / elem_bytes), 1024 + 16 + 128);
    }
    // Along M or N the roles of the offsets change.
    let operand = Operand::decode(layout.descriptor(), Major::Mn, 2).unwrap();
    fills(&operand, 32, 64, (0..4096).collect());
    assert_eq!((operand.address(8, 0), operand.address(0, 8), operand.address(1, 1)), (1024, 128, 18));
}

/// Rows 2 and 12 of the 128-byte pattern as the PTX ISA draws it: chunk c of row r lies at chunk c ⊕ (r mod 8).
#[test]
fn swizzled_rows_are_the_documented_ones() {
    let descriptor = Layout::k_major(Swizzle::B128).descriptor() + descriptor_address(1024);
    let operand = Operand::decode(descriptor, Major::K, 2).unwrap();
    assert_eq!(operand.address(2, 0), 1024 + 2 * 128 + 2 * 16);
    assert_eq!(operand.address(12, 9), 1024 + 12 * 128 + (1 ^ 4) * 16 + 2);
    let descriptor = Layout::mn_major(Swizzle::B128, 16).descriptor() + descriptor_address(1024);
    let operand = Operand::decode(descriptor, Major::Mn, 2).unwrap();
    assert_eq!(operand.address(64 + 8, 10), 1024 + 2048 + 10 * 128 + (1 ^ 2) * 16);
}

fn operands() -> impl Strategy<Value = (Operand, u32)> {
    let any = (0..4usize, any::<bool>(), 1u32..3, 0u64..8, 1u64..4, 1u64..4);
    any.prop_map(|(swizzle, mn, elem_bytes, start, leading, stride)| {
        let swizzle = Swizzle::ALL[swizzle];
        let pattern = u64::from(swizzle.pattern_bytes());
        let elem_bytes = if mn { 2 } else { elem_bytes };
        let major = if mn { Major::Mn } else { Major::K };
        let layout =
            Layout { swizzle, leading: (leading * pattern) as u32, stride: (stride * pattern) as u32 };
        let descriptor = layout.descriptor() + start * pattern / 16;
        (Operand::decode(descriptor, major, elem_bytes).unwrap(), 32 / elem_bytes)
    })
}

proptest! {
    #[test]
    fn chunks_are_those_of_the_elements((operand, k) in operands(), first in 0u32..40, len in 1u32..40) {
        let rows = first..first + len;
        let expected: BTreeSet<u32> = rows
            .clone()
            .flat_map(|r| (0..k).map(move |k| (r, k)))
            .map(|(r, k)| operand.address(r, k) & !15)
            .collect();
        prop_assert_eq!(operand.chunks(rows, k), expected.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let layout = Layout::k_major(Swizzle::B128);
    let at = |start| layout.descriptor() + descriptor_address(start);
    let refused = |descriptor, major| Operand::decode(descriptor, major, 2).unwrap_err();

    assert!(Operand::decode(at(1024 + 96), Major::K, 2).is_ok());
    assert_eq!(refused(at(1024 + 112), Major::K), DescriptorError::Depth { column: 112, row: 128 });
    assert_eq!(
        refused(at(1024 + 128), Major::K),
        DescriptorError::Start { start: 1152, row: 128, pattern: 1024 }
    );
    assert_eq!(refused(at(512), Major::Mn), DescriptorError::Start { start: 512, row: 128, pattern: 1024 });
    let base_offset = at(1024) | 3 << 49;
    assert_eq!(
        refused(base_offset, Major::K),
        DescriptorError::BaseOffset { descriptor: base_offset, base_offset: 3 }
    );
    // A step past the 18 bits of an address carries into a bit that no field has.
    let carried = at(0x3_FC00) + layout.k_step(Major::K) * 32;
    assert_eq!(refused(carried, Major::K), DescriptorError::Reserved { descriptor: carried, bits: 1 << 14 });
    let split = Layout { stride: 512, ..layout }.descriptor();
    assert_eq!(refused(split, Major::K), DescriptorError::Stride { stride: 512, pattern: 1024 });
    // Without swizzle there is no pattern to leave.
    assert!(
        Operand::decode(
            Layout { swizzle: Swizzle::None, leading: 48, stride: 80 }.descriptor() + 3,
            Major::K,
            2
        )
        .is_ok()
    );
}

/// Compares with what wgmma read on an H100 (`hopper/record.py`): for every layout the number of the element that is
/// B(n, k), n < 64.
#[test]
fn operands_lie_where_an_h100_finds_them() {
    let mut rest: &[u8] = include_bytes!("../hopper/operand.bin");
    let mut layouts = 0;
    while let Some((head, after)) = rest.split_first_chunk::<10>() {
        let (&descriptor, &[mn, elem_bytes]) =
            head.split_first_chunk::<8>().map(|(d, r)| (d, r.first_chunk().unwrap())).unwrap();
        let (descriptor, elem_bytes) = (u64::from_le_bytes(descriptor), u32::from(elem_bytes));
        let major = if mn == 1 { Major::Mn } else { Major::K };
        let operand = Operand::decode(descriptor, major, elem_bytes).unwrap();
        let k = 32 / elem_bytes;
        let (found, after) = after.split_at(2 * 64 * k as usize);
        for (i, element) in found.as_chunks::<2>().0.iter().enumerate() {
            let (n, k) = (i as u32 / k, i as u32 % k);
            let hardware = u32::from(u16::from_le_bytes(*element)) * elem_bytes;
            assert_eq!(operand.address(n, k), hardware, "{operand:x?} ({n}, {k})");
        }
        rest = after;
        layouts += 1;
    }
    assert_eq!(layouts, 2 * (2 + 1 + 2 + 4) + 2 + 3 * 2 + 1);
}
