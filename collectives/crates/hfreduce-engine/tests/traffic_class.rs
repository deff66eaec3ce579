//! Every connection of a running group carries HFReduce's traffic class, at both ends. A separate test program,
//! because it inspects all sockets of its process.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod support;

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::Barrier;

use fabric::class::TrafficClass;
use hfreduce_engine::DType;
use rustix::net::sockopt::ip_tos;
use support::{Calls, TIMEOUT, allreduce, buffer, numbers, placement, run};

/// Both addresses and the TOS of every connected TCP socket of this process. All ranks are threads, so each
/// connection has two entries.
fn connections() -> Vec<(SocketAddr, SocketAddr, u8)> {
    let mut sockets = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let number: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: only queried and cloned; a descriptor that was closed meanwhile is an error below.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let Ok(tos) = ip_tos(fd) else { continue };
        let Ok(stream) = fd.try_clone_to_owned().map(TcpStream::from) else { continue };
        if let (Ok(own), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) {
            // A dual-stack socket reports IPv4 addresses as mapped IPv6 addresses.
            let plain = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
            sockets.push((plain(own), plain(peer), tos));
        }
    }
    sockets
}

#[test]
fn every_connection_of_a_group_is_marked_at_both_ends() {
    for streams in [1, 3] {
        all_are_marked(streams);
    }
}

fn all_are_marked(streams: usize) {
    let placement = placement(3, 1);
    let together = Barrier::new(placement.len());
    run(
        &placement,
        |options| (options.peer_memory, options.streams) = (false, Some(streams)),
        |comm| {
            let (rank, mut data) = (comm.rank(), numbers(comm.rank(), 0, 1000));
            allreduce(&comm, &mut data).wait(None).unwrap();
            together.wait();
            // Only one rank inspects the sockets: that needs descriptors for a moment.
            let trees = if rank == 0 { connections().len() } else { 0 };
            together.wait();
            // A connection outside the trees: three nodes in two trees are all neighbors, but a message between
            // two ranks uses a separate connection.
            match rank {
                0 => comm.send(buffer(&mut data), DType::F32, 2, 7, TIMEOUT).unwrap().wait(None),
                2 => comm.recv(buffer(&mut data), DType::F32, 0, 7, TIMEOUT).unwrap().wait(None),
                _ => Ok(()),
            }
            .unwrap();
            together.wait();
            let all = if rank == 0 { connections() } else { Vec::new() };
            together.wait();
            if rank > 0 {
                return;
            }
            assert!(trees >= 4 * streams, "{trees} ends for three nodes");
            assert_eq!(trees % streams, 0);
            assert_eq!(all.len(), trees + 2, "a message uses a point-to-point connection");
            let ends: BTreeSet<_> = all.iter().map(|(own, peer, _)| (*own, *peer)).collect();
            assert!(all.iter().all(|(own, peer, _)| ends.contains(&(*peer, *own))), "{all:?}");
            let marked = TrafficClass::Hfreduce.marks().dscp << 2;
            assert!(all.iter().all(|(.., tos)| *tos == marked), "{all:?}");
        },
    );
}
