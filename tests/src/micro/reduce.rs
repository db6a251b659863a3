//! Bulk reductions in global memory, with subnormal and special numbers.

use fa3_ir::{BoxShape, Elem, Launch, Swizzle};

use super::bench::micro;
use super::values::{BRAINS, FLOATS, HALVES, INTEGERS, Stream};
use super::{Micro, Rule};

pub(super) fn tests() -> Vec<Micro> {
    let tensors = [
        ("reduce tensor f32", Elem::F32),
        ("reduce tensor f16", Elem::F16),
        ("reduce tensor bf16", Elem::Bf16),
        ("reduce tensor u32", Elem::U32),
        ("reduce tensor u64", Elem::U64),
    ];
    let mut tests: Vec<Micro> = tensors.into_iter().map(|(name, elem)| tensor(name, elem)).collect();
    tests.push(flat());
    tests
}

/// Operands: pairs of special values, then pairs of random values.
fn operands(elem: Elem, count: usize, name: &str) -> [Vec<u8>; 2] {
    let special: &[u64] = match elem {
        Elem::F32 => &FLOATS,
        Elem::F16 => &HALVES,
        Elem::Bf16 => &BRAINS,
        Elem::U8 | Elem::U32 | Elem::U64 | Elem::E4m3 => &INTEGERS,
    };
    ["memory", "box"].map(|which| {
        let stream = Stream::new(&format!("{name} {which}"));
        let value = |index: u64| {
            let special = stream.pick(2 * index, special);
            if index.is_multiple_of(4) { stream.bits(2 * index + 1) } else { special }
        };
        (0..count as u64)
            .flat_map(|index| value(index).to_le_bytes()[..elem.bytes() as usize].to_vec())
            .collect()
    })
}

/// Reduces a box whose last columns and rows lie outside of the tensor.
fn tensor(name: &str, elem: Elem) -> Micro {
    let columns = 128 / elem.bytes();
    let shape = BoxShape::new(elem, &[columns, 16], Swizzle::B128);
    let dims = [u64::from(columns) + 16 / u64::from(elem.bytes()), 18];
    let [memory, _] = operands(elem, (dims[0] * dims[1]) as usize, name);
    let [_, added] = operands(elem, (columns * 16) as usize, name);
    micro(name, Launch::threads(32), Rule::Bits, |bench| {
        let map = bench.target_tensor(shape, &dims, memory);
        let region = bench.filled(shape.bytes(), added);
        bench.in_first(|| bench.b.tma_reduce_add(map, (32 / elem.bytes(), 3), region));
    })
}

fn flat() -> Micro {
    let [memory, added] = operands(Elem::F32, 1024, "reduce flat");
    micro("reduce flat", Launch::threads(32), Rule::Bits, |bench| {
        let to = bench.target(memory);
        let region = bench.filled(4096, added);
        bench.in_first(|| bench.b.bulk_reduce_add_f32(to, region, 4096));
    })
}
