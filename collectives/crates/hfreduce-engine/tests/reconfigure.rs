//! Communicators that continue with other members.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::Ordering;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use hfreduce_engine::flight::Folders;
use hfreduce_engine::{Communicator, DType, ErrorKind, Member, Newcomer, Options, WaitError};
use support::{Calls, KEY, TIMEOUT, allreduce, buffer, placement, run};

fn ranks(list: &[u32]) -> Vec<Member> {
    list.iter().map(|rank| Member::Rank(*rank)).collect()
}

/// Allreduce of rank + 1.
fn sum(comm: &Communicator) -> f32 {
    let mut data = vec![(comm.rank() + 1) as f32; 100_000];
    allreduce(comm, &mut data).wait(None).unwrap();
    assert!(data.iter().all(|value| *value == data[0]));
    data[0]
}

#[test]
fn survivors_continue_and_keep_their_order() {
    for (nodes, locals, failed_rank) in [(3, 1, 1), (2, 2, 0), (1, 3, 2), (4, 1, 3)] {
        let world = (nodes * locals) as u32;
        let list: Vec<u32> = (0..world).filter(|rank| *rank != failed_rank).collect();
        let summed = Barrier::new(world as usize);
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                sum(&comm);
                summed.wait();
                if comm.rank() == failed_rank {
                    comm.abort("injected fault");
                    return;
                }
                while comm.error().is_none() {
                    std::thread::yield_now();
                }
                let next = comm.reconfigure(&ranks(&list), TIMEOUT).unwrap();
                assert_eq!((next.world_size(), next.epoch()), (list.len(), 1));
                assert_eq!(list[next.rank() as usize], comm.rank());
                let all = (1..=list.len()).sum::<usize>() as f32;
                assert_eq!(sum(&next), all);
                assert!(comm.barrier(TIMEOUT, true).is_err(), "the old epoch is over");
                // Again, from a complete epoch, in reverse order.
                let turned: Vec<u32> = (0..next.world_size() as u32).rev().collect();
                let third = next.reconfigure(&ranks(&turned), TIMEOUT).unwrap();
                assert_eq!((third.epoch(), sum(&third)), (2, all));
            },
        );
    }
}

#[test]
fn survivors_report_which_of_them_is_an_operation_ahead() {
    let (all_sent, list) = (Barrier::new(3), ranks(&[1, 0]));
    run(
        &placement(3, 1),
        |options| options.peer_memory = false,
        |comm| {
            sum(&comm);
            let mut data = [1.0; 10];
            let mut broadcast = || {
                let data = buffer(&mut data);
                comm.broadcast(data, DType::F32, 0, TIMEOUT, true)
                    .map_err(WaitError::Failed)?
                    .wait(None)
            };
            // A root does not wait, so it completes before any other rank has called.
            if comm.rank() == 0 {
                broadcast().unwrap();
            }
            all_sent.wait();
            if comm.rank() == 2 {
                comm.abort("injected fault");
                return;
            }
            while comm.error().is_none() {
                std::thread::yield_now();
            }
            if comm.rank() == 1 {
                assert!(broadcast().is_err());
            }
            assert!(comm.previous_epochs().iter().all(Option::is_none), "the first epoch");
            // The rendezvous barrier, the sum, and, on rank 0, the broadcast.
            let completed = 3 - u64::from(comm.rank());
            assert_eq!(comm.completed(), completed);
            let next = comm.reconfigure(&list, TIMEOUT).unwrap();
            assert_eq!(next.previous_epochs(), [Some((0, 2)), Some((0, 3))]);
            assert_eq!((comm.completed(), next.completed()), (completed, 1));
        },
    );
}

#[test]
fn newcomers_replace_lost_ranks() {
    let options = |node: &str| {
        let mut options = Options::new(0, vec![(node.to_owned(), "B".to_owned())]);
        options.folders = Folders::default();
        options
    };
    let newcomers = [options("n2"), options("new")].map(|o| Newcomer::new(o, &KEY).unwrap());
    let infos: Vec<Vec<u8>> = newcomers.iter().map(Newcomer::info).collect();
    let sums = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for newcomer in &newcomers {
            let sums = &sums;
            scope.spawn(move || {
                let comm = newcomer.join(TIMEOUT).unwrap();
                assert_eq!((comm.world_size(), comm.epoch()), (4, 1));
                let has_previous: Vec<bool> =
                    comm.previous_epochs().iter().map(Option::is_some).collect();
                assert_eq!(has_previous, [true, true, false, false]);
                let summed = sum(&comm);
                sums.lock().unwrap().push(summed);
            });
        }
        run(
            &placement(3, 1),
            |_| {},
            |comm| {
                if comm.rank() == 2 {
                    comm.close(TIMEOUT);
                    return;
                }
                let mut members = ranks(&[1, 0]);
                members.extend(infos.iter().cloned().map(Member::Newcomer));
                let next = comm.reconfigure(&members, TIMEOUT).unwrap();
                assert_eq!(next.rank(), 1 - comm.rank());
                let summed = sum(&next);
                sums.lock().unwrap().push(summed);
            },
        );
    });
    assert_eq!(*sums.lock().unwrap(), [10.0; 4]);
}

