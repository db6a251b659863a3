//! A problem over a KV cache, and the equivalent problem of contiguous sequences.

mod same_bits;

use std::ops::Range;

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::fwd;
use fa3_ir::Buffer;
use fa3_sched::forward::{Plan, PlanOptions, SplitKeys};
use fa3_types::{
    Dtype, KnownProblem, LseForm, Mask, Problem, ProblemSpec, SequenceRows, Sequences, Shape, TensorDesc,
    TokenScales,
};
use ndarray::{Array4, Axis};

use crate::fwd::{Layout, device, input, judged, outputs, with_qv};
use crate::intervals::Kind;
use crate::memory::{before, tensor_bytes, words};
use crate::values::Rng;
use crate::{Bits, Dist, Poison, Scaled, Trial, Values};

/// Location of the rows of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Each sequence is an entry of the batch, and the first rows of the entry are valid.
    Dense,
    /// Dense entries with left padding.
    Padded,
    /// Dense entries in another order (cache_batch_idx).
    Indexed,
    /// Dense entries in another order, with left padding.
    IndexedPadded,
    /// Paged.
    Pages(Pages),
}

/// Form of a paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Rows per page.
    pub rows: usize,
    /// Whether sequences have left padding.
    pub padded: bool,
    /// Whether an index (cache_batch_idx) selects each sequence's row of the page table.
    pub indexed: bool,
    /// Whether the page table is a slice of a wider table, whose other entries are valid pages.
    pub sliced: bool,
}

impl Pages {
    /// Pages of `rows` rows, without padding, index or slice.
    pub const fn of(rows: usize) -> Pages {
        Pages { rows, padded: false, indexed: false, sliced: false }
    }

    /// These pages with left padding.
    #[must_use]
    pub const fn padded(self) -> Pages {
        Pages { padded: true, ..self }
    }

    /// These pages, with an index (cache_batch_idx) of the page table's rows.
    #[must_use]
    pub const fn indexed(self) -> Pages {
        Pages { indexed: true, ..self }
    }

    /// These pages, with a page table that is a slice of a wider table.
    #[must_use]
    pub const fn sliced(self) -> Pages {
        Pages { sliced: true, ..self }
    }
}

/// Form of the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    /// Dense, with this number of rows for each sequence.
    Dense(usize),
    /// Dense, with `seqused_q` smaller for some sequences.
    InPart(usize),
    /// Packed, up to this many rows per sequence, with rows after the last sequence.
    Packed(usize),
}

/// A problem over a KV cache with the seed of its inputs.
#[derive(Clone, Debug)]
pub struct Case {
    /// Number of keys of each sequence.
    pub lengths: Vec<usize>,
    /// Location of the keys.
    pub keys: Keys,
    /// Form of the queries.
    pub queries: Queries,
    /// heads_q and heads_kv.
    pub heads: (usize, usize),
    /// head_dim and head_dim_v.
    pub columns: (usize, usize),
    /// Type of Q.
    pub dtype: Dtype,
    /// Whether K and V are e4m3, without `token_scales`.
    pub e4m3_keys: bool,
    /// The type of K and V whose rows and heads have scales, if any.
    pub token_scales: Option<Dtype>,
    /// Whether the problem has `qv`.
    pub qv: bool,
    /// The mask, which stands beside the intervals, if any.
    pub mask: Mask,
    /// The kind of intervals, and whether heads have their own.
    pub intervals: Option<(Kind, bool)>,
    /// The soft cap.
    pub softcap: Option<f64>,
    /// Whether heads have sinks.
    pub sink: bool,
    /// The form of LSE.
    pub lse: LseForm,
    /// Memory layout. With `qv` and a contiguous layout, a row of K and a row of V are parts of one row in memory.
    pub layout: Layout,
    /// Distribution of the inputs.
    pub dist: Dist,
    /// Split-KV mode, if any.
    pub split_keys: Option<SplitKeys>,
    /// Limit of the bytes of partial results of fixed-size splits.
    pub split_bytes: Option<u64>,
    /// Number of SMs of the device.
    pub sms: u32,
    /// Seed of all inputs.
    pub seed: u64,
}

/// A case whose cache is laid out in memory.
struct Laid {
    cache: Cache,
    rows_q: SequenceRows,
    /// The problem over the cache.
    problem: Problem,
    /// The problem of the contiguous sequences.
    sequences: crate::Case,
    /// The inputs of this problem.
    values: Values,
}

/// The layout of a cache.
struct Cache {
    /// Number of entries.
    entries: usize,
    /// Number of rows of each entry.
    rows: usize,
    /// Pages of each sequence.
    table: Vec<Vec<i32>>,
    /// Each sequence's row of the page table, and the number of rows, if there is an index.
    index: Option<(Vec<usize>, usize)>,
    leftpad: Vec<usize>,
    /// Entries between the end of a row of the page table and the next row.
    gap: usize,
}

