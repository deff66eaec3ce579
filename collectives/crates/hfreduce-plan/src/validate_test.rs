//! Trees that violate an invariant: `validate` names the invariant.

use crate::tree::{Links, Tree};
use crate::validate::validate;
use crate::{NodePlace, Plan, PlanError};

/// Eight nodes, named `n0` to `n7`.
fn places(zone: fn(usize) -> &'static str) -> Vec<NodePlace> {
    (0..8).map(|node| NodePlace::new(format!("n{node}"), zone(node))).collect()
}

/// A tree of the parent of each node; the root is the first node without one.
fn tree(parents: &[Option<usize>]) -> Tree {
    let mut links: Vec<Links> =
        parents.iter().map(|&parent| Links { parent, children: Vec::new() }).collect();
    for (node, parent) in parents.iter().enumerate() {
        if let Some(links) = parent.and_then(|parent| links.get_mut(parent)) {
            links.children.push(node);
        }
    }
    let root = parents.iter().position(Option::is_none).unwrap_or(0);
    Tree { root, links }
}

fn refused(nodes: &[NodePlace], trees: [Tree; 2]) -> PlanError {
    validate(&Plan { nodes: nodes.to_vec(), trees }).unwrap_err()
}

#[test]
fn a_plan_that_violates_an_invariant_is_refused_with_its_name() {
    let nodes = places(|node| if node < 4 { "A" } else { "B" });
    let plan = Plan::new(&nodes).unwrap();
    let [first, second] = plan.trees.clone();
    assert_eq!(validate(&plan), Ok(()));
    // The same trees over nodes whose zones alternate have too many crossings.
    let mixed = places(|node| if node % 2 == 0 { "A" } else { "B" });
    let error = refused(&mixed, [first.clone(), second.clone()]);
    assert!(matches!(error, PlanError::Crossings { tree: 0, zones: 2, .. }), "{error}");
    assert!(error.to_string().contains("2 zones need 1"), "{error}");

    let other = Plan::with_bridge(&nodes, ("n0", "n7")).unwrap();
    let error = refused(&nodes, [first.clone(), other.trees[1].clone()]);
    assert!(matches!(error, PlanError::TwoBridges { .. }), "{error}");

    let one_zone = places(|_| "A");
    let chain = tree(&(0..8_usize).map(|node| node.checked_sub(1)).collect::<Vec<_>>());
    let error = refused(&one_zone, [chain.clone(), chain]);
    assert!(matches!(error, PlanError::Interior { .. }), "{error}");

    let parents: Vec<_> = first.links.iter().map(|links| links.parent).collect();
    let leaf = (0..8).find(|&node| first.links[node].children.is_empty()).unwrap();
    let cycle: Vec<_> =
        (0..8).map(|node| if node == leaf { Some(leaf) } else { parents[node] }).collect();
    let star: Vec<_> = (0..8_usize).map(|node| (node > 0).then_some(0)).collect();
    for (parents, why) in [
        (star, "more than two children"),
        (cycle, "no path from the root"),
        (vec![Some(1); 8], "no root"),
        (vec![None; 8], "no path from the root"),
        (vec![None; 3], "wrong number of links"),
        ([&parents[..7], &[Some(99)]].concat(), "no path from the root"),
    ] {
        let error = refused(&one_zone, [tree(&parents), second.clone()]);
        assert!(matches!(error, PlanError::Broken { tree: 0, .. }), "{error}");
        assert!(error.to_string().contains(why), "{why}: {error}");
    }
}
