//! The invariants of every plan, checked on the trees alone, independently of their construction.

use std::collections::BTreeSet;

use crate::{CHILDREN_MAX, DEGREE_MAX, Plan, PlanError, Tree};

pub(crate) fn validate(plan: &Plan) -> Result<(), PlanError> {
    if plan.nodes.is_empty() {
        return Err(PlanError::Empty);
    }
    for (index, tree) in plan.trees.iter().enumerate() {
        spans(plan, index, tree)?;
    }
    let zones = plan.nodes.iter().map(|place| &place.zone).collect::<BTreeSet<_>>().len();
    crossings(plan, zones)?;
    neighbors(plan)
}

fn spans(plan: &Plan, index: usize, tree: &Tree) -> Result<(), PlanError> {
    let count = plan.nodes.len();
    let broken = |node: usize, why| PlanError::Broken {
        tree: index,
        node: plan.nodes.get(node).map_or_else(|| node.to_string(), |place| place.name.clone()),
        why,
    };
    if tree.links.len() != count {
        return Err(broken(tree.links.len(), "wrong number of links"));
    }
    if tree.links.get(tree.root).is_none_or(|links| links.parent.is_some()) {
        return Err(broken(tree.root, "no root, or a parent above it,"));
    }
    for (node, links) in tree.links.iter().enumerate() {
        if links.children.len() > CHILDREN_MAX {
            return Err(broken(node, "more than two children"));
        }
        for &child in &links.children {
            if tree.links.get(child).is_none_or(|links| links.parent != Some(node)) {
                return Err(broken(node, "a child with another parent"));
            }
        }
    }
    // Parents and children agree and the root has no parent: it remains to check that every node is reached.
    let mut reached = vec![false; count];
    tree.from_the_root().into_iter().for_each(|node| reached[node] = true);
    match (0..count).find(|&node| !reached[node]) {
        Some(node) => Err(broken(node, "no path from the root")),
        None => Ok(()),
    }
}

fn crossings(plan: &Plan, zones: usize) -> Result<(), PlanError> {
    for (tree, crossings) in plan.crossings().into_iter().enumerate() {
        if crossings != zones - 1 {
            return Err(PlanError::Crossings { tree, crossings, zones });
        }
    }
    if zones == 2 {
        let [first, second] = [pair_of(plan, 0), pair_of(plan, 1)];
        if first != second {
            let name = |pair: BTreeSet<String>| pair.into_iter().collect::<Vec<_>>().join(" and ");
            return Err(PlanError::TwoBridges { first: name(first), second: name(second) });
        }
    }
    Ok(())
}

fn pair_of(plan: &Plan, tree: usize) -> BTreeSet<String> {
    let ends = plan.crossings_of(tree).into_iter().flat_map(|edge| [edge.parent, edge.child]);
    ends.filter_map(|node| plan.nodes.get(node)).map(|place| place.name.clone()).collect()
}

fn neighbors(plan: &Plan) -> Result<(), PlanError> {
    let crossings = (0..2).flat_map(|tree| plan.crossings_of(tree));
    let bridges: BTreeSet<usize> = crossings.flat_map(|edge| [edge.parent, edge.child]).collect();
    for (node, place) in plan.nodes.iter().enumerate() {
        let name = || place.name.clone();
        let degree = plan.degree(node);
        if degree > DEGREE_MAX {
            return Err(PlanError::Degree { node: name(), degree });
        }
        let interior = plan.trees.iter().filter(|tree| tree.degree(node) >= 2).count();
        if interior > 1 && !bridges.contains(&node) {
            return Err(PlanError::Interior { node: name() });
        }
    }
    Ok(())
}
