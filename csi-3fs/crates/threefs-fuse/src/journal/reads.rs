//! Bytes that the daemons of a mount have read, by the distance of the replica: counters at the end
//! of the journal, where the process that keeps the mount reads them.

use std::sync::atomic::Ordering::Relaxed;

use threefs_client::ReadBytes;

use super::{Journal, READS};

/// Number of distances: host, rack, zone, other zones.
pub(super) const DISTANCES: usize = 4;
/// Offset of the counters in the state file of a mount, in bytes: one `u64` for each distance, in
/// native byte order.
pub const READS_OFFSET: usize = READS * size_of::<u64>();

impl Journal {
    /// Adds what a client has read between two readings of its counters.
    pub(crate) fn add_reads(&self, before: ReadBytes, now: ReadBytes) {
        let words = |it: ReadBytes| [it.host, it.rack, it.zone, it.other];
        for (index, (before, now)) in words(before).into_iter().zip(words(now)).enumerate() {
            self.words.at(READS + index).fetch_add(now.saturating_sub(before), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::InodeId;

    use super::*;

    #[test]
    fn the_bytes_of_all_daemons_of_a_mount_are_in_its_state_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let (none, some) =
            (ReadBytes::default(), ReadBytes { host: 1, rack: 20, zone: 300, other: 4 });
        for _daemon in 0..2 {
            let journal = Journal::open(Some(&path), InodeId(5), false).unwrap();
            journal.add_reads(none, some);
            journal.add_reads(some, ReadBytes { host: 6, ..some });
            assert_eq!(journal.locked_files(), [], "the words are not those of locks");
        }
        let file = std::fs::read(&path).unwrap();
        let words = file[READS_OFFSET..]
            .chunks(8)
            .take(DISTANCES)
            .map(|it| u64::from_ne_bytes(it.try_into().unwrap()));
        assert_eq!(words.collect::<Vec<_>>(), [12, 40, 600, 8]);
    }
}
