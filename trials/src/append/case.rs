//! A problem with its inputs, and what must come out.

use fa3_cuda::kernels::{Spec, append};
use fa3_ir::Buffer;
use fa3_quant::E4m3;
use fa3_ref::{AppendedTo, RotatedRows, with_scales};
use fa3_sched::append::Plan;
use fa3_types::{
    AppendProblem, AppendRotary, AppendSpec, AppendedRows, Dtype, QueryPositions, RopeStyle, RotatedQueries,
    SequenceBase, SequenceRows, Sequences, TensorDesc,
};
use ndarray::{Array2, ArrayViewMut4};

use super::inputs::Inputs;
use crate::fwd::Layout;
use crate::memory::{UNWRITTEN, before, decode, dtype, encode, get, number_bytes, put, words};
use crate::{Bits, Trial};

/// Rows of the tables: fewer than some positions need.
pub(super) const TABLE_ROWS: usize = 40;

/// The bits of every NaN that a conversion gives.
const NAN: u16 = 0x7FFF;

/// How many new rows sequences have, and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum New {
    /// As many each.
    Dense(usize),
    /// Up to so many.
    Packed(usize),
    /// The same, but some ends are no ends.
    Garbage(usize),
}

/// The form of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// A sequence has an entry of so many rows.
    Dense(usize),
    /// Pages of so many rows, so many a sequence.
    Pages {
        /// Rows of a page.
        rows: usize,
        /// Pages of a sequence.
        pages: usize,
    },
    /// The same, but some entries of the table are no pages.
    Missing {
        /// Rows of a page.
        rows: usize,
        /// Pages of a sequence.
        pages: usize,
    },
    /// Pages, of rows of the table that an index says, some of which are not there.
    Indexed {
        /// Rows of a page.
        rows: usize,
        /// Pages of a sequence.
        pages: usize,
    },
}

impl Cache {
    /// Entries between the end of a row of the page table and the next one. A table with pages that are not there is a
    /// slice of a wider one.
    fn table_gap(self) -> usize {
        match self {
            Cache::Missing { .. } => 3,
            Cache::Dense(_) | Cache::Pages { .. } | Cache::Indexed { .. } => 0,
        }
    }
}

/// How the cache's tensors lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheLayout {
    /// One of those of all tensors.
    Of(Layout),
    /// (entries, heads, rows, 2 head_dim): behind a row of keys is one of values. What lies between the rows of either
    /// must not change.
    Beside,
}

/// Rows of sequences before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// None.
    Zero,
    /// Anything with which new rows fit.
    Any,
    /// As many as with new rows fill the cache.
    Full,
    /// Some are so many that new rows do not fit.
    Beyond,
    /// Some are negative or too large for any cache.
    Garbage,
}

/// The positions of sequences' first rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The rows before.
    Used,
    /// Any, some of which are beyond the tables or negative.
    Listed,
}

/// The rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Which entries are a pair.
    pub style: RopeStyle,
    /// Whether all entries rotate that can, or only 16.
    pub whole: bool,
    /// Whether tables are f32, and not of the tensors' type.
    pub f32: bool,
    /// Where sequences begin.
    pub base: Base,
}

/// Queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queries {
    /// Rows of each sequence: so many, or of a packed tensor up to so many.
    pub rows: usize,
    /// Whether they are packed.
    pub packed: bool,
    /// The positions of a sequence's rows.
    pub positions: QueryPositions,
}

/// A problem, its seed among it.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The type of new rows and of queries.
    pub dtype: Dtype,
    /// Whether the cache is of e4m3.
    pub to_e4m3: bool,
    /// Sequences.
    pub count: usize,
    /// Elements of a row of Q and K, and of V.
    pub head_dims: [usize; 2],
    /// Heads of Q, and of K and V.
    pub heads: [usize; 2],
    /// New rows.
    pub new: Option<New>,
    /// How Q and new rows lie in memory.
    pub layout: Layout,
    /// The cache.
    pub cache: Cache,
    /// How the cache lies in memory.
    pub cache_layout: CacheLayout,
    /// Rows before.
    pub lengths: Lengths,
    /// The rotation.
    pub rotation: Option<Rotation>,
    /// Queries, if there are some.
    pub queries: Option<Queries>,
    /// The seed of everything else.
    pub seed: u64,
}

impl Cache {
    /// Rows of an entry, and entries of a sequence.
    pub(super) fn rows(self) -> [usize; 2] {
        match self {
            Cache::Dense(rows) => [rows, 1],
            Cache::Pages { rows, pages }
            | Cache::Missing { rows, pages }
            | Cache::Indexed { rows, pages } => [rows, pages],
        }
    }
}

