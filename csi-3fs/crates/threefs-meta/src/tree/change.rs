//! Execution of changes: checks, deduplication, pending truncations and the operation itself.

use std::ops::Range;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_kv::Operation;

use crate::clients::Client;
use crate::identity::Identity;
use crate::ops::{self, AnswerBudget, Inputs, OpError};
use crate::protocol::{MetaChange, MetaError, MetaReply, RequestId, SessionId};
use crate::tree::Tree;
use crate::tree::checks::{check_batch, check_identity, check_ranges, full, grows, now, reports};

/// Truncations that one request waits for, one after the other.
const TRIMS_MAX: usize = 16;

/// A change in progress: its caller, inputs and deadline.
pub(super) struct ChangeCall<'a> {
    pub(super) id: RequestId,
    pub(super) caller: &'a Identity,
    pub(super) client: &'a Client,
    /// Finished changes whose answers it drops.
    finished: Range<u64>,
    room: AnswerBudget,
    inputs: Inputs,
    session: SessionId,
    pub(super) deadline: Deadline,
}

impl ChangeCall<'_> {
    fn run_once<O>(&self, operation: O) -> ops::Dedup<'_, O> {
        ops::Dedup {
            id: self.id,
            now: self.inputs.now,
            floor: &self.client.floor,
            finished: self.finished.clone(),
            volume: self.caller.scope,
            room: self.room,
            operation,
        }
    }
}

impl Tree {
    pub(super) async fn change(
        &self,
        id: RequestId,
        caller: &Identity,
        change: &MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        check_identity(caller)?;
        let room = self.store.room()?;
        // The control plane may use the reserve, except for rows of written chunks.
        let exempt = caller.is_control_plane() && !reports(change);
        let full = if exempt { None } else { full(room) };
        if let Some(full) = &full
            && grows(change)
        {
            return Err(full.clone().into());
        }
        let client = self.clients.note_change(id, caller.scope, self.uptime_ms());
        let names = match change {
            MetaChange::MakeDirectory { at, parents: true, .. } => ops::count_names(&at.path),
            MetaChange::Create { .. }
            | MetaChange::MakeDirectory { .. }
            | MetaChange::MakeSymlink { .. }
            | MetaChange::MakeSpecial { .. } => 1,
            MetaChange::Open { .. }
            | MetaChange::Close { .. }
            | MetaChange::ReportLengths { .. }
            | MetaChange::Reserve { .. }
            | MetaChange::SetLength { .. }
            | MetaChange::Link { .. }
            | MetaChange::Rename { .. }
            | MetaChange::Unlink { .. }
            | MetaChange::RemoveDirectory { .. }
            | MetaChange::RemoveTree { .. }
            | MetaChange::SetAttributes { .. }
            | MetaChange::SetAttribute { .. }
            | MetaChange::SetQuota { .. }
            | MetaChange::Lock(_)
            | MetaChange::Trash(_)
            | MetaChange::Snapshot(_) => 0,
        };
        let first_inode = self.fresh_inodes(names, deadline).await?;
        let (uptime, excess_allowed) = (self.uptime(), true);
        let inputs = Inputs { now: now(), uptime, excess_allowed, first_inode, full };
        let session = SessionId(rand::random());
        let (drops, room) = (client.take_finished(id), AnswerBudget::of(room));
        let finished = drops.range();
        let call =
            ChangeCall { id, caller, client: &client, finished, room, inputs, session, deadline };
        let result = self.apply_after_trims(&call, change).await;
        if result.is_ok() {
            drops.committed();
        }
        result
    }

    async fn apply_after_trims(
        &self,
        call: &ChangeCall<'_>,
        change: &MetaChange,
    ) -> Result<MetaReply, OpError> {
        let mut inputs = call.inputs.clone();
        for _ in 0..TRIMS_MAX {
            match self.apply(call, change, inputs.clone()).await {
                Err(OpError::TrimPending(inode)) => self.finish_trim(inode, call.deadline).await?,
                Err(OpError::LockSession(client, session)) => {
                    self.end_lock_session(client, session, None, call.deadline).await?;
                }
                Err(OpError::AppendLease(inode)) => {
                    self.recall_append_lease(inode, call.id.client, call.deadline).await?;
                }
                Err(error) if inputs.excess_allowed && error.is_over_excess() => {
                    inputs.excess_allowed = false
                }
                result => return result,
            }
        }
        let detail = "the file is being truncated repeatedly".into();
        Err(MetaError::Unavailable { detail }.into())
    }

