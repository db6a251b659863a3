//! Stores of a fragment's rows to global memory.

use fa3_ir::lang::*;

/// A tensor in global memory: its address, and the stride in bytes of each dimension but the innermost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Global<'k, const D: usize> {
    /// The address of the tensor's first element.
    pub(crate) address: U64<'k>,
    /// The strides in bytes, of the outermost dimension first.
    pub(crate) strides: [U64<'k>; D],
}

impl<'k, const D: usize> Global<'k, D> {
    /// The address of the row whose indices are `indices`.
    #[track_caller]
    pub(crate) fn at(&self, indices: [U32<'k>; D]) -> U64<'k> {
        let strides = indices.into_iter().zip(self.strides);
        strides.fold(self.address, |at, (index, stride)| at + index.to_u64() * stride)
    }
}

/// The format in which rows are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreRows {
    /// The element type: f16 or bf16.
    pub(crate) elem: Elem,
    /// The columns of memory to write.
    pub(crate) columns: Columns,
    /// The order of the columns in the fragment.
    pub(crate) order: ColumnOrder,
}

/// The columns of rows in memory that a fragment holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// First column, a multiple of 8.
    pub(crate) first: u32,
    /// Number of columns, a multiple of 8; the fragment may have more.
    pub(crate) count: u32,
}

impl Columns {
    /// The first `count` columns of rows.
    pub(crate) fn of_rows(count: u32) -> Columns {
        Columns { first: 0, count }
    }
}

/// The order of columns in a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnOrder {
    /// The order of columns in memory.
    Natural,
    /// In each group of 16 columns, even columns come first, and then odd columns.
    EvensFirst,
}

impl StoreRows {
    /// Index, among the four chunks of 8 columns in 32, of the chunk that thread `quad` of a quad writes.
    #[track_caller]
    fn chunk<'k>(&self, quad: U32<'k>) -> U32<'k> {
        match self.order {
            ColumnOrder::Natural => quad,
            ColumnOrder::EvensFirst => ((quad & 1) << 1) | (quad >> 1),
        }
    }

    /// Writes the thread's two rows where they are `inside`: the row at `indices` (sequence, head and row), and
    /// the eighth row after it. Threads of a quad exchange words for each group of 32 columns, so that each thread
    /// writes 8 neighbouring columns, 16 bytes.
    #[track_caller]
    pub(crate) fn store<'k>(
        &self,
        o: Frag<'k>,
        to: Global<'k, 3>,
        indices: [U32<'k>; 3],
        inside: [V<'k, Pred>; 2],
    ) {
        let quad = o.builder().tid() & 3;
        let chunk = self.chunk(quad);
        let upper = chunk.mad_wide(16, to.at(indices));
        let [_, _, stride] = to.strides;
        self.store_chunks(o, (quad, chunk), [upper, upper + (stride << 3)], inside);
    }

    /// Like `store`, to rows whose addresses are `rows`.
    #[track_caller]
    pub(crate) fn store_at<'k>(&self, o: Frag<'k>, rows: [U64<'k>; 2], inside: [V<'k, Pred>; 2]) {
        let quad = o.builder().tid() & 3;
        let chunk = self.chunk(quad);
        self.store_chunks(o, (quad, chunk), rows.map(|row| chunk.mad_wide(16, row)), inside);
    }

    #[track_caller]
    fn store_chunks<'k>(
        &self,
        o: Frag<'k>,
        (quad, chunk): (U32<'k>, U32<'k>),
        rows: [U64<'k>; 2],
        inside: [V<'k, Pred>; 2],
    ) {
        let b = o.builder();
        let packed = match self.order {
            ColumnOrder::Natural => o.packed(self.elem),
            ColumnOrder::EvensFirst => o.interleaved().packed(self.elem),
        };
        let exchange = match self.order {
            ColumnOrder::Natural => Exchange::OfQuad(QuadTranspose::new(quad)),
            ColumnOrder::EvensFirst => Exchange::OfNeighbours((quad & 1).eq(0)),
        };
        let Columns { first, count } = self.columns;
        for group in 0..count.div_ceil(32) {
            let missing = (32 * (group + 1)).saturating_sub(count) / 8;
            for half in Half::BOTH {
                let words = exchange.of([0, 1, 2, 3].map(|chunk| packed.word(half, 4 * group + chunk)));
                let mut writes = inside[half as usize];
                if missing > 0 {
                    writes = writes & chunk.lt(4 - missing);
                }
                let at = rows[half as usize].at(2 * (first + 32 * group) as i32);
                b.guarded(writes, || b.store_vector(at, words));
            }
        }
    }
}

/// An exchange of words within a quad, after which each thread has neighbouring words.
enum Exchange<'k> {
    /// Each thread has a word of all four chunks of columns, and gets all words of one chunk.
    OfQuad(QuadTranspose<'k>),
    /// Each thread has two words of each half of the columns. In a pair of threads, the thread whose predicate is true
    /// gets the first half, and the other thread gets the second.
    OfNeighbours(V<'k, Pred>),
}

impl<'k> Exchange<'k> {
    #[track_caller]
    fn of(&self, words @ [a, b, c, d]: [U32<'k>; 4]) -> [U32<'k>; 4] {
        match self {
            Exchange::OfQuad(transpose) => transpose.of(words),
            Exchange::OfNeighbours(is_first) => neighbours(*is_first, [[a, b], [c, d]]),
        }
    }
}

/// Exchanges words between threads 2i and 2i + 1. Each thread has two words of a first run of four words, and two of a
/// second run. The thread whose `is_first` is true gets the first run, and the other thread gets the second.
#[track_caller]
pub(crate) fn neighbours<'k>(is_first: V<'k, Pred>, [first, second]: [[U32<'k>; 2]; 2]) -> [U32<'k>; 4] {
    let pairs = [0, 1].map(|word| {
        let other = is_first.select::<B32>(second[word], first[word]).shfl_bfly(1);
        [is_first.select::<B32>(first[word], other), is_first.select::<B32>(other, second[word])]
    });
    [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
}
