//! A plan as JSON: for logs, for `flyer show`, for other languages.

use serde_json::{Value, json};

use crate::Plan;

pub(crate) fn describe(plan: &Plan) -> Value {
    let name = |node: usize| plan.nodes.get(node).map(|place| place.name.as_str());
    let trees: Vec<Value> = plan
        .trees
        .iter()
        .enumerate()
        .map(|(index, tree)| {
            let parents: Vec<_> =
                tree.links.iter().map(|links| links.parent.and_then(name)).collect();
            let crossings: Vec<_> = plan
                .crossings_of(index)
                .iter()
                .map(|edge| json!([name(edge.parent), name(edge.child)]))
                .collect();
            json!({
                "root": name(tree.root),
                "parents": parents,
                "depth": tree.depth(),
                "crossings": crossings,
            })
        })
        .collect();
    json!({
        "version": 1,
        "nodes": plan.nodes,
        "crossings": plan.crossings(),
        "trees": trees,
    })
}
