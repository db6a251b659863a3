//! Launch arguments as plain data: one [`ArgValue`] per parameter, and a grid.

use crate::{BoxShape, ParamInfo, ParamKind, TensorMapError, TensorView};

/// The value of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum ArgValue {
    /// For [`ParamKind::U32`].
    U32(u32),
    /// For [`ParamKind::U64`].
    U64(u64),
    /// For [`ParamKind::F32`].
    F32(f32),
    /// For [`ParamKind::Pointer`]: an address in global memory.
    Pointer(u64),
    /// For [`ParamKind::TensorMap`].
    Tensor(TensorView),
}

impl ArgValue {
    /// Name of the kind of parameter that takes this value.
    pub fn kind(&self) -> &'static str {
        match self {
            ArgValue::U32(_) => "u32",
            ArgValue::U64(_) => "u64",
            ArgValue::F32(_) => "f32",
            ArgValue::Pointer(_) => "pointer",
            ArgValue::Tensor(_) => "tensor",
        }
    }
}

/// Arguments that do not fit the parameters.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum ArgError {
    #[error("{given} arguments for {expected} parameters")]
    Count { given: usize, expected: usize },
    #[error("there is no argument for parameter {param}")]
    Missing { param: String },
    #[error("the kernel has more than one parameter {param}")]
    Twice { param: String },
    #[error("there is no parameter {name} for the argument of that name")]
    Unknown { name: String },
    #[error("buffer {index} is none of the program's {count}")]
    Buffer { index: usize, count: usize },
    #[error("parameter {param} is a {expected}, its argument a {given}")]
    Kind { param: String, expected: &'static str, given: &'static str },
    #[error("tensor map {param}: {error}")]
    Tensor { param: String, error: TensorMapError },
    #[error("a grid of {x} x {y} x {z} ctas; x must be 1 to 2^31 - 1, y and z 1 to 65535")]
    Grid { x: u32, y: u32, z: u32 },
    #[error("{x} ctas are not whole clusters of {cluster}")]
    Clusters { x: u32, cluster: u32 },
}

/// Checks `args` against the parameters of a kernel.
///
/// # Errors
/// The first argument that does not fit.
pub fn check_args(params: &[ParamInfo], args: &[ArgValue]) -> Result<(), ArgError> {
    if params.len() != args.len() {
        return Err(ArgError::Count { given: args.len(), expected: params.len() });
    }
    params.iter().zip(args).try_for_each(|(param, arg)| check_arg(param, arg))
}

fn check_arg(ParamInfo { name, kind }: &ParamInfo, arg: &ArgValue) -> Result<(), ArgError> {
    let expected = match (kind, arg) {
        (ParamKind::U32, ArgValue::U32(_))
        | (ParamKind::U64, ArgValue::U64(_))
        | (ParamKind::F32, ArgValue::F32(_))
        | (ParamKind::Pointer(_), ArgValue::Pointer(_)) => return Ok(()),
        (ParamKind::TensorMap(shape), ArgValue::Tensor(view)) => return check_tensor(name, shape, view),
        (ParamKind::U32, _) => "u32",
        (ParamKind::U64, _) => "u64",
        (ParamKind::F32, _) => "f32",
        (ParamKind::Pointer(_), _) => "pointer",
        (ParamKind::TensorMap(_), _) => "tensor",
    };
    Err(ArgError::Kind { param: name.clone(), expected, given: arg.kind() })
}

fn check_tensor(name: &str, shape: &BoxShape, view: &TensorView) -> Result<(), ArgError> {
    view.check(shape).map_err(|error| ArgError::Tensor { param: name.to_owned(), error })
}

/// Checks a grid of CTAs for a kernel with clusters of `cluster`.
///
/// # Errors
/// A dimension outside the hardware's limits, or a part of a cluster.
pub fn check_grid([x, y, z]: [u32; 3], cluster: u32) -> Result<(), ArgError> {
    let limits = [1..=i32::MAX as u32, 1..=65535, 1..=65535];
    if ![x, y, z].iter().zip(limits).all(|(given, limit)| limit.contains(given)) {
        return Err(ArgError::Grid { x, y, z });
    }
    if cluster == 0 || !x.is_multiple_of(cluster) {
        return Err(ArgError::Clusters { x, cluster });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Elem, Swizzle};

    #[test]
    fn arguments_fit_their_parameters_or_say_why_not() {
        let param = |name: &str, kind| ParamInfo { name: name.to_owned(), kind };
        let shape = BoxShape::new(Elem::F16, &[64, 8], Swizzle::B128);
        let params = [
            param("n", ParamKind::U32),
            param("x", ParamKind::Pointer(Elem::F32)),
            param("k", ParamKind::TensorMap(shape)),
        ];
        let view = TensorView::contiguous(0, &[64, 100], Elem::F16);
        let good = [ArgValue::U32(3), ArgValue::Pointer(256), ArgValue::Tensor(view.clone())];
        assert_eq!(check_args(&params, &good), Ok(()));
        assert_eq!(check_args(&params, &good[..2]), Err(ArgError::Count { given: 2, expected: 3 }));

        let mut wrong = good.clone();
        wrong[1] = ArgValue::U64(256);
        let kind = ArgError::Kind { param: "x".to_owned(), expected: "pointer", given: "u64" };
        assert_eq!(check_args(&params, &wrong), Err(kind));

        let mut wrong = good;
        wrong[2] = ArgValue::Tensor(TensorView { address: 2, ..view });
        let error = TensorMapError::Address { given: 2 };
        assert_eq!(check_args(&params, &wrong), Err(ArgError::Tensor { param: "k".to_owned(), error }));
    }

    #[test]
    fn grids_are_whole_clusters_within_limits() {
        assert_eq!(check_grid([132, 1, 1], 2), Ok(()));
        assert_eq!(check_grid([131, 1, 1], 2), Err(ArgError::Clusters { x: 131, cluster: 2 }));
        assert_eq!(check_grid([1, 65536, 1], 1), Err(ArgError::Grid { x: 1, y: 65536, z: 1 }));
        assert_eq!(check_grid([0, 1, 1], 1), Err(ArgError::Grid { x: 0, y: 1, z: 1 }));
    }
}
