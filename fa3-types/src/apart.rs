//! Test whether two tensors overlap.

use crate::TensorDesc;

/// Whether the tensors at these addresses share no byte of an element.
///
/// The rows of keys and of values in one cache lie side by side without sharing a byte, and so do Q, K, V and O in one
/// tensor (total, 4, heads, head_dim). The answer is exact where strides are nested, or equal in both tensors. Other
/// pairs of tensors take a search. A search that takes too long is given up, and the tensors count as overlapping.
///
/// ```
/// use fa3_types::{Dtype, Shape, TensorDesc, are_apart};
///
/// let mut dk = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 1, seqlen: 100, heads: 4, head_dim: 64 });
/// dk.strides.seqlen *= 3;
/// let at = |distance: u64| are_apart([&dk, &dk], [4096, 4096 + distance]);
/// // A row has 512 bytes, and rows begin 1536 bytes apart.
/// assert!(at(512) && at(1024) && !at(496) && !at(1040));
/// ```
pub fn are_apart(tensors: [&TensorDesc; 2], [one, other]: [u64; 2]) -> bool {
    if tensors.iter().any(|x| x.shape.dims().contains(&0)) {
        return true;
    }
    // An element of the first tensor and an element of the second are apart by the distance of the tensors' first
    // elements plus a multiple of each step; the multiple lies within the step's limits.
    let mut steps: Vec<Step> = Vec::new();
    for (tensor, sign) in tensors.into_iter().zip([-1, 1]) {
        for (extent, stride) in dims(tensor) {
            let end = i128::from(stride.signum()) * sign * (extent as i128 - 1);
            let (bytes, low, high) = (i128::from(stride.unsigned_abs()), end.min(0), end.max(0));
            match steps.iter_mut().find(|step| step.bytes == bytes) {
                Some(step) => (step.low, step.high) = (step.low + low, step.high + high),
                None => steps.push(Step { bytes, low, high }),
            }
        }
    }
    steps.sort_by_key(|step| -step.bytes);
    let search = Search { widths: tensors.map(width) };
    !search.meet(i128::from(other) - i128::from(one), &steps, &mut PLACES.clone())
}

/// Largest number of distances that a search tries. Tensors with nested strides take about 3 for each dimension.
const PLACES: u32 = 2000;

/// A stride in bytes, which is taken `low` to `high` times.
struct Step {
    bytes: i128,
    low: i128,
    high: i128,
}

struct Search {
    /// Bytes of an element of each tensor.
    widths: [i128; 2],
}

impl Search {
    /// Whether an element of the second tensor overlaps one of the first tensor. Two elements are apart by `distance`
    /// plus a multiple of each of these steps, of which the longest comes first.
    fn meet(&self, distance: i128, steps: &[Step], places: &mut u32) -> bool {
        if *places == 0 {
            return true;
        }
        *places -= 1;
        let [width, other] = self.widths;
        let Some((Step { bytes, low, high }, shorter)) = steps.split_first() else {
            return -other < distance && distance < width;
        };
        // The multiples of the longest step from which the shorter steps can reach 0.
        let least = distance + shorter.iter().map(|step| step.low * step.bytes).sum::<i128>();
        let most = distance + shorter.iter().map(|step| step.high * step.bytes).sum::<i128>();
        let first = (-other - most).div_euclid(*bytes) + 1;
        let last = -(least - width).div_euclid(*bytes) - 1;
        (first.max(*low)..=last.min(*high)).any(|count| self.meet(distance + count * bytes, shorter, places))
    }
}

/// Extents and byte strides of the dimensions between contiguous pieces.
fn dims(x: &TensorDesc) -> impl Iterator<Item = (usize, i64)> {
    let strides = [x.strides.batch, x.strides.seqlen, x.strides.heads, x.strides.head_dim];
    let bytes = x.dtype.bytes() as i64;
    let dims = x.shape.dims().into_iter().zip(strides.map(|stride| stride.saturating_mul(bytes)));
    // Where head_dim has no gaps, its elements are one piece.
    let pieces = if x.strides.head_dim == 1 { 3 } else { 4 };
    dims.take(pieces).filter(|&(extent, stride)| extent > 1 && stride != 0)
}

