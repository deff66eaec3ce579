//! Promotion of a target: checks that it may lead its chain, and the chain with it as the head.

use threefs_core::chain::{NotPromotable, Transition, promote};
use threefs_core::ids::{StoreId, TargetId};
use threefs_core::membership::served_last;
use threefs_core::routing::{ChainTarget, PublicState};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::protocol::{MgmtdError, Promotion};
use crate::view::{View, is_offline};

impl View {
    /// The consequences of promoting `target` to the head of its chain, and the new chain.
    pub(crate) fn promotion(
        &self,
        timers: &Timers,
        now: Millis,
        target: TargetId,
    ) -> Result<(Promotion, Transition, StoreId), MgmtdError> {
        let refusal = |reason: String| MgmtdError::CannotPromote { target, reason };
        let chain = self.routing.chain_of_target(target);
        let chain = chain.ok_or_else(|| refusal("no chain has this target".into()))?;
        let alive = |place: &ChainTarget| {
            let line = self.report_of(place.node, place.target);
            line.filter(|line| self.is_alive(place.node, timers, now) && !is_offline(line))
        };
        let transition = promote(chain, target).map_err(|reason| {
            refusal(match reason {
                NotPromotable::Absent => "no chain has this target".into(),
                NotPromotable::Served => format!("{} has a serving target", chain.id),
                NotPromotable::MayLead => format!(
                    "it is one of the last serving targets of {}, which recovers with it automatically",
                    chain.id
                ),
            })
        })?;
        if let Some(place) = chain.targets.iter().find(|place| {
            let back = alive(place).is_some_and(|line| !self.is_foreign(place, &line));
            place.state == PublicState::LastSrv && back
        }) {
            return Err(refusal(format!("{} is back and leads {}", place.target, chain.id)));
        }
        let is_held = self.held.contains_key(&chain.id);
        if is_held && !self.has_stopped(chain, chain.version, now) {
            return Err(MgmtdError::Starting { remaining_ms: timers.node_failure_ms });
        }
        let place = chain.place(target).ok_or_else(|| refusal("it left the chain".into()))?;
        let line = alive(place).ok_or_else(|| {
            refusal(format!("{} does not report it as usable: start the node first", place.node))
        })?;
        let store = line.store.ok_or_else(|| refusal("its store is not open".into()))?;
        let all_empty =
            || chain.targets.iter().all(|place| alive(place).is_some_and(|line| line.chunks == 0));
        if line.chunks == 0 && !all_empty() {
            return Err(refusal(
                "its store is empty, and as the head it would empty the others; promote a \
                 target with chunks"
                    .into(),
            ));
        }
        let known = self.held.get(&chain.id).unwrap_or(chain);
        let last_serving = served_last(known).filter(|place| place.target != target);
        let promotion = Promotion {
            target,
            node: place.node,
            chain: chain.id,
            chunks: line.chunks,
            served_last: last_serving.map(|place| (place.target, place.node)).collect(),
            was_complete: self.stores.get(&target) == Some(&store),
        };
        Ok((promotion, transition, store))
    }
}
