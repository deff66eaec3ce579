use std::time::Duration;

use super::*;

const FILE: InodeId = InodeId(70);
const OTHER: InodeId = InodeId(71);
const LONG: Duration = Duration::from_secs(60);

struct Fixture {
    journal: Journal,
    pending: WriteBehind,
    work: UnboundedReceiver<Work>,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(Some(&folder.path().join("state")), InodeId(5), true).unwrap();
        let (pending, work) = WriteBehind::new(true, Vec::new());
        Self { journal, pending, work, folder }
    }

    /// The next daemon, while this one has not completed anything more.
    fn successor(&self) -> (Journal, WriteBehind, UnboundedReceiver<Work>) {
        let path = self.folder.path().join("state");
        let journal = Journal::open(Some(&path), InodeId(5), false).unwrap();
        let (pending, work) = WriteBehind::new(true, journal.former_writes().unwrap());
        (journal, pending, work)
    }

    fn add(&self, inode: InodeId, chunk: u32, offset: u64, bytes: &[u8]) -> Added {
        self.pending.add(&self.journal, (inode, chunk), offset, &Bytes::copy_from_slice(bytes))
    }

    fn finish(&self, inode: InodeId, chunk: u32, error: Option<Errno>) {
        self.pending.finish(&self.journal, (inode, chunk), error);
    }
}

fn flight(offset: u64, bytes: &'static [u8]) -> Option<Flight> {
    Some(Flight { offset, bytes: Bytes::from_static(bytes) })
}

#[test]
fn bytes_that_follow_are_joined_until_they_are_written() {
    let mut it = Fixture::new();
    assert_eq!(it.add(FILE, 0, 0, b"ab"), Added::Pending);
    assert_eq!(it.add(FILE, 0, 2, b"c"), Added::Pending);
    assert_eq!(it.work.try_recv(), Ok((FILE, 0)));
    assert_eq!(it.pending.start((FILE, 0)), flight(0, b"abc"));
    // What is being written does not change.
    for (offset, byte) in [(3, b"d"), (4, b"e"), (5, b"f")] {
        assert_eq!(it.add(FILE, 0, offset, byte), Added::Pending);
    }
    assert_eq!(it.pending.end(FILE), 6);
    assert!(it.work.try_recv().is_err(), "one task a chunk");
    it.finish(FILE, 0, None);
    assert_eq!(it.pending.start((FILE, 0)), flight(3, b"def"));
    it.finish(FILE, 0, None);
    assert_eq!(it.pending.start((FILE, 0)), None);
    assert_eq!((it.pending.end(FILE), it.pending.files()), (0, 0));
    assert!(it.pending.lock().files.is_empty());
}

#[test]
fn a_chunk_is_written_in_order_and_has_two_pieces() {
    let it = Fixture::new();
    assert_eq!(it.add(FILE, 0, 10, b"first"), Added::Pending);
    assert_eq!(it.add(FILE, 0, 11, b"second"), Added::Pending);
    assert_eq!(it.add(FILE, 0, 12, b"third"), Added::Full);
    assert_eq!(it.add(FILE, 1, 1000, b"another chunk"), Added::Pending);
    assert_eq!(it.pending.start((FILE, 0)), flight(10, b"first"));
    it.finish(FILE, 0, None);
    assert_eq!(it.add(FILE, 0, 12, b"third"), Added::Pending);
    assert_eq!(it.pending.start((FILE, 0)), flight(11, b"second"));
    it.finish(FILE, 0, None);
    assert_eq!(it.pending.start((FILE, 0)), flight(12, b"third"));
}

#[test]
fn a_piece_is_at_most_as_long_as_its_slot() {
    let it = Fixture::new();
    assert_eq!(it.add(FILE, 0, 0, &[1; SLOT_BYTES - 1]), Added::Pending);
    assert_eq!(it.add(FILE, 0, SLOT_BYTES as u64 - 1, b"23"), Added::Pending);
    assert_eq!(it.pending.start((FILE, 0)).unwrap().bytes.len(), SLOT_BYTES - 1);
    it.finish(FILE, 0, None);
    assert_eq!(it.pending.start((FILE, 0)), flight(SLOT_BYTES as u64 - 1, b"23"));
}

#[test]
fn one_file_does_not_use_all_slots_and_no_file_waits_for_another() {
    let it = Fixture::new();
    let mut slots = 0;
    while it.add(FILE, slots, u64::from(slots) * 100, b"x") == Added::Pending {
        slots += 1;
    }
    assert_eq!(slots as usize, SLOTS_OF_FILE_MAX);
    let mut others = 0;
    while it.add(OTHER, others, u64::from(others) * 100, b"x") == Added::Pending {
        others += 1;
    }
    assert_eq!(slots + others, WRITE_SLOTS as u32);
    assert_eq!(it.add(OTHER, others, 1 << 30, b"x"), Added::Full, "it waits for its own");
    assert_eq!(it.add(InodeId(72), 0, 0, b"x"), Added::NoSlot);
    it.pending.start((FILE, 0)).unwrap();
    it.finish(FILE, 0, None);
    assert_eq!(it.add(InodeId(72), 0, 0, b"x"), Added::Pending);
}

