//! One page of a file's written chunks: a set of 4,096 bits.

/// Bits of a page, as a power of two.
pub(crate) const PAGE_SHIFT: u32 = 12;
/// Bits of a page.
pub(crate) const PAGE_BITS: u64 = 1 << PAGE_SHIFT;
const WORDS: usize = PAGE_BITS as usize / 64;
/// Bytes of a page stored as a bitmap.
const BITMAP_BYTES: usize = WORDS * 8;

/// A set of bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Page([u64; WORDS]);

impl Page {
    pub(crate) fn empty() -> Self {
        Self([0; WORDS])
    }

    /// Decodes a stored page: pairs of 16-bit numbers, the first and last bit of each run, or a
    /// bitmap if that is not longer. `None` if it is neither.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut page = Self::empty();
        if bytes.len() == BITMAP_BYTES {
            for (word, bytes) in page.0.iter_mut().zip(bytes.chunks_exact(8)) {
                *word = u64::from_le_bytes(bytes.try_into().ok()?);
            }
            return Some(page);
        }
        if !bytes.len().is_multiple_of(4) || bytes.len() > BITMAP_BYTES {
            return None;
        }
        for run in bytes.chunks_exact(4) {
            let first = u64::from(u16::from_le_bytes([run[0], run[1]]));
            let last = u64::from(u16::from_le_bytes([run[2], run[3]]));
            if first > last || last >= PAGE_BITS {
                return None;
            }
            page.set(first, last + 1);
        }
        Some(page)
    }

    /// The reverse of [`Page::decode`].
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut runs = Vec::new();
        for (first, end) in self.runs() {
            // Both are below 4,096.
            runs.extend((first as u16).to_le_bytes());
            runs.extend((end as u16 - 1).to_le_bytes());
        }
        if runs.len() < BITMAP_BYTES {
            return runs;
        }
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Its runs of bits, first and end of each.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut bit = 0;
        std::iter::from_fn(move || {
            let first = self.next(bit, true)?;
            bit = self.next(first, false).unwrap_or(PAGE_BITS);
            Some((first, bit))
        })
    }

    /// Sets the bits from `first` up to `end`.
    pub(crate) fn set(&mut self, first: u64, end: u64) {
        self.change(first, end, |word, mask| *word |= mask);
    }

    /// Clears all bits from `first`.
    pub(crate) fn clear_from(&mut self, first: u64) {
        self.change(first, PAGE_BITS, |word, mask| *word &= !mask);
    }

    pub(crate) fn contains(&self, bit: u64) -> bool {
        self.0.get(bit as usize / 64).is_some_and(|word| word & (1 << (bit % 64)) != 0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.0.iter().all(|word| *word == u64::MAX)
    }

    fn change(&mut self, first: u64, end: u64, change: impl Fn(&mut u64, u64)) {
        for (number, word) in self.0.iter_mut().enumerate() {
            let base = number as u64 * 64;
            let (from, to) = (first.clamp(base, base + 64), end.clamp(base, base + 64));
            if from < to {
                change(word, (u64::MAX >> (64 - (to - from))) << (from - base));
            }
        }
    }

    /// The first bit at or after `from` that is `set`.
    fn next(&self, from: u64, set: bool) -> Option<u64> {
        let mut bit = from;
        while bit < PAGE_BITS {
            let word = self.0[bit as usize / 64];
            let word = (if set { word } else { !word }) >> (bit % 64);
            if word != 0 {
                return Some(bit + u64::from(word.trailing_zeros()));
            }
            bit = (bit / 64 + 1) * 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_invalid_page_is_refused() {
        assert_eq!(Page::decode(&[]), Some(Page::empty()));
        for bytes in [&[0u8, 0, 0][..], &[2, 0, 1, 0], &[0, 0, 0, 16], &[0; 516]] {
            assert_eq!(Page::decode(bytes), None, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn a_page_is_the_set_of_its_bits_and_at_most_512_bytes(
            runs in prop::collection::vec((0..PAGE_BITS, 1..40u64), 0..300),
            cut in 0..PAGE_BITS,
        ) {
            let mut page = Page::empty();
            let mut model = std::collections::BTreeSet::new();
            for (first, length) in runs {
                let end = (first + length).min(PAGE_BITS);
                page.set(first, end);
                model.extend(first..end);
            }
            let encoded = page.encode();
            prop_assert!(encoded.len() <= BITMAP_BYTES);
            prop_assert_eq!(Page::decode(&encoded), Some(page.clone()));
            page.clear_from(cut);
            model.retain(|bit| *bit < cut);
            for bit in 0..PAGE_BITS {
                prop_assert_eq!(page.contains(bit), model.contains(&bit));
            }
            prop_assert_eq!(page.is_empty(), model.is_empty());
            page.set(0, PAGE_BITS);
            prop_assert!(page.is_full() && page.encode().len() == 4);
        }
    }
}
