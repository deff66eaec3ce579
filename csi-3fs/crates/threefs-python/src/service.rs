//! Service processes of mgmtd, meta and storage: serve a configuration until SIGTERM.

use std::path::PathBuf;
use std::sync::Arc;

use fabric::auth::keys::Keys;
use fabric::rpc::Shutdown;
use fabric::tls::ServiceTls;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use threefs_client::{Client, ClientConfig};
use threefs_meta::{DEAD_GRACE_MS, LayoutDefaults, MAP_BYTES_MAX, MetaConfig, TreeConfig};
use threefs_mgmtd::{Bootstrap, MgmtdConfig, Timers};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::store::{EtcdJson, PostgresJson, store_config};

type ServiceError = Box<dyn std::error::Error + Send + Sync>;
type Outcome = Result<(), ServiceError>;

/// Serve until SIGTERM. `kind` is "mgmtd", "meta" or "storage"; parent 0: it outlives its parent.
#[pyfunction]
pub fn run_service(py: Python<'_>, kind: &str, config_json: &str, parent_pid: u32) -> PyResult<()> {
    die_with(parent_pid)?;
    log_to_stderr();
    keep_memory();
    let service = Service::parse(kind, config_json).map_err(PyValueError::new_err)?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(service.worker_threads())
        .thread_name(kind)
        .enable_all()
        .build()?;
    // As a task: this thread would have to be woken for each heartbeat.
    let outcome = py.detach(|| runtime.block_on(runtime.spawn(service.serve())));
    let outcome = outcome.unwrap_or_else(|error| Err(error.into()));
    // Store operations in flight are atomic: nothing is lost by not waiting for them.
    runtime.shutdown_background();
    outcome.map_err(|error| PyRuntimeError::new_err(format!("{kind}: {error}")))
}

enum Service {
    Mgmtd(MgmtdJson),
    Meta(MetaJson),
    Storage(threefs_storage::StorageConfig),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MgmtdJson {
    listen: String,
    #[serde(default)]
    advertise: Option<String>,
    key_file: PathBuf,
    #[serde(default)]
    tls: bool,
    #[serde(default)]
    tls_transition: bool,
    #[serde(default)]
    data: Option<PathBuf>,
    #[serde(default)]
    etcd: Option<EtcdJson>,
    #[serde(default)]
    postgres: Option<PostgresJson>,
    nodes: u32,
    replicas: u32,
    chains_per_node: u32,
    node_failure_ms: u64,
    primary_lease_ms: u64,
    scan_ms: u64,
    #[serde(default = "yes")]
    rebalance: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MetaJson {
    listen: String,
    key_file: PathBuf,
    #[serde(default)]
    tls: bool,
    #[serde(default)]
    tls_transition: bool,
    #[serde(default)]
    data: Option<PathBuf>,
    #[serde(default)]
    etcd: Option<EtcdJson>,
    #[serde(default)]
    postgres: Option<PostgresJson>,
    mgmtd: Vec<String>,
    chunk_bytes: u32,
    stripe: u32,
    gc_delay_ms: u64,
    #[serde(default = "dead_grace_ms")]
    dead_grace_ms: u64,
    #[serde(default = "map_bytes_max")]
    map_bytes_max: usize,
}

fn dead_grace_ms() -> u64 {
    DEAD_GRACE_MS
}

fn map_bytes_max() -> usize {
    MAP_BYTES_MAX
}

impl Service {
    fn parse(kind: &str, json: &str) -> Result<Self, String> {
        match kind {
            "mgmtd" => parsed(kind, json).map(Self::Mgmtd),
            "meta" => parsed(kind, json).map(Self::Meta),
            "storage" => parsed(kind, json).map(Self::Storage),
            _ => Err(format!("kind is `{kind}`; it must be mgmtd, meta or storage")),
        }
    }

    fn worker_threads(&self) -> usize {
        match self {
            Self::Mgmtd(_) => 1,
            // Disks have separate threads; these compute checksums and transfer data.
            Self::Meta(_) | Self::Storage(_) => {
                std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 16)
            }
        }
    }

    async fn serve(self) -> Outcome {
        let (handle, shutdown) = Shutdown::new();
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            handle.request();
            // `handle` requests a shutdown when it is dropped, too, so the task never ends.
            std::future::pending::<()>().await;
        });
        match self {
            Self::Mgmtd(json) => Ok(threefs_mgmtd::run(json.config()?, shutdown).await?),
            Self::Meta(json) => {
                let config = json.config()?;
                // Chunks are truncated and removed by an ordinary client of this cluster.
                let meta = vec![config.listen.clone()];
                let credentials = config.tls.credentials(&config.key);
                let client = ClientConfig::new(config.mgmtd.clone(), meta, credentials);
                let trimmer = Arc::new(Client::start(client));
                Ok(threefs_meta::run(config, trimmer, shutdown).await?)
            }
            Self::Storage(config) => Ok(threefs_storage::run(config, shutdown).await?),
        }
    }
}

