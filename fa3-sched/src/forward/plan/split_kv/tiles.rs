//! The tile table of split-KV.

use fa3_types::Problem;

use super::ROWS;
use crate::forward::{CtaTile, Loads, Pipeline, Precision};

/// A row of the table: head_dim of Q and K; head_dim_v; keys per block; stages; and whether half of an SM's registers
/// suffices for the consumers.
type Row = (u32, u32, u32, u32, bool);

/// Rows for 16-bit inputs. HBM needs 64 KiB in flight per SM. On an H100 two CTAs per SM, with fewer stages each, were
/// slower in every case: 9.4 us against 7.5 for one sequence of 1024 keys, 101 against 98 for 16 of 4096.
const HALF: [Row; 8] = [
    (64, 64, 128, 4, true),
    (96, 96, 64, 5, true),
    (128, 128, 64, 4, true),
    (192, 128, 64, 3, true),
    (192, 192, 64, 3, false),
    (256, 256, 64, 2, false),
    (512, 512, 64, 1, false),
    (576, 512, 64, 1, false),
];

/// Rows for problems with `qv`.
const LATENT: [Row; 2] = [(64, 256, 64, 3, false), (64, 512, 64, 2, false)];

/// Number of columns of O that fit the registers of one warpgroup. With more columns, two warpgroups share rows.
const COLUMNS_OF_ONE: u32 = 256;

/// Rows for dequantized e4m3. Smaller elements need more stages for the same number of bytes in flight, and dequantized
/// blocks lie beside the stages. Converter warps leave no registers to another kernel (not measured).
const CONVERTED: [Row; 7] = [
    (64, 64, 128, 6, false),
    (96, 96, 64, 8, false),
    (128, 128, 64, 6, false),
    (192, 128, 64, 5, false),
    (192, 192, 64, 4, false),
    (256, 256, 64, 2, false),
    (512, 512, 64, 1, false),
];

/// Rows for dequantized e4m3 and `qv`. Blocks of fewer columns would need other warps.
const CONVERTED_LATENT: [Row; 1] = [(64, 512, 64, 2, false)];

/// The tile of a problem, and whether half of an SM's registers suffices for the consumers; `None` if no tile fits.
pub(super) fn tile(problem: &Problem) -> Option<(CtaTile, bool)> {
    let precision = Precision::of(problem).converted();
    let has_qv = problem.qv().is_some();
    let table: &[Row] = match precision {
        Precision::Half if has_qv => &LATENT,
        Precision::Half => &HALF,
        Precision::Converted { .. } if has_qv => &CONVERTED_LATENT,
        // K is not converted.
        Precision::Converted { .. } if problem.v_scales().is_some() => return None,
        Precision::Converted { .. } => &CONVERTED,
        Precision::Fp8(_) => return None,
    };
    let mut tiles = table.iter().map(|&(head_dim, head_dim_v, tile_n, stages, is_slim)| {
        let consumers = if head_dim_v > COLUMNS_OF_ONE { 2 } else { 1 };
        let tile = CtaTile {
            head_dim,
            head_dim_v,
            qv: has_qv,
            precision,
            tile_m: ROWS,
            tile_n,
            stages,
            consumers,
            loads: Loads::Producer,
            pipeline: Pipeline::Paired,
            ping_pong: false,
        };
        // Q as loaded takes the memory of a block.
        let takes_room = precision == Precision::Converted { q: true } && head_dim_v > 128;
        (if takes_room { tile.of_converted_queries() } else { tile }, is_slim)
    });
    // Rows of e4m3 Q are converted by other warps than the producer's.
    let converts_q = precision == Precision::Converted { q: true };
    tiles.find(|(tile, _)| tile.holds(problem) && !(converts_q && tile.column_groups() > 1))
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemSpec, Shape};

    use super::*;
    use crate::DeviceLimits;

    #[test]
    fn converted_keys_have_the_blocks_of_16_bit_keys() {
        for ((head_dim, head_dim_v, keys, ..), converted) in HALF.into_iter().zip(CONVERTED) {
            assert_eq!(
                (head_dim, head_dim_v, keys),
                (converted.0, converted.1, converted.2),
                "the same sums"
            );
        }
    }

    #[test]
    fn every_tile_fits() {
        let spec = |&(head_dim, head_dim_v, ..): &Row| {
            let shape = Shape { batch: 1, seqlen: 1, heads: 1, head_dim: head_dim as usize };
            ProblemSpec::dense(Dtype::Bf16, shape, shape).head_dim_v(head_dim_v as usize)
        };
        let fitting = |spec: ProblemSpec| {
            let (tile, _) = tile(&spec.validate().unwrap()).unwrap();
            assert_eq!(tile.check(&DeviceLimits::h100_sxm()), Ok(()), "{tile}");
            tile
        };
        for row in &LATENT {
            let latent = || spec(row).qv(spec(row).o);
            let [tile, converted] = [fitting(latent()), fitting(latent().e4m3_keys())];
            assert!(tile.qv && tile.head_dim_v == row.1);
            assert!(converted.converts_rows() && converted.tile_n == tile.tile_n, "the same sums");
        }
        for row in &HALF {
            fitting(spec(row));
            if row.0 <= 512 {
                fitting(spec(row).e4m3_keys());
            }
            if row.0 <= 256 {
                let (q, kv) = (spec(row).q.shape, spec(row).k.shape);
                let of_e4m3 = fitting(ProblemSpec::dense(Dtype::E4m3, q, kv).head_dim_v(row.1 as usize));
                assert_eq!(of_e4m3.precision, Precision::Converted { q: true });
            }
        }
    }
}
