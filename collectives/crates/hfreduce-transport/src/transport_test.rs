use super::*;
use crate::in_process::InProcess;
use crate::tcp::Streams;
use crate::wire::{Frame, HEAD_BYTES};
use hfreduce_core::credit::CLASSES;
use hfreduce_core::{Determinism, Fingerprint, Kind, Stage};
use hfreduce_testing::cases;
use proptest::prelude::*;
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const SLOT_BYTES: usize = 256 << 10;

type Link = Box<dyn Transport>;

fn sockets(count: usize) -> (Vec<TcpStream>, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let dial = |_| (TcpStream::connect(address).unwrap(), listener.accept().unwrap().0);
    (0..count).map(dial).unzip()
}

fn tcp(sockets: Vec<TcpStream>) -> Link {
    Box::new(Streams::new(sockets, SLOT_BYTES).unwrap())
}

/// Both ends of every transport, in several configurations.
fn every() -> Vec<(String, Link, Link)> {
    let mut all: Vec<(String, Link, Link)> = Vec::new();
    for count in [1, 2, 5] {
        let (sender, receiver) = sockets(count);
        all.push((format!("{count} streams"), tcp(sender), tcp(receiver)));
    }
    let (sender, receiver) = InProcess::pair().unwrap();
    all.push(("in process".into(), Box::new(sender), Box::new(receiver)));
    all
}

fn data(chunk: u32, bytes: usize) -> (Head, DataHead) {
    let fingerprint = Fingerprint {
        kind: Kind::Allreduce,
        dtype: 1,
        element_bytes: 2,
        op: 0,
        root: 0,
        count: 300,
        shape: 0,
        modes: Determinism::DEFAULT,
    };
    let data = DataHead { sequence: 1, chunk, tree: 0, stage: Stage::Up, bytes, fingerprint };
    (Head { payload_bytes: bytes, ..Head::bare(Frame::Data(data)) }, data)
}

/// The payload of a chunk.
fn payload(chunk: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + chunk * 7) as u8).collect()
}

/// Receives until `done`, or until the end of the peer.
fn receive(
    link: &mut Link,
    poller: &Poller,
    mut done: impl FnMut(&Received, &mut Link) -> bool,
) -> io::Result<()> {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        link.look_again();
        while let Some(received) = link.receive_next(poller)? {
            if done(&received, link) {
                return Ok(());
            }
        }
        assert!(Instant::now() < until, "no event");
        std::thread::yield_now();
    }
}

/// The error at the end of the stream.
fn end(link: &mut Link, poller: &Poller) -> io::ErrorKind {
    receive(link, poller, |_, _| false).unwrap_err().kind()
}

