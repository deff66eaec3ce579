//! `Gpu`: a device, opened; `OnGpu`: a communicator's operations on its memory.
//!
//! Pointers are the device's and arrive as integers; the Python side keeps the arrays alive until the
//! work is drained.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use hfreduce_device::{Cuda, Device, DeviceError, Memory, Range, Settings, gdr};
use hfreduce_engine::{Buffer, CollectiveError, Communicator, DType, Work as EngineWork};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{dtype as as_dtype, op as as_op, seconds};
use crate::errors::{gpu_error, raise};
use crate::work::Work;

/// By process and library: a forked child initialises its own.
type Drivers = HashMap<(u32, String), Arc<Cuda>>;

static DRIVERS: LazyLock<Mutex<Drivers>> = LazyLock::new(Mutex::default);

/// The driver, loaded when first asked for; one that cannot be loaded may be there the next time.
fn driver(library: Option<String>) -> Result<Arc<Cuda>, DeviceError> {
    let library = library.unwrap_or_else(|| hfreduce_device::cuda::LIBRARY.to_owned());
    let key = (std::process::id(), library);
    let known = || DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cuda) = known().get(&key) {
        return Ok(cuda.clone());
    }
    // Not under the lock: a driver that hangs in its initialisation would take others with it.
    let cuda = Cuda::load(&key.1)?;
    Ok(known().entry(key).or_insert(cuda).clone())
}

/// A device, opened.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Gpu {
    pub(crate) device: Arc<Device>,
}

#[pymethods]
impl Gpu {
    #[new]
    #[pyo3(signature = (ordinal, *, library = None, pinned_bytes = None, gdrcopy = None))]
    fn new(
        py: Python<'_>,
        ordinal: i32,
        library: Option<String>,
        pinned_bytes: Option<usize>,
        gdrcopy: Option<String>,
    ) -> PyResult<Self> {
        let mut settings = Settings { gdrcopy: wanted(gdrcopy), ..Settings::default() };
        settings.pinned_bytes_max = pinned_bytes.unwrap_or(settings.pinned_bytes_max);
        let opened = py.detach(|| {
            let cuda = driver(library)?;
            Device::open(&cuda, ordinal, settings)
        });
        Ok(Self { device: Arc::new(opened.map_err(|error| gpu_error(py, &error))?) })
    }

    /// The device that owns this address; None for the host's memory.
    #[staticmethod]
    #[pyo3(signature = (pointer, *, library = None))]
    fn owner_of(py: Python<'_>, pointer: u64, library: Option<String>) -> PyResult<Option<i32>> {
        let cuda = py.detach(|| driver(library)).map_err(|error| gpu_error(py, &error))?;
        Ok(cuda.owner_of(pointer))
    }

    #[getter]
    fn ordinal(&self) -> i32 {
        self.device.ordinal()
    }

    /// Why GDRCopy does not make the small copies; None where it does.
    #[getter]
    fn without_gdrcopy(&self) -> Option<&str> {
        self.device.gdrcopy().err()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.device.close());
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.device.counters();
        let stats = PyDict::new(py);
        for (name, counter) in [
            ("from_gpu_bytes", &counters.down_bytes),
            ("to_gpu_bytes", &counters.up_bytes),
            ("by_processor_bytes", &counters.by_processor_bytes),
            ("pauses", &counters.pauses),
        ] {
            stats.set_item(name, counter.load(Ordering::Relaxed))?;
        }
        stats.set_item("pinned_bytes", self.device.pinned_bytes())?;
        Ok(stats)
    }
}

/// The library of GDRCopy that HFREDUCE_GDRCOPY asks for.
fn wanted(gdrcopy: Option<String>) -> Option<String> {
    let library = gdrcopy.unwrap_or_else(|| gdr::LIBRARY.to_owned());
    (library != "off").then_some(library)
}

/// Why GDRCopy cannot be used here; None where it can. `gdrcopy`: value of HFREDUCE_GDRCOPY.
#[pyfunction]
#[pyo3(signature = (gdrcopy = None))]
pub fn without_gdrcopy(py: Python<'_>, gdrcopy: Option<String>) -> Option<String> {
    match wanted(gdrcopy) {
        Some(library) => py.detach(|| gdr::Gdr::open(&library).err()),
        None => Some("HFREDUCE_GDRCOPY is off".to_owned()),
    }
}

/// The operations of a communicator on memory that is made ready in one stream of a GPU.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct OnGpu {
    pub(crate) engine: Arc<Communicator>,
    pub(crate) device: Arc<Device>,
    pub(crate) stream: usize,
}

