//! The parameters of the kernel that appends rows.

use fa3_ir::Program;
use fa3_ir::lang::Elem;
use fa3_sched::FastDiv;
use fa3_sched::append::Plan;
use fa3_types::{SequenceBase, TensorDesc};

use super::spec::{Search, Spec};
use crate::kernels::params::{Form, Host, Pass, Side, param, params};
use crate::kernels::parts::strided::Strided;

params! {
    /// The parameters. A kernel takes only the parameters that its spec needs.
    struct Params {
        new: maybe all NewRows,
        queries: maybe all Queries,
        rotation: maybe all RotationTables,
        /// Lengths of sequences before the append.
        used: maybe pointer = "seqused_k",
        /// Number of sequences.
        count: u32,
    }

    /// The parameters of new keys and values, and of the cache.
    struct NewRows {
        k_new: named Strided,
        v_new: named Strided,
        k_cache: named Strided,
        v_cache: named Strided,
        /// The scales of keys and of values, if rows are quantized to e4m3. At address 0, all scales are 1.
        k_descale: maybe pointer,
        v_descale: maybe pointer,
        /// Lengths of sequences after the append.
        used_after: pointer = "seqused_after",
        cu_seqlens: maybe pointer = "cu_seqlens_k_new",
        /// Number of rows of each sequence of a dense tensor, as a divisor.
        of_sequence: maybe div = "new_rows",
        /// Number of rows of each sequence of a dense tensor, or of the packed tensor.
        seqlen: u32 = "seqlen_new",
        heads: div = "heads_kv",
        /// Number of new rows of keys, over all heads.
        rows: u32 = "rows_kv",
        /// Number of rows for which the cache has room in each sequence.
        capacity: u32,
        pages: maybe all CachePages,
        /// The first CTA that appends values.
        values: u32 = "first_of_values",
        /// The first CTA that rotates queries.
        queries: u32 = "first_of_queries",
        /// The first CTA that writes lengths.
        lengths: u32 = "first_of_lengths",
    }

    /// The page table of the cache.
    struct CachePages {
        table: pointer = "page_table",
        /// cache_batch_idx: the page-table row of each sequence, if the table is indirect.
        index: maybe pointer = "cache_batch_idx",
        /// Number of rows of the page table, if the table is indirect.
        table_rows: maybe u32 = "rows_of_page_table",
        /// Number of entries from one table row to the next.
        stride: u32 = "page_table_stride",
        /// Number of rows of a page.
        rows: div = "page_rows",
        /// Number of pages in memory.
        entries: u32,
    }

    /// The parameters of queries that are rotated.
    struct Queries {
        q: named Strided,
        to: named Strided = "q_rotated",
        cu_seqlens: maybe pointer = "cu_seqlens_q",
        /// Number of rows of each sequence of a dense tensor, as a divisor.
        of_sequence: maybe div = "q_rows",
        heads: div = "heads_q",
        /// Number of rows of queries, over all heads.
        rows: u32 = "rows_q",
    }

    /// The tables of rotary embeddings, and the positions at which they are read.
    struct RotationTables {
        cos: pointer = "rotary_cos",
        sin: pointer = "rotary_sin",
        /// The index of the tables' last row.
        last: u32 = "last_position",
        /// The array of the positions of the sequences' first rows.
        listed: maybe pointer = "rotary_seqlens",
    }
}

