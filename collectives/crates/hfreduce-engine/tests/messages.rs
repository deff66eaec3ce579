//! Messages between ranks: short ones together with their offers, long ones through the segment inside a node.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use hfreduce_engine::{Communicator, DType, ErrorKind, Options, WaitError, Work};
use support::{Calls, Served, TIMEOUT, buffer, numbers, placement, run, run_at};

/// Elements of a slot.
const SLOT: usize = 16 << 10;
/// Lengths from one element to several slots, and around the length from which messages are staged.
const COUNTS: [usize; 9] =
    [1, SLOT / 2 - 1, SLOT / 2, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT, 20 * SLOT + 3, 7];

fn tune(options: &mut Options) {
    options.slot_bytes = SLOT * size_of::<f32>();
}

fn staged(comm: &Communicator) -> u64 {
    comm.counters().staged_bytes.load(Ordering::Relaxed)
}

/// Every rank sends messages of all lengths to every other rank, concurrently.
fn exchange(comm: &Communicator) -> u64 {
    let (own, world) = (comm.rank(), comm.world_size() as u32);
    let peers: Vec<u32> = (0..world).filter(|peer| *peer != own).collect();
    let salt = |from: u32, to: u32| u64::from(from * world + to);
    let mut outgoing: Vec<Vec<Vec<f32>>> = peers
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
        for (tag, data) in outgoing[at].iter_mut().enumerate().rev() {
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
fn messages_inside_a_node_use_its_segment() {
    for (nodes, locals) in [(1, 2), (1, 4), (2, 1), (2, 2)] {
        for staged in run(&placement(nodes, locals), tune, |comm| exchange(&comm)) {
            assert_eq!(staged > 0, locals > 1, "{nodes} nodes of {locals}: {staged} bytes");
        }
    }
    let daemon = Served::new(3);
    let at = |_| Some(daemon.path.clone());
    run_at(&placement(1, 3), at, tune, |comm| exchange(&comm.unwrap()));
}

/// More ranks than a rank has slots for: some pieces use sockets, and all arrive.
#[test]
fn an_all_to_all_of_many_ranks_works_with_too_few_slots() {
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
            for (from, part) in output.chunks_exact(count).enumerate() {
                assert!(part == block(from, own), "from rank {from}");
            }
        }
        assert!(staged(&comm) > 0);
    });
}

/// A rank that closes as soon as it has received its message has acknowledged all of it.
#[test]
fn a_send_completes_although_the_receiver_closes_immediately() {
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

/// Lengths around the limit up to which messages travel with their offers, 300 in total: several times what a
/// receiver buffers.
fn short_counts() -> impl Iterator<Item = usize> {
    [1, 2047, 2048, 2049, 300, 6000].into_iter().cycle().take(300)
}

/// Messages from rank 0 to rank 1 with one tag. `early`: the offers arrive before the receives.
fn stream(comm: &Communicator, early: bool) {
    const TAG: u64 = 4;
    const READY: u64 = 5;
    let mut data: Vec<Vec<f32>> =
        short_counts().enumerate().map(|(at, count)| numbers(7, at as u64, count)).collect();
    let ready = |sends: bool| {
        let mut signal = [0.0];
        let work = match sends {
            true => comm.send(buffer(&mut signal), DType::F32, 1 - comm.rank(), READY, TIMEOUT),
            false => comm.recv(buffer(&mut signal), DType::F32, 1 - comm.rank(), READY, TIMEOUT),
        };
        work.unwrap().wait(None).unwrap();
    };
    let sends = comm.rank() == 0;
    // Offers of one connection arrive in order: this one after all the others.
    if sends != early {
        ready(false);
    }
    let expected = data.clone();
    if !sends {
        data.iter_mut().for_each(|data| data.fill(-1.0));
    }
    let start = |data: &mut Vec<f32>| match sends {
        true => comm.send(buffer(data), DType::F32, 1, TAG, TIMEOUT).unwrap(),
        false => comm.recv(buffer(data), DType::F32, 0, TAG, TIMEOUT).unwrap(),
    };
    let works: Vec<Work> = data.iter_mut().map(start).collect();
    if sends == early {
        ready(true);
    }
    works.into_iter().for_each(|work| work.wait(None).unwrap());
    assert!(data == expected, "early: {early}");
}

#[test]
fn short_messages_arrive_in_order_before_and_after_their_receives() {
    for (nodes, locals) in [(1, 2), (2, 1)] {
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                for early in [true, false, true] {
                    stream(&comm, early);
                }
            },
        );
    }
}

/// The message's bytes arrive, but no receive matches it.
#[test]
fn a_short_send_without_a_receive_fails_at_its_deadline() {
    run(
        &placement(1, 2),
        |_| {},
        |comm| {
            let mut data = [1.0];
            let (own, soon) = (comm.rank(), Duration::from_millis(300));
            let work = match own {
                0 => comm.send(buffer(&mut data), DType::F32, 1, 1, soon),
                _ => comm.recv(buffer(&mut data), DType::F32, 0, 2, TIMEOUT),
            };
            // The group may have failed before a late rank calls.
            let ended = work.map_err(WaitError::Failed).and_then(|work| work.wait(None));
            let Err(WaitError::Failed(error)) = ended else { panic!("rank {own}: {ended:?}") };
            assert_eq!(
                (error.cause.kind, error.cause.peer),
                (ErrorKind::TimedOut, Some(1)),
                "{error}"
            );
        },
    );
}
