use super::*;
use crate::transport::StableMemory;
use crate::wire::{Frame, PIECE_BYTES_MAX};
use hfreduce_core::{DataHead, Determinism, Fingerprint, Kind, Stage};
use hfreduce_testing::{cases, changed, changes};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let first = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (first, listener.accept().unwrap().0)
}

fn abort(bytes: usize) -> Head {
    Head { payload_bytes: bytes, ..Head::bare(Frame::Abort) }
}

#[test]
fn frames_of_every_size_arrive_complete_and_in_order() {
    let (first, other) = pair();
    let (mut first, mut other) =
        (Connection::new(first, 1 << 20).unwrap(), Connection::<()>::new(other, 1 << 20).unwrap());
    let sizes = [0, 1, 63, 64, 1000, 1024, 0, 512];
    for (note, size) in sizes.into_iter().enumerate() {
        first.push(&abort(size), Payload::Owned(vec![note as u8; size]), note);
    }
    let (mut completed, mut count, mut place) = (Vec::new(), 0, vec![0_u8; 2048]);
    while count < sizes.len() {
        first.flush(&mut completed).unwrap();
        other.readable();
        while let Some(arrival) = other.receive_next().unwrap() {
            match arrival {
                // SAFETY: `place` outlives the loop and is larger than any payload.
                Arrival::Head(head) => unsafe {
                    other.body(place.as_mut_ptr(), head.payload_bytes);
                },
                _ => {
                    assert!(place[..sizes[count]].iter().all(|byte| *byte == count as u8));
                    count += 1;
                }
            }
        }
    }
    assert_eq!(completed, (0..sizes.len()).collect::<Vec<_>>());
}

