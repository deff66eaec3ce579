//! Identifiers as distinct types, so that a target cannot be confused with a chain.

use std::fmt;

use serde::{Deserialize, Serialize};

mod epoch;

pub use epoch::Epoch;

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
    /// Increases with each change of the fences of volumes. Its upper bits are the era of the routing
    /// ([`RoutingVersion::era`]).
    FencesVersion(u64), "");
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

impl FencesVersion {
    /// The first version in the era of this routing: above all that a lost store of mgmtd can have
    /// used.
    #[must_use]
    pub fn first_of(routing: RoutingVersion) -> Self {
        Self(u64::from(routing.era()) << RoutingVersion::ERA_BITS)
    }

    /// The version after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
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

/// One version of a chunk of a file; `index` counts from the start of the file. The order is by file,
/// index and epoch, so the versions of a chunk are adjacent and the newest is the last.
///
/// Encoded, epoch and index share one integer. An id of the epoch before the first snapshot has the
/// same bytes as in releases without epochs, in messages and in the logs of stores, and such a
/// release refuses other ids.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "EncodedChunkId", into = "EncodedChunkId")]
pub struct ChunkId {
    /// The file.
    pub inode: InodeId,
    /// Index of the chunk in the file.
    pub index: u32,
    /// The epoch in which this version was made.
    pub epoch: Epoch,
}

impl ChunkId {
    /// The chunk `index` of `inode`, in its version from before the first snapshot.
    #[must_use]
    pub const fn new(inode: InodeId, index: u32) -> Self {
        Self { inode, index, epoch: Epoch::new(0, 0) }
    }

    /// Greater than every chunk id: no inode has this number.
    pub const MAX: Self = Self::new(InodeId(u64::MAX), u32::MAX);

    /// The version of this chunk that was made in `epoch`.
    #[must_use]
    pub const fn in_epoch(self, epoch: Epoch) -> Self {
        Self { epoch, ..self }
    }

    /// The version from before the first snapshot: one id for all versions of a chunk, and the lowest
    /// of them.
    #[must_use]
    pub const fn first_version(self) -> Self {
        self.in_epoch(Epoch::new(0, 0))
    }

    /// The last version that this chunk can have.
    #[must_use]
    pub const fn last_version(self) -> Self {
        self.in_epoch(Epoch::MAX)
    }

    /// Whether this is a version of the same chunk as `other`.
    #[must_use]
    pub fn is_version_of(self, other: Self) -> bool {
        self.first_version() == other.first_version()
    }

    /// The last version of the preceding chunk; `None` for the first chunk.
    #[must_use]
    pub fn before_chunk(self) -> Option<Self> {
        let (inode, index) = match self.index.checked_sub(1) {
            Some(index) => (self.inode, index),
            None => (InodeId(self.inode.0.checked_sub(1)?), u32::MAX),
        };
        Some(Self::new(inode, index).last_version())
    }

    /// A lower bound for requests: below all versions of this chunk, not below the first version of
    /// the preceding one. It is encoded as in releases without epochs.
    #[must_use]
    pub fn bound_before(self) -> Option<Self> {
        self.before_chunk().map(Self::first_version)
    }

    /// An upper bound for requests: above all versions of this chunk, not above the first version of
    /// the next one. It is encoded as in releases without epochs.
    #[must_use]
    pub fn bound_after(self) -> Self {
        match (self.index.checked_add(1), self.inode.0.checked_add(1)) {
            (Some(index), _) => Self::new(self.inode, index),
            (None, Some(inode)) => Self::first_of(InodeId(inode)),
            (None, None) => Self::MAX,
        }
    }

    /// The first chunk id of a file.
    #[must_use]
    pub fn first_of(inode: InodeId) -> Self {
        Self::new(inode, 0)
    }

    /// The last chunk id that a file can have.
    #[must_use]
    pub fn last_of(inode: InodeId) -> Self {
        Self::new(inode, u32::MAX).last_version()
    }
}

/// A chunk id in messages and logs.
#[derive(Serialize, Deserialize)]
struct EncodedChunkId {
    inode: InodeId,
    /// From the highest bits: volume and count of the epoch, index of the chunk; 32 bits each.
    index: u128,
}

impl From<ChunkId> for EncodedChunkId {
    fn from(chunk: ChunkId) -> Self {
        let Epoch { volume, count } = chunk.epoch;
        let index = u128::from(volume) << 64 | u128::from(count) << 32 | u128::from(chunk.index);
        Self { inode: chunk.inode, index }
    }
}

impl TryFrom<EncodedChunkId> for ChunkId {
    type Error = String;

