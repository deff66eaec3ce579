//! A healthy group whose ports, and whose node's socket, have many silent connections.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddr, UnixStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hfreduce_engine::flight::Folders;
use hfreduce_engine::{Buffer, Communicator, DType, Endpoint, Options};
use support::{Calls, KEY, TIMEOUT, allreduce, placement};

/// Opens silent connections to a port, from many local addresses.
fn silent_connections(port: u16, count: usize) -> Vec<TcpStream> {
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    let connect = |at: usize| {
        let from = SocketAddr::from(([127, 0, 0, 2 + (at % 250) as u8], 0));
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        );
        let socket = socket.unwrap();
        rustix::net::bind(&socket, &from).unwrap();
        rustix::net::connect(&socket, &to).unwrap();
        TcpStream::from(socket)
    };
    (0..count).map(connect).collect()
}

fn exchange(comm: &Communicator) {
    let (rank, size) = (comm.rank() as usize, comm.world_size());
    let mut outgoing: Vec<u8> = (0..size).map(|to| (rank * 10 + to) as u8).collect();
    let mut received = vec![0_u8; size];
    // SAFETY: both vectors outlive the operation, which is waited for.
    let (input, output) = unsafe {
        (Buffer::new([(outgoing.as_mut_ptr(), size)]), Buffer::new([(received.as_mut_ptr(), size)]))
    };
    let ones = vec![1; size];
    let work = comm.alltoall(input, output, &ones, &ones, DType::U8, TIMEOUT, true);
    work.unwrap().wait(None).unwrap();
    let expected: Vec<u8> = (0..size).map(|from| (from * 10 + rank) as u8).collect();
    assert_eq!(received, expected);
}

#[test]
fn silent_connections_do_not_disturb_a_group() {
    for count in [160, 1000] {
        let size = 3;
        let endpoints: Vec<Endpoint> = (0..size)
            .map(|rank| {
                let mut options = Options::new(rank, placement(size as usize, 1));
                options.liveness = TIMEOUT;
                options.folders = Folders::default();
                Endpoint::new(options, &KEY).unwrap()
            })
            .collect();
        let infos: Vec<Vec<u8>> = endpoints.iter().map(Endpoint::info).collect();
        let ports: Vec<u16> = infos
            .iter()
            .map(|info| serde_json::from_slice::<serde_json::Value>(info).unwrap())
            .map(|info| info["port"].as_u64().unwrap() as u16)
            .collect();
        let barrier = Barrier::new(size as usize);
        // Before the group connects, and again before ranks first connect point to point.
        let mut silent = silent_connections(ports[0], count);
        let silent = std::sync::Mutex::new(&mut silent);
        std::thread::scope(|scope| {
            for endpoint in endpoints {
                scope.spawn(|| {
                    let comm = endpoint.connect(&infos, TIMEOUT).unwrap();
                    allreduce(&comm, &mut [1.0; 100]).wait(None).unwrap();
                    if comm.rank() == 0 {
                        ports.iter().for_each(|port| {
                            silent.lock().unwrap().extend(silent_connections(*port, count));
                        });
                    }
                    barrier.wait();
                    exchange(&comm);
                    barrier.wait();
                });
            }
        });
    }
}

/// Longer than the timeout of a handshake, and far less than the sum of all handshake timeouts.
const SOON: Duration = Duration::from_secs(60);
const SILENT: usize = 60;
/// Number of connections that send a byte now and then.
const SLOW: usize = 10;

#[test]
fn silent_and_slow_connections_to_the_nodes_socket_delay_no_rank() {
    let endpoints: Vec<Endpoint> = (0..2)
        .map(|rank| {
            let mut options = Options::new(rank, placement(1, 2));
            options.liveness = TIMEOUT;
            options.folders = Folders::default();
            Endpoint::new(options, &KEY).unwrap()
        })
        .collect();
    let infos: Vec<Vec<u8>> = endpoints.iter().map(Endpoint::info).collect();
    let info: serde_json::Value = serde_json::from_slice(&infos[0]).unwrap();
    let name = LocalAddr::from_abstract_name(info["local_socket"].as_str().unwrap()).unwrap();
    let silent: Vec<UnixStream> =
        (0..SILENT).map(|_| UnixStream::connect_addr(&name).unwrap()).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Some connections send a byte now and then, which must not extend their deadline.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                silent[..SLOW].iter().for_each(|mut stream| drop(stream.write_all(&[0])));
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        let ranks: Vec<_> = endpoints
            .into_iter()
            .map(|endpoint| {
                let infos = &infos;
                scope.spawn(move || {
                    let comm = endpoint.connect(infos, SOON)?;
                    allreduce(&comm, &mut [1.0; 100]).wait(None)
                })
            })
            .collect();
        let ended: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    });
}
