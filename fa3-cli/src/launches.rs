//! Timing of back-to-back launches on a GPU.

use fa3::cuda::{HostError, Stream};

/// The default time of a measurement in milliseconds.
pub(crate) const SLICE_MS: f64 = 25.0;

/// The number of launches that estimate the time of one launch, and the smallest number of launches to time.
const FEW: u32 = 3;

/// How many launches take `slice_ms`, at least three. Warms up the GPU.
pub(crate) fn fill<E: From<HostError>>(
    stream: &Stream,
    slice_ms: f64,
    mut launch: impl FnMut() -> Result<(), E>,
) -> Result<u32, E> {
    time(stream, FEW, &mut launch)?;
    let millis = time(stream, FEW, &mut launch)?;
    Ok(((slice_ms / millis.max(1e-3)) as u32).max(FEW))
}

/// Milliseconds per launch, from CUDA events around `launches` launches.
pub(crate) fn time<E: From<HostError>>(
    stream: &Stream,
    launches: u32,
    mut launch: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    let start = stream.record()?;
    (0..launches).try_for_each(|_| launch())?;
    let end = stream.record()?;
    Ok(f64::from(end.millis_since(&start)?) / f64::from(launches))
}
