//! Identifiers as distinct types, so that a target cannot be confused with a chain.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $label:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A storage target: one replica on one disk. It belongs to one chain permanently.
    TargetId(u64), "target-");
id!(
    /// An ordered list of targets that hold the same chunks.
    ChainId(u32), "chain-");
id!(
    /// Increases by one with each change of a chain's order or states.
    ChainVersion(u32), "");
id!(
    /// A named, versioned list of chains.
    TableId(u32), "table-");
id!(
    /// Version of a chain table; fixed in the layouts of files.
    TableVersion(u32), "");
id!(
    /// Increases with each published change of the routing.
    RoutingVersion(u64), "");
id!(
    /// Version of a chunk. 0 = never written; an update of version v makes v + 1.
    ChunkVersion(u64), "");
id!(
    /// One incarnation of a service process. The driver draws a new one at each start.
    Incarnation(u64), "");
id!(
    /// A file, directory or symlink.
    InodeId(u64), "inode-");
id!(
    /// A channel of a client: carries one update at a time.
    ChannelId(u32), "channel-");

/// One disk of a storage service: the unit that mgmtd registers, grants leases to, measures, drains
/// and places replicas on. The first disk of service 3 is `node-3`, disk 2 of it `node-3.2`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct NodeId(pub u32);

impl NodeId {
    /// Ids of one disk number: those of the services. Decimal, so that `2000003` can be read.
    const SERVICES: u32 = 1_000_000;
    /// Highest number of a disk of a service.
    pub const DISK_MAX: u32 = 255;

    /// The id of a disk of this node's service; `None` above [`Self::DISK_MAX`].
    #[must_use]
    pub fn of_disk(self, disk: u32) -> Option<Self> {
        (disk <= Self::DISK_MAX).then(|| Self(disk * Self::SERVICES + self.0 % Self::SERVICES))
    }

    /// The id of its service, which is that of the service's first disk.
    #[must_use]
    pub fn service(self) -> Self {
        Self(self.0 % Self::SERVICES)
    }

    /// Its number in its service.
    #[must_use]
    pub fn disk(self) -> u32 {
        self.0 / Self::SERVICES
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.disk() {
            0 => write!(f, "node-{}", self.0),
            disk => write!(f, "node-{}.{disk}", self.service().0),
        }
    }
}

impl ChainVersion {
    /// A lower bound of the versions in this era ([`RoutingVersion::era`]): a chain changes less
    /// than a million times in one.
    #[must_use]
    pub fn first_of(era: u32) -> Self {
        Self(era.saturating_mul(1 << 20))
    }

    /// The version after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl RoutingVersion {
    const ERA_BITS: u32 = 32;

    /// The version after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Number of restores of mgmtd's store before this version. The upper bits, so that the
    /// versions and ids of a restored store exceed all that the lost one can have used.
    #[must_use]
    pub fn era(self) -> u32 {
        (self.0 >> Self::ERA_BITS) as u32
    }

    /// The first version after a restore of this one.
    #[must_use]
    pub fn next_era(self) -> Self {
        Self(u64::from(self.era().saturating_add(1)) << Self::ERA_BITS)
    }
}

impl ChunkVersion {
    /// The version after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// One incarnation of a client. The upper 96 bits are random: a client draws them at its start, a
/// mount draws them once and keeps them across restarts of its daemon. The lower 32 bits number the
/// incarnations, so that a replica refuses updates of a daemon that has been replaced: see
/// [`ClientId::supersedes`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct ClientId(pub u128);

impl ClientId {
    const INCARNATION_BITS: u32 = 32;

    /// Incarnation number `incarnation` of the client with the upper 96 bits of `random`.
    #[must_use]
    pub fn with_incarnation(random: u128, incarnation: u32) -> Self {
        Self(random >> Self::INCARNATION_BITS << Self::INCARNATION_BITS | u128::from(incarnation))
    }

    /// The part that all incarnations of the client have in common.
    #[must_use]
    pub fn base(self) -> u128 {
        self.0 >> Self::INCARNATION_BITS
    }

    /// Whether this is a later incarnation of the same client than `other`.
    #[must_use]
    pub fn supersedes(self, other: Self) -> bool {
        self.base() == other.base() && self.0 > other.0
    }
}

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client-{:032x}", self.0)
    }
}

/// One cluster: 128 random bits, drawn by the first mgmtd that used the cluster's store.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct ClusterId(pub u128);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cluster-{:032x}", self.0)
    }
}

/// One metadata tree: 128 random bits, drawn when its store is created. A tree restored from a dump
/// keeps the id.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct TreeId(pub u128);

