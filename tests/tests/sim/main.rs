//! Kernels that are right are found right under every schedule; kernels that are wrong are found out.

mod instructions;
mod numbers;
mod probes;
mod programs;
mod rules;
mod runs;
mod tiles;
mod timeline;
mod timeline_trace;
