//! The parameters of a quantization kernel.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_sched::quantize::Plan;
use fa3_sched::{Decoder, Longest, Order, TileCounts};
use fa3_types::{Positions, QuantizeProblem, Signs, ValueLayout};

use super::{ScaleSource, Spec};
use crate::kernels::params::{Form, Host, Pass, Side, TensorForm};
use crate::kernels::tensors::{strides, transposed_strides, view};

/// What a launch passes to a quantization kernel.
pub(super) struct Params<S: Side> {
    pub(super) x: S::Tensor,
    pub(super) codes: S::Pointer,
    /// Bytes from one sequence, head, row of the codes to the next. A row of transposed codes is of keys.
    pub(super) codes_strides: [S::U64; 3],
    pub(super) scale: Scale<S>,
    pub(super) rotation: Option<Rotation<S>>,
    pub(super) signs: Option<[Vec<S::U32>; 2]>,
    pub(super) seqlen: S::U32,
    pub(super) heads: S::U32,
    /// Blocks of rows of a sequence.
    pub(super) blocks: S::U32,
    pub(super) tiles: S::U32,
    /// Tiles of a CTA.
    pub(super) run: S::U32,
    pub(super) decoder: Decoder<S::U32>,
}

/// Where scales come from, or go to.
pub(super) enum Scale<S: Side> {
    /// To (batch, heads, blocks).
    Blocks(S::Pointer),
    /// No scales and no codes: the largest magnitudes of tiles go to (batch, heads, blocks).
    Measured(S::Pointer),
    /// From (batch, heads).
    Heads {
        /// 1 / scale.
        inverse: S::Pointer,
    },
    Given {
        /// 1 / scale.
        inverse: S::F32,
    },
    /// From (batch, heads, head_dim) each.
    Channels {
        mean: S::Pointer,
        /// 1 / scale.
        inverse: S::Pointer,
    },
}

pub(super) struct Rotation<S: Side> {
    pub(super) cos: S::Pointer,
    pub(super) sin: S::Pointer,
    /// Positions that the tables have.
    pub(super) table_rows: S::U32,
    pub(super) positions: RowPositions<S>,
}

pub(super) enum RowPositions<S: Side> {
    From(S::U32),
    Listed(S::Pointer),
}

impl<A: Side> Params<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Params<B> {
        let [batch, head, row] = self.codes_strides;
        Params {
            x: by.tensor("x", self.x),
            codes: by.pointer("codes", self.codes),
            codes_strides: [
                by.u64("codes_batch_bytes", batch),
                by.u64("codes_head_bytes", head),
                by.u64("codes_row_bytes", row),
            ],
            scale: match self.scale {
                Scale::Blocks(scales) => Scale::Blocks(by.pointer("scales", scales)),
                Scale::Measured(maxima) => Scale::Measured(by.pointer("maxima", maxima)),
                Scale::Heads { inverse } => Scale::Heads { inverse: by.pointer("inverse", inverse) },
                Scale::Given { inverse } => Scale::Given { inverse: by.f32("inverse", inverse) },
                Scale::Channels { mean, inverse } => Scale::Channels {
                    mean: by.pointer("mean", mean),
                    inverse: by.pointer("inverse", inverse),
                },
            },
            rotation: self.rotation.map(|Rotation { cos, sin, table_rows, positions }| Rotation {
                cos: by.pointer("cos", cos),
                sin: by.pointer("sin", sin),
                table_rows: by.u32("table_rows", table_rows),
                positions: match positions {
                    RowPositions::From(first) => RowPositions::From(by.u32("first_position", first)),
                    RowPositions::Listed(list) => RowPositions::Listed(by.pointer("positions", list)),
                },
            }),
            signs: self.signs.map(|[leading, between]| {
                let mut words = |name: &str, words: Vec<A::U32>| {
                    let words = words.into_iter().enumerate();
                    words.map(|(index, word)| by.u32(&format!("{name}_signs_{index}"), word)).collect()
                };
                [words("leading", leading), words("between", between)]
            }),
            seqlen: by.u32("seqlen", self.seqlen),
            heads: by.u32("heads", self.heads),
            blocks: by.u32("blocks", self.blocks),
            tiles: by.u32("tiles", self.tiles),
            run: by.u32("run", self.run),
            decoder: self.decoder.map_named(&mut |name: &str, number| by.u32(name, number)),
        }
    }
}

