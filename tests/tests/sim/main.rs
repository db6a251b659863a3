//! Kernels that are right give the right results under every schedule; kernels that are wrong are found out.

mod attention;
mod copied;
mod idioms;
mod instructions;
#[path = "../ir/samples.rs"]
mod kernels;
mod mutants;
mod numbers;
#[path = "../ir/one_product.rs"]
mod one_product;
mod probes;
mod programs;
mod rules;
mod samples;
mod tiles;
mod timeline;
mod timeline_trace;
