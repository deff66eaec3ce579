//! Current routing, kept up to date by one long poll, so that changes arrive when they are
//! published and operations do not query mgmtd.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::ids::{NodeId, RoutingVersion, TargetId};
use threefs_core::routing::RoutingInfo;
use threefs_mgmtd::{
    ClusterStatus, MgmtdClient, MgmtdClientError, Promotion, RebalancePlan, RoutingFollower,
};

use crate::config::ClientConfig;
use crate::error::{Attempts, ClientError};

/// Timeout of a direct query to mgmtd before the followed routing is checked again.
const ASK: Duration = Duration::from_millis(500);

/// Follows mgmtd until dropped.
pub(crate) struct Routing {
    mgmtd: MgmtdClient,
    follower: RoutingFollower,
    names: String,
}

impl Routing {
    /// Starts to follow.
    pub(crate) fn follow(config: &ClientConfig) -> Self {
        let mgmtd = MgmtdClient::new(&config.mgmtd, &config.credentials);
        let follower = mgmtd.follow();
        Self { mgmtd, follower, names: format!("mgmtd at {}", config.mgmtd.join(", ")) }
    }

    /// Current routing; waits for the first one, `None` at the deadline.
    pub(crate) async fn current(
        &self,
        attempts: &mut Attempts,
        deadline: Deadline,
    ) -> Result<Option<Arc<RoutingInfo>>, ClientError> {
        loop {
            let now = self.follower.now();
            if now.version > RoutingVersion(0) {
                return Ok(Some(now));
            }
            if deadline.passed() {
                return Ok(None);
            }
            // Queried only for the reason of the delay; the follower delivers the routing.
            let build_request = deadline.within(ASK);
            match self.mgmtd.routing(RoutingVersion(0), Duration::ZERO, build_request).await {
                Ok(_) => attempts.failed(&self.names, "mgmtd has no routing yet"),
                Err(error) => self.failed(attempts, error)?,
            }
            let pause = deadline.within(Duration::from_millis(50));
            self.follower.wait_for(pause, |it| it.version > RoutingVersion(0)).await;
        }
    }

    /// Waits for routing newer than `current`, at most until `pause`.
    pub(crate) async fn wait_newer(&self, current: RoutingVersion, pause: Deadline) {
        self.follower.wait_for(pause, |it| it.version > current).await;
    }

    /// Returns when `expired` holds for some routing.
    pub(crate) async fn until(&self, expired: impl Fn(&RoutingInfo) -> bool) {
        let mut receiver = self.follower.receiver();
        if receiver.wait_for(|now| expired(now)).await.is_err() {
            // The follower has ended: the client is shutting down, and this future with it.
            std::future::pending::<()>().await;
        }
    }

    /// mgmtd's view of nodes and chains; `None` at the deadline.
    pub(crate) async fn status(
        &self,
        attempts: &mut Attempts,
        deadline: Deadline,
    ) -> Result<Option<ClusterStatus>, ClientError> {
        match self.mgmtd.status(deadline).await {
            Ok(status) => Ok(Some(status)),
            Err(error) => {
                self.failed(attempts, error)?;
                Ok(None)
            }
        }
    }

    /// See [`MgmtdClient::rebalance`]; `None` at the deadline.
    pub(crate) async fn rebalance(
        &self,
        attempts: &mut Attempts,
        apply: bool,
        leaving: Option<Vec<NodeId>>,
        deadline: Deadline,
    ) -> Result<Option<RebalancePlan>, ClientError> {
        match self.mgmtd.rebalance(apply, leaving, deadline).await {
            Ok(plan) => Ok(Some(plan)),
            Err(MgmtdClientError::Refused(error)) if !error.retryable() => {
                Err(ClientError::InvalidArgument { detail: error.to_string() })
            }
            Err(error) => {
                self.failed(attempts, error)?;
                Ok(None)
            }
        }
    }

    /// See [`MgmtdClient::promote`]; `None` at the deadline.
    pub(crate) async fn promote(
        &self,
        attempts: &mut Attempts,
        target: TargetId,
        apply: bool,
        deadline: Deadline,
    ) -> Result<Option<Promotion>, ClientError> {
        match self.mgmtd.promote(target, apply, deadline).await {
            Ok(promotion) => Ok(Some(promotion)),
            Err(MgmtdClientError::Refused(error)) if !error.retryable() => {
                Err(ClientError::InvalidArgument { detail: error.to_string() })
            }
            Err(error) => {
                self.failed(attempts, error)?;
                Ok(None)
            }
        }
    }

    fn failed(&self, attempts: &mut Attempts, error: MgmtdClientError) -> Result<(), ClientError> {
        match error {
            MgmtdClientError::Rpc(error) => attempts.rpc(&self.names, &error),
            MgmtdClientError::Refused(error) => {
                attempts.failed(&self.names, error);
                Ok(())
            }
            unexpected @ MgmtdClientError::Unexpected { .. } => Err(ClientError::Protocol {
                who: self.names.clone(),
                detail: unexpected.to_string(),
            }),
        }
    }
}
