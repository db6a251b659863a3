//! Problems whose keys are listed: rows of a cache, and of a second one behind them.

mod targets;

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::fwd;
use fa3_ir::Buffer;
use fa3_sched::forward::{Plan, PlanOptions, SplitKeys};
use fa3_types::{
    Dtype, ExtraCache, KnownProblem, LseForm, Problem, ProblemSpec, SCALED_COLUMNS, SequenceRows, Sequences,
    Shape, Strides, TensorDesc,
};
use ndarray::{Array4, Axis};

use crate::fwd::{check_max_logits, device, input, judged, outputs, with_qv};
use crate::memory::{before, rounded, tensor_bytes, words};
use crate::values::Rng;
use crate::{Bits, Dist, Poison, Trial, Values};

pub(crate) use targets::targets;

/// A cache, and a list of its rows for each sequence.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// Number of pages, and rows of a page.
    pub pages: (usize, usize),
    /// Rows of memory between a page and the next.
    pub gap: usize,
    /// Entries of a list.
    pub keys: usize,
    /// Entries between a list and the next.
    pub list_gap: usize,
    /// Whether only the first entries of each list count: any number of them, below 0 and above `keys`, too.
    pub used: bool,
}

/// A problem over one or two caches.
#[derive(Clone, Debug)]
pub struct Case {
    /// Number of sequences, which have one row of Q each.
    pub sequences: usize,
    /// heads_q and heads_kv.
    pub heads: (usize, usize),
    /// head_dim and head_dim_v.
    pub columns: (usize, usize),
    /// Whether the problem has `qv`.
    pub qv: bool,
    /// Type of all tensors, of V only if it is not scaled.
    pub dtype: Dtype,
    /// Whether V is e4m3, and its rows have their own scales.
    pub scaled: bool,
    /// The cache, and the second one.
    pub caches: (Listed, Option<Listed>),
    /// One in this number of entries is no row.
    pub holes: u64,
    /// The soft cap.
    pub softcap: Option<f64>,
    /// Whether heads have sinks.
    pub sink: bool,
    /// The form of LSE.
    pub lse: LseForm,
    /// Whether largest scores are a result.
    pub max_logits: bool,
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

/// The bytes of a cache, and its keys.
struct Rows {
    k: Array4<f32>,
    v: Array4<f32>,
    /// Codes of V, and the scales of its rows, if it has them.
    codes: Option<[Array4<f32>; 2]>,
    indices: Vec<i32>,
    lengths: Vec<i32>,
    /// The rows that are keys of each sequence.
    keys: Vec<Vec<usize>>,
}

const LISTED: Listed = Listed { pages: (9, 16), gap: 0, keys: 200, list_gap: 0, used: false };

/// Latent attention over a list of each of three sequences.
pub const LATENT: Case = Case {
    sequences: 3,
    heads: (16, 1),
    columns: (64, 512),
    qv: true,
    dtype: Dtype::Bf16,
    scaled: false,
    caches: (LISTED, None),
    holes: 5,
    softcap: None,
    sink: false,
    lse: LseForm { base_two: false, without_sink: false, empty_is_infinite: false },
    max_logits: false,
    dist: Dist::Normal,
    split_keys: Some(SplitKeys::Even),
    split_bytes: None,
    sms: 2,
    seed: 7,
};

/// FlashMLA's form of LSE.
const FLASH_MLA: LseForm = LseForm { base_two: false, without_sink: true, empty_is_infinite: true };

impl Case {
    /// Builds the trial of this case.
    ///
    /// # Panics
    /// If the planner refuses the case.
    pub fn trial(self) -> Trial {
        let mut rng = Rng::new(self.seed ^ 0x5ba45e);
        let first = self.rows(&self.caches.0, &mut rng);
        let second = self.caches.1.map(|listed| self.rows(&listed, &mut rng));
        let problem = self.problem();
        let all = || std::iter::once(&first).chain(&second);
        let used: Vec<usize> =
            (0..self.sequences).map(|i| all().map(|rows| rows.keys[i].len()).sum()).collect();
        let sequences = self.gathered(&used);
        let (heads, capacity) = (self.heads.1, used.iter().copied().max().unwrap_or(0));
        let gather = |of: fn(&Rows) -> &Array4<f32>, columns| {
            let mut x = Array4::from_elem((self.sequences, capacity, heads, columns), f32::NAN);
            for (i, mut to) in x.outer_iter_mut().enumerate() {
                let from = all().flat_map(|rows| rows.keys[i].iter().map(move |&row| (of(rows), row)));
                for (mut to, (x, row)) in to.outer_iter_mut().zip(from) {
                    let rows = x.dim().1;
                    to.assign(&x.index_axis(Axis(0), row / rows).index_axis_move(Axis(0), row % rows));
                }
            }
            x
        };
        let (k, v) = (gather(|rows| &rows.k, self.columns.0), gather(|rows| &rows.v, self.columns.1));
        let values = Values { k, v, ..sequences.values() };

        let mut options = PlanOptions::default();
        (options.split_keys, options.split_bytes) = (self.split_keys, self.split_bytes);
        let plan = Plan::with(&problem, &device(self.sms), &options);
        let plan = plan.unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let program = fwd::program(&plan).map(Spec::kernel);
        let bytes = before(&program, |buffer: &Buffer| {
            let list = |numbers: &[i32]| Some(words(numbers.iter().copied(), i32::to_le_bytes));
            let (extra, second) = (problem.extra(), second.as_ref());
            match buffer.name {
                "k" => Some(tensor_bytes(problem.k(), &first.k)),
                "v" => {
                    let rows = first.codes.as_ref().map_or(&first.v, |[codes, _]| codes);
                    Some(tensor_bytes(problem.v(), rows))
                }
                "v_scales" => Some(tensor_bytes(&problem.v_scales()?, &first.codes.as_ref()?[1])),
                "indices" => list(&first.indices),
                "seqused_k" => list(&first.lengths),
                "extra_k" => Some(tensor_bytes(&extra?.k, &second?.k)),
                "extra_v" => Some(tensor_bytes(&extra?.v, &second?.v)),
                "extra_indices" => list(&second?.indices),
                "extra_seqused_k" => list(&second?.lengths),
                _ => input(&sequences.problem, &values, buffer),
            }
        });
        Trial::new(format!("{plan}, {self:?}"), Bits::Approximations, program, bytes, move |after| {
            judged(&sequences, &values, &outputs(&sequences.problem, after))?;
            check_max_logits(&sequences, &values, after)
        })
    }

