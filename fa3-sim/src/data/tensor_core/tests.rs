use std::time::Instant;

use proptest::prelude::*;

use super::*;

/// Results of an H100: of f16 and bf16 by `hopper/record.py`, of e4m3 by fa3-quant's.
const HOPPER: &[u8] = include_bytes!("../hopper/mma.bin");
const HOPPER_E4M3: &[u8] = include_bytes!("../hopper/mma_e4m3.bin");

const TYPES: [WgmmaType; 3] = [WgmmaType::F16, WgmmaType::Bf16, WgmmaType::E4m3];

fn product(ty: WgmmaType, n: usize) -> Product {
    Product { ty, n, negate_a: false, negate_b: false, accumulate: true }
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks().0.iter().map(|&code| u16::from_le_bytes(code)).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&bits| f32::from_le_bytes(bits)).collect()
}

fn agrees(product: &Product, a: &[u16], b: &[u16], c: &[f32], hardware: &[f32], trial: usize) {
    let mut d = c.to_vec();
    multiply(product, Arithmetic::Exact, a, b, &mut d);
    for (i, (ours, hardware)) in d.iter().zip(hardware).enumerate() {
        assert_eq!(
            ours.to_bits(),
            hardware.to_bits(),
            "trial {trial}, {product:?}, element {i}: {ours:e} of C = {:e}, the H100 gives {hardware:e}",
            c[i]
        );
    }
}

#[test]
fn f16_and_bf16_are_what_an_h100_computes() {
    let (trials, rest) = HOPPER.as_chunks::<{ 4 + 2 * 16 * 16 + 2 * 8 * 16 + 2 * 4 * 16 * 8 }>();
    assert!(rest.is_empty());
    assert_eq!(trials.len(), 2 * (16 + 2 * 4));
    for (number, trial) in trials.iter().enumerate() {
        let (head, rest) = trial.split_at(4);
        let (a, rest) = rest.split_at(2 * 16 * 16);
        let (b, rest) = rest.split_at(2 * 8 * 16);
        let (c, d) = rest.split_at(4 * 16 * 8);
        let [negate_a, negate_b, accumulate] = [1, 2, 3].map(|i| head[i] == 1);
        let product = Product { ty: TYPES[usize::from(head[0])], n: 8, negate_a, negate_b, accumulate };
        agrees(&product, &halves(a), &halves(b), &floats(c), &floats(d), number);
    }
}

#[test]
fn e4m3_is_what_an_h100_computes() {
    let (trials, rest) = HOPPER_E4M3.as_chunks::<{ 64 * 32 + 8 * 32 + 2 * 4 * 64 * 8 }>();
    assert!(rest.is_empty());
    assert_eq!(trials.len(), 16);
    for (number, trial) in trials.iter().enumerate() {
        let (a, rest) = trial.split_at(64 * 32);
        let (b, rest) = rest.split_at(8 * 32);
        let (c, d) = rest.split_at(4 * 64 * 8);
        let [a, b] = [a, b].map(|codes| codes.iter().map(|&code| code.into()).collect::<Vec<u16>>());
        agrees(&product(WgmmaType::E4m3, 8), &a, &b, &floats(c), &floats(d), number);
    }
}

/// A finite number as (significand, its fraction bits, exponent), by the format's definition.
fn split(ty: WgmmaType, code: u16) -> (i128, i32, i32) {
    let (exponent_bits, mantissa_bits, bias) = match ty {
        WgmmaType::F16 => (5, 10, 15),
        WgmmaType::Bf16 => (8, 7, 127),
        WgmmaType::E4m3 => (4, 3, 7),
    };
    let mantissa = i128::from(code) & ((1 << mantissa_bits) - 1);
    let field = i32::from(code) >> mantissa_bits & ((1 << exponent_bits) - 1);
    let significand = if field == 0 { mantissa } else { mantissa + (1 << mantissa_bits) };
    let negative = code >> (exponent_bits + mantissa_bits) & 1 == 1;
    (if negative { -significand } else { significand }, mantissa_bits, field.max(1) - bias)
}

/// significand · 2^shift, truncated toward zero.
fn shifted(significand: i128, shift: i32) -> i128 {
    let size = significand.unsigned_abs();
    let size = if shift >= 0 { size << shift } else { size.checked_shr(shift.unsigned_abs()).unwrap_or(0) };
    significand.signum() * size as i128
}