impl Cache {
    /// The page table, with invalid entries in unused rows and valid pages in the gaps between rows.
    fn page_table(&self) -> Vec<i32> {
        let rows = match &self.index {
            None => self.table.clone(),
            Some((index, rows)) => {
                let pages = self.table.first().map_or(1, Vec::len);
                let mut table = vec![vec![i32::MIN; pages]; *rows];
                index.iter().zip(&self.table).for_each(|(&row, pages)| table[row].clone_from(pages));
                table
            }
        };
        rows.join(&vec![0; self.gap][..])
    }
}

impl Case {
    /// Builds the trial of this case.
    ///
    /// # Panics
    /// If the planner refuses the case.
    pub fn trial(self) -> Trial {
        self.trial_of(self.laid())
    }

    fn trial_of(&self, laid: Laid) -> Trial {
        let mut options = PlanOptions::default();
        (options.split_keys, options.split_bytes) = (self.split_keys, self.split_bytes);
        let plan = Plan::with(&laid.problem, &device(self.sms), &options);
        let plan = plan.unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let program = fwd::program(&plan).map(Spec::kernel);
        let name = format!("{plan}, {}", laid.sequences.name);
        let before = before(&program, |buffer| self.input(&laid, buffer));
        let Laid { sequences: case, values, .. } = laid;
        Trial::new(name, Bits::Approximations, program, before, move |after| {
            judged(&case, &values, &outputs(&case.problem, after)).map(|_| ())
        })
    }

    fn laid(&self) -> Laid {
        let mut rng = Rng::new(self.seed ^ 0xcac4e);
        let cache = self.cache(&mut rng);
        let rows_q = self.rows_q(&mut rng);
        let problem = self.problem(&cache, &rows_q);
        let sequences = self.case(rows_q.clone());
        let values = sequences.values();
        Laid { cache, rows_q, problem, sequences, values }
    }

    /// Makes a case of some rows of a sequence alone.
    fn alone(&self, all: &Laid, (index, of_sequence): (usize, Range<usize>), sms: u32) -> (Case, Laid) {
        let rows = of_sequence.len();
        let keys = self.lengths[index].saturating_sub(all.rows_q.len(index).saturating_sub(of_sequence.end));
        let case = Case { lengths: vec![keys], sms, ..self.clone() };
        let cache = Cache {
            entries: if self.is_paged() { all.cache.entries } else { 1 },
            rows: all.cache.rows,
            table: vec![all.cache.table[index].clone()],
            index: all.cache.index.as_ref().map(|(rows, count)| (vec![rows[index]], *count)),
            leftpad: vec![all.cache.leftpad[index]],
            gap: all.cache.gap,
        };
        let Values { q, k, v, dout, qv, sink } = &all.values;
        let (batch, first) = all.rows_q.start(index);
        let first = first + of_sequence.start;
        let rows_q = match self.queries {
            Queries::Dense(_) => SequenceRows::dense(1, rows),
            Queries::InPart(_) => {
                let used = rows.min(all.rows_q.len(index)) as i32;
                SequenceRows::dense(1, rows).with_used(&[used]).expect("it is no more than before")
            }
            Queries::Packed(_) => SequenceRows::packed_lengths(&[rows]),
        };
        // Number of rows after this sequence, which hold the next sequence.
        let behind = case.shape_q(&rows_q).seqlen - rows;
        let of_q = |x: &Array4<f32>| {
            let x = x.slice_axis(Axis(0), (batch..=batch).into());
            x.slice_axis_move(Axis(1), (first..first + rows + behind).into()).to_owned()
        };
        let of_k = |x: &Array4<f32>| {
            x.slice_axis(Axis(0), (index..=index).into()).slice_axis(Axis(1), (..keys).into()).to_owned()
        };
        let qv = qv.as_ref().map(of_q);
        let values = Values { q: of_q(q), k: of_k(k), v: of_k(v), dout: of_q(dout), qv, sink: sink.clone() };
        let problem = case.problem(&cache, &rows_q);
        let sequences = case.case(rows_q.clone());
        (case, Laid { cache, rows_q, problem, sequences, values })
    }

    /// The case of the contiguous sequences.
    fn case(&self, rows_q: SequenceRows) -> crate::Case {
        crate::Case {
            name: format!("{self:?}"),
            problem: self.sequences(rows_q),
            dist: self.dist,
            poison: Poison::BeyondEnd,
            seed: self.seed,
        }
    }

