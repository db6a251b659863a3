use std::collections::BTreeSet;

use fa3_ir::{Layout, descriptor_address};
use proptest::prelude::*;

use super::*;

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
    // A step beyond the 18 address bits carries into a bit outside of every field.
    let carried = at(0x3_FC00) + layout.k_step(Major::K) * 32;
    assert_eq!(refused(carried, Major::K), DescriptorError::Reserved { descriptor: carried, bits: 1 << 14 });
    let split = Layout { stride: 512, ..layout }.descriptor();
    assert_eq!(refused(split, Major::K), DescriptorError::Stride { stride: 512, pattern: 1024 });
    // Without swizzle there is no pattern to cross.
    assert!(
        Operand::decode(
            Layout { swizzle: Swizzle::None, leading: 48, stride: 80 }.descriptor() + 3,
            Major::K,
            2
        )
        .is_ok()
    );
}
