//! The cluster as one value: what `threefs status` shows.

use std::sync::Arc;

use serde::Serialize;
use threefs_core::ids::{NodeId, RoutingVersion, TargetId};
use threefs_core::routing::RoutingInfo;
use threefs_meta::{MetaQuery, MetaReply};
use threefs_mgmtd::{ClusterStatus, Promotion, RebalancePlan};

use crate::Client;
use crate::error::{Attempts, ClientError};

/// Everything that the services tell an operator.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// mgmtd's view.
    pub cluster: ClusterStatus,
    /// Nodes, chains and tables as published.
    pub routing: RoutingInfo,
    /// The metadata service's view; `None` with a reason in `meta_trouble` when it is away.
    pub meta: Option<threefs_meta::protocol::MetaStatus>,
    /// Why `meta` is missing.
    pub meta_trouble: Option<String>,
}

impl Client {
    /// Asks mgmtd and the metadata service.
    ///
    /// # Errors
    /// Any [`ClientError`]; a metadata service that does not answer is no error here.
    pub async fn status(&self) -> Result<Status, ClientError> {
        let deadline = self.deadline();
        let mut attempts = Attempts::of("status");
        let cluster = self.0.routing.status(&mut attempts, deadline).await?;
        let Some(cluster) = cluster else {
            return Err(attempts.unavailable(self.0.config.timeout));
        };
        let mut attempts = Attempts::of("status");
        // Before the first node registers there is no routing to wait for.
        let routing = if cluster.routing_version == RoutingVersion(0) {
            Arc::default()
        } else {
            match self.0.routing.newest(&mut attempts, deadline).await? {
                Some(routing) => routing,
                None => return Err(attempts.unavailable(self.0.config.timeout)),
            }
        };
        let patience = deadline.within(std::time::Duration::from_secs(1));
        let asked = self.0.metadata.query("status", MetaQuery::Status, patience).await;
        let (meta, meta_trouble) = match asked {
            Ok(MetaReply::Status(status)) => (Some(status), None),
            Ok(other) => return Err(ClientError::unexpected("meta", &other)),
            Err(error) => (None, Some(error.to_string())),
        };
        Ok(Status { cluster, routing: (*routing).clone(), meta, meta_trouble })
    }

    /// What has to move for all storage nodes to hold as much as the others; with `apply`, it
    /// begins. `leaving`: nodes that shall hold nothing; `None` = those that were named last.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn rebalance(
        &self,
        apply: bool,
        leaving: Option<Vec<NodeId>>,
    ) -> Result<RebalancePlan, ClientError> {
        let mut attempts = Attempts::of("rebalance");
        let plan = self.0.routing.rebalance(&mut attempts, apply, leaving, self.deadline()).await?;
        plan.ok_or_else(|| attempts.unavailable(self.0.config.timeout))
    }

    /// What it would mean for `target` to lead its chain, whose last targets to serve are lost; with
    /// `apply`, it is done.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn promote(&self, target: TargetId, apply: bool) -> Result<Promotion, ClientError> {
        let mut attempts = Attempts::of("promote");
        let promotion =
            self.0.routing.promote(&mut attempts, target, apply, self.deadline()).await?;
        promotion.ok_or_else(|| attempts.unavailable(self.0.config.timeout))
    }
}