impl Spec {
    pub(super) fn form(&self) -> Params<Form> {
        let array = |is_there: bool| is_there.then_some(Elem::U32);
        let is_packed = |search: Search| search != Search::Dense;
        let tensor = || Strided::form(self.elem);
        Params {
            new: self.new.map(|new| NewRows {
                k_new: tensor(),
                v_new: tensor(),
                k_cache: Strided::form(new.of_cache(self.elem)),
                v_cache: Strided::form(new.of_cache(self.elem)),
                k_descale: new.quantizes.then_some(Elem::F32),
                v_descale: new.quantizes.then_some(Elem::F32),
                used_after: Elem::U32,
                cu_seqlens: array(is_packed(new.search)),
                of_sequence: (!is_packed(new.search)).then_some(Form::div()),
                seqlen: (),
                heads: Form::div(),
                rows: (),
                capacity: (),
                pages: new.paged.then_some(CachePages {
                    table: Elem::U32,
                    index: array(new.indexed),
                    table_rows: new.indexed.then_some(()),
                    stride: (),
                    rows: Form::div(),
                    entries: (),
                }),
                values: (),
                queries: (),
                lengths: (),
            }),
            queries: self.queries.map(|queries| Queries {
                q: tensor(),
                to: tensor(),
                cu_seqlens: array(is_packed(queries.search)),
                of_sequence: (!is_packed(queries.search)).then_some(Form::div()),
                heads: Form::div(),
                rows: (),
            }),
            rotation: self.rotation.map(|rotation| RotationTables {
                cos: rotation.table,
                sin: rotation.table,
                last: (),
                listed: array(rotation.base == SequenceBase::Listed),
            }),
            used: array(self.reads_used()),
            count: (),
        }
    }
}

impl Params<Host> {
    /// The arguments of a launch of a plan with something to do. The program must have the plan's buffers.
    pub(super) fn of<K>(plan: &Plan, program: &Program<K>) -> Params<Host> {
        let problem = plan.problem();
        let (maybe, find) = (|name| program.find(name), |name| program.find(name).expect("it is the plan's"));
        // A divisor is 0 only if the tensor is empty, and then it is never used.
        let div = |by: usize| FastDiv::new((by as u32).max(1));
        let strided = |name, tensor: &TensorDesc| Strided::of(find(name), tensor);
        let [values, queries, lengths] = plan.firsts();
        Params {
            new: problem.rows().map(|rows| NewRows {
                k_new: strided("k_new", &rows.k_new),
                v_new: strided("v_new", &rows.v_new),
                k_cache: strided("k_cache", &rows.k_cache),
                v_cache: strided("v_cache", &rows.v_cache),
                k_descale: maybe("k_descale"),
                v_descale: maybe("v_descale"),
                used_after: find("seqused_after"),
                cu_seqlens: maybe("cu_seqlens_k_new"),
                of_sequence: rows.new.seqlen().map(div),
                seqlen: rows.k_new.shape.seqlen as u32,
                heads: div(rows.k_new.shape.heads),
                rows: plan.keys().map_or(0, |keys| keys.rows),
                capacity: problem.capacity() as u32,
                pages: rows.cache.table_entries().map(|(stride, _)| CachePages {
                    table: find("page_table"),
                    index: maybe("cache_batch_idx"),
                    table_rows: maybe("cache_batch_idx").and(rows.cache.table_rows()).map(|rows| rows as u32),
                    stride: stride as u32,
                    rows: div(rows.k_cache.shape.seqlen),
                    entries: rows.k_cache.shape.batch as u32,
                }),
                values,
                queries,
                lengths,
            }),
            queries: problem.queries().map(|queries| Queries {
                q: strided("q", &queries.q),
                to: strided("q_rotated", &TensorDesc::contiguous(queries.q.dtype, queries.q.shape)),
                cu_seqlens: maybe("cu_seqlens_q"),
                of_sequence: queries.sequences.seqlen().map(div),
                heads: div(queries.q.shape.heads),
                rows: plan.queries().map_or(0, |queries| queries.rows),
            }),
            rotation: problem.rotary().map(|rotary| RotationTables {
                cos: find("rotary_cos"),
                sin: find("rotary_sin"),
                last: rotary.table_rows as u32 - 1,
                listed: maybe("rotary_seqlens"),
            }),
            used: maybe("seqused_k"),
            count: plan.count(),
        }
    }
}
