//! The manager, without sockets and clocks: heartbeats and ticks are passed in with their time.
//!
//! Order of effects: decide from the view, write with the fence, change the view, publish, reply. A
//! manager that does not know whether a write succeeded steps down and reads the store again.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::chain::Transition;
use threefs_core::heartbeat::{Heartbeat, HeartbeatReply};
use threefs_core::ids::{FencesVersion, RoutingVersion, StoreId, TargetId};
use threefs_core::routing::{Chain, NodeInfo, RoutingInfo};
use threefs_core::time::Millis;
use threefs_kv::{KvError, Owner, Store};
use tokio::sync::{Mutex, MutexGuard, watch};

use crate::changes::Changes;
use crate::config::{Bootstrap, Timers};
use crate::heartbeat::{HeartbeatStage, Step};
use crate::ops::{OpError, RegisterNode, UpdateChains};
use crate::protocol::{ClusterStatus, MgmtdError, Promotion};
use crate::refusal::Refusal;
use crate::takeover::LeaseWatch;
use crate::view::{Report, View};

/// Timeout of a transaction, including retries. Above the time in which a distributed store elects
/// another leader, 1 to 3 s.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(4);

/// One mgmtd.
pub struct Manager {
    pub(crate) store: Store,
    pub(crate) id: u128,
    pub(crate) address: String,
    pub(crate) bootstrap: Bootstrap,
    /// Whether to add chains and move replicas automatically.
    pub(crate) automatic: bool,
    pub(crate) timers: Timers,
    pub(crate) role: Mutex<Role>,
    /// The lease as this manager has observed it, in all its terms.
    pub(crate) watch: std::sync::Mutex<LeaseWatch>,
    published: watch::Sender<Arc<RoutingInfo>>,
    /// The newest version of the fences that is known to be published.
    pub(crate) fences: watch::Sender<FencesVersion>,
    /// The required owner of the store; `None` in simulators.
    pub(crate) owner: Option<Owner>,
}

pub(crate) enum Role {
    /// The address of the primary, if it is known.
    Contender {
        holder: String,
    },
    Primary(Box<View>),
}

impl Role {
    /// A contender that has not read the lease yet.
    pub(crate) fn contender() -> Self {
        Self::Contender { holder: String::new() }
    }
}

impl Manager {
    /// A manager with a random id drawn by the caller. It is a contender until its first tick.
    pub fn new(
        store: Store,
        id: u128,
        address: impl Into<String>,
        bootstrap: Bootstrap,
        timers: Timers,
    ) -> Self {
        let (published, _) = watch::channel(Arc::default());
        let (fences, _) = watch::channel(FencesVersion(0));
        let role = Mutex::new(Role::contender());
        let (address, automatic) = (address.into(), true);
        let (watch, owner) = (std::sync::Mutex::default(), None);
        Self {
            store,
            id,
            address,
            bootstrap,
            automatic,
            timers,
            role,
            watch,
            published,
            fences,
            owner,
        }
    }

    /// Adds chains and moves replicas on request only.
    #[must_use]
    pub fn on_demand(self) -> Self {
        Self { automatic: false, ..self }
    }

    /// Subscribes to the routing that this manager publishes as the primary.
    pub fn subscribe(&self) -> watch::Receiver<Arc<RoutingInfo>> {
        self.published.subscribe()
    }

    /// Acquires or renews the lease, detects dead nodes and updates chains. To be called every
    /// `scan_ms`.
    ///
    /// # Errors
    /// Only a store that cannot recover: the process should exit.
    pub async fn tick(&self, now: Millis) -> Result<(), KvError> {
        let renewed = self.renew(now).await;
        let mut role = self.role.lock().await;
        let renewed = match renewed {
            Ok(Some(fence)) => {
                if let Role::Primary(view) = &mut *role
                    && view.fence == fence
                {
                    view.renewed_at = view.renewed_at.max(now);
                }
                Ok(())
            }
            other => other.map(drop),
        };
        if renewed.is_err() {
            let renewed = self.step_down_in_doubt(&mut role, renewed);
            self.step_down_without_lease(&mut role, now);
            return self.broken(renewed);
        }
        let result = match &mut *role {
            Role::Contender { .. } => self.contend(&mut role, now).await,
            Role::Primary(view) => {
                let result = self.lead(view, now).await;
                self.step_down_without_lease(&mut role, now);
                result
            }
        };
        let result = self.step_down_in_doubt(&mut role, result);
        self.broken(result)
    }

