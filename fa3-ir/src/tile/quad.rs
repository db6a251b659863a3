//! Exchange between the four threads of a quad, which have the same rows of a fragment.

use crate::lang::{B32, Pred, V};

/// The transpose of a 4 x 4 matrix of words, one row for each thread of a quad.
#[derive(Clone, Copy, Debug)]
pub struct QuadTranspose<'k> {
    /// Whether the lower and the upper bit of the thread's number in its quad are set.
    bits: [V<'k, Pred>; 2],
}

impl<'k> QuadTranspose<'k> {
    /// The transpose for thread `quad`, 0 to 3, of its quad.
    #[track_caller]
    pub fn new(quad: V<'k, B32>) -> QuadTranspose<'k> {
        QuadTranspose { bits: [1, 2].map(|bit| (quad & bit).ne(0)) }
    }

    /// Word i of thread j becomes word j of thread i.
    #[track_caller]
    pub fn of(self, [w0, w1, w2, w3]: [V<'k, B32>; 4]) -> [V<'k, B32>; 4] {
        let _one = w0.builder().as_one();
        let ((w0, w1), (w2, w3)) = (self.exchange(0, w0, w1), self.exchange(0, w2, w3));
        let ((w0, w2), (w1, w3)) = (self.exchange(1, w0, w2), self.exchange(1, w1, w3));
        [w0, w1, w2, w3]
    }

    /// Threads whose bit is set send x and keep y; the others send y and keep x.
    #[track_caller]
    fn exchange(self, bit: usize, x: V<'k, B32>, y: V<'k, B32>) -> (V<'k, B32>, V<'k, B32>) {
        let set = self.bits[bit];
        let got = set.select(x, y).shfl_bfly(1 << bit);
        (set.select(got, x), set.select(y, got))
    }
}
