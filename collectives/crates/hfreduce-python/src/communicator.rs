//! `Communicator` and `Work`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hfreduce_engine::{
    Buffer, Communicator as Engine, DType, Member, Work as EngineWork, fused_shape,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Place, buffer, buffers, dtype as as_dtype, op as as_op, seconds};
use crate::errors::{raise, to_exception};
use crate::gpu::{Gpu, OnGpu};
use crate::memory::Registered;
use crate::work::Work;

/// A connected group of ranks.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Communicator {
    engine: Arc<Engine>,
}

type Made = Result<EngineWork, hfreduce_engine::CollectiveError>;

impl Communicator {
    pub(crate) fn new(engine: Engine) -> Self {
        Self { engine: Arc::new(engine) }
    }

    fn made(py: Python<'_>, made: Made, keep: Option<Py<PyAny>>) -> PyResult<Work> {
        made.map(|work| Work::on_host(work, keep)).map_err(|error| raise(py, &error))
    }
}

#[pymethods]
#[allow(clippy::too_many_arguments)] // They mirror the collectives' own signatures.
impl Communicator {
    #[getter]
    fn rank(&self) -> u32 {
        self.engine.rank()
    }

    #[getter]
    fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    /// The same operations on memory of a GPU that is made ready in a stream.
    fn on(&self, gpu: &Gpu, stream: usize) -> OnGpu {
        OnGpu { engine: self.engine.clone(), device: gpu.device.clone(), stream }
    }

