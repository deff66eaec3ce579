//! Stages of handling a heartbeat: what must be written, in which order, before the reply. Pure:
//! the caller writes, and calls again for the next step.

use threefs_core::ids::RoutingVersion;
use threefs_core::time::Millis;

use crate::changes::Changes;
use crate::config::Timers;
use crate::protocol::MgmtdError;
use crate::rows::NodeRow;
use crate::view::{Admission, Report, View};

/// The next step for a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Scan and write the result: targets of the former incarnation leave their chains.
    Demote,
    /// Write the node with its address, location and incarnation.
    Register,
    /// Create the initial chains if there are none, then scan.
    Decide,
    /// Reply.
    Answer,
}

/// Progress of a heartbeat.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum HeartbeatStage {
    #[default]
    New,
    /// Its data belongs to this cluster.
    Checked,
    Demoted,
    Renewed,
    Admitted,
    Taken,
}

impl View {
    /// The next step, once the previous one is written.
    pub(crate) fn next_step(
        &mut self,
        timers: &Timers,
        report: &Report,
        stage: &mut HeartbeatStage,
        now: Millis,
    ) -> Result<Step, MgmtdError> {
        let Report { heartbeat, location, .. } = report;
        let (node, location) = (heartbeat.node, location.as_ref());
        loop {
            match *stage {
                HeartbeatStage::New => {
                    self.check_data(node, heartbeat.data, now)?;
                    *stage = HeartbeatStage::Checked;
                }
                HeartbeatStage::Checked => match self.admit(heartbeat, location)? {
                    Admission::Known => *stage = HeartbeatStage::Admitted,
                    Admission::Repeated => return Ok(Step::Answer),
                    Admission::Register => {
                        *stage = HeartbeatStage::Admitted;
                        return Ok(Step::Register);
                    }
                    Admission::Restarted => {
                        self.restarts(node, now);
                        if self.routing.targets_of_node(node).next().is_none() {
                            // It is in no chain. A scan while this primary starts would take
                            // nodes for dead that it has not heard yet.
                            *stage = HeartbeatStage::Renewed;
                            return Ok(Step::Register);
                        }
                        if let Some(remaining_ms) = self.startup_remaining_ms(now) {
                            return Err(MgmtdError::Starting { remaining_ms });
                        }
                        // The demotion precedes the registration of the new incarnation: a crash in
                        // between repeats the demotion, the other order would lose it.
                        *stage = HeartbeatStage::Demoted;
                        return Ok(Step::Demote);
                    }
                },
                HeartbeatStage::Demoted => {
                    if self.is_in_chains(node) {
                        let remaining_ms = timers.node_failure_ms;
                        return Err(MgmtdError::Starting { remaining_ms });
                    }
                    *stage = HeartbeatStage::Renewed;
                    return Ok(Step::Register);
                }
                HeartbeatStage::Renewed => {
                    self.forget_node(node);
                    *stage = HeartbeatStage::Admitted;
                }
                HeartbeatStage::Admitted => {
                    *stage = HeartbeatStage::Taken;
                    let news = self.record_heartbeat(report, now);
                    if news && self.startup_remaining_ms(now).is_none() {
                        return Ok(Step::Decide);
                    }
                }
                HeartbeatStage::Taken => return Ok(Step::Answer),
            }
        }
    }

    /// Applies a written registration.
    pub(crate) fn registered(&mut self, version: RoutingVersion, row: NodeRow) {
        self.routing.version = version;
        self.routing.nodes.insert(row.info.id, row.info.clone());
        self.nodes.insert(row.info.id, row);
    }

    /// Applies the written result of a scan.
    pub(crate) fn decided(&mut self, version: RoutingVersion, changes: Changes) {
        self.routing.version = version;
        self.stores.extend(changes.stores);
        self.held.extend(changes.learned.into_iter().map(|chain| (chain.id, chain)));
        for chain in changes.released {
            self.held.remove(&chain);
        }
        for chain in changes.dropped_moves {
            self.routing.moves.remove(&chain);
        }
        for this in changes.ended_moves {
            self.routing.moves.remove(&this.chain);
            self.routing.retired.insert(this.source);
            self.stores.remove(&this.source);
        }
        self.routing.chains.extend(changes.chains.into_iter().map(|chain| (chain.id, chain)));
    }
}