type Made = Result<EngineWork, CollectiveError>;

#[pymethods]
#[allow(clippy::too_many_arguments)] // They mirror the collectives' own signatures.
impl OnGpu {
    #[pyo3(signature = (pointer, numel, dtype, op, timeout_seconds, lazy = false, keep = None))]
    fn allreduce(
        &self,
        py: Python<'_>,
        pointer: u64,
        numel: usize,
        dtype: u8,
        op: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, op, timeout) = (as_dtype(dtype)?, as_op(op)?, seconds(timeout_seconds)?);
        let memory = Memory::in_place(range(pointer, numel, dtype)?, true, true);
        self.along_trees(py, keep, "allreduce", memory, timeout, |buffer, _, timeout| {
            self.engine.allreduce(buffer, dtype, op, 0, timeout, lazy)
        })
    }

    #[pyo3(signature = (pointer, numel, dtype, root, timeout_seconds, lazy = false, keep = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        pointer: u64,
        numel: usize,
        dtype: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let is_root = self.engine.rank() == root;
        let memory = Memory::in_place(range(pointer, numel, dtype)?, is_root, !is_root);
        self.along_trees(py, keep, "broadcast", memory, timeout, |buffer, _, timeout| {
            self.engine.broadcast(buffer, dtype, root, timeout, lazy)
        })
    }

    #[pyo3(signature = (pointer, numel, dtype, op, root, timeout_seconds, lazy = false, keep = None))]
    fn reduce(
        &self,
        py: Python<'_>,
        pointer: u64,
        numel: usize,
        dtype: u8,
        op: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, op, timeout) = (as_dtype(dtype)?, as_op(op)?, seconds(timeout_seconds)?);
        let is_root = self.engine.rank() == root;
        let memory = Memory::in_place(range(pointer, numel, dtype)?, true, is_root);
        self.along_trees(py, keep, "reduce", memory, timeout, |buffer, _, timeout| {
            self.engine.reduce(buffer, dtype, op, root, timeout, lazy)
        })
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, timeout_seconds, lazy = false, keep = None))]
    fn allgather(
        &self,
        py: Python<'_>,
        input_pointer: u64,
        output_pointer: u64,
        numel: usize,
        dtype: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let memory = Memory::apart(
            range(input_pointer, numel, dtype)?,
            range(output_pointer, self.times_world(numel), dtype)?,
        );
        self.along_trees(py, keep, "allgather", memory, timeout, |input, output, timeout| {
            self.engine.allgather(input, output, dtype, timeout, lazy)
        })
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, op, timeout_seconds, lazy = false, keep = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        input_pointer: u64,
        output_pointer: u64,
        numel: usize,
        dtype: u8,
        op: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, op, timeout) = (as_dtype(dtype)?, as_op(op)?, seconds(timeout_seconds)?);
        let memory = Memory::apart(
            range(input_pointer, self.times_world(numel), dtype)?,
            range(output_pointer, numel, dtype)?,
        );
        self.along_trees(py, keep, "reduce_scatter", memory, timeout, |input, output, timeout| {
            self.engine.reduce_scatter(input, output, dtype, op, timeout, lazy)
        })
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, root, timeout_seconds, lazy = false, keep = None))]
    fn gather(
        &self,
        py: Python<'_>,
        input_pointer: u64,
        output_pointer: u64,
        numel: usize,
        dtype: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let output = self.on_root(root, output_pointer, numel, dtype)?;
        let memory = Memory::apart(range(input_pointer, numel, dtype)?, output);
        self.between_pairs(py, keep, "gather", memory, timeout, |input, output, timeout| {
            self.engine.gather(input, output, dtype, root, timeout, lazy)
        })
    }

    #[pyo3(signature = (input_pointer, output_pointer, numel, dtype, root, timeout_seconds, lazy = false, keep = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        input_pointer: u64,
        output_pointer: u64,
        numel: usize,
        dtype: u8,
        root: u32,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let input = self.on_root(root, input_pointer, numel, dtype)?;
        let memory = Memory::apart(input, range(output_pointer, numel, dtype)?);
        self.between_pairs(py, keep, "scatter", memory, timeout, |input, output, timeout| {
            self.engine.scatter(input, output, dtype, root, timeout, lazy)
        })
    }

    #[pyo3(signature = (input_pointer, output_pointer, input_counts, output_counts, dtype, timeout_seconds, lazy = false, keep = None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        input_pointer: u64,
        output_pointer: u64,
        input_counts: Vec<usize>,
        output_counts: Vec<usize>,
        dtype: u8,
        timeout_seconds: f64,
        lazy: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let total = |counts: &[usize]| counts.iter().fold(0_usize, |sum, n| sum.saturating_add(*n));
        let memory = Memory::apart(
            range(input_pointer, total(&input_counts), dtype)?,
            range(output_pointer, total(&output_counts), dtype)?,
        );
        self.between_pairs(py, keep, "alltoall", memory, timeout, |input, output, timeout| {
            let (sent, received) = (&input_counts, &output_counts);
            self.engine.alltoall(input, output, sent, received, dtype, timeout, lazy)
        })
    }

    #[pyo3(signature = (pointer, numel, dtype, peer, tag, timeout_seconds, keep = None))]
    fn send(
        &self,
        py: Python<'_>,
        pointer: u64,
        numel: usize,
        dtype: u8,
        peer: u32,
        tag: u64,
        timeout_seconds: f64,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let memory = Memory::in_place(range(pointer, numel, dtype)?, true, false);
        self.between_pairs(py, keep, "send", memory, timeout, |buffer, _, timeout| {
            self.engine.send(buffer, dtype, peer, tag, timeout)
        })
    }

    #[pyo3(signature = (pointer, numel, dtype, peer, tag, timeout_seconds, keep = None))]
    fn recv(
        &self,
        py: Python<'_>,
        pointer: u64,
        numel: usize,
        dtype: u8,
        peer: Option<u32>,
        tag: u64,
        timeout_seconds: f64,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Work> {
        let (dtype, timeout) = (as_dtype(dtype)?, seconds(timeout_seconds)?);
        let memory = Memory::in_place(range(pointer, numel, dtype)?, false, true);
        self.between_pairs(py, keep, "recv", memory, timeout, |buffer, _, timeout| match peer {
            Some(peer) => self.engine.recv(buffer, dtype, peer, tag, timeout),
            None => self.engine.recv_any(buffer, dtype, tag, timeout),
        })
    }
}