    /// Pages in random order, with unused pages between them. The page table has invalid entries after each sequence's
    /// last page and before its first valid row.
    fn cache(&self, rng: &mut Rng) -> Cache {
        let count = self.lengths.len();
        let leftpad: Vec<usize> =
            (0..count).map(|_| if self.is_padded() { rng.below(70) } else { 0 }).collect();
        let ends = self.lengths.iter().zip(&leftpad).map(|(len, pad)| len + pad);
        let longest = ends.clone().max().unwrap_or(0);
        let (rows, per_sequence) = match self.keys {
            Keys::Pages(Pages { rows, .. }) => (rows, longest.div_ceil(rows) + 2),
            Keys::Dense | Keys::Padded | Keys::Indexed | Keys::IndexedPadded => (longest + 3, 1),
        };
        let used = ends
            .zip(&leftpad)
            .map(|(end, pad)| (pad / rows).min(per_sequence - 1)..end.div_ceil(rows).max(1));
        let used: Vec<_> = used.collect();
        let is_paged = self.is_paged();
        let entries = if is_paged { used.iter().map(|used| used.len()).sum::<usize>() + 2 } else { count };
        let mut free: Vec<i32> = (0..entries as i32).collect();
        if is_paged {
            (1..entries).rev().for_each(|i| free.swap(i, rng.below(i as u64 + 1)));
        }
        let table = used.iter().map(|used| {
            let nowhere = [-1, entries as i32, i32::MAX, i32::MIN];
            let mut pages: Vec<i32> = (0..per_sequence).map(|_| nowhere[rng.below(4)]).collect();
            pages[used.clone()].copy_from_slice(&free.drain(..used.len()).collect::<Vec<_>>());
            pages
        });
        let table = table.collect();
        let index = matches!(self.keys, Keys::Pages(Pages { indexed: true, .. })).then(|| {
            let mut rows: Vec<usize> = (0..count + 2).collect();
            (1..count + 2).rev().for_each(|i| rows.swap(i, rng.below(i as u64 + 1)));
            (rows[..count].to_vec(), count + 2)
        });
        let gap = if matches!(self.keys, Keys::Pages(Pages { sliced: true, .. })) { 3 } else { 0 };
        Cache { entries, rows, table, index, leftpad, gap }
    }

    fn is_padded(&self) -> bool {
        matches!(self.keys, Keys::Padded | Keys::IndexedPadded | Keys::Pages(Pages { padded: true, .. }))
    }

    fn is_paged(&self) -> bool {
        !matches!(self.keys, Keys::Dense | Keys::Padded)
    }

    fn rows_q(&self, rng: &mut Rng) -> SequenceRows {
        let count = self.lengths.len();
        let any = |rng: &mut Rng, most: usize| rng.below(most as u64 + 1);
        match self.queries {
            Queries::Dense(rows) => SequenceRows::dense(count, rows),
            Queries::InPart(rows) => {
                // At least one sequence uses fewer rows than it has, so that seqused matters.
                let used: Vec<i32> =
                    (0..count).map(|i| if i == 0 { rows / 2 } else { any(rng, rows) } as i32).collect();
                SequenceRows::dense(count, rows).with_used(&used).expect("no more rows than there are")
            }
            Queries::Packed(most) => {
                let rows: Vec<usize> =
                    (0..count).map(|i| if i == 0 { most } else { any(rng, most) }).collect();
                SequenceRows::packed_lengths(&rows)
            }
        }
    }

    fn shape_q(&self, rows_q: &SequenceRows) -> Shape {
        let (batch, behind) = if rows_q.is_packed() { (1, 3) } else { (rows_q.count(), 0) };
        Shape { batch, seqlen: rows_q.end() + behind, heads: self.heads.0, head_dim: self.columns.0 }
    }

    fn spec(&self, rows_q: &SequenceRows, kv: Shape) -> ProblemSpec {
        let spec = ProblemSpec::dense(self.dtype, self.shape_q(rows_q), kv).head_dim_v(self.columns.1);
        let spec = if self.e4m3_keys { spec.e4m3_keys() } else { spec };
        let spec = match self.token_scales {
            Some(Dtype::Int8) => spec.int8_keys(),
            Some(_) => spec.e4m3_keys().token_scales(TokenScales::contiguous(kv)),
            None => spec,
        };
        let spec = if self.qv { with_qv(spec) } else { spec };
        let spec = self.layout.of(spec);
        let mut spec = spec.mask(self.mask);
        (spec.softcap, spec.sink, spec.lse) = (self.softcap, self.sink, self.lse);
        if self.qv && self.layout == Layout::Contiguous {
            // K and V are parts of one row in memory.
            let row = Shape { head_dim: self.columns.0 + self.columns.1, ..kv };
            (spec.k.strides, spec.v.strides) = (row.contiguous_strides(), row.contiguous_strides());
        }
        spec
    }

