//! Matrix products of a warpgroup: D = A · B + D, asynchronous, D in registers.

use std::collections::HashSet;

use crate::inst::Access;
use crate::lang::{Arg, B32, B64, Builder, F32, Pred, Reg, Var};
use crate::names::Names;
use crate::{Inst, Operand, Ty, Value};

/// The element type of A and B. D is binary32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WgmmaType {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 with 4 exponent and 3 mantissa bits.
    E4m3,
}

impl WgmmaType {
    /// Extent of one product along K, in elements: 32 bytes.
    pub const fn k(self) -> u32 {
        match self {
            WgmmaType::F16 | WgmmaType::Bf16 => 16,
            WgmmaType::E4m3 => 32,
        }
    }

    const fn ptx(self) -> &'static str {
        match self {
            WgmmaType::F16 => "f16",
            WgmmaType::Bf16 => "bf16",
            WgmmaType::E4m3 => "e4m3",
        }
    }
}

/// The dimension of an operand that is contiguous in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// K, the dimension that is summed over.
    K,
    /// M for A, N for B; for 16-bit elements only.
    Mn,
}

/// The place of A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WgmmaA {
    /// In shared memory, by a descriptor.
    Shared {
        /// The descriptor.
        desc: Operand,
        /// The dimension that is contiguous.
        major: Major,
    },
    /// In registers.
    Registers([Value; 4]),
}

/// Use of D's old value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleD {
    /// D = A · B. The old D is not read.
    Overwrite,
    /// D = A · B + D.
    Accumulate,
    /// [`ScaleD::Accumulate`] where the predicate holds, [`ScaleD::Overwrite`] elsewhere. The predicate is the same in
    /// all lanes.
    AccumulateIf(Value),
}

/// One product of shape 64 x `n` x [`WgmmaType::k`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mma {
    /// The element type of A and B.
    pub ty: WgmmaType,
    /// Columns of D: a multiple of 8 up to 256.
    pub n: u32,
    /// D: n / 2 variables. Thread t's number v is row 16 (t / 32) + (t mod 32) / 4 + 8 ((v / 2) mod 2),
    /// column 8 (v / 4) + 2 (t mod 4) + v mod 2.
    pub d: Vec<Value>,
    /// A.
    pub a: WgmmaA,
    /// The descriptor of B.
    pub b: Operand,
    /// The dimension of B that is contiguous.
    pub b_major: Major,
    /// Use of D's old value.
    pub scale_d: ScaleD,
    /// Whether A is negated.
    pub negate_a: bool,
    /// Whether B is negated.
    pub negate_b: bool,
}

/// Products, and the instructions that order them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WgmmaInst {
    /// `wgmma.fence`: orders earlier register accesses before later products.
    Fence,
    /// `wgmma.commit_group`.
    Commit,
    /// `wgmma.wait_group`: waits until at most `pending` groups are unfinished.
    Wait {
        /// At most 7, which is as far as the hardware counts.
        pending: u32,
    },
    /// `wgmma.mma_async`.
    Mma(Mma),
}

impl WgmmaInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        match self {
            WgmmaInst::Fence | WgmmaInst::Commit => {}
            WgmmaInst::Wait { pending: given } => {
                let what = "wgmma groups";
                see(Access::Limit { what, given: *given, min: 0, max: 7, multiple: 1 });
            }
            WgmmaInst::Mma(mma) => mma.visit(see),
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        match self {
            WgmmaInst::Fence => "wgmma.fence.sync.aligned".to_owned(),
            WgmmaInst::Commit => "wgmma.commit_group.sync.aligned".to_owned(),
            WgmmaInst::Wait { pending } => format!("wgmma.wait_group.sync.aligned {pending}"),
            WgmmaInst::Mma(mma) => mma.text(names),
        }
    }
}

impl Mma {
    fn visit(&self, see: &mut dyn FnMut(Access)) {
        see(Access::Limit { what: "wgmma n", given: self.n, min: 8, max: 256, multiple: 8 });
        let (given, expected) = (self.d.len(), self.n as usize / 2);
        see(Access::Count { what: "accumulator registers", given, expected });
        let different = self.d.iter().collect::<HashSet<_>>().len();
        see(Access::Count { what: "different accumulator registers", given: different, expected: given });
        match self.a {
            WgmmaA::Shared { desc, .. } => see(Access::Read(desc, Ty::B64)),
            WgmmaA::Registers(a) => {
                a.iter().for_each(|&value| see(Access::Read(Operand::Value(value), Ty::B32)));
            }
        }
        see(Access::Read(self.b, Ty::B64));
        let a_is_mn = matches!(self.a, WgmmaA::Shared { major: Major::Mn, .. });
        if self.ty == WgmmaType::E4m3 && (a_is_mn || self.b_major == Major::Mn) {
            see(Access::MajorOf8Bit);
        }
        if let ScaleD::AccumulateIf(pred) = self.scale_d {
            see(Access::Read(Operand::Value(pred), Ty::Pred));
        }
        for &value in &self.d {
            see(match self.scale_d {
                ScaleD::Accumulate => Access::Update(value, Ty::F32),
                ScaleD::Overwrite | ScaleD::AccumulateIf(_) => Access::Write(value, Ty::F32),
            });
        }
    }

