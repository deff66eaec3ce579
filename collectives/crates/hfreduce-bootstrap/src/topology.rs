//! Topology file: node and zone of every rank, written by the scheduler and named in FLYER_TOPOLOGY.
//!
//! Without a file, ranks with equal host names share a node, and all nodes are in the zone
//! FLYER_ZONE. Nodes with different names count as different machines, even on one host.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

const VERSION: u64 = 1;
/// Hundreds of bytes per node, thousands of nodes.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Where one rank runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The node.
    pub node: String,
    /// Its network zone.
    pub zone: String,
    /// The IP address at which other nodes reach it, if the file has one.
    pub address: Option<String>,
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "node {} in zone {}", self.node, self.zone)?;
        self.address.iter().try_for_each(|address| write!(formatter, " at {address}"))
    }
}

/// Content of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The nodes in rank order.
    pub nodes: Vec<Place>,
    /// Number of ranks of each node.
    pub ranks_per_node: usize,
    /// One pair of nodes for every border between two zones.
    pub bridges: Vec<[String; 2]>,
    /// Name of the file.
    pub source: String,
}

/// An invalid topology file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {field}: {problem}")]
pub struct TopologyError {
    /// The file.
    pub file: String,
    /// The field, or `file`.
    pub field: String,
    /// Value and expectation.
    pub problem: String,
}

struct Reader<'a>(&'a str);

impl Reader<'_> {
    fn error(&self, field: impl Into<String>, problem: impl Into<String>) -> TopologyError {
        TopologyError { file: self.0.to_owned(), field: field.into(), problem: problem.into() }
    }

    fn invalid(&self, field: impl Into<String>, value: &Value, expected: &str) -> TopologyError {
        self.error(field, format!("{value} is not {expected}"))
    }

    fn nodes(&self, value: &Value) -> Result<Vec<Place>, TopologyError> {
        let list = value.as_array().filter(|list| !list.is_empty());
        let list =
            list.ok_or_else(|| self.invalid("nodes", value, "a list of at least one node"))?;
        let mut places: Vec<Place> = Vec::with_capacity(list.len());
        let mut indices: HashMap<&str, usize> = HashMap::new();
        for (index, node) in list.iter().enumerate() {
            let field = |name: &str| format!("nodes[{index}]{name}");
            if !node.is_object() {
                return Err(self.invalid(field(""), node, "an object with name and zone"));
            }
            let text = |name: &str, expected: &str| {
                let text = node[name].as_str().filter(|text| !text.is_empty());
                text.ok_or_else(|| self.invalid(field(&format!(".{name}")), &node[name], expected))
            };
            let name = text("name", "a name")?;
            let zone = text("zone", "a name")?.to_owned();
            let address = match &node["address"] {
                Value::Null => None,
                _ => Some(text("address", "an IP address")?.to_owned()),
            };
            if let Some(first) = indices.insert(name, index) {
                let expected = format!("a name other than that of nodes[{first}]");
                return Err(self.invalid(field(".name"), &node["name"], &expected));
            }
            places.push(Place { node: name.to_owned(), zone, address });
        }
        Ok(places)
    }

    fn bridges(&self, value: &Value, nodes: &[Place]) -> Result<Vec<[String; 2]>, TopologyError> {
        if value.is_null() {
            return Ok(Vec::new());
        }
        let ends =
            value.as_array().filter(|ends| ends.len().is_multiple_of(2)).ok_or_else(|| {
                self.invalid("bridge", value, "a list of node names, two for each bridge")
            })?;
        let zones: HashMap<&str, &str> =
            nodes.iter().map(|place| (place.node.as_str(), place.zone.as_str())).collect();
        let mut bridges = Vec::with_capacity(ends.len() / 2);
        for pair in ends.as_chunks::<2>().0 {
            let zone = |end: &Value| {
                let zone = end.as_str().and_then(|name| zones.get(name));
                zone.ok_or_else(|| self.invalid("bridge", end, "the name of a node in `nodes`"))
            };
            let [a, b] = pair;
            let shared = zone(a)?;
            if shared == zone(b)? {
                let expected = format!("a pair of nodes of two zones: both are in {shared}");
                return Err(self.invalid("bridge", &Value::from(pair.to_vec()), &expected));
            }
            bridges.push([a, b].map(|end| end.as_str().unwrap_or_default().to_owned()));
        }
        Ok(bridges)
    }
}

