//! Algorithm 1: FlashAttention-3 forward pass without intra-consumer overlapping, CTA view.

use ndarray::Array2;

use super::softmax::{OnlineSoftmax, scale_rows};
use super::tile::QueryTile;
use crate::output::HeadForward;

pub(super) fn consumer(tile: &QueryTile<'_>) -> HeadForward<f32> {
    let round = |p: Array2<f32>| p.mapv(|p| tile.precision.round(p));
    let mut o = Array2::zeros((tile.rows(), tile.head_dim_v())); // A1:13
    let mut softmax = OnlineSoftmax::new(tile.rows(), tile.unit); // A1:13
    for j in 0..tile.key_blocks() {
        // A1:15, the loop over blocks of keys.
        let s = tile.scores(j); // A1:16-17
        let step = softmax.step(s); // A1:18-19
        scale_rows(&mut o, &step.rescale); // A1:21, without the printed inverse
        o += &round(step.p).dot(&tile.v(j)); // A1:20-21
    }
    softmax.finish(o, tile.sink()) // A1:24
}
