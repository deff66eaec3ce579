//! Terms of a capability: the chunks of a file that its holder may update, and the epoch of a snapshot
//! that it may read.
//!
//! The metadata service signs the terms, and storage services check each update against them
//! without contacting it. Bytes outside the chains of the layout, or beyond the reservation, would
//! count for no quota and would not be removed with their file.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::chunk::ContentChange;
use crate::fence::VolumeEpoch;
use crate::ids::{ChainId, ChunkId, Epoch, InodeId};
use crate::layout::{Layout, LayoutError};
use crate::message::{NamedVolume, StorageRequest, UpdateConditions, UpdateRequest};
use crate::routing::RoutingInfo;
use crate::snapshot_inode;

/// Write lifetime of a capability after its signature, in seconds. It cannot be revoked, so the
/// metadata service charges the permitted bytes at least for this time.
pub const WRITE_LIFETIME_S: u64 = 300;

/// Terms of a capability for one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTerms {
    /// Where its chunks are.
    pub layout: Layout,
    /// Bytes of the file below this one may be written.
    pub end: u64,
    /// End of the write permission, in seconds since 1970.
    pub until_unix_s: u64,
    /// Volume and epoch of the file; of a file of a snapshot, the epoch that it shows, which is the
    /// only one that the holder may read. `None` in a cluster that has never had a snapshot. Terms without
    /// it are encoded as in releases without epochs, which refuse others.
    pub place: Option<VolumeEpoch>,
}

/// Encoded terms, as in releases without epochs; with `place`, more bytes follow.
#[derive(Serialize, Deserialize)]
struct EncodedTerms {
    layout: Layout,
    end: u64,
    until_unix_s: u64,
}

/// Why a request violates the terms.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TermsError {
    /// Another chunk size.
    #[error(
        "{chunk} with a chunk size of {in_update}: the chunk size of its file is {chunk_bytes}"
    )]
    ChunkBytes {
        /// The chunk.
        chunk: ChunkId,
        /// As in the update.
        in_update: u32,
        /// As in the layout.
        chunk_bytes: u32,
    },
    /// Another chain.
    #[error("{chunk} on {in_update}: the layout of its file places it on {chain}")]
    Chain {
        /// The chunk.
        chunk: ChunkId,
        /// As in the update.
        in_update: ChainId,
        /// As in the layout.
        chain: ChainId,
    },
    /// Beyond the reservation at the time of the signature.
    #[error(
        "an update of {chunk} ends at byte {in_update} of its file, but the capability permits bytes \
         below {end}; reserve the range and get a new one"
    )]
    BeyondEnd {
        /// The chunk.
        chunk: ChunkId,
        /// The end of the update.
        in_update: u64,
        /// The permitted end.
        end: u64,
    },
    /// The capability permits reads, but no longer writes.
    #[error(
        "{chunk}: this capability permitted writes of its file until {until_unix_s}; get a new one"
    )]
    WriteExpired {
        /// The chunk.
        chunk: ChunkId,
        /// The end of the write permission, in seconds since 1970.
        until_unix_s: u64,
    },
    /// The volume or the epoch of the update is not that of the terms.
    #[error(
        "{chunk}: the capability is for {}, the update for {}; get a new capability",
        place_text(place.as_ref()),
        volume_text(in_update)
    )]
    Place {
        /// The chunk, with the epoch of the update.
        chunk: ChunkId,
        /// As in the update.
        in_update: NamedVolume,
        /// As in the terms.
        place: Option<VolumeEpoch>,
    },
    /// A file of a snapshot, whose chunks are read up to the epoch of the snapshot, and not updated.
    #[error(
        "{chunk}: the capability is for a file of a snapshot, {}; it permits reads up to its epoch",
        place_text(place.as_ref())
    )]
    Snapshot {
        /// The chunk, with the epoch of the request.
        chunk: ChunkId,
        /// As in the terms.
        place: Option<VolumeEpoch>,
    },
    /// The layout does not match the routing of this node, which may be outdated.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

fn volume_text(volume: &NamedVolume) -> String {
    match volume {
        NamedVolume::Unnamed => "an unnamed volume".into(),
        NamedVolume::NoVolume => "no volume".into(),
        NamedVolume::Volume(volume) => format!("volume {volume}"),
    }
}

fn place_text(place: Option<&VolumeEpoch>) -> String {
    place.map_or_else(
        || "an unnamed volume".into(),
        |place| format!("{} in epoch {}", volume_text(&place.volume.into()), place.epoch),
    )
}

