//! Tests of the facade by what it makes public. They are one binary, which links once.

mod attention;
mod backward;
mod cache;
mod combine;
mod cpu;
mod features;
mod fp8;
mod output;
mod quantize;
mod setters;
