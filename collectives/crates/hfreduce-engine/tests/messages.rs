//! Long messages between ranks: through the board where they are on one node.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::Ordering;

use hfreduce_engine::{Communicator, DType, Options, Work};
use support::{Served, TIMEOUT, buffer, numbers, placement, run, run_at};

/// Elements of a slot.
const SLOT: usize = 16 << 10;
/// From one element to several slots, and around the length from which messages are staged.
const COUNTS: [usize; 9] =
    [1, SLOT / 2 - 1, SLOT / 2, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT, 20 * SLOT + 3, 7];

fn tune(options: &mut Options) {
    options.slot_bytes = SLOT * size_of::<f32>();
}

fn staged(comm: &Communicator) -> u64 {
    comm.counters().staged_bytes.load(Ordering::Relaxed)
}

/// Every rank sends every other rank messages of all lengths, all at once.
fn exchange(comm: &Communicator) -> u64 {
    let (own, world) = (comm.rank(), comm.world_size() as u32);
    let peers: Vec<u32> = (0..world).filter(|peer| *peer != own).collect();
    let salt = |from: u32, to: u32| u64::from(from * world + to);
    let mut sent: Vec<Vec<Vec<f32>>> = peers
        .iter()
        .map(|to| COUNTS.map(|count| numbers(own, salt(own, *to), count)).to_vec())
        .collect();
    let mut received: Vec<Vec<Vec<f32>>> =
        peers.iter().map(|_| COUNTS.map(|count| vec![-1.0; count]).to_vec()).collect();
    let mut works: Vec<Work> = Vec::new();
    for (at, peer) in peers.iter().enumerate() {
        for (tag, data) in received[at].iter_mut().enumerate() {
            let work = comm.recv(buffer(data), DType::F32, *peer, tag as u64, TIMEOUT);
            works.push(work.unwrap());
        }
        for (tag, data) in sent[at].iter_mut().enumerate().rev() {
            let work = comm.send(buffer(data), DType::F32, *peer, tag as u64, TIMEOUT);
            works.push(work.unwrap());
        }
    }
    works.into_iter().for_each(|work| work.wait(None).unwrap());
    for (peer, received) in peers.iter().zip(&received) {
        for (count, data) in COUNTS.iter().zip(received) {
            assert!(*data == numbers(*peer, salt(*peer, own), *count), "{count} from rank {peer}");
        }
    }
    staged(comm)
}

#[test]
fn messages_inside_a_node_go_through_its_memory() {
    for (nodes, locals) in [(1, 2), (1, 4), (2, 1), (2, 2)] {
        for staged in run(&placement(nodes, locals), tune, |comm| exchange(&comm)) {
            assert_eq!(staged > 0, locals > 1, "{nodes} nodes of {locals}: {staged} bytes");
        }
    }
    let daemon = Served::new(3);
    let at = |_| Some(daemon.path.clone());
    run_at(&placement(1, 3), at, tune, |comm| exchange(&comm.unwrap()));
}

/// More ranks than a rank has slots for: some pieces go through sockets, none is lost.
#[test]
fn an_all_to_all_of_many_ranks_needs_no_more_slots_than_there_are() {
    let count = 5 * SLOT + 1;
    run(&placement(1, 7), tune, |comm| {
        let (own, world) = (comm.rank() as usize, comm.world_size());
        for round in 0..3 {
            let block = |from: usize, to: usize| numbers(from as u32, (to + round) as u64, count);
            let mut input: Vec<f32> = (0..world).flat_map(|to| block(own, to)).collect();
            let mut output = vec![-1.0; world * count];
            let counts = vec![count; world];
            let (from, to) = (buffer(&mut input), buffer(&mut output));
            let work = comm.alltoall(from, to, &counts, &counts, DType::F32, TIMEOUT, true);
            work.unwrap().wait(None).unwrap();
            for (from, found) in output.chunks_exact(count).enumerate() {
                assert!(found == block(from, own), "from rank {from}");
            }
        }
        assert!(staged(&comm) > 0);
    });
}

/// A rank that closes as soon as it has its message has told the sender that it copied all of it.
#[test]
fn a_send_ends_well_though_the_receiver_leaves_at_once() {
    for _ in 0..20 {
        run(&placement(1, 2), tune, |comm| {
            let mut data = numbers(0, 1, 9 * SLOT);
            if comm.rank() == 0 {
                let work = comm.send(buffer(&mut data), DType::F32, 1, 0, TIMEOUT).unwrap();
                work.wait(None).unwrap();
                return;
            }
            data.fill(-1.0);
            let work = comm.recv(buffer(&mut data), DType::F32, 0, 0, TIMEOUT).unwrap();
            work.wait(None).unwrap();
            comm.close(TIMEOUT);
            assert!(data == numbers(0, 1, 9 * SLOT));
        });
    }
}
