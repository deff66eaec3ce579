//! A server and its callers for load tests.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::rpc_test::{CONTEXT, credential, key, soon};
use crate::auth::keys::KeyRing;
use crate::auth::ticket::Ticket;
use crate::deadline::Deadline;
use crate::rpc::frame::{Header, Kind};
use crate::rpc::handshake::unix_now;
use crate::rpc::*;

pub(super) const KIB: usize = 1 << 10;
pub(super) const MIB: usize = 1 << 20;

/// `hold` keeps its request until the gate opens; `read` and `list` return a payload and a message
/// of 1 MiB for which they reserve memory; any other call is answered immediately.
struct Loaded {
    gate: Arc<Semaphore>,
}

impl Service for Loaded {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        match &call.message[..] {
            b"hold" => drop(self.gate.acquire().await),
            b"read" => {
                call.reply_memory.reserve(MIB).await?;
                let payload = Bytes::from(vec![7; MIB]).into();
                return Ok(Reply { message: call.message, payload });
            }
            b"list" => {
                call.reply_memory.reserve(MIB).await?;
                let message = Bytes::from(vec![7; MIB]);
                return Ok(Reply { message, payload: Payload::empty() });
            }
            _ => {}
        }
        Ok(Reply { message: call.message, payload: Payload::empty() })
    }
}

pub(super) struct Running {
    pub(super) address: String,
    pub(super) stats: Arc<ServerStats>,
    pub(super) gate: Arc<Semaphore>,
    _alive: ShutdownHandle,
}

pub(super) async fn serve(change: impl FnOnce(&mut ServerConfig)) -> Running {
    let mut config = ServerConfig::new(CONTEXT, key());
    change(&mut config);
    let server = Server::bind("127.0.0.1:0", config).await.unwrap();
    let (handle, shutdown) = Shutdown::new();
    let (address, stats) = (server.address().to_string(), server.stats());
    let gate = Arc::new(Semaphore::new(0));
    tokio::spawn(server.serve(Loaded { gate: Arc::clone(&gate) }, shutdown));
    Running { address, stats, gate, _alive: handle }
}

/// Two classes with memory for one request of 1 MiB each; one connection may use all of it.
pub(super) fn narrow(config: &mut ServerConfig) {
    let budget =
        Budget { calls_max: 4096, bytes_max: MIB + KIB, reply_bytes_max: 4 * MIB, shares: 1 };
    config.budgets = vec![budget; 2];
}

pub(super) async fn open(running: &Running) -> Arc<Connection> {
    let config = ConnectionConfig::new(CONTEXT, key());
    Arc::new(Connection::open(&running.address, config, soon()).await.unwrap())
}

/// A connection with a ticket for a volume.
pub(super) async fn of_volume(
    running: &Running,
    directory: u64,
) -> Result<Arc<Connection>, RpcError> {
    let ticket = Ticket {
        cluster: DEFAULT_CLUSTER.into(),
        key_id: 0,
        directory,
        path: "/volumes/a".into(),
        read_only: false,
        node: String::new(),
        expires_unix_s: unix_now().as_secs() + 600,
    };
    let ticket = ticket.seal(&KeyRing::of(key())).unwrap();
    let config = ConnectionConfig::new(CONTEXT, ticket);
    let connection = Connection::open(&running.address, config, soon()).await?;
    // A refused connection is closed after its handshake.
    send(&connection, b"x", Payload::empty(), 0, soon()).await?;
    Ok(Arc::new(connection))
}

pub(super) fn large() -> Payload {
    Bytes::from(vec![1; MIB]).into()
}

pub(super) async fn send(
    connection: &Connection,
    message: &'static [u8],
    payload: Payload,
    class: u8,
    deadline: Deadline,
) -> Result<Reply, RpcError> {
    let options = CallOptions { class, ..CallOptions::default() };
    connection.call_with(Bytes::from_static(message), payload, deadline, options).await
}

pub(super) async fn until(mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "the condition was not met within 60 s"
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A call that holds all memory of a class until the gate opens.
pub(super) async fn hold_memory(
    running: &Running,
    class: u8,
) -> tokio::task::JoinHandle<Result<Reply, RpcError>> {
    let connection = open(running).await;
    let before = running.stats.calls.load(Relaxed);
    let call =
        tokio::spawn(async move { send(&connection, b"hold", large(), class, soon()).await });
    until(|| running.stats.calls.load(Relaxed) > before).await;
    call
}

/// An authenticated stream, for frames that a `Connection` never sends.
pub(super) async fn raw(running: &Running) -> TcpStream {
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    handshake::dial(&mut stream, &credential(), CONTEXT, &[], soon()).await.unwrap();
    stream
}

pub(super) fn header(kind: Kind, request_id: u64, payload_bytes: usize) -> Header {
    let message_crc = crc32c::crc32c(b"x");
    Header {
        kind,
        class: 0,
        request_id,
        message_bytes: 1,
        payload_bytes,
        time_ms: 60_000,
        message_crc,
    }
}
