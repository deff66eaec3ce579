//! Calls over shared memory between processes that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{
    Call, ConnectionConfig, Fault, Payload, Pool, PoolConfig, Reply, RpcError, Server,
    ServerConfig, ServerStats, Service, Shutdown, ShutdownHandle,
};

/// Role of a child process: `serve`, or the address of a server to call.
const CHILD: &str = "FABRIC_TEST_LOCAL_CALLS";
const CONTEXT: &str = "test/local";

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn pool(address: &str) -> Pool {
    Pool::new(address, PoolConfig::new(ConnectionConfig::new(CONTEXT, key())))
}

/// Echoes its request; `hold` is never answered.
struct Echo;

impl Service for Echo {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        if &call.message[..] == b"hold" {
            std::future::pending::<()>().await;
        }
        Ok(Reply { message: call.message, payload: call.payload.into() })
    }
}

async fn serve(config: ServerConfig) -> (String, Arc<ServerStats>, ShutdownHandle) {
    let server = Server::bind("127.0.0.1:0", config).await.unwrap();
    let (address, stats) = (server.address().to_string(), server.stats());
    let (handle, shutdown) = Shutdown::new();
    tokio::spawn(server.serve(Echo, shutdown));
    (address, stats, handle)
}

async fn call(pool: &Pool, message: &'static [u8]) -> Result<Reply, RpcError> {
    let payload = Payload::from(Bytes::from(vec![1; 2 << 20]));
    pool.call(Bytes::from_static(message), payload, soon()).await
}

/// This test binary in another process, which prints one line once it is ready.
struct Process(Child);

impl Process {
    fn start(test: &str, role: &str) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, role)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines
            .map(Result::unwrap)
            .find_map(|line| line.split_once("ready ").map(|(_, rest)| rest.to_owned()));
        (Self(child), ready.expect("the child ended"))
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn role() -> Option<String> {
    std::env::var(CHILD).ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_fail_at_once_when_the_server_is_killed() {
    if role().is_some() {
        let (address, _, _handle) = serve(ServerConfig::new(CONTEXT, key())).await;
        println!("ready {address}");
        return std::future::pending().await;
    }
    let (mut server, address) =
        Process::start("calls_fail_at_once_when_the_server_is_killed", "serve");
    let pool = pool(&address);
    call(&pool, b"x").await.unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.0.id())).unwrap();
    assert!(maps.contains("memfd:fabric-rpc"), "the connection uses TCP");
    let holding = tokio::spawn({
        let pool = pool.clone();
        async move { call(&pool, b"hold").await }
    });
    // Behind it on the same connection: the request has been sent.
    call(&pool, b"x").await.unwrap();
    server.kill();
    let error = holding.await.unwrap().unwrap_err();
    assert!(matches!(error, RpcError::Lost { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_of_a_killed_client_is_returned() {
    if let Some(address) = role() {
        let pool = pool(&address);
        call(&pool, b"x").await.unwrap();
        println!("ready now");
        // In the middle of transfers when it is killed.
        loop {
            call(&pool, b"x").await.unwrap();
        }
    }
    let mut config = ServerConfig::new(CONTEXT, key());
    // Memory for one connection.
    config.local_bytes_max = 2 << 20;
    let (address, stats, _handle) = serve(config).await;
    let test = "the_memory_of_a_killed_client_is_returned";
    for round in 1..=3 {
        let started = Instant::now();
        let mut client = loop {
            let (client, _) = Process::start(test, &address);
            if stats.local_connections.load(Relaxed) == round {
                break client;
            }
            // The server has not seen the end of the one before.
            assert!(started.elapsed() < Duration::from_secs(60), "the memory was not returned");
        };
        client.kill();
    }
}
