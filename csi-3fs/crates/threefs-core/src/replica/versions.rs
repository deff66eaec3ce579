//! Drops of versions of chunks that no snapshot shows.
//!
//! Each serving replica drops them on its own, by the lists of shown epochs of the volumes
//! (`crate::shown`): what a list hides stays hidden, so replicas need not agree. The newest version is
//! never dropped, and an older one only after the newer one is committed. A drop may be lost with
//! the power: the next scan repeats it.
//!
//! The store is scanned when a list hides more than the one before it, and when the replica starts to
//! serve. A version that is hidden when the next one is committed is dropped without a scan.

use std::collections::{BTreeMap, VecDeque};

use super::queue::{Op, OpKind, StartResult, Step};
use super::{Action, Check, Context, Replica, Role, Timer};
use crate::chunk::{ChunkMeta, ChunkMetas};
use crate::ids::{ChunkId, ChunkVersion, Epoch};
use crate::shown::ShownEpochs;
use crate::time::Millis;

/// Versions that wait to be dropped; further ones are found by another scan of the store.
const DUE_MAX: usize = 1 << 14;
/// Drops in progress.
const WINDOW: usize = 32;
/// Versions per page of a scan.
const PAGE: usize = 1_024;
/// Pause between two pages, and before a version whose chunk is in use is tried again.
const WAIT_MS: u64 = 50;

/// State of the drops.
#[derive(Debug, Default)]
pub(super) struct Drops {
    /// By the number of the volume.
    lists: BTreeMap<u32, ShownEpochs>,
    due: VecDeque<ChunkId>,
    /// The versions after this one remain to be scanned.
    scan: Option<Option<ChunkId>>,
    /// Whether another scan must follow.
    again: bool,
    under_way: usize,
    wake: Option<Millis>,
}

impl Drops {
    fn start_scan(&mut self) {
        match self.scan {
            None => self.scan = Some(None),
            Some(_) => self.again = true,
        }
    }

    fn push(&mut self, chunk: ChunkId) {
        if self.due.len() < DUE_MAX {
            self.due.push_back(chunk);
        } else {
            self.again = true;
        }
    }
}

impl Replica {
    /// Handles a newer list of the shown epochs of a volume.
    pub(super) fn on_shown(&mut self, ctx: &Context<'_>, list: &ShownEpochs) {
        let before = self.drops.lists.insert(list.volume, list.clone());
        if list.hides_more_than(before.as_ref()) && self.role() == Role::Serving {
            self.drops.start_scan();
            self.schedule_drops(ctx.now);
        }
    }

    /// After a change of the chain: only a serving replica has all newer versions.
    pub(super) fn restart_drops(&mut self, ctx: &Context<'_>) {
        if let Some(at) = self.drops.wake.take() {
            self.timers.remove(&(at, Timer::Drop));
        }
        let (lists, under_way) = (std::mem::take(&mut self.drops.lists), self.drops.under_way);
        self.drops = Drops { lists, under_way, ..Drops::default() };
        if self.role() == Role::Serving && !self.drops.lists.is_empty() {
            self.drops.start_scan();
            self.schedule_drops(ctx.now);
        }
    }

    /// Whether this replica may drop, or may have dropped, this version of a chunk.
    #[must_use]
    pub fn hides(&self, metas: &dyn ChunkMetas, chunk: ChunkId) -> bool {
        let newer = metas.metas(Some(chunk), chunk.last_version(), 1);
        let newer = newer.first().filter(|newer| is_committed(newer));
        newer.is_some_and(|newer| self.is_hidden(chunk, newer.chunk))
    }

    /// Whether no snapshot of this epoch exists any more.
    pub(super) fn hides_epoch(&self, epoch: Epoch) -> bool {
        self.drops.lists.get(&epoch.volume).is_some_and(|list| list.hides(epoch))
    }

