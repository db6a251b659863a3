//! Plans and tables tested by their public interface: for any lengths, and for the largest numbers.

mod extremes;
mod packed;
