//! A program, compiled.

use fa3_ir::{BufferId, BufferRole, Program};

use super::placement::Interface;
use super::prepared::Prepared;
use super::{Device, Function, HostError, Stream, Workspace};
use crate::kernels::Spec;

/// A program with its kernels compiled and its arguments packed. Running it is one launch for each step.
#[derive(Debug)]
pub(super) struct Planned {
    steps: Vec<Prepared>,
    workspace: WorkspaceLayout,
    interface: Interface,
}

/// The workspace of a program: the offsets of all buffers that are not the caller's tensors. Operations share a
/// workspace. Its first [`Workspace::COUNTERS`] bytes are only for tile counters, which are 0 before and after every
/// launch, so that no operation writes other data where another operation has a counter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// Buffers with their byte offsets in the workspace.
    parts: Vec<(BufferId, u64)>,
    /// The end of the last counter.
    tickets: usize,
    bytes: usize,
}

/// Alignment in bytes of buffers in a workspace, so that atomics on different buffers do not contend.
const ALIGN: usize = 256;

impl Planned {
    /// Compiles kernels that are not compiled yet, side by side. If `may_overlap`, kernels that execute
    /// griddepcontrol.wait are launched with PDL, before the previous grid has ended.
    ///
    /// # Errors
    /// More counters than fit into [`Workspace::COUNTERS`]; a grid or arguments that do not match a kernel's
    /// declaration; or errors of the driver's compiler.
    pub(super) fn new(
        device: &Device,
        program: &Program<Spec>,
        may_overlap: bool,
    ) -> Result<Planned, HostError> {
        let workspace = WorkspaceLayout::of(program)?;
        let (interface, buffers) = (Interface::of(program), program.buffers.len());
        let functions =
            device.all_kernels(&program.steps.iter().map(|step| &step.kernel).collect::<Vec<_>>())?;
        let steps = program.steps.iter().zip(functions).map(|(step, function)| {
            let early = may_overlap && function.ptx().waits_for_grid;
            Prepared::new(function, step, buffers, early)
        });
        Ok(Planned { steps: steps.collect::<Result<_, _>>()?, workspace, interface })
    }

    /// Size of the workspace in bytes.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }

    /// Number of leading bytes of the workspace that are counters. They must be 0 before the first launch.
    pub(super) fn counter_bytes(&self) -> usize {
        self.workspace.counter_bytes()
    }

    /// The kernels, in the order of the steps.
    pub(super) fn functions(&self) -> impl Iterator<Item = &Function> {
        self.steps.iter().map(Prepared::function)
    }

    /// The caller's tensors.
    pub(super) fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Puts every step on `stream`, with the caller's tensors at `addresses`, which [`Interface::place`] gave, and the
    /// other buffers in the workspace.
    ///
    /// # Safety
    /// The conditions of [`Function::launch_dependent`], for every step. `counters` and `scratch` are the addresses,
    /// multiples of 256, of the workspace's first [`Planned::counter_bytes`] bytes and of the bytes behind
    /// [`Workspace::COUNTERS`]. The counters must be 0, or counters of earlier launches on this stream. Until the work
    /// is done, no other work may use the counters or the scratch memory.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        mut addresses: Vec<u64>,
        [counters, scratch]: [u64; 2],
    ) -> Result<(), HostError> {
        for &(BufferId(buffer), offset) in &self.workspace.parts {
            addresses[buffer] = match offset.checked_sub(Workspace::COUNTERS as u64) {
                None => counters + offset,
                Some(behind) => scratch + behind,
            };
        }
        // SAFETY: the caller guarantees all addresses.
        self.steps.iter().try_for_each(|step| unsafe { step.launch(stream, &addresses) })
    }
}

impl WorkspaceLayout {
    /// The offset of a buffer in bytes, if it belongs to the workspace.
    pub fn offset(&self, buffer: BufferId) -> Option<u64> {
        self.parts.iter().find(|(part, _)| *part == buffer).map(|(_, offset)| *offset)
    }

    /// Size of the workspace in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of leading bytes that are counters, which must be 0 before the first launch.
    pub fn counter_bytes(&self) -> usize {
        self.tickets
    }

    /// The layout of a program's workspace. Scratch buffers that are too large for any memory end at `usize::MAX`.
    ///
    /// # Errors
    /// [`HostError::Tickets`] if the counters do not fit into their bytes.
    pub fn of<K>(program: &Program<K>) -> Result<WorkspaceLayout, HostError> {
        let mut layout = WorkspaceLayout::default();
        let place = |layout: &mut WorkspaceLayout, role: BufferRole, first: usize| {
            let buffers = program.buffers.iter().enumerate().filter(|(_, buffer)| buffer.role == role);
            for (index, buffer) in buffers {
                let at = layout.bytes.max(first);
                layout.parts.push((BufferId(index), at as u64));
                let bytes = buffer.bytes().checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
                layout.bytes = at.saturating_add(bytes);
            }
        };
        place(&mut layout, BufferRole::TileCounter, 0);
        layout.tickets = layout.bytes;
        if layout.tickets > Workspace::COUNTERS {
            return Err(HostError::Tickets { given: layout.tickets, limit: Workspace::COUNTERS });
        }
        place(&mut layout, BufferRole::Scratch, Workspace::COUNTERS);
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use fa3_ir::Elem;

    use super::*;

    #[test]
    fn a_workspace_has_what_is_neither_input_nor_output() {
        let mut program = Program::<Spec>::new();
        program.buffer("x", Elem::F16, &[7], BufferRole::Input);
        let sums = program.buffer("sums", Elem::F32, &[65], BufferRole::Scratch);
        program.buffer("y", Elem::F16, &[7], BufferRole::Output);
        let tickets =
            ["first", "second"].map(|name| program.buffer(name, Elem::U32, &[1], BufferRole::TileCounter));
        let layout = WorkspaceLayout::of(&program).unwrap();
        let parts = vec![(tickets[0], 0), (tickets[1], 256), (sums, 4096)];
        assert_eq!(layout, WorkspaceLayout { parts, tickets: 512, bytes: 4608 });
    }

    #[test]
    fn tickets_fit_the_bytes_that_begin_as_zeros() {
        let mut program = Program::<Spec>::new();
        for _ in 0..Workspace::COUNTERS / ALIGN {
            program.buffer("ticket", Elem::U32, &[1], BufferRole::TileCounter);
        }
        assert_eq!(WorkspaceLayout::of(&program).unwrap().tickets, Workspace::COUNTERS);
        program.buffer("ticket", Elem::U32, &[1], BufferRole::TileCounter);
        let (given, limit) = (Workspace::COUNTERS + ALIGN, Workspace::COUNTERS);
        assert_eq!(WorkspaceLayout::of(&program), Err(HostError::Tickets { given, limit }));
    }

    #[test]
    fn scratch_that_no_memory_holds_is_no_panic() {
        let mut program = Program::<Spec>::new();
        for _ in 0..2 {
            program.buffer("sums", Elem::F32, &[u32::MAX, u32::MAX], BufferRole::Scratch);
        }
        assert_eq!(WorkspaceLayout::of(&program).unwrap().bytes, usize::MAX);
    }
}
