//! `Work`: an outstanding operation on host or GPU memory.

use std::time::Duration;

use hfreduce_device::DeviceWork;
use hfreduce_engine::{Callback, CollectiveError, ErrorKind, WaitError, Work as EngineWork};
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;

use crate::arguments::seconds;
use crate::errors::{raise, to_exception};

enum Handle {
    Host(EngineWork),
    Gpu(DeviceWork),
}

impl Handle {
    fn wait(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        match self {
            Self::Host(work) => work.wait(timeout),
            Self::Gpu(work) => work.wait(timeout),
        }
    }

    fn is_overdue(&self) -> bool {
        match self {
            Self::Host(work) => work.is_overdue(),
            Self::Gpu(work) => work.is_overdue(),
        }
    }

    fn is_done(&self) -> bool {
        match self {
            Self::Host(work) => work.is_done(),
            Self::Gpu(work) => work.is_done(),
        }
    }

    fn error(&self) -> Option<CollectiveError> {
        match self {
            Self::Host(work) => work.error(),
            Self::Gpu(work) => work.error(),
        }
    }

    fn sequence(&self) -> u64 {
        match self {
            Self::Host(work) => work.sequence(),
            Self::Gpu(work) => work.sequence(),
        }
    }

    fn source(&self) -> Option<u32> {
        match self {
            Self::Host(work) => work.source(),
            Self::Gpu(work) => work.source(),
        }
    }

    fn on_end(&self, callback: Callback) {
        match self {
            Self::Host(work) => work.on_end(callback),
            Self::Gpu(work) => work.on_end(callback),
        }
    }

    /// In a forked child: the error of every wait, since no thread completes the operation.
    fn orphaned(&self) -> Option<CollectiveError> {
        let (kind, phase) = (ErrorKind::Invalid, "waiting");
        let detail = "a forked child cannot wait for its parent's operation: \
                      connect after forking";
        match self {
            Self::Host(work) if !work.is_ours() => Some(work.failure(kind, phase, detail)),
            Self::Gpu(work) if !work.is_ours() => Some(work.failure(kind, phase, detail)),
            _ => None,
        }
    }
}

/// One operation under way. It owns references to the memory that the operation uses: an exception
/// between the call and the end of its wait frees nothing that is still written.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Work {
    handle: Handle,
    keep: Option<Py<PyAny>>,
}

impl Work {
    pub(crate) fn on_host(work: EngineWork, keep: Option<Py<PyAny>>) -> Self {
        Self { handle: Handle::Host(work), keep }
    }

    pub(crate) fn on_gpu(work: DeviceWork, keep: Option<Py<PyAny>>) -> Self {
        Self { handle: Handle::Gpu(work), keep }
    }

    pub(crate) fn on_end(&self, callback: Callback) {
        self.handle.on_end(callback);
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let Some(keep) = self.keep.take() else { return };
        if self.handle.is_done() {
            return;
        }
        // The callback needs no interpreter lock: PyO3 drops the reference under the next one.
        self.handle.on_end(Box::new(move || drop(keep)));
    }
}

#[pymethods]
impl Work {
    #[pyo3(signature = (timeout_seconds = None))]
    fn wait(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<()> {
        let timeout = timeout_seconds.map(seconds).transpose()?;
        // Short waits end before a signal matters; long ones look for Ctrl-C now and then.
        let slice = std::time::Duration::from_millis(200);
        let started = std::time::Instant::now();
        if let Some(error) = self.handle.orphaned().filter(|_| !self.handle.is_done()) {
            return Err(to_exception(py, &error));
        }
        loop {
            let remaining = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
            let turn = remaining.map_or(slice, |remaining| remaining.min(slice));
            match py.detach(|| self.handle.wait(Some(turn))) {
                Ok(()) => return Ok(()),
                Err(WaitError::Failed(error)) => return Err(raise(py, &error)),
                Err(WaitError::StillRunning { operation, sequence, .. }) => {
                    py.check_signals()?;
                    if timeout.is_some_and(|timeout| started.elapsed() >= timeout) {
                        let waited = started.elapsed().as_secs_f64();
                        return Err(PyTimeoutError::new_err(format!(
                            "{operation} #{sequence} is not done after {waited:.3} s; it continues \
                             until its own deadline"
                        )));
                    }
                    if self.handle.is_overdue() {
                        return Err(PyRuntimeError::new_err(format!(
                            "{operation} #{sequence} is long past its deadline and the engine \
                             does not move: this is a bug"
                        )));
                    }
                }
            }
        }
    }

    fn done(&self) -> bool {
        self.handle.is_done()
    }

    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.handle.error().map(|error| to_exception(py, &error).into_value(py).into_any())
    }

    #[getter]
    fn sequence(&self) -> u64 {
        self.handle.sequence()
    }

    #[getter]
    fn source(&self) -> Option<u32> {
        self.handle.source()
    }

    fn drained(&self) -> bool {
        match &self.handle {
            Handle::Host(work) => work.is_done(),
            Handle::Gpu(work) => work.is_drained(),
        }
    }
}
