//! An audit of chunks against the tree, in steps: between them the caller shows progress and may stop.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Serialize;
use threefs_client::audit::{Audit, AuditReport, Leak};
use threefs_core::ids::InodeId;

use crate::errors;
use crate::runtime::ClientRuntime;

/// Leaked inodes in a report.
const LEAKS_LISTED_MAX: usize = 1000;

/// An audit in progress. A step that fails or is interrupted ends it.
#[pyclass(module = "threefs._native", frozen)]
pub struct ChunkAudit {
    live: Arc<ClientRuntime>,
    audit: Mutex<Option<Audit>>,
}

#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    report: &'a AuditReport,
    leaks: Vec<ListedLeak<'a>>,
}

#[derive(Serialize)]
struct ListedLeak<'a> {
    inode: InodeId,
    #[serde(flatten)]
    leak: &'a Leak,
}

impl ChunkAudit {
    pub(crate) fn new(live: Arc<ClientRuntime>, audit: Audit) -> Self {
        Self { live, audit: Mutex::new(Some(audit)) }
    }

    /// Takes the audit for one step.
    fn take(&self, py: Python<'_>) -> PyResult<Audit> {
        let taken = self.audit.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| errors::invalid(py, "the audit has ended or is busy; start a new one"))
    }

    fn put_back(&self, audit: Audit) {
        *self.audit.lock().unwrap_or_else(PoisonError::into_inner) = Some(audit);
    }
}

#[pymethods]
impl ChunkAudit {
    /// Compares the next inodes; false after the last ones.
    fn step(&self, py: Python<'_>) -> PyResult<bool> {
        let mut audit = self.take(py)?;
        let more = self.live.wait(py, audit.step())?;
        self.put_back(audit);
        Ok(more)
    }

    /// Searches some names for paths of files with missing chunks; false after the last ones.
    fn find_paths(&self, py: Python<'_>) -> PyResult<bool> {
        let mut audit = self.take(py)?;
        let more = self.live.wait(py, audit.find_paths())?;
        self.put_back(audit);
        Ok(more)
    }

    /// Removes leaked chunks that were found, some at a time; false after the last ones.
    fn remove_leaked(&self, py: Python<'_>) -> PyResult<bool> {
        let mut audit = self.take(py)?;
        let more = self.live.wait(py, audit.remove_leaked())?;
        self.put_back(audit);
        Ok(more)
    }

    /// Bytes of the chunks that were compared, and leaked inodes that were removed, so far.
    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let audit = self.take(py)?;
        let done = (audit.report().bytes, audit.report().removed.inodes);
        self.put_back(audit);
        Ok(done)
    }

    /// What was found, as JSON.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        let audit = self.take(py)?;
        let report = audit.report();
        let leaks = report.leaks().take(LEAKS_LISTED_MAX);
        let leaks = leaks.map(|(inode, leak)| ListedLeak { inode, leak }).collect();
        let text = serde_json::to_string(&Listed { report, leaks });
        self.put_back(audit);
        text.map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
