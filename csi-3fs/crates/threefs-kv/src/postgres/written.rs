//! Hashes of the keys that a batch has written, for the watches of other processes. Pure.

/// Batches with more keys wake all watches.
const HASHES_MAX: usize = 2048;

/// The hashes of a batch; empty if they are too many: then any key may have been written.
pub(crate) fn hashes(keys: &[Vec<u8>]) -> Vec<i32> {
    match keys.len() <= HASHES_MAX {
        true => keys.iter().map(|key| hash(key)).collect(),
        false => Vec::new(),
    }
}

/// Whether a batch may have written a key.
pub(crate) fn contains(hashes: &[i32], key: &[u8]) -> bool {
    hashes.is_empty() || hashes.contains(&hash(key))
}

/// The checksum of a key; equal ones wake a watch without need.
fn hash(key: &[u8]) -> i32 {
    crc32c::crc32c(key).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::{HASHES_MAX, contains, hashes};

    #[test]
    fn a_large_batch_may_have_written_any_key() {
        let keys: Vec<_> = (0..=HASHES_MAX as u32).map(|n| n.to_be_bytes().to_vec()).collect();
        let some = hashes(&keys[1..]);
        assert!(contains(&some, &keys[1]) && !contains(&some, &keys[0]));
        assert!(contains(&hashes(&keys), b"any"));
    }
}
