//! The features of a problem, which every implementation must know.

use crate::names::names;
use crate::{Dtype, Granularity, IntervalsOfRow, LseForm, Problem, Sequences, ValueLayout};

names! {
    /// All features.
    const ALL;

    /// A property of a [`Problem`] that changes what is computed, or where tensors have it. Numbers and shapes are no
    /// features: every problem has them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum Feature {
        /// Bounded sides of a [`Mask`](crate::Mask), without chunks.
        Window = "a window",
        /// [`Mask::chunks`](crate::Mask::chunks).
        Chunks = "chunks",
        /// [`Mask::intervals`](crate::Mask::intervals).
        Intervals = "a mask of intervals",
        /// [`IntervalsOfRow::Tree`](crate::IntervalsOfRow::Tree).
        Tree = "a tree of new keys",
        /// [`IntervalsOfRow::Blocks`](crate::IntervalsOfRow::Blocks).
        Blocks = "lists of blocks of keys",
        /// [`Problem::softcap`].
        SoftCap = "a soft cap",
        /// [`Problem::score`].
        Score = "a function of scores",
        /// [`Problem::has_sink`].
        Sinks = "sinks",
        /// [`Problem::qv`].
        Qv = "qv",
        /// Q, K and V of e4m3.
        E4m3 = "q, k and v of e4m3",
        /// [`Problem::converts_keys`], from e4m3.
        E4m3Keys = "k and v of e4m3 beside q of 16 bits",
        /// [`Problem::converts_keys`], from int8.
        Int8Keys = "k and v of int8 beside q of 16 bits",
        /// [`Problem::v_scales`].
        RowScales = "rows of v in e4m3 with their own scales",
        /// [`Problem::token_scales`].
        TokenScales = "scales of tokens and heads",
        /// [`Problem::has_block_scales`].
        BlockScales = "scales of blocks",
        /// [`Problem::has_v_channels`].
        VChannels = "scales of channels of v",
        /// [`ValueLayout::Transposed`].
        TransposedV = "transposed v",
        /// [`Sequences::is_packed`].
        Packed = "packed sequences",
        /// [`Sequences::has_used`].
        Used = "sequences in use in part",
        /// [`Sequences::pages`].
        Pages = "keys in pages",
        /// [`Sequences::has_index`].
        Index = "cache_batch_idx",
        /// [`Sequences::has_leftpad`].
        Leftpad = "padding before keys",
        /// [`Sequences::list`].
        Lists = "lists of keys",
        /// [`Problem::extra`].
        Extra = "a second cache",
        /// A [`Problem::lse_form`] that is not the default.
        LseForm = "another form of LSE",
        /// [`Problem::has_max_logits`].
        MaxLogits = "max_logits",
    }
}

/// The features that a plan, an engine or a reference computes. It lists them one by one, so that existing
/// implementations refuse every new feature.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    who: &'static str,
    features: &'static [Feature],
}

/// A problem has a feature that is not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{who} cannot compute attention with {feature}")]
pub struct UnknownFeature {
    /// The name of the plan, the engine or the reference.
    pub who: &'static str,
    /// The feature.
    pub feature: Feature,
}

impl Known {
    /// The features that `who` computes, listed by name. Do not pass `Feature::ALL`.
    pub const fn new(who: &'static str, features: &'static [Feature]) -> Known {
        Known { who, features }
    }

    /// Checks that all features of a problem are known.
    ///
    /// # Errors
    /// [`UnknownFeature`] with the first feature that is unknown.
    ///
    /// ```
    /// use fa3_types::{Dtype, Feature, Known, ProblemSpec, Shape};
    ///
    /// const KNOWN: Known = Known::new("my kernel", &[Feature::Window]);
    /// let shape = Shape { batch: 1, seqlen: 64, heads: 2, head_dim: 64 };
    /// let causal = ProblemSpec::dense(Dtype::F16, shape, shape).causal();
    /// assert!(KNOWN.check(&causal.clone().validate()?).is_ok());
    /// let error = KNOWN.check(&causal.sink().validate()?).unwrap_err();
    /// assert_eq!(error.to_string(), "my kernel cannot compute attention with sinks");
    /// # Ok::<(), fa3_types::ProblemError>(())
    /// ```
    pub fn check(&self, problem: &Problem) -> Result<(), UnknownFeature> {
        match problem.features().find(|feature| !self.features.contains(feature)) {
            Some(feature) => Err(UnknownFeature { who: self.who, feature }),
            None => Ok(()),
        }
    }
}

impl Problem {
    /// The features that the problem has.
    pub fn features(&self) -> impl Iterator<Item = Feature> {
        // No `..` here: every new field becomes a feature, or is a number or a shape that every problem has.
        let Problem {
            q,
            k,
            v,
            v_layout,
            scales: [of_q, _, of_v],
            token_scales,
            qv,
            o: _,
            seqs_q,
            seqs_k,
            heads: _,
            mask,
            softmax_scale: _,
            softcap,
            score,
            sink,
            extra,
            lse,
            max_logits,
        } = self;
        let has_window = mask.chunks().is_none() && mask.reach() != (None, None);
        let of_data = mask.intervals().map(|form| match form.of_row {
            IntervalsOfRow::One | IntervalsOfRow::Two | IntervalsOfRow::Causal { .. } => Feature::Intervals,
            IntervalsOfRow::Tree { .. } => Feature::Tree,
            IntervalsOfRow::Blocks { .. } => Feature::Blocks,
        });
        let features = [
            (has_window, Feature::Window),
            (mask.chunks().is_some(), Feature::Chunks),
            (softcap.is_some(), Feature::SoftCap),
            (score.is_some(), Feature::Score),
            (*sink, Feature::Sinks),
            (qv.is_some(), Feature::Qv),
            (q.dtype == Dtype::E4m3, Feature::E4m3),
            (q.dtype != k.dtype && k.dtype != Dtype::Int8, Feature::E4m3Keys),
            (k.dtype == Dtype::Int8, Feature::Int8Keys),
            (k.dtype != v.dtype, Feature::RowScales),
            (token_scales.is_some(), Feature::TokenScales),
            (matches!(of_q, Granularity::Block { .. }), Feature::BlockScales),
            (*of_v == Granularity::Channel, Feature::VChannels),
            (*v_layout == ValueLayout::Transposed, Feature::TransposedV),
            (extra.is_some(), Feature::Extra),
            (*lse != LseForm::default(), Feature::LseForm),
            (*max_logits, Feature::MaxLogits),
        ];
        let features = features.into_iter().filter_map(|(is_there, feature)| is_there.then_some(feature));
        of_data
            .into_iter()
            .chain(features)
            .chain([*seqs_q, *seqs_k].into_iter().flat_map(Sequences::features))
    }
}
