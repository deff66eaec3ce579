//! Primary without a store, whose writes always succeed, for simulators. All decisions are those of
//! the product's [`View`](crate::view).

use std::collections::BTreeMap;

use threefs_core::fence::{Fences, VolumeFence};
use threefs_core::heartbeat::{FenceReport, Heartbeat, HeartbeatReply, SeenRouting};
use threefs_core::ids::{ChainId, FencesVersion, RoutingVersion, StoreId, TargetId};
use threefs_core::location::Location;
use threefs_core::membership::{Unproven, hold};
use threefs_core::routing::{NodeInfo, RoutingInfo};
use threefs_core::time::Millis;

use crate::changes::Changes;
use crate::config::Timers;
use crate::heartbeat::{HeartbeatStage, Step};
use crate::ops::{Fence, Loaded};
use crate::protocol::{MgmtdError, Promotion};
use crate::rows::{FenceRow, NodeRow};
use crate::view::{Report, View};

/// A primary without a store.
#[derive(Clone, Debug)]
pub struct Model {
    timers: Timers,
    view: View,
}

impl Model {
    /// A primary of existing chains.
    #[must_use]
    pub fn new(routing: RoutingInfo, timers: Timers, now: Millis) -> Self {
        let loaded = Loaded { routing, ..Loaded::default() };
        let fence = Fence { manager: 1, epoch: 1 };
        Self { timers, view: View::new(fence, loaded, timers.node_failure_ms, now) }
    }

    /// Another primary takes over from a dead one: it has the written state, and no heartbeats.
    pub fn restart(&mut self, now: Millis) {
        self.start_term(self.timers.node_failure_ms, now);
    }

    /// Another primary takes over from one that may still answer heartbeats.
    pub fn take_over(&mut self, now: Millis) {
        self.start_term(self.timers.settles_ms(), now);
    }

    fn start_term(&mut self, settles_ms: u64, now: Millis) {
        let View { fence, routing, nodes, goal, stores, capacities, pace, held, fences, .. } =
            self.view.clone();
        let (snapshots, unpublished) = (self.view.snapshots, self.view.unpublished);
        let fence = Fence { epoch: fence.epoch + 1, ..fence };
        let (move_rate, restored) = (pace.bytes_per_second, false);
        let loaded = Loaded {
            routing,
            nodes,
            goal,
            stores,
            capacities,
            move_rate,
            held,
            fences,
            snapshots,
            unpublished,
            restored,
        };
        self.view = View::new(fence, loaded, settles_ms, now);
    }

    /// Records that the lease was renewed by a transaction that started at `now`.
    pub fn renewed(&mut self, now: Millis) {
        self.view.renewed_at = now;
    }

    /// Whether it may answer.
    #[must_use]
    pub fn holds_lease(&self, now: Millis) -> bool {
        self.view.holds_lease(&self.timers, now)
    }

    /// The store was restored from a backup: holds all chains, in an era above `seen`, as
    /// `threefs mgmtd load` and the next primary do.
    pub fn restored(&mut self, seen: RoutingVersion, now: Millis) {
        let View { routing, held, .. } = &mut self.view;
        routing.version = routing.version.max(seen).next_era();
        for chain in routing.chains.values_mut() {
            let newest = held.entry(chain.id).or_insert_with(|| chain.clone());
            *chain = hold(newest, chain.version, routing.version.era());
        }
        self.view.unpublished = true;
        self.restart(now);
    }

    /// Puts the dumped chains back, in the versions of the held ones: a seeded bug.
    pub fn trust_backup(&mut self) {
        for (id, dumped) in std::mem::take(&mut self.view.held) {
            if let Some(chain) = self.view.routing.chains.get_mut(&id) {
                chain.targets = dumped.targets;
            }
        }
    }

    /// Why a chain that is held after a restore waits; `None` if it is not held, or about to be
    /// released.
    #[must_use]
    pub fn unproven(&self, chain: ChainId) -> Option<Unproven> {
        self.view.unproven(chain, &self.view.records())
    }

    /// Whether a chain is held after a restore.
    #[must_use]
    pub fn is_held(&self, chain: ChainId) -> bool {
        self.view.held.contains_key(&chain)
    }

    /// The published routing.
    #[must_use]
    pub fn routing(&self) -> &RoutingInfo {
        &self.view.routing
    }

