//! Correct kernels have no findings under any schedule, and faulty kernels have the right finding.

mod instructions;
mod numbers;
mod probes;
mod programs;
mod rules;
mod runs;
mod tiles;
mod timeline;
mod timeline_trace;