    fn step_down_without_lease(&self, role: &mut Role, now: Millis) {
        if let Role::Primary(view) = &*role
            && !view.holds_lease(&self.timers, now)
        {
            tracing::warn!(epoch = view.fence.epoch, "lease renewal failed");
            *role = Role::contender();
        }
    }

    /// Handles a heartbeat.
    ///
    /// # Errors
    /// Any [`MgmtdError`].
    pub async fn heartbeat(
        &self,
        heartbeat: Heartbeat,
        now: Millis,
    ) -> Result<HeartbeatReply, MgmtdError> {
        self.heartbeat_with(Report::of(heartbeat), now).await
    }

    /// Handles a heartbeat; no location = it is unchanged.
    ///
    /// # Errors
    /// Any [`MgmtdError`].
    pub(crate) async fn heartbeat_with(
        &self,
        report: Report,
        now: Millis,
    ) -> Result<HeartbeatReply, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        // Another cluster's versions prove nothing.
        view.check_data(report.heartbeat.node, report.heartbeat.data, now)?;
        let known = report.fences.as_ref().map(|fences| fences.known).unwrap_or_default();
        if let Some(seen) = report.seen.as_ref().filter(|seen| view.is_behind(seen, known)) {
            let (fence, node) = (view.fence, report.heartbeat.node);
            return self.hold_again(&mut role, fence, node, seen.version).await;
        }
        view.check_knows_fences(&report)?;
        let result = self.take_heartbeat(view, report, now).await;
        self.reply_or_step_down(&mut role, result)
    }

    pub(crate) fn reply_or_step_down<T>(
        &self,
        role: &mut Role,
        result: Result<T, Refusal>,
    ) -> Result<T, MgmtdError> {
        match result {
            Ok(reply) => Ok(reply),
            Err(Refusal::Answer(error)) => Err(error),
            Err(Refusal::Op(error)) => {
                let detail = error.to_string();
                drop(self.step_down_in_doubt(role, Err(error)));
                Err(MgmtdError::Store { detail })
            }
        }
    }

    /// The newest routing of a primary.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`].
    pub async fn routing(&self, now: Millis) -> Result<Arc<RoutingInfo>, MgmtdError> {
        let mut role = self.role.lock().await;
        self.view(&mut role, now)?;
        Ok(Arc::clone(&self.published.borrow()))
    }

    /// Status of the cluster.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`].
    pub async fn status(&self, now: Millis) -> Result<ClusterStatus, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        Ok(view.status(&self.timers, now, &self.address, self.bootstrap.nodes))
    }

    /// Promotes `target` to the head of its chain; without `apply`, reports the consequences only.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`], [`MgmtdError::CannotPromote`].
    pub async fn promote(
        &self,
        target: TargetId,
        apply: bool,
        now: Millis,
    ) -> Result<Promotion, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        if let Some(remaining_ms) = view.startup_remaining_ms(now) {
            return Err(MgmtdError::Starting { remaining_ms });
        }
        let (promotion, transition, store) = view.promotion(&self.timers, now, target)?;
        if apply {
            let promoted = self.write_promotion(view, target, transition, store).await;
            self.reply_or_step_down(&mut role, promoted.map_err(Refusal::Op))?;
        }
        Ok(promotion)
    }

    async fn write_promotion(
        &self,
        view: &mut View,
        target: TargetId,
        transition: Transition,
        store: StoreId,
    ) -> Result<(), OpError> {
        let Transition { chain, reasons } = transition;
        let changes = Changes::promotion(chain, target, store);
        let update = UpdateChains { fence: view.fence, changes: &changes };
        let version = self.store.transact(deadline(), &update).await?;
        for reason in &reasons {
            tracing::warn!(routing = version.0, "{reason}");
        }
        view.decided(version, changes);
        view.log_waits();
        self.publish(view);
        Ok(())
    }

    pub(crate) fn view<'a>(
        &self,
        role: &'a mut MutexGuard<'_, Role>,
        now: Millis,
    ) -> Result<&'a mut View, MgmtdError> {
        match &mut **role {
            Role::Primary(view) if view.holds_lease(&self.timers, now) => Ok(view),
            Role::Primary(_) => Err(MgmtdError::NotPrimary { holder: String::new() }),
            Role::Contender { holder } => Err(MgmtdError::NotPrimary { holder: holder.clone() }),
        }
    }

    /// Steps down if another manager is the primary, or if it is unknown whether a write was made:
    /// memory may differ from the store. A write that was certainly not made changes nothing; the
    /// lease decides how long a primary may continue without one.
    fn step_down_in_doubt(
        &self,
        role: &mut Role,
        result: Result<(), OpError>,
    ) -> Result<(), OpError> {
        if let (Err(error), Role::Primary(view)) = (&result, &*role)
            && error.in_doubt()
        {
            tracing::warn!(%error, epoch = view.fence.epoch, "stepping down");
            *role = Role::contender();
        }
        result
    }

    async fn lead(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        view.tick(&self.timers, now);
        if view.startup_remaining_ms(now).is_none() {
            self.make_chains(view, now).await?;
            self.scan(view, now).await?;
            self.record_capacities(view).await?;
            self.grow(view, now).await?;
        }
        Ok(())
    }

    async fn take_heartbeat(
        &self,
        view: &mut View,
        report: Report,
        now: Millis,
    ) -> Result<HeartbeatReply, Refusal> {
        let mut stage = HeartbeatStage::default();
        loop {
            match view.next_step(&self.timers, &report, &mut stage, now)? {
                Step::Demote => self.scan(view, now).await?,
                Step::Register => self.register(view, &report).await?,
                Step::Decide => {
                    self.make_chains(view, now).await?;
                    self.scan(view, now).await?;
                }
                Step::Answer => return Ok(self.answer(view)),
            }
        }
    }

    fn answer(&self, view: &View) -> HeartbeatReply {
        let lease_ms = self.timers.node_lease_ms();
        HeartbeatReply { routing_version: view.routing.version, lease_ms }
    }

    async fn register(
        &self,
        view: &mut View,
        Report { heartbeat, location, .. }: &Report,
    ) -> Result<(), OpError> {
        let known = view.nodes.get(&heartbeat.node).map(|row| &row.info.location);
        let info = NodeInfo {
            id: heartbeat.node,
            address: heartbeat.address.clone(),
            location: location.as_ref().or(known).cloned().unwrap_or_default(),
        };
        let register = RegisterNode {
            fence: view.fence,
            info: info.clone(),
            incarnation: heartbeat.incarnation,
        };
        let (version, row) = self.store.transact(deadline(), &register).await?;
        let (address, location) = (info.address, info.location);
        tracing::info!(node = %info.id, address, %location, "node registered");
        view.registered(version, row);
        self.publish(view);
        Ok(())
    }

    async fn scan(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        let changes = view.scan(&self.timers, now);
        if changes.is_empty() {
            view.log_waits();
            return Ok(());
        }
        let Changes { chains, reasons, ended_moves, .. } = &changes;
        let update = UpdateChains { fence: view.fence, changes: &changes };
        let version = self.store.transact(deadline(), &update).await?;
        view.count_failed_syncs(&self.timers, now, chains);
        for reason in reasons {
            tracing::info!(routing = version.0, "{reason}");
        }
        for this in ended_moves {
            tracing::info!(routing = version.0, "done: {this}");
        }
        view.decided(version, changes);
        view.log_waits();
        self.publish(view);
        Ok(())
    }

    pub(crate) fn apply(&self, view: &mut View, version: RoutingVersion, chains: Vec<Chain>) {
        view.routing.version = version;
        view.routing.chains.extend(chains.into_iter().map(|chain| (chain.id, chain)));
        self.publish(view);
    }

    /// Errors reported by a tick: only those of a store that cannot recover, or is not of this
    /// cluster. Only one process can
    /// have the embedded store open, and it must open it again after an unknown outcome.
    fn broken(&self, result: Result<(), OpError>) -> Result<(), KvError> {
        match result {
            Err(OpError::Kv(error @ (KvError::Broken { .. } | KvError::Owner(_)))) => Err(error),
            Err(OpError::Kv(error @ KvError::CommitUnknown { .. }))
                if self.store.exclusive_opening().is_some() =>
            {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn publish(&self, view: &View) {
        self.published.send_replace(Arc::new(view.routing.clone()));
    }
}

pub(crate) fn deadline() -> Deadline {
    Deadline::after(TRANSACTION_TIMEOUT)
}

#[cfg(test)]
#[path = "manager_test.rs"]
mod tests;

#[cfg(test)]
#[path = "growth_test.rs"]
mod growth_tests;

#[cfg(test)]
#[path = "domains_test.rs"]
mod domains_tests;

#[cfg(test)]
#[path = "drains_test.rs"]
mod drains_tests;

#[cfg(test)]
#[path = "upgrade_test.rs"]
mod upgrade_tests;

#[cfg(test)]
#[path = "capacity_test.rs"]
mod capacity_tests;
