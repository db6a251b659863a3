//! The table of packed sequences, as an operation of its own.

use fa3_ir::Program;
use fa3_sched::{DeviceLimits, forward};
use fa3_types::Problem;

use super::{Compiled, Operation, OperationError};
use crate::kernels::{self, Spec};

/// The table of packed sequences (varlen), which a kernel writes for the forward passes of a model's layers.
///
/// Its tensors are the problem's lists of lengths, i32: `cu_seqlens_q` and `cu_seqlens_k` (sequences + 1), `seqused_q`
/// and `seqused_k` (sequences); and `table`, 32-bit words, of which it writes the used part.
///
/// With a table for other lengths, or with any other contents, a forward pass gives wrong numbers, but accesses no
/// memory outside of its tensors. The table must not change while a forward pass reads it.
///
/// ```
/// use fa3_cuda::host::{Device, Forward, ForwardTable, OperationError, Tensors, Workspace};
/// use fa3_sched::forward::PlanOptions;
/// use fa3_types::{Dtype, ProblemSpec, SequenceRows};
///
/// let run = || -> Result<Vec<u16>, OperationError> {
///     let rows = SequenceRows::packed(&[0, 300, 400])?;
///     let problem = ProblemSpec::packed(Dtype::Bf16, (2, 2), 64, &rows, &rows).causal().validate()?;
///     let device = Device::open(0)?;
///     let write = ForwardTable::new(&device, &problem)?;
///     let forward = Forward::with(&device, &problem, &PlanOptions::default().given_table())?;
///
///     let stream = device.stream()?;
///     let ends = device.upload(&stream, &rows.cu_seqlens())?;
///     let words = write.plan().table().words();
///     let mut table = device.alloc(4 * words as usize)?;
///     let lists = Tensors::new([("cu_seqlens_q", &ends), ("cu_seqlens_k", &ends)], [("table", &mut table)]);
///     write.run(&stream, lists, &mut Workspace::new(&device, &stream, write.workspace_bytes())?)?;
///
///     // 1 in bf16
///     let x = device.upload(&stream, &[0x3F80_u16; 400 * 2 * 64])?;
///     let mut o = device.alloc(x.bytes())?;
///     let mut workspace = Workspace::new(&device, &stream, forward.workspace_bytes())?;
///     for _ in 0..3 {
///         let tensors = Tensors::new([("q", &x), ("k", &x), ("v", &x), ("table", &table)], [("o", &mut o)]);
///         forward.run(&stream, tensors, &mut workspace)?;
///     }
///     Ok(o.download(&stream)?)
/// };
/// match run() {
///     Ok(o) => assert_eq!(o, [0x3F80; 400 * 2 * 64]), // the mean of ones
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
pub type ForwardTable = Compiled<forward::TablePlan>;

impl Operation for forward::TablePlan {
    type Problem = Problem;
    type Options = forward::PlanOptions;

    fn plan(
        problem: &Problem,
        limits: &DeviceLimits,
        options: &forward::PlanOptions,
    ) -> Result<Self, OperationError> {
        Ok(forward::TablePlan::with(problem, limits, options)?)
    }

    fn program(&self) -> Program<Spec> {
        kernels::packed::program(self.table(), false)
    }
}
