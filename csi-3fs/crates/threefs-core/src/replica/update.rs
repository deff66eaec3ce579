//! Updates, of clients on the head and from the predecessor: checked when they start, then made
//! pending in the store. `commit` continues once they are durable.

use std::collections::VecDeque;

use bytes::Bytes;

use super::channels::TagStatus;
use super::queue::{Op, OpKind, QueuedOp, StartResult, Step};
use super::{Action, Alert, Check, Context, DataState, OpId, Replica, Role, Token};
use crate::checksum::Checksum;
use crate::chunk::{ChunkMeta, ChunkState, ContentChange, StoreUpdate};
use crate::error::{StorageError, StoreError};
use crate::ids::{ChunkId, ChunkVersion, RequestTag};
use crate::layout::CHUNK_BYTES_MAX;
use crate::message::{
    ForwardRequest, StorageReply, UpdateConditions, UpdateRequest, Updated, class,
};
use crate::time::Millis;

impl Replica {
    pub(super) fn start_update(
        &mut self,
        ctx: &mut Context<'_>,
        request: UpdateRequest,
        conditions: UpdateConditions,
        payload: Bytes,
        expires: Option<Millis>,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        if let Err(error) = self.check_head(ctx, request.to) {
            return answer(ctx, waiters, Err(error));
        }
        let meta = ctx.newest_version(request.chunk);
        if meta.pending.is_some() {
            let inode = request.chunk.inode;
            if self.is_forgotten(ctx, inode) {
                // The pending state is dropped with its inode and not resolved.
                return answer(ctx, waiters, Err(StorageError::InodeForgotten { inode }));
            }
            let chunk = request.chunk;
            let kind = OpKind::Update { request, conditions, payload, expires };
            return StartResult::Resolve(meta.chunk, Box::new(QueuedOp { chunk, kind, waiters }));
        }
        match self.admit_update(ctx, &request, conditions, &payload, &meta) {
            Err(error) => answer(ctx, waiters, Err(error)),
            Ok(Some(reply)) => answer(ctx, waiters, Ok(reply)),
            // Checked here as well: the update may have waited in the queue until now.
            Ok(None)
                if expires.is_some_and(|at| ctx.now >= at) && self.config.makes(Check::Expiry) =>
            {
                answer(ctx, waiters, Err(StorageError::Expired { target: self.config.target }))
            }
            Ok(None) => {
                self.channels.record_start(request.tag);
                let before = match meta.committed.version {
                    // It may have been purged.
                    ChunkVersion(0) => ctx.metas.version_floor(),
                    version => version,
                };
                let (version, tag) = (before.next(), request.tag);
                if self.starts_as_copy(&request, &payload, &meta) {
                    let kind = OpKind::Update { request, conditions, payload, expires };
                    return self.start_copy(ctx, kind, version, tag, &meta, waiters);
                }
                let update = StoreUpdate {
                    chunk: request.chunk,
                    version,
                    chain_version: self.chain_version(),
                    tags: self.tags_before(&meta, request.chunk).with(tag, version),
                    change: request.change,
                };
                let kind = OpKind::Update { request, conditions, payload, expires };
                self.apply(ctx, kind, update, Some(tag), waiters)
            }
        }
    }

