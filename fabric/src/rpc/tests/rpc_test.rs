use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::auth::Key;
use crate::auth::credentials::Credential;
use crate::auth::keys::KeyRing;
use crate::deadline::Deadline;
use crate::rpc::frame::{Header, Kind};
use crate::rpc::*;

pub(super) const CONTEXT: &str = "test/echo";

pub(super) fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

pub(super) fn ring() -> KeyRing {
    KeyRing::of(key())
}

pub(super) fn credential() -> Credential {
    Credential::Keys(Arc::new(ring()))
}

pub(super) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Echoes its request; `block` waits for the gate; `panic` panics.
struct Echo {
    gate: Arc<Semaphore>,
}

impl Service for Echo {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        match &call.message[..] {
            b"panic" => panic!("as asked"),
            b"block" => self.gate.acquire().await.unwrap().forget(),
            b"parse" => drop(decode_request::<(u64, u64, u64, u64, String)>(&call)?),
            _ => {}
        }
        let (first, second) = (call.payload.slice(..call.payload.len() / 2), call.payload.clone());
        let second = second.slice(first.len()..);
        Ok(Reply { message: call.message, payload: vec![first, second].into() })
    }
}

pub(super) struct Running {
    pub(super) address: String,
    pub(super) stats: Arc<ServerStats>,
    gate: Arc<Semaphore>,
    pub(super) handle: ShutdownHandle,
    pub(super) task: JoinHandle<()>,
}

pub(super) async fn serve(address: &str, change: impl FnOnce(&mut ServerConfig)) -> Running {
    let mut config = ServerConfig::new(CONTEXT, key());
    change(&mut config);
    let server = Server::bind(address, config).await.unwrap();
    let (handle, shutdown) = Shutdown::new();
    let (address, stats) = (server.address().to_string(), server.stats());
    let gate = Arc::new(Semaphore::new(0));
    let task = tokio::spawn(server.serve(Echo { gate: Arc::clone(&gate) }, shutdown));
    Running { address, stats, gate, handle, task }
}

pub(super) async fn serve_default() -> Running {
    serve("127.0.0.1:0", |_| {}).await
}

/// For peers that are silent or read nothing. No other peer reaches it: a slow node is not silent.
const SHORT: Duration = Duration::from_millis(300);

async fn open(running: &Running) -> Connection {
    let config = ConnectionConfig::new(CONTEXT, key());
    Connection::open(&running.address, config, soon()).await.unwrap()
}

async fn echo(connection: &Connection, message: &'static [u8], payload: Bytes) -> Bytes {
    let reply = connection.call(Bytes::from_static(message), payload.into(), soon()).await.unwrap();
    assert_eq!(&reply.message[..], message);
    reply.payload.into_bytes()
}

/// An authenticated stream, for frames that a `Connection` never sends.
async fn raw(running: &Running) -> TcpStream {
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    handshake::dial(&mut stream, &credential(), CONTEXT, &[], soon()).await.unwrap();
    stream
}

async fn closed_by_peer(stream: &mut TcpStream) -> bool {
    let mut byte = [0];
    let read = tokio::time::timeout(Duration::from_secs(60), stream.read(&mut byte)).await;
    matches!(read, Ok(Ok(0) | Err(_)))
}

fn header(message_bytes: usize, payload_bytes: usize) -> Header {
    let (kind, class, request_id, time_ms, message_crc) = (Kind::Request, 0, 7, 1000, 0);
    Header { kind, class, request_id, message_bytes, payload_bytes, time_ms, message_crc }
}

