//! Role of a replica: what it may serve, and which senders, by its chain, its data and its lease.

use super::config::Check;
use super::{Action, Alert, Context, Replica};
use crate::error::StorageError;
use crate::heartbeat::{LocalReport, LocalState};
use crate::ids::{ChainVersion, TargetId};
use crate::message::Address;
use crate::routing::{Chain, ChainTarget, PublicState};
use crate::time::Millis;

/// State of this replica's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataState {
    /// May lack updates.
    Online,
    /// Has everything that its chain has.
    UpToDate,
    /// The store failed: a new replica must start from the reopened store.
    Broken,
}

/// What this replica may do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Serving,
    Syncing,
    Idle(PublicState),
}

impl Replica {
    /// This target's report for the next heartbeat.
    #[must_use]
    pub fn report(&self, now: Millis) -> LocalReport {
        let state = match self.data_state {
            DataState::Broken => LocalState::Offline,
            _ if self.leaving => LocalState::Offline,
            _ if self.is_full(now) || self.is_stalled(now) => LocalState::Offline,
            DataState::UpToDate => LocalState::UpToDate,
            DataState::Online => LocalState::Online,
        };
        LocalReport { state, chain_version: self.chain_version() }
    }

    /// Whether this replica serves reads and updates now.
    #[must_use]
    pub fn serves(&self, now: Millis) -> bool {
        let stalled = self.is_stalled(now) && self.config.makes(Check::Stall);
        self.role() == Role::Serving && self.has_lease(now) && !stalled
    }

    pub(super) fn is_full(&self, now: Millis) -> bool {
        self.full_until.is_some_and(|until| now < until)
    }

    pub(super) fn is_stalled(&self, now: Millis) -> bool {
        self.store_since.values().any(|since| now.since(*since) > self.config.store_stall_ms)
    }

    pub(super) fn chain_version(&self) -> ChainVersion {
        self.chain.as_ref().map_or(ChainVersion(0), |chain| chain.version)
    }

    pub(super) fn role(&self) -> Role {
        let state = self.public_state();
        if self.leaving {
            return Role::Idle(state);
        }
        match (state, self.data_state) {
            (PublicState::Serving, DataState::UpToDate) => Role::Serving,
            (PublicState::Syncing, DataState::UpToDate | DataState::Online) => Role::Syncing,
            _ => Role::Idle(state),
        }
    }

    pub(super) fn public_state(&self) -> PublicState {
        self.chain
            .as_ref()
            .and_then(|chain| chain.state_of(self.config.target))
            .unwrap_or(PublicState::Offline)
    }

    pub(super) fn has_lease(&self, now: Millis) -> bool {
        !self.config.makes(Check::Lease) || self.serve_until.is_some_and(|until| now < until)
    }

    pub(super) fn successor(&self) -> Option<ChainTarget> {
        self.chain.as_ref().and_then(|chain| chain.successor(self.config.target)).copied()
    }

    pub(super) fn predecessor(&self) -> Option<ChainTarget> {
        self.chain.as_ref().and_then(|chain| chain.predecessor(self.config.target)).copied()
    }

    pub(super) fn address_of(&self, target: TargetId) -> Address {
        Address { chain: self.config.chain, chain_version: self.chain_version(), target }
    }

    /// Handles a newer chain: the role may change, and with it all operations in progress.
    pub(super) fn on_routing(&mut self, ctx: &mut Context<'_>, chain: Chain) {
        if chain.id != self.config.chain || chain.version <= self.chain_version() {
            return;
        }
        self.chain = Some(chain);
        self.receiving = None;
        self.successor_full_until = None;
        self.forget_prepares();
        if self.data_state != DataState::Broken {
            match self.public_state() {
                // Only mgmtd can make a restarted target up to date: it was one of the last to
                // serve.
                PublicState::LastSrv => self.data_state = DataState::UpToDate,
                PublicState::Serving => {}
                PublicState::Syncing | PublicState::Waiting | PublicState::Offline => {
                    if self.config.makes(Check::Demotion) {
                        self.data_state = DataState::Online;
                    }
                }
            }
        }
        self.stop_sending(ctx);
        self.abort_forgets(ctx);
        self.restart_purges(ctx);
        self.restart_drops(ctx);
        self.restart_draining();
        match self.role() {
            Role::Serving if self.must_leave(ctx) => {}
            Role::Serving => {
                self.release_received(ctx);
                self.start_sending(ctx);
                self.proceed_all(ctx);
                self.resolve_orphans(ctx);
            }
            // Also if it served until now: it may have missed versions, and operations that it
            // started are no longer its own to complete. A new sync starts from scratch.
            Role::Syncing => self.abort_all(ctx, PublicState::Syncing),
            Role::Idle(state) => self.abort_all(ctx, state),
        }
    }

    /// Stops serving: the data of this replica may be out of date.
    pub(super) fn demote(&mut self, ctx: &mut Context<'_>, alert: Alert) {
        ctx.out.push(Action::Alert(alert));
        if self.data_state == DataState::UpToDate {
            self.data_state = DataState::Online;
        }
        self.receiving = None;
        self.stop_sending(ctx);
        self.abort_forgets(ctx);
        self.abort_all(ctx, self.public_state());
    }

    /// The store failed: nothing is guaranteed until it is opened again.
    pub(super) fn fail(&mut self, ctx: &mut Context<'_>, reason: String) {
        ctx.out.push(Action::Alert(Alert::StoreFailed { target: self.config.target, reason }));
        self.data_state = DataState::Broken;
        self.receiving = None;
        self.stop_sending(ctx);
        self.abort_forgets(ctx);
        self.abort_all(ctx, self.public_state());
    }

    pub(super) fn mismatch(&self, to: Address) -> StorageError {
        StorageError::ChainVersionMismatch {
            chain: self.config.chain,
            request_version: to.chain_version,
            replica_version: self.chain_version(),
        }
    }

    /// Checks that this replica may serve clients.
    pub(super) fn check_serving(&self, ctx: &Context<'_>) -> Result<(), StorageError> {
        if self.role() != Role::Serving {
            return Err(self.not_serving());
        }
        if !self.has_lease(ctx.now) {
            return Err(StorageError::NoLease { target: self.config.target });
        }
        Ok(())
    }

    pub(super) fn check_head(&self, ctx: &Context<'_>, to: Address) -> Result<(), StorageError> {
        if to.chain_version != self.chain_version() {
            return Err(self.mismatch(to));
        }
        self.check_serving(ctx)?;
        let head = self.chain.as_ref().and_then(|chain| chain.head());
        if head.is_none_or(|head| head.target != self.config.target) {
            return Err(StorageError::NotHead {
                target: self.config.target,
                chain: self.config.chain,
            });
        }
        Ok(())
    }

    /// Checks that a request is from the predecessor and for the current chain.
    pub(super) fn check_sender(
        &self,
        to: Address,
        from: TargetId,
        role: Role,
    ) -> Result<(), StorageError> {
        if to.chain_version != self.chain_version() {
            return Err(self.mismatch(to));
        }
        if self.role() != role {
            return Err(self.not_serving());
        }
        if self.predecessor().is_none_or(|place| place.target != from) {
            return Err(StorageError::NotPredecessor { from, target: self.config.target });
        }
        Ok(())
    }
}
