//! Arrays of a call, copied to the device and back.

use bytemuck::Pod;
use fa3_quant::RopeTable;
use fa3_types::{IntervalRows, KnownProblem, ScoreFunction, ScoreTable};
use ndarray::{Array, ArrayView, ArrayView1, ArrayView4, Dim, Dimension, IntoDimension};

use super::rows::pad;
use super::{Compiled, Device, DeviceBuffer, HostError, Lengths, OperationError, Stream, Tensors, Workspace};
use crate::Scalar;

/// The inputs of one call, on a device, by their names, and the stream of the call.
pub(super) struct DeviceInputs<'d> {
    device: &'d Device,
    pub(super) stream: Stream,
    buffers: Vec<(&'static str, DeviceBuffer)>,
}

impl<'d> DeviceInputs<'d> {
    /// A stream without inputs.
    pub(super) fn new(device: &'d Device) -> Result<DeviceInputs<'d>, HostError> {
        Ok(DeviceInputs { device, stream: device.stream()?, buffers: Vec::new() })
    }

    /// Uploads each array as contiguous elements. `arrays` is one array, or an `Option` of one.
    pub(super) fn add<'a, T: Pod, D: Dimension>(
        &mut self,
        name: &'static str,
        arrays: impl IntoIterator<Item = ArrayView<'a, T, D>>,
    ) -> Result<(), HostError> {
        for x in arrays {
            let x = x.as_standard_layout();
            let elements = x.as_slice().expect("the standard layout has no gaps");
            self.buffers.push((name, self.device.upload(&self.stream, elements)?));
        }
        Ok(())
    }

    /// Uploads tensors with their rows padded.
    pub(super) fn add_padded<'a, T: Scalar>(
        &mut self,
        tensors: impl IntoIterator<Item = (&'static str, ArrayView4<'a, T>)>,
    ) -> Result<(), HostError> {
        tensors.into_iter().try_for_each(|(name, x)| self.add(name, [pad(x).view()]))
    }

    /// Uploads lists of numbers, if given.
    pub(super) fn add_lists<const COUNT: usize>(
        &mut self,
        lists: [(&'static str, Option<&[i32]>); COUNT],
    ) -> Result<(), HostError> {
        lists.into_iter().try_for_each(|(name, list)| self.add(name, list.map(ArrayView1::from)))
    }

    /// Uploads cosines and sines, if any.
    pub(super) fn add_tables(
        &mut self,
        [cos, sin]: [&'static str; 2],
        table: Option<&RopeTable>,
    ) -> Result<(), HostError> {
        self.add(cos, table.map(|table| table.cos().view()))?;
        self.add(sin, table.map(|table| table.sin().view()))
    }

    /// Uploads the lengths of a problem's sequences, the bounds of its intervals and the tables of its function of
    /// scores, if any.
    pub(super) fn add_data_of(&mut self, problem: &KnownProblem) -> Result<(), HostError> {
        self.buffers.extend(Lengths::upload(self.device, &self.stream, problem)?.0);
        self.add_score(problem.score_function())?;
        self.add_lists([("intervals", problem.intervals().map(IntervalRows::bounds))])
    }

    /// Uploads the tables of a function of scores, if any.
    pub(super) fn add_score(&mut self, function: Option<&ScoreFunction>) -> Result<(), HostError> {
        let tables = function.map_or(&[][..], |function| function.tables());
        ScoreTable::NAMES
            .into_iter()
            .zip(tables)
            .try_for_each(|(name, table)| self.add(name, [ArrayView1::from(table.elements())]))
    }

    /// Uploads parts of one shape, one after the other.
    pub(super) fn add_parts<T: Pod, D: Dimension>(
        &mut self,
        name: &'static str,
        parts: &[ArrayView<'_, T, D>],
    ) -> Result<(), HostError> {
        let bytes = parts.first().map_or(0, |part| part.len() * size_of::<T>());
        let mut buffer = self.device.alloc(parts.len() * bytes)?;
        for (index, part) in parts.iter().enumerate() {
            let part = part.as_standard_layout();
            let elements = part.as_slice().expect("the standard layout has no gaps");
            buffer.upload_at(&self.stream, index * bytes, elements)?;
        }
        self.buffers.push((name, buffer));
        Ok(())
    }

    /// The inputs of a launch.
    pub(super) fn tensors(&self) -> Tensors<'_> {
        self.buffers.iter().fold(Tensors::default(), |tensors, (name, buffer)| tensors.input(name, buffer))
    }

    /// Runs an operation with a new workspace.
    pub(super) fn run<P>(&self, operation: &Compiled<P>, tensors: Tensors<'_>) -> Result<(), OperationError> {
        let mut workspace = Workspace::new(self.device, &self.stream, operation.workspace_bytes())?;
        operation.run(&self.stream, tensors, &mut workspace)
    }

    pub(super) fn download<T: Pod, const N: usize>(
        &self,
        buffer: &DeviceBuffer,
        dims: [usize; N],
    ) -> Result<Array<T, <[usize; N] as IntoDimension>::Dim>, HostError>
    where
        [usize; N]: IntoDimension<Dim = Dim<[usize; N]>>,
        Dim<[usize; N]>: Dimension,
    {
        let elements = buffer.download(&self.stream)?;
        Ok(Array::from_shape_vec(dims, elements).expect("one element for each index"))
    }
}
