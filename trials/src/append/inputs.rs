//! Inputs of an append case, made from its seed.

use fa3_ref::PageTable;
use fa3_types::{Dtype, SequenceRows, Shape, Strides, TensorDesc};
use ndarray::{Array2, Array4};

use super::Cache;
use super::case::{CacheLayout, Case, Lengths, New, TABLE_ROWS};
use crate::memory::{encode, rounded};
use crate::values::Rng;

/// Number of rows of a packed tensor that lie after the last sequence.
const BEHIND: usize = 3;

/// Number of pages that belong to no sequence.
const SPARE: usize = 3;

/// The inputs of a case.
pub(super) struct Inputs {
    /// Tensors with their names, memory layouts and element bits.
    pub(super) tensors: Vec<(&'static str, TensorDesc, Array4<u16>)>,
    pub(super) new: Option<SequenceRows>,
    pub(super) queries: Option<SequenceRows>,
    pub(super) cu_seqlens_k_new: Vec<i32>,
    pub(super) seqused: Vec<i32>,
    pub(super) page_table: Option<Array2<i32>>,
    pub(super) index: Option<Vec<i32>>,
    pub(super) cos: Array2<f32>,
    pub(super) sin: Array2<f32>,
    pub(super) rotary_seqlens: Vec<i32>,
    /// Scales of an e4m3 cache, for K and for V: (sequences, heads).
    pub(super) scales: [Vec<f32>; 2],
    /// Random initial bytes of the cache's buffers, gaps included.
    pub(super) caches: [Vec<u8>; 2],
}

impl Case {
    /// Makes the inputs of this case.
    pub(super) fn inputs(&self) -> Inputs {
        let mut rng = Rng::new(self.seed);
        let new = self.new.map(|new| match new {
            New::Dense(rows) => SequenceRows::dense(self.count, rows),
            New::Packed(most) | New::Garbage(most) => self.packed(most, &mut rng),
        });
        let queries = self.queries.map(|queries| match queries.packed {
            true => self.packed(queries.rows, &mut rng),
            false => SequenceRows::dense(self.count, queries.rows),
        });
        let seqused = (0..self.count).map(|i| self.used(new.as_ref().map_or(0, |new| new.len(i)), &mut rng));
        let seqused = seqused.collect();
        let page_table = self.page_table(&mut rng);
        let index = self.index(&mut rng);
        let rotary_dim = self.rotation.map_or(2, |rotation| self.rotary_dim(rotation));
        let table = self.rotation.map_or(Dtype::F32, |rotation| self.table(rotation));
        let number = |rng: &mut Rng| rounded(table, rng.normal() as f32);
        let [cos, sin] =
            [(); 2].map(|()| Array2::from_shape_simple_fn((TABLE_ROWS, rotary_dim / 2), || number(&mut rng)));
        let listed = |rng: &mut Rng| match rng.below(8) {
            0 => i32::MAX,
            1 => -1,
            _ => rng.below(TABLE_ROWS as u64 + 3) as i32,
        };
        let mut inputs = Inputs {
            tensors: Vec::new(),
            cu_seqlens_k_new: new.as_ref().map_or(Vec::new(), SequenceRows::cu_seqlens),
            new,
            queries,
            seqused,
            page_table,
            index,
            cos,
            sin,
            rotary_seqlens: (0..self.count).map(|_| listed(&mut rng)).collect(),
            scales: [(); 2].map(|()| Vec::new()),
            caches: [Vec::new(), Vec::new()],
        };
        if matches!(self.new, Some(New::Garbage(_))) {
            inputs.cu_seqlens_k_new.iter_mut().for_each(|end| *end = garbage(*end, &mut rng));
        }
        self.add_tensors(&mut inputs, &mut rng);
        if self.quantizes() {
            // Most quotients by these scales are inexact. A scale of 0 turns zeros into NaN and other numbers into the
            // largest one.
            let scale =
                |rng: &mut Rng| if rng.below(8) == 0 { 0.0 } else { 0.01 * (1.0 + rng.below(300) as f32) };
            let count = self.count * self.heads[1];
            inputs.scales = [(); 2].map(|()| (0..count).map(|_| scale(&mut rng)).collect());
        }
        inputs
    }

    /// Packed sequences of up to `most` rows each.
    fn packed(&self, most: usize, rng: &mut Rng) -> SequenceRows {
        let lengths: Vec<usize> = (0..self.count).map(|_| rng.below(most as u64 + 1)).collect();
        SequenceRows::packed_lengths(&lengths)
    }

    /// Number of valid rows of a sequence before it gets `new` rows.
    fn used(&self, new: usize, rng: &mut Rng) -> i32 {
        let [rows, pages] = self.cache.rows();
        let capacity = rows * pages;
        let fits = capacity.saturating_sub(new);
        let any = rng.below(fits as u64 + 1) as i32;
        match self.lengths {
            Lengths::Zero => 0,
            Lengths::Any => any,
            Lengths::Full => fits as i32,
            Lengths::Beyond => (fits + rng.below(4)) as i32,
            Lengths::Garbage => garbage(any, rng),
        }
    }

    fn page_table(&self, rng: &mut Rng) -> Option<Array2<i32>> {
        let [_, pages] = self.cache.rows();
        let (entries, is_whole) = match self.cache {
            Cache::Dense(_) => return None,
            Cache::Pages { .. } | Cache::Indexed { .. } => (self.entries(), true),
            Cache::Missing { .. } => (self.entries(), false),
        };
        // Sequences share no page, because rows of a shared page would be written twice.
        let mut order: Vec<i32> = (0..entries as i32).collect();
        (1..entries).for_each(|i| order.swap(i, rng.below(i as u64 + 1)));
        let nowhere = [-1, entries as i32, i32::MIN, i32::MAX];
        Some(Array2::from_shape_fn((self.count, pages), |(i, page)| match rng.below(3) {
            0 if !is_whole => nowhere[rng.below(4)],
            _ => order[i * pages + page],
        }))
    }

