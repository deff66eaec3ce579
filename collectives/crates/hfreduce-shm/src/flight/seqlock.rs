//! Seqlock of flight records: a stamp before the words is odd while they change, and a reader reads
//! everything twice.
//!
//! One reading is not enough: it may see the stamp from before a change and words from after it.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use fabric::atomics::{Atomic, Atomics};

/// Changes the words that belong to a stamp, which is odd `during` the change and even `after` it;
/// no value is used twice.
pub fn change<A: Atomics>(stamp: &A::U64, during: u64, after: u64, change: impl FnOnce()) {
    stamp.store(during, Relaxed);
    A::fence(Release);
    change();
    stamp.store(after, Release);
}

/// Writes a text: its length in bytes, which is 0 during the change, then the bytes. Truncates it
/// to the available space.
pub fn write_text<A: Atomics>(place: &[A::U64], bytes: &[u8]) {
    let Some((length, words)) = place.split_first() else { return };
    let bytes = &bytes[..bytes.len().min(words.len() * 8)];
    length.store(0, Relaxed);
    A::fence(Release);
    for (word, bytes) in words.iter().zip(bytes.chunks(8)) {
        let mut value = [0; 8];
        value[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(value), Relaxed);
    }
    length.store(bytes.len() as u64, Release);
}

/// Reads all words. A later reading sees at least what this one saw.
pub fn read_words<A: Atomics>(words: &[A::U64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.load(Acquire).to_le_bytes()).collect()
}

/// Two readings.
#[derive(Clone, Copy)]
pub struct DoubleRead<'a>(pub &'a [u8], pub &'a [u8]);

impl DoubleRead<'_> {
    /// The word at this index, from the first reading.
    pub fn get(&self, at: usize) -> u64 {
        word(self.0, at)
    }

    /// True if this stamp did not change: the words that belong to it are those of the first
    /// reading.
    pub fn is_settled(&self, stamp: usize) -> bool {
        let value = self.get(stamp);
        value.is_multiple_of(2) && word(self.1, stamp) == value
    }

    /// The text in the words `at..end`, if both readings agree.
    pub fn text(&self, at: usize, end: usize) -> Option<&[u8]> {
        let length = (self.get(at) as usize).min((end - at - 1) * 8);
        let range = at * 8..at * 8 + 8 + length;
        (self.0[range.clone()] == self.1[range.clone()]).then(|| &self.0[range][8..])
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod models {
    use std::sync::Arc;

    use super::*;
    use fabric::atomics::model::*;

    fn write<A: Atomics>(words: &[A::U64; 3], number: u64) {
        change::<A>(&words[0], number * 2 + 1, number * 2 + 2, || {
            words[1].store(number + 10, Relaxed);
            words[2].store(number + 10, Relaxed);
        });
    }

    fn a_record_is_whole<A: Atomics>(twice: bool) {
        let words: Arc<[A::U64; 3]> = Arc::new(std::array::from_fn(|_| A::U64::default()));
        write::<A>(&words, 0);
        let other = words.clone();
        let writer = loom::thread::spawn(move || write::<A>(&other, 1));
        let first = read_words::<A>(&*words);
        let second = if twice { read_words::<A>(&*words) } else { first.clone() };
        let reads = DoubleRead(&first, &second);
        if reads.is_settled(0) {
            let number = (reads.get(0) - 2) / 2;
            assert_eq!((reads.get(1), reads.get(2)), (number + 10, number + 10));
        }
        writer.join().unwrap();
    }

    #[test]
    fn a_stable_stamp_means_a_consistent_record() {
        every_order(|| a_record_is_whole::<Modelled>(true));
        assert!(breaks(|| a_record_is_whole::<Weak<NO_RELEASE>>(true)));
        assert!(breaks(|| a_record_is_whole::<Weak<NO_ACQUIRE>>(true)));
        assert!(breaks(|| a_record_is_whole::<Weak<NO_FENCE>>(true)));
        assert!(breaks(|| a_record_is_whole::<Modelled>(false)), "one reading is not enough");
    }
    fn a_text_is_whole<A: Atomics>(twice: bool) {
        let words: Arc<[A::U64; 3]> = Arc::new(std::array::from_fn(|_| A::U64::default()));
        write_text::<A>(&*words, &[1; 16]);
        let other = words.clone();
        let writer = loom::thread::spawn(move || write_text::<A>(&*other, &[2; 16]));
        let first = read_words::<A>(&*words);
        let second = if twice { read_words::<A>(&*words) } else { first.clone() };
        if let Some(text) = DoubleRead(&first, &second).text(0, 3) {
            assert!(text.is_empty() || text == [1; 16] || text == [2; 16], "{text:?}");
        }
        writer.join().unwrap();
        let last = read_words::<A>(&*words);
        assert_eq!(DoubleRead(&last, &last).text(0, 3), Some(&[2; 16][..]));
    }

    #[test]
    fn a_text_that_two_readings_agree_on_is_consistent() {
        every_order(|| a_text_is_whole::<Modelled>(true));
        assert!(breaks(|| a_text_is_whole::<Weak<NO_RELEASE>>(true)));
        assert!(breaks(|| a_text_is_whole::<Weak<NO_ACQUIRE>>(true)));
        assert!(breaks(|| a_text_is_whole::<Weak<NO_FENCE>>(true)));
        assert!(breaks(|| a_text_is_whole::<Modelled>(false)), "one reading is not enough");
    }
}