impl MgmtdJson {
    fn config(self) -> Result<MgmtdConfig, ServiceError> {
        let Self { nodes, replicas, chains_per_node, .. } = self;
        let Self { node_failure_ms, primary_lease_ms, scan_ms, .. } = self;
        Ok(MgmtdConfig {
            listen: self.listen,
            advertise: self.advertise,
            key: Keys::read(&self.key_file)?,
            tls: ServiceTls { enabled: self.tls, transition: self.tls_transition },
            store: store_config(self.data, MAP_BYTES_MAX, self.etcd, self.postgres)?,
            bootstrap: Bootstrap { nodes, replicas, chains_per_node },
            rebalance: self.rebalance,
            timers: Timers { node_failure_ms, primary_lease_ms, scan_ms },
        })
    }
}

impl MetaJson {
    fn config(self) -> Result<MetaConfig, ServiceError> {
        let Self { chunk_bytes, stripe, gc_delay_ms, dead_grace_ms, .. } = self;
        Ok(MetaConfig {
            listen: self.listen,
            key: Keys::read(&self.key_file)?,
            tls: ServiceTls { enabled: self.tls, transition: self.tls_transition },
            store: store_config(self.data, self.map_bytes_max, self.etcd, self.postgres)?,
            mgmtd: self.mgmtd,
            tree: TreeConfig {
                layout: LayoutDefaults { chunk_bytes, stripe },
                gc_delay_ms,
                dead_grace_ms,
                ..TreeConfig::default()
            },
        })
    }
}

fn parsed<T: DeserializeOwned>(kind: &str, json: &str) -> Result<T, String> {
    serde_json::from_str(json).map_err(|error| format!("invalid configuration of {kind}: {error}"))
}

/// Ends this process when its parent ends for any reason.
fn die_with(parent_pid: u32) -> PyResult<()> {
    if parent_pid == 0 {
        return Ok(());
    }
    // SAFETY: prctl with PR_SET_PDEATHSIG takes one integer and touches no memory.
    let status = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if status != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // The parent may have ended before the call above took effect.
    if std::os::unix::process::parent_id() != parent_pid {
        return Err(PyRuntimeError::new_err(format!("the parent process {parent_pid} has exited")));
    }
    Ok(())
}

/// Makes glibc keep freed memory. Payload buffers have the size of a chunk and live for
/// milliseconds: by default each is returned to the kernel, which zeroes the pages of the next one.
pub(crate) fn keep_memory() {
    const MMAP_THRESHOLD_BYTES: libc::c_int = 32 << 20; // The most that glibc takes.
    const TRIM_THRESHOLD_BYTES: libc::c_int = 256 << 20;
    const ARENAS_MAX: libc::c_int = 4;
    // SAFETY: mallopt takes two integers; an unknown option has no effect.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES);
        libc::mallopt(libc::M_ARENA_MAX, ARENAS_MAX);
    }
}

/// `THREEFS_LOG` selects the log lines: a level, or `module=level,…`.
pub(crate) fn log_to_stderr() {
    let directives = std::env::var("THREEFS_LOG").unwrap_or_default();
    let parsed = directives.parse::<Targets>();
    let filter = match &parsed {
        Ok(filter) if !directives.is_empty() => filter.clone(),
        _ => Targets::new().with_default(LevelFilter::INFO),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_filter(filter);
    // An error means that a subscriber is already set, which then receives the lines.
    let _ = tracing_subscriber::registry().with(lines).try_init();
    if let Err(error) = parsed {
        tracing::warn!("invalid THREEFS_LOG={directives} ({error}): using level info");
    }
}
