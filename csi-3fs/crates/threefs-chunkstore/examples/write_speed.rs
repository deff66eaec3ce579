//! Benchmark of durable 1 MiB writes to stores on one disk: `cargo run --release --example
//! write_speed -p threefs-chunkstore -- FOLDER [stores] [writers per store] [writes per writer]`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use threefs_chunkstore::{ChunkStore, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

const CHUNK_BYTES: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("first argument: a folder")?);
    let mut number = |default: u32| -> Result<u32, std::num::ParseIntError> {
        arguments.next().map_or(Ok(default), |text| text.parse())
    };
    let (stores, writers, writes) = (number(1)?, number(8)?, number(64)?);
    let open = |index| FileChunkStore::open(&folder.join(format!("store-{index}")), config());
    let opened: Vec<_> =
        (0..stores).map(open).collect::<Result<Vec<_>, _>>()?.into_iter().map(Arc::new).collect();
    let payload: Arc<Vec<u8>> = Arc::new(
        (0..CHUNK_BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect(),
    );
    for round in 0..3 {
        let started = Instant::now();
        let threads: Vec<_> = opened
            .iter()
            .flat_map(|store| (0..writers).map(move |writer| (Arc::clone(store), writer)))
            .map(|(store, writer)| {
                let payload = Arc::clone(&payload);
                std::thread::spawn(move || write(&store, writer, writes, round, &payload))
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| "a writer panicked")??;
        }
        let seconds = started.elapsed().as_secs_f64();
        let total = f64::from(stores * writers * writes) * CHUNK_BYTES as f64 / 1e6;
        println!("round {round}: write {:.0} MB/s in all", total / seconds);
    }
    let started = Instant::now();
    for index in 0..writes {
        opened[0].read(chunk(0, index), Which::Committed, 0, CHUNK_BYTES as u32)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("read, cached, one thread: {:.0} MB/s", f64::from(writes) * 1.048_576 / seconds);
    Ok(())
}

fn config() -> StoreConfig {
    StoreConfig::default()
}

fn chunk(writer: u32, index: u32) -> ChunkId {
    ChunkId::new(InodeId(u64::from(writer) + 1), index)
}

fn write(
    store: &FileChunkStore,
    writer: u32,
    writes: u32,
    round: u64,
    payload: &[u8],
) -> Result<(), threefs_core::error::StoreError> {
    for index in 0..writes {
        let update = StoreUpdate {
            chunk: chunk(writer, index),
            version: ChunkVersion(round + 1),
            chain_version: ChainVersion(1),
            tags: TagWindow::default(),
            change: ContentChange::Write { offset: 0 },
        };
        store.apply(&update, payload)?;
        store.commit(update.chunk, update.version, update.chain_version)?;
    }
    Ok(())
}
