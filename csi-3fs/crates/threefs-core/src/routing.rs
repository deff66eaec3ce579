//! Routing information published by mgmtd: nodes, chains with target states, chain tables, moves.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{
    ChainId, ChainVersion, ClusterId, NodeId, RoutingVersion, TableId, TableVersion, TargetId,
};
use crate::location::Location;

/// State of a target in its chain, decided and published by mgmtd only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PublicState {
    /// Has all data; takes reads and writes.
    Serving,
    /// One of the targets that served when the chain lost all of them together: any of them, and no
    /// other, can restore the chain.
    LastSrv,
    /// Takes writes and is being synced by its predecessor; takes no reads.
    Syncing,
    /// Alive, waiting to be synced.
    Waiting,
    /// Dead or unusable.
    Offline,
}

impl fmt::Display for PublicState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Serving => "SERVING",
            Self::LastSrv => "LASTSRV",
            Self::Syncing => "SYNCING",
            Self::Waiting => "WAITING",
            Self::Offline => "OFFLINE",
        })
    }
}

/// A member of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChainTarget {
    /// The target.
    pub target: TargetId,
    /// The node that holds it.
    pub node: NodeId,
    /// Its state.
    pub state: PublicState,
}

/// An ordered list of replicas; the first SERVING one is the head, the last SERVING one the tail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chain {
    /// Its id.
    pub id: ChainId,
    /// Increases by one with each change.
    pub version: ChainVersion,
    /// SERVING, LASTSRV, SYNCING, WAITING, OFFLINE, in this order.
    pub targets: Vec<ChainTarget>,
}

impl Chain {
    /// A new, empty chain. Its first target is LASTSRV, the others OFFLINE, so that it starts by
    /// the same rules as after a loss of power of all nodes: no target serves before it has proven
    /// that it may.
    #[must_use]
    pub fn create(id: ChainId, targets: &[(TargetId, NodeId)]) -> Self {
        let targets = targets
            .iter()
            .enumerate()
            .map(|(position, &(target, node))| ChainTarget {
                target,
                node,
                state: if position == 0 { PublicState::LastSrv } else { PublicState::Offline },
            })
            .collect();
        Self { id, version: ChainVersion(1), targets }
    }

    /// The member with `target`, if it belongs to this chain.
    #[must_use]
    pub fn place(&self, target: TargetId) -> Option<&ChainTarget> {
        self.targets.iter().find(|place| place.target == target)
    }

    /// State of `target`, if it belongs to this chain.
    #[must_use]
    pub fn state_of(&self, target: TargetId) -> Option<PublicState> {
        self.place(target).map(|place| place.state)
    }

    /// The targets that take reads, head first.
    pub fn serving(&self) -> impl DoubleEndedIterator<Item = &ChainTarget> {
        self.targets.iter().filter(|place| place.state == PublicState::Serving)
    }

    /// The first serving target, which takes the clients' updates.
    #[must_use]
    pub fn head(&self) -> Option<&ChainTarget> {
        self.serving().next()
    }

    /// The last serving target.
    #[must_use]
    pub fn tail(&self) -> Option<&ChainTarget> {
        self.serving().next_back()
    }

    /// The target that `target` forwards to: the next one that is SERVING or SYNCING.
    #[must_use]
    pub fn successor(&self, target: TargetId) -> Option<&ChainTarget> {
        self.writers().skip_while(|place| place.target != target).nth(1)
    }

    /// The target that forwards to `target`: the preceding one that is SERVING or SYNCING.
    #[must_use]
    pub fn predecessor(&self, target: TargetId) -> Option<&ChainTarget> {
        let mut before = None;
        for place in self.writers() {
            if place.target == target {
                return before;
            }
            before = Some(place);
        }
        None
    }

    /// Whether all targets are SERVING.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.targets.iter().all(|place| place.state == PublicState::Serving)
    }

    fn writers(&self) -> impl Iterator<Item = &ChainTarget> {
        self.targets
            .iter()
            .filter(|place| matches!(place.state, PublicState::Serving | PublicState::Syncing))
    }
}

/// A move of one replica of one chain to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// The chain; a chain has at most one move at a time.
    pub chain: ChainId,
    /// The target that leaves.
    pub source: TargetId,
    /// The target that takes its place.
    pub destination: TargetId,
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} moves to {}", self.chain, self.source, self.destination)
    }
}

impl Move {
    /// Whether all targets but the source serve, so that it is no longer needed.
    pub(crate) fn source_is_replaced(&self, chain: &Chain) -> bool {
        chain.place(self.destination).is_some()
            && chain
                .targets
                .iter()
                .all(|place| place.target == self.source || place.state == PublicState::Serving)
    }

    /// Whether `target` is to stop serving.
    #[must_use]
    pub fn retires(&self, chain: &Chain, target: TargetId) -> bool {
        target == self.source && self.source_is_replaced(chain)
    }
}

