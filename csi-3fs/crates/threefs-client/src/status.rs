//! Cluster status, as shown by `threefs status`.

use std::sync::Arc;

use serde::Serialize;
use threefs_core::ids::{NodeId, RoutingVersion, TargetId};
use threefs_core::routing::RoutingInfo;
use threefs_meta::{MetaQuery, MetaReply};
use threefs_mgmtd::{ClusterStatus, MgmtdClientError, Promotion, RebalancePlan};

use crate::Client;
use crate::error::{Attempts, ClientError};

/// Status of all services.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// mgmtd's view.
    pub cluster: ClusterStatus,
    /// Nodes, chains and tables as published.
    pub routing: RoutingInfo,
    /// The metadata service's view; `None`, with a reason in `meta_trouble`, if it is unavailable.
    pub meta: Option<threefs_meta::protocol::MetaStatus>,
    /// Why `meta` is missing.
    pub meta_trouble: Option<String>,
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
        let deadline = deadline.within(std::time::Duration::from_secs(1));
        let reply = self.0.metadata.query("status", MetaQuery::Status, deadline).await;
        let (meta, meta_trouble) = match reply {
            Ok(MetaReply::Status(status)) => (Some(status), None),
            Ok(other) => return Err(ClientError::unexpected("meta", &other)),
            Err(error) => (None, Some(error.to_string())),
        };
        Ok(Status { cluster, routing: (*routing).clone(), meta, meta_trouble })
    }

    /// Plans moves that balance the storage nodes; with `apply`, starts them. `leaving`: nodes to
    /// be drained; `None` = the nodes of the previous request.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn rebalance(
        &self,
        apply: bool,
        leaving: Option<Vec<NodeId>>,
    ) -> Result<RebalancePlan, ClientError> {
        let plan = self.0.routing.mgmtd.rebalance(apply, leaving, self.deadline()).await;
        self.mgmtd_result("rebalance", plan)
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
