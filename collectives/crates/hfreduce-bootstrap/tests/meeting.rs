//! Ranks as threads that meet at a real port.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hfreduce_bootstrap::{Meeting, MeetingError, VALUE_BYTES_MAX, Who, pack};

const KEY: [u8; 32] = [5; 32];
const LONG: Duration = Duration::from_secs(60);

fn who(rank: u32, world_size: u32) -> Who {
    Who { job: "test/job".into(), rank, world_size }
}

fn host(world: u32) -> Meeting {
    Meeting::new(who(0, world), "127.0.0.1", 0, &KEY).unwrap()
}

fn guest(rank: u32, world: u32, port: u16) -> Meeting {
    Meeting::new(who(rank, world), "127.0.0.1", port, &KEY).unwrap()
}

#[test]
fn every_rank_receives_all_values_in_each_phase() {
    let first = host(5);
    let port = first.port();
    let mut meetings = vec![first];
    meetings.extend((1..5).map(|rank| guest(rank, 5, port)));
    std::thread::scope(|scope| {
        for (rank, meeting) in meetings.iter().enumerate() {
            scope.spawn(move || {
                for phase in ["place", "endpoint"] {
                    let value = format!("{phase} of {rank}");
                    let values = meeting.exchange(phase, value.as_bytes(), LONG).unwrap();
                    let expected: Vec<_> =
                        (0..5).map(|r| format!("{phase} of {r}").into_bytes()).collect();
                    assert_eq!(values, expected);
                }
            });
        }
    });
}

#[test]
fn one_rank_meets_itself_without_a_port() {
    let alone = Meeting::new(who(0, 1), "no such host", 1, &KEY).unwrap();
    assert_eq!(alone.exchange("place", b"x", LONG).unwrap(), [b"x"]);
}

#[test]
fn who_does_not_come_is_named_on_every_rank() {
    let first = host(4);
    let second = guest(1, 4, first.port());
    let soon = Duration::from_millis(300);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| second.exchange("place", b"b", LONG));
        let own = first.exchange("place", b"a", soon);
        // The guest was there, or came too late itself.
        let Err(MeetingError::Absent { ranks, .. }) = own else { panic!("{own:?}") };
        assert!(ranks.ends_with(&[2, 3]), "{ranks:?}");
        drop(first);
        assert!(matches!(other.join().unwrap(), Err(MeetingError::Absent { .. })));
    });
}

#[test]
fn a_host_that_is_not_there_is_named_with_its_address() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = guest(1, 2, nobody).exchange("place", b"", Duration::from_millis(200)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(&error, MeetingError::Absent { ranks, .. } if ranks == &[0]), "{text}");
    assert!(text.contains(&format!("127.0.0.1:{nobody}")), "{text}");
}

#[test]
fn other_programs_and_other_keys_are_refused_and_do_not_disturb_the_ranks() {
    let first = host(2);
    let port = first.port();
    let mut silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    for garbage in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0xff; 4096], b"FFAUTH01"] {
        TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(garbage).unwrap();
    }
    let stranger = Meeting::new(who(1, 2), "127.0.0.1", port, &[9; 32]).unwrap();
    let refused = stranger.exchange("place", b"evil", LONG).unwrap_err();
    assert!(refused.to_string().contains("key"), "{refused}");
    let foreign = Who { job: "another/job".into(), ..who(1, 2) };
    let foreign = Meeting::new(foreign, "127.0.0.1", port, &KEY).unwrap();
    assert!(foreign.exchange("place", b"evil", LONG).is_err());
    let second = guest(1, 2, port);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(second.exchange("place", b"b", LONG).unwrap(), [b"a", b"b"]));
        assert_eq!(first.exchange("place", b"a", LONG).unwrap(), [b"a", b"b"]);
    });
    silent.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let _ = silent.read(&mut [0]);
}

#[test]
fn another_world_size_is_reported_to_all_ranks() {
    let first = host(2);
    let second = guest(1, 3, first.port());
    std::thread::scope(|scope| {
        let told = scope.spawn(|| second.exchange("place", b"b", LONG).unwrap_err());
        for error in [first.exchange("place", b"a", LONG).unwrap_err(), told.join().unwrap()] {
            assert!(error.to_string().contains("WORLD_SIZE"), "{error}");
        }
    });
}

#[test]
fn the_same_rank_twice_is_reported_to_all_ranks() {
    let first = host(3);
    let port = first.port();
    let twins = [guest(1, 3, port), guest(1, 3, port)];
    std::thread::scope(|scope| {
        let told = twins.each_ref().map(|twin| scope.spawn(|| twin.exchange("place", b"b", LONG)));
        let own = first.exchange("place", b"a", LONG);
        for result in told.map(|told| told.join().unwrap()).into_iter().chain([own]) {
            let error = result.unwrap_err();
            assert!(error.to_string().contains("two processes"), "{error}");
        }
    });
}

#[test]
fn a_port_that_is_taken_is_named_with_the_remedy() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Meeting::new(who(0, 2), "127.0.0.1", port, &KEY).err().unwrap().to_string();
    for part in [&port.to_string(), "in use", "MASTER_PORT", "HFREDUCE_RENDEZVOUS"] {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

/// What another program does with each connection.
type Program = fn(&mut TcpStream);

/// Another program at rank 0's port.
fn stolen(what: Program) -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        // Kept: a connection that is dropped would be closed.
        let mut guests = Vec::new();
        for mut guest in listener.incoming().flatten() {
            what(&mut guest);
            guests.push(guest);
        }
    });
    port
}

