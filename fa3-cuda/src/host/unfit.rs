//! What a caller gave to an operation, against what it needs.

use fa3_types::TensorName;

use super::context::Context;
use super::{DeviceBuffer, Stream, Workspace};

/// Why an operation cannot work on what it was given. Every operation's error says the same of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// Memory or a stream of another device.
    OtherDevice,
    /// The workspace is too small.
    WorkspaceSize { given: usize, needed: usize },
    /// A tensor does not fit into its memory.
    BufferSize { tensor: TensorName, given: usize, needed: u64 },
}

/// Checks that stream, buffers and workspace are of the device of `own`, and that the workspace has `needed` bytes.
pub(super) fn check_given<'a>(
    own: &Context,
    stream: &Stream,
    buffers: impl IntoIterator<Item = Option<&'a DeviceBuffer>>,
    workspace: &Workspace,
    needed: usize,
) -> Result<(), Unfit> {
    let is_own = |buffer: &DeviceBuffer| buffer.context().is(own);
    let mut buffers = buffers.into_iter().flatten();
    if !stream.context().is(own) || !is_own(workspace.buffer()) || !buffers.all(is_own) {
        return Err(Unfit::OtherDevice);
    }
    let given = workspace.bytes();
    if given < needed {
        return Err(Unfit::WorkspaceSize { given, needed });
    }
    Ok(())
}

/// Checks that each tensor's bytes fit into its memory, of an address and a size, where there is one.
pub(super) fn check_sizes(
    tensors: impl IntoIterator<Item = (TensorName, u64)>,
    memories: impl IntoIterator<Item = Option<(u64, usize)>>,
) -> Result<(), Unfit> {
    for ((tensor, needed), memory) in tensors.into_iter().zip(memories) {
        if let Some((_, given)) = memory
            && (given as u64) < needed
        {
            return Err(Unfit::BufferSize { tensor, given, needed });
        }
    }
    Ok(())
}
