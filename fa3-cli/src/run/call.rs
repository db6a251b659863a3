//! One attention call: from tensors to results.

use std::time::Instant;

use fa3::{Attention, Device, Gradients, Output, OutputGradients, Scalar};
use fa3_quant::E4m3;
use fa3_types::{Dtype, KnownProblem};
use half::{bf16, f16};
use ndarray::{Array, Array4, ArrayView1, ArrayView4, Axis, Dimension, IntoDimension, concatenate};
use safetensors::Dtype as InFile;

use super::Options;
use super::compare::{Arithmetic, Check, Expected, Judged, check_gradients};
use super::error::Error;
use super::gpu;
use super::layout::{self, Columns};
use super::report::{Backward, Pass, Report};
use super::scales::Scales;
use super::summary::Summary;
use super::tensor::{self, Stored, Tensor};
use super::text::short;
use crate::args::number::row;
use crate::device::{ChosenDevice, Computed, Times};

/// The tensors of one call in a file.
#[derive(Debug)]
pub(super) struct Call {
    /// The prefix of the names of the call's tensors.
    pub(super) prefix: String,
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) lists: Lists,
    /// The part of the queries that V is multiplied by.
    pub(super) qv: Option<Tensor>,
    /// The attention sinks of the query heads.
    pub(super) sink: Option<Tensor>,
    /// The scales of Q, K and V, if they are e4m3.
    pub(super) scales: [Scales; 3],
    pub(super) expected_o: Option<Tensor>,
    pub(super) expected_lse: Option<Tensor>,
    /// The gradient of O.
    pub(super) dout: Option<Tensor>,
    /// The gradient of LSE.
    pub(super) dlse: Option<Tensor>,
}

/// Sequence lengths, from the command line or from a file.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Lists {
    /// Packed input: the first row of Q of each sequence, from 0, and the end of the last sequence; k is 1024
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) cu_seqlens_q: Option<Vec<i32>>,
    /// The first rows of K and V of each sequence, and the end of the last; cu_seqlens_q if K has as many rows as Q
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) cu_seqlens_k: Option<Vec<i32>>,
    /// Number of rows of Q in use, for each sequence
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) seqused_q: Option<Vec<i32>>,
    /// Number of keys in use, for each sequence
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, value_parser = row)]
    pub(super) seqused_k: Option<Vec<i32>>,
}

/// cu_seqlens of Q, and of K and V.
type CuSeqlens<'a> = (&'a [i32], &'a [i32]);

#[derive(Debug)]
pub(super) struct Results {
    pub(super) report: Report,
    pub(super) o: Tensor,
    pub(super) lse: Tensor,
    /// dQ, dK and dV, and dsink if there are sinks. Empty if gradients are not computed.
    pub(super) gradients: Vec<Tensor>,
}

/// A report on gradients, and the gradients.
type Differentiated = (Backward, Vec<Tensor>);

/// A call whose forward pass was computed.
struct Attended<'c, 'a, T: Scalar> {
    attention: &'c Attention<'a, T>,
    qkv: [ArrayView4<'a, T>; 3],
    sink: Option<ArrayView1<'a, f32>>,
    output: &'c Output<T::Output>,
    place: ChosenDevice,
    /// The gradients of O and LSE in the file.
    of: [Option<Tensor>; 2],
    /// Whether the sequences are packed.
    packed: bool,
    /// Q's name, for messages about element types.
    name_q: &'c str,
}

impl Lists {
    /// Takes the lists that are missing here from `others`.
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

