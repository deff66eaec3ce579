//! The stage of one heartbeat: what has to be written, in which order, before it is answered.
//! Pure: whoever drives it writes, and comes back for the next step.

use threefs_core::heartbeat::Heartbeat;
use threefs_core::ids::RoutingVersion;
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::protocol::MgmtdError;
use crate::rows::NodeRow;
use crate::view::{Admission, Changes, View};

/// What is to be done next about a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Scan, and write what that decides: targets of a former life leave their chains.
    Demote,
    /// Write down the node, its address and its life.
    Register,
    /// Make the first chains if there are none, then scan.
    Decide,
    /// Answer it.
    Answer,
}

/// How far a heartbeat has come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum HeartbeatStage {
    #[default]
    New,
    /// Its data is of this cluster.
    Checked,
    Demoted,
    Renewed,
    Admitted,
    Taken,
}

impl View {
    /// The next step, once the one before is written.
    pub(crate) fn next_step(
        &mut self,
        timers: &Timers,
        heartbeat: &Heartbeat,
        stage: &mut HeartbeatStage,
        now: Millis,
    ) -> Result<Step, MgmtdError> {
        let node = heartbeat.node;
        loop {
            match *stage {
                HeartbeatStage::New => {
                    self.check_data(node, heartbeat.data, now)?;
                    *stage = HeartbeatStage::Checked;
                }
                HeartbeatStage::Checked => match self.admit(heartbeat)? {
                    Admission::Known => *stage = HeartbeatStage::Admitted,
                    Admission::Repeated => return Ok(Step::Answer),
                    Admission::Register => {
                        *stage = HeartbeatStage::Admitted;
                        return Ok(Step::Register);
                    }
                    Admission::Restarted => {
                        if let Some(remaining_ms) = self.startup_remaining_ms(timers, now)
                            && self.routing.targets_of_node(node).next().is_some()
                        {
                            return Err(MgmtdError::Starting { remaining_ms });
                        }
                        // Demote before remembering the new life: a crash in between repeats the
                        // demotion, the other order would lose it.
                        self.restarts(node, now);
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
                    let news = self.record_heartbeat(heartbeat.clone(), now);
                    if news && self.startup_remaining_ms(timers, now).is_none() {
                        return Ok(Step::Decide);
                    }
                }
                HeartbeatStage::Taken => return Ok(Step::Answer),
            }
        }
    }

    /// A node's row is written.
    pub(crate) fn registered(&mut self, version: RoutingVersion, row: NodeRow) {
        self.routing.version = version;
        self.routing.nodes.insert(row.info.id, row.info.clone());
        self.nodes.insert(row.info.id, row);
    }

    /// What a scan has decided is written.
    pub(crate) fn decided(&mut self, version: RoutingVersion, changes: Changes) {
        self.routing.version = version;
        self.stores.extend(changes.stores);
        for this in changes.ended {
            self.routing.moves.remove(&this.chain);
            self.routing.retired.insert(this.source);
            self.stores.remove(&this.source);
        }
        self.routing.chains.extend(changes.chains.into_iter().map(|chain| (chain.id, chain)));
    }
}
