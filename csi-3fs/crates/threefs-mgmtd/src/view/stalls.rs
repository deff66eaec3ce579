//! Progress of the moves in progress.

use threefs_core::routing::{Move, PublicState};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::move_report::{MoveStatus, Wait, WaitCause};
use crate::view::{DEAD_DESTINATION_MS, View, is_offline};

impl View {
    /// The replicas being moved.
    pub(crate) fn move_statuses(&self, timers: &Timers, now: Millis) -> Vec<MoveStatus> {
        let is_known = self.startup_remaining_ms(now).is_none();
        let status = |this: &Move| {
            let chain = self.routing.chains.get(&this.chain)?;
            let (from, to) = (chain.place(this.source)?.node, chain.place(this.destination)?.node);
            let report = self.report_of(to, this.destination);
            Some(MoveStatus {
                chain: this.chain,
                from,
                to,
                copied_bytes: report.map_or(0, |line| line.used_bytes),
                stalled: if is_known { self.stall(this, timers, now) } else { None },
            })
        };
        self.routing.moves.values().filter_map(status).collect()
    }

    /// Why a move makes no progress, if it does not.
    fn stall(&self, this: &Move, timers: &Timers, now: Millis) -> Option<Wait> {
        let chain = self.routing.chains.get(&this.chain)?;
        let to = chain.place(this.destination)?;
        let mut others = chain
            .targets
            .iter()
            .filter(|place| ![this.source, this.destination].contains(&place.target));
        if let Some(place) = others.find(|place| place.state != PublicState::Serving) {
            let detail = format!(
                "{} on {} is {}: a move ends only when all other replicas serve",
                place.target, place.node, place.state
            );
            return Some(Wait::new(WaitCause::Replica, detail));
        }
        if !self.is_alive(to.node, timers, now) {
            let silent_s = self.silent_ms(to.node, now) / 1000;
            let detail = format!(
                "{} has been dead for {silent_s} s: the move is abandoned after {} s",
                to.node,
                DEAD_DESTINATION_MS / 1000
            );
            return Some(Wait::new(WaitCause::DeadNode, detail));
        }
        let is_offline = |line| is_offline(&line);
        let failed = self.failed_syncs.get(&this.destination).is_some_and(|count| *count > 0);
        let stopped = self.report_of(to.node, this.destination).is_some_and(is_offline);
        (failed && stopped).then(|| {
            let detail = format!("{} has no space for it, or its disk fails", to.node);
            Wait::new(WaitCause::Disk, detail)
        })
    }
}
