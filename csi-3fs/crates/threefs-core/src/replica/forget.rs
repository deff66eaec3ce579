//! Forgetting inodes: all state of their chunks is dropped on every replica, down the chain.
//!
//! The metadata service asks the head once an inode is removed and every update of it has expired.
//! Each replica drops the chunks and fences the inode durably, then asks its successor, and replies
//! after the successor. The set of fenced inodes only grows and is valid on every replica, so
//! requests may be repeated, and a replica whose successor refuses an update drops the inode as
//! well.

use bytes::Bytes;

use super::queue::OpKind;
use super::{
    Action, CallId, Caller, Check, Context, OpId, PeerFailure, Replica, Role, Timer, Token,
};
use crate::error::{StorageError, StoreError};
use crate::forgotten::{FORGET_INODES_MAX, InodeRange};
use crate::ids::{ChunkId, ChunkVersion, InodeId};
use crate::message::{ForgetInodes, StorageReply, StorageRequest};
use crate::time::Millis;

/// Requests in progress: every update is compared with the inodes of each.
const FORGETS_MAX: usize = 4;

/// A request in progress.
#[derive(Debug)]
pub(super) struct Forgetting {
    inodes: Vec<InodeRange>,
    /// Hop of the waiting request.
    hop: u8,
    /// `None` if no request waits, or the chain has changed.
    token: Option<Token>,
    /// `None` while the store is working.
    call: Option<(CallId, Millis)>,
}

impl Replica {
    /// Whether `inode` is forgotten, or being forgotten.
    pub(super) fn is_forgotten(&self, ctx: &Context<'_>, inode: InodeId) -> bool {
        let under_way =
            |contains: &Forgetting| contains.inodes.iter().any(|range| range.contains(inode));
        ctx.metas.is_forgotten(inode) || self.forgets.values().any(under_way)
    }

    pub(super) fn forget_inodes(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: ForgetInodes,
    ) -> Result<(), StorageError> {
        match request.from {
            None => self.check_head(ctx, request.to)?,
            Some(from) => {
                let role = if self.role() == Role::Syncing { Role::Syncing } else { Role::Serving };
                self.check_sender(request.to, from, role)?;
            }
        }
        if request.inodes.len() > FORGET_INODES_MAX {
            let reason = format!(
                "{} inodes to forget: at most {FORGET_INODES_MAX} are allowed in one request",
                request.inodes.len()
            );
            return Err(StorageError::InvalidRequest { reason });
        }
        // Operations in progress must end first; new updates of the inodes do not start.
        let in_use = |range: &InodeRange| {
            let chunks = ChunkId::first_of(range.first)..=ChunkId::last_of(range.last);
            let mut queues = self.queues.range(chunks).map(|(_, queue)| queue);
            queues.any(|queue| queue.active.is_none_or(|op| !self.waits_for_space(op)))
        };
        if self.forgets.len() >= FORGETS_MAX || request.inodes.iter().any(in_use) {
            return Err(self.busy());
        }
        let floor = request.version_floor;
        self.drop_inodes(ctx, request.inodes, floor, Some(token), request.hop);
        Ok(())
    }

    fn drop_inodes(
        &mut self,
        ctx: &mut Context<'_>,
        inodes: Vec<InodeRange>,
        version_floor: ChunkVersion,
        token: Option<Token>,
        hop: u8,
    ) {
        self.next_op += 1;
        let op = OpId(self.next_op);
        self.forgets.insert(op, Forgetting { inodes: inodes.clone(), hop, token, call: None });
        self.store_since.insert(op, ctx.now);
        ctx.out.push(Action::ForgetInodes { op, inodes, version_floor });
    }

    /// The successor refused an update of `op` because it has forgotten the inode: forget it here
    /// as well.
    pub(super) fn learn_forgotten(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(inode) = self.ops.get(&op).map(|state| state.chunk.inode) else { return };
        if !self.is_forgotten(ctx, inode) {
            self.drop_inodes(ctx, vec![InodeRange::one(inode)], ChunkVersion(0), None, 0);
        }
        self.finish(ctx, op, Err(StorageError::InodeForgotten { inode }));
    }

