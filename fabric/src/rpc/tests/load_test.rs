//! Load tests: many peers, silent peers and stopped peers, and the resources that they may take.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::rpc_test::{CONTEXT, credential, key, soon};
use crate::auth::keys::KeyRing;
use crate::auth::ticket::Ticket;
use crate::deadline::Deadline;
use crate::rpc::frame::{Header, Kind};
use crate::rpc::handshake::unix_now;
use crate::rpc::*;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

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

struct Running {
    address: String,
    stats: Arc<ServerStats>,
    gate: Arc<Semaphore>,
    _alive: ShutdownHandle,
}

async fn serve(change: impl FnOnce(&mut ServerConfig)) -> Running {
    let mut config = ServerConfig::new(CONTEXT, key());
    change(&mut config);
    let server = Server::bind("127.0.0.1:0", config).await.unwrap();
    let (handle, shutdown) = Shutdown::new();
    let (address, stats) = (server.address().to_string(), server.stats());
    let gate = Arc::new(Semaphore::new(0));
    tokio::spawn(server.serve(Loaded { gate: Arc::clone(&gate) }, shutdown));
    Running { address, stats, gate, _alive: handle }
}

/// Two classes with memory for one request of 1 MiB each; the share of one connection is all of it.
fn narrow(config: &mut ServerConfig) {
    let budget =
        Budget { calls_max: 4096, bytes_max: MIB + KIB, reply_bytes_max: 4 * MIB, shares: 1 };
    config.budgets = vec![budget; 2];
}

async fn open(running: &Running) -> Arc<Connection> {
    let config = ConnectionConfig::new(CONTEXT, key());
    Arc::new(Connection::open(&running.address, config, soon()).await.unwrap())
}

/// A connection with a ticket for a volume.
async fn of_volume(running: &Running, directory: u64) -> Result<Arc<Connection>, RpcError> {
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

fn large() -> Payload {
    Bytes::from(vec![1; MIB]).into()
}

async fn send(
    connection: &Connection,
    message: &'static [u8],
    payload: Payload,
    class: u8,
    deadline: Deadline,
) -> Result<Reply, RpcError> {
    let options = CallOptions { class, ..CallOptions::default() };
    connection.call_with(Bytes::from_static(message), payload, deadline, options).await
}

async fn until(mut is_so: impl FnMut() -> bool) {
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
async fn held(running: &Running, class: u8) -> tokio::task::JoinHandle<Result<Reply, RpcError>> {
    let connection = open(running).await;
    let before = running.stats.calls.load(Relaxed);
    let call =
        tokio::spawn(async move { send(&connection, b"hold", large(), class, soon()).await });
    until(|| running.stats.calls.load(Relaxed) > before).await;
    call
}

#[tokio::test]
async fn a_full_class_delays_only_its_large_requests() {
    let running = serve(narrow).await;
    let holder = held(&running, 0).await;
    let connection = open(&running).await;
    let waits = tokio::spawn({
        let connection = Arc::clone(&connection);
        async move { send(&connection, b"x", large(), 0, soon()).await }
    });
    // On the same connection, behind it.
    send(&connection, b"x", large(), 1, soon()).await.unwrap();
    send(&connection, b"x", Payload::empty(), 0, soon()).await.unwrap();
    assert!(!waits.is_finished());
    assert_eq!(running.stats.overloaded.load(Relaxed), 0, "it is not refused either");
    running.gate.add_permits(1);
    holder.await.unwrap().unwrap();
    waits.await.unwrap().unwrap();
}

/// A request that would need an offer's round trip is sent immediately, and offered after a
/// refusal.
#[tokio::test]
async fn a_medium_request_is_sent_without_a_grant_until_memory_is_short() {
    let running = serve(narrow).await;
    let medium = || Payload::from(Bytes::from(vec![1; 100 * KIB]));
    let connection = open(&running).await;
    send(&connection, b"x", medium(), 0, soon()).await.unwrap();
    let holder = held(&running, 0).await;
    let refused = || running.stats.overloaded.load(Relaxed);
    let waits = tokio::spawn({
        let connection = Arc::clone(&connection);
        async move { send(&connection, b"x", medium(), 0, soon()).await }
    });
    until(|| refused() == 1).await;
    // From now on it sends offers; other classes have memory.
    let deadline = Deadline::after(Duration::from_millis(50));
    let error = send(&connection, b"x", medium(), 0, deadline).await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: false, .. }), "{error}");
    send(&connection, b"x", medium(), 1, soon()).await.unwrap();
    running.gate.add_permits(1);
    holder.await.unwrap().unwrap();
    waits.await.unwrap().unwrap();
    assert_eq!((refused(), running.stats.calls.load(Relaxed)), (1, 4));
}

