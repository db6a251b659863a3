//! Tensors that lie between each other's elements.

use crate::TensorDesc;

/// Bytes of two tensors: from the beginning of either, so many of each period are its elements, and no others.
///
/// So rows of keys and of values in one cache lie side by side, and so do dQ, dK and dV in one tensor (total, 3, heads,
/// head_dim).
///
/// ```
/// use fa3_types::{Comb, Dtype, Shape, TensorDesc};
///
/// let mut dk = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 1, seqlen: 100, heads: 4, head_dim: 64 });
/// dk.strides.seqlen *= 3;
/// let combs = Comb::of([&dk, &dk]);
/// let are_apart = |distance: u64| combs.iter().any(|comb| comb.are_apart([4096, 4096 + distance]));
/// // Rows have 512 bytes, of 1536.
/// assert!(are_apart(512) && are_apart(1024) && !are_apart(496) && !are_apart(1040));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comb {
    /// Bytes.
    pub period: u64,
    /// Bytes of each period, at most all.
    pub teeth: [u64; 2],
}

impl Comb {
    /// Ways in which the elements of two tensors repeat together. Strides are not negative.
    pub fn of(tensors: [&TensorDesc; 2]) -> Vec<Comb> {
        let all = tensors.map(steps);
        let comb = |from: u64| {
            // Steps this long or longer lead from a period to another. The shorter ones stay within a tooth.
            let long = all.iter().flatten().map(|&(_, stride)| stride).filter(|&stride| stride >= from);
            let period = long.fold(0, gcd);
            let teeth = [0, 1].map(|i| {
                let short = all[i].iter().filter(|&&(_, stride)| stride < from);
                let width = tensors[i].shape.head_dim as u64 * tensors[i].dtype.bytes() as u64;
                width + short.map(|&(extent, stride)| (extent - 1) * stride).sum::<u64>()
            });
            Comb { period, teeth }
        };
        let combs = all[0].iter().map(|&(_, stride)| comb(stride));
        combs.filter(|comb| comb.period > 0 && comb.teeth.iter().all(|&tooth| tooth <= comb.period)).collect()
    }

    /// Whether no byte is an element of both if they begin at these addresses.
    pub fn are_apart(&self, [one, other]: [u64; 2]) -> bool {
        let Comb { period, teeth: [tooth, other_tooth] } = *self;
        let distance = (i128::from(other) - i128::from(one)).rem_euclid(period.into());
        distance >= tooth.into() && i128::from(period) - distance >= other_tooth.into()
    }
}

/// How many sequences, rows and heads a tensor has, where it has several, and the bytes from one to the next.
fn steps(x: &TensorDesc) -> Vec<(u64, u64)> {
    let dims = [
        (x.shape.batch, x.strides.batch),
        (x.shape.seqlen, x.strides.seqlen),
        (x.shape.heads, x.strides.heads),
    ];
    let dims = dims.into_iter().filter(|&(extent, _)| extent > 1);
    dims.map(|(extent, stride)| (extent as u64, stride.unsigned_abs() * x.dtype.bytes() as u64)).collect()
}

fn gcd(x: u64, y: u64) -> u64 {
    if y == 0 { x } else { gcd(y, x % y) }
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
        (1_usize..4, 1_usize..4, 1_usize..4, 1_usize..3, [stride(), stride(), stride()]).prop_map(
            |(batch, seqlen, heads, columns, [of_batch, of_seqlen, of_heads])| TensorDesc {
                dtype: Dtype::Bf16,
                shape: Shape { batch, seqlen, heads, head_dim: 4 * columns },
                strides: Strides { batch: of_batch, seqlen: of_seqlen, heads: of_heads, head_dim: 1 },
            },
        )
    }

    fn bytes(x: &TensorDesc, at: u64) -> HashSet<u64> {
        let [batch, seqlen, heads, head_dim] = x.shape.dims();
        let mut all = HashSet::new();
        for (b, s, h) in
            (0..batch).flat_map(|b| (0..seqlen).flat_map(move |s| (0..heads).map(move |h| (b, s, h))))
        {
            let row = at + 2 * x.offset(b, s, h, 0).0;
            all.extend(row..row + 2 * head_dim as u64);
        }
        all
    }

    proptest! {
        /// Combs say what is true.
        #[test]
        fn tensors_that_are_apart_share_no_byte(one in tensor(), other in tensor(), at in 0_u64..200) {
            let addresses = [800, 400 + 8 * at];
            if Comb::of([&one, &other]).iter().any(|comb| comb.are_apart(addresses)) {
                let [one, other] = [bytes(&one, addresses[0]), bytes(&other, addresses[1])];
                prop_assert!(one.is_disjoint(&other));
            }
        }

        /// Gradients in one tensor (batch, rows, heads_q + 2 heads_kv, head_dim) are found to be apart, and those that
        /// are not a whole head away are not.
        #[test]
        fn parts_of_one_tensor_are_apart(
            (batch, rows) in (1_usize..3, 1_usize..4), (of_q, of_k) in (1_usize..4, 1_usize..3),
        ) {
            let head_dim = 8_u64;
            let all = (of_q + 2 * of_k) as i64 * head_dim as i64;
            let part = |heads| TensorDesc {
                dtype: Dtype::Bf16,
                shape: Shape { batch, seqlen: rows, heads, head_dim: head_dim as usize },
                strides: Strides { batch: rows as i64 * all, seqlen: all, heads: head_dim as i64, head_dim: 1 },
            };
            let are_apart = |[one, other]: [&TensorDesc; 2], addresses: [u64; 2]| {
                Comb::of([one, other]).iter().any(|comb| comb.are_apart(addresses))
            };
            let (q, k) = (part(of_q), part(of_k));
            let (at, next) = (of_q as u64 * 2 * head_dim, of_k as u64 * 2 * head_dim);
            if batch * rows > 1 {
                prop_assert!(are_apart([&q, &k], [4096, 4096 + at]));
                prop_assert!(are_apart([&q, &k], [4096, 4096 + at + next]));
                prop_assert!(are_apart([&k, &k], [4096 + at, 4096 + at + next]));
                prop_assert!(!are_apart([&q, &k], [4096, 4096 + at - 8]));
                prop_assert!(!are_apart([&k, &k], [4096, 4096 + next - 8]));
            }
        }
    }
}
