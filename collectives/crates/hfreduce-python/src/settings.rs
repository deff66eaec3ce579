//! `Settings`, `Place` and `Topology`: the input of a process before the rendezvous.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;

use hfreduce_bootstrap::{self as bootstrap, SettingError, variables};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::errors::{setting_error, topology_error};

/// Variables of torchrun and other launchers.
const LAUNCHER: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// Settings of a process, from environment variables.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Settings {
    pub(crate) settings: bootstrap::Settings,
}

#[pymethods]
impl Settings {
    /// Reads and checks a mapping; empty values count as unset. Unknown names get a warning.
    #[staticmethod]
    fn read(py: Python<'_>, environment: &Bound<'_, PyAny>) -> PyResult<Self> {
        let values = variables_of(py, environment)?;
        let settings = bootstrap::Settings::read_variables(|name| values.get(name).cloned());
        Ok(Self { settings: settings.map_err(|error| setting_error(py, &error))? })
    }

    /// The same settings with another priority.
    fn with_priority(&self, py: Python<'_>, priority: &str) -> PyResult<Self> {
        let mut settings = self.settings.clone();
        let refuse = |_| SettingError::new("Options.priority", priority, variables::PRIORITY.kind);
        settings.priority =
            priority.parse().map_err(refuse).map_err(|error| setting_error(py, &error))?;
        Ok(Self { settings })
    }

    #[getter]
    fn job(&self) -> &str {
        &self.settings.job
    }

    #[getter]
    fn topology_path(&self) -> Option<String> {
        self.settings.topology.as_ref().map(|path| path.display().to_string())
    }

    #[getter]
    fn address(&self) -> Option<String> {
        let address = &self.settings.address;
        (!address.is_default()).then(|| address.to_string())
    }

    #[getter]
    fn chunk_bytes(&self) -> Option<usize> {
        self.settings.chunk_bytes
    }

    #[getter]
    fn connect_seconds(&self) -> f64 {
        self.settings.connect.as_secs_f64()
    }

    #[getter]
    fn liveness_seconds(&self) -> f64 {
        self.settings.liveness.as_secs_f64()
    }

    /// Whether ranks of different nodes share memory if the nodes run on one machine.
    #[getter]
    fn peer_memory(&self) -> bool {
        self.settings.peer_memory
    }

    #[getter]
    fn streams(&self) -> Option<usize> {
        self.settings.streams
    }

    #[getter]
    fn determinism(&self) -> String {
        self.settings.determinism.to_string()
    }

    #[getter]
    fn priority(&self) -> String {
        self.settings.priority.to_string()
    }

    #[getter]
    fn cuda_library(&self) -> Option<&str> {
        self.settings.cuda_library.as_deref()
    }

    #[getter]
    fn gdrcopy(&self) -> Option<&str> {
        self.settings.gdrcopy.as_deref()
    }

    #[getter]
    fn pinned_bytes(&self) -> Option<usize> {
        self.settings.pinned_bytes
    }

    #[getter]
    fn registered_bytes(&self) -> Option<usize> {
        self.settings.registered_bytes
    }

    /// Reads the key file; None if none is set.
    fn key<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Some(path) = &self.settings.key_file else { return Ok(None) };
        let key = bootstrap::Settings::key_in(path).map_err(|error| setting_error(py, &error))?;
        Ok(Some(PyBytes::new(py, &key)))
    }
}

/// The variables of `environment` that settings are read from. Unknown names get a warning.
pub(crate) fn variables_of(
    py: Python<'_>,
    environment: &Bound<'_, PyAny>,
) -> PyResult<HashMap<String, String>> {
    let mut values = HashMap::new();
    for item in environment.call_method0("items")?.try_iter()? {
        let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
        // Names of other programs need not be text.
        let Ok(name) = name.extract::<String>() else { continue };
        let is_setting = name.starts_with("HFREDUCE_") || name.starts_with("FLYER_");
        if !is_setting && !LAUNCHER.contains(&name.as_str()) {
            continue;
        }
        if let Some(text) = variables::warning(&name) {
            let text = CString::new(text).unwrap_or_default();
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &text, 1)?;
        }
        // Bytes that are not UTF-8 are replaced, so that an error can show the value.
        let value = value.cast::<PyString>()?.to_string_lossy().into_owned();
        values.insert(name, value);
    }
    Ok(values)
}

/// Where one rank runs.
#[pyclass(module = "hfreduce", frozen, eq, get_all)]
#[derive(Clone, PartialEq, Eq)]
pub struct Place {
    node: String,
    zone: String,
    address: Option<String>,
}

#[pymethods]
impl Place {
    #[new]
    #[pyo3(signature = (node, zone, address = None))]
    fn new(node: String, zone: String, address: Option<String>) -> Self {
        Self { node, zone, address }
    }

    fn __repr__(&self) -> String {
        let Self { node, zone, address } = self;
        match address {
            Some(address) => format!("Place({node:?}, {zone:?}, {address:?})"),
            None => format!("Place({node:?}, {zone:?})"),
        }
    }
}

impl From<bootstrap::Place> for Place {
    fn from(place: bootstrap::Place) -> Self {
        Self { node: place.node, zone: place.zone, address: place.address }
    }
}

/// Nodes of a job in rank order.
#[pyclass(module = "hfreduce", frozen)]
pub struct Topology {
    topology: bootstrap::Topology,
}

#[pymethods]
impl Topology {
    /// Checks the text of a topology file; `source` names it in errors.
    #[staticmethod]
    fn parse(py: Python<'_>, text: &str, source: &str) -> PyResult<Self> {
        let topology = bootstrap::Topology::parse(text, source);
        Ok(Self { topology: topology.map_err(|error| topology_error(py, &error))? })
    }

    #[getter]
    fn nodes(&self) -> Vec<Place> {
        self.topology.nodes.iter().cloned().map(Place::from).collect()
    }

    #[getter]
    fn ranks_per_node(&self) -> usize {
        self.topology.ranks_per_node
    }

    #[getter]
    fn bridges(&self) -> Vec<(String, String)> {
        self.topology.bridges.iter().cloned().map(|[a, b]| (a, b)).collect()
    }

    #[getter]
    fn source(&self) -> &str {
        &self.topology.source
    }

    #[getter]
    fn world_size(&self) -> usize {
        self.topology.world_size()
    }

    /// The places of `ranks` in a job of `world_size`, which must be that of the file.
    fn places(&self, py: Python<'_>, ranks: Vec<u32>, world_size: usize) -> PyResult<Vec<Place>> {
        let places = self.topology.places(ranks, world_size);
        let places = places.map_err(|error| topology_error(py, &error))?;
        Ok(places.into_iter().map(Place::from).collect())
    }
}

/// Reads and checks a topology file.
#[pyfunction]
pub fn load_topology(py: Python<'_>, path: PathBuf) -> PyResult<Topology> {
    let topology = py.detach(|| bootstrap::Topology::load(&path));
    Ok(Topology { topology: topology.map_err(|error| topology_error(py, &error))? })
}

/// The settings table of the documentation.
#[pyfunction]
pub fn settings_table() -> String {
    variables::table()
}
