//! Groups of small reads, and reads of three storage services that are started together.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::ChunkId;
use tokio::task::JoinSet;

use super::*;
use crate::cluster_test::{Cluster, LONG, whole};

const CHUNK_BYTES: u32 = 128 << 10;

fn key(number: u32) -> Key {
    (InodeId(u64::from(number / 2)), ChainId(number % 2))
}

fn part(index: u32, length: u32) -> ReadPart {
    ReadPart { index, offset: 0, length }
}

proptest! {
    #[test]
    fn each_read_is_in_one_group_in_order_and_within_the_limits(
        longest in prop::sample::select(vec![1, 4096, SMALL_BYTES_MAX]),
        steps in prop::collection::vec((0..4_u32, prop::option::weighted(0.995, 1..=SMALL_BYTES_MAX)), 1..600),
    ) {
        let mut groups = Groups(HashMap::new());
        let mut sent: HashMap<Key, Vec<u32>> = HashMap::new();
        let mut joined: HashMap<Key, Vec<u32>> = HashMap::new();
        let mut send = |key: Key, group: Group<u32>| {
            let bytes: u64 = group.parts.iter().map(|part| u64::from(part.length)).sum();
            assert!((1..=ReadMany::PARTS_MAX).contains(&group.parts.len()));
            assert!(bytes == group.bytes && bytes <= ReadMany::BYTES_MAX);
            assert!(group.parts.iter().map(|part| part.index).eq(group.waiting.iter().copied()));
            sent.entry(key).or_default().extend(group.waiting);
        };
        for (number, (place, length)) in steps.into_iter().enumerate() {
            let (key, number) = (key(place), number as u32);
            let Some(length) = length else {
                groups.take(key).into_iter().for_each(|group| send(key, group));
                continue;
            };
            let length = length.min(longest);
            let is_first = !groups.0.contains_key(&key);
            match groups.join(key, part(number, length), number) {
                Joined::First => prop_assert!(is_first),
                Joined::Further => prop_assert!(!is_first),
                Joined::FirstAfter(full) => {
                    let bytes = full.bytes + u64::from(length);
                    let count = full.parts.len();
                    prop_assert!(count == ReadMany::PARTS_MAX || bytes > ReadMany::BYTES_MAX);
                    send(key, full);
                }
            }
            joined.entry(key).or_default().push(number);
        }
        for key in (0..4).map(key) {
            groups.take(key).into_iter().for_each(|group| send(key, group));
        }
        prop_assert_eq!(sent, joined);
    }
}

fn location(index: u32) -> ChunkLocation {
    let chunk = ChunkId::new(InodeId(42), index);
    ChunkLocation { chain: ChainId(1), chunk, chunk_bytes: CHUNK_BYTES }
}

fn content(index: u32) -> Bytes {
    (0..CHUNK_BYTES).map(|at| (at / 4096 + index * 32) as u8).collect()
}

async fn read(client: &Client, index: u32, block: u32) -> Result<Option<Bytes>, ClientError> {
    let deadline = Deadline::after(LONG);
    client.read(&"test".into(), location(index), block * 4096, 4096, deadline).await
}

/// Polls a future once.
async fn start<T>(future: &mut (impl Future<Output = T> + Unpin)) {
    tokio::select! {
        biased;
        _ = future => panic!("it cannot have completed"),
        () = std::future::ready(()) => {}
    }
}

/// Repeats a scenario until it needs this number of requests: a stalled machine causes retries.
async fn needs(client: &Client, requests: usize, scenario: impl AsyncFn()) {
    let (end, turns) = (Instant::now() + LONG, || client.0.read_turn.load(Relaxed));
    loop {
        let before = turns();
        scenario().await;
        let needed = turns() - before;
        if needed == requests {
            return;
        }
        assert!(Instant::now() < end, "{needed} requests, expected {requests}");
        whole(client).await;
    }
}

async fn written(cluster: &Cluster) -> Client {
    let client = cluster.client();
    whole(&client).await;
    for index in 0..4 {
        let (change, deadline) = (ContentChange::Write { offset: 0 }, Deadline::after(LONG));
        let data = content(index);
        client.update(&"test".into(), location(index), change, data, deadline).await.unwrap();
    }
    client
}

// One thread, so that all tasks are ready when the first of them yields.
#[tokio::test]
async fn reads_that_are_ready_share_a_request() {
    let cluster = Cluster::of_three(64 << 20).await;
    let client = written(&cluster).await;
    needs(&client, 1, async || {
        let mut tasks = JoinSet::new();
        for number in 0..32 {
            let (client, index, block) = (client.clone(), number % 4, number / 2);
            tasks.spawn(async move {
                let data = read(&client, index, block).await.unwrap().unwrap();
                let at = (block * 4096) as usize;
                assert_eq!(data, content(index)[at..at + 4096]);
            });
        }
        while let Some(result) = tasks.join_next().await {
            result.unwrap();
        }
    })
    .await;
    needs(&client, 1, async || drop(read(&client, 0, 0).await.unwrap().unwrap())).await;
    // What the shared request does not answer is read alone.
    needs(&client, 3, async || {
        let (data, hole) = tokio::join!(read(&client, 2, 1), read(&client, 9, 0));
        assert_eq!(data.unwrap().unwrap(), content(2)[4096..8192]);
        assert_eq!(hole.unwrap(), None);
        let (one, other) = tokio::join!(read(&client, 2, 1), read(&client, 2, 1));
        assert_eq!(one.unwrap(), other.unwrap());
    })
    .await;
    // Large reads do not join.
    needs(&client, 3, async || {
        let (what, deadline): (OperationName, _) = ("test".into(), Deadline::after(LONG));
        let large = |index| client.read(&what, location(index), 0, SMALL_BYTES_MAX + 1, deadline);
        let (one, small, other) = tokio::join!(large(0), read(&client, 0, 0), large(1));
        for (index, data) in [one, other].into_iter().enumerate() {
            let expected = &content(index as u32)[..SMALL_BYTES_MAX as usize + 1];
            assert!(data.unwrap().unwrap() == expected);
        }
        assert!(small.unwrap().is_some());
    })
    .await;
    // A service of an earlier version has refused shared requests.
    client.0.batches.refused();
    needs(&client, 2, async || {
        let (one, other) = tokio::join!(read(&client, 0, 0), read(&client, 1, 0));
        assert!(one.unwrap().is_some() && other.unwrap().is_some());
    })
    .await;
    assert!(client.0.gather.lock().0.is_empty());
}

#[tokio::test]
async fn a_first_read_that_ends_or_hangs_does_not_stop_the_others() {
    let cluster = Cluster::of_three(64 << 20).await;
    let client = written(&cluster).await;
    // Cancelled before it has sent the others, and after.
    for sends in [false, true] {
        let (mut first, mut second) =
            (Box::pin(read(&client, 0, 0)), Box::pin(read(&client, 1, 2)));
        start(&mut first).await;
        start(&mut second).await;
        if sends {
            tokio::task::yield_now().await;
            start(&mut first).await;
        }
        drop(first);
        assert_eq!(second.await.unwrap().unwrap(), content(1)[8192..12288]);
    }
    let mut first = Box::pin(read(&client, 0, 0));
    start(&mut first).await;
    let (what, soon): (OperationName, _) =
        ("test".into(), Deadline::after(Duration::from_millis(50)));
    let error = client.read(&what, location(1), 0, 4096, soon).await.unwrap_err();
    assert!(matches!(error, ClientError::Unavailable { .. }), "{error}");
    drop(first);
    assert!(client.0.gather.lock().0.is_empty());
}
