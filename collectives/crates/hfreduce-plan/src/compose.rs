//! Construction of the two trees from a list of nodes: a double binary tree in each zone, zones joined into a
//! chain.

use std::collections::HashMap;

use crate::tree::{Tree, bridged_parent, double_parent, walk};
use crate::validate::validate;
use crate::{DEGREE_MAX, NodePlace, Plan, PlanError};

/// Adjacency lists of both trees during construction.
struct Draft {
    neighbors: [Vec<Vec<usize>>; 2],
}

impl Draft {
    fn new(nodes: usize) -> Self {
        Self { neighbors: [vec![Vec::new(); nodes], vec![Vec::new(); nodes]] }
    }

    fn join(&mut self, tree: usize, a: usize, b: usize) {
        self.neighbors[tree][a].push(b);
        self.neighbors[tree][b].push(a);
    }

    fn degree(&self, node: usize) -> usize {
        self.neighbors.iter().map(|tree| tree[node].len()).sum()
    }

    /// The nodes of `zone` that carry the next crossing of tree 0 and of tree 1.
    ///
    /// The first node of a zone has two free places and takes both crossings. A zone in the middle of a chain
    /// needs two crossings in each tree: its second border uses the nodes closest to the first one with a free
    /// place, a single node for both trees if possible.
    fn crossing_ends(&self, zone: &[usize]) -> [usize; 2] {
        let nearest = |tree: usize, places: usize, excluded: Option<usize>| {
            walk(&self.neighbors[tree], zone[0]).into_iter().map(|(node, _)| node).find(|node| {
                zone.contains(node)
                    && Some(*node) != excluded
                    && self.degree(*node) + places <= DEGREE_MAX
            })
        };
        if let Some(node) = nearest(0, 2, None) {
            return [node, node];
        }
        // Every zone has room for two crossings in each tree; otherwise `validate` refuses the plan.
        let first = nearest(0, 1, None).unwrap_or(zone[0]);
        [first, nearest(1, 1, Some(first)).unwrap_or(first)]
    }
}

pub(crate) fn compose(
    nodes: &[NodePlace],
    bridge: Option<(&str, &str)>,
) -> Result<Plan, PlanError> {
    check_names(nodes)?;
    let mut zones = zones_of(nodes);
    match (bridge, zones.as_mut_slice()) {
        (Some(pair), _) => put_bridge_in_place(nodes, &mut zones, pair)?,
        // The first zone's last node and the second one's first are neighbors in the list.
        (None, [first, _, ..]) => first.rotate_right(1),
        (None, _) => {}
    }
    let zone_parent = if zones.len() == 1 { double_parent } else { bridged_parent };
    let mut draft = Draft::new(nodes.len());
    for zone in &zones {
        for tree in 0..2 {
            for rank in 0..zone.len() {
                if let Some(parent) = zone_parent(tree, rank, zone.len()) {
                    draft.join(tree, zone[rank], zone[parent]);
                }
            }
        }
    }
    for pair in zones.windows(2) {
        let (near, far) = (draft.crossing_ends(&pair[0]), draft.crossing_ends(&pair[1]));
        for tree in 0..2 {
            draft.join(tree, near[tree], far[tree]);
        }
    }
    let root = |tree: usize| match zones.as_slice() {
        [zone] => root_of(tree, zone),
        _ => central(&draft.neighbors[tree]),
    };
    let trees = [0, 1].map(|tree| Tree::hang(&draft.neighbors[tree], root(tree)));
    let plan = Plan { nodes: nodes.to_vec(), trees };
    validate(&plan)?;
    Ok(plan)
}

fn root_of(tree: usize, zone: &[usize]) -> usize {
    let root = (0..zone.len()).find(|&rank| double_parent(tree, rank, zone.len()).is_none());
    root.map_or(zone[0], |rank| zone[rank])
}

fn check_names(nodes: &[NodePlace]) -> Result<(), PlanError> {
    if nodes.is_empty() {
        return Err(PlanError::Empty);
    }
    let mut indices = HashMap::with_capacity(nodes.len());
    for (index, place) in nodes.iter().enumerate() {
        if place.name.is_empty() {
            return Err(PlanError::Unnamed { index });
        }
        if let Some(first) = indices.insert(place.name.as_str(), index) {
            return Err(PlanError::Duplicate { name: place.name.clone(), first, second: index });
        }
    }
    Ok(())
}

/// The machines of each zone in list order; zones in the order in which they first appear.
fn zones_of(nodes: &[NodePlace]) -> Vec<Vec<usize>> {
    let mut position = HashMap::new();
    let mut zones: Vec<Vec<usize>> = Vec::new();
    for (index, place) in nodes.iter().enumerate() {
        let zone = *position.entry(place.zone.as_str()).or_insert_with(|| {
            zones.push(Vec::new());
            zones.len() - 1
        });
        zones[zone].push(index);
    }
    zones
}

/// Moves the named nodes to the front of their zones: the first rank has free neighbor places.
fn put_bridge_in_place(
    nodes: &[NodePlace],
    zones: &mut [Vec<usize>],
    (a, b): (&str, &str),
) -> Result<(), PlanError> {
    let refuse = |why| PlanError::Bridge { a: a.into(), b: b.into(), why };
    if zones.len() != 2 {
        return Err(refuse("the nodes do not lie in exactly two zones"));
    }
    let mut ends = [None, None];
    for name in [a, b] {
        let Some(index) = nodes.iter().position(|place| place.name == name) else {
            return Err(refuse("one of them is not in the list"));
        };
        let zone = usize::from(!zones[0].contains(&index));
        if ends[zone].replace(index).is_some() {
            return Err(refuse("both lie in the same zone"));
        }
    }
    for (zone, end) in zones.iter_mut().zip(ends.into_iter().flatten()) {
        zone.retain(|&node| node != end);
        zone.insert(0, end);
    }
    Ok(())
}

/// The node with at most two neighbors and the smallest distance to the farthest node; the first of several.
///
/// The distance to the farthest node of a tree is the distance to the farther end of any longest path.
fn central(neighbors: &[Vec<usize>]) -> usize {
    let last = |start| walk(neighbors, start).last().map_or(start, |&(node, _)| node);
    let one_end = last(0);
    let (from_one, from_other) =
        (distances(neighbors, one_end), distances(neighbors, last(one_end)));
    (0..neighbors.len())
        .filter(|&node| neighbors[node].len() <= crate::CHILDREN_MAX)
        .min_by_key(|&node| from_one[node].max(from_other[node]))
        .unwrap_or(one_end)
}

fn distances(neighbors: &[Vec<usize>], start: usize) -> Vec<usize> {
    let mut distance = vec![0; neighbors.len()];
    for (node, from) in walk(neighbors, start) {
        distance[node] = from.map_or(0, |from| distance[from] + 1);
    }
    distance
}