impl TermsError {
    /// Whether a new capability, or newer routing, may fix the error.
    pub fn is_recoverable(&self) -> bool {
        matches!(
            self,
            Self::BeyondEnd { .. }
                | Self::WriteExpired { .. }
                | Self::Place { .. }
                | Self::Layout(LayoutError::NoTable { .. })
        )
    }
}

impl FileTerms {
    /// The bytes that are signed.
    ///
    /// # Errors
    /// Those of the encoding.
    pub fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        let Self { layout, end, until_unix_s, place } = self.clone();
        let encoded = EncodedTerms { layout, end, until_unix_s };
        match place {
            Some(place) => postcard::to_stdvec(&(encoded, place)),
            None => postcard::to_stdvec(&encoded),
        }
    }

    /// Decodes signed bytes.
    ///
    /// # Errors
    /// They are not terms.
    pub fn decode(bytes: &[u8]) -> Result<Self, postcard::Error> {
        let (encoded, rest) = postcard::take_from_bytes::<EncodedTerms>(bytes)?;
        let EncodedTerms { layout, end, until_unix_s } = encoded;
        let place = match rest {
            [] => None,
            rest => match postcard::take_from_bytes(rest)? {
                (place, []) => Some(place),
                _ => return Err(postcard::Error::DeserializeBadEncoding),
            },
        };
        Ok(Self { layout, end, until_unix_s, place })
    }

    /// Whether an update may name this volume, with the epoch of its chunk.
    fn permits_place(&self, chunk: ChunkId, volume: NamedVolume) -> bool {
        match self.place {
            // Without a fence, the replica accepts it.
            None => volume == NamedVolume::Unnamed && chunk.epoch == Epoch::default(),
            Some(place) => volume == place.volume.into() && chunk.epoch <= place.epoch,
        }
    }

    /// Checks a read of a snapshot: the epoch is that of the terms.
    ///
    /// # Errors
    /// [`TermsError::Snapshot`].
    pub fn check_read_up_to(&self, chunk: ChunkId) -> Result<(), TermsError> {
        match self.place {
            Some(place) if place.epoch == chunk.epoch => Ok(()),
            place => Err(TermsError::Snapshot { chunk, place }),
        }
    }

    /// Checks an update with a payload of this size: its chunk is on the file's chain, it ends
    /// within the reservation, it names volume and epoch, and the write permission has not expired.
    ///
    /// # Errors
    /// [`TermsError`].
    pub fn check(
        &self,
        (update, volume): (&UpdateRequest, NamedVolume),
        payload_bytes: usize,
        routing: &RoutingInfo,
        now_unix_s: u64,
    ) -> Result<(), TermsError> {
        let UpdateRequest { chunk, to, chunk_bytes: in_update, .. } = *update;
        let (chunk_bytes, end) = (self.layout.chunk_bytes, self.end);
        let until_unix_s = self.until_unix_s;
        if in_update != chunk_bytes {
            return Err(TermsError::ChunkBytes { chunk, in_update, chunk_bytes });
        }
        let chains = self.layout.resolve(routing)?;
        // A layout has at least one chain.
        let place = chunk.index as usize % chains.len().max(1);
        let chain = chains.get(place).copied().unwrap_or_default();
        if to.chain != chain {
            return Err(TermsError::Chain { chunk, in_update: to.chain, chain });
        }
        if !self.permits_place(chunk, volume) {
            return Err(TermsError::Place { chunk, in_update: volume, place: self.place });
        }
        match end_of(update, payload_bytes) {
            in_update if in_update > end => Err(TermsError::BeyondEnd { chunk, in_update, end }),
            _ if now_unix_s >= until_unix_s => {
                Err(TermsError::WriteExpired { chunk, until_unix_s })
            }
            _ => Ok(()),
        }
    }
}

