//! TLS peers that are unauthenticated, silent or slow: what they may take.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufWriter};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::rpc_test::{CONTEXT, Running, credential, serve, soon};
use super::tls_test::{echo, open, pattern, serving};
use crate::rpc::frame::{Header, Kind, Outgoing, write_frames};
use crate::rpc::stream::Metered;
use crate::rpc::*;
use crate::tls::{Accepts, BINDING_LABEL, client_context};

/// Reads until the server closes; returns the number of bytes.
async fn until_closed(mut stream: impl tokio::io::AsyncRead + Unpin) -> usize {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut answer));
    let _ = read.await.expect("closed");
    answer.len()
}

#[tokio::test]
async fn unauthenticated_tls_peers_are_refused_whatever_they_send() {
    let running = serving(Accepts::Tls).await;
    // A hello that never ends, in records of 16 KiB: the byte limit ends it.
    let endless = [vec![0x16, 3, 1, 0x40, 0, 1, 0, 0xea, 0x60], vec![0; 64 << 10]].concat();
    let cases: [&[u8]; 5] = [
        &endless,
        b"\x16\x03\x01\x00\x05hello",
        b"\x16\x03\x01\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        b"FFAUTH01 and then nothing",
    ];
    for (number, case) in cases.iter().enumerate() {
        let mut stream = TcpStream::connect(&running.address).await.unwrap();
        // The server may close before it has read everything.
        let _ = stream.write_all(case).await;
        let _ = stream.shutdown().await;
        let reply_bytes = until_closed(stream).await;
        assert!(reply_bytes <= 64, "case {number}: {reply_bytes} bytes");
    }
    let deadline = soon();
    while running.stats.refused.load(Relaxed) < cases.len() as u64 {
        assert!(deadline.remaining().is_some(), "{:?}", running.stats);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(running.stats.connections.load(Relaxed), 0);
    echo(&open(&running.address, true).await.unwrap(), Bytes::new()).await.unwrap();
}

#[tokio::test]
async fn a_bounded_number_of_bytes_is_read_of_a_peer_before_it_authenticates() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted_stream, _) = listener.accept().await.unwrap();
    let mut metered = Metered::new(accepted_stream, 1000);
    peer.write_all(&pattern(100_000, 0)).await.unwrap();
    let mut read = vec![0; 2000];
    let mut length = 0;
    let error = loop {
        match metered.read(&mut read[length..]).await {
            Ok(more) => length += more,
            Err(error) => break error,
        }
    };
    assert_eq!((length, &read[..1000]), (1000, &pattern(1000, 0)[..]));
    assert!(error.to_string().contains("before it authenticated"), "{error}");
    metered.authenticated();
    let mut rest = vec![0; 99_000];
    metered.read_exact(&mut rest).await.unwrap();
    assert!(rest == pattern(100_000, 0)[1000..]);
}

#[tokio::test]
async fn a_hello_that_never_ends_is_closed_by_its_length() {
    let change = |config: &mut ServerConfig| {
        config.tls = Accepts::Tls;
        config.handshake_timeout = Duration::from_secs(600);
    };
    let running = serve("127.0.0.1:0", change).await;
    let mut stream = TcpStream::connect(&running.address).await.unwrap();
    // A handshake message of 60,000 bytes, of which 9,000 are sent.
    let hello = [&[0x16, 3, 1, 0x40, 0, 1, 0, 0xea, 0x60][..], &[0; 9000]].concat();
    stream.write_all(&hello).await.unwrap();
    until_closed(stream).await;
}

#[tokio::test]
async fn peers_silent_at_any_handshake_step_have_few_slots_and_little_time() {
    let running = serve("127.0.0.1:0", |config| {
        config.tls = Accepts::Tls;
        (config.unauthenticated_max, config.unauthenticated_per_address_max) = (8, 8);
        config.handshake_timeout = Duration::from_millis(300);
    })
    .await;
    let mut silent = Vec::new();
    for number in 0..24 {
        let mut stream = TcpStream::connect(&running.address).await.unwrap();
        match number % 3 {
            // Before TLS, in the middle of its hello, and after it.
            0 => {}
            1 => stream.write_all(&[0x16, 3, 1]).await.unwrap(),
            _ => {
                let (context, name) = client_context().unwrap();
                let connect = TlsConnector::from(context).connect(name, stream).await;
                // Newer connections may already have evicted it.
                if let Ok(stream) = connect {
                    silent.push(tokio::spawn(until_closed(stream)));
                }
                continue;
            }
        }
        silent.push(tokio::spawn(until_closed(stream)));
    }
    // A member is accepted while all slots are taken.
    echo(&open(&running.address, true).await.unwrap(), Bytes::new()).await.unwrap();
    for stream in silent {
        stream.await.unwrap();
    }
    assert!(running.stats.evicted.load(Relaxed) >= 8, "{:?}", running.stats);
    assert_eq!(running.stats.connections.load(Relaxed), 1);
}

/// An authenticated stream whose kernel buffers are small.
async fn slow_reader(running: &Running) -> TlsStream<TcpStream> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let stream = socket.connect(running.address.parse().unwrap()).await.unwrap();
    let (context, name) = client_context().unwrap();
    let mut stream = TlsConnector::from(context).connect(name, stream).await.unwrap();
    let binding = stream.get_ref().1.export_keying_material([0; 32], BINDING_LABEL, Some(&[]));
    let binding = binding.unwrap();
    handshake::dial(&mut stream, &credential(), CONTEXT, &binding, soon()).await.unwrap();
    stream
}

fn request(request_id: u64, payload_bytes: usize) -> Vec<u8> {
    let message = b"x";
    let header = Header {
        kind: Kind::Request,
        class: 0,
        request_id,
        message_bytes: message.len(),
        payload_bytes,
        time_ms: 60_000,
        message_crc: crc32c::crc32c(message),
    };
    [&header.encode()[..], message, &pattern(payload_bytes, 0)].concat()
}

#[tokio::test]
async fn frames_are_flushed_through_a_buffering_stream() {
    let (local, mut remote) = tokio::io::duplex(1 << 16);
    let (outbox, mut queue) = tokio::sync::mpsc::channel(1);
    tokio::spawn(
        async move { write_frames(&mut BufWriter::new(local), &mut queue, |_| false).await },
    );
    outbox.send(Outgoing::bare(Kind::Grant, 1, ())).await.unwrap();
    let mut frame = [0; HEADER_BYTES];
    let read = tokio::time::timeout(Duration::from_secs(30), remote.read_exact(&mut frame));
    read.await.expect("the frame").unwrap();
}

#[tokio::test]
async fn a_peer_that_takes_no_replies_is_closed() {
    let running = serve("127.0.0.1:0", |config| {
        config.tls = Accepts::Tls;
        config.stall_timeout = Duration::from_millis(300);
    })
    .await;
    let mut stream = slow_reader(&running).await;
    for request_id in 0..64 {
        let request = request(request_id, 1 << 20);
        // Until the service closes; a TLS stream that is only written to reads nothing.
        if stream.write_all(&request).await.is_err() {
            break;
        }
    }
    let deadline = soon();
    while running.stats.broken.load(Relaxed) == 0 {
        assert!(deadline.remaining().is_some(), "{:?}", running.stats);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
