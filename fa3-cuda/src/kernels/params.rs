//! Parameters of kernels. Each operation has one struct of parameters, generic over the [`Side`] that holds them.
//!
//! A function of the struct passes its fields to a [`Pass`], which fixes their names and their order. [`params!`]
//! declares the struct and the function. [`Declare`] turns a form of the parameters into the registers with which a
//! kernel computes. [`Fill`] turns the values of a launch into a list of arguments.

use std::num::NonZeroU32;

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Passed};
use fa3_sched::backward::TileSplit;
use fa3_sched::{Decoder, FastDiv, Order, TileCounts};

/// A side that holds parameters: a kernel's declaration, a launch, or a kernel.
pub(crate) trait Side: Copy {
    /// A number of 32 bits.
    type U32: Copy;
    /// A number of 64 bits.
    type U64: Copy;
    /// A binary32 number.
    type F32: Copy;
    /// The address of an array.
    type Pointer: Copy;
    /// A tensor whose tiles are copied by a tensor map.
    type Tensor: Clone;
}

/// The side of a kernel's declaration, with types and shapes, but no values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form;

impl Side for Form {
    type U32 = ();
    type U64 = ();
    type F32 = ();
    type Pointer = Elem;
    type Tensor = TensorForm;
}

impl Form {
    /// The form of a decoder for order `order`.
    pub(crate) fn decoder(order: Order) -> Decoder<()> {
        Decoder::new(TileCounts::ONE, order).map(|_| ())
    }

    /// The form of [`TileSplit`].
    pub(crate) fn splits() -> TileSplit<()> {
        TileSplit::new(NonZeroU32::MIN, 0, 0).map_named(&mut |_, _| ())
    }

    /// The form of a divisor.
    pub(crate) fn div() -> FastDiv<()> {
        FastDiv::new(1).map(|_| ())
    }
}

/// A tensor's form: the shape of its tiles, the number of its dimensions, and the dimensions of a tile's rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorForm {
    pub(crate) tile: TileShape,
    pub(crate) rank: usize,
    pub(crate) rows: RowDims,
}

/// The dimensions of the tensor over which a tile's rows run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowDims {
    /// A single dimension.
    One(usize),
    /// Two dimensions: the first is faster and counts `count` rows, the second counts the rest.
    Two { first: usize, count: u32, second: usize },
}

/// The side of a launch on the host, with values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host;

impl Side for Host {
    type U32 = u32;
    type U64 = u64;
    type F32 = f32;
    type Pointer = BufferId;
    /// A tensor, always as a [`Passed::Tensor`].
    type Tensor = Passed;
}

/// The side of a kernel, with registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InKernel<'k>(std::marker::PhantomData<&'k Builder>);

impl<'k> Side for InKernel<'k> {
    type U32 = U32<'k>;
    type U64 = U64<'k>;
    type F32 = V<'k, F32>;
    type Pointer = U64<'k>;
    type Tensor = TileMap;
}

/// A visitor that turns a struct of parameters from side `A` to side `B`, field by field.
pub(crate) trait Pass<A: Side, B: Side> {
    fn u32(&mut self, name: &str, x: A::U32) -> B::U32;
    fn u64(&mut self, name: &str, x: A::U64) -> B::U64;
    fn f32(&mut self, name: &str, x: A::F32) -> B::F32;
    fn pointer(&mut self, name: &str, x: A::Pointer) -> B::Pointer;
    fn tensor(&mut self, name: &str, x: A::Tensor) -> B::Tensor;
}

/// The pass that declares the parameters of a kernel.
pub(crate) struct Declare<'k>(pub(crate) &'k Builder);

impl<'k> Pass<Form, InKernel<'k>> for Declare<'k> {
    #[track_caller]
    fn u32(&mut self, name: &str, (): ()) -> U32<'k> {
        self.0.param_u32(name)
    }

    #[track_caller]
    fn u64(&mut self, name: &str, (): ()) -> U64<'k> {
        self.0.param_u64(name)
    }

    #[track_caller]
    fn f32(&mut self, name: &str, (): ()) -> V<'k, F32> {
        self.0.param_f32(name)
    }

    #[track_caller]
    fn pointer(&mut self, name: &str, elem: Elem) -> U64<'k> {
        self.0.param_pointer(name, elem)
    }

    #[track_caller]
    fn tensor(&mut self, name: &str, TensorForm { tile, rank, rows }: TensorForm) -> TileMap {
        match rows {
            RowDims::One(rows) => self.0.tile_map_of(name, tile, rank, rows),
            RowDims::Two { first, count, second } => {
                self.0.tile_map_over(name, tile, rank, &[(first, count), (second, tile.rows / count)])
            }
        }
    }
}