/// Bytes of a contiguous piece.
fn width(x: &TensorDesc) -> i128 {
    let elements = if x.strides.head_dim == 1 { x.shape.head_dim } else { 1 };
    (elements * x.dtype.bytes()) as i128
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::{Dtype, Shape, Strides};

    /// A small tensor with strides of all kinds.
    fn tensor() -> impl Strategy<Value = TensorDesc> {
        let stride = || prop_oneof![0_i64..4, 0_i64..40].prop_map(|stride| stride * 4);
        let of_head_dim = prop_oneof![4 => Just(1_i64), 1 => 0_i64..20];
        (1_usize..4, 1_usize..4, 1_usize..4, 1_usize..3, [stride(), stride(), stride()], of_head_dim)
            .prop_map(|(batch, seqlen, heads, columns, [of_batch, of_seqlen, of_heads], head_dim)| {
                TensorDesc {
                    dtype: Dtype::Bf16,
                    shape: Shape { batch, seqlen, heads, head_dim: 4 * columns },
                    strides: Strides { batch: of_batch, seqlen: of_seqlen, heads: of_heads, head_dim },
                }
            })
    }

    fn bytes(x: &TensorDesc, at: u64) -> HashSet<u64> {
        let [batch, seqlen, heads, head_dim] = x.shape.dims();
        let mut all = HashSet::new();
        for b in 0..batch {
            for s in 0..seqlen {
                for h in 0..heads {
                    for d in 0..head_dim {
                        let element = at + 2 * x.offset(b, s, h, d).0;
                        all.extend([element, element + 1]);
                    }
                }
            }
        }
        all
    }

    proptest! {
        /// Small tensors need no long search, so that the answer is exact.
        #[test]
        fn tensors_are_apart_if_they_share_no_byte(one in tensor(), other in tensor(), at in 0_u64..400) {
            let addresses = [800, 400 + 2 * at];
            let [of_one, of_other] = [bytes(&one, addresses[0]), bytes(&other, addresses[1])];
            prop_assert_eq!(are_apart([&one, &other], addresses), of_one.is_disjoint(&of_other));
        }
    }

    /// Q, K, V and O are parts of one tensor of 2⁴⁰ bytes, (batch, rows, heads, head_dim) or (batch, heads, rows,
    /// head_dim). A part that is shifted by 16 bytes may overlap the next part.
    #[test]
    fn parts_of_one_large_tensor_are_apart() {
        let (batch, rows, heads, head_dim) = (1 << 10, 1 << 16, 16_i64, 128_i64);
        let row = 4 * heads * head_dim;
        let rows_first = Strides { batch: rows as i64 * row, seqlen: row, heads: head_dim, head_dim: 1 };
        let of_head = rows as i64 * head_dim;
        let heads_first =
            Strides { batch: 4 * heads * of_head, seqlen: head_dim, heads: of_head, head_dim: 1 };
        let shape = Shape { batch, seqlen: rows, heads: heads as usize, head_dim: head_dim as usize };
        for (strides, part) in [(rows_first, heads * head_dim), (heads_first, heads * of_head)] {
            let tensor = TensorDesc { dtype: Dtype::Bf16, shape, strides };
            for parts in 0..4 {
                let at = (2 * parts * part) as u64;
                assert_eq!(are_apart([&tensor, &tensor], [1 << 20, (1 << 20) + at]), parts > 0, "{parts}");
                assert_eq!(are_apart([&tensor, &tensor], [(1 << 20) + at, 1 << 20]), parts > 0, "{parts}");
                // 16 bytes further, the last part overlaps the next repetition of the first part.
                let is_apart = are_apart([&tensor, &tensor], [1 << 20, (1 << 20) + at + 16]);
                assert_eq!(is_apart, parts == 1 || parts == 2, "{parts}");
            }
        }
    }

    /// No stride is a multiple of another, and there are many positions to search.
    #[test]
    fn a_long_search_is_given_up() {
        let of = |seqlen, heads| TensorDesc {
            dtype: Dtype::Bf16,
            shape: Shape { batch: 1, seqlen: 1 << 20, heads: 1 << 20, head_dim: 8 },
            strides: Strides { batch: 0, seqlen, heads, head_dim: 1 },
        };
        assert!(!are_apart(
            [&of(10_007 * 16, 10_009 * 16), &of(10_037 * 16, 10_039 * 16)],
            [1 << 20, (1 << 20) + 16]
        ));
    }
}