#[tokio::test]
async fn messages_and_payloads_of_all_sizes_survive_a_round_trip() {
    let running = serve_default().await;
    let connection = open(&running).await;
    for length in [0, 1, 2, 4096, 65_537, 5 << 20] {
        let payload: Bytes = (0..length).map(|i| (i % 251) as u8).collect::<Vec<u8>>().into();
        assert_eq!(echo(&connection, b"hello", payload.clone()).await, payload);
    }
    static LONG: [u8; 100_000] = [7; 100_000];
    assert_eq!(echo(&connection, &LONG, Bytes::new()).await, Bytes::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_calls_share_one_connection_and_do_not_wait_for_each_other() {
    let running = serve_default().await;
    let connection = Arc::new(open(&running).await);
    let blocked = tokio::spawn({
        let connection = Arc::clone(&connection);
        async move { echo(&connection, b"block", Bytes::new()).await }
    });
    let calls: Vec<_> = (0..2000u32)
        .map(|i| {
            let connection = Arc::clone(&connection);
            tokio::spawn(async move {
                let payload = Bytes::from(i.to_le_bytes().repeat(1 + i as usize % 700));
                assert_eq!(echo(&connection, b"x", payload.clone()).await, payload);
            })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    assert!(!blocked.is_finished());
    running.gate.add_permits(1);
    blocked.await.unwrap();
}

#[tokio::test]
async fn garbage_ends_its_connection_and_no_other() {
    let running = serve_default().await;
    let bystander = open(&running).await;
    let mut stream = raw(&running).await;
    stream.write_all(&[0x5a; 200]).await.unwrap();
    assert!(closed_by_peer(&mut stream).await);
    assert_eq!(echo(&bystander, b"still here", Bytes::new()).await, Bytes::new());
    assert_eq!(running.stats.broken.load(Relaxed), 1);
}

#[tokio::test]
async fn an_unauthenticated_peer_that_sends_garbage_is_refused() {
    let running = serve_default().await;
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n").await.unwrap();
    assert!(closed_by_peer(&mut stream).await);
    assert_eq!(running.stats.refused.load(Relaxed), 1);
}

#[tokio::test]
async fn a_silent_unauthenticated_peer_is_dropped() {
    let running = serve("127.0.0.1:0", |config| config.handshake_timeout = SHORT).await;
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    assert!(closed_by_peer(&mut stream).await);
}

async fn until_count(counter: &AtomicU64, expected: u64) {
    let started = Instant::now();
    while counter.load(Relaxed) < expected {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "the counter did not reach {expected}"
        );
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_port_probe_does_not_count_as_a_refusal() {
    let running = serve_default().await;
    drop(TcpStream::connect(&running.address).await.unwrap());
    let reset = TcpStream::connect(&running.address).await.unwrap();
    socket2::SockRef::from(&reset).set_linger(Some(Duration::ZERO)).unwrap();
    drop(reset);
    until_count(&running.stats.silent, 2).await;
    let mut partial = TcpStream::connect(&running.address).await.unwrap();
    partial.write_all(&[7]).await.unwrap();
    drop(partial);
    until_count(&running.stats.refused, 1).await;
    assert_eq!(running.stats.silent.load(Relaxed), 2);
    echo(&open(&running).await, b"x", Bytes::new()).await;
}

#[tokio::test]
async fn an_oversized_length_is_refused_before_memory_is_allocated() {
    let running = serve_default().await;
    let mut stream = raw(&running).await;
    stream.write_all(&header(5, u32::MAX as usize).encode()).await.unwrap();
    assert!(closed_by_peer(&mut stream).await);
    assert_eq!(running.stats.broken.load(Relaxed), 1);
    let limits = Limits { message_bytes_max: 10, payload_bytes_max: 10 };
    let config = ConnectionConfig { limits, ..ConnectionConfig::new(CONTEXT, key()) };
    let connection = Connection::open(&running.address, config, soon()).await.unwrap();
    let call = connection.call(Bytes::from_static(b"x"), Bytes::from(vec![0; 11]).into(), soon());
    assert!(matches!(call.await, Err(RpcError::TooLarge { part: "payload", bytes: 11, .. })));
}

#[tokio::test]
async fn half_a_frame_does_not_hold_a_slot_forever() {
    let running = serve("127.0.0.1:0", |config| {
        config.budgets = vec![Budget { calls_max: 1, ..Budget::default() }];
        config.stall_timeout = SHORT;
    })
    .await;
    for length in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3] {
        let mut stream = raw(&running).await;
        let mut frame = header(10, 10).encode().to_vec();
        frame.extend([0; 20]);
        stream.write_all(&frame[..length]).await.unwrap();
        assert!(closed_by_peer(&mut stream).await, "after {length} bytes");
    }
    echo(&open(&running).await, b"free again", Bytes::new()).await;
}

#[tokio::test]
async fn a_changed_message_is_refused() {
    let running = serve_default().await;
    let mut stream = raw(&running).await;
    stream.write_all(&header(5, 0).encode()).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    assert!(closed_by_peer(&mut stream).await);
    assert_eq!(running.stats.calls.load(Relaxed), 0);
}

#[tokio::test]
async fn another_key_or_another_service_is_refused_at_once() {
    let running = serve_default().await;
    let other = Key::from_bytes(b"another key of enough bytes").unwrap();
    for config in [ConnectionConfig::new(CONTEXT, other), ConnectionConfig::new("other", key())] {
        let pool = Pool::new(&running.address, PoolConfig::new(config));
        let error = pool.call(Bytes::new(), Payload::empty(), soon()).await.unwrap_err();
        assert!(matches!(error, RpcError::Refused { .. }), "{error}");
        assert_eq!((error.executed(), error.retryable()), (Executed::No, false));
    }
}

#[tokio::test]
async fn a_peer_that_reads_nothing_is_dropped() {
    let running = serve("127.0.0.1:0", |config| config.stall_timeout = SHORT).await;
    let mut stream = raw(&running).await;
    let mut request = Header { message_crc: crc32c::crc32c(b"x"), ..header(1, 4 << 20) };
    let payload = vec![0; 4 << 20];
    for request_id in 0..40 {
        request.request_id = request_id;
        let send = async {
            stream.write_all(&request.encode()).await?;
            stream.write_all(b"x").await?;
            stream.write_all(&payload).await
        };
        if !matches!(tokio::time::timeout(Duration::from_millis(500), send).await, Ok(Ok(()))) {
            break;
        }
    }
    for _ in 0..1_200 {
        if running.stats.broken.load(Relaxed) == 1 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the connection was never dropped");
}

#[tokio::test]
async fn too_much_in_flight_is_answered_not_queued() {
    let running = serve("127.0.0.1:0", |config| {
        config.budgets = vec![Budget { calls_max: 2, ..Budget::default() }];
    })
    .await;
    let connection = Arc::new(open(&running).await);
    let blocked: Vec<_> = (0..2)
        .map(|_| {
            let connection = Arc::clone(&connection);
            tokio::spawn(async move { echo(&connection, b"block", Bytes::new()).await })
        })
        .collect();
    while running.stats.calls.load(Relaxed) < 2 {
        tokio::task::yield_now().await;
    }
    let payload = Bytes::from(vec![1; 1 << 20]);
    let error =
        connection.call(Bytes::from_static(b"x"), payload.into(), soon()).await.unwrap_err();
    assert!(
        matches!(&error, RpcError::Faulted { fault, .. } if fault.code == FaultCode::Overloaded)
    );
    assert_eq!((error.executed(), error.retryable()), (Executed::No, true));
    running.gate.add_permits(2);
    for call in blocked {
        call.await.unwrap();
    }
    echo(&connection, b"x", Bytes::new()).await;
}

#[tokio::test]
async fn a_panicking_handler_returns_an_error_and_the_connection_stays() {
    let running = serve_default().await;
    let connection = open(&running).await;
    let error =
        connection.call(Bytes::from_static(b"panic"), Payload::empty(), soon()).await.unwrap_err();
    assert_eq!(error.executed(), Executed::Perhaps);
    let error =
        connection.call(Bytes::from_static(b"parse"), Payload::empty(), soon()).await.unwrap_err();
    assert!(error.to_string().contains("BadRequest"), "{error}");
    echo(&connection, b"x", Bytes::new()).await;
}

#[tokio::test]
async fn a_call_ends_at_its_deadline() {
    let running = serve_default().await;
    let connection = open(&running).await;
    let deadline = Deadline::after(Duration::from_millis(500));
    let call = connection.call(Bytes::from_static(b"block"), Payload::empty(), deadline);
    let error = call.await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: true, .. }), "{error}");
    echo(&connection, b"x", Bytes::new()).await;
}

#[tokio::test]
async fn a_call_whose_deadline_has_passed_is_not_sent() {
    let running = serve_default().await;
    let connection = open(&running).await;
    let over = Deadline::after(Duration::ZERO);
    let error = connection.call(Bytes::from_static(b"x"), Payload::empty(), over).await;
    let error = error.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: false, .. }), "{error}");
    echo(&connection, b"x", Bytes::new()).await;
    assert_eq!(running.stats.calls.load(Relaxed), 1);
}

