//! The first update of a chunk in a new epoch makes a new version of the chunk: a copy of the version
//! before it, changed by the update. It continues the version numbers and the tags, so a retry of an
//! earlier update is recognised. It is forwarded as a whole chunk.

use std::collections::VecDeque;

use bytes::Bytes;

use super::queue::{Op, OpKind, StartResult, Step};
use super::update::answer;
use super::{Action, Check, Context, OpId, Replica, Token};
use crate::checksum::Checksum;
use crate::chunk::{ChunkMeta, ChunkState, ContentChange, StoreUpdate, TagWindow, Which};
use crate::error::{StorageError, StoreError};
use crate::ids::{ChunkId, ChunkVersion, RequestTag};
use crate::message::UpdateRequest;

impl Replica {
    /// Whether an update needs the content of `newest`, an older version than the one it makes.
    pub(super) fn starts_as_copy(
        &self,
        request: &UpdateRequest,
        payload: &Bytes,
        newest: &ChunkMeta,
    ) -> bool {
        let old = &newest.committed;
        let depends = match request.change {
            ContentChange::Write { offset } => offset > 0 || payload.len() < old.length as usize,
            ContentChange::Truncate { length } => length > 0,
            ContentChange::Remove | ContentChange::Replace => false,
        };
        newest.chunk != request.chunk
            && depends
            && old.exists()
            && old.length > 0
            && self.config.makes(Check::CopyContent)
    }

    /// The tags with which an update of version `chunk` starts. `newest`: the newest version.
    pub(super) fn tags_before(&self, newest: &ChunkMeta, chunk: ChunkId) -> TagWindow {
        let copied = newest.chunk == chunk || self.config.makes(Check::CopyTags);
        if copied { newest.committed.tags.clone() } else { TagWindow::default() }
    }

    /// Starts an update of a new version: reads the version before it.
    pub(super) fn start_copy(
        &mut self,
        ctx: &mut Context<'_>,
        kind: OpKind,
        version: ChunkVersion,
        tag: RequestTag,
        before: &ChunkMeta,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        let OpKind::Update { request, payload, .. } = &kind else { return StartResult::Done };
        let (chunk, expected) = (request.chunk, request.payload_checksum);
        let computed = Checksum::of(payload);
        if computed != expected {
            // Not after the copy, whose checksum would be of the damaged content.
            let error = StoreError::PayloadDamaged { chunk, expected, computed };
            return answer(ctx, waiters, Err(error.at(self.config.target)));
        }
        let op = self.add_op(Op { tag: Some(tag), waiters, ..Op::new(chunk, kind, version) });
        let (chunk, which) = (before.chunk, Which::Committed);
        self.store(ctx, op, Step::Reading, Action::ReadContent { op, chunk, which });
        StartResult::Op(op)
    }

    /// Whether `op` has read the content for a new version.
    pub(super) fn is_copy(&self, op: OpId) -> bool {
        let state = self.ops.get(&op);
        state.is_some_and(|it| matches!(it.kind, OpKind::Update { .. }) && it.pending.is_none())
    }

    /// Applies the update of a new version to the content of the version before it.
    pub(super) fn on_copied(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<(ChunkState, Bytes), StoreError>,
    ) {
        if self.ends_forgotten(ctx, op) {
            return;
        }
        let (before, content) = match result {
            Ok(read) => read,
            Err(error) => return self.not_copied(ctx, op, error),
        };
        if self.is_expired(ctx, op) {
            // During the read.
            let target = self.config.target;
            return self.finish(ctx, op, Err(StorageError::Expired { target }));
        }
        let (class, chain_version) = (self.class_of(op), self.chain_version());
        let Some(state) = self.ops.get_mut(&op) else { return };
        let (chunk, version, tag) = (state.chunk, state.version, state.tag.unwrap_or_default());
        let OpKind::Update { request, payload, .. } = &mut state.kind else { return };
        let copy = request.change.applied_to(&content, payload);
        let payload_checksum = Checksum::of(&copy);
        // Forwarded like this as well.
        (request.change, request.payload_checksum) = (ContentChange::Replace, payload_checksum);
        payload.clone_from(&copy);
        let meta = ChunkMeta { chunk: chunk.first_version(), committed: before, pending: None };
        let tags = self.tags_before(&meta, chunk).with(tag, version);
        let change = ContentChange::Replace;
        let update = StoreUpdate { chunk, version, chain_version, tags, change };
        // Forwarded once it is durable: the request is not the one of the client any more.
        let (waits, prepare) = (true, None);
        let action =
            Action::Apply { op, update, payload: copy, payload_checksum, class, waits, prepare };
        self.store(ctx, op, Step::Applying, action);
    }

    fn is_expired(&self, ctx: &Context<'_>, op: OpId) -> bool {
        let state = self.ops.get(&op);
        state.is_some_and(
            |it| matches!(it.kind, OpKind::Update { expires: Some(at), .. } if ctx.now >= at),
        ) && self.config.makes(Check::Expiry)
    }

    fn not_copied(&mut self, ctx: &mut Context<'_>, op: OpId, error: StoreError) {
        let reason = error.to_string();
        let damaged = match &error {
            StoreError::Corrupt { chunk, .. } => Some(*chunk),
            _ => None,
        };
        let is_broken = matches!(error, StoreError::Io { .. } | StoreError::Damaged { .. });
        self.finish(ctx, op, Err(error.at(self.config.target)));
        if is_broken {
            self.fail(ctx, reason);
        } else if let Some(chunk) = damaged {
            // The client retries; by then the old version may be repaired.
            self.repair(ctx, chunk);
        }
    }
}
