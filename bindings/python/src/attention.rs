//! A call of the forward pass.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, PlanCache};
use fa3_sched::forward::{Plan, PlanOptions, SplitKeys};
use fa3_types::{Intervals, Mask, Problem, ProblemError, ProblemSpec, Sequences, Shape, TensorDesc};

use crate::arguments::{Options, Tensors};
use crate::call::{At, Call};
use crate::error::Error;
use crate::{cpu, devices};
use pyo3::PyResult;

/// A forward pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Attention {
    /// Q, K and V; V has the shape and strides of a V that is not transposed.
    pub(crate) inputs: [TensorDesc; 3],
    /// The part of Q that is multiplied by V, of latent attention.
    pub(crate) qv: Option<TensorDesc>,
    /// O.
    pub(crate) o: TensorDesc,
    /// The sequences of Q, and of K and V, unless all are dense and in use in full. Their lengths are data.
    pub(crate) sequences: Option<[Sequences; 2]>,
    /// The problem's default if `None`.
    pub(crate) softmax_scale: Option<Bits>,
    /// Which keys a query sees.
    pub(crate) window: Bounds,
    /// The shape of the intervals that say which keys a query sees, if given.
    pub(crate) intervals: Option<[usize; 4]>,
    /// No cap if `None`.
    pub(crate) softcap: Option<Bits>,
    /// Whether query heads have sinks.
    pub(crate) sink: bool,
    /// How CTAs share the keys of a sequence: 0 if they do not, -1 if equally, else the keys of a split.
    pub(crate) split_keys: Option<i64>,
    /// How many SMs to leave to other kernels.
    pub(crate) sm_margin: i64,
    /// Whether V, which is e4m3, is transposed.
    pub(crate) v_transposed: bool,
    /// How many rows of Q share a scale, while 128 rows of K and V do; scales are per head if `None`.
    pub(crate) block_rows: Option<usize>,
    /// Whether channels of V have scales and means, whatever scales Q and K have.
    pub(crate) v_channels: bool,
    /// The words of the table of sequences, if given.
    pub(crate) table: Option<u32>,
}

/// Which keys a query sees, as given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Bounds {
    /// To the left of its position; -1 is unbounded.
    pub(crate) left: i64,
    /// To the right.
    pub(crate) right: i64,
    /// Keys of a chunk; 0 is none.
    pub(crate) chunk: i64,
}

/// The bits of a number, so that NaN, which every problem refuses, equals itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Bits(u64);

impl From<f64> for Bits {
    fn from(number: f64) -> Bits {
        Bits(number.to_bits())
    }
}

impl Attention {
    /// The problem, with only the mask checked.
    ///
    /// # Errors
    /// [`ProblemError::WindowSize`], [`ProblemError::AttentionChunk`] or [`ProblemError::IntervalsShape`].
    pub(crate) fn spec(&self) -> Result<ProblemSpec, ProblemError> {
        let [q, k, v] = self.inputs;
        let Bounds { left, right, chunk } = self.window;
        let spec = ProblemSpec::new(q, k, v, self.o);
        let mut spec = spec.mask(Mask::from_window(left, right)?).mask(Mask::from_chunk(chunk)?);
        if let Some(shape) = self.intervals {
            spec = spec.mask(Mask::Intervals(Intervals::of_shape(shape, q.shape)?));
        }
        let number = |bits: Option<Bits>| bits.map(|Bits(bits)| f64::from_bits(bits));
        (spec.softmax_scale, spec.softcap) = (number(self.softmax_scale), number(self.softcap));
        (spec.qv, spec.sink) = (self.qv, self.sink);
        if let Some([of_q, of_k]) = self.sequences {
            spec = spec.seqs_q(of_q).seqs_k(of_k);
        }
        if self.v_transposed {
            spec = spec.transposed_v();
        }
        if let Some(rows) = self.block_rows {
            spec = spec.block_scales(rows);
        }
        Ok(if self.v_channels { spec.v_channels() } else { spec })
    }
}

impl Call for Attention {
    type Plan = Plan;

    fn given(tensors: &Tensors<'_>, options: &Options<'_>) -> PyResult<Attention> {
        let (q, k) = (tensors.desc("q")?, tensors.desc("k")?);
        let v_transposed = options.flag("v_transposed")?;
        let v = if v_transposed { tensors.transposed("v", k.shape.seqlen)? } else { tensors.desc("v")? };
        // The problem determines the shapes of LSE and scales: they are only marked as known here.
        for name in ["lse", "q_descale", "k_descale", "v_descale"] {
            tensors.has(name);
        }
        // A table needs no O.
        let of_o = Shape { head_dim: v.shape.head_dim, ..q.shape };
        let of_o = TensorDesc::contiguous(q.dtype.default_output(), of_o).canonical();
        Ok(Attention {
            inputs: [q, k, v],
            qv: tensors.optional("qv")?,
            o: tensors.optional("o")?.unwrap_or(of_o),
            sequences: tensors.sequences(options, [q.shape, k.shape])?,
            softmax_scale: options.number::<f64>("softmax_scale")?.map(Bits::from),
            window: options.window()?,
            intervals: tensors.extents("intervals")?,
            softcap: options.number::<f64>("softcap")?.map(Bits::from),
            sink: tensors.has("sink"),
            split_keys: options.number("split_keys")?,
            sm_margin: options.number("sm_margin")?.unwrap_or(0),
            v_transposed,
            block_rows: options.number("block_rows")?,
            v_channels: tensors.has("v_mean"),
            table: tensors.extents("table")?.map(|[words]| words as u32),
        })
    }

    /// A table replaces the lists of sequences.
    fn takes(&self, tensor: &str) -> bool {
        let is_list = tensor.starts_with("cu_seqlens") || tensor.starts_with("seqused");
        !(self.table.is_some() && is_list)
    }

    fn kept() -> &'static PlanCache<(u32, Attention), Compiled<Plan>> {
        static KEPT: LazyLock<PlanCache<(u32, Attention), Compiled<Plan>>> =
            LazyLock::new(PlanCache::default);
        &KEPT
    }

    fn problem(&self) -> Result<Problem, Error> {
        let problem = self.spec()?.validate()?;
        problem.check_rows()?;
        Ok(problem)
    }

    fn options(&self, sms: NonZeroU32) -> Result<PlanOptions, Error> {
        let options = PlanOptions::default().sms(devices::without(sms, self.sm_margin)?);
        let options = match self.split_keys {
            None => options,
            Some(0) => options.split_keys(SplitKeys::Whole),
            Some(-1) => options.split_keys(SplitKeys::Even),
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

    fn check_for_cpu(&self) -> Result<(), Error> {
        cpu::problem(self).map(drop)
    }

    fn compute(&self, at: &At) -> Result<(), Error> {
        cpu::forward(self, at)
    }
}
