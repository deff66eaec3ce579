//! NUMA placement of the segment: a page is allocated at its first access, on the memory node of the accessing
//! rank. So each rank must be the first to access its slots.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::Instant;

use hfreduce_engine::{DType, Options, ReduceOp};
use hfreduce_shm::segment::{MESSAGE_SLOTS, Shape};
use rustix::fs::SeekFrom;
use support::{Calls, TIMEOUT, buffer, numbers, placement, run};

const PAGE_BYTES: usize = 4096;
const SLOTS: usize = 4;

/// A row of the segment: a rank's input slots, the result slots, or the slots of ring accumulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Row {
    Input(usize),
    Result,
    Sum,
}
use Row::{Input, Result, Sum};

/// The segment of the only group of this process.
fn shm() -> File {
    let open_segment = |path: &Path| {
        let name = std::fs::read_link(path).ok()?;
        (name.to_str()? == "/memfd:hfreduce (deleted)").then(|| File::open(path).ok())?
    };
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.flatten().find_map(|entry| open_segment(&entry.path())).expect("a segment")
}

/// The rows with at least one allocated page.
fn touched(shm: &File, shape: Shape) -> Vec<Row> {
    let row_bytes = shape.slots * shape.slot_bytes;
    let message_bytes = shape.locals * MESSAGE_SLOTS * shape.slot_bytes;
    let data_at = shape.bytes() - message_bytes - (shape.locals + 1) * row_bytes;
    let mut rows = BTreeSet::new();
    let mut at = data_at as u64;
    // The only expected error reports that no data follows.
    while let Ok(page) = rustix::fs::seek(shm, SeekFrom::Data(at)) {
        let row = (page as usize - data_at) / row_bytes;
        rows.insert(match row.cmp(&shape.locals) {
            Ordering::Less => Input(row),
            Ordering::Equal => Result,
            Ordering::Greater => Sum,
        });
        at = page + PAGE_BYTES as u64;
    }
    rows.into_iter().collect()
}

/// A sum of two ranks of one node; the second rank calls once the first has touched memory. Returns the rows
/// that the first rank touched, and those touched in the end.
fn touched_by_a_sum(
    slot_bytes: usize,
    count: usize,
    registered: bool,
    tune: impl Fn(&mut Options) + Sync,
) -> (Vec<Row>, Vec<Row>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Ring slots follow all others, so their number does not matter.
    let shape = Shape { locals: 2, slots: SLOTS, ring_slots: 0, slot_bytes };
    let together = Barrier::new(2);
    let tune = |options: &mut Options| {
        (options.slots, options.slot_bytes) = (Some(SLOTS), slot_bytes);
        tune(options);
    };
    let outcomes = run(&placement(1, 2), tune, |comm| {
        let shm = shm();
        let mut private = numbers(comm.rank(), 1, count);
        let block = comm.allocate(count * 4).unwrap();
        // SAFETY: no other reference to the block exists until the call and after its end.
        let block_values =
            unsafe { std::slice::from_raw_parts_mut(block.base().cast::<f32>(), count) };
        block_values.copy_from_slice(&private);
        let data = if registered { block_values } else { private.as_mut_slice() };
        let start = |data: &mut [f32]| {
            comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, false).unwrap()
        };
        assert!(touched(&shm, shape).is_empty(), "creating the segment touched slots");
        together.wait();
        if comm.rank() == 1 {
            together.wait();
            start(data).wait(None).unwrap();
            together.wait();
            return (vec![], vec![]);
        }
        let work = start(data);
        let until = Instant::now() + TIMEOUT;
        while !registered && touched(&shm, shape).is_empty() {
            assert!(Instant::now() < until, "no slot is touched");
            std::thread::yield_now();
        }
        let alone = touched(&shm, shape);
        together.wait();
        work.wait(None).unwrap();
        together.wait();
        (alone, touched(&shm, shape))
    });
    outcomes.into_iter().next().unwrap()
}

#[test]
fn each_rank_touches_its_own_slots_first() {
    let owners = |options: &mut Options| {
        (options.channels, options.processors) = (Some(2), Some(64));
    };
    let (alone, all) = touched_by_a_sum(5 * PAGE_BYTES, 200_000, false, owners);
    assert_eq!((alone, all), (vec![Input(0)], vec![Input(0), Input(1), Result]));
}

#[test]
fn ring_accumulation_touches_only_its_slots_first_by_rank_0() {
    let crowded = |options: &mut Options| options.processors = Some(1);
    let (alone, all) = touched_by_a_sum(6 * PAGE_BYTES, 300_000, false, crowded);
    assert_eq!((alone, all), (vec![Sum], vec![Sum]));
}

#[test]
fn small_sums_are_placed_near_the_last_arriver() {
    let (alone, all) =
        touched_by_a_sum(7 * PAGE_BYTES, 1000, false, |options| options.processors = Some(64));
    assert_eq!((alone, all), (vec![Input(0)], vec![Input(0), Result]));
}

#[test]
fn registered_memory_needs_no_slots() {
    let owners = |options: &mut Options| options.processors = Some(64);
    let (alone, all) = touched_by_a_sum(8 * PAGE_BYTES, 200_000, true, owners);
    assert_eq!((alone, all), (vec![], vec![]));
}
