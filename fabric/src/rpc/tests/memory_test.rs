//! Load tests of memory: what requests and replies may take, and callers that keep it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpSocket;
use tokio::task::JoinSet;

use super::load::{KIB, MIB, header, hold_memory, large, narrow, open, raw, send, serve, until};
use super::rpc_test::{CONTEXT, credential, soon};
use crate::deadline::Deadline;
use crate::rpc::frame::{Header, Kind};
use crate::rpc::*;

#[tokio::test]
async fn a_full_class_delays_only_its_large_requests() {
    let running = serve(narrow).await;
    let holder = hold_memory(&running, 0).await;
    let connection = open(&running).await;
    let waits = tokio::spawn({
        let connection = Arc::clone(&connection);
        async move { send(&connection, b"x", large(), 0, soon()).await }
    });
    // Sent on the same connection, after the first request.
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
    let holder = hold_memory(&running, 0).await;
    let overload_count = || running.stats.overloaded.load(Relaxed);
    let waits = tokio::spawn({
        let connection = Arc::clone(&connection);
        async move { send(&connection, b"x", medium(), 0, soon()).await }
    });
    until(|| overload_count() == 1).await;
    // From now on it sends offers; other classes have memory.
    let deadline = Deadline::after(Duration::from_millis(50));
    let error = send(&connection, b"x", medium(), 0, deadline).await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: false, .. }), "{error}");
    send(&connection, b"x", medium(), 1, soon()).await.unwrap();
    running.gate.add_permits(1);
    holder.await.unwrap().unwrap();
    waits.await.unwrap().unwrap();
    assert_eq!((overload_count(), running.stats.calls.load(Relaxed)), (1, 4));
}

#[tokio::test]
async fn an_offer_ends_at_its_deadline_without_sending_its_payload() {
    let running = serve(narrow).await;
    let holder = hold_memory(&running, 0).await;
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
    let holder = hold_memory(&running, 0).await;
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
    // One call is withdrawn by dropping its future, the other by closing its connection.
    offers[0].abort();
    drop(dies);
    offers[1].abort();
    running.gate.add_permits(1);
    holder.await.unwrap().unwrap();
    send(&*open(&running).await, b"x", large(), 0, soon()).await.unwrap();
    send(&gives_up, b"x", large(), 0, soon()).await.unwrap();
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
    // Its grant follows those of the other connection, which time out in sequence.
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
    let request_count =
        || running.stats.calls.load(Relaxed) + running.stats.overloaded.load(Relaxed);
    until(|| request_count() == 3).await;
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
    let mut streams = Vec::new();
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
        streams.push(stream);
    }
    let mut readers = JoinSet::new();
    for _ in 0..4 {
        let (connection, stats) = (open(&running).await, Arc::clone(&running.stats));
        readers.spawn(async move {
            let deadline = soon();
            let mut reads = 0;
            // Until the connections that hold memory are closed, regardless of the speed of reads.
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
    while let Some(result) = readers.join_next().await {
        result.unwrap();
    }
    drop(streams);
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
