//! What of a file's chunks the holder of a capability may change: those that the file's layout has,
//! where it has them.
//!
//! The metadata service signs it, and a storage service checks each update with it, offline. A chunk
//! that is on no chain of the layout, or beyond what was reserved, would count for no quota, and nothing
//! would remove it with its file.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::{ChainId, ChunkId};
use crate::layout::{Layout, LayoutError};
use crate::message::UpdateRequest;
use crate::routing::RoutingInfo;

/// What a capability says of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileTerms {
    /// Where its chunks are.
    pub layout: Layout,
    /// How many there may be: indexes below.
    pub chunks: u64,
}

/// Why an update is outside the terms.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TermsError {
    /// Chunks of another size.
    #[error("{chunk} with {named} bytes in a chunk: the chunks of its file have {chunk_bytes}")]
    ChunkBytes {
        /// Which.
        chunk: ChunkId,
        /// As in the update.
        named: u32,
        /// As in the layout.
        chunk_bytes: u32,
    },
    /// Another chain.
    #[error("{chunk} on {named}: the layout of its file has it on {chain}")]
    Chain {
        /// Which.
        chunk: ChunkId,
        /// As in the update.
        named: ChainId,
        /// As in the layout.
        chain: ChainId,
    },
    /// Beyond what was reserved when the capability was signed.
    #[error(
        "{chunk} is not below the {chunks} chunks of the capability; reserve, and get a new one"
    )]
    Index {
        /// Which.
        chunk: ChunkId,
        /// How many there may be.
        chunks: u64,
    },
    /// The layout does not fit the routing known here, which may be about to come.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl TermsError {
    /// Whether a new capability, or newer routing here, may heal it.
    pub fn heals(&self) -> bool {
        matches!(self, Self::Index { .. } | Self::Layout(LayoutError::NoTable { .. }))
    }
}

impl FileTerms {
    /// The terms of a file none of whose chunks is at or beyond byte `end`.
    pub fn of(layout: &Layout, end: u64) -> Self {
        let chunks = end.div_ceil(u64::from(layout.chunk_bytes.max(1)));
        Self { layout: layout.clone(), chunks: chunks.min(1 << 32) }
    }

    /// Whether an update is of a chunk that the file has, on its chain.
    ///
    /// # Errors
    /// [`TermsError`].
    pub fn check(&self, update: &UpdateRequest, routing: &RoutingInfo) -> Result<(), TermsError> {
        let UpdateRequest { chunk, to, chunk_bytes: named, .. } = *update;
        let (chunk_bytes, chunks) = (self.layout.chunk_bytes, self.chunks);
        if named != chunk_bytes {
            return Err(TermsError::ChunkBytes { chunk, named, chunk_bytes });
        }
        let chains = self.layout.resolve(routing)?;
        // A layout has at least one chain.
        let place = chunk.index as usize % chains.len().max(1);
        let chain = chains.get(place).copied().unwrap_or_default();
        if to.chain != chain {
            return Err(TermsError::Chain { chunk, named: to.chain, chain });
        }
        match u64::from(chunk.index) < chunks {
            true => Ok(()),
            false => Err(TermsError::Index { chunk, chunks }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::Checksum;
    use crate::chunk::ContentChange;
    use crate::ids::{ChainVersion, InodeId, RequestTag, TableId, TableVersion, TargetId};
    use crate::layout::ChainChoice;
    use crate::message::Address;
    use crate::routing::ChainTable;

    #[test]
    fn only_chunks_of_the_file_on_its_chains_pass() {
        let chains: Vec<ChainId> = (1..=4).map(ChainId).collect();
        let table = ChainTable { id: TableId(1), version: TableVersion(1), chains };
        let routing = RoutingInfo { tables: vec![table], ..RoutingInfo::default() };
        let layout = Layout {
            table: TableId(1),
            table_version: TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe: 3,
            chains: ChainChoice::Range { base: 3, seed: 9 },
        };
        let resolved = layout.resolve(&routing).unwrap();
        let terms = FileTerms::of(&layout, 10 << 20 | 1);
        assert_eq!(terms.chunks, 11);
        for chain in 0..6 {
            for index in (0..20).chain([u32::MAX]) {
                let to = Address {
                    chain: ChainId(chain),
                    chain_version: ChainVersion(1),
                    target: TargetId(1),
                };
                let update = UpdateRequest {
                    to,
                    chunk: ChunkId::new(InodeId(7), index),
                    tag: RequestTag::default(),
                    change: ContentChange::Remove,
                    payload_checksum: Checksum::of(&[]),
                    chunk_bytes: 1 << 20,
                };
                let result = terms.check(&update, &routing);
                match (resolved[index as usize % 3] == ChainId(chain), index < 11) {
                    (true, true) => assert_eq!(result, Ok(())),
                    (true, false) => assert!(result.unwrap_err().heals()),
                    (false, _) => {
                        let error = result.unwrap_err();
                        assert!(matches!(error, TermsError::Chain { .. }) && !error.heals());
                    }
                }
                let other = UpdateRequest { chunk_bytes: 64 << 20, ..update };
                let error = terms.check(&other, &routing).unwrap_err();
                assert!(matches!(error, TermsError::ChunkBytes { .. }) && !error.heals());
            }
        }
        let old = RoutingInfo::default();
        let to = Address { chain: ChainId(1), chain_version: ChainVersion(1), target: TargetId(1) };
        let update = UpdateRequest {
            to,
            chunk: ChunkId::new(InodeId(7), 0),
            tag: RequestTag::default(),
            change: ContentChange::Remove,
            payload_checksum: Checksum::of(&[]),
            chunk_bytes: 1 << 20,
        };
        assert!(terms.check(&update, &old).unwrap_err().heals(), "the table may be on its way");
        assert_eq!(FileTerms::of(&layout, u64::MAX).chunks, 1 << 32);
        assert_eq!(FileTerms::of(&layout, 0).chunks, 0);
    }
}
