//! Selection of the planned moves that can start now, and the reason of each other one.

use threefs_core::ids::NodeId;
use threefs_core::routing::{Chain, PublicState};
use threefs_core::time::Millis;

use crate::move_report::{Wait, WaitCause};
use crate::placement::{Placement, PlannedMove, Rule};
use crate::view::View;

/// Replicas that are moved concurrently in the whole cluster: the load of programs has priority.
pub(crate) const MOVES_AT_ONCE: usize = 2;

/// The moves that start together.
pub(crate) struct Starts<'a> {
    pub view: &'a View,
    pub placement: &'a Placement,
    pub rule: &'a Rule,
    /// Why moves other than those of a drain do not start.
    pub balancing: Option<Wait>,
    pub now: Millis,
    /// The moves that start.
    pub moves: Vec<PlannedMove>,
    /// The one of them that counts for the rate: at most one starts at a time if it is limited.
    pub limited: Option<PlannedMove>,
}

impl Starts<'_> {
    /// Takes the next planned move.
    ///
    /// # Errors
    /// Why it must wait.
    pub(crate) fn take(&mut self, planned: PlannedMove) -> Result<(), Wait> {
        if let Some(wait) = &self.balancing
            && !self.view.goal.leaving.contains(&planned.from)
        {
            return Err(wait.clone());
        }
        let chain = self.view.routing.chains.get(&planned.chain);
        if let Some(wait) = chain.and_then(|chain| other_must_serve(chain, planned.from)) {
            return Err(wait);
        }
        let in_chain = |it: &PlannedMove| it.chain == planned.chain;
        if self.view.routing.moves.contains_key(&planned.chain)
            || self.moves.iter().any(in_chain)
            || !self.placement.permits(self.rule, &planned)
        {
            return Err(Wait::new(WaitCause::Order, "another move of the chain comes first"));
        }
        if self.moves.len() + self.view.routing.moves.len() >= MOVES_AT_ONCE {
            let detail = format!("at most {MOVES_AT_ONCE} replicas are moved at a time");
            return Err(Wait::new(WaitCause::Others, detail));
        }
        let serves = |chain: &Chain| chain.serving().any(|it| it.node == planned.from);
        if chain.is_some_and(serves) && self.view.pace.bytes_per_second > 0 {
            if self.limited.is_some() || self.view.pace.waits(self.now) {
                let detail = "the limit of `threefs rebalance --rate`";
                return Err(Wait::new(WaitCause::Rate, detail));
            }
            self.limited = Some(planned);
        }
        self.moves.push(planned);
        Ok(())
    }
}

/// The replica that must serve before one on `from` can be moved safely, if any.
fn other_must_serve(chain: &Chain, from: NodeId) -> Option<Wait> {
    let mut others = chain.targets.iter().filter(|place| place.node != from).peekable();
    let alone = others.peek().is_none();
    let source = chain.targets.iter().filter(|place| alone && place.node == from);
    let mut needed = others.chain(source);
    let missing = needed.find(|place| place.state != PublicState::Serving)?;
    let detail = format!(
        "{} on {} is {}: a replica is moved only while the others serve",
        missing.target, missing.node, missing.state
    );
    Some(Wait::new(WaitCause::Replica, detail))
}
