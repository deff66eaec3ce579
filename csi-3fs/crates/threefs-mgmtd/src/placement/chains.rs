//! Nodes of new chains.

use threefs_core::ids::{ChainId, NodeId};

use super::layout::{Layout, Row};
use super::moves::Planner;
use super::spread::{Place, SWAPS_MAX, spread};
use super::{Members, Placement, Rule, Use};

impl Placement {
    /// Nodes of additional chains, the head first, such that each staying node can be first in
    /// `chains_per_node` chains, not counting those that wait. Fewer or none if the nodes with space
    /// cannot hold them by the rule.
    pub(crate) fn new_chains(&self, rule: &Rule, chains_per_node: u32) -> Vec<Vec<NodeId>> {
        let goal = self.staying() * chains_per_node as usize;
        let missing = goal.saturating_sub(self.chains.len() - self.waiting);
        if missing == 0 {
            return Vec::new();
        }
        let mut layout = Layout::new(self, rule);
        let first = layout.rows.len();
        for row in first..first + missing {
            layout.push(ChainId(u32::MAX), 1, &[]);
            while layout.rows[row].nodes.len() < self.replicas as usize {
                let Some(node) = emptiest(&layout, row) else { break };
                layout.join(row, node);
            }
            if layout.rows[row].nodes.len() < self.replicas as usize {
                layout.rows[row].nodes.clone().iter().for_each(|node| layout.leave(row, *node));
                layout.rows.pop();
                break;
            }
        }
        // They hold no data, so that the best arrangement costs nothing. An exchange can make another
        // balancing move possible.
        let mut planner = Planner::new(layout, first);
        for round in 0.. {
            if !planner.balance() && round > 0 {
                break;
            }
            let rows = planner.layout.rows.iter().enumerate().skip(first);
            let mut places: Vec<Place> = rows
                .flat_map(|(row, chain)| chain.nodes.iter().map(move |node| (row, *node)))
                .collect();
            spread(&mut planner.layout, &mut places, SWAPS_MAX);
        }
        heads(&planner.layout, first, chains_per_node)
    }

    /// Adds chains to the placement, with these ids.
    pub(crate) fn add(&mut self, chains: impl Iterator<Item = (ChainId, Vec<NodeId>)>) {
        for (id, nodes) in chains {
            self.chains.insert(id, Members { nodes: nodes.into_iter().collect(), size: 1 });
        }
    }
}

/// The node with the lowest relative load that can join the chain.
fn emptiest(layout: &Layout, row: usize) -> Option<usize> {
    let nodes = (0..layout.ids.len()).filter(|node| layout.states[*node] == Use::Open);
    let fitting = nodes.filter(|node| layout.fits(row, None, *node));
    fitting
        .min_by_key(|node| (layout.relative(*node, 1), layout.pair_change(row, None, *node), *node))
}

/// The nodes of each chain, with a head such that each node leads as many chains as its share: an
/// assignment that exists always, since each chain can give `1 / replicas` of it to each member. A
/// node that has fewer chains than the others leads up to `chains_per_node` of the new ones.
fn heads(layout: &Layout, first: usize, chains_per_node: u32) -> Vec<Vec<NodeId>> {
    let count = |rows: &[Row]| {
        let mut counts = vec![0usize; layout.ids.len()];
        rows.iter().flat_map(|row| &row.nodes).for_each(|node| counts[*node] += 1);
        counts
    };
    let (before, new) = (count(&layout.rows[..first]), count(&layout.rows[first..]));
    let mut rows: Vec<Vec<usize>> =
        layout.rows[first..].iter().map(|row| row.nodes.clone()).collect();
    rows.iter_mut().for_each(|nodes| nodes.sort_by_key(|node| before[*node]));
    let replicas = rows.iter().map(Vec::len).max().unwrap_or(1).max(1);
    let share: Vec<usize> = before
        .iter()
        .zip(new)
        .map(|(before, new)| {
            let missing = (chains_per_node as usize).saturating_sub(before / replicas);
            new.div_ceil(replicas).max(missing)
        })
        .collect();
    let mut led: Vec<Vec<usize>> = vec![Vec::new(); share.len()];
    for row in 0..rows.len() {
        assign(row, &rows, &share, &mut led);
    }
    let mut chains: Vec<Vec<NodeId>> = rows
        .iter()
        .enumerate()
        .map(|(number, nodes)| {
            let mut nodes: Vec<NodeId> = nodes.iter().map(|node| layout.ids[*node]).collect();
            let places = nodes.len().max(1);
            nodes.rotate_left(number % places);
            nodes
        })
        .collect();
    for (node, rows) in led.iter().enumerate() {
        for row in rows {
            chains[*row].sort_by_key(|id| *id != layout.ids[node]);
        }
    }
    chains
}

/// Gives the chain a head with a free place, along a shortest path of chains that change theirs.
fn assign(row: usize, rows: &[Vec<usize>], share: &[usize], led: &mut [Vec<usize>]) {
    let mut reached_from: Vec<Option<usize>> = vec![None; share.len()];
    let mut queue = std::collections::VecDeque::new();
    for node in &rows[row] {
        reached_from[*node] = Some(row);
        queue.push_back(*node);
    }
    while let Some(mut node) = queue.pop_front() {
        if led[node].len() < share[node] {
            // Back along the path: each chain moves to the node that it was reached from.
            while let Some(moved) = reached_from[node] {
                led[node].push(moved);
                let former = (0..led.len()).find(|it| *it != node && led[*it].contains(&moved));
                let Some(former) = former else { return };
                led[former].retain(|it| *it != moved);
                node = former;
            }
            return;
        }
        for other in led[node].clone() {
            for next in &rows[other] {
                if reached_from[*next].is_none() {
                    reached_from[*next] = Some(other);
                    queue.push_back(*next);
                }
            }
        }
    }
}
