//! The protocol of positions and bells in every order, with a small ring.

use super::*;
use crate::atomics::model::*;
use loom::cell::UnsafeCell;
use loom::sync::Notify;

const CAPACITY: usize = 2;
const BYTES: u64 = 3;

struct Shared<A: Atomics> {
    positions: Positions<A>,
    bytes: [UnsafeCell<u64>; CAPACITY],
    readers_bell: Notify,
    writers_bell: Notify,
}

impl<A: Atomics> Shared<A> {
    fn new() -> Self {
        let (tail, head) = (Line::default(), Line::default());
        let (reader_waits, writer_waits) = (Line::default(), Line::default());
        Self {
            positions: Positions { tail, head, reader_waits, writer_waits },
            bytes: std::array::from_fn(|_| UnsafeCell::new(u64::MAX)),
            readers_bell: Notify::new(),
            writers_bell: Notify::new(),
        }
    }

    fn write(&self) {
        let positions = &self.positions;
        for tail in 0..BYTES {
            while positions.writable(tail, CAPACITY).unwrap() == 0 {
                Positions::<A>::announce(&positions.writer_waits.0);
                if positions.writable(tail, CAPACITY).unwrap() == 0 {
                    self.writers_bell.wait();
                }
            }
            // SAFETY: loom reports concurrent accesses.
            self.bytes[tail as usize % CAPACITY].with_mut(|byte| unsafe { *byte = tail });
            if positions.wrote(tail + 1) {
                self.readers_bell.notify();
            }
        }
    }

    fn read(&self) {
        let positions = &self.positions;
        for head in 0..BYTES {
            let mut there = positions.readable(head, CAPACITY).unwrap();
            while there == 0 {
                Positions::<A>::announce(&positions.reader_waits.0);
                there = positions.readable(head, CAPACITY).unwrap();
                if there == 0 {
                    self.readers_bell.wait();
                }
            }
            // SAFETY: as above.
            let byte = self.bytes[head as usize % CAPACITY].with(|byte| unsafe { *byte });
            assert_eq!(byte, head);
            if positions.consumed(head + 1, there - 1 <= CAPACITY / 2) {
                self.writers_bell.notify();
            }
        }
    }
}

/// All bytes arrive in order. A bell that does not ring is a deadlock, which loom reports.
fn bytes_pass<A: Atomics>() {
    let shared = loom::sync::Arc::new(Shared::<A>::new());
    let writing = shared.clone();
    let writer = loom::thread::spawn(move || writing.write());
    shared.read();
    writer.join().unwrap();
}

#[test]
fn bytes_arrive_after_they_were_written() {
    every_order(bytes_pass::<Modelled>);
    assert!(breaks(bytes_pass::<Weak<NO_RELEASE>>));
    assert!(breaks(bytes_pass::<Weak<NO_ACQUIRE>>));
}

/// One side finds nothing and goes to sleep while the other one publishes: the bell rings.
fn the_reader_is_woken<A: Atomics>() {
    let shared = loom::sync::Arc::new(Shared::<A>::new());
    let writing = shared.clone();
    let writer = loom::thread::spawn(move || writing.positions.wrote(1));
    let positions = &shared.positions;
    Positions::<A>::announce(&positions.reader_waits.0);
    let sleeps = positions.readable(0, CAPACITY).unwrap() == 0;
    let rung = writer.join().unwrap();
    assert!(rung || !sleeps, "the reader sleeps forever");
}

fn the_writer_is_woken<A: Atomics>() {
    let shared = loom::sync::Arc::new(Shared::<A>::new());
    let reading = shared.clone();
    let reader = loom::thread::spawn(move || reading.positions.consumed(1, true));
    let (positions, full) = (&shared.positions, CAPACITY as u64);
    Positions::<A>::announce(&positions.writer_waits.0);
    let sleeps = positions.writable(full, CAPACITY).unwrap() == 0;
    let rung = reader.join().unwrap();
    assert!(rung || !sleeps, "the writer sleeps forever");
}

#[test]
fn no_side_sleeps_forever() {
    every_order(the_reader_is_woken::<Modelled>);
    every_order(the_writer_is_woken::<Modelled>);
    assert!(breaks(the_reader_is_woken::<Weak<NO_FENCE>>));
    assert!(breaks(the_writer_is_woken::<Weak<NO_FENCE>>));
    assert!(breaks(the_reader_is_woken::<Weak<NO_TOTAL_ORDER>>));
    assert!(breaks(the_writer_is_woken::<Weak<NO_TOTAL_ORDER>>));
}
