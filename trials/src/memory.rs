//! Buffers in memory: numbers as bytes, tensors with gaps, and the bytes that a program must leave unchanged.

use fa3_ir::{Buffer, BufferRole, Elem, Kernel, Program};
use fa3_quant::E4m3;
use fa3_types::{Dtype, TensorDesc};
use half::{bf16, f16};
use ndarray::{Array4, ArrayView4};

/// The byte that fills unwritten memory. It makes NaN in every type.
pub const UNWRITTEN: u8 = 0xFF;

/// Initial bytes of every buffer of a program. `input` gives the bytes of a buffer that the caller fills. Counters are
/// 0, and all other buffers are unwritten.
///
/// # Panics
/// If `input` gives no bytes for a buffer that it must fill, or bytes of another size than the buffer's.
pub fn before(program: &Program<Kernel>, mut input: impl FnMut(&Buffer) -> Option<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut bytes = |buffer: &Buffer| {
        let given = if buffer.role.is_workspace() { None } else { input(buffer) };
        assert!(given.is_some() || buffer.role.is_written(), "the input {} is given", buffer.name);
        let unwritten = if buffer.role == BufferRole::TileCounter { 0 } else { UNWRITTEN };
        let bytes = given.unwrap_or_else(|| vec![unwritten; buffer.bytes()]);
        assert_eq!(bytes.len(), buffer.bytes(), "the bytes of {}", buffer.name);
        bytes
    };
    program.buffers.iter().map(&mut bytes).collect()
}

/// The memory of a program after a run.
#[derive(Clone, Copy)]
pub struct Memory<'a> {
    buffers: &'a [Buffer],
    bytes: &'a [Vec<u8>],
}

impl<'a> Memory<'a> {
    /// Wraps these bytes, one vector per buffer.
    pub fn new<K>(program: &'a Program<K>, bytes: &'a [Vec<u8>]) -> Memory<'a> {
        Memory { buffers: &program.buffers, bytes }
    }

    /// A buffer and its bytes, if the program has it.
    fn find(self, name: &str) -> Option<(&'a Buffer, &'a [u8])> {
        let mut pairs = self.buffers.iter().zip(self.bytes);
        pairs.find(|(buffer, _)| buffer.name == name).map(|(buffer, bytes)| (buffer, &bytes[..]))
    }

    /// The bytes of a buffer, if the program has it.
    pub fn bytes(self, name: &str) -> Option<&'a [u8]> {
        self.find(name).map(|(_, bytes)| bytes)
    }

    /// The numbers of an f32 buffer, if the program has it.
    pub fn floats(self, name: &str) -> Option<Vec<f32>> {
        let (words, _) = self.bytes(name)?.as_chunks();
        Some(words.iter().copied().map(f32::from_le_bytes).collect())
    }

    /// The numbers of a buffer.
    ///
    /// # Panics
    /// If the program does not have the buffer, or its element type is not a dtype of attention.
    pub fn numbers(self, name: &str) -> Vec<f32> {
        let (buffer, bytes) = self.find(name).unwrap_or_else(|| panic!("there is no {name}"));
        let dtype = dtype(buffer.elem);
        bytes.chunks_exact(dtype.bytes()).map(|element| number(dtype, word(element))).collect()
    }

    /// The numbers of a tensor.
    ///
    /// # Panics
    /// If the program does not have the tensor.
    pub fn tensor(self, name: &str) -> Array4<f32> {
        let (buffer, bytes) = self.find(name).unwrap_or_else(|| panic!("there is no {name}"));
        let tensor = buffer.tensor.as_ref().unwrap_or_else(|| panic!("{name} is no tensor"));
        get(bytes, tensor, |bits| number(tensor.dtype, bits))
    }

    /// Compares a buffer with the expected bytes. `None` allows any byte.
    ///
    /// # Errors
    /// The first byte that differs; or the program does not have the buffer.
    pub fn check_bytes(self, name: &str, expected: &[Option<u8>]) -> Result<(), String> {
        let given = self.bytes(name).ok_or_else(|| format!("there is no {name}"))?;
        if given.len() != expected.len() {
            return Err(format!("{name} has {} bytes, not {}", given.len(), expected.len()));
        }
        let wrong = |(&given, expected): (&u8, &Option<u8>)| expected.is_some_and(|byte| byte != given);
        match given.iter().zip(expected).position(wrong) {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {at} of {name} is {:#x}, not {:#x}",
                given[at],
                expected[at].unwrap_or_default()
            )),
        }
    }

    /// Checks that the program wrote only its outputs: inputs and gaps of tensors are unchanged, and counters are 0.
    ///
    /// # Errors
    /// The first byte that was overwritten.
    pub fn check_rest(self, before: &[Vec<u8>]) -> Result<(), String> {
        for ((buffer, was), is) in self.buffers.iter().zip(before).zip(self.bytes) {
            let is_output = outputs(buffer, is.len());
            if let Some(at) = (0..is.len()).find(|&at| is[at] != was[at] && !is_output[at]) {
                let (name, role) = (buffer.name, buffer.role);
                return Err(format!("byte {at} of {name}, which is {role:?}, was overwritten"));
            }
        }
        Ok(())
    }
}

