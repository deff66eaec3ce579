//! Growth and rebalancing: adds chains for new nodes and starts moves of replicas, a few at a time.
//! The end of a move is part of every scan.

use std::collections::BTreeSet;

use threefs_core::ids::{ChainId, NodeId};
use threefs_core::moves::abandon;
use threefs_core::routing::Move;
use threefs_core::routing::{Chain, ChainTarget, PublicState};
use threefs_core::time::Millis;

use crate::config::FIRST_TABLE;
use crate::manager::{Manager, deadline};
use crate::move_report::{Wait, WaitCause};
use crate::ops::{
    AbandonMoves, AddChains, DropChains, ExtendTable, OpError, SetCapacities, SetPlacementGoal,
    StartMoves,
};
use crate::placement::Placement;
use crate::protocol::{MgmtdError, RebalancePlan};
use crate::refusal::Refusal;
use crate::rows::PlacementGoal;
use crate::starts::{MOVES_AT_ONCE, Starts};
use crate::view::View;

impl Manager {
    /// Adds chains and starts moves, if requested and within the limit. What was started is completed
    /// in any case.
    pub(crate) async fn grow(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        let started = !view.routing.moves.is_empty() || unused(view).next().is_some();
        let requested = self.balances(view) || !view.goal.leaving.is_empty();
        // Neither the members nor the ids in use are known before.
        if !view.held.is_empty() || view.routing.chains.is_empty() || !(requested || started) {
            return Ok(());
        }
        let growth_inputs = view.growth_inputs(&self.timers, now);
        if view.settled_inputs.as_ref() == Some(&growth_inputs) {
            return Ok(());
        }
        self.grow_inner(view, now).await?;
        // With the same inputs, the step would again have no effect.
        let after = view.growth_inputs(&self.timers, now);
        view.settled_inputs = (after == growth_inputs).then_some(growth_inputs);
        Ok(())
    }

    /// Whether chains are added and replicas moved for balance and the domain rule. A drain requests
    /// only the moves off its nodes.
    fn balances(&self, view: &View) -> bool {
        self.automatic || view.goal.once
    }

    /// Why nothing is balanced, if so.
    pub(crate) fn balancing_waits(&self, view: &View, placement: &Placement) -> Option<Wait> {
        if !self.balances(view) {
            let detail =
                "mgmtd runs with --no-rebalance: start it with `threefs rebalance --apply`";
            return Some(Wait::new(WaitCause::Request, detail));
        }
        let unknown = view.unknown_capacities(placement);
        let first = unknown.first()?;
        let detail = format!(
            "{} nodes have never reported their capacity, for example {first}: repair or drain them",
            unknown.len()
        );
        Some(Wait::new(WaitCause::Capacity, detail))
    }

    async fn grow_inner(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        self.abandon_moves(view, now).await?;
        self.drop_chains(view).await?;
        self.add_chains(view, now).await?;
        if view.routing.moves.len() >= MOVES_AT_ONCE {
            return Ok(());
        }
        let placement = self.placement(view, now, &view.goal.leaving);
        let rule = placement.rule();
        let planned = placement.moves(&rule);
        let is_known = view.unknown_capacities(&placement).is_empty();
        if planned.is_empty() && is_known && view.routing.moves.is_empty() && view.goal.once {
            return self.set_goal(view, PlacementGoal { once: false, ..view.goal.clone() }).await;
        }
        let balancing = self.balancing_waits(view, &placement);
        let (placement, rule) = (&placement, &rule);
        let (moves, limited) = (Vec::new(), None);
        let mut starts = Starts { view, placement, rule, balancing, now, moves, limited };
        for planned in planned {
            let _ = starts.take(planned);
        }
        let Starts { moves: plan, limited, .. } = starts;
        if plan.is_empty() {
            return Ok(());
        }
        let start = StartMoves { fence: view.fence, moves: &plan };
        let (version, started_moves) = self.store.transact(deadline(), &start).await?;
        let mut chains = Vec::with_capacity(started_moves.len());
        let bytes = view.chain_bytes();
        for (this, chain) in started_moves {
            tracing::info!(routing = version.0, "{this}");
            if limited.is_some_and(|limited| limited.chain == this.chain) {
                view.pace.started(bytes.get(&this.chain).copied().unwrap_or(0), now);
            }
            view.routing.moves.insert(this.chain, this);
            chains.push(chain);
        }
        self.apply(view, version, chains);
        Ok(())
    }

