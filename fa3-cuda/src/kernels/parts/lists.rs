//! Keys that lists name (sparse attention): rows of a cache, and rows of a second cache behind them.
//!
//! A block of keys has entries of one list ([`fa3_sched::ListLens`]). A list may have any numbers, in any place: an
//! entry is a key if it is below the number of the cache's rows, as an unsigned number, and before the list's length.
//! Zeros fill the rows of other entries, nothing is read for them, and their scores are hidden.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_sched::forward::SplitKvPlan;
use fa3_sched::packed::ClampedRows;
use fa3_sched::{FastDiv, ListBlock, ListLens, ListedRows};
use fa3_types::{Problem, TensorDesc};

use super::pages::{NOWHERE, prefetch_words};
use super::side_rows::SideRows;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};
use crate::kernels::tensors::strides;

/// Bytes of the unit in which rows of memory are numbered: rows of a cache are a multiple of it apart.
pub(crate) const UNIT: u32 = 16;

/// The form of lists, beside the lengths of the first list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListForm {
    /// The base-2 logarithm of the number of keys of a block.
    pub log_keys: u32,
    /// With a second cache: whether an array has the lengths of its lists.
    pub second_used: Option<bool>,
}

impl ListForm {
    /// The form of a plan whose blocks have `keys` keys; `None` if it has no lists.
    pub(super) fn of(shared: &SplitKvPlan, keys: u32) -> Option<ListForm> {
        let (_, second) = shared.lists()?;
        Some(ListForm { log_keys: keys.ilog2(), second_used: second.map(|second| second.used) })
    }
}

params! {
    /// The lengths of lists.
    struct ListLengths {
        /// Entries of a list of the first cache, of which `seqused_k` counts the first ones.
        first: u32 = "keys_of_list",
        /// Entries of a list of the second cache, and the array of their numbers that count.
        second: maybe u32 = "extra_keys_of_list",
        second_used: maybe pointer = "extra_seqused_k",
        form: fixed ListForm,
    }

    /// The caches and their lists.
    struct Lists {
        first: named ListedCache = "listed",
        second: maybe named ListedCache = "extra",
    }
}

copies!(ListLengths, Lists);

/// A cache whose rows are listed, and its lists.
#[derive(Clone, Copy)]
pub(crate) struct ListedCache<S: Side> {
    indices: S::Pointer,
    /// Entries from a list to the next.
    stride: S::U32,
    /// Number of rows.
    rows: S::U32,
    /// Rows of a page.
    page_rows: FastDiv<S::U32>,
    k: ListedTensor<S>,
    v: ListedTensor<S>,
    /// The scales of the first row of V, if rows have their own ones, as far apart as V's rows.
    v_scales: Option<S::Pointer>,
}

/// K or V of a cache.
#[derive(Clone, Copy)]
struct ListedTensor<S: Side> {
    address: S::Pointer,
    /// Bytes from a head to the next.
    head: S::U64,
    /// Units from a page to the next, and from a row to the next.
    page: S::U32,
    row: S::U32,
}

impl<A: Side> ListedCache<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>, name: &str) -> ListedCache<B> {
        ListedCache {
            indices: by.pointer(&format!("{name}_indices"), self.indices),
            stride: by.u32(&format!("{name}_stride"), self.stride),
            rows: by.u32(&format!("{name}_rows"), self.rows),
            page_rows: self
                .page_rows
                .map_named(&format!("{name}_page_rows"), &mut |name: &str, number| by.u32(name, number)),
            k: self.k.pass(by, &format!("{name}_k")),
            v: self.v.pass(by, &format!("{name}_v")),
            v_scales: self.v_scales.map(|scales| by.pointer("v_scales", scales)),
        }
    }
}

impl<A: Side> ListedTensor<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>, name: &str) -> ListedTensor<B> {
        ListedTensor {
            address: by.pointer(name, self.address),
            head: by.u64(&format!("{name}_head_bytes"), self.head),
            page: by.u32(&format!("{name}_page"), self.page),
            row: by.u32(&format!("{name}_row"), self.row),
        }
    }
}

