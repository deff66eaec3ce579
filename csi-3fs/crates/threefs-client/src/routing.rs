//! The newest routing. One long poll keeps it, so a change is known as soon as it is published and
//! nobody asks mgmtd for it on the way of an operation.

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

/// How long mgmtd is asked directly before the followed routing is looked at again.
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

    /// The newest routing that is known now; waits for the first one, `None` at the deadline.
    pub(crate) async fn newest(
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
            // Asked only to learn why there is none yet; the follower brings it.
            let ask = deadline.within(ASK);
            match self.mgmtd.routing(RoutingVersion(0), Duration::ZERO, ask).await {
                Ok(_) => attempts.failed(&self.names, "it has no routing yet"),
                Err(error) => self.failed(attempts, error)?,
            }
            let pause = deadline.within(Duration::from_millis(50));
            self.follower.wait_for(pause, |it| it.version > RoutingVersion(0)).await;
        }
    }

    /// Waits for routing newer than `known`, not longer than `pause`.
    pub(crate) async fn newer_than(&self, known: RoutingVersion, pause: Deadline) {
        self.follower.wait_for(pause, |it| it.version > known).await;
    }

    /// Ends when `over` holds of some routing.
    pub(crate) async fn until(&self, over: impl Fn(&RoutingInfo) -> bool) {
        let mut receiver = self.follower.receiver();
        if receiver.wait_for(|now| over(now)).await.is_err() {
            // Nobody follows any more: the client is going down and this future with it.
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
