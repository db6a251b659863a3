//! Times of launches on a GPU, back to back.

use fa3::cuda::{HostError, Stream};

/// Milliseconds of launches that one measurement takes, unless the user chooses.
pub(crate) const SLICE_MS: f64 = 25.0;

/// Launches that find out how long one takes, and the fewest that are timed.
const FEW: u32 = 3;

/// How many launches fill `slice_ms`, at least three. The GPU is warm afterwards.
///
/// # Errors
/// The errors of `launch`, and the driver's.
pub(crate) fn fill<E: From<HostError>>(
    stream: &Stream,
    slice_ms: f64,
    mut launch: impl FnMut() -> Result<(), E>,
) -> Result<u32, E> {
    time(stream, FEW, &mut launch)?;
    let millis = time(stream, FEW, &mut launch)?;
    Ok(((slice_ms / millis.max(1e-3)) as u32).max(FEW))
}

/// Milliseconds of one of `launches`, between two CUDA events.
///
/// # Errors
/// The errors of `launch`, and the driver's.
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