/// Sends chunks of these sizes and checks payloads, destinations and notes. Returns the order in
/// which their heads arrived.
fn pass(sender: &mut Link, receiver: &mut Link, poller: &Poller, sizes: &[usize]) -> Vec<u32> {
    let payloads: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(at, n)| payload(at, *n)).collect();
    let mut places: Vec<Vec<u8>> = sizes.iter().map(|bytes| vec![0; *bytes]).collect();
    let (mut next, mut notes, mut heads, mut complete) = (0, Vec::new(), Vec::new(), 0);
    let until = Instant::now() + Duration::from_secs(120);
    while complete < sizes.len() || notes.len() < sizes.len() {
        while next < sizes.len() && sender.takes_more() {
            let (head, _) = data(next as u32, sizes[next]);
            // SAFETY: `payloads` outlives the loop, at whose end all frames are written.
            let memory = unsafe { StableMemory::new(payloads[next].as_ptr(), sizes[next]) };
            sender.push(&head, Payload::Memory(memory), Some((1, next as u32)));
            next += 1;
        }
        sender.flush(poller, &mut notes).unwrap();
        receiver.look_again();
        while let Some(received) = receiver.receive_next(poller).unwrap() {
            match received {
                Received::Head(head) => {
                    let Frame::Data(data) = head.frame else { panic!("{head:?}") };
                    heads.push(data.chunk);
                    let place = &mut places[data.chunk as usize];
                    // SAFETY: `places` outlives the loop, at whose end all payloads are complete.
                    unsafe { receiver.body(place.as_mut_ptr(), data.bytes, (data, Place::Direct)) };
                }
                Received::Payload((data, place)) => {
                    assert_eq!(place, Place::Direct);
                    let chunk = data.chunk as usize;
                    assert!(places[chunk] == payloads[chunk], "chunk {chunk} differs");
                    complete += 1;
                }
                Received::Owned(_) => panic!("no such payload was sent"),
            }
        }
        assert!(Instant::now() < until, "{complete} of {} arrived", sizes.len());
    }
    notes.sort_unstable();
    assert_eq!(notes, (0..sizes.len() as u32).map(|chunk| Some((1, chunk))).collect::<Vec<_>>());
    assert!(sender.is_flushed());
    heads
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn chunks_arrive_complete_over_every_transport(
        sizes in proptest::collection::vec(prop_oneof![0..200_usize, 0..SLOT_BYTES], 1..40),
    ) {
        for (name, mut sender, mut receiver) in every() {
            let poller = Poller::new().unwrap();
            let mut heads = pass(&mut sender, &mut receiver, &poller, &sizes);
            heads.sort_unstable();
            prop_assert!(heads.iter().copied().eq(0..sizes.len() as u32), "{}: {:?}", name, heads);
            let payloads: usize = sizes.iter().sum();
            let bytes = (payloads + sizes.len() * HEAD_BYTES) as u64;
            prop_assert_eq!((sender.traffic().0, receiver.traffic().1), (bytes, bytes), "{}", name);
        }
    }
}

#[test]
fn an_end_after_a_close_frame_is_orderly_and_follows_all_data() {
    for (name, mut sender, mut receiver) in every() {
        let poller = Poller::new().unwrap();
        let big = vec![3_u8; 100_000];
        let (head, _) = data(0, big.len());
        sender.push(&head, Payload::Owned(big.clone()), None);
        sender.push_final(&Head::bare(Frame::Close { next: 7 }), &[]);
        let (mut place, mut notes, mut payloads) = (vec![0_u8; big.len()], Vec::new(), 0);
        let ended = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let ended = receive(&mut receiver, &poller, |received, receiver| {
                    if let Received::Head(Head { frame: Frame::Data(data), .. }) = received {
                        // SAFETY: `place` outlives the transport's use of it.
                        unsafe {
                            receiver.body(place.as_mut_ptr(), data.bytes, (*data, Place::Direct))
                        };
                    }
                    payloads += usize::from(matches!(received, Received::Payload(_)));
                    false
                });
                ended.unwrap_err().kind()
            });
            while !sender.is_flushed() {
                sender.flush(&poller, &mut notes).unwrap();
            }
            drop(sender);
            reader.join().unwrap()
        });
        assert_eq!(ended, io::ErrorKind::UnexpectedEof, "{name}");
        assert_eq!((payloads, &place), (1, &big), "{name}");
        assert!(receiver.peer_closed(), "{name}");
    }
    for (name, sender, mut receiver) in every() {
        drop(sender);
        assert_eq!(
            end(&mut receiver, &Poller::new().unwrap()),
            io::ErrorKind::UnexpectedEof,
            "{name}"
        );
        assert!(!receiver.peer_closed(), "{name}");
    }
}

#[test]
fn a_sender_to_a_lost_peer_receives_its_reason_first() {
    for (name, mut sender, mut receiver) in every() {
        let poller = Poller::new().unwrap();
        let reason = b"a reason".to_vec();
        let head = Head { payload_bytes: reason.len(), ..Head::bare(Frame::Abort) };
        sender.push_final(&head, &reason);
        sender.flush(&poller, &mut Vec::new()).unwrap();
        drop(sender);
        // Sends until that fails: the first bytes to a closed socket are accepted.
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            receiver.beat(&Head::idle());
            if receiver.flush(&poller, &mut Vec::new()).is_err() {
                break;
            }
            assert!(Instant::now() < until, "{name}");
            std::thread::yield_now();
        }
        let mut frames = Vec::new();
        let ended = receive(&mut receiver, &poller, |received, receiver| {
            match received {
                Received::Head(head) => receiver.body_owned(head.payload_bytes),
                Received::Owned(bytes) => frames.push(bytes.clone()),
                Received::Payload(_) => panic!("{name}"),
            }
            false
        });
        assert!(ended.is_err() && frames.first() == Some(&reason), "{name}: {frames:?}");
    }
}