    /// Abandons moves that cannot complete.
    async fn abandon_moves(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        let can_be = |this: &&Move| {
            let chain = view.routing.chains.get(&this.chain);
            chain.is_some_and(|chain| abandon(chain, this).is_some())
        };
        let moves: Vec<Move> = view.doomed_moves(now).filter(can_be).copied().collect();
        if moves.is_empty() {
            return Ok(());
        }
        let give_up = AbandonMoves { fence: view.fence, moves: &moves };
        let (version, given_up) = self.store.transact(deadline(), &give_up).await?;
        let mut chains = Vec::with_capacity(given_up.len());
        for (this, chain) in given_up {
            tracing::info!(routing = version.0, "abandoned: {this}");
            let place =
                view.routing.chains.get(&this.chain).and_then(|it| it.place(this.destination));
            if let Some(node) = place.map(|place| place.node) {
                view.refuse_moves(node, this.destination, now);
            }
            view.routing.moves.remove(&this.chain);
            view.routing.retired.insert(this.destination);
            chains.push(chain);
        }
        self.apply(view, version, chains);
        Ok(())
    }

    /// Adds chains for new nodes; new files use them once waiting no longer improves them.
    async fn add_chains(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        let mut nodes = Vec::new();
        let placement = self.placement(view, now, &view.goal.leaving);
        if self.balancing_waits(view, &placement).is_none() {
            nodes = placement.new_chains(&placement.rule(), self.bootstrap.chains_per_node);
        }
        if !nodes.is_empty() {
            let add = AddChains { fence: view.fence, nodes: &nodes };
            let (version, chains) = self.store.transact(deadline(), &add).await?;
            tracing::info!(chains = chains.len(), "chains added for new nodes");
            self.apply(view, version, chains);
        }
        // Adds all chains at once if possible; chains that wait for an unavailable node do not
        // block the others.
        let unavailable = self.unavailable(view, now);
        let needless = |place: &ChainTarget| {
            place.state == PublicState::Serving || unavailable.contains(&place.node)
        };
        let settled = |chain: &Chain| {
            chain.targets.iter().all(needless)
                || (chain.head().is_none() && waits(chain, &unavailable))
        };
        if unused(view).all(settled) {
            let most_serve = |chain: &&Chain| chain.serving().count() * 2 > chain.targets.len();
            let usable = unused(view).filter(most_serve);
            let chains: Vec<ChainId> = usable.map(|chain| chain.id).collect();
            if chains.is_empty() {
                return Ok(());
            }
            let extend = ExtendTable { fence: view.fence, chains: &chains };
            let (version, table) = self.store.transact(deadline(), &extend).await?;
            tracing::info!(chains = table.chains.len(), "new files use the added chains");
            view.routing.tables.push(table);
            self.apply(view, version, Vec::new());
        }
        Ok(())
    }

    /// Drops chains that no file uses and no replica serves, whose first node is leaving: no other
    /// node could start them. Other chains are created for the remaining nodes.
    async fn drop_chains(&self, view: &mut View) -> Result<(), OpError> {
        let doomed_moves = |chain: &&Chain| {
            // After a restore, files may use chains of a lost version of the table.
            let has_served = |place: &ChainTarget| view.stores.contains_key(&place.target);
            chain.head().is_none()
                && !(view.routing.version.era() > 0 && chain.targets.iter().any(has_served))
                && !view.routing.moves.contains_key(&chain.id)
                && chain.targets.iter().any(|place| view.goal.leaving.contains(&place.node))
        };
        let chains: Vec<Chain> = unused(view).filter(doomed_moves).cloned().collect();
        if chains.is_empty() {
            return Ok(());
        }
        let drop = DropChains { fence: view.fence, chains: &chains };
        let version = self.store.transact(deadline(), &drop).await?;
        for chain in &chains {
            tracing::info!(routing = version.0, chain = %chain.id, "unused chain dropped");
            view.routing.chains.remove(&chain.id);
            view.routing.retired.extend(chain.targets.iter().map(|place| place.target));
        }
        self.apply(view, version, Vec::new());
        Ok(())
    }

