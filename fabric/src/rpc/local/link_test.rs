//! Streams over a link: order under back pressure, the end of a peer, and a peer that scribbles.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::shm::Segment;

const CAPACITY: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(60);

/// Two ends of a connection, and a third mapping of its memory.
fn pair() -> (Link, Link, Mapped) {
    let (one, other) = UnixStream::pair().unwrap();
    let segment = Segment::create("link", link_bytes(CAPACITY)).unwrap();
    let open = || {
        let fd = segment.fd().try_clone_to_owned().unwrap();
        Segment::open(fd, link_bytes(CAPACITY)).unwrap().into_mapped()
    };
    let server = Link::new(one, open(), CAPACITY, Side::Server, None).unwrap();
    let client = Link::new(other, open(), CAPACITY, Side::Client, None).unwrap();
    (server, client, open())
}

fn numbers(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at % 251) as u8).collect()
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("the other side was not woken")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_directions_pass_more_than_their_rings_hold() {
    let (server, client, _) = pair();
    let data = numbers(1 << 20);
    let run = |link: Link, seed: u64| {
        let data = data.clone();
        tokio::spawn(async move {
            let (mut reader, mut writer) = link.split();
            let mut random = rand::rngs::StdRng::seed_from_u64(seed);
            let mut sizes = rand::rngs::StdRng::seed_from_u64(seed + 1);
            let write = async {
                let mut rest = &data[..];
                while !rest.is_empty() {
                    let parts = rest.len().min(random.random_range(1..3 * CAPACITY));
                    let (one, two) = rest[..parts].split_at(parts / 3);
                    let slices = [IoSlice::new(one), IoSlice::new(two)];
                    rest = &rest[writer.write_vectored(&slices).await.unwrap()..];
                }
            };
            let read = async {
                let mut all = vec![0; data.len()];
                let mut at = 0;
                while at < all.len() {
                    let end = all.len().min(at + sizes.random_range(1..2 * CAPACITY));
                    at += reader.read(&mut all[at..end]).await.unwrap();
                }
                all
            };
            let ((), received) = tokio::join!(write, read);
            assert!(received == data, "bytes arrived in another order");
            // Keeps the link until both are done.
            (reader, writer)
        })
    };
    let (one, other) = (run(server, 1), run(client, 2));
    within(async { drop((one.await.unwrap(), other.await.unwrap())) }).await;
}

#[tokio::test]
async fn what_a_peer_wrote_before_its_end_arrives() {
    let (server, client, _) = pair();
    let (mut reader, mut writer) = client.split();
    let (_theirs, mut to_us) = server.split();
    to_us.write_all(b"before the end").await.unwrap();
    drop((_theirs, to_us));
    // This side learns of the end before it reads.
    let error = within(writer.write_all(&numbers(2 * CAPACITY))).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    let mut received = Vec::new();
    within(reader.read_to_end(&mut received)).await.unwrap();
    assert_eq!(received, b"before the end");
}

#[tokio::test]
async fn a_writer_that_waits_for_space_sees_the_end_of_its_peer() {
    let (server, client, _) = pair();
    let (_reader, mut writer) = client.split();
    let waiting = tokio::spawn(async move { writer.write_all(&numbers(2 * CAPACITY)).await });
    tokio::task::yield_now().await;
    drop(server);
    assert_eq!(within(waiting).await.unwrap().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[tokio::test]
async fn forked_children_do_not_keep_a_connection_open() {
    let (server, client, _) = pair();
    // SAFETY: the child waits for a signal and runs nothing else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: async-signal-safe.
            unsafe { libc::pause() };
        }
    }
    drop(client);
    let (mut reader, _writer) = server.split();
    let end = tokio::time::timeout(PATIENCE, reader.read(&mut [0])).await;
    // SAFETY: our own child, and no other thread waits for it.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert_eq!(end.expect("the child keeps it open").unwrap(), 0);
}

/// A peer that writes random bytes all over the memory, and rings, while this side uses the link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scribbling_peer_ends_only_its_own_connection() {
    let times: u64 = std::env::var("FUZZ_TIMES").map_or(1, |times| times.parse().unwrap());
    for seed in 0..20 * times {
        let (server, client, memory) = pair();
        let (mut reader, mut writer) = server.split();
        let done = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&done);
        let scribbler = std::thread::spawn(move || {
            let mut random = rand::rngs::StdRng::seed_from_u64(seed);
            while !stop.load(Relaxed) {
                let word = random.random_range(0..link_bytes(CAPACITY) / 8);
                // Half of them are small, so that some positions are possible.
                let value = random.random::<u64>() >> (random.random_range(0..2) * 52);
                // SAFETY: inside the mapping, aligned, and used only through atomics here.
                unsafe { &*memory.base().cast::<AtomicU64>().add(word) }.store(value, Relaxed);
                let _ = client.writer.bell.ring();
            }
            drop(client);
        });
        let mut into = vec![0; 3 * CAPACITY];
        let read = async {
            for _ in 0..200 {
                match reader.read(&mut into).await {
                    Ok(_) => {}
                    Err(error) => return assert_eq!(error.kind(), io::ErrorKind::InvalidData),
                }
            }
        };
        let write = async {
            for _ in 0..200 {
                match writer.write(&numbers(3 * CAPACITY)).await {
                    Ok(_) => {}
                    Err(error) => return assert_eq!(error.kind(), io::ErrorKind::InvalidData),
                }
            }
        };
        within(async { tokio::join!(read, write) }).await;
        done.store(true, Relaxed);
        scribbler.join().unwrap();
    }
}