    /// The problem over the cache.
    fn problem(&self, cache: &Cache, rows_q: &SequenceRows) -> Problem {
        let (count, pages) = (self.lengths.len(), cache.table.first().map_or(1, Vec::len));
        let sequences = match (&cache.index, self.is_paged()) {
            (Some((_, rows)), _) => Sequences::indexed(count, [*rows, pages]),
            (None, true) => Sequences::paged(count, pages),
            (None, false) => Sequences::dense(count, cache.rows),
        };
        let sequences = sequences.table_stride(pages + cache.gap);
        let sequences = if self.is_padded() { sequences.left_padded() } else { sequences };
        let kv =
            Shape { batch: cache.entries, seqlen: cache.rows, heads: self.heads.1, head_dim: self.columns.0 };
        let spec = self.spec(rows_q, kv).seqs_q(rows_q.sequences()).seqs_k(sequences.used());
        let spec = match self.intervals {
            None => spec,
            Some((kind, per_head)) => spec.mask(Mask::of_intervals(kind.form(count, true, per_head))),
        };
        spec.validate().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// The problem of the contiguous sequences.
    fn sequences(&self, rows_q: SequenceRows) -> KnownProblem {
        let count = self.lengths.len();
        // The capacity is the longest sequence in every form of cache, so that the values do not depend on the form.
        let capacity = self.lengths.iter().copied().max().unwrap_or(0);
        let used: Vec<i32> = self.lengths.iter().map(|&len| len as i32).collect();
        let rows_k = SequenceRows::dense(count, capacity).with_used(&used).expect("a cache has all rows");
        let kv = Shape { batch: count, seqlen: capacity, heads: self.heads.1, head_dim: self.columns.0 };
        let spec = self.spec(&rows_q, kv);
        if let Some((kind, per_head)) = self.intervals {
            let spec = spec.seqs_q(rows_q.sequences()).seqs_k(rows_k.sequences());
            return kind.of_sequences(spec, [rows_q, rows_k], true, per_head);
        }
        spec.with_rows(rows_q, rows_k).unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// Bytes of a buffer that the caller fills.
    fn input(&self, laid: &Laid, buffer: &Buffer) -> Option<Vec<u8>> {
        let Laid { cache, problem, sequences: crate::Case { problem: sequences, .. }, values, .. } = laid;
        let list = |numbers: &mut dyn Iterator<Item = i32>| Some(words(numbers, i32::to_le_bytes));
        let tensor = |of: Scaled, desc: &TensorDesc, x: &Array4<f32>| {
            Some(tensor_bytes(desc, &self.in_memory(cache, desc.shape, &of.codes(sequences, x))))
        };
        let scales = |of: Scaled, desc: fn(&TokenScales) -> &TensorDesc| {
            let desc = desc(problem.token_scales()?);
            let scales = of.token_scales(sequences);
            Some(tensor_bytes(desc, &self.in_memory(cache, desc.shape, &scales)))
        };
        match buffer.name {
            "k" => tensor(Scaled::K, problem.k(), &values.k),
            "v" => tensor(Scaled::V, problem.v(), &values.v),
            "k_scales" if self.token_scales.is_some() => scales(Scaled::K, |scales| &scales.k),
            "v_scales" if self.token_scales.is_some() => scales(Scaled::V, |scales| &scales.v),
            "page_table" => list(&mut cache.page_table().into_iter()),
            "cache_batch_idx" => {
                list(&mut cache.index.iter().flat_map(|(rows, _)| rows).map(|&row| row as i32))
            }
            "leftpad_k" => list(&mut cache.leftpad.iter().map(|&rows| rows as i32)),
            "seqused_k" => {
                list(&mut self.lengths.iter().zip(&cache.leftpad).map(|(len, pad)| (len + pad) as i32))
            }
            _ => input(sequences, values, buffer),
        }
    }

    /// K or V, or their scales, in the cache's layout, with NaN in rows outside of every sequence.
    fn in_memory(&self, cache: &Cache, shape: Shape, x: &Array4<f32>) -> Array4<f32> {
        let mut memory = Array4::from_elem(shape.dims(), f32::NAN);
        for (i, &len) in self.lengths.iter().enumerate() {
            for r in 0..len {
                let at = r + cache.leftpad[i];
                let entry = if self.is_paged() { cache.table[i][at / cache.rows] as usize } else { i };
                let mut to = memory.index_axis_mut(Axis(0), entry).index_axis_move(Axis(0), at % cache.rows);
                to.assign(&x.index_axis(Axis(0), i).index_axis_move(Axis(0), r));
            }
        }
        memory
    }
}
