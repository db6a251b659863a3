//! The speed of matrix products on the CPU. The crate's unit tests are compiled without optimisation, so this file
//! compiles the module anew.

use std::time::{Duration, Instant};

use pulp::Arch;

#[allow(dead_code, reason = "the crate has further callers")]
#[path = "../src/cpu/product.rs"]
mod product;

use product::{Left, Panels, Product, Width};

/// The shortest time of several calls.
fn least(mut call: impl FnMut()) -> Duration {
    let times = (0..20).map(|_| {
        let start = Instant::now();
        call();
        start.elapsed()
    });
    times.min().expect("there are twenty calls")
}

/// The inner loop keeps vectors in registers, also in a development build, where one function that is not inlined
/// costs a factor of five. With AVX2 a product takes a twentieth of the scalar time, or a twelfth on a busy
/// machine. With a function that is not inlined it takes a fourth, so the bound lies in between.
#[test]
fn vectors_are_multiplied_in_registers() {
    const SIZE: usize = 192;
    if Arch::new().dispatch(Width) < 16 {
        eprintln!("skipped: no AVX2");
        return;
    }
    let [left, right] =
        [3, 7].map(|step| -> Vec<f32> { (0..SIZE * SIZE).map(|i| (i * step % 11) as f32 - 5.0).collect() });
    let (mut panels, mut vectors, mut scalars) =
        (Panels::new(), vec![0.0; SIZE * SIZE], vec![0.0; SIZE * SIZE]);
    panels.pack([SIZE, SIZE], |i, row| row.copy_from_slice(&right[i * SIZE..][..SIZE]));
    let by_vectors = least(|| Product::new(SIZE, Left::Rows(&left, SIZE), &panels, &mut vectors).run());
    let by_scalars = least(|| {
        for (i, to) in scalars.iter_mut().enumerate() {
            let (row, column) = (i / SIZE, i % SIZE);
            *to = (0..SIZE).fold(0.0, |sum, k| sum + left[row * SIZE + k] * right[k * SIZE + column]);
        }
    });
    assert_eq!(vectors, scalars, "sums of small integers are exact");
    assert!(by_vectors * 7 < by_scalars, "{by_vectors:?} by vectors, {by_scalars:?} by scalars");
}
