//! A rank that receives a failure only over a point-to-point connection, because its tree links are
//! idle, reports the same cause as all other ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hfreduce_engine::flight::Folders;
use hfreduce_engine::{Communicator, DType, Endpoint, ErrorKind, Options, WaitError, Work};
use support::{Calls, KEY, TIMEOUT, allreduce, buffer, placement};

/// The rank whose tree links are silent, the rank that it exchanges messages with, and the rank that aborts:
/// the trees of two zones with two nodes and one are a chain of them.
const DEAF: usize = 0;
const PEER: usize = 1;
const ABORTS: usize = 2;

/// A proxy between all ranks that can silence the tree links of `DEAF` without closing them.
#[derive(Default)]
struct Proxy {
    /// Later connections are point-to-point.
    connected: AtomicBool,
    silent: AtomicBool,
    /// Sockets that stay open until the test ends.
    open_sockets: Mutex<Vec<TcpStream>>,
    arrivals: AtomicUsize,
}

impl Proxy {
    /// A barrier of the ranks, with a timeout because one of them may panic. `nth`: its number.
    fn meet(&self, nth: usize) {
        let until = Instant::now() + TIMEOUT;
        self.arrivals.fetch_add(1, Ordering::SeqCst);
        while self.arrivals.load(Ordering::SeqCst) < 3 * nth {
            assert!(Instant::now() < until, "a rank is missing");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Starts a listener that forwards to `port`; returns its port.
    fn listen(self: &Arc<Self>, port: u16, pair: [usize; 2]) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (own, proxy) = (listener.local_addr().unwrap().port(), self.clone());
        std::thread::spawn(move || {
            for dialer in listener.incoming() {
                let Ok(dialer) = dialer else { return };
                let Ok(acceptor) = TcpStream::connect(("127.0.0.1", port)) else { return };
                let tree = !proxy.connected.load(Ordering::SeqCst) && pair.contains(&DEAF);
                for (from, to) in [(&dialer, &acceptor), (&acceptor, &dialer)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    proxy.open_sockets.lock().unwrap().push(to.try_clone().unwrap());
                    let proxy = proxy.clone();
                    std::thread::spawn(move || proxy.pass(from, to, tree));
                }
            }
        });
        own
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream, tree: bool) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if tree && self.silent.load(Ordering::SeqCst) {
                continue;
            }
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        if !(tree && self.silent.load(Ordering::SeqCst)) {
            let _ = to.shutdown(Shutdown::Write);
        }
    }
}

/// Result of a rank's wait, if it had one.
type Ending = Option<Result<(), WaitError>>;

/// Runs `body` as each of three ranks, one on each node, with a proxy between them. One aborts; every waiting
/// rank must report that.
fn with_three_ranks(body: impl Fn(Communicator, &Proxy) -> Ending + Sync) {
    let proxy = Arc::new(Proxy::default());
    let endpoints: Vec<Endpoint> = (0..3)
        .map(|rank| {
            let mut options = Options::new(rank, placement(3, 1));
            options.folders = Folders::default();
            options.liveness = TIMEOUT;
            options.peer_memory = false;
            Endpoint::new(options, &KEY).unwrap()
        })
        .collect();
    let infos: Vec<serde_json::Value> =
        endpoints.iter().map(|end| serde_json::from_slice(&end.info()).unwrap()).collect();
    let bent = |rank: usize| -> Vec<Vec<u8>> {
        let bend = |(peer, info): (usize, &serde_json::Value)| {
            let mut info = info.clone();
            if peer != rank {
                let port = info["port"].as_u64().unwrap() as u16;
                info["port"] = proxy.listen(port, [rank, peer]).into();
            }
            serde_json::to_vec(&info).unwrap()
        };
        infos.iter().enumerate().map(bend).collect()
    };
    let bent: Vec<_> = (0..3).map(bent).collect();
    let body = &body;
    let endings: Vec<Ending> = std::thread::scope(|scope| {
        let ranks = endpoints.into_iter().zip(&bent).map(|(endpoint, infos)| {
            let proxy = &proxy;
            scope.spawn(move || {
                let comm = endpoint.connect(infos, TIMEOUT).unwrap();
                allreduce(&comm, &mut [1.0; 10]).wait(None).unwrap();
                proxy.meet(1);
                proxy.connected.store(true, Ordering::SeqCst);
                proxy.meet(2);
                body(comm, proxy)
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(endings[DEAF].is_some());
    for ending in endings.into_iter().flatten() {
        let Err(WaitError::Failed(error)) = ending else { panic!("{ending:?}") };
        assert_eq!(
            (error.cause.kind, error.cause.peer),
            (ErrorKind::Aborted, Some(ABORTS as u32)),
            "{error}"
        );
        assert!(error.to_string().contains("loss is NaN"), "{error}");
    }
}

/// A message between `DEAF` and `PEER`; `deaf_receives`: in this direction.
fn message(comm: &Communicator, data: &mut [f32], deaf_receives: bool) -> Option<Work> {
    let deaf = comm.rank() as usize == DEAF;
    let peer = if deaf { PEER as u32 } else { DEAF as u32 };
    match comm.rank() as usize {
        ABORTS => None,
        _ if deaf == deaf_receives => comm.recv(buffer(data), DType::F32, peer, 1, TIMEOUT).ok(),
        _ => comm.send(buffer(data), DType::F32, peer, 1, TIMEOUT).ok(),
    }
}

#[test]
fn an_abort_over_a_point_to_point_connection_reports_the_same_culprit() {
    for deaf_receives in [true, false] {
        with_three_ranks(|comm, proxy| {
            let (mut first, mut second) = ([1.0; 10], [1.0; 10]);
            if let Some(work) = message(&comm, &mut first, deaf_receives) {
                work.wait(None).unwrap();
            }
            proxy.meet(3);
            proxy.silent.store(true, Ordering::SeqCst);
            let deaf = comm.rank() as usize == DEAF;
            let work = deaf.then(|| message(&comm, &mut second, deaf_receives).unwrap());
            proxy.meet(4);
            if comm.rank() as usize == ABORTS {
                comm.abort("loss is NaN");
                return None;
            }
            // The peer receives it along the tree and closes: this must not be reported as the
            // cause.
            let work = work.or_else(|| comm.barrier(TIMEOUT, true).ok());
            work.map(|work| work.wait(None))
        });
    }
}

#[test]
fn a_rank_that_connects_to_an_aborted_rank_receives_the_reason() {
    with_three_ranks(|comm, proxy| {
        proxy.silent.store(true, Ordering::SeqCst);
        proxy.meet(3);
        if comm.rank() as usize == ABORTS {
            comm.abort("loss is NaN");
        }
        let until = Instant::now() + TIMEOUT;
        while comm.rank() as usize == PEER && comm.error().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        proxy.meet(4);
        let mut data = [1.0; 10];
        let work = (comm.rank() as usize == DEAF).then(|| message(&comm, &mut data, false));
        let ending = work.map(|work| work.unwrap().wait(None));
        // The peer stays until the other rank has been notified.
        proxy.meet(5);
        ending
    });
}
