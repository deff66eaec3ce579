//! Ranks that a daemon serves continue with other members, like those with in-process drivers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../hfreduce-engine/tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use hfreduce_daemon::AnyNewcomer;
use hfreduce_engine::flight::Folders;
use hfreduce_engine::{Communicator, ErrorKind, Member, Options};
use support::{Calls, KEY, Served, TIMEOUT, allreduce, placement, run_at};

fn ranks(list: &[u32]) -> Vec<Member> {
    list.iter().map(|rank| Member::Rank(*rank)).collect()
}

/// Allreduce of rank + 1, in memory of both kinds.
fn sum(comm: &Communicator) -> f32 {
    let mut data = vec![(comm.rank() + 1) as f32; 100_000];
    allreduce(comm, &mut data).wait(None).unwrap();
    assert!(data.iter().all(|value| *value == data[0]));
    let block = comm.allocate(100_000 * 4).unwrap();
    // SAFETY: no other reference to it exists until the call and after its end.
    let registered = unsafe { std::slice::from_raw_parts_mut(block.base().cast::<f32>(), 100_000) };
    registered.fill((comm.rank() + 1) as f32);
    allreduce(comm, registered).wait(None).unwrap();
    assert_eq!(registered, data);
    data[0]
}

#[test]
fn survivors_continue_with_and_without_daemons() {
    let daemons: Vec<Served> = (0..3).map(|_| Served::new(16)).collect();
    type RankFilter = fn(u32) -> bool;
    let choices: [RankFilter; 2] = [|_| true, |rank| rank % 2 == 1];
    for (nodes, locals, failed_rank) in [(3, 1, 1), (2, 2, 0), (1, 3, 2)] {
        for served in choices {
            let world = (nodes * locals) as u32;
            let list: Vec<u32> = (0..world).filter(|rank| *rank != failed_rank).collect();
            let summed = Barrier::new(world as usize);
            let daemon =
                |rank: u32| served(rank).then(|| daemons[rank as usize / locals].path.clone());
            run_at(
                &placement(nodes, locals),
                daemon,
                |_| {},
                |comm| {
                    let comm = comm.unwrap();
                    sum(&comm);
                    summed.wait();
                    if comm.rank() == failed_rank {
                        comm.abort("injected fault");
                        return;
                    }
                    while comm.error().is_none() {
                        std::thread::yield_now();
                    }
                    let block = comm.allocate(4096).unwrap();
                    let next = comm.reconfigure(&ranks(&list), TIMEOUT).unwrap();
                    assert_eq!((next.world_size(), next.epoch()), (list.len(), 1));
                    assert_eq!(list[next.rank() as usize], comm.rank());
                    // The rendezvous barrier and two sums, on every survivor.
                    assert_eq!(next.previous_epochs(), vec![Some((0, 3)); list.len()]);
                    let all = (1..=list.len()).sum::<usize>() as f32;
                    assert_eq!(sum(&next), all);
                    assert!(comm.barrier(TIMEOUT, true).is_err(), "the old epoch is over");
                    // SAFETY: no other reference to it exists until the call and after its end.
                    let old = unsafe { std::slice::from_raw_parts_mut(block.base().cast(), 1024) };
                    old.fill(1.0);
                    allreduce(&next, old).wait(None).unwrap();
                    assert_eq!(old[1023], list.len() as f32, "memory outlives epochs");
                    // Again, from a complete epoch, in reverse order.
                    let reversed: Vec<u32> = (0..next.world_size() as u32).rev().collect();
                    let third = next.reconfigure(&ranks(&reversed), TIMEOUT).unwrap();
                    assert_eq!((third.epoch(), sum(&third)), (2, all));
                },
            );
        }
    }
    for daemon in &daemons {
        daemon.eventually_empty();
    }
}

fn newcomer(daemon: Option<&Served>) -> AnyNewcomer {
    let place = vec![("n9".to_owned(), "A".to_owned())];
    let mut options = Options::new(0, place);
    options.liveness = TIMEOUT;
    options.folders = Folders::default();
    AnyNewcomer::open(options, &KEY, daemon.map(|daemon| daemon.path.as_path())).unwrap()
}

#[test]
fn newcomers_are_accepted_with_and_without_daemons() {
    let (members_daemon, newcomer_daemon) = (Served::new(4), Served::new(4));
    for (members_served, newcomer_served) in [(true, true), (true, false), (false, true)] {
        let arrival = newcomer(newcomer_served.then_some(&newcomer_daemon));
        // No member lists it in time: it may wait again.
        let early = arrival.join(Duration::from_millis(50)).map(drop).unwrap_err();
        assert_eq!(early.cause.kind, ErrorKind::TimedOut, "{early}");
        let info = arrival.info();
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| {
                let comm = arrival.join(TIMEOUT).unwrap();
                assert_eq!((comm.rank(), comm.world_size(), comm.epoch()), (1, 3, 1));
                assert_eq!(comm.previous_epochs(), [Some((0, 3)), None, Some((0, 3))]);
                sum(&comm)
            });
            let sums = run_at(
                &placement(1, 2),
                |_| members_served.then(|| members_daemon.path.clone()),
                |_| {},
                |comm| {
                    let comm = comm.unwrap();
                    sum(&comm);
                    let list = [Member::Rank(1), Member::Newcomer(info.clone()), Member::Rank(0)];
                    sum(&comm.reconfigure(&list, TIMEOUT).unwrap())
                },
            );
            assert_eq!((sums, joined.join().unwrap()), (vec![6.0; 2], 6.0));
        });
    }
    members_daemon.eventually_empty();
    newcomer_daemon.eventually_empty();
}

