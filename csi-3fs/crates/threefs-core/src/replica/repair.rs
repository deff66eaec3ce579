//! Repair: a damaged chunk is restored from any replica that has the same version.

use bytes::Bytes;

use super::queue::{Op, OpKind, StartResult, Step};
use super::{Action, Alert, Context, OpId, PeerFailure, Replica, Role};
use crate::checksum::Checksum;
use crate::chunk::{ChunkState, ContentChange, StoreUpdate};
use crate::error::StorageError;
use crate::ids::{ChainVersion, ChunkId, ChunkVersion};
use crate::message::{RepairRequest, StorageReply, StorageRequest, class};
use crate::routing::{Chain, ChainTarget, PublicState};
use crate::scrub::{ChunkSummary, Difference, DifferenceKind};

impl Replica {
    /// Queues the repair of a chunk whose committed content is damaged.
    pub(super) fn repair(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) {
        if self.role() == Role::Serving {
            self.enqueue(ctx, chunk, OpKind::Repair, None);
        }
    }

    /// Stops serving because a chunk differs from the predecessor's, so that the sync replaces it.
    /// Only if every replica of the chain serves: the others hold the chunk meanwhile. A chunk that
    /// the predecessor lacks, or has in an earlier version, is left to the operator.
    pub(super) fn differs(
        &mut self,
        ctx: &mut Context<'_>,
        difference: &Difference,
        chain_version: ChainVersion,
    ) {
        let (target, chunk) = (self.config.target, difference.chunk);
        let Some(predecessor) = difference.predecessor else { return };
        let own = difference.own;
        let reason = match difference.kind {
            DifferenceKind::Newer => return,
            DifferenceKind::Older => StorageError::ChunkMissingUpdate {
                chunk,
                have: own.map_or(ChunkVersion(0), |own| own.version),
                update: predecessor.version,
            },
            DifferenceKind::Content => StorageError::ChecksumMismatch {
                chunk,
                expected: predecessor.checksum,
                computed: own.map_or(Checksum::default(), |own| own.checksum),
            },
        };
        let current = ctx.metas.meta(chunk).map(|meta| ChunkSummary::from(&meta));
        let unchanged = current.filter(|state| state.exists || state.pending) == own;
        let whole = self.chain.as_ref().is_some_and(Chain::is_whole);
        let current_chain = chain_version == self.chain_version() && self.predecessor().is_some();
        if self.role() == Role::Serving && current_chain && whole && unchanged {
            self.demote(ctx, Alert::Disagreement { target, chunk, reason });
        }
    }

    pub(super) fn start_repair(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) -> StartResult {
        let meta = ctx.meta(chunk);
        let repairable = meta.pending.is_none() && meta.committed.exists();
        if !repairable || self.role() != Role::Serving {
            return StartResult::Done;
        }
        let target = self.config.target;
        ctx.out.push(Action::Alert(Alert::Damaged { target, chunk }));
        if self.repair_source(0).is_none() {
            ctx.out.push(Action::Alert(Alert::NotRepaired { target, chunk }));
            return StartResult::Done;
        }
        let op = self.add_op(Op::new(chunk, OpKind::Repair, meta.committed.version));
        self.proceed_repair(ctx, op);
        StartResult::Op(op)
    }

    /// The replica for attempt `attempt` (from 0): each other one once, in chain order.
    fn repair_source(&self, attempt: u32) -> Option<ChainTarget> {
        self.chain.as_ref().and_then(|chain| {
            chain
                .targets
                .iter()
                .filter(|place| place.target != self.config.target)
                .filter(|place| matches!(place.state, PublicState::Serving | PublicState::Syncing))
                .nth(attempt as usize)
                .copied()
        })
    }

    pub(super) fn proceed_repair(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(state) = self.ops.get(&op) else { return };
        let (chunk, version) = (state.chunk, state.version);
        let Some(source) = self.repair_source(state.attempt) else {
            let target = self.config.target;
            ctx.out.push(Action::Alert(Alert::NotRepaired { target, chunk }));
            return self.finish(ctx, op, Err(self.not_serving()));
        };
        let to = self.address_of(source.target);
        let request = RepairRequest { to, from: self.config.target, chunk, version };
        self.op_call(ctx, op, source, StorageRequest::Repair(request), Bytes::new());
    }

    /// The content of `op` cannot be read here. The successor may have the same state already: it
    /// confirms that to a request without the content, and refuses it otherwise. So a chunk that is
    /// damaged on all replicas blocks neither the chain nor its queue; it stays damaged.
    pub(super) fn confirm_without_content(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        content: &ChunkState,
    ) {
        match self.successor() {
            None => self.proceed(ctx, op),
            // An empty payload would be valid.
            Some(_) if content.checksum == Checksum::default() => self.back_off(ctx, op),
            Some(next) if next.state == PublicState::Syncing && self.session().is_some() => {
                self.call_replace(ctx, op, next, content, Bytes::new());
            }
            Some(next) if next.state == PublicState::Serving => {
                let (change, checksum) = (ContentChange::Replace, content.checksum);
                self.call_forward(ctx, op, next, change, Bytes::new(), checksum);
            }
            Some(_) => self.back_off(ctx, op),
        }
    }

    pub(super) fn on_repair_answer(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<StorageReply, PeerFailure>,
        payload: Bytes,
    ) {
        let Some(state) = self.ops.get(&op) else { return };
        let committed = ctx.meta(state.chunk).committed;
        let fits = matches!(&result, Ok(StorageReply::Content(content))
            if content.version == state.version && committed.version == state.version)
            && Checksum::of(&payload) == committed.checksum
            && payload.len() == committed.length as usize;
        if !fits {
            return self.proceed_repair(ctx, op);
        }
        let payload_checksum = committed.checksum;
        let update = StoreUpdate {
            chunk: state.chunk,
            version: committed.version,
            chain_version: committed.chain_version,
            tags: committed.tags,
            change: ContentChange::Replace,
        };
        // Requests of any class may wait for it, and it waits for none.
        let class = class::REPLACE;
        let (waits, prepare) = (true, None);
        let action = Action::Apply { op, update, payload, payload_checksum, class, waits, prepare };
        self.store(ctx, op, Step::Applying, action);
    }
}