#[tokio::test]
async fn a_pool_survives_a_restart_of_the_server() {
    let running = serve_default().await;
    let pool = Pool::new(
        &running.address,
        PoolConfig { connections_max: 2, ..PoolConfig::new(ConnectionConfig::new(CONTEXT, key())) },
    );
    let ask = || pool.ask::<u64, u64>(&5, Duration::from_secs(1), soon(), None);
    assert_eq!(ask().await.unwrap(), 5);
    let address = running.address.clone();
    running.handle.request();
    running.task.await.unwrap();
    let restarted = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        serve(&address, |_| {}).await
    };
    let (answer, _running) = tokio::join!(ask(), restarted);
    assert_eq!(answer.unwrap(), 5);
    assert_eq!(ask().await.unwrap(), 5);
}

#[tokio::test]
async fn shutdown_lets_running_calls_end() {
    let running = serve_default().await;
    let connection = Arc::new(open(&running).await);
    let blocked = tokio::spawn({
        let connection = Arc::clone(&connection);
        async move { echo(&connection, b"block", Bytes::new()).await }
    });
    while running.stats.calls.load(Relaxed) < 1 {
        tokio::task::yield_now().await;
    }
    running.handle.request();
    tokio::task::yield_now().await;
    running.gate.add_permits(1);
    blocked.await.unwrap();
    running.task.await.unwrap();
}

#[tokio::test]
async fn a_missing_peer_is_reported_with_its_address_by_the_deadline() {
    let pool = Pool::new("127.0.0.1:1", PoolConfig::new(ConnectionConfig::new(CONTEXT, key())));
    let deadline = Deadline::after(Duration::from_millis(100));
    let error = pool.call(Bytes::new(), Payload::empty(), deadline).await.unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    assert!(deadline.passed() || deadline.remaining().unwrap() < Duration::from_millis(60));
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let running = serve_default().await;
    let error = Server::bind(&running.address, ServerConfig::new(CONTEXT, key())).await.err();
    assert!(error.unwrap().to_string().contains(&running.address));
}