    /// Index (cache_batch_idx) of each sequence's row in the page table. Indices differ, and one in four is invalid.
    fn index(&self, rng: &mut Rng) -> Option<Vec<i32>> {
        let Cache::Indexed { .. } = self.cache else { return None };
        let mut rows: Vec<i32> = (0..self.count as i32).collect();
        (1..self.count).for_each(|i| rows.swap(i, rng.below(i as u64 + 1)));
        let nowhere = [-1, self.count as i32, i32::MIN, i32::MAX];
        for row in &mut rows {
            if rng.below(4) == 0 {
                *row = nowhere[rng.below(4)];
            }
        }
        Some(rows)
    }

    fn entries(&self) -> usize {
        let [_, pages] = self.cache.rows();
        self.count * pages + if matches!(self.cache, Cache::Dense(_)) { 0 } else { SPARE }
    }

    fn add_tensors(&self, inputs: &mut Inputs, rng: &mut Rng) {
        let rows = |sequences: &SequenceRows| match sequences.is_packed() {
            true => [1, sequences.end() + BEHIND],
            false => [self.count, sequences.end()],
        };
        let desc = |[batch, seqlen]: [usize; 2], heads, head_dim| {
            self.layout.tensor(self.dtype, Shape { batch, seqlen, heads, head_dim })
        };
        let [dim, dim_v] = self.head_dims;
        let [heads_q, heads] = self.heads;
        if let Some(queries) = &inputs.queries {
            let q = desc(rows(queries), heads_q, dim);
            inputs.tensors.push(("q", q, self.numbers(&q, rng)));
        }
        if let Some(new) = &inputs.new {
            let (k, v) = (desc(rows(new), heads, dim), desc(rows(new), heads, dim_v));
            inputs.tensors.push(("k_new", k, self.numbers(&k, rng)));
            inputs.tensors.push(("v_new", v, any_bits(&v, rng)));
            let caches = [("k_cache", dim), ("v_cache", dim_v)].map(|(name, head_dim)| {
                let [rows, _] = self.cache.rows();
                let desc = self.cache_desc([self.entries(), rows, heads, head_dim], dim + dim_v);
                inputs.tensors.push((name, desc, Array4::zeros((0, 0, 0, 0))));
                (0..desc.extent_bytes().0).map(|_| rng.below(256) as u8).collect()
            });
            inputs.caches = caches;
        }
    }

    fn cache_desc(&self, [batch, seqlen, heads, head_dim]: [usize; 4], both: usize) -> TensorDesc {
        let shape = Shape { batch, seqlen, heads, head_dim };
        match self.cache_layout {
            CacheLayout::Of(layout) => layout.tensor(self.cache_dtype(), shape),
            CacheLayout::Beside => {
                let [row, of_head] = [both, seqlen * both].map(|stride| stride as i64);
                let strides =
                    Strides { batch: heads as i64 * of_head, seqlen: row, heads: of_head, head_dim: 1 };
                TensorDesc { strides, ..TensorDesc::contiguous(self.cache_dtype(), shape) }
            }
        }
    }

    /// Numbers of a tensor: mostly normal ones if the kernel rotates them, and any bits if the kernel only copies them.
    fn numbers(&self, desc: &TensorDesc, rng: &mut Rng) -> Array4<u16> {
        let mut x = any_bits(desc, rng);
        let rotated = self.rotation.map_or(0, |rotation| self.rotary_dim(rotation));
        for (_, x) in x.indexed_iter_mut().filter(|((.., column), _)| *column < rotated) {
            if rng.below(100) > 0 {
                *x = encode(self.dtype, rng.normal() as f32);
            }
        }
        x
    }
}

impl Inputs {
    /// The page table in memory. The gaps between its rows hold valid pages.
    pub(super) fn page_table_with_gaps(&self, gap: usize) -> Vec<i32> {
        let rows = self.page_table.iter().flat_map(|table| table.outer_iter()).map(|row| row.to_vec());
        rows.collect::<Vec<_>>().join(&vec![0; gap][..])
    }

    /// The page table, if the cache is paged.
    pub(super) fn page_table(&self) -> Option<PageTable<'_>> {
        let pages = self.page_table.as_ref()?.view();
        Some(PageTable { pages, index: self.index.as_deref() })
    }

    pub(super) fn tensor(&self, name: &str) -> (TensorDesc, &Array4<u16>) {
        let tensor = self.tensors.iter().find(|(known, ..)| *known == name);
        tensor.map(|(_, desc, x)| (*desc, x)).unwrap_or_else(|| unreachable!("{name} is no tensor"))
    }

    pub(super) fn desc(&self, name: &str) -> TensorDesc {
        self.tensor(name).0
    }
}

fn any_bits(desc: &TensorDesc, rng: &mut Rng) -> Array4<u16> {
    Array4::from_shape_simple_fn(desc.shape.dims(), || rng.below(1 << (8 * desc.dtype.bytes())) as u16)
}

/// Replaces one entry in three by another number.
fn garbage(entry: i32, rng: &mut Rng) -> i32 {
    match rng.below(9) {
        0 => -entry,
        1 => rng.below(1 << 32) as u32 as i32,
        2 => [i32::MIN, -1, i32::MAX][rng.below(3)],
        _ => entry,
    }
}
