//! Attention of quantized tensors, with their scales.

use fa3_quant::E4m3;

#[cfg(feature = "cuda")]
pub(crate) use descales::Descales;

use crate::results::Results;
use crate::{Attention, Device, Error, Quantized, Scalar};

/// Q, K and V with their scales.
pub(crate) type Scaled<'a> = [&'a Quantized; 3];

impl<'a> Attention<'a, E4m3> {
    /// Attention of tensors that [`Quantize`](crate::Quantize) made: Q, K and V are codes times scales, plus the means
    /// of channels of V, if any. O is bf16.
    ///
    /// The CPU takes all scales, and computes in f32. A GPU computes in 8 bits, and takes scales of heads, of the
    /// tensor, and of blocks of 64 or 128 rows of Q and 128 rows of K and V, in any combination, and for V also scales
    /// of channels.
    ///
    /// ```
    /// use fa3::half::bf16;
    /// use fa3::ndarray::Array4;
    /// use fa3::{Attention, Device, Quantize};
    ///
    /// let wave = |step: usize| {
    ///     Array4::from_shape_fn((1, 200, 2, 64), |(_, s, h, d)| bf16::from_f32(((s * step + 5 * h + 3 * d) as f32).sin()))
    /// };
    /// let [q, k, v] = [3, 5, 7].map(wave);
    /// let [of_q, of_k, of_v] = [&q, &k, &v].map(|x| Quantize::new(x).run(&Device::Cpu));
    /// let (of_q, of_k, of_v) = (of_q?, of_k?, of_v?);
    /// let output = Attention::of_quantized(&of_q, &of_k, &of_v).causal().forward(&Device::Cpu)?;
    ///
    /// let exact = Attention::new(&q, &k, &v).causal().forward(&Device::Cpu)?;
    /// let error = exact.o.iter().zip(&output.o).map(|(x, y)| (x.to_f32() - y.to_f32()).abs()).fold(0.0, f32::max);
    /// assert!(error < 0.1);
    /// # Ok::<(), fa3::Error>(())
    /// ```
    pub fn of_quantized(q: &'a Quantized, k: &'a Quantized, v: &'a Quantized) -> Attention<'a, E4m3> {
        let mut attention = Attention::new(&q.codes, &k.codes, &v.codes);
        attention.scaled = Some([q, k, v]);
        attention
    }
}

impl<'a, T: Scalar> Attention<'a, T> {
    /// Computes attention of codes times scales in f32 on the CPU.
    pub(crate) fn scaled_on_cpu(&self, scaled: Scaled<'a>, results: Results<'_, T>) -> Result<(), Error> {
        let Results { mut o, mut lse, max_logits } = results;
        let [q, k, v] = scaled.map(Quantized::dequantize);
        let exact = self.of([q.view(), k.view(), v.view()]);
        let exact = match max_logits {
            None => exact.forward(&Device::Cpu)?,
            Some(mut to) => {
                let (exact, largest) = exact.forward_with_max_logits(&Device::Cpu)?;
                to.assign(&largest);
                exact
            }
        };
        o.zip_mut_with(&exact.o, |to, &from| *to = T::Output::from_f32(from));
        lse.assign(&exact.lse);
        Ok(())
    }
}

/// Scales in the kernels' layout.
#[cfg(feature = "cuda")]
mod descales {
    use fa3_types::{KnownProblem, Scaling, SequenceRows, TensorName, first_block};
    use ndarray::Array3;

    use super::Scaled;
    use crate::{Attention, Error, Quantized, Scalar};

    /// Number of keys that share a block scale, and by default also the number of rows of Q.
    const BLOCK: usize = 128;

    pub(crate) struct Descales {
        /// Scales of Q, K and V: (sequences, heads_kv, 1) of heads, (batch, heads, blocks) of blocks, or (batch,
        /// heads_kv, head_dim_v) of V's channels.
        pub(crate) of: [Array3<f32>; 3],
        /// The means of channels of V (batch, heads_kv, head_dim_v), if channels have scales.
        pub(crate) v_mean: Option<Array3<f32>>,
    }