    /// The stores with which targets have served.
    #[must_use]
    pub fn stores(&self) -> &BTreeMap<TargetId, StoreId> {
        &self.view.stores
    }

    /// Writes and publishes a change that is not decided here, such as a move.
    pub fn write(&mut self, change: impl FnOnce(&mut RoutingInfo)) {
        change(&mut self.view.routing);
        self.view.routing.version = self.next_version();
    }

    /// Handles a heartbeat.
    ///
    /// # Errors
    /// As mgmtd refuses it.
    pub fn heartbeat(
        &mut self,
        heartbeat: &Heartbeat,
        seen: &SeenRouting,
        fences: &FenceReport,
        now: Millis,
    ) -> Result<(HeartbeatReply, FencesVersion), MgmtdError> {
        if self.view.is_behind(seen, fences.known) {
            self.restored(seen.version, now);
        }
        let mut stage = HeartbeatStage::default();
        let (heartbeat, seen) = (heartbeat.clone(), Some(seen.clone()));
        let report = Report { heartbeat, location: None, seen, fences: Some(fences.clone()) };
        let heartbeat = &report.heartbeat;
        loop {
            match self.view.next_step(&self.timers, &report, &mut stage, now)? {
                Step::Demote | Step::Decide => self.scan(now),
                Step::Register => {
                    let before = self.view.nodes.get(&heartbeat.node).cloned();
                    let info = NodeInfo {
                        id: heartbeat.node,
                        address: heartbeat.address.clone(),
                        location: Location::default(),
                    };
                    let row = NodeRow::next(before, info, heartbeat.incarnation);
                    self.view.registered(self.next_version(), row);
                }
                Step::Answer => {
                    let lease_ms = self.timers.node_lease_ms();
                    let routing_version = self.view.routing.version;
                    let reply = HeartbeatReply { routing_version, lease_ms };
                    return Ok((reply, self.view.fences_required()));
                }
            }
        }
    }

    /// Stores a fence; returns its version.
    pub fn raise_fence(&mut self, raised: &VolumeFence) -> FencesVersion {
        let before = self.view.fences.get(&raised.volume);
        let fence = before.map_or_else(|| raised.clone(), |row| row.fence.merged(raised));
        let version = match before {
            Some(row) if row.fence == fence => row.version,
            _ => self.view.fences_version().next(),
        };
        self.view.fences.insert(fence.volume, FenceRow { version, fence });
        version
    }

    /// Whether fences may be missing: a metadata service has to publish them first.
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        self.view.unpublished
    }

    /// A metadata service has published all fences.
    pub fn fences_published(&mut self) {
        self.view.unpublished = false;
    }

    /// The fences that have changed since `known`.
    #[must_use]
    pub fn fences_after(&self, known: FencesVersion) -> Option<Fences> {
        self.view.fences_after(known)
    }

    /// What fences of this version wait for.
    #[must_use]
    pub fn fences_wait_for(&self, version: FencesVersion, now: Millis) -> Option<String> {
        self.view.fences_wait_for(&self.timers, version, now)
    }

    /// Promotes `target` to the head of its chain, like the operator's command.
    ///
    /// # Errors
    /// [`MgmtdError::Starting`], [`MgmtdError::CannotPromote`].
    pub fn promote(&mut self, target: TargetId, now: Millis) -> Result<Promotion, MgmtdError> {
        if let Some(remaining_ms) = self.view.startup_remaining_ms(now) {
            return Err(MgmtdError::Starting { remaining_ms });
        }
        let (promotion, transition, store) = self.view.promotion(&self.timers, now, target)?;
        let changes = Changes::promotion(transition.chain, target, store);
        self.view.decided(self.next_version(), changes);
        Ok(promotion)
    }

    /// Scans all chains.
    pub fn tick(&mut self, now: Millis) {
        self.view.tick(&self.timers, now);
        if self.view.startup_remaining_ms(now).is_none() {
            self.scan(now);
        }
    }

    fn scan(&mut self, now: Millis) {
        let changes = self.view.scan(&self.timers, now);
        if !changes.is_empty() {
            self.view.count_failed_syncs(&self.timers, now, &changes.chains);
            self.view.decided(self.next_version(), changes);
        }
    }

    fn next_version(&self) -> RoutingVersion {
        self.view.routing.version.next()
    }
}