#[test]
fn a_mapped_frame_completes_when_the_peer_acknowledges_it() {
    let (first, other) = pair();
    let mut first = Connection::new(first, 4096).unwrap();
    let mut other = Connection::new(other, 4096).unwrap();
    for note in 0..3 {
        first.push(&Head::bare(Frame::Credit), Payload::Mapped(4096), note);
    }
    let mut completed = Vec::new();
    first.flush(&mut completed).unwrap();
    assert!(completed.is_empty() && first.queued() == 0);
    let mut heads = 0;
    while heads < 3 {
        other.readable();
        while other.receive_next().unwrap().is_some() {
            heads += 1;
        }
    }
    other.copied(4096);
    other.copied(4096);
    assert!(other.has_unacked());
    other.push(&Head::bare(Frame::Credit), Payload::Owned(vec![]), 0);
    assert!(!other.has_unacked());
    other.flush(&mut Vec::new()).unwrap();
    first.readable();
    while first.receive_next().unwrap().is_none() {
        first.readable();
    }
    assert_eq!(first.take_copied(), [0, 1]);
    // Two acknowledgments where one is due: a protocol error.
    let too_many = Head { acked: 2, ..Head::bare(Frame::Credit) };
    (&other.stream).write_all(&too_many.encode()).unwrap();
    let error = loop {
        first.readable();
        if let Err(error) = first.receive_next() {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn garbage_and_end_of_stream_are_errors() {
    let (mut first, other) = pair();
    let mut other = Connection::<()>::new(other, 4096).unwrap();
    first.write_all(&[7; 64]).unwrap();
    let error = loop {
        other.readable();
        if let Err(error) = other.receive_next() {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    drop(first);
    other.readable();
    assert_eq!(other.receive_next().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn caller_memory_is_not_accessed_after_detach() {
    let (first, mut other) = pair();
    let mut first = Connection::new(first, 64 << 20).unwrap();
    let big = vec![1_u8; 32 << 20];
    let head = Head { payload_bytes: big.len(), ..Head::bare(Frame::Abort) };
    for note in 0..3 {
        // SAFETY: valid until `detach` was called.
        let memory = unsafe { StableMemory::new(big.as_ptr(), big.len()) };
        first.push(&head, Payload::Memory(memory), note);
    }
    first.flush(&mut Vec::new()).unwrap();
    assert_eq!(first.queued(), 3, "the socket cannot take that much");
    first.detach();
    assert_eq!(first.queued(), 1);
    assert!(matches!(first.queue[0].payload, Payload::Owned(_)));
    drop(big);
    let reader = std::thread::spawn(move || {
        other.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut frame = vec![0; HEAD_BYTES + (32 << 20)];
        other.read_exact(&mut frame).map(|()| frame)
    });
    while first.queued() > 0 {
        first.flush(&mut Vec::new()).unwrap();
        std::thread::yield_now();
    }
    let frame = reader.join().unwrap().unwrap();
    assert!(frame[HEAD_BYTES..].iter().all(|byte| *byte == 1));
}

/// Frames of every kind, encoded.
fn honest() -> Vec<u8> {
    let fingerprint = Fingerprint {
        kind: Kind::Allreduce,
        dtype: 1,
        element_bytes: 2,
        op: 0,
        root: 0,
        count: 300,
        shape: 0,
        modes: Determinism { stable: true, wide: true },
    };
    let data =
        DataHead { sequence: 1, chunk: 0, tree: 0, stage: Stage::Up, bytes: 64, fingerprint };
    let frames = [
        (Frame::Heartbeat { sequence: 1, fingerprint, waiting_for: Some(3) }, 0),
        (Frame::Data(data), 64),
        (Frame::Credit, 0),
        (Frame::Offer { message: 1, tag: 2, bytes: 3, fingerprint }, 0),
        (Frame::Offer { message: 2, tag: 2, bytes: 30, fingerprint }, 30),
        (Frame::Piece { message: 1 }, 100),
        (Frame::MappingOffer { token: 5 }, 0),
        (Frame::Abort, 40),
        (Frame::Close { next: 9 }, 0),
    ];
    let whole = |(frame, payload_bytes): (Frame, usize)| {
        let head = Head { payload_bytes, ..Head::bare(frame) };
        [head.encode().to_vec(), vec![7; payload_bytes]].concat()
    };
    frames.into_iter().flat_map(whole).collect()
}

proptest! {
    #![proptest_config(cases(400))]

    /// Modified frames, split into pieces of any size: frames within their bounds, then an error or
    /// the end.
    #[test]
    fn a_damaged_stream_of_frames_is_refused(
        changes in changes(),
        cuts in proptest::collection::vec(1..200_usize, 1..12),
    ) {
        let (mut first, other) = pair();
        let mut other = Connection::<()>::new(other, 4096).unwrap();
        let bytes = changed(&honest(), &changes);
        let mut place = vec![0_u8; PIECE_BYTES_MAX];
        let (mut arrivals, mut remaining) = (0, bytes.as_slice());
        let mut cuts = cuts.iter().cycle();
        let mut first = Some(&mut first);
        loop {
            match &mut first {
                Some(socket) if !remaining.is_empty() => {
                    let cut = cuts.next().map_or(1, |cut| (*cut).min(remaining.len()));
                    socket.write_all(&remaining[..cut]).unwrap();
                    remaining = &remaining[cut..];
                }
                _ => {
                    if let Some(socket) = first.take() {
                        socket.shutdown(std::net::Shutdown::Write).unwrap();
                    }
                }
            }
            other.readable();
            match other.receive_next() {
                Ok(Some(Arrival::Head(head))) => {
                    arrivals += 1;
                    prop_assert!(head.payload_bytes <= PIECE_BYTES_MAX);
                    match head.frame {
                        Frame::Abort => {
                            prop_assert!(head.payload_bytes <= hfreduce_core::error::REASON_BYTES_MAX);
                            other.body_owned(head.payload_bytes);
                        }
                        // SAFETY: `place` outlives the connection's use of it and holds the
                        // longest payload.
                        _ => unsafe { other.body(place.as_mut_ptr(), head.payload_bytes) },
                    }
                }
                Ok(_) => {}
                Err(_) => break,
            }
        }
        prop_assert!(arrivals <= bytes.len() / HEAD_BYTES);
    }
}
