//! The spec of the kernel that appends rows.

use fa3_ir::Elem;
use fa3_sched::append::{Plan, levels};
use fa3_types::{QueryPositions, RopeStyle, SequenceBase, Sequences};

use crate::kernels::tensors::elem;

/// Everything that the kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The element type of the tensors: f16 or bf16, or e4m3 if new rows are e4m3 already.
    pub elem: Elem,
    /// The new keys and values, if rows are appended.
    pub new: Option<NewSpec>,
    /// The queries, if queries are rotated.
    pub queries: Option<QuerySpec>,
    /// The rotation, if keys or queries are rotated.
    pub rotation: Option<Rotation>,
}

/// The new keys and values, and the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NewSpec {
    /// Number of elements of a row of keys, in units of 16 bits: two e4m3 elements count as one.
    pub head_dim: u32,
    /// Number of elements of a row of values, in units of 16 bits.
    pub head_dim_v: u32,
    /// How the sequence of a row is found.
    pub search: Search,
    /// Whether the cache is paged.
    pub paged: bool,
    /// Whether the page table is indirect: cache_batch_idx has the row of each sequence.
    pub indexed: bool,
    /// Whether 16-bit rows are quantized to e4m3.
    pub quantizes: bool,
}

/// Queries that are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuerySpec {
    /// Number of elements of a row.
    pub head_dim: u32,
    /// How the sequence of a row is found.
    pub search: Search,
    /// The form in which the positions of queries are known.
    pub positions: QueryPositions,
}

/// The way in which the sequence of a row is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Search {
    /// A division of the row's index, in a dense tensor.
    Dense,
    /// A search in `cu_seqlens`, in a packed tensor.
    Packed {
        /// Number of rounds of the search. Each round reads 32 entries for a row.
        levels: u32,
    },
}

/// Everything that a rotation's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotation {
    /// Which entries of a row form a pair.
    pub style: RopeStyle,
    /// Number of entries of a row that are rotated.
    pub rotary_dim: u32,
    /// The element type of the tables: f32, or the type of the tensors.
    pub table: Elem,
    /// The source of the position of a sequence's first row.
    pub base: SequenceBase,
}

impl NewSpec {
    /// The elements of the cache, if new rows have the type `elem`.
    pub(super) fn of_cache(&self, elem: Elem) -> Elem {
        if self.quantizes { Elem::E4m3 } else { elem }
    }
}

impl Spec {
    /// The spec of a plan's kernel.
    pub fn of(plan: &Plan) -> Spec {
        let problem = plan.problem();
        let search = |sequences: Sequences| match sequences.is_packed() {
            true => Search::Packed { levels: levels(plan.count()) },
            false => Search::Dense,
        };
        let new = problem.rows().map(|rows| NewSpec {
            head_dim: plan.keys().map_or(0, |keys| keys.head_dim),
            head_dim_v: plan.values().map_or(0, |values| values.head_dim),
            search: search(rows.new),
            paged: rows.cache.pages().is_some(),
            indexed: rows.cache.has_index(),
            quantizes: problem.quantizes(),
        });
        let queries = problem.queries().map(|queries| QuerySpec {
            head_dim: queries.q.shape.head_dim as u32,
            search: search(queries.sequences),
            positions: queries.positions,
        });
        let rotation = problem.rotary().map(|rotary| Rotation {
            style: rotary.style,
            rotary_dim: rotary.rotary_dim as u32,
            table: elem(rotary.table),
            base: rotary.base,
        });
        Spec { elem: elem(problem.dtype()), new, queries, rotation }
    }

    /// Whether the kernel reads `seqused_k`.
    pub(super) fn reads_used(&self) -> bool {
        self.new.is_some() || self.rotation.is_some_and(|rotation| rotation.base == SequenceBase::Used)
    }
}
