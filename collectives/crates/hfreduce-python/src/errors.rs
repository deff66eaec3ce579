//! Exceptions of the package: errors of the engine and of a join with their fields as attributes.

use hfreduce_bootstrap::{SettingError, TopologyError};
use hfreduce_device::DeviceError;
use hfreduce_engine::{CollectiveError as EngineError, ErrorKind};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

pyo3::create_exception!(
    hfreduce._native,
    CollectiveError,
    PyRuntimeError,
    "An operation failed, or the communicator broke before it."
);

pyo3::create_exception!(
    hfreduce._native,
    GpuError,
    PyRuntimeError,
    "The GPU does not exist on this machine, or its driver fails."
);

/// A `GpuError` with its fields.
pub fn gpu_error(py: Python<'_>, error: &DeviceError) -> PyErr {
    let raised = GpuError::new_err(error.to_string());
    let (call, device, code) = match error {
        DeviceError::Call { call, device, code, .. } => (Some(*call), *device, Some(*code)),
        DeviceError::Late { device, .. }
        | DeviceError::Full { device, .. }
        | DeviceError::Host { device, .. }
        | DeviceError::Closed { device, .. } => (None, *device, None),
        DeviceError::Library { .. } | DeviceError::Symbol { .. } => (None, -1, None),
    };
    let value = raised.value(py);
    let set = || -> PyResult<()> {
        value.setattr("call", call)?;
        value.setattr("device", device)?;
        value.setattr("code", code)
    };
    match set() {
        Ok(()) => raised,
        Err(broken) => broken,
    }
}

/// The exception for an engine's error; arguments that make no sense are a ValueError.
pub fn raise(py: Python<'_>, error: &EngineError) -> PyErr {
    if error.cause.kind == ErrorKind::Invalid {
        return PyValueError::new_err(error.to_string());
    }
    to_exception(py, error)
}

/// A `CollectiveError` with all its fields.
pub fn to_exception(py: Python<'_>, error: &EngineError) -> PyErr {
    let raised = CollectiveError::new_err(error.to_string());
    let value = raised.value(py);
    let cause = &error.cause;
    let set = || -> PyResult<()> {
        value.setattr("kind", cause.kind.name())?;
        value.setattr("job", &*error.job)?;
        value.setattr("rank", error.rank)?;
        value.setattr("node", &*error.node)?;
        value.setattr("peer", cause.peer)?;
        value.setattr("peer_node", cause.peer_node.as_deref())?;
        value.setattr("operation", &error.operation)?;
        value.setattr("sequence", error.sequence)?;
        value.setattr("phase", &error.phase)?;
        value.setattr("detail", &cause.detail)?;
        value.setattr("seen_by", cause.seen_by)?;
        value.setattr("flight_record", error.flight_record.as_deref())
    };
    match set() {
        Ok(()) => raised,
        Err(broken) => broken,
    }
}

/// A `SettingError`.
pub fn setting_error(py: Python<'_>, error: &SettingError) -> PyErr {
    let SettingError { name, value, expected } = error;
    package_error(py, "SettingError", (*name, value, expected), None)
}

/// A `TopologyError`.
pub fn topology_error(py: Python<'_>, error: &TopologyError) -> PyErr {
    let TopologyError { file, field, problem } = error;
    package_error(py, "TopologyError", (file, field, problem), None)
}

/// A `RendezvousError` of `rank` in `phase`; `absent`: the ranks that did not arrive.
pub fn rendezvous_error(
    py: Python<'_>,
    detail: &str,
    rank: u32,
    phase: &str,
    absent: &[u32],
) -> PyErr {
    let fields = || -> PyResult<_> {
        let fields = PyDict::new(py);
        fields.set_item("rank", rank)?;
        fields.set_item("phase", phase)?;
        fields.set_item("absent", absent)?;
        Ok(fields)
    };
    match fields() {
        Ok(fields) => package_error(py, "RendezvousError", (detail,), Some(&fields)),
        Err(broken) => broken,
    }
}

/// An exception of `hfreduce.errors`.
fn package_error<'py>(
    py: Python<'py>,
    name: &str,
    arguments: impl pyo3::call::PyCallArgs<'py>,
    fields: Option<&Bound<'py, PyDict>>,
) -> PyErr {
    let class = py.import("hfreduce.errors").and_then(|module| module.getattr(name));
    match class.and_then(|class| class.call(arguments, fields)) {
        Ok(error) => PyErr::from_value(error),
        Err(broken) => broken,
    }
}