impl Case {
    /// As a trial.
    ///
    /// # Panics
    /// If it makes no sense.
    pub fn trial(self) -> Trial {
        let inputs = self.inputs();
        let problem = self.problem(&inputs);
        let plan = Plan::new(&problem).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let program = append::program(&plan).map(Spec::kernel);
        let before = before(&program, |buffer| self.input(&inputs, buffer));
        Trial::new(format!("{plan}\n{self:?}"), Bits::Inputs, program, before, move |after| {
            let expected = self.expected(&self.inputs());
            expected.iter().try_for_each(|(name, bytes)| after.check_bytes(name, bytes))
        })
    }

    /// The same with what there is: no rotation of e4m3, and no queries without a rotation. Rows of e4m3 are a multiple
    /// of 16 elements.
    #[must_use]
    pub fn allowed(self) -> Case {
        let rotation = self.rotation.filter(|_| self.dtype != Dtype::E4m3);
        let multiple = if self.cache_dtype() == Dtype::E4m3 { 16 } else { 1 };
        let head_dims = self.head_dims.map(|head_dim| head_dim.next_multiple_of(multiple));
        Case { queries: self.queries.filter(|_| rotation.is_some()), rotation, head_dims, ..self }
    }

    /// The type of the cache.
    pub(super) fn cache_dtype(&self) -> Dtype {
        if self.to_e4m3 { Dtype::E4m3 } else { self.dtype }
    }

    /// Whether new rows become e4m3.
    pub(super) fn quantizes(&self) -> bool {
        self.cache_dtype() != self.dtype
    }

