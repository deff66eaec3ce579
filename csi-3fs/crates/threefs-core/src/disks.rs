//! Choice of the disks that a storage service serves, of those found at its paths. Pure; the service
//! looks at the paths every second and executes the [`Step`] of each.
//!
//! A disk is recognized by the identity that is written on it, never by its path or its position in
//! the list. What is found at one path never affects the disk that runs at another: a running disk
//! is stopped only if its own path no longer shows it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::ids::{ClusterId, NodeId, RoutingVersion};
use crate::routing::{PublicState, RoutingInfo};

/// The random id of a disk, written on it once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DiskId(pub String);

/// What is written on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskIdentity {
    /// Its id.
    pub disk: DiskId,
    /// The node that mgmtd knows it as.
    pub node: NodeId,
    /// The cluster of its data; `None` before its first registration.
    pub cluster: Option<ClusterId>,
}

/// What is found at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The path has not been read yet, or cannot be read, with the reason: whether its disk is there
    /// is unknown.
    Unknown(String),
    /// No disk, with the reason: the folder is missing, or a mount point without its mount.
    Nothing(String),
    /// A folder for a new disk, without an identity.
    New,
    /// A disk.
    Disk(DiskIdentity),
}

/// The service that looks for its disks, as far as mgmtd has replied.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its first node.
    pub service: NodeId,
    /// Its paths, in the order of its configuration.
    pub paths: Vec<String>,
    /// Its cluster; `None` until mgmtd has published a routing.
    pub cluster: Option<ClusterId>,
    /// Whether the following sets are known.
    pub has_nodes: bool,
    /// The nodes that mgmtd knows.
    pub registered: BTreeSet<NodeId>,
    /// Nodes with a target that could lead its chain.
    pub leading: BTreeSet<NodeId>,
}

impl Host {
    /// The service according to a routing, which is empty until mgmtd has published one.
    /// `is_new_cluster`: mgmtd has replied that it knows no node, so that it has no routing.
    #[must_use]
    pub fn new(
        service: NodeId,
        paths: Vec<String>,
        routing: &RoutingInfo,
        is_new_cluster: bool,
    ) -> Self {
        let is_known = routing.version > RoutingVersion(0);
        let targets = routing.chains.values().flat_map(|chain| &chain.targets);
        let leads = |state| !matches!(state, PublicState::Waiting | PublicState::Offline);
        Self {
            service,
            paths,
            cluster: is_known.then_some(routing.cluster),
            has_nodes: is_known || is_new_cluster,
            registered: routing.nodes.keys().copied().collect(),
            leading: targets.filter(|it| leads(it.state)).map(|it| it.node).collect(),
        }
    }
}

/// What the service does about one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the disk there runs.
    Keep,
    /// Nothing until this changes.
    Wait(String),
    /// Serves the disk.
    Start(DiskIdentity),
    /// Writes an identity with this node on the new disk.
    Adopt(NodeId),
    /// Stops to serve the disk that was there.
    Stop(String),
    /// Does not serve the disk, and reports why.
    Refuse(Refusal),
}

/// Why a disk is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It belongs to another storage service.
    #[error(
        "the disk at `{path}` belongs to {owner} and this is service {service}: return it to its \
         service, or empty it to use it here"
    )]
    OtherService {
        /// Where it is.
        path: String,
        /// The node that it belongs to.
        owner: NodeId,
        /// This service.
        service: NodeId,
    },
    /// It belongs to another cluster, and a disk of this cluster has its node.
    #[error(
        "the disk at `{path}` holds data of {foreign} and this is {own}: return it to its cluster, \
         or empty it to use it here"
    )]
    OtherCluster {
        /// Where it is.
        path: String,
        /// Its cluster.
        foreign: ClusterId,
        /// This cluster.
        own: ClusterId,
    },
    /// Another path has a disk with the same id.
    #[error(
        "the disks at `{path}` and `{other}` have the same id, so one is a copy of the other or both \
         paths have one mount: remove the copy"
    )]
    Copy {
        /// Where it is.
        path: String,
        /// Where the other one is.
        other: String,
    },
    /// Another disk has the same node.
    #[error(
        "the disks at `{path}` and `{other}` both belong to {node}, so one has replaced the other: \
         empty the one that was replaced to use it as a new disk"
    )]
    Replaced {
        /// Where it is.
        path: String,
        /// Where the other one is.
        other: String,
        /// The node of both.
        node: NodeId,
    },
    /// The service has as many disks as it can have.
    #[error("the new disk at `{path}` cannot be used: this service has {} disks", NodeId::DISK_MAX + 1)]
    TooMany {
        /// Where it is.
        path: String,
    },
}

