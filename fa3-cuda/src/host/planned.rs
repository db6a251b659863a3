//! A program, compiled: what every operation on a GPU is, once it is planned.

use fa3_ir::{BufferId, BufferRole, Program};

use super::prepared::Prepared;
use super::{Device, Function, HostError, Stream, Workspace};
use crate::kernels::Spec;

/// A program with its kernels compiled and its arguments packed. Running it is one launch a step.
#[derive(Debug)]
pub(super) struct Planned {
    steps: Vec<Prepared>,
    workspace: WorkspaceLayout,
    buffers: usize,
}

/// Where the buffers that are neither inputs nor outputs lie in the workspace. What one operation leaves there the next
/// one may find: tickets, which are 0 before and after, come first, and nothing else lies where another operation may
/// have a ticket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct WorkspaceLayout {
    parts: Vec<(BufferId, u64)>,
    /// To the end of the last ticket.
    tickets: usize,
    bytes: usize,
}

/// No operation has more buffers.
const MOST_BUFFERS: usize = 24;

/// Buffers of a workspace begin at multiples of this, so that atomics of one do not meet those of another.
const ALIGN: usize = 256;

/// Bytes at the start of a workspace in which only tickets lie, those of four.
const TICKETS: usize = Workspace::COUNTERS;
const _: () = assert!(TICKETS == 4 * ALIGN);

impl Planned {
    /// Compiles what is not compiled yet. If `may_overlap`, kernels that execute griddepcontrol.wait themselves are
    /// launched with PDL, before the grid before them has ended.
    ///
    /// # Errors
    /// A grid or arguments that are not what a kernel declares, or what the driver's compiler says.
    pub(super) fn new(
        device: &Device,
        program: &Program<Spec>,
        may_overlap: bool,
    ) -> Result<Planned, HostError> {
        let buffers = program.buffers.len();
        if buffers > MOST_BUFFERS {
            return Err(HostError::Buffers { given: buffers, expected: MOST_BUFFERS });
        }
        let steps = program.steps.iter().map(|step| {
            let function = device.kernel(&step.kernel)?;
            let early = may_overlap && function.ptx().waits_for_grid;
            Prepared::new(function, step, buffers, early)
        });
        Ok(Planned {
            steps: steps.collect::<Result<_, _>>()?,
            workspace: WorkspaceLayout::of(program),
            buffers,
        })
    }

    /// Bytes of the workspace.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.workspace.bytes
    }

    /// How many of them, from the first on, are tickets, which must be 0 before the first launch.
    pub(super) fn counter_bytes(&self) -> usize {
        self.workspace.tickets
    }

    /// The kernels, in the order of the steps.
    pub(super) fn functions(&self) -> impl Iterator<Item = &Function> {
        self.steps.iter().map(Prepared::function)
    }

    /// Puts every step on `stream`, with the caller's buffer i at `addresses[i]` and the others in the workspace.
    ///
    /// # Safety
    /// Those of [`Function::launch_dependent`] for every step. `workspace` is the address, a multiple of 256, of
    /// [`Planned::workspace_bytes`] bytes, of which the first [`Planned::counter_bytes`] are 0, or that were a
    /// workspace of launches that come before on this stream; nobody else may touch them until the work is done.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        addresses: &[u64],
        workspace: u64,
    ) -> Result<(), HostError> {
        let mut all = [0; MOST_BUFFERS];
        let all = &mut all[..self.buffers];
        all[..addresses.len()].copy_from_slice(addresses);
        for &(BufferId(buffer), offset) in &self.workspace.parts {
            all[buffer] = workspace + offset;
        }
        // SAFETY: the caller vouches for all addresses.
        self.steps.iter().try_for_each(|step| unsafe { step.launch(stream, all) })
    }
}

impl WorkspaceLayout {
    fn of<K>(program: &Program<K>) -> WorkspaceLayout {
        let mut layout = WorkspaceLayout::default();
        let place = |layout: &mut WorkspaceLayout, role: BufferRole, first: usize| {
            let buffers = program.buffers.iter().enumerate().filter(|(_, buffer)| buffer.role == role);
            for (index, buffer) in buffers {
                let at = layout.bytes.max(first);
                layout.parts.push((BufferId(index), at as u64));
                layout.bytes = at + buffer.bytes().next_multiple_of(ALIGN);
            }
        };
        place(&mut layout, BufferRole::Ticket, 0);
        layout.tickets = layout.bytes;
        place(&mut layout, BufferRole::Scratch, TICKETS);
        layout
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
            ["first", "second"].map(|name| program.buffer(name, Elem::U32, &[1], BufferRole::Ticket));
        let layout = WorkspaceLayout::of(&program);
        let parts = vec![(tickets[0], 0), (tickets[1], 256), (sums, 1024)];
        assert_eq!(layout, WorkspaceLayout { parts, tickets: 512, bytes: 1536 });
    }
}