/// The model's words, in integers: D = C + Σ a b of finite numbers.
fn model(ty: WgmmaType, a: &[u16], b: &[u16], c: f32) -> f32 {
    let (fraction_bits, result_bits) = if ty == WgmmaType::E4m3 { (13, 13) } else { (25, 23) };
    let field = (c.to_bits() >> 23 & 0xFF) as i32;
    let significand = i128::from(c.to_bits() & 0x7F_FFFF) + if field == 0 { 0 } else { 1 << 23 };
    let signed = if c.is_sign_negative() { -significand } else { significand };
    let mut addends = vec![(signed, 23, field.max(1) - 127)];
    for ((sa, bits_a, ea), (sb, bits_b, eb)) in a.iter().zip(b).map(|(&a, &b)| (split(ty, a), split(ty, b))) {
        if sa * sb != 0 {
            addends.push((sa * sb, bits_a + bits_b, ea + eb));
        }
    }
    let largest = addends.iter().map(|addend| addend.2).max().unwrap();
    let sum: i128 = addends.iter().map(|&(s, bits, e)| shifted(s, fraction_bits - bits + e - largest)).sum();
    // The sum counts units of 2^unit; of its bits those below the last that the result has are cut off.
    let unit = largest - fraction_bits;
    let length = 128 - sum.unsigned_abs().leading_zeros() as i32;
    let last = (unit + length - 1).max(-126) - result_bits;
    let kept = shifted(sum, unit - last) as f64 * 2f64.powi(last);
    if kept.abs() >= 2f64.powi(128) { f32::INFINITY.copysign(kept as f32) } else { kept as f32 }
}

/// Finite codes: any, of middling size, small, few bits, mostly zeros.
fn codes(ty: WgmmaType, len: usize) -> BoxedStrategy<Vec<u16>> {
    let (mantissa_bits, fields, width) = match ty {
        WgmmaType::F16 => (10, 31u16, 16),
        WgmmaType::Bf16 => (7, 255, 16),
        WgmmaType::E4m3 => (3, 15, 8),
    };
    let of = move |range: std::ops::Range<u16>, few: u16| {
        let code = (range, any::<u16>(), any::<bool>()).prop_map(move |(field, mantissa, sign)| {
            let mantissa = mantissa & ((1 << mantissa_bits) - 1) & !few;
            u16::from(sign) << (width - 1) | field << mantissa_bits | mantissa
        });
        prop::collection::vec(code, len)
    };
    let zeros = |codes: Vec<u16>| {
        codes.into_iter().enumerate().map(|(i, x)| if i % 5 == 0 { x } else { 0 }).collect()
    };
    let middle = fields / 2;
    prop_oneof![
        of(0..fields, 0),
        of(middle - 3..middle + 4, 0),
        of(0..2, 0),
        of(middle - 3..middle + 4, 0xFFFE),
        of(0..fields, 0).prop_map(zeros)
    ]
    .boxed()
}

fn accumulator() -> impl Strategy<Value = f32> {
    let finite = any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite());
    prop_oneof![finite, -100.0..100.0f32, -1e-6..1e-6f32, Just(0.0), Just(-0.0), Just(f32::MAX)]
}

