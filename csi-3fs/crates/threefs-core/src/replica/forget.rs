//! Forgetting inodes: everything that is known of their chunks is dropped, down the chain.
//!
//! The metadata service asks the head once an inode is gone and every update of it has expired.
//! Each replica drops the chunks and fences the inode durably, then asks its successor, and
//! answers when the successor has. The fence only grows and is right wherever it is known, so a
//! request may be repeated, and a replica that meets the refusal of its successor drops the inode
//! as well.

use bytes::Bytes;

use super::queue::Work;
use super::{
    Action, CallId, Caller, Check, Context, OpId, PeerFailure, Replica, Role, Timer, Token,
};
use crate::error::{StorageError, StoreError};
use crate::forgotten::{FORGET_INODES_MAX, InodeRange};
use crate::ids::{ChunkId, ChunkVersion, InodeId};
use crate::message::{ForgetInodes, StorageReply, StorageRequest};
use crate::time::Millis;

/// Requests under way at once: every update is compared with the inodes of each.
const FORGETS_MAX: usize = 4;

/// One request under way.
#[derive(Debug)]
pub(super) struct Forgetting {
    inodes: Vec<InodeRange>,
    /// Of the request that waits for it.
    hop: u8,
    /// `None` where no request waits for it, or the chain has changed since.
    token: Option<Token>,
    /// `None` while the store is at work.
    call: Option<(CallId, Millis)>,
}

impl Replica {
    /// Is `inode` forgotten, or being forgotten, here?
    pub(super) fn is_forgotten(&self, ctx: &Context<'_>, inode: InodeId) -> bool {
        let under_way = |one: &Forgetting| one.inodes.iter().any(|range| range.contains(inode));
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
                "{} inodes to forget: name at most {FORGET_INODES_MAX} in one request",
                request.inodes.len()
            );
            return Err(StorageError::InvalidRequest { reason });
        }
        // What is under way ends first; no update is begun any more that would start another.
        let in_use = |range: &InodeRange| {
            let chunks = ChunkId::first_of(range.first)..=ChunkId::last_of(range.last);
            self.queues.range(chunks).next().is_some()
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

    /// The successor refuses an update of `op` because it has forgotten the inode: so does this
    /// replica now.
    pub(super) fn learn_forgotten(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(inode) = self.ops.get(&op).map(|state| state.chunk.inode) else { return };
        if !self.is_forgotten(ctx, inode) {
            self.drop_inodes(ctx, vec![InodeRange::one(inode)], ChunkVersion(0), None, 0);
        }
        self.finish(ctx, op, Err(StorageError::InodeForgotten { inode }));
    }

    /// Ends `op` if its inode was forgotten meanwhile.
    pub(super) fn ends_forgotten(&mut self, ctx: &mut Context<'_>, op: OpId) -> bool {
        let Some(state) = self.ops.get(&op) else { return false };
        let inode = state.chunk.inode;
        // A chunk that is to be sent to the successor goes as "no such chunk".
        if matches!(state.work, Work::Send) || state.step.in_store() {
            return false;
        }
        let forgotten = self.is_forgotten(ctx, inode);
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
            Ok(()) => self.pass_on(ctx, op),
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
        let asks = state.token.is_some() && self.config.makes(Check::ForgetDownChain);
        let successor = self.successor().filter(|_| asks);
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
            // It may be asked again at any time; what was done here stays done.
            _ => Err(self.busy()),
        };
        self.end_forget(ctx, op, result);
    }

    pub(super) fn on_forget_timer(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let target = self.config.target;
        self.end_forget(ctx, op, Err(StorageError::Timeout { target }));
    }

    /// The chain has changed: whoever asked asks again, the head as it is then.
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
        let Some(ended) = self.forgets.remove(&op) else { return };
        if let Some((call, at)) = ended.call {
            self.calls.remove(&call);
            self.timers.remove(&(at, Timer::Forget(op)));
        }
        if let Some(token) = ended.token {
            ctx.reply(token, result);
        }
    }
}
