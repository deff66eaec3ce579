//! `Communicator`: a connected group of ranks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hfreduce_engine::{Call, Communicator as Engine, DType, Kind, Member, fused_shape};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Place, op as as_op, seconds};
use crate::errors::{raise, to_exception};
use crate::gpu::Gpu;
use crate::memory::Registered;
use crate::operations::{Keep, OnGpu, Operations, call};
use crate::work::Work;

/// A connected group of ranks.
#[pyclass(module = "hfreduce._native", frozen, extends = Operations)]
pub struct Communicator {
    engine: Arc<Engine>,
}

impl Communicator {
    pub(crate) fn new(py: Python<'_>, engine: Engine) -> PyResult<Py<Self>> {
        let engine = Arc::new(engine);
        let operations = Operations::on_host(engine.clone());
        Py::new(py, PyClassInitializer::from(operations).add_subclass(Self { engine }))
    }
}

#[pymethods]
impl Communicator {
    #[getter]
    fn rank(&self) -> u32 {
        self.engine.rank()
    }

    #[getter]
    fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    /// The same operations on GPU memory, ordered after the work queued in `stream`.
    fn on(&self, py: Python<'_>, gpu: &Gpu, stream: usize) -> PyResult<Py<OnGpu>> {
        let operations = Operations::on_gpu(self.engine.clone(), gpu.device.clone(), stream);
        Py::new(py, PyClassInitializer::from(operations).add_subclass(OnGpu))
    }

    fn allocate(&self, py: Python<'_>, nbytes: usize) -> PyResult<Registered> {
        self.engine.allocate(nbytes).map(Registered::new).map_err(|error| raise(py, &error))
    }

    #[pyo3(signature = (buffers, dtype, op, timeout_seconds, lazy = false, keep = None))]
    fn allreduce_many(
        slf: PyRef<'_, Self>,
        #[pyo3(from_py_with = pieces)] buffers: Vec<(usize, usize)>,
        dtype: u8,
        op: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let shape = fused_shape(buffers.iter().map(|(_, numel)| *numel));
        let call = call(Kind::Allreduce, dtype, timeout_seconds, lazy)?;
        let call = Call { op: as_op(op)?, shape, ..call };
        slf.as_super().in_place(slf.py(), call, Place::Many(buffers), 0, keep)
    }

    #[pyo3(signature = (timeout_seconds, lazy = false, keep = None))]
    fn barrier(
        slf: PyRef<'_, Self>,
        timeout_seconds: f64,
        lazy: bool,
        keep: Keep,
    ) -> PyResult<Work> {
        let call = call(Kind::Barrier, DType::U8.code(), timeout_seconds, lazy)?;
        slf.as_super().in_place(slf.py(), call, Place::One(0), 0, keep)
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

    fn peer_bytes(&self) -> (Vec<u64>, Vec<u64>) {
        let bytes = self.engine.peer_bytes();
        (bytes.sent(), bytes.taken())
    }

    #[pyo3(signature = (members, timeout_seconds = 60.0))]
    fn reconfigure(
        &self,
        py: Python<'_>,
        members: Vec<Listed>,
        timeout_seconds: f64,
    ) -> PyResult<Py<Communicator>> {
        let timeout = seconds(timeout_seconds)?;
        let members: Vec<Member> = members
            .into_iter()
            .map(|member| match member {
                Listed::Rank(rank) => Member::Rank(rank),
                Listed::Newcomer(info) => Member::Newcomer(info),
            })
            .collect();
        let next = py.detach(|| self.engine.reconfigure(&members, timeout));
        Communicator::new(py, next.map_err(|error| raise(py, &error))?)
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

/// A member of the next epoch: a present rank, or a newcomer's info.
#[derive(FromPyObject)]
enum Listed {
    Rank(u32),
    Newcomer(Vec<u8>),
}

fn pieces(list: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, usize)>> {
    list.extract()
}
