//! The shipped kernels that append rows to a cache. The kernel `append/bf16/d128/packed/pages/half-split/q`, for
//! example, takes packed new rows and a paged cache, and rotates packed queries, too.

use fa3_ir::Elem;
use fa3_types::{QueryPositions, RopeStyle, SequenceBase};

use super::Shipped;
use crate::kernels::append::{NewSpec, QuerySpec, Rotation, Search, Spec};

const PACKED: Search = Search::Packed { levels: 2 };

/// Kernels with every way to find sequences and pages, both pairings of rotary entries, both types of rotary tables,
/// and rows of all widths.
pub(super) fn append() -> impl Iterator<Item = Shipped> {
    use RopeStyle::{HalfSplit, Interleaved};
    let rows = [
        (Elem::Bf16, Some(new(128, Search::Dense, true)), None, None),
        (Elem::Bf16, Some(new(128, Search::Dense, true)), Some((Search::Dense, 128)), Some((HalfSplit, 128))),
        (Elem::Bf16, Some(new(128, PACKED, true)), Some((PACKED, 128)), Some((HalfSplit, 128))),
        (Elem::F16, Some(new(64, PACKED, false)), Some((PACKED, 64)), Some((Interleaved, 32))),
        (Elem::Bf16, Some(new(96, Search::Dense, false)), None, Some((HalfSplit, 32))),
        (Elem::Bf16, Some(new(256, PACKED, true)), None, Some((Interleaved, 256))),
        (Elem::Bf16, None, Some((PACKED, 128)), Some((HalfSplit, 128))),
        (Elem::Bf16, Some(NewSpec { indexed: true, ..new(128, Search::Dense, true) }), None, None),
        (Elem::Bf16, Some(quantized(128, Search::Dense)), None, None),
        (Elem::F16, Some(quantized(128, PACKED)), Some((PACKED, 128)), Some((HalfSplit, 128))),
        (Elem::E4m3, Some(new(64, Search::Dense, true)), None, None),
    ];
    rows.into_iter().map(|(elem, new, queries, rotation)| {
        // The rotary tables are f32 here, but without new rows they have the type of the queries.
        let table = if new.is_some() { Elem::F32 } else { elem };
        let spec = Spec {
            elem,
            new,
            queries: queries.map(|(search, head_dim)| QuerySpec {
                head_dim,
                search,
                positions: QueryPositions::Each,
            }),
            rotation: rotation.map(|(style, rotary_dim)| Rotation {
                style,
                rotary_dim,
                table,
                base: SequenceBase::Used,
            }),
        };
        Shipped::new(name(&spec), spec)
    })
}

/// New keys and values, with rows of equal width.
fn new(head_dim: u32, search: Search, paged: bool) -> NewSpec {
    NewSpec { head_dim, head_dim_v: head_dim, search, paged, indexed: false, quantizes: false }
}

/// New keys and values that the kernel quantizes for a paged cache of e4m3.
fn quantized(head_dim: u32, search: Search) -> NewSpec {
    NewSpec { quantizes: true, ..new(head_dim, search, true) }
}

fn name(Spec { elem, new, queries, rotation }: &Spec) -> String {
    let search = |search: Search| if search == Search::Dense { "/dense" } else { "/packed" };
    let head_dim = new.map(|new| new.head_dim).or(queries.map(|queries| queries.head_dim)).unwrap_or(0);
    let words = [
        new.map(|new| search(new.search)),
        new.map(|new| if new.paged { "/pages" } else { "/entries" }),
        new.filter(|new| new.indexed).map(|_| "/indexed"),
        rotation.map(|rotation| match rotation.style {
            RopeStyle::Interleaved => "/interleaved",
            RopeStyle::HalfSplit => "/half-split",
        }),
        rotation.filter(|rotation| rotation.rotary_dim < head_dim).map(|_| "/part"),
        queries.map(|_| "/q"),
        new.filter(|new| new.quantizes).map(|_| "/to-e4m3"),
    ];
    let words: String = words.into_iter().flatten().collect();
    // The spec counts two elements of e4m3 as one of 16 bits.
    let head_dim = if *elem == Elem::E4m3 { 2 * head_dim } else { head_dim };
    format!("append/{elem}/d{head_dim}{words}")
}
