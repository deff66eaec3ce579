//! Neighbors that distribute their chunks over several connections, or use no socket: the same bits, and the
//! same failures.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use hfreduce_engine::flight::Folders;
use hfreduce_engine::{
    CollectiveError, Communicator, DType, Endpoint, ErrorKind, Member, Options, ReduceOp,
    TransportKind, WaitError, Work,
};
use support::{Calls, KEY, TIMEOUT, allreduce, buffer, digest, placement, run, try_run, values};

/// Several chunks of the largest size, and some of each stream.
const NUMEL: usize = 300_000;

/// A digest of each operation's result, and this rank's number of connections.
fn results(comm: &Communicator) -> (Vec<u64>, u64) {
    let mut sums: Vec<Vec<f32>> =
        [NUMEL, 3, 60_000, NUMEL].map(|n| values(comm.rank(), n as u64, n)).to_vec();
    // All operations run concurrently.
    let works: Vec<_> = sums.iter_mut().map(|data| allreduce(comm, data)).collect();
    works.iter().for_each(|work| work.wait(None).unwrap());
    let mut data = values(comm.rank(), 5, NUMEL);
    let root = comm.world_size() as u32 - 1;
    let work = comm.broadcast(buffer(&mut data), DType::F32, root, TIMEOUT, true).unwrap();
    work.wait(None).unwrap();
    assert_eq!(digest(&data), digest(&values(root, 5, NUMEL)));
    comm.barrier(TIMEOUT, true).unwrap().wait(None).unwrap();
    let streams = comm.counters().streams.load(Ordering::Relaxed);
    (sums.iter().map(|data| digest(data)).collect(), streams)
}

#[test]
fn bits_do_not_depend_on_streams_or_transport() {
    for (nodes, locals) in [(2, 1), (3, 1), (5, 1), (2, 2)] {
        let with = |transport: TransportKind, streams: Option<usize>| {
            let tune = |options: &mut Options| {
                (options.transport, options.streams) = (transport, streams);
                (options.peer_memory, options.channels) = (false, Some(locals));
                options.slot_bytes = 64 << 10;
            };
            run(&placement(nodes, locals), tune, |comm| results(&comm))
        };
        let single = with(TransportKind::Tcp, Some(1));
        for streams in [None, Some(3), Some(4)] {
            for (own, base) in with(TransportKind::Tcp, streams).iter().zip(&single) {
                assert_eq!(own.0, base.0, "{nodes} nodes, {locals} ranks, {streams:?}");
                // The ranks that share a node's work divide the streams; the default is two.
                let each = streams.unwrap_or(2).div_ceil(locals) as u64;
                assert_eq!(own.1, base.1 * each, "{nodes} nodes, {locals} ranks, {streams:?}");
            }
        }
        for (own, base) in with(TransportKind::InProcess, None).iter().zip(&single) {
            assert_eq!((&own.0, own.1), (&base.0, 0), "{nodes} nodes, {locals} ranks");
        }
    }
}

#[test]
fn an_epoch_after_a_failure_has_the_streams_of_the_first_one() {
    for (transport, streams) in [(TransportKind::Tcp, 3), (TransportKind::InProcess, 0)] {
        let tune = |options: &mut Options| {
            (options.transport, options.peer_memory) = (transport, false);
            options.streams = (streams > 0).then_some(streams as usize);
        };
        let summed = Barrier::new(3);
        run(&placement(3, 1), tune, |comm| {
            results(&comm);
            summed.wait();
            if comm.rank() == 1 {
                comm.abort("this one has an with_fault");
                return;
            }
            while comm.error().is_none() {
                std::thread::yield_now();
            }
            assert_eq!(comm.error().unwrap().cause.kind, ErrorKind::Aborted);
            let next = comm.reconfigure(&[Member::Rank(2), Member::Rank(0)], TIMEOUT).unwrap();
            assert_eq!(results(&next).1, streams);
        });
    }
}

#[test]
fn a_rank_that_closes_is_reported_over_every_transport() {
    for (transport, streams) in [(TransportKind::Tcp, Some(4)), (TransportKind::InProcess, None)] {
        let tune =
            |options: &mut Options| (options.transport, options.streams) = (transport, streams);
        run(&placement(2, 1), tune, |comm| {
            if comm.rank() == 0 {
                allreduce(&comm, &mut vec![1.0; NUMEL]).wait(None).unwrap();
                comm.close(TIMEOUT);
                return;
            }
            let error = sums_until_an_error(&comm);
            assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::PeerLeft, Some(0)));
        });
    }
}

fn sum(comm: &Communicator, data: &mut [f32]) -> Result<Work, CollectiveError> {
    comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
}

fn failed(work: Result<Work, CollectiveError>) -> Option<CollectiveError> {
    match work.map(|work| work.wait(None)) {
        Ok(Ok(())) => None,
        Ok(Err(WaitError::Failed(error))) | Err(error) => Some(error),
        Ok(Err(other)) => panic!("{other}"),
    }
}

fn sums_until_an_error(comm: &Communicator) -> CollectiveError {
    loop {
        let mut data = vec![1.0; NUMEL];
        if let Some(error) = failed(sum(comm, &mut data)) {
            return error;
        }
        assert!(data.iter().all(|value| *value == 2.0));
    }
}