    fn text(&self, names: &Names) -> String {
        let (n, k, ty) = (self.n, self.ty.k(), self.ty.ptx());
        let a = match &self.a {
            WgmmaA::Shared { desc, .. } => names.operand(*desc),
            WgmmaA::Registers(registers) => names.list(registers).into(),
        };
        let scale_d = match self.scale_d {
            ScaleD::Overwrite => "0".into(),
            ScaleD::Accumulate => "1".into(),
            ScaleD::AccumulateIf(pred) => names.value(pred),
        };
        let sign = |negate: bool| if negate { "-1" } else { "1" };
        let (sign_a, sign_b) = (sign(self.negate_a), sign(self.negate_b));
        let (d, b) = (names.list(&self.d), names.operand(self.b));
        let majors = self.majors();
        format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{ty}.{ty} {d}, {a}, {b}, {scale_d}, {sign_a}, {sign_b}{majors}"
        )
    }

    /// The transposition flags: of A and B, of B alone if A is in registers, or none for 8-bit elements.
    fn majors(&self) -> String {
        let flag = |major| u32::from(major == Major::Mn);
        match (self.ty, self.a) {
            (WgmmaType::E4m3, _) => String::new(),
            (_, WgmmaA::Registers(_)) => format!(", {}", flag(self.b_major)),
            (_, WgmmaA::Shared { major, .. }) => format!(", {}, {}", flag(major), flag(self.b_major)),
        }
    }

    /// D = `a` · `b`, both K-major in shared memory; `d` gives the number of columns. Change the fields for other
    /// forms.
    pub fn new(ty: WgmmaType, d: &[Var<'_, F32>], a: impl Arg<Ty = B64>, b: impl Arg<Ty = B64>) -> Mma {
        Mma {
            ty,
            n: d.len() as u32 * 2,
            d: d.iter().map(|var| var.register()).collect(),
            a: WgmmaA::Shared { desc: a.operand(), major: Major::K },
            b: b.operand(),
            b_major: Major::K,
            scale_d: ScaleD::Overwrite,
            negate_a: false,
            negate_b: false,
        }
    }

    /// Like [`Mma::new`], with A in registers. For 16-bit elements, half h of thread t's register i is row
    /// `16 (t / 32) + (t mod 32) / 4 + 8 (i mod 2)`, column `2 (t mod 4) + h + 8 (i / 2)`. For 8-bit elements, byte b
    /// of the register is column `4 (t mod 4) + b + 16 (i / 2)`.
    pub fn with_registers(
        ty: WgmmaType,
        d: &[Var<'_, F32>],
        a: [impl Reg<Ty = B32>; 4],
        b: impl Arg<Ty = B64>,
    ) -> Mma {
        Mma { a: WgmmaA::Registers(a.map(Reg::register)), ..Mma::new(ty, d, 0u64, b) }
    }

    /// Accumulates into D.
    #[must_use]
    pub fn accumulate(self) -> Mma {
        Mma { scale_d: ScaleD::Accumulate, ..self }
    }

    /// Accumulates into D where `pred` holds, which is the same in all lanes.
    #[must_use]
    pub fn accumulate_if(self, pred: impl Reg<Ty = Pred>) -> Mma {
        Mma { scale_d: ScaleD::AccumulateIf(pred.register()), ..self }
    }

    /// Reads B with N contiguous (MN-major).
    #[must_use]
    pub fn b_mn_major(self) -> Mma {
        Mma { b_major: Major::Mn, ..self }
    }
}

/// Matrix products of a warpgroup.
impl Builder {
    /// Orders accesses to accumulators and A registers before the products that follow.
    #[track_caller]
    pub fn wgmma_fence(&self) {
        self.push(Inst::Wgmma(WgmmaInst::Fence));
    }

    /// Begins a product. Its accumulators and A registers must not be touched until a wait has retired its group.
    #[track_caller]
    pub fn wgmma(&self, mma: Mma) {
        self.push(Inst::Wgmma(WgmmaInst::Mma(mma)));
    }

    /// Commits the products since the last commit as a group.
    #[track_caller]
    pub fn wgmma_commit(&self) {
        self.push(Inst::Wgmma(WgmmaInst::Commit));
    }

    /// Waits until at most `pending` groups are unfinished.
    #[track_caller]
    pub fn wgmma_wait(&self, pending: u32) {
        self.push(Inst::Wgmma(WgmmaInst::Wait { pending }));
    }
}
