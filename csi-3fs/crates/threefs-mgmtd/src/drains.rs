//! Plans that operators request: balancing and draining.

use std::collections::BTreeSet;

use threefs_core::ids::NodeId;
use threefs_core::time::Millis;

use crate::drain_change::DrainChange;
use crate::manager::Manager;
use crate::protocol::{MgmtdError, RebalancePlan};

impl Manager {
    /// The plan that balances all nodes; with `apply`, it is started.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`], or an invalid request.
    pub async fn rebalance(
        &self,
        apply: bool,
        leaving: Option<Vec<NodeId>>,
        now: Millis,
    ) -> Result<RebalancePlan, MgmtdError> {
        self.planned(apply, now, |_| leaving.map(|nodes| nodes.into_iter().collect())).await
    }

    /// As [`Self::rebalance`]; `drain` gets the drained nodes and returns the new ones.
    async fn planned(
        &self,
        apply: bool,
        now: Millis,
        drain: impl FnOnce(&BTreeSet<NodeId>) -> Option<BTreeSet<NodeId>>,
    ) -> Result<RebalancePlan, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        if let Some(remaining_ms) = view.startup_remaining_ms(&self.timers, now) {
            return Err(MgmtdError::Starting { remaining_ms });
        }
        let leaving = drain(&view.goal.leaving);
        let result = self.plan(view, now, apply, leaving).await;
        self.reply_or_step_down(&mut role, result)
    }

    /// The plan after a change of the drained nodes; with `apply`, the change is made.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`], or an invalid request.
    pub async fn drain(
        &self,
        apply: bool,
        change: &DrainChange,
        now: Millis,
    ) -> Result<RebalancePlan, MgmtdError> {
        self.planned(apply, now, |leaving| Some(change.apply(leaving.clone()))).await
    }
}
