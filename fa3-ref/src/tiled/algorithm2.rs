//! Algorithm 2: the consumer warpgroup with two-stage GEMM-softmax overlap. While the tensor core multiplies
//! P V of block j − 1, the softmax of block j runs; so O is rescaled after that product, not before.

use ndarray::Array2;

use super::softmax::{OnlineSoftmax, scale_rows};
use super::tile::QueryTile;
use crate::output::HeadForward;

pub(super) fn consumer(tile: &QueryTile<'_>) -> HeadForward<f32> {
    let round = |p: Array2<f32>| p.mapv(|p| tile.precision.round(p));
    let mut o = Array2::zeros((tile.rows(), tile.head_dim_v())); // A2:2
    let mut softmax = OnlineSoftmax::new(tile.rows(), tile.unit); // A2:2
    if tile.key_blocks() == 0 {
        return softmax.finish(o, tile.sink());
    }
    let s_cur = tile.scores(0); // A2:3-4
    let mut p_cur = round(softmax.step(s_cur).p); // A2:6, O is still 0
    for j in 1..tile.key_blocks() {
        // A2:7, to T_c − 1
        let s_next = tile.scores(j); // A2:8-9, in flight
        o += &p_cur.dot(&tile.v(j - 1)); // A2:10-11, in flight
        let step = softmax.step(s_next); // A2:12-13
        scale_rows(&mut o, &step.rescale); // A2:14
        p_cur = round(step.p); // A2:16
    }
    o += &p_cur.dot(&tile.v(tile.key_blocks() - 1)); // A2:18-19
    softmax.finish(o, tile.sink()) // A2:20
}
