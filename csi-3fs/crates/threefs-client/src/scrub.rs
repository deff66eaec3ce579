//! Scrubs of all targets, as shown and started by `threefs scrub`.

use std::time::Duration;

use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, FaultCode, Payload, RpcError};
use serde::Serialize;
use threefs_core::ids::{ChainId, ChainVersion, NodeId, TargetId};
use threefs_core::message::{Address, StorageReply, StorageRequest};
use threefs_core::routing::{PublicState, RoutingInfo};
use threefs_core::scrub::{ScrubRequest, ScrubStatus};
use tokio::task::JoinSet;

use crate::Client;
use crate::error::{Attempts, CallError, ClientError};

/// Targets that are queried at once.
const TARGETS_AT_ONCE: usize = 32;
/// Timeout of one query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Scrub of one target.
#[derive(Clone, Debug, Serialize)]
pub struct TargetScrub {
    /// The target.
    pub target: TargetId,
    /// Its chain.
    pub chain: ChainId,
    /// Its node.
    pub node: NodeId,
    /// Its state in the routing.
    pub state: PublicState,
    /// The status; `None`, with a reason in `trouble`, if the service did not answer.
    pub scrub: Option<ScrubStatus>,
    /// Why `scrub` is missing.
    pub trouble: Option<String>,
}

impl Client {
    /// Status of the scrub of each target, in order; with `start`, a pass is started on each first.
    /// `targets`: only these; all if it is empty.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown target, or any [`ClientError`]. A service that does not
    /// answer is not an error.
    pub async fn scrub(
        &self,
        start: bool,
        targets: &[TargetId],
    ) -> Result<Vec<TargetScrub>, ClientError> {
        let deadline = self.deadline();
        let mut attempts = Attempts::of("scrub");
        let Some(routing) = self.0.routing.current(&mut attempts, deadline).await? else {
            return Err(attempts.unavailable(self.0.config.timeout));
        };
        let places = routing.chains.values().flat_map(|chain| {
            chain.targets.iter().map(move |place| TargetScrub {
                target: place.target,
                chain: chain.id,
                node: place.node,
                state: place.state,
                scrub: None,
                trouble: None,
            })
        });
        let selected = places.filter(|it| targets.is_empty() || targets.contains(&it.target));
        let mut waiting: Vec<TargetScrub> = selected.collect();
        if let Some(unknown) =
            targets.iter().find(|target| !waiting.iter().any(|it| it.target == **target))
        {
            let detail = format!("{unknown} is in no chain: `threefs status` lists the targets");
            return Err(ClientError::InvalidArgument { detail });
        }
        let mut scrubs = Vec::with_capacity(waiting.len());
        let mut tasks = JoinSet::new();
        loop {
            while tasks.len() < TARGETS_AT_ONCE
                && let Some(place) = waiting.pop()
            {
                let (client, routing) = (self.clone(), routing.clone());
                tasks.spawn(async move { client.scrub_of(&routing, place, start, deadline).await });
            }
            match tasks.join_next().await {
                Some(Ok(scrub)) => scrubs.push(scrub),
                Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
                None => break,
            }
        }
        scrubs.sort_by_key(|scrub| scrub.target);
        Ok(scrubs)
    }

    async fn scrub_of(
        &self,
        routing: &RoutingInfo,
        mut place: TargetScrub,
        start: bool,
        deadline: Deadline,
    ) -> TargetScrub {
        let chain_version = routing.chain(place.chain).map_or(ChainVersion(0), |it| it.version);
        let to = Address { chain: place.chain, chain_version, target: place.target };
        let request = StorageRequest::Scrub(to, ScrubRequest { start });
        let options = CallOptions {
            not_after: None,
            class: request.class(),
            idle_timeout: Some(QUERY_TIMEOUT),
        };
        let deadline = deadline.within(QUERY_TIMEOUT);
        let payload = Payload::empty();
        let call = self.call(routing, place.node, &request, payload, deadline, options);
        match call.await {
            Ok((Ok(StorageReply::Scrub(status)), _)) => place.scrub = Some(*status),
            Ok((Ok(_), _)) => place.trouble = Some("unexpected reply".into()),
            Ok((Err(error), _)) => place.trouble = Some(error.to_string()),
            Err(CallError::Rpc(RpcError::Faulted { fault, .. }))
                if fault.code == FaultCode::BadRequest =>
            {
                place.trouble =
                    Some(format!("{} runs a version without scrub: upgrade it", place.node));
            }
            Err(error) => place.trouble = Some(error.to_string()),
        }
        place
    }
}
