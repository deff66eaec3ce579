//! One tree, and the double binary tree of one zone.

use serde::Serialize;

/// The neighbors of one node in one tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Links {
    /// The node that receives its sum; none at the root.
    pub parent: Option<usize>,
    /// The nodes whose sums it adds, in the order of summation; at most [`crate::CHILDREN_MAX`].
    pub children: Vec<usize>,
}

/// A rooted spanning tree; nodes are indices into the plan's list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tree {
    /// The node that computes the full sum.
    pub root: usize,
    /// The neighbors of every node.
    pub links: Vec<Links>,
}

impl Tree {
    /// The tree that spans `neighbors` (an adjacency list without cycles), rooted at `root`.
    pub(crate) fn hang(neighbors: &[Vec<usize>], root: usize) -> Self {
        let mut links = vec![Links::default(); neighbors.len()];
        for (node, parent) in walk(neighbors, root) {
            links[node].parent = parent;
            if let Some(parent) = parent {
                links[parent].children.push(node);
            }
        }
        // The order of summation must not depend on the order of construction.
        links.iter_mut().for_each(|links| links.children.sort_unstable());
        Self { root, links }
    }

    /// Edges from the root to the deepest leaf.
    pub fn depth(&self) -> usize {
        let mut depth = vec![0; self.links.len()];
        let mut deepest = 0;
        for node in self.from_the_root() {
            for &child in &self.links[node].children {
                depth[child] = depth[node] + 1;
                deepest = deepest.max(depth[child]);
            }
        }
        deepest
    }

    /// Neighbors of `node`: children and parent.
    pub fn degree(&self, node: usize) -> usize {
        self.links
            .get(node)
            .map_or(0, |links| links.children.len() + usize::from(links.parent.is_some()))
    }

    /// All nodes, every parent before its children. Terminates even if the links are broken: at most as many
    /// nodes are listed as exist.
    pub fn from_the_root(&self) -> Vec<usize> {
        let mut order = Vec::with_capacity(self.links.len());
        if self.root < self.links.len() {
            order.push(self.root);
        }
        let mut next = 0;
        while next < order.len() && order.len() <= self.links.len() {
            let children = &self.links[order[next]].children;
            order.extend(children.iter().copied().filter(|&child| child < self.links.len()));
            next += 1;
        }
        order.truncate(self.links.len());
        order
    }
}

/// Breadth-first traversal of an adjacency list: (node, the neighbor it was reached from).
pub(crate) fn walk(neighbors: &[Vec<usize>], start: usize) -> Vec<(usize, Option<usize>)> {
    let mut order = Vec::with_capacity(neighbors.len());
    order.push((start, None));
    let mut next = 0;
    while next < order.len() {
        let (node, from) = order[next];
        order.extend(
            neighbors[node].iter().filter(|&&to| Some(to) != from).map(|&to| (to, Some(node))),
        );
        next += 1;
    }
    order
}

/// The parent of rank `r` in the binary tree over `n` ranks whose root is rank 0.
///
/// With b the lowest set bit of r, the parent is r with b moved one place up, or r without b if that exceeds
/// the end. Odd ranks are leaves, rank 0 has one child, and the depth is at most ceil(log2 n).
fn parent(r: usize, n: usize) -> Option<usize> {
    if r == 0 {
        return None;
    }
    let b = r & r.wrapping_neg();
    let up = (r ^ b) | (b << 1);
    Some(if up < n { up } else { r ^ b })
}

/// The parent of rank `r` in tree 0 or tree 1 of the double binary tree over `n` ranks.
///
/// Tree 1 is the mirror image for even n, and tree 0 shifted by one rank for odd n, so that the ranks with
/// children (even ones in tree 0) are odd in tree 1. Powers of two are not a special case.
pub(crate) fn double_parent(tree: usize, r: usize, n: usize) -> Option<usize> {
    match (tree, n.is_multiple_of(2)) {
        (0, _) => parent(r, n),
        (_, true) => parent(n - 1 - r, n).map(|p| n - 1 - p),
        (_, false) => parent((r + n - 1) % n, n).map(|p| (p + 1) % n),
    }
}

/// The parent of rank `r` in a zone of `n` ranks that is joined to another zone at its rank 0.
///
/// Rank 0 is above the roots of both trees with one neighbor in each, so that two places remain for the two
/// crossings and the joined trees stay shallow. An odd zone is a double binary tree of the other n - 1 ranks
/// with rank 0 on top. In an even zone rank 0 already is tree 0's root, and in tree 1 it moves from a leaf to
/// the top.
pub(crate) fn bridged_parent(tree: usize, r: usize, n: usize) -> Option<usize> {
    match (r, n.is_multiple_of(2)) {
        (0, _) => None,
        (_, false) => Some(double_parent(tree, r - 1, n - 1).map_or(0, |p| p + 1)),
        (_, true) => Some(double_parent(tree, r, n).unwrap_or(0)),
    }
}