/// A type, a row of A, 8 columns of B, 8 accumulators.
fn row() -> impl Strategy<Value = (WgmmaType, Vec<u16>, Vec<u16>, Vec<f32>)> {
    prop::sample::select(TYPES.to_vec()).prop_flat_map(|ty| {
        let k = ty.k() as usize;
        (Just(ty), codes(ty, k), codes(ty, 8 * k), prop::collection::vec(accumulator(), 8))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_vector_code_is_the_model((ty, a, b, c) in row()) {
        let mut d = c.clone();
        multiply(&product(ty, 8), Arithmetic::Exact, &a, &b, &mut d);
        for ((b, c), d) in b.chunks(a.len()).zip(c).zip(d) {
            let expected = model(ty, &a, b, c);
            let message = format!("{ty:?} {a:x?} {b:x?} {c:e}: {d:e}, not {expected:e}");
            prop_assert_eq!(d.to_bits(), expected.to_bits(), "{}", message);
        }
    }

    /// Products that cancel leave +0, whatever their size.
    #[test]
    fn opposite_products_vanish((ty, mut a, mut b, mut d) in row()) {
        let k = a.len();
        let sign = if ty == WgmmaType::E4m3 { 0x80 } else { 0x8000 };
        (0..k / 2).for_each(|i| a[k / 2 + i] = a[i] ^ sign);
        b.chunks_mut(k).for_each(|b| b.copy_within(..k / 2, k / 2));
        d.fill(-0.0);
        multiply(&product(ty, 8), Arithmetic::Exact, &a, &b, &mut d);
        prop_assert!(d.iter().all(|d| d.to_bits() == 0), "{:?}", d);
    }

    /// k products and k additions in binary32 err by at most as many roundings of the sum of sizes.
    #[test]
    fn fast_is_close_to_the_sum((ty, a, b, c) in row()) {
        let mut d = c.clone();
        multiply(&product(ty, 8), Arithmetic::Fast, &a, &b, &mut d);
        let value = |code: u16| {
            let (significand, bits, exponent) = split(ty, code);
            significand as f64 * 2f64.powi(exponent - bits)
        };
        for ((b, c), d) in b.chunks(a.len()).zip(c).zip(d) {
            let products = || a.iter().zip(b).map(|(&a, &b)| value(a) * value(b));
            let sum = products().sum::<f64>() + f64::from(c);
            let size = products().map(f64::abs).sum::<f64>() + f64::from(c.abs());
            let underflow = 33.0 * f64::from(f32::from_bits(1));
            let bound = size * 2f64.powi(-24) * (2 * a.len() + 1) as f64 + underflow;
            prop_assert!(size > f32::MAX.into() || (f64::from(d) - sum).abs() <= bound, "{:e} {:e}", d, sum);
        }
    }
}

/// Rows, columns and blocks in their places: every element against the model, one at a time.
#[test]
fn tiles_are_rows_times_columns() {
    for (ty, n, rows) in [(WgmmaType::F16, 40, 16), (WgmmaType::E4m3, 96, 3), (WgmmaType::Bf16, 256, 1)] {
        let k = ty.k() as usize;
        let step = if ty == WgmmaType::E4m3 { 0x31 } else { 0x1D3 };
        let finite = |i: usize| (i * step % if ty == WgmmaType::E4m3 { 0x7F } else { 0x7C00 }) as u16;
        let a: Vec<u16> = (0..rows * k).map(|i| finite(i + 7)).collect();
        let b: Vec<u16> = (0..n * k).map(finite).collect();
        let mut d: Vec<f32> = (0..rows * n).map(|i| i as f32).collect();
        multiply(&product(ty, n), Arithmetic::Exact, &a, &b, &mut d);
        for (i, d) in d.iter().enumerate() {
            let (row, column) = (i / n, i % n);
            assert_eq!(*d, model(ty, &a[row * k..][..k], &b[column * k..][..k], i as f32));
        }
    }
}

/// 1 + 2⁻¹⁴ in e4m3: what the 13 fraction bits cannot hold is lost; f16 keeps it.
#[test]
fn e4m3_keeps_13_fraction_bits() {
    let mut d = [1.0; 8];
    let mut a = [0; 32];
    a[0] = 0x01; // 2⁻⁹
    let mut b = [0; 8 * 32];
    (0..8).for_each(|column| b[32 * column] = 0x10); // 2⁻⁵
    multiply(&product(WgmmaType::E4m3, 8), Arithmetic::Exact, &a, &b, &mut d);
    assert_eq!(d, [1.0; 8]);
    multiply(&product(WgmmaType::E4m3, 8), Arithmetic::Fast, &a, &b, &mut d);
    assert_eq!(d, [1.0 + 2f32.powi(-14); 8]);
}

#[test]
fn overwriting_does_not_read_d() {
    for arithmetic in [Arithmetic::Exact, Arithmetic::Fast] {
        let mut d = [f32::NAN, f32::INFINITY, 1.0, 1e30, -1.0, f32::MAX, 0.0, -0.0];
        let product = Product { accumulate: false, negate_a: true, ..product(WgmmaType::F16, 8) };
        multiply(&product, arithmetic, &[0x3C00; 16], &[0x4000; 8 * 16], &mut d);
        assert_eq!(d, [-32.0; 8]);
    }
}

#[test]
#[ignore = "prints times: cargo test --release -p fa3-sim time -- --ignored --nocapture"]
fn time() {
    for (ty, n) in
        [(WgmmaType::F16, 128), (WgmmaType::Bf16, 128), (WgmmaType::E4m3, 128), (WgmmaType::F16, 256)]
    {
        let k = ty.k() as usize;
        let code = |i: usize| match ty {
            WgmmaType::F16 => 0x3000 + (i * 7919 % 0x1800) as u16,
            WgmmaType::Bf16 => 0x3F00 + (i * 7919 % 0x200) as u16,
            WgmmaType::E4m3 => (i * 79 % 0x7E) as u16,
        };
        let [a, b] = [16, n].map(|rows| (0..rows * k).map(code).collect::<Vec<u16>>());
        let mut d = vec![0.0; 16 * n];
        for arithmetic in [Arithmetic::Exact, Arithmetic::Fast] {
            let rounds = 400;
            let start = Instant::now();
            for _ in 0..rounds {
                multiply(&product(ty, n), arithmetic, std::hint::black_box(&a), &b, &mut d);
            }
            let warps = start.elapsed().as_secs_f64() / f64::from(rounds) * 1e6;
            println!("m64n{n}k{k} {ty:?} {arithmetic:?}: {:.1} us", 4.0 * warps);
        }
    }
}
