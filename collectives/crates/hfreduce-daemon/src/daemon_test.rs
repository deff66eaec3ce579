//! Tests of the daemon with clients that send unusual messages.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fabric::deadline::Deadline;
use fabric::shm::{self, Segment};
use hfreduce_testing::{cases, edited, edits};
use proptest::prelude::*;

use super::client::ClientSession;
use super::protocol::*;
use super::server::validate;
use super::*;
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_core::{DType, ReduceOp};
use hfreduce_core::{Determinism, Fingerprint, Kind};
use hfreduce_engine::communicator::WaitError;
use hfreduce_engine::endpoint::{Member, Options};
use hfreduce_engine::operation::Buffer;
use hfreduce_engine::operation::Transfer;
use hfreduce_shm::flight::Folders;
use hfreduce_transport::message_socket::MessageSocket;
use hfreduce_transport::message_socket::framed;
use std::time::{Duration, Instant};

const KEY: [u8; 32] = [7; 32];
const TIMEOUT: Duration = Duration::from_secs(60);

fn options(rank: u32, world: usize) -> Options {
    let placement = vec![("a".to_owned(), "z".to_owned()); world];
    Options { folders: Folders::default(), ..Options::new(rank, placement) }
}

fn fingerprint(count: u64) -> Fingerprint {
    Fingerprint {
        kind: Kind::Allreduce,
        dtype: DType::F32.code(),
        element_bytes: 4,
        op: 0,
        root: 0,
        count,
        shape: 0,
        modes: Determinism::DEFAULT,
    }
}

fn call(fingerprint: Fingerprint, offset: u64) -> CallRequest {
    let region = Region { offset, bytes: fingerprint.count as usize * 4 };
    let (ticket, transfers) = (0, Vec::new());
    CallRequest {
        ticket,
        fingerprint: fingerprint.encode(),
        input: region,
        output: region,
        transfers,
        timeout_ms: 60_000,
        pipelined: false,
    }
}

fn allreduce(input: Buffer, op: ReduceOp) -> hfreduce_engine::Call<'static> {
    let call = hfreduce_engine::Call::new(Kind::Allreduce, DType::F32, TIMEOUT, true);
    hfreduce_engine::Call { input, op, ..call }
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn a_damaged_call_is_refused_or_stays_inside_the_arena(edits in edits()) {
        let arena = Segment::create("test", 8192).unwrap();
        let mut request = call(Fingerprint { kind: Kind::Send, ..fingerprint(16) }, 4096);
        request.transfers.push(Transfer { peer: 1, sends: true, offset: 0, bytes: 64, tag: 1 });
        for (request, world) in [(request, 2), (call(fingerprint(16), 0), 1)] {
            let text = edited(&serde_json::to_value(&request).unwrap(), &edits);
            let Ok(read) = serde_json::from_str::<CallRequest>(&text) else { continue };
            let Ok(operation) = validate::operation(&read, &arena, 0, world) else { continue };
            let buffers = [(&operation.input, read.input), (&operation.output, read.output)];
            for (buffer, region) in buffers {
                prop_assert_eq!(buffer.bytes(), region.bytes);
                prop_assert!(region.offset + region.bytes as u64 <= 8192 || region.bytes == 0);
            }
            let bytes = |transfer: &Transfer| transfer.offset + transfer.bytes;
            let most = operation.input.bytes().max(operation.output.bytes());
            prop_assert!(operation.transfers.iter().all(|t| bytes(t) <= most && t.peer == 1));
        }
    }
}

/// Stops the daemon of a test, also of call that fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Runs a scripted rank and a rank of the library in call group; returns the error of the latter's
/// allreduce, after `act`.
fn with_peer(act: impl FnOnce(&mut MessageSocket<UnixStream>)) -> CollectiveError {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("socket");
    let daemon = Daemon::bind(
        &path,
        Rules {
            mode: 0o600,
            ranks_max: 8,
            memory_max: None,
            descriptors_max: None,
            folders: Folders::default(),
        },
    )
    .unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _end = Stop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                daemon.accept_for(Duration::from_millis(20)).unwrap();
            }
        });
        let peer = AnyEndpoint::open(options(0, 2), &KEY, Some(&path)).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        let (process, own, key, newcomer) = (1, options(1, 2), KEY.to_vec(), false);
        let open = Open { version: VERSION, process, options: own, key, newcomer };
        stream.write_all(&framed(&Request::Open(Box::new(open)))).unwrap();
        let soon = Deadline::after(TIMEOUT);
        let fds = shm::receive_descriptors(&stream, &mut [0; 8], soon).unwrap();
        assert_eq!(fds.len(), 1);
        stream.set_nonblocking(true).unwrap();
        let mut line = MessageSocket::with_limit(stream, MESSAGE_BYTES_MAX);
        let Ok(Response::Opened { info, .. }) = await_message(&mut line, Instant::now() + TIMEOUT)
        else {
            panic!("rejected");
        };
        let infos = [String::from_utf8(peer.info()).unwrap(), info];
        let bytes: Vec<Vec<u8>> = infos.iter().cloned().map(String::into_bytes).collect();
        line.send(&Request::Connect { infos: infos.to_vec(), timeout_ms: 60_000 });
        let peer = peer.connect(&bytes, TIMEOUT).unwrap();
        let answer = await_message(&mut line, Instant::now() + TIMEOUT);
        assert!(matches!(answer, Ok(Response::Connected { .. })), "{answer:?}");
        act(&mut line);
        drop(line);
        let mut data = [1.0_f32; 4];
        // SAFETY: the array outlives the operation, which is waited for.
        let buffer = unsafe { Buffer::new([(data.as_mut_ptr().cast(), 16)]) };
        let work = peer.call(allreduce(buffer, ReduceOp::Sum));
        let result = work.map_err(WaitError::Failed).and_then(|work| work.wait(None));
        // The daemon continues to serve peer ranks.
        assert!(AnyEndpoint::open(options(0, 1), &KEY, Some(&path)).is_ok());
        match result {
            Err(WaitError::Failed(error)) => error,
            peer => panic!("{peer:?}"),
        }
    })
}

