//! Convergence at the end of a schedule: all targets serve and all replicas agree.

use threefs_core::chunk::TagWindow;
use threefs_core::ids::ChunkId;
use threefs_core::replica::Event;
use threefs_core::routing::Chain;

use super::client::Activity;
use super::{CONVERGED_BY_US, Simulation, Violation, is_removed};
use crate::fault_plan::FAULTS_END_US;
use crate::topology::{At, chain_id};

impl Simulation {
    /// Whether everything has converged; if so, makes the final checks.
    pub(super) fn check_converged(&mut self) -> Result<bool, Violation> {
        if !self.is_quiet() {
            return Ok(false);
        }
        if !self.scrubbed {
            self.scrubbed = true;
            let members: Vec<At> = self.members().collect();
            for at in members {
                let slots = self.hosted(at).store.slots().iter();
                let damaged_chunks =
                    slots.filter(|(_, slot)| slot.damaged).map(|(chunk, _)| *chunk);
                for chunk in damaged_chunks.collect::<Vec<ChunkId>>() {
                    self.deliver_event(at, Event::DamageFound { chunk })?;
                }
            }
            return Ok(false);
        }
        self.history.check_order().map_err(|what| self.violation(what))?;
        self.check_replicas_equal()?;
        self.check_forgotten()?;
        Ok(true)
    }

    fn is_quiet(&self) -> bool {
        let routing = self.manager.routing();
        let well = |at: At| {
            let chain = routing.chain(chain_id(at.chain));
            self.serves(at)
                && (self.hosted(at).replica.as_ref())
                    .is_some_and(|replica| replica.is_idle() && replica.chain() == chain)
        };
        routing.chains.values().all(Chain::is_whole)
            && routing.moves.is_empty()
            && self.removal.is_done()
            && self.tasks.iter().all(|task| matches!(task.activity, Activity::Idle))
            && self.nodes.iter().all(|node| node.is_idle())
            && self.members().all(well)
            && self.all_purged()
    }

    /// Whether all removed chunks are purged, if this schedule purges chunks.
    fn all_purged(&self) -> bool {
        let has_removed_chunk = |at: At| {
            let mut slots = self.hosted(at).store.slots().values();
            slots.any(|slot| slot.committed.state.removed)
        };
        self.fencing.purge_after_ms().is_none() || !self.members().any(has_removed_chunk)
    }

    /// The targets that are in their chains.
    pub(super) fn members(&self) -> impl Iterator<Item = At> {
        (0..self.topology.chains).flat_map(|chain| self.members_of(chain))
    }

    pub(super) fn members_of(&self, chain: usize) -> impl Iterator<Item = At> {
        let published = self.manager.chain(chain_id(chain));
        let of_node = (0..self.nodes.len()).map(move |node| At { node, chain });
        of_node.filter(move |at| published.is_some_and(|it| it.place(at.target()).is_some()))
    }

    pub(super) fn convergence_report(&self) -> String {
        let tasks: Vec<_> = self
            .tasks
            .iter()
            .filter(|task| !matches!(task.activity, Activity::Idle))
            .map(|task| format!("{:?}", task.activity))
            .collect();
        let idle =
            |at: &At| self.hosted(*at).replica.as_ref().is_some_and(|replica| replica.is_idle());
        let busy: Vec<_> = self.members().filter(|at| !idle(at)).map(|at| self.name(at)).collect();
        let full: Vec<_> =
            (0..self.nodes.len()).filter(|node| !self.nodes[*node].is_idle()).collect();
        format!(
            "not converged {} ms after the faults ended: chains {:?}, open requests {tasks:?}, \
             busy or closed {busy:?}, nodes with requests {full:?}, everything purged: {}",
            (CONVERGED_BY_US - FAULTS_END_US) / 1_000,
            self.manager.routing().chains.values(),
            self.all_purged(),
        )
    }

    fn check_replicas_equal(&self) -> Result<(), Violation> {
        for chunk in self.history.chunks().filter(|chunk| !is_removed(*chunk)) {
            let newest_known = self.history.newest_known(chunk);
            let mut first = None;
            for at in self.members_of(self.topology.chain_of(chunk)) {
                let index = at.node;
                let slot = self.hosted(at).store.slots().get(&chunk).cloned().unwrap_or_default();
                let bytes = slot.committed.bytes;
                let version = self.history.resolve_version(chunk, slot.committed.state.version);
                if slot.pending.is_some() || slot.damaged {
                    return Err(self.violation(format!(
                        "node {index}: {chunk} is {} after convergence",
                        if slot.damaged { "damaged" } else { "pending" }
                    )));
                }
                if version < newest_known {
                    return Err(self.violation(format!(
                        "node {index}: {chunk} has version {version}, clients have seen {newest_known}"
                    )));
                }
                // A replica that had purged the chunk before a new write has fewer tags.
                let tags = match self.fencing.purge_after_ms() {
                    None => slot.committed.state.tags,
                    Some(_) => TagWindow::default(),
                };
                let (before, ..) =
                    first.get_or_insert((index, version, bytes.clone(), tags.clone()));
                let before = *before;
                if first != Some((before, version, bytes, tags)) {
                    return Err(self.violation(format!(
                        "nodes {before} and {index} differ about {chunk} after convergence"
                    )));
                }
            }
        }
        Ok(())
    }
}
