//! The manager: mgmtd's rules and heartbeat handling ([`Model`]). It may be unavailable for a
//! while; its decisions are durable, heartbeats are not.

use std::collections::BTreeMap;
use std::rc::Rc;

use threefs_core::chain::promote;
use threefs_core::fence::{Fences, VolumeFence};
use threefs_core::heartbeat::{FenceReport, Heartbeat, HeartbeatReply, SeenRouting};
use threefs_core::ids::{ChainId, FencesVersion, NodeId, RoutingVersion, StoreId, TargetId};
use threefs_core::membership::Unproven;
use threefs_core::moves::{abandon, start};
use threefs_core::routing::Move;
use threefs_core::routing::PublicState::{Offline, Serving};
use threefs_core::routing::{Chain, RoutingInfo};
use threefs_core::time::Millis;
use threefs_mgmtd::{MgmtdError, Model, Timers};

/// A node without a heartbeat for this time is dead.
pub const DEAD_AFTER_MS: u64 = 100;
/// Interval between scans.
pub const SCAN_MS: u64 = 10;
/// Intervals and timeouts. The lease of the primary matters only if there are two mgmtds.
pub const TIMERS: Timers =
    Timers { node_failure_ms: DEAD_AFTER_MS, primary_lease_ms: 150, scan_ms: SCAN_MS };

/// The simulated manager.
#[derive(Debug)]
pub struct Manager {
    model: Model,
    published: Rc<RoutingInfo>,
    /// See [`crate::Mutation::LeaveOutAtOnce`].
    pub leaves_out_at_once: bool,
    /// See [`crate::Mutation::AbandonServing`].
    pub abandons_serving: bool,
    /// See [`crate::Mutation::PromoteEmpty`].
    pub promotes_empty: bool,
    /// See [`crate::Mutation::TrustBackup`].
    pub trusts_backup: bool,
    /// See [`crate::Mutation::TrustFences`].
    pub trusts_fences: bool,
    /// The newest backup of its store.
    backup: Option<Model>,
    /// Chunks of each target, as last reported.
    chunks: BTreeMap<TargetId, u64>,
}

impl Manager {
    /// A manager of new chains.
    #[must_use]
    pub fn new(chains: Vec<Chain>) -> Self {
        let mut routing = RoutingInfo { version: RoutingVersion(1), ..RoutingInfo::default() };
        routing.chains.extend(chains.into_iter().map(|chain| (chain.id, chain)));
        let published = Rc::new(routing.clone());
        let model = Model::new(routing, TIMERS, Millis(0));
        let chunks = BTreeMap::new();
        Self {
            model,
            published,
            leaves_out_at_once: false,
            abandons_serving: false,
            promotes_empty: false,
            trusts_backup: false,
            trusts_fences: false,
            backup: None,
            chunks,
        }
    }

    /// Restarts the manager: heartbeats are forgotten.
    pub fn restart(&mut self, now: Millis) {
        self.model.restart(now);
    }

    /// Another mgmtd takes over from one that may still answer heartbeats.
    pub fn take_over(&mut self, now: Millis) {
        self.model.take_over(now);
    }

    /// The primary has renewed its lease.
    pub fn renewed(&mut self, now: Millis) {
        self.model.renewed(now);
    }

    /// Whether the primary may answer.
    #[must_use]
    pub fn holds_lease(&self, now: Millis) -> bool {
        self.model.holds_lease(now)
    }

    /// The state of the primary.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Makes a backup of the store.
    pub fn back_up(&mut self) {
        self.backup = Some(self.model.clone());
    }

    /// The store is lost, and restored from its backup.
    pub fn restore(&mut self, now: Millis) {
        let Some(backup) = self.backup.take() else { return };
        self.model = backup;
        self.model.restored(RoutingVersion(0), now);
        if self.trusts_backup {
            self.model.trust_backup();
        }
        if self.trusts_fences {
            self.model.fences_published();
        }
        self.publish();
    }

    /// Why the chain waits after a restore.
    #[must_use]
    pub fn unproven(&self, chain: ChainId) -> Option<Unproven> {
        self.model.unproven(chain)
    }

    /// Whether the chain is held after a restore.
    #[must_use]
    pub fn is_held(&self, chain: ChainId) -> bool {
        self.model.is_held(chain)
    }

    /// The published routing.
    #[must_use]
    pub fn routing(&self) -> Rc<RoutingInfo> {
        Rc::clone(&self.published)
    }

    /// The current chain.
    #[must_use]
    pub fn chain(&self, id: ChainId) -> Option<&Chain> {
        self.published.chains.get(&id)
    }

    /// The store that a target has served with.
    #[must_use]
    pub fn store_of(&self, target: TargetId) -> Option<StoreId> {
        self.model.stores().get(&target).copied()
    }

    /// Handles a heartbeat.
    ///
    /// # Errors
    /// As mgmtd refuses it.
    pub fn heartbeat(
        &mut self,
        now: Millis,
        heartbeat: &Heartbeat,
        seen: &SeenRouting,
        fences: &FenceReport,
    ) -> Result<(HeartbeatReply, FencesVersion), MgmtdError> {
        let reply = self.model.heartbeat(heartbeat, seen, fences, now);
        if self.trusts_fences {
            self.model.fences_published();
        }
        if reply.is_ok() {
            self.chunks.extend(heartbeat.targets.iter().map(|line| (line.target, line.chunks)));
        }
        self.publish();
        reply
    }

