//! Buffers in registered memory: the same bits, fewer copies, and no access after the end of an operation.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hfreduce_engine::{
    Block, Buffer, Communicator, DType, Endpoint, ErrorKind, Member, Options, ReduceOp, WaitError,
};
use support::{Calls, KEY, TIMEOUT, placement, run, try_run, values};

/// Memory of a rank, registered or private.
enum Memory {
    Registered(Block),
    Private(Vec<u64>, usize),
}

impl Memory {
    fn new(comm: &Communicator, registered: bool, bytes: usize) -> Self {
        match registered {
            true => Self::Registered(comm.allocate(bytes).unwrap()),
            false => Self::Private(vec![0; bytes.div_ceil(8)], bytes),
        }
    }

    fn of(comm: &Communicator, registered: bool, content: &[u8]) -> Self {
        let mut memory = Self::new(comm, registered, content.len());
        memory.bytes().copy_from_slice(content);
        memory
    }

    fn parts(&mut self) -> (*mut u8, usize) {
        match self {
            Self::Registered(block) => (block.base(), block.bytes()),
            Self::Private(words, bytes) => (words.as_mut_ptr().cast(), *bytes),
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let (place, bytes) = self.parts();
        // SAFETY: exclusive while no operation is in progress.
        unsafe { std::slice::from_raw_parts_mut(place, bytes) }
    }

    fn buffer(&mut self) -> Buffer {
        // SAFETY: the tests wait for the work before they touch or drop the memory.
        unsafe { Buffer::new([self.parts()]) }
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn in_place(comm: &Communicator) -> u64 {
    comm.counters().in_place_bytes.load(Ordering::Relaxed)
}

/// Which ranks register their memory: none, all, and mixtures.
const REGISTERS: [fn(u32) -> bool; 5] =
    [|_| false, |_| true, |rank| rank == 0, |rank| rank != 0, |rank| rank.is_multiple_of(2)];

fn all_equal<T: PartialEq>(results: Vec<T>) -> T {
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "the same on every rank");
    results.into_iter().next().unwrap()
}

#[test]
fn bits_do_not_depend_on_the_memory_of_the_buffers() {
    for (nodes, locals) in [(1, 2), (1, 4), (2, 2), (3, 3)] {
        for channels in [1, 2] {
            let tune = |options: &mut Options| options.channels = Some(channels);
            let results = run(&placement(nodes, locals), tune, |comm| {
                let sizes = [1, 1000, 70_000, 260_001];
                sizes.map(|count| {
                    let content = bytes_of(&values(comm.rank(), 3, count));
                    let results = REGISTERS.map(|registers| {
                        let registered = registers(comm.rank());
                        let before = in_place(&comm);
                        let mut data = Memory::of(&comm, registered, &content);
                        let buffer = data.buffer();
                        let (dtype, op) = (DType::F32, ReduceOp::Sum);
                        let work = comm.allreduce(buffer, dtype, op, 0, TIMEOUT, true).unwrap();
                        work.wait(None).unwrap();
                        // Small buffers are cheaper to copy than to look up.
                        let used = registered && (nodes > 1 || content.len() > 16 << 10);
                        let grown = if used { content.len() as u64 } else { 0 };
                        assert_eq!(in_place(&comm) - before, grown);
                        data.bytes().to_vec()
                    });
                    all_equal(results.to_vec())
                })
            });
            all_equal(results);
        }
    }
}

#[test]
fn in_place_operations_have_the_same_bits_for_every_type() {
    let results = run(
        &placement(1, 3),
        |_| {},
        |comm| {
            let mut results = Vec::new();
            for (code, op) in (0..=u8::MAX).zip([ReduceOp::Sum, ReduceOp::Max].iter().cycle()) {
                let Some(dtype) = DType::from_code(code) else { break };
                let op = if dtype.is_float() { ReduceOp::Average } else { *op };
                // Any bytes are numbers, including NaN.
                let mut content = bytes_of(&values(comm.rank(), u64::from(code), 60_000));
                content.truncate(content.len() / 8 * 8);
                let outputs = REGISTERS.map(|registers| {
                    let mut data = Memory::of(&comm, registers(comm.rank()), &content);
                    let buffer = data.buffer();
                    comm.allreduce(buffer, dtype, op, 0, TIMEOUT, true)
                        .unwrap()
                        .wait(None)
                        .unwrap();
                    data.bytes().to_vec()
                });
                results.push(all_equal(outputs.to_vec()));
            }
            assert!(results.len() >= 14);
            results
        },
    );
    all_equal(results);
}

#[test]
fn a_reduce_changes_only_the_roots_buffer() {
    for (nodes, locals) in [(1, 3), (2, 2)] {
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                let mut roots = Vec::new();
                for root in 0..comm.world_size() as u32 {
                    let content = bytes_of(&values(comm.rank(), 5, 150_000));
                    let outputs = REGISTERS.map(|registers| {
                        let mut data = Memory::of(&comm, registers(comm.rank()), &content);
                        let (dtype, op) = (DType::F32, ReduceOp::Sum);
                        let buffer = data.buffer();
                        comm.reduce(buffer, dtype, op, root, TIMEOUT, true)
                            .unwrap()
                            .wait(None)
                            .unwrap();
                        data.bytes().to_vec()
                    });
                    let output = all_equal(outputs.to_vec());
                    assert_eq!(output == content, comm.rank() != root);
                    roots.push(output);
                }
            },
        );
    }
}

