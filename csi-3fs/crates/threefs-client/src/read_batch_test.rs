//! Batches of small reads against three storage services.

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, ChunkId, InodeId, TableId, TableVersion};
use threefs_core::layout::{ChainChoice, Layout};

use crate::cluster_test::{Cluster, LONG, whole};
use crate::routing::ChunkLocation;
use crate::*;

const CHUNK_BYTES: u32 = 64 << 10;
const CHUNKS: u32 = 9;
/// Not written.
const HOLE: u32 = 4;

fn file(chains: &[u32]) -> FileHandle {
    let stripe = chains.len() as u32;
    let chains = chains.iter().map(|&chain| ChainId(chain)).collect();
    let layout = Layout {
        table: TableId(1),
        table_version: TableVersion(1),
        chunk_bytes: CHUNK_BYTES,
        stripe,
        chains: ChainChoice::Explicit(chains),
    };
    FileHandle {
        path: "/file".into(),
        inode: InodeId(42),
        layout,
        truncate_version: 0,
        written: Default::default(),
        quota: false,
        epoch: Arc::default(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_return_correct_data_or_none_while_a_service_is_lost() {
    let mut cluster = Cluster::of_three(64 << 20).await;
    let client = cluster.client();
    whole(&client).await;
    let (file, deadline) = (file(&[1]), Deadline::after(LONG));
    let mut random = StdRng::seed_from_u64(1);
    let mut content = vec![0; (CHUNKS * CHUNK_BYTES) as usize];
    random.fill(&mut content[..]);
    let place = |index: u32| (index * CHUNK_BYTES) as usize..((index + 1) * CHUNK_BYTES) as usize;
    content[place(HOLE)].fill(0);
    for index in (0..CHUNKS).filter(|&index| index != HOLE) {
        let chunk = ChunkId::new(file.inode, index);
        let location = ChunkLocation { chain: ChainId(1), chunk, chunk_bytes: CHUNK_BYTES };
        let data = Bytes::copy_from_slice(&content[place(index)]);
        let change = ContentChange::Write { offset: 0 };
        client.update(&"test".into(), location, change, data, deadline).await.unwrap();
    }
    let (mut answered, mut unanswered) = (0, 0);
    for round in 0..40 {
        if round == 10 {
            cluster.abort_storage().await;
        }
        let ranges: Vec<(u64, u64)> = (0..100)
            .map(|_| {
                let length = random.random_range(1..8192);
                (random.random_range(0..content.len() as u64 - length), length)
            })
            .collect();
        let mut results: Vec<Option<Bytes>> = vec![None; ranges.len()];
        for batch in client.plan_batches(&file, &ranges, deadline).await.unwrap() {
            for (range, data) in client.read_batch(&file, &batch, deadline).await {
                assert!(results[range].replace(data).is_none(), "a range in two batches");
            }
        }
        let chunk = |at: u64| (at / u64::from(CHUNK_BYTES)) as u32;
        for (&(offset, length), result) in ranges.iter().zip(results) {
            let expected = &content[offset as usize..(offset + length) as usize];
            let first = chunk(offset);
            let one_chunk = first == chunk(offset + length - 1);
            match result {
                Some(data) => {
                    assert!(one_chunk && first != HOLE);
                    assert_eq!(data, expected);
                    answered += 1;
                }
                None if one_chunk && first != HOLE => {
                    assert!(round >= 10, "nothing is lost yet");
                    unanswered += 1;
                }
                None => {}
            }
        }
    }
    assert!(answered > 1000, "{answered} answered, {unanswered} not");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_are_divided_by_chains_and_limits() {
    let cluster = Cluster::of_three(64 << 20).await;
    let client = cluster.client();
    whole(&client).await;
    let chunk = u64::from(CHUNK_BYTES);
    // 100 ranges in two chains, one over a border, and one larger than a batch.
    let mut ranges: Vec<(u64, u64)> = (0..100).map(|index| (index * chunk, chunk)).collect();
    ranges[7].0 += 1;
    let large =
        FileHandle { layout: Layout { chunk_bytes: 4 << 20, ..file(&[1]).layout }, ..file(&[1]) };
    let deadline = Deadline::after(LONG);
    let batches = client.plan_batches(&file(&[1, 2]), &ranges, deadline).await.unwrap();
    let mut all: Vec<usize> = batches.iter().flat_map(ReadBatch::ranges).collect();
    all.sort_unstable();
    assert_eq!(all, (0..100).filter(|&range| range != 7).collect::<Vec<_>>());
    for batch in &batches {
        let parity: Vec<usize> = batch.ranges().map(|range| range % 2).collect();
        assert!(parity.iter().all(|it| *it == parity[0]), "chains are mixed");
        // 1 MiB.
        assert!(parity.len() <= 16);
    }
    let batches = client.plan_batches(&large, &[(0, 2 << 20), (0, 10)], deadline).await.unwrap();
    assert_eq!(batches.iter().flat_map(ReadBatch::ranges).collect::<Vec<_>>(), [1]);
    // A service of an earlier version has refused one.
    client.0.batches.refused();
    let batches = client.plan_batches(&large, &[(0, 10)], deadline).await.unwrap();
    assert!(batches.is_empty());
}