    /// Stores a fence, as for a metadata service; returns its version.
    pub fn raise_fence(&mut self, fence: &VolumeFence) -> FencesVersion {
        self.model.raise_fence(fence)
    }

    /// Whether fences may be missing since a restore.
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        self.model.is_unpublished()
    }

    /// The metadata service has published all its fences.
    pub fn fences_published(&mut self) {
        self.model.fences_published();
    }

    /// The fences that have changed since `known`.
    #[must_use]
    pub fn fences_after(&self, known: FencesVersion) -> Option<Fences> {
        self.model.fences_after(known)
    }

    /// What fences of this version wait for.
    #[must_use]
    pub fn fences_wait_for(&self, version: FencesVersion, now: Millis) -> Option<String> {
        self.model.fences_wait_for(version, now)
    }

    /// Scans all chains.
    pub fn scan(&mut self, now: Millis) {
        if self.leaves_out_at_once {
            self.leave_out_at_once();
        }
        self.model.tick(now);
        self.publish();
    }

    fn publish(&mut self) {
        if self.model.routing().version != self.published.version {
            self.published = Rc::new(self.model.routing().clone());
        }
    }

    fn leave_out_at_once(&mut self) {
        let routing = self.model.routing();
        let leaves = |this: &&Move| {
            let chain = routing.chains.get(&this.chain);
            chain.is_some_and(|chain| {
                this.retires(chain, this.source) && chain.state_of(this.source) == Some(Serving)
            })
        };
        let Some(this) = routing.moves.values().find(leaves).copied() else { return };
        self.model.write(|routing| {
            let Some(chain) = routing.chains.get_mut(&this.chain) else { return };
            let targets = chain.targets.iter_mut();
            targets.filter(|it| it.target == this.source).for_each(|it| it.state = Offline);
            chain.targets.sort_by_key(|place| place.state);
            chain.version = chain.version.next();
        });
    }

    /// Abandons the chain's move, if possible; returns its destination.
    pub fn abandon_move(&mut self, id: ChainId) -> Option<TargetId> {
        let routing = self.model.routing();
        let this = routing.moves.get(&id).copied()?;
        let chain = routing.chains.get(&id)?;
        let next = if self.abandons_serving {
            // At the worst moment, which rarely occurs by chance.
            if chain.state_of(this.destination) != Some(Serving) {
                return None;
            }
            let mut without = chain.clone();
            without.targets.retain(|place| place.target != this.destination);
            Chain { version: chain.version.next(), ..without }
        } else {
            abandon(chain, &this)?
        };
        self.model.write(|routing| {
            routing.chains.insert(id, next);
            routing.moves.remove(&id);
            routing.retired.insert(this.destination);
        });
        self.publish();
        Some(this.destination)
    }

    /// Promotes a target to the head of its chain, like the operator's command.
    ///
    /// # Errors
    /// As mgmtd refuses it.
    pub fn promote(&mut self, target: TargetId, now: Millis) -> Result<(), MgmtdError> {
        let promoted = match self.promotes_empty {
            true => self.promote_unchecked(target),
            false => self.model.promote(target, now).map(|_| ()),
        };
        self.publish();
        promoted
    }

    fn promote_unchecked(&mut self, target: TargetId) -> Result<(), MgmtdError> {
        let chain = self.model.routing().chain_of_target(target);
        let promoted = chain.map(|chain| promote(chain, target));
        let Some(Ok(transition)) = promoted else {
            return Err(MgmtdError::CannotPromote { target, reason: "not now".into() });
        };
        let chain = transition.chain;
        self.model.write(|routing| drop(routing.chains.insert(chain.id, chain)));
        Ok(())
    }

    /// Whether a target reports no chunks and another one of its chain does.
    #[must_use]
    pub fn would_empty_others(&self, target: TargetId) -> bool {
        let chunks = |target| self.chunks.get(&target).copied().unwrap_or(0);
        let chain = self.published.chain_of_target(target);
        let mut other_targets = chain.into_iter().flat_map(|chain| &chain.targets);
        chunks(target) == 0 && other_targets.any(|place| chunks(place.target) > 0)
    }

    /// Starts a move of the chain's first target to a node without one; false while a move is in
    /// progress or another target does not serve.
    pub fn start_move(&mut self, id: ChainId, destination: TargetId, node: NodeId) -> bool {
        let routing = self.model.routing();
        let Some(chain) = routing.chains.get(&id) else { return false };
        let Some(source) = chain.targets.first().map(|place| place.target) else { return false };
        if !chain.is_whole() || routing.moves.contains_key(&id) {
            return false;
        }
        let next = start(chain, destination, node);
        self.model.write(|routing| {
            routing.chains.insert(id, next);
            routing.moves.insert(id, Move { chain: id, source, destination });
        });
        self.publish();
        true
    }
}
