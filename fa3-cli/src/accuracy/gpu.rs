//! O computed by this library's GPU kernels.

use std::error::Error;

use fa3::Scalar;
use fa3::cuda::{Device, DeviceBuffer, Forward, HostError, Quantize, Stream, Tensors, Workspace};
use fa3_quant::{Incoherent, Quantized};
use fa3_types::{Dtype, Problem, ProblemError, ProblemSpec, QuantizeProblem, QuantizeSpec, Scaling, Shape};
use half::f16;
use ndarray::Array4;

use super::recipe::{BLOCK, Recipe};
use super::sample::Sample;
use crate::gpu::{Which, floats, upload};

/// A GPU and the stream that its work is queued on.
pub(super) struct Gpu {
    device: Device,
    stream: Stream,
}

/// An FP8 tensor on the GPU.
struct Fp8 {
    codes: DeviceBuffer,
    /// One scale per block, head or channel.
    scales: DeviceBuffer,
    /// One mean per channel.
    mean: Option<DeviceBuffer>,
}

impl Gpu {
    /// Opens the first Hopper GPU.
    pub(super) fn open() -> Result<Gpu, fa3::Error> {
        let device = Which::First.open()?;
        let stream = device.stream()?;
        Ok(Gpu { device, stream })
    }

    pub(super) fn name(&self) -> &str {
        self.device.name()
    }

    /// Computes attention of the sample, rounded to fp16.
    pub(super) fn fp16(&self, sample: &Sample) -> Result<Array4<f32>, fa3::Error> {
        let [q, k, v] = sample.fp16();
        let (q, k, v) = (self.upload(&q)?, self.upload(&k)?, self.upload(&v)?);
        self.forward(&sample.problem, [&q, &k, &v], [None; 3], None)
    }

    /// Rounds the sample to fp16, quantizes it by kernels, with V transposed, and computes attention of the result.
    pub(super) fn fp8(
        &self,
        sample: &Sample,
        recipe: Recipe,
        seed: u64,
    ) -> Result<Array4<f32>, Box<dyn Error>> {
        let transform = recipe.transform(sample.problem.head_dim(), seed);
        let quantize = |x: &Array4<f16>, tensor| {
            let problem = quantize_problem(x, recipe, tensor)?;
            Ok::<_, Box<dyn Error>>(self.quantize(x, &problem)?)
        };
        let [q, k, v] = sample.fp16();
        let q = quantize(&q, Tensor::Qk(transform.as_ref()))?;
        let k = quantize(&k, Tensor::Qk(transform.as_ref()))?;
        let v = quantize(&v, Tensor::V)?;
        let scales = [Some(&q.scales), Some(&k.scales), Some(&v.scales)];
        let problem = quantized_problem(&sample.problem, recipe)?;
        Ok(self.forward(&problem, [&q.codes, &k.codes, &v.codes], scales, v.mean.as_ref())?)
    }

    /// Computes attention of exact e4m3 inputs.
    pub(super) fn e4m3(&self, sample: &Sample) -> Result<Array4<f32>, Box<dyn Error>> {
        let [q, k, v] = sample.codes()?;
        let upload = |x: &Quantized| self.upload(x.codes()).map_err(fa3::Error::from);
        let (q, k, v) = (upload(&q)?, upload(&k)?, upload(&v)?);
        let problem = e4m3_spec(&sample.problem).validate()?;
        Ok(self.forward(&problem, [&q, &k, &v], [None; 3], None)?)
    }

    fn quantize(&self, x: &Array4<f16>, problem: &QuantizeProblem) -> Result<Fp8, fa3::Error> {
        let quantize = Quantize::new(&self.device, problem)?;
        let x = self.upload(x)?;
        let mut codes = self.device.alloc(problem.codes_bytes().0 as usize)?;
        let mut computed = floats(&self.device, problem.scales_shape())?;
        let mut mean = floats(&self.device, problem.mean_shape())?;
        let mut workspace = Workspace::new(&self.device, &self.stream, quantize.workspace_bytes())?;
        let tensors = Tensors::new([("x", &x)], [("codes", &mut codes)]);
        let tensors = tensors.output("scales", computed.as_mut()).output("mean", mean.as_mut());
        quantize.run(&self.stream, tensors, &mut workspace)?;
        let Shape { batch, heads, .. } = problem.x().shape;
        let mut scales = computed.expect("none is given");
        if problem.scaling() == Scaling::Tensor {
            // Attention takes one scale per head.
            let scale: Vec<f32> = scales.download(&self.stream)?;
            scales = self.device.upload(&self.stream, &scale.repeat(batch * heads))?;
        }
        Ok(Fp8 { codes, scales, mean })
    }

