//! Plans and tables, tested through their public interface: for any lengths, and for the largest numbers.

mod extremes;
mod packed;