impl OnGpu {
    fn along_trees(
        &self,
        py: Python<'_>,
        keep: Option<Py<PyAny>>,
        operation: &str,
        memory: Memory,
        timeout: Duration,
        call: impl FnOnce(Buffer, Buffer, Duration) -> Made + Send,
    ) -> PyResult<Work> {
        let (engine, device) = (&self.engine, &self.device);
        let made = py.detach(|| {
            // SAFETY: the Python interface demands it of its callers: every array stays alive and
            // untouched until its work is drained.
            unsafe { device.start(engine, operation, memory, self.stream, timeout, call) }
        });
        made.map(|work| Work::on_gpu(work, keep)).map_err(|error| raise(py, &error))
    }

    fn between_pairs(
        &self,
        py: Python<'_>,
        keep: Option<Py<PyAny>>,
        operation: &str,
        memory: Memory,
        timeout: Duration,
        call: impl FnOnce(Buffer, Buffer, Duration) -> Made + Send,
    ) -> PyResult<Work> {
        let (engine, device) = (&self.engine, &self.device);
        let made = py.detach(|| {
            // SAFETY: as above.
            unsafe {
                device.start_after_copy(engine, operation, memory, self.stream, timeout, call)
            }
        });
        made.map(|work| Work::on_gpu(work, keep)).map_err(|error| raise(py, &error))
    }

    /// The memory of all blocks, which counts on the root alone.
    fn on_root(&self, root: u32, pointer: u64, numel: usize, dtype: DType) -> PyResult<Range> {
        match self.engine.rank() == root {
            true => range(pointer, self.times_world(numel), dtype),
            false => Ok(Range::default()),
        }
    }

    fn times_world(&self, numel: usize) -> usize {
        // Too many are refused where they become bytes.
        numel.saturating_mul(self.engine.world_size())
    }
}

fn range(pointer: u64, numel: usize, dtype: DType) -> PyResult<Range> {
    let bytes = numel.checked_mul(dtype.size_bytes()).filter(|bytes| *bytes <= isize::MAX as usize);
    let bytes =
        bytes.ok_or_else(|| PyValueError::new_err(format!("{numel} elements are too many")))?;
    if pointer == 0 && bytes > 0 {
        return Err(PyValueError::new_err(format!("a null pointer for {numel} elements")));
    }
    Ok(Range { pointer, bytes })
}
