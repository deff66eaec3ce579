//! Operations as submitted: fingerprint, buffers and transfers.

use std::sync::Arc;

use hfreduce_core::Fingerprint;
use hfreduce_kernels::Store;
use serde::{Deserialize, Serialize};

use hfreduce_shm::watermarks::Watermarks;

/// Chunks from this size belong to large operations: the caller does not read their first results
/// before the last ones have evicted them from the caches, so the copy bypasses those.
pub(crate) const STREAM_FROM_BYTES: usize = 128 << 10;

/// Memory of the caller: one or several pieces that form one buffer.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    pieces: Vec<Piece>,
    bytes: usize,
    watermarks: Option<Arc<Watermarks>>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    start: usize,
    bytes: usize,
    memory: *mut u8,
}

// SAFETY: a buffer is an address range; its creator promises (see `Buffer::new`) that the memory
// may be used from any thread until the operation has ended.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Creates a buffer of one or several ranges.
    ///
    /// # Safety
    /// Every range must be readable, and writable where the operation writes its output, from any
    /// thread, and must not be accessed by the caller until the operation has ended.
    pub unsafe fn new(pieces: impl IntoIterator<Item = (*mut u8, usize)>) -> Self {
        let mut buffer = Self::default();
        for (memory, bytes) in pieces {
            if bytes > 0 {
                buffer.pieces.push(Piece { start: buffer.bytes, bytes, memory });
                buffer.bytes += bytes;
            }
        }
        buffer
    }

    /// The same memory, which fills and drains while an operation along the trees uses it.
    /// Point-to-point operations do not support it: they read their input when they are called.
    pub fn pipelined(self, watermarks: Arc<Watermarks>) -> Self {
        Self { watermarks: Some(watermarks), ..self }
    }

    /// True if the bytes before `end` have arrived.
    pub fn has_arrived(&self, end: usize) -> bool {
        self.watermarks.as_ref().is_none_or(|watermarks| watermarks.arrived() >= end)
    }

    /// Number of bytes that have arrived; none if all were available from the start.
    pub fn arrived(&self) -> Option<usize> {
        self.watermarks.as_ref().map(|watermarks| watermarks.arrived().min(self.bytes))
    }

    /// Reports that the bytes before `end` are final.
    pub fn deliver(&self, end: usize) {
        if let Some(watermarks) = &self.watermarks {
            watermarks.deliver(end);
        }
    }

    /// True if it is the same memory.
    pub fn is(&self, other: &Self) -> bool {
        let places = |buffer: &Self| -> Vec<_> {
            buffer.pieces.iter().map(|piece| (piece.memory.addr(), piece.bytes)).collect()
        };
        places(self) == places(other)
    }

    /// True if the memory fills and drains during the operation.
    pub fn is_pipelined(&self) -> bool {
        self.watermarks.is_some()
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies a range of one piece into a range of one piece of another buffer; does nothing if
    /// either spans pieces.
    pub fn copy_to(&self, offset: usize, to: &Buffer, at: usize, bytes: usize) {
        let (from, to) = (self.contiguous(offset, bytes), to.contiguous(at, bytes));
        if let (Some(from), Some(to)) = (from, to)
            && from != to
        {
            // SAFETY: both ranges lie inside their buffers (see `Buffer::new`); memmove, because
            // they may overlap.
            unsafe { std::ptr::copy(from, to, bytes) };
        }
    }

    /// Address of a contiguous range.
    pub fn contiguous(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let at = self.piece_at(offset)?;
        let piece = &self.pieces[at];
        let within = offset - piece.start;
        // SAFETY: `within + bytes` was just checked against the piece.
        (within + bytes <= piece.bytes).then(|| unsafe { piece.memory.add(within) })
    }

    /// The ranges that make up `offset..offset + bytes`, in order.
    pub fn ranges(&self, offset: usize, bytes: usize) -> impl Iterator<Item = (*mut u8, usize)> {
        let first = self.piece_at(offset).unwrap_or(self.pieces.len());
        let mut offset = offset;
        let end = (offset + bytes).min(self.bytes);
        self.pieces[first..].iter().map_while(move |piece| {
            let take = end.checked_sub(offset).filter(|remaining| *remaining > 0)?;
            let within = offset - piece.start;
            let take = take.min(piece.bytes - within);
            offset += take;
            // SAFETY: `within < piece.bytes`, because `offset` moves from piece to piece.
            Some((unsafe { piece.memory.add(within) }, take))
        })
    }

    /// Copies a range of this buffer to `place`.
    ///
    /// # Safety
    /// `place` must be writable for `bytes`; the promise of [`Buffer::new`] covers the rest.
    pub(crate) unsafe fn gather(&self, offset: usize, bytes: usize, place: *mut u8) {
        let mut at = place;
        for (memory, count) in self.ranges(offset, bytes) {
            if memory.addr().abs_diff(at.addr()) >= count {
                // SAFETY: `count` bytes are in the range and still fit the destination, and do not
                // overlap.
                unsafe { hfreduce_kernels::copy_raw(Store::Cached, memory, at, count) };
            } else if memory != at {
                // SAFETY: the same; memmove, as an output may overlap its input.
                unsafe { std::ptr::copy(memory, at, count) };
            }
            at = at.wrapping_add(count);
        }
    }

    /// Copies a result from `place` to a range of this buffer.
    ///
    /// # Safety
    /// `place` must be readable for `bytes`; the promise of [`Buffer::new`] covers the rest.
    pub(crate) unsafe fn scatter(&self, offset: usize, bytes: usize, place: *const u8) {
        let mut at = place;
        for (memory, count) in self.ranges(offset, bytes) {
            if memory.cast_const() == at {
                // Written in place.
            } else if bytes >= STREAM_FROM_BYTES {
                // SAFETY: `count` bytes are in the range; a result that is not written in the
                // caller's memory is in the segment, which does not overlap it.
                unsafe { hfreduce_kernels::copy_raw(Store::Streaming, at, memory, count) };
            } else {
                // SAFETY: as in `gather`.
                unsafe { std::ptr::copy(at, memory, count) };
            }
            at = at.wrapping_add(count);
        }
    }

    fn piece_at(&self, offset: usize) -> Option<usize> {
        let after = self.pieces.partition_point(|piece| piece.start <= offset);
        let at = after.checked_sub(1)?;
        (offset < self.pieces[at].start + self.pieces[at].bytes).then_some(at)
    }
}

