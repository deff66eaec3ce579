//! Which machine and zone every rank runs in: the file that FLYER_TOPOLOGY names.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;
/// Hundreds of bytes a node, thousands of nodes.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Where one rank runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The machine.
    pub node: String,
    /// Its network zone.
    pub zone: String,
    /// The IP address at which others reach it, where one is given.
    pub address: Option<String>,
}

/// The file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The machines in rank order.
    pub nodes: Vec<Place>,
    /// Ranks of each.
    pub ranks_per_node: usize,
    /// One pair of nodes for every border between two zones.
    pub bridges: Vec<[String; 2]>,
}

/// The file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{source_name}: {problem}")]
pub struct TopologyError {
    source_name: String,
    problem: String,
}

#[derive(Deserialize)]
struct Document {
    version: u32,
    ranks_per_node: usize,
    nodes: Vec<Node>,
    #[serde(default)]
    bridge: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Node {
    name: String,
    zone: String,
    #[serde(default)]
    address: Option<String>,
}

impl Topology {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// [`TopologyError`] names the file, the field and the value.
    pub fn load(path: &Path) -> Result<Self, TopologyError> {
        let name = path.display().to_string();
        let wrong = |problem: String| TopologyError { source_name: name.clone(), problem };
        let size = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
        if size > FILE_BYTES_MAX {
            return Err(wrong(format!("{size} bytes are no topology file")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        Self::parse(&text, &name)
    }

    /// Checks the text of a file called `name`.
    ///
    /// # Errors
    /// As for [`Topology::load`].
    pub fn parse(text: &str, name: &str) -> Result<Self, TopologyError> {
        let wrong = |problem: String| TopologyError { source_name: name.to_owned(), problem };
        let read: Document =
            serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if read.version != VERSION {
            return Err(wrong(format!("version: {} is not {VERSION}", read.version)));
        }
        if read.ranks_per_node == 0 || read.nodes.is_empty() {
            let (nodes, ranks) = (read.nodes.len(), read.ranks_per_node);
            return Err(wrong(format!(
                "{nodes} nodes of {ranks} ranks: give at least one of each"
            )));
        }
        let mut zones: HashMap<&str, &str> = HashMap::new();
        for (at, node) in read.nodes.iter().enumerate() {
            if node.name.is_empty() || node.zone.is_empty() {
                return Err(wrong(format!("nodes[{at}]: name and zone are words")));
            }
            if zones.insert(&node.name, &node.zone).is_some() {
                return Err(wrong(format!("nodes[{at}].name: `{}` is there twice", node.name)));
            }
        }
        let ends = read.bridge.unwrap_or_default();
        let (pairs, []) = ends.as_chunks::<2>() else {
            return Err(wrong(format!("bridge: {ends:?} is not two nodes for each bridge")));
        };
        for pair in pairs {
            let [a, b] = pair.each_ref().map(|name| zones.get(name.as_str()));
            if a.is_none() || b.is_none() || a == b {
                return Err(wrong(format!("bridge: {pair:?} are not nodes of two zones")));
            }
        }
        let bridges = pairs.to_vec();
        let nodes = read.nodes.into_iter();
        let nodes = nodes.map(|Node { name, zone, address }| Place { node: name, zone, address });
        Ok(Self { nodes: nodes.collect(), ranks_per_node: read.ranks_per_node, bridges })
    }

    /// The place of every rank of a job of `world_size`, which must be the file's own.
    ///
    /// # Errors
    /// [`TopologyError`].
    pub fn places(&self, world_size: usize, name: &str) -> Result<Vec<Place>, TopologyError> {
        let own = self.nodes.len().saturating_mul(self.ranks_per_node);
        if own != world_size {
            return Err(TopologyError {
                source_name: name.to_owned(),
                problem: format!(
                    "ranks_per_node: {} nodes of {} ranks are {own}, but the job has {world_size} \
                     (WORLD_SIZE); start as many or correct the file",
                    self.nodes.len(),
                    self.ranks_per_node
                ),
            });
        }
        let each = |place: &Place| vec![place.clone(); self.ranks_per_node];
        Ok(self.nodes.iter().flat_map(each).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hfreduce_testing::{cases, changed, changes, edited, edits};
    use proptest::prelude::*;

    fn check(text: &str) -> Result<(), TestCaseError> {
        match Topology::parse(text, "topology.json") {
            Ok(read) => {
                prop_assert!(read.ranks_per_node > 0 && !read.nodes.is_empty());
                let zone = |name: &str| {
                    let mut found = read.nodes.iter().filter(|place| place.node == name);
                    let first = found.next().map(|place| place.zone.clone());
                    first.filter(|zone| !zone.is_empty() && found.next().is_none())
                };
                prop_assert!(read.nodes.iter().all(|place| zone(&place.node).is_some()));
                for [a, b] in &read.bridges {
                    prop_assert!(zone(a).is_some() && zone(b).is_some() && zone(a) != zone(b));
                }
                for world in [0, 1, 2, 4, 8] {
                    if let Ok(places) = read.places(world, "topology.json") {
                        prop_assert_eq!(places.len(), world);
                    }
                }
            }
            Err(error) => prop_assert!(error.to_string().starts_with("topology.json: ")),
        }
        Ok(())
    }

    fn document() -> serde_json::Value {
        serde_json::json!({
            "version": 1,
            "job": "default/gpt",
            "ranks_per_node": 2,
            "nodes": [
                {"name": "a0", "zone": "A", "address": "10.0.0.1"},
                {"name": "b0", "zone": "B"},
            ],
            "bridge": ["a0", "b0"],
        })
    }

    proptest! {
        #![proptest_config(cases(2000))]

        #[test]
        fn a_damaged_file_is_refused_by_name_or_keeps_every_rule(edits in edits()) {
            check(&edited(&document(), &edits))?;
        }

        #[test]
        fn a_garbled_file_too(changes in changes()) {
            let bytes = changed(document().to_string().as_bytes(), &changes);
            check(&String::from_utf8_lossy(&bytes))?;
        }
    }

    #[test]
    fn the_whole_one_is_read() {
        let read = Topology::parse(&document().to_string(), "topology.json").unwrap();
        assert_eq!(read.places(4, "topology.json").unwrap()[3].node, "b0");
        assert_eq!(read.bridges, [["a0".to_owned(), "b0".to_owned()]]);
    }
}
