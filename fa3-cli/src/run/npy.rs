//! .npy files: f4 and f2, in C order.
//!
//! A magic string, a version, the header's length, the header as a Python dict, the elements: the format is
//! documented as `numpy.lib.format`.

use std::borrow::Cow;

use safetensors::Dtype;

use super::tensor::{Tensor, Values};

const MAGIC: &[u8] = b"\x93NUMPY";

/// NumPy's own limit.
const MOST_DIMS: usize = 64;

/// Why a file's bytes, or a tensor's values, are none that this reads or writes. Said of the file.
#[derive(Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum NpyError {
    #[error("is not a .npy file: it does not begin with \\x93NUMPY")]
    Magic,
    #[error("is a .npy file of version {major}.{minor}, expected 1.0, 2.0 or 3.0")]
    Version { major: u8, minor: u8 },
    #[error("ends within its header")]
    HeaderCut,
    #[error("is not a .npy file: its header is no dict of descr, fortran_order and shape")]
    Header,
    #[error("holds {descr}, expected f4 or f2")]
    Dtype { descr: String },
    #[error("holds '{descr}', expected f4 or f2, as x.astype('f4') gives")]
    Wide { descr: String },
    #[error("is in Fortran order, expected C order, as numpy.ascontiguousarray gives")]
    FortranOrder,
    #[error("has more than {MOST_DIMS} dimensions")]
    Rank,
    #[error("has an extent of {digits} digits, more than can be addressed")]
    Extent { digits: usize },
    #[error("has shape {shape:?}, more elements than can be addressed")]
    TooLarge { shape: Vec<usize> },
    #[error("holds {given} bytes of data, expected {expected} for {dtype} of shape {shape:?}")]
    Length { given: usize, expected: usize, dtype: Dtype, shape: Vec<usize> },
}

/// What a file says before its data.
struct Header<'a> {
    descr: &'a str,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// The tensor in a file's bytes, under the name `name`.
pub(super) fn decode(name: String, bytes: &[u8]) -> Result<Tensor, NpyError> {
    let (header, data) = split(bytes)?;
    let Header { descr, fortran_order, shape } = Header::parse(header)?;
    let (dtype, big_endian) = match descr {
        "<f4" => (Dtype::F32, false),
        ">f4" => (Dtype::F32, true),
        "<f2" => (Dtype::F16, false),
        ">f2" => (Dtype::F16, true),
        "<f8" | ">f8" => return Err(NpyError::Wide { descr: descr.to_owned() }),
        other => return Err(NpyError::Dtype { descr: format!("'{}'", cut(other)) }),
    };
    if fortran_order {
        return Err(NpyError::FortranOrder);
    }
    let size = dtype.bitsize() / 8;
    let Some(expected) = len(&shape).and_then(|len| len.checked_mul(size)) else {
        return Err(NpyError::TooLarge { shape });
    };
    if data.len() != expected {
        return Err(NpyError::Length { given: data.len(), expected, dtype, shape });
    }
    let data: Cow<'_, [u8]> = if big_endian {
        data.chunks(size).flat_map(|x| x.iter().rev().copied()).collect()
    } else {
        data.into()
    };
    let values = Values::decode(dtype, &data).expect("F32 and F16 are types of values");
    Ok(Tensor { name, shape, values })
}

/// The bytes of a file that holds `tensor`.
pub(super) fn encode(tensor: &Tensor) -> Result<Vec<u8>, NpyError> {
    let descr = match &tensor.values {
        Values::F32(_) => "<f4",
        Values::F16(_) => "<f2",
        Values::F64(_) | Values::Bf16(_) | Values::E4m3(_) | Values::I64(_) | Values::I32(_) => {
            return Err(NpyError::Dtype { descr: tensor.values.dtype().to_string() });
        }
    };
    // A tuple of one needs its comma, and others may have one.
    let shape: String = tensor.shape.iter().map(|extent| format!("{extent}, ")).collect();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    // Spaces, and a line break at the end, bring the data to a multiple of 64 bytes.
    let start = (MAGIC.len() + 4 + dict.len() + 1).next_multiple_of(64);
    let header_len = (start - MAGIC.len() - 4) as u16;
    let width = usize::from(header_len) - 1;
    let header = format!("{dict:width$}\n");
    Ok([MAGIC, &[1, 0], &header_len.to_le_bytes(), header.as_bytes(), &tensor.values.encode()].concat())
}