#[test]
fn another_program_at_the_port_is_suspected_with_the_remedy() {
    let programs: [(Program, &str); 3] = [
        (|_| (), "says nothing"),
        (|guest| guest.shutdown(std::net::Shutdown::Both).unwrap(), "closes the connection"),
        (|guest| guest.write_all(&[b'H'; 128]).unwrap(), "holds another key or is another service"),
    ];
    for (what, said) in programs {
        let port = stolen(what);
        let met = guest(1, 2, port).exchange("place", b"", Duration::from_secs(3));
        let error = met.unwrap_err().to_string();
        for part in [&format!("127.0.0.1:{port}"), said, "another program", "MASTER_PORT"] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}

#[test]
fn more_bytes_than_a_group_may_bring_are_refused_by_name_on_every_rank() {
    let first = host(4);
    let port = first.port();
    // Each value alone is possible; a group of four may bring 80 KiB in all.
    let long = vec![7; VALUE_BYTES_MAX];
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..4)
            .map(|rank| {
                let long = &long;
                scope.spawn(move || guest(rank, 4, port).exchange("place", long, LONG))
            })
            .collect();
        let own = first.exchange("place", &long, LONG);
        for result in others.into_iter().map(|other| other.join().unwrap()).chain([own]) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("at most 81920 are possible"), "{error}");
        }
    });
}

/// A host that holds the key and answers with `bytes`.
fn answering(bytes: Vec<u8>) -> fabric::tcp::Port {
    let key = fabric::auth::Key::from_bytes(&KEY).unwrap();
    let class = fabric::class::TrafficClass::Hfreduce;
    let at = "127.0.0.1:0".parse().unwrap();
    let context = "hfreduce-meeting/test/job".to_owned();
    fabric::tcp::Port::open(at, key, context, class, 0, move |mut stream, _, _| {
        // The guest may have refused the answer before its end.
        let _ = stream.write_all(&bytes);
        let _ = stream.read_to_end(&mut Vec::new());
    })
    .unwrap()
}

#[test]
fn answers_that_cannot_be_are_refused_by_name() {
    let announced = |bytes: u32, rest: &[u8]| {
        let mut answer = vec![0];
        answer.extend(bytes.to_le_bytes());
        answer.extend(rest);
        answer
    };
    let bomb = pack(&vec![[0; 4000]; 64]).unwrap();
    let answers = [
        (b"HTTP/1.0 400 Bad Request".to_vec(), "kind 72"),
        (announced(u32::MAX, b""), "4294967295 bytes are announced, expected at most"),
        (announced(9, b"123456789"), "install the same release"),
        (announced(bomb.len() as u32, &bomb), "at most 73728 are possible"),
        ([vec![1], u32::MAX.to_le_bytes().to_vec()].concat(), "4294967295 of 2 ranks"),
    ];
    for (answer, named) in answers {
        let door = answering(answer);
        let port = door.address().port();
        let error = guest(1, 2, port).exchange("place", b"", LONG).unwrap_err().to_string();
        for part in [named, &format!("rank 0 at 127.0.0.1:{port}")] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}

#[test]
fn an_answer_that_arrives_byte_by_byte_ends_at_the_deadline() {
    let key = fabric::auth::Key::from_bytes(&KEY).unwrap();
    let class = fabric::class::TrafficClass::Hfreduce;
    let at = "127.0.0.1:0".parse().unwrap();
    let door = fabric::tcp::Port::open(
        at,
        key,
        "hfreduce-meeting/test/job".to_owned(),
        class,
        0,
        move |mut stream, _, _| {
            let _ = stream.write_all(&[&[0][..], &1000_u32.to_le_bytes()].concat());
            // Each byte arrives long before a timeout per read would pass.
            while stream.write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        },
    )
    .unwrap();
    let port = door.address().port();
    let soon = Duration::from_millis(100);
    let error = guest(1, 2, port).exchange("place", b"", soon).unwrap_err();
    assert!(matches!(error, MeetingError::Absent { .. }), "{error}");
    assert!(error.to_string().contains("did not answer in time"), "{error}");
}

#[test]
fn a_guest_of_another_release_learns_why_it_is_refused() {
    let first = host(2);
    let key = fabric::auth::Key::from_bytes(&KEY).unwrap();
    let class = fabric::class::TrafficClass::Hfreduce;
    let at = [std::net::SocketAddr::from(([127, 0, 0, 1], first.port()))];
    let until = fabric::deadline::Deadline::after(LONG);
    let mut stream =
        fabric::tcp::dial(&at, &key, "hfreduce-meeting/test/job", class, &[], until).unwrap();
    stream.write_all(b"HFMEET01").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let text = String::from_utf8_lossy(&answer);
    assert!(answer[0] == 1 && text.contains("install the same release"), "{text}");
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    for (rank, world) in [(0, 0), (2, 2)] {
        assert!(Meeting::new(who(rank, world), "127.0.0.1", 0, &KEY).is_err());
    }
    assert!(Meeting::new(who(0, 1), "127.0.0.1", 0, b"short").is_err());
}