/// The pass that lists the arguments of a launch by name.
#[derive(Debug, Default)]
pub(crate) struct Fill(pub(crate) Vec<(String, Passed)>);

impl Fill {
    /// The arguments that `pass` lists when it gets a [`Fill`].
    pub(crate) fn args(pass: impl FnOnce(&mut Fill)) -> Vec<(String, Passed)> {
        let mut fill = Fill::default();
        pass(&mut fill);
        fill.0
    }
}

impl Pass<Host, Filled> for Fill {
    fn u32(&mut self, name: &str, x: u32) {
        self.0.push((name.to_owned(), Passed::U32(x)));
    }

    fn u64(&mut self, name: &str, x: u64) {
        self.0.push((name.to_owned(), Passed::U64(x)));
    }

    fn f32(&mut self, name: &str, x: f32) {
        self.0.push((name.to_owned(), Passed::F32(x)));
    }

    fn pointer(&mut self, name: &str, buffer: BufferId) {
        self.0.push((name.to_owned(), Passed::Pointer(buffer)));
    }

    fn tensor(&mut self, name: &str, tensor: Passed) {
        self.0.push((name.to_owned(), tensor));
    }
}

/// The side that is left when arguments have been listed: nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Filled;

impl Side for Filled {
    type U32 = ();
    type U64 = ();
    type F32 = ();
    type Pointer = ();
    type Tensor = ();
}

/// Defines structs of parameters, generic over the [`Side`] that holds them. Each has a function `pass`, which passes
/// the fields in their order. A field states its kind: a method of [`Pass`]; `div`; `all` with another struct; `named`
/// with a struct whose parameters have the field's name in theirs; `numbers` with a type of named numbers; or `fixed`
/// with a type that is not a parameter, but decides about the code. A name after `=` replaces the field's name. `maybe`
/// marks a field that only some kernels have.
macro_rules! params {
    ($($(#[$meta:meta])* struct $name:ident {
        $($(#[$doc:meta])* $field:ident: $($kind:ident)+ $(= $as:literal)?,)+
    })+) => {$(
        $(#[$meta])*
        pub(crate) struct $name<S: Side> {
            $($(#[$doc])* pub(crate) $field: param!(@type S $($kind)+),)+
        }

        impl<A: Side> $name<A> {
            /// Passes the fields in the order of the kernel's signature.
            #[track_caller]
            pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> $name<B> {
                $name {
                    $($field: param!(
                        @pass by (param!(@name $field $($as)?)) (self.$field) $($kind)+
                    ),)+
                }
            }
        }
    )+};
}

/// Gives the type of a field of [`params`], its name, and the code that passes it.
macro_rules! param {
    (@type $side:ident maybe $($kind:ident)+) => { Option<param!(@type $side $($kind)+)> };
    (@type $side:ident all $params:ident) => { $params<$side> };
    (@type $side:ident named $params:ident) => { $params<$side> };
    (@type $side:ident numbers $numbers:ident) => { $numbers<$side::U32> };
    (@type $side:ident fixed $fixed:ident) => { $fixed };
    (@type $side:ident div) => { FastDiv<$side::U32> };
    (@type $side:ident u32) => { $side::U32 };
    (@type $side:ident u64) => { $side::U64 };
    (@type $side:ident f32) => { $side::F32 };
    (@type $side:ident pointer) => { $side::Pointer };
    (@type $side:ident tensor) => { $side::Tensor };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $as:literal) => { $as };
    (@pass $by:ident ($name:expr) ($x:expr) maybe $($kind:ident)+) => {
        $x.map(|x| param!(@pass $by ($name) (x) $($kind)+))
    };
    (@pass $by:ident ($name:expr) ($x:expr) all $params:ident) => { $x.pass($by) };
    (@pass $by:ident ($name:expr) ($x:expr) named $params:ident) => { $x.pass($by, $name) };
    (@pass $by:ident ($name:expr) ($x:expr) numbers $numbers:ident) => {
        $x.map_named(&mut |name: &str, number| $by.u32(name, number))
    };
    (@pass $by:ident ($name:expr) ($x:expr) fixed $fixed:ident) => { $x };
    (@pass $by:ident ($name:expr) ($x:expr) div) => {
        $x.map_named($name, &mut |name: &str, number| $by.u32(name, number))
    };
    (@pass $by:ident ($name:expr) ($x:expr) $kind:ident) => { $by.$kind($name, $x) };
}

/// Makes structs of [`params`] without tensors `Copy`. `derive` cannot, because their fields' types are macros.
macro_rules! copies {
    ($($name:ident),+) => {$(
        impl<S: Side> Copy for $name<S> {}

        impl<S: Side> Clone for $name<S> {
            fn clone(&self) -> $name<S> {
                *self
            }
        }
    )+};
}

pub(crate) use {copies, param, params};
