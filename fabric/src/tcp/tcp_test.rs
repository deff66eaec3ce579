//! Ports, unauthenticated peers, and selection of the address to dial.

use super::*;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::mpsc;

fn key(byte: u8) -> Key {
    Key::from_bytes(&[byte; 32]).unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn echo_port() -> (Port, mpsc::Receiver<()>) {
    let (sender, receiver) = mpsc::channel();
    let here = SocketAddr::from(([127, 0, 0, 1], 0));
    let sender = std::sync::Mutex::new(sender);
    let port =
        Port::open(here, key(1), "test".into(), TrafficClass::Hfreduce, 0, move |mut s, _, _| {
            let mut byte = [0];
            s.read_exact(&mut byte).unwrap();
            s.write_all(&byte).unwrap();
            sender.lock().unwrap().send(()).unwrap();
        })
        .unwrap();
    (port, receiver)
}

#[test]
fn a_peer_with_the_key_is_accepted_with_its_traffic_class() {
    let (port, receiver) = echo_port();
    let mut stream =
        dial(&[port.address()], &key(1), "test", TrafficClass::Hfreduce, &[], soon()).unwrap();
    assert_eq!(rustix::net::sockopt::ip_tos(&stream).unwrap(), 34 << 2);
    stream.write_all(b"x").unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    receiver.recv().unwrap();
    assert_eq!(port.counters().admitted.load(Ordering::Relaxed), 1);
}

#[test]
fn a_dual_stack_port_accepts_and_marks_ipv4() {
    let (sender, receiver) = mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let all = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
    let class = TrafficClass::Hfreduce;
    // A node without IPv6 has nothing to test.
    let Ok(port) = Port::open(all, key(1), "test".into(), class, 0, move |s, _, _| {
        sender.lock().unwrap().send(rustix::net::sockopt::ip_tos(&s).unwrap()).unwrap();
    }) else {
        return;
    };
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port.address().port()));
    let _stream = dial(&[at], &key(1), "test", class, &[], soon()).unwrap();
    assert_eq!(receiver.recv().unwrap(), 34 << 2);
}

#[test]
fn unauthenticated_connections_are_closed_and_counted_without_effect_on_others() {
    let (port, receiver) = echo_port();
    let mut silent = TcpStream::connect(port.address()).unwrap();
    let mut garbage = TcpStream::connect(port.address()).unwrap();
    garbage.write_all(&[0xff; 4096]).unwrap();
    let wrong = dial(&[port.address()], &key(2), "test", TrafficClass::Other, &[], soon());
    assert!(matches!(wrong.unwrap_err().rejection(), Some(AuthError::WrongKey { .. })));
    let mut stream =
        dial(&[port.address()], &key(1), "test", TrafficClass::Other, &[], soon()).unwrap();
    stream.write_all(b"x").unwrap();
    receiver.recv().unwrap();
    let mut rest = Vec::new();
    let _ = garbage.read_to_end(&mut rest);
    assert!(rest.is_empty());
    // The silent connection is still in its handshake: it delayed no other.
    silent.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    assert!(silent.read(&mut [0]).is_err());
    assert!(port.counters().refused.load(Ordering::Relaxed) >= 1);
}

#[test]
fn peers_skip_foreign_listeners_at_the_first_addresses() {
    let (port, receiver) = echo_port();
    let here = SocketAddr::from(([127, 0, 0, 1], 0));
    let other =
        Port::open(here, key(2), "test".into(), TrafficClass::Other, 0, |_, _, _| {}).unwrap();
    // Accepts a connection and closes it.
    let closing = TcpListener::bind(here).unwrap();
    let closing_address = closing.local_addr().unwrap();
    let closing_thread = std::thread::spawn(move || drop(closing.accept().unwrap()));
    let closed = TcpListener::bind(here).unwrap().local_addr().unwrap();
    let all = [closed, other.address(), closing_address, port.address()];
    let mut stream = dial(&all, &key(1), "test", TrafficClass::Hfreduce, &[], soon()).unwrap();
    assert_eq!(stream.peer_addr().unwrap(), port.address());
    stream.write_all(b"x").unwrap();
    receiver.recv().unwrap();
    closing_thread.join().unwrap();
    // Without another address, every error is reported.
    let error = dial(&all[..2], &key(1), "test", TrafficClass::Hfreduce, &[], soon()).unwrap_err();
    assert!(error.rejection().is_some() && error.interrupted().is_none());
    let text = error.to_string();
    assert!(text.contains(&closed.to_string()) && text.contains("another key"), "{text}");
}

#[test]
fn a_closed_port_is_reported_with_the_addresses_tried() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let deadline = Deadline::after(Duration::from_millis(100));
    let error = dial(&[closed], &key(1), "test", TrafficClass::Other, &[], deadline).unwrap_err();
    assert!(error.to_string().contains(&closed.to_string()), "{error}");
}

/// Silent connections from many addresses.
fn silent_connections(port: SocketAddr, count: usize) -> Vec<TcpStream> {
    let from = |at: usize| SocketAddr::from(([127, 0, 0, 2 + (at % 250) as u8], 0));
    let connect = |at: usize| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
        socket.bind(&from(at).into()).unwrap();
        socket.connect_timeout(&port.into(), Duration::from_secs(60)).unwrap();
        TcpStream::from(socket)
    };
    (0..count).map(connect).collect()
}

#[test]
fn many_silent_connections_do_not_exclude_peers() {
    let (port, receiver) = echo_port();
    for count in [1, 160, 1000] {
        let silent = silent_connections(port.address(), count);
        for _ in 0..3 {
            let here = [port.address()];
            let mut stream =
                dial(&here, &key(1), "test", TrafficClass::Hfreduce, &[], soon()).unwrap();
            stream.write_all(b"x").unwrap();
            receiver.recv().unwrap();
        }
        drop(silent);
    }
}

#[test]
fn partial_handshakes_do_not_exclude_peers() {
    let (port, receiver) = echo_port();
    let mut half = silent_connections(port.address(), 300);
    for stream in &mut half {
        // An evicted connection is already closed.
        let _ = stream.write_all(&[&b"FFAUTH01"[..], &[7; 32]].concat());
    }
    let here = [port.address()];
    let mut stream = dial(&here, &key(1), "test", TrafficClass::Hfreduce, &[], soon()).unwrap();
    stream.write_all(b"x").unwrap();
    receiver.recv().unwrap();
}

#[test]
fn a_greeting_arrives_with_the_connection() {
    let (sender, receiver) = mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let here = SocketAddr::from(([127, 0, 0, 1], 0));
    let port =
        Port::open(here, key(1), "test".into(), TrafficClass::Other, 6, move |_, _, greeting| {
            sender.lock().unwrap().send(greeting.to_vec()).unwrap();
        })
        .unwrap();
    let at = [port.address()];
    let _stream = dial(&at, &key(1), "test", TrafficClass::Other, b"rank 7", soon()).unwrap();
    assert_eq!(receiver.recv().unwrap(), b"rank 7");
    // A dialer without a greeting uses another protocol.
    let brief = Deadline::after(Duration::from_millis(200));
    assert!(dial(&at, &key(1), "test", TrafficClass::Other, &[], brief).is_err());
}