    /// Random rows, lists and lengths. Rows that are no key are NaN.
    fn rows(&self, listed: &Listed, rng: &mut Rng) -> Rows {
        let Listed { pages: (pages, page_rows), keys, list_gap, used, .. } = *listed;
        let count = pages * page_rows;
        let (mut all, mut indices, mut lengths) = (vec![], vec![], vec![]);
        for i in 0..self.sequences {
            let nowhere = [-1, count as i32, i32::MAX, i32::MIN];
            let index = |rng: &mut Rng| match rng.below(self.holes) {
                0 => nowhere[rng.below(4)],
                _ if count == 0 => -1,
                _ => rng.below(count as u64) as i32,
            };
            let list: Vec<i32> = (0..keys).map(|_| index(rng)).collect();
            let length = match rng.below(6) {
                0 => i32::MIN + rng.below(9) as i32,
                1 => i32::MAX,
                _ => rng.below(keys as u64 + 1) as i32,
            };
            let len = if used { length.clamp(0, keys as i32) as usize } else { keys };
            lengths.push(length);
            let is_row = |index: i32| usize::try_from(index).ok().filter(|&row| row < count);
            all.push(list[..len].iter().filter_map(|&index| is_row(index)).collect::<Vec<usize>>());
            // A valid row, which no list has. Lists without entries take no memory.
            let behind = if keys > 0 && i + 1 < self.sequences { list_gap } else { 0 };
            indices.extend(list.into_iter().chain(std::iter::repeat_n(0, behind)));
        }
        let dense =
            self.dense(Shape { batch: 1, seqlen: count, heads: self.heads.1, head_dim: self.columns.0 });
        let case = crate::Case {
            name: String::new(),
            problem: dense,
            dist: self.dist,
            poison: Poison::None,
            seed: self.seed ^ rng.below(1 << 30) as u64,
        };
        let Values { k, v, .. } = case.values();
        let in_pages = |x: Array4<f32>| {
            let (_, _, heads, columns) = x.dim();
            let mut x = x.into_shape_with_order((count, heads * columns)).expect("it is contiguous");
            for (row, mut x) in x.outer_iter_mut().enumerate() {
                if !all.iter().flatten().any(|&key| key == row) {
                    x.fill(f32::NAN);
                }
            }
            x.into_shape_with_order((pages, page_rows, heads, columns)).expect("it has all rows")
        };
        let codes = self.scaled.then(|| {
            let scale = |row: usize, group: usize| ((row * 5 + group * 7) % 23 + 1) as f32 * 0.07;
            let code = |((_, row, _, col), v): ((usize, usize, usize, usize), f32)| {
                rounded(Dtype::E4m3, v / scale(row, col / SCALED_COLUMNS))
            };
            let codes =
                Array4::from_shape_vec(v.raw_dim(), v.indexed_iter().map(|(at, &v)| code((at, v))).collect());
            let groups = self.columns.1.div_ceil(SCALED_COLUMNS);
            let scales =
                Array4::from_shape_fn((1, count, v.dim().2, groups), |(_, row, _, group)| scale(row, group));
            [codes.expect("there are as many"), scales].map(in_pages)
        });
        let v = match &codes {
            None => in_pages(v),
            Some([codes, scales]) => Array4::from_shape_fn(codes.raw_dim(), |(page, row, head, col)| {
                let scale = scales[[page, row, head, col / SCALED_COLUMNS]];
                rounded(self.dtype, codes[[page, row, head, col]] * scale)
            }),
        };
        Rows { k: in_pages(k), v, codes, indices, lengths, keys: all }
    }

