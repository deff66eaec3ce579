use super::*;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const CONTEXT: &str = "threefs/storage";

fn key(byte: u8) -> Key {
    Key::from_bytes(&[byte; 32]).unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// The acceptor's side with blocking calls; services use asynchronous ones.
fn accept(
    stream: &TcpStream,
    key: &Key,
    context: &str,
    deadline: Deadline,
) -> Result<(), AuthError> {
    accept_greeting(stream, key, context, &mut [], deadline)
}

fn accept_greeting(
    stream: &TcpStream,
    key: &Key,
    context: &str,
    greeting: &mut [u8],
    deadline: Deadline,
) -> Result<(), AuthError> {
    timed(stream, context, deadline, |mut stream| {
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).map_err(broken(context))?;
        let (acceptor, challenge) = Acceptor::new(key, context, &hello, nonce().unwrap())?;
        stream.write_all(&challenge).map_err(broken(context))?;
        stream.read_exact(greeting).map_err(broken(context))?;
        let mut proof = [0; PROOF_BYTES];
        stream.read_exact(&mut proof).map_err(broken(context))?;
        acceptor.check_greeting(greeting, &proof)?;
        stream.write_all(&[WELCOME]).map_err(broken(context))
    })
}

/// Runs an acceptor with `key` and `context`; returns its result and that of `dialer`.
fn meet<T>(
    key: Key,
    context: &'static str,
    dialer: impl FnOnce(TcpStream) -> T,
) -> (Result<(), AuthError>, T) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        accept(&stream, &key, context, soon())
    });
    let dialer_result = dialer(TcpStream::connect(address).unwrap());
    (acceptor.join().unwrap(), dialer_result)
}

#[test]
fn peers_with_the_same_key_are_accepted() {
    let (acceptor_result, dialer_result) =
        meet(key(1), CONTEXT, |s| dial(&s, &key(1), CONTEXT, &[], soon()));
    assert!(acceptor_result.is_ok() && dialer_result.is_ok());
}

#[test]
fn another_key_is_refused_on_both_sides() {
    let (acceptor_result, dialer_result) =
        meet(key(1), CONTEXT, |s| dial(&s, &key(2), CONTEXT, &[], soon()));
    assert!(acceptor_result.is_err());
    assert!(matches!(dialer_result, Err(AuthError::WrongKey { .. })));
}

#[test]
fn a_proof_for_one_service_is_invalid_at_another() {
    let (acceptor_result, dialer_result) =
        meet(key(1), "threefs/meta", |s| dial(&s, &key(1), CONTEXT, &[], soon()));
    assert!(acceptor_result.is_err() && dialer_result.is_err());
}

#[test]
fn a_modified_greeting_is_refused() {
    let nonces = ([1; 32], [2; 32]);
    let (dialer, hello) = Dialer::new(&key(1), CONTEXT, nonces.0);
    let (acceptor, challenge) = Acceptor::new(&key(1), CONTEXT, &hello, nonces.1).unwrap();
    let proof = dialer.answer_greeting(&challenge, b"rank 3").unwrap();
    assert!(acceptor.check_greeting(b"rank 3", &proof).is_ok());
    for other in [&b"rank 4"[..], b"rank 33", b"rank ", b""] {
        assert!(matches!(acceptor.check_greeting(other, &proof), Err(AuthError::WrongKey { .. })));
    }
    assert!(acceptor.check(&proof).is_err());
}

#[test]
fn a_dialer_without_the_key_cannot_pass_by_reflection() {
    // It answers the challenge with the proof of the acceptor.
    let (acceptor_result, ()) = meet(key(1), CONTEXT, |mut stream| {
        stream.write_all(&[&MAGIC[..], &[7; 32]].concat()).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        stream.write_all(&challenge[32..]).unwrap();
    });
    assert!(matches!(acceptor_result, Err(AuthError::WrongKey { .. })));
}

#[test]
fn data_of_another_protocol_is_reported_as_such() {
    let (acceptor_result, ()) = meet(key(1), CONTEXT, |mut stream| {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a-long-enough-name\r\n\r\n").unwrap();
    });
    let error = acceptor_result.unwrap_err();
    assert!(matches!(error, AuthError::NotOurProtocol { .. }), "{error}");
    assert!(error.to_string().contains(CONTEXT));
}

#[test]
fn a_silent_peer_is_dropped_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let started = Instant::now();
    let verdict = accept(&stream, &key(1), CONTEXT, Deadline::after(Duration::from_millis(30)));
    assert!(matches!(verdict, Err(AuthError::Broken { .. })));
    assert!(started.elapsed() < Duration::from_secs(60));
    drop(silent);
}

#[test]
fn a_short_or_absent_key_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    assert!(Key::read(&path).unwrap_err().to_string().contains("key`"));
    std::fs::write(&path, "short\n").unwrap();
    let error = Key::read(&path).unwrap_err().to_string();
    assert!(error.contains("5 bytes") && error.contains("16"), "{error}");
    std::fs::write(&path, [b"0123456789abcdef".as_slice(), b"\n"].concat()).unwrap();
    assert!(Key::read(&path).is_ok());
}

#[test]
fn a_key_is_not_printed() {
    assert_eq!(format!("{:?}", key(9)), "Key(…)");
}
