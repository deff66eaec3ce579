//! `Endpoint`: one rank before the rendezvous.

use std::path::PathBuf;
use std::time::Duration;

use fabric::interfaces::AddressSelector;
use hfreduce_bootstrap::Settings;
use hfreduce_daemon::{AnyEndpoint, AnyNewcomer};
use hfreduce_engine::{Determinism, Options, Priority};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments;
use crate::communicator::Communicator;
use crate::errors::raise;

/// One rank before the rendezvous.
#[pyclass(module = "hfreduce._native")]
pub struct Endpoint {
    engine: Option<AnyEndpoint>,
    world_size: usize,
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (rank, world_size, placement, key, *, job = String::new(), address = None,
        towards = None, bridge = None, chunk_bytes = None, slots = None, channels = None,
        liveness_timeout_seconds = 10.0, lend = true, streams = None, determinism = "default",
        priority = "normal", daemon = None))]
    #[allow(clippy::too_many_arguments)] // Keyword arguments in Python.
    fn new(
        py: Python<'_>,
        rank: u32,
        world_size: usize,
        placement: Vec<(String, String)>,
        key: Vec<u8>,
        job: String,
        address: Option<String>,
        towards: Option<String>,
        bridge: Option<(String, String)>,
        chunk_bytes: Option<usize>,
        slots: Option<usize>,
        channels: Option<usize>,
        liveness_timeout_seconds: f64,
        lend: bool,
        streams: Option<usize>,
        determinism: &str,
        priority: &str,
        daemon: Option<PathBuf>,
    ) -> PyResult<Self> {
        if placement.len() != world_size {
            return Err(PyValueError::new_err(format!(
                "placement has {} entries for world_size {world_size}; give one per rank",
                placement.len()
            )));
        }
        let mut options = Options::new(rank, placement);
        options.job = job;
        options.bridge = bridge;
        options.channels = channels;
        options.peer_memory = lend;
        options.streams = streams;
        options.determinism = modes(determinism)?;
        options.priority = level(priority)?;
        options.liveness = liveness(liveness_timeout_seconds)?;
        options.slot_bytes = chunk_bytes.unwrap_or(options.slot_bytes);
        options.slots = slots;
        options.address = address_selector(address.as_deref())?;
        options.towards = towards;
        let engine = py
            .detach(|| AnyEndpoint::open(options, &key, daemon.as_deref()))
            .map_err(|error| raise(py, &error))?;
        Ok(Self { engine: Some(engine), world_size })
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let engine = self.engine.as_ref().ok_or_else(used)?;
        Ok(PyBytes::new(py, &engine.info()))
    }

    fn connect(
        &mut self,
        py: Python<'_>,
        infos: Vec<Vec<u8>>,
        timeout_seconds: f64,
    ) -> PyResult<Py<Communicator>> {
        let timeout = arguments::seconds(timeout_seconds)?;
        if infos.len() != self.world_size {
            return Err(PyValueError::new_err(format!(
                "{} infos for {} ranks; give one per rank",
                infos.len(),
                self.world_size
            )));
        }
        let engine = self.engine.take().ok_or_else(used)?;
        let connected = py.detach(|| engine.connect(&infos, timeout));
        Communicator::new(py, connected.map_err(|error| raise(py, &error))?)
    }
}

/// A process that waits for admission to an existing communicator.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Newcomer {
    engine: AnyNewcomer,
}

#[pymethods]
impl Newcomer {
    #[new]
    #[pyo3(signature = (node, zone, key, *, job = String::new(), address = None,
        towards = None, chunk_bytes = None, slots = None, channels = None, liveness_timeout_seconds = 10.0,
        lend = true, streams = None, determinism = "default", daemon = None))]
    #[allow(clippy::too_many_arguments)] // Keyword arguments in Python.
    fn new(
        py: Python<'_>,
        node: String,
        zone: String,
        key: Vec<u8>,
        job: String,
        address: Option<String>,
        towards: Option<String>,
        chunk_bytes: Option<usize>,
        slots: Option<usize>,
        channels: Option<usize>,
        liveness_timeout_seconds: f64,
        lend: bool,
        streams: Option<usize>,
        determinism: &str,
        daemon: Option<PathBuf>,
    ) -> PyResult<Self> {
        let mut options = Options::new(0, vec![(node, zone)]);
        options.job = job;
        options.channels = channels;
        options.liveness = liveness(liveness_timeout_seconds)?;
        options.slot_bytes = chunk_bytes.unwrap_or(options.slot_bytes);
        options.slots = slots;
        options.peer_memory = lend;
        options.streams = streams;
        options.determinism = modes(determinism)?;
        options.address = address_selector(address.as_deref())?;
        options.towards = towards;
        let engine = py
            .detach(|| AnyNewcomer::open(options, &key, daemon.as_deref()))
            .map_err(|error| raise(py, &error))?;
        Ok(Self { engine })
    }

    fn info<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.engine.info())
    }

    fn join(&self, py: Python<'_>, timeout_seconds: f64) -> PyResult<Py<Communicator>> {
        let timeout = arguments::seconds(timeout_seconds)?;
        let joined = py.detach(|| self.engine.join(timeout));
        Communicator::new(py, joined.map_err(|error| raise(py, &error))?)
    }
}

fn liveness(given_seconds: f64) -> PyResult<Duration> {
    Ok(arguments::seconds(given_seconds)?.min(Duration::from_secs(86_400)))
}

fn level(text: &str) -> PyResult<Priority> {
    text.parse::<Priority>()
        .map_err(|expected| PyValueError::new_err(format!("priority={text:?}: give {expected}")))
}

fn modes(text: &str) -> PyResult<Determinism> {
    text.parse::<Determinism>()
        .map_err(|expected| PyValueError::new_err(format!("determinism={text:?}: give {expected}")))
}

pub(crate) fn address_selector(text: Option<&str>) -> PyResult<AddressSelector> {
    let selector = text.map(|text| Settings::addresses("HFREDUCE_ADDRESS", text)).transpose();
    Ok(selector.map_err(|error| PyValueError::new_err(error.to_string()))?.unwrap_or_default())
}

fn used() -> PyErr {
    PyRuntimeError::new_err("this endpoint was connected already; make a new one")
}
