//! Layout of the segment: its parts, their offsets and sizes.

use std::sync::atomic::AtomicU64;

use super::arrivals::ArrivalBlock;
use super::primitives::{OnceRecord, PeerAccess, PublishedCounter, Seqlock, SleepState};
use hfreduce_core::FINGERPRINT_BYTES;
use hfreduce_core::OUTSTANDING_MAX;
use hfreduce_core::error::REASON_BYTES_MAX;

/// Operations of a rank whose registered memory is known at a time. A rank registers none while the
/// oldest of this many is in progress, so no entry is overwritten while it is read.
pub const REGISTERED_MAX: usize = 16;
/// Fingerprints kept for each rank. No rank starts more operations than this after one that another
/// rank of the node has not ended (see `driver::operations`), so every fingerprint that is still
/// compared is kept: 16 KiB per rank.
pub const FINGERPRINTS_KEPT: usize = OUTSTANDING_MAX;
/// Slots of each rank for pieces of messages to other ranks of its node.
pub const MESSAGE_SLOTS: usize = 8;
pub(super) const PAGE_BYTES: usize = 4096;

#[repr(C)]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) abort: OnceRecord<{ REASON_BYTES_MAX / 8 }>,
}

#[repr(C, align(128))]
pub(super) struct RankBlock {
    /// A cache line that is read by other ranks and seldom changes.
    pub(super) beat: AtomicU64,
    pub(super) closed: PublishedCounter,
    pub(super) sleeping: SleepState,
    pub(super) peer_access: PeerAccess,
    _gap: [u8; 40],
    /// A cache line that changes with every operation.
    pub(super) entered: PublishedCounter,
    pub(super) staged: PublishedCounter,
    pub(super) published: PublishedCounter,
    pub(super) released: PublishedCounter,
    pub(super) ended: PublishedCounter,
    _gap2: [u8; 24],
    /// Offsets of input and output; stamped like the fingerprints.
    pub(super) registered: [Seqlock<2>; REGISTERED_MAX],
    /// Stamped with the sequence number + 1.
    pub(super) fingerprints: [Seqlock<{ FINGERPRINT_BYTES / 8 }>; FINGERPRINTS_KEPT],
}

/// Sizes that all ranks of a segment must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranks on this node.
    pub locals: usize,
    /// Slots per rank for chunks.
    pub slots: usize,
    /// Slots for ring accumulation; 0 if it is not used.
    pub ring_slots: usize,
    /// Bytes of one slot; a multiple of the page size.
    pub slot_bytes: usize,
}

impl Shape {
    #[inline]
    pub(super) fn ranks_at(&self) -> usize {
        PAGE_BYTES
    }

    #[inline]
    pub(super) fn arrivals_at(&self) -> usize {
        self.ranks_at() + self.locals * size_of::<RankBlock>()
    }

    #[inline]
    pub(super) fn data_at(&self) -> usize {
        (self.arrivals_at() + self.slots * size_of::<ArrivalBlock>()).next_multiple_of(PAGE_BYTES)
    }

    /// Slots for chunks; those for messages follow.
    #[inline]
    pub(super) fn chunk_slots(&self) -> usize {
        (self.locals + 1) * self.slots + self.ring_slots
    }

    /// Slots for messages; 0 for a single rank.
    #[inline]
    pub(super) fn message_slots(&self) -> usize {
        if self.locals > 1 { self.locals * MESSAGE_SLOTS } else { 0 }
    }

    /// Size of the whole segment.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.data_at() + (self.chunk_slots() + self.message_slots()) * self.slot_bytes
    }
}
