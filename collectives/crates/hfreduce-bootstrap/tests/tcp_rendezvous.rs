//! TCP rendezvous of ranks that are threads, at a real port.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hfreduce_bootstrap::{RankIdentity, TcpRendezvous, TcpRendezvousError, VALUE_BYTES_MAX, pack};

const KEY: [u8; 32] = [5; 32];
const LONG: Duration = Duration::from_secs(60);

fn identity(rank: u32, world_size: u32) -> RankIdentity {
    RankIdentity { job: "test/job".into(), rank, world_size }
}

fn server(world: u32) -> TcpRendezvous {
    TcpRendezvous::new(identity(0, world), "127.0.0.1", 0, &KEY).unwrap()
}

fn client(rank: u32, world: u32, port: u16) -> TcpRendezvous {
    TcpRendezvous::new(identity(rank, world), "127.0.0.1", port, &KEY).unwrap()
}

#[test]
fn every_rank_receives_all_values_in_each_phase() {
    let first = server(5);
    let port = first.port();
    let mut ranks = vec![first];
    ranks.extend((1..5).map(|rank| client(rank, 5, port)));
    std::thread::scope(|scope| {
        for (rank, rendezvous) in ranks.iter().enumerate() {
            scope.spawn(move || {
                for phase in ["place", "endpoint"] {
                    let value = format!("{phase} of {rank}");
                    let values = rendezvous.exchange(phase, value.as_bytes(), LONG).unwrap();
                    let expected: Vec<_> =
                        (0..5).map(|r| format!("{phase} of {r}").into_bytes()).collect();
                    assert_eq!(values, expected);
                }
            });
        }
    });
}

#[test]
fn a_single_rank_needs_no_port() {
    let alone = TcpRendezvous::new(identity(0, 1), "unresolvable host", 1, &KEY).unwrap();
    assert_eq!(alone.exchange("place", b"x", LONG).unwrap(), [b"x"]);
}

#[test]
fn an_absent_rank_is_named_on_every_rank() {
    let first = server(4);
    let second = client(1, 4, first.port());
    let soon = Duration::from_millis(300);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| second.exchange("place", b"b", LONG));
        let result = first.exchange("place", b"a", soon);
        // Rank 1 arrived, or arrived too late.
        let Err(TcpRendezvousError::Absent { ranks, .. }) = result else { panic!("{result:?}") };
        assert!(ranks.ends_with(&[2, 3]), "{ranks:?}");
        drop(first);
        assert!(matches!(client.join().unwrap(), Err(TcpRendezvousError::Absent { .. })));
    });
}

#[test]
fn an_absent_server_is_named_with_its_address() {
    let unused_port =
        std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error =
        client(1, 2, unused_port).exchange("place", b"", Duration::from_millis(200)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(&error, TcpRendezvousError::Absent { ranks, .. } if ranks == &[0]), "{text}");
    assert!(text.contains(&format!("127.0.0.1:{unused_port}")), "{text}");
}

#[test]
fn other_programs_and_other_keys_are_refused_and_do_not_disturb_the_ranks() {
    let first = server(2);
    let port = first.port();
    let mut silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    for garbage in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0xff; 4096], b"FFAUTH01"] {
        TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(garbage).unwrap();
    }
    let stranger = TcpRendezvous::new(identity(1, 2), "127.0.0.1", port, &[9; 32]).unwrap();
    let refused = stranger.exchange("place", b"evil", LONG).unwrap_err();
    assert!(refused.to_string().contains("key"), "{refused}");
    let foreign = RankIdentity { job: "another/job".into(), ..identity(1, 2) };
    let foreign = TcpRendezvous::new(foreign, "127.0.0.1", port, &KEY).unwrap();
    assert!(foreign.exchange("place", b"evil", LONG).is_err());
    let second = client(1, 2, port);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(second.exchange("place", b"b", LONG).unwrap(), [b"a", b"b"]));
        assert_eq!(first.exchange("place", b"a", LONG).unwrap(), [b"a", b"b"]);
    });
    silent.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let _ = silent.read(&mut [0]);
}

#[test]
fn another_world_size_is_reported_to_all_ranks() {
    let first = server(2);
    let second = client(1, 3, first.port());
    std::thread::scope(|scope| {
        let client = scope.spawn(|| second.exchange("place", b"b", LONG).unwrap_err());
        for error in [first.exchange("place", b"a", LONG).unwrap_err(), client.join().unwrap()] {
            assert!(error.to_string().contains("WORLD_SIZE"), "{error}");
        }
    });
}

#[test]
fn the_same_rank_twice_is_reported_to_all_ranks() {
    let first = server(3);
    let port = first.port();
    let duplicates = [client(1, 3, port), client(1, 3, port)];
    std::thread::scope(|scope| {
        let threads =
            duplicates.each_ref().map(|rank| scope.spawn(|| rank.exchange("place", b"b", LONG)));
        let result = first.exchange("place", b"a", LONG);
        for result in threads.map(|thread| thread.join().unwrap()).into_iter().chain([result]) {
            let error = result.unwrap_err();
            assert!(error.to_string().contains("two processes"), "{error}");
        }
    });
}