#[tokio::test]
async fn an_offer_ends_at_its_deadline_without_sending_its_payload() {
    let running = serve(narrow).await;
    let holder = held(&running, 0).await;
    let connection = open(&running).await;
    let deadline = Deadline::after(Duration::from_millis(50));
    let error = send(&connection, b"x", large(), 0, deadline).await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: false, .. }), "{error}");
    assert_eq!(error.executed(), Executed::No);
    running.gate.add_permits(1);
    holder.await.unwrap().unwrap();
    send(&connection, b"x", large(), 0, soon()).await.unwrap();
    assert_eq!(running.stats.calls.load(Relaxed), 2);
}

#[tokio::test]
async fn a_caller_that_gives_up_or_dies_releases_its_memory() {
    let running = serve(narrow).await;
    let holder = held(&running, 0).await;
    let (gives_up, dies) = (open(&running).await, open(&running).await);
    let offers: Vec<_> = [Arc::clone(&gives_up), Arc::clone(&dies)]
        .into_iter()
        .map(|it| tokio::spawn(async move { send(&it, b"x", large(), 0, soon()).await }))
        .collect();
    // The server has received both offers once it has answered a request that was sent after them.
    for connection in [&gives_up, &dies] {
        tokio::task::yield_now().await;
        send(connection, b"x", Payload::empty(), 0, soon()).await.unwrap();
    }
    // One by dropping its future, the other by closing its connection.
    offers[0].abort();
    drop(dies);
    offers[1].abort();
    running.gate.add_permits(1);
    holder.await.unwrap().unwrap();
    send(&*open(&running).await, b"x", large(), 0, soon()).await.unwrap();
    send(&gives_up, b"x", large(), 0, soon()).await.unwrap();
}

/// An authenticated stream, for frames that a `Connection` never sends.
async fn raw(running: &Running) -> TcpStream {
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    handshake::dial(&mut stream, &credential(), CONTEXT, &[], soon()).await.unwrap();
    stream
}

fn header(kind: Kind, request_id: u64, payload_bytes: usize) -> Header {
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

#[tokio::test]
async fn a_peer_that_does_not_use_its_grant_or_stalls_loses_it() {
    let running = serve(|config| {
        narrow(config);
        config.grant_timeout = Duration::from_millis(100);
    })
    .await;
    let mut hoards = raw(&running).await;
    for request_id in 0..20 {
        hoards.write_all(&header(Kind::Offer, request_id, MIB).encode()).await.unwrap();
    }
    send(&*open(&running).await, b"x", large(), 0, soon()).await.unwrap();
    let mut stops = raw(&running).await;
    stops.write_all(&header(Kind::Offer, 1, MIB).encode()).await.unwrap();
    // Its grant comes after those of the other one, which time out in sequence.
    until(|| stops.try_read(&mut [0; HEADER_BYTES]).is_ok()).await;
    stops.write_all(&header(Kind::Request, 1, MIB).encode()).await.unwrap();
    stops.write_all(b"x and a few bytes").await.unwrap();
    send(&*open(&running).await, b"x", large(), 0, soon()).await.unwrap();
    until(|| running.stats.broken.load(Relaxed) == 1).await;
}

#[tokio::test]
async fn an_older_caller_without_offers_is_served_as_memory_allows() {
    let running = serve(narrow).await;
    let mut older = raw(&running).await;
    for request_id in 0..3 {
        older.write_all(&header(Kind::Request, request_id, MIB).encode()).await.unwrap();
        older.write_all(b"x").await.unwrap();
        older.write_all(&vec![0; MIB]).await.unwrap();
    }
    // Refused requests are refused as overload; accepted ones are answered.
    let seen = || running.stats.calls.load(Relaxed) + running.stats.overloaded.load(Relaxed);
    until(|| seen() == 3).await;
    assert!(running.stats.calls.load(Relaxed) >= 1);
}

/// Half of the readers stop reading: the memory that they hold is bounded, and the others are
/// served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_stop_do_not_keep_the_memory_of_replies_from_others() {
    let running = serve(|config| {
        narrow(config);
        config.reply_stall_timeout = Duration::from_millis(200);
        // Within the time of this test only the pressure of other calls closes them.
        config.stall_timeout = Duration::from_secs(600);
    })
    .await;
    let mut stopped = Vec::new();
    for _ in 0..8 {
        let socket = TcpSocket::new_v4().unwrap();
        // Keeps replies in the server's memory, not in the kernel's.
        socket.set_recv_buffer_size(16 << 10).unwrap();
        let mut stream = socket.connect(running.address.parse().unwrap()).await.unwrap();
        handshake::dial(&mut stream, &credential(), CONTEXT, &[], soon()).await.unwrap();
        for request_id in 0..64 {
            let message_crc = crc32c::crc32c(b"read");
            let header = header(Kind::Request, request_id, 0);
            let request = Header { message_bytes: 4, message_crc, ..header };
            stream.write_all(&request.encode()).await.unwrap();
            stream.write_all(b"read").await.unwrap();
        }
        stopped.push(stream);
    }
    let mut readers = JoinSet::new();
    for _ in 0..4 {
        let (connection, stats) = (open(&running).await, Arc::clone(&running.stats));
        readers.spawn(async move {
            let deadline = soon();
            let mut reads = 0;
            // Until the holders of memory were disconnected, however fast reads are.
            while reads < 20 || stats.broken.load(Relaxed) == 0 {
                let reply = send(&connection, b"read", Payload::empty(), 1, soon()).await.unwrap();
                assert_eq!(reply.payload.len(), MIB);
                let reply = send(&connection, b"read", Payload::empty(), 0, soon()).await.unwrap();
                assert_eq!(reply.payload.len(), MIB);
                reads += 1;
                assert!(!deadline.passed(), "those that hold memory are not dropped");
            }
        });
    }
    while let Some(done) = readers.join_next().await {
        done.unwrap();
    }
    drop(stopped);
}

