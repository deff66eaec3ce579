//! Requests that must not be started after the caller's lease has expired.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::rpc_test::{CONTEXT, Running, key, ring, serve_default, soon};
use crate::boot_instant::BootInstant;
use crate::deadline::Deadline;
use crate::rpc::frame::{HEADER_BYTES, Header, Kind};
use crate::rpc::*;

/// A network that delays the data of one side, as a partition does: the kernels deliver it when the
/// partition ends.
struct Network {
    address: String,
    open: watch::Sender<bool>,
}

async fn network(running: &Running) -> Network {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let open = watch::Sender::new(true);
    let (mut gate, server) = (open.subscribe(), running.address.clone());
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let server = TcpStream::connect(server).await.unwrap();
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
        let mut buffer = [0; 4096];
        loop {
            let read = from_client.read(&mut buffer).await.unwrap_or(0);
            if read == 0 || gate.wait_for(|open| *open).await.is_err() {
                return;
            }
            to_server.write_all(&buffer[..read]).await.unwrap();
        }
    });
    Network { address, open }
}

async fn connect(address: &str) -> Connection {
    Connection::open(address, ConnectionConfig::new(CONTEXT, key()), soon()).await.unwrap()
}

fn not_after() -> NotAfter {
    NotAfter { lease: Lease::default(), end: soon() }
}

async fn call(
    connection: &Connection,
    not_after: &NotAfter,
    wait: Duration,
) -> Result<Reply, RpcError> {
    let payload = Bytes::from_static(b"payload").into();
    let deadline = Deadline::after(wait);
    let options = CallOptions { not_after: Some(not_after), ..CallOptions::default() };
    connection.call_with(Bytes::from_static(b"x"), payload, deadline, options).await
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_request_that_expires_in_the_socket_is_not_started() {
    let running = serve_default().await;
    let network = network(&running).await;
    let connection = connect(&network.address).await;
    let not_after = not_after();
    not_after.lease.renew_until(BootInstant::now().after(LONG));
    call(&connection, &not_after, LONG).await.unwrap();
    assert_eq!(running.stats.calls.load(Relaxed), 1);

    network.open.send_replace(false);
    let end = BootInstant::now().after(Duration::from_secs(1));
    not_after.lease.renew_until(end);
    let error = call(&connection, &not_after, Duration::from_millis(500)).await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: true, .. }), "{error}");
    tokio::time::sleep(end.remaining()).await;
    network.open.send_replace(true);
    // Sent behind it on the same connection: once this is answered, the server has checked the
    // other.
    connection.call(Bytes::from_static(b"y"), Payload::empty(), soon()).await.unwrap();
    assert_eq!(running.stats.expired.load(Relaxed), 1);
    assert_eq!(running.stats.calls.load(Relaxed), 2, "only the two others were handed over");
}

#[tokio::test]
async fn an_abandoned_operation_is_not_started_later() {
    let running = serve_default().await;
    let network = network(&running).await;
    let connection = connect(&network.address).await;
    call(&connection, &not_after(), LONG).await.unwrap();
    network.open.send_replace(false);
    let wait = Duration::from_millis(500);
    let not_after = NotAfter { lease: Lease::default(), end: Deadline::after(wait) };
    call(&connection, &not_after, wait).await.unwrap_err();
    tokio::time::sleep_until(not_after.end.instant().into()).await;
    network.open.send_replace(true);
    connection.call(Bytes::from_static(b"y"), Payload::empty(), soon()).await.unwrap();
    assert_eq!(running.stats.expired.load(Relaxed), 1);
}

#[tokio::test]
async fn a_handler_receives_the_time_until_which_it_may_start() {
    struct Echo;
    impl Service for Echo {
        async fn handle(&self, call: Call) -> Result<Reply, Fault> {
            let remaining = call.expires.map(|at| at.remaining().as_millis() as u64);
            Reply::of(&remaining)
        }
    }
    let server = Server::bind("127.0.0.1:0", ServerConfig::new(CONTEXT, key())).await.unwrap();
    let (address, (handle, shutdown)) = (server.address().to_string(), Shutdown::new());
    let task = tokio::spawn(server.serve(Echo, shutdown));
    let connection = connect(&address).await;
    let not_after =
        NotAfter { lease: Lease::default(), end: Deadline::after(Duration::from_secs(1000)) };
    for _ in 0..2 {
        let reply = call(&connection, &not_after, LONG).await.unwrap();
        let remaining: Option<u64> = decode(&reply.message).unwrap();
        assert!(remaining.unwrap() > 100_000 && remaining.unwrap() <= 900_000, "{remaining:?}");
    }
    let reply = connection.call(Bytes::from_static(b"x"), Payload::empty(), soon()).await.unwrap();
    assert_eq!(decode::<Option<u64>>(&reply.message).unwrap(), None);
    handle.request();
    task.await.unwrap();
}

#[tokio::test]
async fn a_request_with_a_lost_lease_is_not_sent_and_one_without_a_lease_waits() {
    let running = serve_default().await;
    let connection = connect(&running.address).await;
    let not_after = not_after();
    not_after.lease.renew_until(BootInstant::now());
    let error = call(&connection, &not_after, Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: false, .. }), "{error}");
    not_after.lease.revoke();
    let error = call(&connection, &not_after, LONG).await.unwrap_err();
    assert!(matches!(error, RpcError::LeaseLost { .. }), "{error}");
    assert_eq!(error.executed(), Executed::No);
    assert_eq!(running.stats.calls.load(Relaxed), 0);
}

/// A server that does not support guarded calls: its replies carry no clock, and unknown frame
/// kinds close the connection.
#[tokio::test]
async fn an_older_server_is_sent_requests_as_before() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let older = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let ring = ring();
        let accept = handshake::accept(&mut stream, &ring, DEFAULT_CLUSTER, CONTEXT, &[], soon());
        accept.await.unwrap();
        for _ in 0..3 {
            let mut bytes = [0; HEADER_BYTES];
            stream.read_exact(&mut bytes).await.unwrap();
            let header = Header::decode(&bytes, &Limits::default()).unwrap();
            assert_eq!(header.kind, Kind::Request);
            let mut body = vec![0; header.message_bytes + header.payload_bytes];
            stream.read_exact(&mut body).await.unwrap();
            let fault = encode(&Fault::internal("unknown message")).unwrap();
            let reply = Header {
                class: 0,
                kind: if body.is_empty() { Kind::Fault } else { Kind::Reply },
                request_id: header.request_id,
                message_bytes: fault.len(),
                payload_bytes: 0,
                time_ms: 0,
                message_crc: crc32c::crc32c(&fault),
            };
            stream.write_all(&reply.encode()).await.unwrap();
            stream.write_all(&fault).await.unwrap();
        }
    });
    let connection = connect(&address).await;
    for _ in 0..2 {
        call(&connection, &not_after(), LONG).await.unwrap();
    }
    older.await.unwrap();
}