#[test]
fn a_failed_write_is_reported_once() {
    let it = Fixture::new();
    assert_eq!(it.add(FILE, 0, 0, b"x"), Added::Pending);
    it.pending.start((FILE, 0)).unwrap();
    it.finish(FILE, 0, Some(Errno::NOSPC));
    assert_eq!(it.pending.start((FILE, 0)), None);
    assert_eq!(it.pending.take_error(OTHER), Ok(()));
    assert_eq!(it.pending.take_error(FILE), Err(Errno::NOSPC));
    assert_eq!(it.pending.take_error(FILE), Ok(()));
    assert!(it.pending.lock().files.is_empty());
}

#[tokio::test]
async fn a_drain_waits_for_earlier_bytes_only() {
    let it = Fixture::new();
    let soon = || Deadline::after(Duration::from_millis(20));
    assert_eq!(it.pending.drain(FILE, soon()).await, Ok(()));
    assert_eq!(it.add(FILE, 0, 0, b"x"), Added::Pending);
    assert_eq!(it.add(FILE, 1, 100, b"y"), Added::Pending);
    assert_eq!(it.pending.drain(OTHER, soon()).await, Ok(()));
    assert_eq!(it.pending.drain(FILE, soon()).await, Err(Errno::TIMEDOUT));
    let drain = it.pending.drain(FILE, Deadline::after(LONG));
    let writes = async {
        tokio::task::yield_now().await;
        assert_eq!(it.add(FILE, 2, 200, b"z"), Added::Pending);
        for chunk in 0..2 {
            it.pending.start((FILE, chunk)).unwrap();
            it.finish(FILE, chunk, None);
        }
    };
    assert_eq!(tokio::join!(drain, writes).0, Ok(()));
    assert_eq!(it.pending.end(FILE), 201, "what was added meanwhile is pending");
    assert_eq!(it.pending.drain_all(soon()).await, Err(Errno::TIMEDOUT));
}

#[test]
fn a_successor_writes_what_is_answered_and_in_the_same_order() {
    let it = Fixture::new();
    assert_eq!(it.add(FILE, 7, 10, b"first"), Added::Pending);
    assert_eq!(it.add(OTHER, 0, 0, b"durable"), Added::Pending);
    assert_eq!(it.add(FILE, 7, 11, b"second"), Added::Pending);
    assert_eq!(it.add(FILE, 7, 17, b" and more"), Added::Pending);
    it.pending.start((FILE, 7)).unwrap();
    it.pending.start((OTHER, 0)).unwrap();
    it.finish(OTHER, 0, None);
    let (journal, pending, mut work) = it.successor();
    assert_eq!(work.try_recv(), Ok((FILE, 7)));
    assert!(work.try_recv().is_err());
    assert_eq!(pending.end(FILE), 26);
    let add = |offset, bytes| pending.add(&journal, (FILE, 7), offset, &Bytes::from_static(bytes));
    assert_eq!(add(12, b"third"), Added::Full);
    assert_eq!(pending.start((FILE, 7)), flight(10, b"first"));
    pending.finish(&journal, (FILE, 7), None);
    assert_eq!(add(12, b"third"), Added::Pending);
    assert_eq!(pending.start((FILE, 7)), flight(11, b"second and more"));
    pending.finish(&journal, (FILE, 7), None);
    assert_eq!(pending.start((FILE, 7)), flight(12, b"third"));
    pending.finish(&journal, (FILE, 7), None);
    assert!(journal.former_writes().unwrap().is_empty());
}

#[test]
fn memory_is_released_when_no_slot_was_used_for_a_while() {
    let it = Fixture::new();
    let path = it.folder.path().join("state");
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap());
    let before = blocks();
    assert_eq!(it.add(FILE, 0, 0, &[1; SLOT_BYTES]), Added::Pending);
    let used = blocks();
    assert!(used >= before + SLOT_BYTES as u64 / 512);
    it.pending.release_unused_memory(&it.journal);
    it.pending.release_unused_memory(&it.journal);
    it.pending.start((FILE, 0)).unwrap();
    assert_eq!(blocks(), used, "the slot is in use");
    it.finish(FILE, 0, None);
    it.pending.release_unused_memory(&it.journal);
    assert!(blocks() < used);
}

#[tokio::test]
async fn a_small_piece_is_delayed_unless_an_operation_waits() {
    let it = Fixture::new();
    assert_eq!(it.add(FILE, 0, 0, b"a"), Added::Pending);
    assert_eq!(it.add(OTHER, 0, 0, b"b"), Added::Pending);
    assert!(it.pending.gathers((FILE, 0)) && it.pending.gathers((OTHER, 0)));
    {
        let drain = it.pending.drain(FILE, Deadline::after(LONG));
        tokio::pin!(drain);
        tokio::select! {
            biased;
            _ = &mut drain => panic!("nothing was written"),
            () = std::future::ready(()) => {}
        }
        assert!(!it.pending.gathers((FILE, 0)));
        assert!(it.pending.gathers((OTHER, 0)), "nothing waits for it");
        // Does not wait for other pieces, and no timer.
        assert_eq!(it.pending.next((FILE, 0)).await, flight(0, b"a"));
        it.finish(FILE, 0, None);
        assert_eq!(drain.await, Ok(()));
    }
    assert_eq!(it.add(FILE, 0, 1, &[0; LARGE_BYTES]), Added::Pending);
    assert!(!it.pending.gathers((FILE, 0)));
    assert_eq!(it.pending.next((OTHER, 0)).await, flight(0, b"b"));
}
