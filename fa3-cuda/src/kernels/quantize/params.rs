//! The parameters of a quantization kernel.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_sched::quantize::Plan;
use fa3_sched::{Decoder, Order};
use fa3_types::{Positions, Signs, ValueLayout};

use super::{ScaleSource, Spec};
use crate::kernels::params::{Form, Host, Pass, RowDims, Side, TensorForm, param, params};
use crate::kernels::parts::ragged;
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::{self, view};

params! {
    /// The parameters of a quantization kernel.
    struct Params {
        x: tensor,
        /// The codes. In transposed codes, a row has the keys of a column.
        codes: named Strided,
        scale: all Scale,
        rotation: maybe all RotationTables,
        signs: maybe all SignWords,
        seqlen: u32,
        heads: u32,
        /// Number of blocks of rows of a sequence.
        blocks: u32,
        tiles: u32,
        /// Number of tiles of a run, which a CTA takes one after another.
        run: u32,
        decoder: numbers Decoder,
        packed: maybe all PackedRows,
    }

    /// The sequences of a packed tensor.
    struct PackedRows {
        cu_seqlens: pointer,
        sequences: u32,
        /// log2 of the number of rows of a block.
        shift: u32,
    }
}

/// The source of scales, or their destination.
pub(super) enum Scale<S: Side> {
    /// The kernel computes scales, and writes them to (batch, heads, blocks).
    Blocks(S::Pointer),
    /// The kernel writes the largest magnitude of each tile to (batch, heads, blocks), but no scales and no codes.
    Measured(S::Pointer),
    /// The kernel reads scales from (batch, heads).
    Heads {
        /// 1 / scale.
        inverse: S::Pointer,
    },
    Given {
        /// 1 / scale.
        inverse: S::F32,
    },
    /// The kernel reads means and scales from (batch, heads, head_dim).
    Channels {
        mean: S::Pointer,
        /// 1 / scale.
        inverse: S::Pointer,
    },
}

params! {
    /// The tables of a rotation.
    struct RotationTables {
        cos: pointer,
        sin: pointer,
        /// Number of positions in the tables.
        table_rows: u32,
        positions: all RowPositions,
    }
}

/// The positions of rows.
pub(super) enum RowPositions<S: Side> {
    From(S::U32),
    Listed(S::Pointer),
}

/// Words whose bits are random signs: those before the leading transform, and those between the two transforms.
pub(super) struct SignWords<S: Side>(pub(super) [Vec<S::U32>; 2]);

impl<A: Side> Scale<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Scale<B> {
        match self {
            Scale::Blocks(scales) => Scale::Blocks(by.pointer("scales", scales)),
            Scale::Measured(maxima) => Scale::Measured(by.pointer("maxima", maxima)),
            Scale::Heads { inverse } => Scale::Heads { inverse: by.pointer("inverse", inverse) },
            Scale::Given { inverse } => Scale::Given { inverse: by.f32("inverse", inverse) },
            Scale::Channels { mean, inverse } => {
                Scale::Channels { mean: by.pointer("mean", mean), inverse: by.pointer("inverse", inverse) }
            }
        }
    }
}

impl<A: Side> RowPositions<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> RowPositions<B> {
        match self {
            RowPositions::From(first) => RowPositions::From(by.u32("first_position", first)),
            RowPositions::Listed(list) => RowPositions::Listed(by.pointer("positions", list)),
        }
    }
}

impl<A: Side> SignWords<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> SignWords<B> {
        let SignWords([leading, between]) = self;
        let mut words = |name: &str, words: Vec<A::U32>| {
            let words = words.into_iter().enumerate();
            words.map(|(index, word)| by.u32(&format!("{name}_signs_{index}"), word)).collect()
        };
        SignWords([words("leading", leading), words("between", between)])
    }
}

/// Numbers of words of signs: before the leading transform, and between the two transforms.
fn sign_words(head_dim: u32) -> [usize; 2] {
    let words = head_dim.div_ceil(32) as usize;
    [words, if head_dim.is_power_of_two() { 0 } else { words }]
}

impl Params<Form> {
    pub(super) fn form(spec: &Spec) -> Params<Form> {
        // The tile has whole panels of 64 columns, in which columns that the tensor does not have are zeros.
        let tile = TileShape::new(spec.elem, spec.tile.rows, spec.tile.head_dim.next_multiple_of(64));
        Params {
            x: match spec.packed {
                false => TensorForm { tile, rank: 4, rows: RowDims::One(2) },
                true => ragged::form(tile),
            },
            codes: Strided::form(Elem::E4m3),
            scale: match spec.scale {
                ScaleSource::Blocks => Scale::Blocks(Elem::F32),
                ScaleSource::Measured => Scale::Measured(Elem::F32),
                ScaleSource::Heads => Scale::Heads { inverse: Elem::F32 },
                ScaleSource::Given => Scale::Given { inverse: () },
                ScaleSource::Channels => Scale::Channels { mean: Elem::F32, inverse: Elem::F32 },
            },
            rotation: spec.rotation.map(|rotation| RotationTables {
                cos: Elem::F32,
                sin: Elem::F32,
                table_rows: (),
                positions: match rotation.listed {
                    true => RowPositions::Listed(Elem::U32),
                    false => RowPositions::From(()),
                },
            }),
            signs: spec
                .hadamard
                .then(|| SignWords(sign_words(spec.tile.head_dim).map(|words| vec![(); words]))),
            seqlen: (),
            heads: (),
            blocks: (),
            tiles: (),
            run: (),
            decoder: Form::decoder(Order::HEADS_FASTEST),
            packed: spec.packed.then_some(PackedRows { cu_seqlens: Elem::U32, sequences: (), shift: () }),
        }
    }
}

impl Params<Host> {
    /// The arguments of a launch with at least one tile, over the buffers of its program.
    pub(super) fn of<K>(plan: &Plan, program: &Program<K>, scale: Scale<Host>) -> Params<Host> {
        let (problem, shape) = (plan.problem(), plan.problem().x().shape);
        let buffer = |name| program.find(name).unwrap_or(BufferId(usize::MAX));
        let decoder = plan.decoder().expect("there is a tile");
        Params {
            x: match plan.packed() {
                None => view(buffer("x"), problem.x()),
                Some(packed) => tensors::ragged_view(buffer("x"), problem.x(), packed.rows),
            },
            codes: match problem.layout() {
                ValueLayout::Rows => Strided::of(buffer("codes"), problem.codes()),
                ValueLayout::Transposed => Strided::transposed(buffer("codes"), problem.codes().shape),
            },
            scale,
            rotation: problem.rotary().map(|rotary| RotationTables {
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
                SignWords([leading[..of_leading].to_vec(), between[..of_between].to_vec()])
            }),
            seqlen: shape.seqlen as u32,
            heads: shape.heads as u32,
            blocks: plan.blocks(),
            tiles: plan.num_tiles(),
            run: plan.run(),
            decoder,
            packed: plan.packed().map(|packed| PackedRows {
                cu_seqlens: buffer("cu_seqlens"),
                sequences: packed.sequences,
                shift: plan.tile().block_rows().ilog2(),
            }),
        }
    }
}
