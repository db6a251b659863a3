//! Kernels that are right give the right results under every schedule; kernels that are wrong are found out.

mod attention;
mod idioms;
mod instructions;
mod mutants;
mod numbers;
mod rules;
mod samples;
mod tiles;
