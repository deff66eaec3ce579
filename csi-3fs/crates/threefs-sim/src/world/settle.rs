//! The end of a schedule: all is well again, and everything agrees.

use threefs_core::ids::ChunkId;
use threefs_core::replica::Event;
use threefs_core::routing::{Chain, PublicState};

use super::{CHAIN, Outcome, SETTLED_BY_US, Violation, World, is_removed};
use crate::client::Doing;
use crate::faults::CALM_AT_US;
use crate::node::Node;

impl World {
    /// All well? Then the last checks are made.
    pub(super) fn check_settled(&mut self) -> Result<bool, Violation> {
        if !self.is_quiet() {
            return Ok(false);
        }
        if !self.scrubbed {
            self.scrubbed = true;
            let members: Vec<usize> = self.members().map(|(index, _)| index).collect();
            for node in members {
                let damaged: Vec<ChunkId> = self.nodes[node]
                    .store
                    .slots()
                    .iter()
                    .filter(|(_, slot)| slot.damaged)
                    .map(|(chunk, _)| *chunk)
                    .collect();
                for chunk in damaged {
                    self.give(node, Event::DamageFound { chunk })?;
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
        let chain = self.manager.chain(CHAIN);
        chain.is_some_and(Chain::is_whole)
            && self.manager.routing().moves.is_empty()
            && self.removal.is_done()
            && self.tasks.iter().all(|task| matches!(task.doing, Doing::Resting))
            && self.members().all(|(_, node)| {
                node.replica.is_idle()
                    && node.replica.serves(node.clock(self.now))
                    && node.replica.chain() == chain
            })
    }

    /// The last replica that may have all updates was on the lost disk: the others had left the
    /// chain by plan, or died, before mgmtd found that the disk's node was dead. mgmtd cannot know
    /// that nothing was acknowledged in between, so no other replica may serve until an operator
    /// promotes one.
    pub(super) fn waits_for_lost_disk(&self) -> bool {
        let Some(lost) = self.lost.map(|node| &self.nodes[node]) else { return false };
        let chain = self.manager.chain(CHAIN);
        let last = chain.and_then(|chain| chain.state_of(lost.target));
        last == Some(PublicState::LastSrv)
            && self.manager.store_of(lost.target) != Some(lost.store.id)
    }

    /// Such a chain answers nobody, and what it had answered before was right.
    pub(super) fn settled_without_lost_disk(&self) -> Result<Outcome, Violation> {
        for (index, node) in self.members() {
            if node.replica.serves(node.clock(self.now)) {
                let what = format!("node {index} serves a chain that waits for a lost disk");
                return Err(self.violation(what));
            }
        }
        self.history.check_order().map_err(|what| self.violation(what))?;
        // How soon all was well says nothing here.
        Ok(Outcome { settled_after_us: 0, waits_for_lost_disk: 1, ..self.outcome() })
    }

    /// The nodes whose targets are in the chain now.
    pub(super) fn members(&self) -> impl Iterator<Item = (usize, &Node)> {
        let chain = self.manager.chain(CHAIN);
        let member = move |node: &Node| chain.is_some_and(|it| it.place(node.target).is_some());
        self.nodes.iter().enumerate().filter(move |(_, node)| member(node))
    }

    pub(super) fn what_is_not_well(&self) -> String {
        let tasks: Vec<_> = self
            .tasks
            .iter()
            .filter(|task| !matches!(task.doing, Doing::Resting))
            .map(|task| format!("{:?}", task.doing))
            .collect();
        let busy: Vec<_> =
            (0..self.nodes.len()).filter(|node| !self.nodes[*node].replica.is_idle()).collect();
        format!(
            "not all well {} ms after the faults have ended: chain {:?}, open requests {tasks:?}, \
             busy nodes {busy:?}",
            (SETTLED_BY_US - CALM_AT_US) / 1_000,
            self.manager.chain(CHAIN),
        )
    }

    fn check_replicas_equal(&self) -> Result<(), Violation> {
        for chunk in self.history.chunks().filter(|chunk| !is_removed(*chunk)) {
            let known = self.history.newest_known(chunk);
            let mut first = None;
            for (index, node) in self.members() {
                let slot = node.store.slots().get(&chunk).cloned().unwrap_or_default();
                let (version, bytes) = (slot.committed.state.version, slot.committed.bytes);
                if slot.pending.is_some() || slot.damaged {
                    return Err(self.violation(format!(
                        "node {index}: {chunk} is {} when all is quiet",
                        if slot.damaged { "damaged" } else { "pending" }
                    )));
                }
                if version < known {
                    return Err(self.violation(format!(
                        "node {index}: {chunk} has version {version}, clients know of {known}"
                    )));
                }
                let tags = slot.committed.state.tags;
                let (before, ..) =
                    first.get_or_insert((index, version, bytes.clone(), tags.clone()));
                let before = *before;
                if first != Some((before, version, bytes, tags)) {
                    return Err(self.violation(format!(
                        "nodes {before} and {index} differ about {chunk} when all is quiet"
                    )));
                }
            }
        }
        Ok(())
    }
}
