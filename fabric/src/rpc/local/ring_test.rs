//! Rings against a queue, across the wrap of their positions, and with a peer that writes anything.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::shm::Segment;

const CAPACITY: usize = 4096;
/// Bytes before and after the ring, which no operation may change.
const GUARD: usize = 4096;
const CANARY: u8 = 0xa5;

fn memory() -> Arc<Mapped> {
    let bytes = GUARD + ring_bytes(CAPACITY) + GUARD;
    let memory = Segment::create("ring", bytes).unwrap().into_mapped();
    for at in (0..GUARD).chain(bytes - GUARD..bytes) {
        // SAFETY: inside the memory, which nothing else uses yet.
        unsafe { memory.base().add(at).write(CANARY) };
    }
    Arc::new(memory)
}

fn is_intact(memory: &Mapped) -> bool {
    let end = GUARD + ring_bytes(CAPACITY);
    // SAFETY: inside the memory; only this thread uses it.
    let byte = |at: usize| unsafe { memory.base().add(at).read() };
    (0..GUARD).chain(end..end + GUARD).all(|at| byte(at) == CANARY)
}

/// Both ends of a ring whose positions start at `start`.
fn ends(memory: &Arc<Mapped>, start: u64) -> (Producer, Consumer) {
    let mut producer = Producer::new(memory, GUARD, CAPACITY).unwrap();
    let mut consumer = Consumer::new(memory, GUARD, CAPACITY).unwrap();
    producer.ring.positions().tail.0.store(start, Relaxed);
    producer.ring.positions().head.0.store(start, Relaxed);
    (producer.tail, consumer.head) = (start, start);
    (producer, consumer)
}

fn read(consumer: &mut Consumer, bytes: usize) -> Result<Vec<u8>, Corrupt> {
    let mut into = vec![MaybeUninit::uninit(); bytes];
    let read = consumer.read(&mut into, || Ok::<_, Corrupt>(()))?;
    // SAFETY: the first `read` bytes are initialised.
    Ok(into[..read].iter().map(|byte| unsafe { byte.assume_init() }).collect())
}

fn write(producer: &mut Producer, parts: &[&[u8]]) -> Result<usize, Corrupt> {
    let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
    producer.write(&parts, || Ok::<_, Corrupt>(()))
}

#[derive(Clone, Debug)]
enum Step {
    Write(Vec<usize>),
    Read(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        prop::collection::vec(0..CAPACITY + 9, 0..4).prop_map(Step::Write),
        (0..CAPACITY + 9).prop_map(Step::Read),
    ]
}

proptest! {
    #[test]
    fn a_ring_is_a_bounded_queue(
        before_the_wrap in 0..3 * CAPACITY as u64,
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let memory = memory();
        let (mut producer, mut consumer) = ends(&memory, 0_u64.wrapping_sub(before_the_wrap));
        let (mut queue, mut next) = (VecDeque::new(), 0_u8);
        for step in steps {
            match step {
                Step::Write(lengths) => {
                    let mut byte = next;
                    let parts: Vec<Vec<u8>> = lengths.iter().map(|length| {
                        (0..*length).map(|_| { byte = byte.wrapping_add(1); byte }).collect()
                    }).collect();
                    let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
                    let written = write(&mut producer, &slices).unwrap();
                    let all = parts.concat();
                    prop_assert_eq!(written, all.len().min(CAPACITY - queue.len()));
                    queue.extend(&all[..written]);
                    next = next.wrapping_add(written as u8);
                }
                Step::Read(length) => {
                    let expected: Vec<u8> = queue.drain(..length.min(queue.len())).collect();
                    prop_assert_eq!(read(&mut consumer, length).unwrap(), expected);
                }
            }
        }
        prop_assert!(is_intact(&memory));
    }

    #[test]
    fn a_peer_that_writes_any_position_reaches_no_other_memory(
        start in any::<u64>(),
        lies in prop::collection::vec((any::<bool>(), lie(), 0..2 * CAPACITY), 1..40),
    ) {
        let memory = memory();
        let (mut producer, mut consumer) = ends(&memory, start);
        for (reads, lie, bytes) in lies {
            let positions = producer.ring.positions();
            let position = start.wrapping_add(lie);
            if reads {
                positions.tail.0.store(position, Relaxed);
                let there = position.wrapping_sub(consumer.head);
                match read(&mut consumer, bytes) {
                    Ok(read) => {
                        prop_assert!(there <= CAPACITY as u64);
                        prop_assert_eq!(read.len() as u64, there.min(bytes as u64));
                    }
                    Err(Corrupt) => prop_assert!(there > CAPACITY as u64),
                }
            } else {
                positions.head.0.store(position, Relaxed);
                let used = producer.tail.wrapping_sub(position);
                match write(&mut producer, &[&vec![1; bytes]]) {
                    Ok(written) => prop_assert!(written as u64 + used <= CAPACITY as u64),
                    Err(Corrupt) => prop_assert!(used > CAPACITY as u64),
                }
            }
            prop_assert!(is_intact(&memory));
        }
    }
}

/// Differences of positions, those near the limits often.
fn lie() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..3 * CAPACITY as u64).prop_map(|near| near.wrapping_sub(CAPACITY as u64)),
    ]
}

#[test]
fn bells_ring_only_for_a_side_that_waits() {
    let memory = memory();
    let (mut producer, mut consumer) = ends(&memory, 0);
    let (mut rung, full) = (0, vec![3; CAPACITY]);
    let put = |producer: &mut Producer, bytes: &[u8]| {
        let mut bells = 0;
        let ring = || {
            bells += 1;
            Ok::<_, Corrupt>(())
        };
        producer.write(&[IoSlice::new(bytes)], ring).unwrap();
        bells
    };
    assert_eq!(put(&mut producer, b"a"), 0);
    assert!(consumer.wait().unwrap(), "a byte is there");
    read(&mut consumer, 1).unwrap();
    assert!(!consumer.wait().unwrap());
    assert_eq!((put(&mut producer, b"b"), put(&mut producer, b"c")), (1, 0));
    put(&mut producer, &full);
    assert!(!producer.wait().unwrap());
    let mut take = |bytes: usize| {
        let mut into = vec![MaybeUninit::uninit(); bytes];
        let ring = || {
            rung += 1;
            Ok::<_, Corrupt>(())
        };
        consumer.read(&mut into, ring).unwrap();
        std::mem::take(&mut rung)
    };
    assert_eq!(take(CAPACITY / 2 - 1), 0, "less than half is free");
    assert_eq!((take(1), take(1)), (1, 0));
}

#[test]
fn a_ring_that_is_not_inside_its_memory_is_refused() {
    let memory = memory();
    assert!(Producer::new(&memory, 2 * GUARD + 128, CAPACITY).is_none());
    assert!(Consumer::new(&memory, GUARD + 8, CAPACITY).is_none(), "not aligned");
    assert!(Consumer::new(&memory, GUARD, CAPACITY - 1).is_none(), "not a power of two");
}