/// A proxy between two ranks that holds both sockets of every stream.
struct Proxy {
    port: u16,
    streams: Arc<Mutex<Vec<(TcpStream, TcpStream)>>>,
    /// This stream no longer forwards data, and stays open.
    frozen: Arc<AtomicUsize>,
}

impl Proxy {
    fn new(port: u16, count: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().port();
        let streams: Arc<Mutex<Vec<_>>> = Arc::default();
        let frozen = Arc::new(AtomicUsize::new(usize::MAX));
        let (sockets, stops) = (streams.clone(), frozen.clone());
        std::thread::spawn(move || {
            for stream in 0..count {
                let Ok((dialer, _)) = listener.accept() else { return };
                let acceptor = TcpStream::connect(("127.0.0.1", port)).unwrap();
                for (from, to) in [(&dialer, &acceptor), (&acceptor, &dialer)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let stops = stops.clone();
                    std::thread::spawn(move || pass_on(&from, &to, stream, &stops));
                }
                sockets.lock().unwrap().push((dialer, acceptor));
            }
        });
        Self { port: own, streams, frozen }
    }
}

fn pass_on(mut from: &TcpStream, mut to: &TcpStream, stream: usize, frozen: &AtomicUsize) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count) = from.read(&mut bytes)
        && count > 0
    {
        let passes = frozen.load(Ordering::SeqCst) != stream;
        if passes && to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// Two ranks with four streams; after some sums `fault` is applied to the third stream. Returns the errors of
/// the ranks.
fn with_fault(
    liveness: Duration,
    happens: impl Fn(&Proxy, &TcpStream, &TcpStream) + Sync,
) -> Vec<CollectiveError> {
    let endpoints: Vec<Endpoint> = (0..2)
        .map(|rank| {
            let mut options = Options::new(rank, placement(2, 1));
            options.folders = Folders::default();
            (options.streams, options.liveness) = (Some(4), liveness);
            Endpoint::new(options, &KEY).unwrap()
        })
        .collect();
    let infos: Vec<Vec<u8>> = endpoints.iter().map(Endpoint::info).collect();
    let mut proxied: serde_json::Value = serde_json::from_slice(&infos[1]).unwrap();
    let proxy = Proxy::new(proxied["port"].as_u64().unwrap() as u16, 4);
    proxied["port"] = proxy.port.into();
    let proxied = vec![infos[0].clone(), serde_json::to_vec(&proxied).unwrap()];
    let ready = Barrier::new(2);
    std::thread::scope(|scope| {
        let ranks = endpoints.into_iter().zip([&proxied, &infos]);
        let ranks = ranks.map(|(endpoint, infos)| {
            let (proxy, happens, ready) = (&proxy, &happens, &ready);
            scope.spawn(move || {
                let comm = endpoint.connect(infos, TIMEOUT).unwrap();
                results(&comm);
                ready.wait();
                if comm.rank() == 0 {
                    let streams = proxy.streams.lock().unwrap();
                    happens(proxy, &streams[2].0, &streams[2].1);
                }
                ready.wait();
                sums_until_an_error(&comm)
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn all_report(errors: &[CollectiveError], kind: ErrorKind, culprits: &[u32], expected: &str) {
    for error in errors {
        assert_eq!(error.cause.kind, kind, "{error}");
        assert!(error.cause.peer.is_some_and(|peer| culprits.contains(&peer)), "{error}");
        assert!(error.cause.detail.contains(expected), "{error}");
    }
}

#[test]
fn closing_one_of_several_streams_counts_as_loss_of_the_peer() {
    let errors = with_fault(TIMEOUT, |_, dialer, acceptor| {
        dialer.shutdown(Shutdown::Both).unwrap();
        acceptor.shutdown(Shutdown::Both).unwrap();
    });
    all_report(&errors, ErrorKind::PeerDied, &[0, 1], "its connection");
}

#[test]
fn garbage_on_one_of_several_streams_is_attributed_to_its_sender() {
    let errors = with_fault(TIMEOUT, |_, _, mut acceptor| acceptor.write_all(&[7; 64]).unwrap());
    all_report(&errors, ErrorKind::Protocol, &[0], "HFR1");
}

#[test]
fn silence_on_one_of_several_streams_counts_as_a_stalled_peer() {
    let errors = with_fault(Duration::from_secs(2), |proxy, _, _| {
        proxy.frozen.store(2, Ordering::SeqCst);
    });
    all_report(&errors, ErrorKind::PeerStalled, &[0, 1], "no heartbeat");
}

#[test]
fn ranks_with_different_numbers_of_streams_are_reported_before_they_connect() {
    let errors = try_run(
        &placement(2, 1),
        |options| options.streams = Some(2 + options.rank as usize),
        |connected| connected.map(drop).unwrap_err(),
    );
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.cause.kind, ErrorKind::Mismatch, "{error}");
        assert_eq!(error.cause.peer, Some(1 - rank as u32), "{error}");
        let detail = &error.cause.detail;
        assert!(detail.contains("streams 2") && detail.contains("streams 3"), "{detail}");
    }
}

#[test]
fn the_error_of_an_invalid_number_of_streams_names_the_setting() {
    for streams in [0, 17] {
        let mut options = Options::new(0, placement(2, 1));
        options.streams = Some(streams);
        let error = Endpoint::new(options, &KEY).map(drop).unwrap_err();
        assert_eq!(error.cause.kind, ErrorKind::Invalid);
        assert!(error.cause.detail.contains("HFREDUCE_STREAMS"), "{error}");
    }
}
