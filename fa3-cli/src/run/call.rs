//! One attention call: from tensors to results.

use fa3::{Attention, Device, Output, Scalar};
use fa3_quant::E4m3;
use fa3_types::{Dtype, Mask};
use half::{bf16, f16};

use super::compare::{Arithmetic, Check, Expected};
use super::error::{Error, short};
use super::place::{Computed, Wanted};
use super::report::Report;
use super::tensor::{self, Stored, Tensor, Values};
use crate::args::number::row;

/// What a file says about one call.
#[derive(Debug)]
pub(super) struct Call {
    /// What the names of its tensors begin with.
    pub(super) prefix: String,
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) lists: Lists,
    pub(super) expected_o: Option<Tensor>,
    pub(super) expected_lse: Option<Tensor>,
}

/// Sequence lengths, from the command line or from a file.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Lists {
    /// Packed input: the rows of Q where sequences begin, from 0, and where the last one ends; k is 1024
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) cu_seqlens_q: Option<Vec<i32>>,
    /// The same for K and V; cu_seqlens_q if they have as many rows as Q
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) cu_seqlens_k: Option<Vec<i32>>,
    /// How many rows of each sequence of Q take part
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) seqused_q: Option<Vec<i32>>,
    /// How many keys of each sequence of K and V take part
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) seqused_k: Option<Vec<i32>>,
}

/// cu_seqlens of Q, and of K and V.
type CuSeqlens<'a> = (&'a [i32], &'a [i32]);

/// What the command line says about every call.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) device: Wanted,
    /// Whether results are judged.
    pub(super) check: bool,
    pub(super) mask: Mask,
    pub(super) softmax_scale: Option<f64>,
    pub(super) softcap: Option<f64>,
    pub(super) lists: Lists,
}

/// What a call gives.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) report: Report,
    pub(super) o: Tensor,
    pub(super) lse: Tensor,
}

impl Lists {
    /// These, and where they say nothing, `others`.
    fn or(self, others: Lists) -> Lists {
        Lists {
            cu_seqlens_q: self.cu_seqlens_q.or(others.cu_seqlens_q),
            cu_seqlens_k: self.cu_seqlens_k.or(others.cu_seqlens_k),
            seqused_q: self.seqused_q.or(others.seqused_q),
            seqused_k: self.seqused_k.or(others.seqused_k),
        }
    }

    fn is_packed(&self) -> bool {
        self.cu_seqlens_q.is_some() || self.cu_seqlens_k.is_some()
    }

    /// Both cu_seqlens, if there are any.
    fn cu_seqlens(&self, rows_q: usize, rows_k: usize) -> Result<Option<CuSeqlens<'_>>, Error> {
        match (&self.cu_seqlens_q, &self.cu_seqlens_k) {
            (None, None) => Ok(None),
            (Some(q), Some(k)) => Ok(Some((q, k))),
            (Some(q), None) if rows_q == rows_k => Ok(Some((q, q))),
            (Some(_), None) => Err(Error::NoCuSeqlensK { rows_q, rows_k }),
            (None, Some(_)) => Err(Error::NoCuSeqlensQ),
        }
    }
}

impl Call {
    /// Computes the call in the type of Q and compares.
    pub(super) fn attend(self, settings: &Settings) -> Result<Results, Error> {
        match &self.q.values {
            Values::F32(_) => self.attend_in::<f32>(settings),
            Values::F16(_) => self.attend_in::<f16>(settings),
            Values::Bf16(_) => self.attend_in::<bf16>(settings),
            Values::E4m3(_) => self.attend_in::<E4m3>(settings),
            other @ (Values::F64(_) | Values::I64(_) | Values::I32(_)) => Err(Error::Dtype {
                tensor: self.q.name.clone(),
                given: other.dtype(),
                expected: tensor::ATTENDED,
            }),
        }
    }

    fn attend_in<T: Stored<Output: Stored>>(self, settings: &Settings) -> Result<Results, Error> {
        let Call { prefix, q, k, v, lists, expected_o, expected_lse } = self;
        let tensors = [&q, &k, &v].map(|tensor| tensor.name.as_str()).join(", ");
        let problem_error = |error| {
            if let fa3::Error::Problem(source) = error {
                return Error::Problem { tensors: tensors.clone(), source };
            }
            if let fa3::Error::Cuda(error) = error {
                return Error::Cuda(error);
            }
            Error::Sequences { prefix: short(&prefix), source: error }
        };
        let lists = settings.lists.clone().or(lists);
        let packed = lists.is_packed();
        let name_q = q.name.clone();
        let [q, k, v] = [q, k, v].map(|tensor| tensor.array::<T>(packed, &name_q));
        let (q, k, v) = (q?, k?, v?);
        let cu_seqlens = lists.cu_seqlens(q.dim().1, k.dim().1)?;
        let (q, k, v) = (q.view(), k.view(), v.view());
        let attention = settings.apply(Attention::new(q, k, v), &lists, cu_seqlens);

        let problem = attention.problem().map_err(problem_error)?;
        let expected = Expected::new(&problem, expected_o, expected_lse)?;
        let place = settings.device.place().map_err(problem_error)?;
        let computed = settings.device.forward(&attention, &problem, [q, k, v], place);
        let Computed { output, times, place } = computed.map_err(problem_error)?;
        let arithmetic = match (problem.dtype(), &place.device) {
            (Dtype::E4m3, Device::Cuda(_)) => Arithmetic::Fp8,
            _ => Arithmetic::OfInputs,
        };
        let check = match settings.check {
            true => expected.check(&problem, [q, k, v], arithmetic, &output)?,
            false => Check::Unwanted,
        };

        let report = Report { prefix: short(&prefix), problem, place, times, check };
        let Output { o, lse } = output;
        let (o, lse) = (Tensor::new(prefix.clone() + "o", o), Tensor::new(prefix + "lse", lse));
        let (o, lse) = if packed { (o.without_batch(), lse.without_batch()) } else { (o, lse) };
        Ok(Results { report, o, lse })
    }
}

impl Settings {
    fn apply<'a, T: Scalar>(
        &self,
        mut attention: Attention<'a, T>,
        lists: &'a Lists,
        cu_seqlens: Option<CuSeqlens<'a>>,
    ) -> Attention<'a, T> {
        attention = attention.mask(self.mask);
        if let Some((q, k)) = cu_seqlens {
            attention = attention.packed(q, k);
        }
        if let Some(seqused) = &lists.seqused_q {
            attention = attention.seqused_q(seqused);
        }
        if let Some(seqused) = &lists.seqused_k {
            attention = attention.seqused_k(seqused);
        }
        if let Some(scale) = self.softmax_scale {
            attention = attention.softmax_scale(scale);
        }
        if let Some(cap) = self.softcap {
            attention = attention.softcap(cap);
        }
        attention
    }
}
