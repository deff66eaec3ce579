//! Layout of files: the chain of each chunk, specified to the byte. Other implementations must
//! compute the same chains.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::{ChainId, TableId, TableVersion};
use crate::routing::{ChainTable, RoutingInfo};

/// Minimum chunk size in bytes; sizes are powers of two.
pub const CHUNK_BYTES_MIN: u32 = 64 << 10;
/// Maximum chunk size in bytes.
pub const CHUNK_BYTES_MAX: u32 = 64 << 20;

/// How the chains of a file are chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainChoice {
    /// `stripe` chains of the table from index `base` (wrapping), permuted with `seed`.
    Range {
        /// Index of the first chain in the table.
        base: u32,
        /// Seed of the permutation.
        seed: u64,
    },
    /// These chains, as many as the stripe.
    Explicit(Vec<ChainId>),
}

/// Location of a file's chunks. Fixed when the file is created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The chain table.
    pub table: TableId,
    /// Its version at the file's creation.
    pub table_version: TableVersion,
    /// Bytes of a chunk, a power of two.
    pub chunk_bytes: u32,
    /// Number of chains that the chunks are striped over.
    pub stripe: u32,
    /// The chains.
    pub chains: ChainChoice,
}

/// Why a layout is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum LayoutError {
    /// Not a power of two between the bounds.
    #[error(
        "chunk_bytes is {0}: must be a power of two from {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}"
    )]
    ChunkBytes(u32),
    /// More chains than exist, or none.
    #[error("stripe is {stripe}: must be from 1 to the {chains} chains of the table")]
    Stripe {
        /// The requested stripe.
        stripe: u32,
        /// The number of chains.
        chains: usize,
    },
    /// The routing info has no such table version.
    #[error("{table} version {version} is not in the routing info: refresh it")]
    NoTable {
        /// The table.
        table: TableId,
        /// The version.
        version: TableVersion,
    },
    /// The base is outside the table.
    #[error("base is {base}: the table has {chains} chains")]
    Base {
        /// The requested base.
        base: u32,
        /// The number of chains.
        chains: usize,
    },
    /// The file would exceed the range of chunk indexes.
    #[error("offset {0} exceeds the maximum file size")]
    Offset(u64),
}

/// A part of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkSpan {
    /// Index of the chunk in the file.
    pub index: u32,
    /// Offset in the chunk.
    pub offset: u32,
    /// Number of bytes.
    pub length: u32,
}

/// Checks a chunk size.
///
/// # Errors
/// [`LayoutError::ChunkBytes`].
pub fn check_chunk_bytes(bytes: u32) -> Result<(), LayoutError> {
    match bytes.is_power_of_two() && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&bytes) {
        true => Ok(()),
        false => Err(LayoutError::ChunkBytes(bytes)),
    }
}

impl Layout {
    /// Checks everything that does not need the table.
    ///
    /// # Errors
    /// Names the field and the value.
    pub fn validate(&self) -> Result<(), LayoutError> {
        check_chunk_bytes(self.chunk_bytes)?;
        match &self.chains {
            _ if self.stripe == 0 => Err(LayoutError::Stripe { stripe: 0, chains: 0 }),
            ChainChoice::Explicit(chains) if chains.len() != self.stripe as usize => {
                Err(LayoutError::Stripe { stripe: self.stripe, chains: chains.len() })
            }
            _ => Ok(()),
        }
    }

    /// Maximum length of a file: chunk indexes have 32 bits.
    #[must_use]
    pub fn length_max(&self) -> u64 {
        u64::from(self.chunk_bytes) << 32
    }

    /// The chains of the file in stripe order: chunk i is on `chains[i % stripe]`.
    ///
    /// # Errors
    /// The table version is unknown, or too small for the layout.
    pub fn resolve(&self, routing: &RoutingInfo) -> Result<Vec<ChainId>, LayoutError> {
        self.validate()?;
        if let ChainChoice::Explicit(chains) = &self.chains {
            return Ok(chains.clone());
        }
        let table = routing
            .table(self.table, self.table_version)
            .ok_or(LayoutError::NoTable { table: self.table, version: self.table_version })?;
        self.resolve_in(table)
    }

    /// As [`Self::resolve`], with a given table.
    ///
    /// # Errors
    /// The table is too small for the layout.
    pub fn resolve_in(&self, table: &ChainTable) -> Result<Vec<ChainId>, LayoutError> {
        self.validate()?;
        let (base, seed) = match &self.chains {
            ChainChoice::Explicit(chains) => return Ok(chains.clone()),
            &ChainChoice::Range { base, seed } => (base, seed),
        };
        let count = table.chains.len();
        let stripe = self.stripe as usize;
        if stripe > count {
            return Err(LayoutError::Stripe { stripe: self.stripe, chains: count });
        }
        if base as usize >= count {
            return Err(LayoutError::Base { base, chains: count });
        }
        let mut chains: Vec<ChainId> =
            (0..stripe).map(|i| table.chains[(base as usize + i) % count]).collect();
        permute(&mut chains, seed);
        Ok(chains)
    }

