//! Incoherent processing: a random orthogonal matrix that spreads outliers (§3.3).

use fa3_types::Signs;
use ndarray::NdFloat;

/// M = D · H, the random orthogonal matrix of incoherent processing: D = diag(±1), H a Hadamard matrix.
///
/// Q M and K M have the scores of Q and K, (Q M)(K M)ᵀ = Q Kᵀ, but every entry is a random sum over a row, so one large
/// entry no longer sets the scale of all others.
///
/// H is the Sylvester-Hadamard matrix over √d if d is a power of two, and every entry of M is ±1/√d. Otherwise let w be
/// the largest power of two below d. Then M = D · H_lead · D' · H_trail, where H_lead is the Hadamard matrix of width w
/// on the leading w entries, and H_trail on the trailing ones. M is orthogonal because each factor is. M spreads every
/// entry over at least w entries because the two ranges overlap, and takes O(d log d) operations. Without the second
/// random signs D', the overlap could reassemble an entry that the first step spread. An entry of M is 0, ±1/√w, or a
/// sum of at most w random signs over w. Such a sum is above t/√w with probability at most 2 exp(−t²/2) (Hoeffding's
/// inequality).
#[derive(Clone, Debug, PartialEq)]
pub struct Incoherent {
    /// The entries where D is −1.
    negate: Vec<bool>,
    /// The entries where D' is −1; empty if d is a power of two.
    negate_between: Vec<bool>,
}

impl Incoherent {
    /// The matrix for rows of `head_dim` entries; the same seed gives the same signs everywhere.
    pub fn new(head_dim: usize, seed: u64) -> Incoherent {
        let signs = |from: usize, count: usize| {
            (from..from + count).map(|i| splitmix64(seed, i as u64) >> 63 == 1).collect()
        };
        let between = if head_dim == largest_power_of_two(head_dim) { 0 } else { head_dim };
        Incoherent { negate: signs(0, head_dim), negate_between: signs(head_dim, between) }
    }

    /// The head dimension d.
    pub fn head_dim(&self) -> usize {
        self.negate.len()
    }

    /// The signs as bits, as a kernel takes them. `None` for more than 256 entries.
    pub fn signs(&self) -> Option<Signs> {
        let words = |negate: &[bool]| {
            let mut words = [0u32; 8];
            negate.iter().enumerate().for_each(|(i, &negate)| words[i / 32] |= u32::from(negate) << (i % 32));
            words
        };
        (self.head_dim() <= 256)
            .then(|| Signs { leading: words(&self.negate), between: words(&self.negate_between) })
    }

    /// Computes row ← row · M.
    ///
    /// # Panics
    /// Unless the row has [`Incoherent::head_dim`] entries.
    pub fn apply<F: NdFloat>(&self, row: &mut [F]) {
        assert_eq!(row.len(), self.head_dim(), "the row's length is not the transform's head_dim");
        let w = largest_power_of_two(row.len());
        flip_signs(row, &self.negate);
        walsh_hadamard(&mut row[..w]);
        if w < row.len() {
            let trailing = row.len() - w;
            flip_signs(row, &self.negate_between);
            walsh_hadamard(&mut row[trailing..]);
        }
    }

    /// Computes row ← row · Mᵀ, the inverse of [`Incoherent::apply`].
    ///
    /// # Panics
    /// Unless the row has [`Incoherent::head_dim`] entries.
    pub fn invert<F: NdFloat>(&self, row: &mut [F]) {
        assert_eq!(row.len(), self.head_dim(), "the row's length is not the transform's head_dim");
        let w = largest_power_of_two(row.len());
        if w < row.len() {
            let trailing = row.len() - w;
            walsh_hadamard(&mut row[trailing..]);
            flip_signs(row, &self.negate_between);
        }
        walsh_hadamard(&mut row[..w]);
        flip_signs(row, &self.negate);
    }
}

/// The largest power of two that is not above d; 0 for 0.
fn largest_power_of_two(d: usize) -> usize {
    d.checked_ilog2().map_or(0, |log| 1 << log)
}

fn flip_signs<F: NdFloat>(row: &mut [F], negate: &[bool]) {
    for (x, &negate) in row.iter_mut().zip(negate) {
        *x = if negate { -*x } else { *x };
    }
}

/// Computes x ← x · H / √n for n = x.len(), a power of two or 0: log n rounds of sums and differences. H is symmetric,
/// so the transform is its own inverse.
fn walsh_hadamard<F: NdFloat>(x: &mut [F]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let length = x.iter().fold(F::zero(), |count, _| count + F::one());
    let factor = length.sqrt().recip();
    x.iter_mut().for_each(|x| *x *= factor);
}