/// A file's header, and what follows it.
fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), NpyError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(NpyError::Magic)?;
    let (&[major, minor], rest) = rest.split_first_chunk().ok_or(NpyError::HeaderCut)?;
    let (len, rest) = match (major, minor) {
        (1, 0) => rest.split_first_chunk().map(|(&len, rest)| (u16::from_le_bytes(len).into(), rest)),
        (2 | 3, 0) => rest.split_first_chunk().map(|(&len, rest)| (u32::from_le_bytes(len), rest)),
        _ => return Err(NpyError::Version { major, minor }),
    }
    .ok_or(NpyError::HeaderCut)?;
    rest.split_at_checked(len as usize).ok_or(NpyError::HeaderCut)
}

/// How many elements there are. Other extents are bounded even if one is 0, as ndarray wants it.
fn len(shape: &[usize]) -> Option<usize> {
    let others = shape.iter().filter(|&&extent| extent != 0);
    let len = others.copied().try_fold(1, usize::checked_mul)?;
    Some(if shape.contains(&0) { 0 } else { len })
}

/// The first characters of a text out of a file.
fn cut(text: &str) -> String {
    text.chars().take(32).collect()
}

impl Header<'_> {
    /// Reads a dict with just these three keys, in any order.
    fn parse(header: &[u8]) -> Result<Header<'_>, NpyError> {
        let mut text = Text(str::from_utf8(header).map_err(|_| NpyError::Header)?);
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        text.expect("{")?;
        while !text.eat("}") {
            let key = text.string()?;
            text.expect(":")?;
            match key {
                "descr" => descr = Some(text.descr()?),
                "fortran_order" => fortran_order = Some(text.bool()?),
                "shape" => shape = Some(text.tuple()?),
                _ => return Err(NpyError::Header),
            }
            if !text.eat(",") {
                text.expect("}")?;
                break;
            }
        }
        match (descr, fortran_order, shape, text.0.trim_start()) {
            (Some(descr), Some(fortran_order), Some(shape), "") => Ok(Header { descr, fortran_order, shape }),
            _ => Err(NpyError::Header),
        }
    }
}