    /// Both cu_seqlens, if the call is packed.
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
    /// Computes the call on `place`, in the layout and the type of the options, and checks the results. The results
    /// have the layout of the inputs.
    pub(super) fn attend(self, options: &Options, place: ChosenDevice) -> Result<Results, Error> {
        let columns = Columns::of(options.layout, options.heads, options.head_dim)?;
        let lists = options.lists.clone().or(self.lists.clone());
        let packed = lists.is_packed();
        let call = Call { lists, ..self }.rounded(options.dtype);
        let Some(layout) = options.layout else {
            let may_be_other = !packed && layout::may_be_other(&call.q.shape, &call.k.shape);
            let results = call.compute(options, place);
            let results = results.map_err(|error| if packed { error } else { error.with_hint() })?;
            if may_be_other {
                crate::console::print_note(&format_args!(
                    "there are fewer rows than heads; {}",
                    layout::HINT
                ));
            }
            return Ok(results);
        };
        let heads = columns.map(|columns| columns.heads(&call.q, &call.k)).transpose()?;
        let [of_q, of_k] = [0, 1].map(|of| heads.map(|heads| heads[of]));
        let Call { q, k, v, qv, expected_o, dout, .. } = call;
        let [k, v] = [k, v].map(|tensor| layout.read(tensor, packed, of_k));
        let like_q = |tensor| layout.read(tensor, packed, of_q);
        let [qv, expected_o, dout] = [qv, expected_o, dout].map(|tensor| tensor.map(like_q).transpose());
        let (qv, expected_o, dout) = (qv?, expected_o?, dout?);
        let call = Call { q: like_q(q)?, k: k?, v: v?, qv, expected_o, dout, ..call };
        let Results { report, o, lse, gradients } = call.compute(options, place)?;
        // LSE and the gradients of sinks have their own order of dimensions.
        let laid = |tensor: Tensor| match tensor.name.ends_with("dsink") {
            true => tensor,
            false => layout.write(tensor, packed),
        };
        Ok(Results { report, o: laid(o), lse, gradients: gradients.into_iter().map(laid).collect() })
    }

    /// Rounds the inputs to `dtype`.
    fn rounded(self, dtype: Option<Dtype>) -> Call {
        let round = match dtype {
            Some(Dtype::F32) => Tensor::rounded_to::<f32>,
            Some(Dtype::F16) => Tensor::rounded_to::<f16>,
            Some(Dtype::Bf16) => Tensor::rounded_to::<bf16>,
            Some(Dtype::E4m3) => Tensor::rounded_to::<E4m3>,
            Some(Dtype::Int8) => Tensor::rounded_to::<i8>,
            None => return self,
        };
        let Call { q, k, v, qv, dout, .. } = self;
        Call { q: round(q), k: round(k), v: round(v), qv: qv.map(round), dout: dout.map(round), ..self }
    }

    /// Computes the call on `place` in Q's type, and checks the results.
    #[allow(clippy::wildcard_enum_match_arm, reason = "the list of types in files grows without us")]
    fn compute(self, options: &Options, place: ChosenDevice) -> Result<Results, Error> {
        let (has_scales, backward) = (self.scales.iter().any(Scales::are_there), options.backward);
        match self.q.dtype {
            InFile::F8_E4M3 if has_scales && !backward => self.attend_scaled(options, place),
            _ if has_scales => Err(Error::dtype(&self.q, tensor::SCALED)),
            InFile::F32 => self.attend_in::<f32>(options, place, differentiate),
            InFile::F16 => self.attend_in::<f16>(options, place, differentiate),
            InFile::BF16 => self.attend_in::<bf16>(options, place, differentiate),
            InFile::F8_E4M3 if backward => Err(Error::dtype(&self.q, tensor::DIFFERENTIATED)),
            InFile::F8_E4M3 => self.attend_in::<E4m3>(options, place, |_, _| Ok(None)),
            _ => Err(Error::dtype(&self.q, tensor::ATTENDED)),
        }
    }