    impl<T: Scalar> Attention<'_, T> {
        /// The problem of codes and scales, and the scales in the problem's layout.
        ///
        /// # Errors
        /// [`Error::Scales`], and the errors of [`Attention::problem`].
        pub(crate) fn descaled(
            &self,
            scaled: Scaled<'_>,
            max_logits: bool,
        ) -> Result<(KnownProblem, Descales), Error> {
            let [rows_q, rows_k] = self.rows()?;
            // The numbers of heads are valid from here on.
            let group = self.problem()?.heads().group_size();
            let [q, k, v] = scaled;
            for (tensor, x, rows) in
                [(TensorName::Q, q, &rows_q), (TensorName::K, k, &rows_k), (TensorName::V, v, &rows_k)]
            {
                check(tensor, x, rows)?;
            }
            let has_blocks = scaled.iter().any(|x| matches!(x.scaling, Scaling::Block { .. }));
            let is_finer = matches!(q.scaling, Scaling::Heads { heads } if !heads.is_multiple_of(group));
            let mut spec = self.spec_of(max_logits)?;
            let [of_q, of_k, mut of_v] = if has_blocks || is_finer {
                let q_rows = if let Scaling::Block { rows } = q.scaling { rows } else { BLOCK };
                spec = spec.block_scales(q_rows);
                [of_blocks(q, &rows_q, q_rows), of_blocks(k, &rows_k, BLOCK), of_blocks(v, &rows_k, BLOCK)]
            } else {
                [of_heads(q, &rows_q, group), of_heads(k, &rows_k, 1), of_heads(v, &rows_k, 1)]
            };
            if v.mean.is_some() {
                spec = spec.v_channels();
                of_v = v.scales.clone();
            }
            let problem = spec.with_rows(rows_q, rows_k)?;
            Ok((problem, Descales { of: [of_q, of_k, of_v], v_mean: v.mean.clone() }))
        }
    }

    /// Checks that kernels take the scales of a tensor with these sequences.
    fn check(tensor: TensorName, x: &Quantized, rows: &SequenceRows) -> Result<(), Error> {
        let is_taken = match x.scaling {
            Scaling::Heads { .. } | Scaling::Tensor | Scaling::Given(_) => true,
            Scaling::Channel => tensor == TensorName::V,
            Scaling::Block { rows: of_block } => {
                let ends = |rows: &SequenceRows| rows.is_packed().then(|| rows.cu_seqlens());
                (tensor == TensorName::Q || of_block == BLOCK)
                    && x.packed.as_ref().and_then(ends) == ends(rows)
            }
        };
        if is_taken { Ok(()) } else { Err(Error::Scales { tensor, given: x.scaling }) }
    }

    /// Scales (sequences, heads / group, 1). All scales of a sequence and a group of heads are equal.
    fn of_heads(x: &Quantized, rows: &SequenceRows, group: usize) -> Array3<f32> {
        let heads = x.codes.dim().2;
        Array3::from_shape_fn((rows.count(), heads / group, 1), |(sequence, head, _)| {
            x.scale([rows.start(sequence).0, 0, head * group, 0])
        })
    }

