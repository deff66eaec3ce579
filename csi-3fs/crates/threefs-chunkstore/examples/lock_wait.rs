//! Measures the latency of index lookups while the log is compacted: `cargo run --release -p
//! threefs-chunkstore --example lock_wait -- FOLDER CHUNKS`.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use threefs_chunkstore::{ChunkStore, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

const WRITERS: u32 = 32;
const LOG_BYTES: u64 = 4 << 20;

fn chunk(index: u32) -> ChunkId {
    ChunkId::new(InodeId(u64::from(index / 64) + 1), index % 64)
}

fn put(store: &FileChunkStore, index: u32, version: u64) -> Result<(), StoreError> {
    let (chunk, version) = (chunk(index), ChunkVersion(version));
    let update = StoreUpdate {
        chunk,
        version,
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change: ContentChange::Replace,
    };
    store.apply(&update, &[7; 64])?;
    store.commit(chunk, version, ChainVersion(1))?;
    Ok(())
}

fn put_all(store: &FileChunkStore, chunks: u32, version: u64) -> Result<(), StoreError> {
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|first| {
                let mut indexes = (first..chunks).step_by(WRITERS as usize);
                scope.spawn(move || indexes.try_for_each(|index| put(store, index, version)))
            })
            .collect();
        writers.into_iter().try_for_each(|writer| {
            writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}

/// Latencies of lookups until `ended`.
fn look(store: &FileChunkStore, ended: &AtomicBool) -> Vec<Duration> {
    let mut waits = Vec::new();
    while !ended.load(Relaxed) {
        let started = Instant::now();
        store.meta(chunk(0));
        waits.push(started.elapsed());
        std::thread::sleep(Duration::from_micros(200));
    }
    waits
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("first argument: a folder")?;
    let chunks: u32 = arguments.next().ok_or("second argument: chunks")?.parse()?;
    let config = StoreConfig { log_bytes: LOG_BYTES, ..StoreConfig::default() };
    let store = FileChunkStore::open(folder.as_ref(), config)?;
    put_all(&store, chunks, 1)?;
    let ended = AtomicBool::new(false);
    let started = Instant::now();
    let (written, mut waits) = std::thread::scope(|scope| {
        let looks = scope.spawn(|| look(&store, &ended));
        let written = (2..=3).try_for_each(|version| put_all(&store, chunks, version));
        ended.store(true, Relaxed);
        (written, looks.join().unwrap_or_default())
    });
    written?;
    let rate = 2.0 * f64::from(chunks) / started.elapsed().as_secs_f64();
    waits.sort();
    let at = |part: usize| waits[(waits.len() - 1) * part / 1000].as_secs_f64() * 1e3;
    println!(
        "{chunks} chunks: {rate:.0} updates/s; lookup latency {:.3} ms at p99, {:.1} ms at p99.9, {:.1} ms max",
        at(990),
        at(999),
        at(1000)
    );
    Ok(())
}
