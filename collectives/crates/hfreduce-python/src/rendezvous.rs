//! `Rendezvous`: connects the ranks of a launcher without torch's store.

use fabric::deadline::Deadline;
use hfreduce_bootstrap::{
    self as bootstrap, BundleError, Exchanged, JoinError, Membership, TcpRendezvous,
    TcpRendezvousError,
};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::seconds;
use crate::communicator::Communicator;
use crate::errors::{rendezvous_error, setting_error};
use crate::join::connect;
use crate::settings::{Settings, variables_of};

/// Rendezvous of all ranks at the address in their environment.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Rendezvous {
    settings: bootstrap::Settings,
    tcp: TcpRendezvous,
}

#[pymethods]
impl Rendezvous {
    #[new]
    fn new(py: Python<'_>, environment: &Bound<'_, PyAny>) -> PyResult<Self> {
        let values = variables_of(py, environment)?;
        let settings = bootstrap::Settings::read(|name| values.get(name).cloned())
            .map_err(|error| setting_error(py, &error))?;
        let tcp = py.detach(|| settings.open_rendezvous()).map_err(|error| match error {
            JoinError::Rendezvous(error) => {
                tcp_rendezvous_error(py, error, settings.rank, "listening")
            }
            JoinError::Setting(error) => setting_error(py, &error),
            other => PyValueError::new_err(other.to_string()),
        })?;
        Ok(Self { settings, tcp })
    }

    #[getter]
    fn settings(&self) -> Settings {
        Settings { settings: self.settings.clone() }
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.settings.rank
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.settings.world_size
    }

    /// Port of rank 0.
    #[getter]
    fn port(&self) -> u16 {
        self.tcp.port()
    }

    fn exchange<'py>(
        &self,
        py: Python<'py>,
        phase: &str,
        value: Vec<u8>,
        timeout_seconds: f64,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let deadline = Deadline::after(seconds(timeout_seconds)?);
        let exchanged =
            py.detach(|| bootstrap::Rendezvous::exchange(self, phase, &value, deadline))?;
        Ok(exchanged.values.iter().map(|value| PyBytes::new(py, value)).collect())
    }

    /// Joins the group of all ranks; the default timeout is that of the settings.
    #[pyo3(signature = (timeout_seconds = None))]
    fn join(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<Py<Communicator>> {
        let timeout = timeout_seconds.map_or(Ok(self.settings.connect), seconds)?;
        let deadline = Deadline::after(timeout);
        let membership = Membership::world(self.settings.rank, self.settings.world_size)
            .map_err(|error| setting_error(py, &error))?;
        connect(py, self, &membership, &self.settings, deadline)
    }
}

impl bootstrap::Rendezvous for Rendezvous {
    type Error = PyErr;

    fn host(&self) -> Option<String> {
        bootstrap::Rendezvous::host(&self.tcp)
    }

    fn exchange(&self, phase: &str, value: &[u8], deadline: Deadline) -> PyResult<Exchanged> {
        bootstrap::Rendezvous::exchange(&self.tcp, phase, value, deadline).map_err(|error| {
            Python::attach(|py| tcp_rendezvous_error(py, error, self.settings.rank, phase))
        })
    }

    fn key(&self, deadline: Deadline) -> PyResult<Vec<u8>> {
        bootstrap::Rendezvous::key(&self.tcp, deadline).map_err(|error| {
            Python::attach(|py| tcp_rendezvous_error(py, error, self.settings.rank, "key"))
        })
    }
}

fn tcp_rendezvous_error(
    py: Python<'_>,
    error: TcpRendezvousError,
    rank: u32,
    phase: &str,
) -> PyErr {
    let text = error.to_string();
    match error {
        TcpRendezvousError::Invalid(_) => PyValueError::new_err(text),
        TcpRendezvousError::Listen { .. } | TcpRendezvousError::Descriptors(_) => {
            PyOSError::new_err(text)
        }
        TcpRendezvousError::Absent { ranks, .. } => {
            rendezvous_error(py, &text, rank, phase, &ranks)
        }
        TcpRendezvousError::Broken(_) => rendezvous_error(py, &text, rank, phase, &[]),
    }
}

/// One compressed blob of the values in rank order; a ValueError if they are too long.
#[pyfunction]
pub fn pack(py: Python<'_>, values: Vec<Vec<u8>>) -> PyResult<Bound<'_, PyBytes>> {
    let blob = py.detach(|| hfreduce_bootstrap::pack(&values)).map_err(refuse)?;
    Ok(PyBytes::new(py, &blob))
}

/// The values of `ranks` ranks; a ValueError if the blob is damaged or has another number of ranks.
#[pyfunction]
pub fn unpack(py: Python<'_>, blob: Vec<u8>, ranks: usize) -> PyResult<Vec<Bound<'_, PyBytes>>> {
    let values = py.detach(|| hfreduce_bootstrap::unpack(&blob, ranks)).map_err(refuse)?;
    Ok(values.iter().map(|value| PyBytes::new(py, value)).collect())
}

/// The longest blob of `ranks` ranks, in bytes.
#[pyfunction]
pub fn blob_bytes_max(ranks: usize) -> usize {
    hfreduce_bootstrap::blob_bytes_max(ranks)
}

fn refuse(error: BundleError) -> PyErr {
    PyValueError::new_err(error.to_string())
}
