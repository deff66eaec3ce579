//! Dumps of the stores of meta and mgmtd, for backups.

use std::path::PathBuf;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use threefs_kv::{DumpError, Dumped, EmbeddedConfig};

/// Number of rows and bytes.
type Counts = (u64, u64);

fn kind_of(kind: &str) -> PyResult<&str> {
    match kind {
        threefs_meta::DUMP_KIND | "mgmtd" => Ok(kind),
        _ => Err(PyValueError::new_err(format!("kind is `{kind}`; it must be meta or mgmtd"))),
    }
}

fn counts(result: Result<Dumped, DumpError>) -> PyResult<Counts> {
    result
        .map(|dumped| (dumped.rows, dumped.bytes))
        .map_err(|error| PyOSError::new_err(error.to_string()))
}

/// Write a consistent snapshot of a service's store, while the service may run.
#[pyfunction]
pub fn store_dump(py: Python<'_>, kind: &str, folder: PathBuf, file: PathBuf) -> PyResult<Counts> {
    let kind = kind_of(kind)?;
    counts(py.detach(|| threefs_kv::dump(&EmbeddedConfig::new(folder), kind, &file)))
}

/// Create a service's store from a dump, in a folder without a store.
#[pyfunction]
pub fn store_load(py: Python<'_>, kind: &str, folder: PathBuf, file: PathBuf) -> PyResult<Counts> {
    let config = EmbeddedConfig::new(folder);
    if kind_of(kind)? != threefs_meta::DUMP_KIND {
        return counts(py.detach(|| threefs_kv::load(&config, kind, &file)));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    counts(py.detach(|| runtime.block_on(threefs_meta::restore(config, &file))))
}

/// Let a metadata store replace the one registered in its cluster, from the next start on.
#[pyfunction]
pub fn store_adopt(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    py.detach(|| runtime.block_on(threefs_meta::adopt(EmbeddedConfig::new(folder))))
        .map_err(|error| PyOSError::new_err(error.to_string()))
}

/// Read a dump to its end and verify it.
#[pyfunction]
pub fn store_verify(py: Python<'_>, kind: &str, file: PathBuf) -> PyResult<Counts> {
    let kind = kind_of(kind)?;
    counts(py.detach(|| threefs_kv::verify(kind, &file)))
}
