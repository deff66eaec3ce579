//! A placement with indices in place of ids, and the loads of nodes and pairs of nodes.

use threefs_core::ids::{ChainId, NodeId};
use threefs_core::location::Level;

use super::{Placement, Rule, Use, WEIGHT_MAX};

/// Index of the limit of a service.
const SERVICE: usize = Level::ALL.len();
const LIMITS: usize = SERVICE + 1;

/// A chain of a [`Layout`].
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub id: ChainId,
    pub size: u64,
    /// Indices of its nodes, ascending.
    pub nodes: Vec<usize>,
    /// Number of its planned moves.
    pub moves: u32,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub ids: Vec<NodeId>,
    pub states: Vec<Use>,
    pub rows: Vec<Row>,
    /// Indices of the rows of each node.
    pub of_node: Vec<Vec<usize>>,
    /// Sizes of the chains of each node.
    pub loads: Vec<u64>,
    /// Scale / weight of each node: a load times this is its relative load.
    pub costs: Vec<u64>,
    /// Number of chains that two nodes share.
    pairs: Vec<u16>,
    /// Limits of the levels, and of a service.
    caps: [Option<u32>; LIMITS],
    /// The domain of each node at each level, and its service. A node of unknown domain has a
    /// separate one.
    domains: Vec<[u32; LIMITS]>,
}

impl Layout {
    pub(super) fn new(placement: &Placement, rule: &Rule) -> Self {
        let count = placement.nodes.len();
        let ids: Vec<NodeId> = placement.nodes.keys().copied().collect();
        let sites = placement.nodes.values();
        let scale = u64::from(WEIGHT_MAX * WEIGHT_MAX);
        let mut layout = Self {
            states: sites.clone().map(|site| site.state).collect(),
            rows: Vec::with_capacity(placement.chains.len()),
            of_node: vec![Vec::new(); count],
            loads: vec![0; count],
            costs: sites.clone().map(|site| scale / u64::from(site.weight.max(1))).collect(),
            pairs: vec![0; count * count],
            caps: [Some(1); LIMITS],
            domains: vec![[0; LIMITS]; count],
            ids,
        };
        for level in Level::ALL {
            layout.caps[level as usize] = rule.cap_of(level);
            let names = placement.nodes.values().map(|site| site.location.domain(level));
            let mut first = std::collections::BTreeMap::new();
            for (node, name) in names.enumerate() {
                let number = node as u32;
                layout.domains[node][level as usize] =
                    name.map_or(number, |name| *first.entry(name).or_insert(number));
            }
        }
        let mut first = std::collections::BTreeMap::new();
        for (node, id) in placement.nodes.keys().enumerate() {
            layout.domains[node][SERVICE] = *first.entry(id.service()).or_insert(node as u32);
        }
        for (id, chain) in &placement.chains {
            let index = |node| layout.ids.binary_search(node).ok();
            let nodes: Vec<usize> = chain.nodes.iter().filter_map(index).collect();
            layout.push(*id, u64::from(chain.size), &nodes);
        }
        layout
    }

    /// Adds a chain.
    pub(super) fn push(&mut self, id: ChainId, size: u64, nodes: &[usize]) {
        self.rows.push(Row { id, size, nodes: Vec::with_capacity(nodes.len()), moves: 0 });
        for node in nodes {
            self.join(self.rows.len() - 1, *node);
        }
    }

    /// Adds a replica.
    pub(super) fn join(&mut self, row: usize, node: usize) {
        let count = self.ids.len();
        let chain = &mut self.rows[row];
        for peer in &chain.nodes {
            for pair in [node * count + peer, peer * count + node] {
                self.pairs[pair] = self.pairs[pair].saturating_add(1);
            }
        }
        let place = chain.nodes.partition_point(|other| *other < node);
        chain.nodes.insert(place, node);
        self.loads[node] += chain.size;
        self.of_node[node].push(row);
    }