impl Topology {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// [`TopologyError`] names the file, the field and the value.
    pub fn load(path: &Path) -> Result<Self, TopologyError> {
        let name = path.display().to_string();
        let reader = Reader(&name);
        let unreadable =
            |error: std::io::Error| reader.error("file", format!("cannot be read: {error}"));
        let size = std::fs::metadata(path).map_err(unreadable)?.len();
        if size > FILE_BYTES_MAX {
            let problem = format!("has {size} bytes, expected at most {FILE_BYTES_MAX}");
            return Err(reader.error("file", problem));
        }
        Self::parse(&std::fs::read_to_string(path).map_err(unreadable)?, &name)
    }

    /// Checks the text of a file called `name`.
    ///
    /// # Errors
    /// As for [`Topology::load`].
    pub fn parse(text: &str, name: &str) -> Result<Self, TopologyError> {
        let reader = Reader(name);
        let document: Value = serde_json::from_str(text)
            .map_err(|error| reader.error("file", format!("is not JSON: {error}")))?;
        if !document.is_object() {
            return Err(reader.error("file", "is not a JSON object"));
        }
        let version = &document["version"];
        if version.as_u64() != Some(VERSION) {
            return Err(reader.invalid("version", version, &VERSION.to_string()));
        }
        let ranks = &document["ranks_per_node"];
        let ranks_per_node = ranks
            .as_u64()
            .filter(|ranks| *ranks > 0)
            .ok_or_else(|| reader.invalid("ranks_per_node", ranks, "a whole number above 0"))?
            as usize;
        let nodes = reader.nodes(&document["nodes"])?;
        let bridges = reader.bridges(&document["bridge"], &nodes)?;
        Ok(Self { nodes, ranks_per_node, bridges, source: name.to_owned() })
    }

    /// Number of ranks that the file describes.
    pub fn world_size(&self) -> usize {
        self.nodes.len().saturating_mul(self.ranks_per_node)
    }

    /// The places of `ranks` in a job of `world_size`, which must be that of the file.
    ///
    /// # Errors
    /// [`TopologyError`] if the sizes differ or a rank is not below them.
    pub fn places(
        &self,
        ranks: impl IntoIterator<Item = u32>,
        world_size: usize,
    ) -> Result<Vec<Place>, TopologyError> {
        let own = self.world_size();
        if own != world_size {
            let problem = format!(
                "{} nodes of {} ranks are {own}, but the job has {world_size} (WORLD_SIZE); start \
                 {own} ranks or correct the file",
                self.nodes.len(),
                self.ranks_per_node
            );
            return Err(Reader(&self.source).error("ranks_per_node", problem));
        }
        let places = ranks.into_iter().map(|rank| {
            let problem = format!("rank {rank} is not below {own}");
            let place = self.place(rank).cloned();
            place.ok_or_else(|| Reader(&self.source).error("ranks_per_node", problem))
        });
        places.collect()
    }

    /// The place of a rank of the job; none if the file has fewer ranks.
    pub fn place(&self, rank: u32) -> Option<&Place> {
        self.nodes.get(rank as usize / self.ranks_per_node)
    }