    /// Checks a client's update when it starts, with the newest version of its chunk. `Some` = it is
    /// already done.
    fn admit_update(
        &self,
        ctx: &Context<'_>,
        request: &UpdateRequest,
        conditions: UpdateConditions,
        payload: &Bytes,
        meta: &ChunkMeta,
    ) -> Result<Option<Updated>, StorageError> {
        let tag = request.tag;
        let committed = &meta.committed;
        if request.change != ContentChange::Remove && self.is_forgotten(ctx, request.chunk.inode) {
            return Err(StorageError::InodeForgotten { inode: request.chunk.inode });
        }
        if let Some(successor) = committed.tags.successor_of(&tag) {
            return Err(StorageError::Superseded { tag, successor });
        }
        if let Some(entry) = committed.tags.of_channel(&tag)
            && self.config.makes(Check::Tags)
        {
            if entry.tag == tag {
                return Ok(Some(self.updated(meta, entry.version)));
            }
            if entry.tag.sequence > tag.sequence {
                return Err(StorageError::DuplicateUpdate { tag });
            }
        }
        match self.channels.status(tag, request.chunk) {
            TagStatus::New => {}
            TagStatus::Done(version) => return Ok(Some(self.updated(meta, version))),
            TagStatus::Outdated => return Err(StorageError::DuplicateUpdate { tag }),
            TagStatus::Superseded(successor) => {
                return Err(StorageError::Superseded { tag, successor });
            }
        }
        let (chunk, newest) = (request.chunk, meta.chunk.epoch);
        if newest > chunk.epoch && self.config.makes(Check::Epoch) {
            return Err(StorageError::EpochEnded { chunk, newest });
        }
        self.check_fence(chunk, conditions.volume)?;
        if let Some(expected) = conditions.at.filter(|expected| *expected != committed.version) {
            let committed = committed.version;
            return Err(StorageError::ChunkChanged { chunk, expected, committed });
        }
        if payload.is_empty() && matches!(request.change, ContentChange::Write { .. }) {
            let reason = "a write of 0 bytes: use a truncate to change the length".to_owned();
            return Err(StorageError::InvalidRequest { reason });
        }
        let (end, grows) = match request.change {
            ContentChange::Write { offset } => (u64::from(offset) + payload.len() as u64, true),
            ContentChange::Truncate { length } => (u64::from(length), true),
            ContentChange::Replace => (payload.len() as u64, true),
            ContentChange::Remove => (0, false),
        };
        // The client's chunk size does not bound the chunk; a larger chunk could not be copied.
        let chunk_bytes = request.chunk_bytes.min(CHUNK_BYTES_MAX);
        if end > u64::from(chunk_bytes) {
            return Err(StorageError::ChunkSizeMismatch { chunk: request.chunk, end, chunk_bytes });
        }
        if request.change == ContentChange::Remove && !committed.exists() {
            return Ok(Some(self.updated(meta, committed.version)));
        }
        if grows && self.successor_full_until.is_some_and(|until| ctx.now < until) {
            let target = self.successor().map_or(self.config.target, |place| place.target);
            return Err(StorageError::NoSpace { target });
        }
        Ok(None)
    }

    /// The reply for an update that made `version` earlier.
    pub(super) fn updated(&self, meta: &ChunkMeta, version: ChunkVersion) -> Updated {
        let newest = meta.committed.version == version;
        Updated {
            version,
            length: if newest { meta.committed.length } else { 0 },
            checksum: if newest { meta.committed.checksum } else { Checksum::default() },
            chain_version: self.chain_version(),
        }
    }

    pub(super) fn start_forward(
        &mut self,
        ctx: &mut Context<'_>,
        request: ForwardRequest,
        payload: Bytes,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        match self.standing(ctx, &request) {
            Standing::Follows(newest) => {
                let kind = OpKind::Forward { request, payload };
                self.apply_forward(ctx, kind, &request, &newest, waiters)
            }
            Standing::Has { pending } => {
                let kind = OpKind::Forward { request, payload };
                let kind = if kind.is_intact() { kind } else { OpKind::Resolve };
                self.end_forward(ctx, kind, &request, pending, waiters)
            }
            Standing::Refused(error) => answer(ctx, waiters, Err(error)),
            Standing::Disagrees(reason) => self.disagree(ctx, request.chunk, waiters, reason),
        }
    }

    /// Makes a forwarded update pending.
    pub(super) fn apply_forward(
        &mut self,
        ctx: &mut Context<'_>,
        kind: OpKind,
        request: &ForwardRequest,
        newest: &ChunkMeta,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        self.channels.record_start(request.tag);
        let update = StoreUpdate {
            chunk: request.chunk,
            version: request.version,
            chain_version: self.chain_version(),
            tags: self.tags_before(newest, request.chunk).with(request.tag, request.version),
            change: request.change,
        };
        self.apply(ctx, kind, update, Some(request.tag), waiters)
    }

    /// Continues an update that is pending here, or answers one that is committed, if it has the same
    /// content as on the predecessor.
    pub(super) fn end_forward(
        &mut self,
        ctx: &mut Context<'_>,
        kind: OpKind,
        request: &ForwardRequest,
        pending: bool,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        let (chunk, meta) = (request.chunk, ctx.meta(request.chunk));
        let (expected, computed) = (request.chunk_checksum, meta.newest().checksum);
        if computed != expected {
            let reason = StorageError::ChecksumMismatch { chunk, expected, computed };
            return self.disagree(ctx, chunk, waiters, reason);
        }
        if pending {
            return self.start_resolve(ctx, chunk, kind, waiters, request.hop);
        }
        answer(ctx, waiters, Ok(self.updated(&meta, request.version)))
    }

