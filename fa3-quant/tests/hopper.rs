//! The arithmetic of this crate compared with an H100, bit by bit.
//!
//! `hopper/record.py` recorded the GPU's results (H100 80GB HBM3, driver 580.159.04), and this test replays them.

use fa3_quant::{Accumulation, E4m3, Operand, Row};

const MMA: &[u8] = include_bytes!("hopper/mma.bin");
const CVT: &[u8] = include_bytes!("hopper/cvt.bin");

const ROWS: usize = 64;
const COLUMNS: usize = 8;
const DEPTH: usize = Accumulation::DEPTH;

/// One instruction: A and B as codes, C and D as bits of f32.
struct Trial<'a> {
    a: &'a [u8],
    b: &'a [u8],
    c: Vec<u32>,
    d: Vec<u32>,
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

fn trials() -> impl Iterator<Item = Trial<'static>> {
    let sizes = [ROWS * DEPTH, COLUMNS * DEPTH, 4 * ROWS * COLUMNS];
    MMA.chunks_exact(sizes[0] + sizes[1] + 2 * sizes[2]).map(move |trial| {
        let (a, rest) = trial.split_at(sizes[0]);
        let (b, rest) = rest.split_at(sizes[1]);
        let (c, d) = rest.split_at(sizes[2]);
        Trial { a, b, c: words(c), d: words(d) }
    })
}

#[test]
fn the_tensor_core_sums_as_the_model_says() {
    let mut compared = 0;
    for (number, trial) in trials().enumerate() {
        let b = Operand::new(DEPTH, COLUMNS, |k, column| E4m3::from_bits(trial.b[column * DEPTH + k]));
        for (row, codes) in trial.a.chunks_exact(DEPTH).enumerate() {
            let a = Row::new(codes.iter().map(|&code| E4m3::from_bits(code)));
            let place = row * COLUMNS..(row + 1) * COLUMNS;
            let mut d: Vec<f32> = trial.c[place.clone()].iter().map(|&c| f32::from_bits(c)).collect();
            Accumulation::OneLevel.chain(&a, &b, 0..DEPTH, &mut d);
            for (column, (model, &hardware)) in d.iter().zip(&trial.d[place]).enumerate() {
                let model = model.to_bits();
                assert_eq!(
                    model, hardware,
                    "trial {number}, row {row}, column {column}: {model:#010x}, the H100 gives {hardware:#010x}"
                );
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 16 * ROWS * COLUMNS);
}

#[test]
fn conversions_are_the_instructions() {
    let (pairs, rest) = CVT.as_chunks::<5>();
    assert!(rest.is_empty() && pairs.len() > 1500);
    for &[x0, x1, x2, x3, code] in pairs {
        let x = f32::from_le_bytes([x0, x1, x2, x3]);
        let ours = E4m3::from_f32(x).to_bits();
        assert_eq!(ours, code, "{x:e} ({:#010x}): {ours:#04x}, the H100 gives {code:#04x}", x.to_bits());
    }
}
