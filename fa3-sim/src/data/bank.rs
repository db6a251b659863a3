//! Cost of an access to shared memory: 32 banks, each of which serves one word of 4 bytes at a time.

use smallvec::SmallVec;

const BANKS: u32 = 32;

/// The wavefronts of one access. `addresses` are the byte addresses of the lanes that take part, and each lane moves
/// `bytes` bytes (1 to 16).
///
/// Lanes that move at most 128 bytes together are served together: the whole warp with up to 4 bytes per lane, half a
/// warp with 8, a quarter with 16. They need as many wavefronts as the most loaded bank has different words. One word
/// is sent to any number of lanes at once.
///
/// `ldmatrix` and `stmatrix` of n matrices are accesses of 16 bytes by the first 8n lanes.
pub fn wavefronts(addresses: &[Option<u32>; 32], bytes: u32) -> u32 {
    let together = (32 * 4 / bytes).min(32) as usize;
    addresses.chunks(together).map(|lanes| Words::of(lanes, bytes).most_loaded_bank()).sum()
}

/// The wavefronts that the access would take without bank conflicts.
pub fn ideal_wavefronts(addresses: &[Option<u32>; 32], bytes: u32) -> u32 {
    (Words::of(addresses, bytes).words.len() as u32).div_ceil(BANKS)
}

/// Different words, in lists by bank.
struct Words {
    /// Each word, and the number of the previous word in its bank. Numbers begin with 1, and 0 means that there is no
    /// word.
    words: SmallVec<[(u32, u8); 4 * 32]>,
    /// The number of the last word in each bank.
    last: [u8; BANKS as usize],
    load: [u8; BANKS as usize],
}

impl Words {
    fn of(addresses: &[Option<u32>], bytes: u32) -> Words {
        let none = [0; BANKS as usize];
        let mut all = Words { words: SmallVec::new(), last: none, load: none };
        for address in addresses.iter().copied().flatten() {
            (address / 4..=address.saturating_add(bytes - 1) / 4).for_each(|word| all.add(word));
        }
        all
    }

    fn add(&mut self, word: u32) {
        let bank = (word % BANKS) as usize;
        let mut number = self.last[bank];
        while let Some(index) = number.checked_sub(1) {
            let (known, before) = self.words[usize::from(index)];
            if known == word {
                return;
            }
            number = before;
        }
        self.words.push((word, self.last[bank]));
        self.last[bank] = self.words.len() as u8;
        self.load[bank] += 1;
    }

    fn most_loaded_bank(&self) -> u32 {
        self.load.iter().copied().max().unwrap_or(0).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warp(address: impl Fn(u32) -> u32) -> [Option<u32>; 32] {
        std::array::from_fn(|lane| Some(address(lane as u32)))
    }

    #[test]
    fn contiguous_accesses_move_128_bytes_at_a_time() {
        for (bytes, expected) in [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)] {
            assert_eq!(wavefronts(&warp(|lane| 256 + bytes * lane), bytes), expected, "{bytes} bytes");
        }
    }

    /// With a stride of s words, gcd(s, 32) lanes share a bank.
    #[test]
    fn strided_accesses_conflict_as_often_as_banks_recur() {
        for (stride, expected) in [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (32, 32), (33, 1), (64, 32)] {
            assert_eq!(wavefronts(&warp(|lane| 4 * stride * lane), 4), expected, "stride {stride}");
        }
    }

    #[test]
    fn one_word_is_broadcast() {
        assert_eq!(wavefronts(&warp(|_| 64), 4), 1);
        assert_eq!(wavefronts(&warp(|lane| 128 * (lane / 16)), 4), 2);
        assert_eq!(wavefronts(&warp(|_| 64), 16), 4);
        assert_eq!(wavefronts(&[None; 32], 4), 0);
    }

    /// One 16-byte chunk in each of 8 rows of 128 bytes: 8 conflicts without swizzle, no conflict with it.
    #[test]
    fn swizzle_makes_matrices_free_of_conflicts() {
        for chunk in 0..8 {
            let plain = |lane| 128 * (lane % 8) + 16 * chunk;
            assert_eq!(wavefronts(&warp(plain), 16), 4 * 8);
            assert_eq!(wavefronts(&warp(|lane| fa3_ir::Swizzle::B128.apply(plain(lane))), 16), 4);
        }
        let mut one_matrix = [None; 32];
        (0..8).for_each(|row| one_matrix[row] = Some(1024 + 128 * row as u32));
        assert_eq!(wavefronts(&one_matrix, 16), 8);
    }
}