/// A versioned list of chains. Layouts of files refer to one version, so versions are never
/// removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainTable {
    /// Its id.
    pub id: TableId,
    /// Its version.
    pub version: TableVersion,
    /// Its chains, in the order used by layouts.
    pub chains: Vec<ChainId>,
}

/// A node and its address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its id.
    pub id: NodeId,
    /// host:port of its storage service.
    pub address: String,
    /// Its failure domains.
    #[serde(default)]
    pub location: Location,
}

/// Everything that services and clients need to locate data, in one versioned value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutingInfo {
    /// The cluster; zero before mgmtd has published it.
    pub cluster: ClusterId,
    /// Increases with each change of the fields below.
    pub version: RoutingVersion,
    /// All registered nodes, dead ones too.
    pub nodes: BTreeMap<NodeId, NodeInfo>,
    /// All chains.
    pub chains: BTreeMap<ChainId, Chain>,
    /// All versions of all tables.
    pub tables: Vec<ChainTable>,
    /// Replicas that are moving to another node, by chain.
    #[serde(default)]
    pub moves: BTreeMap<ChainId, Move>,
    /// Targets that have left their chains permanently: their nodes may remove their data. Never
    /// reused.
    #[serde(default)]
    pub retired: BTreeSet<TargetId>,
}

impl RoutingInfo {
    /// The chain `id`.
    #[must_use]
    pub fn chain(&self, id: ChainId) -> Option<&Chain> {
        self.chains.get(&id)
    }

    /// One version of one table.
    #[must_use]
    pub fn table(&self, id: TableId, version: TableVersion) -> Option<&ChainTable> {
        self.tables.iter().find(|table| table.id == id && table.version == version)
    }

    /// The newest version of a table.
    #[must_use]
    pub fn newest_table(&self, id: TableId) -> Option<&ChainTable> {
        self.tables.iter().filter(|table| table.id == id).max_by_key(|table| table.version)
    }

    /// The chain that `target` belongs to.
    #[must_use]
    pub fn chain_of_target(&self, target: TargetId) -> Option<&Chain> {
        self.chains.values().find(|chain| chain.place(target).is_some())
    }

    /// The targets of one node, each with its chain.
    pub fn targets_of_node(&self, node: NodeId) -> impl Iterator<Item = (&Chain, &ChainTarget)> {
        self.chains.values().flat_map(move |chain| {
            chain
                .targets
                .iter()
                .filter(move |place| place.node == node)
                .map(move |place| (chain, place))
        })
    }

    /// Whether `target` must stop serving because another has replaced it.
    #[must_use]
    pub fn retires(&self, chain: &Chain, target: TargetId) -> bool {
        self.moves.get(&chain.id).is_some_and(|the_move| the_move.retires(chain, target))
    }

    /// Address of a node.
    #[must_use]
    pub fn address(&self, node: NodeId) -> Option<&str> {
        self.nodes.get(&node).map(|info| info.address.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(states: &[PublicState]) -> Chain {
        Chain {
            id: ChainId(1),
            version: ChainVersion(3),
            targets: states
                .iter()
                .zip(1..)
                .map(|(&state, number)| ChainTarget {
                    target: TargetId(number),
                    node: NodeId(number as u32),
                    state,
                })
                .collect(),
        }
    }

    #[test]
    fn neighbors_are_serving_or_syncing_targets() {
        use PublicState::{Offline, Serving, Syncing};
        let chain = chain(&[Serving, Serving, Syncing, Offline]);
        assert_eq!(chain.head().map(|t| t.target), Some(TargetId(1)));
        assert_eq!(chain.tail().map(|t| t.target), Some(TargetId(2)));
        assert_eq!(chain.successor(TargetId(2)).map(|t| t.target), Some(TargetId(3)));
        assert_eq!(chain.successor(TargetId(3)), None);
        assert_eq!(chain.predecessor(TargetId(3)).map(|t| t.target), Some(TargetId(2)));
        assert_eq!(chain.predecessor(TargetId(1)), None);
        assert_eq!(chain.predecessor(TargetId(4)), None);
        assert_eq!(chain.successor(TargetId(4)), None);
    }

    #[test]
    fn routing_round_trips_through_json_and_postcard() {
        let mut routing = RoutingInfo { version: RoutingVersion(4), ..Default::default() };
        routing.chains.insert(ChainId(1), chain(&[PublicState::Serving, PublicState::LastSrv]));
        let json = serde_json::to_string(&routing).unwrap();
        assert!(json.contains("\"LASTSRV\""), "{json}");
        assert_eq!(serde_json::from_str::<RoutingInfo>(&json).unwrap(), routing);
        let packed = postcard::to_stdvec(&routing).unwrap();
        assert_eq!(postcard::from_bytes::<RoutingInfo>(&packed).unwrap(), routing);
    }
}
