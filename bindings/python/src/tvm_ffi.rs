//! Calls by tvm-ffi's C interface: one function computes every operation over DLPack's tensors.
//!
//! `run(operation, name, value, name, value, ...)` gets the tensors and the options of an operation, as
//! [`Operation`](crate::operation::Operation) has them, in any order. A value that is a tensor is a tensor of the call,
//! any other an option. An output of attention or its gradients whose value is None is allocated, and returned. On the
//! CPU the call is computed when the function returns. On a GPU it is on the stream that tvm-ffi's environment has for
//! the device.
#![allow(unsafe_code, reason = "tvm-ffi passes plain pointers")]

mod abi;
mod environment;
mod given;

use std::ffi::{c_int, c_void};

use fa3_call::{Error, Options, Place, caught};

use crate::buffers::Buffers;
use crate::dlpack::{CPU, CUDA};
use crate::error::refused;
use crate::operation;
use abi::{Any, List};
use environment::{Environment, Owned};
use given::Given;

/// The function `run` of the module.
///
/// # Safety
/// The arguments are tvm-ffi's, and `result` can be written.
#[unsafe(export_name = "__tvm_ffi_run")]
unsafe extern "C" fn run(_module: *mut c_void, arguments: *const Any, count: i32, result: *mut Any) -> c_int {
    let arguments = List { first: arguments, count: count.into() };
    // SAFETY: the caller guarantees the arguments.
    let done = caught(|| unsafe { compute(arguments.elements()) });
    match done.unwrap_or_else(|message| Err(Error::Panic { message })) {
        Ok(made) => {
            // SAFETY: the caller guarantees the result.
            unsafe { result.write(made) };
            0
        }
        Err(error) => environment::raise(&error),
    }
}

/// Computes a call, and returns the outputs that were allocated.
///
/// # Safety
/// The arguments are tvm-ffi's.
///
/// # Errors
/// The call is invalid, or the driver or tvm-ffi reports an error.
unsafe fn compute(arguments: &[Any]) -> Result<Any, Error> {
    // SAFETY: the caller guarantees the arguments.
    let given = unsafe { Given::of(arguments) }?;
    let computes = operation::computation(given.operation, &Options::new(&given.options))?;
    let device = given.device()?;
    let place = match device {
        (CPU, _) => Place::Cpu,
        (CUDA, number @ 0..) => Place::Stream { device: number as u32, stream: environment::stream(number)? },
        (kind, number) => {
            return Err(refused(format!("tensors are on DLPack's device {kind}:{number}, expected 1 or 2")));
        }
    };
    let mut buffers = Buffers { place, given: Vec::with_capacity(12) };
    given.add_to(&mut buffers)?;
    given.check_lse()?;
    let mut made = Vec::with_capacity(given.wanted.len());
    for &name in &given.wanted {
        let output = given.output(name)?;
        // SAFETY: it is a tensor, which lives until the call is over.
        if let Some(tensor) = unsafe { output.0.as_tensor() } {
            buffers.given.push((name, tensor.buffer(name)?));
        }
        made.push(output);
    }
    computes.compute_for(&Environment(device), &mut buffers)?;
    Owned::result(made)
}
