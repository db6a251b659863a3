//! Elements of arrays as bytes.

use fa3_ir::Elem;
use fa3_quant::E4m3;
use half::{bf16, f16};

/// The bytes of the element nearest to `x`.
pub(super) fn encode(elem: Elem, x: f64) -> Vec<u8> {
    let x = x as f32;
    match elem {
        Elem::F32 => x.to_le_bytes().to_vec(),
        Elem::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        Elem::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        Elem::E4m3 => vec![E4m3::from_f32(x).to_bits()],
        Elem::U8 | Elem::U32 | Elem::U64 => unreachable!("no kernel of the ladder has arrays of {elem}"),
    }
}

/// The numbers of an array.
pub(super) fn decode(elem: Elem, bytes: &[u8]) -> Vec<f64> {
    let words = bytes.chunks_exact(elem.bytes() as usize);
    let number = |word: &[u8]| match (elem, word) {
        (Elem::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (Elem::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (Elem::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (Elem::E4m3, &[code]) => f64::from(E4m3::from_bits(code).to_f32()),
        _ => unreachable!("no kernel of the ladder has arrays of {elem}"),
    };
    words.map(number).collect()
}