impl ListLengths<Form> {
    /// The parameters that kernels of this form share.
    pub(super) fn form(form: ListForm) -> ListLengths<Form> {
        let second_used = form.second_used.and_then(|used| used.then_some(Elem::U32));
        ListLengths { first: (), second: form.second_used.map(|_| ()), second_used, form }
    }
}

impl ListLengths<Host> {
    /// The lengths of a launch. `second_used` is the array of lengths of the second cache's lists.
    pub(super) fn of(
        (first, second): (ListedRows, Option<ListedRows>),
        second_used: Option<BufferId>,
        form: ListForm,
    ) -> ListLengths<Host> {
        ListLengths { first: first.keys, second: second.map(|second| second.keys), second_used, form }
    }
}

impl<'k> ListLengths<InKernel<'k>> {
    /// The lengths of the lists of sequence `sequence`, which must exist.
    #[track_caller]
    pub(super) fn lens(
        &self,
        b: &'k Builder,
        first: &SideRows<InKernel<'k>>,
        sequence: U32<'k>,
    ) -> ListLens<U32<'k>> {
        let len = |keys, used: Option<U64<'k>>| {
            let rows = ClampedRows::dense(keys);
            used.map_or(rows, |array| rows.used(b.load(sequence.mad_wide(4, array)))).len
        };
        let second = self.second.map(|keys| len(keys, self.second_used));
        ListLens { first: len(self.first, first.seqused), second }
    }
}

impl Lists<Form> {
    /// The parameters that a kernel declares, for K and V of these elements, and scales of V's rows if `is_scaled`.
    pub(crate) fn form(elems: [Elem; 2], is_scaled: bool, form: ListForm) -> Lists<Form> {
        let [k, v] = elems.map(|elem| ListedTensor { address: elem, head: (), page: (), row: () });
        let v_scales = is_scaled.then_some(Elem::F32);
        let (indices, page_rows) = (Elem::U32, Form::div());
        let cache = ListedCache { indices, stride: (), rows: (), page_rows, k, v, v_scales };
        Lists { first: cache, second: form.second_used.map(|_| cache) }
    }
}

impl Lists<Host> {
    /// The lists of a launch; `None` if keys are not listed. The program has their buffers.
    pub(crate) fn of<K>(
        problem: &Problem,
        shared: &SplitKvPlan,
        program: &Program<K>,
    ) -> Option<Lists<Host>> {
        let (first, second) = shared.lists()?;
        let cache = |list: ListedRows, tensors: [&TensorDesc; 2], names: [&str; 3]| {
            let find = |name: &str| program.find(name).expect("a program of lists has them and their caches");
            let [indices, k, v] = names.map(find);
            let tensor = |address, tensor: &TensorDesc| {
                let units = |elements: u64| (elements * tensor.dtype.bytes() as u64 / u64::from(UNIT)) as u32;
                let ([page, row], [_, head, _]) = (ListedRows::strides(tensor), strides(tensor));
                ListedTensor { address, head, page: units(page), row: units(row) }
            };
            ListedCache {
                indices,
                stride: list.list_stride,
                rows: list.rows,
                // If rows of pages follow each other, all rows are one page's.
                page_rows: FastDiv::new(list.page_rows.unwrap_or(list.rows).max(1)),
                k: tensor(k, tensors[0]),
                v: tensor(v, tensors[1]),
                v_scales: program.find("v_scales"),
            }
        };
        let second = second.zip(problem.extra());
        Some(Lists {
            first: cache(first, [problem.k(), problem.v()], ["indices", "k", "v"]),
            second: second.map(|(second, extra)| {
                cache(second, [&extra.k, &extra.v], ["extra_indices", "extra_k", "extra_v"])
            }),
        })
    }
}

impl<'k> Lists<InKernel<'k>> {
    /// Prefetches the lists of this number of sequences to L2, each CTA a part.
    #[track_caller]
    pub(crate) fn prefetch(&self, b: &'k Builder, sequences: U32<'k>) {
        let thread = b.cta_x().mad(b.launch().threads, b.tid());
        for ListedCache { indices, stride, .. } in std::iter::once(self.first).chain(self.second) {
            prefetch_words(b, thread, indices, stride * (sequences - 1));
        }
    }
}

