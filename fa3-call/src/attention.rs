//! A call of the forward pass.

use std::num::NonZeroU32;
use std::sync::Arc;

use fa3_sched::forward::{Plan, PlanOptions, SplitKeys};
use fa3_types::{
    Dtype, ExtraCache, Intervals, LseForm, Mask, OpenScore, Problem, ProblemSpec, Sequences, Shape, Strides,
    TensorDesc, TokenScales,
};

use crate::call::Call;
use crate::devices;
use crate::error::Error;
use crate::options::{Bounds, Options};
use crate::tensors::Tensors;

/// A forward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// Q, K and V. A transposed V is described by the shape and strides that it would have in rows.
    pub inputs: [TensorDesc; 3],
    /// The part of the queries that is multiplied by V, in latent attention.
    pub qv: Option<TensorDesc>,
    /// O.
    pub o: TensorDesc,
    /// The sequences of Q, and of K and V. `None` if all are dense and all their rows are in use. Lengths are data.
    pub sequences: Option<[Sequences; 2]>,
    /// The second cache, if keys are listed in two.
    pub extra: Option<ExtraCache>,
    /// The scales of K's rows, if tokens have scales. Then V's rows have some, too.
    pub k_scales: Option<TensorDesc>,
    /// The scales of V's rows, if rows have their own ones.
    pub v_scales: Option<TensorDesc>,
    /// The shape of the intervals that say which keys a query sees, if given.
    pub intervals: Option<[usize; 4]>,
    /// Whether query heads have sinks.
    pub sink: bool,
    /// Whether the largest score of each row is a result.
    pub max_logits: bool,
    /// Whether V has per-channel scales and means, whatever scales Q and K have.
    pub v_channels: bool,
    /// The extents of the tables of the function of scores, in the order of its expression.
    pub score_tables: Vec<Arc<[usize]>>,
    /// The number of 32-bit words of the table of sequences, if it is given.
    pub table: Option<u32>,
    /// The options.
    pub numbers: Numbers,
}

/// The options of a forward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Numbers {
    /// The scale of scores; `None` for the problem's default.
    pub softmax_scale: Option<Bits>,
    /// The keys that a query sees.
    pub window: Bounds,
    /// The soft cap; `None` for no cap.
    pub softcap: Option<Bits>,
    /// The function of scores; `None` for scores as they are.
    pub score: Option<OpenScore>,
    /// Split-KV: 0 for no splits, -1 for equal shares of the CTAs, -2 for fixed-size splits whose size the planner
    /// chooses, or the number of keys of a fixed-size split.
    pub split_keys: Option<i64>,
    /// The number of SMs that are left to other kernels.
    pub sm_margin: i64,
    /// Whether V, which is e4m3, is transposed.
    pub v_transposed: bool,
    /// The number of rows of Q that share a block scale (128 rows of K and V share one); `None` for scales per head.
    pub block_rows: Option<usize>,
    /// The form of LSE.
    pub lse: LseForm,
    /// Hints of the longest sequences of Q, and of K and V.
    pub longest: [Option<usize>; 2],
}

/// The pass that attention is a part of.
#[derive(Clone, Copy)]
pub enum Pass {
    /// O is written.
    Forward,
    /// O is written. K and V are a cache, to which rows are appended first.
    Append,
    /// O is read.
    Backward,
}

/// Whether sequences of Q are packed.
pub(crate) fn is_packed(sequences: Option<[Sequences; 2]>) -> bool {
    sequences.is_some_and(|[of_q, _]| of_q.is_packed())
}

/// The bits of a number, so that NaN, which every problem refuses, equals itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bits(u64);

impl From<f64> for Bits {
    fn from(number: f64) -> Bits {
        Bits(number.to_bits())
    }
}

impl Attention {
    /// The problem, with only the mask and the function of scores checked.
    ///
    /// # Errors
    /// The mask is invalid, or the function's tables are.
    pub fn spec(&self) -> Result<ProblemSpec, Error> {
        let ([q, k, v], numbers) = (self.inputs, &self.numbers);
        let Bounds { left, right, chunk } = numbers.window;
        let spec = ProblemSpec::new(q, k, v, self.o);
        let mut spec = spec.mask(Mask::from_window(left, right)?).mask(Mask::from_chunk(chunk)?);
        if let Some(shape) = self.intervals {
            spec = spec.mask(Mask::of_intervals(Intervals::of_shape(shape, q.shape)?));
        }
        let number = |bits: Option<Bits>| bits.map(|Bits(bits)| f64::from_bits(bits));
        (spec.softmax_scale, spec.softcap) = (number(numbers.softmax_scale), number(numbers.softcap));
        (spec.qv, spec.sink, spec.lse, spec.extra) = (self.qv, self.sink, numbers.lse, self.extra);
        spec.max_logits = self.max_logits;
        spec.token_scales = self.k_scales.zip(self.v_scales).map(|(k, v)| TokenScales { k, v });
        spec.score = numbers.score.as_ref().map(|score| score.form(&self.score_tables)).transpose()?;
        if let Some([of_q, of_k]) = self.sequences {
            spec = spec.seqs_q(of_q).seqs_k(of_k);
        }
        if numbers.v_transposed {
            spec = spec.transposed_v();
        }
        if let Some(rows) = numbers.block_rows {
            spec = spec.block_scales(rows);
        }
        Ok(if self.v_channels { spec.v_channels() } else { spec })
    }
}

