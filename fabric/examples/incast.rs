//! One process of `bench/incast.py`: a service that answers like a storage service, or a receiver
//! that reads from many of them.
//!
//! ```text
//! incast serve PORT MEMORY_BYTES
//! incast read SECONDS REQUEST_BYTES WINDOW_BYTES ADDRESS...
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::auth::Key;
use fabric::class::TrafficClass;
use fabric::deadline::Deadline;
use fabric::rpc::{
    Budget, Call, ConnectionConfig, Fault, Payload, PoolConfig, Pools, Reply, Server, ServerConfig,
    Service, Shutdown, decode, encode,
};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const CONTEXT: &str = "incast";
/// Latency of a simulated disk, which serves reads in parallel.
const DISK_MS: std::ops::Range<u64> = 1..10;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match args[..] {
        ["serve", port, memory_bytes] => {
            runtime.block_on(serve(format!("0.0.0.0:{port}"), memory_bytes.parse()?))
        }
        ["read", seconds, request_bytes, window_bytes, ref addresses @ ..] => {
            let receiver = Receiver {
                pools: Pools::new(pool()?),
                request_bytes: request_bytes.parse()?,
                window: Semaphore::new(window_bytes.parse()?),
            };
            let time = Duration::from_secs_f64(seconds.parse()?);
            let addresses = addresses.iter().map(|it| (*it).into()).collect();
            runtime.block_on(read(Arc::new(receiver), time, addresses))
        }
        _ => Err("usage: see the head of fabric/examples/incast.rs".into()),
    }
}

fn key() -> Result<Key, Failure> {
    Ok(Key::from_bytes(b"the key of a benchmark")?)
}

struct Storage {
    data: Bytes,
}

impl Service for Storage {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let length: usize = decode(&call.message).map_err(|it| Fault::internal(it.to_string()))?;
        call.reply_memory.reserve(length).await?;
        tokio::time::sleep(Duration::from_millis(rand::random_range(DISK_MS))).await;
        // A copy, as a read from a disk is: each reply has its own memory.
        let data = Bytes::copy_from_slice(&self.data[..length.min(self.data.len())]);
        Ok(Reply { message: Bytes::new(), payload: data.into() })
    }
}

async fn serve(address: String, memory_bytes: usize) -> Result<(), Failure> {
    let mut config = ServerConfig::new(CONTEXT, key()?);
    config.class = TrafficClass::Storage;
    config.budgets = vec![Budget { reply_bytes_max: memory_bytes, ..Budget::default() }];
    let server = Server::bind(&address, config).await?;
    let (_running, shutdown) = Shutdown::new();
    println!("ready");
    server.serve(Storage { data: vec![7; 4 << 20].into() }, shutdown).await;
    Ok(())
}

fn pool() -> Result<PoolConfig, Failure> {
    let mut connection = ConnectionConfig::new(CONTEXT, key()?);
    connection.class = TrafficClass::Storage;
    Ok(PoolConfig { connections_max: 2, ..PoolConfig::new(connection) })
}

struct Receiver {
    pools: Pools,
    request_bytes: usize,
    window: Semaphore,
}

/// Reads from all services in turn, at most one window of bytes at a time. Prints the bytes from
/// each of them.
async fn read(
    receiver: Arc<Receiver>,
    time: Duration,
    addresses: Vec<String>,
) -> Result<(), Failure> {
    for address in &addresses {
        let deadline = Deadline::after(Duration::from_secs(10));
        let hello = encode(&0_usize)?;
        receiver.pools.at(address).call(hello, Payload::empty(), deadline).await?;
    }
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    let (started, mut calls) = (Instant::now(), JoinSet::new());
    let mut bytes: HashMap<String, u64> = addresses.iter().map(|it| (it.clone(), 0)).collect();
    let mut errors = 0_u32;
    // Without the first replies, as many bytes are in flight at the start as at the end.
    let warm_up = time / 4;
    let mut next = addresses.iter().cycle();
    while started.elapsed() < time {
        let Some(address) = next.next().cloned() else { return Err("no address".into()) };
        let request_bytes = receiver.request_bytes;
        let owner = Arc::clone(&receiver);
        let remaining = time.saturating_sub(started.elapsed());
        let room = receiver.window.acquire_many(request_bytes as u32);
        let Ok(room) = tokio::time::timeout(remaining, room).await else { break };
        room?.forget();
        calls.spawn(async move {
            let received = owner.read(&address).await;
            owner.window.add_permits(owner.request_bytes);
            (address, received)
        });
        while let Some(finished) = calls.try_join_next() {
            match finished? {
                _ if started.elapsed() < warm_up => {}
                (address, Ok(received)) => *bytes.entry(address).or_default() += received,
                (_, Err(_)) => errors += 1,
            }
        }
    }
    let seconds = (started.elapsed() - warm_up).as_secs_f64();
    let bytes: Vec<u64> = addresses.iter().map(|it| bytes[it]).collect();
    println!("{{\"seconds\": {seconds}, \"errors\": {errors}, \"bytes\": {bytes:?}}}");
    Ok(())
}

impl Receiver {
    async fn read(&self, address: &str) -> Result<u64, Failure> {
        let deadline = Deadline::after(Duration::from_secs(60));
        let message = encode(&self.request_bytes)?;
        let pool = self.pools.at(address);
        let call = pool.call(message, Payload::empty(), deadline);
        Ok(call.await?.payload.len() as u64)
    }
}
