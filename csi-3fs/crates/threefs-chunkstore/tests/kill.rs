//! Kills a writer repeatedly at random moments and checks that acknowledged updates survive.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, Epoch, InodeId};

const FOLDER: &str = "THREEFS_KILL_TEST_FOLDER";
const KILLS: u32 = 50;
const WRITERS: u32 = 4;
const CHUNKS_PER_WRITER: u32 = 3;
/// Updates of a chunk in one epoch.
const EPOCH_UPDATES: u64 = 5;
/// Every fourth epoch is kept: the version of a chunk in another one is dropped when the next one
/// starts.
const KEPT_EPOCHS: u64 = 4;
/// Timeout for output of a child: output takes milliseconds, and a start from a cold disk takes
/// seconds.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(60);

fn config() -> StoreConfig {
    StoreConfig {
        budget: DiskBudget::new(64 << 20, 0),
        grow_bytes: 1 << 20,
        log_bytes: 256 << 10,
        ..StoreConfig::default()
    }
}

/// The chunk in the epoch in which an update makes `version`.
fn in_epoch_of(chunk: ChunkId, version: u64) -> ChunkId {
    let count = (version / EPOCH_UPDATES) as u32;
    chunk.in_epoch(Epoch::new(u32::from(count > 0), count))
}

fn content(chunk: ChunkId, version: u64) -> Vec<u8> {
    let length = 3_000 + (version * 7_919 + u64::from(chunk.index)) % 60_000;
    (0..length).map(|i| (i * 17 + version * 101 + chunk.inode.0) as u8).collect()
}

/// The child process: writes until it is killed, and prints each acknowledged version.
#[test]
fn writer() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let store = Arc::new(FileChunkStore::open(Path::new(&folder), config()).unwrap());
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let store = Arc::clone(&store);
            std::thread::spawn(move || {
                for round in 0.. {
                    write_once(
                        &store,
                        ChunkId::new(InodeId(u64::from(writer)), round % CHUNKS_PER_WRITER),
                    );
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
}

fn write_once(store: &FileChunkStore, chunk: ChunkId) {
    let newest = || store.version_up_to(chunk.last_version());
    if let Some(meta) = newest()
        && let Some(pending) = meta.pending
    {
        store.commit(meta.chunk, pending.version, ChainVersion(1)).unwrap();
    }
    let before = newest();
    let version = before.as_ref().map_or(0, |meta| meta.committed.version.0) + 1;
    let id = in_epoch_of(chunk, version);
    let update = StoreUpdate {
        chunk: id,
        version: ChunkVersion(version),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change: ContentChange::Replace,
    };
    store.apply(&update, &content(chunk, version)).unwrap();
    let line = format!("acknowledged {} {} {version}\n", chunk.inode.0, chunk.index);
    std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
    store.commit(id, ChunkVersion(version), ChainVersion(1)).unwrap();
    if let Some(before) = before.filter(|before| before.chunk != id)
        && !u64::from(before.chunk.epoch.count).is_multiple_of(KEPT_EPOCHS)
    {
        store.purge(before.chunk, ChunkVersion(0)).unwrap();
    }
}

/// Checks the versions of a chunk in kept epochs before that of `newest`, an update.
fn check_kept(store: &FileChunkStore, chunk: ChunkId, newest: u64) {
    for count in (0..newest / EPOCH_UPDATES).step_by(KEPT_EPOCHS as usize) {
        let last = (count + 1) * EPOCH_UPDATES - 1;
        let id = in_epoch_of(chunk, last);
        let read = store.read(id, Which::Committed, 0, u32::MAX).unwrap();
        assert_eq!(read.state.version.0, last, "{id}");
        assert!(read.bytes == content(chunk, last), "{id} version {last}");
    }
}

/// Lines of a child, read by a thread so that waiting for one has a deadline.
fn listen(output: ChildStdout) -> Receiver<Vec<u8>> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        let read = BufReader::new(output).split(b'\n').map_while(Result::ok);
        read.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
    });
    lines
}

#[test]
fn fifty_kills_lose_no_acknowledged_write() {
    let folder = tempfile::tempdir().unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut acked_versions: BTreeMap<ChunkId, u64> = BTreeMap::new();
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = listen(child.stdout.take().unwrap());
        // Waits for a random number of acknowledgements, then for a random time, so that the kill
        // falls between two of them.
        let mut output_lines: Vec<Vec<u8>> = Vec::new();
        let mut hangs = false;
        for _ in 0..rng.random_range(1..60) {
            match lines.recv_timeout(OUTPUT_TIMEOUT) {
                Ok(line) => output_lines.push(line),
                Err(error) => {
                    hangs = error == RecvTimeoutError::Timeout;
                    break;
                }
            }
        }
        std::thread::sleep(Duration::from_micros(rng.random_range(0..5_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!hangs, "kill {kill}: no output of the child for {OUTPUT_TIMEOUT:?}");
        output_lines.extend(lines);
        for line in output_lines {
            let line = String::from_utf8_lossy(&line).into_owned();
            let words: Vec<&str> = line.split(' ').collect();
            // The last line may be truncated; "acknowledged" may follow output of the test harness.
            if let Some(at) = words.iter().position(|word| word.ends_with("acknowledged"))
                && let [inode, index, version] = words[at + 1..]
                && let (Ok(inode), Ok(index), Ok(version)) =
                    (inode.parse(), index.parse(), version.parse::<u64>())
            {
                let newest = acked_versions.entry(ChunkId::new(InodeId(inode), index)).or_insert(0);
                *newest = (*newest).max(version);
            }
        }
        let store = FileChunkStore::open(folder.path(), config()).unwrap();
        for (chunk, version) in &acked_versions {
            let id = store.version_up_to(chunk.last_version()).unwrap().chunk;
            let read = store.read(id, Which::Newest, 0, u32::MAX).unwrap();
            let newest = read.state.version.0;
            assert!(
                newest >= *version,
                "kill {kill}: {chunk} has {newest}, acknowledged
            {version}"
            );
            assert!(
                read.bytes == content(*chunk, newest),
                "kill {kill}: {chunk}
            version {newest}"
            );
            check_kept(&store, *chunk, newest);
        }
    }
    let acknowledged: u64 = acked_versions.values().sum();
    assert!(acknowledged > 500, "the children wrote too little: {acknowledged}");
    println!("{acknowledged} acknowledged writes in {KILLS} processes");
}
