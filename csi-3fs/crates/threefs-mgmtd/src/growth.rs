//! What the manager does about nodes that came and nodes that shall go: adds chains, begins moves
//! of replicas, a few at a time. The end of a move is part of every scan.

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::ids::{ChainId, NodeId};
use threefs_core::moves::{Move, abandon};
use threefs_core::routing::{Chain, PublicState};
use threefs_core::time::Millis;

use crate::config::FIRST_TABLE;
use crate::manager::{Manager, Refusal, deadline};
use crate::ops::{AbandonMoves, AddChains, ExtendTable, OpError, StartMoves, Want};
use crate::protocol::{MgmtdError, RebalancePlan};
use crate::rebalance::{Placed, PlannedMove};
use crate::rows::Wanted;
use crate::view::View;

/// Replicas that are copied at the same time in the whole cluster: programs come first.
const MOVES_AT_ONCE: usize = 2;

impl Manager {
    /// Adds chains and begins moves, if that is wanted and there is room for more.
    pub(crate) async fn grow(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        let asked = view.wanted.once || !view.wanted.leaving.is_empty();
        if view.routing.chains.is_empty() || !(self.automatic || asked) {
            return Ok(());
        }
        self.abandon_moves(view).await?;
        self.add_chains(view, now).await?;
        let room = MOVES_AT_ONCE.saturating_sub(view.routing.moves.len());
        if room == 0 {
            return Ok(());
        }
        let planned = self.placed(view, now, &view.wanted.leaving).moves();
        if planned.is_empty() && view.routing.moves.is_empty() && view.wanted.once {
            return self.want(view, Wanted { once: false, ..view.wanted.clone() }).await;
        }
        let mut chosen: Vec<PlannedMove> = Vec::new();
        for planned in planned {
            let moves = |it: &PlannedMove| it.chain == planned.chain;
            let chain = view.routing.chains.get(&planned.chain);
            let ready = chain.is_some_and(|chain| others_serve(chain, planned.from));
            if ready
                && !view.routing.moves.contains_key(&planned.chain)
                && !chosen.iter().any(moves)
            {
                chosen.push(planned);
            }
        }
        chosen.truncate(room);
        if chosen.is_empty() {
            return Ok(());
        }
        let start = StartMoves { own: view.fence, moves: &chosen };
        let (version, begun) = self.store.transact(deadline(), &start).await?;
        let mut chains = Vec::with_capacity(begun.len());
        for (this, chain) in begun {
            tracing::info!(routing = version.0, "{this}");
            view.routing.moves.insert(this.chain, this);
            chains.push(chain);
        }
        self.apply(view, version, chains);
        Ok(())
    }

    /// Gives up moves to nodes that are away and shall hold nothing: they would wait for ever, and
    /// all other moves with them.
    async fn abandon_moves(&self, view: &mut View) -> Result<(), OpError> {
        let hopeless = |this: &&Move| {
            let chain = view.routing.chains.get(&this.chain);
            let place = chain.and_then(|chain| chain.place(this.destination));
            place.is_some_and(|place| view.wanted.leaving.contains(&place.node))
                && chain.is_some_and(|chain| abandon(chain, this).is_some())
        };
        let moves: Vec<Move> = view.routing.moves.values().filter(hopeless).copied().collect();
        if moves.is_empty() {
            return Ok(());
        }
        let give_up = AbandonMoves { own: view.fence, moves: &moves };
        let (version, given_up) = self.store.transact(deadline(), &give_up).await?;
        let mut chains = Vec::with_capacity(given_up.len());
        for (this, chain) in given_up {
            tracing::info!(routing = version.0, "given up: {this}");
            view.routing.moves.remove(&this.chain);
            view.routing.retired.insert(this.destination);
            chains.push(chain);
        }
        self.apply(view, version, chains);
        Ok(())
    }