#[test]
fn a_full_link_refuses_frames_and_a_detached_one_references_no_caller_memory() {
    for (name, mut sender, mut receiver) in every() {
        let poller = Poller::new().unwrap();
        let big = vec![1_u8; SLOT_BYTES];
        let mut pushed = 0_u32;
        let mut notes = Vec::new();
        // The kernel takes some MiB of each socket, then no more.
        loop {
            while sender.takes_more() {
                let (head, _) = data(pushed, big.len());
                // SAFETY: valid until `detach` was called.
                let memory = unsafe { StableMemory::new(big.as_ptr(), big.len()) };
                sender.push(&head, Payload::Memory(memory), Some((1, pushed)));
                pushed += 1;
            }
            sender.flush(&poller, &mut notes).unwrap();
            if !sender.takes_more() {
                break;
            }
            assert!(pushed < 4000, "{name}: bounded");
        }
        assert!(!sender.is_idle() && !sender.is_flushed() && sender.unsent_bytes() > 0, "{name}");
        assert!(notes.len() < pushed as usize, "{name}");
        sender.detach();
        drop(big);
        sender.push_final(&Head::bare(Frame::Close { next: 0 }), &[]);
        let mut place = vec![0_u8; SLOT_BYTES];
        let (mut byes, expected) = (0, sender.streams().max(1));
        let until = Instant::now() + Duration::from_secs(120);
        while byes < expected {
            sender.flush(&poller, &mut notes).unwrap();
            receiver.look_again();
            while let Some(received) = receiver.receive_next(&poller).unwrap() {
                match received {
                    Received::Head(Head { frame: Frame::Data(data), .. }) => {
                        // SAFETY: one payload after the other lands in it, each stream's own.
                        unsafe {
                            receiver.body(place.as_mut_ptr(), data.bytes, (data, Place::Direct))
                        };
                    }
                    Received::Head(head) => {
                        byes += usize::from(head.frame == Frame::Close { next: 0 })
                    }
                    Received::Payload(_) => assert!(place.iter().all(|byte| *byte == 1), "{name}"),
                    Received::Owned(_) => panic!("{name}"),
                }
            }
            assert!(Instant::now() < until, "{name}: {byes} close frames");
        }
        assert!(receiver.peer_closed(), "{name}");
    }
}

#[test]
fn large_chunks_take_turns_and_small_ones_stay_on_the_first_stream() {
    let (sender, receiver) = sockets(3);
    let receivers: Vec<TcpStream> =
        receiver.iter().map(|socket| socket.try_clone().unwrap()).collect();
    let (mut sender, poller) = (tcp(sender), Poller::new().unwrap());
    let waiting = |socket: &TcpStream| {
        socket.set_nonblocking(true).unwrap();
        socket.peek(&mut [0]).is_ok()
    };
    let until = Instant::now() + Duration::from_secs(120);
    for chunk in 0..4 {
        sender.push(&data(chunk, 1000).0, Payload::Owned(vec![0; 1000]), None);
    }
    sender.flush(&poller, &mut Vec::new()).unwrap();
    while !waiting(&receivers[0]) {
        assert!(Instant::now() < until);
    }
    assert!(!waiting(&receivers[1]) && !waiting(&receivers[2]));
    for chunk in 4..6 {
        sender.push(&data(chunk, 100_000).0, Payload::Owned(vec![0; 100_000]), None);
    }
    sender.flush(&poller, &mut Vec::new()).unwrap();
    while !receivers.iter().all(waiting) {
        assert!(Instant::now() < until);
    }
}

