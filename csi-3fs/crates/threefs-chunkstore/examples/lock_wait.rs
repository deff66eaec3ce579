//! How long a look into the index takes at most while the log is compacted:
//! `cargo run --release -p threefs-chunkstore --example lock_wait -- FOLDER CHUNKS`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use threefs_chunkstore::{ChunkStore, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow};
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

const WRITERS: u32 = 32;
const LOG_BYTES: u64 = 4 << 20;

fn chunk(index: u32) -> ChunkId {
    ChunkId::new(InodeId(u64::from(index / 64) + 1), index % 64)
}

fn put(store: &FileChunkStore, index: u32, version: u64) {
    let (chunk, version) = (chunk(index), ChunkVersion(version));
    let update = StoreUpdate {
        chunk,
        version,
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change: ContentChange::Replace,
    };
    store.apply(&update, &[7; 64]).expect("room for the chunks");
    store.commit(chunk, version, ChainVersion(1)).expect("what was applied is pending");
}

fn put_all(store: &Arc<FileChunkStore>, chunks: u32, version: u64) {
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let store = Arc::clone(store);
            scope.spawn(move || {
                (writer..chunks)
                    .step_by(WRITERS as usize)
                    .for_each(|index| put(&store, index, version));
            });
        }
    });
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().expect("a folder");
    let chunks: u32 = arguments.next().and_then(|text| text.parse().ok()).expect("chunks");
    let config = StoreConfig { log_bytes: LOG_BYTES, ..StoreConfig::default() };
    let store = FileChunkStore::open(folder.as_ref(), config).expect("a store");
    let store = Arc::new(store);
    put_all(&store, chunks, 1);
    let ended = Arc::new(AtomicBool::new(false));
    let reader = {
        let (store, ended) = (Arc::clone(&store), Arc::clone(&ended));
        std::thread::spawn(move || {
            let mut waits = Vec::new();
            while !ended.load(Relaxed) {
                let begun = Instant::now();
                store.meta(chunk(0));
                waits.push(begun.elapsed());
                std::thread::sleep(Duration::from_micros(200));
            }
            waits
        })
    };
    let begun = Instant::now();
    (2..=3).for_each(|version| put_all(&store, chunks, version));
    let seconds = begun.elapsed().as_secs_f64();
    ended.store(true, Relaxed);
    let mut waits = reader.join().expect("the reader");
    waits.sort();
    let at = |part: usize| waits[(waits.len() - 1) * part / 1000].as_secs_f64() * 1e3;
    println!(
        "{chunks} chunks: {:.0} updates a second; a look waits {:.3} ms at p99, {:.1} at p99.9, {:.1} at most",
        2.0 * f64::from(chunks) / seconds,
        at(990),
        at(999),
        at(1000)
    );
}
