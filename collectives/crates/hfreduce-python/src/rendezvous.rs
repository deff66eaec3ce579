//! `Rendezvous`: connects the ranks of a group without torch's store.

use hfreduce_bootstrap::{BundleError, Meeting, MeetingError, Who};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::seconds;

/// One rank's place at the meetings of its group.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Rendezvous {
    meeting: Meeting,
}

#[pymethods]
impl Rendezvous {
    #[new]
    #[pyo3(signature = (rank, world_size, host, port, key, *, job = String::new()))]
    fn new(
        py: Python<'_>,
        rank: u32,
        world_size: u32,
        host: &str,
        port: u16,
        key: Vec<u8>,
        job: String,
    ) -> PyResult<Self> {
        let who = Who { job, rank, world_size };
        let meeting = py.detach(|| Meeting::new(who, host, port, &key)).map_err(raise)?;
        Ok(Self { meeting })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.meeting.port()
    }

    fn exchange<'py>(
        &self,
        py: Python<'py>,
        phase: &str,
        value: Vec<u8>,
        timeout_seconds: f64,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let timeout = seconds(timeout_seconds)?;
        let values = py.detach(|| self.meeting.exchange(phase, &value, timeout)).map_err(raise)?;
        Ok(values.iter().map(|value| PyBytes::new(py, value)).collect())
    }
}

/// One compressed blob of the values in rank order; a ValueError where they are too long.
#[pyfunction]
pub fn pack(py: Python<'_>, values: Vec<Vec<u8>>) -> PyResult<Bound<'_, PyBytes>> {
    let blob = py.detach(|| hfreduce_bootstrap::pack(&values)).map_err(refuse)?;
    Ok(PyBytes::new(py, &blob))
}

/// The values of `ranks` ranks; a ValueError where the blob is not theirs.
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

/// A RuntimeError's arguments are the text and the ranks that did not come.
fn raise(error: MeetingError) -> PyErr {
    let text = error.to_string();
    match error {
        MeetingError::Invalid(_) => PyValueError::new_err(text),
        MeetingError::Listen { .. } | MeetingError::Descriptors(_) => PyOSError::new_err(text),
        MeetingError::Absent { ranks, .. } => PyRuntimeError::new_err((text, ranks)),
        MeetingError::Broken(_) => PyRuntimeError::new_err((text, Vec::<u32>::new())),
    }
}