    fn allocate(&self, py: Python<'_>, nbytes: usize) -> PyResult<Registered> {
        self.engine.allocate(nbytes).map(Registered::new).map_err(|error| raise(py, &error))
    }

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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, op, timeout) = (as_dtype(dtype)?, as_op(op)?, seconds(timeout_seconds)?);
        let buffer = buffer(pointer, numel, dtype)?;
        Self::made(py, self.engine.allreduce(buffer, dtype, op, 0, timeout, lazy), keep)
    }

    #[pyo3(signature = (buffers, dtype, op, timeout_seconds, lazy = false, keep = None))]
    fn allreduce_many(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = pieces)] buffers: Vec<(usize, usize)>,
        dtype: u8,
        op: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, op, timeout) = (as_dtype(dtype)?, as_op(op)?, seconds(timeout_seconds)?);
        let shape = fused_shape(buffers.iter().map(|(_, numel)| *numel));
        let buffer = self::buffers(buffers, dtype)?;
        Self::made(py, self.engine.allreduce(buffer, dtype, op, shape, timeout, lazy), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let buffer = buffer(pointer, numel, dtype)?;
        Self::made(py, self.engine.broadcast(buffer, dtype, root, timeout, lazy), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, op, timeout) = (as_dtype(dtype)?, as_op(op)?, seconds(timeout_seconds)?);
        let buffer = buffer(pointer, numel, dtype)?;
        Self::made(py, self.engine.reduce(buffer, dtype, op, root, timeout, lazy), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let input = buffer(input_pointer, numel, dtype)?;
        let output = output_pointer.buffer(self.times_world(numel), dtype)?;
        Self::made(py, self.engine.allgather(input, output, dtype, timeout, lazy), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, op, timeout) = (as_dtype(dtype)?, as_op(op)?, seconds(timeout_seconds)?);
        let input = input_pointer.buffer(self.times_world(numel), dtype)?;
        let output = buffer(output_pointer, numel, dtype)?;
        Self::made(py, self.engine.reduce_scatter(input, output, dtype, op, timeout, lazy), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let input = buffer(input_pointer, numel, dtype)?;
        let output = self.on_root(root, output_pointer, numel, dtype)?;
        Self::made(py, self.engine.gather(input, output, dtype, root, timeout, lazy), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let input = self.on_root(root, input_pointer, numel, dtype)?;
        let output = buffer(output_pointer, numel, dtype)?;
        Self::made(py, self.engine.scatter(input, output, dtype, root, timeout, lazy), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let total = |counts: &[usize]| counts.iter().fold(0_usize, |sum, n| sum.saturating_add(*n));
        let input = input_pointer.buffer(total(&input_counts), dtype)?;
        let output = output_pointer.buffer(total(&output_counts), dtype)?;
        let made = self.engine.alltoall(
            input,
            output,
            &input_counts,
            &output_counts,
            dtype,
            timeout,
            lazy,
        );
        Self::made(py, made, keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let buffer = buffer(pointer, numel, dtype)?;
        Self::made(py, self.engine.send(buffer, dtype, peer, tag, timeout), keep)
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
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let buffer = buffer(pointer, numel, dtype)?;
        let made = match peer {
            Some(peer) => self.engine.recv(buffer, dtype, peer, tag, timeout),
            None => self.engine.recv_any(buffer, dtype, tag, timeout),
        };
        Self::made(py, made, keep)
    }

    #[pyo3(signature = (timeout_seconds, lazy = false, keep = None))]
    fn barrier(
        &self,
        py: Python<'_>,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        Self::made(py, self.engine.barrier(seconds(timeout_seconds)?, lazy), keep)
    }

    fn abort(&self, py: Python<'_>, reason: String) -> PyResult<()> {
        if !self.engine.is_ours() {
            return Err(PyRuntimeError::new_err(
                "a forked child cannot abort its parent's group: connect after forking",
            ));
        }
        py.detach(|| self.engine.abort(&reason));
        Ok(())
    }

    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.engine.error().map(|error| to_exception(py, &error).into_value(py).into_any())
    }

    #[pyo3(signature = (timeout_seconds = 5.0))]
    fn close(&self, py: Python<'_>, timeout_seconds: f64) -> PyResult<()> {
        let timeout = seconds(timeout_seconds)?;
        py.detach(|| self.engine.close(timeout));
        Ok(())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.engine.counters();
        let stats = PyDict::new(py);
        for (name, counter) in [
            ("operations", &counters.operations),
            ("chunks", &counters.chunks),
            ("sleeps", &counters.sleeps),
            ("wakeups", &counters.wakeups),
            ("held_back", &counters.held_back),
            ("streams", &counters.streams),
            ("sent_bytes", &counters.sent_bytes),
            ("mapped_bytes", &counters.mapped_bytes),
            ("staged_bytes", &counters.staged_bytes),
            ("received_bytes", &counters.received_bytes),
            ("refused_connections", &counters.refused),
            ("in_place_bytes", &counters.in_place_bytes),
            ("ring_bytes", &counters.ring_bytes),
            ("reduced_bytes", &counters.reduced_bytes),
            ("reducing_nanoseconds", &counters.reducing_nanoseconds),
        ] {
            stats.set_item(name, counter.load(Ordering::Relaxed))?;
        }
        stats.set_item("channels", self.engine.channels())?;
        stats.set_item("reached_at", self.engine.reached_at())?;
        stats.set_item("registered_bytes", self.engine.registered_bytes())?;
        Ok(stats)
    }

    #[pyo3(signature = (members, timeout_seconds = 60.0))]
    fn reconfigure(
        &self,
        py: Python<'_>,
        members: Vec<Listed>,
        timeout_seconds: f64,
    ) -> PyResult<Communicator> {
        let timeout = seconds(timeout_seconds)?;
        let members: Vec<Member> = members
            .into_iter()
            .map(|member| match member {
                Listed::Rank(rank) => Member::Rank(rank),
                Listed::Newcomer(info) => Member::Newcomer(info),
            })
            .collect();
        let next = py.detach(|| self.engine.reconfigure(&members, timeout));
        Ok(Communicator::new(next.map_err(|error| raise(py, &error))?))
    }

    #[getter]
    fn epoch(&self) -> u32 {
        self.engine.epoch()
    }

    #[getter]
    fn completed(&self) -> u64 {
        self.engine.completed()
    }

    #[getter]
    fn came_from(&self) -> Vec<Option<(u32, u64)>> {
        self.engine.previous_epochs()
    }

    fn flight<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let snapshot = py.detach(|| self.engine.flight());
        let text = serde_json::to_string(&snapshot).unwrap_or_default();
        py.import("json")?.call_method1("loads", (text,))
    }

    fn plan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text = self.engine.plan().describe().to_string();
        py.import("json")?.call_method1("loads", (text,))
    }
}

impl Communicator {
    /// The buffer of all blocks, which counts on the root alone.
    fn on_root(&self, root: u32, place: Place, numel: usize, dtype: DType) -> PyResult<Buffer> {
        match self.engine.rank() == root {
            true => place.buffer(self.times_world(numel), dtype),
            false => Ok(Buffer::default()),
        }
    }

    fn times_world(&self, numel: usize) -> usize {
        // Too many are refused where they become bytes.
        numel.saturating_mul(self.engine.world_size())
    }
}

/// A member of the next epoch: a present rank, or a newcomer's info.
#[derive(FromPyObject)]
enum Listed {
    Rank(u32),
    Newcomer(Vec<u8>),
}

fn pieces(list: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, usize)>> {
    list.extract()
}
