//! `Work`: one operation under way, in the host's memory or a GPU's.

use std::time::Duration;

use hfreduce_device::DeviceWork;
use hfreduce_engine::{CollectiveError, WaitError, Work as EngineWork};
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
}

/// One operation under way.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Work {
    handle: Handle,
}

impl From<EngineWork> for Work {
    fn from(work: EngineWork) -> Self {
        Self { handle: Handle::Host(work) }
    }
}

impl From<DeviceWork> for Work {
    fn from(work: DeviceWork) -> Self {
        Self { handle: Handle::Gpu(work) }
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
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
            let turn = left.map_or(slice, |left| left.min(slice));
            match py.detach(|| self.handle.wait(Some(turn))) {
                Ok(()) => return Ok(()),
                Err(WaitError::Failed(error)) => return Err(raise(py, &error)),
                Err(WaitError::StillRunning { operation, sequence, .. }) => {
                    py.check_signals()?;
                    if timeout.is_some_and(|timeout| started.elapsed() >= timeout) {
                        let waited = started.elapsed().as_secs_f64();
                        return Err(PyTimeoutError::new_err(format!(
                            "{operation} #{sequence} is not done after {waited:.3} s; it goes on \
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