impl fmt::Display for TreeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tree-{:032x}", self.0)
    }
}

/// The store of one target: 128 random bits, drawn when it is created and kept in its log. An
/// emptied or replaced disk has another id, whatever target it is used for.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct StoreId(pub u128);

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store-{:032x}", self.0)
    }
}

/// Tag that makes an update exactly-once. A client gives each update the next sequence number of a
/// channel, retries it with the same tag, and reuses a channel only when its update is answered.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct RequestTag {
    /// The client.
    pub client: ClientId,
    /// The channel of the client.
    pub channel: ChannelId,
    /// Increases with each new update of the channel.
    pub sequence: u64,
}

impl fmt::Display for RequestTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}#{}", self.client, self.channel, self.sequence)
    }
}

/// One chunk of a file; `index` counts from the start of the file.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ChunkId {
    /// The file.
    pub inode: InodeId,
    /// Index of the chunk in the file.
    pub index: u32,
}

impl ChunkId {
    /// Bytes of an encoded chunk id.
    pub const ENCODED_BYTES: usize = 16;

    /// The chunk `index` of `inode`.
    #[must_use]
    pub fn new(inode: InodeId, index: u32) -> Self {
        Self { inode, index }
    }

    /// Greater than every chunk id.
    pub const MAX: Self = Self { inode: InodeId(u64::MAX), index: u32::MAX };

    /// The preceding chunk id; `None` for the first one.
    #[must_use]
    pub fn before(self) -> Option<Self> {
        match self.index.checked_sub(1) {
            Some(index) => Some(Self { inode: self.inode, index }),
            None => Some(Self { inode: InodeId(self.inode.0.checked_sub(1)?), index: u32::MAX }),
        }
    }

    /// The first chunk id of a file.
    #[must_use]
    pub fn first_of(inode: InodeId) -> Self {
        Self { inode, index: 0 }
    }

    /// The last chunk id that a file can have.
    #[must_use]
    pub fn last_of(inode: InodeId) -> Self {
        Self { inode, index: u32::MAX }
    }

    /// Big-endian, so that byte order is chunk order:
    /// tenant (1, always 0) | reserved (1, 0) | inode (8) | track (2, 0) | index (4).
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::ENCODED_BYTES] {
        let mut bytes = [0; Self::ENCODED_BYTES];
        bytes[2..10].copy_from_slice(&self.inode.0.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.index.to_be_bytes());
        bytes
    }

    /// The reverse of [`Self::to_bytes`]; `None` where tenant, reserved or track is not zero.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::ENCODED_BYTES]) -> Option<Self> {
        if bytes[0..2] != [0, 0] || bytes[10..12] != [0, 0] {
            return None;
        }
        let mut inode = [0; 8];
        inode.copy_from_slice(&bytes[2..10]);
        let mut index = [0; 4];
        index.copy_from_slice(&bytes[12..16]);
        Some(Self { inode: InodeId(u64::from_be_bytes(inode)), index: u32::from_be_bytes(index) })
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunk {}/{}", self.inode.0, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_chunk_ids_sort_like_the_ids_and_decode() {
        let mut ids = [
            ChunkId::new(InodeId(1), 0),
            ChunkId::new(InodeId(1), 256),
            ChunkId::new(InodeId(1), 1),
            ChunkId::new(InodeId(256), 0),
            ChunkId::last_of(InodeId(u64::MAX)),
        ];
        ids.sort();
        let encoded: Vec<_> = ids.iter().map(|id| id.to_bytes()).collect();
        assert!(encoded.is_sorted());
        for (id, bytes) in ids.iter().zip(encoded) {
            assert_eq!(ChunkId::from_bytes(bytes), Some(*id));
        }
    }

    #[test]
    fn a_later_incarnation_supersedes_earlier_ones_of_the_same_client_only() {
        let random = 0x1234_5678_9abc_def0_1234_5678_9abc_def0;
        let (first, second) =
            (ClientId::with_incarnation(random, 1), ClientId::with_incarnation(random, 2));
        assert!(second.supersedes(first));
        assert!(!first.supersedes(second));
        assert!(!first.supersedes(first));
        let other = ClientId::with_incarnation(random + (1 << 32), 9);
        assert!(!other.supersedes(first) && !first.supersedes(other));
    }

    #[test]
    fn a_foreign_tenant_or_track_is_refused() {
        for position in [0, 1, 10, 11] {
            let mut bytes = ChunkId::new(InodeId(7), 3).to_bytes();
            bytes[position] = 1;
            assert_eq!(ChunkId::from_bytes(bytes), None);
        }
    }
}
