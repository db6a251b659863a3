//! Numbers in command-line options.

use std::num::NonZeroU32;

use clap::builder::TypedValueParser;
use fa3_types::Dtype;

/// A text that is not a number or type of the expected kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotThat {
    #[error("expected a number such as 512 or 16k")]
    Size,
    #[error("expected a number such as 512 or 16k, below 2^31")]
    Row,
    #[error("expected a whole number from 1 to {most}")]
    Whole { most: u32 },
    #[error("expected a multiple of {unit} from {unit} to {most}")]
    Multiple { unit: u32, most: u32 },
    #[error("expected bf16 or f16")]
    Half,
    #[error("expected bf16, f16 or e4m3")]
    Measured,
    #[error("expected a number such as 0.125 or 1/8")]
    Factor,
}

/// Reads a size such as 512 or 16k.
pub(crate) fn size(text: &str) -> Result<usize, NotThat> {
    let (digits, unit) = text.strip_suffix(['k', 'K']).map_or((text, 1), |digits| (digits, 1024));
    let number: Option<usize> = digits.parse().ok();
    number.and_then(|number| number.checked_mul(unit)).ok_or(NotThat::Size)
}

/// Reads a size or a negative number. -1 is an unbounded window; callers refuse other negative numbers.
pub(crate) fn signed_size(text: &str) -> Result<i64, NotThat> {
    let number = if text.starts_with('-') { text.parse().ok() } else { size(text)?.try_into().ok() };
    number.ok_or(NotThat::Size)
}

/// Reads a number of tensor rows, possibly negative.
pub(crate) fn row(text: &str) -> Result<i32, NotThat> {
    signed_size(text).ok().and_then(|row| row.try_into().ok()).ok_or(NotThat::Row)
}

/// Formats a size as 512 or 16k.
pub(crate) fn size_label(size: usize) -> String {
    if size > 0 && size.is_multiple_of(1024) { format!("{}k", size / 1024) } else { size.to_string() }
}

/// Reads a multiple of `unit`, from `unit` to `most`.
pub(crate) fn multiple_of(unit: u32, most: u32) -> impl Fn(&str) -> Result<u32, NotThat> + Clone {
    let refusal = if unit == 1 { NotThat::Whole { most } } else { NotThat::Multiple { unit, most } };
    move |text| {
        let number = text.parse().ok().filter(|number| (unit..=most).contains(number));
        number.filter(|number| number.is_multiple_of(unit)).ok_or(refusal)
    }
}

/// Reads a number of streaming multiprocessors. The limit is above any GPU's count, and bounds the memory used.
pub(crate) fn sms() -> impl TypedValueParser<Value = NonZeroU32> {
    clap::value_parser!(u32).range(1..=4096).try_map(NonZeroU32::try_from)
}

/// Reads an element type that the forward kernels take.
pub(crate) fn half(text: &str) -> Result<Dtype, NotThat> {
    let dtype = text.parse().ok().filter(|dtype| matches!(dtype, Dtype::Bf16 | Dtype::F16));
    dtype.ok_or(NotThat::Half)
}

/// Reads a factor such as 0.125 or 1/8.
pub(crate) fn factor(text: &str) -> Result<f64, NotThat> {
    let number = |text: &str| text.parse::<f64>().map_err(|_| NotThat::Factor);
    match text.split_once('/') {
        Some((above, below)) => Ok(number(above)? / number(below)?),
        None => number(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors() {
        assert_eq!(["0.125", "1/8", "-1e3"].map(factor), [Ok(0.125), Ok(0.125), Ok(-1e3)]);
        assert_eq!(["", "1/", "x", "1/2/3"].map(factor), [Err(NotThat::Factor); 4]);
    }

    #[test]
    fn sizes() {
        assert_eq!(["512", "1k", "16K", "0"].map(size), [Ok(512), Ok(1024), Ok(16384), Ok(0)]);
        assert!(
            ["", "k", "1.5k", "-1", "99999999999999999999", "18446744073709551615k"]
                .iter()
                .all(|x| size(x) == Err(NotThat::Size))
        );
        assert_eq!([512, 1024, 16384, 1000, 0].map(size_label), ["512", "1k", "16k", "1000", "0"]);
    }

    #[test]
    fn sizes_that_may_be_negative() {
        assert_eq!(["-1", "2k"].map(signed_size), [Ok(-1), Ok(2048)]);
        assert_eq!(["-2147483648", "1k"].map(row), [Ok(i32::MIN), Ok(1024)]);
        assert!(["", "-", "-1k", "--1", "x", "9223372036854775808"].iter().all(|x| signed_size(x).is_err()));
        assert!(["2147483648", "2097152k", ""].iter().all(|x| row(x) == Err(NotThat::Row)));
    }

    #[test]
    fn multiples() {
        let eighths = multiple_of(8, 64);
        assert_eq!(["8", "64"].map(&eighths), [Ok(8), Ok(64)]);
        let refused = ["", "x", "-8", "0", "12", "72", "99999999999"];
        assert!(refused.iter().all(|text| eighths(text) == Err(NotThat::Multiple { unit: 8, most: 64 })));
        assert_eq!(multiple_of(1, 9)("0"), Err(NotThat::Whole { most: 9 }));
    }
}
