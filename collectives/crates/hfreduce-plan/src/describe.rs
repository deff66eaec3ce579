//! A plan as JSON: for logs, for `flyer show`, for other languages.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Bridging, NodePlace, Plan, PlanError};

const VERSION: u32 = 1;

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
        "version": VERSION,
        "nodes": plan.nodes,
        "bridging": plan.bridging,
        "crossings": plan.crossings(),
        "trees": trees,
    })
}

/// The fields that a plan is rebuilt from; the other fields of a description follow from them.
#[derive(Deserialize)]
struct Description {
    version: u32,
    nodes: Vec<NodePlace>,
    bridging: Bridging,
    trees: [Parents; 2],
}

#[derive(Deserialize)]
struct Parents {
    parents: Vec<Option<String>>,
}

pub(crate) fn read(description: &Value) -> Result<Plan, PlanError> {
    let refuse = |why: String| PlanError::Description { why };
    let read: Description =
        Description::deserialize(description).map_err(|error| refuse(error.to_string()))?;
    if read.version != VERSION {
        return Err(refuse(format!("version {} is not {VERSION}", read.version)));
    }
    let place: HashMap<&str, usize> =
        read.nodes.iter().enumerate().map(|(at, node)| (node.name.as_str(), at)).collect();
    let index = |name: &Option<String>| match name {
        None => Ok(None),
        Some(name) => match place.get(name.as_str()) {
            Some(&at) => Ok(Some(at)),
            None => Err(refuse(format!("parent `{name}` is not one of its nodes"))),
        },
    };
    let mut parents = [Vec::new(), Vec::new()];
    for (parents, tree) in parents.iter_mut().zip(&read.trees) {
        *parents = tree.parents.iter().map(index).collect::<Result<_, _>>()?;
    }
    Plan::from_parents(&read.nodes, [&parents[0], &parents[1]], read.bridging)
}
