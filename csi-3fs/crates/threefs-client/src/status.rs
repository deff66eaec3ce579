//! Cluster status, as shown by `threefs status`.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use fabric::rpc::RpcError;
use serde::Serialize;
use threefs_core::ids::{RoutingVersion, TargetId};
use threefs_core::routing::RoutingInfo;
use threefs_meta::protocol::ServiceRole;
use threefs_meta::{MetaClientError, MetaError, MetaQuery, MetaReply};
use threefs_mgmtd::{
    ClusterStatus, DomainReport, DrainChange, MgmtdClientError, MgmtdError, MoveReport, Promotion,
    RebalancePlan, UnconfirmedReport,
};

use crate::Client;
use crate::error::{Attempts, ClientError};

/// Time for which the state of each service is waited for.
const STATE_TIMEOUT: Duration = Duration::from_secs(1);

/// State of one mgmtd or metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ServiceState {
    /// It answers requests.
    Serving,
    /// An mgmtd that takes over from the primary.
    Standby,
    /// It runs and does not answer requests yet.
    Starting,
    /// No reply.
    Unreachable,
}

/// One mgmtd or metadata service.
#[derive(Clone, Debug, Serialize)]
pub struct ServiceStatus {
    /// Its address in the configuration of this client.
    pub address: String,
    /// Its state.
    pub state: ServiceState,
    /// Whether it is the primary mgmtd, or the metadata service that collects garbage.
    pub leads: bool,
    /// Why it does not serve, or does not tell its role.
    pub detail: Option<String>,
}

/// Status of all services.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// mgmtd's view.
    pub cluster: ClusterStatus,
    /// Nodes, chains and tables as published.
    pub routing: RoutingInfo,
    /// Failure domains; `None` if mgmtd is older than this report, or the client has a ticket.
    pub domains: Option<DomainReport>,
    /// Moves of replicas in progress; `None` as for `domains`.
    pub moves: Option<MoveReport>,
    /// Chains that wait after a restore of mgmtd's store; `None` as for `domains`.
    pub unconfirmed: Option<UnconfirmedReport>,
    /// The metadata service's view; `None`, with a reason in `meta_trouble`, if it is unavailable.
    pub meta: Option<threefs_meta::protocol::MetaStatus>,
    /// Why `meta` is missing.
    pub meta_trouble: Option<String>,
    /// Every mgmtd that this client knows.
    pub mgmtds: Vec<ServiceStatus>,
    /// Every metadata service that this client knows.
    pub metas: Vec<ServiceStatus>,
}

impl Client {
    /// Queries mgmtd and the metadata service.
    ///
    /// # Errors
    /// Any [`ClientError`]; an unavailable metadata service is not an error.
    pub async fn status(&self) -> Result<Status, ClientError> {
        let deadline = self.deadline();
        let cluster = self.mgmtd_result("status", self.0.routing.mgmtd.status(deadline).await)?;
        let mut attempts = Attempts::of("status");
        // mgmtd has no routing before the first node registers.
        let routing = if cluster.routing_version == RoutingVersion(0) {
            Arc::default()
        } else {
            match self.0.routing.current(&mut attempts, deadline).await? {
                Some(routing) => routing,
                None => return Err(attempts.unavailable(self.0.config.timeout)),
            }
        };
        let domains = self.mgmtd_result("status", self.0.routing.mgmtd.domains(deadline).await)?;
        let moves = self.moves_until(false, deadline).await?;
        let unconfirmed = self.0.routing.mgmtd.unconfirmed(deadline).await;
        let unconfirmed = self.mgmtd_result("status", unconfirmed)?;
        let deadline = deadline.within(STATE_TIMEOUT);
        let (reply, mgmtds, metas) = tokio::join!(
            self.0.metadata.query("status", MetaQuery::Status, deadline),
            self.mgmtds(deadline),
            self.metas(deadline)
        );
        let (meta, meta_trouble) = match reply {
            Ok(MetaReply::Status(status)) => (Some(status), None),
            Ok(other) => return Err(ClientError::unexpected("meta", &other)),
            Err(error) => (None, Some(error.to_string())),
        };
        let routing = (*routing).clone();
        Ok(Status {
            cluster,
            routing,
            domains,
            moves,
            unconfirmed,
            meta,
            meta_trouble,
            mgmtds,
            metas,
        })
    }

