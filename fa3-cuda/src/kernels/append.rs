//! Appends new rows of keys and values to a cache, with the keys rotated, and writes rotated queries to another tensor.
//! One launch does all this. A CTA has a few rows:
//!
//! ```text
//! CTAs   keys │ values │ queries │ lengths after
//!
//! row ──► sequence, row there ──► seqused_k ──► page ──► place of the row
//!                                           └─► angles of its position
//! ```
//!
//! The loads of a chain depend on each other; all other loads are issued without waiting for them. No access leaves the
//! cache, whatever the lengths and page tables are: see [`fa3_sched::append`].

mod params;
mod program;
mod row;
mod spec;
mod token;

pub use program::program;
pub use spec::{NewSpec, QuerySpec, Rotation, Search, Spec};

use fa3_ir::lang::*;
use fa3_sched::append::{THREADS, position, used_after};
use fa3_sched::packed::ClampedRows;
use fa3_types::QueryPositions;

use self::params::{NewRows, Params, Queries};
use self::row::RowPart;
use self::token::{Token, Tokens};
use super::KernelSpec;
use super::params::{Declare, InKernel};
use super::parts::strided::Strided;

impl KernelSpec for Spec {
    /// Builds the kernel of a spec that comes from [`Spec::of`].
    fn kernel(&self) -> Kernel {
        Kernel::build("append", Launch::threads(THREADS), |b| {
            let params = self.form().pass(&mut Declare(b));
            b.launch_dependents();
            b.grid_dependency_wait();
            Append { builder: b, spec: *self, params }.run();
        })
    }
}

/// The state of a kernel that all its parts read.
struct Append<'k> {
    builder: &'k Builder,
    spec: Spec,
    params: Params<InKernel<'k>>,
}

impl<'k> Append<'k> {
    /// Does this CTA's part of the work.
    #[track_caller]
    fn run(&self) {
        let (b, cta, queries) = (self.builder, self.builder.cta_x(), self.params.queries.as_ref());
        let Some(new) = &self.params.new else {
            if let Some(queries) = queries {
                self.rotate(queries, b.value(0));
            }
            return;
        };
        let lengths = || self.store_lengths(new);
        let behind = || match queries {
            Some(queries) => {
                b.if_else_uniform(cta.lt(new.lengths), || self.rotate(queries, new.queries), lengths);
            }
            None => lengths(),
        };
        let Some(spec) = self.spec.new else { return };
        let values = Moved {
            from: &new.v_new,
            to: &new.v_cache,
            descale: new.v_descale,
            head_dim: spec.head_dim_v,
            first: new.values,
            rotation: None,
        };
        let keys = Moved {
            from: &new.k_new,
            to: &new.k_cache,
            descale: new.k_descale,
            head_dim: spec.head_dim,
            first: b.value(0),
            rotation: self.spec.rotation,
        };
        let values = || {
            b.if_else_uniform(cta.lt(new.queries), || self.append(new, spec.search, values), behind);
        };
        b.if_else_uniform(cta.lt(new.values), || self.append(new, spec.search, keys), values);
    }

    /// Appends the CTA's new rows to the cache.
    #[track_caller]
    fn append(&self, new: &NewRows<InKernel<'k>>, search: Search, moved: Moved<'_, 'k>) {
        let b = self.builder;
        let Moved { from, to, descale, head_dim, first, rotation } = moved;
        let part = RowPart::new(b, head_dim, rotation, (first, new.rows));
        let (token, head) = new.heads.div_rem(part.row);
        let tokens =
            Tokens { of_sequence: new.of_sequence, cu_seqlens: new.cu_seqlens, count: self.params.count };
        let token = tokens.token(b, search, token, part.lanes());
        let x = part.load(b, from.global().at([token.entry, head, token.row_of_entry]));
        // A row outside every sequence is treated as if its sequence had a negative length, and is dropped.
        let used = self.of_sequence(self.params.used, &token, u32::MAX);
        let angles = rotation.zip(self.params.rotation.as_ref()).map(|(rotation, tables)| {
            let base = tables.listed.map_or(used, |listed| self.of_sequence(Some(listed), &token, 0));
            part.angles(b, &rotation, tables, base, token.row)
        });
        let (position, fits) = position(used, token.row, new.capacity);
        let ([entry, row], writes) = self.place(new, token.sequence, position, part.inside & fits);
        let x = match rotation.zip(angles) {
            Some(rotation) => part.rotated(self.spec.elem, x, rotation, None),
            None => x,
        };
        let at = to.global().at([entry, head, row]);
        match descale {
            None => part.store(b, at, x, writes),
            Some(scales) => {
                let scale = b.var("descale", 1.0);
                let number = token.sequence.mad(new.heads.divisor(), head);
                b.guarded(scales.ne(0u64) & writes, || scale.set(b.load::<F32>(number.mad_wide(4, scales))));
                part.store_codes(b, self.spec.elem, at, (x, scale.get()), writes);
            }
        }
        b.fence(FenceInst::ProxyAsyncGlobal);
    }