    /// Compares an update of the predecessor with the state of its chunk, when it starts.
    pub(super) fn standing(&self, ctx: &Context<'_>, request: &ForwardRequest) -> Standing {
        if let Err(error) = self.check_sender(request.to, request.from, Role::Serving) {
            return Standing::Refused(error);
        }
        let (chunk, update) = (request.chunk, request.version);
        if self.is_forgotten(ctx, chunk.inode) {
            return Standing::Refused(StorageError::InodeForgotten { inode: chunk.inode });
        }
        if self.purges.is_from_before(request) {
            // If it is not a delayed copy, it is repeated.
            return Standing::Refused(self.busy());
        }
        let (meta, newest) = (ctx.meta(chunk), ctx.newest_version(chunk));
        if newest.chunk != chunk
            && let Some(error) = precedes(&newest, chunk, update)
        {
            return match error {
                StorageError::ChunkStaleUpdate { .. } => Standing::Refused(error),
                reason => Standing::Disagrees(reason),
            };
        }
        if let Some(pending) = &meta.pending {
            let same_tag = pending.tags.newest().is_some_and(|newest| newest.tag == request.tag);
            if pending.version == update && same_tag {
                return Standing::Has { pending: true };
            }
            let have = meta.committed.version;
            if have >= update {
                // A delayed copy of an earlier one.
                return Standing::Refused(StorageError::ChunkStaleUpdate { chunk, have, update });
            }
            let version = pending.version;
            return Standing::Disagrees(StorageError::ChunkConflict { chunk, version });
        }
        let have = meta.committed.version;
        if have == update {
            return Standing::Has { pending: false };
        }
        if have > update {
            return Standing::Refused(StorageError::ChunkStaleUpdate { chunk, have, update });
        }
        // Neither replica has content that the update depends on.
        let fresh = request.fresh && !meta.committed.exists();
        if have.next() != update && !fresh {
            return Standing::Disagrees(StorageError::ChunkMissingUpdate { chunk, have, update });
        }
        Standing::Follows(newest)
    }

    pub(super) fn disagree(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        waiters: VecDeque<Token>,
        reason: StorageError,
    ) -> StartResult {
        let target = self.config.target;
        self.demote(ctx, Alert::Disagreement { target, chunk, reason: reason.clone() });
        answer(ctx, waiters, Err(reason))
    }

    /// First step of every operation that changes content.
    pub(super) fn apply(
        &mut self,
        ctx: &mut Context<'_>,
        kind: OpKind,
        update: StoreUpdate,
        tag: Option<RequestTag>,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        let (payload, payload_checksum) = (kind.payload(), kind.payload_checksum());
        let op = self.add_op(Op { tag, waiters, ..Op::new(update.chunk, kind, update.version) });
        let (class, prepare) = (self.class_of(op), self.prepare_successor(ctx, op));
        // The confirmations that free space have the class of a prepare, which is not needed.
        let waits = !matches!(self.ops.get(&op).map(|op| &op.kind), Some(OpKind::Prepare { .. }));
        let action = Action::Apply { op, update, payload, payload_checksum, class, waits, prepare };
        self.store(ctx, op, Step::Applying, action);
        StartResult::Op(op)
    }

    /// The class in which `op` waits for space. It blocks the requests behind it: their class
    /// counts.
    pub(super) fn class_of(&self, op: OpId) -> u8 {
        let lowest = match self.ops.get(&op).map(|state| &state.kind) {
            Some(OpKind::Update { .. }) => class::UPDATE,
            Some(OpKind::Forward { .. } | OpKind::Prepare { .. }) => 1,
            _ => return class::REPLACE,
        };
        (self.next_hop(op) - 1).clamp(lowest, class::HOP_MAX)
    }

    pub(super) fn on_applied(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<ChunkState, StoreError>,
        unsent: bool,
    ) {
        if unsent {
            self.not_announced(op);
        }
        if result.is_ok()
            && let Some(state) = self.ops.get(&op)
            && !matches!(state.kind, OpKind::Repair)
        {
            self.lacking.remove(&state.chunk);
        }
        let Some(state) = self.store_done(ctx, op, result.as_ref().err()) else { return };
        state.step = Step::BackingOff;
        let chunk = state.chunk;
        let expected = match &state.kind {
            OpKind::Forward { request, .. } => Some(request.chunk_checksum),
            OpKind::Receive { request, .. } => Some(request.checksum),
            _ => None,
        };
        match result {
            Ok(pending) => {
                let computed = pending.checksum;
                state.pending = Some(pending);
                match expected {
                    Some(expected) if expected != computed => {
                        let target = self.config.target;
                        let reason = StorageError::ChecksumMismatch { chunk, expected, computed };
                        self.demote(ctx, Alert::Disagreement { target, chunk, reason });
                    }
                    _ if matches!(state.kind, OpKind::Repair) => self.commit(ctx, op),
                    _ if matches!(state.kind, OpKind::Prepare { .. }) => self.prepared(ctx, op),
                    _ => self.proceed(ctx, op),
                }
            }
            Err(error) => self.apply_failed(ctx, op, chunk, error),
        }
    }