/// The file of a client's request; `None` for a request that terms do not permit. Chunks of a file of
/// a snapshot are read up to an epoch, those of other files are not.
pub fn file_of(request: &StorageRequest) -> Option<InodeId> {
    let (inode, is_snapshot) = match request {
        StorageRequest::Update(update)
        | StorageRequest::UpdateIf(update, UpdateConditions { at: None, .. }) => {
            (update.chunk.inode, false)
        }
        StorageRequest::Read(read) => (read.chunk.inode, false),
        StorageRequest::ReadUpTo(read) => (read.chunk.inode, true),
        StorageRequest::ReadMany(reads) => (reads.inode, false),
        StorageRequest::QueryChunks(query) => (query.inode, false),
        StorageRequest::QueryLastChunk(query) => (query.inode, false),
        StorageRequest::Forward(_)
        | StorageRequest::Prepare(_)
        | StorageRequest::Confirm(_)
        | StorageRequest::Replace(_)
        | StorageRequest::Repair(_)
        | StorageRequest::SyncStart(_)
        | StorageRequest::SyncMetas(_)
        | StorageRequest::SyncDone(_)
        | StorageRequest::ForgetInodes(_)
        | StorageRequest::Purge(_)
        | StorageRequest::UpdateAt(..)
        | StorageRequest::UpdateIf(..)
        | StorageRequest::QueryVersions(_)
        | StorageRequest::QueryStates(..)
        | StorageRequest::Scrub(..) => return None,
    };
    (snapshot_inode::split(inode).is_some() == is_snapshot).then_some(inode)
}

