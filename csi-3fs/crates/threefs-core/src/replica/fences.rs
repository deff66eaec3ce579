//! Fences: updates of epochs that have ended do not start, and those that started before are waited for
//! before the replica confirms.
//!
//! It confirms in a version of its chain: after a change of the chain it may get, or find, an update
//! that the former predecessor has started. mgmtd counts a confirmation only in the current version.
//!
//! A pending state of the epoch before the first snapshot does not name its volume. So a confirmation
//! waits for all operations and pending states from before it, whatever their volume.

use std::sync::Arc;

use super::queue::OpKind;
use super::{Check, Context, OpId, Replica, Role};
use crate::chunk::ChunkMetas;
use crate::error::StorageError;
use crate::fence::FenceTable;
use crate::ids::{ChunkId, Epoch, FencesVersion};
use crate::message::NamedVolume;

/// Fences and their confirmation.
#[derive(Debug, Default)]
pub(super) struct Fencing {
    table: Arc<FenceTable>,
    /// Operations up to this one are waited for, to confirm this version.
    barrier: Option<(FencesVersion, OpId)>,
    /// The confirmed version.
    drained: FencesVersion,
}

impl Replica {
    /// The newest fences that this replica confirms: it executes no update that they refuse, in the
    /// chain version of its report.
    #[must_use]
    pub fn drained_fences(&self) -> FencesVersion {
        match self.role() {
            Role::Serving => self.fencing.drained,
            Role::Syncing | Role::Idle(_) => FencesVersion(0),
        }
    }

    pub(super) fn on_fences(&mut self, ctx: &Context<'_>, table: Arc<FenceTable>) {
        if table.version() < self.fencing.table.version() {
            return;
        }
        for fence in table.iter() {
            let known = self.fencing.table.of(fence.volume);
            if known.is_none_or(|known| known.shown != fence.shown) {
                self.on_shown(ctx, &fence.shown);
            }
        }
        self.fencing.table = table;
    }

    /// After a change of the chain.
    pub(super) fn restart_draining(&mut self) {
        if self.config.makes(Check::DrainedInChain) {
            (self.fencing.barrier, self.fencing.drained) = (None, FencesVersion(0));
        }
    }

    /// Whether an update may start. `chunk`: with the epoch of the update.
    pub(super) fn check_fence(
        &self,
        chunk: ChunkId,
        volume: NamedVolume,
    ) -> Result<(), StorageError> {
        let table = &self.fencing.table;
        let is_first = chunk.epoch == Epoch::default();
        let fence = match volume {
            _ if !is_first => table.of_number(chunk.epoch.volume),
            NamedVolume::Volume(volume) => table.of(volume),
            NamedVolume::NoVolume | NamedVolume::Unnamed => None,
        };
        if let NamedVolume::Volume(named) = volume
            && let Some(fence) = fence.filter(|fence| fence.volume != named)
        {
            let (epoch, of) = (chunk.epoch, fence.volume);
            let reason = format!("epoch {epoch} is of volume {of}, the update names {named}");
            return Err(StorageError::InvalidRequest { reason });
        }
        let is_unknown = match volume {
            _ if !is_first => fence.is_none(),
            NamedVolume::Unnamed => !table.is_empty(),
            NamedVolume::NoVolume | NamedVolume::Volume(_) => false,
        };
        let fence = fence.map(|fence| fence.epoch);
        let has_ended = fence.is_some_and(|fence| chunk.epoch < fence);
        if (has_ended || is_unknown) && self.config.makes(Check::Fence) {
            return Err(StorageError::Fenced { chunk, fence });
        }
        Ok(())
    }

    /// Confirms fences once everything from before them has ended.
    pub(super) fn drain(&mut self, ctx: &Context<'_>) {
        if self.role() != Role::Serving {
            return;
        }
        // Newer fences wait for the barrier of earlier ones: otherwise frequent ones would delay it.
        while self.fencing.drained < self.fencing.table.version() {
            let newest = (self.fencing.table.version(), OpId(self.next_op));
            let (version, last) = *self.fencing.barrier.get_or_insert(newest);
            if !self.has_drained(ctx.metas, last) {
                return;
            }
            (self.fencing.barrier, self.fencing.drained) = (None, version);
        }
    }

    /// Whether all operations up to `last`, and all pending states from before it, have ended.
    fn has_drained(&self, metas: &dyn ChunkMetas, last: OpId) -> bool {
        let is_earlier = self.ops.first_key_value().is_some_and(|(first, _)| *first <= last);
        if is_earlier && self.config.makes(Check::DrainedOperations) {
            return false;
        }
        let mut after = None;
        loop {
            let page = metas.pending(after, self.config.sync_page);
            if !page.iter().all(|chunk| self.is_of_later_update(*chunk, last)) {
                return false;
            }
            let Some(end) = page.last() else { return true };
            after = Some(*end);
        }
    }

    /// Whether an update after `last` has made this pending state.
    fn is_of_later_update(&self, chunk: ChunkId, last: OpId) -> bool {
        if let Some(prepared) = self.prepared.get(&chunk) {
            return prepared.op > last;
        }
        let queue = self.queues.get(&chunk.first_version());
        let active = queue.and_then(|queue| queue.active).filter(|op| *op > last);
        let kind = active.and_then(|op| self.ops.get(&op)).map(|op| &op.kind);
        matches!(
            kind,
            Some(OpKind::Update { .. } | OpKind::Forward { .. } | OpKind::Prepare { .. })
        )
    }
}