/// Whether a program may change each byte of a buffer.
fn outputs(buffer: &Buffer, bytes: usize) -> Vec<bool> {
    match (buffer.role, &buffer.tensor) {
        (BufferRole::Scratch, _) => vec![true; bytes],
        (role, Some(tensor)) if role.is_written() => {
            let mut is_element = vec![false; bytes];
            let row_bytes = tensor.dtype.bytes() * tensor.shape.head_dim;
            rows(tensor).for_each(|at| is_element[at..][..row_bytes].fill(true));
            is_element
        }
        (role, _) => vec![role.is_written() && role != BufferRole::TileCounter; bytes],
    }
}

/// Byte offset of each row of a tensor, in the order of an array's rows.
fn rows(tensor: &TensorDesc) -> impl Iterator<Item = usize> {
    let tensor = *tensor;
    let [batch, seqlen, heads, _] = tensor.shape.dims();
    ndarray::indices((batch, seqlen, heads))
        .into_iter()
        .map(move |(batch, row, head)| tensor.dtype.bytes() * tensor.offset(batch, row, head, 0).0 as usize)
}

/// A tensor's bytes in memory, with NaN in its gaps.
pub fn tensor_bytes(tensor: &TensorDesc, x: &Array4<f32>) -> Vec<u8> {
    let mut bytes = vec![UNWRITTEN; tensor.extent_bytes().0 as usize];
    put(&mut bytes, tensor, x.view(), |x| bits(tensor.dtype, x));
    bytes
}

/// Writes a tensor's elements to their addresses.
pub(crate) fn put<T: Copy>(
    bytes: &mut [u8],
    tensor: &TensorDesc,
    x: ArrayView4<'_, T>,
    bits: impl Fn(T) -> u32,
) {
    let width = tensor.dtype.bytes();
    for (at, row) in rows(tensor).zip(x.rows()) {
        for (element, &x) in bytes[at..].chunks_exact_mut(width).zip(row) {
            element.copy_from_slice(&bits(x).to_le_bytes()[..width]);
        }
    }
}

/// Reads a tensor's elements from memory.
pub(crate) fn get<T: Clone + Default>(
    bytes: &[u8],
    tensor: &TensorDesc,
    element: impl Fn(u32) -> T,
) -> Array4<T> {
    let (mut x, width) = (Array4::default(tensor.shape.dims()), tensor.dtype.bytes());
    for (at, mut row) in rows(tensor).zip(x.rows_mut()) {
        for (x, bytes) in row.iter_mut().zip(bytes[at..].chunks_exact(width)) {
            *x = element(word(bytes));
        }
    }
    x
}

/// The bytes of an element as a 32-bit word.
fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte))
}

/// The dtype of a buffer's elements.
///
/// # Panics
/// If the elements are integers.
pub fn dtype(elem: Elem) -> Dtype {
    match elem {
        Elem::F32 => Dtype::F32,
        Elem::F16 => Dtype::F16,
        Elem::Bf16 => Dtype::Bf16,
        Elem::E4m3 => Dtype::E4m3,
        Elem::U8 | Elem::U32 | Elem::U64 => panic!("elements of {elem} are no numbers of attention"),
    }
}

/// The bytes of consecutive numbers of a dtype.
pub fn number_bytes(dtype: Dtype, numbers: impl IntoIterator<Item = f32>) -> Vec<u8> {
    numbers.into_iter().flat_map(|x| bits(dtype, x).to_le_bytes().into_iter().take(dtype.bytes())).collect()
}

/// The bytes of consecutive 32-bit numbers.
pub(crate) fn words<T>(numbers: impl IntoIterator<Item = T>, bytes: fn(T) -> [u8; 4]) -> Vec<u8> {
    numbers.into_iter().flat_map(bytes).collect()
}

/// The bits of `x` rounded to a dtype.
pub(crate) fn bits(dtype: Dtype, x: f32) -> u32 {
    if dtype == Dtype::F32 { x.to_bits() } else { encode(dtype, x).into() }
}

/// The number with these bits.
fn number(dtype: Dtype, bits: u32) -> f32 {
    if dtype == Dtype::F32 { f32::from_bits(bits) } else { decode(dtype, bits as u16) }
}

/// The bits of `x` rounded to a dtype of at most 16 bits.
///
/// # Panics
/// If the dtype has more than 16 bits.
pub fn encode(dtype: Dtype, x: f32) -> u16 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_bits(),
        Dtype::Bf16 => bf16::from_f32(x).to_bits(),
        Dtype::E4m3 => E4m3::from_f32(x).to_bits().into(),
        // Where other types have NaN, this one has its largest magnitude.
        Dtype::Int8 => (if x.is_nan() { i8::MIN } else { x as i8 }).cast_unsigned().into(),
        Dtype::F32 => unreachable!("{dtype} has 32 bits"),
    }
}

/// The number with these bits in a dtype of at most 16 bits.
///
/// # Panics
/// If the dtype has more than 16 bits.
pub fn decode(dtype: Dtype, bits: u16) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_bits(bits).to_f32(),
        Dtype::Bf16 => bf16::from_bits(bits).to_f32(),
        Dtype::E4m3 => E4m3::from_bits(bits as u8).to_f32(),
        Dtype::Int8 => (bits as i8).into(),
        Dtype::F32 => unreachable!("{dtype} has 32 bits"),
    }
}

/// `x` rounded to a dtype.
pub fn rounded(dtype: Dtype, x: f32) -> f32 {
    number(dtype, bits(dtype, x))
}