    /// Removes a replica.
    pub(super) fn leave(&mut self, row: usize, node: usize) {
        let count = self.ids.len();
        let chain = &mut self.rows[row];
        chain.nodes.retain(|other| *other != node);
        for peer in &chain.nodes {
            for pair in [node * count + peer, peer * count + node] {
                self.pairs[pair] = self.pairs[pair].saturating_sub(1);
            }
        }
        self.loads[node] = self.loads[node].saturating_sub(chain.size);
        self.of_node[node].retain(|other| *other != row);
    }

    /// Moves a replica.
    pub(super) fn replace(&mut self, row: usize, from: usize, to: usize) {
        self.leave(row, from);
        self.join(row, to);
        self.rows[row].moves += 1;
    }

    /// Number of chains that two nodes share.
    pub(super) fn pair(&self, one: usize, other: usize) -> u64 {
        u64::from(self.pairs[one * self.ids.len() + other])
    }

    /// Whether two nodes are in one domain that can have only one replica of a chain.
    pub(super) fn are_exclusive(&self, one: usize, other: usize) -> bool {
        let same = |level: usize| self.domains[one][level] == self.domains[other][level];
        one == other || (0..LIMITS).filter(|it| self.caps[*it] == Some(1)).any(same)
    }

    /// Whether `to` can join a chain in place of `without`, such that no domain gets above its limit
    /// or farther above it. Replicas on draining nodes do not count: they leave.
    pub(super) fn fits(&self, row: usize, without: Option<usize>, to: usize) -> bool {
        let nodes = &self.rows[row].nodes;
        if nodes.contains(&to) {
            return false;
        }
        (0..LIMITS).all(|level| {
            let Some(cap) = self.caps[level] else { return true };
            let domain = |node: usize| self.domains[node][level];
            let inside = |node: &&usize| {
                Some(**node) != without
                    && self.counts(**node, level)
                    && domain(**node) == domain(to)
            };
            let stays =
                without.is_some_and(|from| self.counts(from, level) && domain(from) == domain(to));
            stays || (nodes.iter().filter(inside).count() as u32) < cap
        })
    }

    /// Whether a replica on a node counts for a limit. One on a draining node leaves, but the drain
    /// may be cancelled, so that it counts for the limit of its service.
    fn counts(&self, node: usize, level: usize) -> bool {
        level == SERVICE || self.states[node] != Use::Leaving
    }

    /// Replicas of a chain above the limits.
    pub(super) fn excess(&self, nodes: &[usize]) -> u32 {
        let of_level = |level: usize| {
            let Some(cap) = self.caps[level] else { return 0 };
            let domain = |node: &usize| self.domains[*node][level];
            let counted = nodes.iter().filter(|node| self.counts(**node, level));
            let mut domains: Vec<u32> = counted.map(domain).collect();
            domains.sort_unstable();
            let runs = domains.chunk_by(|one, other| one == other);
            runs.map(|run| (run.len() as u32).saturating_sub(cap)).sum()
        };
        (0..LIMITS).map(of_level).sum()
    }

    /// Change of the cost of pairs if `to` joins a chain in place of `from`.
    pub(super) fn pair_change(&self, row: usize, from: Option<usize>, to: usize) -> i64 {
        let peers = self.rows[row].nodes.iter().filter(|peer| Some(**peer) != from);
        peers.map(|peer| self.exchange_cost(*peer, from, to)).sum()
    }

    /// Change of the cost of pairs with one peer if `to` gets a chain of it in place of `from`. The
    /// cost of a pair is the square of its chains, relative to the capacities.
    pub(super) fn exchange_cost(&self, peer: usize, from: Option<usize>, to: usize) -> i64 {
        let joining = (2 * self.pair(to, peer) + 1) * self.costs[to];
        let leaving =
            from.map_or(0, |from| (2 * self.pair(from, peer)).saturating_sub(1) * self.costs[from]);
        (joining as i64 - leaving as i64).saturating_mul(self.costs[peer] as i64)
    }

    /// Relative load of a node with this much more.
    pub(super) fn relative(&self, node: usize, more: u64) -> u64 {
        (self.loads[node] + more) * self.costs[node]
    }
}
