//! Routes of chunks through the trees, as seen from one node.
//!
//! A tree is an undirected graph without cycles, so any node can serve as its root: partial sums
//! travel toward the root, results travel away from it. An allreduce uses the root of the plan, a
//! broadcast or reduce the node of its root rank. Node degrees, and therefore bandwidth, do not
//! change.
//!
//! ```text
//!        up (sums)                 down (results)
//!   left ──┐                         ┌──▶ left
//!          ├─▶ me ──▶ toward   toward ──▶ me
//!  right ──┘                         └──▶ right
//! ```

use hfreduce_plan::Plan;

/// Maximum number of neighbors of a node in one tree: its parent and two children.
pub const NEIGHBOURS_MAX: usize = 3;

/// The direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// A partial sum on its way to the root of the tree.
    Up = 0,
    /// A result on its way from the root.
    Down = 1,
}

/// The route of one chunk through one node, by link number.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Flow {
    /// The link toward the root; none at the root.
    pub toward: Option<usize>,
    /// The other links of this tree, in the order of summation.
    pub away: Vec<usize>,
}

/// All routes through one node.
#[derive(Clone, Debug)]
pub struct Flows {
    peers: Vec<usize>,
    roots: [usize; 2],
    /// `[tree][root node]`
    flows: [Vec<Flow>; 2],
}

impl Flows {
    /// The routes through node `me` of `plan`. Links are numbered by ascending peer node.
    pub fn new(plan: &Plan, me: usize) -> Self {
        let neighbors: Vec<Vec<usize>> = (0..2).map(|tree| neighbors(plan, tree, me)).collect();
        let mut peers: Vec<usize> = neighbors.iter().flatten().copied().collect();
        peers.sort_unstable();
        peers.dedup();
        let count = plan.nodes().len();
        let flows = [0, 1].map(|tree| {
            let toward = toward(plan, tree, me, count);
            (0..count)
                .map(|root| {
                    let link = |peer: &usize| peers.binary_search(peer).unwrap_or(usize::MAX);
                    Flow {
                        toward: toward[root].as_ref().map(link),
                        away: neighbors[tree]
                            .iter()
                            .filter(|peer| Some(**peer) != toward[root])
                            .map(link)
                            .collect(),
                    }
                })
                .collect()
        });
        Self { peers, roots: [0, 1].map(|tree| plan.trees()[tree].root), flows }
    }

    /// The neighbor nodes, by link number.
    #[inline]
    pub fn peers(&self) -> &[usize] {
        &self.peers
    }

    /// The route in `tree` with its root at `root` (default: the root of the plan).
    #[inline]
    pub fn flow(&self, tree: usize, root: Option<usize>) -> &Flow {
        &self.flows[tree][root.unwrap_or(self.roots[tree])]
    }

    /// True if this node is the root of the tree.
    #[inline]
    pub fn is_root(&self, tree: usize, root: Option<usize>) -> bool {
        self.flow(tree, root).toward.is_none()
    }
}

/// The neighbors of `me`: children in the plan's order of summation, then the parent.
fn neighbors(plan: &Plan, tree: usize, me: usize) -> Vec<usize> {
    let Some(links) = plan.links(tree, me) else { return Vec::new() };
    links.children.iter().copied().chain(links.parent).collect()
}

/// For every node, the neighbor of `me` on the way to it (none for `me` itself).
fn toward(plan: &Plan, tree: usize, me: usize, count: usize) -> Vec<Option<usize>> {
    let parent = plan.links(tree, me).and_then(|links| links.parent);
    let mut toward = vec![parent; count];
    toward[me] = None;
    let mut reached: Vec<(usize, usize)> = plan
        .links(tree, me)
        .map(|links| links.children.iter().map(|child| (*child, *child)).collect())
        .unwrap_or_default();
    while let Some((node, through)) = reached.pop() {
        toward[node] = Some(through);
        if let Some(links) = plan.links(tree, node) {
            reached.extend(links.children.iter().map(|child| (*child, through)));
        }
    }
    toward
}

#[cfg(test)]
mod tests {
    use super::*;
    use hfreduce_plan::NodePlace;

    fn plan(nodes: usize) -> Plan {
        let places: Vec<NodePlace> = (0..nodes)
            .map(|node| {
                NodePlace::new(format!("n{node}"), if node * 2 < nodes { "A" } else { "B" })
            })
            .collect();
        Plan::new(&places).unwrap()
    }

    #[test]
    fn every_node_is_reached_once_from_every_root() {
        for nodes in 1..20 {
            let plan = plan(nodes);
            let flows: Vec<Flows> = (0..nodes).map(|me| Flows::new(&plan, me)).collect();
            for tree in 0..2 {
                for root in 0..nodes {
                    let mut reached = vec![false; nodes];
                    let mut next = vec![root];
                    while let Some(node) = next.pop() {
                        assert!(!reached[node], "{nodes} nodes, tree {tree}, root {root}");
                        reached[node] = true;
                        let flow = flows[node].flow(tree, Some(root));
                        assert_eq!(flow.toward.is_none(), node == root);
                        for link in &flow.away {
                            let peer = flows[node].peers()[*link];
                            let back = flows[peer].flow(tree, Some(root)).toward.unwrap();
                            assert_eq!(flows[peer].peers()[back], node);
                            next.push(peer);
                        }
                    }
                    assert!(reached.iter().all(|r| *r));
                }
            }
        }
    }
}
