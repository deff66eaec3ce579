//! Execution of requests about the snapshots of a volume.

use std::time::Duration;

use fabric::deadline::Deadline;

use crate::identity::Identity;
use crate::ops::{self, Inputs, OpError};
use crate::protocol::{At, MetaError, MetaReply, SnapshotChange, SnapshotQuery};
use crate::tree::Tree;
use crate::tree::change::ChangeCall;

/// A creation is given up after this time: writers of the volume wait for it.
pub(crate) const CREATION_TIMEOUT: Duration = Duration::from_secs(10);

impl Tree {
    pub(super) async fn change_snapshots(
        &self,
        call: &ChangeCall<'_>,
        change: &SnapshotChange,
        inputs: Inputs,
    ) -> Result<MetaReply, OpError> {
        match change {
            SnapshotChange::Create { at, name } => {
                self.create_snapshot(call, at, name, inputs).await
            }
            SnapshotChange::Remove { at, name } => {
                let caller = call.caller;
                self.run_once(call, ops::RemoveSnapshot { caller, at, name }).await
            }
        }
    }

    /// Each step may be repeated, also by another service that gets the same request.
    async fn create_snapshot(
        &self,
        call: &ChangeCall<'_>,
        at: &At,
        name: &str,
        inputs: Inputs,
    ) -> Result<MetaReply, OpError> {
        let (caller, id, deadline) = (call.caller, call.id, call.deadline);
        let wait_ms = self.config.recount_wait_ms;
        let mut start = ops::StartSnapshot {
            floor: &call.client.floor,
            caller,
            at,
            name,
            id,
            now: inputs.now,
            wait_ms,
            enabled: false,
        };
        let mut started = self.store.transact(deadline, &start).await?;
        if let ops::Started::NotEnabled = started {
            self.fences.enable(deadline.within(CREATION_TIMEOUT)).await.map_err(refused)?;
            start.enabled = true;
            started = self.store.transact(deadline, &start).await?;
        }
        let fence = match started {
            ops::Started::Answered(reply) => return Ok(reply),
            ops::Started::Fence(fence) => fence,
            ops::Started::NotEnabled => return Err(refused("it is not enabled".into())),
        };
        let volume = fence.volume;
        let raised = match self.fences.raise(&fence, deadline.within(CREATION_TIMEOUT)).await {
            Ok(()) => {
                self.run_once(
                    call,
                    ops::MakeSnapshot { volume, name, id, now: inputs.now, wait_ms },
                )
                .await
            }
            Err(detail) => Err(refused(format!("the snapshot was given up: {detail}"))),
        };
        if raised.is_err() {
            // Writers of the volume wait. The collector gives it up if this fails.
            let deadline = Deadline::after(CREATION_TIMEOUT);
            self.store.transact(deadline, &ops::AbortSnapshot { volume, id }).await?;
        }
        raised
    }

    pub(super) async fn query_snapshots(
        &self,
        caller: &Identity,
        query: &SnapshotQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        let SnapshotQuery::List { at } = query;
        self.store.transact(deadline, &ops::ListSnapshots { caller, at }).await
    }
}

fn refused(detail: String) -> OpError {
    MetaError::Unavailable { detail }.into()
}