    /// The place in the cache of a row at `position` of its sequence: the batch entry, the row in it, and whether that
    /// row exists. It does not exist if `fits` is false.
    #[track_caller]
    fn place(
        &self,
        new: &NewRows<InKernel<'k>>,
        sequence: U32<'k>,
        position: U32<'k>,
        fits: V<'k, Pred>,
    ) -> ([U32<'k>; 2], V<'k, Pred>) {
        let Some(pages) = &new.pages else { return ([sequence, position], fits) };
        let b = self.builder;
        let (of_table, fits) = match pages.index.zip(pages.table_rows) {
            Some((index, rows)) => {
                let of_table = b.var("row of table", u32::MAX);
                b.guarded(fits, || of_table.set(b.load::<B32>(sequence.mad_wide(4, index))));
                (of_table.get(), fits & of_table.get().lt(rows))
            }
            None => (sequence, fits),
        };
        let (page, row) = pages.rows.div_rem(position);
        let at = of_table.mul_wide(pages.stride) + page.to_u64();
        // A row that does not fit gets a missing page.
        let entry = b.var("page", u32::MAX);
        b.guarded(fits, || entry.set(b.load::<B32>((at << 2) + pages.table)));
        let entry = entry.get();
        ([entry, row], entry.lt(pages.entries))
    }

    /// Rotates the CTA's queries. The CTAs from number `first` on rotate queries.
    #[track_caller]
    fn rotate(&self, queries: &Queries<InKernel<'k>>, first: U32<'k>) {
        let b = self.builder;
        let all = (self.spec.queries, self.spec.rotation, &self.params.rotation);
        let (Some(spec), Some(rotation), Some(tables)) = all else { return };
        let part = RowPart::new(b, spec.head_dim, Some(rotation), (first, queries.rows));
        let (token, head) = queries.heads.div_rem(part.row);
        let tokens = Tokens {
            of_sequence: queries.of_sequence,
            cu_seqlens: queries.cu_seqlens,
            count: self.params.count,
        };
        let token = tokens.token(b, spec.search, token, part.lanes());
        let indices = [token.entry, head, token.row_of_entry];
        let x = part.load(b, queries.q.global().at(indices));
        let base = self.of_sequence(tables.listed.or(self.params.used), &token, 0);
        let row = match spec.positions {
            QueryPositions::Each => token.row,
            QueryPositions::First => b.value(0),
        };
        let angles = part.angles(b, &rotation, tables, base, row);
        let x = part.rotated(self.spec.elem, x, (rotation, angles), token.is_there);
        part.store(b, queries.to.global().at(indices), x, part.inside);
        b.fence(FenceInst::ProxyAsyncGlobal);
    }

    /// Writes the lengths of sequences after the append. Each thread writes one.
    #[track_caller]
    fn store_lengths(&self, new: &NewRows<InKernel<'k>>) {
        let (b, params) = (self.builder, &self.params);
        let sequence = (b.cta_x() - new.lengths).mad(THREADS, b.tid());
        b.if_lanes(sequence.lt(params.count), || {
            let used = params.used.map_or(b.value(0), |used| b.load(sequence.mad_wide(4, used)));
            let rows = match new.cu_seqlens {
                Some(cu_seqlens) => {
                    let at = sequence.mad_wide(4, cu_seqlens);
                    ClampedRows::packed([b.load(at), b.load(at.at(4))], new.seqlen).rows
                }
                None => new.seqlen,
            };
            let after = used_after(used, rows, new.capacity);
            b.store(sequence.mad_wide(4, new.used_after), after);
        });
    }

    /// The array's entry for the sequence of a row, or `otherwise` if the row is outside every sequence.
    #[track_caller]
    fn of_sequence(&self, array: Option<U64<'k>>, token: &Token<'k>, otherwise: u32) -> U32<'k> {
        let (b, Some(array)) = (self.builder, array) else { return self.builder.value(otherwise) };
        let at = token.sequence.mad_wide(4, array);
        let Some(is_there) = token.is_there else { return b.load(at) };
        let entry = b.var("entry", otherwise);
        b.guarded(is_there, || entry.set(b.load::<B32>(at)));
        entry.get()
    }
}

/// The rows that a CTA moves: new keys or values.
struct Moved<'p, 'k> {
    from: &'p Strided<InKernel<'k>>,
    to: &'p Strided<InKernel<'k>>,
    /// The scales of the cache, if rows are quantized to e4m3.
    descale: Option<U64<'k>>,
    head_dim: u32,
    /// The first CTA that moves these rows.
    first: U32<'k>,
    rotation: Option<Rotation>,
}