    fn apply_failed(&mut self, ctx: &mut Context<'_>, op: OpId, chunk: ChunkId, error: StoreError) {
        if self.ends_forgotten(ctx, op) || self.keeps_announced(ctx, op, &error) {
            return;
        }
        match error {
            StoreError::Io { .. } | StoreError::Damaged { .. } => {
                let reason = error.to_string();
                self.finish(ctx, op, Err(error.at(self.config.target)));
                self.fail(ctx, reason);
            }
            // The sender repeats it.
            StoreError::PayloadDamaged { .. } => {
                self.finish(ctx, op, Err(error.at(self.config.target)));
            }
            StoreError::Corrupt { .. } => {
                // The client retries; by then the old content may be repaired.
                self.finish(ctx, op, Err(error.at(self.config.target)));
                self.repair(ctx, chunk);
            }
            StoreError::NoSpace { .. } | StoreError::NotFound { .. } => {
                if self.role() == Role::Syncing {
                    // The chain must not wait for a target that does not serve: it reports itself
                    // OFFLINE. So it must not start to serve either, whatever it has reported about
                    // its data before.
                    self.full_until = Some(ctx.now.after(self.config.full_wait_ms));
                    if self.config.makes(Check::Room) {
                        self.data_state = DataState::Online;
                    }
                    self.receiving = None;
                }
                self.finish(ctx, op, Err(error.at(self.config.target)));
            }
        }
    }
}

impl OpKind {
    /// Checksum of the payload of its request.
    fn payload_checksum(&self) -> Checksum {
        match self {
            Self::Update { request, .. } => request.payload_checksum,
            Self::Forward { request, .. } | Self::Prepare { request, .. } => {
                request.payload_checksum
            }
            Self::Receive { request, .. } => request.checksum,
            Self::Confirm { .. }
            | Self::Resolve
            | Self::Send
            | Self::Repair
            | Self::Purge { .. }
            | Self::Drop => Checksum::default(),
        }
    }

    /// Whether it has the payload that its request names: a damaged chunk is forwarded without one,
    /// and the network may have damaged it.
    pub(super) fn is_intact(&self) -> bool {
        Checksum::of(&self.payload()) == self.payload_checksum()
    }

    /// The payload of its request.
    fn payload(&self) -> Bytes {
        match self {
            Self::Update { payload, .. }
            | Self::Forward { payload, .. }
            | Self::Prepare { payload, .. }
            | Self::Receive { payload, .. } => payload.clone(),
            _ => Bytes::new(),
        }
    }
}

/// How an update of the predecessor relates to the state of its chunk.
pub(super) enum Standing {
    /// It follows this version, the newest one.
    Follows(ChunkMeta),
    /// It is pending, or committed, here.
    Has {
        pending: bool,
    },
    Refused(StorageError),
    /// This replica has other content than the predecessor.
    Disagrees(StorageError),
}

/// Why an update from the predecessor cannot start version `chunk` of a chunk whose newest version
/// is another one.
fn precedes(newest: &ChunkMeta, chunk: ChunkId, update: ChunkVersion) -> Option<StorageError> {
    let have = newest.newest().version;
    if have == ChunkVersion(0) {
        return None; // The chunk is unknown.
    }
    if newest.chunk > chunk || have >= update {
        return Some(StorageError::ChunkStaleUpdate { chunk, have, update });
    }
    if newest.pending.is_some() {
        return Some(StorageError::ChunkConflict { chunk: newest.chunk, version: have });
    }
    (have.next() != update).then_some(StorageError::ChunkMissingUpdate { chunk, have, update })
}

/// Sends the same reply to all waiters.
pub(super) fn answer(
    ctx: &mut Context<'_>,
    waiters: VecDeque<Token>,
    result: Result<Updated, StorageError>,
) -> StartResult {
    for token in waiters {
        ctx.reply(token, result.clone().map(StorageReply::Updated));
    }
    StartResult::Done
}