#[tokio::test]
async fn no_reply_is_produced_for_a_caller_that_has_given_up() {
    memory_is_short_for(b"read").await;
}

/// The bytes of a message count as those of a payload.
#[tokio::test]
async fn a_long_message_keeps_its_memory_until_it_is_written() {
    memory_is_short_for(b"list").await;
}

/// One peer reads no replies, and others time out until its connection is closed.
async fn memory_is_short_for(what: &'static [u8; 4]) {
    let running = serve(|config| {
        let budget = Budget { reply_bytes_max: MIB, ..Budget::default() };
        config.budgets = vec![budget];
        config.stall_timeout = Duration::from_secs(600);
        config.reply_stall_timeout = Duration::from_secs(600);
    })
    .await;
    // Reads nothing: its reply, except for the part in the kernel's buffers, holds the memory.
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut stream = socket.connect(running.address.parse().unwrap()).await.unwrap();
    handshake::dial(&mut stream, &credential(), CONTEXT, &[], soon()).await.unwrap();
    for request_id in 0..16 {
        let message_crc = crc32c::crc32c(what);
        let request =
            Header { message_bytes: 4, message_crc, ..header(Kind::Request, request_id, 0) };
        stream.write_all(&request.encode()).await.unwrap();
        stream.write_all(what).await.unwrap();
    }
    until(|| running.stats.calls.load(Relaxed) == 16).await;
    let connection = open(&running).await;
    let mut late = 0;
    for _ in 0..20 {
        let deadline = Deadline::after(Duration::from_millis(20));
        late += usize::from(send(&connection, what, Payload::empty(), 0, deadline).await.is_err());
    }
    assert!(late > 0, "memory was never short");
    // The connection remains usable.
    send(&connection, b"x", Payload::empty(), 0, soon()).await.unwrap();
}

#[tokio::test]
async fn callers_wait_for_a_busy_server_but_not_for_a_silent_one() {
    let running = serve(narrow).await;
    let connection = open(&running).await;
    let idle_timeout = Some(Duration::from_millis(150));
    let options = CallOptions { idle_timeout, ..CallOptions::default() };
    let hold =
        || connection.call_with(Bytes::from_static(b"hold"), Payload::empty(), soon(), options);
    let error = hold().await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: true, waited_ms: 150.., .. }), "{error}");
    let talks = async {
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            send(&connection, b"x", Payload::empty(), 0, soon()).await.unwrap();
        }
        running.gate.add_permits(2);
    };
    let (held, ()) = tokio::join!(hold(), talks);
    held.unwrap();
}

async fn silent(running: &Running, last: u8) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 7, last], 0).into()).unwrap();
    socket.connect(running.address.parse().unwrap()).await.ok()
}

/// More silent connections than the server has slots, from one address and from many.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_never_exclude_authenticated_peers() {
    for addresses in [1, 40] {
        let running = serve(|config| {
            (config.connections_max, config.unauthenticated_max) = (64, 32);
            config.unauthenticated_per_address_max = 8;
            // Longer than the test: only eviction frees a slot.
            config.handshake_timeout = Duration::from_secs(600);
        })
        .await;
        let before = open(&running).await;
        let mut silent_streams = Vec::new();
        for number in 0..400_u32 {
            silent_streams.extend(silent(&running, 1 + (number % addresses) as u8).await);
            if number % 20 == 0 {
                send(&before, b"x", Payload::empty(), 0, soon()).await.unwrap();
                send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.unwrap();
            }
        }
        let remaining = if addresses == 1 { 8 } else { 32 };
        until(|| running.stats.evicted.load(Relaxed) >= 400 - remaining).await;
        assert_eq!(silent_streams.len(), 400);
        send(&before, b"x", large(), 0, soon()).await.unwrap();
    }
}