/// The end of an update in its file, for a payload of this size. A removal or truncation to 0
/// counts as one byte: it leaves a record of the chunk.
pub fn end_of(update: &UpdateRequest, payload_bytes: usize) -> u64 {
    let payload_bytes = payload_bytes as u64;
    let in_chunk = match update.change {
        ContentChange::Write { offset } => u64::from(offset).saturating_add(payload_bytes),
        ContentChange::Truncate { length } => length.into(),
        ContentChange::Replace => payload_bytes,
        ContentChange::Remove => 0,
    };
    let start = u64::from(update.chunk.index) * u64::from(update.chunk_bytes);
    start.saturating_add(in_chunk.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::Checksum;
    use crate::chunk::ContentChange;
    use crate::ids::{ChainVersion, RequestTag, TableId, TableVersion, TargetId};
    use crate::layout::ChainChoice;
    use crate::message::Address;
    use crate::routing::ChainTable;

    const MIB: u64 = 1 << 20;

    const UNNAMED: NamedVolume = NamedVolume::Unnamed;

    fn layout() -> Layout {
        Layout {
            table: TableId(1),
            table_version: TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe: 3,
            chains: ChainChoice::Range { base: 3, seed: 9 },
        }
    }

    fn update(chain: ChainId, index: u32, change: ContentChange) -> UpdateRequest {
        let chain_version = ChainVersion(1);
        UpdateRequest {
            to: Address { chain, chain_version, target: TargetId(1) },
            chunk: ChunkId::new(InodeId(7), index),
            tag: RequestTag::default(),
            change,
            payload_checksum: Checksum::of(&[]),
            chunk_bytes: 1 << 20,
        }
    }

    #[test]
    fn only_chunks_of_the_file_on_its_chains_are_permitted() {
        let chains: Vec<ChainId> = (1..=4).map(ChainId).collect();
        let table = ChainTable { id: TableId(1), version: TableVersion(1), chains };
        let routing = RoutingInfo { tables: vec![table], ..RoutingInfo::default() };
        let layout = layout();
        let resolved = layout.resolve(&routing).unwrap();
        let terms = FileTerms { layout, end: 10 * MIB + 1, until_unix_s: 9, place: None };
        for chain in 0..6 {
            for index in (0..20).chain([u32::MAX]) {
                let request = update(ChainId(chain), index, ContentChange::Remove);
                let result = terms.check((&request, UNNAMED), 0, &routing, 8);
                match (resolved[index as usize % 3] == ChainId(chain), index < 11) {
                    (true, true) => assert_eq!(result, Ok(())),
                    (true, false) => assert!(result.unwrap_err().is_recoverable()),
                    (false, _) => {
                        let error = result.unwrap_err();
                        assert!(
                            matches!(error, TermsError::Chain { .. }) && !error.is_recoverable()
                        );
                    }
                }
                let other = UpdateRequest { chunk_bytes: 64 << 20, ..request };
                let error = terms.check((&other, UNNAMED), 0, &routing, 8).unwrap_err();
                assert!(matches!(error, TermsError::ChunkBytes { .. }) && !error.is_recoverable());
            }
        }
        let request = update(ChainId(1), 0, ContentChange::Remove);
        let old = RoutingInfo::default();
        let error = terms.check((&request, UNNAMED), 0, &old, 8).unwrap_err();
        assert!(error.is_recoverable(), "newer routing may have the table");
    }

    #[test]
    fn the_last_byte_of_an_update_is_checked() {
        let index = 5;
        let start = u64::from(index) * MIB;
        for (change, payload_bytes, end) in [
            (ContentChange::Write { offset: 0 }, 1, start + 1),
            (ContentChange::Write { offset: 4096 }, 4096, start + 8192),
            (ContentChange::Write { offset: u32::MAX }, 7, start + u64::from(u32::MAX) + 7),
            (ContentChange::Truncate { length: 300 }, 0, start + 300),
            (ContentChange::Truncate { length: 0 }, 0, start + 1),
            (ContentChange::Replace, 1 << 20, start + MIB),
            (ContentChange::Remove, 0, start + 1),
        ] {
            let request = update(ChainId(1), index, change);
            assert_eq!(end_of(&request, payload_bytes), end, "{change:?}");
        }
        let table =
            ChainTable { id: TableId(1), version: TableVersion(1), chains: vec![ChainId(1); 4] };
        let routing = RoutingInfo { tables: vec![table], ..RoutingInfo::default() };
        let terms = FileTerms { layout: layout(), end: start + 100, until_unix_s: 9, place: None };
        let write = update(ChainId(1), index, ContentChange::Write { offset: 60 });
        assert_eq!(terms.check((&write, UNNAMED), 40, &routing, 8), Ok(()));
        let error = terms.check((&write, UNNAMED), 40, &routing, 9).unwrap_err();
        assert!(
            matches!(error, TermsError::WriteExpired { until_unix_s: 9, .. })
                && error.is_recoverable()
        );
        let error = terms.check((&write, UNNAMED), 41, &routing, 8).unwrap_err();
        assert!(
            matches!(error, TermsError::BeyondEnd { in_update, .. } if in_update == start + 101),
            "{error}"
        );
        let nothing = FileTerms { layout: layout(), end: 0, until_unix_s: 9, place: None };
        let remove = update(ChainId(1), 0, ContentChange::Remove);
        assert!(nothing.check((&remove, UNNAMED), 0, &routing, 8).is_err());
    }

    #[test]
    fn terms_without_a_place_have_the_bytes_of_releases_without_epochs() {
        let terms = FileTerms { layout: layout(), end: 5, until_unix_s: 9, place: None };
        let bytes = terms.encode().unwrap();
        assert_eq!(bytes, postcard::to_stdvec(&(layout(), 5_u64, 9_u64)).unwrap());
        assert_eq!(FileTerms::decode(&bytes).unwrap(), terms);
        let place = VolumeEpoch { volume: Some(InodeId(40)), epoch: Epoch::new(3, 1) };
        let placed = FileTerms { place: Some(place), ..terms };
        let mut bytes = placed.encode().unwrap();
        assert_eq!(FileTerms::decode(&bytes).unwrap(), placed);
        bytes.push(0);
        assert!(FileTerms::decode(&bytes).is_err());
    }

    #[test]
    fn an_update_names_the_volume_of_the_terms_and_no_later_epoch() {
        let chains = vec![ChainId(1); 4];
        let table = ChainTable { id: TableId(1), version: TableVersion(1), chains };
        let routing = RoutingInfo { tables: vec![table], ..RoutingInfo::default() };
        let volume = NamedVolume::Volume(InodeId(40));
        let at = |epoch| VolumeEpoch { volume: Some(InodeId(40)), epoch };
        let (first, second) = (Epoch::new(3, 1), Epoch::new(3, 2));
        for (place, named, epoch, permitted) in [
            (None, UNNAMED, Epoch::default(), true),
            (None, volume, Epoch::default(), false),
            (None, UNNAMED, first, false),
            (Some(at(first)), volume, first, true),
            // The fence refuses it, or it is repeated.
            (Some(at(first)), volume, Epoch::default(), true),
            (Some(at(first)), volume, second, false),
            (Some(at(first)), UNNAMED, first, false),
            (Some(at(first)), NamedVolume::NoVolume, Epoch::default(), false),
            (Some(at(first)), NamedVolume::Volume(InodeId(41)), Epoch::default(), false),
            (Some(VolumeEpoch::default()), NamedVolume::NoVolume, Epoch::default(), true),
        ] {
            let terms = FileTerms { layout: layout(), end: MIB, until_unix_s: 9, place };
            let mut request = update(ChainId(1), 0, ContentChange::Remove);
            request.chunk = request.chunk.in_epoch(epoch);
            let result = terms.check((&request, named), 0, &routing, 8);
            assert_eq!(result.is_ok(), permitted, "{place:?} {named:?} {epoch}");
            assert!(result.err().is_none_or(|error| error.is_recoverable()));
        }
    }
}
