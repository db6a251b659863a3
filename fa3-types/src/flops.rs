//! The operations of a problem.

use crate::mask::keys_of_row;
use crate::{Elems, KnownProblem, Lengths, Mask};

impl KnownProblem {
    /// Floating-point operations of the forward pass as the FlashAttention papers count them (§4.1):
    /// 2 · (head_dim + head_dim_v) for each pair of a query and a key, half the pairs under a causal mask. With
    /// [`qv`](crate::Problem::qv) it is 2 · (head_dim + 2 · head_dim_v).
    /// For a window, for chunks and for intervals, the visible pairs are counted exactly.
    pub fn forward_flops(&self) -> f64 {
        if self.o().extent() == Elems(0) {
            return 0.0;
        }
        let products = self.head_dim() + self.head_dim_v() * if self.qv().is_some() { 2 } else { 1 };
        if self.intervals().is_some() {
            return 2.0 * products as f64 * self.pairs_of_intervals() as f64;
        }
        // An empty sum of floats would be -0.
        let pairs =
            (0..self.batch()).map(|index| self.pairs(self.lengths(index))).fold(0.0, |sum, n| sum + n);
        2.0 * products as f64 * self.heads().q() as f64 * pairs
    }

    /// Visible pairs of all sequences and heads.
    fn pairs_of_intervals(&self) -> usize {
        let heads = (0..self.batch()).flat_map(|index| (0..self.heads().q()).map(move |head| (index, head)));
        let rows =
            heads.flat_map(|(index, head)| (0..self.lengths(index).q).map(move |row| [index, head, row]));
        rows.filter_map(|row| self.intervals_of_row(row)).flatten().map(|keys| keys.len()).sum()
    }

    fn pairs(&self, len: Lengths) -> f64 {
        let all = len.q as f64 * len.k as f64;
        match self.mask() {
            // Pairs under a mask of intervals are counted elsewhere (`pairs_of_intervals`).
            Mask::None | Mask::Intervals { .. } => all,
            Mask::Causal => all / 2.0,
            mask @ (Mask::Window { .. } | Mask::Chunk { .. }) => {
                (0..len.q).map(|row| keys_of_row(mask, row, len).len()).sum::<usize>() as f64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, ProblemSpec, Shape};

    const SHAPE: Shape = Shape { batch: 1, seqlen: 1024, heads: 16, head_dim: 128 };

    #[test]
    fn flops_are_the_papers() {
        let spec = ProblemSpec::dense(Dtype::F16, SHAPE, SHAPE);
        let dense = 4.0 * 1024.0 * 1024.0 * 128.0 * 16.0;
        assert_eq!(spec.clone().known().unwrap().forward_flops(), dense);
        assert_eq!(spec.clone().causal().known().unwrap().forward_flops(), dense / 2.0);
        let window = Mask::Window { left: Some(0), right: Some(0) };
        assert_eq!(spec.mask(window).known().unwrap().forward_flops(), dense / 1024.0);
    }

    #[test]
    fn no_work_is_zero() {
        let problem =
            ProblemSpec::dense(Dtype::F16, Shape { batch: 0, ..SHAPE }, Shape { batch: 0, ..SHAPE });
        assert_eq!(problem.known().unwrap().forward_flops().to_bits(), 0, "not -0");
    }

    proptest::proptest! {
        /// `pairs` in closed form equals the number of pairs that `allows` accepts.
        #[test]
        fn pairs_are_what_the_mask_allows(
            q in 0usize..20, k in 0usize..20,
            left in proptest::option::of(0u32..24), right in proptest::option::of(0u32..24), chunk in 0_i64..24,
        ) {
            let (q_shape, kv) = (Shape { seqlen: q, ..SHAPE }, Shape { seqlen: k, ..SHAPE });
            let mask = Mask::Window { left, right }.and(Mask::from_chunk(chunk).unwrap()).unwrap();
            let problem = ProblemSpec::dense(Dtype::F16, q_shape, kv).mask(mask).known().unwrap();
            // By convention causal masks count half of the pairs.
            proptest::prop_assume!(problem.mask() != Mask::Causal);
            let len = Lengths { q, k };
            let allowed = (0..q).map(|i| (0..k).filter(|&j| mask.allows(i, j, len)).count()).sum::<usize>();
            proptest::prop_assert_eq!(problem.pairs(len), allowed as f64);
        }
    }
}
