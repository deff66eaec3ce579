//! `Gpu`: an open device.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use hfreduce_device::{Cuda, Device, DeviceError, Settings, gdr};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::gpu_error;

/// By process and library: a forked child initialises its own.
type Drivers = HashMap<(u32, String), Arc<Cuda>>;

static DRIVERS: LazyLock<Mutex<Drivers>> = LazyLock::new(Mutex::default);

/// The driver, loaded at its first use; a failed load is repeated at the next use.
fn driver(library: Option<String>) -> Result<Arc<Cuda>, DeviceError> {
    let library = library.unwrap_or_else(|| hfreduce_device::cuda::LIBRARY.to_owned());
    let key = (std::process::id(), library);
    let drivers = || DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cuda) = drivers().get(&key) {
        return Ok(cuda.clone());
    }
    // Not under the lock: a driver that hangs in its initialisation must not block the others.
    let cuda = Cuda::load(&key.1)?;
    Ok(drivers().entry(key).or_insert(cuda).clone())
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
        let mut settings = Settings { gdrcopy: gdrcopy_library(gdrcopy), ..Settings::default() };
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

/// The library of GDRCopy that HFREDUCE_GDRCOPY selects; none if it is `off`.
fn gdrcopy_library(gdrcopy: Option<String>) -> Option<String> {
    let library = gdrcopy.unwrap_or_else(|| gdr::LIBRARY.to_owned());
    (library != "off").then_some(library)
}

/// Why GDRCopy cannot be used here; None where it can. `gdrcopy`: value of HFREDUCE_GDRCOPY.
#[pyfunction]
#[pyo3(signature = (gdrcopy = None))]
pub fn without_gdrcopy(py: Python<'_>, gdrcopy: Option<String>) -> Option<String> {
    match gdrcopy_library(gdrcopy) {
        Some(library) => py.detach(|| gdr::Gdr::open(&library).err()),
        None => Some("HFREDUCE_GDRCOPY is off".to_owned()),
    }
}