    fn spec(&self, kv: Shape) -> ProblemSpec {
        let q = Shape { batch: self.sequences, seqlen: 1, heads: self.heads.0, head_dim: self.columns.0 };
        let spec = ProblemSpec::dense(self.dtype, q, kv).head_dim_v(self.columns.1);
        let mut spec = if self.qv { with_qv(spec) } else { spec };
        (spec.softcap, spec.sink, spec.lse) = (self.softcap, self.sink, self.lse);
        spec.max_logits = self.max_logits;
        spec
    }

    /// The problem of these keys alone, for the values of a cache.
    fn dense(&self, kv: Shape) -> KnownProblem {
        let q = Shape { seqlen: 1, heads: self.heads.0, ..kv };
        let spec = ProblemSpec::dense(self.dtype, q, kv).head_dim_v(self.columns.1);
        spec.known().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// K and V of a cache: parts of one row if the problem has `qv`, otherwise apart.
    fn tensors(&self, listed: &Listed) -> [TensorDesc; 2] {
        let Listed { pages: (batch, seqlen), gap, .. } = *listed;
        let (head_dim, head_dim_v) = self.columns;
        let of = |head_dim| Shape { batch, seqlen, heads: self.heads.1, head_dim };
        // A row of K's elements has V's codes, its scales, and K.
        let scales = head_dim_v.div_ceil(SCALED_COLUMNS);
        let both = head_dim
            + if self.scaled { (head_dim_v / 2 + 2 * scales).next_multiple_of(8) } else { head_dim_v };
        let of_k = self.tensor(of(head_dim), of(if self.qv { both } else { head_dim }), gap);
        let of_v = self.tensor(of(head_dim_v), of(if self.qv { both } else { head_dim_v }), gap);
        if !self.scaled {
            return [of_k, of_v];
        }
        let Strides { batch, seqlen, heads, .. } = of_v.strides;
        let strides = Strides { batch: 2 * batch, seqlen: 2 * seqlen, heads: 2 * heads, head_dim: 1 };
        [of_k, TensorDesc { dtype: Dtype::E4m3, strides, ..of_v }]
    }

    /// A tensor of `shape` in rows of another shape, and pages with a gap of rows.
    fn tensor(&self, shape: Shape, row: Shape, gap: usize) -> TensorDesc {
        let mut strides = row.contiguous_strides();
        strides.batch += gap as i64 * strides.seqlen;
        TensorDesc { strides, ..TensorDesc::contiguous(self.dtype, shape) }
    }

    fn lists(&self, listed: &Listed) -> Sequences {
        let lists =
            Sequences::listed(self.sequences, listed.keys).table_stride(listed.keys + listed.list_gap);
        if listed.used { lists.used() } else { lists }
    }

    /// The problem over the caches.
    fn problem(&self) -> Problem {
        let (first, second) = &self.caches;
        let [k, v] = self.tensors(first);
        let mut spec = self.spec(k.shape).seqs_k(self.lists(first));
        (spec.k, spec.v) = (k, v);
        if let Some(second) = second {
            let [k, v] = self.tensors(second);
            spec = spec.extra(ExtraCache { k, v, sequences: self.lists(second) });
        }
        spec.validate().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// The problem of sequences whose keys are contiguous.
    fn gathered(&self, used: &[usize]) -> crate::Case {
        let capacity = used.iter().copied().max().unwrap_or(0);
        let kv =
            Shape { batch: self.sequences, seqlen: capacity, heads: self.heads.1, head_dim: self.columns.0 };
        let lengths: Vec<i32> = used.iter().map(|&len| len as i32).collect();
        let rows_k =
            SequenceRows::dense(self.sequences, capacity).with_used(&lengths).expect("there are no more");
        let rows_q = SequenceRows::dense(self.sequences, 1);
        let problem =
            self.spec(kv).with_rows(rows_q, rows_k).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        crate::Case {
            name: format!("{self:?}"),
            problem,
            dist: self.dist,
            poison: Poison::None,
            seed: self.seed,
        }
    }
}

/// Lists of one cache and of two, of every form.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let used = Listed { used: true, list_gap: 3, ..LISTED };
    let paged = Listed { pages: (5, 24), gap: 7, keys: 100, ..used };
    let cases = [
        Case { caches: (used, None), ..LATENT },
        // Two tiles of 60 heads read the same keys.
        Case { heads: (120, 1), sms: 4, sink: true, lse: FLASH_MLA, max_logits: true, ..LATENT },
        Case { heads: (12, 1), caches: (used, Some(Listed { pages: (130, 1), ..paged })), ..LATENT },
        Case {
            sequences: 2,
            caches: (paged, Some(used)),
            dtype: Dtype::F16,
            softcap: Some(3.0),
            split_keys: Some(SplitKeys::FixedSize { keys: 128 }),
            max_logits: true,
            ..LATENT
        },
        Case {
            sequences: 1,
            caches: (Listed { keys: 0, ..LISTED }, Some(paged)),
            split_keys: None,
            ..LATENT
        },
        // No entry is a row.
        Case {
            holes: 1,
            caches: (LISTED, None),
            split_keys: Some(SplitKeys::Whole),
            max_logits: true,
            ..LATENT
        },
        // Every entry is a row.
        Case { holes: u64::MAX, columns: (40, 328), dist: Dist::Decreasing, ..LATENT },
        Case { caches: (Listed { pages: (0, 16), keys: 70, ..LISTED }, None), ..LATENT },
        Case { sequences: 0, caches: (used, Some(paged)), ..LATENT },
        Case { sequences: 0, split_keys: Some(SplitKeys::FixedSize { keys: 128 }), ..LATENT },
        Case { heads: (8, 2), columns: (128, 128), qv: false, caches: (used, Some(paged)), ..LATENT },
        Case {
            heads: (3, 1),
            columns: (64, 64),
            qv: false,
            caches: (Listed { keys: 300, ..LISTED }, None),
            split_keys: Some(SplitKeys::Fixed),
            max_logits: true,
            ..LATENT
        },
        // Sinks are added by the reduction, and by CTAs that merge splits.
        Case { sink: true, lse: FLASH_MLA, split_keys: Some(SplitKeys::FixedSize { keys: 128 }), ..LATENT },
        Case {
            columns: (128, 128),
            qv: false,
            caches: (used, Some(Listed { keys: 300, ..paged })),
            sink: true,
            lse: FLASH_MLA,
            split_keys: Some(SplitKeys::Fixed),
            split_bytes: Some(0),
            ..LATENT
        },
        Case { heads: (2, 1), columns: (64, 128), caches: (paged, None), max_logits: true, ..LATENT },
        Case { scaled: true, caches: (used, None), lse: FLASH_MLA, max_logits: true, ..LATENT },
        Case {
            scaled: true,
            columns: (40, 336),
            heads: (120, 1),
            sms: 4,
            caches: (paged, None),
            sink: true,
            ..LATENT
        },
        Case { scaled: true, holes: 1, split_keys: Some(SplitKeys::Whole), ..LATENT },
        Case { heads: (9, 1), columns: (512, 512), qv: false, caches: (paged, None), sequences: 2, ..LATENT },
    ];
    cases.into_iter().map(|case| Case { seed, ..case }.trial()).collect()
}

/// Problems with several work tiles of a CTA and several blocks, to run under many schedules.
pub(crate) fn small() -> Vec<Trial> {
    let second = Listed { pages: (5, 24), gap: 7, keys: 100, used: true, ..LISTED };
    let cases = [
        Case { heads: (8, 1), caches: (LISTED, Some(second)), ..LATENT },
        Case { heads: (3, 1), columns: (128, 128), qv: false, caches: (second, None), ..LATENT },
        Case { heads: (8, 1), scaled: true, caches: (LISTED, None), ..LATENT },
    ];
    cases.into_iter().map(Case::trial).collect()
}

/// Head dimensions of random problems, and whether they have `qv`.
const RANDOM: [((usize, usize), bool); 5] =
    [((64, 512), true), ((64, 512), true), ((64, 256), true), ((512, 512), false), ((128, 128), false)];

/// A random problem. Seeds that are equal modulo `kernels` share their kernels, unless groups of heads differ.
///
/// # Panics
/// If the planner refuses the problem.
pub fn random(seed: u64, kernels: u64) -> Trial {
    let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0x115ed), Rng::new(seed ^ 0x115ed << 32));
    let (columns, qv) = RANDOM[of_kernel.below(RANDOM.len() as u64)];
    let heads = [1, 8, 12, 16, 60, 64, 128, 96][of_kernel.below(8)];
    let sequences = 1 + rng.below(1 + 400 / heads as u64);
    let mut listed = |used: bool| {
        let page_rows = [1, 64, 17][rng.below(3)];
        let most = [70, 300, 2100][rng.below(3)];
        Listed {
            pages: (rng.below(4000 / page_rows as u64 + 1), page_rows),
            gap: rng.below(2) * 5,
            keys: rng.below(most),
            list_gap: rng.below(2) * 9,
            used,
        }
    };
    let first = listed(of_kernel.below(2) == 0);
    let second = (of_kernel.below(2) == 0).then(|| listed(of_kernel.below(2) == 0));
    let splits = [Some(SplitKeys::Even), Some(SplitKeys::FixedSize { keys: 512 }), None];
    let case = Case {
        sequences,
        heads: (heads, 1),
        columns,
        qv,
        dtype: [Dtype::Bf16, Dtype::F16][of_kernel.below(2)],
        scaled: false,
        caches: (first, second),
        holes: [1 << 40, 2, 9, 1][rng.below(4)],
        softcap: None,
        sink: of_kernel.below(2) == 0,
        lse: [LseForm::default(), FLASH_MLA][of_kernel.below(2)],
        max_logits: of_kernel.below(2) == 0,
        dist: [Dist::Normal, Dist::Increasing, Dist::Decreasing][rng.below(3)],
        split_keys: splits[of_kernel.below(3)],
        split_bytes: None,
        sms: 132,
        seed,
    };
    let may_scale = qv && columns.1 == 512 && case.dtype == Dtype::Bf16 && second.is_none();
    Case { scaled: may_scale && of_kernel.below(2) == 0, ..case }.trial()
}