    /// Whether no snapshot shows `older`, which the version `newer` follows.
    fn is_hidden(&self, older: ChunkId, newer: ChunkId) -> bool {
        let Some(list) = self.drops.lists.get(&newer.epoch.volume) else { return false };
        let is_complete =
            list.is_complete_to(newer.epoch) || !self.config.makes(Check::CompleteList);
        let shows = list.shows(older.epoch, newer.epoch) && self.config.makes(Check::ShownVersions);
        newer.is_version_of(older) && is_complete && !shows
    }

    /// After the commit of `chunk`: the version before it may be hidden.
    pub(super) fn drop_before(&mut self, ctx: &Context<'_>, chunk: ChunkId) {
        if !self.drops.lists.contains_key(&chunk.epoch.volume) || self.role() != Role::Serving {
            return;
        }
        let older = ctx.version_before(chunk).map(|meta| meta.chunk);
        if let Some(older) = older.filter(|older| self.is_hidden(*older, chunk)) {
            self.drops.push(older);
            self.schedule_drops(ctx.now);
        }
    }

    fn schedule_drops(&mut self, at: Millis) {
        let drops = &mut self.drops;
        let idle = drops.due.is_empty() && drops.scan.is_none() && !drops.again;
        if drops.wake.is_none() && !idle && drops.under_way < WINDOW {
            drops.wake = Some(at);
            self.timers.insert((at, Timer::Drop));
        }
    }

    pub(super) fn on_drop_timer(&mut self, ctx: &mut Context<'_>, at: Millis) {
        if self.drops.wake != Some(at) {
            return;
        }
        self.drops.wake = None;
        if self.role() != Role::Serving {
            return;
        }
        // Not only once none is due: a chunk may be in use all the time.
        if self.drops.due.len() + PAGE <= DUE_MAX {
            self.scan_for_hidden(ctx);
        }
        for _ in 0..self.drops.due.len() {
            if self.drops.under_way >= WINDOW || self.ops.len() >= self.config.ops_max {
                break;
            }
            let Some(chunk) = self.drops.due.pop_front() else { break };
            if self.queues.contains_key(&chunk.first_version()) {
                self.drops.push(chunk);
            } else {
                self.enqueue(ctx, chunk, OpKind::Drop, None);
            }
        }
        self.schedule_drops(ctx.now.after(WAIT_MS));
    }

    /// Scans the next page of the store.
    fn scan_for_hidden(&mut self, ctx: &Context<'_>) {
        if self.drops.scan.is_none() && std::mem::take(&mut self.drops.again) {
            self.drops.scan = Some(None);
        }
        let Some(after) = self.drops.scan else { return };
        let page = ctx.metas.metas(after, ChunkId::MAX, PAGE);
        let hidden = page
            .windows(2)
            .filter(|pair| is_committed(&pair[1]) && self.is_hidden(pair[0].chunk, pair[1].chunk));
        self.drops.due.extend(hidden.map(|pair| pair[0].chunk).collect::<Vec<_>>());
        // The last one of this page is the first one of the next: it may have a later version there.
        let next = page.len().checked_sub(2).map(|index| page[index].chunk);
        self.drops.scan = next.filter(|_| page.len() == PAGE).map(Some);
    }

    /// Starts the drop of a version, with the queue of the chunk blocked.
    pub(super) fn start_drop(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) -> StartResult {
        let meta = ctx.meta(chunk);
        let is_settled = meta.pending.is_none() && is_committed(&meta);
        if !self.hides(ctx.metas, chunk) || !is_settled || self.role() != Role::Serving {
            return StartResult::Done;
        }
        self.drops.under_way += 1;
        let op = self.add_op(Op::new(chunk, OpKind::Drop, meta.committed.version));
        self.store(ctx, op, Step::Forgetting, Action::Drop { op, chunk });
        StartResult::Op(op)
    }

    /// Ends the drop of a version.
    pub(super) fn drop_ended(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) {
        self.drops.under_way = self.drops.under_way.saturating_sub(1);
        self.purge_next(ctx, chunk);
        self.schedule_drops(ctx.now);
    }
}

fn is_committed(meta: &ChunkMeta) -> bool {
    meta.committed.version > ChunkVersion(0)
}
