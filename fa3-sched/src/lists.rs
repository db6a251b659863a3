//! Lists of keys (sparse attention): each sequence lists rows of a cache, and maybe rows of a second cache.
//!
//! A block of keys has entries of one list. The blocks of the first list come first, then the blocks of the second one:
//!
//! ```text
//! lists of 100 and of 30 entries, blocks of 64 keys
//!
//! block      ├────── 0 ──────┼────── 1 ──────┼────── 2 ──────┤
//! entries     0 ────────────────────── 99     0 ─── 29
//! ```
//!
//! Blocks are visited in this order, from a list's front. In an order of falling scores the first block then has the
//! largest ones.

use fa3_types::{ExtraCache, Problem, Sequences, Shape, TensorDesc};

use crate::Int;

/// Lengths of a sequence's lists: numbers of entries that count, clamped to the lists
/// ([`ClampedRows`](crate::packed::ClampedRows)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListLens<T> {
    /// Entries of the first list.
    pub first: T,
    /// Entries of the second list, if there is a second cache.
    pub second: Option<T>,
}

/// A block of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListBlock<T: Int> {
    /// Whether its entries are ones of the second list; `None` if there is no second list.
    pub is_second: Option<T::Bool>,
    /// Its first entry, counted from the front of its list.
    pub entry: T,
    /// Number of its entries that count, at most the keys of a block. Behind them there is no key.
    pub entries: T,
}

impl<T: Int> ListLens<T> {
    /// Number of blocks of 2^`log_keys` keys.
    pub fn blocks(&self, log_keys: u32) -> T {
        let of_first = blocks(self.first, log_keys);
        self.second.map_or(of_first, |second| of_first + blocks(second, log_keys))
    }

    /// Number of keys of whole blocks: the sequence's length, of which a kernel masks nothing else.
    pub fn keys(&self, log_keys: u32) -> T {
        self.blocks(log_keys) * self.first.lit(1 << log_keys)
    }

    /// Whether block `number`, of 2^`log_keys` keys, has entries of the second list; `None` if there is no second list.
    pub fn is_second(&self, number: T, log_keys: u32) -> Option<T::Bool> {
        self.second.map(|_| blocks(self.first, log_keys).le(number))
    }

    /// Block `number`, of 2^`log_keys` keys. A block behind the last one has no entries.
    pub fn block(&self, number: T, log_keys: u32) -> ListBlock<T> {
        let keys = number.lit(1 << log_keys);
        let of = |is_second, number: T, len: T| {
            let entry = number * keys;
            ListBlock { is_second, entry, entries: len.sub_sat(entry).at_most(keys) }
        };
        let Some((second, is_second)) = self.second.zip(self.is_second(number, log_keys)) else {
            return of(None, number, self.first);
        };
        let select = |yes, no| T::select(is_second, yes, no);
        let before = blocks(self.first, log_keys);
        of(Some(is_second), select(number.sub_sat(before), number), select(second, self.first))
    }
}

fn blocks<T: Int>(entries: T, log_keys: u32) -> T {
    (entries + entries.lit((1 << log_keys) - 1)).shr(entries.lit(log_keys))
}

/// A cache whose rows are listed, and the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedRows {
    /// Number of rows. An index, as an unsigned number, is a key if it is below.
    pub rows: u32,
    /// Entries of a list.
    pub keys: u32,
    /// Entries from a list to the next; 0 if lists have none, which then have no memory.
    pub list_stride: u32,
    /// Whether only the first entries of a list count, and an array has their number.
    pub used: bool,
    /// Rows of a page, if a page's rows do not follow the rows of the page before: row r of the cache is then row r mod
    /// `page_rows` of page r / `page_rows`. Otherwise all rows are equally far apart.
    pub page_rows: Option<u32>,
}

impl ListedRows {
    /// The first cache of a problem, and the second one, if keys are listed.
    pub fn of(problem: &Problem) -> Option<(ListedRows, Option<ListedRows>)> {
        let first = ListedRows::of_cache([problem.k(), problem.v()], problem.seqs_k())?;
        let extra = |extra: &ExtraCache| ListedRows::of_cache([&extra.k, &extra.v], extra.sequences);
        Some((first, problem.extra().and_then(extra)))
    }

    fn of_cache(tensors: [&TensorDesc; 2], sequences: Sequences) -> Option<ListedRows> {
        let (keys, list_stride) = sequences.list()?;
        let Shape { batch, seqlen, .. } = tensors[0].shape;
        let is_paged = tensors.into_iter().any(|tensor| {
            let [page, row] = ListedRows::strides(tensor);
            batch > 1 && page != seqlen as u64 * row
        });
        let list_stride = if keys > 0 { list_stride } else { 0 };
        // All numbers are below 2³¹ in every problem.
        let [rows, keys, list_stride, page_rows] =
            [batch * seqlen, keys, list_stride, seqlen].map(|x| x as u32);
        let page_rows = is_paged.then_some(page_rows);
        Some(ListedRows { rows, keys, list_stride, used: sequences.has_used(), page_rows })
    }