/// The lists of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct ListSpan<'k> {
    builder: &'k Builder,
    lists: Lists<InKernel<'k>>,
    lens: ListLens<U32<'k>>,
    log_keys: u32,
    sequence: U32<'k>,
    /// The head of K and V.
    head: U32<'k>,
}

impl<'k> ListSpan<'k> {
    /// The lists of sequence `sequence`, in blocks of 2^`log_keys` keys of `head`.
    pub(crate) fn new(
        builder: &'k Builder,
        lists: Lists<InKernel<'k>>,
        (lens, log_keys): (ListLens<U32<'k>>, u32),
        [sequence, head]: [U32<'k>; 2],
    ) -> ListSpan<'k> {
        ListSpan { builder, lists, lens, log_keys, sequence, head }
    }

    /// The block that begins with key `first` of the sequence.
    #[track_caller]
    pub(super) fn number(&self, first: U32<'k>) -> U32<'k> {
        first >> self.log_keys
    }

    /// The builder of the kernel that the lists belong to.
    pub(super) fn builder(&self) -> &'k Builder {
        self.builder
    }

    /// A number of the cache whose rows are the entries of a block, which may have ones of the second list.
    #[track_caller]
    fn of_cache<T: Select>(
        &self,
        is_second: Option<V<'k, Pred>>,
        number: impl Fn(&ListedCache<InKernel<'k>>) -> V<'k, T>,
    ) -> V<'k, T> {
        let of_first = number(&self.lists.first);
        let second = self.lists.second.as_ref().zip(is_second);
        second.map_or(of_first, |(second, is_second)| is_second.select(number(second), of_first))
    }

    /// Loads entry `at` of block `number` to a variable, which stays as it is if the entry does not count.
    #[track_caller]
    pub(super) fn load(&self, to: &Var<'k, B32>, [number, at]: [U32<'k>; 2]) {
        let block = self.lens.block(number, self.log_keys);
        let list = self
            .of_cache(block.is_second, |cache| (self.sequence.mul_wide(cache.stride) << 2) + cache.indices);
        let from = (block.entry + at).mad_wide(4, list);
        self.builder.guarded(at.lt(block.entries), || to.set(self.builder.load::<B32>(from)));
    }

    /// The unit of memory at which the row of entry `at` of block `number` begins, in K and in V; [`NOWHERE`] if the
    /// entry, `index`, is no row or does not count.
    #[track_caller]
    pub(super) fn units(&self, [number, at]: [U32<'k>; 2], index: U32<'k>) -> [U32<'k>; 2] {
        let ListBlock { is_second, entries, .. } = self.lens.block(number, self.log_keys);
        let is_there = at.lt(entries) & index.lt(self.of_cache(is_second, |cache| cache.rows));
        [|cache: &ListedCache<InKernel<'k>>| cache.k, |cache: &ListedCache<InKernel<'k>>| cache.v].map(
            |tensor| {
                let unit = self.of_cache(is_second, |cache| {
                    let (page, within) = cache.page_rows.div_rem(index);
                    page.mad(tensor(cache).page, within * tensor(cache).row)
                });
                is_there.select(unit, NOWHERE)
            },
        )
    }

    /// The address from which units of the scales of V's rows count; `None` if rows have no own scales.
    #[track_caller]
    pub(crate) fn scales(&self) -> Option<U64<'k>> {
        let ListedCache { v, v_scales, .. } = self.lists.first;
        v_scales.map(|scales| self.head.to_u64() * v.head + scales)
    }

    /// The addresses from which units of K and of V count, in the cache of block `number`.
    #[track_caller]
    pub(crate) fn addresses(&self, number: U32<'k>) -> [U64<'k>; 2] {
        let is_second = self.lens.is_second(number, self.log_keys);
        let address = |tensor: ListedTensor<InKernel<'k>>| self.head.to_u64() * tensor.head + tensor.address;
        [
            self.of_cache(is_second, |cache| address(cache.k)),
            self.of_cache(is_second, |cache| address(cache.v)),
        ]
    }
}
