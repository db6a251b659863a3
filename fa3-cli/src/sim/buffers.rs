//! The initial contents of a program's buffers.

use fa3_ir::{Buffer, BufferRole, Elem, Program};
use fa3_quant::E4m3;
use half::{bf16, f16};
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rand_xoshiro::Xoshiro256PlusPlus;

/// The most bytes of all buffers. The simulator tracks every byte, so that these take some GiB.
const MOST_BYTES: usize = 256 << 20;

/// Why buffers cannot be initialized.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum BufferError {
    #[error("{given} bytes of buffers are more than the {limit} that are simulated")]
    Bytes { given: usize, limit: usize },
    #[error("{buffer} is a buffer of {elem}, for which there are no random numbers")]
    Elem { buffer: &'static str, elem: Elem },
}

/// The initial bytes of every buffer: standard normal numbers in inputs, except for lists and scales, and zeros where
/// the program adds. Buffers that are only written stay empty.
pub(crate) fn initial<K>(program: &Program<K>, seed: u64) -> Result<Vec<Vec<u8>>, BufferError> {
    let given = program.buffers.iter().map(Buffer::bytes).fold(0, usize::saturating_add);
    if given > MOST_BYTES {
        return Err(BufferError::Bytes { given, limit: MOST_BYTES });
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let bytes = |buffer: &Buffer| match buffer.role {
        // Lists, which the caller fills in.
        BufferRole::Input if buffer.elem == Elem::U32 => Ok(vec![0; buffer.bytes()]),
        // Scales must be positive, so they are 1. All other inputs are random.
        BufferRole::Input if !buffer.name.ends_with("descale") => random(buffer, &mut rng),
        BufferRole::Input | BufferRole::OptionalInput => Ok(1f32.to_le_bytes().repeat(buffer.len())),
        BufferRole::InOut => Ok(vec![0; buffer.bytes()]),
        BufferRole::Output | BufferRole::OptionalOutput | BufferRole::Scratch | BufferRole::TileCounter => {
            Ok(Vec::new())
        }
    };
    program.buffers.iter().map(bytes).collect()
}

/// Standard normal numbers in the buffer's element type.
pub(crate) fn random(buffer: &Buffer, rng: &mut Xoshiro256PlusPlus) -> Result<Vec<u8>, BufferError> {
    let mut bytes = Vec::with_capacity(buffer.bytes());
    for _ in 0..buffer.len() {
        let x: f32 = StandardNormal.sample(rng);
        match buffer.elem {
            Elem::F32 => bytes.extend(x.to_le_bytes()),
            Elem::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
            Elem::Bf16 => bytes.extend(bf16::from_f32(x).to_le_bytes()),
            Elem::E4m3 => bytes.push(E4m3::from_f32(x).to_bits()),
            elem @ (Elem::U8 | Elem::U32 | Elem::U64) => {
                return Err(BufferError::Elem { buffer: buffer.name, elem });
            }
        }
    }
    Ok(bytes)
}

/// The elements of a buffer as numbers.
pub(crate) fn numbers(elem: Elem, bytes: &[u8]) -> Vec<f64> {
    let number = |word: &[u8]| match (elem, word) {
        (Elem::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (Elem::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (Elem::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (Elem::E4m3, &[code]) => E4m3::from_bits(code).to_f32().into(),
        // All other types are unsigned integers.
        (_, bytes) => bytes.iter().rev().fold(0.0, |number, &byte| 256.0 * number + f64::from(byte)),
    };
    bytes.chunks_exact(elem.bytes() as usize).map(number).collect()
}

#[cfg(test)]
mod tests {
    use fa3_cuda::kernels::ladder::{GemmSize, gemm_split_k, vector_add};

    use super::*;

    #[test]
    fn inputs_are_drawn_by_the_seed() {
        let program = gemm_split_k::program(Elem::Bf16, GemmSize { m: 136, n: 264, k: 392 }, 2);
        let [a, b, c]: [Vec<u8>; 3] = initial(&program, 3).unwrap().try_into().unwrap();
        assert_eq!(initial(&program, 3).unwrap(), [a.clone(), b.clone(), c.clone()]);
        assert!(a != initial(&program, 4).unwrap()[0] && a[..1000] != b[..1000]);
        let numbers = a.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f64());
        let (count, squares) = (numbers.len() as f64, numbers.map(|x| x * x).sum::<f64>());
        // Fifty thousand squares of variance 2.
        assert!((squares / count - 1.0).abs() < 0.05, "{squares} / {count}");
        assert!(c.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn buffers_that_are_too_much() {
        let program = vector_add::program(1 << 30);
        assert_eq!(initial(&program, 1), Err(BufferError::Bytes { given: 12 << 30, limit: MOST_BYTES }));
    }
}
