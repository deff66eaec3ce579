//! The flight recorder's files, for tools: one reader, the engine's.

use std::path::PathBuf;

use hfreduce_engine::flight::{Folders, ReadError, read_file};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// What a recorder's file holds, as JSON.
#[pyfunction]
pub fn read_flight(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    let result = py.detach(|| read_file(&path));
    let snapshot = result.map_err(|error| match error {
        ReadError::Io { .. } => PyOSError::new_err(error.to_string()),
        other => PyValueError::new_err(format!("{}: {other}", path.display())),
    })?;
    serde_json::to_string(&snapshot).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The folders in use: candidates for recorders' files, and the one for dumps.
#[pyfunction]
pub fn flight_folders() -> (Vec<PathBuf>, Option<PathBuf>) {
    let folders = Folders::from_environment();
    (folders.run, folders.dumps)
}
