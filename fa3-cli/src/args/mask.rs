//! Mask options: one mask, or a list.

use fa3_types::{Mask, ProblemError};

use super::number::signed_size;

/// Which keys a query may see.
#[derive(Debug, clap::Args)]
pub(crate) struct MaskArgs {
    /// Each query sees the keys up to its own position; the last query is aligned with the last key
    #[arg(long)]
    causal: bool,
    /// Each query sees L keys before its own position and R after it; -1 is unbounded, k is 1024. With --causal it sees
    /// none after it
    #[arg(long, value_name = "L,R", allow_hyphen_values = true, value_parser = window)]
    window: Option<Mask>,
    /// Each query sees only keys of its own chunk of N keys; k is 1024
    #[arg(long, value_name = "N", value_parser = chunk)]
    chunk: Option<Mask>,
}

/// A list of masks: all that are given, or no mask and causal if none is.
#[derive(Debug, clap::Args)]
pub(crate) struct MaskList {
    /// Without a mask
    #[arg(long)]
    no_mask: bool,
    /// Each query sees the keys up to its own position; the last query is aligned with the last key
    #[arg(long)]
    causal: bool,
    /// Each query sees L keys before its own position and R after it; -1 is unbounded, k is 1024; may be given again
    #[arg(long, value_name = "L,R", allow_hyphen_values = true, value_parser = window)]
    window: Vec<Mask>,
    /// Each query sees the keys of its own chunk of N keys up to its own position; k is 1024; may be given again
    #[arg(long, value_name = "N", value_parser = chunk)]
    chunk: Vec<Mask>,
}

/// Why a window or a chunk cannot be parsed.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum MaskError {
    #[error("expected two whole numbers L,R from -1 to 2^32 - 1, as in 256,0")]
    NotAPair,
    #[error("expected a whole number of keys from 1 to 2^32 - 1, as in 8k")]
    NotANumber,
    #[error(transparent)]
    Size(#[from] ProblemError),
}

impl MaskArgs {
    /// The mask that the options describe, the intersection of all that are given.
    pub(crate) fn mask(&self) -> Mask {
        let causal = if self.causal { Mask::Causal } else { Mask::None };
        let masks = [self.window, self.chunk].into_iter().flatten();
        masks.fold(causal, |mask, other| mask.and(other).expect("one option alone gives chunks"))
    }
}

impl MaskList {
    /// The masks that the options describe.
    pub(crate) fn masks(&self) -> Vec<Mask> {
        let all = !self.no_mask && !self.causal && self.window.is_empty() && self.chunk.is_empty();
        let none = (self.no_mask || all).then_some(Mask::None);
        let causal = (self.causal || all).then_some(Mask::Causal);
        let chunks = self.chunk.iter().map(|chunk| Mask::Causal.and(*chunk).expect("one of them has chunks"));
        none.into_iter().chain(causal).chain(self.window.iter().copied()).chain(chunks).collect()
    }
}

fn window(text: &str) -> Result<Mask, MaskError> {
    let number = |text: &str| signed_size(text.trim()).map_err(|_| MaskError::NotAPair);
    let (left, right) = text.split_once(',').ok_or(MaskError::NotAPair)?;
    Ok(Mask::from_window(number(left)?, number(right)?)?)
}

fn chunk(text: &str) -> Result<Mask, MaskError> {
    match signed_size(text.trim()).map_err(|_| MaskError::NotANumber)? {
        0 => Err(MaskError::NotANumber),
        keys => Ok(Mask::from_chunk(keys)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The two options both hide keys, and neither undoes the other.
    #[test]
    fn a_causal_window() {
        let mask = |causal, window| MaskArgs { causal, window, chunk: None }.mask();
        let window = Mask::from_window(3, 7).ok();
        assert_eq!([mask(false, None), mask(true, None)], [Mask::None, Mask::Causal]);
        assert_eq!(mask(false, window), Mask::Window { left: Some(3), right: Some(7) });
        assert_eq!(mask(true, window), Mask::Window { left: Some(3), right: Some(0) });
    }

    #[test]
    fn chunks() {
        assert_eq!(chunk("8k"), Mask::from_chunk(8192).map_err(MaskError::Size));
        assert_eq!(chunk("-1"), Err(MaskError::Size(ProblemError::AttentionChunk { given: -1 })));
        assert_eq!([chunk("0"), chunk("1,2")], [const { Err(MaskError::NotANumber) }; 2]);
        let both =
            MaskArgs { causal: true, window: Mask::from_window(3, 7).ok(), chunk: chunk("5").ok() }.mask();
        assert_eq!(both, Mask::window(Some(3), Some(0)).and(Mask::from_chunk(5).unwrap()).unwrap());
        let list =
            MaskList { no_mask: false, causal: false, window: vec![], chunk: vec![chunk("5").unwrap()] };
        assert_eq!(list.masks(), [Mask::Causal.and(chunk("5").unwrap()).unwrap()]);
    }

    #[test]
    fn windows() {
        assert_eq!(window("256,0"), Ok(Mask::Window { left: Some(256), right: Some(0) }));
        assert_eq!(window("-1, 3"), Ok(Mask::Window { left: None, right: Some(3) }));
        assert_eq!(window("-1,-1"), Ok(Mask::None));
        assert_eq!(window("4k,0"), window("4096,0"));
        for text in ["5", "5,", "1,2,3", "a,b", "99999999999999999999,0", ""] {
            assert_eq!(window(text), Err(MaskError::NotAPair), "{text}");
        }
        assert_eq!(window("-2,0"), Err(MaskError::Size(ProblemError::WindowSize { given: -2 })));
    }
}
