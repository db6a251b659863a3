//! The methods of Table 3 on Q, K and V read from a file, such as a model's activations.

use std::error::Error;
use std::path::{Path, PathBuf};

use fa3_ref::norms::ErrorNorms;
use ndarray::Array4;
use serde::Serialize;

use super::sample::Sample;
use super::table::{self, Row};
use crate::console;
use crate::run;

/// The element types that are read.
const TYPES: &str = "F64, F32, F16 or BF16";

/// The measurements.
#[derive(Debug, Serialize)]
pub(super) struct Activations {
    input: PathBuf,
    gpu: Option<String>,
    /// The root mean square of O in f64.
    rms: f64,
    table: Vec<Row>,
}

/// Reads q, k and v from a safetensors file, each (batch, seqlen, heads, head_dim). `prefix` precedes their names in
/// the file. The numbers are taken as exact.
pub(super) fn read(path: &Path, prefix: &str) -> Result<Sample, Box<dyn Error>> {
    let tensor = |name| -> Result<Array4<f64>, Box<dyn Error>> {
        let name = format!("{prefix}{name}");
        let tensor = run::read_tensor(path, Some(&name), &name, TYPES)?;
        let dims = tensor.dims()?;
        Ok(tensor.expected(ndarray::Dim(dims))?)
    };
    Ok(Sample::new(tensor("q")?, tensor("k")?, tensor("v")?)?)
}

impl Activations {
    pub(super) fn new(input: &Path, gpu: Option<&str>, sample: &Sample, table: Vec<Row>) -> Activations {
        Activations { input: input.into(), gpu: gpu.map(str::to_owned), rms: rms(sample), table }
    }
}

/// The root mean square of O.
fn rms(sample: &Sample) -> f64 {
    ErrorNorms::of(&Array4::<f64>::zeros(sample.exact.o.dim()), &sample.exact.o).rmse
}

/// The lines above the table.
pub(super) fn head(input: &Path, sample: &Sample, seeds: usize, gpu: Option<&str>) -> String {
    let (input, problem) = (console::escaped(&input.to_string_lossy()), &sample.problem);
    let (q, v, rms) = (problem.q().shape, problem.v().shape, rms(sample));
    let lines = format!(
        "Error of O (RMSE against f64), {seeds} seeds of random signs;\n{input}: Q {q}, K and V {v}\n\
         the root mean square of O is {rms:.3e}"
    );
    table::head(&lines, gpu, "")
}