    /// Chains for new nodes; new files use them once all of them are whole.
    async fn add_chains(&self, view: &mut View, now: Millis) -> Result<(), OpError> {
        let placed = self.placed(view, now, &view.wanted.leaving);
        let nodes = placed.new_chains(self.bootstrap.replicas, self.bootstrap.chains_per_node);
        if !nodes.is_empty() {
            let add = AddChains { own: view.fence, nodes: &nodes };
            let (version, chains) = self.store.transact(deadline(), &add).await?;
            tracing::info!(chains = chains.len(), "chains added for new nodes");
            self.apply(view, version, chains);
        }
        let table = view.routing.newest_table(FIRST_TABLE);
        let mut unused = view
            .routing
            .chains
            .values()
            .filter(|chain| table.is_none_or(|table| !table.chains.contains(&chain.id)));
        let ready = unused.next().is_some_and(Chain::is_whole) && unused.all(Chain::is_whole);
        if ready {
            let extend = ExtendTable { own: view.fence };
            let (version, table) = self.store.transact(deadline(), &extend).await?;
            tracing::info!(chains = table.chains.len(), "new files use the added chains");
            view.routing.tables.push(table);
            self.apply(view, version, Vec::new());
        }
        Ok(())
    }

    /// What would have to move; with `apply`, it is begun.
    pub(crate) async fn plan(
        &self,
        view: &mut View,
        now: Millis,
        apply: bool,
        leaving: Option<BTreeSet<NodeId>>,
    ) -> Result<RebalancePlan, Refusal> {
        let leaving = leaving.unwrap_or_else(|| view.wanted.leaving.clone());
        if let Some(node) = leaving.iter().find(|node| !view.nodes.contains_key(node)) {
            return Err(MgmtdError::UnknownNode { node: *node }.into());
        }
        let mut placed = self.placed(view, now, &leaving);
        let replicas = self.bootstrap.replicas;
        let staying = placed.staying.len() as u32;
        if !leaving.is_empty() && staying < replicas {
            return Err(MgmtdError::TooFewNodes { staying, replicas }.into());
        }
        let new = placed.new_chains(replicas, self.bootstrap.chains_per_node);
        let last = view.routing.chains.last_key_value().map_or(0, |(id, _)| id.0);
        for (nodes, id) in new.iter().zip(last + 1..) {
            placed.chains.insert(ChainId(id), nodes.iter().copied().collect());
        }
        let plan = RebalancePlan {
            automatic: self.automatic,
            leaving: leaving.iter().copied().collect(),
            new_chains: new.len() as u32,
            moves: placed.moves(),
            under_way: view.routing.moves.values().copied().collect(),
        };
        if apply {
            self.want(view, Wanted { once: true, leaving }).await?;
            self.grow(view, now).await?;
        }
        Ok(plan)
    }

    async fn want(&self, view: &mut View, wanted: Wanted) -> Result<(), OpError> {
        let want = Want { own: view.fence, wanted: &wanted };
        self.store.transact(deadline(), &want).await?;
        view.wanted = wanted;
        Ok(())
    }

    /// Where everything is once the moves under way have ended.
    fn placed(&self, view: &View, now: Millis, leaving: &BTreeSet<NodeId>) -> Placed {
        let nodes_of = |chain: &Chain| -> BTreeSet<NodeId> {
            let source = view.routing.moves.get(&chain.id).map(|this| this.source);
            let stays = chain.targets.iter().filter(|place| Some(place.target) != source);
            stays.map(|place| place.node).collect()
        };
        let chains: BTreeMap<ChainId, BTreeSet<NodeId>> =
            view.routing.chains.values().map(|chain| (chain.id, nodes_of(chain))).collect();
        let alive = view.nodes.keys().filter(|node| view.is_alive(**node, &self.timers, now));
        let staying = alive.filter(|node| !leaving.contains(node)).copied().collect();
        Placed { chains, staying, leaving: leaving.clone() }
    }
}

/// Every replica but the one on `from` serves: a move is safe to begin.
fn others_serve(chain: &Chain, from: NodeId) -> bool {
    let mut others = chain.targets.iter().filter(|place| place.node != from).peekable();
    let alone = others.peek().is_none();
    let source_serves = chain.serving().any(|place| place.node == from);
    others.all(|place| place.state == PublicState::Serving) && (!alone || source_serves)
}
