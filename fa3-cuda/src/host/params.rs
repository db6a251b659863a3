//! Arguments as bytes of a kernel's parameter space.

use std::ffi::c_void;

use fa3_ir::{ArgValue, BoxShape, ParamInfo, ParamKind, TensorView};

/// The bytes of one parameter, in a buffer of a tensor map's size.
///
/// The driver copies as many bytes as the kernel declares, from an address aligned like a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub(super) struct ParamImage([u8; 128]);

impl ParamImage {
    /// The bytes of a number, followed by zeros.
    pub(super) fn scalar<const N: usize>(bytes: [u8; N]) -> ParamImage {
        let mut image = [0; 128];
        image[..N].copy_from_slice(&bytes);
        ParamImage(image)
    }

    /// A tensor map, 16 words of 64 bits.
    pub(super) fn words(words: [u64; 16]) -> ParamImage {
        let mut image = [0; 128];
        for (bytes, word) in image.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        ParamImage(image)
    }

    /// The address from which the driver reads it.
    pub(super) fn pointer(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }
}

/// The images of `args`, which have passed [`fa3_ir::check_args`]; `encode` makes the images of tensor maps.
///
/// # Errors
/// Errors of `encode`.
pub(super) fn pack<E>(
    params: &[ParamInfo],
    args: &[ArgValue],
    encode: impl Fn(&str, &BoxShape, &TensorView) -> Result<ParamImage, E>,
) -> Result<Vec<ParamImage>, E> {
    let image = |(param, arg): (&ParamInfo, &ArgValue)| match (param.kind, arg) {
        (ParamKind::TensorMap(shape), ArgValue::Tensor(view)) => encode(&param.name, &shape, view),
        (_, ArgValue::Tensor(view)) => Ok(ParamImage::scalar(view.address.to_ne_bytes())),
        (_, ArgValue::U32(value)) => Ok(ParamImage::scalar(value.to_ne_bytes())),
        (_, ArgValue::F32(value)) => Ok(ParamImage::scalar(value.to_ne_bytes())),
        (_, ArgValue::U64(value) | ArgValue::Pointer(value)) => Ok(ParamImage::scalar(value.to_ne_bytes())),
    };
    params.iter().zip(args).map(image).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys::CUtensorMap;
    use fa3_ir::{Elem, Swizzle};

    #[test]
    fn parameters_are_little_endian_and_aligned_for_tensor_maps() {
        let shape = BoxShape::new(Elem::F16, &[64, 8], Swizzle::B128);
        let kinds = [
            ParamKind::U32,
            ParamKind::F32,
            ParamKind::U64,
            ParamKind::Pointer(Elem::F32),
            ParamKind::TensorMap(shape),
        ];
        let params = kinds.map(|kind| ParamInfo { name: "p".to_owned(), kind });
        let view = TensorView::contiguous(512, &[64, 100], Elem::F16);
        let args = [
            ArgValue::U32(0x0102_0304),
            ArgValue::F32(-2.0),
            ArgValue::U64(0x0102_0304_0506_0708),
            ArgValue::Pointer(0xa0b0),
            ArgValue::Tensor(view.clone()),
        ];
        let map = ParamImage::words(std::array::from_fn(|word| word as u64 + 1));
        let encode = |name: &str, box_shape: &BoxShape, tensor: &TensorView| {
            assert_eq!((name, box_shape, tensor), ("p", &shape, &view));
            Ok::<ParamImage, ()>(map)
        };
        let mut images = pack(&params, &args, encode).unwrap();
        let starts: [&[u8]; 4] = [
            &[4, 3, 2, 1, 0],
            &[0, 0, 0, 0xc0, 0],
            &[8, 7, 6, 5, 4, 3, 2, 1, 0],
            &[0xb0, 0xa0, 0, 0, 0, 0, 0, 0],
        ];
        for (image, start) in images.iter().zip(starts) {
            assert_eq!(&image.0[..start.len()], start);
        }
        assert_eq!(images[4].0[120..], [16, 0, 0, 0, 0, 0, 0, 0]);
        assert!(images.iter_mut().all(|image| image.pointer().cast::<CUtensorMap>().is_aligned()));
    }

    #[test]
    fn errors_of_the_encoder_come_through() {
        let kind = ParamKind::TensorMap(BoxShape::new(Elem::F16, &[64, 8], Swizzle::B128));
        let params = [ParamInfo { name: "k".to_owned(), kind }];
        let args = [ArgValue::Tensor(TensorView::contiguous(0, &[64, 100], Elem::F16))];
        assert_eq!(pack(&params, &args, |name, _, _| Err(name.to_owned())), Err("k".to_owned()));
    }
}