    fn attend_in<T: Stored<Output: Stored>>(
        self,
        options: &Options,
        place: ChosenDevice,
        differentiate: impl Fn(Attended<'_, '_, T>, &Options) -> Result<Option<Differentiated>, Error>,
    ) -> Result<Results, Error> {
        let Call { prefix, q, k, v, lists, qv, sink, expected_o, expected_lse, dout, dlse, .. } = self;
        let tensors = [&q, &k, &v].map(|tensor| tensor.name.as_str()).join(", ");
        let problem_error = |error| {
            if let fa3::Error::Problem(source) = error {
                return Error::Problem { tensors: tensors.clone(), source };
            }
            Error::compute(&prefix, error)
        };
        let packed = lists.is_packed();
        let name_q = q.name.clone();
        let [q, k, v] = [q, k, v].map(|tensor| tensor.array::<T>(packed, &name_q));
        let (q, k, v) = (q?, k?, v?);
        let qv = qv.map(|qv| qv.array::<T>(packed, &name_q)).transpose()?;
        let qv = qv.as_ref().map(|qv| qv.view());
        let cu_seqlens = lists.cu_seqlens(q.dim().1, k.dim().1)?;
        let qkv @ [q, k, v] = [q.view(), k.view(), v.view()];
        let sink = floats(sink, q.dim().2)?;
        let sink = sink.as_ref().map(|sink| sink.view());
        let attention = options.apply(Attention::new(q, k, v), &lists, cu_seqlens, sink)?;
        let attention = qv.into_iter().fold(attention, Attention::qv);

        let problem = attention.problem().map_err(problem_error)?;
        let expected = Expected::new(&problem, expected_o, expected_lse)?;
        let computed = options.device.compute(
            place,
            "o and lse",
            |device| Ok(gpu::forward(device, &problem, qkv, qv, sink)?),
            || attention.forward(&Device::Cpu),
        );
        let Computed { result: output, times, place } = computed.map_err(problem_error)?;
        let arithmetic = arithmetic(&problem, &place);
        let check = match qv {
            None => expected.check(options.judged(), &problem, qkv, sink, arithmetic, &output)?,
            Some(qv) => {
                let (q, k) = (side_by_side(qv, q), side_by_side(v, k));
                let qkv = [q.view(), k.view(), v];
                expected.check(options.judged(), &problem.joined(), qkv, sink, arithmetic, &output)?
            }
        };
        let (place_again, of) = (place.again(), [dout, dlse]);
        let forward = Pass { place, times, summaries: vec![Summary::new("o", &output.o)], check };
        let mut report = Report { prefix: short(&prefix), problem, forward, backward: None };
        let mut gradients = Vec::new();
        if options.backward {
            let (attention, output, name_q) = (&attention, &output, name_q.as_str());
            let attended = Attended { attention, qkv, sink, output, place: place_again, of, packed, name_q };
            let (backward, tensors) = differentiate(attended, options)?.unzip();
            (report.backward, gradients) = (backward, tensors.unwrap_or_default());
        }

        Ok(Results::new(report, output, gradients, &prefix, packed))
    }

