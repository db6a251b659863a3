//! A call of the forward pass.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use fa3_cuda::host::{Compiled, Kept};
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
    /// Q, K and V; V of such a shape and such strides as if it were not transposed.
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
    /// The shape of the intervals that say which keys a query sees, if there are some.
    pub(crate) intervals: Option<[usize; 4]>,
    /// No cap if `None`.
    pub(crate) softcap: Option<Bits>,
    /// Whether query heads have sinks.
    pub(crate) sink: bool,
    /// How CTAs share the keys of a sequence: 0 is not, -1 equally, and other numbers are keys of a piece.
    pub(crate) split_keys: i64,
    /// How many SMs to leave to others.
    pub(crate) sm_margin: i64,
    /// Whether V, which is e4m3, lies transposed.
    pub(crate) v_transposed: bool,
    /// Rows of Q that share a scale, as 128 of K and V do; heads do if `None`.
    pub(crate) block_rows: Option<usize>,
    /// Whether channels of V have scales and means, whatever rows of Q and K share.
    pub(crate) v_channels: bool,
    /// The words of the table of sequences, if it is given.
    pub(crate) table: Option<u32>,
}

/// Which keys a query sees, as it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Bounds {
    /// To the left of its position; -1 is unbounded.
    pub(crate) left: i64,
    /// To the right.
    pub(crate) right: i64,
    /// Keys of a chunk; 0 is none.
    pub(crate) chunk: i64,
}

/// The bits of a number: NaN, which no problem can have, is equal to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Bits(u64);

impl From<f64> for Bits {
    fn from(number: f64) -> Bits {
        Bits(number.to_bits())
    }
}

impl Attention {
    /// The problem, of which only the mask has been checked.
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
        // LSE and scales have the shapes that the problem says.
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
            split_keys: options.number("split_keys")?.unwrap_or(0),
            sm_margin: options.number("sm_margin")?.unwrap_or(0),
            v_transposed,
            block_rows: options.number("block_rows")?,
            v_channels: tensors.has("v_mean"),
            table: tensors.extents("table")?.map(|[words]| words as u32),
        })
    }

    /// Whether the operation reads this tensor: a table replaces the lists.
    fn takes(&self, tensor: &str) -> bool {
        let is_list = tensor.starts_with("cu_seqlens") || tensor.starts_with("seqused");
        !(self.table.is_some() && is_list)
    }

    fn kept() -> &'static Kept<(u32, Attention), Compiled<Plan>> {
        static KEPT: LazyLock<Kept<(u32, Attention), Compiled<Plan>>> = LazyLock::new(Kept::default);
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
            0 => options,
            -1 => options.split_keys(SplitKeys::Equally),
            // One that is negative becomes more keys than any piece has.
            keys => options.split_keys(SplitKeys::Pieces { keys: keys as u64 }),
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