    fn problem(&self, inputs: &Inputs) -> AppendProblem {
        let desc = |name: &str| inputs.desc(name);
        let rows = self.new.map(|new| AppendedRows {
            k_new: desc("k_new"),
            v_new: desc("v_new"),
            new: match new {
                New::Dense(rows) => Sequences::dense(self.count, rows),
                New::Packed(_) | New::Garbage(_) => Sequences::packed(self.count),
            },
            k_cache: desc("k_cache"),
            v_cache: desc("v_cache"),
            cache: match self.cache {
                Cache::Dense(rows) => Sequences::dense(self.count, rows).used(),
                // Padding makes no difference.
                Cache::Pages { pages, .. } => Sequences::paged(self.count, pages).left_padded().used(),
                // In a slice of a wider table.
                Cache::Missing { pages, .. } => {
                    Sequences::paged(self.count, pages).table_stride(pages + self.cache.table_gap()).used()
                }
                Cache::Indexed { pages, .. } => Sequences::indexed(self.count, [self.count, pages]).used(),
            },
        });
        let rotary = self.rotation.map(|rotation| AppendRotary {
            style: rotation.style,
            rotary_dim: self.rotary_dim(rotation),
            table: self.table(rotation),
            table_rows: TABLE_ROWS,
            base: match rotation.base {
                Base::Used => SequenceBase::Used,
                Base::Listed => SequenceBase::Listed,
            },
        });
        let queries = self.queries.map(|queries| RotatedQueries {
            q: desc("q"),
            sequences: match queries.packed {
                true => Sequences::packed(self.count),
                false => Sequences::dense(self.count, queries.rows),
            },
            positions: queries.positions,
        });
        let spec = match (rows, queries, rotary) {
            (Some(rows), queries, rotary) => {
                let mut spec = AppendSpec::new(rows);
                (spec.queries, spec.rotary) = (queries, rotary);
                spec
            }
            (None, Some(queries), Some(rotary)) => AppendSpec::of_queries(queries, rotary),
            (None, ..) => unreachable!("{self:?} has something to do"),
        };
        spec.validate().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    pub(super) fn rotary_dim(&self, rotation: Rotation) -> usize {
        if rotation.whole { self.head_dims[0] / 16 * 16 } else { 16 }
    }

    pub(super) fn table(&self, rotation: Rotation) -> Dtype {
        if rotation.f32 { Dtype::F32 } else { self.dtype }
    }

    /// The bytes of a buffer that the caller fills.
    fn input(&self, inputs: &Inputs, buffer: &Buffer) -> Option<Vec<u8>> {
        let list = |list: &[i32]| words(list.iter().copied(), i32::to_le_bytes);
        let floats = |numbers: &[f32]| words(numbers.iter().copied(), f32::to_le_bytes);
        let table = |table: &Array2<f32>| number_bytes(dtype(buffer.elem), table.iter().copied());
        Some(match buffer.name {
            "k_cache" => inputs.caches[0].clone(),
            "v_cache" => inputs.caches[1].clone(),
            "cu_seqlens_k_new" => list(&inputs.cu_seqlens_k_new),
            "cu_seqlens_q" => list(&inputs.queries.as_ref().map_or(Vec::new(), SequenceRows::cu_seqlens)),
            "seqused_k" => list(&inputs.seqused),
            "page_table" => list(&inputs.page_table_with_gaps(self.cache.table_gap())),
            "cache_batch_idx" => list(inputs.index.as_deref().unwrap_or_default()),
            "rotary_cos" => table(&inputs.cos),
            "rotary_sin" => table(&inputs.sin),
            "rotary_seqlens" => list(&inputs.rotary_seqlens),
            "k_descale" => floats(&inputs.scales[0]),
            "v_descale" => floats(&inputs.scales[1]),
            "seqused_after" | "q_rotated" => return None,
            name => {
                let (desc, x) = inputs.tensor(name);
                let mut bytes = vec![UNWRITTEN; buffer.bytes()];
                put(&mut bytes, &desc, x.view(), u32::from);
                bytes
            }
        })
    }

    /// The bytes of what is written; `None` where they may be anything.
    fn expected(&self, inputs: &Inputs) -> Vec<(&'static str, Vec<Option<u8>>)> {
        let mut expected = Vec::new();
        let known = |bytes: Vec<u8>| bytes.into_iter().map(Some).collect::<Vec<_>>();
        if let Some(new) = &inputs.new {
            let to = AppendedTo { seqused: &inputs.seqused, page_table: inputs.page_table() };
            let garbage = matches!(self.new, Some(New::Garbage(_)));
            for (index, names) in [["k_new", "k_cache"], ["v_new", "v_cache"]].into_iter().enumerate() {
                let (of_cache, (_, x)) = (inputs.desc(names[1]), inputs.tensor(names[0]));
                let mut x = x.clone();
                if index == 0 {
                    self.rotate(inputs, &mut x.view_mut(), new, QueryPositions::Each);
                }
                if self.quantizes() {
                    let code =
                        |bits, scale| E4m3::from_f32(decode(self.dtype, bits) / scale).to_bits().into();
                    x = with_scales(x.view(), new, Some(&inputs.scales[index]), code);
                }
                let mut cache = get(&inputs.caches[index], &of_cache, |bits| bits as u16);
                to.append(x.view(), new, &mut cache.view_mut());
                let mut bytes = inputs.caches[index].clone();
                put(&mut bytes, &of_cache, cache.view(), u32::from);
                let mut bytes = known(bytes);
                if garbage {
                    self.forget(inputs, &of_cache, &mut bytes);
                }
                expected.push((names[1], bytes));
            }
            let after = match garbage {
                false => to.seqused_after(new, self.cache.rows()[0]),
                true => self.garbage_after(inputs),
            };
            expected.push(("seqused_after", known(after.iter().flat_map(|x| x.to_le_bytes()).collect())));
        }
        if let Some((queries, rows)) = self.queries.zip(inputs.queries.as_ref()) {
            let mut x = inputs.tensor("q").1.clone();
            self.rotate(inputs, &mut x.view_mut(), rows, queries.positions);
            expected.push(("q_rotated", known(x.iter().flat_map(|x| x.to_le_bytes()).collect())));
        }
        expected
    }

    fn rotate(
        &self,
        inputs: &Inputs,
        x: &mut ArrayViewMut4<'_, u16>,
        rows: &SequenceRows,
        positions: QueryPositions,
    ) {
        let Some(rotation) = self.rotation else { return };
        let base = match rotation.base {
            Base::Used => &inputs.seqused,
            Base::Listed => &inputs.rotary_seqlens,
        };
        let (cos, sin) = (inputs.cos.view(), inputs.sin.view());
        let rotated = RotatedRows { style: rotation.style, cos, sin, base, positions };
        let round = |x: f32| if x.is_nan() { NAN } else { encode(self.dtype, x) };
        rotated.rotate(x, rows, |bits| decode(self.dtype, bits), round);
    }

    /// Forgets what rows of the cache hold that a sequence could get.
    fn forget(&self, inputs: &Inputs, cache: &TensorDesc, bytes: &mut [Option<u8>]) {
        let [page_rows, pages] = self.cache.rows();
        for (i, &used) in inputs.seqused.iter().enumerate() {
            let Ok(used) = usize::try_from(used) else { continue };
            for position in used..page_rows * pages {
                let entry = match inputs.page_table() {
                    Some(table) => table.page(i, position / page_rows).unwrap_or(-1) as usize,
                    None => i,
                };
                if entry >= cache.shape.batch {
                    continue;
                }
                for head in 0..cache.shape.heads {
                    let width = cache.dtype.bytes();
                    let at = width * cache.offset(entry, position % page_rows, head, 0).0 as usize;
                    bytes[at..][..width * cache.shape.head_dim].fill(None);
                }
            }
        }
    }

    /// The rows after, where ends of new rows are clamped one by one.
    fn garbage_after(&self, inputs: &Inputs) -> Vec<i32> {
        let total = inputs.desc("k_new").shape.seqlen as i32;
        let [rows, pages] = self.cache.rows();
        let ends = inputs.cu_seqlens_k_new.windows(2).map(|ends| {
            let begin = ends[0].clamp(0, total);
            ends[1].clamp(begin, total) - begin
        });
        let after = |(&used, new): (&i32, i32)| match used {
            ..0 => 0,
            used => used.saturating_add(new).min((rows * pages) as i32),
        };
        inputs.seqused.iter().zip(ends).map(after).collect()
    }
}
