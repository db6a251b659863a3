//! Copies by the tensor memory accelerator: the bytes that they move.

use fa3_ir::{ArgValue, BoxShape, Elem, Operand, ParamKind, Swizzle, TensorMap, TensorView, TmaInst};

use crate::copies::Piece;
use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::warp::each;

impl<'a> Machine<'a> {
    pub(super) fn tensor(&mut self, at: At, inst: &'a TmaInst, active: u32) {
        match inst {
            TmaInst::Load { dst, map, coords, mbarrier, options } => {
                let Some((shape, view)) = self.tensor_map(at, *map) else { return };
                for lane in each(active) {
                    let coords = self.coords(at, &shape, coords, lane);
                    let source = (pieces(&shape, view, &coords), shape.swizzle, shape.align());
                    self.load_copy(at, lane, *dst, *mbarrier, options, source);
                }
            }
            TmaInst::Store { map, coords, src } | TmaInst::ReduceAdd { map, coords, src } => {
                let Some((shape, view)) = self.tensor_map(at, *map) else { return };
                let add = matches!(inst, TmaInst::ReduceAdd { .. }).then_some(shape.elem);
                for lane in each(active) {
                    let coords = self.coords(at, &shape, coords, lane);
                    if let Some(coord) = coords.iter().find(|coord| **coord < 0) {
                        self.find(Rule::T1, at, format!("a tensor store begins at coordinate {coord}"));
                        continue;
                    }
                    let pieces = pieces(&shape, view, &coords);
                    self.bulk_copy(at, lane, *src, add, (pieces, shape.swizzle, shape.align()));
                }
            }
            TmaInst::BulkLoad { dst, src, bytes, mbarrier, options } => {
                let (from, bytes) = (self.global_addresses(at, *src), self.operand(at, *bytes));
                for lane in each(active) {
                    if let Some(pieces) = self.flat(at, from[lane], bytes[lane]) {
                        self.load_copy(at, lane, *dst, *mbarrier, options, (pieces, Swizzle::None, 16));
                    }
                }
            }
            TmaInst::BulkStore { dst, src, bytes } | TmaInst::BulkReduceAddF32 { dst, src, bytes } => {
                let (to, bytes) = (self.global_addresses(at, *dst), self.operand(at, *bytes));
                let add = matches!(inst, TmaInst::BulkReduceAddF32 { .. }).then_some(Elem::F32);
                for lane in each(active) {
                    if let Some(pieces) = self.flat(at, to[lane], bytes[lane]) {
                        self.bulk_copy(at, lane, *src, add, (pieces, Swizzle::None, 16));
                    }
                }
            }
            TmaInst::Prefetch { .. } => {}
            TmaInst::Commit => self.bulk_commit(at, active),
            TmaInst::Wait { pending, read } => self.bulk_wait(at, active, *pending, *read),
        }
    }

    /// A tensor map whose box fits shared memory.
    fn tensor_map(&mut self, at: At, TensorMap(param): TensorMap) -> Option<(BoxShape, &'a TensorView)> {
        let index = param.0 as usize;
        let (kind, arg) = (self.program.kernel.params.get(index)?.kind, self.args.get(index)?);
        let (ParamKind::TensorMap(shape), ArgValue::Tensor(view)) = (kind, arg) else { return None };
        let elements: u64 = shape.dims().iter().map(|&dim| u64::from(dim)).product();
        let bytes = elements * u64::from(shape.elem.bytes());
        if bytes > self.program.kernel.smem.bytes().into() {
            let what = format!("a box of {bytes} bytes is more than the kernel's shared memory");
            self.find(Rule::Bounds, at, what);
            return None;
        }
        Some((shape, view))
    }

    /// The coordinates of a box. Its rows must begin at multiples of 16 bytes; otherwise an H100 stops with an illegal
    /// instruction.
    fn coords(&mut self, at: At, shape: &BoxShape, coords: &[Operand], lane: usize) -> Vec<i64> {
        let coords: Vec<i64> =
            coords.iter().map(|&coord| i64::from(self.operand(at, coord)[lane].cast_signed())).collect();
        let first = coords.first().map_or(0, |coord| coord * i64::from(shape.elem.bytes()));
        if first % 16 != 0 {
            let what = format!("a box begins {first} bytes into its tensor's rows, not at a multiple of 16");
            self.find(Rule::T1, at, what);
        }
        coords
    }

    /// The only piece of a flat copy.
    fn flat(&mut self, at: At, address: u64, bytes: u32) -> Option<Vec<Piece>> {
        if !address.is_multiple_of(16) || !bytes.is_multiple_of(16) {
            let what =
                format!("a bulk copy of {bytes} bytes at global address {address:#x}, not multiples of 16");
            self.find(Rule::T1, at, what);
            return None;
        }
        Some(vec![Piece { shared: 0, global: Some(address), bytes }])
    }
}

/// Splits a box into pieces: for each of its rows, the elements before, in and after the tensor.
fn pieces(shape: &BoxShape, view: &TensorView, coords: &[i64]) -> Vec<Piece> {
    let elem = shape.elem.bytes();
    let row = shape.dims()[0];
    let rows: u32 = shape.dims()[1..].iter().product();
    let size = |dim: usize| view.dims.get(dim).map_or(1, |&size| size as i64);
    // The elements of a row from `from` to `to` are in the tensor.
    let from = (-coords[0]).clamp(0, row.into()) as u32;
    let to = (size(0) - coords[0]).clamp(from.into(), row.into()) as u32;
    let mut pieces = Vec::new();
    for index in 0..rows {
        let (mut rest, mut address, mut inside) = (index, view.address as i64, true);
        for (dim, (&length, &coord)) in shape.dims().iter().zip(coords).enumerate().skip(1) {
            let at = coord + i64::from(rest % length);
            rest /= length;
            inside &= (0..size(dim)).contains(&at);
            let stride = view.strides.get(dim - 1).map_or(0, |&stride| stride as i64);
            address = address.wrapping_add(at.wrapping_mul(stride));
        }
        let start = index * row * elem;
        let mut push = |first: u32, end: u32, inside: bool| {
            if first < end {
                let at = address.wrapping_add((coords[0] + i64::from(first)) * i64::from(elem));
                let global = inside.then_some(at as u64);
                pieces.push(Piece { shared: start + first * elem, global, bytes: (end - first) * elem });
            }
        };
        push(0, from, false);
        push(from, to, inside);
        push(to, row, false);
    }
    pieces
}