#[test]
fn a_newcomer_that_has_exited_is_reported_immediately() {
    let daemon = Served::new(4);
    let arrival = newcomer(Some(&daemon));
    let info = arrival.info();
    drop(arrival);
    daemon.eventually_empty();
    let list = [Member::Rank(0), Member::Newcomer(info)];
    let path = |_| Some(daemon.path.clone());
    run_at(
        &placement(1, 1),
        path,
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let error = comm.reconfigure(&list, TIMEOUT).map(drop).unwrap_err();
            assert_eq!(error.cause.kind, ErrorKind::PeerDied, "{error}");
            let next = comm.reconfigure(&ranks(&[0]), TIMEOUT).unwrap();
            assert_eq!(sum(&next), 1.0, "the group continues with fewer ranks");
        },
    );
}

#[test]
fn invalid_member_lists_are_refused_without_side_effects() {
    let daemon = Served::new(2);
    run_at(
        &placement(2, 1),
        |_| Some(daemon.path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let refused = |members: &[Member]| {
                let error = comm.reconfigure(members, TIMEOUT).err().unwrap();
                assert_eq!(error.cause.kind, ErrorKind::Invalid, "{error}");
                assert_eq!(error.operation, "reconfigure");
                error.to_string()
            };
            assert!(refused(&[]).contains("first member"));
            assert!(refused(&ranks(&[0, 7])).contains("rank 7 is not in an epoch"));
            assert!(refused(&ranks(&[1 - comm.rank()])).contains("is not in the list of members"));
            assert_eq!(sum(&comm), 3.0, "the epoch continues");
            comm.close(TIMEOUT);
            assert!(refused(&ranks(&[0, 1])).contains("before it is closed"));
        },
    );
}

#[test]
fn different_lists_and_absent_ranks_are_reported_as_without_a_daemon() {
    let daemon = Served::new(4);
    let (reported, over) = (Barrier::new(2), Barrier::new(3));
    run_at(
        &placement(3, 1),
        |_| Some(daemon.path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let soon = Duration::from_secs(8);
            if comm.rank() == 2 {
                over.wait();
                return;
            }
            let list = if comm.rank() == 0 { vec![0, 1] } else { vec![0, 1, 2] };
            let differ = comm.reconfigure(&ranks(&list), soon).map(drop).unwrap_err();
            assert_eq!(differ.cause.kind, ErrorKind::Mismatch, "{differ}");
            assert!(differ.to_string().contains("[0, 1, 2]"), "{differ}");
            reported.wait();
            let absent = comm.reconfigure(&ranks(&[0, 1, 2]), soon).map(drop).unwrap_err();
            assert_eq!(absent.cause.peer, Some(2), "{absent}");
            over.wait();
            assert_eq!(sum(&comm.reconfigure(&ranks(&[1, 0]), TIMEOUT).unwrap()), 3.0);
        },
    );
}

/// Rank 0 waits for rank 1, which never calls, and then the daemon of rank 0 stops.
#[test]
fn a_daemon_that_stops_during_reconfiguration_is_reported() {
    let daemons = Mutex::new(vec![Served::new(4), Served::new(4)]);
    let paths: Vec<PathBuf> =
        daemons.lock().unwrap().iter().map(|daemon| daemon.path.clone()).collect();
    let barrier = Barrier::new(2);
    run_at(
        &placement(2, 1),
        |rank| Some(paths[rank as usize].clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            if comm.rank() == 1 {
                barrier.wait();
                drop(daemons.lock().unwrap().remove(0));
                // The daemon has notified its ranks by now: the attempt that includes this rank has ended.
                let next = comm.reconfigure(&ranks(&[1]), TIMEOUT).unwrap();
                assert_eq!(sum(&next), 1.0, "a rank of another daemon continues");
                return;
            }
            barrier.wait();
            let error = comm.reconfigure(&ranks(&[0, 1]), TIMEOUT).map(drop).unwrap_err();
            assert!(error.to_string().contains("hfreduced"), "{error}");
            assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::PeerDied, Some(0)));
            let second = comm.reconfigure(&ranks(&[0]), TIMEOUT).map(drop).unwrap_err();
            assert!(second.to_string().contains("as a newcomer"), "{second}");
            assert_eq!(second.cause.kind, ErrorKind::PeerDied);
        },
    );
}
