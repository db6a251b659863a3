//! Head groups: the assignment of query heads to key/value heads.

use crate::ProblemError;

/// Query and key/value head counts, `q` a multiple of `kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heads {
    q: usize,
    kv: usize,
}

/// The kind of sharing between query heads and key/value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadGrouping {
    /// Multi-head attention: every query head has its own K and V.
    Mha,
    /// Grouped-query attention: groups of query heads share K and V.
    Gqa,
    /// Multi-query attention: one K and V for all query heads.
    Mqa,
}

impl Heads {
    /// # Errors
    /// [`ProblemError::HeadsNotDivisible`] unless `kv` is positive and divides `q`.
    pub fn new(q: usize, kv: usize) -> Result<Heads, ProblemError> {
        if q == 0 || kv == 0 || !q.is_multiple_of(kv) {
            return Err(ProblemError::HeadsNotDivisible { heads_q: q, heads_kv: kv });
        }
        Ok(Heads { q, kv })
    }

    /// Number of query heads.
    pub fn q(self) -> usize {
        self.q
    }

    /// Number of key/value heads.
    pub fn kv(self) -> usize {
        self.kv
    }

    /// Query heads that share one key/value head.
    pub fn group_size(self) -> usize {
        self.q / self.kv
    }

    /// The key/value head that query head `head_q` reads.
    pub fn kv_head(self, head_q: usize) -> usize {
        head_q / self.group_size()
    }

    /// MHA, GQA or MQA.
    pub fn grouping(self) -> HeadGrouping {
        if self.q == self.kv {
            HeadGrouping::Mha
        } else if self.kv == 1 {
            HeadGrouping::Mqa
        } else {
            HeadGrouping::Gqa
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups() {
        let gqa = Heads::new(8, 2).unwrap();
        assert_eq!(gqa.group_size(), 4);
        assert_eq!([0, 3, 4, 7].map(|h| gqa.kv_head(h)), [0, 0, 1, 1]);
        assert_eq!(gqa.grouping(), HeadGrouping::Gqa);
        assert_eq!(Heads::new(8, 8).unwrap().grouping(), HeadGrouping::Mha);
        assert_eq!(Heads::new(8, 1).unwrap().grouping(), HeadGrouping::Mqa);
        assert_eq!(Heads::new(1, 1).unwrap().grouping(), HeadGrouping::Mha);
    }

    #[test]
    fn heads_that_do_not_divide_are_rejected() {
        for (q, kv) in [(8, 3), (2, 4), (0, 1), (1, 0), (0, 0)] {
            let error = Heads::new(q, kv).unwrap_err();
            assert_eq!(error, ProblemError::HeadsNotDivisible { heads_q: q, heads_kv: kv });
        }
    }
}
