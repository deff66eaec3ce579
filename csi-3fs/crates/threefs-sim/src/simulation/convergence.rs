//! Convergence at the end of a schedule: all targets serve and all replicas agree.

use threefs_core::chunk::TagWindow;
use threefs_core::ids::{ChunkId, ChunkVersion};
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
            && self.epochs.are_done()
            && self.tasks.iter().all(|task| matches!(task.activity, Activity::Idle))
            && self.nodes.iter().all(|node| node.is_idle())
            && self.members().all(well)
            && self.all_purged()
            && self.all_dropped()
    }

    /// Whether all removed chunks are purged, if this schedule purges chunks.
    fn all_purged(&self) -> bool {
        let has_removed_chunk = |at: At| {
            let slots = self.hosted(at).store.slots();
            // A removed version hides older ones.
            let is_oldest = |it: ChunkId| slots.range(it.first_version()..it).next().is_none();
            slots.iter().any(|(chunk, slot)| slot.committed.state.removed && is_oldest(*chunk))
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
             busy or closed {busy:?}, nodes with requests {full:?}, everything purged: {}, \
             dropped: {}",
            (CONVERGED_BY_US - FAULTS_END_US) / 1_000,
            self.manager.routing().chains.values(),
            self.all_purged(),
            self.all_dropped(),
        )
    }

    fn check_replicas_equal(&self) -> Result<(), Violation> {
        for chunk in self.history.chunks().filter(|chunk| !is_removed(*chunk)) {
            let newest_known = self.history.newest_known(chunk);
            let mut first = None;
            for at in self.members_of(self.topology.chain_of(chunk)) {
                let index = at.node;
                let slots = self.hosted(at).store.slots().range(chunk..=chunk.last_version());
                let (mut newest, mut versions) = (ChunkVersion(0), Vec::new());
                for (chunk, slot) in slots {
                    if slot.pending.is_some() || slot.damaged {
                        return Err(self.violation(format!(
                            "node {index}: {chunk} is {} after convergence",
                            if slot.damaged { "damaged" } else { "pending" }
                        )));
                    }
                    let checked = self.history.check_stored(*chunk, &slot.committed);
                    checked.map_err(|what| self.violation(format!("node {index}: {what}")))?;
                    newest = newest.max(slot.committed.state.version);
                    // A replica that had purged the chunk before a new write has fewer tags.
                    let tags = match self.fencing.purge_after_ms() {
                        None => slot.committed.state.tags.clone(),
                        Some(_) => TagWindow::default(),
                    };
                    let (version, bytes) = (slot.committed.state.version, &slot.committed.bytes);
                    versions.push((*chunk, version, bytes.clone(), tags));
                }
                for epoch in self.epochs.kept(self.now) {
                    let view = chunk.in_epoch(epoch);
                    let shown = versions.iter().rev().find(|(chunk, ..)| *chunk <= view);
                    let shown = shown.map_or(ChunkVersion(0), |(_, version, ..)| *version);
                    let checked = self.history.check_shown(view, shown);
                    checked.map_err(|what| self.violation(format!("node {index}: {what}")))?;
                }
                let version = self.history.resolve_version(chunk.last_version(), newest);
                if version < newest_known {
                    return Err(self.violation(format!(
                        "node {index}: {chunk} has version {version}, clients have seen {newest_known}"
                    )));
                }
                let (before, ..) = first.get_or_insert((index, version, versions.clone()));
                let before = *before;
                if first != Some((before, version, versions)) {
                    return Err(self.violation(format!(
                        "nodes {before} and {index} differ about {chunk} after convergence"
                    )));
                }
            }
        }
        Ok(())
    }
}