    /// Elements of a cache's tensor from a page to the next, and from a row to the next.
    pub fn strides(tensor: &TensorDesc) -> [u64; 2] {
        // Strides of a problem's tensors are not negative.
        let [page, row] = [tensor.strides.batch, tensor.strides.seqlen].map(i64::unsigned_abs);
        if tensor.shape.seqlen > 1 { [page, row] } else { [page, page] }
    }

    /// A tensor's rows that are equally far apart: a page's, or all rows if pages have one row each.
    pub(crate) fn of_page(tensor: &TensorDesc) -> TensorDesc {
        let (Shape { batch, seqlen, .. }, [_, row]) = (tensor.shape, ListedRows::strides(tensor));
        let rows = if seqlen == 1 { batch } else { seqlen };
        let mut page = *tensor;
        (page.shape.batch, page.shape.seqlen, page.strides.seqlen) = (1, rows, row as i64);
        page
    }

    /// Number of keys of all blocks of `keys` keys of whole lists: see [`ListLens::keys`].
    pub(crate) fn most_keys((first, second): (ListedRows, Option<ListedRows>), keys: u32) -> usize {
        let of = |list: ListedRows| (list.keys as usize).next_multiple_of(keys as usize);
        of(first) + second.map_or(0, of)
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemSpec};
    use proptest::prelude::*;

    use super::*;
    use crate::checked::Checked;

    proptest! {
        /// Blocks have each entry of both lists once, in order.
        #[test]
        fn blocks_are_all_entries(
            first in 0_u32..300, second in prop_oneof![Just(None), (0_u32..300).prop_map(Some)], log_keys in 0_u32..8,
        ) {
            let lens = ListLens { first: Checked::from(first), second: second.map(Checked::from) };
            let count = lens.blocks(log_keys).0;
            prop_assert_eq!(lens.keys(log_keys).0, count << log_keys);
            let mut entries = vec![];
            for number in 0..count {
                let block = lens.block(Checked(number), log_keys);
                let select = |is_second| Checked::select(is_second, Checked(1), Checked(0)).0;
                let list = block.is_second.map_or(0, select);
                prop_assert!(block.entries.0 > 0 && block.entries.0 <= 1 << log_keys);
                entries.extend((0..block.entries.0).map(|at| (list, block.entry.0 + at)));
            }
            let expected = (0..first).map(|at| (0, at.into()));
            let expected: Vec<_> = expected.chain((0..second.unwrap_or(0)).map(|at| (1, at.into()))).collect();
            prop_assert_eq!(entries, expected);
            prop_assert_eq!(lens.block(Checked(count), log_keys).entries, Checked(0));
        }
    }

    #[test]
    fn rows_in_pages() {
        let q = Shape { batch: 3, seqlen: 1, heads: 2, head_dim: 64 };
        let spec = |pages, rows, stride| {
            let mut spec =
                ProblemSpec::dense(Dtype::Bf16, q, Shape { batch: pages, seqlen: rows, heads: 1, ..q });
            spec.k.strides.batch = stride;
            spec.seqs_k(Sequences::listed(3, 100).table_stride(128))
        };
        let listed = |spec: ProblemSpec| ListedRows::of(&spec.validate().unwrap()).unwrap();
        let adjacent = ListedRows { rows: 80, keys: 100, list_stride: 128, used: false, page_rows: None };
        assert_eq!(listed(spec(5, 16, 1024)), (adjacent, None));
        let paged = ListedRows { page_rows: Some(16), ..adjacent };
        assert_eq!(listed(spec(5, 16, 2048)).0, paged);
        assert_eq!(listed(spec(1, 80, 7)).0, adjacent);
        assert_eq!(listed(spec(80, 1, 192)).0, adjacent);
        let mut other = spec(5, 16, 1024);
        other.v.strides.batch = 2048;
        let extra = ExtraCache { k: other.k, v: other.k, sequences: Sequences::listed(3, 7).used() };
        let second = ListedRows { keys: 7, list_stride: 7, used: true, ..adjacent };
        assert_eq!(listed(other.extra(extra)), (paged, Some(second)));
        let empty = spec(5, 16, 1024).seqs_k(Sequences::listed(3, 0).table_stride(1));
        assert_eq!(listed(empty).0, ListedRows { keys: 0, list_stride: 0, ..adjacent });
        let strided = spec(80, 1, 192).validate().unwrap();
        assert_eq!(ListedRows::strides(strided.k()), [192, 192]);
    }
}
