//! Plans and tables by what is public: for any lengths, and for the largest numbers.

mod extremes;
mod packed;