/// Number `index` of the stream `seed` of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators, OOPSLA 2014).
fn splitmix64(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::normal;

    /// Every head dimension that the library supports.
    fn head_dims() -> impl Iterator<Item = usize> {
        (8..=576).step_by(8)
    }

    /// M row by row, from its action on unit vectors.
    fn matrix(incoherent: &Incoherent) -> Vec<Vec<f64>> {
        let d = incoherent.head_dim();
        let image = |i: usize| {
            let mut unit = vec![0.0; d];
            unit[i] = 1.0;
            incoherent.apply(&mut unit);
            unit
        };
        (0..d).map(image).collect()
    }

    fn dot(x: &[f64], y: &[f64]) -> f64 {
        x.iter().zip(y).map(|(x, y)| x * y).sum()
    }

    fn doubles(row: Vec<f32>) -> Vec<f64> {
        row.into_iter().map(f64::from).collect()
    }

    #[test]
    fn splitmix64_is_the_published_generator() {
        // The first numbers of the reference implementation (Vigna, splitmix64.c) for the seed 1234567.
        let published = [6457827717110365317, 3203168211198807973, 9817491932198370423];
        assert_eq!([0, 1, 2].map(|i| splitmix64(1234567, i)), published);
    }

    #[test]
    fn powers_of_two_are_the_sylvester_matrix_times_signs() {
        for d in [8, 16, 64, 128, 256, 512] {
            let incoherent = Incoherent::new(d, 3);
            for (i, row) in matrix(&incoherent).into_iter().enumerate() {
                let sign = if incoherent.negate[i] { -1.0 } else { 1.0 };
                for (j, x) in row.into_iter().enumerate() {
                    // Sylvester's construction: entry (i, j) is -1 to the power of the number of binary ones that i and
                    // j share.
                    let sylvester = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                    assert!((x - sign * sylvester / (d as f64).sqrt()).abs() < 1e-15);
                }
            }
        }
    }

    #[test]
    fn it_is_orthogonal_and_its_inverse_undoes_it() {
        for d in head_dims() {
            let incoherent = Incoherent::new(d, d as u64);
            let x = doubles(normal(d, 1));
            let mut y = x.clone();
            incoherent.apply(&mut y);
            let norm = dot(&x, &x);
            assert!((dot(&y, &y) - norm).abs() < 1e-13 * norm, "{d}");
            incoherent.invert(&mut y);
            assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 1e-14 * norm), "{d}");
        }
        for d in [24, 72, 96] {
            let m = matrix(&Incoherent::new(d, 9));
            for (i, row) in m.iter().enumerate() {
                for (j, other) in m.iter().enumerate() {
                    assert!((dot(row, other) - f64::from(u8::from(i == j))).abs() < 1e-14);
                }
            }
        }
    }

    #[test]
    fn signs_are_the_bits_of_words() {
        let incoherent = Incoherent::new(96, 9);
        let Signs { leading, between } = incoherent.signs().unwrap();
        let bit = |words: [u32; 8], i: usize| words[i / 32] >> (i % 32) & 1 == 1;
        assert!((0..96).all(|i| bit(leading, i) == incoherent.negate[i]));
        assert!((0..96).all(|i| bit(between, i) == incoherent.negate_between[i]));
        assert_eq!(Incoherent::new(128, 9).signs().unwrap().between, [0; 8]);
        assert_eq!(Incoherent::new(264, 9).signs(), None);
    }

    #[test]
    fn scores_stay() {
        for d in head_dims() {
            let incoherent = Incoherent::new(d, 5);
            let (mut q, mut k) = (normal(d, 1), normal(d, 2));
            let before = dot(&doubles(q.clone()), &doubles(k.clone()));
            let (q_norm, k_norm) = (doubles(q.clone()), doubles(k.clone()));
            incoherent.apply(&mut q);
            incoherent.apply(&mut k);
            let after = dot(&doubles(q), &doubles(k));
            // Each of at most 2 · (log2 d + 1) roundings moves a row by at most 2^-24 of its norm.
            let rounding = 4.0 * f64::from(d.ilog2() + 2) * 2f64.powi(-24);
            let limit = rounding * (dot(&q_norm, &q_norm) * dot(&k_norm, &k_norm)).sqrt();
            assert!((after - before).abs() <= limit, "{d}: {before} {after}");
        }
    }

    #[test]
    fn an_outlier_is_spread() {
        for d in head_dims().step_by(3) {
            let w = largest_power_of_two(d) as f64;
            // An entry is either ±1/√w, or below 6 standard deviations, which no seed should exceed.
            let limit = if d.is_power_of_two() { 1.000_000_1 } else { 6.0 } / w.sqrt();
            let largest =
                matrix(&Incoherent::new(d, 17)).into_iter().flatten().fold(0.0, |m: f64, x| m.max(x.abs()));
            assert!(largest <= limit, "{d}: {largest} {limit}");
        }
    }

    #[test]
    fn seeds_differ_and_repeat() {
        assert_eq!(Incoherent::new(96, 1), Incoherent::new(96, 1));
        assert_ne!(Incoherent::new(96, 1), Incoherent::new(96, 2));
        let negative = Incoherent::new(4096, 1).negate.into_iter().filter(|&negate| negate).count();
        assert!((1900..2200).contains(&negative), "{negative}"); // 4096 / 2 ± 4.6 standard deviations
    }
}
