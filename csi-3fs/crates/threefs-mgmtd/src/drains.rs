//! Plans that operators request: balancing and draining. Reports of what waits.

use std::collections::BTreeSet;

use threefs_core::ids::NodeId;
use threefs_core::time::Millis;

use crate::drain_change::DrainChange;
use crate::manager::Manager;
use crate::move_report::{MoveReport, Wait, WaitCause, WaitingMove};
use crate::placement::PlannedMove;
use crate::protocol::{MgmtdError, RebalancePlan};
use crate::starts::Starts;
use crate::view::View;

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

    /// The drained nodes and the moves in progress; with `plan`, also the moves that wait.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`], [`MgmtdError::Starting`].
    pub async fn moves(&self, plan: bool, now: Millis) -> Result<MoveReport, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        let mut waiting = Vec::new();
        if plan {
            if let Some(remaining_ms) = view.startup_remaining_ms(now) {
                return Err(MgmtdError::Starting { remaining_ms });
            }
            waiting = self.waiting_moves(view, now);
        }
        let waiting_total = waiting.len() as u32;
        waiting.truncate(MoveReport::WAITING_MAX);
        Ok(MoveReport {
            leaving: view.goal.leaving.iter().copied().collect(),
            under_way: view.move_statuses(&self.timers, now),
            waiting,
            waiting_total,
        })
    }

    fn waiting_moves(&self, view: &View, now: Millis) -> Vec<WaitingMove> {
        let placement = &self.placement(view, now, &view.goal.leaving);
        let rule = &placement.rule();
        let planned = placement.moves(rule);
        let mut waiting: Vec<WaitingMove> = placement
            .without_place(rule, &planned)
            .map(|(chain, from, detail)| {
                let wait = Wait::new(WaitCause::NoPlace, detail);
                WaitingMove { chain, from, to: None, wait }
            })
            .collect();
        let balancing = self.balancing_waits(view, placement);
        let (moves, limited) = (Vec::new(), None);
        let mut starts = Starts { view, placement, rule, balancing, now, moves, limited };
        waiting.extend(planned.into_iter().filter_map(|planned| {
            let PlannedMove { chain, from, to } = planned;
            let wait = starts.take(planned).err()?;
            Some(WaitingMove { chain, from, to: Some(to), wait })
        }));
        waiting
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
        if let Some(remaining_ms) = view.startup_remaining_ms(now) {
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
