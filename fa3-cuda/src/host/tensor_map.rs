//! Tensor maps: turns the plain description into the 128 bytes that the copy engine reads.

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use fa3_ir::{BoxShape, Elem, Swizzle, TensorView};

use super::context::Current;
use super::error::RejectedMap;
use super::params::ParamImage;
use super::{CudaError, HostError};

/// The arguments of `cuTensorMapEncodeTiled` for a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiledMap {
    elem: CUtensorMapDataType,
    rank: u32,
    address: u64,
    dims: [u64; 5],
    /// Strides in bytes, from dimension 1 on.
    strides: [u64; 4],
    box_dims: [u32; 5],
    swizzle: CUtensorMapSwizzle,
    fetches: CUtensorMapL2promotion,
}

/// Traversal strides of 1, which skip no element.
const STEPS: [u32; 5] = [1; 5];
const INTERLEAVE: CUtensorMapInterleave = CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE;
const FILL: CUtensorMapFloatOOBfill = CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;

impl TiledMap {
    /// The map for boxes of `shape` in `view`, which has passed [`TensorView::check`].
    pub fn new(shape: &BoxShape, view: &TensorView) -> TiledMap {
        TiledMap {
            elem: data_type(shape.elem),
            rank: shape.rank(),
            address: view.address,
            dims: padded(&view.dims, 1),
            strides: padded(&view.strides, 0),
            box_dims: padded(shape.dims(), 1),
            swizzle: swizzle(shape.swizzle),
            fetches: fetches(view.dims.first().map_or(0, |cols| cols * u64::from(shape.elem.bytes()))),
        }
    }

    /// The arguments but the address, by the names of the driver's parameters, with enums as the driver numbers them.
    pub fn arguments(&self) -> [(&'static str, Vec<u64>); 9] {
        let rank = self.rank as usize;
        [
            ("tensorDataType", vec![self.elem as u64]),
            ("globalDim", self.dims[..rank].to_vec()),
            ("globalStrides", self.strides[..rank - 1].to_vec()),
            ("boxDim", self.box_dims[..rank].iter().map(|&dim| dim.into()).collect()),
            ("elementStrides", STEPS[..rank].iter().map(|&step| step.into()).collect()),
            ("interleave", vec![INTERLEAVE as u64]),
            ("swizzle", vec![self.swizzle as u64]),
            ("l2Promotion", vec![self.fetches as u64]),
            ("oobFill", vec![FILL as u64]),
        ]
    }

    /// Has the driver encode the map. Elements beyond the tensor are read as zero.
    fn encode(
        &self,
        current: &Current<'_>,
        say: impl FnOnce(CudaError) -> HostError,
    ) -> Result<ParamImage, HostError> {
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: `map` is aligned by its type; the arrays have at least the `rank` entries that the driver reads; the
        // address is only stored.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                self.elem,
                self.rank,
                self.address as *mut _,
                self.dims.as_ptr(),
                self.strides.as_ptr(),
                self.box_dims.as_ptr(),
                STEPS.as_ptr(),
                INTERLEAVE,
                self.swizzle,
                self.fetches,
                FILL,
            )
        };
        current.check_or("cuTensorMapEncodeTiled", result, say)?;
        Ok(ParamImage::words(map.opaque))
    }
}

/// Encodes parameter `param` of `kernel`.
///
/// # Errors
/// [`HostError::TensorMap`] if the driver rejects a view that [`TensorView::check`] accepted.
pub(super) fn encode(
    current: &Current<'_>,
    (kernel, param): (&str, &str),
    shape: &BoxShape,
    view: &TensorView,
) -> Result<ParamImage, HostError> {
    TiledMap::new(shape, view).encode(current, |error| HostError::TensorMap {
        kernel: kernel.to_owned(),
        param: param.to_owned(),
        error,
        map: Box::new(RejectedMap { shape: *shape, view: view.clone() }),
    })
}

fn padded<T: Copy, const N: usize>(given: &[T], rest: T) -> [T; N] {
    std::array::from_fn(|index| given.get(index).copied().unwrap_or(rest))
}

fn data_type(elem: Elem) -> CUtensorMapDataType {
    match elem {
        // Copies depend only on the size of an element.
        Elem::U8 | Elem::E4m3 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        Elem::U32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        Elem::U64 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        Elem::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Elem::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Elem::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }
}

/// L2 promotion for rows of `row_bytes`: the largest promotion that fetches nothing of the next row. In a KV cache the
/// next row belongs to another head, and would be evicted before a CTA reads that head. On an H100, with 64 sequences
/// of 2048 keys and e4m3 rows of 128 bytes, fetches of 256 bytes took 145 us, and fetches of 128 bytes 106 us. With
/// rows of 256 bytes, fetches of 128 bytes took 2 % longer than fetches of 256 bytes.
fn fetches(row_bytes: u64) -> CUtensorMapL2promotion {
    match row_bytes {
        256.. => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        128.. => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        _ => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
    }
}

fn swizzle(swizzle: Swizzle) -> CUtensorMapSwizzle {
    match swizzle {
        Swizzle::None => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// K of a (batch 2, seqlen 100, heads 3, head_dim 128) tensor in boxes of 64 columns and 80 rows.
    #[test]
    fn innermost_dimension_first_and_strides_from_the_second_on() {
        let shape = BoxShape::new(Elem::Bf16, &[64, 1, 80, 1], Swizzle::B128);
        let view = TensorView { address: 0x7000, dims: vec![128, 3, 100, 2], strides: vec![256, 768, 76800] };
        assert_eq!(view.check(&shape), Ok(()));
        let expected = TiledMap {
            elem: CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            rank: 4,
            address: 0x7000,
            dims: [128, 3, 100, 2, 1],
            strides: [256, 768, 76800, 0],
            box_dims: [64, 1, 80, 1, 1],
            swizzle: CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            fetches: CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        assert_eq!(TiledMap::new(&shape, &view), expected);
    }

    /// A fetch reads nothing of another head's row: 64 elements of 16 bits are 128 bytes.
    #[test]
    fn fetches_stay_in_a_row() {
        let bytes = [8, 96, 128, 192, 256, 1024].map(|bytes| fetches(bytes) as u32);
        assert_eq!(bytes, [1, 1, 2, 2, 3, 3], "as the driver numbers 64, 128 and 256 bytes");
    }

    /// The enums' numbers are part of the driver's interface (CUtensorMapDataType, CUtensorMapSwizzle).
    #[test]
    fn element_types_and_swizzles_have_the_numbers_of_the_driver() {
        let elems = [Elem::U8, Elem::E4m3, Elem::U32, Elem::U64, Elem::F16, Elem::F32, Elem::Bf16];
        assert_eq!(elems.map(|elem| data_type(elem) as u32), [0, 0, 2, 4, 6, 7, 9]);
        assert_eq!(Swizzle::ALL.map(|mode| swizzle(mode) as u32), [0, 1, 2, 3]);
    }
}