    /// Scales (batch, heads, blocks) of blocks of `of_block` rows; 1 at the unused indices between sequences.
    fn of_blocks(x: &Quantized, rows: &SequenceRows, of_block: usize) -> Array3<f32> {
        let (batch, seqlen, heads, _) = x.codes.dim();
        let is_packed = rows.is_packed();
        let blocks = if is_packed {
            fa3_types::ScaleBlocks::packed(seqlen, rows.count(), of_block)
        } else {
            fa3_types::ScaleBlocks::dense(seqlen, of_block)
        };
        let mut scales = Array3::ones((batch, heads, blocks.count()));
        for sequence in 0..rows.count() {
            let (entry, first) = rows.start(sequence);
            let at = if is_packed { first_block(first as u32, sequence as u32, of_block.ilog2()) } else { 0 };
            for block in 0..rows.capacity(sequence).div_ceil(of_block) {
                for head in 0..heads {
                    let scale = x.scale([entry, first + block * of_block, head, 0]);
                    scales[[entry, head, at as usize + block]] = scale;
                }
            }
        }
        scales
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use fa3_types::{Dtype, QuantizeSpec, Scaling, SequenceRows, Shape, TensorName};

    use super::*;

    /// `cu_seqlens` of two packed sequences of K, and of Q.
    const ENDS: [i32; 3] = [0, 130, 300];

    /// Codes with scales, no two of which are equal.
    fn quantized(heads: usize, scaling: Scaling, ends: Option<&[i32]>) -> Quantized {
        let shape = Shape { batch: 1, seqlen: 300, heads, head_dim: 16 };
        let rows = SequenceRows::listed(1, 300, ends, None).unwrap();
        let mut spec = QuantizeSpec::contiguous(Dtype::Bf16, shape);
        (spec.scaling, spec.packed) = (scaling, rows.is_packed().then_some(rows.count()));
        let problem = spec.validate().unwrap();
        let numbers = |shape: Option<[usize; 3]>| {
            (1..=shape.map_or(0, |shape| shape.iter().product())).map(|x| x as f32).collect()
        };
        let (scales, mean) = (numbers(problem.scales_shape()), numbers(problem.mean_shape()));
        let x = Quantized::new(&problem, vec![E4m3::ZERO; 300 * heads * 16], scales, mean);
        Quantized { packed: rows.is_packed().then_some(rows), ..x }
    }

    const PER_HEAD: Scaling = Scaling::Heads { heads: 1 };

    #[test]
    fn scales_of_heads_stay_such_where_they_can() {
        let (q, k) = (quantized(4, Scaling::Heads { heads: 2 }, None), quantized(2, Scaling::Tensor, None));
        let v = quantized(2, Scaling::Channel, None);
        let attention = Attention::of_quantized(&q, &k, &v);
        let (problem, Descales { of: [of_q, of_k, of_v], v_mean }) =
            attention.descaled([&q, &k, &v], false).unwrap();
        assert!(!problem.has_block_scales() && problem.has_v_channels());
        assert_eq!((of_q.into_raw_vec_and_offset().0, of_k[[0, 1, 0]]), (vec![1.0, 2.0], 1.0));
        assert_eq!((of_v, v_mean), (v.scales.clone(), v.mean.clone()));
    }

    /// Each row has the scale of its block, whatever scales the other tensors have.
    #[test]
    fn blocks_have_the_scales_of_their_rows() {
        for packed in [None, Some(&ENDS[..])] {
            // A tensor with scales of heads was quantized without packed sequences.
            for (of_q, ends, rows) in [(Scaling::Block { rows: 64 }, packed, 64), (PER_HEAD, None, 128)] {
                let (q, k) = (quantized(4, of_q, ends), quantized(2, PER_HEAD, None));
                let v = quantized(2, Scaling::Block { rows: 128 }, packed);
                let attention = Attention::of_quantized(&q, &k, &v);
                let attention = packed.map_or(attention.clone(), |ends| attention.packed(ends, ends));
                let (problem, Descales { of, .. }) = attention.descaled([&q, &k, &v], false).unwrap();
                assert_eq!(of.each_ref().map(|x| x.shape().to_vec()), problem.descale_shapes());
                for (x, of, rows) in [(&q, &of[0], rows), (&k, &of[1], 128), (&v, &of[2], 128)] {
                    for (sequence, first, row) in
                        [(0, 0, 0), (0, 0, 64), (0, 0, 129), (1, 130, 0), (1, 130, 169)]
                    {
                        let place = match packed {
                            Some(_) => first / rows + sequence + row / rows,
                            None => (first + row) / rows,
                        };
                        assert_eq!(
                            of[[0, 1, place]],
                            x.scale([0, first + row, 1, 0]),
                            "{rows} {sequence} {row}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn scales_that_no_kernel_takes_are_named() {
        let refused = |of_k, of_v, ends: Option<&[i32]>| {
            let (q, k, v) =
                (quantized(2, PER_HEAD, None), quantized(2, of_k, ends), quantized(2, of_v, None));
            let error = Attention::of_quantized(&q, &k, &v).descaled([&q, &k, &v], false).map(drop);
            if let Err(Error::Scales { tensor, .. }) = error { Some(tensor) } else { None }
        };
        let blocks = Scaling::Block { rows: 128 };
        assert_eq!(refused(blocks, blocks, None), None);
        assert_eq!(refused(Scaling::Channel, blocks, None), Some(TensorName::K));
        assert_eq!(refused(PER_HEAD, Scaling::Block { rows: 64 }, None), Some(TensorName::V));
        assert_eq!(refused(blocks, blocks, Some(&ENDS)), Some(TensorName::K), "of other sequences");
    }
}
