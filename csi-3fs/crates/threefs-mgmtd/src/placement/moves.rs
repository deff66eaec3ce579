//! Plans of moves: draining, then the domain rule, then balance.

use std::cmp::Reverse;

use super::layout::Layout;
use super::spread::{Place, SWAPS_MAX, spread};
use super::{Placement, PlannedMove, Rule, Use};

/// Candidates that one plan examines for the domain rule and for balance. A plan is computed again
/// after its first moves.
pub(crate) const STEPS_MAX: usize = 5_000_000;

impl Placement {
    /// The moves, in a valid order.
    pub(crate) fn moves(&self, rule: &Rule) -> Vec<PlannedMove> {
        let mut planner = Planner::new(Layout::new(self, rule), 0);
        planner.drain();
        planner.restore_rule();
        planner.balance();
        planner.moves
    }
}

pub(super) struct Planner {
    pub layout: Layout,
    /// Chains before this row stay where they are.
    first: usize,
    moves: Vec<PlannedMove>,
    steps: usize,
}

impl Planner {
    pub(super) fn new(layout: Layout, first: usize) -> Self {
        Self { layout, first, moves: Vec::new(), steps: 0 }
    }

    /// Moves replicas off draining nodes. One that no other node may receive stays.
    fn drain(&mut self) {
        let mut places: Vec<Place> = Vec::new();
        for row in 0..self.layout.rows.len() {
            for from in self.layout.rows[row].nodes.clone() {
                if self.layout.states[from] != Use::Leaving {
                    continue;
                }
                if let Some(to) = self.destination(row, from) {
                    self.make(row, from, to);
                    places.push((row, to));
                }
            }
        }
        // Which of them goes where costs nothing.
        spread(&mut self.layout, &mut places, SWAPS_MAX);
        for (planned, (_, to)) in self.moves.iter_mut().zip(places) {
            planned.to = self.layout.ids[to];
        }
    }

    /// Moves replicas out of domains that have too many of a chain.
    fn restore_rule(&mut self) {
        for row in 0..self.layout.rows.len() {
            while self.steps <= STEPS_MAX
                && let Some((from, to)) = self.restoring_move(row)
            {
                self.make(row, from, to);
            }
        }
    }

    /// The move of a replica that leaves the fewest replicas above the limits, if it improves that.
    fn restoring_move(&mut self, row: usize) -> Option<(usize, usize)> {
        let layout = &self.layout;
        let nodes = &layout.rows[row].nodes;
        let before = layout.excess(nodes);
        if before == 0 {
            return None;
        }
        self.steps += nodes.len() * layout.ids.len();
        let excess = |from: usize, to: usize| {
            let stay = nodes.iter().copied().filter(|node| *node != from);
            layout.excess(&stay.chain([to]).collect::<Vec<_>>())
        };
        let givers = self.giving().filter(|node| nodes.contains(node));
        let pairs = givers.flat_map(|from| self.receiving().map(move |to| (from, to)));
        let restoring = pairs
            .filter(|(from, to)| layout.fits(row, Some(*from), *to))
            .map(|(from, to)| (excess(from, to), from, to))
            .filter(|(after, ..)| *after < before);
        let key = |(after, from, to): &(u32, usize, usize)| {
            let loads = (Reverse(layout.relative(*from, 0)), layout.relative(*to, 0));
            (*after, loads, layout.pair_change(row, Some(*from), *to), *from, *to)
        };
        restoring.min_by_key(key).map(|(_, from, to)| (from, to))
    }

    /// Moves replicas from nodes with a high relative load to nodes with a low one.
    /// Whether there were any.
    pub(super) fn balance(&mut self) -> bool {
        let before = self.moves.len();
        while let Some((row, from, to)) = self.balancing_move() {
            self.make(row, from, to);
        }
        self.moves.len() > before
    }

