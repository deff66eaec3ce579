//! Speed of remote calls between two processes of one machine: over TCP and over shared memory, in
//! turn, with the processor time of both processes.
//!
//! ```text
//! rpc_speed [ROUNDS [SECONDS]]
//! ```

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{
    Budget, Call, ConnectionConfig, Fault, Payload, Pool, PoolConfig, Reply, Server, ServerConfig,
    Service, Shutdown, decode, encode,
};

const CONTEXT: &str = "speed";

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match args[..] {
        ["serve", local_bytes] => runtime.block_on(serve(local_bytes.parse()?)),
        [] => runtime.block_on(compare(3, 2.0)),
        [rounds] => runtime.block_on(compare(rounds.parse()?, 2.0)),
        [rounds, seconds] => runtime.block_on(compare(rounds.parse()?, seconds.parse()?)),
        _ => Err("usage: see the head of fabric/examples/rpc_speed.rs".into()),
    }
}

fn key() -> Result<Key, Failure> {
    Ok(Key::from_bytes(b"the key of a benchmark")?)
}

/// Answers with as many bytes as the message says.
struct Storage {
    data: Bytes,
}

impl Service for Storage {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let length: usize = decode(&call.message).map_err(|it| Fault::internal(it.to_string()))?;
        call.reply_memory.reserve(length).await?;
        Ok(Reply { message: Bytes::new(), payload: self.data.slice(..length).into() })
    }
}

async fn serve(local_bytes_max: usize) -> Result<(), Failure> {
    let mut config = ServerConfig::new(CONTEXT, key()?);
    config.local_bytes_max = local_bytes_max;
    config.budgets = vec![Budget { reply_bytes_max: 256 << 20, ..Budget::default() }];
    let server = Server::bind("127.0.0.1:0", config).await?;
    let (_running, shutdown) = Shutdown::new();
    println!("{}", server.address());
    server.serve(Storage { data: vec![7; 4 << 20].into() }, shutdown).await;
    Ok(())
}

/// A server in another process. Killed when dropped.
struct Running {
    process: Child,
    pool: Pool,
}

impl Running {
    fn start(local_bytes_max: usize) -> Result<Self, Failure> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["serve", &local_bytes_max.to_string()])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut address = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        let config = PoolConfig::new(ConnectionConfig::new(CONTEXT, key()?));
        Ok(Self { process, pool: Pool::new(address.trim(), config) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One measurement: bytes to send and to receive, and calls in flight.
struct Load {
    name: &'static str,
    send: usize,
    receive: usize,
    in_flight: usize,
}

const LOADS: [Load; 5] = [
    Load { name: "write 1 MiB, 8 in flight", send: 1 << 20, receive: 0, in_flight: 8 },
    Load { name: "read 1 MiB, 8 in flight", send: 0, receive: 1 << 20, in_flight: 8 },
    Load { name: "read 1 MiB, 1 in flight", send: 0, receive: 1 << 20, in_flight: 1 },
    Load { name: "read 4 KiB, 16 in flight", send: 0, receive: 4 << 10, in_flight: 16 },
    Load { name: "read 4 KiB, 1 in flight", send: 0, receive: 4 << 10, in_flight: 1 },
];

async fn compare(rounds: usize, seconds: f64) -> Result<(), Failure> {
    let transports = [("TCP", Running::start(0)?), ("shared memory", Running::start(64 << 20)?)];
    for round in 0..rounds {
        for load in &LOADS {
            for (transport, running) in &transports {
                let before = cpu(running.process.id())?;
                let started = Instant::now();
                let calls = run(&running.pool, load, Duration::from_secs_f64(seconds)).await?;
                let time = started.elapsed().as_secs_f64();
                let busy = cpu(running.process.id())? - before;
                let gigabytes = (calls * (load.send + load.receive) as u64) as f64 / 1e9;
                println!(
                    "round {round}: {}: {transport}: {:.2} GB/s, {:.0} calls/s, {:.2} CPU s/GB, {:.1} CPU us/call",
                    load.name,
                    gigabytes / time,
                    calls as f64 / time,
                    busy / gigabytes,
                    busy * 1e6 / calls as f64,
                );
            }
        }
    }
    Ok(())
}

async fn run(pool: &Pool, load: &Load, time: Duration) -> Result<u64, Failure> {
    let (calls, started) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let message = encode(&load.receive)?;
    let payload = Payload::from(Bytes::from(vec![5; load.send]));
    let tasks: Vec<_> = (0..load.in_flight)
        .map(|_| {
            let (pool, calls) = (pool.clone(), Arc::clone(&calls));
            let (message, payload) = (message.clone(), payload.clone());
            tokio::spawn(async move {
                while started.elapsed() < time {
                    let deadline = Deadline::after(Duration::from_secs(30));
                    pool.call(message.clone(), payload.clone(), deadline).await?;
                    calls.fetch_add(1, Relaxed);
                }
                Ok::<_, fabric::rpc::RpcError>(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok(calls.load(Relaxed))
}

/// Seconds of processor time of this process and another one.
fn cpu(other: u32) -> Result<f64, Failure> {
    let of = |process: &str| -> Result<f64, Failure> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / 100.0)
    };
    Ok(of("self")? + of(&other.to_string())?)
}
