//! `join` and `Membership`: joins a group through a rendezvous, which Python or this crate provides.

use std::collections::HashSet;

use fabric::deadline::Deadline;
use hfreduce_bootstrap::{self as bootstrap, Exchanged, JoinError, Joined, Place};
use hfreduce_engine::Communicator as Engine;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::seconds;
use crate::communicator::Communicator;
use crate::errors::{raise, rendezvous_error, setting_error, topology_error};
use crate::settings::Settings;

/// Membership of one rank in a group.
#[pyclass(module = "hfreduce._native", frozen, eq)]
#[derive(PartialEq, Eq)]
pub struct Membership {
    membership: bootstrap::Membership,
}

#[pymethods]
impl Membership {
    #[new]
    fn new(py: Python<'_>, rank: u32, global_ranks: Vec<u32>, world_size: u32) -> PyResult<Self> {
        let membership = bootstrap::Membership::new(rank, global_ranks, world_size);
        Ok(Self { membership: membership.map_err(|error| setting_error(py, &error))? })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.membership.rank()
    }

    #[getter]
    fn global_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.membership.global_ranks())
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.membership.world_size()
    }

    #[getter]
    fn size(&self) -> usize {
        self.membership.size()
    }

    #[getter]
    fn digest(&self) -> String {
        self.membership.digest()
    }
}

/// A rendezvous in Python: the one through torch's store.
struct PythonRendezvous {
    object: Py<PyAny>,
    host: Option<String>,
}

impl bootstrap::Rendezvous for PythonRendezvous {
    type Error = PyErr;

    fn host(&self) -> Option<String> {
        self.host.clone()
    }

    fn exchange(&self, phase: &str, value: &[u8], deadline: Deadline) -> PyResult<Exchanged> {
        let value = String::from_utf8(value.to_vec())?;
        Python::attach(|py| {
            let arguments = (phase, value, remaining_seconds(deadline));
            let exchanged = self.object.bind(py).call_method1("exchange", arguments)?;
            let (name, values): (String, Vec<Vec<u8>>) = exchanged.extract()?;
            Ok(Exchanged { name, values })
        })
    }

    fn key(&self, deadline: Deadline) -> PyResult<Vec<u8>> {
        Python::attach(|py| {
            self.object.bind(py).call_method1("key", (remaining_seconds(deadline),))?.extract()
        })
    }
}

fn remaining_seconds(deadline: Deadline) -> f64 {
    deadline.remaining().unwrap_or_default().as_secs_f64()
}

/// Joins a group through an object with `host`, `exchange` and `key`.
#[pyfunction]
pub fn join(
    py: Python<'_>,
    rendezvous: Bound<'_, PyAny>,
    membership: &Membership,
    settings: &Settings,
    timeout_seconds: f64,
) -> PyResult<Py<Communicator>> {
    let deadline = Deadline::after(seconds(timeout_seconds)?);
    let host: Option<String> = rendezvous.getattr("host")?.extract()?;
    let rendezvous = PythonRendezvous { object: rendezvous.unbind(), host };
    connect(py, &rendezvous, &membership.membership, &settings.settings, deadline)
}

/// Joins a group without the interpreter lock; `rendezvous` takes it where it needs it.
pub(crate) fn connect<R: bootstrap::Rendezvous<Error = PyErr> + Sync>(
    py: Python<'_>,
    rendezvous: &R,
    membership: &bootstrap::Membership,
    settings: &bootstrap::Settings,
    deadline: Deadline,
) -> PyResult<Py<Communicator>> {
    let joined = py.detach(|| settings.join_through(rendezvous, membership, deadline));
    let Joined { communicator, places } = joined.map_err(|error| match error {
        JoinError::Setting(error) => setting_error(py, &error),
        JoinError::Topology(error) => topology_error(py, &error),
        JoinError::Rendezvous(error) => error,
        JoinError::Disagreement(error) => {
            let rank = membership.global_rank();
            rendezvous_error(py, &error.to_string(), rank, error.phase, &[])
        }
        JoinError::Engine(error) => raise(py, &error),
    })?;
    report_address(py, &communicator, &places)?;
    Communicator::new(py, communicator)
}

/// The first rank of a node writes the node's address to the logger of the package, or to the job's
/// log if the program has no logger.
fn report_address(py: Python<'_>, communicator: &Engine, places: &[Place]) -> PyResult<()> {
    let rank = communicator.rank() as usize;
    let (earlier, node) = (&places[..rank], &places[rank].node);
    let nodes: HashSet<_> = places.iter().map(|place| &place.node).collect();
    if nodes.len() < 2 || earlier.iter().any(|place| place.node == *node) {
        return Ok(());
    }
    let address = Some(communicator.reached_at()).filter(|address| !address.is_empty());
    let line = format!("node {node} is reached at {}", address.unwrap_or("no address"));
    let log = py.import("logging")?.call_method1("getLogger", ("hfreduce",))?;
    if log.call_method0("hasHandlers")?.is_truthy()? {
        log.call_method1("info", (line,))?;
    } else {
        let line = format!("hfreduce: {line}\n");
        py.import("sys")?.getattr("stderr")?.call_method1("write", (line,))?;
    }
    Ok(())
}
