//! Load of all services by their callers, as shown by `threefs top`.
//!
//! A service reports what its callers did since the previous report on the same connection
//! (`fabric::rpc::Usage`). So each client has separate connections for reports, one to each service.

use std::collections::BTreeSet;
use std::time::Duration;

use fabric::deadline::Deadline;
use fabric::rpc::{ConnectionConfig, Counts, FaultCode, Pool, PoolConfig, Pools, RpcError, Usage};
use serde::Serialize;
use threefs_core::ids::NodeId;
use threefs_core::message::class;
use threefs_core::routing::RoutingInfo;
use tokio::task::JoinSet;

use crate::Client;
use crate::config::{ClientConfig, STORAGE_CONTEXT};
use crate::error::{Attempts, ClientError};

/// Services that are queried at once.
const SERVICES_AT_ONCE: usize = 64;
/// Timeout of one query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Kind of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ServiceKind {
    /// Cluster manager.
    Mgmtd,
    /// Metadata service.
    Meta,
    /// Storage service.
    Storage,
}

/// Load of a service by one caller, or by several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Calls.
    pub operations: u64,
    /// Of a storage service: bytes of replies to reads. Otherwise of all replies.
    pub read_bytes: u64,
    /// Of a storage service: bytes of updates, also those that a replica forwards. Otherwise of all
    /// requests.
    pub written_bytes: u64,
}

/// Load of a service by one caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallerLoad {
    /// Inode of the caller's volume; `None` for a holder of the cluster's key.
    pub volume: Option<u64>,
    /// Path of the volume when its credential was issued, or the end of it.
    pub path: String,
    /// The node of the credential; otherwise the address of the caller.
    pub host: String,
    /// Its load.
    #[serde(flatten)]
    pub load: Load,
}

/// Load of a service since the previous report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServiceLoad {
    /// Its kind.
    pub kind: ServiceKind,
    /// Its node, or its address.
    pub name: String,
    /// Its address.
    pub address: String,
    /// Time since the previous report; `None` for the first one since the service or its connection
    /// was started, and without a reply.
    pub elapsed_ms: Option<u64>,
    /// Its callers with the most load.
    pub callers: Vec<CallerLoad>,
    /// The sum of all other callers.
    pub other: Load,
    /// Why it did not reply.
    pub trouble: Option<String>,
}

/// Connections for reports.
pub(crate) struct UsageConnections {
    mgmtd: Pools,
    meta: Pools,
    storage: Pools,
}

impl UsageConnections {
    pub(crate) fn new(config: &ClientConfig) -> Self {
        let of_context = |context| {
            let mut connection = ConnectionConfig::new(context, &config.credentials);
            connection.connect_timeout = QUERY_TIMEOUT;
            Pools::new(PoolConfig::new(connection))
        };
        Self {
            mgmtd: of_context(threefs_mgmtd::protocol::CONTEXT),
            meta: of_context(threefs_meta::protocol::CONTEXT),
            storage: of_context(STORAGE_CONTEXT),
        }
    }

    fn pool(&self, kind: ServiceKind, address: &str) -> Pool {
        match kind {
            ServiceKind::Mgmtd => self.mgmtd.at(address),
            ServiceKind::Meta => self.meta.at(address),
            ServiceKind::Storage => self.storage.at(address),
        }
    }
}

impl Client {
    /// Load of each mgmtd, metadata service and storage service with replicas, since the previous
    /// call of this function. The first call has no counters. Calls must not overlap.
    ///
    /// # Errors
    /// `Refused` without the cluster's key. A service that does not reply is not an error.
    pub async fn usage(&self) -> Result<Vec<ServiceLoad>, ClientError> {
        let (mut waiting, mut loads) = (self.services().await?, Vec::new());
        let mut tasks = JoinSet::new();
        loop {
            while tasks.len() < SERVICES_AT_ONCE
                && let Some(service) = waiting.pop()
            {
                let pool = (!service.address.is_empty())
                    .then(|| self.0.usage.pool(service.kind, &service.address));
                tasks.spawn(query(service, pool));
            }
            match tasks.join_next().await {
                Some(Ok(load)) => loads.push(load?),
                Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
                None => break,
            }
        }
        loads.sort_by(|a, b| (a.kind, a.order()).cmp(&(b.kind, b.order())));
        Ok(loads)
    }

