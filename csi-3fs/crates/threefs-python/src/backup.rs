//! Dumps of the stores of meta and mgmtd, for backups and conversion.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use fabric::auth::keys::Keys;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use threefs_core::ids::ClusterId;
use threefs_kv::rows::decode;
use threefs_kv::{DumpError, Dumped, Fingerprints, StoreConfig, Values};

use crate::errors;
use crate::store::store_of_json;

/// Number of rows and bytes.
type Counts = (u64, u64);
/// With the id of the cluster, unless no service of a cluster has used the store.
type Verified = (u64, u64, Option<u128>);

fn kind_of(kind: &str) -> PyResult<&str> {
    match kind {
        threefs_meta::DUMP_KIND | threefs_mgmtd::DUMP_KIND => Ok(kind),
        _ => Err(PyValueError::new_err(format!("kind is `{kind}`; it must be meta or mgmtd"))),
    }
}

fn store_of(json: &str) -> PyResult<StoreConfig> {
    store_of_json(json).map_err(PyValueError::new_err)
}

/// Calls Python with the progress, and checks for signals.
struct Progress {
    call: Py<PyAny>,
    error: Mutex<Option<PyErr>>,
}

impl Progress {
    fn new(call: Py<PyAny>) -> Self {
        Self { call, error: Mutex::new(None) }
    }

    fn report(&self, done: u64, total: u64) -> bool {
        let called = Python::attach(|py| {
            py.check_signals()?;
            self.call.call1(py, (done, total)).map(drop)
        });
        let Err(error) = called else { return true };
        if let Ok(mut slot) = self.error.lock() {
            slot.get_or_insert(error);
        }
        false
    }

    fn counts(self, result: Result<Dumped, DumpError>) -> PyResult<Counts> {
        let error = self.error.into_inner().unwrap_or_default();
        match (result, error) {
            (Ok(dumped), _) => Ok((dumped.rows, dumped.bytes)),
            (Err(DumpError::Stopped), Some(error)) => Err(error),
            (Err(error), _) => Err(PyOSError::new_err(error.to_string())),
        }
    }
}

fn run<T: Send>(py: Python<'_>, work: impl Future<Output = T> + Send) -> PyResult<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(py.detach(|| runtime.block_on(work)))
}

/// Write a consistent snapshot of a service's store, while the service may run.
#[pyfunction]
pub fn store_dump(
    py: Python<'_>,
    kind: &str,
    store_json: &str,
    file: PathBuf,
    progress: Py<PyAny>,
) -> PyResult<Counts> {
    let (kind, store) = (kind_of(kind)?, store_of(store_json)?);
    let progress = Progress::new(progress);
    let report = |done, total| progress.report(done, total);
    let dumped = run(py, threefs_kv::dump(&store, kind, &file, &report))?;
    progress.counts(dumped)
}

/// Fill a service's empty store from a dump.
#[pyfunction]
pub fn store_load(
    py: Python<'_>,
    kind: &str,
    store_json: &str,
    file: PathBuf,
    progress: Py<PyAny>,
) -> PyResult<Counts> {
    let (kind, store) = (kind_of(kind)?, store_of(store_json)?);
    let progress = Progress::new(progress);
    let report = |done, total| progress.report(done, total);
    let loaded = match kind {
        threefs_meta::DUMP_KIND => run(py, threefs_meta::restore(&store, &file, &report))?,
        _ => run(py, threefs_mgmtd::restore(&store, &file, &report))?,
    };
    progress.counts(loaded)
}

/// Let a metadata store replace the one registered in its cluster, from the next start on.
#[pyfunction]
pub fn store_adopt(py: Python<'_>, store_json: &str) -> PyResult<()> {
    let store = store_of(store_json)?;
    run(py, threefs_meta::adopt(store))?.map_err(|error| PyOSError::new_err(error.to_string()))
}

/// Make the keys of a file the owner of a stopped service's store. Returns the fingerprints of the
/// former and of the new owner.
#[pyfunction]
pub fn store_rekey(
    py: Python<'_>,
    kind: &str,
    store_json: &str,
    key_file: &str,
) -> PyResult<(Vec<String>, Vec<String>)> {
    let (kind, store) = (kind_of(kind)?, store_of(store_json)?);
    let keys = Keys::read(Path::new(key_file));
    let keys = keys.map_err(|error| errors::invalid(py, &error.to_string()))?;
    let owner = match kind {
        threefs_meta::DUMP_KIND => threefs_meta::owner(&keys, &store),
        _ => threefs_mgmtd::owner(&keys, &store),
    };
    let rekeyed = run(py, threefs_kv::rekey(store, &owner))?;
    let rekeyed = rekeyed.map_err(|error| PyOSError::new_err(error.to_string()))?;
    let texts = |keys: &Fingerprints| keys.iter().map(ToString::to_string).collect();
    Ok((texts(&rekeyed.before), texts(&rekeyed.after)))
}

/// Read a dump to its end and verify it. Also returns the id of the cluster of its store.
#[pyfunction]
pub fn store_verify(
    py: Python<'_>,
    kind: &str,
    file: PathBuf,
    progress: Py<PyAny>,
) -> PyResult<Verified> {
    let kind = kind_of(kind)?;
    let row = match kind {
        threefs_meta::DUMP_KIND => threefs_meta::CLUSTER_ROW,
        _ => threefs_mgmtd::CLUSTER_ROW,
    };
    let progress = Progress::new(progress);
    let report = |done, total| progress.report(done, total);
    let verified = py.detach(|| threefs_kv::verify(kind, &file, &[row], &report));
    let (dumped, values) = match verified {
        Ok((dumped, values)) => (Ok(dumped), values),
        Err(error) => (Err(error), Values::new()),
    };
    let (rows, bytes) = progress.counts(dumped)?;
    let cluster = values.get(row).map(|value| decode::<ClusterId>(row, value)).transpose();
    let cluster = cluster.map_err(|error| PyOSError::new_err(error.to_string()))?;
    Ok((rows, bytes, cluster.map(|cluster| cluster.0)))
}

/// Check the rows of a dump of metadata against each other; returns the result as JSON.
#[pyfunction]
pub fn store_check(py: Python<'_>, file: PathBuf, progress: Py<PyAny>) -> PyResult<String> {
    let progress = Progress::new(progress);
    let report = |done, total| progress.report(done, total);
    let checked = py.detach(|| threefs_meta::check::check(&file, &report));
    let (json, result) = match checked {
        Ok(checked) => (serde_json::to_string(&checked), Ok(Dumped::default())),
        Err(error) => (Ok(String::new()), Err(error)),
    };
    progress.counts(result)?;
    json.map_err(|error| PyValueError::new_err(error.to_string()))
}