impl Attention {
    /// A call of an operation.
    ///
    /// # Errors
    /// A tensor is missing or invalid.
    pub fn of(tensors: &mut Tensors<'_>, numbers: &Numbers, pass: Pass) -> Result<Attention, Error> {
        let q = tensors.input("q")?;
        let mut input = |name| match pass {
            Pass::Append => tensors.output(name),
            Pass::Forward | Pass::Backward => tensors.input(name),
        };
        let k = input("k")?;
        let v = if numbers.v_transposed { tensors.transposed("v", k.shape.seqlen)? } else { input("v")? };
        // The problem determines the shapes of the scales, so that only their presence is noted here.
        for name in ["q_descale", "k_descale", "v_descale"] {
            tensors.has(name)?;
        }
        // A call that only writes a table has no O.
        let of_o = Shape { head_dim: v.shape.head_dim, ..q.shape };
        let of_o = TensorDesc::contiguous(q.dtype.default_output(), of_o).canonical();
        let sequences = tensors.sequences(numbers.longest, [q.shape, k.shape])?;
        let o = match pass {
            Pass::Backward => tensors.like_o("o", of_o, is_packed(sequences))?,
            Pass::Forward | Pass::Append => tensors.output_like("o", of_o)?,
        };
        let [k_scales, v_scales] = [tensors.optional("k_scales")?, tensors.optional("v_scales")?];
        if k_scales.is_some() && v_scales.is_none() {
            return Err(Error::NoTensor { tensor: "v_scales" });
        }
        Ok(Attention {
            inputs: [q, k, v],
            qv: tensors.optional("qv")?,
            o,
            sequences,
            extra: tensors.extra_cache(of_o.shape.batch)?,
            k_scales,
            v_scales,
            intervals: tensors.extents("intervals")?,
            sink: tensors.has("sink")?,
            max_logits: tensors.has_output("max_logits", Dtype::F32)?,
            v_channels: tensors.has("v_mean")?,
            table: tensors.extents("table")?.map(|[words]| words as u32),
            score_tables: tensors.score_tables(numbers.score.as_ref())?,
            numbers: numbers.clone(),
        })
    }
}

impl Call for Attention {
    type Plan = Plan;
    type Numbers = Numbers;

    fn numbers(options: &Options<'_>) -> Result<Numbers, Error> {
        Ok(Numbers {
            softmax_scale: options.real("softmax_scale")?.map(Bits::from),
            window: options.window()?,
            softcap: options.real("softcap")?.map(Bits::from),
            score: options.score()?,
            split_keys: options.integer("split_keys")?,
            sm_margin: options.integer("sm_margin")?.unwrap_or(0),
            v_transposed: options.flag("v_transposed")?,
            block_rows: options.integer("block_rows")?,
            lse: LseForm {
                base_two: options.flag("lse_base_two")?,
                without_sink: options.flag("lse_without_sink")?,
                empty_is_infinite: options.flag("lse_empty_is_infinite")?,
            },
            longest: options.hints()?,
        })
    }

    fn given(tensors: &mut Tensors<'_>, numbers: &Numbers) -> Result<Attention, Error> {
        let attention = Attention::of(tensors, numbers, Pass::Forward)?;
        tensors.has_output("lse", Dtype::F32)?;
        Ok(attention)
    }

    /// If a table is given, the call does not take the lists of sequences.
    fn takes(&self, tensor: &str) -> bool {
        let is_list = tensor.starts_with("cu_seqlens") || tensor.starts_with("seqused");
        !(self.table.is_some() && is_list)
    }

    fn problem(&self) -> Result<Problem, Error> {
        let problem = self.spec()?.validate()?;
        problem.check_rows()?;
        let given = self.v_scales.filter(|_| problem.token_scales().is_none());
        match (given.map(TensorDesc::canonical), problem.v_scales()) {
            (given, expected) if given == expected => Ok(problem),
            (Some(given), Some(expected)) => {
                let text = |TensorDesc { dtype, shape, strides }: TensorDesc| {
                    let Strides { batch, seqlen, heads, head_dim } = strides;
                    format!("{dtype} {:?} of strides {:?}", shape.dims(), [batch, seqlen, heads, head_dim])
                };
                let (found, expected) = (text(given), text(expected) + ", as far apart as rows of v");
                Err(Error::Tensor { tensor: "v_scales", found, expected })
            }
            (None, _) => Err(Error::NoTensor { tensor: "v_scales" }),
            (Some(_), None) => Err(Error::UnknownTensor { name: "v_scales".to_owned() }),
        }
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        let options = PlanOptions::default().sms(devices::without(sms, self.numbers.sm_margin)?);
        let options = match self.numbers.split_keys {
            None => options,
            Some(0) => options.split_keys(SplitKeys::Whole),
            Some(-1) => options.split_keys(SplitKeys::Even),
            Some(-2) => options.split_keys(SplitKeys::Fixed),
            // A negative number wraps to more keys than any split has, which the plan refuses.
            Some(keys) => options.split_keys(SplitKeys::FixedSize { keys: keys as u64 }),
        };
        Ok(if self.table.is_some() { options.given_table() } else { options })
    }

    fn check_plan(&self, plan: &Plan) -> Result<(), Error> {
        let needed = plan.table().map_or(0, |table| table.words());
        match self.table {
            Some(given) if given != needed => Err(Error::TableWords { given, needed }),
            _ => Ok(()),
        }
    }
}
