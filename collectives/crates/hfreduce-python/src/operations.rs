//! `Operations`: a communicator's operations on memory of the host or, as `OnGpu`, of one GPU.
//!
//! Pointers arrive as integers; the Python side keeps the arrays alive until the work is drained.

use std::sync::Arc;

use hfreduce_device::{Device, Range};
use hfreduce_engine::{Buffer, Call, Communicator as Engine, Kind};
use pyo3::prelude::*;

use crate::arguments::{Place, dtype as as_dtype, op as as_op, seconds};
use crate::errors::raise;
use crate::work::Work;

/// An object that holds the memory of an operation.
pub(crate) type Keep = Option<Py<PyAny>>;

/// Operations that host and GPU memory have in common.
#[pyclass(module = "hfreduce._native", frozen, subclass)]
pub struct Operations {
    engine: Arc<Engine>,
    /// The device of the memory, and the stream whose queued work precedes each operation.
    gpu: Option<(Arc<Device>, usize)>,
}

/// Operations on GPU memory, each ordered after the work queued in one stream.
#[pyclass(module = "hfreduce._native", frozen, extends = Operations)]
pub struct OnGpu;

/// A call without memory.
pub(crate) fn call(
    kind: Kind,
    dtype: u8,
    timeout_seconds: f64,
    lazy: bool,
) -> PyResult<Call<'static>> {
    Ok(Call::new(kind, as_dtype(dtype)?, seconds(timeout_seconds)?, lazy))
}

impl Operations {
    pub(crate) fn on_host(engine: Arc<Engine>) -> Self {
        Self { engine, gpu: None }
    }

    pub(crate) fn on_gpu(engine: Arc<Engine>, device: Arc<Device>, stream: usize) -> Self {
        Self { engine, gpu: Some((device, stream)) }
    }

    pub(crate) fn in_place(
        &self,
        py: Python<'_>,
        call: Call<'_>,
        memory: Place,
        numel: usize,
        keep: Keep,
    ) -> PyResult<Work> {
        self.start(py, call, (memory, numel), None, keep)
    }

    /// Blocks of `numel` elements each.
    fn apart(
        &self,
        py: Python<'_>,
        call: Call<'_>,
        input: Place,
        output: Place,
        numel: usize,
        keep: Keep,
    ) -> PyResult<Work> {
        let is_root = self.engine.rank() == call.root;
        let (inputs, outputs) = call.kind.blocks(is_root, self.engine.world_size());
        // The memory of all blocks counts on the root alone.
        let side = |place, blocks| match blocks {
            0 => (Place::One(0), 0),
            // Too many elements are refused where they become bytes.
            _ => (place, numel.saturating_mul(blocks)),
        };
        self.start(py, call, side(input, inputs), Some(side(output, outputs)), keep)
    }

    /// Starts an operation; without an output it is in place.
    fn start(
        &self,
        py: Python<'_>,
        call: Call<'_>,
        input: (Place, usize),
        output: Option<(Place, usize)>,
        keep: Keep,
    ) -> PyResult<Work> {
        let dtype = call.dtype;
        let result = if let Some((device, stream)) = &self.gpu {
            let range = |(place, numel): (Place, usize)| place.range(numel, dtype);
            let (input, output) = (range(input)?, output.map_or(Ok(Range::default()), range)?);
            let work = py.detach(|| {
                // SAFETY: the Python interface demands it of its callers: every array stays alive
                // and untouched until its work is drained.
                unsafe { device.start(&self.engine, call, input, output, *stream) }
            });
            work.map(|work| Work::on_gpu(work, keep))
        } else {
            let buffer = |(place, numel): (Place, usize)| place.buffer(numel, dtype);
            let (input, output) = (buffer(input)?, output.map_or(Ok(Buffer::default()), buffer)?);
            let work = self.engine.call(Call { input, output, ..call });
            work.map(|work| Work::on_host(work, keep))
        };
        result.map_err(|error| raise(py, &error))
    }
}

#[pymethods]
#[allow(clippy::too_many_arguments)] // Keyword arguments in Python.
impl Operations {
    #[pyo3(signature = (pointer, numel, dtype, op, timeout_seconds, lazy = false, keep = None))]
    fn allreduce(
        &self,
        py: Python<'_>,
        pointer: usize,
        numel: usize,
        dtype: u8,
        op: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = call(Kind::Allreduce, dtype, timeout_seconds, lazy)?;
        let call = Call { op: as_op(op)?, ..call };
        self.in_place(py, call, Place::One(pointer), numel, keep)
    }