#[test]
fn blocks_can_be_scattered_into_registered_memory_and_into_their_input() {
    for (nodes, locals) in [(1, 3), (2, 2)] {
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                let (world, rank) = (comm.world_size(), comm.rank() as usize);
                let block = 40_000;
                let content = bytes_of(&values(comm.rank(), 8, block / 4 * world));
                let scatter = |input: Buffer, output: Buffer| {
                    let (dtype, op) = (DType::F32, ReduceOp::Sum);
                    let work = comm.reduce_scatter(input, output, dtype, op, TIMEOUT, true);
                    work.unwrap().wait(None).unwrap();
                };
                let apart = REGISTERS.map(|registers| {
                    let registered = registers(comm.rank());
                    let mut input = Memory::of(&comm, registered, &content);
                    let mut output = Memory::new(&comm, registered, block);
                    scatter(input.buffer(), output.buffer());
                    assert!(input.bytes() == content);
                    output.bytes().to_vec()
                });
                let apart = all_equal(apart.to_vec());
                let mut both = Memory::of(&comm, true, &content);
                let place = both.parts().0.wrapping_add(rank * block);
                // SAFETY: a part of the memory, which stays until the work has ended.
                let own = unsafe { Buffer::new([(place, block)]) };
                scatter(both.buffer(), own);
                assert!(both.bytes()[rank * block..][..block] == apart);
            },
        );
    }
}

#[test]
fn parts_of_blocks_and_several_ranges_have_the_same_bits() {
    let results = run(
        &placement(1, 3),
        |_| {},
        |comm| {
            let content = bytes_of(&values(comm.rank(), 6, 100_000));
            let mut data = Memory::new(&comm, true, content.len() + 64);
            data.bytes()[64..].copy_from_slice(&content);
            let (place, _) = data.parts();
            let sum = |buffer| {
                comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
                    .unwrap()
                    .wait(None)
                    .unwrap();
            };
            // SAFETY: as for `Memory::buffer`.
            sum(unsafe { Buffer::new([(place.wrapping_add(64), content.len())]) });
            assert_eq!(data.bytes()[..64], [0; 64]);
            let middle = data.bytes()[64..].to_vec();
            let mut pieces = Memory::of(&comm, true, &content);
            let (place, bytes) = pieces.parts();
            // SAFETY: as for `Memory::buffer`.
            let halves = unsafe { Buffer::new([(place, 4096), (place.add(4096), bytes - 4096)]) };
            sum(halves);
            assert!(pieces.bytes() == middle);
            middle
        },
    );
    all_equal(results);
}

#[test]
fn more_operations_than_can_be_registered_at_a_time_end_in_order() {
    run(
        &placement(1, 3),
        |_| {},
        |comm| {
            let fill = |salt: usize| vec![(comm.rank() as usize + salt) as f32; 1 + 2000 * salt];
            let mut data: Vec<Memory> = (0..60)
                .map(|salt| Memory::of(&comm, salt % 7 > 0, &bytes_of(&fill(salt))))
                .collect();
            let works: Vec<_> = data
                .iter_mut()
                .map(|data| {
                    let buffer = data.buffer();
                    comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true).unwrap()
                })
                .collect();
            works.iter().rev().for_each(|work| work.wait(None).unwrap());
            for (salt, data) in data.iter_mut().enumerate() {
                assert!(data.bytes() == bytes_of(&vec![(3 + 3 * salt) as f32; 1 + 2000 * salt]));
            }
            assert!(in_place(&comm) > 0);
        },
    );
}

#[test]
fn memory_returns_to_its_owner_when_an_operation_fails() {
    const WORLD: usize = 4;
    let failed = Barrier::new(WORLD);
    try_run(
        &placement(1, WORLD),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let mut data = Memory::new(&comm, true, 8 << 20);
            let mut rounds = 0;
            let error = loop {
                let buffer = data.buffer();
                let work = comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true);
                if comm.rank() == 2 && rounds == 3 {
                    comm.abort("abort of the test");
                }
                match work.map_err(WaitError::Failed).and_then(|work| work.wait(None)) {
                    Ok(()) => rounds += 1,
                    Err(WaitError::Failed(error)) => break error,
                    Err(error) => panic!("{error}"),
                }
            };
            assert_eq!(error.cause.kind, ErrorKind::Aborted, "{error}");
            data.bytes().fill(comm.rank() as u8);
            failed.wait();
            assert!(data.bytes().iter().all(|byte| *byte == comm.rank() as u8));
        },
    );
}

