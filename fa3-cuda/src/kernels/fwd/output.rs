//! O and LSE of a tile, from registers to global memory.

use fa3_ir::{At, B32, B64, Builder, Elem, Frag, Pred, V};

use super::FwdSpec;
use super::consumer::Sum;
use super::geometry::{Geometry, Work};

/// Where results go.
pub(super) struct Output {
    o: V<B64>,
    lse: V<B64>,
    /// Bytes from one sequence, head, row of O to the next.
    strides: [V<B64>; 3],
    heads: V<B32>,
    elem: Elem,
    /// Columns of O.
    cols: u32,
}

impl Output {
    /// Declares the parameters.
    #[track_caller]
    pub(super) fn declare(b: &mut Builder, spec: &FwdSpec) -> Output {
        Output {
            o: b.param_pointer("o", spec.elem),
            lse: b.param_pointer("lse", Elem::F32),
            strides: ["batch", "head", "row"].map(|name| b.param_u64(&format!("o_{name}_bytes"))),
            heads: b.param_u32("heads"),
            elem: spec.elem,
            cols: spec.head_dim_v,
        }
    }

    /// Writes the rows of a tile that there are; the thread's are `row` and 8 more.
    #[track_caller]
    pub(super) fn write(
        &self,
        b: &mut Builder,
        geometry: &Geometry<V<B32>>,
        sum: Sum,
        work: &Work<V<B32>>,
        row: V<B32>,
    ) {
        let Sum { mut o, softmax } = sum;
        let (inverse, lse) = softmax.finish(b); // A1:24
        let second = b.add(row, 8);
        let inside = [row, second].map(|row| b.lt_u32(row, geometry.lens.q));
        let tid = b.tid();
        let quad = b.and(tid, 3);

        // All threads of a quad have the same L. At address 0 nobody wants it.
        let one = b.eq_b32(quad, 0);
        let wanted = b.ne_b64(self.lse, 0u64);
        let one = b.and_pred(one, wanted);
        let head = b.mad_u32(work.batch, self.heads, work.head);
        let rows = b.mul_wide_u32(head, geometry.lens.q);
        let at = b.u64_of_u32(row);
        let at = b.add(rows, at);
        let at = b.shl_b64(at, 2);
        let at = b.add(self.lse, at);
        for (half, inside) in inside.into_iter().enumerate() {
            let writes = b.and_pred(inside, one);
            b.guarded(writes, |b| b.store(at.at(32 * half as i32), lse.0[half]));
        }

        o.scale_rows(b, inverse); // A1:24
        // A row that has seen no key is 0, whatever was multiplied by its zeros.
        let empty = inverse.0.map(|inverse| b.eq_f32(inverse, 0.0));
        let either = b.or_pred(empty[0], empty[1]);
        let any = b.vote_any(either);
        b.if_uniform(any, |b| o.map(b, |b, o, at| b.select(empty[at.half as usize], 0.0, o)));
        let mut at = self.o;
        for (number, stride) in [work.batch, work.head, row].into_iter().zip(self.strides) {
            let number = b.u64_of_u32(number);
            let bytes = b.mul(number, stride);
            at = b.add(at, bytes);
        }
        at = b.mad_wide_u32(quad, 16, at);
        let down = b.shl_b64(self.strides[2], 3);
        let below = b.add(at, down);
        self.write_rows(b, &o, quad, [at, below], inside); // A1:25
    }

    /// Writes the thread's two rows, each group of 32 columns at once: threads of a quad exchange what they have, so that each
    /// has 8 neighbours, 16 bytes.
    fn write_rows(&self, b: &mut Builder, o: &Frag, quad: V<B32>, rows: [V<B64>; 2], inside: [V<Pred>; 2]) {
        let words: Vec<(At, V<B32>)> = o
            .pairs()
            .map(|(at, [x, y])| {
                let half = self.elem == Elem::F16;
                (at, if half { b.f16x2_of_f32(y, x) } else { b.bf16x2_of_f32(y, x) })
            })
            .collect();
        let bits = [1, 2].map(|bit| {
            let bit = b.and(quad, bit);
            b.ne_b32(bit, 0)
        });
        for group in 0..self.cols.div_ceil(32) {
            let missing = (32 * (group + 1)).saturating_sub(self.cols) / 8;
            for half in 0..2 {
                let chunk = |chunk: u32| {
                    let wanted = At { half, col: 32 * group + 8 * chunk };
                    words.iter().find(|(at, _)| *at == wanted).map_or(words[0].1, |&(_, word)| word)
                };
                let chunks = transposed(b, [0, 1, 2, 3].map(chunk), bits);
                let mut writes = inside[half as usize];
                if missing > 0 {
                    let there = b.lt_u32(quad, 4 - missing);
                    writes = b.and_pred(writes, there);
                }
                let at = rows[half as usize].at(64 * group as i32);
                b.guarded(writes, |b| b.store_vector(at, chunks));
            }
        }
    }
}

/// The 4 x 4 words of a quad's threads, transposed: word i of thread j becomes word j of thread i. `bits` are those of the
/// thread's number.
fn transposed(b: &mut Builder, [w0, w1, w2, w3]: [V<B32>; 4], bits: [V<Pred>; 2]) -> [V<B32>; 4] {
    // Threads whose bit is set give x and keep y, the others give y and keep x.
    let mut exchange = |bit: usize, x: V<B32>, y: V<B32>| {
        let sent = b.select(bits[bit], x, y);
        let got = b.shfl_bfly(sent, 1 << bit);
        (b.select(bits[bit], got, x), b.select(bits[bit], y, got))
    };
    let ((w0, w1), (w2, w3)) = (exchange(0, w0, w1), exchange(0, w2, w3));
    let ((w0, w2), (w1, w3)) = (exchange(1, w0, w2), exchange(1, w1, w3));
    [w0, w1, w2, w3]
}