    /// Computes O in f16. Its buffer is filled with NaN first.
    fn forward(
        &self,
        problem: &Problem,
        [q, k, v]: [&DeviceBuffer; 3],
        descales: [Option<&DeviceBuffer>; 3],
        v_mean: Option<&DeviceBuffer>,
    ) -> Result<Array4<f32>, fa3::Error> {
        let forward = Forward::new(&self.device, problem)?;
        let mut workspace = Workspace::new(&self.device, &self.stream, forward.workspace_bytes())?;
        let mut o = self.device.alloc(problem.o().extent_bytes().0 as usize)?;
        o.fill(&self.stream, 0xFF)?;
        let [q_descale, k_descale, v_descale] = descales;
        let tensors = Tensors::new([("q", q), ("k", k), ("v", v)], [("o", &mut o)]);
        let tensors = tensors.input("q_descale", q_descale).input("k_descale", k_descale);
        let tensors = tensors.input("v_descale", v_descale).input("v_mean", v_mean);
        forward.run(&self.stream, tensors, &mut workspace)?;
        let o: Vec<f16> = o.download(&self.stream)?;
        let o = Array4::from_shape_vec(problem.o().shape.dims(), o).expect("one element each");
        Ok(o.mapv(f16::to_f32))
    }

    fn upload<T: Scalar>(&self, x: &Array4<T>) -> Result<DeviceBuffer, HostError> {
        upload(&self.device, &self.stream, x.view())
    }
}

/// A tensor to quantize.
#[derive(Clone, Copy)]
enum Tensor<'a> {
    /// Q or K, and the orthogonal matrix that both are multiplied by, if any.
    Qk(Option<&'a Incoherent>),
    /// V, which is transposed.
    V,
}

/// How `tensor` is quantized.
fn quantize_problem(
    x: &Array4<f16>,
    recipe: Recipe,
    tensor: Tensor<'_>,
) -> Result<QuantizeProblem, Box<dyn Error>> {
    let (batch, seqlen, heads, head_dim) = x.dim();
    let spec = QuantizeSpec::contiguous(Dtype::F16, Shape { batch, seqlen, heads, head_dim });
    let spec = spec.scaling(if recipe.blocks { Scaling::Block { rows: BLOCK } } else { Scaling::Tensor });
    let spec = match tensor {
        Tensor::Qk(None) => spec,
        Tensor::Qk(Some(transform)) => spec.signs(transform.signs().expect("head_dim is at most 256")),
        Tensor::V if recipe.v_channels => spec.scaling(Scaling::Channel).transposed(),
        Tensor::V => spec.transposed(),
    };
    Ok(spec.validate().map_err(fa3::Error::from)?)
}

/// `problem` with e4m3 inputs and O in f16.
fn e4m3_spec(problem: &Problem) -> ProblemSpec {
    let mut spec = ProblemSpec::dense(Dtype::E4m3, problem.q().shape, problem.k().shape);
    spec.o.dtype = Dtype::F16;
    spec
}

/// `problem` with inputs quantized by `recipe`.
fn quantized_problem(problem: &Problem, recipe: Recipe) -> Result<Problem, ProblemError> {
    let spec = e4m3_spec(problem).transposed_v();
    let spec = if recipe.blocks { spec.block_scales(BLOCK) } else { spec };
    if recipe.v_channels { spec.v_channels() } else { spec }.validate()
}

#[cfg(test)]
mod tests {
    use super::super::method::{Kernel, Method};
    use super::super::table;
    use super::*;
    use fa3_sched::{DeviceLimits, forward, quantize};

    /// Every problem for the GPU has a kernel.
    #[test]
    fn kernels_take_every_problem() {
        let limits = DeviceLimits::h100_sxm();
        let shape = Shape { batch: 1, seqlen: 1000, heads: 1, head_dim: table::HEAD_DIM };
        let half = ProblemSpec::dense(Dtype::F16, shape, shape).validate().unwrap();
        let x = Array4::from_elem(shape.dims(), f16::ONE);
        let kernels: Vec<Kernel> = Method::ALL.into_iter().filter_map(Method::kernel).collect();
        assert_eq!(kernels.len(), 5);
        for kernel in kernels {
            let Kernel::Fp8(recipe) = kernel else {
                forward::Plan::new(&half, &limits).unwrap();
                continue;
            };
            let problem = quantized_problem(&half, recipe).unwrap();
            assert_eq!(problem.o().dtype, Dtype::F16);
            forward::Plan::new(&problem, &limits).unwrap();
            let transform = recipe.transform(table::HEAD_DIM, 1);
            let [qk, v] = [Tensor::Qk(transform.as_ref()), Tensor::V]
                .map(|tensor| quantize_problem(&x, recipe, tensor).unwrap());
            for problem in [&qk, &v] {
                quantize::Plan::new(problem, &limits).unwrap();
            }
            // The quantizer writes the sizes that attention reads.
            assert_eq!(v.codes_bytes(), problem.v_bytes());
            assert_eq!(qk.codes_bytes(), problem.q().extent_bytes());
            let scales = |problem: &QuantizeProblem| match problem.scales_shape() {
                // The tensor's one scale is repeated for each head.
                Some([1, 1, 1]) | None => vec![1, 1],
                Some(shape) => Vec::from(shape),
            };
            assert_eq!([scales(&qk), scales(&qk), scales(&v)], problem.descale_shapes());
            assert_eq!(v.mean_shape(), problem.v_mean_shape());
        }
        let problem = e4m3_spec(&half).validate().unwrap();
        forward::Plan::new(&problem, &limits).unwrap();
    }
}
