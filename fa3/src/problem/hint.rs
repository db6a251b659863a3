//! Rounded hints of lengths ([`Sequences::longest`](super::Sequences::longest)), for caches of plans.
//!
//! A plan gets only the leading bits of a hint, so that calls with similar longest sequences share a plan. The planner
//! chooses tiles by limits: up to a number of rows of Q, or from a number of keys on. So rows of Q are rounded up and
//! keys are rounded down, and neither passes a limit that is itself a rounded number.

/// Number of leading bits that are kept.
const BITS: u32 = 3;

/// Rounds up to a number in which all bits after the leading ones are 0.
pub fn rounded_up(rows: usize) -> usize {
    let step = step(rows);
    rows.checked_next_multiple_of(step).unwrap_or(rows)
}

/// Rounds down to a number in which all bits after the leading ones are 0.
pub fn rounded_down(rows: usize) -> usize {
    rows - rows % step(rows)
}

fn step(rows: usize) -> usize {
    1 << (rows.checked_ilog2().unwrap_or(0) + 1).saturating_sub(BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_bits_are_told() {
        for rows in 0..=8 {
            assert_eq!((rounded_down(rows), rounded_up(rows)), (rows, rows));
        }
        for (rows, down, up) in [
            (9, 8, 10),
            (65, 64, 80),
            (1000, 896, 1024),
            (1024, 1024, 1024),
            (1025, 1024, 1280),
            (1535, 1280, 1536),
            (1 << 40, 1 << 40, 1 << 40),
            (usize::MAX, 7 << 61, usize::MAX),
        ] {
            assert_eq!((rounded_down(rows), rounded_up(rows)), (down, up), "{rows}");
        }
    }

    /// The planner chooses tiles by these limits.
    #[test]
    fn limits_stay_limits() {
        for limit in [64, 128, 512, 1536, 2048] {
            for rows in 0..4096 {
                assert_eq!(rounded_up(rows) <= limit, rows <= limit, "up to {limit} of {rows}");
                assert_eq!(rounded_down(rows) >= limit, rows >= limit, "from {limit} on of {rows}");
            }
        }
    }
}