/// One operation.
#[derive(Debug)]
pub struct Operation {
    /// What all ranks must agree on.
    pub fingerprint: Fingerprint,
    /// The input buffer.
    pub input: Buffer,
    /// The output buffer; may be the same memory.
    pub output: Buffer,
    /// Point-to-point transfers.
    pub transfers: Vec<Transfer>,
}

/// One message between two ranks, as part of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The other rank; `ANY_RANK` until a receive from any rank is matched.
    pub peer: u32,
    /// True for a send.
    pub sends: bool,
    /// Offset in the input (send) or output (receive).
    pub offset: usize,
    /// Its length.
    pub bytes: usize,
    /// Tag by which sends and receives are matched.
    pub tag: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_ranges_count_as_one_buffer() {
        let mut one = [0_u8; 10];
        let mut two = [0_u8; 6];
        let (a, b) = (one.as_mut_ptr(), two.as_mut_ptr());
        // SAFETY: both arrays outlive the buffer and nothing is delivered.
        let buffer = unsafe { Buffer::new([(a, 10), (std::ptr::null_mut(), 0), (b, 6)]) };
        assert_eq!(buffer.bytes(), 16);
        assert_eq!(buffer.contiguous(10, 6), Some(b));
        assert_eq!(buffer.contiguous(9, 2), None);
        let ranges: Vec<_> = buffer.ranges(8, 5).collect();
        assert_eq!(ranges, [(a.wrapping_add(8), 2), (b, 3)]);
        assert_eq!(buffer.ranges(16, 4).count(), 0);
        assert_eq!(buffer.ranges(15, 4).collect::<Vec<_>>(), [(b.wrapping_add(5), 1)]);
    }
}