    fn try_from(encoded: EncodedChunkId) -> Result<Self, String> {
        let volume = u32::try_from(encoded.index >> 64)
            .map_err(|_| format!("invalid chunk id: {:#x} is not an epoch", encoded.index))?;
        let epoch = Epoch::new(volume, (encoded.index >> 32) as u32);
        Ok(Self { inode: encoded.inode, index: encoded.index as u32, epoch })
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunk {}/{}", self.inode.0, self.index)?;
        if self.epoch > Epoch::default() {
            write!(f, " of epoch {}", self.epoch)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chunk id as in releases without epochs.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct WithoutEpoch {
        inode: InodeId,
        index: u32,
    }

    #[test]
    fn a_chunk_id_of_epoch_0_has_the_bytes_of_releases_without_epochs() {
        for (inode, index) in [(0, 0), (7, 127), (300, 128), (1 << 55, u32::MAX), (u64::MAX, 1)] {
            let inode = InodeId(inode);
            let chunk = ChunkId::new(inode, index);
            let bytes = postcard::to_stdvec(&chunk).unwrap();
            assert_eq!(bytes, postcard::to_stdvec(&WithoutEpoch { inode, index }).unwrap());
            assert_eq!(postcard::from_bytes::<ChunkId>(&bytes).unwrap(), chunk);
        }
    }

    #[test]
    fn a_release_without_epochs_refuses_a_chunk_id_of_a_later_epoch() {
        let epochs = [Epoch::new(1, 0), Epoch::new(1, 255), Epoch::new(300, 1), Epoch::MAX];
        for (index, epoch) in [0, 5, 9, u32::MAX].into_iter().zip(epochs) {
            let chunk = ChunkId::new(InodeId(7), index).in_epoch(epoch);
            let bytes = postcard::to_stdvec(&chunk).unwrap();
            assert_eq!(postcard::from_bytes::<ChunkId>(&bytes).unwrap(), chunk);
            // The record of a scrub.
            let json = serde_json::to_string(&chunk).unwrap();
            assert_eq!(serde_json::from_str::<ChunkId>(&json).unwrap(), chunk);
            assert!(postcard::from_bytes::<WithoutEpoch>(&bytes).is_err(), "{chunk}");
        }
    }

    #[test]
    fn a_chunk_id_with_more_bits_than_an_epoch_has_is_refused() {
        let bytes = postcard::to_stdvec(&(InodeId(7), 1_u128 << 96)).unwrap();
        assert!(postcard::from_bytes::<ChunkId>(&bytes).is_err());
    }

    #[test]
    fn the_epoch_before_is_below_all_versions_of_an_epoch() {
        assert_eq!(Epoch::new(2, 7).before(), Some(Epoch::new(2, 6)));
        assert_eq!(Epoch::new(2, 0).before(), Some(Epoch::new(1, u32::MAX)));
        assert_eq!(Epoch::default().before(), None);
    }

    #[test]
    fn versions_of_a_chunk_are_adjacent_and_the_newest_is_the_last() {
        let chunk = ChunkId::new(InodeId(7), 3);
        let sorted = [
            ChunkId::last_of(InodeId(6)),
            ChunkId::first_of(InodeId(7)),
            chunk.before_chunk().unwrap(),
            chunk,
            chunk.in_epoch(Epoch::new(1, 1)),
            chunk.in_epoch(Epoch::new(1, 255)),
            chunk.in_epoch(Epoch::new(2, 1)),
            chunk.last_version(),
            ChunkId::new(InodeId(7), 4),
            ChunkId::last_of(InodeId(7)),
            ChunkId::MAX,
        ];
        assert!(sorted.is_sorted());
        assert_eq!(
            ChunkId::first_of(InodeId(7)).before_chunk(),
            Some(ChunkId::last_of(InodeId(6)))
        );
        assert_eq!(ChunkId::first_of(InodeId(0)).before_chunk(), None);
        for chunk in [chunk, ChunkId::first_of(InodeId(7)), ChunkId::last_of(InodeId(7))] {
            let (before, after) = (chunk.bound_before().unwrap(), chunk.bound_after());
            assert!(before < chunk.first_version() && chunk.last_version() < after, "{chunk}");
            assert_eq!((before.epoch, after.epoch), (Epoch::default(), Epoch::default()));
        }
        assert!(chunk.in_epoch(Epoch::new(1, 9)).is_version_of(chunk));
        assert!(!ChunkId::new(InodeId(7), 4).is_version_of(chunk));
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
}
