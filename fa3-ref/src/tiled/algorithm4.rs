//! Algorithm 4: the consumer warpgroup with three stages in flight. Step j multiplies Q K of block j and P V of
//! block j − 2 while the softmax of block j − 1 runs; O is rescaled just before the product that needs it.

use ndarray::Array2;

use super::softmax::{OnlineSoftmax, scale_rows};
use super::tile::QueryTile;
use crate::output::HeadForward;

pub(super) fn consumer(tile: &QueryTile<'_>) -> HeadForward<f32> {
    let round = |p: Array2<f32>| p.mapv(|p| tile.precision.round(p));
    let blocks = tile.key_blocks();
    let mut o = Array2::zeros((tile.rows(), tile.head_dim_v())); // A4:1
    let mut softmax = OnlineSoftmax::new(tile.rows(), tile.unit); // A4:1
    if blocks == 0 {
        return softmax.finish(o, tile.sink());
    }
    let s = tile.scores(0); // A4:2-3
    let mut cur = softmax.step(s); // A4:4, P_i and scale_o of block 0
    if blocks > 1 {
        let mut s = tile.scores(1); // A4:5-6
        for j in 2..blocks {
            // A4:7, to T_c − 1
            let s_next = tile.scores(j); // A4:8-9, in flight
            scale_rows(&mut o, &cur.rescale); // A4:11
            o += &round(cur.p).dot(&tile.v(j - 2)); // A4:10, A4:12, in flight
            cur = softmax.step(s); // A4:13, for the S of step j − 1; A4:16
            s = s_next; // A4:14-15
        }
        scale_rows(&mut o, &cur.rescale); // A4:19
        o += &round(cur.p).dot(&tile.v(blocks - 2)); // A4:18, A4:20
        cur = softmax.step(s); // A4:21
    }
    scale_rows(&mut o, &cur.rescale); // A4:23
    o += &round(cur.p).dot(&tile.v(blocks - 1)); // A4:22, A4:24
    softmax.finish(o, tile.sink()) // A4:25
}
