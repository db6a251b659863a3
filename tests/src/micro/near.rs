//! Distances between binary32 numbers.

/// Compares arrays of binary32 numbers.
pub(super) fn compare(model: &[u8], hardware: &[u8], ulp: u32, floor: f32) -> Result<(), String> {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|&chunk| f32::from_le_bytes(chunk)).collect()
    };
    let (model, hardware) = (numbers(model), numbers(hardware));
    let distances = model.iter().zip(&hardware).map(|(&x, &y)| distance(x, y, floor));
    let worst = distances.enumerate().max_by(|x, y| x.1.total_cmp(&y.1));
    match worst {
        Some((index, worst)) if worst > f64::from(ulp) => {
            let (x, y) = (model[index], hardware[index]);
            Err(format!("number {index} is {x:e}, the H100's {y:e}: {worst} ulp apart, not {ulp}"))
        }
        Some(_) | None => Ok(()),
    }
}

/// |x − y| in ulp of max(|y|, `floor`). NaN and infinities are at a finite distance from themselves only.
fn distance(x: f32, y: f32, floor: f32) -> f64 {
    if x.to_bits() == y.to_bits() {
        return 0.0;
    }
    if !x.is_finite() || !y.is_finite() {
        return f64::INFINITY;
    }
    let scale = y.abs().max(floor).to_bits();
    let last_place = f64::from(f32::from_bits(scale + 1)) - f64::from(f32::from_bits(scale));
    (f64::from(x) - f64::from(y)).abs() / last_place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_last_places() {
        let next = 1.0f32.next_up();
        assert_eq!(distance(1.0, next, 0.5), 1.0);
        assert_eq!(distance(1.0, 1.0f32.next_down(), 0.5), 1.0);
        assert_eq!(distance(0.0, f32::MIN_POSITIVE, f32::MIN_POSITIVE), f64::from(1 << 23));
        assert_eq!(distance(0.25, 0.25f32.next_up(), 1.0), 0.25);
        assert_eq!(distance(f32::INFINITY, f32::MAX, 1.0), f64::INFINITY);
        assert_eq!(distance(f32::NAN, f32::NAN, 1.0), 0.0);
        assert!(distance(f32::NAN, -f32::NAN, 1.0).is_infinite());
    }
}