    /// The bridge between ranks at `places`, if they are in two zones and have both of its ends.
    pub fn bridge(&self, places: &[Place]) -> Option<(String, String)> {
        let nodes: BTreeSet<&str> = places.iter().map(|place| place.node.as_str()).collect();
        let zones: BTreeSet<&str> = places.iter().map(|place| place.zone.as_str()).collect();
        let mut bridges =
            self.bridges.iter().filter(|ends| ends.iter().all(|end| nodes.contains(end.as_str())));
        match (bridges.next(), bridges.next(), zones.len()) {
            (Some([a, b]), None, 2) => Some((a.clone(), b.clone())),
            _ => None,
        }
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
                    let mut places = read.nodes.iter().filter(|place| place.node == name);
                    let first = places.next().map(|place| place.zone.clone());
                    first.filter(|zone| !zone.is_empty() && places.next().is_none())
                };
                prop_assert!(read.nodes.iter().all(|place| zone(&place.node).is_some()));
                for [a, b] in &read.bridges {
                    prop_assert!(zone(a).is_some() && zone(b).is_some() && zone(a) != zone(b));
                }
                for world in [0, 1, 2, 4, 8] {
                    if let Ok(places) = read.places(0..world as u32, world) {
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
        fn a_garbled_file_is_refused_by_name_or_keeps_every_rule(changes in changes()) {
            let bytes = changed(document().to_string().as_bytes(), &changes);
            check(&String::from_utf8_lossy(&bytes))?;
        }
    }

    #[test]
    fn a_complete_file_is_read() {
        let read = Topology::parse(&document().to_string(), "topology.json").unwrap();
        assert_eq!(read.places([3], 4).unwrap()[0].node, "b0");
        assert_eq!(read.bridges, [["a0".to_owned(), "b0".to_owned()]]);
    }

    #[test]
    fn a_group_has_a_bridge_if_it_spans_two_zones_and_has_both_ends() {
        let node = |name: &str, zone: &str| serde_json::json!({"name": name, "zone": zone});
        let nodes = [node("a0", "A"), node("a1", "A"), node("b0", "B"), node("c0", "C")];
        let mut fields = document();
        fields["nodes"] = nodes.to_vec().into();
        fields["bridge"] = vec!["a0", "b0", "b0", "c0"].into();
        let file = Topology::parse(&fields.to_string(), "t.json").unwrap();
        let bridge = |nodes: &[usize]| {
            let places: Vec<_> = nodes.iter().map(|node| file.nodes[*node].clone()).collect();
            file.bridge(&places)
        };
        let pair = |a: &str, b: &str| Some((a.to_owned(), b.to_owned()));
        assert_eq!(bridge(&[0, 0, 1, 2]), pair("a0", "b0"));
        assert_eq!(bridge(&[2, 3]), pair("b0", "c0"));
        for nodes in [&[0, 1][..], &[1, 2], &[0, 2, 3], &[]] {
            assert_eq!(bridge(nodes), None);
        }
    }

    #[test]
    fn a_bad_field_is_named_with_its_value() {
        for (field, value, message) in [
            ("version", "2", "version: 2 is not 1"),
            ("version", "true", "version: true is not 1"),
            ("ranks_per_node", "0", "ranks_per_node: 0 is not a whole number above 0"),
            ("ranks_per_node", "true", "ranks_per_node: true is not"),
            ("nodes", "[]", "nodes: [] is not a list of at least one node"),
            ("nodes", r#"["a0"]"#, r#"nodes[0]: "a0" is not an object"#),
            ("nodes", r#"[{"zone": "A"}]"#, "nodes[0].name: null is not a name"),
            ("nodes", r#"[{"name": "a0", "zone": 7}]"#, "nodes[0].zone: 7 is not a name"),
            (
                "nodes",
                r#"[{"name": "a", "zone": "A"}, {"name": "a", "zone": "A"}]"#,
                r#"nodes[1].name: "a" is not a name other than that of nodes[0]"#,
            ),
            ("bridge", r#""a0""#, r#"bridge: "a0" is not a list of node names"#),
            ("bridge", r#"["a0", "z9"]"#, r#"bridge: "z9" is not the name of a node"#),
            ("bridge", r#"["a0", "a0"]"#, "a pair of nodes of two zones: both are in A"),
            ("bridge", r#"["a0"]"#, "two for each bridge"),
            ("bridge", r#"[["a0"], "b0"]"#, r#"bridge: ["a0"] is not the name of a node"#),
            ("nodes", r#"[{"name": "\ud800", "zone": "A"}]"#, "file: is not JSON"),
        ] {
            let mut fields = document();
            fields[field] = "HERE".into();
            let text = fields.to_string().replace(r#""HERE""#, value);
            let error = Topology::parse(&text, "t.json").unwrap_err().to_string();
            assert!(error.starts_with("t.json: ") && error.contains(message), "{error}");
        }
    }

    #[test]
    fn other_documents_are_refused() {
        for text in ["", "{", "[1]", "null", r#""x""#, &"[".repeat(100_000)] {
            let error = Topology::parse(text, "t.json").unwrap_err().to_string();
            assert!(error.starts_with("t.json: file: "), "{error}");
        }
        let error = Topology::load(Path::new("/absent.json")).unwrap_err().to_string();
        assert!(error.starts_with("/absent.json: file: cannot be read"), "{error}");
    }

    #[test]
    fn a_job_of_another_size_is_refused() {
        let topology = Topology::parse(&document().to_string(), "t.json").unwrap();
        let error = topology.places([0], 5).unwrap_err().to_string();
        assert!(error.starts_with("t.json: ranks_per_node: 2 nodes of 2 ranks are 4"), "{error}");
        assert!(error.contains("the job has 5 (WORLD_SIZE)"), "{error}");
    }
}
