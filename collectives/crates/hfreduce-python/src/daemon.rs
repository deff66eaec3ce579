//! `Daemon`: what `hfreduced` runs.

use std::path::PathBuf;
use std::time::Duration;

use hfreduce_daemon::{Daemon as Engine, ListenError, Rules};
use hfreduce_engine::flight::Folders;
use pyo3::exceptions::{PyFileExistsError, PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use tracing_subscriber::filter::LevelFilter;

/// A socket at which ranks are served.
#[pyclass(module = "hfreduce._native")]
pub struct Daemon {
    engine: Option<Engine>,
}

#[pymethods]
impl Daemon {
    #[new]
    #[pyo3(signature = (path, mode, ranks_max, memory_max=None))]
    fn new(
        path: PathBuf,
        mode: u32,
        ranks_max: usize,
        memory_max: Option<usize>,
    ) -> PyResult<Self> {
        // An error means that a subscriber is set already; it receives the lines.
        let _ = tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .with_max_level(LevelFilter::INFO)
            .try_init();
        let (folders, descriptors_max) = (Folders::from_environment(), None);
        let rules = Rules { mode, ranks_max, memory_max, descriptors_max, folders };
        let engine = Engine::bind(&path, rules).map_err(|error| match error {
            ListenError::Taken { .. } => PyFileExistsError::new_err(error.to_string()),
            ListenError::Io { .. } => PyOSError::new_err(error.to_string()),
        })?;
        Ok(Self { engine: Some(engine) })
    }

    fn accept(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let engine = self.engine.as_ref().ok_or_else(closed)?;
        py.detach(|| engine.accept_for(time)).map_err(|error| PyOSError::new_err(error.to_string()))
    }

    #[getter]
    fn ranks(&self) -> usize {
        self.engine.as_ref().map_or(0, Engine::ranks)
    }

    fn close(&mut self, py: Python<'_>) {
        let engine = self.engine.take();
        py.detach(|| drop(engine));
    }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("this daemon is closed: make a new one")
}
