use half::{bf16, f16};

use super::*;

/// The code nearest to a positive number, ties to even, by search through the format. `values` are ascending.
fn nearest(values: &[f64], x: f64) -> usize {
    let above = values.partition_point(|&value| value <= x).min(values.len() - 1);
    let below = above.saturating_sub(1);
    let (to_below, to_above) = (x - values[below], values[above] - x);
    if to_below < to_above || (to_below == to_above && below % 2 == 0) { below } else { above }
}

/// Rounds the numbers around which rounding changes: every value of the format, every midpoint between values, and
/// their neighbours.
fn rounds_to_nearest_even(values: &[f64], sign: u16, rounded: impl Fn(f32) -> u16) {
    let middles = values.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
    for x in values.iter().copied().chain(middles) {
        let x = x as f32;
        for x in [x.next_down().max(0.0), x, x.next_up()] {
            let expected = nearest(values, x.into()) as u16;
            assert_eq!([rounded(x), rounded(-x)], [expected, expected | sign], "{x:e}");
        }
    }
}

#[test]
fn f16_rounds_to_nearest_even_at_every_boundary() {
    // Infinity has the code that the next finite value would have.
    let values: Vec<f64> = (0..0x7C00).map(|code| f16::from_bits(code).to_f64()).chain([65536.0]).collect();
    rounds_to_nearest_even(&values, 0x8000, f16_of_f32);
}

#[test]
fn bf16_rounds_to_nearest_even_at_every_boundary() {
    let values: Vec<f64> =
        (0..0x7F80).map(|code| bf16::from_bits(code).to_f64()).chain([2f64.powi(128)]).collect();
    rounds_to_nearest_even(&values, 0x8000, bf16_of_f32);
}

#[test]
fn e4m3_rounds_to_nearest_even_at_every_boundary_and_saturates() {
    let value = |code: u8| {
        let (field, mantissa) = (i32::from(code >> 3), f64::from(code & 7) / 8.0);
        if field == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(field - 7) }
    };
    let values: Vec<f64> = (0..0x7F).map(value).collect();
    rounds_to_nearest_even(&values, 0x80, |x| e4m3_of_f32(x).into());
    for x in [449.0, 464.0, 480.0, 1e9, f32::MAX, f32::INFINITY] {
        assert_eq!([e4m3_of_f32(x), e4m3_of_f32(-x)], [0x7E, 0xFE], "{x:e}");
    }
}