#[test]
fn an_absent_rank_is_reported_and_the_memory_stays_usable_in_the_next_epoch() {
    const WORLD: usize = 3;
    let together = Barrier::new(WORLD - 1);
    run(
        &placement(1, WORLD),
        |_| {},
        |comm| {
            let mut data = Memory::new(&comm, true, 1 << 20);
            let sum = |comm: &Communicator, data: &mut Memory, timeout| {
                comm.allreduce(data.buffer(), DType::I32, ReduceOp::Sum, 0, timeout, true)
                    .map_err(WaitError::Failed)
                    .and_then(|work| work.wait(None))
            };
            if comm.rank() != 1 {
                together.wait();
                // Long enough that no other rank is late on a busy host.
                let error = sum(&comm, &mut data, Duration::from_secs(3)).unwrap_err();
                let WaitError::Failed(error) = error else { panic!("{error}") };
                assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::TimedOut, Some(1)));
            } else {
                while comm.error().is_none() {
                    std::thread::yield_now();
                }
            }
            data.bytes().fill(0);
            data.bytes()[0] = 1;
            let members: Vec<Member> = (0..WORLD as u32).map(Member::Rank).collect();
            let next = comm.reconfigure(&members, TIMEOUT).unwrap();
            sum(&next, &mut data, TIMEOUT).unwrap();
            assert_eq!(data.bytes()[0], WORLD as u8);
            assert_eq!(in_place(&next), 1 << 20);
        },
    );
}

#[test]
fn an_arena_whose_size_differs_from_the_announced_one_is_refused() {
    let ranks = placement(1, 2);
    let endpoint = |rank| {
        let mut options = Options::new(rank, ranks.clone());
        options.folders = hfreduce_engine::flight::Folders::default();
        options.registered_bytes = 1 << 20;
        Endpoint::new(options, &KEY).unwrap()
    };
    let endpoints = [endpoint(0), endpoint(1)];
    let infos = endpoints.each_ref().map(Endpoint::info);
    let falsify = |info: &[u8]| {
        let text = String::from_utf8(info.to_vec()).unwrap();
        let falsify = text.replace("\"registered_bytes\":1048576", "\"registered_bytes\":2097152");
        assert_ne!(falsify, text);
        falsify.into_bytes()
    };
    let infos = vec![infos[0].clone(), falsify(&infos[1])];
    std::thread::scope(|scope| {
        let ranks = endpoints.map(|endpoint| {
            let infos = &infos;
            scope.spawn(move || endpoint.connect(infos, Duration::from_secs(20)).err())
        });
        let errors = ranks.map(|rank| rank.join().unwrap());
        let error = errors[0].as_ref().unwrap();
        assert_eq!(error.cause.peer, Some(1), "{error}");
        assert!(error.cause.detail.contains("2097152"), "{error}");
        assert!(errors[1].is_some());
    });
}

#[test]
fn a_peers_arena_is_mapped_once_it_has_registered_memory() {
    // A size that no other test uses: they run in the same process.
    const ARENA: u64 = 67 << 30;
    const RANKS: u64 = 3;
    let barrier = Barrier::new(RANKS as usize);
    let arenas = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let of_size = |line: &&str| {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let from = u64::from_str_radix(from, 16).unwrap();
            u64::from_str_radix(to, 16).unwrap() - from == ARENA
        };
        maps.lines().filter(of_size).count() as u64
    };
    run(
        &placement(1, RANKS as usize),
        |options| {
            options.registered_bytes = ARENA as usize;
            options.channels = Some(RANKS as usize);
        },
        |comm| {
            barrier.wait();
            assert_eq!(arenas(), RANKS, "each rank's own");
            barrier.wait();
            for registered in [false, true] {
                let mut memory = Memory::of(&comm, registered, &bytes_of(&[1.0; 400_000]));
                let buffer = memory.buffer();
                let sum = comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true);
                sum.unwrap().wait(None).unwrap();
                assert_eq!(memory.bytes(), bytes_of(&[RANKS as f32; 400_000]));
                barrier.wait();
                let expected = if registered { RANKS * RANKS } else { RANKS };
                assert_eq!(arenas(), expected);
                barrier.wait();
            }
        },
    );
}

#[test]
fn a_thousand_blocks_leave_no_descriptors_or_mappings() {
    let lines = |path: &str| std::fs::read_to_string(path).unwrap().lines().count();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    run(
        &placement(1, 1),
        |options| options.registered_bytes = 64 << 20,
        |comm| {
            let first = comm.allocate(1 << 20).unwrap();
            let (maps, fds) = (lines("/proc/self/maps"), open());
            for round in 1..1000 {
                let block = comm.allocate(round * 4000).unwrap();
                // SAFETY: inside the block.
                unsafe { block.base().write(1) };
            }
            // Other tests run concurrently and open and map some themselves.
            assert!(lines("/proc/self/maps") < maps + 500 && open() < fds + 500);
            assert_eq!(comm.registered_bytes(), 1 << 20);
            let error = comm.allocate(64 << 20).unwrap_err();
            assert!(error.cause.detail.contains("1048576 of 67108864"), "{error}");
            drop(first);
        },
    );
}