    /// Runs the operation of a change once, however often the change is sent.
    async fn apply(
        &self,
        call: &ChangeCall<'_>,
        change: &MetaChange,
        inputs: Inputs,
    ) -> Result<MetaReply, OpError> {
        let (caller, open_files) = (call.caller, &self.open_files);
        let client = call.id.client;
        let session =
            |write: &bool| write.then_some(ops::SessionRequest { session: call.session, client });
        let operation = match change {
            MetaChange::Create { at, mode, exclusive, layout, write, track_open } => {
                let (write, layouts) = (session(write), &self.layouts);
                let (mode, exclusive, layout) = (*mode, *exclusive, *layout);
                let fresh = inputs.first_inode;
                let create =
                    ops::Create { caller, at, mode, exclusive, layout, layouts, write, inputs };
                let _opening = track_open.then(|| self.openings.start());
                let reply = self.run_once(call, create).await?;
                if let (true, MetaReply::Opened { inode, .. }) = (*track_open, &reply) {
                    self.open_files.open(client, caller.scope, inode.id, self.uptime_ms());
                    // The answer to an earlier attempt: the file may have been removed since.
                    if inode.id != fresh {
                        self.hold_removed(&[inode.id]).await?;
                    }
                }
                return Ok(reply);
            }
            MetaChange::SetLength { at, length } => {
                let start = ops::StartTrim { caller, client, at, length: *length, inputs };
                return self.set_length(call, start).await;
            }
            MetaChange::Open { at, write } => {
                let (write, full) = (session(write), inputs.full);
                self.run_once(call, ops::Open { caller, at, write, full })
            }
            MetaChange::Close { inode, session, report } => {
                check_ranges(report.iter())?;
                let (inode, session, report) = (*inode, *session, report.as_ref());
                self.run_once(call, ops::Close { inode, session, report, inputs })
            }
            MetaChange::ReportLengths { reports, ends } => {
                check_batch("reports", reports.len().max(ends.len()))?;
                check_ranges(reports.iter())?;
                self.run_once(call, ops::ReportLengths { reports, ends, inputs })
            }
            MetaChange::Reserve { reservations } => {
                check_batch("reservations", reservations.len())?;
                self.run_once(call, ops::Reserve { reservations, client, full: inputs.full })
            }
            MetaChange::MakeDirectory { at, mode, parents, defaults } => {
                let (mode, parents, defaults) = (*mode, *parents, *defaults);
                self.run_once(
                    call,
                    ops::MakeDirectory { caller, at, mode, parents, defaults, inputs },
                )
            }
            MetaChange::MakeSymlink { at, target } => {
                self.run_once(call, ops::Symlink { caller, at, target, inputs })
            }
            MetaChange::MakeSpecial { at, mode, kind, device } => {
                let (mode, kind, device) = (*mode, *kind, *device);
                self.run_once(call, ops::MakeSpecial { caller, at, mode, kind, device, inputs })
            }
            MetaChange::Link { from, to } => {
                self.run_once(call, ops::Link { caller, from, to, inputs })
            }
            MetaChange::Rename { from, to, mode } => {
                let mode = *mode;
                self.run_once(call, ops::Rename { caller, from, to, mode, open_files, inputs })
            }
            MetaChange::Unlink { at } => {
                self.run_once(call, ops::Unlink { caller, at, open_files, inputs })
            }
            MetaChange::RemoveDirectory { at } => {
                self.run_once(call, ops::RemoveDirectory { caller, at, open_files, inputs })
            }
            MetaChange::RemoveTree { at } => {
                self.run_once(call, ops::RemoveTree { caller, at, open_files, inputs })
            }
            MetaChange::SetAttributes { at, follow, mode, uid, gid, accessed, modified } => {
                let (follow, mode, uid, gid) = (*follow, *mode, *uid, *gid);
                let (accessed, modified) = (*accessed, *modified);
                self.run_once(
                    call,
                    ops::SetAttributes {
                        caller,
                        at,
                        follow,
                        mode,
                        uid,
                        gid,
                        accessed,
                        modified,
                        inputs,
                    },
                )
            }
            MetaChange::SetAttribute { at, name, value, mode } => {
                let value = value.as_deref();
                self.run_once(call, ops::SetAttribute { caller, at, name, value, mode, inputs })
            }
            MetaChange::SetQuota { at, bytes_max, inodes_max } => {
                let (bytes_max, inodes_max) = (*bytes_max, *inodes_max);
                self.run_once(call, ops::SetQuota { caller, at, bytes_max, inodes_max, inputs })
            }
            MetaChange::Lock(change) => return Box::pin(self.change_locks(call, change)).await,
            MetaChange::Trash(change) => {
                return Box::pin(self.change_trash(call, change, inputs)).await;
            }
            MetaChange::Snapshot(change) => {
                return Box::pin(self.change_snapshots(call, change, inputs)).await;
            }
        };
        operation.await
    }

    /// Boxed: one state machine of all operations takes minutes to compile.
    pub(super) fn run_once<'a, O>(
        &'a self,
        call: &'a ChangeCall<'a>,
        operation: O,
    ) -> BoxFuture<'a, Result<MetaReply, OpError>>
    where
        O: Operation<Output = MetaReply, Error = OpError> + Send + 'a,
    {
        Box::pin(self.run_once_inner(call, operation))
    }

    async fn run_once_inner<O>(
        &self,
        call: &ChangeCall<'_>,
        operation: O,
    ) -> Result<MetaReply, OpError>
    where
        O: Operation<Output = MetaReply, Error = OpError>,
    {
        self.store.transact(call.deadline, &call.run_once(operation)).await
    }

    /// The first step makes the change and stores its answer. A retry, after other changes of the
    /// file, only completes the cut of a pending truncation.
    async fn set_length(
        &self,
        call: &ChangeCall<'_>,
        start: ops::StartTrim<'_>,
    ) -> Result<MetaReply, OpError> {
        let reply = self.run_once(call, start).await?;
        if let MetaReply::Inode(inode) = &reply {
            self.finish_trim(inode.id, call.deadline).await?;
        }
        Ok(reply)
    }
}
