//! Pure operations of one lane, which a table generates ([`LaneOp`]).

mod generic;
mod pairs;
mod table;

pub use generic::{Bits, Number, Select};
pub use table::LaneOp;

use crate::inst::Access;
use crate::lang::{Arg, Builder, Class, V};
use crate::names::Names;
use crate::{Imm, Inst, Operand, Ty, Value};

/// A lane operation with its operands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneInst {
    /// The operation.
    pub op: LaneOp,
    /// Results, of the classes [`LaneOp::outputs`].
    pub dst: Vec<Value>,
    /// Operands, of the classes [`LaneOp::inputs`].
    pub src: Vec<Operand>,
}

impl LaneInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        let (inputs, outputs) = (self.op.inputs(), self.op.outputs());
        see(Access::Count { what: "operands", given: self.src.len(), expected: inputs.len() });
        see(Access::Count { what: "results", given: self.dst.len(), expected: outputs.len() });
        for (&operand, &ty) in self.src.iter().zip(inputs) {
            see(Access::Read(operand, ty));
            if matches!(operand, Operand::Imm(_)) && !self.op.takes_constants() {
                see(Access::Constant(self.op.name()));
            }
        }
        for (&value, &ty) in self.dst.iter().zip(outputs) {
            see(Access::Write(value, ty));
        }
    }

    /// The operation's PTX with the letters `a b c` replaced by the operands and `d e` by the results.
    pub(crate) fn text(&self, names: &Names) -> String {
        let (mnemonic, letters) = self.op.ptx().split_once(' ').unwrap_or((self.op.ptx(), ""));
        let mut text = format!("{mnemonic} ");
        for letter in letters.chars() {
            match letter {
                'a'..='c' => {
                    let operand = self.src.get(letter as usize - 'a' as usize);
                    text.extend(operand.map(|&operand| names.operand(operand)));
                }
                'd' | 'e' => {
                    let value = self.dst.get(letter as usize - 'd' as usize);
                    text.extend(value.map(|&value| names.value(value)));
                }
                punctuation => text.push(punctuation),
            }
        }
        text
    }
}

impl LaneOp {
    /// Whether PTX takes constants as operands. It has no constants of floating-point types below 32 bits: builder
    /// methods move these to registers first. The last type of the mnemonic is the operands' type.
    pub fn takes_constants(self) -> bool {
        let mnemonic = self.ptx().split(' ').next().unwrap_or_default();
        let ty = mnemonic.rsplit('.').next().unwrap_or_default();
        !["f16", "bf16", "f16x2", "bf16x2", "e4m3x2"].contains(&ty)
    }
}

impl Builder {
    /// Appends an operation with one result, and returns the result.
    #[track_caller]
    pub(crate) fn lane(&self, op: LaneOp, src: &[Operand]) -> Value {
        let dst = self.define(op.outputs()[0]);
        self.lane_to(op, vec![dst], src);
        dst
    }

    #[track_caller]
    fn lane_to(&self, op: LaneOp, dst: Vec<Value>, src: &[Operand]) {
        let src = match op.takes_constants() {
            true => src.to_vec(),
            false => src.iter().map(|&operand| self.in_register(operand)).collect(),
        };
        self.push(Inst::Lane(LaneInst { op, dst, src }));
    }

    #[track_caller]
    fn in_register(&self, operand: Operand) -> Operand {
        match operand {
            Operand::Imm(Imm::B32(bits)) => self.copy(bits).operand(),
            Operand::Imm(Imm::B16(bits)) => self.copy(bits).operand(),
            Operand::Imm(_) | Operand::Value(_) => operand,
        }
    }
}

/// The results of an operation: one value, or two.
trait Results<'k> {
    const TYPES: &'static [Ty];
    fn define(b: &'k Builder) -> (Self, Vec<Value>)
    where
        Self: Sized;
}

impl<'k, T: Class> Results<'k> for V<'k, T> {
    const TYPES: &'static [Ty] = &[T::TY];
    fn define(b: &'k Builder) -> (V<'k, T>, Vec<Value>) {
        let value = b.define(T::TY);
        (V::new(b, value), vec![value])
    }
}

impl<'k, T: Class, U: Class> Results<'k> for (V<'k, T>, V<'k, U>) {
    const TYPES: &'static [Ty] = &[T::TY, U::TY];
    fn define(b: &'k Builder) -> (Self, Vec<Value>) {
        let (first, second) = (b.define(T::TY), b.define(U::TY));
        ((V::new(b, first), V::new(b, second)), vec![first, second])
    }
}

/// Makes an operation of each row, with its signature, its name and its PTX. If the row names a method, the class of
/// the first operand gets the method. Other operations are operators, or `generic.rs` chooses them by class.
macro_rules! lane_ops {
    ($($(#[doc = $doc:literal])+ $op:ident: $(fn $name:ident)? ($($arg:ident: $class:ident),+) -> $result:tt = $ptx:literal;)+) => {
        /// A pure operation of one lane. Each is a row of one table, from which come its signature, its printed name,
        /// its PTX and its method.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum LaneOp {
            $($(#[doc = $doc])+ #[doc = concat!("\n\n`", $ptx, "`")] $op,)+
        }

        impl LaneOp {
            /// Every operation, in the order of the table.
            pub const ALL: &[LaneOp] = &[$(LaneOp::$op),+];

            /// The name of the variant.
            pub const fn name(self) -> &'static str {
                match self { $(LaneOp::$op => stringify!($op),)+ }
            }

            /// The operation's PTX, with the letters `a b c` for operands and `d e` for results.
            pub const fn ptx(self) -> &'static str {
                match self { $(LaneOp::$op => $ptx,)+ }
            }

            /// The classes of the operands.
            pub const fn inputs(self) -> &'static [Ty] {
                match self { $(LaneOp::$op => &[$(Ty::$class),+],)+ }
            }

            /// The classes of the results.
            pub const fn outputs(self) -> &'static [Ty] {
                match self { $(LaneOp::$op => <lane_ops!(@result $result) as Results<'static>>::TYPES,)+ }
            }
        }

        $(lane_ops! { @row [$(fn $name)?] $(#[doc = $doc])+ $op ($($arg: $class),+) $result $ptx })+
    };

    (@result ($first:ident, $second:ident)) => { (V<'_, $first>, V<'_, $second>) };
    (@result $class:ident) => { V<'_, $class> };

    (@row [] $($rest:tt)+) => {};
    (@row [fn $name:ident] $(#[doc = $doc:literal])+ $op:ident ($self:ident: $own:ident $(, $arg:ident: $class:ident)*) $result:tt $ptx:literal) => {
        impl<'k> V<'k, $own> {
            $(#[doc = $doc])+
            #[doc = concat!("\n\n`", $ptx, "`")]
            #[track_caller]
            pub fn $name(self, $($arg: impl Arg<Ty = $class>),*) -> lane_ops!(@results 'k $result) {
                let (result, dst) = <lane_ops!(@results 'k $result)>::define(self.builder());
                self.builder().lane_to(LaneOp::$op, dst, &[self.operand(), $($arg.operand()),*]);
                result
            }
        }
    };
    (@results $k:lifetime ($first:ident, $second:ident)) => { (V<$k, $first>, V<$k, $second>) };
    (@results $k:lifetime $class:ident) => { V<$k, $class> };
}
use lane_ops;