#[test]
fn a_full_stream_does_not_delay_the_others() {
    let (sender, receiver) = sockets(2);
    let (mut sender, poller) = (tcp(sender), Poller::new().unwrap());
    let mut receiver = receiver.into_iter();
    let (_unread, read) = (receiver.next().unwrap(), receiver.next().unwrap());
    let drain =
        std::thread::spawn(move || std::io::copy(&mut &read, &mut std::io::sink()).unwrap());
    let until = Instant::now() + Duration::from_secs(120);
    let (mut pushed, mut notes) = (0_u32, Vec::new());
    // Far more than one unread socket accepts.
    while notes.len() < 400 {
        while sender.takes_more() && pushed < 500 {
            sender.push(&data(pushed, SLOT_BYTES).0, Payload::Owned(vec![0; SLOT_BYTES]), None);
            pushed += 1;
        }
        sender.flush(&poller, &mut notes).unwrap();
        assert!(Instant::now() < until, "{} of {pushed} left", notes.len());
    }
    drop(sender);
    assert!(drain.join().unwrap() > 200 * SLOT_BYTES as u64);
}

#[test]
fn a_stream_that_ends_without_close_ends_the_link_after_a_reason_on_another_stream() {
    let (mut raw, accepted) = sockets(3);
    let (mut link, poller) = (tcp(accepted), Poller::new().unwrap());
    // A close frame on the other streams does not close this one.
    let close = Head::bare(Frame::Close { next: 3 }).encode();
    raw[0].write_all(&close).unwrap();
    raw[2].write_all(&close).unwrap();
    raw[1].shutdown(Shutdown::Both).unwrap();
    let mut heads = 0;
    let ended = receive(&mut link, &poller, |_, _| {
        heads += 1;
        false
    });
    assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(!link.peer_closed() && heads <= 2);

    let (mut raw, accepted) = sockets(2);
    let (mut link, poller) = (tcp(accepted), Poller::new().unwrap());
    assert!(link.receive_next(&poller).unwrap().is_none());
    let abort = Head { payload_bytes: 3, ..Head::bare(Frame::Abort) };
    raw[1].write_all(&[&abort.encode()[..], b"why"].concat()).unwrap();
    // Both have arrived before anything is read.
    let until = Instant::now() + Duration::from_secs(120);
    raw[0].shutdown(Shutdown::Both).unwrap();
    let mut reason = None;
    while reason.is_none() {
        assert!(Instant::now() < until);
        link.woken(0, Ready { token: 0, readable: true, writable: false });
        match link.receive_next(&poller).unwrap() {
            Some(Received::Head(head)) => link.body_owned(head.payload_bytes),
            Some(Received::Owned(bytes)) => reason = Some(bytes),
            Some(Received::Payload(_)) => panic!("none was sent"),
            None => {}
        }
    }
    assert_eq!(reason.unwrap(), b"why");
}

#[test]
fn garbage_on_one_stream_is_an_error() {
    let (mut raw, accepted) = sockets(4);
    raw[2].write_all(&[7; HEAD_BYTES]).unwrap();
    assert_eq!(end(&mut tcp(accepted), &Poller::new().unwrap()), io::ErrorKind::InvalidData);
}

#[test]
fn every_stream_sends_heartbeats_and_a_silent_one_is_detected() {
    let (raw, accepted) = sockets(3);
    let (mut link, mut peer) = (tcp(accepted), tcp(raw));
    let poller = Poller::new().unwrap();
    let credits = [1; CLASSES];
    peer.beat(&Head { credits, ..Head::idle() });
    peer.flush(&poller, &mut Vec::new()).unwrap();
    let (mut heads, mut credit_frames) = (0, 0);
    receive(&mut link, &poller, |received, _| {
        let Received::Head(head) = received else { panic!("{received:?}") };
        heads += 1;
        credit_frames += usize::from(head.credits == credits);
        heads == 3
    })
    .unwrap();
    assert_eq!(credit_frames, 1, "credits are given once");
    assert!(link.poll_received() && !link.poll_received());
    // One more frame, over the first stream only.
    peer.push(&Head::idle(), Payload::Owned(vec![]), None);
    peer.flush(&poller, &mut Vec::new()).unwrap();
    receive(&mut link, &poller, |_, _| true).unwrap();
    assert!(!link.poll_received(), "two of three are silent");
}
