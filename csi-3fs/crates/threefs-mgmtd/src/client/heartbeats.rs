//! Heartbeats to all mgmtds at once: a node does not have to find out first which of them leads.

use std::time::Duration;

use fabric::deadline::Deadline;
use fabric::rpc::FaultCode::BadRequest;
use fabric::rpc::Pool;
use threefs_core::heartbeat::{FenceReport, Heartbeat, HeartbeatReply, SeenRouting};
use threefs_core::ids::FencesVersion;
use threefs_core::location::Location;
use tokio::task::JoinSet;

use super::{MgmtdClient, MgmtdClientError, refused, unexpected};
use crate::protocol::{MgmtdReply, MgmtdRequest, MgmtdResult};

/// What a node reports in a heartbeat.
#[derive(Clone, Debug)]
pub struct NodeReport {
    /// Its state and that of its targets.
    pub heartbeat: Heartbeat,
    /// Its failure domains.
    pub location: Location,
    /// The routing that it has seen.
    pub seen: SeenRouting,
    /// The fences that it knows and confirms.
    pub fences: FenceReport,
}

/// Heartbeats of one node. At most one of them waits for the reply of each mgmtd.
pub struct Heartbeats<T> {
    client: MgmtdClient,
    mgmtds: Vec<State>,
    calls: JoinSet<Reply<T>>,
}

/// What is known of an mgmtd.
#[derive(Clone, Copy, Default)]
struct State {
    waits: bool,
    /// A newer heartbeat was not sent to it.
    missed: bool,
    /// Its last reply accepted a heartbeat, and it owes none to a newer one.
    leads: bool,
    /// Its last reply accepted a heartbeat.
    accepted: bool,
}

/// A reply to a heartbeat.
pub struct HeartbeatResult<T> {
    /// The tag of the heartbeat.
    pub tag: T,
    /// The reply of the primary, with the fences that the lease requires, or an error.
    pub result: Result<(HeartbeatReply, FencesVersion), MgmtdClientError>,
    /// A newer heartbeat was not sent to this mgmtd, which owed this reply.
    pub missed: bool,
}

struct Reply<T> {
    number: usize,
    tag: T,
    result: Result<(HeartbeatReply, FencesVersion), MgmtdClientError>,
}

impl MgmtdClient {
    /// Heartbeats of one node to all mgmtds.
    pub fn heartbeats<T>(&self) -> Heartbeats<T> {
        let mgmtds = vec![State::default(); self.0.pools.len()];
        Heartbeats { client: self.clone(), mgmtds, calls: JoinSet::new() }
    }
}

impl<T: Clone + Send + 'static> Heartbeats<T> {
    /// Sends a heartbeat to each mgmtd that does not owe a reply to an earlier one. `tag` is returned
    /// with each reply.
    pub fn send(&mut self, report: &NodeReport, tag: &T, timeout: Duration) {
        for number in 0..self.mgmtds.len() {
            let state = &mut self.mgmtds[number];
            if state.waits {
                (state.missed, state.leads) = (true, false);
                continue;
            }
            state.waits = true;
            let pool = self.client.0.pools[number].clone();
            let (report, tag) = (report.clone(), tag.clone());
            self.calls.spawn(async move {
                let result = call(&pool, report, Deadline::after(timeout)).await;
                Reply { number, tag, result }
            });
        }
    }

    /// The next reply; never returns while no mgmtd owes one. Both the former and the next primary may
    /// accept heartbeats for a while. Cancel safe.
    pub async fn reply(&mut self) -> HeartbeatResult<T> {
        loop {
            match self.calls.join_next().await {
                Some(Ok(Reply { number, tag, result })) => {
                    let missed = self.replied(number, &result);
                    return HeartbeatResult { tag, result, missed };
                }
                // A call does not panic, and only dropping the set aborts it.
                Some(Err(error)) => tracing::error!(%error, "a heartbeat ended"),
                None => std::future::pending::<()>().await,
            }
        }
    }

    /// Returns whether this mgmtd has missed a newer heartbeat.
    fn replied<R>(&mut self, number: usize, result: &Result<R, MgmtdClientError>) -> bool {
        let leads = result.is_ok();
        let state = State { leads, accepted: leads, ..State::default() };
        let before = std::mem::replace(&mut self.mgmtds[number], state);
        let known = *self.client.0.primary.borrow();
        // Of two that accept heartbeats, the one that did not do so before is the next primary.
        if leads && (known == number || !self.mgmtds[known].leads || !before.accepted) {
            self.client.0.leads(number);
        }
        let error = match result {
            Err(MgmtdClientError::Rpc(error)) => Some(error),
            _ => None,
        };
        self.client.0.heard(number, error);
        before.missed
    }
}

/// One heartbeat to one mgmtd. An older one gets it without what it does not know.
async fn call(
    pool: &Pool,
    report: NodeReport,
    deadline: Deadline,
) -> Result<(HeartbeatReply, FencesVersion), MgmtdClientError> {
    let NodeReport { heartbeat, location, seen, fences } = report;
    let (to_send, at) = (|| heartbeat.clone(), || location.clone());
    let requests = [
        MgmtdRequest::FencedHeartbeat {
            heartbeat: to_send(),
            location: at(),
            seen: seen.clone(),
            fences,
        },
        MgmtdRequest::SeenHeartbeat { heartbeat: to_send(), location: at(), seen },
        MgmtdRequest::LocatedHeartbeat { heartbeat: to_send(), location: at() },
    ];
    for request in requests {
        match ask(pool, &request, deadline).await {
            Err(error) if refused(&error, &[BadRequest]) => {}
            result => return result,
        }
    }
    ask(pool, &MgmtdRequest::Heartbeat(heartbeat), deadline).await
}

async fn ask(
    pool: &Pool,
    request: &MgmtdRequest,
    deadline: Deadline,
) -> Result<(HeartbeatReply, FencesVersion), MgmtdClientError> {
    let timeout = deadline.remaining().unwrap_or_default();
    match pool.ask::<_, MgmtdResult>(request, timeout, deadline, None).await?? {
        MgmtdReply::FencedHeartbeat(reply, fences) => Ok((reply, fences)),
        MgmtdReply::Heartbeat(reply) => Ok((reply, FencesVersion(0))),
        other => Err(unexpected("a heartbeat", &other)),
    }
}