    /// Computes attention of codes times scales on `place`, and checks the results.
    fn attend_scaled(self, options: &Options, place: ChosenDevice) -> Result<Results, Error> {
        let Call { prefix, q, k, v, lists, qv, sink, scales, expected_o, expected_lse, .. } = self;
        if let Some(qv) = qv {
            return Err(Error::ScaledQv { tensor: qv.name });
        }
        let (packed, name_q) = (lists.is_packed(), q.name.clone());
        let [of_q, of_k, of_v] = scales;
        let [q, k, v] = [(q, of_q), (k, of_k), (v, of_v)]
            .map(|(tensor, scales)| scales.of(tensor.array::<E4m3>(packed, &name_q)?));
        let (q, k, v) = (q?, k?, v?);
        let cu_seqlens = lists.cu_seqlens(q.codes.dim().1, k.codes.dim().1)?;
        let sink = floats(sink, q.codes.dim().2)?;
        let sink = sink.as_ref().map(|sink| sink.view());
        let attention = options.apply(Attention::of_quantized(&q, &k, &v), &lists, cu_seqlens, sink)?;

        let error = |error| Error::compute(&prefix, error);
        let problem = attention.problem().map_err(error)?;
        let expected = Expected::new(&problem, expected_o, expected_lse)?;
        let computed = options.device.compute(
            place,
            "o and lse",
            |device| {
                // This time includes copies, and possibly compiling a kernel.
                let (device, start) = (Device::Cuda(device.clone()), Instant::now());
                let output = attention.forward(&device)?;
                Ok((output, Times { compile: None, call: start.elapsed(), launches: 1, warm: false }))
            },
            || attention.forward(&Device::Cpu),
        );
        let Computed { result: output, times, place } = computed.map_err(error)?;
        let arithmetic = arithmetic(&problem, &place);
        let numbers = [&q, &k, &v].map(fa3::Quantized::dequantize);
        let [q, k, v] = numbers.each_ref().map(|x| x.view());
        let check = expected.check(options.judged(), &problem, [q, k, v], sink, arithmetic, &output)?;
        let forward = Pass { place, times, summaries: vec![Summary::new("o", &output.o)], check };
        let report = Report { prefix: short(&prefix), problem, forward, backward: None };
        Ok(Results::new(report, output, Vec::new(), &prefix, packed))
    }
}

impl Results {
    /// The results of a call, named with the prefix of its tensors.
    fn new<T: Stored>(
        report: Report,
        output: Output<T>,
        gradients: Vec<Tensor>,
        prefix: &str,
        packed: bool,
    ) -> Results {
        let Output { o, lse, .. } = output;
        let (o, lse) = (Tensor::new("o", o), Tensor::new("lse", lse));
        let named = |tensor: Tensor| {
            // Sinks have no batch dimension.
            let tensor = if packed && tensor.shape.len() > 1 { tensor.without_batch() } else { tensor };
            Tensor { name: prefix.to_owned() + &tensor.name, ..tensor }
        };
        let gradients = gradients.into_iter().map(named).collect();
        Results { report, o: named(o), lse: named(lse), gradients }
    }
}

/// Concatenates the columns of two tensors.
fn side_by_side<T: Stored>(first: ArrayView4<'_, T>, second: ArrayView4<'_, T>) -> Array4<T> {
    concatenate(Axis(3), &[first, second]).expect("tensors of a valid problem have the same rows")
}

/// The arithmetic of a call on `place`.
fn arithmetic(problem: &KnownProblem, place: &ChosenDevice) -> Arithmetic {
    match (problem.dtype(), &place.device) {
        (Dtype::E4m3, Device::Cuda(_)) => Arithmetic::Fp8,
        _ => Arithmetic::OfInputs,
    }
}

/// The numbers of a tensor of this shape as f32.
fn floats<D: Dimension>(
    tensor: Option<Tensor>,
    shape: impl IntoDimension<Dim = D>,
) -> Result<Option<Array<f32, D>>, Error> {
    let numbers = tensor.map(|tensor| tensor.expected(shape.into_dimension())).transpose()?;
    Ok(numbers.map(|numbers| numbers.mapv(|x| x as f32)))
}

/// Computes the gradients of Q, K, V and the sinks, and checks them.
fn differentiate<T: Stored<Output = T>>(
    attended: Attended<'_, '_, T>,
    options: &Options,
) -> Result<Option<Differentiated>, Error> {
    let Attended { attention, qkv, sink, output, place, of: [dout, dlse], packed, name_q } = attended;
    let error = |error| Error::compute("", error);
    let problem = attention.backward_problem().map_err(error)?;
    let forward = attention.problem().map_err(error)?;
    let from = [&dout, &dlse].map(|tensor| tensor.as_ref().map(|tensor| tensor.name.clone()));
    let dout = match dout {
        Some(dout) => dout.array_like::<T>(packed, name_q, output.o.shape())?,
        None => Array4::from_elem(output.o.dim(), T::from_f32(1.0)),
    };
    let dlse = floats(dlse, forward.lse_shape())?;
    let mut of = OutputGradients::from(dout.view());
    of.dlse = dlse.as_ref().map(|dlse| dlse.view());

    let computed = options.device.compute(
        place,
        "dq, dk and dv",
        |device| Ok(gpu::backward(device, (&problem, &forward), qkv, sink, output, of)?),
        || attention.backward(&Device::Cpu, output, of),
    );
    let Computed { result: gradients, times, place } = computed.map_err(error)?;
    let check = match options.judged() {
        Judged::All => check_gradients(&forward, qkv, sink, of, &gradients)?,
        Judged::Expected => Check::NothingExpected,
        Judged::None => Check::Unwanted,
    };
    let Gradients { dq, dk, dv, dsink, .. } = gradients;
    let three = [("dq", dq), ("dk", dk), ("dv", dv)];
    let mut summaries: Vec<Summary> = three.iter().map(|(name, x)| Summary::new(name, x)).collect();
    summaries.extend(dsink.as_ref().map(|x| Summary::new("dsink", x)));
    let tensors = three.into_iter().map(|(name, x)| Tensor::new(name, x));
    let tensors = tensors.chain(dsink.map(|x| Tensor::new("dsink", x))).collect();
    Ok(Some((Backward { from, pass: Pass { place, times, summaries, check } }, tensors)))
}

impl Options {
    fn apply<'a, T: Scalar>(
        &self,
        attention: Attention<'a, T>,
        lists: &'a Lists,
        cu_seqlens: Option<CuSeqlens<'a>>,
        sink: Option<ArrayView1<'a, f32>>,
    ) -> Result<Attention<'a, T>, Error> {
        let attention = attention.mask(self.score.mask());
        let attention = cu_seqlens.into_iter().fold(attention, |attention, (q, k)| attention.packed(q, k));
        let attention = lists.seqused_q.iter().fold(attention, |attention, rows| attention.seqused_q(rows));
        let attention = lists.seqused_k.iter().fold(attention, |attention, rows| attention.seqused_k(rows));
        let attention = self.score.softmax_scale.into_iter().fold(attention, Attention::softmax_scale);
        let attention = self.score.softcap.into_iter().fold(attention, Attention::softcap);
        let attention = self.function.function()?.into_iter().fold(attention, Attention::score);
        Ok(sink.into_iter().fold(attention, Attention::sink))
    }
}
