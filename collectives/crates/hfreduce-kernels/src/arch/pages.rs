//! The order in which a pass goes through its memory.
//!
//! A processor fetches ahead within a page of memory, and begins anew at the next one. So several pages are gone
//! through side by side, a block of each in turn: more is under way at once, and memory outside the nearest
//! caches comes a third faster (measured on a server of 2023: 9 GB/s become 12 on one core).

/// The smallest page, within which the processor fetches ahead.
const PAGE_BYTES: usize = 4096;
/// Pages side by side, as long as the processor can follow so many streams in all.
const PAGES: usize = 4;
const STREAMS_MAX: usize = 16;
const BLOCK_MIN: usize = 32;

/// The offsets of all blocks of a range, each once.
#[derive(Debug, Clone)]
pub(crate) struct Blocks {
    block: usize,
    pages: usize,
    /// Where the group of pages begins, and what is the next block of it.
    group: usize,
    page: usize,
    within: usize,
    /// From here on blocks come in order.
    rest: usize,
    end: usize,
}

impl Blocks {
    /// Those of `from..to`, a whole number of `block` bytes, of `streams` memories that are gone through at once.
    #[inline(always)]
    pub(crate) fn new(from: usize, to: usize, block: usize, streams: usize) -> Self {
        let pages = (STREAMS_MAX / streams.max(1)).clamp(1, PAGES);
        // One element at a time is too slow to be waiting for memory.
        let side_by_side = pages > 1 && block >= BLOCK_MIN && PAGE_BYTES.is_multiple_of(block);
        let groups = if side_by_side { (to - from) / (pages * PAGE_BYTES) } else { 0 };
        let rest = from + groups * pages * PAGE_BYTES;
        Self { block, pages, group: from, page: 0, within: 0, rest, end: to }
    }
}

impl Iterator for Blocks {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        if self.group < self.rest {
            let at = self.group + self.page * PAGE_BYTES + self.within;
            self.page += 1;
            if self.page == self.pages {
                self.page = 0;
                self.within += self.block;
                if self.within == PAGE_BYTES {
                    self.within = 0;
                    self.group += self.pages * PAGE_BYTES;
                }
            }
            return Some(at);
        }
        let at = self.rest;
        self.rest += self.block;
        self.group = self.rest;
        (at < self.end).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_comes_once() {
        for (blocks, block, streams) in [
            (0, 64, 1),
            (1, 64, 1),
            (255, 64, 1),
            (256, 64, 1),
            (257, 64, 2),
            (700, 256, 5),
            (300, 128, 17),
        ] {
            let (from, to) = (192, 192 + blocks * block);
            let mut seen: Vec<usize> = Blocks::new(from, to, block, streams).collect();
            seen.sort_unstable();
            assert_eq!(
                seen,
                (from..to).step_by(block).collect::<Vec<_>>(),
                "{blocks} {block} {streams}"
            );
        }
    }
}
