//! .npy files: f4 and f2, in C or Fortran order, with headers written by Python 3 or Python 2.
//!
//! A file has a magic string, a version, the header's length, the header as a Python dict, and the elements. The format
//! is documented as `numpy.lib.format`.

use safetensors::Dtype;

use super::error::NpyError;
use super::source::Source;
use super::tensor::Tensor;

const MAGIC: &[u8] = b"\x93NUMPY";

/// The largest number of dimensions, which is NumPy's own limit.
const MOST_DIMS: usize = 64;

/// The longest header. It is far above what is needed: the header of an array takes less than 2 KiB.
const MOST_HEADER_BYTES: u32 = 1 << 24;

/// The names of element types, and whether their bytes are in big-endian order.
const TYPES: [(&str, Dtype, bool); 4] = [
    ("<f4", Dtype::F32, false),
    (">f4", Dtype::F32, true),
    ("<f2", Dtype::F16, false),
    (">f2", Dtype::F16, true),
];

/// The description before a file's data.
struct Header<'a> {
    descr: &'a str,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Reads the tensor of a file and names it `name`.
pub(super) fn read(name: String, source: &mut Source) -> Result<Tensor, NpyError> {
    let (header, start) = header(source)?;
    let Header { descr, fortran_order, shape } = Header::parse(&header)?;
    let Some((_, dtype, big_endian)) = TYPES.into_iter().find(|(name, ..)| *name == descr) else {
        return Err(match descr {
            "<f8" | ">f8" => NpyError::Wide { descr: descr.to_owned() },
            "<V2" | ">V2" | "|V2" => NpyError::Untyped { descr: descr.to_owned() },
            other => NpyError::Dtype { descr: format!("'{}'", cut(other)) },
        });
    };
    let size = dtype.bitsize() / 8;
    let Some(expected) = len(&shape).and_then(|len| len.checked_mul(size)) else {
        return Err(NpyError::TooLarge { shape });
    };
    let expected = expected as u64;
    let length = |given| NpyError::Length { given, expected, dtype, shape: shape.clone() };
    if let Some(given) = source.len().map(|len| len - start).filter(|given| *given != expected) {
        return Err(length(given));
    }
    let mut bytes = source.bytes(start..start.saturating_add(expected))?;
    if bytes.len() as u64 != expected {
        return Err(length(bytes.len() as u64));
    }
    if big_endian {
        bytes.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
    let tensor = Tensor { name, dtype, shape, bytes };
    Ok(if fortran_order { tensor.in_c_order() } else { tensor })
}

/// The bytes of a .npy file with `tensor`.
pub(super) fn encode(tensor: &Tensor) -> Result<Vec<u8>, NpyError> {
    let is_written = |(_, dtype, big_endian): &(&str, Dtype, bool)| *dtype == tensor.dtype && !big_endian;
    let Some((descr, ..)) = TYPES.into_iter().find(is_written) else {
        return Err(NpyError::Dtype { descr: tensor.dtype.to_string() });
    };
    // A tuple with one element needs a trailing comma, and longer tuples may have one.
    let shape: String = tensor.shape.iter().map(|extent| format!("{extent}, ")).collect();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    // Spaces and a final line break align the data to 64 bytes.
    let start = (MAGIC.len() + 4 + dict.len() + 1).next_multiple_of(64);
    let header_len = (start - MAGIC.len() - 4) as u16;
    let width = usize::from(header_len) - 1;
    let header = format!("{dict:width$}\n");
    Ok([MAGIC, &[1, 0], &header_len.to_le_bytes(), header.as_bytes(), &tensor.bytes].concat())
}

/// A file's header, and the offset of its data.
fn header(source: &mut Source) -> Result<(Vec<u8>, u64), NpyError> {
    let version_end = MAGIC.len() as u64 + 2;
    let first = source.bytes(0..version_end)?;
    let version = first.strip_prefix(MAGIC).ok_or(NpyError::Magic)?;
    let &[major, minor] = version else { return Err(NpyError::HeaderCut) };
    let length_bytes = match (major, minor) {
        (1, 0) => 2,
        (2 | 3, 0) => 4,
        _ => return Err(NpyError::Version { major, minor }),
    };
    let start = version_end + length_bytes;
    let mut length = source.bytes(version_end..start)?;
    if length.len() as u64 != length_bytes {
        return Err(NpyError::HeaderCut);
    }
    length.resize(4, 0);
    let length = u32::from_le_bytes(length.try_into().expect("4 bytes"));
    if length > MOST_HEADER_BYTES {
        return Err(NpyError::HeaderLength { given: length, most: MOST_HEADER_BYTES });
    }
    let end = start + u64::from(length);
    let header = source.bytes(start..end)?;
    if header.len() as u64 != u64::from(length) {
        return Err(NpyError::HeaderCut);
    }
    Ok((header, end))
}

/// The number of elements. The product of the extents other than 0 must not overflow either, because ndarray requires
/// it.
fn len(shape: &[usize]) -> Option<usize> {
    let others = shape.iter().filter(|&&extent| extent != 0);
    let len = others.copied().try_fold(1, usize::checked_mul)?;
    Some(if shape.contains(&0) { 0 } else { len })
}

/// The first characters of a text from a file.
fn cut(text: &str) -> String {
    text.chars().take(32).collect()
}

impl Header<'_> {
    /// Parses a dict that has exactly the fields of [`Header`] as keys, in any order.
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

/// The part of a header that is still to be parsed.
struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    /// Consumes `token` if it comes next.
    fn eat(&mut self, token: &str) -> bool {
        let rest = self.0.trim_start().strip_prefix(token);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), NpyError> {
        if self.eat(token) { Ok(()) } else { Err(NpyError::Header) }
    }

    /// Parses a string. Python 2 marks Unicode strings with u.
    fn string(&mut self) -> Result<&'a str, NpyError> {
        self.eat("u");
        let quote = ['\'', '"'].into_iter().find(|quote| self.eat(quote.encode_utf8(&mut [0])));
        let (string, rest) = quote.and_then(|quote| self.0.split_once(quote)).ok_or(NpyError::Header)?;
        self.0 = rest;
        Ok(string)
    }

    /// Parses the name of the element type. A list in place of the name describes records.
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
                return Err(NpyError::Rank { most: MOST_DIMS });
            }
            extents.push(self.number()?);
            if !self.eat(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(extents)
    }

    /// Parses an extent. Python 2 marks long integers with L.
    fn number(&mut self) -> Result<usize, NpyError> {
        let text = self.0.trim_start();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, rest) = text.split_at(digits);
        self.0 = rest.strip_prefix('L').unwrap_or(rest);
        match number.parse() {
            Ok(number) => Ok(number),
            Err(_) if digits > 0 => Err(NpyError::Extent { digits }),
            Err(_) => Err(NpyError::Header),
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array, arr1, arr2};

    use super::*;

    fn file(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
        let len = header.len().to_le_bytes();
        let len = &len[..if version == 1 { 2 } else { 4 }];
        [MAGIC, &[version, 0], len, header.as_bytes(), data].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Tensor, NpyError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read("x".into(), &mut Source::open(file.path()).unwrap())
    }

    fn decoded(header: &str, data: &[u8]) -> Result<Tensor, NpyError> {
        decode(&file(1, header, data))
    }

    #[test]
    fn headers_as_they_come() {
        let numbers = [1.0f32, -2.0];
        let little = [0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0];
        let big = [0x3F, 0x80, 0, 0, 0xC0, 0, 0, 0];
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }   \n";
        for version in 1..=3 {
            assert_eq!(decode(&file(version, header, &little)), Ok(Tensor::new("x", arr1(&numbers))));
        }
        let header = "{\"shape\":(1,2),\"descr\":\">f4\",\"fortran_order\":False}";
        assert_eq!(decoded(header, &big), Ok(Tensor::new("x", arr2(&[numbers]))));
        let header = "{'descr': '>f2', 'fortran_order': False, 'shape': ()}";
        assert_eq!(decoded(header, &[0x3C, 0]), Ok(Tensor::new("x", ndarray::arr0(half::f16::ONE))));
    }

    /// Headers that NumPy writes under Python 2, and reads under Python 3.
    #[test]
    fn headers_of_python_2() {
        let expected = Tensor::new("x", arr2(&[[1.0f32, -2.0]]));
        let data = [0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0];
        for header in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1L, 2L), }             \n",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1L, 2L)}",
            "{u'descr': u'<f4', u'fortran_order': False, u'shape': (1, 2L,),}",
            " {'shape' : ( 1L , 2L ) , 'fortran_order' : False , 'descr' : '<f4' , } ",
        ] {
            assert_eq!(decoded(header, &data), Ok(expected.clone()), "{header}");
        }
    }

    #[test]
    fn elements_in_fortran_order() {
        let header = "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3, 2)}";
        let expected = Array::from_shape_fn((2, 3, 2), |(a, b, c)| (a + 2 * (b + 3 * c)) as f32);
        let data: Vec<u8> = (0..12u16).flat_map(|x| f32::from(x).to_le_bytes()).collect();
        assert_eq!(decoded(header, &data), Ok(Tensor::new("x", expected)));
        let none = "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 0)}";
        assert_eq!(decoded(none, &[]).unwrap().shape, [2, 0]);
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
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2LL,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (L,)}",
        ] {
            assert_eq!(decoded(header, &[0; 8]), Err(NpyError::Header), "{header}");
        }
    }

    /// Every shape either fails or has exactly as many elements as the data has bytes for.
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
        assert_eq!(shape(&format!("({})", "1,".repeat(65))), Some(NpyError::Rank { most: MOST_DIMS }));
    }

    #[test]
    fn written_files() {
        let tensor = |rank| Tensor::new("x", Array::from_elem(vec![1; rank], 0.5f32));
        for rank in 0..=MOST_DIMS {
            let bytes = encode(&tensor(rank)).unwrap();
            assert_eq!(decode(&bytes), Ok(tensor(rank)));
            assert_eq!(bytes.len() % 64, 4, "the data are aligned");
        }
        let bf16 = Tensor::new("x", arr1(&[half::bf16::ONE]));
        assert_eq!(encode(&bf16), Err(NpyError::Dtype { descr: "BF16".into() }));
    }
}
