//! FUSE daemon process: serves a mounted descriptor until it is unmounted.

use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fabric::auth::credentials::Credentials;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::Deserialize;
use threefs_client::{Client, ClientConfig};
use threefs_core::location::Location;
use threefs_fuse::{ClaimConfig, FuseConfig, FuseError, UnansweredCalls};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use crate::addresses::Addresses;
use crate::service::{keep_memory, log_to_stderr};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FuseJson {
    mgmtd: Vec<String>,
    meta: Addresses,
    key_file: PathBuf,
    #[serde(default)]
    tls: bool,
    root: String,
    fd: i32,
    read_only: bool,
    resume: bool,
    state: Option<PathBuf>,
    timeout_seconds: f64,
    valid_seconds: f64,
    #[serde(default)]
    write_back: bool,
    #[serde(default)]
    location: Location,
    #[serde(default)]
    claim: Option<ClaimJson>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClaimJson {
    path: String,
    holder: String,
    valid_seconds: f64,
}

/// Serve a mounted descriptor of /dev/fuse until it is unmounted, or until SIGTERM; then another
/// daemon may take over. Prints one JSON line to standard output once it is serving.
#[pyfunction]
pub fn run_fuse(py: Python<'_>, config_json: &str) -> PyResult<()> {
    log_to_stderr();
    keep_memory();
    let json: FuseJson = serde_json::from_str(config_json).map_err(|error| {
        PyValueError::new_err(format!("invalid configuration of fuse: {error}"))
    })?;
    if json.fd < 3 {
        let text =
            format!("fd is {}; it must be an open descriptor of /dev/fuse, at least 3", json.fd);
        return Err(PyValueError::new_err(text));
    }
    // SAFETY: the caller hands over this descriptor, which is not one of the standard three. If it
    // is not open, the first use of it fails.
    let descriptor = unsafe { OwnedFd::from_raw_fd(json.fd) };
    let seconds = |name: &str, value: f64| {
        Duration::try_from_secs_f64(value)
            .map_err(|error| PyValueError::new_err(format!("{name} is {value}: {error}")))
    };
    let timeout = seconds("timeout_seconds", json.timeout_seconds)?;
    let valid = seconds("valid_seconds", json.valid_seconds)?;
    let credentials = Credentials::read(&json.key_file)
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let mut client =
        ClientConfig::new(json.mgmtd, json.meta.into(), credentials.over_tls(json.tls));
    client.timeout = timeout;
    client.location = json.location;
    let (root, read_only, resume, state) = (json.root, json.read_only, json.resume, json.state);
    let claim = match json.claim {
        None => None,
        Some(claim) => {
            let valid = seconds("claim.valid_seconds", claim.valid_seconds)?;
            Some(ClaimConfig { path: claim.path, holder: claim.holder, valid })
        }
    };
    let validity = claim.as_ref().map(|claim: &ClaimConfig| claim.valid);
    let config = FuseConfig {
        root,
        read_only,
        resume,
        state,
        timeout,
        claim,
        write_back: json.write_back,
        valid,
        unanswered: Arc::new(UnansweredCalls::new(validity, resume)),
    };
    // They also copy payloads from and to the kernel. More of them than cores divide what could share
    // a request to a storage service.
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let runtime = Builder::new_multi_thread()
        .worker_threads(cores.clamp(2, 4))
        .thread_name("threefs-fuse")
        .enable_all()
        .build()?;
    let outcome = py.detach(|| runtime.block_on(serve(client, descriptor, config)));
    runtime.shutdown_background();
    outcome.map_err(|error| PyRuntimeError::new_err(format!("fuse: {error}")))
}

async fn serve(
    client: ClientConfig,
    descriptor: OwnedFd,
    config: FuseConfig,
) -> Result<(), FuseError> {
    let unanswered = Arc::clone(&config.unanswered);
    let mut terminate = signal(SignalKind::terminate()).map_err(FuseError::Device)?;
    let ready = Box::new(|ready: &threefs_fuse::Ready| {
        let line = serde_json::to_string(ready).unwrap_or_default();
        let mut out = std::io::stdout().lock();
        // An error is ignored: if the reader has exited, no process waits for the line.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    });
    tokio::select! {
        served = threefs_fuse::serve(Client::start(client), descriptor, config, ready) => served,
        // Everything acknowledged is durable or in the state file; the kernel resends running
        // requests to the next daemon.
        _ = terminate.recv() => unanswered.check(),
    }
}