#[test]
fn ranks_that_disagree_on_the_members_get_an_error_and_can_retry() {
    run(
        &placement(3, 1),
        |_| {},
        |comm| {
            let list: &[u32] = if comm.rank() == 2 { &[0, 2] } else { &[0, 1, 2] };
            let next = match comm.reconfigure(&ranks(list), TIMEOUT) {
                // Rank 1 may be late and participate only in the second attempt.
                Ok(next) if comm.rank() == 1 => next,
                Ok(_) => panic!("rank {} joined other ranks", comm.rank()),
                Err(error) => {
                    assert_eq!(error.cause.kind, ErrorKind::Mismatch, "{error}");
                    assert_eq!((error.rank, &*error.operation), (comm.rank(), "reconfigure"));
                    assert!(error.to_string().contains("[0, 2]"), "{error}");
                    comm.reconfigure(&ranks(&[0, 1, 2]), TIMEOUT).unwrap()
                }
            };
            assert_eq!(sum(&next), 6.0);
        },
    );
}

#[test]
fn members_that_learn_late_of_a_lost_one_follow_their_coordinator() {
    let first_failed = Barrier::new(3);
    run(
        &placement(4, 1),
        |_| {},
        |comm| {
            if comm.rank() == 1 {
                return;
            }
            if comm.rank() != 0 {
                first_failed.wait();
                // Rank 0 calls with the next list meanwhile; any order must work.
                std::thread::sleep(Duration::from_millis(100) * (comm.rank() - 2));
            }
            let absent = comm.reconfigure(&ranks(&[0, 1, 2, 3]), TIMEOUT).err().unwrap();
            assert_eq!(absent.cause.peer, Some(1), "{absent}");
            if comm.rank() == 0 {
                first_failed.wait();
            }
            let next = comm.reconfigure(&ranks(&[0, 2, 3]), TIMEOUT).unwrap();
            assert_eq!(sum(&next), 6.0);
        },
    );
}

#[test]
fn segments_are_offered_again_and_those_of_lost_ranks_are_not_read() {
    let failed_rank = 3;
    let list: Vec<u32> = (0..6).filter(|rank| *rank != failed_rank).collect();
    let summed = Barrier::new(6);
    let mapped = run(
        &placement(3, 2),
        |_| {},
        |comm| {
            sum(&comm);
            summed.wait();
            if comm.rank() == failed_rank {
                // Its contribution to a sum that no other rank starts is in the segment when it leaves.
                let mut data = vec![1e9; 100_000];
                let work = allreduce(&comm, &mut data);
                comm.abort("injected fault");
                let _ = work.wait(None);
                return 0;
            }
            while comm.error().is_none() {
                std::thread::yield_now();
            }
            let next = comm.reconfigure(&ranks(&list), TIMEOUT).unwrap();
            for _ in 0..5 {
                assert_eq!(sum(&next), 15.0);
            }
            let mapped = |comm: &Communicator| comm.counters().mapped_bytes.load(Ordering::Relaxed);
            let before = mapped(&comm);
            for _ in 0..5 {
                assert_eq!(sum(&next), 15.0);
            }
            assert_eq!(mapped(&comm), before, "the old epoch offers no segments");
            mapped(&next)
        },
    );
    assert!(mapped.iter().any(|bytes| *bytes > 0), "{mapped:?}");
}

#[test]
fn a_lost_or_absent_member_is_reported_with_its_present_rank() {
    let (together, over) = (Barrier::new(2), Barrier::new(3));
    run(
        &placement(4, 1),
        |_| {},
        |comm| {
            // Rank 3's port is closed; rank 1 is running and calls nothing.
            if comm.rank() == 3 {
                return;
            }
            if comm.rank() == 1 {
                over.wait();
                return;
            }
            together.wait();
            let soon = Duration::from_secs(8);
            let absent = comm.reconfigure(&ranks(&[2, 0, 1]), soon).err().unwrap();
            assert_eq!(absent.cause.peer, Some(1), "{absent}");
            assert!(matches!(absent.cause.kind, ErrorKind::TimedOut | ErrorKind::PeerDied));
            assert_eq!(absent.cause.peer_node.as_deref(), Some("n1"));
            over.wait();
            let next = comm.reconfigure(&ranks(&[2, 0]), TIMEOUT).unwrap();
            assert_eq!(sum(&next), 3.0);
        },
    );
}

#[test]
fn invalid_member_lists_are_refused_without_side_effects() {
    run(
        &placement(2, 1),
        |_| {},
        |comm| {
            let refused = |members: &[Member]| {
                let error = comm.reconfigure(members, TIMEOUT).err().unwrap();
                assert_eq!(error.cause.kind, ErrorKind::Invalid, "{error}");
                error.to_string()
            };
            assert!(refused(&[]).contains("first member"));
            assert!(refused(&ranks(&[0, 0])).contains("twice"));
            assert!(refused(&ranks(&[0, 7])).contains("rank 7 is not in"));
            assert!(refused(&ranks(&[1 - comm.rank()])).contains("not in the list of members"));
            let garbage = Member::Newcomer(b"garbage".to_vec());
            assert!(refused(&[Member::Rank(0), garbage]).contains("invalid info"));
            assert_eq!(sum(&comm), 3.0, "the epoch continues");
        },
    );
}
