//! Bytes between each two ranks, as the ranks count them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use hfreduce_engine::{Communicator, DType, Options};
use support::{Calls, TIMEOUT, allreduce, buffer, numbers, placement, run};

/// Bytes by source and destination.
type Matrix = Vec<Vec<u64>>;

const ELEMENTS: usize = 1 << 16;
const BYTES: u64 = 4 * ELEMENTS as u64;
/// Elements of an operation that the last arriver reduces, and of one that uses the ring.
const SMALL: usize = 100;
const LARGE: usize = (1 << 18) + 1000;

/// Bytes that `operation` moves along the connections, and those that it moves through memory.
fn moved(
    (nodes, locals): (usize, usize),
    tune: impl Fn(&mut Options) + Sync,
    operation: impl Fn(&Communicator) + Sync,
) -> [Matrix; 2] {
    let counted = run(&placement(nodes, locals), tune, |comm| {
        operation(&comm);
        // An operation that has ended on a rank has moved all its bytes there.
        [comm.peer_bytes().sent(), comm.peer_bytes().taken()]
    });
    let world = nodes * locals;
    let sent = (0..world).map(|rank| counted[rank][0].clone()).collect();
    let taken = |from: usize| (0..world).map(|rank| counted[rank][1][from]).collect();
    [sent, (0..world).map(taken).collect()]
}

fn sum(matrix: &Matrix) -> u64 {
    matrix.iter().flatten().sum()
}

fn reduce_once(count: usize) -> impl Fn(&Communicator) {
    move |comm| {
        let mut data = numbers(comm.rank(), 1, count);
        allreduce(comm, &mut data).wait(None).unwrap();
    }
}

#[test]
fn a_message_counts_its_payload_once_whatever_its_length_and_way() {
    const COUNTS: [usize; 4] = [1, 4000, 60_000, 200_001];
    let tune = |options: &mut Options| options.slot_bytes = 64 << 10;
    // Between nodes, and inside one through sockets and slots.
    for (from, to) in [(0, 2), (2, 0), (0, 1)] {
        let [sent, taken] = moved((2, 2), tune, |comm| {
            for count in COUNTS {
                let mut data = numbers(comm.rank(), 1, count);
                let work = match comm.rank() {
                    own if own == from => comm.send(buffer(&mut data), DType::F32, to, 0, TIMEOUT),
                    own if own == to => comm.recv(buffer(&mut data), DType::F32, from, 0, TIMEOUT),
                    _ => continue,
                };
                work.unwrap().wait(None).unwrap();
            }
        });
        let mut expected = vec![vec![0; 4]; 4];
        expected[from as usize][to as usize] = 4 * COUNTS.iter().sum::<usize>() as u64;
        assert_eq!((sent, sum(&taken)), (expected, 0));
    }
}

#[test]
fn an_allreduce_sends_each_tree_half_of_the_bytes_up_and_down_every_edge() {
    for nodes in [2, 3, 5] {
        let plans = run(&placement(nodes, 1), |_| {}, |comm| comm.plan().clone());
        let mut expected = vec![vec![0; nodes]; nodes];
        for tree in plans[0].trees() {
            for (node, links) in tree.links.iter().enumerate() {
                let Some(parent) = links.parent else { continue };
                expected[node][parent] += BYTES / 2;
                expected[parent][node] += BYTES / 2;
            }
        }
        let [sent, taken] = moved((nodes, 1), |_| {}, reduce_once(ELEMENTS));
        assert_eq!((sum(&sent), sum(&taken)), (2 * (nodes as u64 - 1) * BYTES, 0));
        assert_eq!(sent, expected, "{nodes} nodes");
    }
}

#[test]
fn inside_a_node_the_owner_takes_the_inputs_and_the_others_take_the_results() {
    let one_owner = |options: &mut Options| options.channels = Some(1);
    let [sent, taken] = moved((2, 3), one_owner, reduce_once(ELEMENTS));
    assert_eq!(sum(&sent), 2 * BYTES);
    let expected = |from: usize, to: usize| {
        let owner_and_other = from.is_multiple_of(3) != to.is_multiple_of(3);
        if from / 3 == to / 3 && owner_and_other { BYTES } else { 0 }
    };
    let expected: Matrix =
        (0..6).map(|from| (0..6).map(|to| expected(from, to)).collect()).collect();
    assert_eq!(taken, expected);
}

#[test]
fn the_ring_passes_each_sum_on_and_the_last_rank_has_the_results() {
    let tune = |options: &mut Options| options.processors = Some(1);
    let [sent, taken] = moved((1, 3), tune, reduce_once(LARGE));
    let bytes = 4 * LARGE as u64;
    assert_eq!(taken, [[0, bytes, 0], [0, 0, bytes], [bytes, bytes, 0]]);
    assert_eq!(sum(&sent), 0);
}

#[test]
fn the_last_arriver_takes_the_inputs_and_the_others_take_the_results() {
    let [sent, taken] = moved((1, 3), |_| {}, reduce_once(SMALL));
    assert_eq!((sum(&sent), sum(&taken)), (0, 2 * 2 * 4 * SMALL as u64));
}

/// The owner writes the results of registered buffers; other results are copied from its slots.
#[test]
fn results_in_registered_memory_count_as_taken() {
    let [_, taken] = moved(
        (1, 3),
        |options| options.processors = Some(3),
        |comm| {
            let block = comm.allocate(BYTES as usize).unwrap();
            // SAFETY: the block is allocated for this test alone and holds that many elements.
            let data =
                unsafe { std::slice::from_raw_parts_mut(block.base().cast::<f32>(), ELEMENTS) };
            allreduce(comm, data).wait(None).unwrap();
        },
    );
    assert_eq!(sum(&taken), 2 * 2 * BYTES);
}

#[test]
fn a_broadcast_is_taken_from_the_root_in_its_node_and_from_the_owner_elsewhere() {
    let one_owner = |options: &mut Options| options.channels = Some(1);
    let [sent, taken] = moved((2, 2), one_owner, |comm| {
        let mut data = numbers(comm.rank(), 1, ELEMENTS);
        comm.broadcast(buffer(&mut data), DType::F32, 1, TIMEOUT, true)
            .unwrap()
            .wait(None)
            .unwrap();
    });
    let only = |from: usize, to: usize| {
        let mut matrix = vec![vec![0; 4]; 4];
        matrix[from][to] = BYTES;
        matrix
    };
    assert_eq!(sent, only(0, 2));
    let mut expected = only(1, 0);
    expected[2][3] = BYTES;
    assert_eq!(taken, expected);
}