/// What is left of a header.
struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    /// Takes `token` if it comes next.
    fn eat(&mut self, token: &str) -> bool {
        let rest = self.0.trim_start().strip_prefix(token);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), NpyError> {
        if self.eat(token) { Ok(()) } else { Err(NpyError::Header) }
    }

    fn string(&mut self) -> Result<&'a str, NpyError> {
        let quote = ['\'', '"'].into_iter().find(|quote| self.eat(quote.encode_utf8(&mut [0])));
        let (string, rest) = quote.and_then(|quote| self.0.split_once(quote)).ok_or(NpyError::Header)?;
        self.0 = rest;
        Ok(string)
    }

    /// The type's name. A list instead describes records.
    fn descr(&mut self) -> Result<&'a str, NpyError> {
        if self.eat("[") { Err(NpyError::Dtype { descr: "records".to_owned() }) } else { self.string() }
    }

    fn bool(&mut self) -> Result<bool, NpyError> {
        if self.eat("True") {
            return Ok(true);
        }
        self.expect("False").map(|()| false)
    }

    fn tuple(&mut self) -> Result<Vec<usize>, NpyError> {
        let mut extents = Vec::new();
        self.expect("(")?;
        while !self.eat(")") {
            if extents.len() == MOST_DIMS {
                return Err(NpyError::Rank);
            }
            extents.push(self.number()?);
            if !self.eat(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(extents)
    }

    fn number(&mut self) -> Result<usize, NpyError> {
        let text = self.0.trim_start();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, rest) = text.split_at(digits);
        self.0 = rest;
        match number.parse() {
            Ok(number) => Ok(number),
            Err(_) if digits > 0 => Err(NpyError::Extent { digits }),
            Err(_) => Err(NpyError::Header),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
        let len = header.len().to_le_bytes();
        let len = &len[..if version == 1 { 2 } else { 4 }];
        [MAGIC, &[version, 0], len, header.as_bytes(), data].concat()
    }

    fn decoded(header: &str, data: &[u8]) -> Result<Tensor, NpyError> {
        decode("x".into(), &file(1, header, data))
    }

    #[test]
    fn headers_as_they_come() {
        let expected = |shape: &[usize]| {
            Ok(Tensor { name: "x".into(), shape: shape.into(), values: Values::F32(vec![1.0, -2.0]) })
        };
        let little = [0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0];
        let big = [0x3F, 0x80, 0, 0, 0xC0, 0, 0, 0];
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }   \n";
        for version in 1..=3 {
            assert_eq!(decode("x".into(), &file(version, header, &little)), expected(&[2]));
        }
        let header = "{\"shape\":(1,2),\"descr\":\">f4\",\"fortran_order\":False}";
        assert_eq!(decoded(header, &big), expected(&[1, 2]));
        let header = "{'descr': '>f2', 'fortran_order': False, 'shape': ()}";
        assert_eq!(decoded(header, &[0x3C, 0]).unwrap().values, Values::F16(vec![half::f16::ONE]));
    }

    #[test]
    fn headers_that_are_none() {
        for header in [
            "",
            "{",
            "{}",
            "{'descr': '<f4', 'shape': (2,)}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': 2}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} more",
            "{'descr': '<f4\", 'fortran_order': False, 'shape': (2,)}",
            "{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}",
        ] {
            assert_eq!(decoded(header, &[0; 8]), Err(NpyError::Header), "{header}");
        }
    }

    /// Every shape of what follows either fails or has just as many elements as there are bytes for.
    #[test]
    fn shapes_that_overflow() {
        let shape = |shape: &str| {
            decoded(&format!("{{'descr': '<f2', 'fortran_order': False, 'shape': {shape}}}"), &[]).err()
        };
        let large = 1 << 32;
        assert_eq!(shape("(0, 3)"), None);
        let too_large = |shape: &[usize]| Some(NpyError::TooLarge { shape: shape.into() });
        assert_eq!(shape("(4294967296, 4294967296, 2, 8)"), too_large(&[large, large, 2, 8]));
        assert_eq!(shape("(0, 4294967296, 4294967296, 8)"), too_large(&[0, large, large, 8]));
        assert_eq!(shape("(9223372036854775808,)"), too_large(&[1 << 63]));
        assert_eq!(shape("(18446744073709551616,)"), Some(NpyError::Extent { digits: 20 }));
        assert_eq!(shape(&format!("({})", "1,".repeat(65))), Some(NpyError::Rank));
    }

    #[test]
    fn written_files() {
        let tensor = |rank| Tensor { name: "x".into(), shape: vec![1; rank], values: Values::F32(vec![0.5]) };
        for rank in 0..=MOST_DIMS {
            let bytes = encode(&tensor(rank)).unwrap();
            assert_eq!(decode("x".into(), &bytes), Ok(tensor(rank)));
            assert_eq!(bytes.len() % 64, 4, "the data are aligned");
        }
        let bf16 = Tensor { name: "x".into(), shape: vec![0], values: Values::Bf16(Vec::new()) };
        assert_eq!(encode(&bf16), Err(NpyError::Dtype { descr: "BF16".into() }));
    }
}