#[tokio::test]
async fn the_connections_of_one_address_are_bounded() {
    let running = serve(|config| config.connections_per_address_max = 3).await;
    let mut connections = Vec::new();
    for _ in 0..3 {
        connections.push(open(&running).await);
    }
    let over = open(&running).await;
    let refused = send(&over, b"x", Payload::empty(), 0, soon()).await;
    assert!(refused.is_err());
    connections.pop();
    // Its slot is released once the server has noticed that it closed.
    let started = Instant::now();
    while send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.is_err() {
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}

/// Calls of one volume, over any number of connections, leave slots to other volumes, and those of
/// all volumes leave slots to services.
#[tokio::test]
async fn calls_of_one_volume_do_not_exclude_other_callers() {
    let running = serve(|config| {
        config.budgets = vec![Budget { calls_max: 16, shares: 4, ..Budget::default() }];
    })
    .await;
    let mut connections = Vec::new();
    for volume in [1, 1, 1, 2, 3, 4] {
        connections.push(of_volume(&running, volume).await.unwrap());
    }
    let held = || running.stats.calls.load(Relaxed) - connections.len() as u64;
    let mut holding = JoinSet::new();
    for (connection, expected) in connections.iter().zip([4, 4, 4, 8, 12, 12]) {
        for _ in 0..8 {
            let before = held() + running.stats.overloaded.load(Relaxed);
            let connection = Arc::clone(connection);
            holding.spawn(async move {
                drop(send(&connection, b"hold", Payload::empty(), 0, soon()).await);
            });
            until(|| held() + running.stats.overloaded.load(Relaxed) > before).await;
        }
        assert_eq!(held(), expected);
    }
    send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.unwrap();
    running.gate.add_permits(16);
    while holding.join_next().await.is_some() {}
    send(&connections[5], b"x", Payload::empty(), 0, soon()).await.unwrap();
}

/// The same holds for the memory of requests and of replies: a volume with many connections has no
/// more of it, and alternates with a volume that has a single connection.
#[tokio::test]
async fn a_volume_with_many_connections_leaves_memory_to_one_with_a_single_connection() {
    let running = serve(|config| {
        let bytes_max = 8 * (MIB + KIB);
        let reply_bytes_max = bytes_max;
        config.budgets =
            vec![Budget { bytes_max, reply_bytes_max, shares: 4, ..Budget::default() }];
    })
    .await;
    let mut many = Vec::new();
    for _ in 0..8 {
        many.push(of_volume(&running, 1).await.unwrap());
    }
    let (one, service) = (of_volume(&running, 2).await.unwrap(), open(&running).await);
    let before = running.stats.calls.load(Relaxed);
    let mut holding = JoinSet::new();
    for connection in many.iter().flat_map(|connection| vec![connection; 4]) {
        let connection = Arc::clone(connection);
        holding
            .spawn(async move { send(&connection, b"hold", large(), 0, soon()).await.map(drop) });
    }
    // Half of the memory, over at least four connections.
    until(|| running.stats.calls.load(Relaxed) == before + 4).await;
    for connection in [&one, &service] {
        for _ in 0..3 {
            send(connection, b"x", large(), 0, soon()).await.unwrap();
        }
    }
    assert_eq!(running.stats.calls.load(Relaxed), before + 10, "the others wait");
    running.gate.add_permits(32);
    while let Some(held) = holding.join_next().await {
        held.unwrap().unwrap();
    }
}

#[tokio::test]
async fn connections_with_tickets_leave_slots_to_services() {
    let running = serve(|config| config.connections_max = 8).await;
    let mut connections = Vec::new();
    for volume in 0..6 {
        connections.push(of_volume(&running, volume).await.unwrap());
    }
    assert!(of_volume(&running, 7).await.is_err());
    for _ in 0..2 {
        let service = open(&running).await;
        send(&service, b"x", Payload::empty(), 0, soon()).await.unwrap();
        connections.push(service);
    }
}

#[tokio::test]
async fn connections_of_one_volume_leave_slots_to_others() {
    let running = serve(|config| config.connections_max = 64).await;
    let mut connections = Vec::new();
    for _ in 0..36 {
        connections.push(of_volume(&running, 1).await.unwrap());
    }
    assert!(of_volume(&running, 1).await.is_err());
    for volume in [2, 3] {
        for _ in 0..6 {
            connections.push(of_volume(&running, volume).await.unwrap());
        }
        assert!(of_volume(&running, volume).await.is_err());
    }
    assert!(of_volume(&running, 4).await.is_err(), "the rest is for services");
    send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.unwrap();
}
