//! Tests of the public API in one binary, which links once.

mod attention;
mod backward;
mod cache;
mod combine;
mod cpu;
mod expressions;
mod features;
mod fp8;
mod output;
mod quantize;
mod setters;
mod sparse;

use fa3::Scalar;
use ndarray::Array4;

fn wave<T: Scalar>(dims: (usize, usize, usize, usize), step: f32) -> Array4<T> {
    Array4::from_shape_fn(dims, |(b, s, h, d)| {
        T::from_f32((step * (11 * b + 7 * s + 3 * h + 5 * d) as f32).sin())
    })
}