    /// All services that may have load.
    async fn services(&self) -> Result<Vec<ServiceLoad>, ClientError> {
        let config = &self.0.config;
        let of_kind = |kind, addresses: &[String]| -> Vec<ServiceLoad> {
            addresses.iter().map(|it| ServiceLoad::new(kind, it.clone(), it)).collect()
        };
        let mut services = of_kind(ServiceKind::Mgmtd, &config.mgmtd);
        services.extend(of_kind(ServiceKind::Meta, &config.meta));
        let mut attempts = Attempts::of("usage");
        let deadline = self.deadline().within(QUERY_TIMEOUT);
        match self.0.routing.current(&mut attempts, deadline).await? {
            Some(routing) => services.extend(storage_services(&routing)),
            None => {
                let mut storage = ServiceLoad::new(ServiceKind::Storage, "storage".into(), "");
                storage.trouble = Some("unknown services: mgmtd has sent no routing".into());
                services.push(storage);
            }
        }
        Ok(services)
    }
}

/// The nodes with replicas. Others have no load: they may be drained and removed.
fn storage_services(routing: &RoutingInfo) -> impl Iterator<Item = ServiceLoad> {
    let places = routing.chains.values().flat_map(|chain| &chain.targets);
    let nodes: BTreeSet<NodeId> = places.map(|place| place.node).collect();
    nodes.into_iter().map(|node| {
        let address = routing.address(node).unwrap_or_default();
        let mut service = ServiceLoad::new(ServiceKind::Storage, node.to_string(), address);
        if address.is_empty() {
            service.trouble = Some("its address is not in the routing".into());
        }
        service
    })
}

impl ServiceLoad {
    fn new(kind: ServiceKind, name: String, address: &str) -> Self {
        let (callers, other) = (Vec::new(), Load::default());
        let address = address.to_owned();
        Self { kind, name, address, elapsed_ms: None, callers, other, trouble: None }
    }

    /// Nodes by their number.
    fn order(&self) -> (usize, &str) {
        (self.name.len(), &self.name)
    }

    fn with(mut self, usage: Usage) -> Self {
        let load = |counts: &Counts| load_of(self.kind, counts);
        self.other = load(&usage.other);
        self.callers = usage
            .callers
            .into_iter()
            .map(|(caller, counts)| CallerLoad {
                volume: caller.volume,
                path: caller.path,
                host: caller.host,
                load: load(&counts),
            })
            .collect();
        self.elapsed_ms = usage.elapsed_ms;
        self
    }
}

/// Queries a service, unless its address is unknown.
async fn query(service: ServiceLoad, pool: Option<Pool>) -> Result<ServiceLoad, ClientError> {
    let Some(pool) = pool else { return Ok(service) };
    let trouble = match pool.usage(Deadline::after(QUERY_TIMEOUT)).await {
        Ok(usage) => return Ok(service.with(usage)),
        Err(RpcError::Faulted { fault, .. }) if fault.code == FaultCode::Forbidden => {
            return Err(ClientError::Refused { detail: fault.detail });
        }
        Err(RpcError::Faulted { fault, .. }) if fault.code == FaultCode::BadRequest => {
            "it runs a version without this report: upgrade it".to_owned()
        }
        Err(error) => error.to_string(),
    };
    Ok(ServiceLoad { trouble: Some(trouble), ..service })
}

fn load_of(kind: ServiceKind, counts: &Counts) -> Load {
    let mut load = Load::default();
    for (class, count) in counts {
        let (reads, writes) = match kind {
            ServiceKind::Storage => {
                let reads = matches!(*class, class::READ | class::QUERY);
                (reads, !reads)
            }
            ServiceKind::Mgmtd | ServiceKind::Meta => (true, true),
        };
        load.operations += count.operations;
        load.read_bytes += if reads { count.sent_bytes } else { 0 };
        load.written_bytes += if writes { count.received_bytes } else { 0 };
    }
    load
}