    #[pyo3(signature = (pointer, numel, dtype, root, timeout_seconds, lazy = false, keep = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        pointer: usize,
        numel: usize,
        dtype: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = Call { root, ..call(Kind::Broadcast, dtype, timeout_seconds, lazy)? };
        self.in_place(py, call, Place::One(pointer), numel, keep)
    }

    #[pyo3(signature = (pointer, numel, dtype, op, root, timeout_seconds, lazy = false, keep = None))]
    fn reduce(
        &self,
        py: Python<'_>,
        pointer: usize,
        numel: usize,
        dtype: u8,
        op: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = call(Kind::Reduce, dtype, timeout_seconds, lazy)?;
        let call = Call { op: as_op(op)?, root, ..call };
        self.in_place(py, call, Place::One(pointer), numel, keep)
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, timeout_seconds, lazy = false, keep = None))]
    fn allgather(
        &self,
        py: Python<'_>,
        input_pointer: usize,
        output_pointer: Place,
        numel: usize,
        dtype: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = call(Kind::Allgather, dtype, timeout_seconds, lazy)?;
        self.apart(py, call, Place::One(input_pointer), output_pointer, numel, keep)
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, op, timeout_seconds, lazy = false, keep = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        input_pointer: Place,
        output_pointer: usize,
        numel: usize,
        dtype: u8,
        op: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = call(Kind::ReduceScatter, dtype, timeout_seconds, lazy)?;
        let call = Call { op: as_op(op)?, ..call };
        self.apart(py, call, input_pointer, Place::One(output_pointer), numel, keep)
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, root, timeout_seconds, lazy = false, keep = None))]
    fn gather(
        &self,
        py: Python<'_>,
        input_pointer: usize,
        output_pointer: Place,
        numel: usize,
        dtype: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = Call { root, ..call(Kind::Gather, dtype, timeout_seconds, lazy)? };
        self.apart(py, call, Place::One(input_pointer), output_pointer, numel, keep)
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, root, timeout_seconds, lazy = false, keep = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        input_pointer: Place,
        output_pointer: usize,
        numel: usize,
        dtype: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = Call { root, ..call(Kind::Scatter, dtype, timeout_seconds, lazy)? };
        self.apart(py, call, input_pointer, Place::One(output_pointer), numel, keep)
    }

    #[pyo3(signature = (input_pointer, output_pointer, input_counts, output_counts, dtype, timeout_seconds, lazy = false, keep = None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        input_pointer: Place,
        output_pointer: Place,
        input_counts: Vec<usize>,
        output_counts: Vec<usize>,
        dtype: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let counts = [&input_counts[..], &output_counts[..]];
        let call = Call { counts, ..call(Kind::Alltoall, dtype, timeout_seconds, lazy)? };
        let total = |counts: &[usize]| counts.iter().fold(0_usize, |sum, n| sum.saturating_add(*n));
        let [inputs, outputs] = counts.map(total);
        self.start(py, call, (input_pointer, inputs), Some((output_pointer, outputs)), keep)
    }

    #[pyo3(signature = (pointer, numel, dtype, peer, tag, timeout_seconds, keep = None))]
    fn send(
        &self,
        py: Python<'_>,
        pointer: usize,
        numel: usize,
        dtype: u8,
        peer: u32,
        tag: u64,
        timeout_seconds: f64,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = call(Kind::Send, dtype, timeout_seconds, false)?;
        let call = Call { peer: Some(peer), tag, ..call };
        self.in_place(py, call, Place::One(pointer), numel, keep)
    }

    #[pyo3(signature = (pointer, numel, dtype, peer, tag, timeout_seconds, keep = None))]
    fn recv(
        &self,
        py: Python<'_>,
        pointer: usize,
        numel: usize,
        dtype: u8,
        peer: Option<u32>,
        tag: u64,
        timeout_seconds: f64,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = Call { peer, tag, ..call(Kind::Recv, dtype, timeout_seconds, false)? };
        self.in_place(py, call, Place::One(pointer), numel, keep)
    }
}