    /// Ends `op` if its inode was forgotten in the meantime.
    pub(super) fn ends_forgotten(&mut self, ctx: &mut Context<'_>, op: OpId) -> bool {
        let Some(state) = self.ops.get(&op) else { return false };
        let inode = state.chunk.inode;
        // A chunk to be sent to the successor is sent as unknown.
        if matches!(state.kind, OpKind::Send) || state.step.in_store() {
            return false;
        }
        let forgotten = match self.waits_for_space(op) {
            // The successor may have the update: it ends once the inode is forgotten.
            true => ctx.metas.is_forgotten(inode),
            false => self.is_forgotten(ctx, inode),
        };
        if forgotten {
            self.finish(ctx, op, Err(StorageError::InodeForgotten { inode }));
        }
        forgotten
    }

    pub(super) fn on_inodes_forgotten(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<(), StoreError>,
    ) {
        self.store_since.remove(&op);
        match result {
            Ok(()) => {
                self.drop_prepared(ctx);
                self.pass_on(ctx, op);
            }
            Err(StoreError::NoSpace { .. }) => {
                let target = self.config.target;
                self.end_forget(ctx, op, Err(StorageError::NoSpace { target }));
            }
            Err(error) => {
                let reason = error.to_string();
                self.end_forget(ctx, op, Err(error.at(self.config.target)));
                self.fail(ctx, reason);
            }
        }
    }

    fn pass_on(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(state) = self.forgets.get(&op) else { return };
        let forwards = state.token.is_some() && self.config.makes(Check::ForgetDownChain);
        let successor = self.successor().filter(|_| forwards);
        let Some(next) = successor else {
            return self.end_forget(ctx, op, Ok(StorageReply::InodesForgotten));
        };
        let (inodes, hop) = (state.inodes.clone(), state.hop.saturating_add(1));
        let (to, from) = (self.address_of(next.target), Some(self.config.target));
        let version_floor = ctx.metas.version_floor();
        let request =
            StorageRequest::ForgetInodes(ForgetInodes { to, from, inodes, version_floor, hop });
        let call = self.call(ctx, Caller::Forget(op), next, request, Bytes::new());
        let at = ctx.now.after(self.config.call_timeout_ms);
        self.timers.insert((at, Timer::Forget(op)));
        if let Some(state) = self.forgets.get_mut(&op) {
            state.call = Some((call, at));
        }
    }

    pub(super) fn on_forget_answer(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<StorageReply, PeerFailure>,
    ) {
        let result = match result {
            Ok(StorageReply::InodesForgotten) => Ok(StorageReply::InodesForgotten),
            // It may be retried at any time; the local result is kept.
            _ => Err(self.busy()),
        };
        self.end_forget(ctx, op, result);
    }

    pub(super) fn on_forget_timer(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let target = self.config.target;
        self.end_forget(ctx, op, Err(StorageError::Timeout { target }));
    }

    /// After a change of the chain: callers must repeat the request, to the head at that time.
    pub(super) fn abort_forgets(&mut self, ctx: &mut Context<'_>) {
        let all: Vec<OpId> = self.forgets.keys().copied().collect();
        for op in all {
            let error = self.not_serving();
            let Some(state) = self.forgets.get_mut(&op) else { continue };
            if let Some(token) = state.token.take() {
                ctx.reply(token, Err(error));
            }
            if state.call.is_some() {
                self.end_forget(ctx, op, Ok(StorageReply::InodesForgotten));
            }
        }
    }

    fn end_forget(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<StorageReply, StorageError>,
    ) {
        let Some(operation) = self.forgets.remove(&op) else { return };
        if let Some((call, at)) = operation.call {
            self.calls.remove(&call);
            self.timers.remove(&(at, Timer::Forget(op)));
        }
        if let Some(token) = operation.token {
            ctx.reply(token, result);
        }
    }
}