    /// The rebalancing plan; with `apply`, it is started.
    pub(crate) async fn plan(
        &self,
        view: &mut View,
        now: Millis,
        apply: bool,
        leaving: Option<BTreeSet<NodeId>>,
    ) -> Result<RebalancePlan, Refusal> {
        let drains = leaving.is_some();
        let leaving = leaving.unwrap_or_else(|| view.goal.leaving.clone());
        if let Some(node) = leaving.iter().find(|node| !view.nodes.contains_key(node)) {
            return Err(MgmtdError::UnknownNode { node: *node }.into());
        }
        let mut placement = self.placement(view, now, &leaving);
        let replicas = self.bootstrap.replicas;
        let staying = placement.staying() as u32;
        // After a failure, the draining nodes can still be shown, and some of them kept.
        if !leaving.is_subset(&view.goal.leaving) && staying < replicas {
            return Err(MgmtdError::TooFewNodes { staying, replicas }.into());
        }
        let rule = placement.rule();
        let new = placement.new_chains(&rule, self.bootstrap.chains_per_node);
        let new_chains = new.len() as u32;
        let last = view.routing.chains.last_key_value().map_or(0, |(id, _)| id.0);
        placement.add((last + 1..).map(ChainId).zip(new));
        let moves = placement.moves(&rule);
        let plan = RebalancePlan {
            automatic: self.automatic,
            leaving: leaving.iter().copied().collect(),
            new_chains,
            stuck: placement.stuck(&moves) as u32,
            moves,
            under_way: view.routing.moves.values().copied().collect(),
        };
        if apply {
            let once = !drains || view.goal.once;
            self.set_goal(view, PlacementGoal { once, leaving }).await?;
            self.grow(view, now).await?;
        }
        Ok(plan)
    }

    /// Stores capacities that have changed.
    pub(crate) async fn record_capacities(&self, view: &mut View) -> Result<(), OpError> {
        let capacities = view.new_capacities();
        if capacities.is_empty() {
            return Ok(());
        }
        let set = SetCapacities { fence: view.fence, capacities: &capacities };
        self.store.transact(deadline(), &set).await?;
        view.capacities.extend(capacities);
        Ok(())
    }

    async fn set_goal(&self, view: &mut View, goal: PlacementGoal) -> Result<(), OpError> {
        let set_goal = SetPlacementGoal { fence: view.fence, goal: &goal };
        self.store.transact(deadline(), &set_goal).await?;
        view.goal = goal;
        Ok(())
    }

    /// Nodes that are dead, full, or have a target that cannot be opened.
    pub(crate) fn unavailable(&self, view: &View, now: Millis) -> BTreeSet<NodeId> {
        let away = view.nodes.keys().filter(|node| !view.is_alive(**node, &self.timers, now));
        away.copied().chain(view.full(now)).chain(view.broken()).collect()
    }
}

/// Whether a chain has a target on one of these nodes.
pub(crate) fn waits(chain: &Chain, unavailable: &BTreeSet<NodeId>) -> bool {
    chain.targets.iter().any(|place| unavailable.contains(&place.node))
}

/// Chains that are in no version of the table, so that no file uses them.
pub(crate) fn unused(view: &View) -> impl Iterator<Item = &Chain> {
    // Each version contains all chains of the earlier ones.
    let table = view.routing.newest_table(FIRST_TABLE);
    let table_chains: BTreeSet<ChainId> =
        table.iter().flat_map(|table| table.chains.iter().copied()).collect();
    view.routing.chains.values().filter(move |chain| !table_chains.contains(&chain.id))
}