/// Words of signs, and how many of them are between two transforms.
fn sign_words(head_dim: u32) -> [usize; 2] {
    let words = head_dim.div_ceil(32) as usize;
    [words, if head_dim.is_power_of_two() { 0 } else { words }]
}

fn codes_strides(problem: &QuantizeProblem) -> [u64; 3] {
    match problem.layout() {
        ValueLayout::Rows => strides(problem.codes()),
        ValueLayout::Transposed => transposed_strides(problem.codes().shape),
    }
}

impl Params<Form> {
    /// Those of a kernel.
    pub(super) fn form(spec: &Spec) -> Params<Form> {
        let order = Order::LongestFirst { section: 1, longest: Longest::First };
        // Panels of 64 columns; what a row has fewer is zeros.
        let tile = TileShape::new(spec.elem, spec.tile.rows, spec.tile.head_dim.next_multiple_of(64));
        Params {
            x: TensorForm { tile, rank: 4, rows: 2 },
            codes: Elem::E4m3,
            codes_strides: [(); 3],
            scale: match spec.scale {
                ScaleSource::Blocks => Scale::Blocks(Elem::F32),
                ScaleSource::Measured => Scale::Measured(Elem::F32),
                ScaleSource::Heads => Scale::Heads { inverse: Elem::F32 },
                ScaleSource::Given => Scale::Given { inverse: () },
                ScaleSource::Channels => Scale::Channels { mean: Elem::F32, inverse: Elem::F32 },
            },
            rotation: spec.rotation.map(|rotation| Rotation {
                cos: Elem::F32,
                sin: Elem::F32,
                table_rows: (),
                positions: match rotation.listed {
                    true => RowPositions::Listed(Elem::U32),
                    false => RowPositions::From(()),
                },
            }),
            signs: spec.hadamard.then(|| sign_words(spec.tile.head_dim).map(|words| vec![(); words])),
            seqlen: (),
            heads: (),
            blocks: (),
            tiles: (),
            run: (),
            decoder: Decoder::new(TileCounts::ONE, order).map(|_| ()),
        }
    }
}

impl Params<Host> {
    /// The values of a launch with at least one tile, over the buffers of its program.
    pub(super) fn of<K>(plan: &Plan, program: &Program<K>, scale: Scale<Host>) -> Params<Host> {
        let (problem, shape) = (plan.problem(), plan.problem().x().shape);
        let buffer = |name| program.find(name).unwrap_or(BufferId(usize::MAX));
        let decoder = plan.decoder().expect("there is a tile");
        Params {
            x: view(buffer("x"), problem.x()),
            codes: buffer("codes"),
            codes_strides: codes_strides(problem),
            scale,
            rotation: problem.rotary().map(|rotary| Rotation {
                cos: buffer("cos"),
                sin: buffer("sin"),
                table_rows: rotary.table_rows as u32,
                positions: match rotary.positions {
                    Positions::From(first) => RowPositions::From(first as u32),
                    Positions::Listed => RowPositions::Listed(buffer("positions")),
                },
            }),
            signs: problem.signs().map(|Signs { leading, between }| {
                let [of_leading, of_between] = sign_words(plan.tile().head_dim);
                [leading[..of_leading].to_vec(), between[..of_between].to_vec()]
            }),
            seqlen: shape.seqlen as u32,
            heads: shape.heads as u32,
            blocks: (shape.seqlen as u32).div_ceil(plan.tile().block_rows()),
            tiles: plan.num_tiles(),
            run: plan.run(),
            decoder,
        }
    }
}