    async fn mgmtds(&self, deadline: Deadline) -> Vec<ServiceStatus> {
        let results = self.0.routing.mgmtd.status_of_each(deadline).await;
        let of_result = |result| match result {
            Ok(_) => (ServiceState::Serving, true, None),
            Err(MgmtdClientError::Refused(MgmtdError::NotPrimary { .. })) => {
                (ServiceState::Standby, false, None)
            }
            Err(error @ MgmtdClientError::Refused(_)) => {
                (ServiceState::Starting, false, Some(error.to_string()))
            }
            Err(error) => (ServiceState::Unreachable, false, Some(error.to_string())),
        };
        with_addresses(&self.0.config.mgmtd, results.into_iter().map(of_result))
    }

    async fn metas(&self, deadline: Deadline) -> Vec<ServiceStatus> {
        let results = self.0.metadata.role_of_each(deadline).await;
        let of_result = |result| match result {
            Ok(ServiceRole { collects_garbage }) => (ServiceState::Serving, collects_garbage, None),
            Err(MetaClientError::Refused(error @ MetaError::Unavailable { .. })) => {
                (ServiceState::Starting, false, Some(error.to_string()))
            }
            // It runs, and refuses to tell: an earlier release, or the client has a ticket.
            Err(
                error @ (MetaClientError::Refused(_)
                | MetaClientError::Rpc(RpcError::Faulted { .. })),
            ) => (ServiceState::Serving, false, Some(error.to_string())),
            Err(error) => (ServiceState::Unreachable, false, Some(error.to_string())),
        };
        with_addresses(&self.0.config.meta, results.into_iter().map(of_result))
    }

    /// Plans moves that balance the storage nodes; with `apply`, starts them.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn rebalance(&self, apply: bool) -> Result<RebalancePlan, ClientError> {
        let plan = self.0.routing.mgmtd.rebalance(apply, None, self.deadline()).await;
        self.mgmtd_result("rebalance", plan)
    }

    /// Plans the moves after a change of the drained nodes; with `apply`, makes it.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn drain(
        &self,
        apply: bool,
        change: DrainChange,
    ) -> Result<RebalancePlan, ClientError> {
        let plan = self.0.routing.mgmtd.drain(apply, change, self.deadline()).await;
        self.mgmtd_result("drain", plan)
    }

    /// Moves in progress, and with `plan` why others wait; `None` if mgmtd is older than this report,
    /// or the client has a ticket.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn moves(&self, plan: bool) -> Result<Option<MoveReport>, ClientError> {
        self.moves_until(plan, self.deadline()).await
    }

    async fn moves_until(
        &self,
        plan: bool,
        deadline: Deadline,
    ) -> Result<Option<MoveReport>, ClientError> {
        self.mgmtd_result("moves", self.0.routing.mgmtd.moves(plan, deadline).await)
    }

    /// The limit of the bytes per second that moves copy, after it is set if one is given; 0 = none.
    /// `None` if mgmtd is older than this limit.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn move_rate(
        &self,
        bytes_per_second: Option<u64>,
    ) -> Result<Option<u64>, ClientError> {
        let rate = self.0.routing.mgmtd.move_rate(bytes_per_second, self.deadline()).await;
        self.mgmtd_result("move_rate", rate)
    }

    /// Plans the promotion of `target` to serve its chain, whose last serving targets are lost;
    /// with `apply`, does it.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn promote(&self, target: TargetId, apply: bool) -> Result<Promotion, ClientError> {
        let promotion = self.0.routing.mgmtd.promote(target, apply, self.deadline()).await;
        self.mgmtd_result("promote", promotion)
    }

    /// The result of a call to mgmtd.
    pub(crate) fn mgmtd_result<T>(
        &self,
        what: &str,
        result: Result<T, MgmtdClientError>,
    ) -> Result<T, ClientError> {
        let error = match result {
            Ok(reply) => return Ok(reply),
            Err(MgmtdClientError::Refused(error)) if !error.retryable() => {
                return Err(ClientError::InvalidArgument { detail: error.to_string() });
            }
            Err(error) => error,
        };
        let mut attempts = Attempts::of(what);
        self.0.routing.record_failure(&mut attempts, error)?;
        Err(attempts.unavailable(self.0.config.timeout))
    }
}

fn with_addresses(
    addresses: &[String],
    states: impl Iterator<Item = (ServiceState, bool, Option<String>)>,
) -> Vec<ServiceStatus> {
    let of_service = |(address, (state, leads, detail)): (&String, _)| {
        let address = address.clone();
        ServiceStatus { address, state, leads, detail }
    };
    addresses.iter().zip(states).map(of_service).collect()
}
