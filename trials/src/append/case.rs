//! An append problem with its inputs and its expected results.

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

/// Number of rows of the cos and sin tables. Some rotary positions lie beyond the tables.
pub(super) const TABLE_ROWS: usize = 40;

/// Bits of the NaN to which the kernel rounds any NaN, in f16 and in bf16.
const NAN: u16 = 0x7FFF;

/// Number of new rows of each sequence, and their layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum New {
    /// Dense: every sequence has this many new rows.
    Dense(usize),
    /// Packed: each sequence has up to this many new rows.
    Packed(usize),
    /// Packed with up to this many new rows each, but some entries of cu_seqlens are invalid.
    Garbage(usize),
}

/// Layout of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Dense: each sequence has an entry of this many rows.
    Dense(usize),
    /// Paged.
    Pages {
        /// Rows per page.
        rows: usize,
        /// Pages per sequence.
        pages: usize,
    },
    /// Paged, with some invalid entries in the page table.
    Missing {
        /// Rows per page.
        rows: usize,
        /// Pages per sequence.
        pages: usize,
    },
    /// Paged, with an index (cache_batch_idx) that selects each sequence's row of the page table. Some pages are
    /// missing.
    Indexed {
        /// Rows per page.
        rows: usize,
        /// Pages per sequence.
        pages: usize,
    },
}

impl Cache {
    /// Entries between the end of a row of the page table and the next row. A table with missing pages is a slice of a
    /// wider table.
    fn table_gap(self) -> usize {
        match self {
            Cache::Missing { .. } => 3,
            Cache::Dense(_) | Cache::Pages { .. } | Cache::Indexed { .. } => 0,
        }
    }
}

/// Memory layout of the cache's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheLayout {
    /// A layout that every tensor may have.
    Of(Layout),
    /// K and V as parts of the rows of one tensor (entries, heads, rows, 2 head_dim): a row of K, then a row of V. A
    /// write to one part must not change the other part.
    Beside,
}

/// Valid rows of each sequence before the append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// None.
    Zero,
    /// Any number that leaves room for the new rows.
    Any,
    /// The number with which the new rows exactly fill the cache.
    Full,
    /// Some sequences leave no room for their new rows.
    Beyond,
    /// Some lengths are negative or larger than any cache.
    Garbage,
}

/// Position of each sequence's first new row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The number of valid rows before the append.
    Used,
    /// Given as a list. Some positions are negative or beyond the tables.
    Listed,
}

/// The rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// How entries are paired.
    pub style: RopeStyle,
    /// Whether the rotary dimension is the largest possible; otherwise it is 16.
    pub whole: bool,
    /// Whether the tables are f32; otherwise they have the tensors' type.
    pub f32: bool,
    /// Positions of the sequences' first rows.
    pub base: Base,
}

/// Queries that the kernel rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queries {
    /// Rows per sequence if dense; the largest number of rows of a sequence if packed.
    pub rows: usize,
    /// Whether the queries are packed.
    pub packed: bool,
    /// Whether the later queries of a sequence have the position of its first query, or the positions after it.
    pub positions: QueryPositions,
}

/// An append problem with the seed of its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The type of new rows and of queries.
    pub dtype: Dtype,
    /// Whether the cache is e4m3.
    pub to_e4m3: bool,
    /// Number of sequences.
    pub count: usize,
    /// head_dim and head_dim_v.
    pub head_dims: [usize; 2],
    /// heads_q and heads_kv.
    pub heads: [usize; 2],
    /// New rows, if any.
    pub new: Option<New>,
    /// Memory layout of Q and of the new rows.
    pub layout: Layout,
    /// Form of the cache.
    pub cache: Cache,
    /// Memory layout of the cache.
    pub cache_layout: CacheLayout,
    /// Valid rows before the append.
    pub lengths: Lengths,
    /// The rotary embedding, if any.
    pub rotation: Option<Rotation>,
    /// Queries to rotate, if any.
    pub queries: Option<Queries>,
    /// Seed of all inputs.
    pub seed: u64,
}

impl Cache {
    /// Rows per entry, and entries per sequence.
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
    /// Builds the trial of this case.
    ///
    /// # Panics
    /// If the case is invalid.
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

    /// Replaces unsupported combinations: e4m3 is not rotated, queries need a rotation, and the number of elements in a
    /// row of e4m3 is a multiple of 16.
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

    /// Whether new rows are quantized to e4m3.
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
                // The kernel treats left padding like any other paged cache.
                Cache::Pages { pages, .. } => Sequences::paged(self.count, pages).left_padded().used(),
                // This page table is a slice of a wider table.
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

    /// Bytes of an input buffer.
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

    /// Expected bytes of the outputs. `None` means that any byte is allowed.
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

    /// Allows any bytes (`None`) in the rows of the cache that some sequence could write.
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

    /// Valid rows of each sequence after the append. The kernel clamps each invalid entry of cu_seqlens on its own.
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