/// The step for each path. `running`: the disk that is served at a path, until its stores are closed.
#[must_use]
pub fn steps(
    host: &Host,
    running: &BTreeMap<String, DiskIdentity>,
    found: &BTreeMap<String, Found>,
) -> BTreeMap<String, Step> {
    let mut taken = nodes_of(running, found);
    let mut steps = BTreeMap::new();
    for (path, there) in found {
        let step = match (running.get(path), there) {
            // One failed read does not prove that the disk is gone. Its stores notice a failure.
            (Some(_), Found::Unknown(_)) => Step::Keep,
            (Some(runs), Found::Disk(disk)) if runs.disk == disk.disk => Step::Keep,
            (Some(_), Found::Nothing(reason)) => Step::Stop(reason.clone()),
            (Some(_), Found::New) => Step::Stop("its folder is empty".into()),
            (Some(_), Found::Disk(_)) => Step::Stop("another disk is there".into()),
            (None, Found::Unknown(reason) | Found::Nothing(reason)) => Step::Wait(reason.clone()),
            (None, Found::Disk(disk)) => match refusal(host, path, disk, found) {
                Some(refusal) => Step::Refuse(refusal),
                None if running.values().any(|other| other.node == disk.node) => {
                    Step::Wait(format!("{} has open files at another path", disk.node))
                }
                None => Step::Start(disk.clone()),
            },
            (None, Found::New) => adoption(host, path, found, &mut taken),
        };
        steps.insert(path.clone(), step);
    }
    steps
}

fn refusal(
    host: &Host,
    path: &str,
    disk: &DiskIdentity,
    found: &BTreeMap<String, Found>,
) -> Option<Refusal> {
    let path = path.to_owned();
    if disk.node.service() != host.service {
        return Some(Refusal::OtherService { path, owner: disk.node, service: host.service });
    }
    let rivals = found.iter().filter_map(|(other, there)| match there {
        Found::Disk(rival) if *other != path && rival.node == disk.node => Some((other, rival)),
        _ => None,
    });
    for (other, rival) in rivals {
        let other = other.clone();
        if rival.disk == disk.disk {
            return Some(Refusal::Copy { path, other });
        }
        // A disk of another cluster alone is served until mgmtd refuses it: mgmtd must receive its
        // heartbeat, which may show that mgmtd has lost its store.
        match (foreign(host, disk), foreign(host, rival)) {
            (None, Some(_)) => {}
            (Some((foreign, own)), None) => {
                return Some(Refusal::OtherCluster { path, foreign, own });
            }
            // Neither is served, because only an operator knows which one is right; one that runs
            // continues.
            _ => return Some(Refusal::Replaced { path, other, node: disk.node }),
        }
    }
    None
}

/// The cluster of a disk and that of the service, if they differ.
fn foreign(host: &Host, disk: &DiskIdentity) -> Option<(ClusterId, ClusterId)> {
    disk.cluster.zip(host.cluster).filter(|(foreign, own)| foreign != own)
}

/// The nodes of all disks that run or are found.
fn nodes_of(
    running: &BTreeMap<String, DiskIdentity>,
    found: &BTreeMap<String, Found>,
) -> BTreeSet<NodeId> {
    let there = found.values().filter_map(|found| match found {
        Found::Disk(disk) => Some(disk.node),
        _ => None,
    });
    running.values().map(|disk| disk.node).chain(there).collect()
}

/// The step for a new disk. It gets a node that mgmtd does not know, as long as the paths suffice: an
/// absent disk may return. If every path has or had a disk, it replaces an absent one, once no target
/// of that one could lead its chain. Of several nodes, it gets that of its path's number if possible.
fn adoption(
    host: &Host,
    path: &str,
    found: &BTreeMap<String, Found>,
    taken: &mut BTreeSet<NodeId>,
) -> Step {
    if !host.has_nodes {
        return Step::Wait("the disk is new; mgmtd has not replied yet".into());
    }
    // The disk of a path that cannot be read may have any node.
    if let Some(unknown) = found.iter().find(|(_, there)| matches!(there, Found::Unknown(_))) {
        return Step::Wait(format!("the disk is new; `{}` cannot be read yet", unknown.0));
    }
    let number = host.paths.iter().position(|it| it == path).map(|number| number as u32);
    let numbers = number.into_iter().chain(0..found.len() as u32);
    let all = numbers.filter_map(|disk| host.service.of_disk(disk));
    let free: Vec<NodeId> = all.filter(|node| !taken.contains(node)).collect();
    let mut usable = free.iter().filter(|node| !host.leading.contains(node));
    let unused = free.iter().find(|node| !host.registered.contains(node));
    match (unused.or_else(|| usable.next()), free.first()) {
        (Some(node), _) => {
            taken.insert(*node);
            Step::Adopt(*node)
        }
        (None, Some(absent)) => Step::Wait(format!(
            "the disk is new, and {absent}, which it would replace, is absent but could lead a \
             chain; if the disk of {absent} is lost, choose another copy of each chain with \
             `threefs promote TARGET`"
        )),
        (None, None) => Step::Refuse(Refusal::TooMany { path: path.to_owned() }),
    }
}

#[cfg(test)]
#[path = "disks_test.rs"]
mod tests;