#[test]
fn a_port_in_use_is_named_with_the_remedy() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let error =
        TcpRendezvous::new(identity(0, 2), "127.0.0.1", port, &KEY).err().unwrap().to_string();
    for part in [&port.to_string(), "in use", "MASTER_PORT", "HFREDUCE_RENDEZVOUS"] {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

/// What another program does with each connection.
type Program = fn(&mut TcpStream);

/// Another program at rank 0's port.
fn occupied_port(program: Program) -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        // Stored, because a dropped connection is closed.
        let mut connections = Vec::new();
        for mut connection in listener.incoming().flatten() {
            program(&mut connection);
            connections.push(connection);
        }
    });
    port
}

#[test]
fn another_program_at_the_port_is_reported_with_the_remedy() {
    let programs: [(Program, &str); 3] = [
        (|_| (), "sends nothing"),
        (
            |connection| connection.shutdown(std::net::Shutdown::Both).unwrap(),
            "closes the connection",
        ),
        (
            |connection| connection.write_all(&[b'H'; 128]).unwrap(),
            "holds another key or is another service",
        ),
    ];
    for (program, symptom) in programs {
        let port = occupied_port(program);
        let result = client(1, 2, port).exchange("place", b"", Duration::from_secs(3));
        let error = result.unwrap_err().to_string();
        for part in [&format!("127.0.0.1:{port}"), symptom, "another program", "MASTER_PORT"] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}

#[test]
fn values_above_the_limit_of_the_group_are_refused_on_every_rank() {
    let first = server(4);
    let port = first.port();
    // Each value alone is possible; the limit of a group of four is 80 KiB.
    let long = vec![7; VALUE_BYTES_MAX];
    std::thread::scope(|scope| {
        let clients: Vec<_> = (1..4)
            .map(|rank| {
                let long = &long;
                scope.spawn(move || client(rank, 4, port).exchange("place", long, LONG))
            })
            .collect();
        let result = first.exchange("place", &long, LONG);
        for result in clients.into_iter().map(|client| client.join().unwrap()).chain([result]) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("at most 81920 are possible"), "{error}");
        }
    });
}

/// A server that holds the key and answers with `bytes`.
fn server_that_sends(bytes: Vec<u8>) -> fabric::tcp::Port {
    let key = fabric::auth::Key::from_bytes(&KEY).unwrap();
    let class = fabric::class::TrafficClass::Hfreduce;
    let at = "127.0.0.1:0".parse().unwrap();
    let context = "hfreduce-meeting/test/job".to_owned();
    fabric::tcp::Port::open(at, key, context, class, 0, move |mut stream, _, _| {
        // The client may have refused the answer before its end.
        let _ = stream.write_all(&bytes);
        let _ = stream.read_to_end(&mut Vec::new());
    })
    .unwrap()
}

#[test]
fn invalid_answers_are_refused_with_the_reason() {
    let answer_of = |bytes: u32, blob: &[u8]| {
        let mut answer = vec![0];
        answer.extend(bytes.to_le_bytes());
        answer.extend(blob);
        answer
    };
    let bomb = pack(&vec![[0; 4000]; 64]).unwrap();
    let answers = [
        (b"HTTP/1.0 400 Bad Request".to_vec(), "kind 72"),
        (answer_of(u32::MAX, b""), "4294967295 bytes are announced, expected at most"),
        (answer_of(9, b"123456789"), "install the same release"),
        (answer_of(bomb.len() as u32, &bomb), "at most 73728 are possible"),
        ([vec![1], u32::MAX.to_le_bytes().to_vec()].concat(), "4294967295 of 2 ranks"),
    ];
    for (answer, reason) in answers {
        let listener = server_that_sends(answer);
        let port = listener.address().port();
        let error = client(1, 2, port).exchange("place", b"", LONG).unwrap_err().to_string();
        for part in [reason, &format!("rank 0 at 127.0.0.1:{port}")] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}

#[test]
fn an_answer_that_arrives_byte_by_byte_ends_at_the_deadline() {
    let key = fabric::auth::Key::from_bytes(&KEY).unwrap();
    let class = fabric::class::TrafficClass::Hfreduce;
    let at = "127.0.0.1:0".parse().unwrap();
    let listener = fabric::tcp::Port::open(
        at,
        key,
        "hfreduce-meeting/test/job".to_owned(),
        class,
        0,
        move |mut stream, _, _| {
            let _ = stream.write_all(&[&[0][..], &1000_u32.to_le_bytes()].concat());
            // The bytes arrive faster than a timeout of each read would allow.
            while stream.write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        },
    )
    .unwrap();
    let port = listener.address().port();
    // Enough for the handshake on a busy host, and far less than all bytes take.
    let soon = Duration::from_secs(3);
    let error = client(1, 2, port).exchange("place", b"", soon).unwrap_err();
    assert!(matches!(error, TcpRendezvousError::Absent { .. }), "{error}");
    assert!(error.to_string().contains("did not answer in time"), "{error}");
}

#[test]
fn a_client_of_another_release_receives_the_reason_of_its_refusal() {
    let first = server(2);
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
fn invalid_ranks_are_refused() {
    for (rank, world) in [(0, 0), (2, 2)] {
        assert!(TcpRendezvous::new(identity(rank, world), "127.0.0.1", 0, &KEY).is_err());
    }
    assert!(TcpRendezvous::new(identity(0, 1), "127.0.0.1", 0, b"short").is_err());
}