    fn balancing_move(&mut self) -> Option<(usize, usize, usize)> {
        let mut givers: Vec<usize> = self.giving().collect();
        givers.sort_by_key(|node| (Reverse(self.layout.relative(*node, 0)), *node));
        let mut receivers: Vec<usize> = self.receiving().collect();
        receivers.sort_by_key(|node| (self.layout.relative(*node, 0), *node));
        for from in givers {
            for to in &receivers {
                if self.layout.relative(*to, 0) >= self.layout.relative(from, 0) {
                    break;
                }
                if self.steps > STEPS_MAX {
                    return None;
                }
                if let Some(row) = self.best_row(from, *to) {
                    return Some((row, from, *to));
                }
            }
        }
        None
    }

    /// The chain to move between two nodes: with the fewest moves, because replicas of one chain
    /// are not moved concurrently.
    fn best_row(&mut self, from: usize, to: usize) -> Option<usize> {
        let layout = &self.layout;
        let rows = &layout.of_node[from];
        self.steps += rows.len() + 1;
        let improves = |size: u64| {
            let (before, after) = (2 * layout.loads[from], 2 * layout.loads[to]);
            before.saturating_sub(size) * layout.costs[from] > (after + size) * layout.costs[to]
        };
        let suitable = rows.iter().filter(|row| {
            **row >= self.first
                && improves(layout.rows[**row].size)
                && layout.fits(**row, Some(from), to)
        });
        let key = |row: &&usize| {
            (layout.rows[**row].moves, layout.pair_change(**row, Some(from), to), **row)
        };
        suitable.min_by_key(key).copied()
    }

    /// The node that should receive a replica.
    fn destination(&self, row: usize, from: usize) -> Option<usize> {
        let layout = &self.layout;
        let fitting = self.receiving().filter(|to| layout.fits(row, Some(from), *to));
        fitting.min_by_key(|to| {
            let load = layout.relative(*to, layout.rows[row].size);
            (load, layout.pair_change(row, Some(from), *to), *to)
        })
    }

    fn giving(&self) -> impl Iterator<Item = usize> {
        let gives = |node: &usize| matches!(self.layout.states[*node], Use::Open | Use::Full);
        (0..self.layout.ids.len()).filter(gives)
    }

    fn receiving(&self) -> impl Iterator<Item = usize> {
        (0..self.layout.ids.len()).filter(|node| self.layout.states[*node] == Use::Open)
    }

    fn make(&mut self, row: usize, from: usize, to: usize) {
        let (chain, ids) = (self.layout.rows[row].id, &self.layout.ids);
        self.moves.push(PlannedMove { chain, from: ids[from], to: ids[to] });
        self.layout.replace(row, from, to);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use threefs_core::ids::{ChainId, NodeId};
    use threefs_core::location::Location;

    use super::super::{Members, Site, WEIGHT_MAX};
    use super::*;

    /// The nodes of a large cluster get zones, and every chain violates the rule.
    #[test]
    fn the_moves_for_the_rule_are_bounded_and_the_next_plan_continues() {
        let site = |node: u32| {
            let location = Location::new(["A", "B"][node as usize % 2], "", "").unwrap();
            (NodeId(node), Site { location, weight: WEIGHT_MAX, state: Use::Open })
        };
        let nodes: BTreeMap<NodeId, Site> = (0..10).map(site).collect();
        let members = |node: u32| {
            let nodes = [node, (node + 2) % 10].map(NodeId).into_iter().collect();
            (ChainId(node), Members { nodes, size: 1 })
        };
        let chains = (0..10).map(members).collect();
        let placement = Placement { chains, nodes, replicas: 2, waiting: 0 };
        let rule = placement.rule();
        let mut planner = Planner::new(Layout::new(&placement, &rule), 0);
        let candidates = 2 * placement.nodes.len();
        planner.steps = STEPS_MAX - 3 * candidates;
        planner.restore_rule();
        assert!(!planner.balance(), "not before the rule is restored");
        assert_eq!(planner.moves.len(), 4);
        planner.steps = 0;
        planner.restore_rule();
        assert_eq!(planner.moves.len(), 10);
    }
}
