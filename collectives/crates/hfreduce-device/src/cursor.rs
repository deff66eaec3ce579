//! The next bytes of an operation to copy: a pure function of the progress so far.
//!
//! Both directions are prefixes: `0 … landed … issued … total`. A chunk is a whole one, or the remainder.

use std::ops::Range;

/// One direction of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    total: usize,
    chunk: usize,
    issued: usize,
    landed: usize,
}

impl Cursor {
    /// A cursor over `total` bytes, copied in chunks of `chunk` bytes.
    pub fn new(total: usize, chunk: usize) -> Self {
        Self { total, chunk: chunk.max(1), issued: 0, landed: 0 }
    }

    /// The next range to queue, if the bytes before `available` may be copied.
    pub fn next(&self, available: usize) -> Option<Range<usize>> {
        let end = (self.issued + self.chunk).min(self.total);
        (self.issued < end && end <= available).then_some(self.issued..end)
    }

    /// Records that the range was queued.
    pub fn issued(&mut self, range: &Range<usize>) {
        self.issued = range.end;
    }

    /// Records that the bytes before `end` have been copied.
    pub fn landed(&mut self, end: usize) {
        self.landed = self.landed.max(end);
    }

    /// True if all bytes are queued.
    pub fn is_issued(&self) -> bool {
        self.issued == self.total
    }

    /// True once all bytes have been copied.
    pub fn is_landed(&self) -> bool {
        self.landed == self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_or_the_rest_and_cover_all() {
        let mut cursor = Cursor::new(10, 4);
        assert_eq!(cursor.next(3), None);
        let mut ranges = vec![];
        while let Some(range) = cursor.next(10) {
            cursor.issued(&range);
            ranges.push(range);
        }
        assert_eq!(ranges, [0..4, 4..8, 8..10]);
        assert!(cursor.is_issued() && !cursor.is_landed());
        cursor.landed(10);
        assert!(cursor.is_landed());
    }

    #[test]
    fn an_empty_copy_is_complete_immediately() {
        let cursor = Cursor::new(0, 4);
        assert!(cursor.is_issued() && cursor.is_landed() && cursor.next(0).is_none());
    }
}
