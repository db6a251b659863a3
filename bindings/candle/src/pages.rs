//! Keys and values of sequences that lie in pages.

use candle_core::{DType, Device, Result, Tensor};
use fa3::problem::TensorName;

use crate::error::Error;

/// The rows of all sequences, one after the other, of K and of V, which are (blocks, page_rows, heads_kv, head_dim).
/// Sequence i has rows `ends[i] .. ends[i + 1]` of the result, in the blocks that row i of the table names.
///
/// # Errors
/// Tensors and a table that make no sense together, with the numbers.
pub(crate) fn gathered(
    [k, v]: [&Tensor; 2],
    page_rows: usize,
    table: &Tensor,
    ends: &[i32],
) -> Result<[Tensor; 2]> {
    for (tensor, x) in [(TensorName::K, k), (TensorName::V, v)] {
        if x.rank() != 4 || x.dims()[1] != page_rows || x.dims()[0] != k.dims()[0] {
            return Err(Error::Pages { tensor, shape: x.shape().clone(), page_rows }.into());
        }
    }
    let rows = Tensor::new(numbers(k.dims()[0], page_rows, table, ends)?, k.device())?;
    let of = |x: &Tensor| x.flatten(0, 1)?.index_select(&rows, 0);
    Ok([of(k)?, of(v)?])
}

/// The number of each sequence's rows, counted through all blocks.
fn numbers(blocks: usize, page_rows: usize, table: &Tensor, ends: &[i32]) -> Result<Vec<u32>> {
    let (shape, given, sequences) = (table.shape(), table.dtype(), ends.len().saturating_sub(1));
    if shape.rank() != 2 || shape.dims()[0] != sequences {
        return Err(Error::BlockTable { shape: shape.clone(), sequences }.into());
    }
    if ![DType::U32, DType::I32].contains(&given) {
        return Err(Error::ListDtype { list: "block_table", given }.into());
    }
    let table = table.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec2::<i64>()?;
    let mut numbers = Vec::new();
    for (sequence, (pages, pair)) in table.iter().zip(ends.windows(2)).enumerate() {
        let rows = i64::from(pair[1]) - i64::from(pair[0]);
        let room = pages.len().saturating_mul(page_rows);
        let Some(rows) = usize::try_from(rows).ok().filter(|&rows| rows <= room) else {
            return Err(Error::PagedRows { sequence, rows, pages: pages.len(), page_rows }.into());
        };
        for row in 0..rows {
            let (entry, given) = (row / page_rows, pages[row / page_rows]);
            let Some(page) = usize::try_from(given).ok().filter(|&page| page < blocks) else {
                return Err(Error::Block { sequence, entry, given, blocks }.into());
            };
            let number = u32::try_from(page * page_rows + row % page_rows);
            numbers.push(number.map_err(candle_core::Error::wrap)?);
        }
    }
    Ok(numbers)
}