#[test]
fn a_rank_whose_process_ends_is_reported() {
    let error = with_peer(|_| {});
    assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::PeerDied, Some(1)));
    assert!(error.to_string().contains("its process ended"), "{error}");
}

#[test]
fn a_rank_that_closes_is_not_reported_as_dead() {
    let error = with_peer(|line| line.send(&Request::Leave { timeout_ms: 1000 }));
    assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::PeerLeft, Some(1)));
}

#[test]
fn an_invalid_call_ends_only_its_group() {
    let error = with_peer(|line| {
        line.send(&Request::Call(Box::new(call(fingerprint(4), u64::MAX - 8))));
        let answer = await_message(line, Instant::now() + TIMEOUT);
        assert!(matches!(answer, Ok(Response::Broken { .. })), "{answer:?}");
    });
    assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::Protocol, Some(1)));
    assert!(error.to_string().contains("invalid call"), "{error}");
}

#[test]
fn revoked_memory_is_replaced_in_the_next_epoch() {
    let error = with_peer(|line| {
        let (members, completed) = (vec![Member::Rank(1)], 1);
        let request = Reconfigure { members, completed, retired: true, timeout_ms: 60_000 };
        line.send(&Request::Reconfigure(request));
        let answer = await_message(line, Instant::now() + TIMEOUT);
        let Ok(Response::Reconfigured(answer)) = answer else { panic!("{answer:?}") };
        assert_eq!((answer.infos.len(), answer.rank, answer.epoch), (1, 0, 1));
        assert!(answer.other_memory);
        line.send(&Request::Memory);
        line.stream().set_nonblocking(false).unwrap();
        let soon = Deadline::after(TIMEOUT);
        let fds = shm::receive_descriptors(line.stream(), &mut [0; 8], soon).unwrap();
        assert_eq!(fds.len(), 1);
        line.stream().set_nonblocking(true).unwrap();
        line.send(&Request::Call(Box::new(call(fingerprint(4), 0))));
        let answer = await_message(line, Instant::now() + TIMEOUT);
        assert!(matches!(&answer, Ok(Response::Done(done)) if done.len() == 1), "{answer:?}");
    });
    assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::PeerLeft, Some(1)));
}

#[test]
fn a_rank_requests_its_arena_and_allocates_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let rules = Rules {
        mode: 0o600,
        ranks_max: 8,
        memory_max: None,
        descriptors_max: None,
        folders: Folders::default(),
    };
    let daemon = Daemon::bind(&path, rules).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = Stop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                daemon.accept_for(Duration::from_millis(20)).unwrap();
            }
        });
        let alone = AnyEndpoint::open(options(0, 1), &KEY, Some(&path)).unwrap();
        let infos = [alone.info()];
        let comm = alone.connect(&infos, TIMEOUT).unwrap();
        let before = comm.arena().unwrap();
        before.retire();
        let next = comm.reconfigure(&[Member::Rank(0)], TIMEOUT).unwrap();
        assert!(!Arc::ptr_eq(&before, &next.arena().unwrap()));
        let block = next.allocate(4096).unwrap();
        // SAFETY: the block outlives the operation, which is waited for.
        let buffer = unsafe { Buffer::new([(block.base(), 4096)]) };
        let work = next.call(allreduce(buffer, ReduceOp::Average));
        work.unwrap().wait(None).unwrap();
    });
}

#[test]
fn a_late_answer_is_not_used_for_the_next_attempt() {
    let (client_end, daemon_end) = UnixStream::pair().unwrap();
    [&client_end, &daemon_end].into_iter().for_each(|end| end.set_nonblocking(true).unwrap());
    let (own, mut daemon) = (
        MessageSocket::with_limit(client_end, MESSAGE_BYTES_MAX),
        MessageSocket::with_limit(daemon_end, MESSAGE_BYTES_MAX),
    );
    let info = hfreduce_engine::endpoint::Endpoint::new(options(0, 1), &KEY).unwrap().info();
    let infos = vec![serde_json::from_slice(&info).unwrap()];
    let arena = Arc::new(fabric::arena::Arena::create("test", 1 << 20).unwrap());
    let session = ClientSession::new(options(0, 1), arena, "hfreduced".to_owned(), infos, 0);
    let comm = session.start(own, 1).unwrap();
    let reconfigure = || comm.reconfigure(&[Member::Rank(0)], TIMEOUT).map(drop).unwrap_err();
    let error = std::thread::scope(|scope| {
        let attempt = scope.spawn(reconfigure);
        let until = Instant::now() + TIMEOUT;
        while !matches!(await_message(&mut daemon, until).unwrap(), Request::Reconfigure(_)) {}
        daemon.send(&Response::Left); // No answer.
        attempt.join().unwrap()
    });
    assert!(error.to_string().contains("unexpected message Left"), "{error}");
    let infos = vec![String::from_utf8(info).unwrap()];
    let (rank, epoch, channels, other_memory) = (0, 1, 1, false);
    let late = Reconfigured { infos, rank, epoch, channels, other_memory };
    daemon.send(&Response::Reconfigured(Box::new(late)));
    assert_eq!(reconfigure().cause.kind, ErrorKind::PeerDied);
}
