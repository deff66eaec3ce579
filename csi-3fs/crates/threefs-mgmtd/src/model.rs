//! Primary without a store, whose writes always succeed, for simulators. All decisions are those of
//! the product's [`View`](crate::view).

use std::collections::BTreeMap;

use threefs_core::heartbeat::{Heartbeat, HeartbeatReply};
use threefs_core::ids::{RoutingVersion, StoreId, TargetId};
use threefs_core::location::Location;
use threefs_core::routing::{NodeInfo, RoutingInfo};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::heartbeat::{HeartbeatStage, Step};
use crate::ops::{Fence, Loaded};
use crate::protocol::{MgmtdError, Promotion};
use crate::rows::NodeRow;
use crate::view::{Changes, View};

/// A primary without a store.
#[derive(Debug)]
pub struct Model {
    timers: Timers,
    view: View,
}

impl Model {
    /// A primary of existing chains.
    #[must_use]
    pub fn new(routing: RoutingInfo, timers: Timers, now: Millis) -> Self {
        let loaded = Loaded { routing, ..Loaded::default() };
        Self { timers, view: View::new(Fence { manager: 1, epoch: 1 }, loaded, now) }
    }

    /// Another primary takes over: it has the written state, and no heartbeats.
    pub fn restart(&mut self, now: Millis) {
        let View { fence, routing, nodes, goal, stores, capacities, pace, .. } = self.view.clone();
        let fence = Fence { epoch: fence.epoch + 1, ..fence };
        self.view = View::new(
            fence,
            Loaded { routing, nodes, goal, stores, capacities, move_rate: pace.bytes_per_second },
            now,
        );
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
        now: Millis,
    ) -> Result<HeartbeatReply, MgmtdError> {
        let mut stage = HeartbeatStage::default();
        loop {
            match self.view.next_step(&self.timers, heartbeat, None, &mut stage, now)? {
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
                    return Ok(HeartbeatReply { routing_version, lease_ms });
                }
            }
        }
    }

    /// Promotes `target` to the head of its chain, like the operator's command.
    ///
    /// # Errors
    /// [`MgmtdError::Starting`], [`MgmtdError::CannotPromote`].
    pub fn promote(&mut self, target: TargetId, now: Millis) -> Result<Promotion, MgmtdError> {
        if let Some(remaining_ms) = self.view.startup_remaining_ms(&self.timers, now) {
            return Err(MgmtdError::Starting { remaining_ms });
        }
        let (promotion, transition, store) = self.view.promotion(&self.timers, now, target)?;
        let (chains, stores) = (vec![transition.chain], vec![(target, store)]);
        let changes = Changes { chains, stores, ..Changes::default() };
        self.view.decided(self.next_version(), changes);
        Ok(promotion)
    }

    /// Scans all chains.
    pub fn tick(&mut self, now: Millis) {
        self.view.tick(&self.timers, now);
        if self.view.startup_remaining_ms(&self.timers, now).is_none() {
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