    /// The parts of chunks that contain the bytes `offset .. offset + length` of a file.
    ///
    /// # Errors
    /// The range exceeds the maximum file size.
    pub fn spans(&self, offset: u64, length: u64) -> Result<Vec<ChunkSpan>, LayoutError> {
        self.validate()?;
        let chunk_bytes = u64::from(self.chunk_bytes);
        let end = offset.checked_add(length).ok_or(LayoutError::Offset(offset))?;
        if length > 0 && (end - 1) / chunk_bytes > u64::from(u32::MAX) {
            return Err(LayoutError::Offset(end));
        }
        let mut spans = Vec::new();
        let mut at = offset;
        while at < end {
            let within = at % chunk_bytes;
            let take = (chunk_bytes - within).min(end - at);
            // The casts hold: the index was checked above, the rest is below chunk_bytes (u32).
            spans.push(ChunkSpan {
                index: (at / chunk_bytes) as u32,
                offset: within as u32,
                length: take as u32,
            });
            at += take;
        }
        Ok(spans)
    }
}

/// The permutation of a stripe. Fisher–Yates from the last place down to the second; for place
/// `i` the partner is `next() % (i + 1)`, where `next` is SplitMix64 (Steele, Lea, Flood 2014)
/// started with `seed`. The modulo's bias is below 2^-32 for any table and keeps this portable.
pub fn permute<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    for place in (1..items.len()).rev() {
        let partner = (next() % (place as u64 + 1)) as usize;
        items.swap(place, partner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(stripe: u32, chains: ChainChoice) -> Layout {
        Layout {
            table: TableId(1),
            table_version: TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe,
            chains,
        }
    }

    fn table(count: u32) -> ChainTable {
        ChainTable {
            id: TableId(1),
            version: TableVersion(1),
            chains: (100..100 + count).map(ChainId).collect(),
        }
    }

    #[test]
    fn the_permutation_is_pinned() {
        let mut items: Vec<u32> = (0..8).collect();
        permute(&mut items, 0);
        assert_eq!(items, PINNED_SEED_0);
        let mut items: Vec<u32> = (0..8).collect();
        permute(&mut items, 42);
        assert_eq!(items, PINNED_SEED_42);
    }

    // Computed with an independent implementation of the paragraph above (Python integers).
    const PINNED_SEED_0: [u32; 8] = [2, 5, 0, 3, 4, 6, 1, 7];
    const PINNED_SEED_42: [u32; 8] = [3, 1, 6, 2, 4, 0, 7, 5];

    #[test]
    fn a_range_wraps_around_the_table() {
        let chains =
            layout(3, ChainChoice::Range { base: 3, seed: 5 }).resolve_in(&table(4)).unwrap();
        let mut sorted = chains.clone();
        sorted.sort();
        assert_eq!(sorted, [ChainId(100), ChainId(101), ChainId(103)]);
    }

    #[test]
    fn invalid_layouts_name_the_field_and_the_value() {
        let mut bad = layout(1, ChainChoice::Range { base: 0, seed: 0 });
        bad.chunk_bytes = 100_000;
        assert!(bad.validate().unwrap_err().to_string().contains("chunk_bytes is 100000"));
        let wide = layout(9, ChainChoice::Range { base: 0, seed: 0 });
        let error = wide.resolve_in(&table(4)).unwrap_err();
        assert!(error.to_string().contains("stripe is 9"), "{error}");
        let far = layout(1, ChainChoice::Range { base: 4, seed: 0 });
        assert_eq!(
            far.resolve_in(&table(4)).unwrap_err(),
            LayoutError::Base { base: 4, chains: 4 }
        );
        assert!(layout(0, ChainChoice::Explicit(vec![])).validate().is_err());
    }

    #[test]
    fn spans_split_at_chunk_boundaries() {
        let layout = layout(1, ChainChoice::Explicit(vec![ChainId(1)]));
        let spans = layout.spans((1 << 20) - 10, (1 << 20) + 20).unwrap();
        let parts: Vec<_> = spans.iter().map(|s| (s.index, s.offset, s.length)).collect();
        assert_eq!(parts, [(0, (1 << 20) - 10, 10), (1, 0, 1 << 20), (2, 0, 10)]);
        assert!(layout.spans(u64::MAX - 4, 4).is_err());
        assert_eq!(layout.spans(5, 0).unwrap(), []);
    }
}
